"""Checks for tests that the scheduler's books agree with each other: queues, slots and blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

from admission import Admission
from kv_cache import BlockManager
from scheduler import Scheduler
from scheduling.disk import DiskSpaceManager
from scheduling.fair import OUTPUT_WEIGHT, UNPLACED, Fair
from sequence import Sequence, Status


def check_integrity(scheduler: Scheduler) -> None:
    """Assert that all books agree, by a look at every block and sequence."""
    seqs = [seq for group in scheduler.requests.values() for seq in group.seqs]
    check_space(scheduler.space, scheduler.admission, seqs)
    check_admission(scheduler.admission, scheduler, seqs)
    if isinstance(scheduler.policy, Fair):
        check_fair(scheduler.policy, scheduler)
    check_running(scheduler)
    check_lanes(scheduler)


def check_space(space: DiskSpaceManager, admission: Admission, seqs: list[Sequence]) -> None:
    """The books of all pools agree with the block tables, and with the host rows of states."""
    kept = [table for group in admission.samples.holders for table in group.prompt_tables]
    check_pool(space.device, [*kept, *(table for seq in seqs for table in seq.tables)])
    check_pool(space.host, [*(table for seq in seqs for table in seq.host_tables), *disk_tables(space)])
    check_disk(space, admission)
    if space.states:
        check_pool(space.states.snapshots, [])
        check_pool(space.states.host, [[seq.host_state for seq in seqs]])


def disk_tables(space: DiskSpaceManager) -> list[list[int]]:
    """The host blocks that are pinned for moves to and from the disk."""
    return [[move.block for move in space.moves.values()], *(blocks for _, blocks, _ in space.held.values())]


def check_disk(space: DiskSpaceManager, admission: Admission) -> None:
    """What is on its way to and from the disk agrees with who waits for it."""
    reads = {ticket: move for ticket, move in space.moves.items() if move.reads}
    assert space.reading == {move.key: ticket for ticket, move in reads.items()}
    assert all(move.ranks for move in space.moves.values())
    assert all(ticket >= space.first for ticket in space.moves)
    assert {ticket for ticket, _, _ in space.to_read} <= reads.keys()
    held = {seq for seq in space.held if not seq.finish_reason}
    assert set(admission.reading) == held | {seq for seq in space.ready if not seq.finish_reason}
    for tickets, *_ in space.held.values():
        assert tickets and tickets <= reads.keys()
    assert space.looking is None
    for block, key in space.arrived.items():
        assert space.host.hashes[block] == key or key not in space.host.block_of or space.host.block_of[key] != block


def check_pool(manager: BlockManager, tables: Iterable[Items[int]]) -> None:
    """The books of a pool agree with `tables`, the block tables of all that own blocks."""
    owners = Counter(block for table in tables for block in table if block >= 0)
    for block, count in enumerate(manager.ref_counts):
        assert count == owners[block], f"block {block} has {count} references but stands in {owners[block]} tables"
        assert (count == 0) == (block in manager.idle), f"block {block} has {count} references and the wrong state"
    assert len(manager.idle) + sum(count > 0 for count in manager.ref_counts) == manager.num_blocks
    for digest, block in manager.block_of.items():
        assert manager.hashes[block] == digest, f"block {block} is found by a hash that is not its own"
    assert len(manager.block_of) == sum(digest is not None for digest in manager.hashes)
    assert manager.findable == bytes(digest is not None for digest in manager.hashes)


def check_fair(policy: Fair, scheduler: Scheduler) -> None:
    """What the policy keeps of clients agrees with the requests that have yet to finish."""
    requests = scheduler.requests.values()
    assert policy.charged.keys() <= {seq for group in requests for seq in group.seqs}
    assert policy.num_active == len({group.client for group in requests})
    for name, client in policy.clients.items():
        seqs = [seq for group in requests if group.client == name for seq in group.seqs]
        charges = [policy.charged[seq] for seq in seqs if seq in policy.charged]
        charged = sum(prompt + OUTPUT_WEIGHT * output for prompt, output in charges)
        assert client.outstanding == charged and client.counter >= charged
        for backlog in client.backlogs.values():
            assert {seq.status for seq in backlog} == {policy.status}
            assert [seq.key[0] < UNPLACED for seq in backlog] == [True] + [False] * (len(backlog) - 1)


def check_admission(admission: Admission, scheduler: Scheduler, seqs: list[Sequence]) -> None:
    """Each sequence is in one place, and each slot has one owner."""
    waiting, swapped, deferred = map(list, (admission.waiting, admission.swapped, admission.deferred))
    deferred_or_reading = [*deferred, *admission.reading]
    requests, running = scheduler.requests.values(), scheduler.running
    held = [seq for group in requests for seq in group.held]
    alone = admission.isolation.isolated
    assert all(alone and seq.group not in alone for seq in deferred)
    assert not alone or all(seq.group in alone for seq in (*waiting, *swapped, *running))
    assert admission.isolation.suspects.keys() <= set(requests)
    places = [id(seq) for seq in (*waiting, *swapped, *deferred_or_reading, *held, *running)]
    assert sorted(places) == sorted(map(id, seqs))
    slots = [seq.slot for seq in running]
    assert sorted(slots + admission.free_slots) == list(range(admission.config.max_num_seqs))
    for seq in (*waiting, *swapped, *deferred_or_reading, *held):
        assert seq.slot < 0 and not seq.tables
    for seq in held:
        assert seq.status is Status.HELD and (leader := seq.group.leader)
        assert leader.status not in (Status.HELD, Status.FINISHED)
    for seq in swapped:
        columns = admission.space.host.blocks_for(seq.num_computed)
        assert [len(table) for table in seq.host_tables] == [columns] * len(admission.space.windows)
    adapters = admission.adapters
    with_adapter = {seq: seq.group.adapter for seq in running if seq.group.adapter}
    assert adapters.holders == with_adapter and adapters.users == Counter(with_adapter.values())
    assert adapters.users.keys() <= adapters.slots.keys() and all(adapters.users.values())
    assert sorted([*adapters.free, *adapters.slots.values()]) == list(range(adapters.count))


def check_running(scheduler: Scheduler) -> None:
    """Running sequences are in order, and have blocks for what they have computed."""
    keys, size = [seq.key for seq in scheduler.running], scheduler.config.block_size
    assert keys == sorted(keys)
    for seq in scheduler.running:
        assert seq.status is Status.RUNNING
        assert not seq.host_tables and seq.num_computed < seq.num_known <= seq.limit
        assert len(seq.tables) == len(scheduler.space.windows)
        assert all(len(table) * size >= seq.num_computed for table in seq.tables)
        assert seq.lane and (seq in seq.lane.others) == (seq.batch is None)


def check_lanes(scheduler: Scheduler) -> None:
    """The batches of decodes agree with their sequences."""
    for lane in scheduler.lanes.all:
        seqs, rows = lane.decodes.current.seqs, lane.decodes.current.rows
        assert [seq.row for seq in seqs] == list(range(len(seqs)))
        assert all(seq.batch is lane.decodes and seq.lane is lane and seq.slot >= 0 for seq in seqs)
        assert rows == [(seq.slot, 1) for seq in seqs]
