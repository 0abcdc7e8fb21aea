"""A worker made of integers, for the scheduler: a toy model whose next token is a function of the whole prefix.

`FakeWorker` keeps a pool of token slots and follows plans as the real worker does. A sequence's next token is a hash of
what the pool holds for it, so a wrong block, a stale prefix or a missed copy changes the tokens; `expected` computes
them from the prompt alone.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections import defaultdict, deque
from collections.abc import Callable

from config import EngineConfig
from fake_disk import FakeDisk
from integrity import check_integrity
from plan import Adapter, Logprobs, StateRoom, StepPlan, StepResult, Verified
from sampling_params import SamplingParams
from scheduler import Scheduler
from scheduling.beam_search import BeamAnswer, BeamSearches, beam_search, num_candidates
from sequence import Sequence, SequenceGroup, derived_seed

VOCAB, EOS = 50, 7
NUM_MOVES = 7  # kinds of moves in a plan
NUM_ADAPTERS = 5
ON_DISK = {"folder": "", "bytes": 100, "pays": True, "read": 1.0, "compute": 1e9}  # a worker's facts


def next_token(tokens: list[int], seed: int = 0) -> int:
    return zlib.crc32(bytes(tokens), seed & 0xFFFFFFFF) % VOCAB


def next_logprobs(tokens: list[int]) -> list[float]:
    scores = [zlib.crc32(bytes([*tokens, token])) % 1009 / 300 for token in range(VOCAB)]
    total = math.log(sum(map(math.exp, scores)))
    return [score - total for score in scores]


def known_logprobs(tokens: list[int], place: int, k: int) -> Logprobs:
    """Of the token at `place` and the k likeliest, given the tokens before it."""
    values, token = next_logprobs(tokens[:place]), tokens[place]
    ids = sorted(range(VOCAB), key=lambda other: -values[other])[:k]
    rank = 1 + sum(value > values[token] for value in values)
    return Logprobs(values[token], ids, [values[other] for other in ids], rank)


def expected(
    prompt: list[int], max_tokens: int, max_model_len: int, ignore_eos: bool = False, seed: int = 0
) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, max_model_len):
        tokens.append(next_token(tokens, seed))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


def sample_seed(index: int, seed: int = 0) -> int:
    return derived_seed(seed, str(index)) if index else seed


def salt_of(adapter: int | None) -> str:
    """Each adapter has prefixes of its own."""
    return "" if adapter is None else f"adapter {adapter}"


def adapted_seed(seed: int, adapter: int | None) -> int:
    """Makes the toy model another one with each adapter."""
    return seed if adapter is None else seed ^ (adapter + 1) * 0x9E3779B9


def expected_beams(
    prompt: list[int], max_tokens: int, limit: int, width: int, n: int, ignore_eos: bool = False
) -> list[list[int]]:
    stops = [] if ignore_eos else [EOS]
    search = beam_search(width, min(max_tokens, limit - len(prompt)), stops)
    answers = driven(search, lambda output: next_logprobs(prompt + output), num_candidates(width, stops))
    return [answer.tokens for answer in answers[:n]]


def driven(search, model: Callable[[list[int]], list[float]], most: int) -> list[BeamAnswer]:
    """The answers of a search, which is told the `most` likeliest tokens after each output by `model`."""
    nexts = None
    while True:
        try:
            outputs = search.send(nexts)
        except StopIteration as end:
            return end.value
        nexts = []
        for output in outputs:
            values = model(output)
            ids = sorted(range(len(values)), key=lambda token: -values[token])[:most]
            nexts.append((ids, [values[token] for token in ids]))


def made_up_drafts(tokens: list[int], seed: int, most: int) -> list[int]:
    """Drafts of which some are right: up to a place that the tokens themselves say."""
    mixed = zlib.crc32(bytes(tokens), 1)
    drafts: list[int] = []
    for _ in range(mixed % (most + 1)):
        drafts.append(next_token([*tokens, *drafts], seed))
    right = mixed // 16 % (most + 2)
    return [token if i < right else (token + 1) % VOCAB for i, token in enumerate(drafts)]


def ahead_of(plan: StepPlan) -> list[tuple[int, int]]:
    """Which blocks may move to the host while the plan's step runs."""
    return plan.swap_out[len(plan.swap_out) - plan.num_beside :]


class FakeWorker:
    """Follows plans over a pool of integers, and over one of states: what a sequence's has seen, all of its tokens."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        num_host_blocks: int,
        windows: tuple[int, ...],
        room: StateRoom | None = None,
    ):
        self.size, self.windows, self.room = config.block_size, windows, room
        rows = (config.max_num_seqs + room.snapshots, room.host) if room else (0, 0)
        self.states, self.host_states = ([None] * n for n in rows)
        self.pool, self.host = ([[None] * self.size for _ in range(n)] for n in (num_blocks, num_host_blocks))
        self.slots: dict[int, dict] = {}
        self.trims = False  # whether a row computes the drafts that there are, as on a CPU, or as many as were planned
        self.disk: FakeDisk | None = None
        self.host_adapters, self.adapters = [[i] for i in range(NUM_ADAPTERS)], [["none"]] * config.max_loras

    def enter(self, plan: StepPlan) -> None:
        for slot in plan.released:
            self.slots.pop(slot)
        for row in plan.new:
            assert row.slot not in self.slots
            self.slots[row.slot] = {
                "tokens": list(row.token_ids),
                "computed": row.num_computed,
                "tables": [list(table) for table in row.blocks],
                "row": row,
                "drafts": [],
            }
        for slot, grown in plan.new_blocks:
            for table, blocks in zip(self.slots[slot]["tables"], grown, strict=True):
                table += blocks

    def move(self, plan: StepPlan, most: int = NUM_MOVES) -> None:
        """Make a plan's moves, or only the first `most` kinds of them."""
        if self.disk:
            self.disk.give_up(plan.disk_first)
        for pairs, origin, goal in (
            (plan.swap_out[: len(plan.swap_out) - plan.num_beside], self.pool, self.host),
            (plan.swap_in, self.host, self.pool),
            (plan.copies, self.pool, self.pool),
            (plan.state_out, self.states, self.host_states),
            (plan.state_in, self.host_states, self.states),
            (plan.state_copies, self.states, self.states),
            (plan.adapters, self.host_adapters, self.adapters),
        )[:most]:  # all at once, as a kernel does: it may not read what it writes, nor write twice
            assert len({target for _, target in pairs}) == len(pairs)
            assert origin is not goal or not {source for source, _ in pairs} & {target for _, target in pairs}
            for (_, target), content in zip(pairs, [list(origin[source]) for source, _ in pairs], strict=True):
                goal[target] = content

    def step(self, plan: StepPlan) -> StepResult:
        self.enter(plan)
        self.move(plan)
        if self.disk:
            self.disk.begin(plan, self.host)
        counts = [count - plan.drafts.get(slot, 0) for slot, count in plan.rows]
        assert counts == sorted(counts, key=lambda count: count > 1), "rows of one known token come first"
        written: set[tuple[int, int]] = set()
        if self.trims:
            drafted = {slot: min(most, len(self.slots[slot]["drafts"])) for slot, most in plan.drafts.items()}
            rows = [(slot, count - plan.drafts.get(slot, 0) + drafted.get(slot, 0)) for slot, count in plan.rows]
            plan = dataclasses.replace(plan, rows=rows, drafts=drafted)
        for slot, count in plan.rows:  # everybody writes before anybody reads, as on a device
            row = self.slots[slot]
            assert len(row["tables"]) == len(self.windows)
            ids = [*row["tokens"], *row["drafts"], *[0] * count]
            assert row["computed"] + count - plan.drafts.get(slot, 0) <= len(row["tokens"])
            for kind, table in enumerate(row["tables"]):
                for i in range(row["computed"], row["computed"] + count):
                    block, offset = table[i // self.size], i % self.size
                    assert (block, offset) not in written and block >= 0
                    written.add((block, offset))
                    self.pool[block][offset] = kind, ids[i], self.adapter_of(row)
            if self.room:
                seen = self.states[slot] if row["computed"] else []
                assert seen == row["tokens"][: row["computed"]], "a state has seen something else"
            row["computed"] += count - plan.drafts.get(slot, 0)
        sampled, stopped, logprobs, scores, verified, guesses, proposed = [], [], {}, {}, {}, {}, {}
        for i, (slot, count) in enumerate(plan.rows):
            row = self.slots[slot]
            sampled.append(-1)
            for kind, (window, table) in enumerate(zip(self.windows, row["tables"], strict=True)):
                num_known = count - plan.drafts.get(slot, 0)
                first = row["computed"] - num_known - window + 1 if window else 0  # the oldest that a query sees
                for place in range(max(0, first), row["computed"]):
                    held = self.pool[table[place // self.size]][place % self.size]
                    written_there = kind, row["tokens"][place], self.adapter_of(row)
                    assert held == written_there, "a block holds somebody else's tokens"
            k, low, high = row["row"].score or (0, 0, 0)
            places = range(max(low, row["computed"] - count + 1), min(high, row["computed"] + 1))
            if places:
                scores[i] = [known_logprobs(row["tokens"], place, k) for place in places]
            if row["computed"] == len(row["tokens"]):
                drafts, made = row["drafts"][: plan.drafts.get(slot, 0)], row["drafts"]
                row["drafts"] = []
                brought, records, stops = self.sample(row, drafts)
                if made and not plan.drafts.get(slot, 0):
                    guesses[i] = made[0] == brought[0]
                sampled[-1] = brought[-1]
                stopped += [i] if stops else []
                if slot in plan.drafts:
                    verified[i] = Verified(len(drafts), brought, records)
                elif records:
                    logprobs[i] = records[0]
                row["computed"] += len(brought) - 1
                if plan.propose:
                    row["drafts"] = made_up_drafts(row["tokens"], self.seed_of(row), plan.propose)
                if row["drafts"] and row["row"].constrained:
                    proposed[slot] = [*row["drafts"]]
            if self.room:
                self.states[slot] = row["tokens"][: row["computed"]]
        for block, copy in ahead_of(plan):  # as late as a device may do it
            self.host[copy] = list(self.pool[block])
        result = StepResult(plan.step, sampled, stopped, logprobs, scores, {}, verified, guesses, proposed)
        result.disk = self.disk.turn(self.host) if self.disk else []
        return result

    def sample(self, row: dict, drafts: list[int]) -> tuple[list[int], list[Logprobs], bool]:
        """What a sequence gets that has caught up: tokens, with their log-probabilities, and whether the last ends it.

        It takes drafts that are right, and the token after them."""
        brought, records, wanted = [], [], row["row"].num_logprobs
        while True:
            token = next_token(row["tokens"], self.seed_of(row))
            if wanted > 0 and row["row"].sampling[0] == 0:  # a beam
                token = known_logprobs([*row["tokens"], 0], len(row["tokens"]), 1).ids[0]
            if wanted >= 0:
                records.append(known_logprobs([*row["tokens"], token], len(row["tokens"]), wanted))
            row["tokens"] = [*row["tokens"], token]
            stops = bool(row["row"].stops.get(token // 32, 0) >> token % 32 & 1)
            brought.append(token)
            if stops or len(brought) > len(drafts) or drafts[len(brought) - 1] != token:
                return brought, records, stops

    def seed_of(self, row: dict) -> int:
        return adapted_seed(row["row"].seed, self.adapter_of(row))

    def adapter_of(self, row: dict) -> int | None:
        """The adapter that a sequence's step reads, by its row of the host's memory."""
        slot = row["row"].adapter
        return self.adapters[slot - 1][0] if slot else None


class Engine:
    """Scheduler and fake worker, checked after every step; a plan is made with `depth` - 1 steps still to run.

    Sequences have states if there is room for some: snapshots, and rows in host memory.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        max_model_len: int = 64,
        num_host_blocks: int = 0,
        windows: tuple[int, ...] = (0,),
        swap_cost: float = 0.0,
        depth: int = 1,
        states: tuple[int, int] | None = None,
        row_seconds: tuple[tuple[int, float, float], ...] = (),
        files: dict[bytes, list] | None = None,
        **fields,
    ):
        fields = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16,
                  "schedule_conservativeness": 0.0} | fields  # fmt: skip
        self.now = 0.0  # a clock that a test turns by hand
        self.config = EngineConfig(**fields)
        self.max_model_len = max_model_len
        room = StateRoom(*states, blocks=1.5) if states else None
        self.scheduler = Scheduler(
            self.config, num_blocks, max_model_len, VOCAB, [EOS], num_host_blocks, windows, swap_cost, room,
            row_seconds, ON_DISK if files is not None else None, clock=lambda: self.now)  # fmt: skip
        self.searches = BeamSearches(self.scheduler, lambda *event: None)
        self.worker_args = self.config, num_blocks, num_host_blocks, windows, room
        self.worker, self.files = FakeWorker(*self.worker_args), files
        if files is not None:
            self.scheduler.space.has_file = files.__contains__
            self.worker.disk = FakeDisk(files, self.config.world_size, num_blocks)
        self.depth, self.flying = depth, deque[StepPlan]()
        self.groups: dict[str, SequenceGroup] = {}
        self.answers: dict[str, dict[int, list[int]]] = {}
        self.logprobs: dict[tuple[str, int], float | None] = {}
        self.token_logprobs: dict[tuple[str, int], list[Logprobs]] = defaultdict(list)
        self.scores: dict[str, list[Logprobs]] = defaultdict(list)
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.finished: list[str] = []
        self.plans: list[StepPlan] = []
        self.kills: Callable[[set[str]], bool] = lambda ran: False  # whether a step of these requests kills the worker
        self.deaths = 0
        self.planned: Callable[[], None] = lambda: None  # called when a step is planned that has not begun
        # Whether a plan interrupts the steps in flight, of which it is the latest, and where: see `lose`
        self.interrupts: Callable[[StepPlan], tuple[int, int] | None] = lambda plan: None

    def add(
        self, request_id: str, prompt: list[int], salt: str = "", priority: int = 0, client: str = "",
        adapter: int | None = None, retention: int = 0, **params,
    ) -> Sequence:  # fmt: skip
        """A request; its adapter, if it has one, is in that row of the host's memory."""
        chosen = None if adapter is None else Adapter(salt_of(adapter), adapter)
        salt += salt_of(adapter)
        if params.get("use_beam_search"):
            params = {"temperature": 0} | params
        request = SequenceGroup(
            request_id, prompt, SamplingParams(**{"seed": 0} | params), salt, priority, client, None, chosen, retention
        )
        (self.searches.begin if request.params.use_beam_search else self.scheduler.add)(request)
        self.groups[request_id] = request
        self.answers[request_id] = {i: [] for i in range(request.params.n)}
        return request.seqs[0]

    def serve(self, request_id: str, prompt: list[int], *args, **params) -> Sequence:
        """Add a request, and run all to their ends."""
        seq = self.add(request_id, prompt, *args, **params)
        self.run()
        return seq

    def step(self, times: int = 1) -> StepPlan:
        """So many steps; returns the last one's plan."""
        for _ in range(times - 1):
            self.step()
        waits = self.flying or self.scheduler.awaiting_masks or self.scheduler.space.has_moves()
        plan = self.scheduler.schedule()
        assert plan.rows or plan.new or waits or plan.disk_in, "a step with work to do runs something"
        assert sum(count for _, count in plan.rows) <= self.config.max_num_batched_tokens
        assert len(plan.rows) <= self.config.max_num_seqs
        check_integrity(self.scheduler)
        ran = {seq.group.request_id for seq in self.scheduler.in_flight[-1].seqs}
        if self.kills(ran):
            self.deaths += 1
            self._start_over(True, "killed")
            return plan
        self.flying.append(plan)
        if place := self.interrupts(plan):
            self._break_off(*place)
            self._start_over(False, None)
            return plan
        self.planned()
        if len(self.flying) == self.depth:
            self.land()
        self.plans.append(plan)
        return plan

    def land(self) -> None:
        plan = self.flying.popleft()
        for output in self.searches.take(self.scheduler.update(plan, self.worker.step(plan))):
            self.answers[output.request_id][output.index] += output.token_ids
            self.logprobs[output.request_id, output.index] = output.cumulative_logprob
            self.token_logprobs[output.request_id, output.index] += output.logprobs or ()
            self.scores[output.request_id] += output.prompt_logprobs or ()
            assert output.request_id not in self.finished
            if output.finish_reason:
                self.reasons[output.request_id] = output.finish_reason
            if output.finished:
                self.finished.append(output.request_id)
        check_integrity(self.scheduler)

    def lose(self, lost: bool, cause: str | None = None, whole: int = 9, moves: int = NUM_MOVES) -> None:
        """The steps in flight bring no results, because the worker dies in one, or because one fails or is interrupted.

        Where the worker lives, the first `whole` of them run to their end, and the next one makes the first `moves`
        kinds of its moves. The others never begin.
        """
        self.flying.append(self.scheduler.schedule())
        if not lost:
            self._break_off(whole, moves)
        self._start_over(lost, cause)

    def _break_off(self, whole: int, moves: int) -> None:
        ran, broken = list(self.flying)[:whole], list(self.flying)[whole:]
        for plan in ran:
            self.worker.step(plan)
        for plan in broken:  # the batch state takes what it has not seen leave or enter
            for slot in (*plan.released, *(row.slot for row in plan.new)):
                self.worker.slots.pop(slot, None)
            self.worker.enter(dataclasses.replace(plan, released=[], new_blocks=[]))
        for plan in broken[:1]:
            self.worker.move(plan, moves)
            if self.worker.disk and moves == NUM_MOVES:
                self.worker.disk.begin(plan, self.worker.host)
        for _, row in (pair for plan in self.flying for pair in plan.state_copies):
            self.worker.states[row] = ["failed"]  # a state that has not come as far as it was to
        for _, slot in (pair for plan in self.flying for pair in plan.adapters):
            self.worker.adapters[slot] = ["failed"]

    def _start_over(self, lost: bool, cause: str | None) -> None:
        self.flying.clear()
        if lost:
            before, self.worker = self.worker, FakeWorker(*self.worker_args)
            self.worker.trims = before.trims
            if before.disk:
                self.worker.disk = FakeDisk(before.disk.files, before.disk.ranks, self.scheduler.step)
        for output in self.searches.take(self.scheduler.start_over(lost, cause)):
            assert output.finished and cause and output.error.startswith(cause)
            assert output.request_id not in self.finished
            self.reasons[output.request_id], self.errors[output.request_id] = "error", output.error
            self.finished.append(output.request_id)
        check_integrity(self.scheduler)

    @property
    def outputs(self) -> dict[str, list[int]]:
        return {request_id: answers[0] for request_id, answers in self.answers.items()}

    def has_work(self) -> bool:
        """Whether requests have not finished, or blocks are to be moved."""
        return self.scheduler.has_work() or self.scheduler.space.has_moves()

    def run(self) -> None:
        """Run all requests to their ends, and check their answers."""
        while self.has_work():
            self.step()
        while self.flying:
            self.land()
        self.check()

    def check(self) -> None:
        """Check that all requests have ended, and that answers are the toy model's, but for those given up."""
        limit = self.max_model_len
        for name, answers in self.answers.items():
            group, report = self.groups[name], self.scheduler.reports.explain(name)
            if report is None:  # it is forgotten
                assert name in self.finished
                continue
            assert report["finished"]
            params, ids = group.params, [*group.prompt]
            ended = [row["index"] for row in report["answers"] if row["finish_reason"] in ("stop", "length")]
            ended = [index for index in ended if index in answers]
            reason = self.reasons.get(name)
            assert ended or name in self.errors or name not in self.finished, f"{name} has ended by {reason}"
            most = limit if params.max_tokens is None else params.max_tokens
            if params.use_beam_search:
                beams = expected_beams(ids, most, limit, params.num_sequences, params.n, params.ignore_eos)
                assert not ended or [*answers.values()] == beams
            for index in ended if not (params.use_beam_search or params.stop_token_ids) else ():
                seed = adapted_seed(sample_seed(index, params.seed), group.adapter and group.adapter.row)
                assert answers[index] == expected(ids, most, limit, params.ignore_eos, seed)


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + i * i) % VOCAB for i in range(length)]
