"""Ask a server held-out questions and print the share of right answers of each task.

    python demo/evaluate.py --url http://127.0.0.1:8000 --corpus tinyshakespeare.txt
    python demo/evaluate.py --url http://127.0.0.1:8000 --natural               # what people type: natural.json

The questions are those that `train.py` can never have drawn: see `held_out` in `tasks.py`. Answers are greedy. A right
one is exact: to the letter, or for a call its function and its arguments. An object that is to be made up has the
fields that were asked for, with sensible values.

With `--natural` the prompts of `natural.json` are asked instead, each with several seeds, at the temperature that the
model's `generation_config.json` says. An answer is right if the whole of it is one of the prompt's marks: what is
right, or what says honestly that the model cannot do that, or what it is.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from natural import Prompt, prompts
from skills import Question, exam, sensible
from tasks import read_corpus

ANSWER_TOKENS = 128  # a word of many tokens nine times fits, and so does a call


def ask(url: str, question: Question) -> tuple[dict[str, Any], int]:
    """The server's greedy answer, a message, and how many tokens the prompt had."""
    messages = [message | {"tool_calls": written(message)} for message in question.messages]
    answer = complete(url, {"messages": messages, "tools": question.tools, "temperature": 0})
    return answer["choices"][0]["message"], answer["usage"]["prompt_tokens"]


def complete(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What the server answers to a chat with these fields."""
    request = urllib.request.Request(
        url.rstrip("/") + "/v1/chat/completions",
        json.dumps(fields | {"max_tokens": ANSWER_TOKENS}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def converse(url: str, prompt: Prompt, seed: int) -> str:
    """The server's answer to the last turn of a prompt, after its own answers to the turns before."""
    messages: list[dict[str, Any]] = []
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        messages.append(complete(url, {"messages": messages, "seed": seed})["choices"][0]["message"])
    return messages[-1]["content"]


def ask_natural(url: str, seeds: int, pool: ThreadPoolExecutor) -> None:
    """Print the wrong answers to the prompts of `natural.json`, and the share of right ones in each group."""
    drawn = [(prompt, seed) for prompt in prompts() for seed in range(seeds)]
    answers = list(pool.map(lambda each: converse(url, *each), drawn))
    graded = [(prompt, prompt.is_right(said)) for (prompt, _), said in zip(drawn, answers, strict=True)]
    wrong = Counter((*prompt.turns, said) for (prompt, right), said in zip(graded, answers, strict=True) if not right)
    for said, times in wrong.items():
        print(f"wrong, {times} of {seeds}: {' | '.join(said)}")
    for group in dict.fromkeys(prompt.group for prompt, _ in graded):
        right = [right for prompt, right in graded if prompt.group == group]
        print(f"{group:10} {sum(right) / len(right):6.1%} of {len(right)}")


def written(message: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The calls of a message as an API has them, where arguments are JSON text."""
    calls = message.get("tool_calls")
    return calls and [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in calls
    ]


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """What functions an answer calls, and with what."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def is_right(question: Question, answer: dict[str, Any]) -> bool:
    right = question.right | {"tool_calls": written(question.right)}
    if called(right) or called(answer):
        return called(right) == called(answer)
    return sensible(question, answer["content"]) if question.task == "json" else answer["content"] == right["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens")
    parser.add_argument("--corpus", help="the text that the model was trained on")
    parser.add_argument("--natural", action="store_true", help="ask the prompts of natural.json")
    parser.add_argument("--seeds", type=int, default=5, help="how often each of these is asked")
    parser.add_argument("--questions", type=int, default=200, help="of each task")
    parser.add_argument("--concurrency", type=int, default=32, help="questions in flight")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--save", type=Path, help="write every question and answer to this file, one JSON a line")
    args = parser.parse_args()
    if args.natural:
        with ThreadPoolExecutor(args.concurrency) as pool:
            ask_natural(args.url, args.seeds, pool)
        return
    if not args.corpus:
        parser.error("--corpus is missing: the held-out questions are made of it")
    drawn = exam(read_corpus(args.corpus), args.questions, args.seed)
    with ThreadPoolExecutor(args.concurrency) as pool:
        answers = list(pool.map(lambda question: ask(args.url, question), drawn))
    longest = max(prompt for _, prompt in answers)
    graded = [(question, said, is_right(question, said)) for question, (said, _) in zip(drawn, answers, strict=True)]
    for task in dict.fromkeys(question.task for question in drawn):
        right = [right for question, _, right in graded if question.task == task]
        print(f"{task:10} {sum(right) / len(right):6.1%} of {len(right)}")
    print(f"longest prompt: {longest} tokens")
    if args.save:
        lines = [question._asdict() | {"said": said, "is_right": right} for question, said, right in graded]
        args.save.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
