"""Checks that the scheduler's books agree with each other: queues, slots and blocks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sequence import SequenceGroup, Status

if TYPE_CHECKING:
    from admission import Admission
    from kv_cache import BlockSpaceManager
    from scheduler import Scheduler


def check_integrity(scheduler: Scheduler) -> None:
    """Assert that all books agree, by a look at every block and sequence."""
    groups = [group for request in scheduler.requests.values() for group in request.groups]
    check_space(scheduler.space, scheduler.admission, groups)
    check_admission(scheduler.admission, scheduler, groups)
    scheduler.policy.check_integrity(scheduler.requests.values())
    check_running(scheduler)
    check_lanes(scheduler)


def check_space(space: BlockSpaceManager, admission: Admission, groups: list[SequenceGroup]) -> None:
    """The books of all pools agree with the block tables, and with the host rows of states."""
    seqs = [group.seq for group in groups]
    kept = [table for request in admission.samples.holders for table in request.prompt_tables]
    space.device.check_integrity([*kept, *(table for seq in seqs for table in seq.tables)])
    space.host.check_integrity(table for seq in seqs for table in seq.host_tables)
    if space.states:
        space.states.snapshots.check_integrity([])
        space.states.host.check_integrity([[seq.host_state for seq in seqs]])


def check_admission(admission: Admission, scheduler: Scheduler, groups: list[SequenceGroup]) -> None:
    """Each group is in one place, and each slot has one owner."""
    waiting, swapped, aside = map(list, (admission.waiting, admission.swapped, admission.aside))
    requests, running = scheduler.requests.values(), scheduler.running
    held = [group for request in requests for group in request.held]
    alone = admission.trial.alone
    assert all(alone and group.request not in alone for group in aside)
    assert not alone or all(group.request in alone for group in (*waiting, *swapped, *running))
    assert admission.trial.suspects.keys() <= set(requests)
    places = [id(group) for group in (*waiting, *swapped, *aside, *held, *running)]
    assert sorted(places) == sorted(map(id, groups))
    slots = [group.seq.slot for group in running]
    assert sorted(slots + admission.free_slots) == list(range(admission.config.max_num_seqs))
    for group in (*waiting, *swapped, *aside, *held):
        assert group.seq.slot < 0 and not group.seq.tables
    for group in held:
        assert group.status is Status.HELD and (leader := group.request.leader)
        assert leader.awaited or leader.status in (Status.WAITING, Status.ASIDE)
    for group in swapped:
        columns = admission.space.host.blocks_for(group.seq.num_computed)
        assert [len(table) for table in group.seq.host_tables] == [columns] * len(admission.space.windows)
    adapters = admission.adapters
    with_adapter = {group: group.request.adapter for group in running if group.request.adapter}
    assert adapters.holders == with_adapter and adapters.users == Counter(with_adapter.values())
    assert adapters.users.keys() <= adapters.slots.keys() and all(adapters.users.values())
    assert sorted([*adapters.free, *adapters.slots.values()]) == list(range(adapters.count))


def check_running(scheduler: Scheduler) -> None:
    """Running groups are in order, and have blocks for what they have computed."""
    keys, size = [group.key for group in scheduler.running], scheduler.config.block_size
    assert keys == sorted(keys)
    for group in scheduler.running:
        assert group.status is Status.RUNNING
        seq = group.seq
        assert not seq.host_tables and seq.num_computed < seq.num_known <= group.limit
        assert len(seq.tables) == len(scheduler.space.windows)
        assert all(len(table) * size >= seq.num_computed for table in seq.tables)
        assert group.lane and (group in group.lane.others) == (seq.batch is None)


def check_lanes(scheduler: Scheduler) -> None:
    """The batches of decodes agree with their sequences."""
    for lane in scheduler.lanes:
        seqs, rows = lane.decodes.current.seqs, lane.decodes.current.rows
        assert [seq.row for seq in seqs] == list(range(len(seqs)))
        assert all(seq.batch is lane.decodes and seq.group.lane is lane and seq.slot >= 0 for seq in seqs)
        assert rows == [(seq.slot, 1) for seq in seqs]
