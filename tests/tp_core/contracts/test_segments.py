"""What an allocator of segments reserves, by the rules of torch's."""

import pytest
from tp_core.jobs import CachingAllocator

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (0, 0),
    ],
)
def test_a_block_takes_a_segment_by_its_size(nbytes, reserved):
    allocator = CachingAllocator()
    allocator.allocate("block", nbytes)
    assert allocator.reserved == allocator.peak == reserved


def test_small_blocks_share_a_segment_in_steps_of_512_bytes():
    allocator = CachingAllocator()
    for number in range(4096):
        allocator.allocate(number, 1)
    assert allocator.reserved == 2 * MIB
    allocator.allocate("one more", 1)
    assert allocator.reserved == 4 * MIB


def test_the_rest_of_a_large_block_is_used_if_it_is_more_than_a_mebibyte():
    allocator = CachingAllocator()
    allocator.allocate("first", 9 * MIB)
    allocator.allocate("second", 9 * MIB)
    allocator.allocate("third", 2 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate("fourth", 2 * MIB)
    assert allocator.reserved == 40 * MIB


def test_freed_neighbors_become_one_block_again():
    allocator = CachingAllocator()
    for name in ("a", "b", "c"):
        allocator.allocate(name, 6 * MIB)
    allocator.free("a")
    allocator.free("c")
    allocator.allocate("between", 9 * MIB)  # no place is so large
    assert allocator.reserved == 40 * MIB
    allocator.free("between")
    allocator.free("b")
    allocator.allocate("whole", 18 * MIB)
    assert allocator.reserved == 40 * MIB


def test_a_stream_does_not_use_what_another_one_has_freed():
    allocator = CachingAllocator()
    allocator.allocate("here", MIB)
    allocator.free("here")
    allocator.allocate("there", MIB, stream=1)
    assert allocator.reserved == 4 * MIB


def test_unused_segments_are_given_back_before_there_is_no_more_memory():
    allocator = CachingAllocator(limit=32 * MIB)
    allocator.allocate("first", 20 * MIB)
    allocator.free("first")
    allocator.allocate("second", 30 * MIB)
    assert allocator.reserved == allocator.peak == 30 * MIB
    allocator.allocate("third", 12 * MIB)
    assert allocator.peak == 42 * MIB  # it does not fit


def test_what_has_no_memory_can_be_freed():
    allocator = CachingAllocator()
    allocator.allocate("empty", 0)
    allocator.free("empty")
    allocator.free("never there")
    assert allocator.reserved == 0
