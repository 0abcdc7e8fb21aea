"""The demo's skills in the words that people type, for training; and the prompts of `natural.json`, for grading.

People leave out spaces, capital letters and marks, write small numbers as words, and call a dog by its name.
The operands and words are those that `tasks.py` trains on, and a question that stands in `natural.json` is never drawn:
see `is_held_back`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from skills import CITIES, FIELDS, Message, SkillTasks, asks, says
from talk import ANSWERS, CANNOT, TERMS
from tasks import KEYS, NAMES, held_out

UNTOLD = "You have not told me."
KINDS = ANSWERS | {"untold": UNTOLD}
DIGITS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip
SUMS = """{a}+{b}|{a}+{b}|{a}+{b}=|{a} + {b}|{a}+{b}?|{a} + {b}?|{a} + {b} = ?|{a} +{b}|{a}+ {b}|What is {a}+{b}?
    |What's {a}+{b}?|What's {a} plus {b}?|Whats {a} + {b}|{a} plus {b}|{a} plus {b}?|Can you add {a} and {b}?
    |Add {a} and {b}|Add {b} to {a}|The sum of {a} and {b}|Sum {a} and {b}|How much is {a} plus {b}?
    |How much is {a}+{b}|What do you get if you add {a} and {b}?|{a} and {b} together|What is {a} added to {b}?
    |Solve {a}+{b}|{a} add {b}|What does {a} + {b} equal?|{a} plus {b} is what?|What is the sum of {a} and {b}?
    |What is {a} and {b}?|Calculate {a}+{b}|Can you tell me {a}+{b}|Do you know what {a} plus {b} is?
    |I need {a} plus {b}"""
DIFFERENCES = """{a}-{b}|{a}-{b}|{a}-{b}=|{a} - {b}|{a}-{b}?|{a} - {b}?|{a} - {b} = ?|{a} -{b}|What is {a}-{b}?
    |What's {a}-{b}?|What's {a} minus {b}?|Whats {a} - {b}|{a} minus {b}|{a} minus {b}?|Subtract {b} from {a}
    |Can you subtract {b} from {a}?|Take {b} from {a}|Take {b} away from {a}|{a} take away {b}
    |How much is {a} minus {b}?|How much is {a}-{b}|Solve {a}-{b}|{a} less {b}|What is {a} less {b}?
    |What does {a} - {b} equal?|Calculate {a}-{b}|What do you get if you subtract {b} from {a}?
    |Can you tell me {a}-{b}|I need {a} minus {b}"""
OTHER_SUMS = """{a}*{b}|{a}*{b}|{a}x{b}|{a} * {b}|{a}*{b}=|{a} x {b}|What is {a}*{b}?|What's {a} times {b}?|{a}/{b}
    |{a} / {b}|{a} times {b}|What's {a}*{b}|Whats {a} x {b}|How much is {a}*{b}?|{a}/{b}=|What is {a}/{b}?
    |What's {a} divided by {b}?|{a} divided by {b}|Multiply {a} and {b}|Multiply {a} by {b}|Divide {a} by {b}
    |The product of {a} and {b}|{a}^{b}|{a} squared|{a} mod {b}|{a}%{b}|Square root of {a}|sqrt({a})
    |Calculate {a}*{b}|Calculate {a}/{b}|{a} times {b} is what?|Can you multiply {a} and {b}?|Solve {a}*{b}
    |What is the product of {a} and {b}?|{a}+{b}*{a}|{a}*{b}+{a}"""
BACKWARDS = """Spell {} backwards|Spell {} backwards.|Spell {} backwards|Spell {} backward
    |Spell the word {} backwards|Can you spell {} backwards?|Please spell {} backwards|{} backwards
    |{} spelled backwards|What is {} backwards?|What's {} backwards?|What is {} spelled backwards?
    |Write {} backwards|Say {} backwards|Reverse {}|Reverse the word {}|Spell '{}' backwards|Spell "{}" backwards
    |Spell {} in reverse|How do you spell {} backwards?|Spell {} from the end|Backwards: {}|Spell backwards: {}
    |Could you spell {} backwards please|Turn {} around|Now spell {} backwards"""
REPEATS = """Repeat {} {n} times|Repeat {} {n} times|Repeat {} {n} times.|Say {} {n} times|Write {} {n} times
    |Print {} {n} times|Repeat the word {} {n} times|Can you repeat {} {n} times?|Please repeat {} {n} times
    |Type {} {n} times|Say the word {} {n} times|Repeat '{}' {n} times|Repeat "{}" {n} times|{} {n} times
    |Give me {} {n} times|Could you say {} {n} times|Write the word {} {n} times|Repeat {n} times {}
    |Say {n} times {}|Now repeat {} {n} times|I want you to repeat {} {n} times"""
ONCE = """Repeat {}|Repeat after me: {}|Repeat {} once|Repeat the word {}|Repeat this: {}|Repeat {} one time"""
FACTS = """{Key} is {}|{Key} is {}|{Key} is called {}|{Key} is called {}|{Key} is named {}|{Key}'s name is {}
    |{Key} has the name {}|The name of {key} is {}|Remember that {key} is {}|Remember that {key} is called {}
    |Remember: {key} is {}|{Key}: {}|Remember {key}: {}|Please remember that {key} is {}|Note that {key} is {}
    |Hi, {key} is {}|I call {key} {}|{Key} was {}|You should know that {key} is {}|Do not forget that {key} is {}
    |Don't forget: {key} is {}|So {key} is called {}"""
RECALLS = """What is {key}?|What is {key}?|What's {key}?|What is {key} called?|What is {key} called?
    |What's {key} called?|What is {key}'s name?|What's {key}'s name?|What is the name of {key}?|What is {key} named?
    |How is {key} called?|Tell me {key}|Do you remember {key}?|Do you know {key}?|{Key}?|What was {key}?|And {key}?
    |What was {key} called?|Can you tell me {key}?|Who is {key}?|What did I say {key} is?
    |Do you remember what {key} is called?|Which is {key}?|Tell me what {key} is|Tell me {key}'s name|I forgot {key}
    |Remind me what {key} is"""
PERSONAL = {  # what people say of themselves: how, and how they ask for it
    "my name": (
        """My name is {}|My name is {}|I am {}|I'm {}|Call me {}|I am called {}|Hi, my name is {}|Hi, I am {}
        |Hello, I'm {}|Hello, my name is {}|You can call me {}|Remember that my name is {}|My name's {}
        |The name is {}|They call me {}""",
        """What is my name?|What is my name?|What's my name?|Do you know my name?|Do you remember my name?|Who am I?
        |Tell me my name|What am I called?|Say my name|How am I called?|Can you tell me my name?|And my name?""",
    ),
    "my home": (
        """I live in {}|I am from {}|I'm from {}|My home is {}|My home is in {}|I come from {}|I live in {} now
        |Home is {}""",
        """Where do I live?|Where am I from?|Where is my home?|What is my home?|Do you know where I live?
        |Where do I come from?""",
    ),
    "my age": (
        "I am {} years old|I'm {} years old|I am {}|I'm {}|My age is {}|I am {} now|I just turned {}",
        "How old am I?|What is my age?|What's my age?|Do you know how old I am?|Tell me my age|Do you know my age?",
    ),
}
OBJECTS = """Give me a {} as JSON|Give me JSON for a {}|Create a JSON object for a {}|Make a JSON {}|{} as JSON
    |JSON of a {}|A {} in JSON|Write JSON for a {}|I need a {} in JSON|Generate JSON for a {}
    |Can you write a {} as JSON?|Show me a {} as JSON|Create a {} in JSON|Write a JSON object for a {}
    |Output a {} as JSON|Make up a {} in JSON|JSON for a {}"""


def parts(text: str) -> list[str]:
    return [part.strip() for part in text.split("|")]


class Prompt(NamedTuple):
    """A prompt of `natural.json`.

    Attributes:
        group: "chat", what people type first; or "skills", what they type to try these.
        turns: what the user says, turn by turn; the answer to the last is graded.
        right: a regular expression of right answers.
    """

    group: str
    turns: list[str]
    right: str

    def is_right(self, answer: str) -> bool:
        """Whether the whole answer is right or honest."""
        return re.fullmatch(self.right, answer.strip()) is not None


def prompts() -> list[Prompt]:
    """Those of `natural.json`. Its marks are names of `KINDS`, answers, or regular expressions between slashes."""
    drawn = []
    for group, lines in json.loads((Path(__file__).parent / "natural.json").read_text()).items():
        for *turns, marks in lines:
            right = [mark[1:-1] if mark[0] == mark[-1] == "/" else re.escape(KINDS.get(mark, mark)) for mark in marks]
            drawn.append(Prompt(group, turns, "|".join(right)))
    return drawn


def bare(text: str) -> str:
    """A question without what people type now so, now so: capital letters, spaces and most marks."""
    return re.sub(r"[^a-z0-9+*/-]", "", text.lower())


HELD_BACK = {bare(prompt.turns[-1]) for prompt in prompts()}


def is_held_back(messages: list[Message]) -> bool:
    """Whether one of these messages asks what `natural.json` asks."""
    return any(message["role"] == "user" and bare(message["content"]) in HELD_BACK for message in messages)


class Spoken:
    """Draws questions in people's words, and their answers.

    Args:
        tasks: draws operands and words.
    """

    def __init__(self, tasks: SkillTasks):
        self.tasks, self.rng = tasks, tasks.rng

    def typed(self, text: str) -> str:
        """The text as people type it: perhaps without its last mark, or with a word for politeness."""
        chance = self.rng.random()
        if chance < 0.25:
            return text.rstrip(".?")
        if chance < 0.4 and text[-1] not in ".?!=":
            return text + self.rng.choice((".", "?", " please", ", please", "!"))
        return text

    def turn(self, known: dict[str, str], tools: bool) -> list[Message]:
        """A question and its answer. What is told is remembered in `known`. With tools there are no sums."""
        draws = (self.sum, self.other_sum, self.backwards, self.repeat, self.fact, self.recall, self.object)
        weights = (0, 0, 3, 3, 2, 3, 1) if tools else (5, 2, 4, 4, 4, 6, 1)
        question, answer = self.rng.choices(draws, weights)[0](known)
        return [asks(question), says(answer)]

    def lower(self, question: str, answer: str, chance: float = 0.4) -> tuple[str, str]:
        """Both in lower case, perhaps."""
        return (question.lower(), answer.lower()) if self.rng.random() < chance else (question, answer)

    def operands(self) -> tuple[int, int]:
        """People type small numbers."""
        high = self.rng.choice((9, 20, 20, 99, 99, 999))
        while True:
            a, b = self.rng.randint(0, high), self.rng.randint(0, self.rng.choice((high, 20)))
            if not held_out(f"{a},{b}"):
                return a, b

    def calculation(self, forms: str, a: int, b: int) -> str:
        """A question in one of these forms, where words stand with small numbers in words."""
        form = self.rng.choice(parts(forms))
        words = max(a, b) <= 20 and not re.search(r"[-+*/^%(]|}x", form) and self.rng.random() < 0.6
        x, y = (DIGITS[number] if words else str(number) for number in (a, b))
        return self.lower(self.typed(form.format(a=x, b=y)), "")[0]

    def sum(self, known: dict[str, str]) -> tuple[str, str]:
        a, b = self.operands()
        plus = self.rng.random() < 0.55
        return self.calculation(SUMS if plus else DIFFERENCES, a, b), str(a + b if plus else a - b)

    def other_sum(self, known: dict[str, str]) -> tuple[str, str]:
        return self.calculation(OTHER_SUMS, *self.operands()), CANNOT

    def word(self) -> str:
        """A word of training, at times with a capital letter, or one of today's."""
        chance = self.rng.random()
        if chance < 0.12:
            return self.rng.choice((*NAMES, *CITIES)).replace(" ", "")
        if chance < 0.24:
            return self.rng.choice([term for term in TERMS if term.isalpha() and term.islower()])
        word = self.tasks.word()
        return word.capitalize() if chance < 0.36 else word

    def backwards(self, known: dict[str, str]) -> tuple[str, str]:
        word = self.word()
        question = self.typed(self.rng.choice(parts(BACKWARDS)).format(word))
        question = question[0].upper() + question[1:] if not question.startswith(word) else question
        return self.lower(question, " ".join(reversed(word)))

    def repeat(self, known: dict[str, str]) -> tuple[str, str]:
        word = self.word() if self.rng.random() < 0.85 else f"{self.word()} {self.word()}"
        if self.rng.random() < 0.1:
            return self.lower(self.typed(self.rng.choice(parts(ONCE)).format(word)), word)
        times = self.rng.randint(2, 9) if self.rng.random() < 0.95 else 10
        if self.rng.random() < 0.06:
            times = self.rng.choice((20, 25, 30, 50, 99, 100, 200, 500, 1000, self.rng.randint(21, 999)))
        said = DIGITS[times] if times <= 10 and self.rng.random() < 0.55 else str(times)
        question = self.rng.choice(parts(REPEATS)).format(word, n=said)
        if times == 2 and self.rng.random() < 0.5:
            question = question.replace(f"{said} times", "twice")
        question = self.typed(question)
        if times > 10:
            return self.lower(question, "")[0], CANNOT
        return self.lower(question, " ".join([word] * times))

    def key(self) -> str:
        """What a fact is of: one of those of `tasks.py`, or of any word."""
        chance = self.rng.random()
        if chance < 0.5:
            return self.rng.choice(KEYS)
        if chance < 0.6:
            return f"my favorite {self.tasks.word()}"
        return f"{'the' if chance < 0.7 else 'my'} {self.tasks.word()}"

    def value(self) -> str:
        kind = self.rng.choices(("word", "name", "city", "number"), (4, 3, 2, 1))[0]
        if kind == "number":
            return str(self.rng.randint(1, 999))
        return self.word() if kind == "word" else self.rng.choice(NAMES) if kind == "name" else self.tasks.city()

    def fact(self, known: dict[str, str]) -> tuple[str, str]:
        """One or two facts, told as people tell them."""
        told = []
        small = self.rng.random() < 0.35
        for _ in range(1 if self.rng.random() < 0.75 else 2):
            if self.rng.random() < 0.35:
                key = self.rng.choice([*PERSONAL])
                value = (
                    str(self.rng.randint(5, 99)) if key == "my age" else self.rng.choice(NAMES)
                    if key == "my name" and self.rng.random() < 0.5 else self.tasks.city()
                )  # fmt: skip
                said = self.rng.choice(parts(PERSONAL[key][0])).format(value)
            else:
                key, value = self.key(), self.value()
                said = self.rng.choice(parts(FACTS)).format(value, key=key, Key=key[0].upper() + key[1:])
            if key in known:
                continue
            known[key] = value.lower() if small else value
            told.append(said)
        if not told:
            return self.fact(known)
        question = self.rng.choice((". ", " and ", ", ")).join(told) + self.rng.choice((".", ".", "", "!"))
        return question.lower() if small else question, "OK."

    def recall(self, known: dict[str, str]) -> tuple[str, str]:
        """A question for a fact, which at times was not told."""
        if known and self.rng.random() < 0.85:
            latest = [*known][-3:]
            key = self.rng.choice(latest if self.rng.random() < 0.6 else [*known])
        else:
            key = self.rng.choice([*PERSONAL]) if self.rng.random() < 0.3 else self.key()
            if key.startswith("the ") and key not in KEYS:
                key = "my" + key[3:]
        forms = PERSONAL[key][1] if key in PERSONAL else RECALLS
        question = self.typed(self.rng.choice(parts(forms)).format(key=key, Key=key[0].upper() + key[1:]))
        return self.lower(question, "")[0], known.get(key, UNTOLD)

    def object(self, known: dict[str, str]) -> tuple[str, str]:
        """An object in JSON."""
        kind = self.rng.choice([*FIELDS])
        made = self.tasks.object(kind)
        *most, last = made
        fields = f" with {', '.join(most)} and {last}", f" with {', '.join(made)}", f": {', '.join(made)}", ""
        question = self.typed(self.rng.choice(parts(OBJECTS)).format(kind).rstrip("?") + self.rng.choice(fields))
        return self.lower(question, "")[0], json.dumps(made)
