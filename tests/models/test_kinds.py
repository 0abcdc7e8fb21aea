"""Layers that see different windows: what shares a page, what a sequence holds, and that its tokens are right."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from config import EngineConfig
from core import EngineCore
from device.memory import blocks_per_seq, fit_pool
from device.startup import print_plan
from fake_worker import EOS, VOCAB, Engine, expected, prompt, sample_seed
from integrity import check_integrity
from model_config import ModelConfig
from models.kv_layout import layout_of, most_blocks
from observe.sanitizer import SanitizerError
from plan import EngineCoreRequest, StepResult
from sampling_params import SamplingParams
from scheduler import Scheduler
from sequence import SequenceGroup
from worker_steps import SHAPE

MIXED = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 11, "use_sliding_window": True,
    "sliding_window": 9, "max_window_layers": 4,
}  # fmt: skip


def pattern(layers: int, window: int, period: int) -> list[int]:
    """Every `period`-th layer sees all tokens, the others a window."""
    return [window if (i + 1) % period else 0 for i in range(layers)]


# --- what shares a page -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "layers", "kinds"),
    [
        ([0] * 30, 30, (0,)),
        ([4096] * 32, 32, (4096,)),
        (pattern(26, 512, 6), 4, (0, *[512] * 6)),  # Gemma 3
        (pattern(34, 1024, 6), 5, (0, *[1024] * 6)),
        (pattern(48, 1024, 6), 8, (0, *[1024] * 5)),
        (pattern(62, 1024, 6), 10, (0, *[1024] * 6)),
        (pattern(24, 128, 2), 12, (0, 128)),  # GPT-OSS
        (pattern(32, 4096, 4), 8, (0, *[4096] * 3)),  # Cohere 2
        (pattern(48, 8192, 4), 12, (0, *[8192] * 3)),  # Llama 4
        ([0] * 28 + [4096] * 4, 7, (0, 0, 0, 0, 4096)),  # a Qwen2
    ],
)
def test_the_layout_that_wastes_the_least(windows, layers, kinds):
    layout = layout_of(windows)
    assert (layout.size, layout.windows) == (layers, kinds)


@given(st.lists(st.sampled_from((0, 1, 7, 4096)), min_size=1, max_size=80))
def test_every_layer_has_a_place_of_its_own(windows):
    layout = layout_of(windows)
    assert len(set(layout.places)) == len(windows) == len(layout.places)
    assert {kind for kind, _ in layout.places} == set(range(len(layout.windows)))
    for window, (kind, place) in zip(windows, layout.places, strict=True):
        assert layout.windows[kind] == window and 0 <= place < layout.layers[kind]
    seen = [window or 2**31 for window in layout.windows]
    assert seen == sorted(seen, reverse=True)


GEMMA4 = {  # keys and values of layers with a window, and of those that see all
    "31B": ((2, 16, 256), (2, 4, 512)), "26B": ((2, 8, 256), (2, 2, 512)), "E2B": ((2, 1, 256), (2, 1, 512)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "windows", "layers", "waste"),
    [
        ("31B", pattern(60, 1024, 6), (10, *[5] * 10), 0),
        ("26B", pattern(30, 1024, 6), (6, *[3] * 9), 0.1),
        ("E2B", pattern(15, 512, 5), (3, 6, 6), 0),  # the other 20 layers have no keys of their own
    ],
)
def test_layers_with_different_keys_share_pages_of_equal_bytes(model, windows, layers, waste):
    """Gemma 4: layers that see all have fewer and larger heads, and more or fewer of them fit into a page."""
    layout = layout_of(windows, [GEMMA4[model][window == 0] for window in windows])
    assert layout.layers == layers
    held = layout.size * len(layout.windows)
    assert layout.total <= held <= layout.total * (1 + waste)


@given(
    st.lists(st.sampled_from([(0, (2, 1, 24)), (0, (2, 3, 16)), (7, (2, 2, 12)), (7, (1, 1, 40))]), min_size=1,
             max_size=40)
)  # fmt: skip
def test_layers_with_different_keys_have_places_of_their_own(layers):
    windows, shapes = zip(*layers, strict=True)
    layout = layout_of(windows, shapes)
    used = set()
    for window, shape, (kind, place) in zip(windows, shapes, layout.places, strict=True):
        assert (layout.windows[kind], layout.shapes[kind]) == (window, shape) and layout.size % shape[-1] == 0
        assert (place + 1) * math.prod(shape) <= layout.size and place < layout.layers[kind]
        used.add((kind, place))
    assert len(used) == len(layers)


# --- what is held -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "window"), [(26, 512), (34, 1024), (48, 1024), (62, 1024)])
def test_gemma_3_holds_a_fifth_of_what_full_attention_takes(layers, window):
    layout, length = layout_of(pattern(layers, window, 6)), 32768
    config = EngineConfig(block_size=16, max_num_seqs=2, max_num_batched_tokens=2048)
    scheduler = Scheduler(config, 8192, length, VOCAB, [EOS], windows=layout.windows)
    request = SequenceGroup("a", [1] * (length - 40), SamplingParams(max_tokens=40, ignore_eos=True))
    scheduler.add(request)
    seq, peak = request.seqs[0], 0
    while seq.num_tokens < length - 1:
        plan = scheduler.schedule()
        done = seq.num_computed >= length - 40
        held = 8192 - scheduler.blocks.num_free
        peak = max(peak, held)
        scheduler.update(plan, StepResult(plan.step, [1 if done else -1]))
        check_integrity(scheduler)
    assert held * layout.size <= layers * (length // 16) / 5
    assert held < peak <= blocks_per_seq(config, layout.windows, length - 1)
    assert sum(most_blocks(layout.windows, length, 1, 16)) >= held


def test_a_prompt_runs_in_a_pool_that_could_not_hold_it_in_every_kind():
    engine = Engine(num_blocks=85, max_model_len=216, windows=(0, 9, 9, 5))
    ids = [1 + i * i % 40 for i in range(200)]
    for name in "ab":
        engine.add(name, ids, max_tokens=12, ignore_eos=True)
    engine.run()
    assert engine.outputs["a"] == engine.outputs["b"] == expected(ids, 12, 216, ignore_eos=True)
    with pytest.raises(ValueError, match="KV blocks of 4; the whole pool has 70"):
        Engine(num_blocks=70, max_model_len=216, windows=(0, 9, 9, 5)).add("a", ids, max_tokens=12)


def test_prompts_that_are_under_way_have_their_windows_reserved():
    """The second one would take the blocks that the first one's windows need for its next chunk."""
    engine = Engine(num_blocks=30, max_model_len=60, windows=(0, 12, 12), schedule_conservativeness=1.0)
    first = engine.add("first", prompt(40), max_tokens=2, ignore_eos=True)
    engine.step()
    engine.serve("second", prompt(40, 2), max_tokens=2, ignore_eos=True)
    assert first.num_preemptions == 0
    assert engine.outputs["second"] == expected(prompt(40, 2), 2, 60, ignore_eos=True)


# --- what is found again ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "cached"),
    [
        ([], 39),
        ([(1, 0), (1, 5), (2, 7)], 39),  # nobody sees them any more
        ([(0, 0)], 0),
        ([(0, 8)], 32),
        ([(2, 9)], 36),
        ([(1, 8)], 32),  # the last window of the first kind must be there, up to the block before
        ([(1, 8), (2, 7)], 28),
    ],
)
def test_a_hit_needs_the_blocks_that_are_seen_from_its_end(gone, cached):
    engine = Engine(windows=(0, 7, 3), max_num_seqs=4, max_num_batched_tokens=4)
    first = engine.add("first", prompt(40), max_tokens=1)
    hashes = first.hashes
    engine.run()
    for kind, column in gone:
        engine.scheduler.blocks.forget(hashes[column] + engine.scheduler.space.marks[kind])
    again = engine.serve("again", prompt(40), max_tokens=5, ignore_eos=True)
    assert again.group.num_cached == cached
    assert engine.outputs["again"] == expected(prompt(40), 5, 64, ignore_eos=True)


def test_windows_come_back_from_host_memory():
    engine = Engine(num_blocks=20, max_model_len=48, num_host_blocks=60, windows=(0, 7), preemption_mode="recompute")
    for name, start in (("first", 1), ("other", 9), ("more", 17)):
        engine.serve(name, prompt(40, start), max_tokens=2, ignore_eos=True)
    again = engine.add("again", prompt(40), max_tokens=2, ignore_eos=True)
    plan = engine.step()
    assert again.group.num_cached == 39 and 10 < len(plan.swap_in) <= 13
    engine.run()
    assert engine.outputs["again"] == engine.outputs["first"]


def test_samples_share_the_prompt_of_every_kind():
    engine = Engine(windows=(0, 7))
    engine.add("a", prompt(14), n=4, max_tokens=10, ignore_eos=True)
    engine.step()
    entered = engine.step()
    assert len(entered.new) == 3 and len(entered.copies) == 6 and len(entered.rows) == 4
    first, second, third = (row.blocks for row in entered.new)
    assert [table[:3] for table in first] == [table[:3] for table in second] == [table[:3] for table in third]
    engine.run()
    for index, tokens in engine.answers["a"].items():
        assert tokens == expected(prompt(14), 10, 64, ignore_eos=True, seed=sample_seed(index))


# --- a model ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def make_core(tmp_path_factory: pytest.TempPathFactory):
    """Makes an engine with a sanitizer on a tiny model of random weights and two kinds of layers."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "config.json").write_text(json.dumps(SHAPE | MIXED))

    def make(**fields) -> EngineCore:
        options = {"model": str(folder), "load_format": "dummy", "dtype": "float32", "device": "cpu", "threads": 1}
        options |= {"block_size": 4, "max_num_seqs": 8, "max_model_len": 64, "max_num_batched_tokens": 64, "seed": 3}
        options |= {"schedule_conservativeness": 0.0, "sanitize_kv": True, "swap_space": 0.001}
        return EngineCore(EngineConfig(**options | fields))

    return make


def run(core: EngineCore, tag: str = "", deaths: int = 0) -> dict[tuple[str, int], list[int]]:
    """Single sequences, samples and beams; the first steps may bring no results, because the worker is gone."""
    got: dict[tuple[str, int], list[int]] = {}
    for i in range(9):
        kind = ({}, {"n": 3}, {"use_beam_search": True, "n": 2, "temperature": 0.0})[i % 3]
        params = SamplingParams(**{"max_tokens": 14, "ignore_eos": True, "seed": i} | kind)
        core.add(EngineCoreRequest(f"{tag}{i}", [1 + (i + j * j) % 90 for j in range(8 + 3 * i)], params))
    steps = 0
    while core.has_work():
        outputs, steps = core.step(), steps + 1
        if deaths and steps % 9 == 0:
            deaths -= 1
            worker = core.executor.worker
            worker.pool.fill_(torch.nan)
            worker.host_pool.fill_(torch.nan)
            core.scheduler.start_over(True)
            core.plans.clear()
            core.executor.steps.clear()
        for output in outputs:
            got.setdefault((output.request_id.removeprefix(tag), output.index), []).extend(output.token_ids)
    check_integrity(core.scheduler)
    return got


@pytest.fixture(scope="module")
def cold(make_core) -> dict[tuple[str, int], list[int]]:
    """The tokens that an engine gives at first, and then, when the prompts are in its cache."""
    core = make_core()
    assert core.facts["windows"] == [0, 9, 9]
    assert core.executor.worker.model.layout.layers == (4, 4, 4)  # there is room for 12 layers
    tokens = run(core)
    assert run(core, "again") == tokens and core.metrics()["prefix_cache_hits_total"] > 50
    return tokens


@pytest.mark.parametrize(
    ("fields", "deaths"),
    [
        pytest.param({"max_num_batched_tokens": 8}, 0, marks=pytest.mark.full),
        pytest.param({"enable_prefix_caching": False}, 0, marks=pytest.mark.full),
        pytest.param(
            {"num_gpu_blocks_override": 48, "preemption_mode": "recompute", "max_num_batched_tokens": 16},
            0,
            marks=pytest.mark.full,
        ),
        ({"num_gpu_blocks_override": 48, "preemption_mode": "swap", "max_num_batched_tokens": 16}, 0),
        ({"sanitize_kv": False, "max_num_batched_tokens": 16}, 3),
    ],
    ids=["chunked", "without a cache", "recomputed", "swapped", "deaths"],
)
def test_tokens_are_the_same_however_the_blocks_went(make_core, cold, fields, deaths):
    other = make_core(**fields)
    assert run(other, deaths=deaths) == cold
    if "num_gpu_blocks_override" in fields:
        assert other.metrics()["num_preemptions_total"] > 1


def test_the_sanitizer_knows_kinds(make_core):
    """A sequence that reads another kind's block is told, though the tokens are its own."""
    core = make_core(async_scheduling=False)
    core.add(EngineCoreRequest("a", list(range(1, 11)), SamplingParams(max_tokens=20, ignore_eos=True)))
    core.step()
    core.step()
    state, sanitizer = core.executor.worker.state, core.executor.worker.sanitizer
    state.block_tables[1, 0] = state.block_tables[0, 0]
    assert sanitizer is not None
    with pytest.raises(SanitizerError, match=r"request 'a': block \d+, offset \d does not hold"):
        while core.has_work():
            core.step()


# --- its memory -------------------------------------------------------------------------------------------------------


def test_blocks_of_a_pool_with_windows():
    config = EngineConfig(block_size=16, max_num_seqs=8, max_num_batched_tokens=64)
    windows = (0, 32, 32)
    assert blocks_per_seq(config, windows, 1600) == 100 + 2 * 7
    assert fit_pool(config, windows, 10**6, 1600) == (8 * 114, 1600)
    assert fit_pool(config, windows, 50, 1600) == (50, 36 * 16)
    assert fit_pool(config, windows, 12, 1600) == (12, 4 * 16)


def test_the_plan_tells_what_windows_save(capsys, tmp_path):
    windows = {"sliding_window": 512, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    shape = SHAPE | windows | {"num_hidden_layers": 4, "max_position_embeddings": 32768}
    shape["architectures"] = ["MinistralForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = EngineConfig(str(tmp_path), max_num_batched_tokens=512, max_num_seqs=4)
    print_plan(config, ModelConfig.from_folder(config.model), 8.0)
    text = capsys.readouterr().out
    assert "layers by what they see: 1 all tokens, 3 the latest 512 tokens" in text
