"""What drafts bring: the demo's tasks with and without them, in turns, and an agent's recorded calls."""

from __future__ import annotations

import difflib
import json
import random
import statistics
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from config import DEMO
from cpu import ops
from engine import LLM, SamplingParams
from skills import exam
from speculation.options import SpeculativeConfig
from speculation.proposer import SUFFIX_FACTOR, PromptLookup
from tasks import Tasks
from tokenizer import Tokenizer
from turns import in_turns, spread

Figures = list[dict[str, Any]]
DRAFTED, TAKEN = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"
CORPUS = Path(__file__).parent.parent / "docs"


def questions(task: str, count: int, alone: bool) -> list[tuple[list[dict[str, Any]], Any]]:
    """Conversations and their tools: of the demo's exam for `repeat`, `recall` and `exam`, which is all of it, and
    beginnings of plays for `prose`. Those that are not asked `alone` have no tools."""
    corpus = "\n".join(path.read_text(encoding="utf-8") for path in sorted(CORPUS.glob("*.md")))
    if task == "exam":
        pairs = [(question.messages, question.tools) for question in exam(corpus, 8, 0) if alone or not question.tools]
        pairs = [pair for pair in pairs if not any(message.get("tool_calls") for message in pair[0])]
        return random.Random(0).sample(pairs, min(count, len(pairs)))
    tasks, rng = Tasks(corpus, 0, graded=True), random.Random(0)
    conversations: list[tuple[list[dict[str, Any]], Any]] = []
    for _ in range(count):
        turns = tasks.conversation(400) if task == "recall" else [tasks.repeat()]
        if task == "prose":
            turns = [(f"{rng.choice(('KING', 'QUEEN', 'FOOL'))}:\n{rng.choice(tasks.words).capitalize()}", "")]
        messages = []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        conversations.append((messages[:-1], None))
    return conversations


def speculation_figures(
    options: dict[str, Any], sequences: list[int], repeats: int, tasks: list[str], model: str = DEMO
) -> Figures:
    """Tokens a second with and without drafts, taking turns; "of plain" is the median of the turns' ratios.

    Args:
        options: of speculation, as `--speculative-config` has them.
        sequences: how many run at once.
        repeats: turns.
        tasks: their names; see `questions`.
    """
    plain = LLM(model, enable_prefix_caching=False)
    drafting = LLM(model, enable_prefix_caching=False, speculative_config=json.dumps(options))
    counters = drafting.core.scheduler.counters
    figures = []
    for task in tasks:
        prose = task == "prose"  # of any length, so each answer has as many tokens
        params = SamplingParams(temperature=0.8 * prose, seed=0, max_tokens=96 if prose else 60, ignore_eos=prose)
        for batch in sequences:
            pairs = questions(task, max(8, *sequences), batch == 1)
            before = counters[DRAFTED], counters[TAKEN]

            def rate(llm: LLM, turn: int, pairs: Any = pairs, batch: int = batch, params: Any = params) -> float:
                begun, tokens = time.perf_counter(), 0
                for at in range(0, min(len(pairs), 8 * batch), batch):
                    part = [messages for messages, _ in pairs[at : at + batch]]
                    for output in llm.chat(part, params, use_tqdm=False, tools=pairs[at][1]):
                        tokens += len(output.outputs[0].token_ids)
                return tokens / (time.perf_counter() - begun)

            rates = in_turns({llm: partial(rate, llm) for llm in (plain, drafting)}, repeats)
            ratios = [with_drafts / free for with_drafts, free in zip(rates[drafting], rates[plain], strict=True)]
            drafted = counters[DRAFTED] - before[0]
            figures.append({
                "task": task, "sequences": batch, "plain tok/s": round(statistics.median(rates[plain])),
                "tok/s": round(statistics.median(rates[drafting])), "of plain": round(statistics.median(ratios), 3),
                **spread(ratios, 3), "drafts": int(drafted),
                "taken": round((counters[TAKEN] - before[1]) / max(1, drafted), 2),
            })  # fmt: skip
    return figures


def edits(count: int) -> list[list[tuple[str, str]]]:
    """Sessions of an agent that made this repository's last commits to Python files: prompts, and the calls that it
    answers with. It reads the part of a file that a commit changes, and then replaces one place after the other."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(CORPUS.parent), *words], capture_output=True, text=True).stdout

    def calls(name: str, **arguments: Any) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    sessions = []
    for commit in git("log", "--format=%H", "--no-merges", "-n", "1000").split():
        turns: list[tuple[str, str]] = []
        prompt = f"<|user|>{git('show', '-s', '--format=%s', commit)}"
        for path in git("show", "--name-only", "--format=", commit, "--", "*.py").split():
            before, after = (git("show", f"{at}:{path}").splitlines(True) for at in (f"{commit}^", commit))
            changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
            changes = [change for change in changes if change[0] != "equal"]
            if not before or not 0 < len(changes) <= 6:
                continue
            begin, end = max(0, changes[0][1] - 40), min(len(before), changes[-1][2] + 40, changes[0][1] + 210)
            steps = [(calls("read_file", path=path, view_range=[begin + 1, end]), "".join(before[begin:end]))]
            for _, i, j, new_i, new_j in changes:
                old, new = "".join(before[max(0, i - 2) : j + 1]), "".join(after[max(0, new_i - 2) : new_j + 1])
                steps.append((calls("str_replace", path=path, old_str=old, new_str=new), "The file was edited.\n"))
            for answer, result in steps:
                prompt += "<|assistant|>"
                turns.append((prompt, answer))
                prompt += f"{answer}\n<|tool|>{result}"
        sessions += [turns] if turns else []
        if len(sessions) == count:
            break
    return sessions


def replay_figures(methods: list[dict[str, Any]], sessions: int, tokenizer: str) -> Figures:
    """What each of the `methods` finds in an agent's recorded sessions: tokens a step, if every draft is verified.

    One session comes after the other, and each answer takes the slot that was free for the longest, of 64.
    """
    reader = Tokenizer(DEMO if tokenizer == "demo" else tokenizer)
    turns = [[reader.encode(text, False) for text in turn] for session in edits(sessions) for turn in session]
    width, figures = max(len(prompt) + len(answer) for prompt, answer in turns) + 40, []
    for method in methods:
        lookup = PromptLookup(SpeculativeConfig.of(json.dumps(method)), ops)
        ids = torch.zeros(64, width, dtype=torch.int32)
        known, counts, clients = torch.zeros(3, 64, dtype=torch.int32)
        others: tuple[Any, ...] = (clients, SUFFIX_FACTOR) if lookup.over_requests else ()
        steps = drafted = taken = tokens = 0
        for turn, (prompt, answer) in enumerate(turns):
            slot, whole = torch.tensor([turn % 64], dtype=torch.int32), torch.tensor(prompt + answer, dtype=torch.int32)
            ids[turn % 64, : len(whole)] = whole
            at, tokens = len(prompt), tokens + len(answer)
            while at < len(whole):
                known[turn % 64] = at
                drafts = ops.look_up(ids, known, counts, slot, *lookup.sizes, *others)[0]
                ids[turn % 64, at : len(whole)] = whole[at:]  # which the drafts were written over
                right = drafts[: len(whole) - at] == whole[at : at + len(drafts)]
                accepted = int(right.long().cumprod(0).sum())
                drafted, taken, steps = drafted + int(counts[turn % 64]), taken + accepted, steps + 1
                at += accepted + 1
        figures.append({
            "method": json.dumps(method), "answers": len(turns), "tokens": tokens,
            "tokens/step": round(tokens / steps, 2), "drafts/step": round(drafted / steps, 2),
            "taken": round(taken / max(1, drafted), 2),
        })  # fmt: skip
    return figures
