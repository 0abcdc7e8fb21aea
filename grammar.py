"""Which tokens may come next, where an answer must be what its request says: JSON of a schema, one of some texts, ...

    Grammar      what one or more requests ask for, compiled
    Constraint   where one sequence is: in hidden reasoning, or how far in its grammar
    Grammars     compiles grammars and makes the masks of a step, in threads beside the engine's loop

llguidance does the parsing: it compiles schemas, regular expressions and Lark to lexers and an Earley parser, and walks
a tree of the vocabulary for the tokens that fit. All that takes long it does without the GIL.

A constraint follows from a sequence's output alone. So it need not know of preemption, chunks, swaps or a worker's
death: whatever happened, it reads those tokens that it has not read.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ints
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from plan import StepPlan, bit_words
from sampling_params import SamplingParams, StructuredOutputsParams
from schemas import grammar_text
from sequence import Request, Sequence, SequenceGroup

MAX_CHARS = 2**18  # of a grammar; its compilation takes seconds at most
MAX_CACHED = 2**21  # characters of all that is kept
COMPILE_TIMEOUT = 20.0  # seconds that a request waits for its grammar
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


class Constraint:
    """What may come next in one sequence: what `mask` [words] uint32 says, in the order of `Adjust.bitmask`.

    Args:
        params: of the request.
        grammar: what it asks for; None if only its reasoning is bounded.
        stops: words of the tokens that end the sequence, as of `plan.bit_words`.
        words: of a mask.
    """

    def __init__(self, params: SamplingParams, grammar: Grammar | None, stops: dict[int, int], words: int):
        self.params, self.stops, self.words = params, stops, words
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


class Grammars:
    """Compiles the grammars of an engine's requests, and makes the masks of its steps.

    Args:
        open_tokenizer: makes the LLTokenizer of the model, which takes seconds for a large vocabulary.
        vocab_size: of the model.
    """

    def __init__(self, open_tokenizer: Callable[[], Any], vocab_size: int):
        self.words = -(-vocab_size // 32)
        self.open_tokenizer, self.opening = open_tokenizer, threading.Lock()
        self.tokenizer: Any = None
        count = min(THREADS, os.cpu_count() or 1)  # of each: masks never wait behind grammars, which may take long
        self.threads, self.compilers = (ThreadPoolExecutor(count, thread_name_prefix="grammar") for _ in range(2))
        self.cache: OrderedDict[StructuredOutputsParams, Future[Grammar]] = OrderedDict()

    def prepare(self) -> None:
        """Begin to read the model's vocabulary, so that the first grammar need not wait for it."""
        self.compilers.submit(self._tokenizer)

    def _tokenizer(self) -> Any:
        with self.opening:
            if self.tokenizer is None:
                self.tokenizer = self.open_tokenizer()
            return self.tokenizer

    def compile(self, wanted: StructuredOutputsParams) -> Future[Grammar]:
        """The compiled grammar, as soon as it is there. Its error is a ValueError that says what cannot be done.

        Raises:
            ValueError: it is too long.
        """
        if (size := wanted.size) > MAX_CHARS:
            raise ValueError(f"structured_outputs has {size} characters; at most {MAX_CHARS} are allowed")
        if wanted in self.cache:
            self.cache.move_to_end(wanted)
        else:
            self.cache[wanted] = self.compilers.submit(self._compile, wanted)
            while sum(key.size for key in self.cache) > MAX_CACHED:
                self.cache.popitem(last=False)
        return self.cache[wanted]

    def _compile(self, wanted: StructuredOutputsParams) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = grammar_text(wanted)
        except Exception as error:  # the converter of GBNF raises its own
            raise ValueError(f"structured_outputs cannot be read: {brief(str(error))}") from None
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        try:
            matcher = LLMatcher(self._tokenizer(), text, log_level=0, limits=limits)
            first = mask_of(matcher, self.words)
        except BaseException as error:  # the library's panics are not even Exceptions
            raise ValueError(f"structured_outputs cannot be compiled: {brief(str(error))}") from None
        if matcher.is_error() or not first.any():
            said = brief(matcher.get_error()) or "they allow no text"
            raise ValueError(f"structured_outputs cannot be compiled: {said}")
        return Grammar(matcher, first)

    def check(self, request: Request) -> None:
        """Check that a request, whose grammar has been compiled, leaves a first token.

        Raises:
            ValueError: it does not, or the grammar could not be compiled.
        """
        if error := self._constraint(request).error:
            raise ValueError(error)

    def _constraint(self, request: Request) -> Constraint:
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
            constraint.work = self.threads.submit(constraint.advance, seq.tokens[num_prompt:])
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
        """Let the threads end."""
        for pool in (self.threads, self.compilers):
            pool.shutdown(wait=False, cancel_futures=True)


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
