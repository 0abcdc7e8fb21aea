"""Adapters are read beside the steps: who waits meanwhile, who does not, and what may come between."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import worker_functions
from adapters import make_adapter, make_core, reads_of, request, run
from config import DEMO
from core import EngineCore
from forked import forked_workers
from integrity import check_integrity
from lora.adapter import CONFIG, WEIGHTS
from sampling_params import LoRARequest


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("adapters")
    for i in range(3):
        make_adapter(place / f"a{i}", i)
    return [place / f"a{i}" for i in range(3)]


@pytest.fixture(scope="module")
def alone(folders: list[Path]) -> list[list[int]]:
    """What each adapter answers."""
    core = make_core()
    for i, folder in enumerate(folders):
        core.add(request(f"{i}", folder), at_once=True)
    answers = run(core)[0]
    assert len({str(tokens) for tokens in answers.values()}) == len(folders)
    return [answers[f"{i}"] for i in range(len(folders))]


@pytest.fixture
def opened() -> Iterator[threading.Event]:
    """Until this is set, `slow_core` reads nothing."""
    event = threading.Event()
    yield event
    event.set()


def slow_core(opened: threading.Event, *slow: Path, **fields: int) -> tuple[EngineCore, list[str]]:
    """An engine that reads these folders once `opened` is set, and the names of what it has begun to read."""
    core = make_core(**fields)

    def wait(folder: str) -> None:
        assert Path(folder) not in slow or opened.wait(10)

    return core, reads_of(core, wait)


def some_steps(core: EngineCore, count: int = 30) -> dict[str, int]:
    """How many tokens each request gets in so many steps."""
    counts: dict[str, int] = {}
    for _ in range(count):
        for output in core.step():
            counts[output.request_id] = counts.get(output.request_id, 0) + len(output.token_ids)
    check_integrity(core.scheduler)
    return counts


def test_others_go_on_while_an_adapter_is_read(
    folders: list[Path], alone: list[list[int]], opened: threading.Event
) -> None:
    core, _ = slow_core(opened, folders[0])
    core.add(request("plain", None, max_tokens=40))
    core.add(request("slow", folders[0]))
    core.add(request("there", folders[1]), at_once=True)
    core.add(request("quick", folders[2]))
    assert some_steps(core)["plain"] >= 20 and [*core.adapters.waiting][:1] == ["slow"]
    deadline = time.monotonic() + 10
    while "quick" in core.adapters.waiting and time.monotonic() < deadline:
        core.step()
    assert [*core.adapters.waiting] == ["slow"] and not opened.is_set()
    opened.set()
    answers, errors, _ = run(core)
    assert answers["slow"] == alone[0] and not errors


def test_requests_for_one_adapter_wait_for_one_read_and_keep_their_order(
    folders: list[Path], alone: list[list[int]], opened: threading.Event
) -> None:
    core, read = slow_core(opened, folders[0], max_num_seqs=1)
    for i in range(3):
        core.add(request(f"slow {i}", folders[0]))
        core.add(request(f"plain {i}", None))
    assert some_steps(core) == {f"plain {i}": 8 for i in range(3)}
    opened.set()
    answers, _, ended = run(core)
    assert ended == [f"slow {i}" for i in range(3)] == [*answers] and read == ["a0"]
    assert all(tokens == alone[0] for tokens in answers.values())


def test_a_folder_has_several_paths(
    folders: list[Path], alone: list[list[int]], opened: threading.Event, tmp_path: Path
) -> None:
    core, read = slow_core(opened, folders[0])
    (tmp_path / "link").symlink_to(folders[0])
    for i, path in enumerate((str(folders[0]), f"{folders[0]}/", str(tmp_path / "link"))):
        adapted = request(str(i), folders[0])
        adapted.lora = LoRARequest("a", 1, path)
        core.add(adapted)
    assert len(core.adapters.lines) == 1
    opened.set()
    answers, errors, ended = run(core)
    assert ended == ["0", "1", "2"] and not errors and len(read) == 1 and answers["0"] == answers["2"]


def test_requests_for_an_adapter_keep_their_order_while_weights_are_replaced(
    folders: list[Path], opened: threading.Event
) -> None:
    core, _ = slow_core(opened, folders[0], max_num_seqs=1)
    core.add(request("first", folders[0]))
    core.pausing = True
    core.add(request("second", folders[0]))
    opened.set()
    for _ in range(20):
        core.step()
    core.pausing = False
    assert run(core)[2] == ["first", "second"]


def test_a_row_that_is_being_filled_is_nobodys(
    folders: list[Path], alone: list[list[int]], opened: threading.Event
) -> None:
    """Not even where the request that has asked for it is gone; and the adapter is there for the next one."""
    core, read = slow_core(opened, folders[0], max_loras=1, max_cpu_loras=1)
    core.add(request("gone", folders[0]))
    core.add(request("b", folders[1]))
    core.add(request("plain", None))
    core.abort("gone")
    assert some_steps(core) == {"plain": 8} and [*core.adapters.waiting] == ["b"] and core.has_work()
    opened.set()
    assert run(core)[0] == {"b": alone[1]} and read == ["a0", "a1"]
    core.add(request("a", folders[0]))
    core.abort("a")
    assert not core.has_work()
    core.add(request("again", folders[0]))
    assert run(core)[0] == {"again": alone[0]} and read == ["a0", "a1", "a0"]


def test_all_that_wait_are_told_what_is_wrong(folders: list[Path], tmp_path: Path, opened: threading.Event) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(folders[0], bad)
    tensors = load_file(bad / WEIGHTS)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] * float("nan")}, bad / WEIGHTS)
    core, read = slow_core(opened, bad, max_loras=1, max_cpu_loras=1)
    for i in range(2):
        core.add(request(f"{i}", bad))
    opened.set()
    _, errors, _ = run(core)
    assert errors.keys() == {"0", "1"} and all(f"{name} has NaN" in error for error in errors.values())
    assert read == ["bad"] and core.metrics()["request_success_total"]["error"] == 2
    with pytest.raises(ValueError, match="has NaN"):
        core.add(request("2", bad), at_once=True)
    shutil.copytree(folders[1], bad, dirs_exist_ok=True)
    core.add(request("3", bad))
    assert not run(core)[1]


def test_what_cannot_be_opened_is_told(folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()

    def broken(row: int, folder: str) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(core.executor.worker.adapters, "fill_row", broken)
    core.add(request("a", folders[0]))
    core.add(request("plain", None))
    answers, errors, _ = run(core)
    assert "a0 could not be read: OSError(5, 'Input/output error')" in errors["a"] and len(answers["plain"]) == 8


def test_an_adapter_that_changes_while_it_is_read_is_read_again(
    folders: list[Path], alone: list[list[int]], tmp_path: Path, opened: threading.Event
) -> None:
    folder = tmp_path / "changing"
    shutil.copytree(folders[0], folder)
    core, read = slow_core(opened, folder)
    core.add(request("a", folder))
    core.step()
    for file in (CONFIG, WEIGHTS):
        shutil.copy(folders[1] / file, tmp_path / file)
        os.replace(tmp_path / file, folder / file)
    opened.set()
    assert run(core)[0] == {"a": alone[1]} and read == ["changing"] * 2


def test_an_explicit_load_shares_a_read_that_has_begun(
    folders: list[Path], alone: list[list[int]], opened: threading.Event
) -> None:
    core, read = slow_core(opened, folders[0])
    core.add(request("a", folders[0]))
    assert core.adapters.add("name", str(folders[0])) is None
    core.add(request("plain", None))
    assert some_steps(core) == {"plain": 8}
    threading.Timer(0.05, opened.set).start()
    core.add(request("at once", folders[0]), at_once=True)
    assert opened.is_set() and core.adapters.add("name", str(folders[0]))
    answers = run(core)[0]
    assert answers == {"a": alone[0], "at once": alone[0]}
    opened.clear()
    (folders[0] / WEIGHTS).touch()  # and so it is another one
    assert core.adapters.add("name", str(folders[0])) is None and not core.has_work()
    opened.set()
    while (there := core.adapters.add("name", str(folders[0]))) is None:
        pass
    assert there
    core.add(request("a", folders[0]), at_once=True)
    assert run(core)[0] == {"a": alone[0]} and read == ["a0", "a0"]


@pytest.mark.parametrize("change", ["sleep", "deep sleep", "weights"])
def test_workers_sleep_and_get_other_weights_while_they_read(
    folders: list[Path], alone: list[list[int]], opened: threading.Event, change: str
) -> None:
    core, read = slow_core(opened, folders[0])
    core.add(request("a", folders[0]))
    core.step()
    if change == "weights":
        core.pausing = True
        core.add(request("later", folders[0]))
        assert not core.busy()
        core.update_weights(str(DEMO))
        core.pausing = False
    else:
        core.workers.sleep(1 if change == "sleep" else 2)
        core.add(request("later", folders[0]))
        some_steps(core, 3)
        assert not core.has_work()
        core.workers.wake_up()
    assert core.adapters.reading
    opened.set()
    answers, errors, ended = run(core)
    assert ended == ["a", "later"] and answers == dict.fromkeys(ended, alone[0]) and not errors and read == ["a0"]


# --- workers of their own ---------------------------------------------------------------------------------------------


@pytest.fixture
def make_mp_core() -> Iterator[Callable[..., EngineCore]]:
    made: list[EngineCore] = []

    def make(**fields: int) -> EngineCore:
        made.append(make_core(distributed_executor_backend="mp", **fields))
        return made[-1]

    with forked_workers():
        yield make
    for core in made:
        core.close()


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_workers_read_beside_their_steps(
    make_mp_core: Callable[..., EngineCore], folders: list[Path], alone: list[list[int]], tmp_path: Path, size: int
) -> None:
    """The last rank is slow. Then a worker dies, and the new ones read what the old ones have not read to its end."""
    core = make_mp_core(tensor_parallel_size=size)
    core.executor.collective_rpc(worker_functions.hold_loads, args=[str(tmp_path / "opened"), size - 1])
    core.add(request("plain", None, max_tokens=60))
    core.add(request("slow", folders[0]))
    assert some_steps(core)["plain"] >= 20 and [*core.adapters.waiting] == ["slow"]
    (tmp_path / "opened").touch()
    answers, errors, _ = run(core)
    assert answers["slow"] == alone[0] and not errors
    (tmp_path / "opened").unlink()
    core.add(request("slow", folders[1]))
    some_steps(core, 3)
    assert core.adapters.reading
    core.executor.processes[0].kill()
    assert run(core)[0] == {"slow": alone[1]}
    assert core.metrics()["num_worker_restarts_total"] == 1


def test_an_adapter_that_kills_its_readers_is_refused(
    make_mp_core: Callable[..., EngineCore], folders: list[Path], alone: list[list[int]]
) -> None:
    core = make_mp_core()

    def spoil() -> None:
        core.executor.collective_rpc(worker_functions.die_in_loads)

    spoil()
    core.workers.on_restart, reload = lambda: (reload(), spoil()), core.workers.on_restart
    core.add(request("plain", None, max_tokens=20))
    core.add(request("bad", folders[0]))
    answers, errors, _ = run(core)
    assert "the workers have died twice while they read" in errors["bad"] and len(answers["plain"]) == 20
    assert core.metrics()["num_worker_restarts_total"] == 2
    core.workers.on_restart = reload
    core.executor.processes[0].kill()
    core.add(request("good", folders[1]))
    assert run(core)[0] == {"good": alone[1]}
