"""What people type to the demo: the prompts that are graded, their marks, and what training draws."""

from __future__ import annotations

import copy
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer

import evaluate
from config import DEMO
from natural import KINDS, UNTOLD, Spoken, bare, prompts
from skills import SkillTasks, asks, says
from talk import CANNOT, WHO
from tasks import held_out
from train import Rows

CORPUS = "\n".join(f"{a}{b} silver {b}{a} garden {a}lo{b}" for a in ("bar", "don", "fel") for b in ("gim", "hot"))


def test_a_mark_is_the_whole_answer():
    right = {prompt.turns[-1]: prompt.is_right for prompt in prompts()}
    assert len(right) == 70 and sum(prompt.group == "chat" for prompt in prompts()) == 40
    about, times = right["What is KV cache?"], right["2*3"]
    assert about(CANNOT) and about(WHO)
    assert not any(about(said) for said in ("Pisce", CANNOT + " Pisce", KINDS["thanks"]))
    assert times("6") and times(CANNOT) and not times("5") and not times("66")
    person = right["give me a person as json with name and age"]
    assert person('{"name": "Anna", "age": 31}') and not person('{"age": 31, "name": "Anna"}')


def test_what_is_graded_is_never_trained_on(monkeypatch):
    tokenizer = Tokenizer.from_file(str(Path(DEMO) / "tokenizer.json"))
    rows = Rows(tokenizer, CORPUS, seed=3)
    drawn = itertools.cycle(("12 + 30 ?", "WHAT is kv cache", "Spell 'Manta' backwards.", "Anything else"))
    monkeypatch.setattr(rows.tasks, "talk", lambda box: [asks(next(drawn)), says("No.")])
    text = "".join(tokenizer.decode(rows.row(256)[0]) for _ in range(20))
    assert "Anything else" in text and not any(bare(each) in bare(text) for each in ("12+30?", "KV", "Manta"))


def test_people_are_answered_as_the_question_says():
    spoken, drawn = Spoken(SkillTasks(CORPUS, seed=1)), []
    for _ in range(50):
        known: dict[str, str] = {}
        for _ in range(20):
            asked, said = (message["content"] for message in spoken.turn(known, False))
            drawn.append((asked, said))
            if "backwards" in asked:
                assert said.replace(" ", "")[::-1] in asked
            elif asked.lower().startswith("where do i live"):
                assert said == known.get("my home", UNTOLD)
    sums = [(re.fullmatch(r"(\d+) ?([-+]) ?(\d+)[ =?]*", asked), said) for asked, said in drawn]
    found = [(int(m[1]), m[2], int(m[3]), int(said)) for m, said in sums if m]
    assert len(found) > 20 and all(said == (a + b if sign == "+" else a - b) for a, sign, b, said in found)
    assert not any(held_out(f"{a},{b}") for a, _, b, _ in found)
    assert {CANNOT, UNTOLD, "OK."} <= {said for _, said in drawn}


def test_the_prompts_are_put_to_a_server(monkeypatch, capsys):
    asked = []

    def complete(url, fields):
        asked.append(copy.deepcopy(fields))
        last = fields["messages"][-1]["content"]
        said = {"12+30": "42", "My dog is called Rex": "OK."}.get(last, "Pisce" if fields["seed"] else CANNOT)
        return {"choices": [{"message": {"role": "assistant", "content": said}}]}

    monkeypatch.setattr(evaluate, "complete", complete)
    with ThreadPoolExecutor(1) as pool:
        evaluate.ask_natural("http://x", 2, pool)
    printed = capsys.readouterr().out
    assert "temperature" not in asked[0] and "wrong, 1 of 2: What is KV cache? | Pisce\n" in printed
    dogs = [each["messages"] for each in asked if each["messages"][-1]["content"] == "What is my dog called?"]
    assert [message["content"] for message in dogs[0]] == ["My dog is called Rex", "OK.", "What is my dog called?"]
    honest = sum(prompt.is_right(CANNOT) for prompt in prompts() if prompt.group == "chat")
    assert f"chat       {honest / 80:6.1%} of 80\n" in printed
