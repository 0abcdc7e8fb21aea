"""Beam search: its choice by itself on toy models, and the engine's beams against transformers' on tiny checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from config import EngineConfig
from engine import EngineCore
from fake_worker import driven
from integrity import check_integrity
from plan import EngineCoreRequest, EngineOutput
from random_checkpoints import BEAMS, Checkpoints
from random_checkpoints import NEW_OF_BEAMS as NEW
from random_checkpoints import SEARCHED as CASES
from sampling_params import SamplingParams
from scheduling.beam_search import BeamAnswer, beam_search, num_candidates

Model = Callable[[Sequence[int]], list[float]]  # output so far -> log-probability of each token


def toy(vocab: int, seed: int) -> Model:
    """A model of random log-probabilities, which looks back at the last two tokens."""

    @functools.cache
    def row(last: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{seed} {last}")
        return fixed(*(math.exp(rng.gauss(0, 2)) for _ in range(vocab)))([])

    return lambda output: row(tuple(output[-2:]))


def fixed(*weights: float) -> Model:
    """A model that gives its tokens probabilities like `weights`, whatever came before."""
    row = [math.log(weight / sum(weights)) for weight in weights]
    return lambda output: row


class Search(NamedTuple):
    """The arguments of `beam_search`."""

    width: int
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: bool | str = False


def drive(search: Search, model: Model) -> tuple[list[BeamAnswer], int]:
    """The answers of a search, and how many steps it took."""
    steps: list[list[list[int]]] = []

    def noted(output: list[int]) -> list[float]:
        steps[-1:] = [*steps[-1:], [output]] if not steps or len(output) > len(steps[-1][0]) else [[*steps[-1], output]]
        return model(output)

    answers = driven(beam_search(*search), noted, num_candidates(search.width, search.stop_ids))
    for outputs in steps:
        assert len(set(map(tuple, outputs))) == len(outputs) <= search.width
    return answers, len(steps)


def by_the_letter(model: Model, search: Search) -> tuple[list[tuple[float, tuple[int, ...]]], int]:
    """transformers' `_beam_search` for one prompt, line by line in lists of (score, tokens), with its made-up beams of
    -1e9; returns the answers and the number of steps."""
    width, penalty, early = search.width, search.length_penalty, search.early_stopping

    def top(count: int, beams: list) -> list:
        return sorted(beams, key=lambda beam: -beam[0])[:count]

    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *[(-1e9, ())] * (width - 1)]
    finished: list[tuple[float, tuple[int, ...], bool]] = [(-1e9, (), False)] * width
    for length in range(1, search.max_tokens + 1):
        every = [(score + value, (*o, token)) for score, o in running for token, value in enumerate(model(o))]
        candidates = top(max(2, 1 + len(search.stop_ids)) * width, every)
        ends = [o[-1] in search.stop_ids or length == search.max_tokens for _, o in candidates]
        running = top(width, [(score - 1e9 * end, o) for (score, o), end in zip(candidates, ends, strict=True)])
        done = [end and place < width for place, end in enumerate(ends)]
        finished = top(
            width,
            finished
            + [(s / length**penalty - 1e9 * (not d), o, d) for (s, o), d in zip(candidates, done, strict=True)],
        )
        all_finished = all(is_finished for _, _, is_finished in finished)
        reach = search.max_tokens if early == "never" and penalty > 0 else length
        worst = finished[-1][0] if all_finished else -1e9
        if all(ends) or running[0][0] / reach**penalty <= worst or (all_finished and early is True):
            return [(score, o) for score, o, _ in finished], length
    raise AssertionError("all candidates end at max_tokens")


PENALTIES = st.sampled_from([-2.0, -1.0, -0.3, 0.0, 0.5, 1.0, 2.0, 3.0])
EARLY = st.sampled_from([True, False, "never"])


SEARCHES = given(
    data=st.data(), seed=st.integers(0, 10**6), width=st.integers(1, 5), stops=st.integers(0, 3),
    max_tokens=st.integers(1, 12), penalty=PENALTIES, early=EARLY)  # fmt: skip


def check_search(data, seed, width, stops, max_tokens, penalty, early):
    vocab = data.draw(st.integers(max(2, width + stops), 14))  # fewer tokens, and transformers makes beams up
    stop_ids = frozenset(random.Random(seed).sample(range(vocab), stops))
    search, model = Search(width, max_tokens, stop_ids, penalty, early), toy(vocab, seed)
    answers, steps = drive(search, model)
    expected, expected_steps = by_the_letter(model, search)
    assert [tuple(answer.tokens) for answer in answers] == [tokens for _, tokens in expected]
    assert [answer.score for answer in answers] == pytest.approx([score for score, _ in expected])
    assert [answer.stopped for answer in answers] == [tokens[-1] in stop_ids for _, tokens in expected]
    assert steps == expected_steps


@pytest.mark.parametrize("count", [150, pytest.param(400, marks=pytest.mark.long)])
def test_search_goes_by_the_letter(count):
    settings(max_examples=count)(SEARCHES(check_search))()


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), vocab=st.integers(1, 4), stops=st.integers(0, 3), max_tokens=st.integers(1, 4),
       penalty=PENALTIES, early=EARLY)  # fmt: skip
def test_search_wide_enough_finds_everything(seed, vocab, stops, max_tokens, penalty, early):
    """With room for every output there is, the answers are all of them in order, whatever else is set."""
    stop_ids, model = frozenset(range(min(stops, vocab))), toy(vocab, seed)
    everything = []
    for length in range(1, max_tokens + 1):
        for output in itertools.product(range(vocab), repeat=length):
            stopped = output[-1] in stop_ids
            if stop_ids.isdisjoint(output[:-1]) and (stopped or length == max_tokens):
                logprob = sum(model(output[:i])[token] for i, token in enumerate(output))
                everything.append((logprob / length**penalty, list(output), stopped))
    answers, _ = drive(Search(vocab**max_tokens + len(everything), max_tokens, stop_ids, penalty, early), model)
    everything.sort(key=lambda answer: -answer[0])
    assert [(answer.tokens, answer.stopped) for answer in answers] == [answer[1:] for answer in everything]
    assert [answer.score for answer in answers] == pytest.approx([score for score, _, _ in everything])


@settings(max_examples=100)
@given(data=st.data(), seed=st.integers(0, 10**6), vocab=st.integers(1, 6), max_tokens=st.integers(1, 6),
       penalty=PENALTIES, early=EARLY)  # fmt: skip
def test_as_many_answers_as_beams(data, seed, vocab, max_tokens, penalty, early):
    """However many of the tokens end a beam, if the vocabulary is as large as the search is wide."""
    width, stops = data.draw(st.integers(1, vocab)), data.draw(st.integers(0, vocab))
    found, _ = drive(Search(width, max_tokens, frozenset(range(stops)), penalty, early), toy(vocab, seed))
    assert len({tuple(answer.tokens) for answer in found}) == len(found) == width


def early_model(output: Sequence[int]) -> list[float]:
    """Both first choices may end at once; who goes on twice is almost certain of the rest."""
    rows = {0: (0.40, 0.25, 0.2, 0.15), 1: (0.3, 0.3, 0.2, 0.2), 2: (0.01, 0.01, 0.97, 0.01)}
    return [math.log(p) for p in rows[min(len(output), 2)]]


@pytest.mark.parametrize(("early", "steps"), [(True, 1), (False, 1), ("never", 8)])
def test_early_stopping(early, steps):
    """Two answers after one step: more can come only for who compares at full length."""
    found, taken = drive(Search(2, 8, frozenset({0, 1}), 1.0, early), early_model)
    assert taken == steps and len(found) == 2 and (found[0].tokens == [0]) == (early != "never")


def step(search: Generator, *nexts: tuple[list[int], list[float]]) -> list[list[int]]:
    """The beams that go on."""
    if not nexts:
        return next(search)
    return search.send([*nexts])


def test_end_outside_of_the_best_is_dropped():
    """A candidate that ends counts only among the best `width`."""
    search = beam_search(2, 2, {2})
    step(search)
    assert step(search, ([0, 1, 2, 3], [-1.0, -1.1, -1.2, -1.3])) == [[0], [1]]
    with pytest.raises(StopIteration) as end:
        step(search, ([0], [-9.0]), ([0], [-9.5]))
    assert [answer.tokens for answer in end.value.value] == [[0, 0], [1, 0]]


def test_ties_go_to_the_earlier_beam_and_the_earlier_token():
    search = beam_search(3, 5, {9})
    step(search)
    assert step(search, ([1, 2, 3], [-2.0] * 3)) == [[1], [2], [3]]
    nexts = [([4, 9], [-1.0, -1.0]), ([5, 9], [-1.0, -1.0]), ([6, 7], [-1.0, -1.0])]
    assert step(search, *nexts) == [[1, 4], [2, 5], [3, 6]]


def test_fewer_beams_than_width():
    """Of three tokens two go on: two beams, then four of eight; nothing is made up."""
    search, nexts = beam_search(8, 3, {2}), ([0, 1, 2], [math.log(p) for p in (0.5, 0.3, 0.2)])
    step(search)
    assert step(search, nexts) == [[0], [1]]
    assert step(search, nexts, nexts) == [[0, 0], [0, 1], [1, 0], [1, 1]]


# --- the engine's beams against transformers' -----------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices this small only lose by sharing them out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoints(shared: Path) -> Checkpoints:
    return Checkpoints("beams", shared)


FEW = 1, 3, 5  # settings: each `early_stopping`
EAGER = {"schedule_conservativeness": 0.0}  # let in whoever fits now, so that many are preempted


def params_for(arguments: dict) -> SamplingParams:
    """What transformers' arguments are in our words; without a stop token the checkpoint's own are taken."""
    stops = arguments.get("eos_token_id", [])
    return SamplingParams(
        use_beam_search=True, beam_width=arguments["num_beams"], n=arguments["num_return_sequences"],
        max_tokens=arguments["max_new_tokens"], length_penalty=arguments.get("length_penalty", 1.0),
        early_stopping=arguments.get("early_stopping", False), stop_token_ids=tuple(stops), ignore_eos=bool(stops),
    )  # fmt: skip


def finish(core: EngineCore) -> dict[str, list[EngineOutput]]:
    """Step until all is done; returns each request's outputs."""
    outputs: dict[str, list[EngineOutput]] = {}
    for _ in range(2000):
        if not core.has_work():
            return outputs
        news = core.step()
        check_integrity(core.scheduler)
        for output in news:
            before = outputs.setdefault(output.request_id, [])
            assert not any(earlier.finished for earlier in before), "an output after the last one"
            before.append(output)
    raise AssertionError("2000 steps, and still not done")


def make_core(folder: Path, **fields) -> EngineCore:
    defaults = {"dtype": "float32", "device": "cpu", "max_num_seqs": 12, "max_model_len": 40, "swap_space": 0.001}
    return EngineCore(EngineConfig(str(folder), **(defaults | {"block_size": 4} | fields)))


@functools.cache
def read(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)


def said_of(core: EngineCore) -> dict[str, torch.Tensor]:
    """What transformers said of its model."""
    return read(Path(core.facts["model"]) / "oracle.safetensors")


def add_beams(core: EngineCore, name: str, i: int, j: int) -> None:
    """Queue a search for prompt `i` with setting `j`, as request `j.i`."""
    core.add(EngineCoreRequest(f"{j}.{i}", CASES[name]["prompts"][i], params_for(CASES[name]["beams"][j])))


def score_error(name: str, score: float, length: int, penalty: float) -> float:
    """How far apart the scores of one beam may be in two programs that compute in float32, ours and transformers'.

    Rounding in float32 changes a number by at most u = 2^-24 of its size. A score is the sum of `length`
    log-probabilities, divided by length^penalty, so its error has two parts:

    - transformers adds up and divides in float32. Each of these roundings is at most u of the whole sum, which makes
      (length + 1) * u * |score|.
    - Each log-probability is off already. It is a logit less the log of a sum of all logits' exponentials, and that log
      is off by no more than the worst logit: twice a logit's error, in each of two programs.

    A logit is a sum of H products of a normed hidden value, about 1, and a weight of the head, about 0.15 (oracle.py
    draws them so), therefore at most about 0.15 * H in size. The sums that it came through, one after the other, have
    so many terms: in each layer H for the queries, D for the scores of attention, one for each token of the context,
    all heads' D for the projection back, H and I in the MLP; and H in the head. The error of a chain of sums with K
    terms is about sqrt(K) * u of the size, because roundings go either way (Higham and Mary, 2019).
    """
    u, sizes = 2.0**-24, CASES[name]["shape"]
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head_dim = sizes.get("head_dim", hidden // heads)
    context = max(map(len, CASES[name]["prompts"])) + NEW
    layer = hidden + head_dim + context + heads * head_dim + hidden + sizes["intermediate_size"]
    terms = sizes["num_hidden_layers"] * layer + hidden
    logit = math.sqrt(terms) * u * 0.15 * hidden
    return (length + 1) * u * abs(score) + length * 4 * logit / length**penalty


def check_answer(core: EngineCore, name: str, i: int, j: int, found: list[EngineOutput]) -> set[tuple[str, int]]:
    """The answers to prompt `i` with setting `j` are transformers'; returns why and at what lengths they ended."""
    oracle, arguments = said_of(core), CASES[name]["beams"][j]
    beams = [[token for token in beam if token >= 0] for beam in oracle[f"beams{j}.{i}"].tolist()]
    stops = arguments.get("eos_token_id") or core.model_config.eos_token_ids
    assert [output.token_ids for output in found] == beams, (j, i)
    penalty = arguments.get("length_penalty", 1.0)
    for output, score in zip(found, oracle[f"scores{j}.{i}"].tolist(), strict=True):
        allowed = score_error(name, score, len(output.token_ids), penalty)
        assert output.cumulative_logprob == pytest.approx(score, rel=0, abs=allowed)
    assert [output.finish_reason for output in found] == ["stop" if b[-1] in stops else "length" for b in beams]
    assert [output.index for output in found] == list(range(arguments["num_return_sequences"]))
    assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]
    return {(output.finish_reason or "", len(output.token_ids)) for output in found}


def check_beams(core: EngineCore, name: str, beside: bool = False, settings: Sequence[int] = range(len(BEAMS))) -> None:
    """All prompts with all `settings` at the same time; if asked for, with greedy requests between them."""
    places = [(i, j) for i in range(len(CASES[name]["prompts"])) for j in settings]
    for i, j in places:
        add_beams(core, name, i, j)
        if beside:
            params = SamplingParams(temperature=0, max_tokens=NEW)
            core.add(EngineCoreRequest(f"greedy {j}.{i}", CASES[name]["prompts"][i], params))
    outputs, ends = finish(core), set()
    for i, j in places:
        ends |= check_answer(core, name, i, j, outputs.pop(f"{j}.{i}"))
        if beside:
            tokens = [token for output in outputs.pop(f"greedy {j}.{i}") for token in output.token_ids]
            assert tokens == said_of(core)[f"tokens{i}"].tolist()
    assert not outputs
    # Else the checkpoint would show little: beams that stop at several lengths, and beams that do not.
    lengths = {length for reason, length in ends if reason == "stop"}
    assert len(settings) < len(BEAMS) or (("length", NEW) in ends and len(lengths) > 3)
    assert core.metrics()["kv_cache_usage_perc"] == 0


NAMES = [pytest.param(name, marks=[pytest.mark.full] * (name != "llama")) for name in CASES]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "beside", [pytest.param(False, marks=pytest.mark.full), True], ids=["alone", "beside greedy requests"]
)
def test_beams_equal_transformers(checkpoints, name, beside):
    core = make_core(checkpoints / name)
    check_beams(core, name, beside)
    hits = core.metrics()["prefix_cache_hits_total"]
    check_beams(core, name, beside)  # once more, with the prompts in the cache
    assert core.metrics()["prefix_cache_hits_total"] - hits >= 20 * len(BEAMS)


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "mode", "cache", "chunked"),
    [(1, 78, "recompute", True, True), (3, 32, "swap", False, True), (16, 11, "swap", True, False)],
    ids=["1-recompute-cache-chunked", "3-swap-no cache-chunked", "16-swap-cache-classic"],
)
def test_preempted_beams_are_the_same(checkpoints, block_size, num_blocks, mode, cache, chunked):
    """In a small pool, with nothing kept free for growth."""
    core = make_core(
        checkpoints / "llama", block_size=block_size, num_gpu_blocks_override=num_blocks, max_num_seqs=40,
        preemption_mode=mode, enable_prefix_caching=cache, enable_chunked_prefill=chunked, **EAGER)  # fmt: skip
    check_beams(core, "llama", chunked, FEW)


def test_search_to_the_end_of_the_context(checkpoints):
    """Without `max_tokens` the context is the limit, and the length that a hopeful beam is judged by."""
    i, j = 2, 3
    assert BEAMS[j]["early_stopping"] == "never" and BEAMS[j]["length_penalty"] > 0
    prompt = CASES["llama"]["prompts"][i]
    core = make_core(checkpoints / "llama", max_model_len=len(prompt) + NEW)
    params = dataclasses.replace(params_for(CASES["llama"]["beams"][j]), max_tokens=None)
    core.add(EngineCoreRequest("search", prompt, params))
    check_answer(core, "llama", i, j, finish(core)["search"])


@pytest.mark.parametrize(
    "steps", [pytest.param(steps, marks=[pytest.mark.full] * (steps not in (1, 5, 9))) for steps in range(14)]
)
def test_abort_leaves_nothing_behind(checkpoints, steps):
    """One of three searches is dropped, wherever it is: running, preempted, waiting or just finished."""
    core = make_core(checkpoints / "llama", num_gpu_blocks_override=26, **EAGER)
    places, outputs = [(0, 0), (2, 2), (1, 3)], []
    for i, j in places:
        add_beams(core, "llama", i, j)
    for _ in range(steps):
        outputs += core.step()
    dropped = places[steps % 3]
    core.abort(f"{dropped[1]}.{dropped[0]}")
    check_integrity(core.scheduler)
    for news in finish(core).values():
        outputs += news
    for i, j in places:
        brought = [output for output in outputs if output.request_id == f"{j}.{i}"]
        assert brought or (i, j) == dropped
        if brought:
            check_answer(core, "llama", i, j, brought)
    assert core.metrics()["kv_cache_usage_perc"] == 0
