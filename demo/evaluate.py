"""Ask a server held-out questions and print the share of exact answers of each task.

    python demo/evaluate.py --url http://127.0.0.1:8000 --corpus tinyshakespeare.txt

The questions are those that `train.py` can never have drawn: see `held_out` in `tasks.py`. Answers are greedy.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tasks import Tasks, read_corpus

TASKS = ("sum", "difference", "spell", "repeat", "recall")
ANSWER_TOKENS = 64  # a word of many tokens nine times fits


def questions(corpus: str, count: int, seed: int) -> list[tuple[str, list[dict[str, str]], str]]:
    """`count` triples of task, messages and right answer; recalls are asked at the end of up to ~800 tokens."""
    tasks, drawn = Tasks(corpus, seed, graded=True), []
    for i in range(count):
        task = TASKS[i * len(TASKS) // count]
        turns = tasks.conversation(tasks.rng.randint(100, 1600)) if task == "recall" else [getattr(tasks, task)()]
        messages = []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        drawn.append((task, messages[:-1], turns[-1][1]))
    return drawn


def ask(url: str, messages: list[dict[str, str]]) -> tuple[str, int]:
    """The server's greedy answer, and how many tokens the prompt had."""
    body = {"messages": messages, "temperature": 0, "max_tokens": ANSWER_TOKENS}
    request = urllib.request.Request(
        url.rstrip("/") + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens")
    parser.add_argument("--corpus", required=True, help="the text that the model was trained on")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=32, help="questions in flight")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--save", type=Path, help="write every question and answer to this file, one JSON a line")
    args = parser.parse_args()
    drawn = questions(read_corpus(args.corpus), args.questions, args.seed)
    with ThreadPoolExecutor(args.concurrency) as pool:
        answers = list(pool.map(lambda item: ask(args.url, item[1]), drawn))
    longest = max(prompt for _, prompt in answers)
    for task in TASKS:
        graded = [said == right for (name, _, right), (said, _) in zip(drawn, answers, strict=True) if name == task]
        print(f"{task:10} {sum(graded) / len(graded):6.1%} of {len(graded)}")
    print(f"longest prompt: {longest} tokens")
    if args.save:
        lines = [{"task": task, "asked": messages[-1]["content"], "right": right, "said": said}
                 for (task, messages, right), (said, _) in zip(drawn, answers, strict=True)]  # fmt: skip
        args.save.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
