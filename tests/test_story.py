"""docs/story.md: its quotes are the code, and its table has the values of a real scheduler."""

from __future__ import annotations

import re

from config import EngineConfig
from plan import StepPlan, StepResult
from quote import QUOTE, STORY, quoted
from ring import Codec
from sampling_params import SamplingParams
from scheduler import Scheduler
from sequence import Sequence, SequenceGroup, Status

STOPS = 8


def test_the_quotes_are_the_code():
    page = STORY.read_text()
    assert page == quoted(page), "python docs/quote.py writes them anew"
    assert len(QUOTE.findall(page)) == page.count("```python"), "a block of code without a marker, or one that is none"
    _, *stops = re.split(r"^## \d", page, flags=re.MULTILINE)
    assert len(stops) == STOPS and all(QUOTE.search(stop) for stop in stops)


def row_of(when: str, seq: Sequence) -> list[str]:
    fields = seq.status.name, seq.num_tokens, seq.num_known, seq.num_computed, seq.tables, seq.slot
    return [when, *map(str, fields)]


def test_the_table_has_a_real_schedulers_values():
    table = [line.strip("| ").split(" | ") for line in STORY.read_text().splitlines() if line.startswith("| ")][1:]
    scheduler = Scheduler(EngineConfig(block_size=64), 16, max_model_len=512, vocab_size=97, eos_token_ids=[])
    group = SequenceGroup("chat", [3] * 130, SamplingParams(max_tokens=64))
    scheduler.add(group)
    (seq,) = group.seqs
    rows = [row_of("`add`", seq)]
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan.rows == [(0, 1 if plan.step else 130)] and len(plan.new) == (plan.step == 0)
        assert plan.step in (0, 63) or plan == StepPlan(plan.step, rows=[(0, 1)])
        assert plan.step or 500 < len(Codec().encode(plan)) < 700
        if plan.step < 2:
            rows.append(row_of("`schedule`", seq))
        if plan.new_blocks:
            assert plan.new_blocks == [(0, [[3]])]
            rows.append(row_of(f"`schedule` of step {plan.step}", seq))
        scheduler.update(plan, StepResult(plan.step, [5]))
        if plan.step < 2:
            rows.append(row_of("`update`", seq))
    assert seq.status is Status.FINISHED
    assert table == [*rows, row_of("the last `update`", seq)]
