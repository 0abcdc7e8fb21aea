"""Beam search: which beams go on and when it is over (`BeamSearch`), and what steps give them (`Beams`).

The algorithm is that of transformers (`GenerationMixin._beam_search`), so that beams and scores can be compared. It
looks at the best `num_candidates` continuations of all beams. Those that end are kept as answers if they are among the
best `width`, and the best `width` that do not end go on. An answer's score is the sum of its tokens' log-probabilities,
the one that ended it included, divided by length^length_penalty.

transformers makes up missing beams and answers, of log-probability -1e9. Here there are fewer, and at first one beam,
the empty output. That matters only if fewer than `width` tokens do not end a beam, because made-up beams then count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from plan import EngineOutput, Logprobs, StepPlan, error_output
from sequence import Flight, Sequence, SequenceGroup

if TYPE_CHECKING:
    from admission import Admission
    from kv_cache import BlockSpaceManager

Birth = tuple[Sequence, Sequence, int]  # (new beam, its parent, tokens that they share)


class Continuation(NamedTuple):
    """A beam of the latest step with one more token."""

    parent: int  # which beam
    token: int
    logprob: float  # of the whole output


class Answer(NamedTuple):
    """A beam that has ended."""

    score: float
    tokens: list[int]
    stopped: bool  # by its last token, and not by its length


@dataclass(slots=True)
class BeamSearch:
    """The state of one search."""

    width: int  # beams that are kept
    max_tokens: int  # length at which a beam ends in any case
    stop_ids: frozenset[int]
    length_penalty: float  # above 0 favours longer answers
    early_stopping: bool | Literal["never"]  # see `SamplingParams`
    answers: list[Answer] = field(default_factory=list)  # the best first

    @property
    def num_candidates(self) -> int:
        """Enough that `width` beams go on even if every beam's likeliest continuations are the tokens that end it."""
        return max(2, 1 + len(self.stop_ids)) * self.width

    def advance(
        self,
        outputs: Items[Items[int]],
        logprobs: Items[float],
        nexts: Items[tuple[list[int], list[float]]],
    ) -> list[Continuation]:
        """Take the next tokens of all beams; returns the beams that go on, the best first, or none: the search is over.

        Args:
            outputs: each beam's tokens since the prompt; all have the same length.
            logprobs: each beam's log-probability.
            nexts: each beam's `num_candidates` likeliest next tokens (all, if the vocabulary is smaller) and their
                log-probabilities, the likeliest first. Those of minus infinity may not come.
        """
        length = len(outputs[0]) + 1
        continuations = (
            [Continuation(i, id, logprob + value) for id, value in zip(ids, values, strict=True) if value > -math.inf]
            for i, (logprob, (ids, values)) in enumerate(zip(logprobs, nexts, strict=True))
        )
        ranked = merge(*continuations, key=lambda c: -c.logprob)  # stable: among equals the earlier beam
        going: list[Continuation] = []
        for place, c in enumerate(islice(ranked, self.num_candidates)):
            stopped = c.token in self.stop_ids
            if not stopped and length < self.max_tokens:
                going.append(c)
            elif place < self.width:
                score = c.logprob / length**self.length_penalty
                self.answers.append(Answer(score, [*outputs[c.parent], c.token], stopped))
        self.answers.sort(key=lambda answer: -answer.score)
        del self.answers[self.width :]
        going = going[: self.width]
        return going if going and not self._over(going[0].logprob, length) else []

    def _over(self, best: float, length: int) -> bool:
        """Whether no running beam, of log-probability `best` at most, is expected among the answers."""
        if len(self.answers) < self.width:
            return False
        if self.early_stopping is True:
            return True
        hopeful = self.early_stopping == "never" and self.length_penalty > 0
        reached = best / (self.max_tokens if hopeful else length) ** self.length_penalty
        return reached <= self.answers[-1].score


def blocks_to_fork(space: BlockSpaceManager, births: Iterable[Birth]) -> int:
    """Blocks that the new beams of `births` will take."""
    size, device = space.block_size, space.device
    own = sum(device.blocks_for(len(child.tokens)) - shared // size for child, _, shared in births)
    return len(space.windows) * own


class Beams:
    """What the scheduler does for groups of beams: all beams of a group compute their next tokens in the same step."""

    def __init__(
        self,
        space: BlockSpaceManager,
        admission: Admission,
        make_room: Callable[[int, SequenceGroup, StepPlan], bool],
        finish: Callable[[SequenceGroup, str], None],
    ):
        self.space, self.admission = space, admission
        self.make_room, self.finish = make_room, finish

    def search(self, group: SequenceGroup) -> BeamSearch:
        """A search that begins, for a group with its limit and width."""
        request, params = group.request, group.request.params
        most = group.limit - request.num_prompt
        return BeamSearch(group.width, most, request.stop_ids, params.length_penalty, params.early_stopping)

    def schedule(self, group: SequenceGroup, flight: Flight, most: int, just_entered: bool = False) -> bool:
        """Give all beams of a group their next token in this step, or some of them what they lack before that.

        New beams are born first, by reference to their parents' blocks. After a preemption by recompute the first beam
        computes its tokens, then the others branch off it. For the return value see `Scheduler._schedule_sequence`.
        """
        plan, length = flight.plan, len(group.seqs[0].tokens)
        # A block that this very plan copies into cannot be copied from, so a group that just entered has no births.
        births = [] if just_entered else self._due(group.births)
        if self.space.windowed and not (just_entered or births):  # blocks that this plan moves must stay
            for seq in group.seqs:
                self.space.pass_windows(seq)
        missing = blocks_to_fork(self.space, births)
        missing += sum(self.space.lacks(seq, length, seq.num_computed + most) for seq in group.seqs)
        if missing > self.space.device.num_free and not self.make_room(missing, group, plan):
            return False
        if self.space.states:
            for seq in group.seqs:
                self.space.states.keep(seq, plan)
        for child, parent, shared in births:
            self._fork(child, parent, shared, plan)
            self.admission.enter(child, plan)
            if self.space.states:
                plan.state_copies.append((parent.slot, child.slot))
            group.seqs.append(child)
        group.births = [birth for birth in group.births if birth not in births]
        # A running group finds a token for each beam; one that was just let in may have to wait for the next step.
        together = not group.births and all(seq.num_computed == length - 1 for seq in group.seqs)
        together = together and most >= len(group.seqs)
        goal = length if together or len(group.seqs) + len(group.births) == 1 else length - 1
        for seq in group.seqs:
            if seq.stale:
                self.admission.enter(seq, plan)
            if self.space.lacks(seq, length, seq.num_computed + most):
                plan.new_blocks.append((seq.slot, self.space.grow(seq, length, seq.num_computed + most)))
            if (count := self.space.cut(seq, min(goal - seq.num_computed, most))) > 0:
                most -= count
                flight.take(seq, count)
        return True

    def _due(self, births: list[Birth]) -> list[Birth]:
        """The `births` that come now: all, when every parent is so far; with states, each when its parent is there."""
        if self.space.states:
            return [birth for birth in births if birth[1].num_computed == birth[2]]
        return births if all(parent.num_computed >= shared for _, parent, shared in births) else []

    def _fork(self, child: Sequence, parent: Sequence, shared: int, plan: StepPlan) -> None:
        """Give `child` its parent's first `shared` tokens by reference, and a copy of the block that it goes on in."""
        device, full = self.space.device, shared // self.space.block_size
        own = device.blocks_for(len(child.tokens)) - full
        child.tables, child.hashes = [table[:full] for table in parent.tables], parent.hashes[:full]
        for table, source in zip(child.tables, parent.tables, strict=True):
            device.share(table)
            blocks = device.allocate(own)
            if shared % self.space.block_size:
                plan.copies.append((source[full], blocks[0]))
            table += blocks
        child.num_computed, child.num_published = shared, full

    def advance(self, rows: list[tuple[Sequence, int, Logprobs]]) -> list[EngineOutput]:
        """Choose the next beams of one search; returns its answers, if it is over.

        Args:
            rows: each beam, the token that was sampled for it, and the likeliest ones.
        """
        group = rows[0][0].group
        request, beams = group.request, group.beams
        assert beams is not None and [seq for seq, _, _ in rows] == group.seqs
        going = beams.advance(
            [seq.tokens[request.num_prompt :] for seq in group.seqs],
            [seq.logprob for seq in group.seqs],
            [(logprobs.ids, logprobs.values) for _, _, logprobs in rows],
        )
        if not going:
            return self._answers(group, beams)
        length, seqs = len(rows[0][0].tokens), {}
        for c in going:
            parent, sampled, _ = rows[c.parent]
            tokens = [*parent.tokens[:length], c.token]
            if c.parent in seqs:  # a second continuation of the same beam
                child = Sequence(group, tokens)
                child.logprob = c.logprob
                group.births.append((child, parent, length))
            else:
                seqs[c.parent] = parent
                parent.delivered, parent.logprob = tokens, c.logprob
                parent.stale = c.token != sampled
        self.admission.leave([seq for i, (seq, _, _) in enumerate(rows) if i not in seqs])
        group.seqs = list(seqs.values())
        return []

    def _answers(self, group: SequenceGroup, beams: BeamSearch) -> list[EngineOutput]:
        """The answers of a search that is over, the best first; or the error that there are too few."""
        request, outputs = group.request, []
        n, count = request.params.n, len(beams.answers)
        if count < n:
            error = f"n is {n}, but the request's other fields allow only {count} answers; it must be at most {count}"
            self.finish(group, "error")
            return [error_output(request.request_id, error)]
        for index, answer in enumerate(beams.answers[:n]):
            output = EngineOutput(request.request_id, answer.tokens, "stop" if answer.stopped else "length")
            output.stop_reason = answer.tokens[-1] if answer.tokens[-1] in request.params.stop_token_ids else None
            output.num_cached_tokens, output.index = request.num_cached, index
            output.cumulative_logprob = answer.score
            outputs.append(output)
        self.admission.counters["generation_tokens_total"] += sum(len(output.token_ids) for output in outputs)
        self.admission.reserve.learn(group)
        self.finish(group, outputs[0].finish_reason or "")
        outputs[-1].finished, outputs[0].time_in_queue = True, request.time_in_queue
        return outputs
