"""An engine on a made-up device: the real scheduler, whose steps take what a formula says. No model runs.

`bench_scale.py` has many of them behind a router, and `bench_policies.py` compares scheduling policies on one.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple, Protocol

from config import EngineConfig
from plan import StepPlan, StepResult
from sampling_params import SamplingParams
from scheduler import Scheduler
from sequence import SequenceGroup

VOCAB = 2**31 - 1  # token ids are numbers of conversations
POOL = 6000  # KV blocks of an engine: 50 GB of the 80, where a block of 64 tokens is 8 MiB
CONTEXT = 2**15  # tokens that a sequence may have; the longest request of the trace has fewer


class Device(NamedTuple):
    """What a step takes, in seconds: Llama-3.1-8B in bfloat16 on an H100.

    NVIDIA's datasheet of the H100 SXM has 3.35 TB/s and 989 TFLOP/s, of which 70% and 60% are taken to be reached. In
    every step the weights are read, and a millisecond goes by beside the products. With the 4.8 TB/s of an H200 that
    makes 5.9 ms for 8 sequences; vLLM's own benchmark of a build in 2024 has 6.5.
    """

    fixed: float = 16.06e9 / (0.7 * 3.35e12) + 1e-3
    prompt_token: float = 2 * 8.03e9 / (0.6 * 989e12)
    row: float = 10e-6  # that decodes: sampling, and what its products add to reading the weights
    # Of context that a row reads: keys and values of 32 layers, 8 heads of 128
    kv_token: float = 2**17 / (0.7 * 3.35e12)

    def seconds(self, prompt: int, rows: int, context: int) -> float:
        """Of a step with so many tokens of prompts and rows that decode, which read `context` tokens of the cache."""
        return self.fixed + prompt * self.prompt_token + rows * self.row + context * self.kv_token


class SimulatedRequest(Protocol):
    """A request of a simulation. Times are in seconds, and all but `at` are written when it is done."""

    at: float  # when it arrives
    output: int  # tokens of its answer
    begun: float  # when it was let in
    first: float  # when its first token came
    done: float  # when its last token came
    cached: int  # tokens of its prompt that the prefix cache had

    def tokens(self) -> list[int]:
        """Its prompt."""
        ...


class ScheduledEngine:
    """An engine with the real scheduler, whose steps take what `device` says. It plans no step ahead.

    Attributes:
        load: (waiting, running), as the coordinator knows it.
        reports: how often it has told it.
        computed: tokens.
    """

    def __init__(self, config: EngineConfig, device: Device, num_blocks: int = POOL, max_model_len: int = CONTEXT):
        self.now, self.config, self.device, self.load, self.reports = 0.0, config, device, (0, 0), 0
        self.scheduler = Scheduler(config, num_blocks, max_model_len, VOCAB, [], clock=lambda: self.now)
        self.plan: StepPlan | None = None
        self.jobs: dict[str, tuple[SimulatedRequest, SequenceGroup]] = {}
        self.names = itertools.count()

    @property
    def size(self) -> int:
        """Requests that wait or run."""
        return len(self.jobs)

    @property
    def computed(self) -> int:
        """Tokens that it has computed."""
        return int(self.scheduler.counters["num_computed_tokens_total"])

    def add(self, job: SimulatedRequest, now: float) -> None:
        """A request arrives.

        Raises:
            ValueError: the scheduler refuses it, as one that the pool cannot hold.
        """
        self.now, name = now, str(next(self.names))
        request = SequenceGroup(name, job.tokens(), SamplingParams(max_tokens=job.output, ignore_eos=True))
        self.scheduler.add(request)
        self.jobs[name] = job, request

    def turn(self, now: float) -> float:
        """The step that ran is done, and the next one begins; returns the seconds that it takes, 0 if there is none."""
        self.now, scheduler = now, self.scheduler
        if self.plan:
            seqs = scheduler.in_flight[0].seqs
            tokens = [s.group.prompt[-1] if s.num_computed == s.num_tokens else -1 for s in seqs]
            for output in scheduler.update(self.plan, StepResult(self.plan.step, tokens)).outputs:
                if output.finished:
                    job, request = self.jobs.pop(output.request_id)
                    assert request.time_in_queue is not None and request.first_token_at is not None
                    job.begun, job.first, job.done = job.at + request.time_in_queue, request.first_token_at, now
                    job.cached = request.num_cached
        load = (len(scheduler.waiting), len(scheduler.running))
        self.reports += load != self.load
        self.plan, self.load = None, load
        if not scheduler.has_work():
            return 0.0
        self.plan = scheduler.schedule()
        return self.device.seconds(*step_size(scheduler))


def step_size(scheduler: Scheduler) -> tuple[int, int, int]:
    """Of the latest step: tokens of prompts, rows that decode, and tokens of the cache that all rows read."""
    flight = scheduler.in_flight[-1]
    rows = sum(seq.num_computed > seq.group.num_prompt for seq in flight.seqs)
    return sum(count for _, count in flight.plan.rows) - rows, rows, sum(seq.num_computed for seq in flight.seqs)
