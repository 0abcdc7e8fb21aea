"""Messages between the processes that run one model, its ranks, while they compute (`torch.distributed`).

With tensor parallelism (`Group`) the model is cut lengthwise: each rank holds a share of every weight, and their
partial results are added up or put side by side. With pipeline parallelism (`Pipeline`) it is cut across: each stage
holds some of the layers on as many ranks, and hands its hidden states on to the next; `Sampled` keeps account of the
tokens that come back. `device/channel.py` has messages for ranks that something else than the engine has started.

All ranks run the same steps in the same order, so that each call below meets its counterparts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from batch_state import BatchState, Rows, to_device

if TYPE_CHECKING:
    from models.expert_ranks import ExpertGroup

MOST_SENT = 4  # tensors that a stage may have on their way, for each stage: two for each step that is planned


class RankGone(ConnectionError):
    """Another rank is gone, or late."""


class PeersGone(ConnectionError):
    """Another engine that shares the experts is gone, or late."""


class Group:
    """The ranks of one model, or of one stage of it.

    A group of one exchanges nothing and needs no `connect`. Tensors of torch's `meta` device are not exchanged either,
    because they have no memory. Every exchange raises RankGone if a rank is gone, or too slow (`set_timeout`).

    Args:
        rank: this process's, from 0, and size: how many there are.
        device: of the tensors that they exchange, `cpu` or `cuda`.
        experts: with expert parallelism, who holds which experts.
        pipeline: the stage that they are, if the layers are divided in stages.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, device: str = "cpu",
        experts: ExpertGroup | None = None, pipeline: Pipeline | None = None,
    ):  # fmt: skip
        assert 0 <= rank < size
        self.rank, self.size, self.device = rank, size, device
        self.experts, self.pipeline = experts, pipeline or Pipeline()
        self.local_size = self.world_size  # how many ranks of all stages are on this machine
        self.link: Any = None  # of the ranks of this stage; None: there is one stage
        self.exchanged: list[tuple[torch.Size, torch.dtype]] = []  # in this step so far: a row's shape

    @property
    def peers(self) -> ExpertGroup | None:
        """The engines that share the experts, while messages go between them."""
        return self.experts if self.experts and self.experts.live and self.experts.engines > 1 else None

    @property
    def world_size(self) -> int:
        """How many ranks all stages have."""
        return self.size * self.pipeline.stages

    @classmethod
    def connect(cls, rank: int, size: int, rendezvous: str, device: str, stages: int, timeout: float) -> Group:
        """Meet the other ranks, over gloo on CPUs and NCCL on GPUs.

        Args:
            rank: this process's among the ranks of all stages, those of the first stage first.
            size: ranks of each stage.
            rendezvous: where they meet: `file:///...` is a new file on this machine; with `env://` the environment says
                where, and which of the ranks on its machine this is (see `executors/torchrun.py`).
            timeout: seconds that they may take to come, and each exchange until `set_timeout`.

        Raises:
            ValueError: there is no GPU for this rank.
            RankGone: the others do not come.
        """
        group = cls(rank % size, size, device, pipeline=Pipeline(rank // size, stages))
        if (world := group.world_size) > 1:
            assert rendezvous, "several ranks need a place to meet"
            index = rank
            if rendezvous == "env://":
                index = int(os.environ.get("LOCAL_RANK", rank))
                group.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world))
            if device == "cuda":
                if index >= (count := torch.cuda.device_count()):
                    raise ValueError(
                        f"tensor_parallel_size is {size} and pipeline_parallel_size {stages}; torch sees {count} CUDA "
                        "devices on this machine"
                    )
                torch.cuda.set_device(index)
            if group.local_size == world:  # one machine, whose own name may not resolve
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            backend = "nccl" if device == "cuda" else "gloo"
            with group.exchange():
                limit = timedelta(seconds=timeout)
                dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world, timeout=limit)
                if stages > 1:
                    parts = [dist.new_group([*range(s * size, (s + 1) * size)]) for s in range(stages)]
                    group.link = parts[group.pipeline.stage]
                    group.pipeline.connect(group.rank, size)
                group.set_timeout(timeout)
        return group

    def close(self) -> None:
        """Leave the group. No rank may be waiting for another at that time."""
        if self.world_size > 1:
            dist.destroy_process_group()
            # With their last references torch's groups end their threads, now and not while the process exits.
            self.link, self.pipeline.links = None, []
            self.pipeline.sent.clear()

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Raise a RankGone of one line if a rank is gone or too slow."""
        with connection_errors(f"rank {self.pipeline.stage * self.size + self.rank} has lost the other ranks"):
            yield

    def set_timeout(self, seconds: float) -> None:
        """From now on, give up an exchange that takes longer.

        On a GPU no exchange waits. There the step is given up (`run_step`), or the engine ends the process. NCCL's
        watchdog would end it after twice that time, but sees nothing of what a CUDA graph replays.
        """
        for link in (dist.group.WORLD, self.link, *self.pipeline.links):
            if link is not None:
                link.set_timeout(timedelta(seconds=seconds * (1 + (self.device == "cuda"))))
        self.pipeline.limit = () if self.device == "cuda" else (timedelta(seconds=seconds),)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, in place of `x`, which is returned."""
        if self.size > 1 and not x.is_meta:
            with self.exchange():
                dist.all_reduce(x, group=self.link)
            self.exchanged.append((x.shape[1:], x.dtype))
        return x

    def all_gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """All ranks' `x` [..., n] side by side in the order of the ranks, cut to `width` columns: [..., width]."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        if not x.is_meta:
            with self.exchange():
                dist.all_gather(parts, x, group=self.link)
            self.exchanged.append((x.shape[1:], x.dtype))
        return torch.cat(parts, -1)[..., :width].contiguous()

    def min(self, value: int) -> int:
        """The least `value` of all ranks in all stages."""
        return self._reduce(value, dist.ReduceOp.MIN)

    def sum(self, value: int) -> int:
        """The sum of `value` over all ranks in all stages."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def _reduce(self, value: int, how: Any) -> int:
        if self.world_size == 1:
            return value
        reduced = torch.tensor(value, device=self.device)
        with self.exchange():
            dist.all_reduce(reduced, how)
        return int(reduced)


@contextlib.contextmanager
def connection_errors(what: str, kind: type[ConnectionError] = RankGone) -> Iterator[None]:
    """Raise a ConnectionError of this kind and of one line, `what` and why, for an error of torch.distributed."""
    try:
        yield
    except RuntimeError as error:
        why = re.sub(r"^\[\S+\] ", "", str(error))  # without the file and line of C++
        why = re.split(r"\n|\. ", why)[0]
        raise kind(f"{what}: {why}") from None


class Pipeline:
    """One of the stages that the layers are divided in, and what goes from stage to stage.

    Hidden states go to the rank of the same number in the next stage. What the last stage samples, and its drafts, go
    back to the first, as the input of the sequence's next step, and from there to the stages between. Each direction
    has its own link, so that on GPUs neither waits.

    A stage does not wait for the next one to take what it sends: it keeps the tensor until it has gone, and meanwhile
    computes its next step, which is for other sequences (GPipe, Huang et al., 2019; the schedule is PipeDream's).

    Until `live` is set, a stage warms up by itself: zeros come in, and what goes out is dropped.

    Args:
        stage: this process's, from 0, and stages: how many there are.
        layers: which it holds; None: all, as a single stage does.
    """

    def __init__(self, stage: int = 0, stages: int = 1, layers: range | None = None):
        assert 0 <= stage < stages
        self.stage, self.stages, self.layers = stage, stages, layers
        self.first, self.last = stage == 0, stage == stages - 1
        self.live = False
        self.links: list[Any] = []  # to the stage before and after this one in the ring of stages
        self.sent: deque[tuple[Any, torch.Tensor]] = deque()  # what is on its way
        self.limit: tuple[timedelta, ...] = ()  # for `wait`, where that waits on the host: gloo's

    def connect(self, rank: int, size: int) -> None:
        """Make the links; all ranks of all stages do so at the same time."""
        world, me = self.stages * size, self.stage * size + rank
        self.before, self.after = (me - size) % world, (me + size) % world
        links = [dist.new_group([source, (source + size) % world]) for source in range(world)]
        self.links = [links[self.before], links[me]]

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """The next tensor from the stage before this one in the ring."""
        make = torch.empty if self.live else torch.zeros
        x = make(shape, dtype=dtype, device=device)
        if self.live:
            with connection_errors(f"stage {self.stage} has lost the stage before it"):
                if work := dist.irecv(x, self.before, self.links[0]):
                    work.wait(*self.limit)
        return x

    def send(self, x: torch.Tensor) -> None:
        """Send `x` to the stage after this one in the ring; it must not be changed afterwards."""
        if not self.live:
            return
        with connection_errors(f"stage {self.stage} has lost the stage after it"):
            while self.sent and (len(self.sent) > MOST_SENT * self.stages or self.sent[0][0].is_completed()):
                self.sent.popleft()[0].wait(*self.limit)  # gloo tells only who waits that one has gone
            self.sent.append((dist.isend(x, self.after, self.links[1]), x))


class Sampled:
    """The tokens that the last of several stages samples, and its drafts, on their way to the stages before it.

    There a step counts its tokens as computed at once. What it samples comes in the order of the steps, and must be
    there when a later step runs one of its sequences. So a stage waits for no more of it than it needs.
    """

    def __init__(self, state: BatchState, pipeline: Pipeline):
        self.state, self.pipeline = state, pipeline
        # Of each step whose tokens are to come: the slots [B] that sample, and where the tokens of each begin [B + 1]
        self.to_come: deque[tuple[np.ndarray, np.ndarray]] = deque()
        self.counts = np.zeros(len(state.num_blocks), dtype=np.int32)  # how many of these steps each slot is in

    def follow(self, rows: Rows, result: torch.Tensor) -> None:
        """A step with these rows has run: send what it has sampled, `result` [2, R] int32, or expect that."""
        begins = np.flatnonzero(np.diff(rows.sampling, prepend=-1))  # where each row's tokens begin
        slots, count = rows.slots[begins], len(rows.sampling)
        if not self.pipeline.last:
            self.to_come.append((slots, np.append(begins, count).astype(np.int32)))
            self.counts[slots] += 1
            return
        news = result[0, :count].clone()
        if self.state.most_drafts:
            owners = to_device(slots, self.state.device)
            news = torch.cat((self.state.drafts_of(owners, self.state.num_drafts[owners]).flatten(), news))
        self.pipeline.send(news)

    def forget(self, slots: list[int]) -> None:
        """Other sequences have these slots now."""
        if self.counts[slots].any():
            for expected, _ in self.to_come:
                expected[np.isin(expected, slots)] = -1
            self.counts[slots] = 0

    def take(self, ops: ModuleType, rows: list[tuple[int, int]] | None) -> None:
        """Before the last stage: receive what earlier steps have sampled, until it is there for the sequences in these
        `rows`, or all, and little is on its way; and bring it into the state."""
        state, pipeline, wanted = self.state, self.pipeline, [slot for slot, _ in rows or ()]
        most = MOST_SENT // 2 * pipeline.stages  # the last stage waits with MOST_SENT, for ended sequences, too
        while self.to_come and (rows is None or len(self.to_come) > most or self.counts[wanted].any()):
            slots, starts = self.to_come.popleft()
            live = slots >= 0
            self.counts[slots[live]] -= 1
            drafted = len(slots) * state.most_drafts
            news = pipeline.receive((drafted + int(starts[-1]),), torch.int32, state.device)
            if pipeline.stage + 2 < pipeline.stages:
                pipeline.send(news)
            owners, begins = to_device(slots, state.device), to_device(starts, state.device)
            state.update(ops, owners, torch.zeros_like(begins), begins, news[drafted:].long(), None, drafted > 0)
            if drafted:
                made = news[:drafted].view(len(slots), state.most_drafts)
                ops.put_drafts(state.token_ids, state.num_known, state.num_drafts, owners, made)


def add_stages(w: Any) -> None:
    """Add the phases of a stage: hidden states go to the next one, and sampled tokens from the last one to all.

    `w` is the `Worker`, and `run` a `StepRun`: files that import this one.
    """

    def forget(run: Any) -> None:
        if run.plan.new:
            w.sampled.forget([row.slot for row in run.plan.new])

    def take(run: Any) -> None:  # before the plan, which may say that a grammar takes fewer of the drafts
        w.mark("receive")
        w.take_sampled(run.plan.rows)

    def receive(run: Any) -> None:
        w.mark("receive")
        x = incoming_of(w, run.shape.tokens)
        run.incoming = w.incoming[: run.shape.tokens].copy_(x) if run.graph else x

    def hand_on(run: Any) -> None:  # in place of sampling: the step's tokens are computed, and others come later
        run.result = run.hidden
        if not w.pooler:
            w.mark("post_update")
            none, starts = run.hidden.new_empty(0, dtype=torch.int64), w.state.sample_starts[: run.shape.rows + 1]
            batch, zeros, drafted = run.batch, torch.zeros_like(starts), run.shape.drafted > 0
            w.state.update(w.ops, batch.slots, batch.starts, zeros, none, None, drafted)

    def send(run: Any) -> None:
        if not w.pipeline.last:
            w.pipeline.send(run.result.clone() if run.graph else run.result)
        if not w.pooler and len(run.rows.sampling):
            w.sampled.follow(run.rows, run.result)

    def report(run: Any) -> None:
        run.launched.rows, run.launched.unfinished.token_ids = None, [-1] * len(run.plan.rows)

    w.plan_phases.insert(0, forget)
    w.row_phases.insert(w.row_phases.index(w.report), send)
    if not w.pipeline.first:
        w.row_phases.insert(w.row_phases.index(w.compute), receive)
    if not w.pipeline.last:
        w.plan_phases.insert(1, take)
        w.row_phases[w.row_phases.index(w.report) :] = [report]
        w.forward_phases[w.forward_phases.index(w.score) :] = [hand_on]


def incoming_of(w: Any, tokens: int) -> torch.Tensor | None:
    """The previous stage's output for a step of so many tokens; the first stage has none."""
    if w.pipeline.first:
        return None
    return w.pipeline.receive((tokens, w.model.passed_sizes[0]), w.model.dtype, w.device)
