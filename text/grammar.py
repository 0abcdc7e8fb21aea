"""Which tokens may come next in structured answers: JSON of a schema, one of some texts, ...

    Constraint   where one sequence is: in hidden reasoning, or how far in its grammar
    Grammars     compiles grammars and makes the masks of a step, in threads beside the engine's loop

A grammar may harm the process that compiles it, so it is first tried in another one (`text/sandbox.py`).

A constraint follows from a sequence's output alone, so preemption, chunks, swaps and dead workers do not matter to it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from plan import StepPlan, bit_words
from sampling_params import SamplingParams, StructuredOutputsParams
from sequence import Sequence, SequenceGroup
from text.sandbox import LEAST_SIZE, Grammar, Sandbox, brief, compile_text, mask_of, open_vocabulary, text_of
from text.schemas import is_small

MAX_CHARS = 2**18  # of a grammar
MAX_CACHED = 2**28  # bytes of all that is kept
COMPILE_TIMEOUT = 20.0  # seconds that a request waits for its grammar
STACK = 2**24  # bytes of the stack of a thread that compiles, or makes masks: more than in the sandbox
CHAR_SIZE = 2**9  # bytes that a small grammar takes for each character, beside LEAST_SIZE
COMPILERS = 4  # threads that compile what is not small, each for another client
MASK_TIMEOUT = 2.0  # seconds that one mask may take
PATIENCE = 0.005  # seconds that a step waits for masks; sequences whose masks come later are left out of it
THREADS = 4  # at most
ALL = 0xFFFFFFFF  # a word of a mask


class Constraint:
    """The tokens that may come next in one sequence: `mask` [words] uint32, in the order of `Adjust.bitmask`.

    Args:
        params: of the request.
        grammar: None if only its reasoning is bounded.
        stops: tokens that end the sequence, as `plan.bit_words`.
        words: of a mask.
    """

    def __init__(self, params: SamplingParams, grammar: Grammar | None, stops: dict[int, int], words: int):
        self.params, self.grammar = params, grammar
        self.stops, self.words = stops, words
        self.matcher: Any = None  # the grammar's, copied once there is something to read
        self.allowed = grammar.first if grammar else np.full(words, ALL, dtype=np.uint32)  # by the grammar
        self.num_read = 0  # tokens of the output that `mask` follows
        self.reasoning = bool(params.reasoning_end_ids) and not params.reasoning_start_ids
        self.undecided = bool(params.reasoning_start_ids)  # the output is the beginning of what begins reasoning
        self.num_reasoning = 0  # tokens of it
        self.error = ""  # why the sequence cannot go on
        self.work: Future[None] | None = None  # makes the next mask,
        self.begun = 0.0  # since then, in seconds of `time.monotonic()`,
        self.wanted = 0  # and for so many tokens of the output
        self.lock = threading.Lock()
        self.mask = self._mask([])
        self.later: list[np.ndarray] = []  # the masks after its drafts, as far as `follow` has come

    @property
    def trouble(self) -> str:
        """Why the sequence cannot go on; empty: it can, or its next mask may still come in time."""
        slow = self.behind and time.monotonic() >= self.begun + MASK_TIMEOUT
        return self.error or (f"the structured output takes more than {MASK_TIMEOUT:g} s for a token" if slow else "")

    @property
    def behind(self) -> bool:
        """Whether the mask after its latest token is still being made."""
        return self.num_read < self.wanted

    def follow(self, output: Items[int], drafts: Items[int]) -> None:
        """Read what is new of `output`, and make the masks after it and after each of its `drafts`.

        That ends at the first draft that cannot be taken, or that ends the sequence; and where it takes too long,
        because a step waits.
        """
        self.later = later = []  # its own: a walk that takes long may end after the next one
        with self.lock:  # the next walk may begin before this one has its copy
            self.advance(output)
            if not drafts:
                return
            ahead = copy.copy(self)
            ahead.matcher = self.matcher and self.matcher.deep_copy()
        for i, draft in enumerate(drafts, 1):
            word, bit = divmod(draft, 32)
            goes_on = int(ahead.mask[word]) & ~self.stops.get(word, 0) & 1 << bit
            if not goes_on or time.monotonic() > self.begun + PATIENCE:
                return
            ahead.advance([*output, *drafts[:i]])
            if ahead.error:
                return
            later.append(ahead.mask)

    def advance(self, output: Items[int]) -> None:
        """Read what is new of `output`, all tokens since the prompt, and make the mask that follows it."""
        start, end = self.params.reasoning_start_ids, self.params.reasoning_end_ids
        read = []  # tokens of the grammar
        for i in range(self.num_read, len(output)):
            if self.reasoning:
                self.num_reasoning += 1
                is_last = output[i] in (end[-1], *self.params.reasoning_last_ids)
                self.reasoning = not is_last or tuple(output[max(0, i + 1 - len(end)) : i]) != end[:-1]
            elif self.undecided and output[i] == start[i]:
                self.reasoning = i + 1 == len(start)
                self.undecided = not self.reasoning
            elif self.undecided:
                self.undecided, read = False, [*output[: i + 1]]
            else:
                read.append(output[i])
        if self.grammar is not None and read:
            try:
                self.matcher = self.matcher or self.grammar.matcher.deep_copy()
                self.matcher.consume_tokens(read)
                self.allowed, error = mask_of(self.matcher, self.words), self.matcher.get_error()
            except BaseException as failure:  # the library's panics are not even Exceptions
                error = repr(failure)
            if error:
                self.error = f"the structured output cannot go on: {brief(error)}"
        self.mask = self._mask(output)
        self.num_read = len(output)

    def _mask(self, output: Items[int]) -> np.ndarray:
        """The mask after `output`, by the reasoning or the grammar, and by the request's own lists."""
        params, end = self.params, self.params.reasoning_end_ids
        budget = params.thinking_token_budget
        if self.reasoning and budget is not None and self.num_reasoning >= budget:  # its end comes, or the rest of it
            lengths = range(min(len(end) - 1, len(output)), -1, -1)
            written = next(n for n in lengths if tuple(output[len(output) - n :]) == end[:n])
            return self._bits(bit_words([end[written]]))
        if self.reasoning:  # what the grammar asks for has yet to come
            mask = np.full(self.words, ALL, dtype=np.uint32) & ~self._bits(self.stops if self.grammar else {})
        elif self.undecided:
            mask = self._allowed_after(output) | self._bits(bit_words([params.reasoning_start_ids[len(output)]]))
        else:
            mask = self.allowed
        listed = mask & self._listed(output)
        early = listed & ~self._bits(self.stops) if len(output) < params.min_tokens else listed
        if not listed.any() and not self.error:
            self.error = "allowed_token_ids or bad_words leave no token with which the structured output can go on"
        return early if early.any() else listed  # what is complete ends, whatever `min_tokens` says

    def _allowed_after(self, output: Items[int]) -> np.ndarray:
        """The grammar's mask after tokens that it has not read; all zeros if it does not allow these."""
        if self.grammar is None or not output:
            return self.allowed
        matcher = self.grammar.matcher.deep_copy()
        if matcher.try_consume_tokens([*output]) < len(output):
            return np.zeros(self.words, dtype=np.uint32)
        return mask_of(matcher, self.words)

    def _listed(self, output: Items[int]) -> np.ndarray:
        """The mask of what the request itself allows after `output`."""
        allowed, bad = self.params.allowed_token_ids, self.params.bad_word_ids
        mask = np.full(self.words, ALL, dtype=np.uint32) if allowed is None else self._bits(bit_words(allowed))
        written = [word for word in bad if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]]
        return mask & ~self._bits(bit_words(word[-1] for word in written))

    def _bits(self, words: dict[int, int]) -> np.ndarray:
        row = np.zeros(self.words, dtype=np.uint32)
        row[list(words)] = list(words.values())
        return row


class Job(NamedTuple):
    """A grammar that has yet to be compiled."""

    wanted: StructuredOutputsParams
    future: Future[Grammar]
    clients: list[str]  # of the requests that wait for it


class Turns:
    """Has grammars compiled, one at a time for each client. The client whose turn is longest ago comes next.

    So a client that sends many grammars, or slow ones, holds up only its own.
    """

    def __init__(self, compile: Callable[[StructuredOutputsParams], Grammar]):
        self.compile, self.lock = compile, threading.Lock()
        self.threads = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        self.jobs: dict[StructuredOutputsParams, Job] = {}
        self.running: dict[str, Job] = {}  # by the client whose turn it is
        self.latest: dict[str, float] = {}  # when the latest turn of a client ended

    def ask(self, wanted: StructuredOutputsParams, client: str, future: Future[Grammar] | None = None) -> None:
        """A request of a client waits for a grammar: a new one, to be compiled into `future`, or one under way."""
        with self.lock:
            if future:
                self.jobs[wanted] = Job(wanted, future, [])
            if job := self._job(wanted):
                job.clients.append(client)
                submit(self.threads, self._compile_all)

    def leave(self, wanted: StructuredOutputsParams, client: str, future: Future[Grammar]) -> None:
        """A request waits for its grammar no more. If none does, that is not compiled, unless it has begun."""
        with self.lock:
            if (job := self._job(wanted)) and job.future is future and client in job.clients:
                job.clients.remove(client)
                if not job.clients:
                    self.jobs.pop(wanted, None)
                    job.future.cancel()

    def _job(self, wanted: StructuredOutputsParams) -> Job | None:
        running = (job for job in self.running.values() if job.wanted == wanted and not job.future.cancelled())
        return self.jobs.get(wanted) or next(running, None)

    def _compile_all(self) -> None:
        """Compile all that may be compiled now."""
        for job, client in iter(self._take, None):
            with contextlib.suppress(InvalidStateError):  # it was cancelled
                try:
                    job.future.set_result(self.compile(job.wanted))
                except BaseException as error:
                    job.future.set_exception(error.with_traceback(None))
            with self.lock:
                del self.running[client]
                self.latest[client] = time.monotonic()
                if not self.jobs:
                    self.latest.clear()

    def _take(self) -> tuple[Job, str] | None:
        """The next job, and the client whose turn it is; None if each job left waits for its client's turn."""
        with self.lock:
            waiting = {client: job for job in reversed(self.jobs.values()) for client in job.clients}
            if not (free := waiting.keys() - self.running.keys()):
                return None
            client = min(free, key=lambda client: (self.latest.get(client, 0.0), client))
            self.running[client] = self.jobs.pop(waiting[client].wanted)
            return self.running[client], client


class Grammars:
    """Compiles the grammars of an engine's requests, and makes the masks of its steps."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: Items[int]):
        self.words = -(-vocab_size // 32)
        self.vocabulary, self.opening = (folder, vocab_size, [*eos_token_ids]), threading.Lock()
        self.tokenizer: Any = None
        self.sandbox = Sandbox(*self.vocabulary)
        # Masks never wait behind grammars, nor small grammars behind others, which may take long.
        self.threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="mask")
        self.small, self.others = ThreadPoolExecutor(1, thread_name_prefix="grammar"), Turns(self._compile)
        self.cache: OrderedDict[StructuredOutputsParams, Future[Grammar]] = OrderedDict()
        self.waiting: dict[str, SequenceGroup] = {}  # for their grammars, by id; the first to come first
        self.deadlines: dict[SequenceGroup, float] = {}  # until when these wait
        self.compiled: deque[SequenceGroup] = deque()  # whose grammars are ready

    def prepare(self) -> None:
        """Begin to read the model's vocabulary, before the first grammar needs it."""
        submit(self.others.threads, self._open)
        submit(self.others.threads, self.sandbox.start)

    def _open(self) -> Any:
        """The LLTokenizer of the model, which takes seconds for a large vocabulary."""
        with self.opening:
            if self.tokenizer is None:
                self.tokenizer = open_vocabulary(*self.vocabulary)
            return self.tokenizer

    def compile(self, wanted: StructuredOutputsParams, client: str = "") -> Future[Grammar]:
        """The compiled grammar, or a ValueError that says what is wrong with it; at once if it is too long."""
        if (size := wanted.size) > MAX_CHARS:
            raise ValueError(f"structured_outputs has {size} characters; at most {MAX_CHARS} are allowed")
        future, now = self.cache.get(wanted), time.monotonic()
        failed = future and future.done() and (future.cancelled() or future.exception())
        if failed and now > getattr(failed, "until", 0.0):
            future = None
        if future is None:
            if is_small(wanted):
                future = submit(self.small, self._compile_small, wanted)
            else:
                self.others.ask(wanted, client, future := Future())
            self.cache[wanted] = future
            while len(self.cache) > 1 and sum(map(size_of, self.cache.items())) > MAX_CACHED:
                self.cache.popitem(last=False)
        elif not future.done():
            self.others.ask(wanted, client)
        self.cache.move_to_end(wanted)
        return future

    def wait(self, request: SequenceGroup) -> None:
        """Have a request wait until `ready` returns it."""
        self.waiting[request.request_id] = request
        self.deadlines[request] = time.monotonic() + COMPILE_TIMEOUT
        request.grammar.add_done_callback(lambda _: self.compiled.append(request))

    def ready(self) -> list[SequenceGroup]:
        """The requests that wait no more: their grammars are compiled, or they have waited for COMPILE_TIMEOUT."""
        now, ready = time.monotonic(), [self.compiled.popleft() for _ in range(len(self.compiled))]
        ready += takewhile(lambda request: now > self.deadlines[request], self.deadlines)
        ready = [request for request in ready if self.deadlines.pop(request, None) is not None]  # else aborted
        for request in ready:
            del self.waiting[request.request_id]
        return ready

    def abort(self, request_id: str) -> None:
        """Have a request wait no more, if it does."""
        if request := self.waiting.pop(request_id, None):
            del self.deadlines[request]
            self.leave(request)

    def leave(self, request: SequenceGroup) -> None:
        """A request waits for its grammar no more."""
        if wanted := request.params.structured_outputs:
            self.others.leave(wanted, request.client, request.grammar)

    def _compile(self, wanted: StructuredOutputsParams) -> Grammar:
        self.sandbox.start()  # it reads the vocabulary meanwhile
        tokenizer = self._open()
        text, size = self.sandbox.check(wanted)
        return compile_text(tokenizer, text, self.words, size)

    def _compile_small(self, wanted: StructuredOutputsParams) -> Grammar:
        return compile_text(self._open(), text_of(wanted), self.words, LEAST_SIZE + CHAR_SIZE * wanted.size)

    def check(self, request: SequenceGroup) -> None:
        """Raises ValueError: a request's grammar could not be compiled, took too long, or leaves no first token."""
        if request.grammar and not request.grammar.done():
            self.leave(request)
            raise ValueError(f"structured_outputs took more than {COMPILE_TIMEOUT:g} s to compile")
        if error := self._constraint(request).error:
            raise ValueError(error)

    def _constraint(self, request: SequenceGroup) -> Constraint:
        if request.grammar and (error := request.grammar.exception()):
            raise ValueError(str(error))  # itself it would grow by a traceback each time
        grammar = request.grammar.result() if request.grammar else None
        return Constraint(request.params, grammar, request.stops, self.words)

    def look(self, seqs: Items[Sequence]) -> tuple[set[Sequence], dict[SequenceGroup, str]]:
        """Have masks made for constrained sequences that run, and wait a little for them.

        Of the drafts that were proposed, those stay that the masks lead along.

        Returns:
            the sequences that lack a mask, or the token that it depends on; and why requests cannot go on at all.
        """
        ready = [seq for seq in seqs if not awaits_token(seq)]
        wait([work for seq in ready if (work := self._work(seq))], PATIENCE)
        behind = {seq for seq in seqs if awaits_token(seq) or self._of(seq).behind}
        for seq in ready:
            if seq not in behind:
                del seq.proposed[len(self._of(seq).later) :]
        return behind, self._failed(seqs)

    def _failed(self, seqs: Iterable[Sequence]) -> dict[SequenceGroup, str]:
        """The requests whose sequences cannot go on, and why."""
        return {seq.group: why for seq in seqs if (why := self._of(seq).trouble)}

    def _of(self, seq: Sequence) -> Constraint:
        if seq.constraint is None:
            seq.constraint = self._constraint(seq.group)
        return seq.constraint

    def _work(self, seq: Sequence) -> Future[None] | None:
        """The work on the masks after a sequence's latest token and after its drafts; None if they are there."""
        constraint, request = self._of(seq), seq.group
        begin = request.num_prompt - (request.beam.written if request.beam else 0)
        length = len(seq.tokens) - begin
        if constraint.work is not None and constraint.work.done():
            constraint.work = None
        # There may be work on drafts that no longer matter; nobody waits for it.
        if constraint.num_read < length and (constraint.work is None or constraint.wanted < length):
            constraint.wanted, constraint.begun = length, time.monotonic()
            constraint.work = submit(self.threads, constraint.follow, seq.tokens[begin:], [*seq.proposed])
        return constraint.work

    def fill(self, plan: StepPlan, rows: Iterable[tuple[Sequence, int, int]]) -> dict[SequenceGroup, str]:
        """Give a plan the masks of its constrained rows that sample, of its `Flight.other_rows`.

        A sequence that was preempted may have none yet; that mask is waited for, at most MASK_TIMEOUT. Returns why
        requests cannot go on at all. The caller must abort them, because their rows may sample any token.
        """
        seqs = [seq for seq, _, computed in rows if samples(seq, computed)]
        behind = [work for seq in seqs if (work := self._work(seq)) and self._of(seq).behind]
        wait(behind, MASK_TIMEOUT + PATIENCE)  # a sequence without a mask by now has `trouble`
        failed = self._failed(seqs)
        for seq in seqs:
            constraint = self._of(seq)
            masks = [constraint.mask, *constraint.later[: plan.drafts.get(seq.slot, 0)]]
            if seq.group in failed:
                masks = [np.full_like(constraint.mask, ALL)]
            plan.masks.append((seq.slot, b"".join(mask.tobytes() for mask in masks)))
        return failed

    def close(self) -> None:
        """Let the threads and the sandbox end."""
        for pool in (self.threads, self.small, self.others.threads):
            pool.shutdown(wait=False, cancel_futures=True)
        self.sandbox.close()


def submit(pool: ThreadPoolExecutor, task: Callable[..., Any], *args: Any) -> Future[Any]:
    """Have a pool run a task in a thread with a large stack."""
    usual = threading.stack_size(STACK)
    try:
        return pool.submit(task, *args)
    finally:
        threading.stack_size(usual)


def size_of(entry: tuple[StructuredOutputsParams, Future[Grammar]]) -> int:
    """The bytes of an entry of the cache."""
    wanted, future = entry
    known = future.done() and not future.cancelled() and not future.exception()
    return 2 * wanted.size + (future.result().size if known else 0)


def samples(seq: Sequence, computed: int) -> bool:
    """Whether a row that brings a sequence to `computed` tokens, drafts included, draws a token by a mask."""
    return seq.group.params.constrained and computed >= len(seq.tokens)


def awaits_token(seq: Sequence) -> bool:
    """Whether the mask of a sequence's next token must wait for a step in flight, which brings the token before."""
    return seq.num_computed >= len(seq.tokens)
