"""Warm-up: each kind of step runs once, so that all kernels are compiled, and decode steps become CUDA graphs."""

from __future__ import annotations

import math
import time
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from config import MOST_DRAFTING
from cpu import machine
from device.dry_run import dry_worker, largest_image
from device.memory import captures_graphs, piece_sizes
from device.piecewise import PiecewiseGraphs
from device.start import Start
from layers import Batch
from model import Transformer
from models.tower_rows import SMALL
from parallel import incoming_of
from plan import NewRow, StepPlan, VisionPlan
from sampling_params import PoolingParams, SamplingParams
from speculation.drafter import Drafter
from worker import StepRun, Worker

# Products with weights in codes have specializations for up to 16, 64 and 511 rows, and for more.
SOME_ROWS = (33, 97, 512)


def rehearse(start: Start) -> None:
    """Launch what `warm_up` will launch, on a worker without memory, so that all kernels compile at the same time."""
    assert start.guard
    config, ops = start.config, start.ops
    with torch.inference_mode(), torch.device("meta"):
        pairs, staged = torch.empty(1, 2, dtype=torch.int64), torch.empty(8, dtype=torch.int32)
        dry = dry_worker(config, start.model, ops)
        model, last = dry.model, dry.pipeline.last
        with start.guard.rehearse(threads=max(1, machine.available_cores() // start.sharers)):
            ops.apply_writes(dry.state.words, staged, 1)
            run_tower(dry)
            most = config.num_drafts
            for adjusted in (True, False):
                kinds = [(*warm_up_prompts(start), 0), (1, 1, 0), (1, 1 + most, most)]
                for count, length, drafts in {*kinds, *((*some, 0) for some in some_prompts(start))}:
                    ones = np.ones(count, dtype=np.int32)
                    shape = dry.shape_of(ones * length, ones * (1 + drafts), ones * drafts)
                    proposes = most > 0 and count <= MOST_DRAFTING
                    shape = shape._replace(adjusted=adjusted, adapted=dry.adapters is not None, proposes=proposes)
                    run = StepRun(shape=shape, incoming=incoming_of(dry, shape.tokens))
                    if adjusted and (count, length) == warm_up_prompts(start) and (vision := seeing(start, length)):
                        run.plan.rows, run.plan.vision = [(i, length) for i in range(count)], vision
                    brought = dry.forward(run)
                    if last and not config.makes_vectors:
                        ops.logprobs(run.logits, brought[0].long(), int(adjusted))
            if dry.adapters:
                ops.swap_blocks(dry.adapters.host, dry.adapters.pool, pairs)
            if config.makes_vectors:
                return
            if last:
                for rows in logits_rows(start):
                    model.logits(torch.empty(rows, model.config.hidden_size, dtype=model.dtype))
            for moved in (dry.pool, dry.states) if model.state_size else (dry.pool,):
                ops.copy_blocks(moved, pairs)
                ops.swap_blocks(moved, moved, pairs)


def run_layers(model: Transformer, rows: int, pool: torch.Tensor) -> None:
    """Run all kernels of a model but attention's on `rows` tokens of zeros, without storing keys and values."""
    x = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
    zeros = torch.zeros(rows, dtype=torch.int64)
    nowhere = torch.full((len(model.layout.windows), rows), -1)
    batch = Batch(
        input_ids=zeros, positions=zeros, slot_mapping=nowhere, seq_lens=zeros, slots=zeros,
        block_tables=zeros[None, None], starts=zeros, query_starts=zeros,
    )  # fmt: skip
    step = model.new_step(batch, pool, x.new_empty(0, model.state_size, dtype=torch.float32))
    model.enter(x)
    for i in model.span:
        layer = model.layers[i]
        if layer.attention:
            layer.attention.rehearse(x, step)
        y = layer.mlp(model.add(torch.zeros_like(x), x, layer.mlp_in).clone(), step)
    model.add(y, x, model.following(model.span[-1]))
    if model.head is not None and model.group.pipeline.last:
        model.logits(x[:1])


@torch.inference_mode()
def run_tower(worker: Worker) -> float:
    """Run the tower on a small image: its kernels are the same for all sizes.

    Returns the seconds that the largest image takes at this speed; 0 if this stage has no tower.
    """
    model = worker.model
    if not model.tower or not worker.pipeline.first:
        return 0.0
    small, large = model.tower.vision.shape(SMALL), largest_image(model)
    begun = time.perf_counter()
    model.tower(torch.zeros(*small, 3, dtype=torch.uint8, device=worker.device))
    if worker.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) * math.prod(large) / math.prod(small)


@torch.inference_mode()
def warm_up(start: Start, worker: Worker) -> tuple[float, float, float]:
    """Run every kind of step, so that all kernels are compiled before the first request, and capture graphs.

    Returns three times in seconds: what a token of a prefill takes once all is warm, what a block takes out to the
    host and back, and what `--compile` took.
    """
    compile_seconds = 0.0
    with worker.watch():
        if start.builder:
            begun = time.perf_counter()
            for rows in start.builder.rows:
                run_layers(start.model, rows, worker.pool)
            if start.config.compile:
                start.builder.wait()
                compile_seconds = time.perf_counter() - begun
        run_tower(worker)
        token_seconds = run_prompts(start, worker)
        if start.device == "cuda" and captures_graphs(start.config):
            capture(start, worker)
        swap_seconds = time_swap(worker)
    if start.guard:
        start.guard.armed = True
    if start.device == "cpu":
        machine.release()
    return token_seconds, swap_seconds, compile_seconds


def run_prompts(start: Start, worker: Worker) -> float:
    """Run prompts and decodes, with and without all that a row may ask for; returns seconds per prompt token."""
    from tqdm import tqdm  # here, because a plan does without

    count, length = warm_up_prompts(start)
    if start.config.makes_vectors:
        return run_pooled(start, worker, count, length)
    blocks = some_blocks(start, min(length + 3 + start.config.num_drafts, start.max_model_len))
    adapters = [(0, 0)] if worker.adapters else []  # of zeros
    requests: list[dict[str, Any]] = [{"penalties": (2.0, 0.0, 0.0), "num_logprobs": 0}]
    requests.append({"sampling": SamplingParams().columns, "num_logprobs": 1})
    if start.device == "cuda":  # which loads kernels at their first launch, so the last prompts are timed without
        requests.append(requests[-1])
    for fields in tqdm(requests, desc="Warming up", leave=False, disable=None):
        new = prompts(count, length, blocks, adapter=len(adapters), **fields)
        if worker.adapters:
            worker.adapters.compiles = start.guard is not None and fields is requests[0]
        begun = time.perf_counter()
        plan = StepPlan(0, rows=[(row.slot, length) for row in new], new=new, adapters=adapters)
        plan.vision = seeing(start, length) if fields is requests[0] else None
        worker.execute(plan).result()
        seconds = time.perf_counter() - begun
        worker.execute(StepPlan(1, rows=[(0, 1)])).result()
        if drafts := start.config.num_drafts:
            worker.execute(StepPlan(1, rows=[(0, 1)], propose=drafts)).result()
            worker.execute(StepPlan(1, rows=[(0, 1 + drafts)], drafts={0: drafts})).result()
    moves: dict[str, Any] = {"copies": [(0, 0)]}
    if start.model.state_size:
        moves["state_copies"] = [(0, 0)]
    if len(worker.host_states):
        moves |= {"state_out": [(0, 0)], "state_in": [(0, 0)]}
    worker.execute(StepPlan(2, released=[row.slot for row in new], **moves))
    for several, tokens in some_prompts(start) if start.guard else []:
        new = prompts(several, tokens, some_blocks(start, tokens))
        worker.execute(StepPlan(3, rows=[(row.slot, tokens) for row in new], new=new)).result()
        worker.execute(StepPlan(4, released=[row.slot for row in new]))
    if start.guard and start.group.pipeline.last:  # the head's product for many rows may be another specialization
        some_logits(start)
    return seconds / (count * length)


def seeing(start: Start, length: int) -> VisionPlan | None:
    """A step's images, where a kernel of attention is another one if tokens see one another; None: it is not."""
    vision = start.model_config.vision
    return VisionPlan(seeing={0: [(0, length)]}) if vision and vision.row.mutual else None


def some_prompts(start: Start) -> set[tuple[int, int]]:
    """Numbers of prompts and of tokens of each, with which products with weights in codes have SOME_ROWS, if a step may
    have so many; empty without such weights."""
    budget, sizes = start.config.token_budget, set()
    for rows in SOME_ROWS if start.model.coded else ():
        length = min(rows, budget, start.max_model_len - 1)
        sizes.add((min(-(-rows // length), budget // length, start.config.max_num_seqs), length))
    return sizes


def logits_rows(start: Start) -> list[int]:
    """Numbers of rows for which the head's products may be other specializations; the last is the largest."""
    most = start.config.max_samples
    return sorted({min(rows, most) for rows in (*SOME_ROWS, most)}) if start.model.coded else [most]


def some_logits(start: Start) -> torch.Tensor:
    """Logits of as many rows as a step may have, from hidden states of zeros."""
    for rows in logits_rows(start):
        hidden = torch.zeros(rows, start.model_config.hidden_size, dtype=start.model.dtype, device=start.device)
        logits = start.model.logits(hidden)
    return logits


def run_pooled(start: Start, worker: Worker, count: int, length: int) -> float:
    """Run prompts that are pooled, `count` of `length` tokens and one of one; returns seconds per prompt token."""
    for n, tokens in ((1, 1), (count, length), (count, length)):
        adapter = int(worker.adapters is not None)  # of zeros
        new = prompts(n, tokens, some_blocks(start, tokens), pooling=PoolingParams(), adapter=adapter)
        begun = time.perf_counter()
        worker.execute(StepPlan(0, rows=[(row.slot, tokens) for row in new], new=new)).result()
        seconds = time.perf_counter() - begun
    return seconds / (count * length)


def some_blocks(start: Start, tokens: int) -> list[list[int]]:
    """Tables for `tokens` tokens: the first blocks for each kind of layers, because what they hold is not used."""
    return [list(range(-(-tokens // start.config.block_size)))] * len(start.model.layout.windows)


def warm_up_prompts(start: Start) -> tuple[int, int]:
    """The number of warm-up's prompts, and of each one's tokens."""
    tokens = start.config.token_budget
    drafts = start.config.num_drafts
    after = 3 + drafts if drafts else 1  # tokens that follow a prompt, in the steps behind it
    length = max(1, min(start.max_model_len - after, tokens))
    if start.device == "cpu":  # here two blocks tell as much about speed as a long prompt, and sooner
        length = min(length, 2 * start.config.block_size)
    # `ops.linear` has one kernel for up to 64 rows and another one for more.
    return min(start.config.max_num_seqs, tokens // length, 64 // length + 1), length


@torch.inference_mode()
def capture(start: Start, worker: Worker) -> None:
    """Capture a CUDA graph of a decode step for each size that steps are padded to, the largest first.

    The graphs share their memory, because they never run at the same time. What is read afterwards are the sampled
    tokens, which each graph keeps, or before the last stage the hidden states, for which all have one buffer. Logits,
    which only log-probabilities are made of, stay where they were made until the next replay of any of the graphs.
    """
    from tqdm import tqdm  # here, because a plan does without

    rows = start.config.max_num_seqs
    pipeline, experts = start.group.pipeline, start.group.experts
    worker.graph_sizes = graph_sizes(rows)
    pool, shapes = torch.cuda.graph_pool_handle(), []
    for size in reversed(worker.graph_sizes):
        drafts = start.config.num_drafts if size <= MOST_DRAFTING else 0
        proposing = drafts > 0 and pipeline.last
        for tokens in sorted({1, 1 + drafts}):
            counts = np.full(size, tokens, dtype=np.int32)
            shape = worker.shape_of(counts, counts, counts - 1)
            for flags in product((False, True), {False, worker.adapters is not None}, {False, proposing}):
                shapes.append(shape._replace(adjusted=flags[0], adapted=flags[1], proposes=flags[2]))
    incoming_size, outgoing_size = start.model.passed_sizes
    most = max(shape.tokens for shape in shapes)
    worker.incoming = torch.zeros(most, incoming_size, dtype=start.model.dtype, device=start.device)
    outgoing = torch.zeros(most, outgoing_size, dtype=start.model.dtype, device=start.device)
    for shape in tqdm(shapes, desc="Capturing CUDA graphs", leave=False, disable=None):
        worker.state.enter_rows(np.zeros((0, 3), dtype=np.int32), np.zeros(0, dtype=np.int32), shape)
        worker.state.apply(start.ops)
        if experts:
            experts.exchange(shape.rows)
        incoming = None if pipeline.first else worker.incoming[: shape.tokens]
        # This compiles kernels, and lets libraries allocate what they cannot during a capture.
        worker.forward(StepRun(shape=shape, incoming=incoming))
        graph, run = torch.cuda.CUDAGraph(), StepRun(shape=shape, incoming=incoming)
        with torch.cuda.graph(graph, pool=pool):  # the next graph reuses the memory of all that nobody refers to
            result = worker.forward(run)  # until the capture ends, `run` holds the logits, so nothing overwrites them
            if not pipeline.last:
                result = outgoing[: shape.tokens].copy_(result)
        worker.graphs[shape] = graph, result, borrowed(run.logits) if pipeline.last else result
        del run
    sizes = piece_sizes(start.config, start.model)
    last = start.group.min(sizes[-1] if sizes else 0)  # ranks that hold other experts may have reckoned otherwise
    if sizes := [size for size in sizes if size <= last]:
        worker.pieces = PiecewiseGraphs(start.model, worker.pool, sizes, pool, worker.adapters)
    worker.rows = None  # the batch state holds the rows of the last graph
    if experts:
        experts.exchange(None)
    if isinstance(worker.proposer, Drafter):
        sizes = [size for size in worker.graph_sizes if size <= MOST_DRAFTING]
        worker.proposer.capture(worker.state, worker.pool, sizes, start.config.num_drafts, pool)


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor on a GPU that does not keep its memory, like one made by another library."""
    shape, strides = tensor.shape, tensor.stride()  # where ranks have padding, it is cut off
    size = tensor.itemsize * (1 + sum((n - 1) * apart for n, apart in zip(shape, strides, strict=True)))
    memory = {"data": (tensor.data_ptr(), False), "shape": (size,), "typestr": "|u1", "version": 3}
    view = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=memory), device=tensor.device)
    assert view.data_ptr() == tensor.data_ptr()  # it is no copy
    return view.view(tensor.dtype).as_strided(shape, strides)


def time_swap(worker: Worker) -> float:
    """Seconds that one of several blocks takes out to the host and back; 0 where a pool has no blocks."""
    count = min(4, len(worker.pool), len(worker.host_pool))
    if not count:
        return 0.0
    pairs, seconds = [(i, i) for i in range(count)], []
    for _ in range(3):  # the first round touches the host's memory for the first time, so the least time counts
        begun = time.perf_counter()
        worker.execute(StepPlan(0, swap_out=pairs, swap_in=pairs))
        if worker.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return min(seconds) / count


@torch.inference_mode()
def time_rows(start: Start, worker: Worker) -> list[tuple[int, float, float]]:
    """(rows, seconds of a step of decodes, seconds of making a draft for each); empty without drafts."""
    repeats, most, drafts = 5, min(64, start.config.max_num_seqs), start.config.num_drafts
    counts = [1 << i for i in range(most.bit_length())]
    length = 1 + 2 * repeats * len(counts)
    if not drafts or start.max_model_len <= length + drafts:
        return []
    new, timings = prompts(most, 1, some_blocks(start, length + drafts)), []
    with worker.watch():
        for count in counts:
            rows, times = [(slot, 1) for slot in range(count)], {0: math.inf, drafts: math.inf}
            for propose in [*times] * repeats:
                begun = time.perf_counter()
                worker.execute(StepPlan(0, rows=rows, new=new, propose=propose)).result()
                times[propose] = min(times[propose], time.perf_counter() - begun)
                new = []
            timings.append((count, times[0], max(0.0, times[drafts] - times[0]) / drafts))
        worker.execute(StepPlan(1, released=list(range(most))))
    return timings


def graph_sizes(most: int) -> list[int]:
    """The numbers of rows that decode steps are padded to: 1, 2, 4, the multiples of 8, and `most`."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})


def prompts(count: int, length: int, blocks: list[list[int]], **fields: Any) -> list[NewRow]:
    """New rows for `count` slots. Each is a prompt of `length` times token 0."""
    return [NewRow(slot=slot, token_ids=[0] * length, blocks=blocks, **fields) for slot in range(count)]
