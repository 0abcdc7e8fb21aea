"""Beam search: which beams go on and when it is over (`beam_search`), and the requests that it makes (`BeamSearches`).

The algorithm is that of transformers (`GenerationMixin._beam_search`). It looks at the best `num_candidates`
continuations of all beams. Those that end are kept as answers if they are among the best `width`, and the best `width`
that do not end go on. A score is the sum of all tokens' log-probabilities divided by length^length_penalty.
transformers makes up missing beams of log-probability -1e9, which count if fewer than `width` tokens do not end a beam.

The scheduler knows nothing of this. Each beam of a step is a request of one token, whose prompt is the client's and the
beam's output so far. The prefix cache has all full blocks of it, so the step computes the tokens of its last block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import count, islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from config import HookError
from plan import EngineOutput, error_output
from sampling_params import SamplingParams
from scheduling.reports import Timeline
from sequence import Beam, Sequence, SequenceGroup, Status

if TYPE_CHECKING:
    from scheduler import Scheduler

Nexts = tuple[list[int], list[float]]  # a beam's likeliest next tokens and their log-probabilities, the likeliest first


class BeamAnswer(NamedTuple):
    """A beam that has ended."""

    score: float
    tokens: list[int]
    stopped: bool  # by its last token, and not by its length


def num_candidates(width: int, stop_ids: Collection[int]) -> int:
    """Enough that `width` beams go on even if every beam's likeliest continuations are the tokens that end it."""
    return max(2, 1 + len(stop_ids)) * width


def beam_search(
    width: int,
    max_tokens: int,
    stop_ids: Collection[int],
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
) -> Generator[list[list[int]], list[Nexts], list[BeamAnswer]]:
    """Search for the best outputs; returns the answers, the best first.

    Yields each beam's output so far, the best beam first, and takes the `num_candidates` likeliest next tokens of each
    (all, if the vocabulary is smaller). Those of minus infinity may not come.

    Args:
        width: beams that are kept, and answers at most.
        max_tokens: length at which a beam ends in any case.
        stop_ids: tokens that end it.
        length_penalty, early_stopping: see `SamplingParams`.
    """
    beams: list[tuple[float, list[int]]] = [(0.0, [])]  # each beam's log-probability and output
    answers: list[BeamAnswer] = []
    for length in count(1):
        nexts = yield [output for _, output in beams]
        continuations = (
            [(logprob + value, output, id) for id, value in zip(ids, values, strict=True) if value > -math.inf]
            for (logprob, output), (ids, values) in zip(beams, nexts, strict=True)
        )
        ranked = merge(*continuations, key=lambda c: -c[0])  # stable: among equals the earlier beam
        going = []
        for place, (logprob, output, id) in enumerate(islice(ranked, num_candidates(width, stop_ids))):
            stopped = id in stop_ids
            if not stopped and length < max_tokens:
                going.append((logprob, [*output, id]))
            elif place < width:
                answers.append(BeamAnswer(logprob / length**length_penalty, [*output, id], stopped))
        answers = sorted(answers, key=lambda answer: -answer.score)[:width]
        beams = going[:width]
        if not beams:
            break
        if len(answers) == width:  # is no beam that goes on expected among them?
            hopeful = early_stopping == "never" and length_penalty > 0
            reached = beams[0][0] / (max_tokens if hopeful else length) ** length_penalty
            if early_stopping is True or reached <= answers[-1].score:
                break
    return answers


@dataclass(slots=True, eq=False)
class Search:
    """A client's request for a beam search, and the requests of its step."""

    group: SequenceGroup  # the client's, which the scheduler never has
    seq: Sequence  # stands for the search in reports and metrics; it never runs
    params: SamplingParams  # of a beam's request
    beams: Generator[list[list[int]], list[Nexts], list[BeamAnswer]]
    names: list[str] = field(default_factory=list)  # ids of the step's requests, one a beam
    nexts: dict[str, Nexts] = field(default_factory=dict)  # what has come, by id
    num_requests: int = 0  # requests of all steps


class BeamSearches:
    """The beam searches of an engine, each of which the client knows as one request.

    `observe` is called when the scheduler gets or drops a beam's request, see `Observer`.
    """

    def __init__(self, scheduler: Scheduler, observe: Callable[..., None]):
        self.scheduler, self.observe = scheduler, observe
        self.running: dict[str, Search] = scheduler.reports.searches  # by the client's id
        self.of_beam: dict[str, Search] = {}  # by the id of a beam's request

    def begin(self, group: SequenceGroup) -> None:
        """Begin a search; raises a ValueError if it can never run, see `RequestLimits.settle`, or is too wide."""
        scheduler, params = self.scheduler, group.params
        limit, width = scheduler.limits.settle(group), params.num_sequences
        if width > (most := min(scheduler.config.max_num_seqs, scheduler.limits.vocab_size)):
            raise ValueError(
                f"beam_width is {width}; it must be at most {most}, the lower of max_num_seqs and the vocabulary's size"
            )
        group.arrival = scheduler.clock()
        seq = Sequence(group, 0, Timeline(scheduler.waits), limit=limit)
        group.seqs.append(seq)
        beams = beam_search(
            width, limit - group.num_prompt, group.stop_ids, params.length_penalty, params.early_stopping
        )
        of_beam = replace(
            params, use_beam_search=False, n=1, beam_width=None, length_penalty=1.0, early_stopping=False,
            temperature=0.0, max_tokens=1,
        )  # fmt: skip
        search = Search(group, seq, of_beam, beams)
        self._ask(search, next(beams))
        self.running[group.request_id] = search
        scheduler.counters["prompt_tokens_total"] += group.num_prompt

    def _ask(self, search: Search, outputs: list[list[int]]) -> None:
        """Add the requests of a step, whose beams have these `outputs`."""
        whole = search.group
        candidates = min(num_candidates(whole.params.num_sequences, whole.stop_ids), self.scheduler.limits.vocab_size)
        search.nexts, search.names = {}, []
        for output in outputs:
            while (name := f"{whole.request_id}/{search.num_requests}") in self.scheduler.requests:  # a client's own id
                search.num_requests += 1
            beam = Beam(len(output), candidates, (search.seq.key[1], search.num_requests) if output else None)
            group = SequenceGroup(
                name, [*whole.prompt, *output], search.params, whole.salt, whole.priority, whole.client,
                adapter=whole.adapter, grammar=whole.grammar, beam=beam, delay=whole.delay, pictures=whole.pictures,
            )  # fmt: skip
            search.num_requests += 1
            self.scheduler.add(group)
            self.observe("added", group)
            search.names.append(name)
            self.of_beam[name] = search
            if not output:  # its steps keep the place in the queues that its arrival gave it
                first = group.seqs[0]
                search.seq.key, search.seq.timeline, search.seq.status = first.key, first.timeline, Status.RUNNING

    def take(self, outputs: Iterable[EngineOutput]) -> list[EngineOutput]:
        """Replace the outputs of beams by those of the searches that have ended; searches that go on ask for more."""
        news = []
        for output in outputs:
            search = self.of_beam.get(output.request_id)
            news += [output] if search is None else self._take(search, output)
        return news

    def _take(self, search: Search, output: EngineOutput) -> list[EngineOutput]:
        """What a client is told after an output of one of its beams."""
        request_id = search.group.request_id
        if output.error:
            self.abort(request_id, "error")
            return [replace(output, request_id=request_id)]
        if output.prompt_logprobs:
            return [EngineOutput(request_id, [], prompt_logprobs=output.prompt_logprobs)]
        assert output.logprobs and output.finished
        del self.of_beam[output.request_id]
        search.nexts[output.request_id] = output.logprobs[0].ids, output.logprobs[0].values
        if search.group.time_in_queue is None:
            search.group.time_in_queue, search.group.num_cached = output.time_in_queue, output.num_cached_tokens
            search.params = replace(search.params, prompt_logprobs=None)
            self.scheduler.stats.sampled(search.seq, 0)
        if len(search.nexts) < len(search.names):
            return []
        try:
            self._ask(search, search.beams.send([search.nexts[name] for name in search.names]))
        except StopIteration as end:
            return self._answer(search, end.value)
        except HookError as error:  # a user's policy has refused a beam's request
            self.abort(request_id, "error")
            return [error_output(request_id, error)]
        return []

    def _answer(self, search: Search, answers: list[BeamAnswer]) -> list[EngineOutput]:
        """The answers of a search that is over, the best first; or the error that there are too few."""
        group, most = search.group, len(answers)
        if most < (n := group.params.n):
            error = f"n is {n}, but the request's other fields allow only {most} answers; it must be at most {most}"
            self.abort(group.request_id, "error")
            return [error_output(group.request_id, error)]
        outputs = []
        for index, answer in enumerate(answers[:n]):
            output = EngineOutput(group.request_id, answer.tokens, "stop" if answer.stopped else "length")
            output.stop_reason = answer.tokens[-1] if answer.tokens[-1] in group.params.stop_token_ids else None
            output.num_cached_tokens, output.index = group.num_cached, index
            output.cumulative_logprob = answer.score
            outputs.append(output)
        self.scheduler.counters["generation_tokens_total"] += sum(len(output.token_ids) for output in outputs)
        search.seq.tokens.extend(answers[0].tokens)
        outputs[-1].finished, outputs[0].time_in_queue = True, group.time_in_queue
        self._end(search, outputs[0].finish_reason or "")
        return outputs

    def _end(self, search: Search, reason: str) -> None:
        del self.running[search.group.request_id]
        self.scheduler.reports.keep(search.group, self.scheduler.close(search.seq, reason))

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Drop a search, with all its requests; an unknown id has just finished. See `Scheduler.abort`."""
        if search := self.running.get(request_id):
            for name in search.names:
                if self.of_beam.pop(name, None):
                    self.scheduler.abort(name, reason=reason)
                    self.observe("aborted", name, None, reason)
            self._end(search, reason)

    def owner(self, request_id: str) -> str:
        """The client's id of a request, which may be a beam's."""
        search = self.of_beam.get(request_id)
        return search.group.request_id if search else request_id
