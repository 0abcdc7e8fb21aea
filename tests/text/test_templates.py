"""What chat templates get, and those that want too much: they are refused soon, and with a reason."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from scripted import TOKENIZER
from test_tokenizer import MESSAGES, PARTS, PLAIN, TRIMMED
from text import templates
from text.messages import chat_messages
from text.templates import TemplateEnvironment, read_template, run_template

CHARS = 100_000


def run(source: str, chars: int = CHARS, **variables: Any) -> str:
    return run_template(read_template(TemplateEnvironment(chars), source).template, variables)


LOOP = "{% for i in range(100000) %}{{ 'a' * 9 }}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% set x = j %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in [range(60)|list] recursive %}{% if i %}{{ loop([i[1:], i[1:]]) }}{% endif %}{% endfor %}",
    ],
)
def test_time_is_limited(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Also where nothing is written."""
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.05)
    with pytest.raises(ValueError, match=r"took more than 0.05 seconds"):
        run(source)


def test_what_a_template_writes_is_limited() -> None:
    with pytest.raises(ValueError, match="max_template_chars"):
        run(LOOP)


@pytest.mark.parametrize(
    "source",
    [
        "a" * (templates.MAX_SOURCE + 1),
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        "{% for a in b %}" * 100 + "{% endfor %}" * 100,
    ],
)
def test_what_is_too_large_or_too_deep_does_not_compile(source: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        read_template(TemplateEnvironment(CHARS), source)
    assert "\n" not in str(caught.value)


def test_compiling_computes_nothing_that_can_grow() -> None:
    for source in ("{{ 'a' * 10**10 }}", "{{ 'a' | center(10**10) }}", "{% set x = 10**10**10 %}"):
        read_template(TemplateEnvironment(CHARS), source)


def test_others_run_while_a_template_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """And their time does not count."""
    now, pauses = [0.0], list[float]()

    def monotonic() -> float:
        now[0] += 1e-5
        return now[0]

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += 9.0

    monkeypatch.setattr(templates, "time", SimpleNamespace(monotonic=monotonic, sleep=sleep))
    assert len(run(LOOP, 10**9)) == 900_000
    assert len(pauses) > 100


def test_ordinary_operations_are_as_ever() -> None:
    assert run("{{ 'a' * 3 ~ 2 ** 3 }}{{ [1] * 2 + [3] }}{{ (1, 2) }}") == "aaa8[1, 1, 3](1, 2)"
    assert run("{{ '%5.1f|%s' % (1.25, 'x') }}{{ '{:>4}{a}'.format(1, a=2) }}") == "  1.2|x   12"
    assert run("{{ ['a', 'b'] | join('-') }}{{ '-'.join(['a', 'b']) }}{{ 'abc'.replace('b', 'xx') }}") == "a-ba-baxxc"
    said = run("{{ 'a\nb' | indent(2) }}{{ 'ab'.center(4) }}{{ x[1:] }}{{ x[0] == 1 < 2 }}", x=[1, 2])
    assert said == "a\n  b ab [2]True"
    assert run("{{ [1] | map('string') | tojson }}") == '["1"]'
    said = run("{{ {'a': [1]} | tojson(indent=2) }}{{ [3, 1] | sort | first }}{{ [1, 2] | sum }}")
    assert said == '{\n  "a": [\n    1\n  ]\n}13'
    said = run("{{ [1, 2, 3] | batch(2, 0) | list }}{{ 2.5 | round(0) }}{{ none ~ x }}{{ x }}")
    assert said == "[[1, 2], [3, 0]]2.0None"
    assert run("{{ (x is defined and x > 1) or 'no' }}{{ 1 if x is none else x in [2] }}", x=2) == "TrueTrue"
    assert run("{% autoescape true %}{{ '<' ~ x }}{{ x }}{% endautoescape %}", x="<b>") == "&lt;&lt;b&gt;&lt;b&gt;"


# --- what they get ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "told",
    [
        {"reasoning_content": "ab"}, {"reasoning": "ab", "reasoning_content": ""},
        {"reasoning_details": [
            {"type": "reasoning.text", "text": "a"}, {"type": "reasoning.encrypted", "data": "x"},
            {"type": "reasoning.summary", "summary": "b"},
        ]},
        {"thinking_blocks": [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "ab"}]},
        {"content": [{"type": "thinking", "thinking": "ab", "signature": ""}, "c"]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "ab"}]},
                     {"type": "input_text", "text": "c"}]},
    ],
)  # fmt: skip
def test_reasoning_comes_back_in_several_spellings(told: dict[str, Any]) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.content }}{% endfor %}"
    (message,) = chat_messages([{"role": "assistant", "content": "c", **told}])
    calls = message | {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    shown = [TOKENIZER.render([each], chat_template=template) for each in (message, calls, calls | {"content": ""})]
    assert shown == ["ababc", "abc", "abab"]  # gpt-oss's template refuses `thinking` beside a content and calls


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        *(({"name": "f", **empty},
           '[]{"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}')
          for empty in ({}, {"description": None, "parameters": None}, {"description": "", "parameters": {}})),
        ({"parameters": {"properties": {}, "x": 1}, "description": "d", "name": "f"},
         'd[]{"parameters": {"properties": {}, "x": 1, "type": "object"}, "description": "d", "name": "f"}'),
    ],
)  # fmt: skip
def test_tools_have_what_templates_take_for_granted(given: dict[str, Any], shown: str) -> None:
    template = "{% set f = tools[0].function %}{{ '' + f.description }}{{ f.parameters.properties | list }}"
    template, tools = template + "{{ f | tojson }}", [{"type": "function", "function": given}]
    before = json.dumps(tools)
    assert TOKENIZER.render(MESSAGES, chat_template=template, tools=tools) == shown and json.dumps(tools) == before
    assert TOKENIZER.render(MESSAGES, chat_template="{{ tools }}", tools=[{"type": "x"}]) == "[{'type': 'x'}]"


QWEN = PLAIN.replace("{{ m.c", "{{ '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' }}{{ m.c")
DEEPSEEK = PLAIN.replace("{{ m.c", "<think>{{ m.reasoning_content }}</think>{{ m.c")
THOUGHT = {"content": "", "reasoning_content": "I p "}


@pytest.mark.parametrize(
    ("template", "final", "end"),
    [
        (PLAIN, {"content": "Well "}, "<|assistant|>Well "),
        (TRIMMED, {"content": "Well "}, "<|assistant|>Well"),
        (PARTS, {"content": [{"type": "text", "text": "Well"}]}, "assistant:Well"),
        (PARTS, {"content": ""}, "assistant:"),
        *((template, THOUGHT | {"content": said}, f"<think>{n}I p {rest}")
          for template, n in ((QWEN, "\n"), (DEEPSEEK, ""))
          for said, rest in ((None, ""), ("", ""), ([], ""), ("So", f"{n}</think>{n}{n}So"))),
        (TRIMMED.replace("content", "thinking"), THOUGHT, "<|assistant|>I p"),
        (PLAIN + "{{ '<think>\n' if add_generation_prompt }}", THOUGHT, "<|user|><|end|><think>\nI p "),
        (PLAIN, THOUGHT, "<|assistant|>"),
    ],
)  # fmt: skip
def test_continue_final_message(template: str, final: dict[str, Any], end: str) -> None:
    messages = [{"role": "user", "content": []}, {"role": "assistant", **final}]
    before = json.dumps(messages)
    assert TOKENIZER.render(messages, False, True, chat_template=template).endswith(end)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("template", "messages", "generation", "message"),
    [
        (PLAIN, MESSAGES, True, "exclude each other"),
        ("nothing", MESSAGES, False, "does not show the final message"),
        (PLAIN, [{"role": "assistant", "content": None}], False, "no text"),
        (PLAIN, [], False, "no text"),
    ],
)
def test_continue_final_message_is_refused(
    template: str, messages: list[dict[str, Any]], generation: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TOKENIZER.render(messages, generation, continue_final_message=True, chat_template=template)
