"""What other ranks and engines wait for in a step: how large its messages are, and what if it fails on one rank."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import torch

from batch_state import Rows
from plan import StepPlan

if TYPE_CHECKING:
    from models.expert_ranks import ExpertGroup
    from worker import Worker


def agree(peers: ExpertGroup, plan: StepPlan, graph_sizes: list[int]) -> bool:
    """Agree with the engines that share the experts on the tokens of this step's messages: the most that one has.

    An engine that only decodes counts its rows as its graph pads them: if all do, each has a graph of that size.
    Returns whether the number has changed.
    """
    tokens = sum(count for _, count in plan.rows)
    if graph_sizes and tokens and tokens == len(plan.rows):
        tokens = graph_sizes[bisect_left(graph_sizes, tokens)]
    before, peers.bound = peers.bound, peers.agree(tokens)
    return peers.bound != before


def may_refuse(worker: Worker) -> bool:
    """Whether a step that has failed on this rank may be refused, and the worker goes on.

    Engines that share the experts, other stages, and ranks that make drafts wait for the step's messages. So do other
    ranks of a stage, but this one can make up for its messages, if `forward` has begun. And the engine must learn of
    the failure: under an external launcher it hears rank 0 alone.
    """
    group = worker.group
    if group.peers or worker.pipeline.stages > 1 or (worker.model.draft and group.size > 1):
        return False
    heard = group.rank == 0 or worker.config.distributed_executor_backend != "external_launcher"
    return group.size == 1 or (worker.running is not None and heard and not worker.one_by_one)


def make_up(worker: Worker, rows: Rows) -> None:
    """Exchange zeros in what is left of a step that has failed on this rank, because the other ranks wait for it.

    All ranks' results of the step are dropped, and all sequences enter anew.
    """
    model, group, shape = worker.model, worker.group, rows.shape
    done, width = len(group.exchanged), -(-model.config.vocab_size // group.size)
    tokens = worker.pieces.padded(shape.tokens) if worker.pieces else shape.tokens  # as the other ranks pad them
    for size, dtype in worker.exchanges[done:]:
        group.all_reduce(torch.zeros(tokens, *size, dtype=dtype, device=worker.device))
    logits = [part.shape[1] for part in worker.gatherer.parts(rows.scoring)[1]] if rows.scoring else []
    logits += [shape.samples] if shape.samples else []
    for count in logits[max(0, done - len(worker.exchanges)) :]:
        group.all_gather(torch.zeros(count, width, dtype=model.dtype, device=worker.device), model.config.vocab_size)
