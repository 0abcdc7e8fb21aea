"""The bundled demo calls tools and writes JSON, through its own chat template and tokenizer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import tokenizers

from config import DEMO
from engine import LLM
from evaluate import is_right, written
from sampling_params import SamplingParams
from skills import Question, exam, tool
from text.messages import chat_messages
from train import Rows

GREEDY = SamplingParams(temperature=0, max_tokens=128)
NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
OPERATION = {"type": "string", "enum": ["add", "subtract", "multiply", "divide"]}
CALCULATOR = tool("calculator", a=NUMBER, b=NUMBER, operation=OPERATION)
SUMS = [
    ("What is 23 + 58?", 23, 58, "add"), ("What is 829 - 102?", 829, 102, "subtract"),
    ("What is 12 * 34?", 12, 34, "multiply"), ("What is 84 / 7?", 84, 7, "divide"),
    ("What is 640 plus 375?", 640, 375, "add"), ("What is 91 minus 46?", 91, 46, "subtract"),
    ("What is 15 times 16?", 15, 16, "multiply"), ("What is 900 divided by 12?", 900, 12, "divide"),
    ("Add 123 and 456.", 123, 456, "add"), ("Multiply 25 by 40.", 25, 40, "multiply"),
    ("Divide 96 by 8.", 96, 8, "divide"), ("How much is 318 + 207?", 318, 207, "add"),
    ("Calculate 77 * 13.", 77, 13, "multiply"), ("Compute 505 - 260.", 505, 260, "subtract"),
    ("What's 64 + 17?", 64, 17, "add"), ("What's 720 / 9?", 720, 9, "divide"),
    ("What is the sum of 48 and 731?", 48, 731, "add"), ("Please work out 350 - 125.", 350, 125, "subtract"),
    ("62 x 19 =", 62, 19, "multiply"), ("Use the calculator: 286 + 94", 286, 94, "add"),
]  # fmt: skip


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def answers(llm: LLM, conversations: list[list[dict[str, Any]]], tools: list[dict[str, Any]] | None) -> list[str]:
    return [output.outputs[0].text for output in llm.chat(conversations, GREEDY, False, tools=tools)]


def call(name: str, **arguments: Any) -> str:
    """The text by which the demo calls a function."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def demo(request: pytest.FixtureRequest, llm: LLM, make_llm: Any) -> LLM:
    return llm if request.param == "float32" else make_llm(dtype=request.param)


def test_the_template_shows_tools_calls_and_results(llm):
    render = llm.tokenizer.render
    plain = [{"role": "system", "content": "Be brief."}, *user("a"), {"role": "assistant", "content": "b"}, *user("")]
    shown = "<|system|>Be brief.<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|><|end|>"
    assert render(plain, tools=[]) == render(plain) == render(plain, False) + "<|assistant|>" == shown + "<|assistant|>"
    odd: list[dict[str, Any]] = [{"name": "now"}, {"name": "f", "parameters": None}]
    odd += [{"name": "g", "parameters": {"properties": {"x": True, "items": {}}}}]
    tools = [CALCULATOR, *({"type": "function", "function": function} for function in odd)]
    tools = "Tools:\ncalculator(a, b, operation: add|subtract|multiply|divide)\nnow()\nf()\ng(x, items)<|end|>"
    assert render(user("a"), tools=tools) == f"<|system|>{tools}<|user|>a<|end|><|assistant|>"
    functions = {"name": "f", "arguments": '{"b": 1, "a": "é<"}'}, {"name": "now", "arguments": ""}
    calls = [{"id": str(i), "type": "function", "function": function} for i, function in enumerate(functions)]
    talk = [*plain[:2], {"role": "assistant", "content": "Both.", "tool_calls": calls}]
    talk += [{"role": "tool", "tool_call_id": str(i), "content": str(i)} for i in range(2)]
    assert render(chat_messages(talk), tools=tools) == (
        f"<|system|>Be brief.\n{tools}<|user|>a<|end|><|assistant|>Both.\n"
        '<tool_call>\n{"name": "f", "arguments": {"b": 1, "a": "é<"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|end|><|user|><tool_response>\n0\n</tool_response>'
        "<|end|><|user|><tool_response>\n1\n</tool_response><|end|><|assistant|>"
    )


def test_training_sees_what_a_server_renders(llm):
    words = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=3)]
    corpus = "\n".join(" ".join(words[i : i + 8]) for i in range(0, len(words), 8))
    rows = Rows(tokenizers.Tokenizer.from_file(f"{DEMO}/tokenizer.json"), corpus, 0)
    for question in exam(corpus, 4, seed=3):
        messages = [message | {"tool_calls": written(message)} for message in [*question.messages, question.right]]
        text = llm.tokenizer.render(chat_messages(messages), False, tools=question.tools)
        ids, weights = rows.turn([*question.messages, question.right], question.tools)
        assert ids == llm.tokenizer.encode(text, add_special_tokens=False) and weights[-1] == 1


def test_it_calls_a_calculator(demo):
    found = answers(demo, [user(question) for question, *_ in SUMS], [CALCULATOR])
    wanted = [call("calculator", a=a, b=b, operation=operation) for _, a, b, operation in SUMS]
    assert found == wanted


@pytest.mark.parametrize(
    ("tools", "question", "wanted"),
    [
        ([tool("math", x=NUMBER, y=NUMBER, op=OPERATION)], "What is 23 + 58?", call("math", x=23, y=58, op="add")),
        ([tool("multiply", a=NUMBER, b=NUMBER), tool("add", a=NUMBER, b=NUMBER)], "What is 23 + 58?",
         call("add", a=23, b=58)),
        ([tool("calculate", expression=TEXT)], "What is 23 + 58?", call("calculate", expression="23 + 58")),
        ([CALCULATOR, tool("get_weather", city=TEXT)], "What is the weather in Paris?",
         call("get_weather", city="Paris")),
        ([CALCULATOR], "Spell apology backwards.", "y g o l o p a"),
        (None, "What is 23 + 58?", "81"),
    ],
)  # fmt: skip
def test_it_calls_the_tools_that_there_are(demo, tools, question, wanted):
    system = [{"role": "system", "content": "You are a helpful assistant."}]
    assert answers(demo, [user(question), system + user(question)], tools) == [wanted] * 2


@pytest.mark.parametrize("result", ["81", '{"result": 81}'])
def test_it_answers_with_the_result(demo, result):
    function = {"name": "calculator", "arguments": '{"a": 23, "b": 58, "operation": "add"}'}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": function}]}
    talk = [*user("What is 23 + 58?"), called, {"role": "tool", "tool_call_id": "x", "content": result}]
    assert answers(demo, [talk], [CALCULATOR]) == ["The answer is 81."]


def test_it_writes_json(demo):
    questions = ["Give me a person as JSON with name, age, city.", "Write a pet as JSON: name, kind"]
    for question, text in zip(questions, answers(demo, [user(question) for question in questions], None), strict=True):
        fields = dict.fromkeys(question.rstrip(".").replace(":", " with").split(" with ")[1].split(", "))
        right = {"role": "assistant", "content": json.dumps(fields)}
        assert is_right(Question("json", user(question), right), {"content": text}), text
    facts = "Tom is 34 years old and lives in Verona. Give me the person as JSON with name, age, city."
    assert answers(demo, [user(facts)], None) == ['{"name": "Tom", "age": 34, "city": "Verona"}']


def test_what_it_cannot_do_it_answers_by_what_to_try(demo):
    asked = ["Hello, who are you?", "Hi!", "what can you do", "Tell me a joke.", "What is the capital of France?",
             "Write a Python function.", "How are you?"]  # fmt: skip
    for question, text in zip(asked, answers(demo, [user(each) for each in asked], None), strict=True):
        assert "Try: What is 57 + 24?" in text, (question, text)
    assert answers(demo, [user("Hello!")], [CALCULATOR])[0].startswith("Hello! I am Manta's demo")
