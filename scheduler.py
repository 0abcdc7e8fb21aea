"""What runs next. The scheduler speaks integers only: it never imports torch and never touches a tensor.

There is no prefill phase and no decode phase. Each request has `tokens` (its prompt, then its output) and
`num_computed`, how many of them have their keys and values in the cache. A step gives each request some tokens of the
budget until `num_computed` has caught up, and then the model's last hidden state yields the next token.

    add -> waiting -> running -> finished
              ^        |  ^
              |        |  '---- swapped     preempted by swap: its blocks wait in host memory
              '--------'                    preempted by recompute: its blocks are freed, its tokens kept

All three queues have one order: by priority (all equal under `fcfs`), then by arrival. The first goes first, and the
last that runs is the first to be preempted, so nobody is passed by a later request of its own class.

`schedule()` makes a `StepPlan` of differences for the workers; `update()` takes their `StepResult`.
"""

from __future__ import annotations

import enum
import hashlib
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from config import EngineConfig, SamplingParams
from kv_cache import AllocStatus, BlockManager

COUNTERS = (
    "num_preemptions_total",
    "num_swapped_blocks_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
)


@dataclass(slots=True)
class NewRow:
    """A sequence that enters a slot of the workers' batch state."""

    slot: int
    token_ids: list[int]  # all it has: the prompt, and after a preemption its output so far
    num_computed: int  # how many of them are in the cache already
    blocks: list[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(slots=True)
class StepPlan:
    """What a step changes and runs. A steady decode step carries its rows and little else."""

    step: int
    rows: list[tuple[int, int]] = field(default_factory=list)  # (slot, tokens to compute); rows of one token come first
    new: list[NewRow] = field(default_factory=list)
    new_blocks: list[tuple[int, list[int]]] = field(default_factory=list)  # (slot, blocks that its table grew by)
    released: list[int] = field(default_factory=list)  # slots whose sequence has left; applied before `new`
    # Blocks to move before the step runs, in this order; a block that an earlier one frees, a later one may fill.
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to)


@dataclass(slots=True)
class StepResult:
    """What a step brought: for each of the plan's rows the sampled token, or -1 where the row did not sample."""

    step: int
    token_ids: list[int]


@dataclass(slots=True)
class EngineOutput:
    """One step's news of one request."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | None = None  # which of the request's stop_token_ids ended it
    num_cached_tokens: int = 0
    error: str | None = None  # what was wrong with the request; finish_reason is then "error"


class Status(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One sequence: its tokens, its blocks and how far it has been computed.

    Args:
        request_id: unique among the requests in flight.
        prompt_token_ids: its prompt.
        params: how its tokens are chosen and when it ends.
        salt: prefixes are shared only among requests of equal salt.
        priority: lower goes first, where the policy is `priority`.
    """

    __slots__ = (
        "arrival", "blocks", "hashes", "host_blocks", "key", "max_len", "num_cached", "num_computed",
        "num_preemptions", "num_prompt", "num_published", "params", "priority", "request_id", "salt", "seed", "slot",
        "status", "stop_ids", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        salt: str = "",
        priority: int = 0,
    ):
        self.request_id, self.params, self.salt, self.priority = request_id, params, salt, priority
        self.status = Status.WAITING
        self.key = (0, 0)  # its place in every queue: (priority, number of arrival)
        self.arrival = 0.0
        self.host_blocks: list[int] = []
        self.tokens = list(prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.num_cached = 0  # of the prompt, found in the prefix cache at first admission
        self.num_preemptions = 0
        self.num_published = 0  # blocks offered to the prefix cache
        self.hashes: list[bytes] = []
        self.blocks: list[int] = []
        self.slot = -1  # a row of the workers' batch state while running
        self.seed = 0
        self.max_len = 0
        self.stop_ids: frozenset[int] = frozenset()


class SchedulingBudget:
    """What is left of a step: tokens and sequences."""

    __slots__ = ("seqs", "tokens")

    def __init__(self, tokens: int, seqs: int):
        self.tokens, self.seqs = tokens, seqs

    def take(self, tokens: int) -> None:
        self.tokens -= tokens
        self.seqs -= 1


class RequestQueue:
    """Requests of one status, first to go first. O(log n) to push and pop; who was aborted is skipped when met."""

    def __init__(self, status: Status):
        self.status = status
        self.heap: list[tuple[tuple[int, int], Request]] = []
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self.heap if request.status is self.status)

    def push(self, request: Request) -> None:
        """Put `request` in its place."""
        request.status = self.status
        heappush(self.heap, (request.key, request))
        self.size += 1

    def first(self) -> Request:
        """The request that goes next; the queue must not be empty."""
        while self.heap[0][1].status is not self.status:
            heappop(self.heap)
        return self.heap[0][1]

    def pop(self) -> Request:
        """Take the request that goes next out of the queue, to run."""
        request = self.first()
        heappop(self.heap)
        request.status = Status.RUNNING
        self.size -= 1
        return request

    def abort(self, request: Request) -> None:
        """Take `request` out for good."""
        request.status = Status.FINISHED
        self.size -= 1


class Scheduler:
    """Decides, step by step, which requests run and which blocks they own.

    Args:
        config: budgets, order, policy and mode of preemption.
        num_blocks: size of the KV pool.
        max_model_len: tokens that a request may have, prompt and output together.
        vocab_size: token ids of a prompt must be below it.
        eos_token_ids: tokens that end a request which does not `ignore_eos`.
        num_host_blocks: size of the host pool, for preemption by swap.
        clock: in seconds; only the classic order's delay looks at it.

    Raises:
        ValueError: without chunked prefill a prompt must fit a step, and `max_num_batched_tokens` is too small.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_host_blocks: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {config.max_num_batched_tokens}; without chunked prefill it must be at "
                f"least max_model_len, {max_model_len}"
            )
        self.config, self.max_model_len, self.vocab_size = config, max_model_len, vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.blocks = BlockManager(num_blocks, config.block_size, config.enable_prefix_caching)
        self.host = BlockManager(num_host_blocks, config.block_size, enable_prefix_caching=False)
        self.waiting, self.swapped = RequestQueue(Status.WAITING), RequestQueue(Status.SWAPPED)
        self.running: list[Request] = []  # in order of `key`
        self.arrivals = 0
        self.clock = clock
        self.last_prefill: float | None = None  # when the classic order ran prompts, until the step after that
        self.prefill_seconds = 0.0  # that the latest of these steps took
        self.requests: dict[str, Request] = {}
        self.free_slots = list(range(config.max_num_seqs))[::-1]
        self.released: list[int] = []
        self.preempted: list[tuple[str, str, str]] = []  # in the latest step: (request, how, for which request)
        self.held_up: tuple[str, ...] = ()  # (request, why) that could not be let in, with all behind it
        self.in_flight: deque[tuple[StepPlan, list[Request]]] = deque()
        self.step = 0
        self.counters = dict.fromkeys(COUNTERS, 0)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the prompt is empty, has a token outside of the vocabulary, leaves no room for output within
                `max_model_len`, or could outgrow the whole KV pool.
        """
        params, num_prompt = request.params, request.num_prompt
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by a request in flight")
        if num_prompt == 0:
            raise ValueError("the prompt is empty; it must have at least 1 token")
        if (low := min(request.tokens)) < 0 or (high := max(request.tokens)) >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"the prompt has token id {bad}; allowed: 0 to {self.vocab_size - 1}")
        if num_prompt >= self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt} tokens; at most {self.max_model_len - 1} leave room for output within "
                f"the context of {self.max_model_len}"
            )
        request.max_len = min(num_prompt + (params.max_tokens or self.max_model_len), self.max_model_len)
        # The last token of a request is never computed, so it needs no place in the cache.
        needed = self.blocks.blocks_for(request.max_len - 1)
        if self.blocks.can_allocate(needed) is AllocStatus.NEVER:
            raise ValueError(
                f"the request may grow to {request.max_len} tokens, {needed} KV blocks of {self.config.block_size}; "
                f"the whole pool has {self.blocks.num_blocks}: lower max_tokens or shorten the prompt"
            )
        request.stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            request.stop_ids |= self.eos_token_ids
        request.seed = params.seed if params.seed is not None else derived_seed(self.config.seed, request.request_id)
        self.arrivals += 1
        ranked = self.config.scheduling_policy == "priority"
        request.key = (request.priority if ranked else 0, self.arrivals)
        request.arrival = self.clock()
        self.requests[request.request_id] = request
        self.waiting.push(request)
        self.counters["prompt_tokens_total"] += num_prompt

    def abort(self, request_id: str) -> None:
        """Drop a request wherever it is; an unknown id is one that has just finished."""
        if (request := self.requests.get(request_id)) is None:
            return
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.SWAPPED:
            self.swapped.abort(request)
            self.host.free(request.host_blocks)
        else:
            self.waiting.abort(request)
        self._finish(request)

    def has_work(self) -> bool:
        """Whether a request has yet to finish."""
        return bool(self.requests)

    def schedule(self) -> StepPlan:
        """Plan the next step: who runs, with how many tokens, and what moves in memory for it.

        Chunked prefill (the default) gives every step its decodes first and fills the rest of the budget with prompts,
        cut where it ends (Sarathi-Serve, Agrawal et al., 2024). The classic order runs whole prompts first, and alone.
        """
        plan = StepPlan(self.step)
        self.preempted, self.held_up = [], ()
        budget = SchedulingBudget(self.config.max_num_batched_tokens, self.config.max_num_seqs)
        scheduled: list[tuple[Request, int]] = []
        if self.config.enable_chunked_prefill:
            self._make_way(plan)
            # After a preemption nobody is let in: it would be who was preempted, into the blocks it has just given up.
            if not self._schedule_running(plan, budget, scheduled):
                self._let_in(plan, budget, scheduled, (self.swapped, self.waiting))
        else:
            if not self.swapped and self._delay_has_passed():
                self._make_way(plan)
                self._let_in(plan, budget, scheduled, (self.waiting,))
            if scheduled:
                self.last_prefill = self.clock()
            elif not self._schedule_running(plan, budget, scheduled):
                self._let_in(plan, budget, scheduled, (self.swapped,))
        scheduled.sort(key=lambda row: row[1] > 1)  # stable: rows of one token first, as the workers' kernels want them
        plan.rows = [(request.slot, count) for request, count in scheduled]
        plan.released, self.released = self.released, []
        self.in_flight.append((plan, [request for request, _ in scheduled]))
        self.step += 1
        return plan

    def _make_way(self, plan: StepPlan) -> None:
        """Preempt running requests of lower priority than the first one waiting, if that is enough to let it in."""
        if not (self.waiting and self.running and self.running[-1].key[0] > self.waiting.first().key[0]):
            return
        request, victims = self.waiting.first(), 0
        short = self.blocks.blocks_for(len(request.tokens)) + self.blocks.watermark_blocks - self.blocks.num_free
        for victim in reversed(self.running):
            if victim.key[0] <= request.key[0] or (short <= 0 and len(self.free_slots) + victims > 0):
                break
            short -= sum(self.blocks.ref_counts[block] == 1 for block in victim.blocks)
            victims += 1
        if short <= 0:
            for _ in range(victims):
                self._preempt(self.running.pop(), plan, request)

    def _delay_has_passed(self) -> bool:
        """Whether the classic order may run prompts again; waiting a while lets more of them come together."""
        if self.last_prefill is not None:
            self.prefill_seconds, self.last_prefill = self.clock() - self.last_prefill, None
        factor = self.config.scheduler_delay_factor
        if not factor or not self.waiting or not self.running:
            return True
        return self.clock() - self.waiting.first().arrival > factor * self.prefill_seconds

    def _schedule_running(self, plan: StepPlan, budget: SchedulingBudget, scheduled: list[tuple[Request, int]]) -> bool:
        """Give every running request its next tokens, preempting from the back where blocks run out.

        Returns whether one was preempted.
        """
        size, preempted, i = self.config.block_size, False, 0
        while i < len(self.running):
            request = self.running[i]
            i += 1
            count = len(request.tokens) - request.num_computed
            if count > 1:  # those still to come keep a token of the budget each, so that no prompt holds up decodes
                count = min(count, budget.tokens - (len(self.running) - i))
            missing = -(-(request.num_computed + count) // size) - len(request.blocks)
            if missing > 0:
                while missing > self.blocks.num_free:
                    preempted = True
                    victim = self.running.pop()
                    self._preempt(victim, plan, request)
                    if victim is request:
                        return True
                grown = self.blocks.allocate(missing)
                request.blocks += grown
                plan.new_blocks.append((request.slot, grown))
            request.num_computed += count
            budget.take(count)
            scheduled.append((request, count))
        return preempted

    def _let_in(
        self,
        plan: StepPlan,
        budget: SchedulingBudget,
        scheduled: list[tuple[Request, int]],
        queues: Sequence[RequestQueue],
    ) -> None:
        """Let requests in, the first of all queues first, until one does not fit: nobody overtakes it."""
        while budget.tokens > 0 and budget.seqs > 0 and self.free_slots and any(queues):
            queue = min((queue for queue in queues if queue), key=lambda queue: queue.first().key)
            request = queue.first()
            if not self.config.enable_chunked_prefill and len(request.tokens) - request.num_computed > budget.tokens:
                self.held_up = (request.request_id, "tokens")  # the classic order cuts no prompt
                return
            if not (self._swap_in(request, plan) if queue is self.swapped else self._admit(request, plan)):
                self.held_up = (request.request_id, "blocks")
                return
            insort(self.running, queue.pop(), key=lambda request: request.key)
            count = min(len(request.tokens) - request.num_computed, budget.tokens)
            request.num_computed += count
            budget.take(count)
            scheduled.append((request, count))
        if any(queues):
            first = min((queue.first() for queue in queues if queue), key=lambda request: request.key)
            self.held_up = (first.request_id, "slots" if not self.free_slots else "tokens")

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Give a waiting request its blocks and a slot, if the blocks can be had now."""
        blocks, size = self.blocks, self.config.block_size
        shared: list[int] = []
        if self.config.enable_prefix_caching:
            blocks.chain(request.hashes, request.tokens, request.salt)
            shared = blocks.lookup(request.hashes)
        # At least the last token must be computed, for its hidden state yields the next one. Where its block is a
        # shared one that somebody else reads, it is computed into a copy.
        cached = min(len(shared) * size, len(request.tokens) - 1)
        copied = cached < len(shared) * size and blocks.ref_counts[shared[-1]] > 0
        revived = sum(blocks.ref_counts[block] == 0 for block in shared)  # they count as free, but not for long
        needed = blocks.blocks_for(len(request.tokens)) - len(shared) + copied
        # With nothing running nobody needs the watermark's reserve, and the request may fill the pool.
        if blocks.can_allocate(needed + revived, reserve=bool(self.running)) is not AllocStatus.OK:
            assert self.running, f"request {request.request_id} fits the empty pool"
            return False
        blocks.share(shared)
        own = blocks.allocate(needed)
        if copied:
            plan.copies.append((shared[-1], own[0]))
            blocks.free(shared[-1:])
            shared = shared[:-1]
        request.blocks = shared + own
        request.num_computed, request.num_published = cached, len(shared)
        if request.num_preemptions == 0:
            request.num_cached = cached
            self.counters["prefix_cache_queries_total"] += request.num_prompt
            self.counters["prefix_cache_hits_total"] += cached
        self._enter(request, plan)
        return True

    def _swap_in(self, request: Request, plan: StepPlan) -> bool:
        """Bring a swapped request's blocks back and give it a slot, if device blocks can be had now."""
        needed = self.blocks.blocks_for(len(request.tokens))
        if self.blocks.can_allocate(needed, reserve=bool(self.running)) is not AllocStatus.OK:
            assert self.running, f"request {request.request_id} fits the empty pool"
            return False
        request.blocks = self.blocks.allocate(needed)
        plan.swap_in += zip(request.host_blocks, request.blocks, strict=False)
        self.host.free(request.host_blocks)
        request.host_blocks = []
        self._enter(request, plan)
        return True

    def _enter(self, request: Request, plan: StepPlan) -> None:
        """Give a request that has its blocks a slot."""
        request.slot, params = self.free_slots.pop(), request.params
        plan.new.append(
            NewRow(request.slot, list(request.tokens), request.num_computed, list(request.blocks), params.temperature,
                   params.top_k, params.top_p, params.min_p, request.seed))  # fmt: skip

    def _preempt(self, request: Request, plan: StepPlan, cause: Request) -> None:
        """Take a running request's blocks and slot away, for `cause` to have them.

        By swap, its blocks move to host memory if there is room. By recompute, and where there is none, they are freed:
        it will compute its tokens again, or find them in the prefix cache.
        """
        request.num_preemptions += 1
        self.counters["num_preemptions_total"] += 1
        held = self.blocks.blocks_for(request.num_computed)
        swap = self.config.preemption_mode == "swap" and self.host.can_allocate(held, reserve=False) is AllocStatus.OK
        if swap:
            request.host_blocks = self.host.allocate(held)
            plan.swap_out += zip(request.blocks, request.host_blocks, strict=False)
            self.counters["num_swapped_blocks_total"] += held
        else:
            request.num_computed = 0
        request.num_published = 0
        self._release(request)
        self.preempted.append((request.request_id, "swap" if swap else "recompute", cause.request_id))
        (self.swapped if swap else self.waiting).push(request)

    def _release(self, request: Request) -> None:
        self.blocks.free(request.blocks)
        request.blocks = []
        self.free_slots.append(request.slot)
        self.released.append(request.slot)
        request.slot = -1

    def _finish(self, request: Request) -> None:
        request.status = Status.FINISHED
        if request.slot >= 0:
            self._release(request)
        del self.requests[request.request_id]

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take the result of the oldest plan in flight; returns the news for the clients."""
        planned, requests = self.in_flight.popleft()
        assert planned is plan and plan.step == result.step and len(result.token_ids) == len(requests)
        outputs, finished, size = [], False, self.config.block_size
        for request, token in zip(requests, result.token_ids, strict=True):
            if request.slot < 0:  # aborted while the step ran
                continue
            if request.num_computed >= (request.num_published + 1) * size:
                self._publish(request)
            if token < 0:  # more of its prompt is to come
                continue
            request.tokens.append(token)
            output = EngineOutput(request.request_id, [token], num_cached_tokens=request.num_cached)
            if token in request.stop_ids:
                output.finish_reason = "stop"
                output.stop_reason = token if token in request.params.stop_token_ids else None
            elif len(request.tokens) >= request.max_len:
                output.finish_reason = "length"
            if output.finish_reason:
                self._finish(request)
                finished = True
            outputs.append(output)
        if finished:
            self.running = [request for request in self.running if request.slot >= 0]
        self.counters["generation_tokens_total"] += len(outputs)
        return outputs

    def _publish(self, request: Request) -> None:
        """Offer the blocks that have become full to the prefix cache: computed tokens only, never planned ones."""
        if self.config.enable_prefix_caching:
            full = request.num_computed // self.config.block_size
            if len(request.hashes) < full:
                self.blocks.chain(request.hashes, request.tokens, request.salt)
            for i in range(request.num_published, full):
                self.blocks.publish(request.blocks[i], request.hashes[i])
            request.num_published = full

    def metrics(self) -> dict[str, float]:
        """Gauges and counters, by vLLM's names."""
        return {
            "num_requests_running": len(self.running),
            "num_requests_waiting": len(self.waiting),
            "num_requests_swapped": len(self.swapped),
            "kv_cache_usage_perc": 1 - self.blocks.num_free / self.blocks.num_blocks,
            **self.counters,
        }

    def check_integrity(self) -> None:
        """Assert that queues, slots and blocks agree with each other."""
        self.blocks.check_integrity(request.blocks for request in self.requests.values())
        self.host.check_integrity(request.host_blocks for request in self.requests.values())
        waiting, swapped = list(self.waiting), list(self.swapped)
        assert (len(waiting), len(swapped)) == (len(self.waiting), len(self.swapped))
        places = [id(request) for request in (*waiting, *swapped, *self.running)]
        assert sorted(places) == sorted(id(request) for request in self.requests.values())
        slots = [request.slot for request in self.running]
        assert sorted(slots + self.free_slots) == list(range(self.config.max_num_seqs))
        keys = [request.key for request in self.running]
        assert keys == sorted(keys)
        for request in (*waiting, *swapped):
            assert request.slot < 0 and not request.blocks
        for request in swapped:
            assert len(request.host_blocks) == self.host.blocks_for(request.num_computed)
        for request in self.running:
            assert request.status is Status.RUNNING and not request.host_blocks
            assert request.num_computed <= len(request.tokens) <= request.max_len
            assert len(request.blocks) * self.config.block_size >= request.num_computed


def derived_seed(seed: int, request_id: str) -> int:
    """The seed of a request that brings none: the same for the same id and engine seed, spread over int64."""
    digest = hashlib.blake2b(f"{seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
