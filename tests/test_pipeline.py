"""Pipeline stages: which layers each has, the same tokens as without them, and lanes whose steps overlap."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cpu.ops
import reference
from batch_state import BatchState, Rows
from config import EngineConfig
from device.loader import fill_dummy
from device.memory import split_layers, stage_layers
from engine import LLM, SamplingParams
from fake_worker import Engine, expected
from forked import forked_workers
from integrity import check_integrity
from model import Batch, Transformer
from model_config import ModelConfig
from models.kv_layout import layout_of, part_of
from parallel import MOST_SENT, Group, Pipeline, Sampled
from plan import StepPlan
from random_checkpoints import GEMMA4, shape
from worker_functions import count_sent

STORY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPTS = ["ROMEO:\n", "Enter the KING, with his lords and", "To be, or not to be, that is", "What is 23 + 58?"] * 2
MIXED = [
    STORY, SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, use_beam_search=True, n=2, max_tokens=12),
    SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True, logprobs=2, repetition_penalty=1.3),
] * 2  # fmt: skip
STARVED = {"num_gpu_blocks_override": 32, "block_size": 8, "max_model_len": 128, "schedule_conservativeness": 0.0}
KINDS = {  # of layers: windows, states, latents, inputs of their own, keys of other layers
    "plain": {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 5, "tie_word_embeddings": True},
    "windows": {
        "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "sliding_window": 9, "head_dim": 16,
        "query_pre_attn_scalar": 24, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2
        + ["sliding_attention"], "tie_word_embeddings": True},
    "inputs": {
        "architectures": ["Gemma4ForCausalLM"], **GEMMA4, "hidden_size_per_layer_input": 8, "num_hidden_layers": 6,
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3},
}  # fmt: skip


def model_config(tmp_path: Path, **raw: Any) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(shape() | raw))
    return ModelConfig.from_folder(str(tmp_path))


def new_model(config: ModelConfig, stage: int = 0, layers: list[range] | None = None) -> Transformer:
    """A model, or one of its stages, with made-up weights."""
    pipeline = Pipeline(stage, len(layers), layers[stage]) if layers else Pipeline()
    model = Transformer(config, reference, "cpu", torch.float32, 64, Group(pipeline=pipeline))
    fill_dummy(model, 3)
    return model


def run(model: Transformer, incoming: torch.Tensor | None = None) -> torch.Tensor:
    """What the model makes of a prompt of 21 tokens and of one token more."""
    kinds, size = len(model.layout.windows), 16
    pool = torch.zeros(4 * kinds, model.layout.size * size)
    states = torch.zeros(2, model.state_size)
    tables = torch.arange(4 * kinds, dtype=torch.int32).view(kinds, 2, 2)
    state = BatchState(2, 64, 4, size, 99, "cpu", kinds)
    state.block_tables[:, :, :2] = tables
    slots, starts = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 1, 22], dtype=torch.int32)
    state.token_ids[:, :21] = torch.arange(42, dtype=torch.int32).view(2, 21)
    inputs = reference.prepare_inputs(
        state.token_ids, state.num_computed, state.block_tables, slots, starts, 22, size
    )  # fmt: skip
    ids, positions, slot_mapping, lens = inputs
    batch = Batch(
        input_ids=ids, positions=positions, slot_mapping=slot_mapping, seq_lens=lens, slots=slots,
        block_tables=state.block_tables, num_decodes=1, starts=starts, query_starts=starts[1:] - 1, max_query_len=21,
        longer=[(21, 2)],
    )  # fmt: skip
    return model.forward(batch, pool, states, incoming)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_hand_on_what_the_whole_model_computes(tmp_path: Path, kind: str) -> None:
    """To the bit: between two stages nothing is rounded."""
    config = model_config(tmp_path, **KINDS[kind])
    whole = run(new_model(config))
    model = Transformer(config, reference, "meta", torch.float32, 64, Group())
    most = 2 if kind == "inputs" else 3
    for stages in range(2, most + 1):
        layers = split_layers(EngineConfig(pipeline_parallel_size=stages), model)
        x, parts = None, [new_model(config, stage, layers) for stage in range(stages)]
        for part in parts:
            x = run(part, x)
        assert torch.equal(x, whole)
        assert len({part.num_parameters() for part in parts}) == 1  # each knows of the whole checkpoint,
        held = [sum(piece.target.numel() for name in part.parameters().values() for piece in name.pieces)
                for part in parts]  # fmt: skip
        assert sum(held) < 2 * parts[0].num_parameters() and max(held) < parts[0].num_parameters()  # and holds a part


@pytest.mark.parametrize(
    ("given", "stages", "want"),
    [
        ({"num_hidden_layers": 8}, 4, [2, 2, 2, 2]),
        ({"num_hidden_layers": 8, "vocab_size": 5000}, 2, [7, 1]),  # the head is as large as six layers
        ({"num_hidden_layers": 3}, 3, [1, 1, 1]),
    ],
)
def test_layers_are_divided_by_bytes(tmp_path: Path, given: dict[str, Any], stages: int, want: list[int]) -> None:
    config = model_config(tmp_path, architectures=["LlamaForCausalLM"], **given)
    found = stage_layers(EngineConfig(pipeline_parallel_size=stages), config, reference, torch.float32)
    assert [len(layers or ()) for layers in found] == want
    assert [i for layers in found for i in layers or ()] == list(range(given["num_hidden_layers"]))


def test_layers_are_divided_as_asked_for(tmp_path: Path) -> None:
    config = model_config(tmp_path, architectures=["LlamaForCausalLM"], num_hidden_layers=4)
    partitioned = EngineConfig(pipeline_parallel_size=2, pipeline_layer_partition="1,3")
    assert stage_layers(partitioned, config, reference, torch.float32) == [range(1), range(1, 4)]
    for fields, message in (
        (
            {"pipeline_parallel_size": 2, "pipeline_layer_partition": "2,3"},
            r"is '2,3'; .* has 4 layers, and a stage may",
        ),
        ({"pipeline_parallel_size": 5}, r"is 5; .* has 4 layers, which can be divided in at most 4 stages"),
        ({"pipeline_layer_partition": "3"}, r"is '3'; .* has 4 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            stage_layers(EngineConfig(**fields), config, reference, torch.float32)
    for fields, message in (
        ({"pipeline_layer_partition": "1,3"}, r"'1,3'; these are 2 counts; .* pipeline_parallel_size is 1"),
        ({"pipeline_layer_partition": "1;3"}, r"'1;3'; it must be counts of layers, like 12,16"),
        ({"pipeline_parallel_size": 0}, "must be at least 1"),
        ({"pipeline_parallel_size": 8, "max_num_seqs": 4}, "must be at most max_num_seqs, 4"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"}, "'uni', which has one worker"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig(**fields)


def test_a_stage_has_the_kinds_of_the_whole_model_and_smaller_pages() -> None:
    windows, shapes = [9, 9, 9, 9, 9, 0] * 4, [(2, 2, 16)] * 24
    whole = layout_of(windows, shapes)
    halves = [part_of(whole, shapes, range(begin, begin + 12)) for begin in (0, 12)]
    for half, layers in zip(halves, (range(12), range(12, 24)), strict=True):
        assert half.windows == whole.windows and half.shapes == whole.shapes
        assert half.total * 2 == whole.total and half.size <= whole.size / 2 + 64
        places = [half.places[i] for i in layers]
        assert len(set(places)) == 12 and all(
            half.windows[kind] == windows[i] for i, (kind, _) in zip(layers, places, strict=True)
        )
        assert all(place < half.layers[kind] for kind, place in places)
    assert part_of(whole, shapes, [0]).layers.count(0) > 0  # no layer of some kinds, whose blocks it does not fill


def rows_of(slots: Any, counts: Any) -> Rows:
    """Rows of which each samples so many tokens."""
    sampling = np.repeat(np.arange(len(slots)), counts)
    return Rows([], {}, None, sampling, np.array(slots)[sampling], sampling[:0], [])


def test_the_first_stage_waits_for_no_more_tokens_than_it_needs() -> None:
    state = BatchState(4, 32, 2, 16, 99, "cpu")
    sampled, came = Sampled(state, Pipeline(0, 2)), iter([torch.tensor([71, 72]), torch.tensor([73, 74])])
    sampled.pipeline.receive = lambda *args: next(came).int()

    def take(*slots: int) -> list[int]:
        sampled.take(reference, [(slot, 1) for slot in slots])
        return state.token_ids[:, 0].tolist()

    for slots in ([0, 1], [2, 3]):
        sampled.follow(rows_of(slots, [1, 1]), torch.empty(0))
    assert take(1) == [71, 72, 0, 0]
    assert take(0, 1) == [71, 72, 0, 0]  # nothing is to come of these
    sampled.forget([3])  # another sequence has the slot now, and its token must stay
    state.token_ids[3, 0] = 5
    assert take(3) == [71, 72, 0, 5]
    assert take(2) == [71, 72, 73, 5] and not sampled.to_come
    assert state.num_known.tolist() == [1, 1, 1, 0]


def test_earlier_stages_take_what_the_last_one_has_taken() -> None:
    """Each step as late as may be; a slot changes hands meanwhile."""
    random, size, most = np.random.default_rng(7), 4, 3
    first, last = (BatchState(size, 99, 2, 16, 99, "cpu", drafts=most) for _ in range(2))
    (sampled, sending), on_its_way = (Sampled(s, Pipeline(i, 2)) for i, s in enumerate((first, last))), deque()
    sending.pipeline.send, sampled.pipeline.receive = on_its_way.append, lambda *args: on_its_way.popleft()
    for state in (first, last):
        state.num_known.fill_(2)
        state.stop_bits[:, 0] = 1 << 7
    numbers = "num_known", "num_computed", "num_drafts"
    for step in range(60):
        slots = np.sort(random.choice(size, 2, replace=False)).astype(np.int32)
        if step == 30:
            sampled.forget([3])
            for state in (first, last):
                for name, number in zip(numbers, (5, 4, 0), strict=True):
                    getattr(state, name)[3] = number
                state.token_ids[3, :5] = torch.arange(5)
        sampled.take(cpu.ops, [(slot, 1) for slot in slots])
        for name in numbers:
            assert torch.equal(getattr(first, name)[slots], getattr(last, name)[slots])
        for slot in slots:  # drafts included
            end = int((last.num_known + last.num_drafts)[slot])
            assert torch.equal(first.token_ids[slot, :end], last.token_ids[slot, :end])
        counts = 1 + random.integers(0, most + 1, 2)
        starts = torch.from_numpy(np.array([0, *counts.cumsum()], dtype=np.int32))
        ids = torch.from_numpy(random.integers(6, 9, int(starts[-1])))
        on_device, none = torch.from_numpy(slots), torch.zeros_like(starts)
        for state, bounds in ((first, none), (last, starts)):
            tensors = state.token_ids, state.num_known, state.num_computed, on_device, starts, bounds
            news = cpu.ops.post_update(*tensors, ids, state.stop_bits, None, state.num_drafts, most)
        drafts = torch.from_numpy(random.integers(6, 9, (2, most)).astype(np.int32))
        drafts[:, int(random.integers(0, most + 1)) :] = -1
        cpu.ops.put_drafts(last.token_ids, last.num_known, last.num_drafts, on_device, drafts)
        for side in (sampled, sending):
            side.follow(rows_of(slots, counts), news)
    assert int(last.num_known.min()) > 20 and on_its_way


def test_lanes_have_as_many_sequences_and_take_turns() -> None:
    engine = Engine(pipeline_parallel_size=3, depth=3, max_num_seqs=12, max_num_batched_tokens=12)
    for i in range(9):
        engine.add(f"{i}", [1 + i, 2, 3], max_tokens=6 if i < 3 else 30, ignore_eos=True)
    assert [len(engine.step().new) for _ in range(3)] == [3, 3, 3]
    assert [engine.scheduler.lanes.turn for _ in range(6) if engine.step()] == [1, 2, 0, 1, 2, 0]
    while len(engine.finished) < 3:  # the first lane loses its sequences, and gets some of the others'
        engine.step()
    assert [len(engine.step().rows) for _ in range(9)][3:] == [2] * 6
    while engine.scheduler.has_work():
        engine.step()
    for i in range(9):
        assert engine.outputs[f"{i}"] == expected([1 + i, 2, 3], 6 if i < 3 else 30, 64, ignore_eos=True)


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    with forked_workers():
        yield


def tokens(llm: LLM, count: int = len(PROMPTS)) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS[:count], MIXED[:count], use_tqdm=False)
    check_integrity(llm.core.scheduler)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def answers(forked: None, make_llm: Callable[..., LLM]) -> list[list[list[int]]]:
    return tokens(make_llm())


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **STARVED, "preemption_mode": "swap"},
            marks=pytest.mark.full,
        ),
        pytest.param({"pipeline_parallel_size": 4, **STARVED, "async_scheduling": False}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_stages_give_the_tokens_of_one(
    make_llm: Callable[..., LLM], answers: list[list[list[int]]], fields: dict[str, Any]
) -> None:
    llm = make_llm(threads=1, **fields)
    assert tokens(llm) == answers and tokens(llm) == answers  # the second time prefixes are cached
    metrics = llm.core.metrics()
    assert (metrics["num_preemptions_total"] > 0) == ("num_gpu_blocks_override" in fields)
    assert metrics["num_worker_restarts_total"] == 0 and metrics["prefix_cache_hits_total"] > 0
    llm.core.close()


@pytest.mark.parametrize(
    "kills",  # by step, the stage
    [{10: 1}, pytest.param({2: 2, 30: 0, 55: 1}, marks=pytest.mark.full)],
    ids=["", "each of three"],
)
def test_a_stage_that_is_killed_is_replaced(
    make_llm: Callable[..., LLM], answers: list[list[list[int]]], kills: dict[int, int]
) -> None:
    llm = make_llm(threads=1, pipeline_parallel_size=max(kills.values()) + 1)
    core, submit, counts = llm.core, llm.core.executor.submit, itertools.count()

    def submit_and_kill(plan: StepPlan) -> None:
        submit(plan)
        if (stage := kills.get(next(counts))) is not None:
            os.kill(core.executor.processes[stage].pid, signal.SIGKILL)

    core.executor.submit = submit_and_kill
    assert tokens(llm, 4) == answers[:4] and core.metrics()["num_worker_restarts_total"] == len(kills)
    core.close()


def test_a_stage_lets_go_of_what_the_next_one_has(forked: None, make_llm: Callable[..., LLM]) -> None:
    """gloo says so only to a stage that waits for it."""
    llm = make_llm(threads=1, pipeline_parallel_size=2, distributed_executor_backend="mp")
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False)
    assert max(llm.collective_rpc(count_sent)) <= MOST_SENT * 2 + 1
    llm.core.close()


def test_requests_of_one_token_leave_nothing_on_the_way(make_llm: Callable[..., LLM], answers: list[list[list[int]]]):
    """No later step of theirs takes what the last stage has sampled, which would wait for that."""
    llm = make_llm(threads=1, pipeline_parallel_size=2, step_timeout=20.0)
    one = SamplingParams(temperature=0, max_tokens=1)
    first = [llm.generate("to be", one, use_tqdm=False)[0].outputs[0].token_ids for _ in range(30)]
    assert first == [make_llm().generate("to be", one, use_tqdm=False)[0].outputs[0].token_ids] * 30
    assert llm.core.metrics()["num_worker_restarts_total"] == 0
    llm.core.close()


def spans(path: Path) -> Iterator[tuple[str, float, float]]:
    """The lane, begin and end of every phase of a trace in which a worker runs its layers, in microseconds."""
    events = json.loads(path.read_text())
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    for event in events:
        if event["ph"] == "X" and event["name"] == "model":
            yield lanes[event["tid"]], event["ts"], event["ts"] + event["dur"]


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.full), 8])
def test_stages_work_at_the_same_time_for_different_sequences(
    forked: None, make_llm: Callable[..., LLM], tmp_path: Path, count: int
) -> None:
    """Of one sequence the first stage must wait for what the last one samples."""
    llm = make_llm(threads=1, pipeline_parallel_size=2, trace=str(tmp_path / "trace"))
    llm.generate([[5 + i, 6, 7] for i in range(count)], SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
    llm.core.close()
    busy: dict[str, list[tuple[float, float]]] = {"worker 0": [], "worker 1": []}
    for lane, begin, end in spans(tmp_path / "trace"):
        if lane in busy:
            busy[lane].append((begin, end))
    first, second = busy.values()
    overlap = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)
    assert first and second and (overlap > 0) == (count > 1)
