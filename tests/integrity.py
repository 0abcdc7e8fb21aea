"""Checks for tests that the scheduler's books agree with each other: queues, slots and blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from admission import Admission
from kv_cache import BlockManager, BlockSpaceManager
from scheduler import Scheduler
from scheduling.fair import OUTPUT_WEIGHT, UNPLACED, Fair
from sequence import SequenceGroup, Status


def check_integrity(scheduler: Scheduler) -> None:
    """Assert that all books agree, by a look at every block and sequence."""
    groups = [group for request in scheduler.requests.values() for group in request.groups]
    check_space(scheduler.space, scheduler.admission, groups)
    check_admission(scheduler.admission, scheduler, groups)
    if isinstance(scheduler.policy, Fair):
        check_fair(scheduler.policy, scheduler)
    check_running(scheduler)
    check_lanes(scheduler)


def check_space(space: BlockSpaceManager, admission: Admission, groups: list[SequenceGroup]) -> None:
    """The books of all pools agree with the block tables, and with the host rows of states."""
    seqs = [group.seq for group in groups]
    kept = [table for request in admission.samples.holders for table in request.prompt_tables]
    check_pool(space.device, [*kept, *(table for seq in seqs for table in seq.tables)])
    check_pool(space.host, (table for seq in seqs for table in seq.host_tables))
    if space.states:
        check_pool(space.states.snapshots, [])
        check_pool(space.states.host, [[seq.host_state for seq in seqs]])


def check_pool(manager: BlockManager, tables: Iterable[Sequence[int]]) -> None:
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
    assert policy.num_active == len({request.client for request in requests})
    for name, client in policy.clients.items():
        groups = [group for request in requests if request.client == name for group in request.groups]
        charged = sum(group.charged_prompt + OUTPUT_WEIGHT * group.charged_output for group in groups)
        assert client.outstanding == charged and client.settled >= 0
        for backlog in client.backlogs.values():
            assert {group.status for group in backlog} == {policy.status}
            assert [group.key[0] < UNPLACED for group in backlog] == [True] + [False] * (len(backlog) - 1)


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
