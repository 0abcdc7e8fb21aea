"""The library's face for asyncio: an engine in a process of its own, and tasks that come, go and are cancelled."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import threading
from dataclasses import replace

import psutil
import pytest

from async_llm import AsyncLLM, EngineArgs, EngineDeadError, SamplingParams
from config import DEMO
from processes.child import STOP_TIMEOUT
from served import alive, eventually

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=900)
SEED = [5, 80, 300]


@pytest.fixture(scope="module")
def llm_async():
    llm = AsyncLLM.from_engine_args(EngineArgs(DEMO, dtype="float32", device="cpu", block_size=16, threads=1))
    yield llm
    llm.shutdown()


async def collect(llm: AsyncLLM, prompt, params, request_id: str, **more) -> list:
    return [output async for output in llm.generate(prompt, params, request_id, **more)]


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine has nothing to do."""
    while (await llm.get_metrics())["num_requests_running"]:
        await asyncio.sleep(0.01)


async def begun(llm: AsyncLLM, request_id: str) -> tuple[asyncio.Task, asyncio.Event]:
    """A task that generates for long, and has had its first output; and an event that it sets with each output."""
    event = asyncio.Event()

    async def read() -> list:
        outputs = []
        async for output in llm.generate(SEED, LONG, request_id):
            outputs.append(output)
            event.set()
        return outputs

    task = asyncio.create_task(read())
    await event.wait()
    return task, event


def test_generators_at_once_give_what_the_llm_gives(llm_async, llm):
    async def main():
        prompts = ["To be", {"prompt": "Enter"}, {"prompt_token_ids": SEED, "cache_salt": "a"}, SEED, "ROMEO:\n"] * 3
        jobs = [collect(llm_async, prompt, GREEDY, f"r{i}") for i, prompt in enumerate(prompts)]
        return prompts, await asyncio.gather(*jobs)

    prompts, streams = asyncio.run(main())
    wanted = llm.generate(prompts, GREEDY, use_tqdm=False)
    for i, (outputs, want) in enumerate(zip(streams, wanted, strict=True)):
        last = outputs[-1]
        assert last.outputs == want.outputs and last.prompt == want.prompt and last.request_id == f"r{i}"
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        grown = [output.outputs[0].token_ids for output in outputs]
        assert all(ids == want.outputs[0].token_ids[: len(ids)] for ids in grown)
        assert sorted({len(ids) for ids in grown}) == [len(ids) for ids in grown]  # each is longer than the one before
    assert not llm_async.live


def test_samples_and_stop_strings(llm_async, llm):
    params = SamplingParams(temperature=0.9, max_tokens=24, seed=7, n=3)
    greedy = replace(params, n=1, temperature=0)
    wanted, plain = llm.generate(["ROMEO:\n"] * 2, [params, greedy], use_tqdm=False)
    stop, later = wanted.outputs[1].text[4:9], plain.outputs[0].text[10:14]
    cut = [replace(params, stop=stop), replace(greedy, stop=later)]
    wanted = [wanted, *llm.generate(["ROMEO:\n"] * 2, cut, use_tqdm=False)]

    async def main():
        jobs = [collect(llm_async, "ROMEO:\n", setting, f"r{i}") for i, setting in enumerate([params, *cut])]
        streams = await asyncio.gather(*jobs)
        await idle(llm_async)
        return streams

    assert [outputs[-1].outputs for outputs in asyncio.run(main())] == [output.outputs for output in wanted]
    assert wanted[2].outputs[0].stop_reason == later


def test_a_bad_request_is_refused_by_name(llm_async):
    for args, fields, name in (
        ((5, GREEDY, "r"), {}, "prompt"),
        (([10**6], GREEDY, "r"), {}, "prompt"),
        (("a", None, "r"), {}, "sampling_params"),
        (("a", GREEDY, 5), {}, "request_id"),
        (("a", GREEDY, "r"), {"priority": 1}, "priority"),
    ):
        with pytest.raises(ValueError, match=name):
            asyncio.run(collect(llm_async, *args, **fields))
    assert not llm_async.live and not llm_async.client.engine.streams


def test_a_request_id_is_taken_as_long_as_its_request_runs(llm_async):
    async def main():
        task, _ = await begun(llm_async, "r")
        with pytest.raises(ValueError, match="request id 'r' is in use"):
            await collect(llm_async, "a", GREEDY, "r")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await collect(llm_async, SEED, GREEDY, "r")  # at once, though the engine may not have heard of the abort

    assert asyncio.run(main())[-1].finished


def test_a_cancelled_task_takes_its_request_along(llm_async):
    async def main():
        tasks = [(await begun(llm_async, f"r{i}"))[0] for i in range(3)]
        assert (await llm_async.get_metrics())["num_requests_running"] == 3
        tasks[0].cancel()
        while (await llm_async.get_metrics())["num_requests_running"] != 2:
            await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tasks[1], 0.01)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        await idle(llm_async)
        async for _ in llm_async.generate(SEED, LONG, "left"):
            break
        await idle(llm_async)
        for pauses in range(12):  # before it is tokenized, while it is sent, before the first output
            task = asyncio.create_task(collect(llm_async, "To be", LONG, "early"))
            for _ in range(pauses):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len((await collect(llm_async, SEED, GREEDY, "last"))[-1].outputs[0].token_ids) == 8
        await idle(llm_async)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert not llm_async.live and not llm_async.client.engine.streams


def test_a_loop_that_ends_takes_its_requests_along(llm_async):
    async def leave():
        await begun(llm_async, "r")

    asyncio.run(leave())
    asyncio.run(asyncio.wait_for(idle(llm_async), 60))
    assert not llm_async.live


def test_abort_ends_a_generator_with_what_it_has(llm_async, llm):
    async def main():
        tasks = [(await begun(llm_async, f"r{i}"))[0] for i in range(2)]
        await llm_async.abort("unknown")
        await llm_async.abort(["r0", "r1"])
        ends = [(await task)[-1] for task in tasks]
        await idle(llm_async)
        return ends

    wanted = llm.generate([SEED], replace(LONG, max_tokens=20), use_tqdm=False)[0].outputs[0].token_ids
    for output in asyncio.run(main()):
        assert output.finished and output.error is None and output.outputs[0].finish_reason == "abort"
        ids = output.outputs[0].token_ids
        assert 0 < len(ids) < 900 and ids[:20] == wanted[: len(ids)]


def test_utilities(llm_async, llm):
    async def main():
        assert await llm_async.reset_prefix_cache() is True
        (size,) = await llm_async.collective_rpc("block_bytes")
        with pytest.raises(ValueError, match="nonsense"):
            await llm_async.collective_rpc("nonsense")
        await llm_async.check_health()
        return size

    assert asyncio.run(main()) > 0
    assert llm_async.get_tokenizer().encode("To be") == llm.tokenizer.encode("To be")
    assert llm_async.get_default_sampling_params() == llm.get_default_sampling_params()
    assert llm_async.is_running and not llm_async.errored


def test_the_loop_sleeps_while_the_engine_computes(llm_async):
    """With an engine that stands still it wakes only for what the test itself does."""

    async def main():
        loop, pid = asyncio.get_running_loop(), llm_async.client.process.process.pid
        task, _ = await begun(llm_async, "r")
        select, woken = loop._selector.select, []
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.1)  # what was on its way has come
            loop._selector.select = lambda timeout: woken.append(timeout) or select(timeout)
            await asyncio.sleep(0.3)
        finally:
            os.kill(pid, signal.SIGCONT)
            loop._selector.select = select
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await idle(llm_async)
        return len(woken)

    assert asyncio.run(main()) <= 10


@pytest.mark.full
def test_a_dead_engine_ends_all_generators_and_is_replaced(llm_async):
    async def main():
        tasks = [(await begun(llm_async, f"r{i}"))[0] for i in range(2)]
        os.kill(llm_async.client.process.process.pid, signal.SIGKILL)
        for task in tasks:
            with pytest.raises(EngineDeadError, match="the engine process has ended"):
                await task
        assert llm_async.errored and not llm_async.is_running
        with pytest.raises(EngineDeadError, match="the engine process has ended"):
            await llm_async.check_health()
        with pytest.raises(EngineDeadError, match="the engine process has ended"):
            await collect(llm_async, SEED, GREEDY, "r0")
        while llm_async.errored:
            await asyncio.sleep(0.05)
        return await collect(llm_async, SEED, GREEDY, "r0")

    assert len(asyncio.run(asyncio.wait_for(main(), 120))[-1].outputs[0].token_ids) == 8


def test_shutdown_ends_all(llm_async):  # the last of those that share the engine
    async def main():
        task, _ = await begun(llm_async, "r")
        await asyncio.to_thread(llm_async.shutdown)
        with pytest.raises(EngineDeadError):
            await task

    pid = llm_async.client.process.process.pid
    asyncio.run(asyncio.wait_for(main(), 2 * STOP_TIMEOUT))
    assert not alive(pid) and llm_async.errored and not llm_async.live
    llm_async.shutdown()
    for call in (
        lambda: asyncio.run(collect(llm_async, "a", GREEDY, "r")),
        lambda: asyncio.run(llm_async.abort("r")),
        lambda: asyncio.run(llm_async.get_metrics()),
        llm_async.get_tokenizer, llm_async.get_default_sampling_params,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="this AsyncLLM is shut down"):
            call()
    with pytest.raises(EngineDeadError):
        asyncio.run(llm_async.check_health())


@pytest.mark.full
def test_what_is_forgotten_ends_once_nobody_reads_from_it():
    threads, loop = set(threading.enumerate()), asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    forgotten = AsyncLLM(EngineArgs(DEMO, dtype="float32", device="cpu", block_size=16, threads=1))
    engine = forgotten.client.process.process.pid
    pids = [engine, *(child.pid for child in psutil.Process(engine).children(recursive=True))]
    assert len(pids) >= 2  # its worker
    outputs = forgotten.generate(SEED, GREEDY, "r")
    del forgotten
    gc.collect()

    async def read(outputs) -> list:
        return [output async for output in outputs]

    assert len(loop.run_until_complete(read(outputs))[-1].outputs[0].token_ids) == 8
    del outputs
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    gc.collect()  # the thread that writes to the engine may hold it for a moment longer
    eventually(lambda: not any(map(alive, pids)) and set(threading.enumerate()) <= threads)


def test_options_for_which_there_is_no_engine_are_refused():
    for fields, message in (
        ({"data_parallel_size": 2}, "data_parallel_size is 2; for AsyncLLM it must be 1"),
        ({"distributed_executor_backend": "torchrun"}, "distributed_executor_backend is 'external_launcher'; for Asy"),
        ({"model": "/nowhere"}, "no folder /nowhere"),
    ):
        for make in (lambda **fields: AsyncLLM(EngineArgs(**fields)), AsyncLLM):
            with pytest.raises(ValueError, match=message):
                make(**fields)
    with pytest.raises(ValueError, match="EngineConfig has no max_seqs; the nearest is max_num_seqs"):
        AsyncLLM("demo", max_seqs=3)


@pytest.mark.full
def test_an_engine_that_cannot_be_is_an_error(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(f"{DEMO}/{name}", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(EngineDeadError, match=r"^the engine process has not started: temperature"):
        AsyncLLM(EngineArgs(str(tmp_path), device="cpu", load_format="dummy"))
