"""What drafts bring: the demo's tasks with and without speculative decoding, in turns."""

from __future__ import annotations

import json
import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from config import DEMO
from engine import LLM, SamplingParams
from skills import exam
from tasks import Tasks
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
