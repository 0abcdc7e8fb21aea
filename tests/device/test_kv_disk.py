"""KV blocks on disk: whatever becomes of the files, the tokens are those of an engine without them."""

from __future__ import annotations

import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import EngineConfig
from device.kv_disk import HEADER, KVDisk
from engine import LLM, SamplingParams
from integrity import check_integrity
from observe.logs import start_log
from plan import EngineCoreRequest, StepPlan
from processes.child import Board
from scheduling.disk import weights_mark

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {
    "dtype": "float32", "block_size": 16, "max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 20,
    "swap_space": 0.02, "schedule_conservativeness": 0.0,
}  # fmt: skip
RANDOM = random.Random(5)
START = [RANDOM.randrange(300) for _ in range(64)]  # which some prompts begin with
PROMPTS = [START * (i % 2) + [RANDOM.randrange(300) for _ in range(160 - 64 * (i % 2))] for i in range(5)]


def run(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    fields = {name: value for name, value in SMALL.items() if name not in ("num_gpu_blocks_override", "swap_space")}
    with LLM(enable_prefix_caching=False, **fields) as llm:
        return run(llm)


@pytest.fixture(autouse=True)
def paying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether reading pays depends on the machine, so here it does."""
    monkeypatch.setattr(KVDisk, "time_reads", lambda disk, nbytes: 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "kv")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]]) -> Path:
    """The files of an engine that has run all prompts."""
    path = tmp_path_factory.mktemp("written") / "kv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVDisk, "time_reads", lambda disk, nbytes: 0.0)
        with LLM(kv_disk=str(path), **SMALL) as llm:
            assert run(llm) == run(llm) == expected
    assert len(files_of(path)) > 30
    return path


def files_of(folder: Path | str) -> list[Path]:
    return sorted(path for path in Path(folder).glob("blocks/*/*/*"))


def copied(written: Path, folder: str) -> str:
    shutil.copytree(written, folder)
    return folder


def test_a_second_engine_finds_what_the_first_has_written(written, folder, expected):
    """Also under the sanitizer, which has files of its own: what is read has the shadow that it had."""
    with LLM(kv_disk=copied(written, folder), **SMALL) as llm:
        assert run(llm) == expected
        metrics = llm.core.metrics()
        assert metrics["disk_cache_hits_total"] > 400 and metrics["kv_disk_bad_blocks_total"] == 0
        size = llm.core.executor.worker.block_bytes()
        assert metrics["kv_disk_read_bytes_total"] == metrics["kv_disk_read_blocks_total"] * size > 0
        assert "KV disk" in start_log(llm.core.facts, "")
        check_integrity(llm.core.scheduler)
    for _ in range(2):
        with LLM(kv_disk=folder, sanitize_kv=True, **SMALL) as llm:
            assert run(llm) == expected
            hits = llm.core.metrics()["disk_cache_hits_total"]
    assert hits > 400


def test_files_are_the_owners_alone(written):
    (fingerprint,) = (written / "blocks").iterdir()
    for path in (written, fingerprint, fingerprint / "0"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files_of(written)} == {0o600}
    assert len({path.stat().st_size for path in files_of(written)}) == 1


def test_two_engines_share_a_folder(folder, expected):
    with LLM(kv_disk=folder, **SMALL) as one, LLM(kv_disk=folder, **SMALL) as other:
        for i in range(len(PROMPTS)):
            assert run(one, PROMPTS[i:]) == expected[i:]
            assert run(other, PROMPTS[i:]) == expected[i:]
        assert one.core.metrics()["kv_disk_bad_blocks_total"] + other.core.metrics()["kv_disk_bad_blocks_total"] == 0
        assert other.core.metrics()["disk_cache_hits_total"] > 0


def test_salts_have_files_of_their_own(folder):
    def cached(salt: str) -> int:
        with LLM(kv_disk=folder, **SMALL) as llm:
            prompt = {"prompt_token_ids": PROMPTS[0], "cache_salt": salt}
            llm.generate([prompt], GREEDY, use_tqdm=False)
            llm.generate(PROMPTS[1:], GREEDY, use_tqdm=False)  # which drive it out
            return llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens

    cached("a")
    with LLM(kv_disk=folder, **SMALL) as llm:
        for salt, hit in (("b", False), ("", False), ("a", True)):
            (output,) = llm.generate([{"prompt_token_ids": PROMPTS[0], "cache_salt": salt}], GREEDY, use_tqdm=False)
            assert (output.metrics.cached_by_tier["disk"] > 100) == hit
            assert sum(output.metrics.cached_by_tier.values()) == output.num_cached_tokens


# --- faults -----------------------------------------------------------------------------------------------------------


def cut(path: Path, rng: random.Random, others: list[Path]) -> None:
    with open(path, "r+b") as file:
        file.truncate(rng.randrange(path.stat().st_size))


def flip(path: Path, rng: random.Random, others: list[Path]) -> None:
    at = rng.randrange(path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def swap(path: Path, rng: random.Random, others: list[Path]) -> None:
    """Another block's whole file in the place of this one."""
    other = rng.choice([other for other in others if other != path])
    shutil.copyfile(other, path)


def extend(path: Path, rng: random.Random, others: list[Path]) -> None:
    with open(path, "ab") as file:
        file.write(bytes(rng.randrange(1, 100)))


def views_of(pool: torch.Tensor) -> Callable[[int], list[memoryview]]:
    return lambda block: [pool[block].numpy().data.cast("B")]


def a_disk(written: Path, folder: str) -> tuple[KVDisk, torch.Tensor]:
    """The files of `written`, with blocks to read into."""
    config = EngineConfig(kv_disk=copied(written, folder))
    (fingerprint,) = (Path(folder) / "blocks").iterdir()
    size = files_of(folder)[0].stat().st_size - HEADER.size
    pool = torch.zeros(4, size // 4)
    return KVDisk(config, fingerprint.name, 0, views_of(pool)), pool


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_a_bad_file_is_a_miss_and_is_removed(written, folder, count):
    disk, _ = a_disk(written, folder)
    rng, whole = random.Random(1), {path: path.read_bytes() for path in files_of(folder)}
    for i in range(count):
        path = rng.choice([*whole])
        (cut, flip, swap, extend)[i % 4](path, rng, [*whole])
        assert path.read_bytes() != whole[path]
        name = bytes.fromhex(path.name)
        assert disk.read(name, 0, None) == -1 and not path.exists()
        assert disk.read(name, 0, None) == 0  # it is not there
        path.write_bytes(whole[path])
        assert disk.read(name, 1, None) == 1
        assert disk.views(1)[0].tobytes() == whole[path][HEADER.size :]


def test_tokens_are_right_whatever_was_done_to_files(written, folder, expected):
    copied(written, folder)
    rng = random.Random(2)
    for path in rng.sample(files_of(folder), len(files_of(folder)) // 3):
        rng.choice((cut, flip, swap, extend))(path, rng, files_of(written))
    with LLM(kv_disk=folder, **SMALL) as llm:
        assert run(llm) == expected
        assert llm.core.metrics()["kv_disk_bad_blocks_total"] > 0


@pytest.mark.parametrize("what", ["all", "of the engine", "of the rank"])
def test_the_folder_may_go_away(written, folder, expected, what):
    copied(written, folder)
    with LLM(kv_disk=folder, **SMALL) as llm:
        assert run(llm, PROMPTS[:2]) == expected[:2]
        (fingerprint,) = (Path(folder) / "blocks").iterdir()
        shutil.rmtree({"all": Path(folder), "of the engine": fingerprint, "of the rank": fingerprint / "0"}[what])
        assert run(llm) == run(llm) == expected
    assert os.path.exists(folder) == bool(files_of(folder)) == (what != "all")  # what we own we make anew


@pytest.mark.parametrize("method", ["write_file", "read_file", "touch"])
def test_errors_of_the_disk_end_nothing(written, folder, expected, monkeypatch, caplog, method):
    """Named once; and after a failed write the next ones pause."""
    copied(written, folder)
    calls = []

    def fail(*args: Any) -> None:
        calls.append(args)
        raise OSError(28, "No space left on device")

    with LLM(kv_disk=folder, **SMALL) as llm:
        monkeypatch.setattr(KVDisk, method, fail)
        run(llm, [[7, *prompt] for prompt in PROMPTS])
        assert run(llm) == expected
        metrics = llm.core.metrics()
    assert calls
    if method == "read_file":
        assert metrics["disk_cache_hits_total"] == 0
    if method == "write_file":
        assert metrics["kv_disk_written_blocks_total"] == 0 and len(calls) == 1
    said = [record for record in caplog.records if "No space left" in record.getMessage()]
    assert len(said) == 1


def test_what_is_used_least_recently_goes_first(tmp_path):
    """A sixteenth is free then. Files that are to be kept, and files that were read, stay."""
    size, count = 1000, 32
    config = EngineConfig(kv_disk=str(tmp_path / "kv"), kv_disk_size=count * (size + HEADER.size) / 2**30)
    disk = KVDisk(config, "engine", 0, views_of(torch.zeros(1, size // 4)))
    names = [i.to_bytes(16, "big") for i in range(count + 1)]
    now = time.time()
    for i, name in enumerate(names[:count]):
        assert disk.write(name, 0, 300.0 * (i == 3), None) == 1
        if i != 3:
            os.utime(disk.path(name), (now - 1000 + i, now - 1000 + i))
    assert disk.path(names[3]).stat().st_mtime > now + 250
    assert disk.read(names[1], 0, None) == 1  # which is a use
    assert disk.write(names[0], 0, 0.0, None) == 0  # it is there already; and this is one, too
    (tmp_path / "kv" / "blocks" / "other" / "0").mkdir(parents=True)
    (tmp_path / "kv" / "blocks" / "other" / "0" / "file").write_bytes(bytes(size))  # another engine's, the latest
    stranger = tmp_path / "kv" / "weights" / "a" / "b" / "model.safetensors"
    stranger.parent.mkdir(parents=True)
    stranger.write_bytes(bytes(count * size))
    os.utime(stranger, (1, 1))
    assert disk.write(names[count], 0, 0.0, None) == 1
    gone = [i for i, name in enumerate(names) if not disk.path(name).exists()]
    assert gone == [2, 4, 5, 6] and stranger.exists()
    left = sum(path.stat().st_size for path in files_of(tmp_path / "kv"))
    assert left <= count * (size + HEADER.size)


@pytest.mark.parametrize(("marked", "gone"), [(12, "plain"), (20, "marked")])
def test_files_that_are_kept_for_longer_take_at_most_half(tmp_path, marked, gone):
    size, count = 1000, 32
    config = EngineConfig(kv_disk=str(tmp_path / "kv"), kv_disk_size=count * (size + HEADER.size) / 2**30)
    disk = KVDisk(config, "engine", 0, views_of(torch.zeros(1, size // 4)))
    names = [i.to_bytes(16, "big") for i in range(count + 1)]
    now = time.time()
    for i, name in enumerate(names[:count]):  # those that are kept were used first
        assert disk.write(name, 0, 3600.0 * (i < marked), None) == 1
        os.utime(disk.path(name), (now - 100 + i, disk.path(name).stat().st_mtime if i < marked else now - 100 + i))
    assert disk.write(names[count], 0, 0.0, None) == 1
    first = marked if gone == "plain" else 0
    assert [i for i, name in enumerate(names) if not disk.path(name).exists()] == [*range(first, first + 3)]


def test_a_block_larger_than_the_room_is_not_written(tmp_path):
    config = EngineConfig(kv_disk=str(tmp_path / "kv"), kv_disk_size=1e-6)
    disk = KVDisk(config, "engine", 0, views_of(torch.zeros(1, 2000)))
    assert disk.write(bytes(16), 0, 0.0, None) == 0 and not files_of(tmp_path / "kv")


def test_given_up_moves_touch_no_block(written, folder, monkeypatch):
    disk, pool = a_disk(written, folder)
    names = [bytes.fromhex(path.name) for path in files_of(folder)]
    begun, read = [], disk.read_file

    def slow(name: bytes, views: list[memoryview]) -> bool:
        begun.append(name)
        time.sleep(0.1)
        return read(name, views)

    monkeypatch.setattr(disk, "read_file", slow)
    disk.begin(StepPlan(0, disk_in=[(ticket, name, 0) for ticket, name in enumerate(names, 1)]), None)
    while not begun:
        time.sleep(0.001)
    disk.give_up(len(names) + 1)
    pool.zero_()
    assert not disk.ended() and len(begun) < 3
    time.sleep(0.25)
    assert not pool.any()


# --- options ----------------------------------------------------------------------------------------------------------


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    others = tmp_path / "others"
    others.mkdir()
    others.chmod(0o770)
    file = tmp_path / "file"
    file.touch()
    for path in (others, file, tmp_path / "none" / "there"):
        with pytest.raises(ValueError, match=f"kv_disk is '{path}'"):
            LLM(kv_disk=str(path), **SMALL)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"swap_space": 0.0}, "kv_disk is .*needs host memory for blocks, and swap_space is 0.0"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching is False; with kv_disk it must be True"),
        ({"log_scheduler": "file"}, "log_scheduler is 'file'"),
        ({"distributed_executor_backend": "torchrun"}, "distributed_executor_backend is 'external_launcher'"),
    ],
)
def test_what_it_does_not_go_with(folder, fields, words):
    with pytest.raises(ValueError, match=words):
        LLM(kv_disk=folder, **SMALL | fields)


def test_where_reading_costs_more_it_is_not_used(folder, monkeypatch, expected):
    monkeypatch.setattr(KVDisk, "time_reads", lambda disk, nbytes: 9.0)
    with LLM(kv_disk=folder, **SMALL) as llm:
        assert run(llm) == run(llm) == expected
        assert "not used" in start_log(llm.core.facts, "")
    assert not files_of(folder)


def test_times_are_of_whole_reads(folder, monkeypatch):
    monkeypatch.undo()
    with LLM(kv_disk=folder, **SMALL) as llm:
        worker, facts = llm.core.executor.worker, llm.core.facts["kv_disk"]
        assert facts["bytes"] == worker.block_bytes() and "a block is read in" in facts["note"]
        assert 0 < worker.disk.time_reads(worker.block_bytes()) < 60
        assert not files_of(folder)


def test_the_servers_secret_outlives_it(tmp_path):
    path = str(tmp_path / "kv")
    tags = {Board(path).tag("salt", "client", "a") for _ in range(2)}
    assert len(tags) == 1 and Board().tag("salt", "client", "a") not in tags
    secret = tmp_path / "kv" / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600 and os.listdir(path) == ["secret"]
    secret.write_bytes(b"short")
    with pytest.raises(ValueError, match="must have 16 bytes"):
        Board(path)


# --- sessions, weights and ranks --------------------------------------------------------------------------------------


def test_a_marked_request_is_on_disk_soon_after_it_has_ended(folder):
    """The pools have room for all of it, so nothing else would bring it there."""
    with LLM(kv_disk=folder, **SMALL | {"num_gpu_blocks_override": 100}) as llm:
        core = llm.core
        for name, retention in (("plain", 0), ("marked", 3600)):
            core.add(EngineCoreRequest(name, PROMPTS[retention > 0], GREEDY, retention=retention))
            while core.has_work():
                core.step()
            assert len(files_of(folder)) == (10 if retention else 0)
        assert min(path.stat().st_mtime for path in files_of(folder)) > time.time() + 3500


def test_other_weights_have_other_files(written, folder, tmp_path):
    """Weights are known by what is in their files, wherever they lie."""
    with LLM(kv_disk=copied(written, folder), **SMALL) as llm:
        shutil.copytree(llm.config.folder, tmp_path / "same")
        shutil.copytree(llm.config.folder, tmp_path / "other")
        tensors = load_file(tmp_path / "other" / "model.safetensors")
        save_file({name: x * 1.01 for name, x in tensors.items()}, tmp_path / "other" / "model.safetensors")

        def hits() -> int:
            before = llm.core.metrics()["disk_cache_hits_total"]
            run(llm)
            return llm.core.metrics()["disk_cache_hits_total"] - before

        llm.update_weights(str(tmp_path / "other"))
        assert hits() == 0
        llm.update_weights(str(tmp_path / "same"))
        assert hits() > 0
        llm.core.reset_prefix_cache()  # because somebody may have changed the weights in memory
        assert hits() == 0


@pytest.mark.parametrize("ending", ["safetensors", "gguf"])
def test_weights_are_known_by_their_files(tmp_path, ending):
    def mark(name: str, contents: bytes, at: int = 1) -> bytes:
        (tmp_path / name).mkdir()
        file = tmp_path / name / f"weights.{ending}"
        file.write_bytes(contents)
        os.utime(file, (at, at))
        return marks_of(tmp_path / name)[0]

    def marks_of(path: Path) -> list[bytes]:
        config = SimpleNamespace(weights="", checkpoint=str(path), seed=0)
        return [weights_mark(config), weights_mark(config)]

    assert mark("a", b"x" * 100) == mark("b", b"x" * 100)
    others = [mark("longer", b"x" * 101), mark("end", b"x" * 99 + b"y"), mark("later", b"x" * 100, 2)]
    assert len({*others, *marks_of(tmp_path / "a")}) == 4
    assert len({*marks_of(tmp_path / "a" / f"weights.{ending}")}) == 1
    assert len({*marks_of(tmp_path / "gone")}) == 2  # of what cannot be read it is another one each time


def test_a_disk_that_does_not_answer_keeps_nobody(written, folder, expected, monkeypatch):
    monkeypatch.setattr("scheduling.disk.PATIENCE", 0.2)
    answers = threading.Event()
    monkeypatch.setattr(KVDisk, "read_file", lambda disk, name, views: answers.wait(60) and False)
    with LLM(kv_disk=copied(written, folder), **SMALL) as llm:
        assert run(llm) == expected
        answers.set()


def test_sleep_gives_up_moves(written, folder, expected):
    with LLM(kv_disk=copied(written, folder), **SMALL) as llm:
        assert run(llm) == expected
        llm.sleep()
        llm.wake_up()
        assert run(llm) == expected
        assert llm.core.metrics()["disk_cache_hits_total"] > 800


@pytest.mark.full
@pytest.mark.parametrize(
    "fields",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"distributed_executor_backend": "mp"}],
    ids=["two ranks", "two stages", "a worker process"],
)
def test_ranks_in_processes(folder, expected, fields):
    """With blocks of 64 tokens, reading one pays on any machine."""
    sizes = SMALL | {"block_size": 64, "num_gpu_blocks_override": 6, "swap_space": 0.1}
    for _ in range(2):
        with LLM(kv_disk=folder, **sizes, **fields) as llm:
            assert run(llm) == run(llm) == expected
            metrics = llm.core.metrics()
            assert llm.core.facts["kv_disk"]["pays"] and metrics["kv_disk_bad_blocks_total"] == 0
    assert metrics["disk_cache_hits_total"] > 256
    (fingerprint,) = (Path(folder) / "blocks").iterdir()
    assert len(list(fingerprint.iterdir())) == llm.config.world_size
