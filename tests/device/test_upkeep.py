"""What is done to workers between their steps: sleep, other weights, profiles, and a caller's functions."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from async_llm import AsyncLLM, EngineArgs, EngineDeadError
from checkpoints.hub import source_of
from config import DEMO, TENSORS
from device.upkeep import KeptWorker
from engine import LLM, LLMEngine, SamplingParams
from executor import WorkerError
from integrity import check_integrity
from worker_functions import end_late

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
PROMPTS = ["To be, or not", [5, 80, 300], "ROMEO:\n", list(range(3, 150))]


def tokens(llm: LLM, prompts: Any = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    """A copy of the demo with other weights."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def disturb(weights: dict[str, torch.Tensor], seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator)
        weights[name] = (weight.float() + 0.06 * noise).to(weight.dtype)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of the demo's shape that says other things."""
    return changed(tmp_path_factory.mktemp("other") / "model", disturb)


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> list[list[int]]:
    return tokens(llm)


@pytest.fixture(scope="module")
def others(other: str, wanted: list[list[int]]) -> list[list[int]]:
    llm = LLM(other, dtype="float32", device="cpu")
    found = tokens(llm)
    llm.close()
    assert all(a != b for a, b in zip(found, wanted, strict=True))
    return found


@pytest.fixture(scope="module", params=["uni", "mp"])
def either(request: pytest.FixtureRequest, make_llm: Callable[..., LLM]) -> Iterator[LLM]:
    llm = make_llm(distributed_executor_backend=request.param, threads=1)
    yield llm
    llm.close()


# A test of `fresh` has both executors. With these, a worker in a process of its own is for the tier full.
in_process_first = pytest.mark.parametrize("either", ["uni", pytest.param("mp", marks=pytest.mark.full)], indirect=True)


@pytest.fixture
def fresh(either: LLM) -> LLM:
    """An `LLM` that is awake and has the demo's weights."""
    either.wake_up()
    if either.weights_version:
        either.update_weights(DEMO)
    return either


# --- sleep ------------------------------------------------------------------------------------------------------------


@in_process_first
def test_an_engine_that_slept_says_what_it_said_before(fresh, wanted):
    for level in (1, 2, 1):
        assert tokens(fresh) == wanted and not fresh.is_sleeping()
        fresh.sleep(level)
        assert fresh.is_sleeping()
        with pytest.raises(ValueError, match="sleeps"):
            fresh.generate("To be", GREEDY)
        fresh.wake_up(["weights"])
        assert fresh.is_sleeping()
        fresh.wake_up()
        fresh.wake_up()  # has nothing to do
    assert tokens(fresh) == wanted
    check_integrity(fresh.core.scheduler)


@in_process_first
def test_sleeping_deeper_and_waking_in_parts(fresh, wanted):
    fresh.sleep(1)
    fresh.sleep(2)
    fresh.wake_up(["kv_cache"])
    fresh.sleep(1)  # the weights are gone already
    fresh.wake_up(["kv_cache"])
    fresh.wake_up(["weights"])
    assert not fresh.is_sleeping() and tokens(fresh) == wanted


@pytest.mark.parametrize(
    "fields",
    [
        {"backend": "reference"}, {"max_num_seqs": 1, "dtype": "bfloat16"}, {"quantization": "int4"},
        pytest.param({"quantization": "fp8", "load_format": "dummy"}, marks=pytest.mark.full),
        pytest.param({"dtype": "bfloat16", "load_format": "dummy"}, marks=pytest.mark.full),
        pytest.param({"sanitize_kv": True, "swap_space": 0.01}, marks=pytest.mark.full),
    ],
    ids=str,
)  # fmt: skip
def test_every_layout_sleeps_and_takes_other_weights(make_llm, other, fields):
    with make_llm(threads=1, **fields) as llm:
        before = tokens(llm, PROMPTS[:2], SHORT)
        for level in (2, 1):
            llm.sleep(level)
            llm.wake_up()
            assert tokens(llm, PROMPTS[:2], SHORT) == before
        llm.update_weights(other)
        after = tokens(llm, PROMPTS[:2], SHORT)
        assert after != before
        llm.sleep(2)
        llm.wake_up()
        assert tokens(llm, PROMPTS[:2], SHORT) == after
        if "load_format" not in fields:
            llm.update_weights(DEMO)
            assert tokens(llm, PROMPTS[:2], SHORT) == before


@pytest.mark.parametrize(
    "call", ["sleep(0)", "sleep('1')", "sleep(3)", "wake_up('weights')", "wake_up(['kv'])", "wake_up([[]])"]
)
def test_a_level_or_a_tag_that_is_not_there(llm, call):
    with pytest.raises(ValueError, match="it must be"):
        eval(f"llm.{call}")
    assert not llm.is_sleeping()


def test_requests_that_ran_go_on_after_the_sleep(llm, wanted):
    engine = LLMEngine(llm.config)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, GREEDY)
    answers: dict[str, list[int]] = {}
    for i in itertools.count():
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            answers[output.request_id] = output.outputs[0].token_ids
        if i in (0, 2, 5):
            engine.client.utility_on_all("sleep", 1 + i % 2)
            assert engine.step() == [] and engine.has_unfinished_requests()
            engine.client.utility_on_all("wake_up")
        check_integrity(engine.client.core.scheduler)
    assert [answers[str(i)] for i in range(len(PROMPTS))] == wanted
    engine.close()


def test_a_sleep_waits_for_requests_or_ends_them(llm, wanted):
    engine, outputs = LLMEngine(llm.config), {}
    client = engine.client

    def begin() -> None:
        for i, prompt in enumerate(PROMPTS[:2]):
            engine.add_request(str(i), prompt, GREEDY)
        engine.step()

    def finish() -> dict[str, Any]:
        while engine.has_unfinished_requests():
            outputs.update({output.request_id: output for output in engine.step()})
        return outputs

    begin()
    with pytest.raises(TimeoutError, match="2 requests have not ended in 0 s, so the engine does not sleep"):
        client.utility_on_all("sleep", 1, "wait", 0)
    assert not any(client.utility("is_sleeping").values())
    client.utility_on_all("sleep", 1, "wait", 1e9)
    client.utility_on_all("wake_up")
    assert [finish()[str(i)].outputs[0].token_ids for i in range(2)] == wanted[:2]
    begin()
    client.utility_on_all("sleep", 1, "abort", 0)
    for i in range(2):
        assert "the engine was put to sleep (mode=abort)" in finish()[str(i)].error
    check_integrity(client.core.scheduler)
    client.utility_on_all("sleep", 2, "wait", 0)  # nothing runs
    engine.close()


def config_of(folder: Path) -> str:
    """A model of 100 MB in float32, whose weights are made up."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 2048,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8000,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def resident(worker: KeptWorker) -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize(
    "backend", [pytest.param("cpu", marks=pytest.mark.full), pytest.param("reference", marks=pytest.mark.long)]
)
def test_memory_goes_back_to_the_system(tmp_path, backend):
    llm = LLM(
        config_of(tmp_path / "model"), device="cpu", backend=backend, dtype="float32", load_format="dummy", threads=1,
        skip_tokenizer_init=True, distributed_executor_backend="mp", num_gpu_blocks_override=64, max_num_seqs=16,
    )  # fmt: skip
    assert llm.core.facts["parameters"] * 4 > 90e6 and llm.core.facts["kv_bytes"] > 60e6
    prompts = [[3 + i] * 900 for i in range(2)]
    before = tokens(llm, prompts, SHORT)
    (awake,) = llm.collective_rpc(resident)
    seen = [awake]
    for level in (1, 2):
        llm.sleep(level)
        seen += llm.collective_rpc(resident)
    assert awake - seen[1] > 0.8 * 2 * 900 / 1024 * llm.core.facts["kv_bytes"] / 4  # what the prompts had filled
    assert seen[1] - seen[2] > 0.5 * 4 * llm.core.facts["parameters"]  # what is packed takes fewer bytes
    llm.wake_up()
    assert tokens(llm, prompts, SHORT) == before
    assert abs(llm.collective_rpc(resident)[0] - awake) < 0.2 * awake
    llm.close()


# --- other weights ----------------------------------------------------------------------------------------------------


@in_process_first
def test_weights_are_updated_from_a_folder_and_from_tensors(fresh, other, wanted, others, monkeypatch):
    version, updates = fresh.weights_version, list[dict[str, Any]]()
    monkeypatch.setattr(fresh.core, "on_weights", updates.append)
    assert tokens(fresh) == wanted
    assert fresh.update_weights(other) == version + 1
    assert tokens(fresh) == others  # and so no block of the old ones was found again
    assert fresh.update_weights(tensors=load_file(f"{DEMO}/model.safetensors")) == version + 2
    assert tokens(fresh) == wanted
    assert fresh.update_weights(f"{other}/model.safetensors") == fresh.weights_version == version + 3
    assert tokens(fresh) == others
    successors = [(options["weights"], options["weights_version"] - version) for options in updates]
    assert successors == [(other, 1), (TENSORS, 2), (f"{other}/model.safetensors", 3)]


def test_an_engine_that_missed_updates_takes_the_version_of_the_others(fresh, other):
    version = fresh.weights_version
    assert fresh.core.update_weights(other, True, version + 3) == version + 3
    assert fresh.core.update_weights(DEMO, True, version + 2) == fresh.weights_version == version + 4


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"data_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_all_ranks_sleep_are_profiled_and_take_other_weights(make_llm, tmp_path, other, wanted, others, ranks):
    with make_llm(threads=1, torch_profiler_dir=str(tmp_path / "profiles"), **ranks) as llm:
        assert tokens(llm) == wanted
        llm.start_profile()
        tokens(llm, PROMPTS[:1], SHORT)
        files = llm.stop_profile()
        assert sorted(files) == sorted(os.listdir(tmp_path / "profiles"))
        assert len([file for file in files if file.endswith(".pt.trace.json.gz")]) == 2
        llm.update_weights(other)
        llm.sleep(2)
        assert llm.is_sleeping()
        llm.wake_up()
        assert tokens(llm) == others
        llm.update_weights(tensors=load_file(f"{DEMO}/model.safetensors"))
        assert tokens(llm) == wanted and llm.weights_version == 2
        with pytest.raises(ValueError, match="there are no safetensors"):
            llm.update_weights(str(tmp_path))
        assert tokens(llm) == wanted and llm.weights_version == 2
        assert len(llm.collective_rpc(asleep_on)) == 2


def test_weights_for_an_engine_that_sleeps(fresh, other, others):
    for level in (1, 2):
        fresh.sleep(level)
        fresh.update_weights(other)
        assert fresh.is_sleeping()
        fresh.wake_up(["kv_cache"])
        assert not fresh.is_sleeping() and tokens(fresh) == others
    fresh.update_weights(tensors=load_file(f"{DEMO}/model.safetensors"))
    fresh.sleep(2)
    with pytest.raises(ValueError, match=f"version {fresh.weights_version} of the weights came as tensors"):
        fresh.wake_up()
    fresh.update_weights(other)
    fresh.wake_up()
    assert tokens(fresh) == others


@in_process_first
def test_what_does_not_fit_is_refused_and_changes_nothing(fresh, tmp_path, wanted):
    version = fresh.weights_version
    weights = load_file(f"{DEMO}/model.safetensors")
    name = next(name for name, weight in weights.items() if weight.ndim == 2)
    del weights[name]
    with pytest.raises(ValueError, match=f"has no tensor {name}"):
        fresh.update_weights(tensors=weights)
    with pytest.raises(ValueError, match=rf"tensor {name} has shape \[3, 4\]"):
        fresh.update_weights(tensors=weights | {name: torch.zeros(3, 4)})
    with pytest.raises(ValueError, match="surplus"):
        fresh.update_weights(changed(tmp_path / "more", lambda weights: weights.update(surplus=torch.zeros(1))))
    for fields, words in (({}, "either"), ({"folder": DEMO, "tensors": weights}, "either"),
                         ({"folder": str(tmp_path)}, "no safetensors"), ({"tensors": {}}, "dict of tensors"),
                         ({"tensors": {name: [1.0]}}, "cannot be sent")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            fresh.update_weights(**fields)
    assert fresh.weights_version == version and tokens(fresh) == wanted


def spoil(weights: dict[str, torch.Tensor]) -> None:
    weights[max(name for name in weights if not name.startswith("mtp."))].view(-1)[0] = torch.nan


@in_process_first
def test_weights_that_fail_halfway_leave_the_old_ones(fresh, tmp_path, wanted):
    version = fresh.weights_version
    with pytest.raises(ValueError, match="NaN or infinite"):
        fresh.update_weights(changed(tmp_path / "bad", spoil))
    assert fresh.weights_version == version and not fresh.is_sleeping() and tokens(fresh) == wanted


@pytest.mark.full
@pytest.mark.parametrize("late", [None, 0, 1])
def test_weights_that_turn_out_to_be_bad_leave_the_old_ones(make_llm, tmp_path, other, others, late):
    """Also where one rank fails long after the other."""
    bad, llm = changed(tmp_path / "bad", spoil), make_llm(tensor_parallel_size=2, threads=1)
    llm.update_weights(other)
    if late is not None:
        llm.collective_rpc(end_late, args=(late, "load_weights", 1.0))
    with pytest.raises(ValueError, match="NaN or infinite"):
        llm.update_weights(bad)
    assert llm.weights_version == 1 and tokens(llm) == others
    llm.update_weights(tensors=load_file(f"{other}/model.safetensors"))
    with pytest.raises(WorkerError, match=r"neither as they were to be .*NaN.* nor as before .*came as tensors"):
        llm.update_weights(bad)
    with pytest.raises(WorkerError, match="neither as they were to be"):
        llm.generate("To be", GREEDY, use_tqdm=False)
    llm.close()


def fail_once(worker: KeptWorker, owner: str, method: str) -> None:
    """The next call of a method of a part of the worker raises an error."""
    part = getattr(worker, owner) if owner else worker
    run = getattr(part, method)

    def fail(*args: Any, **kwargs: Any) -> None:
        setattr(part, method, run)
        raise RuntimeError("no memory is left")

    setattr(part, method, fail)


def held(worker: KeptWorker) -> list[Any]:
    """Which memory a worker has."""
    return [sorted(worker.asleep), worker.dropped, len(worker.pool), len(worker.states), worker.traces, worker.profiler]


@in_process_first
@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_fails_halfway_leaves_all_as_it_was(fresh, wanted, level):
    """Whether an engine sleeps before or not."""
    version = fresh.weights_version
    if level:
        fresh.sleep(level)
    before, failures = fresh.collective_rpc(held), [("start", "fill", partial(fresh.update_weights, DEMO))]
    if level:
        failures += [("start", name, fresh.wake_up) for name in ("new_pool", "new_states", "new_state")]
        failures += [("start", "arrange", partial(fresh.wake_up, ["weights"]))] * (level == 2)
    else:
        failures += [("", name, partial(fresh.sleep, 2)) for name in ("take_sampled", "drop_weights", "give_back")]
        failures += [("start", "new_state", fresh.sleep), ("", "new_model", partial(fresh.sleep, 2))]
    for owner, method, call in failures:
        fresh.collective_rpc(fail_once, args=(owner, method))
        with pytest.raises(ValueError, match="no memory is left"):
            call()
        assert fresh.is_sleeping() == bool(level) and fresh.collective_rpc(held) == before, method
    fresh.wake_up()
    assert tokens(fresh) == wanted and fresh.weights_version == version


def kill(llm: LLM) -> None:
    process = llm.core.executor.processes[0]
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.full
def test_new_workers_have_the_weights_that_were_set_last(make_llm, tmp_path, wanted):
    llm = make_llm(distributed_executor_backend="mp", threads=1)
    folder = changed(tmp_path / "model", disturb)
    llm.update_weights(folder)
    after = tokens(llm)
    kill(llm)
    assert tokens(llm) == after != wanted
    llm.sleep(2)
    kill(llm)
    llm.core.workers.check()
    assert llm.is_sleeping() and llm.collective_rpc(asleep_on) == [["kv_cache", "weights"]]
    llm.wake_up()
    assert tokens(llm) == after
    os.utime(f"{folder}/model.safetensors", (1, 1))
    kill(llm)
    with pytest.raises(WorkerError, match="has changed since version 1"):
        tokens(llm)
    llm.close()


def fail_at(worker: KeptWorker, method: str) -> None:
    setattr(worker, method, lambda *args: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.full
def test_a_worker_that_dies_in_the_middle_is_replaced_and_nothing_hangs(make_llm, other, wanted):
    llm = make_llm(tensor_parallel_size=2, threads=1)
    update = partial(llm.update_weights, other)
    for method, call in (("drop_weights", partial(llm.sleep, 2)), ("load_weights", update)):
        llm.collective_rpc(fail_at, args=(method,))
        with pytest.raises(ValueError, match=r"died \(SIGKILL\).*; the workers were started anew, as they were before"):
            call()
        assert not llm.is_sleeping() and llm.weights_version == 0 and tokens(llm) == wanted
    llm.sleep()
    llm.collective_rpc(fail_at, args=("wake_up",))
    with pytest.raises(ValueError, match="as they were before"):
        llm.wake_up()
    assert llm.is_sleeping()
    llm.wake_up()
    assert tokens(llm) == wanted
    llm.close()


def asleep_on(worker: KeptWorker) -> list[str]:
    return sorted(worker.asleep)


@pytest.mark.full
def test_weights_that_came_as_tensors_die_with_the_workers_and_so_does_the_engine(make_llm, other):
    llm = make_llm(distributed_executor_backend="mp", threads=1)
    llm.update_weights(tensors=load_file(f"{other}/model.safetensors"))
    kill(llm)
    for kind in (WorkerError, EngineDeadError):
        with pytest.raises(kind, match=r"died \(SIGKILL\).*version 1 of the weights came as tensors"):
            tokens(llm)
    llm.close()


def test_a_source_of_tensors_has_them_bit_by_bit():
    base = torch.randn(6, 5)
    tensors = {"a": base, "b": base.t(), "c": base.bfloat16(), "ü" * 300: torch.tensor(3), "d": base, "e": base[:0]}
    with source_of(None, tensors) as (path, lasting):
        stored = load_file(path)
    assert not lasting and stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(stored[name], tensor) and stored[name].dtype == tensor.dtype


# --- with requests in flight ------------------------------------------------------------------------------------------


@pytest.fixture
def llm_async() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(EngineArgs(DEMO, dtype="float32", device="cpu", threads=1))
    yield llm
    llm.shutdown()


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams, name: str) -> Any:
    return [output async for output in llm.generate(prompt, params, name)][-1]


async def begin(llm: AsyncLLM, params: SamplingParams, name: str) -> asyncio.Task:
    """A request that has had a token."""
    event = asyncio.Event()

    async def read() -> Any:
        outputs = []
        async for output in llm.generate(PROMPTS[1], params, name):
            outputs.append(output)
            event.set()
        return outputs[-1]

    task = asyncio.create_task(read())
    await event.wait()
    return task


@pytest.mark.full
def test_no_answer_mixes_weights(llm_async, llm, other):
    async def main() -> tuple[Any, Any, int]:
        running = await begin(llm_async, LONG, "old")
        update = asyncio.create_task(llm_async.update_weights(other))
        await asyncio.sleep(0.05)
        assert not running.done() and not update.done()
        later = asyncio.create_task(last(llm_async, PROMPTS[1], LONG, "new"))
        dropped = asyncio.create_task(last(llm_async, PROMPTS[0], LONG, "dropped"))
        await asyncio.sleep(0.05)
        dropped.cancel()
        return (await running), (await later), (await update)

    old, new, version = asyncio.run(main())
    fresh = LLM(other, dtype="float32", device="cpu")
    assert version == 1 and old.outputs[0].token_ids == tokens(llm, [PROMPTS[1]], LONG)[0]
    assert new.outputs[0].token_ids == tokens(fresh, [PROMPTS[1]], LONG)[0]
    fresh.close()


@pytest.mark.full
def test_requests_wait_while_the_engine_sleeps(llm_async, llm, other):
    async def main() -> list[Any]:
        running = await begin(llm_async, LONG, "kept")
        await llm_async.sleep()
        later = asyncio.create_task(last(llm_async, PROMPTS[0], GREEDY, "later"))
        await asyncio.sleep(0.3)
        assert await llm_async.is_sleeping() and not running.done() and not later.done()
        await llm_async.wake_up()
        outputs = [await running, await later]
        begun = await begin(llm_async, LONG, "begun")
        await llm_async.sleep(2)
        waits = asyncio.create_task(last(llm_async, PROMPTS[0], GREEDY, "waits"))
        await asyncio.sleep(0.1)
        await llm_async.update_weights(other)
        await llm_async.wake_up()
        return [*outputs, await begun, await waits]

    kept, later, begun, waited = asyncio.run(main())
    assert kept.outputs[0].token_ids == tokens(llm, [PROMPTS[1]], LONG)[0]
    assert later.outputs[0].token_ids == tokens(llm, [PROMPTS[0]])[0] != waited.outputs[0].token_ids
    assert begun.finished and "this answer had begun with the old ones" in begun.error and waited.error is None


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_a_profile_that_does_not_begin_is_none(make_llm, tmp_path):
    with make_llm(threads=1, torch_profiler_dir=str(tmp_path)) as llm:
        before, observers = llm.collective_rpc(held), [*llm.core.observers]
        fail_once(torch.profiler, "profile", "start")
        with pytest.raises(ValueError, match="no memory is left"):
            llm.start_profile()
        assert llm.collective_rpc(held) == before and llm.core.observers == observers
        llm.start_profile()
        assert len(llm.stop_profile()) == 2


@pytest.mark.parametrize("trace", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_profile_has_what_torch_and_the_engine_do(make_llm, tmp_path, trace):
    folder = tmp_path / "profiles"
    file = str(tmp_path / "trace.json") if trace else None
    with make_llm(threads=1, torch_profiler_dir=str(folder), trace=file) as llm:
        for _ in range(1 + trace):
            with pytest.raises(ValueError, match="no profile is being recorded"):
                llm.stop_profile()
            llm.start_profile()
            with pytest.raises(ValueError, match="a profile is being recorded"):
                llm.start_profile()
            tokens(llm, ["To be"], SHORT)
            file, *steps = llm.stop_profile()
            events = json.loads(gzip.decompress((folder / file).read_bytes()))["traceEvents"]
            assert any(event["name"].startswith("aten::") for event in events)
            assert [Path(name).suffixes for name in steps] == ([] if trace else [[".steps", ".json"]])
            for path in [folder / name for name in steps] or [tmp_path / "trace.json"]:
                phases = {event["name"] for event in json.loads(path.read_text())}
                assert {"schedule", "wait", "update", "apply"} <= phases


def test_what_cannot_be_profiled_is_refused(llm, make_llm, tmp_path):
    with pytest.raises(ValueError, match="torch_profiler_dir is None"):
        llm.start_profile()
    (tmp_path / "file").write_text("")
    refused = pytest.raises(ValueError, match=r"torch_profiler_dir is .*: Not a directory")
    with make_llm(torch_profiler_dir=str(tmp_path / "file" / "folder")) as made, refused:
        made.start_profile()
