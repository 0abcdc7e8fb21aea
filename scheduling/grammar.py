"""Which tokens may come next, where an answer must be what its request says: JSON of a schema, one of some texts, ...

    Grammar      what one or more requests ask for, compiled
    Constraint   where one sequence is: in hidden reasoning, or how far in its grammar
    Grammars     compiles grammars and makes the masks of a step, in threads beside the engine's loop
    Sandbox      a process in which a grammar is tried first, because it may be made to harm whoever compiles it

llguidance does the parsing: it compiles schemas, regular expressions and Lark to lexers and an Earley parser, and walks
a tree of the vocabulary for the tokens that fit. All that takes long it does without the GIL.

A constraint follows from a sequence's output alone. So it need not know of preemption, chunks, swaps or a worker's
death: whatever happened, it reads those tokens that it has not read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ints
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import connection
from typing import Any, NamedTuple

import numpy as np
import psutil

from executor import end_with_parent, name_process
from plan import StepPlan, bit_words
from processes.client import accept, connect
from sampling_params import SamplingParams, StructuredOutputsParams
from sequence import Request, Sequence, SequenceGroup
from text.schemas import grammar_text, is_small

MAX_CHARS = 2**18  # of a grammar
MAX_CACHED = 2**28  # bytes of all that is kept
COMPILE_TIMEOUT = 20.0  # seconds that a request waits for its grammar
STACK = 2**24  # bytes of the stack of a thread that compiles, or makes masks: more than in the sandbox
START_TIMEOUT = 60.0  # seconds that the sandbox may take to read the vocabulary
REMEMBERED = 600.0  # seconds in which a grammar that was refused is refused at once
LEAST_SIZE, CHAR_SIZE = 2**17, 2**9  # bytes that a grammar takes at least, and that a small one takes per character
COMPILERS = 4  # threads that compile, each for another client
NICE = 5  # how far a grammar in the sandbox stands back for what serves requests
MASK_TIMEOUT = 2.0  # seconds that one mask may take
PATIENCE = 0.005  # seconds that a step waits for masks; sequences whose masks come later are left out of it
THREADS = 4  # at most
MAX_LEXER_STATES = 50_000  # of a grammar: up to 2 KiB each
MAX_SAID = 300  # characters of an error
ALL = 0xFFFFFFFF  # a word of a mask


class Grammar(NamedTuple):
    """What requests ask for, compiled."""

    matcher: Any  # an LLMatcher at the beginning; its copies are advanced
    first: np.ndarray  # [words] uint32: the mask there
    size: int  # bytes that it takes


class Constraint:
    """What may come next in one sequence: what `mask` [words] uint32 says, in the order of `Adjust.bitmask`.

    Args:
        params: of the request.
        grammar: what it asks for; None if only its reasoning is bounded.
        stops: words of the tokens that end the sequence, as of `plan.bit_words`.
        words: of a mask.
    """

    def __init__(self, params: SamplingParams, grammar: Grammar | None, stops: dict[int, int], words: int):
        self.params, self.stops = params, stops
        self.words = words
        self.grammar = grammar
        self.matcher: Any = None  # the grammar's, copied once there is something to read
        self.allowed = grammar.first if grammar else np.full(words, ALL, dtype=np.uint32)  # by the grammar
        self.num_read = 0  # tokens of the output that `mask` follows
        self.reasoning = bool(params.reasoning_end_ids) and not params.reasoning_start_ids
        self.num_reasoning = 0  # tokens of it
        self.error = ""  # why the sequence cannot go on
        self.work: Future[None] | None = None  # that makes the next mask,
        self.begun = 0.0  # and when it began, in seconds of `time.monotonic()`
        self.mask = self._mask([])

    @property
    def trouble(self) -> str:
        """Why the sequence cannot go on; empty: it can, or its next mask is being made and may still come in time."""
        slow = self.work is not None and not self.work.done() and time.monotonic() >= self.begun + MASK_TIMEOUT
        return self.error or (f"the structured output takes more than {MASK_TIMEOUT:g} s for a token" if slow else "")

    def advance(self, output: Ints[int]) -> None:
        """Read what is new of the `output`, which is all tokens since the prompt, and make the mask that follows it."""
        start, end = self.params.reasoning_start_ids, self.params.reasoning_end_ids
        read = []  # tokens of the grammar
        for i in range(self.num_read, len(output)):
            if self.reasoning:
                self.num_reasoning += 1
                self.reasoning = tuple(output[max(0, i + 1 - len(end)) : i + 1]) != end
            elif i == 0 and start[:1] == (output[0],):  # if `start` has others, they count as reasoning
                self.reasoning = True
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

    def _mask(self, output: Ints[int]) -> np.ndarray:
        """What may follow `output`, by the reasoning or the grammar, and by the request's own lists."""
        params, end = self.params, self.params.reasoning_end_ids
        budget = params.thinking_token_budget
        if self.reasoning and budget is not None and self.num_reasoning >= budget:  # its end comes, or the rest of it
            lengths = range(min(len(end) - 1, len(output)), -1, -1)
            written = next(n for n in lengths if tuple(output[len(output) - n :]) == end[:n])
            return self._bits(bit_words([end[written]]))
        if self.reasoning:  # what the grammar asks for has yet to come
            mask = np.full(self.words, ALL, dtype=np.uint32) & ~self._bits(self.stops if self.grammar else {})
        elif params.reasoning_start_ids and not output:
            mask = self.allowed | self._bits(bit_words(params.reasoning_start_ids[:1]))
        else:
            mask = self.allowed
        listed = mask & self._listed(output)
        early = listed & ~self._bits(self.stops) if len(output) < params.min_tokens else listed
        if not listed.any() and not self.error:
            self.error = "allowed_token_ids or bad_words leave no token with which the structured output can go on"
        return early if early.any() else listed  # what is complete ends, whatever `min_tokens` says

    def _listed(self, output: Ints[int]) -> np.ndarray:
        """The mask of what the request itself allows after `output`."""
        allowed, bad = self.params.allowed_token_ids, self.params.bad_word_ids
        mask = np.full(self.words, ALL, dtype=np.uint32) if allowed is None else self._bits(bit_words(allowed))
        written = [word for word in bad if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]]
        return mask & ~self._bits(bit_words(word[-1] for word in written))

    def _bits(self, words: dict[int, int]) -> np.ndarray:
        row = np.zeros(self.words, dtype=np.uint32)
        row[list(words)] = list(words.values())
        return row


class Limits(NamedTuple):
    """What a grammar may take in the sandbox."""

    cpu_time: int = 5  # seconds of a core
    time: float = 15.0  # seconds by the clock, on a machine that has much else to do
    memory: int = 2**29  # bytes
    stack: int = 2**22  # bytes; some 1,500 rules that refer to each other in a chain


class Refused(ValueError):
    """Why a grammar cannot be compiled, and until when that is remembered."""

    def __init__(self, why: str):
        super().__init__(why)
        self.until = time.monotonic() + REMEMBERED


class Job(NamedTuple):
    """A grammar that has yet to be compiled."""

    wanted: StructuredOutputsParams
    future: Future[Grammar]
    clients: dict[str, float]  # those who want it, and until when they wait


class Turns:
    """Has grammars compiled, one at a time for each client. The client whose turn is longest ago comes next.

    So whoever sends many grammars, or slow ones, holds up its own alone.

    Args:
        compile: compiles one.
        count: threads that do.
    """

    def __init__(self, compile: Callable[[StructuredOutputsParams], Grammar], count: int):
        self.compile, self.lock = compile, threading.Lock()
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="grammar")
        self.jobs: dict[StructuredOutputsParams, Job] = {}
        self.busy: set[str] = set()  # clients for whom something is compiled
        self.latest: dict[str, float] = {}  # when the latest turn of a client ended

    def ask(self, wanted: StructuredOutputsParams, client: str, future: Future[Grammar] | None = None) -> None:
        """A client waits for a grammar for a while, which is to be compiled into a future, unless that is under way."""
        with self.lock:
            if future:
                self.jobs[wanted] = Job(wanted, future, {})
            if job := self.jobs.get(wanted):
                job.clients[client] = time.monotonic() + COMPILE_TIMEOUT
                submit(self.threads, self._compile_all)

    def _compile_all(self) -> None:
        """Compile until nothing is left that may be compiled now."""
        while taken := self._take():
            job, client = taken
            try:
                job.future.set_result(self.compile(job.wanted))
            except BaseException as error:
                job.future.set_exception(error.with_traceback(None))
            with self.lock:
                self.busy.discard(client)
                self.latest[client] = time.monotonic()
                if not self.jobs:
                    self.latest.clear()

    def _take(self) -> tuple[Job, str] | None:
        """What is compiled next, and whose turn it is; None if all that is left has to wait for its client's turn."""
        with self.lock:
            now = time.monotonic()
            for job in [job for job in self.jobs.values() if job.clients and now > max(job.clients.values())]:
                del self.jobs[job.wanted]
                job.future.set_exception(late())
            waiting = {client: job for job in reversed([*self.jobs.values()]) for client in job.clients}
            if not (free := waiting.keys() - self.busy):
                return None
            client = min(free, key=lambda client: (self.latest.get(client, 0.0), client))
            self.busy.add(client)
            return self.jobs.pop(waiting[client].wanted), client


class Grammars:
    """Compiles the grammars of an engine's requests, and makes the masks of its steps.

    Args:
        folder: of the model, which has the vocabulary.
        vocab_size: of the model.
        eos_token_ids: of the model.
    """

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: Ints[int]):
        self.words = -(-vocab_size // 32)
        self.vocabulary, self.opening = (folder, vocab_size, [*eos_token_ids]), threading.Lock()
        self.tokenizer: Any = None
        self.sandbox = Sandbox(*self.vocabulary)
        # Masks never wait behind grammars, which may take long.
        self.threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="mask")
        self.small, self.others = Turns(self._compile_small, 1), Turns(self._compile, COMPILERS)
        self.cache: OrderedDict[StructuredOutputsParams, Future[Grammar]] = OrderedDict()

    def prepare(self) -> None:
        """Begin to read the model's vocabulary, so that the first grammar need not wait for it."""
        submit(self.others.threads, self._open)
        submit(self.others.threads, self.sandbox.start)

    def _open(self) -> Any:
        """The LLTokenizer of the model, which takes seconds for a large vocabulary."""
        with self.opening:
            if self.tokenizer is None:
                self.tokenizer = open_vocabulary(*self.vocabulary)
            return self.tokenizer

    def compile(self, wanted: StructuredOutputsParams, client: str = "") -> Future[Grammar]:
        """The compiled grammar, as soon as it is there. Its error is a ValueError that says what cannot be done.

        Raises:
            ValueError: it is too long.
        """
        if (size := wanted.size) > MAX_CHARS:
            raise ValueError(f"structured_outputs has {size} characters; at most {MAX_CHARS} are allowed")
        future, now = self.cache.get(wanted), time.monotonic()
        if future and future.done() and (why := future.exception()) and now > getattr(why, "until", 0.0):
            future = None
        if future is None:
            future = self.cache[wanted] = Future()
            self._turns(wanted).ask(wanted, client, future)
            while len(self.cache) > 1 and sum(map(size_of, self.cache.items())) > MAX_CACHED:
                self.cache.popitem(last=False)
        elif not future.done():
            self._turns(wanted).ask(wanted, client)
        self.cache.move_to_end(wanted)
        return future

    def _turns(self, wanted: StructuredOutputsParams) -> Turns:
        return self.small if is_small(wanted) else self.others

    def _compile(self, wanted: StructuredOutputsParams) -> Grammar:
        self.sandbox.start()  # it reads the vocabulary meanwhile
        tokenizer = self._open()
        text, size = self.sandbox.check(wanted)
        return compile_text(tokenizer, text, self.words, size)

    def _compile_small(self, wanted: StructuredOutputsParams) -> Grammar:
        return compile_text(self._open(), text_of(wanted), self.words, LEAST_SIZE + CHAR_SIZE * wanted.size)

    def check(self, request: Request) -> None:
        """Check that a request, whose grammar has been compiled, leaves a first token.

        Raises:
            ValueError: it does not, or the grammar could not be compiled.
        """
        if error := self._constraint(request).error:
            raise ValueError(error)

    def _constraint(self, request: Request) -> Constraint:
        if request.grammar and (error := request.grammar.exception()):
            raise ValueError(str(error))  # itself it would grow by a traceback each time
        grammar = request.grammar.result() if request.grammar else None
        return Constraint(request.params, grammar, request.stops, self.words)

    def look(self, groups: Iterable[SequenceGroup]) -> tuple[set[SequenceGroup], dict[Request, str]]:
        """Have masks made of those who have got a token, and wait a little for them.

        Args:
            groups: that run, and whose requests are constrained.

        Returns:
            the groups that have to wait, because a mask has yet to come, or the token that it depends on; and why
            requests cannot go on at all.
        """
        late: set[SequenceGroup] = set()
        behind: dict[Future[None], SequenceGroup] = {}
        seqs = [seq for group in groups for seq in (*group.seqs, *(child for child, _, _ in group.births))]
        for seq in seqs:
            if awaits_token(seq):
                late.add(seq.group)
            elif work := self._work(seq):
                behind[work] = seq.group
        late.update(behind[work] for work in wait(behind, PATIENCE).not_done)
        return late, self._failed(seqs)

    def _failed(self, seqs: Iterable[Sequence]) -> dict[Request, str]:
        """Why requests cannot go on, of those whose sequences cannot."""
        return {seq.group.request: why for seq in seqs if (why := self._of(seq).trouble)}

    def _of(self, seq: Sequence) -> Constraint:
        if seq.constraint is None:
            seq.constraint = self._constraint(seq.group.request)
        return seq.constraint

    def _work(self, seq: Sequence) -> Future[None] | None:
        """What is being done on the mask after a sequence's latest token; None if the mask is there."""
        constraint, num_prompt = self._of(seq), seq.group.request.num_prompt
        if constraint.work is not None and constraint.work.done():
            constraint.work = None
        if constraint.work is None and constraint.num_read < len(seq.tokens) - num_prompt:
            constraint.begun = time.monotonic()
            constraint.work = submit(self.threads, constraint.advance, seq.tokens[num_prompt:])
        return constraint.work

    def fill(self, plan: StepPlan, rows: Iterable[tuple[Sequence, int, int]]) -> dict[Request, str]:
        """Give a plan the masks of its constrained rows that sample.

        Who was preempted while its mask was being made may have none yet. It is waited for, at most MASK_TIMEOUT.

        Args:
            plan: the plan.
            rows: (sequence, tokens, tokens computed with these) of its rows, but for those of the batch of decodes.

        Returns:
            why requests cannot go on at all. Their rows get a mask that allows every token. The caller must abort
            these requests, so that the token is dropped.
        """
        seqs = [seq for seq, _, computed in rows if samples(seq, computed)]
        if behind := [work for seq in seqs if (work := self._work(seq))]:
            wait(behind, MASK_TIMEOUT + PATIENCE)  # a sequence without a mask by now has `trouble`
        failed = self._failed(seqs)
        for seq in seqs:
            mask = self._of(seq).mask
            if seq.group.request in failed:
                mask = np.full_like(mask, ALL)
            plan.masks.append((seq.slot, mask.tobytes()))
        return failed

    def close(self) -> None:
        """Let the threads and the sandbox end."""
        for pool in (self.threads, self.small.threads, self.others.threads):
            pool.shutdown(wait=False, cancel_futures=True)
        self.sandbox.close()


Held = list[tuple[subprocess.Popen[bytes], socket.socket]]  # a process and its address, if there is one


class Sandbox:
    """A process that tries grammars: one may overflow the stack, take all memory, or never end.

    It reads the vocabulary once, and forks for each grammar. Whatever happens to the fork costs nobody else anything.
    It is started where it is first needed, ends when this process does, however that ends, and is replaced if it died.

    Args:
        vocabulary: the arguments of `open_vocabulary`.
    """

    def __init__(self, *vocabulary: Any):
        self.vocabulary, self.lock = vocabulary, threading.Lock()
        self.limits = Limits()
        self.held: Held = []
        self.close = weakref.finalize(self, end_sandbox, self.held, self.lock)

    def start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process and its address. It is started unless it is there.

        Raises:
            ValueError: this is closed.
        """
        with self.lock:
            if not self.close.alive:
                raise ValueError("structured_outputs cannot be compiled: the engine has ended")
            if self.held and self.held[0][0].poll() is None:
                return self.held[0]
            end_process(self.held)
            address, listener = socket.socketpair()
            with listener:
                process = subprocess.Popen(
                    [sys.executable, "-P", os.path.abspath(__file__), json.dumps(self.vocabulary)],
                    stdin=listener.fileno(), stdout=subprocess.DEVNULL, start_new_session=True,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                )  # fmt: skip
            self.held.append((process, address))
            return self.held[0]

    def check(self, wanted: StructuredOutputsParams) -> tuple[str, int]:
        """The text of a grammar that can be compiled, and how many bytes it takes then.

        Raises:
            Refused: it cannot.
            ValueError: there is no such process, which has said why on stderr.
        """
        for _ in range(2):  # somebody may have killed it
            process, address = self.start()
            try:
                return self._ask(address, wanted)
            except OSError:
                process.kill()
                process.wait()
        raise ValueError("structured_outputs cannot be compiled now: the process that tries them has ended")

    def _ask(self, address: socket.socket, wanted: StructuredOutputsParams) -> tuple[str, int]:
        with connect(address) as sock, sock.makefile("rb") as file:
            sock.settimeout(START_TIMEOUT)
            sock.sendall(json.dumps([dataclasses.asdict(wanted), self.limits]).encode() + b"\n")
            said: dict[str, Any] = {}
            while "exit" not in said:
                if not (line := file.readline()):
                    raise ConnectionError("the process has ended")
                said |= json.loads(line)
        if said["exit"]:
            raise Refused(reason(said["exit"], self.limits))
        if "error" in said:
            raise Refused(said["error"])
        return said["text"], said["size"]


def end_sandbox(held: Held, lock: threading.Lock) -> None:
    """End a sandbox's process, if there is one, once nobody is about to start another."""
    with lock:
        end_process(held)


def end_process(held: Held) -> None:
    """End a sandbox's process; the list is empty afterwards."""
    while held:
        process, address = held.pop()
        address.close()
        process.kill()
        process.wait()


def reason(code: int, limits: Limits) -> str:
    """Why a grammar is refused that has ended the process which compiled it, with this code."""
    number = -code
    if number in (signal.SIGSEGV, signal.SIGBUS):
        why = "its rules or parts lie in each other, or refer to each other, too deeply"
    elif number in (signal.SIGXCPU, signal.SIGALRM):
        why = f"that takes more than {limits.cpu_time} s"
    elif number in (signal.SIGABRT, signal.SIGKILL):
        why = f"that takes more than {limits.memory >> 20} MiB of memory"
    else:
        why = f"the process that tried has ended with the code {code}"
    return f"structured_outputs cannot be compiled: {why}"


def sandbox_main() -> None:
    """What the sandbox's process runs, until no process is left that could send a grammar."""
    name_process("grammars")
    end_with_parent(signal.SIGKILL)
    folder, vocab_size, eos_token_ids = json.loads(sys.argv[1])
    tokenizer, words = open_vocabulary(folder, vocab_size, eos_token_ids), -(-vocab_size // 32)
    compile_text(tokenizer, text_of(StructuredOutputsParams(grammar='start: "a"')), words, 0)  # loads what forks need
    listener, context = socket.socket(fileno=0), multiprocessing.get_context("fork")
    forks: dict[Any, tuple[Any, socket.socket]] = {}  # each with the socket of whoever waits for it
    while True:
        for ready in connection.wait([listener, *forks]):
            if ready is listener:
                if not (client := accept(listener)):
                    os._exit(0)
                process = context.Process(target=attempt, args=(tokenizer, words, client))
                process.start()
                forks[process.sentinel] = process, client
            else:
                process, client = forks.pop(ready)
                process.join()
                with client, contextlib.suppress(OSError):  # nobody waits any more
                    client.sendall(json.dumps({"exit": process.exitcode}).encode() + b"\n")


def attempt(tokenizer: Any, words: int, client: socket.socket) -> None:
    """In a fork: compile the grammar that a client sends, within limits, and tell what came of it."""
    import resource  # here, because Windows has none

    end_with_parent(signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library writes there how it dies
    os.nice(NICE)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory is short, this ends first
    with client.makefile("rb") as lines:
        asked, sizes = json.loads(lines.readline())
    wanted, limits = StructuredOutputsParams(**asked), Limits(*sizes)
    signal.setitimer(signal.ITIMER_REAL, limits.time)
    space = psutil.Process().memory_info().vms + limits.memory
    for name, most in (("CORE", 0), ("CPU", limits.cpu_time), ("AS", space)):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # this system lacks it, or a lower one holds
            number = getattr(resource, f"RLIMIT_{name}")
            resource.setrlimit(number, (most, resource.getrlimit(number)[1]))
    said: dict[str, Any] = {}

    def run() -> None:
        try:
            before = own_memory()
            text = text_of(wanted)
            grammar = compile_text(tokenizer, text, words, 0)
            grammar.matcher.deep_copy()
            said.update(text=text, size=max(own_memory() - before, LEAST_SIZE))
        except MemoryError:
            said["error"] = reason(-signal.SIGABRT, limits)
        except Refused as error:
            said["error"] = str(error)

    threading.stack_size(limits.stack)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    client.sendall(json.dumps(said).encode() + b"\n")


def submit(pool: ThreadPoolExecutor, task: Callable[..., Any], *args: Any) -> Future[Any]:
    """Have a pool run a task, in a thread whose stack is large enough for what went through the sandbox."""
    usual = threading.stack_size(STACK)
    try:
        return pool.submit(task, *args)
    finally:
        threading.stack_size(usual)


def late() -> ValueError:
    """The error of a request whose grammar is not there in time."""
    return ValueError(f"structured_outputs took more than {COMPILE_TIMEOUT:g} s to compile")


def size_of(entry: tuple[StructuredOutputsParams, Future[Grammar]]) -> int:
    """The bytes of an entry of the cache."""
    wanted, future = entry
    known = future.done() and not future.cancelled() and not future.exception()
    return 2 * wanted.size + (future.result().size if known else 0)


def own_memory() -> int:
    """Bytes of memory that this process has, without what it shares by files."""
    memory = psutil.Process().memory_info()
    return memory.rss - getattr(memory, "shared", 0)


def text_of(wanted: StructuredOutputsParams) -> str:
    """The grammar for llguidance of what is asked for.

    Raises:
        Refused: it is malformed.
    """
    try:
        return grammar_text(wanted)
    except MemoryError:
        raise
    except Exception as error:  # the converter of GBNF raises its own
        raise Refused(f"structured_outputs cannot be read: {brief(str(error))}") from None


def compile_text(tokenizer: Any, text: str, words: int, size: int) -> Grammar:
    """Compile a grammar of llguidance.

    Raises:
        Refused: it is none, or too complex.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    try:
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        first = mask_of(matcher, words)
    except BaseException as error:  # the library's panics are not even Exceptions
        raise Refused(f"structured_outputs cannot be compiled: {brief(str(error))}") from None
    if matcher.is_error() or not first.any():
        said = brief(matcher.get_error()) or "they allow no text"
        raise Refused(f"structured_outputs cannot be compiled: {said}")
    return Grammar(matcher, first, size)


def samples(seq: Sequence, computed: int) -> bool:
    """Whether a row that brings a sequence to so many computed tokens draws a token by a mask."""
    return seq.group.request.params.constrained and computed == len(seq.tokens)


def awaits_token(seq: Sequence) -> bool:
    """Whether a step in flight brings a sequence's next token, on which depends what may follow it."""
    return seq.num_computed >= len(seq.tokens)


def brief(error: str) -> str:
    """An error of the library in a line, which may quote a grammar at length."""
    return " ".join(error.split())[:MAX_SAID]


def mask_of(matcher: Any, words: int) -> np.ndarray:
    """The mask [words] uint32 of what a matcher allows next; nothing, if it is in error."""
    mask = np.zeros(words, dtype=np.uint32)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return mask


def open_vocabulary(folder: str, vocab_size: int, eos_token_ids: Ints[int]) -> Any:
    """The LLTokenizer of a model's folder, as `Grammars` wants it.

    Raises:
        ValueError: the model has no tokenizer, or names no token that ends an answer.
    """
    from llguidance import LLTokenizer

    from tokenizer import tokenizer_json

    if not (ends := [token for token in eos_token_ids if token < vocab_size]):
        raise ValueError("structured_outputs need a model that names its end-of-sequence token, and this one does not")
    return LLTokenizer(tokenizer_json(folder), n_vocab=vocab_size, eos_token=ends)


if __name__ == "__main__":
    sandbox_main()
