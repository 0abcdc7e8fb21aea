"""Gauges, counters and histograms of the engine, by vLLM's names. `prometheus.py` shows them.

Counting happens in the engine process, so all API processes tell the same. Most steps cost one count: as long as nobody
joins or leaves the decodes, all of them have waited equally long for a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Any, Literal, NamedTuple

from config import EngineConfig
from sequence import DecodeRows, Sequence

LATENCIES = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
PER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
PHASE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
TOKENS = ()  # 1, 2, 5, 10, ... up to the context's length


class Series(NamedTuple):
    """The description of a series."""

    kind: Literal["gauge", "counter", "histogram", "info", "moment"]  # the last two have labels of their own
    help: str
    label: str = ""  # beside the model and the engine; its values are the keys of a dict
    bounds: tuple[float, ...] = TOKENS  # of a histogram's buckets, each the largest value that is counted in it


COUNTERS = {
    "num_preemptions_total": "Preemptions, by recompute or by swap.",
    "num_computed_tokens_total": "Tokens computed in all steps.",
    "num_recomputed_tokens_total": "Tokens computed again after a preemption.",
    "num_swapped_tokens_total": "Tokens whose keys and values went to host memory with a preempted request.",
    "num_swapped_blocks_total": "KV blocks that went there.",
    "prefix_cache_queries_total": "Prompt tokens that were looked for in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens that were found there.",
    "host_cache_hits_total": "Prompt tokens of these that were fetched from host memory.",
    "disk_cache_hits_total": "And those that were read from disk.",
    "kv_disk_read_blocks_total": "KV blocks that were read from disk.",
    "kv_disk_read_bytes_total": "Bytes of these, on all ranks.",
    "kv_disk_written_blocks_total": "KV blocks that were written to disk.",
    "kv_disk_written_bytes_total": "Bytes of these, on all ranks.",
    "kv_disk_bad_blocks_total": "KV blocks on disk that were not whole.",
    "prompt_tokens_total": "Prompt tokens of requests that were queued.",
    "generation_tokens_total": "Tokens generated.",
    "spec_decode_num_drafts_total": "Rows of steps that had drafts to verify, with speculative_config.",
    "spec_decode_num_draft_tokens_total": "Drafts that were verified.",
    "spec_decode_num_accepted_tokens_total": "Drafts of these that the model has sampled, too.",
}
REASONS = ("stop", "length", "abort", "error")
COMPLETE = ("stop", "length")  # requests that end otherwise would distort the histograms
PHASES = ("schedule", "submit", "wait", "update")
SERIES = {
    "num_requests_running": Series("gauge", "Samples of requests that run."),
    "num_requests_waiting": Series("gauge", "Samples of requests that wait."),
    "num_requests_waiting_by_reason": Series(
        "gauge", "Those for want of capacity, and those deferred while it is found who kills workers.", label="reason"
    ),
    "num_requests_swapped": Series("gauge", "Samples of requests that wait with their KV blocks in host memory."),
    "kv_cache_usage_perc": Series("gauge", "Share of the KV blocks that are in use; 1 is all."),
    "cache_config_info": Series("info", "How the KV cache is laid out."),
    "lora_requests_info": Series(
        "moment", "When this was told, in seconds since 1970: which adapters requests run with and wait for."
    ),
    **{name: Series("counter", help) for name, help in COUNTERS.items()},
    "spec_decode_num_accepted_tokens_per_pos_total": Series(
        "counter", "The same, by the draft's place in its row, from 0 on.", label="position"
    ),
    "num_worker_restarts_total": Series("counter", "How often the workers were started anew."),
    "request_success_total": Series("counter", "Samples of requests that have ended.", label="finished_reason"),
    "iteration_tokens_total": Series("histogram", "Tokens computed in a step.", bounds=STEP_TOKENS),
    "step_phase_seconds": Series("histogram", "Phases of a step in the engine.", label="phase", bounds=PHASE_SECONDS),
    "time_to_first_token_seconds": Series("histogram", "From arrival to the first token.", bounds=FIRST_TOKEN),
    "inter_token_latency_seconds": Series("histogram", "From one token to the next.", bounds=PER_TOKEN),
    "request_time_per_output_token_seconds": Series(
        "histogram", "A sample's mean time from one token to the next.", bounds=PER_TOKEN
    ),
    "e2e_request_latency_seconds": Series("histogram", "From arrival to the end.", bounds=LATENCIES),
    "request_queue_time_seconds": Series("histogram", "From arrival to the first step.", bounds=LATENCIES),
    "request_inference_time_seconds": Series("histogram", "From the first step to the end.", bounds=LATENCIES),
    "request_prefill_time_seconds": Series("histogram", "From the first step to the first token.", bounds=LATENCIES),
    "request_decode_time_seconds": Series("histogram", "From the first token to the end.", bounds=LATENCIES),
    "request_prompt_tokens": Series("histogram", "Tokens of a prompt."),
    "request_prefill_kv_computed_tokens": Series("histogram", "Tokens of a prompt that were in no cache."),
    "request_generation_tokens": Series("histogram", "Tokens generated for a sample."),
    "request_max_num_generation_tokens": Series("histogram", "Tokens of the longest sample of a request."),
    "request_params_n": Series("histogram", "Answers that a request asks for.", bounds=SAMPLES),
    "request_params_max_tokens": Series("histogram", "Tokens that a request allows a sample."),
    "request_num_preemptions": Series("histogram", "How often a sample was preempted.", bounds=PREEMPTIONS),
}


class Histogram:
    """Counts of values by bucket, and their sum.

    A value belongs to the first bucket whose bound is not less. One more bucket has those above all `bounds`.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count such a value, or several."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def plain(self) -> dict[str, Any]:
        """The same in JSON's types: the bounds, what lies in each bucket alone, and the sum."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


def token_bounds(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 and so on up to `most`."""
    return tuple(bound for power in range(len(str(most))) for m in (1, 2, 5) if (bound := m * 10**power) <= most)


class EngineStats:
    """The counts of an engine since it was started; `max_model_len` tokens are the most of a sequence."""

    def __init__(self, max_model_len: int):
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.ended = dict.fromkeys(REASONS, 0)
        tokens = token_bounds(max_model_len)
        kinds = {name: series for name, series in SERIES.items() if series.kind == "histogram" and not series.label}
        self.histograms = {name: Histogram(series.bounds or tokens) for name, series in kinds.items()}
        self.phases = {phase: Histogram(PHASE_SECONDS) for phase in PHASES}
        self.now = 0.0  # when the latest step landed
        self.rows, self.rows_at = DecodeRows(), 0.0  # the decodes of the latest step, and when they got their tokens
        self.together = False  # whether the step before had the same

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Count a value in one of the histograms."""
        self.histograms[name].observe(value, times)

    def landed(self, tokens: int, rows: DecodeRows, now: float) -> None:
        """A step of so many tokens has landed, at `now` in the scheduler's seconds; `rows` are its decodes."""
        if tokens:  # engines in lockstep run empty steps, too
            self.observe("iteration_tokens_total", tokens)
        self.now, self.together = now, rows is self.rows
        if not self.together:  # somebody has joined or left
            for seq in self.rows.seqs:
                seq.token_at = self.rows_at
            self.rows = rows

    def decoded(self, count: int) -> None:
        """The decodes of the step that has landed have brought this many tokens."""
        self.counters["generation_tokens_total"] += count
        if self.together:
            self.observe("inter_token_latency_seconds", self.now - self.rows_at, count)
        else:
            for at, times in Counter(seq.token_at for seq in self.rows.seqs if seq.slot >= 0).items():
                self.observe("inter_token_latency_seconds", self.now - at, times)
        self.rows_at = self.now

    def sampled(self, seq: Sequence, count: int) -> None:
        """A row of the step that has landed, none of its decodes, has brought a token, or several at once."""
        group = seq.group
        if group.params.max_tokens == 0 or group.beam:  # it goes to nobody
            return
        self.counters["generation_tokens_total"] += count
        if seq.first_token_at is None:
            seq.first_token_at = self.now
            if group.first_token_at is None:
                group.first_token_at = self.now
            self.observe("time_to_first_token_seconds", group.delay + self.now - group.arrival)
        else:
            self.observe("inter_token_latency_seconds", self.now - seq.token_at)
        if count > 1:
            self.observe("inter_token_latency_seconds", 0.0, count - 1)
        seq.token_at = self.now

    def finished(self, seq: Sequence, now: float) -> None:
        """A sequence has ended at `now`, and its report is the latest of its request's."""
        group = seq.group
        report = group.finished_reports[-1]
        self.ended[report["finish_reason"]] += 1
        if report["finish_reason"] not in COMPLETE:
            return
        stays = report["stays"]
        entry = next(i for i, stay in enumerate(stays) if stay["state"] == "running")
        elapsed = group.delay + now - group.arrival
        queued = group.delay + sum(stay["seconds"] for stay in stays[:entry])
        decoded = 0.0 if seq.first_token_at is None else now - seq.first_token_at
        self.observe("e2e_request_latency_seconds", elapsed)
        self.observe("request_queue_time_seconds", queued)
        self.observe("request_inference_time_seconds", elapsed - queued)
        self.observe("request_prefill_time_seconds", elapsed - queued - decoded)
        self.observe("request_decode_time_seconds", decoded)
        self.observe("request_prompt_tokens", group.num_prompt)
        self.observe("request_prefill_kv_computed_tokens", group.num_prompt - stays[entry]["cached_tokens"])
        self.observe("request_num_preemptions", report["preemptions"])
        if group.pooling is not None:
            return
        tokens = report["output_tokens"]
        self.observe("request_generation_tokens", tokens)
        self.observe("request_time_per_output_token_seconds", decoded / (tokens - 1) if tokens > 1 else 0.0)
        if group.params.max_tokens:
            self.observe("request_params_max_tokens", group.params.max_tokens)
        if not group.seqs:
            longest = max(report["output_tokens"] for report in group.finished_reports)
            self.observe("request_max_num_generation_tokens", longest)
            self.observe("request_params_n", group.params.n)

    def refused(self) -> None:
        """A request was not taken, because it can never run."""
        self.ended["error"] += 1

    def plain(self) -> dict[str, Any]:
        """All that is told of it, by name, in JSON's types."""
        histograms = {name: histogram.plain() for name, histogram in self.histograms.items()}
        phases = {phase: histogram.plain() for phase, histogram in self.phases.items()}
        return {**self.counters, "request_success_total": dict(self.ended), **histograms, "step_phase_seconds": phases}


def engine_metrics(
    counted: dict[str, Any], config: EngineConfig, facts: dict[str, Any], num_restarts: int
) -> dict[str, Any]:
    """All of an engine's metrics, by their names in `SERIES`: what its scheduler has `counted`, and the rest."""
    options = ("block_size", "enable_prefix_caching", "gpu_memory_utilization")
    names = {"cache_dtype": "cache_dtype", "num_cpu_blocks": "num_host_blocks", "num_gpu_blocks": "num_blocks"}
    cache = {name: getattr(config, name) for name in options} | {name: facts[fact] for name, fact in names.items()}
    labels = {name: str(value) for name, value in cache.items()}
    return counted | {"num_worker_restarts_total": num_restarts, "cache_config_info": labels}
