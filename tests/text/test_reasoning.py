"""Hidden reasoning: told from content, however an answer is cut, with what its prompt has begun."""

from __future__ import annotations

import functools

import pytest

from test_tools import TOOLS, cuts, read
from test_written_calls import TOOLS as WRITTEN_TOOLS
from test_written_calls import written
from text.tools import REASONING_PARSERS, TOKEN, TOOL_PARSERS, new_reader, read_whole, reasoning_parser_of

# parser, the prompt's end, answer, reasoning, content
ANSWERS = [
    # vllm-project/vllm tests/reasoning/test_qwen3_reasoning_parser.py and test_deepseekr1_reasoning_parser.py
    ("qwen3", "<think>\n", "This is a reasoning section</think>This is the rest", "This is a reasoning section",
     "This is the rest"),
    ("qwen3", "", "<think>This is a reasoning\nsection</think>This is the rest\nThat", "This is a reasoning\nsection",
     "This is the rest\nThat"),
    ("qwen3", "<think>\n", "<think>This is a reasoning section</think>", "This is a reasoning section", ""),
    ("qwen3", "<think>", "This is the rest", "This is the rest", ""),
    ("qwen3", "", "<think>This is a reasoning section", "This is a reasoning section", ""),
    ("qwen3", "<think>\n\n</think>\n\n", "This is plain content", "", "This is plain content"),
    ("qwen3", "", "Some output without think tokens\n", "", "Some output without think tokens\n"),
    ("qwen3", "", "\n Only <think> and </think> in it", "", "\n Only <think> and </think> in it"),
    ("qwen3", "What does <think> mean?", "A tag. <thi", "", "A tag. <thi"),
    ("qwen3", "", "<think>\nA \n\n</think>\n\nB\n", "A", "B\n"),
    ("deepseek_r1", "<think>\n", "a < b </thin </think>\n\nYes", "a < b </thin", "Yes"),
    # .../test_mistral_reasoning_parser.py
    ("mistral", "", "[THINK]This is a reasoning section[/THINK]This is the rest", "This is a reasoning section",
     "This is the rest"),
    ("mistral", "", "This is a reasoning section[/THINK]This is the rest", "",
     "This is a reasoning sectionThis is the rest"),
    # .../test_granite_reasoning_parser.py
    ("granite", "", "Here is my thought process:This is a reasoning section. Here's my response:This is the rest",
     "This is a reasoning section.", "This is the rest"),
    ("granite", "", "Here is my th", "", "Here is my th"),
    # .../test_gemma4_reasoning_parser.py
    ("gemma4", "<|turn>model\n", "<|channel>thought\nThis is reasoning<channel|>This is the rest", "This is reasoning",
     "This is the rest"),
    ("gemma4", "<|channel>thought\n<channel|>", "This is content", "", "This is content"),
    # .../test_seedoss_reasoning_parser.py, test_kimi_k2_reasoning_parser.py, test_glm4_moe_reasoning_parser.py
    ("seed_oss", "", "<seed:think>Some reasoning</seed:think>The answer", "Some reasoning", "The answer"),
    ("kimi_k2", "", "<think>step 1</think>Hello", "step 1", "Hello"),
    ("glm45", "", "\n<think>This is a reasoning section</think>\nThis is the rest", "This is a reasoning section",
     "This is the rest"),
    # .../test_ernie45_reasoning_parser.py
    ("ernie45", "<think>\n", "abc\n</think>\n\n\n<response>\ndef\n</response>\n", "abc", "def"),
    ("ernie45", "<think>\n", "abc\n</think>\ndef", "abc", "def"),
    ("ernie45", "<think>\n", "abc</think><response>a </response> and\n</response>", "abc", "a </response> and"),
    ("ernie45", "", "<a>\n<response>b</response>", "", "<a>\n<response>b</response>"),
    ("ernie45", "", "<response>\n<response>b</response>\n</response>\n", "", "<response>b</response>"),
    # .../test_hunyuan_reasoning_parser.py
    ("hunyuan_a13b", "", "<think>\nThis is a reasoning section\n</think>\n<answer>\nThis is the rest\n</answer>",
     "This is a reasoning section", "This is the rest"),
    ("hunyuan_a13b", "", "<think>\n\n</think>\n<answer>\nThis is the rest\nThat\n</answer>", "",
     "This is the rest\nThat"),
    ("hunyuan_a13b", "<think>\n\n</think>\n", "<answer>\n助手：Which city?</answer>", "", "Which city?"),
    ("hunyuan_a13b", "", "<think>\na\n</think>\n<answer>\nThis is cut</answ", "a", "This is cut</answ"),
    ("hunyuan_a13b", "", "\n This is content</answer>", "", "\n This is content</answer>"),
    # tests/tool_parsers/test_cohere_command_tool_parser.py
    ("cohere_command3", "", "<|START_THINKING|>I think.<|END_THINKING|>\n<|START_RESPONSE|>foo bar<|END_RESPONSE|>",
     "I think.", "foo bar"),
    ("cohere_command4", "<|START_THINKING|>", "I think.<|END_THINKING|><|START_TEXT|>foo bar<|END_TEXT|>", "I think.",
     "foo bar"),
    ("cohere_command3", "", "<|START_RESPONSE|>foo <|END_RESPONSE|> bar<|END_RESPONSE|>", "",
     "foo <|END_RESPONSE|> bar"),
    ("cohere_command3", "", "<|START_THINKING|>I only think.<|END_THINKING|>", "I only think.", ""),
    # tests/reasoning/test_apertus_reasoning_parser.py
    ("apertus", "", "<|inner_prefix|>This is reasoning<|inner_suffix|>This is the rest", "This is reasoning",
     "This is the rest"),
    ("apertus", "", "This is the rest", "", "This is the rest"),
    # ggml-org/llama.cpp tests/test-chat.cpp, and the models' templates
    ("apriel", "Here are my reasoning steps:\n", "A\n[BEGIN FINAL RESPONSE]\nB\n[END FINAL RESPONSE]\n", "A", "B"),
    ("apriel", "", "Here are my reasoning steps:\nA\n[BEGIN FINAL RESPONSE]\nB", "A", "B"),
    ("kimi", "", "◁think▷A◁/think▷B", "A", "B"),
    ("solar_open", "<|begin|>assistant", "<|think|>A<|end|><|begin|>assistantB<|end|>", "A", "B"),
    # .../test_gptoss_reasoning_parser.py
    ("openai_gptoss", "<|start|>assistant",
     "<|channel|>analysis<|message|>Reasons<|end|><|start|>assistant<|channel|>final<|message|>This is the rest",
     "Reasons", "This is the rest"),
    ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>", "This is the rest<|return|>", "",
     "This is the rest"),
    ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>Well,", "so<|end|>", "so", ""),
    ("openai_gptoss", "<|start|>assistant",  # the last channel counts
     "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>commentary to=assistant<|channel|>final"
     "<|message|>Hello", "x", "Hello"),
    ("openai_gptoss", "<|start|>assistant", "<|channel|>final<|message|>A<|channel|><|end|>B<|constrain|>", "", "AB"),
    # an end that closes nothing is no content, unless the answer tells of it
    ("gemma4", "", "<|channel>thought\n<channel|>Hi<channel|>", "", "Hi"),
    ("gemma4", "", "<|channel>thought\n<channel|>Hi <|channel>thought\n<channel|>you<channel|>!", "", "Hi you!"),
    ("qwen3", "", "<think>A</think>\n\n</think>\n\nB </think> C", "A", "B C"),
    ("qwen3", "", "<think>A</think>`</think>` and '</think>' end what <think> begins: </think>", "A",
     "`</think>` and '</think>' end what <think> begins: </think>"),
    ("qwen3", "", "<think>A</think><think>B</think>C", "AB", "C"),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "prompt", "answer", "reasoning", "content"), ANSWERS)
def test_reasoning_is_told_from_content(parser, prompt, answer, reasoning, content):
    for pieces in cuts(answer):
        assert read(pieces, None, parser, [], prompt) == (content, reasoning, [])


def test_every_parser_reads_what_it_says():
    for name, parser in REASONING_PARSERS.items():
        if name == "openai_gptoss":
            continue
        for start in parser.starts:
            for end in parser.ends:
                assert read([f"{start}\nA\n{end}\n\nB"], None, name, []) == ("B", "A", [])
                assert read([f"A\n{end}\n\nB"], None, name, [], f"user\nx\nassistant\n{start}\n") == ("B", "A", [])


CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call>'
PLAN = "<|START_THINKING|>I look.<|END_THINKING|>"
FORMATS = sorted({id(format): name for name, format in TOOL_PARSERS.items() if name != "openai"}.values())
PARSERS = sorted({id(parser): name for name, parser in REASONING_PARSERS.items() if parser.starts}.values())


def both(answer, tool_parser, parser):
    """An answer read whole, and a character at a time."""
    make = functools.partial(new_reader, tool_parser, parser, WRITTEN_TOOLS, "", ())
    reader = make()
    stream = [part for char in answer for part in reader.feed(char)] + reader.end()
    for parts in (read_whole(make, parser, answer)[0], stream):
        content, reasoning = "".join(part.content for part in parts), "".join(part.reasoning for part in parts)
        yield content, reasoning, [part.name for part in parts if part.name]


@pytest.mark.parametrize("format", FORMATS)
def test_a_call_ends_open_reasoning(format):
    """Unless its end comes behind the call, and the answer is read whole. A bare bracket begins no call there."""
    quoted, begin = written(format, [("read", {"text": "x"})]), f"A {TOOL_PARSERS[format].begins[0]} is it."
    for parser in PARSERS:
        start, end = REASONING_PARSERS[parser].starts[0], REASONING_PARSERS[parser].ends[0]
        assert [*both(f"{start}{begin}{end}No.", format, parser)] == [("No.", begin, [])] * 2
        call = written(format, [("read", {"text": f"x {end} y"})])
        if TOOL_PARSERS[format].begins[0] in "[{":
            assert [*both(f"{start}I look.\n{quoted}", format, parser)] == [("", f"I look.\n{quoted}", [])] * 2
            continue
        for answer in (f"{start}I look.\n{call}", f"{start}\nI look.\n{end}\n\n{call}"):
            assert [*both(answer, format, parser)] == [("", "I look.", ["read"])] * 2
        whole, stream = both(f"{start}I look.\n{quoted} No.{end}Yes.{quoted}", format, parser)
        assert whole == ("Yes.", f"I look.\n{quoted} No.", ["read"])
        assert stream == ("No.Yes.", "I look.", ["read", "read"])


@pytest.mark.parametrize("format", FORMATS)
def test_an_end_that_closes_nothing_is_no_content(format):
    call, begin = written(format, [("read", {"text": "x"})]), TOOL_PARSERS[format].begins[0]
    ends = {*filter(TOKEN.fullmatch, TOOL_PARSERS[format].ends)}
    for end in ends:
        for answer, content, called in (
            (f"Hi{end}", "Hi", []),
            (f"Hi\n{end}\nyou{end}", "Hi\nyou", []),
            (f"{call}\n{end}\nHi{end}", "Hi", ["read"]),
            (f"A `{end}`, '{end}' or \"{end}", f"A `{end}`, '{end}' or \"{end}", []),
            (f"It is {begin} name {end}.", f"It is {begin} name {end}.", []),
        ):
            assert [*both(answer, format, "qwen3")] == [(content, "", called)] * 2
    for end in {*TOOL_PARSERS[format].ends} - ends:
        assert [*both(f"Hi {end} you", format, "qwen3")] == [(f"Hi {end} you", "", [])] * 2


ACTION = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "search", "parameters": {"q": "x"}}\n]<|END_ACTION|>'
)
LISTED = '<tool_calls>[{"name": "search", "arguments": {"q": "x"}}]</tool_calls>'


@pytest.mark.parametrize("special", [(), ("<|START_RESPONSE|>", "<|END_RESPONSE|>")])
@pytest.mark.parametrize(
    ("format", "parser", "answer", "content"),
    [
        ("cohere_command3", "cohere_command3", f"{PLAN}{ACTION}", ""),
        ("cohere_command3", "cohere_command3", f"<|START_THINKING|>I look.{ACTION}", ""),
        ("cohere_command3", "cohere_command3", f"{PLAN}<|START_RESPONSE|>I do.<|END_RESPONSE|>{ACTION}", "I do."),
        ("hunyuan_a13b", "hunyuan_a13b", f"<think>\nI look.\n</think>\n<answer>\n{LISTED}\n</answer>", ""),
        ("hunyuan_a13b", "hunyuan_a13b", f"<think>\nI look.\n</think>\n<answer>\nI do.{LISTED}</answer>\n", "I do."),
        ("hunyuan_a13b", "hunyuan_a13b", f"<think>I look.</think><answer>I do.</answer>\n{LISTED}", "I do."),
        ("hunyuan_a13b", "hunyuan_a13b", f"<think>I look.</think>{LISTED}\n</answer>", ""),
        ("ernie45", "ernie45", f"<think>\nI look.\n</think>\n\n\n{CALL}\n", ""),
        ("ernie45", "ernie45", f"<think>I look.\n</think>\n<response>\nI do.\n</response>\n\n\n{CALL}\n", "I do."),
        ("apertus", "apertus", '<|inner_prefix|>I look.<|tools_prefix|>[{"search": {"q": "x"}}]<|tools_suffix|>', ""),
    ],
)  # fmt: skip
def test_what_stands_around_an_answer_is_left_out(format, parser, answer, content, special):
    """Whether its marks are special tokens of the model or not, and beside calls, too."""
    for pieces in cuts(answer):
        found = read(pieces, format, parser, special=frozenset(special))
        assert found == (content, "I look.", [["search", '{"q": "x"}', ""]])


def test_the_marks_around_an_answer_may_be_in_an_argument():
    answer = (
        '<answer>\n<tool_calls>[{"name": "search", "arguments": {"q": "<answer>a</answer>"}}]</tool_calls>\n</answer>'
    )
    for pieces in cuts(answer):
        assert read(pieces, "hunyuan_a13b", "hunyuan_a13b") == ("", "", [["search", '{"q": "<answer>a</answer>"}', ""]])


def test_the_reader_knows_when_it_is_in_reasoning():
    reader = new_reader(None, "qwen3", TOOLS, "<think>\n", ())
    assert reader.source.in_reasoning
    reader.feed("a</thi")
    assert reader.source.in_reasoning
    reader.feed("nk>")
    assert not reader.source.in_reasoning
    reader = new_reader(None, "qwen3", TOOLS, "", ())
    states = []
    for piece in ("<thi", "nk>", "a", "</think>", "b"):
        reader.feed(piece)
        states.append(reader.source.in_reasoning)
    assert states == [False, True, True, False, False]
    reader = new_reader("openai", "openai_gptoss", TOOLS, "<|start|>assistant", ())
    reader.feed("<|channel|>analysis<|message|>a")
    assert reader.source.in_reasoning
    reader.feed("<|end|><|start|>assistant<|channel|>final<|message|>b")
    assert not reader.source.in_reasoning


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{%- set content = content.split('</think>')[-1].lstrip('\\n') %}", "qwen3"),
        ("{{'<｜Assistant｜><think>\\n'}} content.split('</think>')[-1]", "qwen3"),
        ("[THINK]Your thoughts[/THINK]", "mistral"),
        ('"<|channel|>analysis<|message|>"', "openai_gptoss"),
        ("{{- '<|channel>thought\\n<channel|>' -}}", "gemma4"),
        ("<seed:think>\n</seed:think>", "seed_oss"),
        ("Respond with 'Here is my thought process:' and 'Here is my response:'", "granite"),
        ("{%- set inner_token = '<|inner_prefix|>' -%}", "apertus"),
        ("write <|START_THINKING|> followed by a plan", "cohere_command3"),
        ("<|START_THINKING|>{{ plan }}<|END_THINKING|> <|START_TEXT|>{{ text }}<|END_TEXT|>", "cohere_command4"),
        ("'<think>\n' + reasoning + '\n</think>\n' '\n<response>\n' + content + '\n</response>\n'", "ernie45"),
        ("'助手：开头。' '<think>\n\n</think>\n'", "hunyuan_a13b"),
        ("content.split('<answer>')[-1].strip('</answer>') '<think>\n\n</think>\n'", "hunyuan_a13b"),
        ("'<think>\n' '</think>\n\n' '<minimax:tool_call>' '\n<response>' '</response>'", "minimax_m2"),
        ("after the marker [BEGIN FINAL RESPONSE]. <tool_calls>", "apriel"),
        ("'<|think|>' + message.reasoning + '<|end|>' '<|tool_calls|>'", "solar_open"),
        ("<|im_start|>assistant", None),
    ],
)
def test_a_template_says_how_its_model_reasons(template, parser):
    assert reasoning_parser_of(template) == parser
