"""Ask a server held-out questions and print the share of right answers of each task.

    python demo/evaluate.py --url http://127.0.0.1:8000 --corpus tinyshakespeare.txt

The questions are those that `train.py` can never have drawn: see `held_out` in `tasks.py`. Answers are greedy. A right
one is exact: to the letter, or for a call its function and its arguments. An object that is to be made up has the
fields that were asked for, with sensible values. With `--text` no server is asked: the questions and the right answers
are written as the model would see them, for measuring perplexity. `exam.txt` was made with `--questions 6`.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2

from skills import Question, exam, sensible
from tasks import read_corpus

ANSWER_TOKENS = 128  # a word of many tokens nine times fits, and so does a call


def ask(url: str, question: Question) -> tuple[dict[str, Any], int]:
    """The server's greedy answer, a message, and how many tokens the prompt had."""
    messages = [message | {"tool_calls": written(message)} for message in question.messages]
    body = {"messages": messages, "tools": question.tools, "temperature": 0, "max_tokens": ANSWER_TOKENS}
    request = urllib.request.Request(
        url.rstrip("/") + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    return answer["choices"][0]["message"], answer["usage"]["prompt_tokens"]


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


def text_of(questions: list[Question]) -> str:
    """Questions and right answers as the demo's chat template writes them."""
    source = json.loads((Path(__file__).parent / "tokenizer_config.json").read_text())["chat_template"]
    environment = jinja2.Environment()
    environment.filters["tojson"] = json.dumps  # Jinja's own would sort keys and escape HTML
    template = environment.from_string(source)
    return "\n".join(template.render(messages=[*q.messages, q.right], tools=q.tools) for q in questions) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens")
    parser.add_argument("--corpus", required=True, help="the text that the model was trained on")
    parser.add_argument("--questions", type=int, default=200, help="of each task")
    parser.add_argument("--concurrency", type=int, default=32, help="questions in flight")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--save", type=Path, help="write every question and answer to this file, one JSON a line")
    parser.add_argument("--text", type=Path, help="only write questions and right answers to this file")
    args = parser.parse_args()
    drawn = exam(read_corpus(args.corpus), args.questions, args.seed)
    if args.text:
        args.text.write_text(text_of(drawn))
        return
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
