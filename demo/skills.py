"""The demo model's skills with tools and JSON, and the exam of all its skills.

It calls a calculator, in whatever form people write one, or asks a tool for the weather; and it writes small objects.

The operands and words of questions are held out as in `tasks.py`. Beyond that some wordings of questions are only
graded, never trained on: those of `OTHER_FRAMES`.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from talk import small_talk
from tasks import NAMES, Tasks

Message = dict[str, Any]

SIGNS = {
    "add": ("+", "plus"), "subtract": ("-", "minus"), "multiply": ("*", "x", "times", "multiplied by"),
    "divide": ("/", "divided by"),
}  # fmt: skip
VERBS = {
    "add": ("Add {a} and {b}.", "Add {a} to {b}.", "What is the sum of {a} and {b}?"),
    "subtract": ("Subtract {b} from {a}.",),
    "multiply": ("Multiply {a} by {b}.", "What is the product of {a} and {b}?"),
    "divide": ("Divide {a} by {b}.",),
}
FRAMES = (
    "What is {}?", "{} =", "{}", "What's {}?", "what is {}", "How much is {}?", "Calculate {}.", "Compute {}.",
    "Please work out {}.", "Use the calculator: {}", "What is {}? Use the tool.", "Tell me {}.",
    "Could you compute {}?", "My teacher asks what {} is.",
)  # fmt: skip
OTHER_FRAMES = ("Can you tell me what {} is?", "How many is {}?", "Please calculate {}.", "I want to know {}.")
TOOL_NAMES = ("calculator", "calculate", "calc", "compute", "math", "arithmetic")
OPERANDS = (("a", "b"), ("x", "y"), ("left", "right"), ("first", "second"), ("num1", "num2"), ("number1", "number2"))
OPERATION_NAMES = ("operation", "op", "operator")
OPERATIONS = (  # what a calculator's schema may call the four
    ("add", "subtract", "multiply", "divide"), ("+", "-", "*", "/"), ("sum", "difference", "product", "quotient"),
    ("plus", "minus", "times", "divided_by"), ("addition", "subtraction", "multiplication", "division"),
)  # fmt: skip
CITIES = (
    "Amsterdam", "Athens", "Berlin", "Cairo", "Dublin", "Lisbon", "London", "Madrid", "Milan", "New York", "Oslo",
    "Padua", "Paris", "Prague", "Rome", "San Francisco", "Tokyo", "Venice", "Verona", "Vienna",
)  # fmt: skip
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "warm", "cold")
SYSTEMS = ("You are a helpful assistant.", "Be brief.", "Answer briefly.", "You are a helpful agent. Use the tools.")
FIELDS: dict[str, dict[str, Any]] = {  # of what is asked for as JSON: the values that make sense; a list: two of them
    "person": {
        "name": tuple(NAMES), "age": range(18, 81), "city": CITIES,
        "job": ("baker", "doctor", "farmer", "gardener", "painter", "sailor", "singer", "teacher", "writer"),
        "married": (True, False), "hobbies": ["chess", "cooking", "dancing", "music", "reading", "running", "sailing"],
    },
    "book": {
        "title": ("Hamlet", "Macbeth", "Othello", "King Lear", "The Tempest", "Romeo and Juliet", "Julius Caesar"),
        "author": ("William Shakespeare",), "year": range(1590, 1614), "pages": range(80, 400),
    },
    "pet": {
        "name": ("Bella", "Coco", "Daisy", "Luna", "Max", "Milo", "Rocky"), "kind": ("dog", "cat", "horse", "rabbit"),
        "age": range(1, 16), "color": ("black", "brown", "gray", "red", "white"),
    },
    "product": {
        "name": ("chair", "desk", "hat", "lamp", "shirt", "table", "watch"),
        "price": tuple(n + 0.99 for n in range(1, 100)), "color": ("black", "blue", "green", "red", "white"),
        "in_stock": (True, False),
    },
}  # fmt: skip
TASKS = {  # of the exam, beside those of `Tasks`: whether they are asked where there are tools
    "call": True,  # of a calculator
    "wording": True,  # the same, in other words than those of training
    "answer": True,  # that goes out when the result is in
    "weather": True,  # another tool's call
    "needless": True,  # spell or repeat: no tool is for that
    "plain": False,  # sums and differences in all the words of calls
    "extract": False,  # facts of the question, as JSON
    "json": False,  # an object that is made up
    "talk": False,  # what is none of these, in other words than those of training
    "aside": True,  # the same
}


class Toolbox(NamedTuple):
    """Tools as a request carries them, and how they are called.

    Attributes:
        tools: in OpenAI's shape.
        calls: by operation, the tool's name and its arguments, where "{a}" and "{b}" stand for the operands.
        weather: name and parameter of the tool that tells the weather of a city, or None.
    """

    tools: list[dict[str, Any]]
    calls: dict[str, tuple[str, dict[str, str]]]
    weather: tuple[str, str] | None


def tool(name: str, /, **properties: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's shape, all of whose parameters are required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def asks(question: str) -> Message:
    return {"role": "user", "content": question}


def says(answer: str) -> Message:
    return {"role": "assistant", "content": answer}


def calls(name: str, arguments: dict[str, Any]) -> Message:
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def returns(result: str) -> Message:
    return {"role": "tool", "tool_call_id": "call_0", "content": result}


class SkillTasks(Tasks):
    """Draws conversations with calls and with JSON; see `Tasks`."""

    def toolbox(self) -> Toolbox:
        """A calculator in one of the forms that people write it in, perhaps among other tools."""
        rng = self.rng
        a, b = OPERANDS[0] if rng.random() < 0.5 else rng.choice(OPERANDS)
        number = {"type": "integer"}
        some = [*SIGNS] if rng.random() < 0.6 else rng.sample([*SIGNS], rng.randint(1, 4))
        form = rng.random()
        if form < 0.2:  # a tool for each operation
            ending = rng.choice(("", "", "_numbers"))
            tools = [tool(name + ending, **{a: number, b: number}) for name in some]
            calls = {name: (name + ending, {a: "{a}", b: "{b}"}) for name in some}
        elif form < 0.3:
            name, key = rng.choice(TOOL_NAMES), rng.choice(("expression", "expression", "expr"))
            tools = [tool(name, **{key: {"type": "string"}})]
            calls = {each: (name, {key: f"{{a}} {SIGNS[each][0]} {{b}}"}) for each in SIGNS}
        else:
            name = self.name() if rng.random() < 0.2 else "calculator" if rng.random() < 0.6 else rng.choice(TOOL_NAMES)
            key = "operation" if rng.random() < 0.6 else rng.choice(OPERATION_NAMES)
            names = OPERATIONS[0] if rng.random() < 0.5 else rng.choice(OPERATIONS)
            words = dict(zip(SIGNS, names, strict=True))
            operation: dict[str, Any] = {"type": "string", "enum": [words[each] for each in some]}
            if names is OPERATIONS[0] and rng.random() < 0.15:  # the schema does not say which there are
                operation, some = {"type": "string"}, [*SIGNS]
            order = [a, b, key] if rng.random() < 0.65 else [key, a, b]
            tools = [tool(name, **{each: operation if each == key else number for each in order})]
            values = {a: "{a}", b: "{b}"}
            calls = {each: (name, {part: values.get(part, words[each]) for part in order}) for each in some}
        weather = None
        if rng.random() < 0.3:
            weather = rng.choice(("get_weather", "get_weather", "weather")), rng.choice(("city", "city", "location"))
            tools.append(tool(weather[0], **{weather[1]: {"type": "string"}}))
        if rng.random() < 0.25:
            text = {"type": "string"}
            others = tool("get_time", city=text), tool("search", query=text), tool(self.name(), **{self.word(): text})
            tools.append(rng.choice(others))
        return Toolbox(rng.sample(tools, len(tools)), calls, weather)

    def name(self) -> str:
        """A tool's name that says nothing."""
        return "_".join(self.word() for _ in range(self.rng.randint(1, 2)))

    def city(self) -> str:
        return self.word().capitalize() if self.graded or self.rng.random() < 0.6 else self.rng.choice(CITIES)

    def arithmetic(self, operation: str, frames: tuple[str, ...] = FRAMES) -> tuple[str, int, int]:
        """A question, and its operands in the order in which they are computed with."""
        a, b = self.operands()
        if operation == "divide" and b == 0:
            return self.arithmetic(operation, frames)
        if frames is FRAMES and self.rng.random() < 0.25:
            return self.rng.choice(VERBS[operation]).format(a=a, b=b), a, b
        sign = self.rng.choice(SIGNS[operation])
        sum = f"{a}{sign}{b}" if len(sign) == 1 and sign != "x" and self.rng.random() < 0.2 else f"{a} {sign} {b}"
        frame = self.rng.choice(frames)
        if not self.graded and self.rng.random() < 0.15:  # any words, so that it is the sum that is looked at
            before, after = (" ".join(self.word() for _ in range(self.rng.randint(0, 4))) for _ in range(2))
            frame = f"{before.capitalize()} {{}} {after}.".strip()
        return frame.format(sum), a, b

    def calculation(self, box: Toolbox, frames: tuple[str, ...] = FRAMES) -> list[Message]:
        """A question for the calculator, the call of it, what it returns, and the answer."""
        operation = self.rng.choice([*box.calls])
        question, a, b = self.arithmetic(operation, frames)
        name, arguments = box.calls[operation]
        filled: dict[str, Any] = {key: value.format(a=a, b=b) for key, value in arguments.items()}
        filled |= {key: int(filled[key]) for key, value in arguments.items() if value in ("{a}", "{b}")}
        results = {"add": a + b, "subtract": a - b, "multiply": a * b}
        result = results[operation] if operation in results else round(a / b, self.rng.choice((1, 2, 3, 4, 17)))
        key = self.rng.choice(("result", "result", "answer", "value"))
        returned = str(result) if self.rng.random() < 0.65 else json.dumps({key: result})
        return [asks(question), calls(name, filled), returns(returned), says(f"The answer is {result}.")]

    def weather(self, box: Toolbox) -> list[Message]:
        """A question for the weather, the call, and what it returns, which is also the answer."""
        assert box.weather
        city, sky, name, key = self.city(), self.rng.choice(SKIES), *box.weather
        question = self.rng.choice(("What is the weather in {}?", "How is the weather in {}?", "Weather in {}?"))
        degrees = self.rng.randint(-9, 39)
        report = self.rng.choice(
            (f"The weather in {city} is {sky}.", f"It is {sky}, {degrees} degrees.", f"It's {sky}!")
        )
        return [asks(question.format(city)), calls(name, {key: city}), returns(report), says(report)]

    def object(self, kind: str) -> dict[str, Any]:
        """Some fields of a thing of this kind, in any order."""
        keys = self.rng.sample([*FIELDS[kind]], self.rng.randint(2, 4))
        made = {}
        for key in keys:
            allowed = FIELDS[kind][key]
            made[key] = self.rng.sample(allowed, 2) if isinstance(allowed, list) else self.rng.choice(allowed)
        return made

    def json(self) -> tuple[str, dict[str, Any]]:
        """A question for a JSON object, and one that answers it. Where it is not graded, it may name no fields."""
        kind = self.rng.choice([*FIELDS])
        made = self.object(kind)
        *most, last = made
        every = ", ".join(made)
        fields = [f" with {every}.", f" with {', '.join(most)} and {last}.", f": {every}", f" with the fields {every}.",
                  f" ({every})."] + ["."] * (not self.graded)  # fmt: skip
        asked = self.rng.choice(("Give me a {} as JSON", "Write a {} as JSON", "Make up a {} as JSON",
                                 "Describe a {} in JSON"))  # fmt: skip
        return asked.format(kind) + self.rng.choice(fields), made

    def extraction(self) -> tuple[str, dict[str, Any]]:
        """Facts in words, asked for as JSON; and the object that has them."""
        if self.rng.random() < 0.5:
            made: dict[str, Any] = {"name": self.city(), "age": self.rng.randint(1, 99), "city": self.city()}
            kind, facts = "person", "{name} is {age} years old and lives in {city}.".format(**made)
        else:
            kind = self.rng.choice([*FIELDS])
            made = {key: value if type(value) is int else self.city() for key, value in self.object(kind).items()
                    if type(value) in (int, str)}  # fmt: skip
            if len(made) < 2:
                return self.extraction()
            facts = " ".join(f"The {key} is {value}." for key, value in made.items())
        keys = self.rng.sample([*made], self.rng.randint(2, len(made)))
        question = f"{facts} Give me the {kind} as JSON with {', '.join(keys)}."
        return question, {key: made[key] for key in keys}

    def plain(self) -> list[Message]:
        """A sum or a difference in any wording, answered without a tool."""
        operation = self.rng.choice(("add", "subtract"))
        question, a, b = self.arithmetic(operation)
        return [asks(question), says(str(a + b if operation == "add" else a - b))]

    def talk(self, box: Toolbox | None) -> list[Message]:
        """Small talk, or what the model cannot do."""
        question, answer = small_talk(self.rng, self.word, bool(box), self.graded)
        return [asks(question), says(answer)]

    def skill(self, box: Toolbox | None) -> list[Message]:
        """A few messages that exercise one of these skills: with tools mostly a call."""
        chance = self.rng.random()
        if box and chance < 0.9:
            return self.weather(box) if box.weather and self.rng.random() < 0.4 else self.calculation(box)
        if not box and chance < 0.3:
            return self.plain()
        question, made = self.json() if self.rng.random() < 0.6 else self.extraction()
        return [asks(question), says(json.dumps(made))]

    def question(self, task: str, box: Toolbox) -> list[Message]:
        """Messages that end with the right answer to a question of this task of `TASKS`."""
        if task == "wording":
            return self.calculation(box, OTHER_FRAMES)[:2]
        if task == "needless":  # there are tools, but none for this
            question, answer = self.spell() if self.rng.random() < 0.5 else self.repeat()
            return [asks(question), says(answer)]
        if task in ("json", "extract"):
            question, made = self.json() if task == "json" else self.extraction()
            return [asks(question), says(json.dumps(made))]
        if task == "plain":
            return self.plain()
        if task in ("talk", "aside"):
            return self.talk(box if TASKS[task] else None)
        messages = self.weather(box) if task == "weather" else self.calculation(box)
        return messages if task == "answer" else messages[:2]

    def system(self) -> list[Message]:
        """No system message, or one that changes nothing."""
        return [{"role": "system", "content": self.rng.choice(SYSTEMS)}] if self.rng.random() < 0.3 else []


class Question(NamedTuple):
    """A question of the exam: a conversation, and the assistant's message that is the right answer to it."""

    task: str
    messages: list[Message]
    right: Message
    tools: list[dict[str, Any]] | None = None


def exam(corpus: str, each: int, seed: int) -> list[Question]:
    """`each` held-out questions of every task, the old skills first; recalls come after up to ~800 tokens."""
    tasks, drawn = Tasks(corpus, seed, graded=True), []
    for task in ("sum", "difference", "spell", "repeat", "recall"):
        for _ in range(each):
            turns = tasks.conversation(tasks.rng.randint(100, 1600)) if task == "recall" else [getattr(tasks, task)()]
            messages = [message for question, answer in turns for message in (asks(question), says(answer))]
            drawn.append(Question(task, messages[:-1], messages[-1]))
    more = SkillTasks(corpus, seed, graded=True)
    for task in TASKS:
        for _ in range(each):
            box = more.toolbox()
            while task == "weather" and not box.weather:
                box = more.toolbox()
            question, tools = more.question(task, box), box.tools if TASKS[task] else None
            messages = more.system() + question[:-1]
            drawn.append(Question(task, messages, question[-1], tools))
    return drawn


def sensible(question: Question, answer: str) -> bool:
    """Whether an answer is JSON that has the fields that were asked for, with values of the right type and meaning."""
    kind = next(kind for kind in FIELDS if kind in question.messages[-1]["content"])
    try:
        made = json.loads(answer)
    except ValueError:
        return False
    return (
        isinstance(made, dict)
        and [*made] == [*json.loads(question.right["content"])]
        and all(is_value(value, FIELDS[kind][key]) for key, value in made.items())
    )


def is_value(value: Any, allowed: Any) -> bool:
    """Whether a field may have this value; see `FIELDS`."""
    if isinstance(allowed, list):
        return isinstance(value, list) and len(value) == 2 and all(each in allowed for each in value)
    return type(value) is type(allowed[0]) and value in allowed
