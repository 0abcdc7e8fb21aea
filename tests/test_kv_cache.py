"""The block manager alone: who owns what, what is found again, what is reused first."""

from __future__ import annotations

import random

import pytest

from kv_cache import AllocStatus, BlockManager, chain


def test_blocks_for_rounds_up():
    manager = BlockManager(4, 16)
    assert [manager.blocks_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_can_allocate_knows_now_later_and_never():
    manager = BlockManager(100, 4, watermark=0.05)
    manager.allocate(50)
    assert manager.can_allocate(45) is AllocStatus.OK
    assert manager.can_allocate(46) is AllocStatus.LATER  # would go below the watermark of 5
    assert manager.can_allocate(46, kept=0) is AllocStatus.OK
    assert manager.can_allocate(101) is AllocStatus.NEVER


def test_chain_covers_everything_before_a_block():
    one, other, same = [], [], []
    chain(one, [1, 2, 3, 4, 5], 2)
    chain(other, [9, 2, 3, 4], 2)
    chain(same, [1, 2], 2)
    chain(same, [1, 2, 3, 4], 2)
    assert len(one) == 2 and all(len(digest) == 16 for digest in one)
    assert one == same
    assert not set(one) & set(other)  # the second blocks hold equal tokens after unequal ones


def test_chain_depends_on_the_salt():
    plain, salted = [], []
    chain(plain, [1, 2], 2)
    chain(salted, [1, 2], 2, "tenant")
    assert plain != salted


def test_freed_blocks_are_found_until_they_are_reused():
    manager, hashes = BlockManager(3, 2), []
    chain(hashes, [1, 2, 3, 4], 2)
    blocks = manager.allocate(2)
    for block, digest in zip(blocks, hashes, strict=True):
        manager.publish(block, digest)
    manager.free(blocks)
    assert manager.lookup(hashes) == blocks and manager.num_free == 3
    taken = manager.allocate(2)  # the unhashed block first, then the tail of the prefix
    assert blocks[0] not in taken and blocks[1] in taken
    assert manager.lookup(hashes) == blocks[:1]
    manager.check_integrity([taken])


def test_least_recently_freed_is_reused_first():
    manager = BlockManager(4, 1)
    blocks = manager.allocate(4)
    for block in blocks:
        manager.publish(block, bytes([block]) * 16)
    for block in (2, 0, 3, 1):
        manager.free([block])
    manager.share([2])
    manager.free([2])  # used again: now the latest
    assert manager.allocate(4) == [0, 3, 1, 2]


def test_an_equal_block_is_published_once():
    manager = BlockManager(2, 1)
    first, second = manager.allocate(2)
    manager.publish(first, b"same")
    manager.publish(second, b"same")
    manager.free([second])
    assert manager.lookup([b"same"]) == [first]
    manager.check_integrity([[first]])


def test_without_prefix_caching_nothing_is_found():
    manager = BlockManager(2, 1, enable_prefix_caching=False)
    manager.publish(manager.allocate(1)[0], b"x")
    assert manager.lookup([b"x"]) == []


def test_reset_prefix_cache_keeps_blocks_in_use():
    manager = BlockManager(2, 1)
    blocks = manager.allocate(1)
    manager.publish(blocks[0], b"x")
    manager.reset_prefix_cache()
    assert manager.lookup([b"x"]) == []
    manager.check_integrity([blocks])


@pytest.mark.parametrize("damage", ["lost reference", "wrong state", "wrong hash"])
def test_check_integrity_can_fail(damage):
    manager = BlockManager(4, 1)
    blocks = manager.allocate(2)
    manager.publish(blocks[0], b"x")
    if damage == "lost reference":
        manager.ref_counts[blocks[0]] += 1
    elif damage == "wrong state":
        manager.idle[blocks[1]] = None
    else:
        manager.block_of[b"x"] = blocks[1]
    with pytest.raises(AssertionError):
        manager.check_integrity([blocks])


def test_random_traffic_keeps_the_books():
    rng = random.Random(0)
    manager, tables, digests = BlockManager(32, 2), [], []
    for step in range(3000):
        if tables and rng.random() < 0.5:
            manager.free(tables.pop(rng.randrange(len(tables))))
        elif tables and rng.random() < 0.3:
            shared = list(rng.choice(tables))
            manager.share(shared)
            tables.append(shared)
        elif (count := rng.randint(1, 5)) <= manager.num_free:
            table = manager.lookup(digests[-2:])
            manager.share(table)
            if count <= manager.num_free:
                fresh = manager.allocate(count)
                digests.append(step.to_bytes(16, "little"))
                manager.publish(fresh[0], digests[-1])
                table = table + fresh
            tables.append(table)
        manager.check_integrity(tables)
