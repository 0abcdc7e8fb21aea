"""Answers about images are the same however an engine computes them, and its tower runs no more than it must."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters import make_adapter, merge
from engine import LLM, BeamSearchParams, SamplingParams
from forked import forked_workers, kill_after
from integrity import check_integrity
from models.tower import Tower
from outputs import RequestOutput
from sampling_params import LoRARequest
from seeing_folder import PLACES, picture, seeing_folder

SIZES = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": 4, "max_model_len": 100, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=5)
TEXTS = "Look at {} and at {}: what is it?", "{}{} To be, or", "See {} here, and {}"


def prompt(name: str, seed: int, text: str = TEXTS[0]) -> dict[str, Any]:
    """Two images of different sizes, and text."""
    images = [picture(seed, 40, 24), picture(seed + 1, 16, 30)]
    return {"prompt": text.replace("{}", PLACES[name]), "multi_modal_data": {"image": images}}


def work(name: str) -> tuple[list[Any], list[SamplingParams]]:
    prompts = [prompt(name, i, TEXTS[i % 3]) for i in range(4)] + ["What is 23 + 58?", prompt(name, 1), prompt(name, 9)]
    beams = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True).sampling_params()
    others = [replace(SEEDED, n=2, logprobs=1), replace(GREEDY, prompt_logprobs=0), SEEDED, GREEDY, beams]
    return prompts, [GREEDY, SEEDED, *others]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def run(llm: LLM, name: str, **more: Any) -> list[list[list[int]]]:
    answers = tokens(llm.generate(*work(name), use_tqdm=False, **more))
    check_integrity(llm.core.scheduler)
    return answers


class Seeing:
    """A model's folder, and the answers of its engine that has one request at a time and caches nothing."""

    def __init__(self, shared: Path, name: str):
        self.name, self.folder = name, seeing_folder(shared, name)
        with self.llm(enable_prefix_caching=False) as llm:
            self.answers = [tokens(llm.generate(*one, use_tqdm=False))[0] for one in zip(*work(name), strict=True)]

    def llm(self, **fields: Any) -> LLM:
        return LLM(self.folder, **SIZES | fields)


@pytest.fixture(
    scope="module", params=["qwen2.5-vl", "llava", "gemma3", pytest.param("qwen3-vl", marks=pytest.mark.full)]
)
def seeing(shared: Path, request: pytest.FixtureRequest) -> Seeing:
    return Seeing(shared, request.param)


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    with forked_workers():
        yield


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The pixels of each image that has gone through the tower."""
    made, call = list[bytes](), Tower.__call__
    monkeypatch.setattr(Tower, "__call__", lambda *args: made.append(args[1].numpy().tobytes()) or call(*args))
    return made


FEW = {"num_gpu_blocks_override": 40, "schedule_conservativeness": 0.0, "enable_prefix_caching": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 2}
WAYS: dict[str, dict[str, Any]] = {  # a budget of 16 tokens keeps the rows of one image
    "chunks": {"max_num_batched_tokens": 16},
    "recompute": FEW | {"preemption_mode": "recompute"},
    "swap": FEW | {"preemption_mode": "swap", "swap_space": 0.01},
    "ngram": {"speculative_config": NGRAM, "max_num_batched_tokens": 48},
    "draft model": {"speculative_config": DRAFTS},
    "no prefix cache": {"enable_prefix_caching": False},
    "batch invariant": {"batch_invariant": True, "max_num_batched_tokens": 16},
    "small chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 5, "enable_prefix_caching": False},
    "classic order": {"enable_chunked_prefill": False},
    "recompute in chunks": FEW | {"preemption_mode": "recompute", "max_num_batched_tokens": 16},
    "sanitized": {"sanitize_kv": True, "max_num_batched_tokens": 32, "async_scheduling": True},
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 16},
    "stages that swap": FEW | {"pipeline_parallel_size": 2, "preemption_mode": "swap", "swap_space": 0.01},
}
FULL = [*WAYS][5:]
NEVER = {  # with tokens that see one another, or in the second case with two kinds of layers
    "batch invariant": "batch_invariant takes no images on a CPU",
    "draft model": "they must see as many as each other",
    "small chunks": "9 tokens of image 0 see one another; a step has 1 for them",
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.full] * (way in FULL)) for way in WAYS])
def test_same_answers_however_they_are_computed(seeing: Seeing, way: str) -> None:
    fields = dict(WAYS[way])
    if drafts := fields.get("speculative_config"):
        fields["speculative_config"] = json.dumps(drafts | ({"model": seeing.folder} if drafts is DRAFTS else {}))
    if seeing.name == "gemma3" and "num_gpu_blocks_override" in fields:  # the layers with windows have their own
        fields["num_gpu_blocks_override"] = 60
    if seeing.name == "gemma3" and way in NEVER:
        with pytest.raises(ValueError, match=NEVER[way]), seeing.llm(**fields) as llm:
            run(llm, seeing.name)
        return
    with seeing.llm(**fields) as llm:
        llm.core.scheduler.drafting.row_seconds = ()  # drafts cost nothing, so there are some
        assert run(llm, seeing.name) == seeing.answers
        metrics = llm.get_metrics()
        assert (metrics["num_preemptions_total"] > 0) == ("num_gpu_blocks_override" in fields)
        assert (metrics["num_swapped_blocks_total"] > 0) == (fields.get("preemption_mode") == "swap")
        assert not drafts or metrics["spec_decode_num_accepted_tokens_total"] > 0


def test_towers_run_once_for_each_image(seeing: Seeing, towers: list[bytes]) -> None:
    """Also while several requests need it, and not at all for cached prefixes."""
    with seeing.llm() as llm:
        del towers[:]  # those of the start
        assert run(llm, seeing.name) == seeing.answers and len(towers) == len({*towers}) == 10
        llm.core.scheduler.images.forget()  # no step of a prompt that ends with a text needs their rows
        again = [prompt(seeing.name, 0), prompt(seeing.name, 3)]
        outputs = llm.generate(again, GREEDY, use_tqdm=False)
        assert tokens(outputs) == [seeing.answers[i] for i in (0, 3)] and len(towers) == 10
        assert all(output.num_cached_tokens > 30 for output in outputs)
        # Of a prompt that differs in its second image, what is before that is cached.
        other = again[0] | {"multi_modal_data": {"image": [picture(0, 40, 24), picture(90, 16, 30)]}}
        (output,) = llm.generate(other, GREEDY, use_tqdm=False)
        assert 12 <= output.num_cached_tokens < 32 and len(towers) == 11
        with seeing.llm() as fresh:
            assert tokens(fresh.generate(other, GREEDY, use_tqdm=False)) == tokens([output]) != seeing.answers[:1]


@pytest.mark.full
def test_prompts_whose_text_sees_what_follows(shared: Path) -> None:
    """They share blocks with equal prompts alone."""
    folder, texts = seeing_folder(shared, "paligemma"), ["What is it?", "What is it? No", "To be", "What is it?"]
    prompts: list[Any] = [
        {"prompt": f"<image>{text}", "multi_modal_data": {"image": picture(i % 3, 20, 30)}}
        for i, text in enumerate(texts)
    ]
    params = [GREEDY, SEEDED, replace(SEEDED, n=2, logprobs=1), replace(SEEDED, n=3)]
    with LLM(folder, **SIZES, enable_prefix_caching=False) as llm:
        answers = [tokens(llm.generate(*one, use_tqdm=False))[0] for one in zip(prompts, params, strict=True)]
        with pytest.raises(ValueError, match="the prompt has 2 images; this model takes one"):
            llm.generate(prompts[0] | {"multi_modal_data": {"image": [picture(1, 9, 9)] * 2}}, GREEDY)
        with pytest.raises(ValueError, match="prompt_logprobs is given"):
            llm.generate(prompts[0], replace(GREEDY, prompt_logprobs=0))
    few = FEW | {"num_gpu_blocks_override": 30, "preemption_mode": "recompute"}
    for fields in {}, few, {"max_num_batched_tokens": 40}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}:
        with LLM(folder, **SIZES | fields) as llm:
            for cached in (0, 20):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert tokens(outputs) == answers
                assert fields is few or outputs[0].num_cached_tokens >= cached
            assert (llm.get_metrics()["num_preemptions_total"] > 0) == (fields is few)


def test_after_a_sleep_and_other_weights(seeing: Seeing, shared: Path) -> None:
    folder = seeing_folder(shared, seeing.name, anew=True)
    with seeing.llm() as llm, LLM(folder, **SIZES) as other:
        others = run(other, seeing.name)
        assert run(llm, seeing.name) == seeing.answers != others
        for level in (1, 2):
            llm.sleep(level)
            assert not llm.core.executor.worker.images
            llm.wake_up()
            assert run(llm, seeing.name) == seeing.answers
        for source, answers in ((folder, others), (seeing.folder, seeing.answers)):
            llm.update_weights(source)
            assert run(llm, seeing.name) == answers


def test_adapters_of_the_text(shared: Path, tmp_path: Path) -> None:
    """Whose prefixes are their own."""
    seeing = Seeing(shared, "qwen2.5-vl")
    make_adapter(tmp_path / "adapter", 1, modules=("q_proj", "o_proj"), base=seeing.folder)
    with LLM(str(merge(tmp_path / "merged", tmp_path / "adapter", seeing.folder)), **SIZES) as llm:
        adapted = run(llm, seeing.name)
    adapter, towers = (LoRARequest(name, i, str(tmp_path / name)) for i, name in enumerate(("adapter", "tower"), 1))
    make_adapter(tmp_path / "tower", 1, modules=("qkv",), base=seeing.folder)
    with seeing.llm(enable_lora=True, max_num_batched_tokens=16) as llm:
        for turns in ([adapter, None] * 3 + [adapter], [None, adapter] * 3 + [None]):
            pairs = zip(turns, adapted, seeing.answers, strict=True)
            assert run(llm, seeing.name, lora_request=turns) == [one if lora else two for lora, one, two in pairs]
        with pytest.raises(ValueError, match="change how the model sees; take them out, or serve the text alone"):
            llm.generate("a", lora_request=towers)


@pytest.mark.full
def test_after_workers_that_were_killed(seeing: Seeing) -> None:
    with seeing.llm(distributed_executor_backend="mp", max_num_batched_tokens=32) as llm:
        kill_after(llm.core, [3, 8, 31])
        for _ in range(2):
            assert run(llm, seeing.name) == seeing.answers
        assert llm.core.metrics()["num_worker_restarts_total"] == 3


@pytest.mark.full
def test_answers_equal_transformers(seeing: Seeing, tmp_path: Path) -> None:
    """From the image's file to the text."""
    paths = [tmp_path / "0.png", tmp_path / "1.png"]
    for i, path in enumerate(paths):
        picture(i, *((75, 41), (16, 30))[i]).save(path)
    request = prompt(seeing.name, 0) | {"multi_modal_data": {"image": [path.read_bytes() for path in paths]}}
    script = Path(__file__).with_name("answer_oracle.py")
    command = [sys.executable, "-I", script, seeing.folder, request["prompt"], *paths]  # -I: see tests/oracle.py
    want = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=tmp_path).stdout)
    with seeing.llm() as llm:
        (output,) = llm.generate(request, replace(GREEDY, max_tokens=30), use_tqdm=False)
    (answer,) = output.outputs
    assert {"prompt": output.prompt_token_ids, "tokens": answer.token_ids, "text": answer.text} == want
