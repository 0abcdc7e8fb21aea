"""Answers to prompts with images are the same however an engine computes them, and towers run no more than needed."""

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
from worker import Worker

SIZES = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": 4, "max_model_len": 100, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=5)
TEXTS = "Look at {} and at {}: what is it?", "{}{} To be, or", "See {} here, and {}"


def prompt(name: str, seed: int, text: str = TEXTS[0]) -> dict[str, Any]:
    """Two images of different sizes, with text before, between and after."""
    images = [picture(seed, 40, 24), picture(seed + 1, 16, 30)]
    return {"prompt": text.format(PLACES[name], PLACES[name]), "multi_modal_data": {"image": images}}


def work(name: str) -> tuple[list[Any], list[SamplingParams]]:
    prompts = [prompt(name, i, TEXTS[i % 3]) for i in range(4)] + ["What is 23 + 58?", prompt(name, 1), prompt(name, 9)]
    beams = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True).sampling_params()
    several = replace(SEEDED, n=2, logprobs=1)
    return prompts, [GREEDY, SEEDED, several, replace(GREEDY, prompt_logprobs=0), SEEDED, GREEDY, beams]


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


@pytest.fixture(scope="module", params=["qwen2.5-vl", "llava", pytest.param("qwen3-vl", marks=pytest.mark.full)])
def seeing(shared: Path, request: pytest.FixtureRequest) -> Seeing:
    return Seeing(shared, request.param)


@pytest.fixture
def forked() -> Iterator[None]:
    with forked_workers():
        yield


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The pixels of each image that has gone through the tower."""
    made, call = list[bytes](), Tower.__call__
    monkeypatch.setattr(
        Tower, "__call__", lambda tower, pixels: made.append(pixels.numpy().tobytes()) or call(tower, pixels)
    )
    return made


FEW = {"num_gpu_blocks_override": 40, "schedule_conservativeness": 0.0, "enable_prefix_caching": False}
NGRAM, DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}, {"num_speculative_tokens": 2}
WAYS: dict[str, dict[str, Any]] = {  # a budget of 16 tokens keeps the rows of one image
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 16},
    "recompute": FEW | {"preemption_mode": "recompute"},
    "swap": FEW | {"preemption_mode": "swap", "swap_space": 0.01},
    "ngram": {"speculative_config": NGRAM, "max_num_batched_tokens": 48},
    "draft model": {"speculative_config": DRAFTS},
    "batch invariant": {"batch_invariant": True, "max_num_batched_tokens": 16},
    "small chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 5, "enable_prefix_caching": False},
    "classic order": {"enable_chunked_prefill": False},
    "recompute in chunks": FEW | {"preemption_mode": "recompute", "max_num_batched_tokens": 16},
    "sanitized": {"sanitize_kv": True, "max_num_batched_tokens": 32, "async_scheduling": True},
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 16},
    "stages that swap": FEW | {"pipeline_parallel_size": 2, "preemption_mode": "swap", "swap_space": 0.01},
}
FULL = [*WAYS][7:]


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.full] * (way in FULL)) for way in WAYS])
def test_same_answers_however_they_are_computed(seeing: Seeing, forked: None, way: str) -> None:
    fields = dict(WAYS[way])
    if drafts := fields.get("speculative_config"):
        own = {} if drafts is NGRAM else {"method": "draft_model", "model": seeing.folder}
        fields["speculative_config"] = json.dumps(drafts | own)
    with seeing.llm(**fields) as llm:
        llm.core.scheduler.drafting.row_seconds = ()  # as if drafts cost nothing
        assert run(llm, seeing.name) == seeing.answers
        metrics = llm.get_metrics()
        assert (metrics["num_preemptions_total"] > 0) == ("num_gpu_blocks_override" in fields)
        assert (metrics["num_swapped_blocks_total"] > 0) == (fields.get("preemption_mode") == "swap")
        assert (metrics["spec_decode_num_draft_tokens_total"] > 0) == bool(drafts)


def test_towers_run_once_for_each_image(seeing: Seeing, towers: list[bytes]) -> None:
    """Also while several requests need it, and not at all for cached prefixes."""
    with seeing.llm(num_gpu_blocks_override=900) as llm:  # which all prefixes fit into
        del towers[:]  # those of the start
        assert run(llm, seeing.name) == seeing.answers and len(towers) == len({*towers}) == 10
        llm.collective_rpc(forget_images)  # no step needs their rows
        prompts, params = work(seeing.name)
        for i in (
            2,
            3,
        ):  # these would compute tokens of images again: the last one of the prompt, and for prompt_logprobs
            prompts[i], params[i] = prompts[0], params[0]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers = seeing.answers[:2] + seeing.answers[:1] * 2 + seeing.answers[4:]
        assert tokens(outputs) == answers and len(towers) == 10
        assert all(output.num_cached_tokens > 20 for output in outputs[:2])
        # Of a prompt that differs in its second image, what is before that is cached.
        other, _ = work(seeing.name)
        other = other[0] | {"multi_modal_data": {"image": [picture(0, 40, 24), picture(90, 16, 30)]}}
        (output,) = llm.generate(other, GREEDY, use_tqdm=False)
        assert 12 <= output.num_cached_tokens < 32 and len(towers) == 11
        with seeing.llm() as fresh:
            assert tokens(fresh.generate(other, GREEDY, use_tqdm=False)) == tokens([output]) != seeing.answers[:1]


def forget_images(worker: Worker) -> None:
    worker.images.clear()


def test_after_a_sleep_and_other_weights(seeing: Seeing, shared: Path, towers: list[bytes]) -> None:
    folder = seeing_folder(shared, seeing.name, seed=8)
    with seeing.llm() as llm, LLM(folder, **SIZES) as other:
        del towers[:]  # those of the starts
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
    assert len(towers) == 10 * 6


def test_adapters_of_the_text(shared: Path, tmp_path: Path) -> None:
    """Whose prefixes are their own."""
    seeing = Seeing(shared, "qwen2.5-vl")
    make_adapter(tmp_path / "adapter", 1, modules=("q_proj", "o_proj"), base=seeing.folder)
    with LLM(str(merge(tmp_path / "merged", tmp_path / "adapter", seeing.folder)), **SIZES) as llm:
        adapted = run(llm, seeing.name)
    adapter = LoRARequest("a", 1, str(tmp_path / "adapter"))
    with seeing.llm(enable_lora=True, max_num_batched_tokens=16) as llm:
        for i in (0, 1):
            turns = [adapter if (i + k) % 2 else None for k in range(7)]
            want = [(adapted if lora else seeing.answers)[k] for k, lora in enumerate(turns)]
            assert run(llm, seeing.name, lora_request=turns) == want


@pytest.mark.full
def test_after_workers_that_were_killed(seeing: Seeing, forked: None) -> None:
    with seeing.llm(distributed_executor_backend="mp", max_num_batched_tokens=32) as llm:
        kill_after(llm.core, [2, 7, 30])
        for _ in range(2):
            assert run(llm, seeing.name) == seeing.answers
        assert llm.core.metrics()["num_worker_restarts_total"] == 3


@pytest.mark.full
def test_answers_equal_transformers(seeing: Seeing, tmp_path: Path) -> None:
    """From the image's file to the text."""
    paths = [tmp_path / f"{i}.png" for i in range(2)]
    for i, path in enumerate(paths):
        picture(i, *((75, 41), (16, 30))[i]).save(path)
    text = TEXTS[0].format(PLACES[seeing.name], PLACES[seeing.name])
    script = Path(__file__).with_name("answer_oracle.py")
    command = [sys.executable, "-I", script, seeing.folder, text, *paths]  # -I: see tests/oracle.py
    want = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=tmp_path).stdout)
    with seeing.llm() as llm:
        request = {"prompt": text, "multi_modal_data": {"image": [path.read_bytes() for path in paths]}}
        (output,) = llm.generate(request, replace(GREEDY, max_tokens=30), use_tqdm=False)
    assert output.prompt_token_ids == want["prompt"] and output.outputs[0].token_ids == want["tokens"]
    assert output.outputs[0].text == want["text"]
