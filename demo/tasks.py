"""The checkable skills of the demo model: it is trained on these questions and graded on held-out ones.

Five tasks: `sum`, `difference`, `spell` (a word backwards), `repeat` (a word N times) and `recall` (a fact stated
earlier in the conversation). An operand pair or a word is held out when its CRC falls in one bucket of `HELD_OUT`, so
that training and grading can never meet, in whatever order either of them draws.
"""

from __future__ import annotations

import random
import re
import zlib
from pathlib import Path

HELD_OUT = 20  # one pair or word in twenty is never trained on

OWNED = """favorite color, home town, cat, dog, horse, garden, job, lucky number, best friend, teacher, car, street,
sport, hero, breakfast, song, book, boat, doctor, neighbor, drink, hat, captain, hobby, school, nickname, team, village,
river, uncle"""
LOCKED = """box, door, gate, safe, locker, tower, bridge, castle, cabin, chest, room, wagon, cellar, attic, vault,
desk, trunk, barn, mill, shop, tent, well, cave, tunnel"""
PEOPLE = """Anna, Ben, Clara, David, Emma, Frank, Grace, Henry, Iris, Jack, Kate, Leo, Mary, Nora, Oscar, Paul, Rosa,
Sam, Tom, Vera, Will, Alice, Hugo, Lucy"""
NAMES = re.split(r",\s+", PEOPLE)
KEYS = [f"my {noun}" for noun in re.split(r",\s+", OWNED)]
KEYS += [f"the code of the {noun}" for noun in re.split(r",\s+", LOCKED)]


def held_out(item: str) -> bool:
    """Whether `item` (a word, or "a,b" for a pair of operands) belongs to the graded set."""
    return zlib.crc32(item.encode()) % HELD_OUT == 0


class Tasks:
    """Draws (question, answer) pairs, from the training side or from the held-out side.

    Args:
        corpus: text whose lowercase words of 3 to 8 letters are the words to spell, repeat and recall.
        seed: of the draws.
        graded: draw held-out operands and words, instead of those to train on.
    """

    def __init__(self, corpus: str, seed: int, graded: bool = False):
        self.rng = random.Random(seed)
        self.graded = graded
        words = sorted(set(re.findall(r"\b[a-z]{3,8}\b", corpus)))
        self.words = [word for word in words if held_out(word) == graded]
        self.lines = [line for line in corpus.splitlines() if 20 <= len(line) <= 60]

    def word(self) -> str:
        # Half of the training words are made of two halves of words, so that the model learns to spell, not a list.
        if self.graded or self.rng.random() < 0.5:
            return self.rng.choice(self.words)
        while True:
            left, right = self.rng.choice(self.words), self.rng.choice(self.words)
            word = (left[: (len(left) + 1) // 2] + right[len(right) // 2 :])[:8]
            if not held_out(word):
                return word

    def operands(self) -> tuple[int, int]:
        while True:
            high = 999 if self.graded or self.rng.random() < 0.75 else self.rng.choice((9, 99, 999))
            pair = self.rng.randint(0, high), self.rng.randint(0, 999 if self.rng.random() < 0.9 else high)
            if self.rng.random() < 0.5:
                pair = pair[::-1]
            if held_out(f"{pair[0]},{pair[1]}") == self.graded:
                return pair

    def sum(self) -> tuple[str, str]:
        a, b = self.operands()
        return self.rng.choice((f"What is {a} + {b}?", f"What is {a} plus {b}?", f"{a} + {b} =")), str(a + b)

    def difference(self) -> tuple[str, str]:
        a, b = self.operands()
        return self.rng.choice((f"What is {a} - {b}?", f"What is {a} minus {b}?", f"{a} - {b} =")), str(a - b)

    def spell(self) -> tuple[str, str]:
        word = self.word()
        return f"Spell {word} backwards.", " ".join(reversed(word))

    def repeat(self) -> tuple[str, str]:
        word, times = self.word(), self.rng.randint(2, 9)
        return f"Repeat {word} {times} times.", " ".join([word] * times)

    def fact(self, known: dict[str, str]) -> tuple[str, str]:
        """State one to three new facts and remember them in `known`."""
        said = []
        for key in self.rng.sample([key for key in KEYS if key not in known], self.rng.randint(1, 3)):
            if key.startswith("the code"):
                known[key] = str(self.rng.randint(100, 999))
            else:
                known[key] = self.rng.choice(NAMES) if self.rng.random() < 0.3 else self.word()
            said.append(f"{key[0].upper()}{key[1:]} is {known[key]}.")
        return " ".join(said), "OK."

    def recall(self, known: dict[str, str]) -> tuple[str, str]:
        key = self.rng.choice(list(known))
        return f"What is {key}?", known[key]

    def read(self) -> tuple[str, str]:
        """A few lines of the corpus, as the noise between a fact and the question about it."""
        start = self.rng.randrange(len(self.lines) - 4)
        return "Read this: " + " ".join(self.lines[start : start + self.rng.randint(1, 3)]), "OK."

    def turn(self, known: dict[str, str], weights: tuple[float, ...]) -> tuple[str, str]:
        """One turn of a conversation; `weights` are those of sum, difference, spell, repeat, fact, recall, read."""
        task = self.rng.choices(("sum", "difference", "spell", "repeat", "fact", "recall", "read"), weights)[0]
        if (task == "recall" and not known) or (task == "fact" and len(known) > len(KEYS) - 3):
            return self.turn(known, weights)
        draw = getattr(self, task)
        return draw(known) if task in ("fact", "recall") else draw()

    def conversation(self, length: int) -> list[tuple[str, str]]:
        """Turns of at least `length` characters in all, that end with a recall of a fact from anywhere among them."""
        known: dict[str, str] = {}
        turns = [self.fact(known)]
        while sum(len(question) + len(answer) for question, answer in turns) < length:
            turns.append(self.turn(known, (1, 1, 1, 1, 2, 0, 3)))
        return [*turns, self.recall(known)]


def read_corpus(path: str | Path) -> str:
    """The corpus as text; `path` is any plain text of a megabyte or so."""
    return Path(path).read_text(encoding="utf-8")
