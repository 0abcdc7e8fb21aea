"""Adapters in the engine, on the demo: each answer is that of the checkpoint with its adapter in the weights."""

from __future__ import annotations

import dataclasses
import shutil
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import ALL, PREFIX, ROOMY, asked, make_adapter, make_core, merge, reads_of, request, run, weights_of
from config import DEMO
from engine import LLM, SamplingParams
from forked import forked_workers, kill_after
from integrity import check_integrity
from lora.adapter import WEIGHTS
from lora.registry import state_of
from outputs import RequestOutput
from sampling_params import LoRARequest

FEW = ROOMY | {"num_gpu_blocks_override": 40, "max_model_len": 120, "schedule_conservativeness": 0.0}
SPEECH = "Enter the KING, with a torch, and speaks to the SERVANT of it.\n\n"
PROMPTS = ["What is 23 + 58?", SPEECH]
GREEDY = SamplingParams(temperature=0, max_tokens=10, logprobs=2, ignore_eos=True)
KINDS: list[dict[str, Any]] = [  # of adapters
    {"modules": (*ALL, "embed_tokens", "lm_head")}, {"rank": 1, "modules": ("q_proj", "lm_head")},
    {"rank": 16, "use_rslora": True}, {"modules": ("q_proj", "down_proj")},
    {"modules": (*ALL, "embed_tokens"), "rank_pattern": {"k_proj": 2, "layers.1.*": 12}, "alpha_pattern": {"up.*": 3}},
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of all kinds."""
    place = tmp_path_factory.mktemp("adapters")
    for i, kind in enumerate(KINDS):
        make_adapter(place / f"a{i}", i, **kind)
    return [place / f"a{i}" for i in range(len(KINDS))]


@pytest.fixture(scope="module")
def merged(folders: list[Path], make_llm: Callable[..., LLM]) -> Callable[[int], LLM]:
    """The engine of a checkpoint with an adapter in its weights; -1: without one."""
    made: dict[int, LLM] = {}

    def of(i: int) -> LLM:
        if i not in made:
            folder = merge(folders[i].parent / f"merged{i}", folders[i]) if i >= 0 else DEMO
            made[i] = LLM(str(folder), dtype="float32", device="cpu", **ROOMY)
        return made[i]

    return of


@pytest.fixture(scope="module")
def adapted(make_llm: Callable[..., LLM]) -> LLM:
    """Two slots, and rows of the host's memory for three."""
    return make_llm(**ROOMY, enable_lora=True, max_loras=2, max_cpu_loras=3)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def assert_equal(got: list[RequestOutput], want: list[RequestOutput]) -> None:
    """The same tokens, with the same log-probabilities up to rounding."""
    assert tokens(got) == tokens(want)
    for ours, theirs in zip(got, want, strict=True):
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            for here, there in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert here.keys() == there.keys()
                assert all(abs(here[token].logprob - there[token].logprob) < 2e-4 for token in here)


@pytest.fixture(scope="module")
def mixed(folders: list[Path], merged: Callable[[int], LLM]) -> tuple[list[str], list[LoRARequest | None], Any]:
    """Every prompt with every adapter and without, in turns, and what the merged checkpoints answer."""
    order = [(prompt, i) for prompt in PROMPTS for i in (*range(len(KINDS)), -1)]
    found = {i: merged(i).generate(PROMPTS, GREEDY, use_tqdm=False) for i in (*range(len(KINDS)), -1)}
    answers = [found[i][PROMPTS.index(prompt)] for prompt, i in order]
    return [prompt for prompt, _ in order], [asked(folders[i]) if i >= 0 else None for _, i in order], answers


def test_an_adapter_changes_answers(mixed: Any) -> None:
    """Else the others would prove nothing."""
    prompts, _, answers = mixed
    found = {(prompt, str(answer)) for prompt, answer in zip(prompts, tokens(answers), strict=True)}
    assert len(found) == len(prompts)


def test_one_by_one_as_the_merged_checkpoints(adapted: LLM, mixed: Any) -> None:
    """Five adapters take turns in two slots and three rows of the host's memory."""
    prompts, adapters, answers = mixed
    for prompt, adapter, answer in [*zip(prompts, adapters, answers, strict=True)][:6]:
        assert_equal(adapted.generate(prompt, GREEDY, use_tqdm=False, lora_request=adapter), [answer])


@pytest.mark.parametrize(
    "fields",
    [
        ROOMY | {"max_loras": 8},
        ROOMY | {"max_loras": 2, "max_cpu_loras": 3},
        ROOMY | {"max_loras": 1, "max_num_batched_tokens": 16},
        FEW | {"max_loras": 4, "preemption_mode": "recompute", "swap_space": 0.0},
        FEW | {"max_loras": 4, "preemption_mode": "swap", "swap_space": 0.01},
        pytest.param(ROOMY | {"max_loras": 2, "enable_chunked_prefill": False}, marks=pytest.mark.full),
        pytest.param(ROOMY | {"max_loras": 3, "enable_prefix_caching": False}, marks=pytest.mark.full),
        pytest.param(ROOMY | {"max_loras": 3, "batch_invariant": True}, marks=pytest.mark.full),
    ],
    ids=[
        "all at once",
        "crowded",
        "chunks",
        "recompute",
        "swap",
        "classic order",
        "no prefix cache",
        "batch invariant",
    ],
)
def test_all_in_one_batch_as_the_merged_checkpoints(
    make_llm: Callable[..., LLM], mixed: Any, fields: dict[str, Any]
) -> None:
    prompts, adapters, answers = mixed
    llm = make_llm(enable_lora=True, **fields)
    for _ in range(2):  # the second round finds prefixes, each of its own adapter
        assert_equal(llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapters), answers)
    check_integrity(llm.core.scheduler)
    metrics = llm.core.metrics()
    if fields["num_gpu_blocks_override"] == 400:
        assert (metrics["prefix_cache_hits_total"] > 0) == llm.core.config.enable_prefix_caching
    else:
        assert metrics["num_preemptions_total"] > 0
    assert (metrics["num_swapped_blocks_total"] > 0) == (fields.get("preemption_mode") == "swap")


def test_the_specification_gives_the_same(make_llm: Callable[..., LLM], mixed: Any) -> None:
    prompts, adapters, answers = mixed
    llm = make_llm(**ROOMY, enable_lora=True, backend="reference")
    chosen = slice(0, 6)
    assert_equal(llm.generate(prompts[chosen], GREEDY, use_tqdm=False, lora_request=adapters[chosen]), answers[chosen])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=0, use_beam_search=True, n=3, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=8, presence_penalty=1.0, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2),
    ],
    ids=["n", "beams", "penalties", "prompt_logprobs"],
)
def test_samples_and_beams_of_an_adapter(
    adapted: LLM, merged: Callable[[int], LLM], folders: list[Path], params: SamplingParams
) -> None:
    got = adapted.generate(PROMPTS * 2, params, use_tqdm=False, lora_request=[asked(folders[i // 2]) for i in range(4)])
    want = [merged(i).generate(PROMPTS, params, use_tqdm=False) for i in range(2)]
    assert_equal(got, want[0] + want[1])
    for ours, theirs in zip(got, want[0] + want[1], strict=True):
        for here, there in zip(ours.prompt_logprobs or (), theirs.prompt_logprobs or (), strict=True):
            assert here is there is None or all(abs(here[t].logprob - there[t].logprob) < 2e-4 for t in there)


def test_adapters_share_no_prefixes(make_llm: Callable[..., LLM], folders: list[Path], tmp_path: Path) -> None:
    llm = make_llm(**ROOMY, enable_lora=True)
    shutil.copytree(folders[0], tmp_path / "a")

    def hits(adapter: LoRARequest | None) -> int:
        return llm.generate(SPEECH, GREEDY, use_tqdm=False, lora_request=adapter)[0].metrics.num_cached_tokens

    assert hits(None) == hits(asked(folders[0])) == hits(asked(folders[1])) == hits(asked(tmp_path / "a")) == 0
    cached = [hits(None), hits(asked(folders[0])), hits(asked(folders[1])), hits(asked(tmp_path / "a"))]
    assert min(cached) == max(cached) > 12
    salt = {"prompt": SPEECH, "cache_salt": f"\0{state_of(str(folders[0]))}"}
    assert llm.generate(salt, GREEDY, use_tqdm=False)[0].metrics.num_cached_tokens == 0
    # Whatever it is called, a folder is the adapter.
    assert hits(LoRARequest("another name", 77, f"{folders[0]}/.")) == cached[0]


def test_the_memory_plan_counts_all_matrices(adapted: LLM) -> None:
    """Of rank 16 in float32, for each of two slots; the head is one more module than the files have."""
    worker = adapted.core.executor.worker  # type: ignore[union-attr]
    each = 4 * 16 * sum(sum(weight.shape) for weight in weights_of(DEMO).values() if weight.ndim == 2)
    assert worker.start.memory.adapters == worker.adapters.pool.nbytes == 2 * each


def test_adapters_stay_where_they_are_when_weights_are_loaded_again(
    make_llm: Callable[..., LLM], folders: list[Path], merged: Callable[[int], LLM]
) -> None:
    llm = make_llm(**ROOMY, enable_lora=True)
    for _ in range(2):
        got = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=asked(folders[1]))
        assert_equal(got, merged(1).generate(PROMPTS, GREEDY, use_tqdm=False))
        llm.core.executor.worker.load_weights("")  # type: ignore[union-attr]


def test_an_old_model_is_gone_when_new_weights_come(
    make_llm: Callable[..., LLM], folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a model in codes; so the two never take memory at once."""
    llm = make_llm(**ROOMY, enable_lora=True, quantization="int8_per_channel_weight_only")
    before = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=asked(folders[1]))
    worker = llm.core.executor.worker  # type: ignore[union-attr]
    old, fill = weakref.ref(worker.model), worker.start.fill
    seen: list[object] = []
    monkeypatch.setattr(worker.start, "fill", lambda source: (seen.append(old()), fill(source)))
    worker.load_weights("")
    assert seen == [None]
    assert_equal(llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=asked(folders[1])), before)


def test_a_folder_that_is_written_anew_is_another_adapter(
    adapted: LLM, merged: Callable[[int], LLM], folders: list[Path], tmp_path: Path
) -> None:
    for i in (0, 3):
        shutil.copytree(folders[i], tmp_path / "a", dirs_exist_ok=True)
        got = adapted.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=asked(tmp_path / "a"))
        assert_equal(got, merged(i).generate(PROMPTS, GREEDY, use_tqdm=False))


# --- what is refused --------------------------------------------------------------------------------------------------

Q = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_"
EMBED = f"{PREFIX}model.embed_tokens"


def changed(tensors: dict[str, torch.Tensor], **more: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in (tensors | more).items() if tensor is not None}


BAD: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, Any]], str]] = {
    "NaN": (lambda t: {f"{Q}A.weight": t[f"{Q}A.weight"] * float("nan")}, "q_proj.lora_A.weight has NaN or infinite"),
    "too large": (lambda t: {f"{Q}B.weight": t[f"{Q}B.weight"] + 3e38}, "q_proj.lora_B.weight has NaN or infinite"),
    "only A": (lambda t: {f"{Q}B.weight": None}, "q_proj has only A, and lacks B"),
    "shape of A": (lambda t: {f"{Q}A.weight": t[f"{Q}A.weight"][:, 1:].contiguous()}, r"it must be \[8, 192\]"),
    "shape of B": (lambda t: {f"{Q}B.weight": t[f"{Q}B.weight"][1:].contiguous()}, r"it must be \[192, 8\]"),
    "rank": (lambda t: {f"{Q}A.weight": t[f"{Q}A.weight"][:4].contiguous()}, r"has shape \[4, 192\]; it must be"),
    "integers": (lambda t: {f"{Q}A.weight": t[f"{Q}A.weight"].to(torch.int8)}, "has dtype torch.int8; it must be"),
    "another layer": (
        lambda t: {Q.replace(".0.", ".99.") + "A.weight": t[f"{Q}A.weight"].clone()},
        "is of a module that the model has not"),
    "shape of the embeddings": (
        lambda t: {f"{EMBED}.lora_embedding_A": torch.zeros(8, 9)}, r"lora_embedding_A has shape .*be \[8, 1024\]"),
    "embeddings as a linear layer": (
        lambda t: {f"{EMBED}.lora_A.weight": torch.zeros(8, 192)}, "cannot have an adapter here"),
    "a linear layer as embeddings": (
        lambda t: {f"{PREFIX}lm_head.lora_embedding_A": torch.zeros(8, 192)}, "cannot have an adapter here"),
    "more embeddings": (
        lambda t: {f"{EMBED}.base_layer.weight": torch.zeros(1030, 192)}, "has 1030 rows, the model has 1024, and"),
    "fewer embeddings": (
        lambda t: {f"{EMBED}.base_layer.weight": torch.zeros(900, 192)}, "has 900 rows, .* is 1024 tokens"),
    "a copy of a layer": (
        lambda t: {Q.removesuffix("lora_") + "base_layer.weight": torch.zeros(2, 2)}, "base_layer.* trained whole"),
    "a norm": (
        lambda t: {f"{PREFIX}model.norm.lora_A.weight": torch.zeros(8, 192)}, "cannot have an adapter here"),
    "magnitudes": (lambda t: {f"{Q}magnitude_vector": torch.zeros(9)}, r"shape \[9\]; it must be \[192\]"),
    "a saved module": (lambda t: {f"{PREFIX}lm_head.weight": torch.zeros(9)}, r"shape \[9\]; it must be \[9, 192\]"),
    "a saved norm": (lambda t: {f"{PREFIX}model.norm.weight": torch.zeros(192)}, "and the head may be trained whole"),
    "a head's bias alone": (lambda t: {f"{PREFIX}lm_head.bias": torch.zeros(1024)}, "only .* lacks whole"),
    "tokens that none names": (
        lambda t: {f"{EMBED}.token_adapter.trainable_tokens_delta": torch.zeros(2, 192)}, "token_indices None"),
    "another method": (lambda t: {f"{Q.removesuffix('lora_')}hada_w1_a": torch.zeros(9)}, "no name that PEFT gives"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(folders: list[Path]) -> dict[str, torch.Tensor]:
    return load_file(folders[0] / WEIGHTS)


def refusal(llm: LLM, folder: Path) -> str:
    with pytest.raises(ValueError) as refused:
        llm.generate(["Hello", "there"], GREEDY, use_tqdm=False, lora_request=asked(folder))
    assert not llm.core.scheduler.requests and "\n" not in str(refused.value) and len(str(refused.value)) < 700
    return str(refused.value)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_adapter_is_refused_in_a_line(
    adapted: LLM, folders: list[Path], good: dict[str, torch.Tensor], tmp_path: Path, name: str
) -> None:
    change, message = BAD[name]
    shutil.copytree(folders[0], tmp_path, dirs_exist_ok=True)
    save_file(changed(good, **change(good)), tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=message):
        raise ValueError(refusal(adapted, tmp_path))


def test_a_file_that_is_none_is_refused_in_a_line(adapted: LLM, folders: list[Path], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path, dirs_exist_ok=True)
    whole = (folders[0] / WEIGHTS).read_bytes()
    for data in (b"", whole[:-100], whole[:20], b"\x80\x04pickle", b"\xff" * 64):
        (tmp_path / WEIGHTS).write_bytes(data)
        assert WEIGHTS in refusal(adapted, tmp_path)
    save_file({}, tmp_path / WEIGHTS)
    assert "has no LoRA matrices" in refusal(adapted, tmp_path)


def test_after_refusals_all_others_are_served(adapted: LLM, mixed: Any, tmp_path: Path) -> None:
    """Nothing of a bad adapter is left in the row that it was read into."""
    prompts, adapters, answers = mixed
    make_adapter(tmp_path / "high", 0, rank=17)
    make_adapter(tmp_path / "bad", 0)
    tensors = load_file(tmp_path / "bad" / WEIGHTS)
    last = [*tensors][-1]
    save_file(tensors | {last: tensors[last] * float("inf")}, tmp_path / "bad" / WEIGHTS)
    assert "max_lora_rank is 16" in refusal(adapted, tmp_path / "high")
    assert "NaN or infinite" in refusal(adapted, tmp_path / "bad")
    assert_equal(adapted.generate(prompts[:6], GREEDY, use_tqdm=False, lora_request=adapters[:6]), answers[:6])


@pytest.mark.parametrize(
    "fields", [{}, {"async_scheduling": True}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}]
)
def test_an_adapter_whose_products_overflow_is_named_and_others_go_on(
    folders: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    """1e37 is a number in its file, and infinite a product later. The log has one line, however many requests end."""
    name = f"overflows{len(str(fields))}"  # a line is written once in a process
    tensors = make_adapter(tmp_path / name, 0)
    save_file({key: x if "lora_A" in key else x * 0 + 1e37 for key, x in tensors.items()}, tmp_path / name / WEIGHTS)
    core = make_core(**fields)
    neighbours = [("with", folders[0], {}), ("without", None, {}), ("drawn", None, {"temperature": 1.0, "seed": 4})]
    for key, folder, options in neighbours:
        core.add(request(key, folder, **options), at_once=True)
    alone = run(core)[0]
    for turn in range(2):
        bad = [(f"bad{turn}", {}), (f"drawn{turn}", {"temperature": 1.0, "n": 3, "logprobs": 2, "top_p": 0.5})]
        bad += [(f"scored{turn}", {"max_tokens": 0, "prompt_logprobs": 1})]
        for key, folder, options in neighbours[:2]:
            core.add(request(key, folder, **options), at_once=True)
        for key, options in bad:
            core.add(request(key, tmp_path / name, **options), at_once=True)
        core.add(request("drawn", None, **neighbours[2][2]))
        answers, errors, _ = run(core)
        check_integrity(core.scheduler)
        assert errors.keys() == {key for key, _ in bad}
        assert all(f"adapter '{name}' has made numbers that are not finite" in error for error in errors.values())
        assert {key: answers[key] for key in alone} == alone and not any(answers[key] for key, _ in bad)
    assert sum(name in record.getMessage() and record.levelname == "WARNING" for record in caplog.records) == 1


def test_an_adapter_of_another_model_is_refused(adapted: LLM, tmp_path: Path) -> None:
    base = Path(__file__).parent.parent / "data" / "llamas" / "qwen2-sharded-tied"
    tensors = {}
    for file in base.glob("model*.safetensors"):
        tensors |= load_file(file)
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    make_adapter(tmp_path / "a", 0, base=tmp_path / "base")
    assert "; it must be [" in refusal(adapted, tmp_path / "a")


def test_requests_for_adapters_that_cannot_be(llm: LLM, adapted: LLM, folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lora_request is 'a0'; it needs an engine with enable_lora"):
        llm.generate("Hello", GREEDY, use_tqdm=False, lora_request=asked(folders[0]))
    with pytest.raises(ValueError, match="lora_request is 'a0'; it must be a LoRARequest or None"):
        adapted.generate("Hello", GREEDY, use_tqdm=False, lora_request="a0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lora_request has 2 entries for 1 prompts"):
        adapted.generate(["Hello"], GREEDY, use_tqdm=False, lora_request=[None, None])
    with pytest.raises(ValueError, match=r"lora_path is '.*nowhere'; its adapter_config.json cannot be read: No such"):
        adapted.generate("Hello", GREEDY, use_tqdm=False, lora_request=LoRARequest("a", 1, str(tmp_path / "nowhere")))


# --- rows of the host's memory ----------------------------------------------------------------------------------------


def test_crowded_requests_wait_in_order_and_go_on(folders: list[Path]) -> None:
    core = make_core(max_loras=1, max_cpu_loras=1)
    for name, folder in {"a": 0, "b": 1, "none": None, "c": 2, "a again": 0}.items():
        core.add(request(name, folders[folder] if folder is not None else None), at_once=True)
    assert list(core.adapters.waiting) == ["b", "c", "a again"]  # that one too: it would hold up those before it
    answers, errors, ended = run(core)
    assert not errors and ended == ["a", "none", "b", "c", "a again"]
    assert answers["a"] == answers["a again"] and len({str(answers[name]) for name in "abc"}) == 3


def test_crowded_requests_are_aborted_refused_and_passed(folders: list[Path], tmp_path: Path) -> None:
    core = make_core(max_loras=1, max_cpu_loras=1)
    make_adapter(tmp_path / "gone", 9)
    for name, folder in {"a": folders[0], "b": folders[1], "c": tmp_path / "gone", "d": folders[3]}.items():
        core.add(request(name, folder), at_once=True)
    with pytest.raises(ValueError, match="'b' is in use"):
        core.add(request("b", None))
    core.step()
    shutil.rmtree(tmp_path / "gone")
    core.abort("b")
    _, errors, ended = run(core)
    assert ended == ["a", "c", "d"] and errors.keys() == {"c"} and "cannot be read: No such file" in errors["c"]
    core.add(request("e", folders[0]), at_once=True)
    core.add(request("f", folders[1]), at_once=True)
    core.abort("e")
    core.abort("f")
    assert run(core) == ({}, {}, []) and not core.adapters.waiting and not core.has_work()


def test_crowded_requests_sleep_with_the_workers(folders: list[Path]) -> None:
    core = make_core(max_loras=1, max_cpu_loras=1)
    core.add(request("a", folders[0]), at_once=True)
    core.add(request("b", folders[1]), at_once=True)
    core.step()
    core.workers.sleep()
    while core.has_work():  # what is in flight lands, and then there is nothing to do
        core.step()
    core.workers.wake_up()
    assert run(core)[2] == ["a", "b"]


def test_crowded_requests_are_passed_by_some_and_not_for_ever(folders: list[Path]) -> None:
    """Streams of requests for the two adapters that have rows never end; another one gets its turn."""
    core = make_core(max_loras=2, max_cpu_loras=2, max_num_seqs=6)
    ended: list[str] = []
    folder = str(folders[0])
    for number in range(60):
        for adapter in range(2):
            core.add(request(f"{adapter} {number}", folders[adapter], max_tokens=6), at_once=True)
        if number == 3:
            for name, adapter in {"third": 2, "fourth": 3}.items():
                core.add(request(name, folders[adapter], max_tokens=2), at_once=True)
            assert [*core.adapters.crowded[""].values()] == [str(folders[2]), str(folders[3])]
            assert core.adapters.add("explicit", folder) and core.adapters.add("explicit", folder + "/")
        for reading in [*core.adapters.reading.values()]:  # a slow machine would run more steps meanwhile
            core.adapters._read_to_end(reading)
        for _ in range(2):
            ended += [output.request_id for output in core.step() if output.finished]
    _, errors, _ = run(core)
    assert not errors and "third" in ended and "fourth" in ended
    passed = ended[: ended.index("third")]
    assert "1 4" in passed and "0 10" not in passed  # the least recently used one has to leave


def test_who_walks_through_many_adapters_keeps_no_other_client_out(folders: list[Path], tmp_path: Path) -> None:
    """Clients take turns at a row of the host's memory; one that shares an adapter comes in with its first turn."""
    core = make_core(max_loras=1, max_cpu_loras=1)

    def ask(client: str, *adapters: int) -> None:
        for i in adapters:
            if not (folder := tmp_path / str(i)).exists():
                shutil.copytree(folders[i % 4], folder)
            core.add(dataclasses.replace(request(f"{client} {i}", folder), client=client))

    ask("walks", *range(10))
    ask("other", 10, 11, 2)
    ask("third", 12, 9)
    core.abort("third 9")
    _, errors, ended = run(core)
    assert not errors and not core.adapters.crowded
    assert ended == [
        "walks 0",
        "walks 1",
        "other 10",
        "third 12",
        "walks 2",
        "other 2",
        "other 11",
        *(f"walks {i}" for i in range(3, 10)),
    ]


def test_more_adapters_than_rows_and_slots_take_turns(folders: list[Path]) -> None:
    """The least recently used one gives up its row, and one in use never does."""
    core = make_core(max_loras=1, max_cpu_loras=2)
    loaded = reads_of(core)
    alone: dict[int, list[int]] = {}
    for i in (0, 1, 0, 2, 0, 1):
        core.add(request(f"{i}", folders[i]), at_once=True)
        answer = run(core)[0][f"{i}"]
        assert alone.setdefault(i, answer) == answer
    assert loaded == ["a0", "a1", "a2", "a1"]


# --- workers that die -------------------------------------------------------------------------------------------------


@pytest.fixture
def forked() -> Iterator[None]:
    with forked_workers():
        yield


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_new_workers_have_the_adapters(make_llm: Callable[..., LLM], mixed: Any, forked: None, size: int) -> None:
    prompts, adapters, answers = mixed
    fields = ROOMY | {"distributed_executor_backend": "mp", "tensor_parallel_size": size}
    llm = make_llm(enable_lora=True, max_loras=2, max_cpu_loras=3, **fields)
    try:
        kill_after(llm.core, [3, 30])
        assert_equal(llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapters), answers)
        assert llm.core.metrics()["num_worker_restarts_total"] == 2
        check_integrity(llm.core.scheduler)
    finally:
        llm.core.close()


def test_an_adapter_that_new_workers_cannot_read_ends_its_requests_alone(
    folders: list[Path], forked: None, tmp_path: Path
) -> None:
    """Also those whose grammar is not ready yet; and its row is another's then."""
    core = make_core(max_loras=2, max_cpu_loras=2, distributed_executor_backend="mp")
    try:
        shutil.copytree(folders[1], tmp_path / "gone")
        core.add(request("kept", folders[0], max_tokens=20), at_once=True)
        core.add(request("gone", tmp_path / "gone", max_tokens=20), at_once=True)
        core.step()
        second = dataclasses.replace(request("late", tmp_path / "gone"), params=SamplingParams(max_tokens=4))
        core.add(second, at_once=True)
        waiting = core.scheduler.requests["late"]
        core.scheduler.abort("late")
        waiting.grammar = Future()  # that is never compiled
        core.grammars.wait(waiting)
        core.add(request("next", folders[2]), at_once=True)  # crowded
        shutil.rmtree(tmp_path / "gone")
        kill_after(core, [1])
        answers, errors, _ = run(core)
        assert errors.keys() == {"gone", "late"} and all("cannot be read" in error for error in errors.values())
        assert len(answers["kept"]) == 20 and len(answers["next"]) == 8 and not core.grammars.waiting
        core.add(request("again", folders[2]), at_once=True)
        assert run(core)[0]["again"] == answers["next"]
    finally:
        core.close()
