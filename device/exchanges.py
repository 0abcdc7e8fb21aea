"""Messages of a step, for which other ranks and engines wait: their sizes, and what if it fails on one rank."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import torch

from batch_state import Rows

if TYPE_CHECKING:
    from worker import StepRun, Worker


def add_lockstep(w: Worker) -> None:
    """Engines that share the experts agree on the tokens of a step's messages: the most that one of them has.

    An engine that only decodes counts its rows as its graph pads them: if all do, each has a graph of that size.
    """

    def agree(run: StepRun) -> None:
        if not (peers := w.group.peers):
            return
        rows, sizes = run.plan.rows, w.graph_sizes
        tokens = sum(count for _, count in rows)
        if sizes and tokens and tokens == len(rows):
            tokens = sizes[bisect_left(sizes, tokens)]
        before, peers.bound = peers.bound, peers.agree(tokens)
        if peers.bound != before:
            w.rows = None  # they may have been padded to another number
        if peers.bound and not rows:
            w.model.serve()

    def check_graph(run: StepRun) -> None:
        if w.group.peers and w.group.peers.bound != run.shape.rows:
            run.graph = None

    w.plan_phases.append(agree)
    w.row_phases.insert(w.row_phases.index(w.enter_rows) + 1, check_graph)


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
    adapters = worker.adapters
    has_changes = adapters and adapters.slots_with_changes(worker.state.adapted, rows.planned)
    # The other ranks pad a step that runs in pieces, which steps with changes or images do not.
    in_pieces = worker.pieces and not (has_changes or rows.eager)
    tokens = worker.pieces.padded(shape.tokens) if worker.pieces and in_pieces else shape.tokens
    for size, dtype in worker.exchanges[done:]:
        group.all_reduce(torch.zeros(tokens, *size, dtype=dtype, device=worker.device))
    logits = [part.shape[1] for part in worker.gatherer.parts(rows.scoring)[1]] if rows.scoring else []
    logits += [shape.samples] if shape.samples else []
    for count in logits[max(0, done - len(worker.exchanges)) :]:
        group.all_gather(torch.zeros(count, width, dtype=model.dtype, device=worker.device), model.config.vocab_size)
