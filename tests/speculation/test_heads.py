"""Drafts that a model makes: they are those of the published formulas, and change no token."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import random
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import heads_oracle as oracle
from config import DEMO, EngineConfig
from device.startup import print_plan
from engine import LLM, SamplingParams
from forked import forked_workers
from integrity import check_integrity
from model_config import ModelConfig
from outputs import RequestOutput
from random_checkpoints import Checkpoints
from scheduling.drafts import Drafting
from speculation.drafter import Drafter
from test_speculation import ASKED, PROMPTS, ROOMY, assert_equal, kill_with_drafts_in_flight

MOST = 3  # drafts
DRAFTED, TAKEN = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"
TINY = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": 4, "num_gpu_blocks_override": 300,
        "skip_tokenizer_init": True, "max_num_seqs": 8}  # fmt: skip
FEW = {"num_gpu_blocks_override": 40, "schedule_conservativeness": 0.0, "max_model_len": 96}
SCARCE = FEW | {"num_gpu_blocks_override": 24, "max_model_len": 72}
SWAP = {"preemption_mode": "swap", "swap_space": 0.01}
LENGTHS = (1, 2, 9, 17, 40, 23)
IDS = [random.Random(n).choices(range(oracle.VOCAB), k=n) for n in LENGTHS]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WAYS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2}, {"temperature": 1, "seed": 1}, {"temperature": 0.6, "seed": 2, "top_k": 5},
    {"temperature": 1, "seed": 3, "top_p": 0.8, "logprobs": 0}, {"temperature": 1, "seed": 4, "min_p": 0.1},
    {"temperature": 0, "repetition_penalty": 1.2}, {"temperature": 0.5, "seed": 5, "frequency_penalty": 0.6},
    {"temperature": 0, "logit_bias": {3: -5.0, 7: 2.0}}, {"temperature": 0.8, "seed": 6, "n": 3, "logprobs": 0},
    {"temperature": 0, "allowed_token_ids": list(range(4, 20))}, {"temperature": 0.9, "seed": 7, "n": 2},
    {"temperature": 0, "stop_token_ids": [3, 4, 5], "min_tokens": 6, "logprobs": 0}, {"temperature": 0},
]  # fmt: skip
HEADS = ("mtp", "draft_model", "eagle3")
PUBLISHED = ("eagle3.1", "eagle3.1-nvidia", "speculators")
Record = list[tuple[list[int], list[int]]]
Make = Callable[..., oracle.Made]
OPEN: list[LLM] = []  # what `tiny` has made


def options_of(method: str, head: object = "", most: int = MOST) -> str:
    return json.dumps({"method": method, "num_speculative_tokens": most} | ({"model": str(head)} if head else {}))


def tiny(made: oracle.Made, method: str = "", **fields: Any) -> LLM:
    """An `LLM` on these checkpoints, which `closed` closes after the test."""
    drafts = {"speculative_config": options_of(method, made.head)} if method else {}
    OPEN.append(LLM(str(made.folder), **TINY | drafts | fields))
    return OPEN[-1]


def answers(llm: LLM, params: Any = GREEDY, prompts: list[list[int]] = IDS) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def every_way(llm: LLM) -> list[RequestOutput]:
    asked = [SamplingParams(**{"max_tokens": 16, "ignore_eos": "stop_token_ids" not in way} | way) for way in WAYS]
    return answers(llm, asked, [IDS[i % len(IDS)] for i in range(len(asked))])


def counted(llm: LLM) -> tuple[int, int]:
    """How many drafts were verified, and how many of them taken."""
    counters = llm.client.core.scheduler.counters
    return counters[DRAFTED], counters[TAKEN]


@pytest.fixture
def forked() -> Iterator[None]:
    with forked_workers():
        yield


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture(autouse=True)
def every_draft_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drafting, "price", lambda drafting, rows: 0.0)
    monkeypatch.setattr(Drafting, "_seconds", lambda drafting, rows, column: float(column == 1))  # making costs nothing


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], oracle.Made]:
    """Makes the checkpoints of a name, once."""
    by_name: dict[str, oracle.Made] = {}

    def make(name: str) -> oracle.Made:
        if name not in by_name:
            by_name[name] = oracle.MAKERS[name][1](tmp_path_factory.mktemp(name))
        return by_name[name]

    return make


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """The known tokens of each proposal, and the drafts."""
    proposals, propose = Record(), Drafter.propose

    def recorded(drafter: Drafter, state: Any, batch: Any, hidden: Any, pool: Any, count: int) -> None:
        propose(drafter, state, batch, hidden, pool, count)
        for slot in batch.slots.tolist() if count else ():
            length, drafts = int(state.num_known[slot]), int(state.num_drafts[slot])
            ids = state.token_ids[slot, : length + drafts].tolist()
            if state.num_computed[slot] == length - 1:
                proposals.append((ids[:length], ids[length:]))
            else:
                assert drafts == 0  # its prompt goes on

    monkeypatch.setattr(Drafter, "propose", recorded)
    return proposals


# --- what is proposed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in (*HEADS, *PUBLISHED)), ("mtp", SWAP | SCARCE),
        *(pytest.param(name, {}, marks=pytest.mark.full) for name in oracle.MAKERS if name not in HEADS + PUBLISHED),
        *(pytest.param(name, SCARCE, marks=pytest.mark.full) for name in HEADS),
        *(pytest.param(name, SWAP | SCARCE, marks=pytest.mark.full) for name in HEADS[1:]),
    ],
    ids=str,
)  # fmt: skip
def test_drafts_are_those_of_the_formula(name: str, options: dict[str, Any], made: Make, record: Record) -> None:
    """After prompts in chunks, after drafts that were taken, or refused, or partly so, and after preemption."""
    (method, _, head), checkpoints = oracle.MAKERS[name], made(name)
    llm, t = tiny(checkpoints, method, max_num_batched_tokens=24, **options), checkpoints.tensors
    record.clear()  # of warm-up
    for prompt, output in zip(IDS, answers(llm), strict=True):
        tokens = output.outputs[0].token_ids
        scores = oracle.logits(t, prompt + tokens)[len(prompt) - 1 : -1]
        below = scores.max(1).values - scores[torch.arange(len(tokens)), tokens]
        assert below.max() <= oracle.CLOSE
    compared = compare(record, t, head)
    drafted, taken = counted(llm)
    assert drafted > taken > 10 and compared > 200
    counters = llm.client.core.scheduler.counters
    assert (counters["num_preemptions_total"] > 0) == bool(options)
    assert (counters["num_swapped_tokens_total"] > 0) == ("preemption_mode" in options)


def compare(record: Record, t: dict[str, torch.Tensor], head: Any) -> int:
    """Compare proposals with the formula's, each up to its first close call; returns how many drafts were equal."""
    compared, draft_tensors = 0, {name.removeprefix("head."): x for name, x in t.items() if name.startswith("head.")}
    for prefix, drafts in record:
        assert len(drafts) == MOST
        wanted = oracle.drafts(t, head, prefix, MOST) if head else oracle.continuation(draft_tensors, prefix, MOST)
        for draft, (token, margin) in zip(drafts, wanted, strict=True):
            if margin <= oracle.CLOSE:
                break
            assert draft == token, (prefix, drafts, wanted)
            compared += 1
    return compared


@pytest.mark.parametrize("name", ["deepseek-v3", pytest.param("glm4-moe", marks=pytest.mark.full)])
def test_a_head_of_experts_is_a_layer_of_its_family(name: str, shared: Path, record: Record, tmp_path: Path) -> None:
    """A head behind the model's layers that W lets see its tokens alone, and no hidden state: as a model of one layer,
    it says what comes after them."""
    torch.manual_seed(0)
    source = Checkpoints("families", shared) / name
    raw, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    tensors = {name: x.float() for name, x in tensors.items()}
    last, size = f"model.layers.{raw['num_hidden_layers']}.", raw["hidden_size"]
    layer = {name: x for name, x in tensors.items() if name.startswith("model.layers.1.")}
    layer = {name.removeprefix("model.layers.1."): x.flip(0).contiguous() for name, x in layer.items()}
    joint, norms = torch.randn(size, size) * size**-0.5, 1 + 0.1 * torch.randn(3, size)
    embedding = oracle.rms(tensors["model.embed_tokens.weight"], norms[0]) @ joint.T
    head_tensors = {"eh_proj.weight": torch.cat((joint, torch.zeros_like(joint)), 1), "enorm.weight": norms[0],
           "hnorm.weight": norms[1], "shared_head.norm.weight": norms[2], "embed_tokens.weight": torch.ones(3),
           "shared_head.head.weight": tensors["lm_head.weight"]}  # fmt: skip
    raw |= {"dtype": "float32"}
    head_tensors = {last + name: x.clone() for name, x in (head_tensors | layer).items()}
    oracle.save(tmp_path / "model", raw, tensors | head_tensors)
    single = {f"model.layers.0.{name}": x for name, x in layer.items()} | {"lm_head.weight": tensors["lm_head.weight"]}
    single |= {"model.embed_tokens.weight": embedding, "model.norm.weight": norms[2]}
    oracle.save(tmp_path / "single", raw | {"num_hidden_layers": 1, "first_k_dense_replace": 0}, single)
    llm = tiny(oracle.Made(tmp_path / "model", "", {}), "mtp", max_num_batched_tokens=24)
    record.clear()
    answers(llm)
    compared = [(prefix, drafts) for prefix, drafts in record if len(prefix) > 1][::3]
    params = SamplingParams(temperature=0, max_tokens=MOST, ignore_eos=True, logprobs=2)
    want = tiny(oracle.Made(tmp_path / "single", "", {}))
    same = 0
    continued = answers(want, params, [prefix[1:] for prefix, _ in compared])
    for (_, drafts), output in zip(compared, continued, strict=True):
        for draft, token, two in zip(drafts, output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            best, second, *_ = sorted((entry.logprob for entry in two.values()), reverse=True)
            if best - second <= 1e-3:
                break
            assert draft == token
            same += 1
    assert same > 50


@pytest.mark.parametrize("lost", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_model_is_its_own_best_draft(lost: bool, make_llm: Callable[..., LLM], forked: None) -> None:
    """All drafts are taken, also those that were drawn: with the random number of their place. Only rounding of steps
    with different numbers of rows may say otherwise. This holds for new workers after some were `lost`, too."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "n", "logprobs", "max_tokens", "ignore_eos")
    drawn = [way for way in ASKED if SamplingParams(**{name: getattr(way, name) for name in names}) == way]
    assert sum(way.temperature == 1 for way in drawn) >= 3
    fields = {"distributed_executor_backend": "mp"} if lost else {}
    llm = make_llm(**ROOMY | fields, speculative_config=options_of("draft_model", DEMO))
    killed = kill_with_drafts_in_flight(llm.core) if lost else []
    llm.generate([prompt for prompt in PROMPTS for _ in drawn], drawn * 2, use_tqdm=False)
    assert llm.core.metrics()["num_worker_restarts_total"] == len(killed) == 2 * lost
    drafted, taken = counted(llm)
    assert drafted > 100 and taken >= 0.98 * drafted
    llm.close()


@pytest.mark.parametrize("count", [600, pytest.param(40000, marks=pytest.mark.long)])
def test_what_comes_after_drafts_has_the_model_s_distribution(count: int, made: Make) -> None:
    """The second and the third token at temperature 1, against the exact probabilities of all pairs."""
    checkpoints, few = made("draft_model"), [0, 5, 11, 17, 22]
    llm = tiny(checkpoints, "draft_model", max_num_seqs=32)
    asked: dict[str, Any] = {"temperature": 1, "max_tokens": 4, "ignore_eos": True, "allowed_token_ids": few}
    params = [SamplingParams(seed=i, **asked) for i in range(count)]
    outputs = answers(llm, params, [IDS[2]] * count)
    drafted, taken = counted(llm)
    assert 0.05 * drafted < taken < 0.9 * drafted

    def chances(known: list[int]) -> torch.Tensor:
        return oracle.logits(checkpoints.tensors, known)[-1, few].softmax(0)

    wanted = torch.zeros(5, 5, 5)
    for a, first in enumerate(chances(IDS[2])):
        for b, second in enumerate(chances([*IDS[2], few[a]])):
            wanted[a, b] = first * second * chances([*IDS[2], few[a], few[b]])
    seen = torch.zeros(5, 5, 5)
    for output in outputs:
        seen[*(few.index(token) for token in output.outputs[0].token_ids[:3])] += 1
    pairs, expected = seen.sum(0).flatten(), count * wanted.sum(0).flatten()
    rare = expected < 5
    pairs, expected = (torch.cat((x[~rare], x[rare].sum()[None])) for x in (pairs, expected))
    square = float(((pairs - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    freedom = len(expected) - 1
    assert square < freedom + 5 * (2 * freedom) ** 0.5 + 10


# --- no token changes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(made: Make) -> Callable[[str], list[RequestOutput]]:
    """What a name's model answers without drafts."""
    by_name: dict[str, list[RequestOutput]] = {}

    def answer(name: str) -> list[RequestOutput]:
        if name not in by_name:
            llm = tiny(made(name))
            by_name[name] = every_way(llm)
            llm.close()
        return by_name[name]

    return answer


CHUNKS = {"max_num_batched_tokens": 16} | FEW
AHEAD = {"enable_prefix_caching": False, "async_scheduling": True, "sanitize_kv": True}
FULL: list[dict[str, Any]] = [
    SWAP | FEW, {"async_scheduling": True, "sanitize_kv": True} | FEW,
    {"enable_chunked_prefill": False}, {"distributed_executor_backend": "mp"}, {"backend": "reference"},
    {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, {"scheduling_policy": "fair"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mtp", CHUNKS),
        ("eagle3", AHEAD),
        *(pytest.param(name, SWAP | CHUNKS, marks=pytest.mark.full) for name in HEADS[1:]),
        *(pytest.param("mtp", options, marks=pytest.mark.full) for options in FULL),
    ],
    ids=str,
)
def test_tokens_are_those_without_drafts(
    name: str, options: dict[str, Any], made: Make, plain: Callable[[str], list[RequestOutput]]
) -> None:
    llm = tiny(made(name), oracle.MAKERS[name][0], **options)
    assert_equal(every_way(llm), plain(name))  # some prompts come several times, and are found again
    drafted, taken = counted(llm)
    assert drafted > taken > 20
    if options.get("schedule_conservativeness") == 0:
        assert llm.client.core.scheduler.counters["num_preemptions_total"] > 0
    check_integrity(llm.client.core.scheduler)


@pytest.mark.full
def test_workers_die_with_drafts_in_flight(made: Make, plain: Callable[[str], list[RequestOutput]], forked: None):
    llm = tiny(made("mtp"), "mtp", tensor_parallel_size=2, distributed_executor_backend="mp")
    killed = kill_with_drafts_in_flight(llm.core)
    assert_equal(every_way(llm), plain("mtp"))
    drafted, taken = counted(llm)
    assert drafted > taken > 20 and llm.core.metrics()["num_worker_restarts_total"] == len(killed) == 2
    check_integrity(llm.core.scheduler)


@pytest.mark.parametrize("name", ["mtp", pytest.param("draft_model", marks=pytest.mark.full)])
def test_padding_has_no_drafts(name: str, made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU pads steps of decodes to the sizes of its graphs. Padding has slot -1, which may stand for any tokens."""
    llm, want = (tiny(made(name), oracle.MAKERS[name][0]) for _ in range(2))
    llm.client.core.executor.worker.graph_sizes = [8]
    sizes, propose = set[tuple[int, int]](), Drafter.propose

    def noted(drafter: Drafter, state: Any, batch: Any, *more: Any) -> None:
        sizes.add((len(batch.slots), int((batch.slots >= 0).sum())))
        propose(drafter, state, batch, *more)

    monkeypatch.setattr(Drafter, "propose", noted)
    assert_equal(answers(llm), answers(want))
    assert any(rows == 8 > live for rows, live in sizes)
    assert counted(llm) == counted(want)


class CalledAgain:
    """Stands in for a CUDA graph of `Drafter.draft`: a replay calls it again, with the tensors of the capture."""

    replays = 0  # of all

    def replay(self) -> None:
        CalledAgain.replays += 1
        self.call()


@pytest.mark.parametrize("name", ["mtp", *(pytest.param(name, marks=pytest.mark.full) for name in HEADS[1:])])
def test_drafts_are_made_by_graphs_where_the_step_has_none(name: str, made: Make, record: Record, monkeypatch):
    """They are those without graphs, of rows that find their inputs where these lay when the graphs were captured."""
    drafts, large, draft = [], [], Drafter.draft

    def launched(drafter: Drafter, state: Any, rows: torch.Tensor, *more: Any) -> None:
        large.append(len(rows))
        draft(drafter, state, rows, *more)

    @contextlib.contextmanager
    def captured(graph: CalledAgain, pool: str) -> Iterator[None]:
        with monkeypatch.context() as patch:  # a capture launches nothing
            patch.setattr(Drafter, "draft", lambda *args: setattr(graph, "call", functools.partial(draft, *args)))
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CalledAgain)
    monkeypatch.setattr(torch.cuda, "graph", captured)
    monkeypatch.setattr(CalledAgain, "replays", 0)
    for sizes in ([], [1, 2, 4]):
        llm = tiny(made(name), oracle.MAKERS[name][0], max_num_batched_tokens=24)
        worker = llm.client.core.executor.worker
        if sizes:
            with torch.inference_mode():
                worker.proposer.capture(worker.state, worker.pool, sizes, MOST, "memory")
            assert [*worker.proposer.graphs] == sizes
            monkeypatch.setattr(Drafter, "draft", launched)
        record.clear()
        answers(llm)
        drafts.append([*record])
        llm.close()
    assert drafts[0] == drafts[1] and len(drafts[0]) > 50
    assert {*large} == {5, 6} and CalledAgain.replays > 5


@pytest.mark.parametrize("name", ["eagle3", *(pytest.param(name, marks=pytest.mark.full) for name in HEADS[:2])])
def test_steps_without_proposals_change_no_token(
    name: str, made: Make, plain: Callable[[str], list[RequestOutput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave out keys and values of the draft, which the sanitizer has filled with NaN."""
    proposals = Drafting.proposals
    monkeypatch.setattr(Drafting, "proposals", lambda drafting, of: of.plan.step % 3 and proposals(drafting, of))
    llm = tiny(made(name), oracle.MAKERS[name][0], sanitize_kv=True)
    assert_equal(every_way(llm), plain(name))
    assert counted(llm)[0] > 50


@pytest.mark.parametrize("name", ["mtp", "draft_model", pytest.param("eagle3", marks=pytest.mark.full)])
def test_drafts_end_with_the_model_s_length(name: str, made: Make) -> None:
    prompts = [ids for ids in IDS if len(ids) < 20]
    params, outputs = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), []
    for method in ("", oracle.MAKERS[name][0]):
        llm = tiny(made(name), method, max_model_len=21, block_size=5)
        outputs.append(answers(llm, params, prompts))
        llm.close()
    assert_equal(*outputs)
    assert all(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) == 21 for o in outputs[1])


@pytest.mark.parametrize("rows", [oracle.VOCAB - 6, oracle.VOCAB + 7])
def test_a_draft_s_vocabulary_may_end_elsewhere(rows: int, made: Make, tmp_path: Path) -> None:
    """As tables of embeddings are padded. The draft would always say the last of its tokens."""
    checkpoints = made("draft_model")
    tensors = load_file(f"{checkpoints.head}/model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = torch.cat((tensors[name], tensors[name]))[:rows]
    tensors["lm_head.weight"][-1] *= 100
    raw = json.loads(Path(checkpoints.head, "config.json").read_text()) | {"vocab_size": rows}
    oracle.save(tmp_path / "draft", raw, tensors)
    want = tiny(checkpoints)
    llm = tiny(checkpoints._replace(head=str(tmp_path / "draft")), "draft_model")
    assert_equal(every_way(llm), every_way(want))
    drafted, taken = counted(llm)
    assert drafted > 100 and (taken > 0 or rows < oracle.VOCAB)


@pytest.mark.full
@pytest.mark.interpreted
def test_the_interpreted_kernels_make_the_same_drafts(made: Make, few_programs: None) -> None:
    few = {"block_size": 16, "max_num_seqs": 2, "max_model_len": 32, "num_gpu_blocks_override": 8}
    llm, want = (tiny(made("eagle3"), "eagle3", backend=of, **few) for of in ("triton", "cpu"))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    assert_equal(answers(llm, params, IDS[1:3]), answers(want, params, IDS[1:3]))
    assert counted(llm) == counted(want)


# --- other weights ----------------------------------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path: Path, made: Make) -> oracle.Made:
    """A model of the same shape that says other things, with a head."""
    found = made("mtp")
    tensors = {name: x if "mtp" in name or x.ndim == 1 else x.flip(0).contiguous() for name, x in found.tensors.items()}
    oracle.save(tmp_path / "other", json.loads((found.folder / "config.json").read_text()), tensors)
    return oracle.Made(tmp_path / "other", "", tensors)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("draft_model", "cpu"), ("mtp", "reference"), pytest.param("eagle3", "cpu", marks=pytest.mark.full)],
)
def test_drafts_after_a_sleep(name: str, backend: str, made: Make) -> None:
    llm = tiny(made(name), oracle.MAKERS[name][0], backend=backend)
    wanted, before = answers(llm), counted(llm)
    for level in (1, 2):
        worker = llm.client.core.executor.worker
        worker.proposer.graphs[0] = CalledAgain()  # it would be for steps without rows
        draft = weakref.ref(worker.model.draft)
        llm.sleep(level)
        assert not worker.proposer.graphs
        gc.collect()
        assert (draft() is None) == (level == 2 and backend == "cpu")  # so its weights take no memory
        llm.wake_up()
        assert_equal(answers(llm), wanted)
        assert counted(llm) == tuple((level + 1) * count for count in before)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.full)])
def test_a_head_gets_new_weights_with_its_model(backend: str, made: Make, other: oracle.Made, tmp_path, record: Record):
    llm = tiny(made("mtp"), "mtp", backend=backend)
    answers(llm, prompts=IDS[:2])
    llm.update_weights(str(other.folder))
    record.clear()
    got = answers(llm)
    want = tiny(other)
    assert_equal(got, answers(want))
    compared = 0
    for prefix, drafts in record[::3]:
        (token, margin), *_ = oracle.drafts(other.tensors, oracle.mtp, prefix, 1)
        assert drafts[0] == token or margin <= oracle.CLOSE
        compared += margin > oracle.CLOSE
    assert compared > 10
    headless = {name: x for name, x in other.tensors.items() if "mtp" not in name}
    oracle.save(tmp_path / "headless", json.loads((other.folder / "config.json").read_text()), headless)
    with pytest.raises(ValueError, match=r"has no tensor model\.mtp\."):
        llm.update_weights(str(tmp_path / "headless"))
    assert_equal(answers(llm), got)


def test_a_draft_keeps_its_weights_when_its_model_gets_others(made: Make, other: oracle.Made) -> None:
    checkpoints = made("draft_model")
    llm, want = tiny(checkpoints, "draft_model"), tiny(other._replace(head=checkpoints.head), "draft_model")
    headless = Path(other.folder, "model.safetensors")
    save_file({name: x for name, x in other.tensors.items() if "mtp" not in name}, headless)
    llm.update_weights(str(other.folder))
    assert_equal(answers(llm), answers(want))
    assert counted(llm) == counted(want)


@pytest.mark.parametrize("name", ["mtp", *(pytest.param(name, marks=pytest.mark.full) for name in HEADS[1:])])
def test_weights_that_are_made_up(name: str, made: Make) -> None:
    """Until the true ones come, and with them those of a head that is in the same checkpoint."""
    llm, want = tiny(made(name), oracle.MAKERS[name][0], load_format="dummy"), tiny(made(name), oracle.MAKERS[name][0])
    answers(llm, prompts=IDS[:2])
    assert (before := counted(llm))[0] > 0
    llm.update_weights(str(made(name).folder))
    assert_equal(answers(llm), answers(want))
    assert name != "mtp" or counted(llm)[1] - before[1] == counted(want)[1] > 20


# --- what does not fit ------------------------------------------------------------------------------------------------


def changed(found: oracle.Made, folder: Path, part: str, fields: dict[str, Any], change: Any = None) -> oracle.Made:
    """The checkpoints with fields of one config.json changed, and its tensors as `change` returns them."""
    source = found.folder if part == "model" else Path(found.head)
    shutil.copytree(source, folder / part)
    raw = json.loads((source / "config.json").read_text()) | fields
    (folder / part / "config.json").write_text(json.dumps(raw))
    if change:
        save_file(change(load_file(source / "model.safetensors")), folder / part / "model.safetensors")
    return found._replace(folder=folder / part) if part == "model" else found._replace(head=str(folder / part))


def moved(tensors: dict[str, torch.Tensor], by: int) -> dict[str, torch.Tensor]:
    return tensors | {"d2t": tensors["d2t"] + by}


@pytest.mark.parametrize(
    ("name", "part", "fields", "change", "said"),
    [
        ("draft_model", "head", {"vocab_size": 999}, None, "its vocab_size is 999, that of the model 24"),
        ("draft_model", "head", {"max_position_embeddings": 50}, None, "it has 50 positions, and max_model_len is 128"),
        ("eagle", "head", {"vocab_size": 999}, None, "its vocab_size is 999, that of the model 24"),
        ("eagle", "head", {"hidden_size": 16}, None, "1 layers of size 16; it must have one of the model's size, 32"),
        ("eagle", "head", {"num_hidden_layers": 3}, None, "it has 3 layers of size 32"),
        ("eagle", "head", {"architectures": None}, None, "head': config.json is of a 'None'"),
        ("eagle3", "head", {"eagle_aux_hidden_state_layer_ids": [1, 7]}, None, r"layers \[1, 7\], .* 0 to 6"),
        ("eagle3", "head", {"embed_requires_grad": True}, None, "embeddings of its own"),
        ("eagle3", "head", {"norm_before_logits": True}, None, "'norm_before_logits' is True"),
        ("speculators", "head", {"speculators_model_type": "dflash"}, None, "type is 'dflash', not eagle3"),
        ("eagle3", "head", {}, lambda t: moved(t, 20), "d2t names token 4[0-9]; tokens are from 0 to 23"),
        ("eagle3", "head", {}, lambda t: moved(t, -9), "d2t names token -[0-9]; tokens are from 0 to 23"),
        ("eagle3", "head", {}, lambda t: t | {"d2t": t["d2t"][:9]}, r"lm_head.weight has shape \[16, 32\]"),
        ("eagle3", "head", {}, lambda t: {n: x for n, x in t.items() if n != "fc.weight"}, "has no tensor fc.weight"),
        ("eagle3", "head", {}, lambda t: t | {"more.weight": torch.ones(1)}, "has a tensor 'more.weight'"),
        ("mtp", "model", {}, lambda t: {n: x for n, x in t.items() if "mtp" not in n}, "no layers that predict ahead"),
        ("mtp", "model", {}, lambda t: t | {"mtp.norm.weight": torch.ones(9)}, r"mtp.norm.weight has shape \[9\]"),
        ("mtp", "model", {}, lambda t: t | {"mtp.norm.weight": torch.ones(32) / 0}, "NaN or infinite"),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused(
    name: str, part: str, fields: dict[str, Any], change: Any, said: str, made: Make, tmp_path: Path
) -> None:
    found = changed(made(name), tmp_path, part, fields, change)
    with pytest.raises(ValueError, match=said) as error:
        tiny(found, oracle.MAKERS[name][0])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_folder_that_is_none_or_damaged_is_named(method: str, made: Make, tmp_path: Path) -> None:
    checkpoints = made(method)
    with pytest.raises(ValueError, match="nowhere"):
        tiny(checkpoints._replace(head=str(tmp_path / "nowhere")), method)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no config\.json"):
        tiny(checkpoints._replace(head=str(tmp_path / "empty")), method)
    cut = changed(checkpoints, tmp_path, "head", {})
    file = Path(cut.head, "model.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"head/model\.safetensors is damaged"):
        tiny(cut, method)
    file.unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        tiny(cut, method)


def test_a_head_of_speculators_names_its_model(made: Make, tmp_path: Path) -> None:
    """Its folder alone is enough, and says how many drafts there are."""
    found = made("speculators")
    llm, want = LLM(found.head, **TINY), tiny(found)
    assert_equal(every_way(llm), every_way(want))
    assert llm.config.num_drafts == 3 and counted(llm)[1] > 10
    llm.close()
    want.close()
    lost = changed(found, tmp_path, "head", {"speculators_config": {"proposal_methods": []}})
    with pytest.raises(ValueError, match="is a draft head; its speculators_config names no verifier"):
        LLM(lost.head, **TINY)


def test_a_short_model_has_no_room_for_eagle3(made: Make) -> None:
    with pytest.raises(ValueError, match=r"layers \[2, 1, -1\], and the model has layers 0 to 1"):
        tiny(made("eagle")._replace(head=made("eagle3").head), "eagle3")


def test_windows_must_fit(made: Make, tmp_path: Path) -> None:
    """A model with a window frees the blocks behind it, so its draft may not see more."""
    checkpoints, mistral = made("draft_model"), {"architectures": ["MistralForCausalLM"], "sliding_window": 9}
    plain = {"architectures": ["LlamaForCausalLM"]}

    def without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: x for name, x in tensors.items() if "q_norm" not in name and "k_norm" not in name}

    windowed = changed(checkpoints, tmp_path, "model", mistral, without)
    wide = changed(windowed, tmp_path / "wide", "head", plain, without)
    with pytest.raises(ValueError, match=r"its layers see \(0,\) tokens"):
        tiny(wide, "draft_model")
    narrow = changed(windowed, tmp_path / "narrow", "head", mistral | {"sliding_window": 7}, without)
    llm, want = tiny(narrow, "draft_model", sanitize_kv=True), tiny(narrow)
    assert_equal(every_way(llm), every_way(want))
    assert counted(llm)[1] > 20


@pytest.mark.parametrize("there", [True, False], ids=["weights", "no weights yet"])
@pytest.mark.parametrize("name", ["mtp", "draft_model", "eagle-bias", "eagle3"])
def test_a_plan_has_the_draft(name: str, there: bool, made: Make, tmp_path: Path, capsys: Any) -> None:
    """Its weights, and its part of each block."""
    checkpoints, method = made(name), oracle.MAKERS[name][0]
    if not there:
        checkpoints = changed(checkpoints, tmp_path, "model", {})
        checkpoints = changed(checkpoints, tmp_path, "head", {}) if checkpoints.head else checkpoints
        for file in tmp_path.glob("*/model.safetensors"):
            file.unlink()
    lines: list[list[str]] = []
    for drafts in ({}, {"speculative_config": options_of(method, checkpoints.head)}):
        config = EngineConfig(str(checkpoints.folder), device="cpu", dtype="float32", block_size=16, **drafts)
        print_plan(config, ModelConfig.from_folder(str(checkpoints.folder)))
        lines.append(capsys.readouterr().out.splitlines())
    (line,) = [line for line in lines[1] if line.strip().startswith("draft")]
    assert method in line
    page = [next(line for line in text if "KV pool" in line) for text in lines]
    per_block = [float(line.split()[2]) / int(line.split()[4].replace(",", "")) for line in page]
    layers = json.loads((checkpoints.folder / "config.json").read_text())["num_hidden_layers"]
    assert per_block[1] / per_block[0] == pytest.approx(1 + 1 / layers, rel=0.01)


@pytest.mark.full
def test_the_plan_counts_all_weights_of_a_draft(made: Make) -> None:
    for name in oracle.MAKERS:
        llm = tiny(made(name), oracle.MAKERS[name][0], backend="reference")
        start = llm.client.core.executor.worker.start
        pieces = {piece.target.untyped_storage().data_ptr(): piece.target.untyped_storage().nbytes()
                  for part in start.draft_parameters.values() for piece in part.pieces}  # fmt: skip
        draft = start.model.draft
        beside = [*draft.rotations, getattr(draft, "ids", torch.empty(0))]
        assert start.memory.draft == sum(pieces.values()) + sum(table.nbytes for table in beside)
        llm.close()
