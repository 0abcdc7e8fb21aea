"""Answers of models, as their templates write them, read whole and in pieces, and the grammars that make them."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from counting import Compared
from text.lark_rules import MAY_BE_SPECIAL, Lark, types_of
from text.scanning import LONGEST_NAME
from text.tools import REASONING_PARSERS, TOKEN, TOOL_PARSERS, call_grammar, new_reader, tool_parser_of

DATA = json.loads((Path(__file__).parent.parent / "data" / "tool_answers.json").read_text())
TOOLS = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in DATA["tools"].items()]
OTHER_TOOLS = [{"type": "function", "function": {"name": "ж"}}]
SPECIAL = frozenset({"</s>", "<|im_end|>", "<tool_call>", "<escape>"}) | {
    text
    for answer in DATA["answers"]
    for text in re.findall(r"<[|｜][^<>\s]+>|<[^<>\s]+[|｜]>|\[[A-Z_]+\]", answer["text"])
}


def read(pieces, tool_parser=None, reasoning_parser=None, tools=TOOLS, prompt="", special=SPECIAL):
    """What an answer turns out to be: content, reasoning, and calls with names, arguments and ids."""
    reader = new_reader(tool_parser, reasoning_parser, tools, prompt, special)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end()
    calls = []
    for part in parts:
        if part.name:
            assert part.call == len(calls) and part.arguments
            calls.append([part.name, "", part.id])
        if part.call is not None:
            calls[part.call][1] += part.arguments
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), calls


def cuts(text):
    """The ways in which a text is cut: not at all, everywhere, once at many places, and in threes."""
    yield [text]
    yield list(text)
    yield from ([text[:i], text[i:]] for i in range(1, len(text), 1 + len(text) // 50))
    yield [text[i : i + 3] for i in range(0, len(text), 3)]


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", DATA["answers"], ids=lambda answer: answer["parser"])
def test_answers_are_read(answer):
    whole = read([answer["text"]], answer["parser"])
    content, reasoning, calls = whole
    assert content == answer["content"] and reasoning == answer.get("reasoning", "")
    assert [[name, json.loads(arguments)] for name, arguments, _ in calls] == answer["calls"]
    assert [id for _, _, id in calls] == answer.get("ids", [""] * len(calls))
    for pieces in cuts(answer["text"]):
        assert read(pieces, answer["parser"]) == whole


FORMATS = sorted({id(format): parser for parser, format in reversed(TOOL_PARSERS.items())}.values())  # without aliases


def test_every_format_has_an_answer():
    assert {answer["parser"] for answer in DATA["answers"] if answer["calls"]} >= set(FORMATS)


@pytest.mark.parametrize(
    ("parser", "before", "text", "arguments"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": ', '{"a": "a', '{"a": "a'),
        ("qwen3_coder", "<tool_call>\n<function=search>\n", "<parameter=q>\na b", '{"q": "a b'),
        ("pythonic", "[search(", "q='a b", '{"q": "a b'),
        ("kimi_k2", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>", '{"a": "', '{"a": "'),
        ("openai", "<|channel|>commentary to=functions.add<|message|>", '{"a": "', '{"a": "'),
    ],
)
def test_a_call_begins_with_its_arguments_and_they_come_as_they_are_written(parser, before, text, arguments):
    reader = new_reader(parser, None, TOOLS, "", SPECIAL)
    assert reader.feed(before) == []
    assert [(part.name in before, part.arguments) for part in reader.feed(text)] == [(True, arguments)]
    assert [part.arguments for piece in "xyz" for part in reader.feed(piece)] == list("xyz")


def test_special_tokens_are_left_out_where_they_are_no_syntax():
    text = 'a<|im_end|>b<tool_call>{"name": "search", "arguments": {"q": "x<|im_end|>"}}</tool_call></s>'
    for pieces in cuts(text):
        assert read(pieces, "hermes") == ("ab", "", [["search", '{"q": "x"}', ""]])


def test_without_tools_there_are_no_calls():
    for answer in DATA["answers"]:
        if answer["parser"] != "openai":
            assert read([answer["text"]], answer["parser"], tools=[], special=()) == (answer["text"], "", [])


def pieces_of(parser):
    """Texts that mean something in a format, and some that do not."""
    format = TOOL_PARSERS[parser]
    texts = [text for text in format.syntax if text]
    if thinking := REASONING_PARSERS.get(parser):
        texts += thinking.starts + thinking.ends + thinking.openers + thinking.closers
    texts += [text[: len(text) // 2] for text in texts]
    texts += [*"{}[]()<>:;,='\"\\ \n", "search", "add", "name", '"name": "search"', '"arguments": {"q": "x"}']
    texts += ["call:", "q", "a=1", "1", "True", "functions.add:0", "```json\n", "functools", "é", "\\u"]
    texts += [" to=functions.add"]
    texts += [answer["text"] for answer in DATA["answers"] if answer["parser"] == parser][:4]
    return st.lists(st.sampled_from(texts), max_size=12)


@pytest.mark.parametrize("parser", FORMATS)
@settings(max_examples=20)
@given(data=st.data())
def test_any_text_is_read_alike_however_it_is_cut(parser, data):
    text = "".join(data.draw(pieces_of(parser)))
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    thinking = None if parser == "openai" else parser if parser in REASONING_PARSERS else "qwen3"
    whole = read([text], parser, thinking)
    assert read(pieces, parser, thinking) == whole
    assert read(list(text), parser, thinking) == whole


@pytest.mark.parametrize("parser", sorted({*FORMATS} - {"openai"}))
@settings(max_examples=20)
@given(data=st.data())
def test_what_is_no_call_is_content_to_the_last_character(parser, data):
    text = "".join(data.draw(pieces_of(parser)))
    for end in filter(TOKEN.fullmatch, TOOL_PARSERS[parser].ends):  # which would be left out
        text = text.replace(end, " ")
    assert read(list(text), parser, tools=OTHER_TOOLS, special=()) == (text, "", [])


@pytest.mark.parametrize("answer", [a for a in DATA["answers"] if a["calls"]][::3], ids=lambda answer: answer["parser"])
@settings(max_examples=10)
@given(before=st.text("ab жé.\n"), after=st.text("ab жé.\n"))
def test_text_around_calls_is_content(answer, before, after):
    if answer["parser"] == "openai" or answer["content"]:
        return
    content, _, calls = read([before + answer["text"] + after], answer["parser"])
    assert content == "\n".join(filter(None, (before.rstrip(), after.lstrip())))
    assert [[name, json.loads(arguments)] for name, arguments, _ in calls] == answer["calls"]


def test_the_reader_is_quick_with_long_texts():
    """The work for each piece does not grow with the text: 40,000 pieces take no 40,000 readings of it."""
    code = json.dumps("line\n" * 20_000)
    text = f'<tool_call>\n{{"name": "write_file", "arguments": {{"content": {code}}}}}\n</tool_call>'
    assert read([text[i : i + 3] for i in range(0, len(text), 3)], "hermes") == read([text], "hermes")


# --- which format a template wants -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ('<tool_call>\\n{"name": \' + tool_call.name', "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>", "glm47"),
        ("{{- '<|tool_call>call:' + function['name'] + '{' -}}", "gemma4"),
        ("'<start_function_call>call:' + tool_call.name", "functiongemma"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '\\n' + '```json'", "deepseek_v3"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'", "deepseek_v31"),
        ('{{- "[TOOL_CALLS] [" }}', "mistral"),
        ("<|channel|>commentary json<|message|> <|call|>", "openai"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ("<|start_of_role|>assistant<|end_of_role|><|tool_call|>", "granite"),
        ("<|tool|>{{ message['tools'] }}<|/tool|>", "phi4_mini_json"),
        ('<|START_ACTION|>[\n    {"tool_call_id": "{{ tool_idx.value }}", "tool_name": "', "cohere_command3"),
        ('<|START_ACTION|>[\n    {"tool_call_id": "{{ i }}" <|START_TEXT|>{{ content }}', "cohere_command4"),
        ('助手：开头。<tool_calls>[{"name": "func_name1", "arguments": {"argument1": "value1"}},...]', "hunyuan_a13b"),
        ("<tool_calls><tool_call>' + tool['function']['name'] + '\n' + '```json' + '\n' + arguments", "hunyuan_dense"),
        ("<tool_call>\n{\"name\": ' + tool_call.name '<response>\n' + content", "ernie45"),
        ("{%- set tool_calls_token = '<|tools_prefix|>' -%}", "apertus"),
        ('{%- set dsml_token = "｜DSML｜" -%}<{{ dsml_token }}function_calls>', "deepseek_v32"),
        ('<tool_calls>[\n    {"name": "', "jamba"),
        ('[{"name": "tool_call_name", "arguments": {"arg1": "value1", "arg2": "value2"}}, ...', "xlam"),
        # Each has a text that another format's sign would match.
        ("set toolcall_begin_token = '<minimax:tool_call>' <invoke name= {{- '\\n<response>' }}", "minimax_m2"),
        ("role_sep=\"<|role_sep|>\\n\" {'role': 'function call', 'content': '{\"name\": ' ~ name", "gigachat3"),
        ("role_sep=\"<|role_sep|>\\n\", function_call=\"<|function_call|>\" `function call`", "gigachat31"),
        ("'<function name=\"' ~ name ~ '\"><param name=\"' split('<tool_sep>') <tool_response>", "minicpm5"),
        ("<dots_function_call>\n<invoke name=", "dots"),
        ('formatted as functools[{"name": [function name], "arguments": ', "functools"),
        ("<|header_start|>ipython<|header_end|> Use exact format: [func_name1(param1=value1), func_name2(...)]",
         "llama4_pythonic"),
        ("<|start_header_id|> [func_name1(param1=value1), func_name2(...)]", "pythonic"),
        ("<TOOLCALL>[{{ tool_calls }}]</TOOLCALL>", "nemotron_json"),
        ("<|tool_calls|><|tool_call:begin|>{{ id }}<|tool_call:name|>", "solar_open"),
        # These are unknown.
        ("```json\n[{\"tool_name\": title of the tool in the specification, \"parameters\": ", None),
        ("<function={{ name }}>{\"example_name\": \"example_value\"}</function>", None),
        ("<|im_start|>assistant", None),
    ],
)  # fmt: skip
def test_a_template_says_its_format(template, parser):
    assert tool_parser_of(template) == parser


# --- grammars --------------------------------------------------------------------------------------------------------

CLOSED = {"type": "object", "additionalProperties": False}
WRITTEN = {
    "get_weather": CLOSED | {
        "properties": {
            "city": {"type": "string", "description": '"%json" </parameter> <|call|>'},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"type": "string", "enum": ["c", 'f"\n']},
            "exact": {"type": "boolean"},
            "note": {"anyOf": [{"$ref": "#/$defs/note"}, {"type": "null"}]},
            "kind": {"allOf": [{"$ref": "#/$defs/kind"}]},
            "where": {"$ref": "#/$defs/place"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
            "code": {"type": "string", "pattern": "^[a-z]{2}/[0-9]+$"},
            "short": {"type": "string", "minLength": 1, "maxLength": 4},
        },
        "required": ["city", "days"],
        "$defs": {
            "place": CLOSED | {"properties": {"lat": {"type": "number"}}, "required": ["lat"]},
            "note": {"type": "string", "maxLength": 9}, "kind": {"type": "string", "enum": ["a", "b"]},
        },
    },
    "now": CLOSED | {"properties": {}},
    "get": CLOSED | {"properties": {"a-b": {"type": ["integer", "null"]}, "c.d": {"type": "string"}}},
}  # fmt: skip
WRITTEN_TOOLS = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in WRITTEN.items()]


class Bytes:
    """A tokenizer of bytes and of special tokens."""

    def __init__(self, special):
        self.tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in special] + [b"</s>"]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.bos_token_id = self.eos_token_id = len(self.tokens) - 1
        self.ids = {text: 256 + i for i, text in enumerate(special)}

    def __call__(self, text):
        return list(text)

    def encode(self, text):
        """The tokens of a text, special ones where they are written."""
        pieces = re.split(f"({'|'.join(map(re.escape, self.ids)) or '(?!)'})", text)
        return [id for piece in pieces for id in ([self.ids[piece]] if piece in self.ids else piece.encode())]


def random_walk(parser, required, parallel, special, rng):
    """A text that a grammar allows; None if it did not come to its end.

    At times the walk writes a text of the format's own, because nobody writes one by chance.
    """
    tokenizer = Bytes(special)
    grammar = call_grammar(parser, WRITTEN_TOOLS, required, parallel, tokenizer.ids.get)
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(tokenizer)), grammar)
    assert not matcher.get_error()
    syntax = [tokenizer.encode(before + text) for text in TOOL_PARSERS[parser].syntax for before in ("", "\n") if text]
    walked = []
    if rng.random() < 0.7 and matcher.try_consume_tokens(syntax[0]) == len(syntax[0]):
        walked += syntax[0]
    else:
        matcher.reset()
    for _ in range(600):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask).tolist()
        if matcher.is_stopped() or (matcher.is_accepting() and (rng.random() < 0.3 or len(walked) > 80)):
            return b"".join(tokenizer.tokens[id] for id in walked).decode()
        if rng.random() < 0.3:
            text = rng.choice(syntax)
            consumed = matcher.try_consume_tokens(text)
            if consumed == len(text):
                walked += text
                continue
            matcher.rollback(consumed)
        likely = [id for id in allowed if id != tokenizer.eos_token_id and (id > 255 or chr(id) in '"}],0123456789\n')]
        id = rng.choice(likely if likely and rng.random() < (0.5 if len(walked) < 200 else 0.9) else allowed)
        if id == tokenizer.eos_token_id:
            return b"".join(tokenizer.tokens[id] for id in walked).decode()
        assert matcher.consume_token(id)
        walked.append(id)
    return None


def special_of(parser):
    """The markers of a format, which its models have as special tokens."""
    return sorted(set(MAY_BE_SPECIAL.findall(" ".join(TOOL_PARSERS[parser].syntax))))


@pytest.mark.parametrize(
    ("special", "rounds"),
    [
        pytest.param(True, 2, id="few"),
        pytest.param(True, 4, id="True", marks=pytest.mark.full),
        pytest.param(False, 4, id="False", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("parser", FORMATS)
def test_what_a_grammar_allows_is_read_as_calls_that_follow_the_schemas(parser, special, rounds):
    if parser == "openai" and not special:
        pytest.skip("harmony's markers are special tokens")
    rng, called = random.Random(1), 0
    tokens = special_of(parser) if special else []
    for required, parallel in ((True, True), (True, False), (False, True), (False, False)) * rounds:
        text = random_walk(parser, required, parallel, tokens, rng)
        if text is None:
            continue
        content, _, calls = read([text], parser, tools=WRITTEN_TOOLS, special=frozenset(tokens))
        for mark in getattr(TOOL_PARSERS[parser], "response", ()):  # which reasoning's parser leaves out
            content = content.replace(mark, "").strip()
        assert calls or not required, text
        assert not (required and content), text
        assert parallel or len(calls) <= 1, text
        for name, arguments, _ in calls:
            jsonschema.validate(json.loads(arguments), WRITTEN[name])
        called += len(calls)
    assert called >= 5 * rounds / 4


def allows(grammar, text, special=()):
    tokenizer = Bytes(special)
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(tokenizer)), grammar)
    assert not matcher.get_error(), matcher.get_error()
    tokens = tokenizer.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("answer", [a for a in DATA["answers"] if "template" in a["source"] and not a["content"]],
                         ids=lambda answer: answer["parser"])  # fmt: skip
def test_a_grammar_allows_what_the_models_template_writes(answer):
    used = {name for name, _ in answer["calls"]}
    tools = [tool for tool in TOOLS if tool["function"]["name"] in used]
    special = [text for text in special_of(answer["parser"]) if text in answer["text"]]
    for tokens in ([], special) if "[ARGS]" not in special else (special,):
        ids = Bytes(tokens).ids
        assert allows(call_grammar(answer["parser"], tools, True, True, ids.get), answer["text"].strip(), tokens)


def test_a_model_may_write_text_or_is_held_to_a_call():
    auto = call_grammar("hermes", WRITTEN_TOOLS, False, True, lambda text: None)
    required = call_grammar("hermes", WRITTEN_TOOLS, True, True, lambda text: None)
    single = call_grammar("hermes", WRITTEN_TOOLS, True, False, lambda text: None)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for grammar in (auto, required, single):
        assert allows(grammar, call)
        assert not allows(grammar, call.replace("now", "later"))
        assert not allows(grammar, call.replace("{}", '{"a": 1}'))
    assert allows(auto, "Hello") and allows(auto, "Hello\n" + call) and allows(auto, "")
    assert not allows(required, "Hello") and not allows(required, "Hello\n" + call)
    assert allows(required, call + "\n" + call) and not allows(single, call + "\n" + call)


def test_names_stay_names_whatever_they_hold():
    odd = 'a"b\\ <tool_call> %json {} /x/'
    tools = [{"type": "function", "function": {"name": odd, "parameters": {"properties": {odd: {"const": 'é"'}}}}}]
    text = "<tool_call>\n" + json.dumps({"name": odd, "arguments": {odd: 'é"'}}, ensure_ascii=False) + "\n</tool_call>"
    assert allows(call_grammar("hermes", tools, True, False, lambda text: None), text)
    assert read([text], "hermes", tools=tools)[2] == [[odd, json.dumps({odd: 'é"'}, ensure_ascii=False), ""]]
    with pytest.raises(ValueError, match="cannot write"):
        call_grammar("qwen3_coder", tools, True, False, lambda text: None)


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "gemma4", "pythonic"])
@pytest.mark.parametrize(
    "schema",
    [
        {
            "properties": {"a": {"$ref": "#/$defs/a"}},
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/b"}]}},
        },
        {"properties": {"a": {"type": [{}, 1]}, "b": {"enum": 3}, "c": 5, "d": {"anyOf": [True, {}]}}, "required": 7},
        {"properties": {"a": {"type": "string", "maxLength": "1}/ x", "pattern": 'a\\/b/c\n"'}}},
        {"properties": None, "$defs": 3},
    ],
)
def test_odd_schemas_do_no_harm(parser, schema):
    """A request can hold any JSON; what llguidance cannot compile is refused there."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = call_grammar(parser, tools, True, False, lambda text: None)
    assert all(re.match(r"(start|TEXT|r\d+|L?V\d+)(\[lazy\])?: ", line) for line in grammar.splitlines())
    for text in ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", "[f(a=1)]"):
        calls = read([text], parser, tools=tools)[2]
        assert all(json.loads(arguments)["a"] in (1, "1") for _, arguments, _ in calls)


TAGGED = ("qwen3_coder", "glm45", "deepseek_v32", "minimax_m2", "pythonic", "gemma4")


def a_tool(properties, **more):
    """A list of one tool, which has these parameters."""
    schema = {"type": "object", "properties": properties, **more}
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


@pytest.mark.parametrize("parser", TAGGED)
def test_only_definitions_that_are_referred_to_are_written_and_equal_ones_once(parser):
    definitions = {
        "a/b": {"items": {"$ref": "#/$defs/b"}, "type": "array"}, "b": {"enum": [[1], [2], "DEFINED"]},
        "c": {"description": "UNUSED" * 9000},
    }  # fmt: skip
    tools = a_tool({f"p{i}": {"$ref": "#/%24defs/a~1b"} for i in range(100)}, **{"$defs": definitions})
    grammar = call_grammar(parser, tools, True, True, lambda text: None)
    assert grammar.count("DEFINED") == 1 and "UNUSED" not in grammar
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))
    properties = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/c"}, {"const": [i]}]} for i in range(9)}
    tools = a_tool(properties, definitions={"d": 1})
    tools[0]["function"]["parameters"]["$defs"] = definitions
    with pytest.raises(ValueError, match=r"definitions have \d{6} characters or more; at most 262144 are allowed"):
        call_grammar(parser, tools, True, True, lambda text: None)


@pytest.mark.parametrize("parser", TAGGED)
def test_required_parameters_are_not_sought_one_by_one(parser):
    names = [f"p{i}" for i in range(500)]
    before = Compared.count
    tools = a_tool({name: {"type": "integer"} for name in names}, required=[*map(Compared, names)])
    grammar = call_grammar(parser, tools, True, True, lambda text: None)
    assert Compared.count - before < 8 * len(names) and len(grammar) < 200 * len(names)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("^a/b$", ["a/b"], ["xa/b", "a/bx", "ab"]),
        (r"^a\/b$", ["a/b"], ["ab"]),
        (r"\\/", ["x\\/y"], ["/"]),
        ("b", ["abc", "b"], ["a"]),
        (r"^\$$", ["$"], [""]),
        ("^(?:a|b)$", ["a", "b"], ["ab"]),
    ],
)
def test_the_pattern_of_a_text_is_kept(pattern, right, wrong):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = call_grammar("qwen3_coder", tools, True, False, lambda text: None)
    text = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert all(allows(grammar, text.format(value)) for value in right)
    assert not any(allows(grammar, text.format(value)) for value in wrong)


@pytest.mark.parametrize("special", [(), ("<|content|>", "<|end|>")])
def test_calls_come_after_marks_around_text(special):
    ids = Bytes(special).ids.get
    auto, required = (call_grammar("solar_open", WRITTEN_TOOLS, required, False, ids) for required in (False, True))
    call = (
        "<|tool_calls|><|tool_call:begin|>abcdefghij<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>"
    )
    opening, closing = "<|content|>", "<|end|>"
    for before, text in (("", ""), (opening, ""), (opening, "Hi"), ("", "Hi")):
        for behind in ("", closing):
            assert allows(auto, before + text + behind + call, special)
            assert allows(auto, before + text + behind, special)
            assert allows(required, before + behind + call, special)
            assert not allows(required, before + "Hi" + behind + call, special)


def test_calls_after_a_broken_one_are_content():
    for text, parser in (
        ('{"name": "search", "parameters": {}}; {"name": "unknown", "parameters": {}}', "llama3_json"),
        ("[search(), unknown(a=1)]", "pythonic"),
        ("<tool_call>\n<function=search>\n</function>\n<function=unknown>\n</function></tool_call>", "qwen3_coder"),
        ('[TOOL_CALLS]search{}[TOOL_CALLS]unknown{"a": 1}', "mistral"),
    ):
        for pieces in cuts(text):
            content, _, calls = read(pieces, parser)
            assert calls == [["search", "{}", ""]]
            assert content == text[text.index(content) :] and "unknown" in content


def test_deep_lists_end_a_call():
    for pieces in cuts("[do_something_cool(steps=" + "[" * 300):
        assert read(pieces, "pythonic")[2] == [["do_something_cool", '{"steps": ' + "[" * 256, ""]]


def test_calls_have_no_arguments_that_the_tool_does_not_name():
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": inner, "any": {"type": "object"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = call_grammar("hermes", tools, True, False, lambda text: None)
    for arguments, fine in (
        ('{"a": {"b": 1}, "any": {"x": 1}}', True), ('{"x": 1}', False), ('{"a": {"b": 1, "c": 2}}', False),
    ):  # fmt: skip
        matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes([]))), grammar, log_level=0)
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert (matcher.try_consume_tokens([*text.encode()]) == len(text)) == fine


UNHELD = [
    {"type": "string", "pattern": "^(?=.{1,3}$)[a-z.]+$"},
    {"type": "string", "pattern": r"\bfoo\b"},
    {"type": "string", "pattern": r"^(a|b)\1$"},
    {"type": "object", "patternProperties": {"^a": {"type": "string"}, "b$": {"type": "number"}}},
    {"type": "array", "contains": {"type": "string"}},
]


@pytest.mark.parametrize("parser", ["hermes", "mistral", "qwen3_coder", "pythonic", "openai"])
@pytest.mark.parametrize("unheld", UNHELD)
def test_what_no_grammar_can_hold_a_model_to_is_left_out_unless_the_tool_is_strict(parser, unheld):
    """One strict tool spoils no other."""
    held = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": unheld, "b": {"type": "boolean"}}}
    for strict in (False, True):
        tools = [
            {"type": "function", "function": {"name": "lenient", "parameters": schema}},
            {
                "type": "function",
                "function": {"name": "firm", "parameters": schema if strict else held, "strict": True},
            },
        ]
        if strict:
            with pytest.raises(ValueError, match="the tool 'firm' is strict: no grammar can hold an answer to "):
                call_grammar(parser, tools, True, False, lambda text: None)
        else:
            grammar = call_grammar(parser, tools, True, False, lambda text: None)
            assert not LLMatcher(LLTokenizer(TokenizerWrapper(Bytes([]))), grammar, log_level=0).get_error()


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("float", ["1.5"], ['"a"']), ("tuple", ["[1, 2]"], ["{}"]), ("dict", ['{"b": 1}'], ["[]"]),
        ("any", ['"a"', "[1]", "null"], []), ("whatever", ['"a"', "[1]", "null"], []),
        (["tuple", "null"], ["[]", "null"], ["1"]),
    ],
)  # fmt: skip
def test_types_as_python_names_them(kind, right, wrong):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "dict", "properties": {"a": {"type": kind}}, "required": ["a"],
    }}}]  # fmt: skip
    grammar = call_grammar("hermes", tools, True, False, lambda text: None)
    text = '<tool_call>\n{{"name": "f", "arguments": {{"a": {}}}}}\n</tool_call>'
    assert all(allows(grammar, text.format(value)) for value in right)
    assert not any(allows(grammar, text.format(value)) for value in wrong)
    for value in right:
        written = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        (call,) = read([written], "qwen3_coder", tools=tools)[2]
        assert json.loads(call[1]) in ({"a": json.loads(value)}, {"a": value})
        assert ("string" in types_of({"type": kind})) == (kind in ("any", "whatever"))


@pytest.mark.parametrize("name", [name for name, parser in TOOL_PARSERS.items() if hasattr(parser, "header")])
def test_a_header_that_is_none_is_read_at_once(name: str) -> None:
    """A pattern of cubic time takes a second for what may be a header, and the process serves nobody meanwhile."""
    begun = time.process_time()
    for begin in ("a", "function<｜tool▁sep｜>a", "a[CALL_ID]"):
        for part in (" ", "\n", ":1", "[ARGS]"):
            TOOL_PARSERS[name].header.fullmatch(begin + part * (LONGEST_NAME // len(part)) + "{")
    assert time.process_time() - begun < 0.8


def test_properties_that_are_no_object_are_refused() -> None:
    with pytest.raises(ValueError, match="it must be an object of schemas"):
        [*Lark(lambda text: None).properties({"properties": [1]})]
