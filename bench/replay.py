"""Makes every decision of a scheduler's journal again, and stops where one differs: `python bench/replay.py FILE`.

`python server.py --log-scheduler steps.jsonl` writes the journal; see `observe/journal.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # from a clone: the engine's files lie one folder up
    sys.path.insert(0, str(Path(__file__).parent.parent))

from config import EngineConfig
from observe.journal import decisions
from plan import Adapter, Logprobs, Picture, Span, StateRoom, StepResult, Verified
from sampling_params import PoolingParams, SamplingParams
from scheduler import Scheduler
from sequence import Beam, SequenceGroup


def replay(lines: Sequence[str], watch: Callable[[Scheduler, dict[str, Any]], None] | None = None) -> Scheduler:
    """Make the decisions of a journal again, and call `watch` after each line; returns the scheduler after the last.

    Raises:
        ValueError: a decision differs, or the journal is none.
    """
    now = 0.0
    try:
        head = json.loads(lines[0])
        sizes = head["sizes"]
        if sizes.get("states"):
            sizes["states"] = StateRoom(*sizes["states"])
        scheduler = Scheduler(EngineConfig(**head["config"]), **sizes, clock=lambda: now)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is no journal: {error!r}") from None
    for text in lines[1:]:
        line = json.loads(text)
        for kind, now, *rest in line["events"]:  # noqa: B007 (the scheduler's clock reads `now`)
            apply_event(scheduler, kind, rest)
        now = line["now"]
        if "step" in line:
            scheduler.schedule()
            for name, decided in decisions(scheduler).items():
                if decided != line[name]:
                    raise ValueError(f"step {line['step']}: {name} is {decided}; the journal says {line[name]}")
        elif "landed" in line:
            scores = {row: [Logprobs(0.0, [], [])] * count for row, count in line["scores"]}
            pooled = dict.fromkeys(line.get("pooled", ()), b"")
            result = StepResult(line["landed"], line["tokens"], line["stopped"], scores=scores, pooled=pooled)
            result.verified = {row: Verified(drafts, ids) for row, drafts, ids in line.get("verified", ())}
            result.guesses = dict(line.get("guesses", ()))
            scheduler.update(scheduler.in_flight[0].plan, result)
        else:
            scheduler.start_over(*line["start_over"])
        if watch:
            watch(scheduler, line)
    return scheduler


def apply_event(scheduler: Scheduler, kind: str, rest: list[Any]) -> None:
    """Repeat an event: a request comes or is taken back, masks are late, or cached prefixes are forgotten."""
    if kind == "add":
        request_id, prompt, params, salt, priority, client, pooling, adapter, retention, beam, images = rest
        of_prompt, with_adapter = pooling and PoolingParams(**pooling), adapter and Adapter(*adapter)
        whose = salt, priority, client, of_prompt, with_adapter, retention
        pictures = [
            Picture(bytes.fromhex(digest), b"", (0, 0, 0), rows, [Span(*span) for span in spans], (low, high))
            for digest, rows, spans, (low, high) in images
        ]
        group = SequenceGroup(request_id, prompt, SamplingParams(**params), *whose, pictures, beam=beam and Beam(*beam))
        scheduler.add(group)
    elif kind == "abort":
        scheduler.abort(*rest)
    elif kind == "late":
        awaiting, proposed = rest
        names = {(seq.group.request_id, seq.index): seq for seq in scheduler.others}
        scheduler.awaiting_masks = {names[request_id, index] for request_id, index in awaiting}
        for seq in scheduler.others:
            seq.proposed = []
        for request_id, index, count in proposed:  # which they are decides nothing
            names[request_id, index].proposed = [0] * count
    else:
        scheduler.space.reset_prefix_cache()


def main() -> None:
    """Replay the journal named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python bench/replay.py FILE")
    try:
        with open(sys.argv[1], encoding="utf-8") as file:
            scheduler = replay(file.readlines())
    except (OSError, ValueError) as error:
        print(f"replay.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    counts = ", ".join(f"{name} {value:,.0f}" for name, value in scheduler.counters.items())
    print(f"{scheduler.step} steps, every decision the same: {counts}")


if __name__ == "__main__":
    main()
