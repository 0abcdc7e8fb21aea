"""Adds the phases of options to a step, at their places among those of `Worker`, and nothing without them.

Each function below is one option. It says where its phases go, and what they do.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from batch_state import to_device, to_host
from device.exchanges import add_lockstep
from device.images import add_vision
from device.launched import run_one_by_one
from layers import DraftRows
from parallel import add_stages

if TYPE_CHECKING:
    from device.kv_disk import KVDisk
    from lora.stacks import AdapterPool
    from models.pooled import Pooler
    from observe.sanitizer import KVSanitizer
    from worker import Phase, StepRun, Worker


def add_phases(worker: Worker) -> None:
    """Add the phases of all options that this worker has."""
    if worker.adapters:
        add_adapters(worker, worker.adapters)
    if worker.config.num_drafts:
        add_drafts(worker)
    if worker.sanitizer:
        add_sanitizer(worker, worker.sanitizer)
    if worker.disk:
        add_disk(worker, worker.disk)
    if worker.group.experts:
        add_lockstep(worker)
    if worker.pipeline.stages > 1:
        add_stages(worker)
    if worker.model.config.token_types > 1 and worker.pipeline.first:
        add_token_types(worker)
    if worker.pooler and worker.pipeline.last:
        add_pooling(worker, worker.pooler)
    if worker.model.config.vision:
        add_vision(worker)
    if worker.one_by_one:
        worker.run_plan = partial(run_one_by_one, worker.run_rows, bool(worker.pooler))


def put(phases: list[Phase], place: Phase, phase: Phase, after: int = 1) -> None:
    """Insert a phase after another one, or with `after` 0 before it."""
    phases.insert(phases.index(place) + after, phase)


def add_adapters(w: Worker, adapters: AdapterPool) -> None:
    """Adapters come to the device, and change the products of the model and of its head."""

    def move(run: StepRun) -> None:
        if run.plan.adapters:
            adapters.move(run.plan.adapters)

    def choose_graph(run: StepRun) -> None:  # no graph has the products with changes
        if adapters.slots_with_changes(w.state.adapted, run.plan.rows):
            run.graph = None

    def begin(run: StepRun) -> None:
        of_slots = w.state.adapters if run.shape.adapted else None
        changed = adapters.slots_with_changes(w.state.adapted, run.plan.rows)
        adapters.begin(of_slots, run.batch.slots, run.batch.starts, run.shape, changed)

    w.making_logits = lambda slots: adapters.making_logits(slots.int())
    put(w.plan_phases, w.enter, move)
    put(w.row_phases, w.enter_rows, choose_graph)
    put(w.forward_phases, w.prepare_batch, begin)


def add_drafts(w: Worker) -> None:
    """Rows have drafts, which the step verifies, and afterwards it makes some for the next one."""

    def count(run: StepRun) -> None:  # on a CPU, where nobody waits for a look at tensors: only the drafts that exist
        if run.plan.drafts:
            run.plan = w.state.with_drafts(run.plan)

    def choose_graph(run: StepRun) -> None:  # making drafts is a part of some graphs
        if not run.plan.propose:
            return
        shape = run.shape._replace(proposes=True)
        if not run.graph:
            run.shape = shape
        elif shape in w.graphs:  # a large step has no such graph, and makes none
            run.shape, run.graph = shape, w.graphs[shape]

    def lay_out(run: StepRun) -> None:
        batch, shape = run.batch, run.shape
        if not shape.drafted:
            return
        rows, most = shape.drafted, 1 + w.state.most_drafts
        decodes = rows, batch.slots[:rows], batch.seq_lens[:rows]
        if shape.queries == 1:  # each token goes through attention_decode by itself
            decodes = rows, w.state.decode_slots[: shape.num_decodes], batch.positions[: shape.num_decodes] + 1
        batch.drafts = DraftRows(decodes, shape.queries, most)
        if w.model.state_size:
            short = torch.arange(shape.rows, device=w.device) < rows
            batch.drafts.seen = batch.starts.diff().masked_fill(short, 0)

    def verify(run: StepRun) -> None:
        if run.shape.drafted:
            run.sampling = w.state.sampling[: run.shape.samples]
            run.drafts = w.state.drafts_of(run.sampling, w.state.ahead[: run.shape.samples])

    def settle(run: StepRun) -> None:  # recurrent states see the drafts that were taken, now that these are counted
        batch = run.batch
        if not batch.drafts or not batch.drafts.later:
            return
        computed = w.state.num_computed[batch.slots.clamp(min=0)]
        taken = computed - batch.seq_lens + batch.starts.diff()
        for see in batch.drafts.later:
            see(taken)
        if w.sanitizer:
            w.sanitizer.settle(batch.slots, computed)

    def propose(run: StepRun) -> None:
        assert w.proposer
        shape, count = run.shape, run.plan.propose
        if shape.proposes and (w.device != "cpu" or not run.plan.rows):  # kernels are compiled for that
            count = w.config.num_drafts
        if count or shape.num_decodes < shape.tokens:
            w.mark("propose")
            w.proposer.propose(w.state, run.batch, run.hidden, w.pool, count)

    def report(run: StepRun) -> None:
        launched, plan = run.launched, run.plan
        launched.padded = w.device != "cpu"
        if plan.propose and plan.masks:  # grammars look at these drafts
            launched.masked = [slot for slot, _ in plan.masks]
            masked = to_device(np.array(launched.masked), w.device)
            launched.drafts = to_host(w.state.drafts_of(masked, w.state.num_drafts[masked]))

    if w.device == "cpu":
        put(w.row_phases, w.enter_rows, count, 0)
    put(w.row_phases, w.enter_rows, choose_graph)
    put(w.row_phases, w.report, report)
    put(w.forward_phases, w.prepare_batch, lay_out)
    put(w.forward_phases, w.select, verify)
    w.forward_phases += [settle, propose]


def add_sanitizer(w: Worker, sanitizer: KVSanitizer) -> None:
    """`KVSanitizer` checks what a step reads."""

    def follow(run: StepRun) -> None:
        w.state.apply(w.ops)
        sanitizer.follow(run.plan, [adapter.digest for adapter in w.adapters.held] if w.adapters else ())

    def check(run: StepRun) -> None:
        batch = run.batch
        sanitizer.check(run.plan, batch.input_ids, batch.positions, batch.slot_mapping, batch.seq_lens)

    put(w.plan_phases, w.move_blocks, follow)
    put(w.forward_phases, w.prepare_batch, check)
    put(w.forward_phases, w.run_model, lambda run: sanitizer.check_hidden(run.plan, run.hidden))


def add_disk(w: Worker, disk: KVDisk) -> None:
    """Blocks of the host are written to disk and read from there by threads, see `KVDisk`."""

    def begin(run: StepRun) -> None:  # once what this plan and earlier ones move is in the device's queue
        event = torch.cuda.Event() if w.device == "cuda" and (run.plan.disk_out or run.plan.disk_in) else None
        if event:
            event.record()
        disk.begin(run.plan, event)

    put(w.plan_phases, w.move_blocks, lambda run: disk.give_up(run.plan.disk_first), 0)
    w.plan_phases.append(begin)


def add_token_types(w: Worker) -> None:
    """The model is told which tokens are of a pair's second text."""

    def tell(run: StepRun) -> None:
        starts = {row.slot: row.pooling.second_text for row in run.plan.new if row.pooling}
        if {*starts.values()} - {None}:
            rows = ((count, starts.get(slot)) for slot, count in run.plan.rows)
            types = [np.arange(count) >= (count if start is None else start) for count, start in rows]
            run.batch.token_types = to_device(np.concatenate(types).astype(np.int32), w.device)

    put(w.forward_phases, w.prepare_batch, tell)


def add_pooling(w: Worker, pooler: Pooler) -> None:
    """Prompts are pooled to vectors, and nothing is sampled."""

    def pool(run: StepRun) -> None:
        w.mark("pool")
        run.result = pooler(run.hidden, run.batch.starts, w.model.score)

    def report(run: StepRun) -> None:
        wanted = {row.slot: row.pooling for row in run.plan.new}  # each prompt enters and is done in the same step
        params, counts = [wanted[slot] for slot, _ in run.plan.rows], [count for _, count in run.plan.rows]
        by_token = pooler.of_tokens(run.hidden, counts, params, w.model.score)
        run.launched.finish = partial(pooler.finish, params, by_token)

    w.forward_phases[w.forward_phases.index(w.score) :] = [pool]
    put(w.row_phases, w.report, report)
