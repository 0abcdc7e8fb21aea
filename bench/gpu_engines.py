"""The parts of `gpu_check.py` that measure engines: throughput, phases and profiles of steps, and single features."""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_models import QWEN3_06B, QWEN3_8B, TINY, Row, has_gpu, memory_row, model_folder, options, shape_here

SHOWN_KERNELS = 14  # of a profile: those that take most of a step
TRAFFIC_SECONDS = 10.0
DRAFTED, TAKEN = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"

# ---------------------------------------------------------------------------------------------------------- throughput


def small_model() -> Iterator[Row]:
    """Qwen3-0.6B's shape under the usual workload: 256 requests, 100 to 1,024 tokens in and out."""
    yield from throughput(QWEN3_06B, 256)


def small_fp8_cache() -> Iterator[Row]:
    """The same with keys and values in FP8."""
    yield from throughput(QWEN3_06B, 256, kv_cache_dtype="fp8")


def large_model() -> Iterator[Row]:
    """Qwen3-8B's shape under a quarter of the workload."""
    yield from throughput(QWEN3_8B, 64)


def large_int4() -> Iterator[Row]:
    """The same with weights of 4 bits."""
    yield from throughput(QWEN3_8B, 64, max_num_seqs=64, quantization="int4")


def large_int8() -> Iterator[Row]:
    """The same with weights and inputs of 8 bits."""
    yield from throughput(QWEN3_8B, 64, max_num_seqs=64, quantization="int8")


def throughput(shape: Row, requests: int, **fields: Any) -> Iterator[Row]:
    """Tokens a second of all requests at once, those of prompts alone, and the memory of the engine."""
    from bench_engine import longest, throughput_work
    from engine import LLM
    from sampling_params import SamplingParams

    shape, gpu = shape_here(shape), has_gpu()
    work = throughput_work(requests if gpu else 1, 1.0 if gpu else 0.003, shape["vocab_size"])
    begun = time.perf_counter()
    with LLM(model_folder(shape), **options(**{"max_model_len": longest(work), "max_num_seqs": 256} | fields)) as llm:
        yield memory_row(llm.client.facts) | {"start seconds": round(time.perf_counter() - begun, 1)}
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count) for _, count in work]
        read, written = sum(len(prompt) for prompt, _ in work), sum(count for _, count in work)
        begun = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in work], params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        assert [len(output.outputs[0].token_ids) for output in outputs] == [count for _, count in work]
        yield {
            "seconds": round(seconds, 2), "prompt tokens": read, "output tokens": written,
            "output tok/s": round(written / seconds), "total tok/s": round((read + written) / seconds),
            "preemptions": llm.get_metrics()["num_preemptions_total"],
        }  # fmt: skip
        yield prefill(llm, shape)


def prefill(llm: Any, shape: Row) -> Row:
    """Tokens and TFLOP a second of prompts that fill two steps, without the LM head's FLOPs."""
    from sampling_params import SamplingParams

    facts, rng = llm.client.facts, random.Random(1)
    length = min(1024 if has_gpu() else 5, facts["max_model_len"] - 1)
    count = 2 * facts["max_num_batched_tokens"] // length if has_gpu() else 1
    for _ in range(2):  # the first turn warms up
        prompts = [[rng.randrange(shape["vocab_size"]) for _ in range(length)] for _ in range(count)]
        begun = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
        seconds = time.perf_counter() - begun
    heads, kv_heads = (shape[f"num_{name}_heads"] * shape["head_dim"] for name in ("attention", "key_value"))
    weights = shape["hidden_size"] * (2 * heads + 2 * kv_heads + 3 * shape["intermediate_size"])
    layer = 2 * length * weights + 4 * heads * length * (length + 1) // 2
    flops = count * shape["num_hidden_layers"] * layer
    rates = {"prefill tok/s": round(count * length / seconds), "TFLOP/s": round(flops / seconds / 1e12, 1)}
    return {"prompts": f"{count} x {length}", "seconds": round(seconds, 3)} | rates


# ---------------------------------------------------------------------------------------------------------- a step


def breakdown() -> Iterator[Row]:
    """Phases of a decode step, by its rows."""
    import bench_engine

    batches, tokens = ((1, 32, 256), 100) if has_gpu() else ((1, 2), 3)
    yield from bench_engine.breakdown_figures(model_folder(shape_here(QWEN3_06B)), batches, tokens, options())


def profile() -> Iterator[Row]:
    """Microseconds of each kernel and in all, a step: of decodes, and of decodes beside a prompt of 512 tokens.

    Where no profiler slows them down, steps are timed with log-probabilities for one row, and with prompts, with and
    without the graphs between attentions.
    """
    from engine import LLM

    rows, steps = (256, 20) if has_gpu() else (1, 1)
    with LLM(model_folder(shape_here(QWEN3_06B)), **options(max_num_seqs=rows + 64, max_model_len=6144)) as llm:
        core = llm.core
        for running in (1, rows)[: 2 if has_gpu() else 1]:
            add = start_decodes(core, running)
            yield {"steps": f"{running} decodes", "us a step": step_time(core)}
            yield from profiled(core, f"{running} decodes", steps, lambda: None)
            stop(core)
        start_decodes(core, rows - 1)
        add(logprobs=5)
        yield {"steps": f"{rows} decodes, one with log-probabilities", "us a step": step_time(core)}
        stop(core)
        add = start_decodes(core, rows)
        worker = core.executor.worker  # type: ignore[union-attr]
        pieces = worker.pieces
        for tokens in (512, 4096) if has_gpu() else (3,):
            for graphs in (True, False) * (2 if has_gpu() else 1):
                worker.pieces = pieces if graphs else None
                taken = []
                for _ in range(6 if has_gpu() else 1):
                    add(tokens)
                    taken.append(step_time(core, 1, 0))
                yield {"steps": f"with a prompt of {tokens}", "graphs between attentions": graphs, "us each": taken}
        worker.pieces = pieces
        yield from profiled(core, "with a prompt", max(1, steps // 4), add)


def start_decodes(core: Any, rows: int, adapters: list[Any] | None = None) -> Callable[..., None]:
    """Let `rows` requests decode; returns what adds one more, whose prompt has 512 tokens or as many as it is given.

    They take the `adapters` in turn, if there are any.
    """
    from plan import EngineCoreRequest
    from sampling_params import SamplingParams

    rng, length = random.Random(rows), 512 if has_gpu() else 3
    usual: Row = {"temperature": 0.6, "ignore_eos": True, "max_tokens": 1000 if has_gpu() else 30}
    numbers = itertools.count()

    def add(tokens: int = length, **more: Any) -> None:
        number = next(numbers)
        prompt, params = [rng.randrange(199) for _ in range(tokens)], SamplingParams(**usual | more)
        lora = adapters[number % len(adapters)] if adapters else None
        core.add(EngineCoreRequest(f"{rows} {number}", prompt, params, lora=lora), at_once=True)

    for _ in range(rows):
        add()
    while core.metrics()["num_requests_waiting"]:
        core.step()
    return add


def step_time(core: Any, steps: int = 50, before: int = 5) -> int:
    """Microseconds of a step, on average, after some `before` it."""
    steps, before = (steps, before) if has_gpu() else (1, 0)
    for _ in range(before):
        core.step()
    begun = time.perf_counter()
    for _ in range(steps):
        core.step()
    return round((time.perf_counter() - begun) / steps * 1e6)


def stop(core: Any) -> None:
    """End all requests."""
    core.abort_requests([])
    while core.has_work():
        core.step()


def profiled(core: Any, kind: str, steps: int, before_each: Callable[[], None]) -> Iterator[Row]:
    """What torch's profiler sees in these steps: a row in all, and one for each of the kernels that take most."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA if has_gpu() else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        begun = time.perf_counter()
        for _ in range(steps):
            before_each()
            core.step()
        seconds = time.perf_counter() - begun
    kernels = [event for event in profile.key_averages() if event.self_device_time_total]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels)
    yield {"steps": kind, "us a step, profiled": round(seconds / steps * 1e6), "GPU busy us": round(busy / steps)}
    for event in kernels[:SHOWN_KERNELS]:
        taken = {"us a step": round(event.self_device_time_total / steps, 1), "calls": event.count / steps}
        yield {"steps": kind, "kernel": event.key[:70], **taken}


# ------------------------------------------------------------------------------------------------------------ features


def adapters() -> Iterator[Row]:
    """Steps of an engine that has adapters, with and without them, beside one that has none; then mixed traffic."""
    import bench_lora
    from engine import LLM
    from model_config import ModelConfig

    folder = model_folder(shape_here(QWEN3_06B))
    rows = (1, 256) if has_gpu() else (1,)
    sizes = {"max_num_seqs": max(rows), "max_model_len": 2048}
    with tempfile.TemporaryDirectory() as place:
        made = bench_lora.write_adapters(Path(place), ModelConfig.from_folder(folder), 4 if has_gpu() else 1, 16)
        # The second engine finds room even if the first one leaves some of its memory behind.
        for enabled, share in ((False, 0.4), (True, 0.8)):
            with LLM(folder, **options(**sizes, enable_lora=enabled, gpu_memory_utilization=share)) as llm:
                yield {"enable_lora": enabled} | memory_row(llm.client.facts)
                for used in ([], made)[: 1 + enabled]:
                    for count in rows:
                        start_decodes(llm.core, count, used)
                        step = {"decodes": count, "adapters in use": len(used), "us a step": step_time(llm.core)}
                        yield {"enable_lora": enabled} | step
                        stop(llm.core)
                if enabled:
                    yield from mixed_traffic(llm.core, made)


def mixed_traffic(core: Any, adapters: list[Any]) -> Iterator[Row]:
    """Requests of all lengths and sampling parameters for ten seconds; the kernels that are compiled meanwhile."""
    from plan import EngineCoreRequest
    from sampling_params import SamplingParams

    rng, most = random.Random(3), core.config.max_num_seqs
    longest, vocab_size = core.facts["max_model_len"] - 40, core.facts["vocab_size"]
    guard = core.executor.worker.start.guard
    unseen: set[str] = set()
    guard._compile = functools.partial(allow_late, guard._compile, unseen)
    begun, count, steps, errors = time.perf_counter(), 0, 0, list[str]()
    while time.perf_counter() - begun < TRAFFIC_SECONDS if has_gpu() else count < 3:
        if len(core.scheduler.requests) < most * 3 // 4 + 1 and rng.random() < 0.7:
            length = rng.choice((1, 17, 40, 300, longest)) if has_gpu() else rng.choice((1, 5, 17))
            prompt = [rng.randrange(vocab_size) for _ in range(length)]
            params = SamplingParams(**drawn_params(rng, count))
            lora = None if params.use_beam_search else rng.choice([None, *adapters])
            core.add(EngineCoreRequest(f"mixed {count}", prompt, params, lora=lora))
            count += 1
        if rng.random() < 0.02 and core.scheduler.requests:
            core.abort(rng.choice([*core.scheduler.requests]))
        errors += [output.error for output in core.step() if output.error]
        steps += 1
    yield {
        "mixed traffic s": round(time.perf_counter() - begun, 1), "requests": count, "steps": steps,
        "errors": len(errors), "kernels seen late": len(unseen),
    }  # fmt: skip
    yield from ({"late": kernel[:400]} for kernel in sorted(unseen)[:10])
    yield from ({"error": error[:300]} for error in errors[:3])
    stop(core)


def allow_late(check: Callable[..., Any], unseen: set[str], *args: Any, **more: Any) -> Any:
    """Stands in for the guard's own `check` of a launch: what it refuses is noted, and goes on."""
    from worker import LateCompile

    try:
        return check(*args, **more)
    except LateCompile as error:
        unseen.add(str(error))
        return False


def drawn_params(rng: random.Random, i: int) -> Row:
    """Sampling parameters, of five kinds in turn."""
    params: Row = {"temperature": rng.choice((0, 0.8)), "seed": i, "ignore_eos": True}
    params["max_tokens"] = rng.randint(1, 30 if has_gpu() else 2)
    kind = i % 5
    if kind == 1:
        params |= {"n": 3, "top_k": 5, "top_p": 0.8, "min_p": 0.05}
    elif kind == 2:
        params |= {"repetition_penalty": 1.2, "logit_bias": {3: 2.0}, "allowed_token_ids": tuple(range(2, 60))}
        params |= {"min_tokens": 1, "stop_token_ids": (3,), "bad_word_ids": ((5, 6), (7,), (2, 5, 6))}
    elif kind == 3:
        params |= {"use_beam_search": True, "beam_width": 2, "n": 2, "temperature": 0}
    elif kind == 4:
        params |= {"logprobs": rng.choice((0, 5)), "prompt_logprobs": rng.choice((None, 3)), "top_p": 0.9}
    return params


def drafts() -> Iterator[Row]:
    """The demo's tasks with 0, 1 and 3 drafts of its own head for multi-token prediction, one at a time and together.

    Without a GPU a tiny model has such a head.
    """
    from config import DEMO
    from engine import LLM
    from sampling_params import SamplingParams

    gpu, expected = has_gpu(), dict[int, list[list[int]]]()
    params = SamplingParams(temperature=0, max_tokens=60 if gpu else 4, ignore_eos=True)
    for count, share in ((0, 0.25), (1, 0.5), (3, 0.75)) if gpu else ((0, 0.5), (3, 0.5)):
        fields: Row = {"max_num_seqs": 32, "gpu_memory_utilization": share}
        if not gpu:
            fields |= options() | {"max_num_seqs": 1, "max_model_len": 12}
        if count:
            fields["speculative_config"] = {"method": "mtp", "num_speculative_tokens": count}
        with LLM(DEMO if gpu else model_folder(TINY | {"num_nextn_predict_layers": 1}), **fields) as llm:
            prompts = demo_prompts(llm.get_tokenizer(), 32) if gpu else [[5, 80, 30]]
            for batch in sorted({1, len(prompts)}):
                groups = [prompts[at : at + batch] for at in range(0, len(prompts), batch)][:8]
                for _ in range(2 if gpu else 1):  # the first turn warms up
                    before = dict(llm.core.scheduler.counters)
                    begun = time.perf_counter()
                    outputs = [output for group in groups for output in llm.generate(group, params, use_tqdm=False)]
                    seconds = time.perf_counter() - begun
                drafted, taken = (llm.core.scheduler.counters[name] - before.get(name, 0) for name in (DRAFTED, TAKEN))
                answers = [output.outputs[0].token_ids for output in outputs]
                same = sum(a == b for a, b in zip(answers, expected.setdefault(batch, answers), strict=True))
                yield {
                    "drafts": count, "sequences": batch, "tok/s": round(sum(map(len, answers)) / seconds),
                    "drafted": int(drafted), "accepted": round(taken / max(1, drafted), 3),
                    "same answers": f"{same} of {len(answers)}",
                }  # fmt: skip


def demo_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the demo's tasks."""
    from bench_speculation import questions

    texts = (tokenizer.render(messages) for messages, _ in questions("repeat", count, alone=False))
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
