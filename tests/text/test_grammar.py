"""Structured outputs: schemas as llguidance takes them, the masks of a sequence, answers that are what was asked."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import threading
import time
from concurrent.futures import Future
from itertools import cycle

import numpy as np
import pytest

from conftest import DEMO
from engine import SamplingParams, StructuredOutputsParams
from integrity import check_integrity
from plan import EngineCoreRequest, bit_words
from text.grammar import MAX_CHARS, Constraint, Grammars
from text.schemas import FORMATS, NAMED, grammar_text, plain
from tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
EOS = 1


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(str(DEMO), 1024, [EOS])
    yield made
    made.close()


@pytest.fixture
def constraint(grammars):
    """Makes the constraint of a sequence whose answer is asked for."""

    def make(asked=None, **params) -> Constraint:
        wanted = None if asked is None else StructuredOutputsParams(**asked)
        sampling = SamplingParams(structured_outputs=wanted, **{"max_tokens": None} | params)
        compiled = None if wanted is None else grammars.compile(wanted).result()
        return Constraint(sampling, compiled, bit_words([EOS]), grammars.words)

    return make


def allowed(constraint: Constraint) -> set[int]:
    return set(np.unpackbits(constraint.mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def accepts(grammars, tokenizer, text: str, **asked) -> bool:
    matcher = grammars.compile(StructuredOutputsParams(**asked)).result().matcher.deep_copy()
    return matcher.consume_tokens(tokenizer.encode(text, False)) and matcher.is_accepting()


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"choice": ["yes", "no (never)", "a|b", "ü?"]}, ["yes", "no (never)", "a|b", "ü?"], ["a", "ye", "no"]),
        ({"regex": r"\d{3}-[a-c]+"}, ["123-abc"], ["12-abc", "123-abcd"]),
        ({"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]+/'}, ["x12"], ["x", "12"]),
        ({"grammar": 'root ::= "x" number\nnumber ::= [0-9]+'}, ["x12"], ["x", "12"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"}']),
        ({"json": PERSON}, ['{"name": "A", "age": 7}', '{\n  "name": "A",\n  "age": 7\n}', '{"name":"A","age":7}'],
         ['{"name": "Ann"}', '{"name": "Ann", "age": -7}', '{"name": "Ann", "age": 7, "x": 1}', '{  "name": "A"}']),
        ({"json": json.dumps(PERSON)}, ['{"name": "Ann", "age": 7}'], ["{}"]),
        ({"json": {"type": "object", "properties": {"a": {"type": "null"}}}}, ['{"a": null, "b": 1}'], ['{"a": 1}']),
        ({"json": {"type": "object", "properties": {"a": {"type": "null"}}}, "disable_additional_properties": True},
         ['{"a": null}', "{}"], ['{"a": null, "b": 1}']),
        ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"Ann","age":7}'], ['{"name": "Ann", "age": 7}']),
        ({"json": PERSON, "whitespace_pattern": " {2}"}, ['{"name":  "Ann","age":7}'], ['{"name": "Ann","age":7}']),
        ({"structural_tag": {"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<"]}},
         ["no call", 'see <f>{"name": "Ann", "age": 7}</f> there'], ['<f>{"name": 1}</f>', "<f>"]),
    ],
)  # fmt: skip
def test_each_kind_allows_what_it_says(grammars, tokenizer, asked, good, bad):
    assert [text for text in good if not accepts(grammars, tokenizer, text, **asked)] == []
    assert [text for text in bad if accepts(grammars, tokenizer, text, **asked)] == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"json": "{"}, "cannot be read: Expecting"),
        ({"json": "[" * 100_000}, "too deep"),
        ({"json": {"contains": {"type": "null"}, "type": "array"}}, "no grammar can hold an answer to contains"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "nsatisfiable"),
        ({"json": {"$ref": "http://example.com/a.json"}}, "cannot be compiled"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(" * 50_000}, "cannot be compiled"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"grammar": "root ::= ("}, "cannot be read"),
        ({"grammar": "start: " + "(" * 100_000}, "too deeply nested"),
        ({"regex": "a" * (MAX_CHARS + 1)}, f"has {MAX_CHARS + 1} characters; at most {MAX_CHARS}"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "at least one structure"),
        ({"structural_tag": {"structures": [{"begin": "a", "end": "b"}], "triggers": ["c"]}}, "none of its triggers"),
        ({"structural_tag": {"type": "structural_tag", "format": {}}}, "must have structures"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(grammars, asked, said):
    with pytest.raises(ValueError, match=said) as error:
        grammars.compile(StructuredOutputsParams(**asked)).result()
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "asked",
    [{}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": "yes"}, {"choice": [1]}, {"regex": ""}, {"regex": 1},
     {"json": 1}, {"json": {}, "disable_any_whitespace": 1}, {"json": {}, "whitespace_pattern": 1}],
)  # fmt: skip
def test_parameters_are_checked(asked):
    with pytest.raises(ValueError, match=["none", *asked][-1]):
        SamplingParams(structured_outputs=asked)


def test_other_parameters_are_checked():
    with pytest.raises(ValueError, match="grammer; the nearest is grammar"):
        SamplingParams(structured_outputs={"grammer": "x"})
    with pytest.raises(ValueError, match="masked_logprobs"):
        SamplingParams(masked_logprobs=True)
    with pytest.raises(ValueError, match="structured_outputs is 'json'"):
        SamplingParams(structured_outputs="json")
    sampling = SamplingParams(structured_outputs={"choice": ["a"]})
    assert SamplingParams(**dataclasses.asdict(sampling)) == sampling


def test_formats_that_are_kept_are_those_that_are_checked(grammars):
    others = ("binary", "path", "int32", "color", "regex", "iri", "date time")
    for name in (*FORMATS, *others):
        properties = {"format": {"type": "string", "format": name}}
        schema = {"type": "object", "properties": properties, "required": ["format"]}
        assert (plain(schema) == schema) == (name in FORMATS)
        assert grammars.compile(StructuredOutputsParams(json=schema)).result()
        text = grammar_text(StructuredOutputsParams(json={"type": "string", "format": name}))
        assert (name in text) == (name in FORMATS)


def test_a_keyword_is_taken_away_wherever_a_schema_lies():
    inner = {"uniqueItems": True}
    for schema in (
        inner, {"items": inner}, {"prefixItems": [inner]}, {"anyOf": [inner, inner]}, {"x": {"y": inner}},
        *({name: {"x": inner}} for name in NAMED),
    ):  # fmt: skip
        assert "uniqueItems" not in json.dumps(plain(schema, []))
    for schema in ({"const": inner}, {"enum": [inner]}, {"properties": {"uniqueItems": {"type": "null"}}}):
        assert plain(schema) == schema


# --- masks ------------------------------------------------------------------------------------------------------------


def test_a_mask_follows_the_output(constraint, tokenizer):
    c = constraint({"choice": ["yes", "no"]})
    assert {tokenizer.token(id)[0] for id in allowed(c)} == {"y", "n"}
    c.advance(ids := tokenizer.encode("yes", False))
    assert allowed(c) == {EOS} and not c.error
    other = constraint({"choice": ["yes", "no"]})
    for end in range(1, len(ids) + 1):
        other.advance(ids[:end])
    assert allowed(other) == {EOS}


def test_reasoning_comes_first(constraint, tokenizer):
    end = tuple(tokenizer.encode("</t>", False))
    c = constraint({"choice": ["yes"]}, reasoning_end_ids=end)
    everything = set(range(1024))
    assert allowed(c) == everything - {EOS}
    thoughts = tokenizer.encode("no no no", False)
    c.advance(thoughts)
    assert allowed(c) == everything - {EOS}
    c.advance([*thoughts, *end])
    assert {tokenizer.token(id)[0] for id in allowed(c)} == {"y"}
    c.advance([*thoughts, *end, *tokenizer.encode("yes", False)])
    assert allowed(c) == {EOS}


def test_reasoning_may_be_left_out(constraint, tokenizer):
    start, end = (700,), tuple(tokenizer.encode("</t>", False))
    c = constraint({"choice": ["yes"]}, reasoning_start_ids=start, reasoning_end_ids=end)
    assert {tokenizer.token(id)[0] for id in allowed(c) - {700}} == {"y"} and 700 in allowed(c)
    c.advance(tokenizer.encode("yes", False))
    assert allowed(c) == {EOS}
    c = constraint({"choice": ["yes"]}, reasoning_start_ids=start, reasoning_end_ids=end)
    c.advance([700])
    assert len(allowed(c)) == 1023


def test_what_begins_as_reasoning_does_may_be_the_grammars(constraint, tokenizer):
    """Where a mark is several tokens, of which a call may share the first ones."""
    start, end = (tuple(tokenizer.encode(text, False)) for text in ("<think>", "</think>"))
    answer = tokenizer.encode("<that>", False)
    shared = next(i for i, pair in enumerate(zip(start, answer, strict=False)) if pair[0] != pair[1])
    assert shared > 0
    for step in (1, 10):
        c = constraint({"choice": ["<that>"]}, reasoning_start_ids=start, reasoning_end_ids=end)
        for i in range(0, len(answer), step):
            assert start[i] in allowed(c) if i <= shared else True
            assert answer[i] in allowed(c) and len(allowed(c)) < 10
            c.advance(answer[: i + step])
        assert allowed(c) == {EOS} and not c.error
        c = constraint({"choice": ["<that>"]}, reasoning_start_ids=start, reasoning_end_ids=end)
        for i in range(0, len(start), step):
            assert start[i] in allowed(c) and len(allowed(c)) < 10
            c.advance(start[: i + step])
        assert len(allowed(c)) == 1023
        c.advance([*start, 90, *end])
        assert answer[0] in allowed(c) and len(allowed(c)) < 10 and not c.error


def test_the_end_of_reasoning_may_spell_white_space_too(constraint, tokenizer):
    """`>` and a line break are one token of some models."""
    end = tuple(tokenizer.encode("</t>", False))
    c = constraint({"choice": ["yes"]}, reasoning_end_ids=end, reasoning_last_ids=(700,))
    for not_yet in ([700], [*end[:-2], 700], [*end[:-1], 701]):
        c.advance([90, *not_yet])
        assert len(allowed(c)) == 1023
        c = constraint({"choice": ["yes"]}, reasoning_end_ids=end, reasoning_last_ids=(700,))
    c.advance([90, *end[:-1], 700])
    assert {tokenizer.token(id)[0] for id in allowed(c)} == {"y"}


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("asked", [None, {"choice": ["yes"]}])
def test_a_budget_ends_reasoning(constraint, tokenizer, budget, asked):
    end = tuple(tokenizer.encode("</t>", False))
    assert len(end) > 2
    c, output = constraint(asked, reasoning_end_ids=end, thinking_token_budget=budget), []
    for _ in range(budget):
        output.append(90)
        c.advance(output)
    for token in end:
        assert allowed(c) == {token}
        output.append(token)
        c.advance(output)
    assert len(allowed(c)) == 1024 if asked is None else {tokenizer.token(id)[0] for id in allowed(c)} == {"y"}


def test_the_end_of_reasoning_that_was_begun_is_not_written_twice(constraint, tokenizer):
    end = tuple(tokenizer.encode("</t>", False))
    c = constraint(None, reasoning_end_ids=end, thinking_token_budget=3)
    c.advance([90, 90, end[0]])
    assert allowed(c) == {end[1]}


def test_own_lists_hold_beside_the_grammar(constraint, tokenizer):
    digits = [tokenizer.encode(str(n), False)[0] for n in range(10)]
    barred = ((digits[1], digits[2]),)
    c = constraint({"regex": r"\d{1,4}"}, allowed_token_ids=digits[:5], min_tokens=2, bad_word_ids=barred)
    assert allowed(c) == set(digits[:5])
    c.advance([digits[1]])
    assert allowed(c) == set(digits[:5]) - {digits[2]}
    c.advance([digits[1]] * 2)
    assert allowed(c) == set(digits[:5]) - {digits[2]}  # EOS is none of the allowed tokens
    c = constraint({"choice": ["1"]}, min_tokens=9)
    c.advance([digits[1]])
    assert allowed(c) == {EOS}  # what is complete ends
    assert "leave no token" in constraint({"choice": ["1"]}, allowed_token_ids=digits[2:5]).error


def test_what_a_grammar_forbids_is_an_error(constraint, tokenizer):
    c = constraint({"choice": ["yes"]})
    c.advance(tokenizer.encode("no", False))
    assert c.error.startswith("the structured output cannot go on") and not allowed(c)


def test_a_panic_of_the_library_is_an_error_of_the_request(grammars, constraint, monkeypatch):
    class Panic(BaseException):  # as the library's is
        pass

    def fail(*args):
        raise Panic("deep inside")

    c = constraint({"choice": ["yes"]})
    monkeypatch.setattr("text.grammar.mask_of", fail)
    c.advance([5])
    assert "deep inside" in c.error
    monkeypatch.setattr("text.sandbox.mask_of", fail)
    with pytest.raises(ValueError, match="cannot be compiled: deep inside"):
        grammars.compile(StructuredOutputsParams(regex="ab")).result()


class Stub:
    """Has the attributes that it is given."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def test_a_mask_that_takes_long_holds_up_its_sequence_alone(grammars, constraint, monkeypatch):
    def sequence(c):
        group = Stub(num_prompt=1, params=c.params, beam=None)
        return Stub(constraint=c, num_computed=1, tokens=[5, 6], proposed=[], group=group)

    slow, quick, waits = (sequence(constraint({"regex": ".*"})) for _ in range(3))
    waits.num_computed = 2  # a step in flight brings its next token
    go_on = threading.Event()
    slow.constraint.advance = lambda output: go_on.wait()
    monkeypatch.setattr("text.grammar.PATIENCE", 0.2)
    behind, failed = grammars.look([slow, quick, waits])
    assert behind == {slow, waits} and not failed
    assert quick.constraint.num_read == 1
    monkeypatch.setattr("text.grammar.MASK_TIMEOUT", 0.0)
    _, failed = grammars.look([slow])
    assert "more than 0 s" in failed[slow.group]
    go_on.set()


@pytest.mark.parametrize(
    "asked", [{"choice": ["maybe" * 50_000]}, {"regex": "(maybe){50000}"}, {"json": {"const": "maybe" * 50_000}}]
)
def test_a_long_text_takes_no_longer_for_a_token(grammars, constraint, tokenizer, asked):
    """Each of its masks took 0.2 s, because llguidance looked for the tokens of all that has to follow."""
    begun = time.process_time()
    text = ('"' if "json" in asked else "") + "maybe" * 20
    made = constraint(asked)
    ids = tokenizer.encode(text, False)
    for i in range(1, len(ids) + 1):
        made.advance(ids[:i])
    assert not made.error and made.mask.any()
    assert time.process_time() - begun < 2


def test_grammars_are_compiled_once(grammars):
    wanted = StructuredOutputsParams(regex="abc+")
    assert grammars.compile(wanted) is grammars.compile(StructuredOutputsParams(regex="abc+"))


def test_the_cache_counts_bytes(grammars, monkeypatch):
    """2,000 texts of 20 characters take far more memory than characters."""
    large, small = (StructuredOutputsParams(choice=[f"{i:020}" for i in range(n)]) for n in (2000, 2))
    size = grammars.compile(large).result(30).size
    assert size > 10 * large.size
    monkeypatch.setattr("text.grammar.MAX_CACHED", size)
    grammars.compile(small)
    assert [*grammars.cache] == [small]


# --- answers ----------------------------------------------------------------------------------------------------------

ASKED = (
    {"regex": "[a-c]{30}"},
    {"json": PERSON, "disable_any_whitespace": True},
    {"choice": ["yes it is", "no"]},
    None,
)


def requests(count: int) -> tuple[list[str], list[SamplingParams]]:
    prompts = [f"To be, or not {i}" for i in range(count)]
    return prompts, [
        SamplingParams(temperature=1.0, seed=i, max_tokens=40, structured_outputs=asked, ignore_eos=asked is None)
        for i, asked in zip(range(count), cycle(ASKED), strict=False)
    ]


def holds(asked: dict | None, text: str) -> bool:
    if asked is None:
        return True
    if "regex" in asked:
        return re.fullmatch(asked["regex"], text) is not None
    if "choice" in asked:
        return text in asked["choice"]
    value = json.loads(text)
    return list(value) == ["name", "age"] and len(value["name"]) <= 8 and value["age"] >= 0


@pytest.fixture(scope="module")
def undisturbed(llm):
    prompts, params = requests(16)
    return [out.outputs[0].text for out in llm.generate(prompts, params, use_tqdm=False)]


def test_answers_are_what_was_asked(undisturbed):
    for text, asked in zip(undisturbed, cycle(ASKED), strict=False):
        assert holds(asked, text), text


STARVED = {"num_gpu_blocks_override": 9, "block_size": 8, "max_model_len": 64}


@pytest.mark.parametrize(
    "fields",
    [
        {**STARVED, "preemption_mode": "recompute"},
        pytest.param({**STARVED, "preemption_mode": "swap", "swap_space": 0.05}, marks=pytest.mark.long),
        pytest.param({"max_num_batched_tokens": 16, "max_num_seqs": 8}, marks=pytest.mark.full),
        pytest.param({"enable_chunked_prefill": False}, marks=pytest.mark.long),
        pytest.param({"distributed_executor_backend": "mp", "async_scheduling": True}, marks=pytest.mark.full),
    ],
    ids=["recompute", "swap", "chunks", "classic", "ahead"],
)
def test_answers_are_the_same_whatever_happens(make_llm, undisturbed, fields):
    prompts, params = requests(16)
    with make_llm(**fields) as llm:
        llm.generate(prompts[: len(ASKED)], params[: len(ASKED)], use_tqdm=False)  # no request waits for its grammar
        assert [out.outputs[0].text for out in llm.generate(prompts, params, use_tqdm=False)] == undisturbed
        counters = llm.core.scheduler.counters
        assert "preemption_mode" not in fields or counters["num_preemptions_total"] > 0


def test_samples_and_beams(llm):
    form = StructuredOutputsParams(regex="(yes|no|maybe), [ab]{3}")
    drawn = llm.generate("To be", SamplingParams(n=8, seed=1, max_tokens=30, structured_outputs=form), use_tqdm=False)
    params = SamplingParams(n=4, use_beam_search=True, temperature=0, max_tokens=30, structured_outputs=form)
    outputs = llm.generate("To be", params, use_tqdm=False)
    texts = [answer.text for out in (*drawn, *outputs) for answer in out.outputs]
    assert len(texts) == 12 and all(re.fullmatch(form.regex, text) for text in texts)
    assert len({answer.text for answer in drawn[0].outputs}) > 1
    scores = [answer.cumulative_logprob for answer in outputs[0].outputs]
    assert scores == sorted(scores, reverse=True) and scores[0] > -10  # among the allowed tokens


@pytest.mark.parametrize(("choice", "max_tokens"), [(["yes" * 30, "no" * 30], 1), (["!"], 3)])
def test_a_search_that_finds_too_few_answers_says_so(llm, choice, max_tokens):
    """And the `n` that it names has as many."""
    ask = functools.partial(SamplingParams, use_beam_search=True, temperature=0, max_tokens=max_tokens)
    structure = StructuredOutputsParams(choice=choice)
    message = "n is 8, but the request's other fields allow only (.) answers; it must be at most"
    with pytest.raises(ValueError, match=message) as error:
        llm.generate("To be", ask(n=8, structured_outputs=structure), use_tqdm=False)
    most = int(re.search(message, str(error.value))[1])
    output = llm.generate("To be", ask(n=most, structured_outputs=structure), use_tqdm=False)[0]
    assert len(output.outputs) == most and output.error is None
    check_integrity(llm.core.scheduler)


def test_logprobs_are_the_models_own_unless_asked(llm):
    params = SamplingParams(
        temperature=0, max_tokens=20, logprobs=3, structured_outputs=StructuredOutputsParams(choice=["maybe", "yes"])
    )
    unmasked, masked = (
        llm.generate("To be", dataclasses.replace(params, masked_logprobs=is_masked), use_tqdm=False)[0].outputs[0]
        for is_masked in (False, True)
    )
    assert unmasked.token_ids == masked.token_ids
    for token, a, b in zip(unmasked.token_ids, unmasked.logprobs, masked.logprobs, strict=True):
        assert a[token].logprob < b[token].logprob <= 0
        assert sum(math.exp(entry.logprob) for entry in b.values()) == pytest.approx(1)  # no fourth is allowed


def test_an_end_comes_even_where_it_is_ignored(llm):
    params = SamplingParams(ignore_eos=True, min_tokens=30, max_tokens=40, structured_outputs={"choice": ["yes"]})
    (out,) = llm.generate("To be", params, use_tqdm=False)
    assert out.outputs[0].text == "yes" and out.outputs[0].finish_reason == "stop"


def test_a_bad_grammar_is_refused_before_anything_runs(llm):
    with pytest.raises(ValueError, match="unclosed group"):
        llm.generate("To be", SamplingParams(structured_outputs={"regex": "("}), use_tqdm=False)
    params = SamplingParams(allowed_token_ids=(900,), structured_outputs={"choice": ["yes"]})
    with pytest.raises(ValueError, match="leave no token"):
        llm.generate("a", params, use_tqdm=False)
    assert not llm.core.has_work()


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.full)])
def test_a_journal_replays_them(make_llm, tmp_path, count):
    from replay import replay

    path = tmp_path / "journal"
    prompts, params = requests(count)
    with make_llm(log_scheduler=str(path), num_gpu_blocks_override=20, block_size=8, max_model_len=64) as llm:
        llm.generate(prompts, params, use_tqdm=False)
    lines = path.read_text().splitlines()
    assert any('"late"' in line for line in lines)
    replay(lines)


def test_a_request_waits_for_its_grammar_while_others_run(llm):
    """As in a server, whose loop goes on. An id is taken from the first; one that is given up is forgotten."""
    compiled: Future[None] = Future()
    params = SamplingParams(temperature=0, max_tokens=4, structured_outputs=StructuredOutputsParams(regex="abc?"))
    core, ended = llm.core, set()
    grammar = core.grammars.compile(params.structured_outputs).result()
    core.grammars.cache[params.structured_outputs] = compiled
    for name in ("held", "left"):
        core.add(EngineCoreRequest(name, [5, 6], params))
    with pytest.raises(ValueError, match="'held' is in use"):
        core.add(EngineCoreRequest("held", [5], SamplingParams(max_tokens=1)))
    core.add(EngineCoreRequest("free", [5, 6], SamplingParams(temperature=0, max_tokens=4)))
    core.abort("left")
    while core.has_work():
        ended |= {output.request_id for output in core.step() if output.finish_reason}
        if ended == {"free"} and not compiled.done():
            compiled.set_result(grammar)
    assert ended == {"free", "held"} and not core.grammars.waiting


def test_the_grammar_of_a_request_that_is_aborted_is_not_compiled(llm):
    wanted = StructuredOutputsParams(json={"type": "integer", "multipleOf": 99999989})
    llm.core.add(EngineCoreRequest("left", [5, 6], SamplingParams(max_tokens=4, structured_outputs=wanted)))
    grammar = llm.core.grammars.waiting["left"].grammar
    llm.core.abort("left")
    assert grammar.cancelled() and not llm.core.has_work()


def test_an_abort_leaves_another_requests_grammar_alone(llm):
    """Also where the cache has dropped the one under way, and it is compiled anew."""
    wanted = StructuredOutputsParams(json={"type": "integer", "multipleOf": 99999941})
    for name in ("left", "kept"):
        llm.core.add(EngineCoreRequest(name, [5, 6], SamplingParams(max_tokens=4, structured_outputs=wanted)))
        llm.core.grammars.cache.clear()
    grammars = [llm.core.grammars.waiting[name].grammar for name in ("left", "kept")]
    llm.core.abort("left")
    assert grammars[0] is not grammars[1] and not grammars[1].cancelled()
    llm.core.abort("kept")
    assert not llm.core.has_work()


def test_a_grammar_that_takes_too_long_is_refused(llm):
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="a(b|c)d?"))
    llm.core.grammars.cache[params.structured_outputs] = Future()
    llm.core.add(EngineCoreRequest("slow", [5, 6], params))
    assert not [*llm.core.step()]
    llm.core.grammars.deadlines[llm.core.grammars.waiting["slow"]] = 0.0
    (refused,) = llm.core.step()
    assert refused.finished and "took more than 20 s to compile" in refused.error and not llm.core.has_work()


# --- answers that cannot go on ----------------------------------------------------------------------------------------

LETTERS_ONLY = {"structured_outputs": {"regex": "[a-z]{6}[0-9]{3}"}, "temperature": 1.0, "max_tokens": 60, "seed": 1}


@pytest.fixture(scope="module")
def stuck(tokenizer):
    """Parameters of an answer that comes to where only a digit may follow, and no digit is allowed."""
    letters = [id for id in range(1024) if re.fullmatch("[a-z]", tokenizer.decode([id]))]
    return SamplingParams(allowed_token_ids=tuple(letters), **LETTERS_ONLY)


def run_to_the_end(core) -> list:
    news = []
    while core.has_work():
        news += core.step()
    return news


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.full), True], ids=["in turn", "ahead"])
def test_an_answer_without_a_next_token_ends_with_an_error_once_and_no_token_of_it_leaves(make_llm, stuck, ahead):
    fine = SamplingParams(max_tokens=20, seed=1, structured_outputs=StructuredOutputsParams(regex="[a-z ]{400}"))
    with make_llm(async_scheduling=ahead) as llm:
        for name, params in (("fine", fine), ("stuck", stuck)):
            llm.core.add(EngineCoreRequest(name, [5, 6, 7], params), at_once=True)
        news = run_to_the_end(llm.core)
    ends = [(output.request_id, output.finish_reason) for output in news if output.finished]
    assert sorted(ends) == [("fine", "length"), ("stuck", "error")]
    (why,) = {output.error for output in news if output.error}
    assert "leave no token" in why
    said = {id for output in news if output.request_id == "stuck" for id in output.token_ids}
    assert said <= {*stuck.allowed_token_ids}


def test_who_has_left_is_not_told_that_its_answer_cannot_go_on(llm, stuck):
    core = llm.core
    core.add(EngineCoreRequest("stuck", [5, 6, 7], stuck), at_once=True)
    while not core.scheduler.running or len(core.scheduler.running[0].tokens) < 6:
        assert not any(output.finished for output in core.step())
    (seq,) = core.scheduler.others
    seq.constraint.error = "it cannot go on"
    core.abort("stuck")
    assert not core.scheduler.others and not run_to_the_end(core)


def test_beams_that_have_ended_are_looked_at_no_more(llm):
    structure = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(n=2, use_beam_search=True, temperature=0, max_tokens=8, structured_outputs=structure)
    llm.core.add(EngineCoreRequest("beams", [5, 6, 7], params), at_once=True)
    while llm.core.scheduler.requests:
        llm.core.step()
    assert not llm.core.scheduler.others


def test_a_mask_that_does_not_come_after_a_preemption_ends_its_answer_alone(make_llm, monkeypatch):
    """Who was preempted may be let in while its mask is still being made: `fill` waits, but not for ever."""
    monkeypatch.setattr("text.grammar.MASK_TIMEOUT", 0.05)
    structure = StructuredOutputsParams(regex="[a-z ]{400}")
    params = SamplingParams(max_tokens=30, seed=1, structured_outputs=structure)
    free, go_on = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True), threading.Event()
    with make_llm() as llm:
        core = llm.core
        core.add(EngineCoreRequest("slow", [5, 6, 7], params), at_once=True)
        core.add(EngineCoreRequest("free", [5, 6], free))
        while not core.scheduler.running or len(core.scheduler.running[0].tokens) < 6:
            core.step()
        core._start_over(False, None)  # as a preemption by recompute does, for all
        seq = core.scheduler.requests["slow"].seqs[0]
        seq.constraint.num_read -= 1
        seq.constraint.advance = lambda output: go_on.wait()
        news = run_to_the_end(core)
        go_on.set()
    ends = {output.request_id: output for output in news if output.finished}
    assert ends["free"].finish_reason == "length" and "more than 0.05 s" in ends["slow"].error
    assert not [output for output in news if output.request_id == "slow" and output.token_ids]
