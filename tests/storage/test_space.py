import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from storage.space import EXTENT, REACH, FreeSpace


def test_a_page_goes_to_the_nearest_free_one():
    space = FreeSpace(1000, np.setdiff1d(np.arange(1000), [100, 140, 500]))
    assert space.take(np.array([115, 116])).tolist() == [100, 140]
    assert space.free.tolist() == [500]


def test_what_finds_no_room_nearby_grows_the_file_together():
    space = FreeSpace(1000, np.setdiff1d(np.arange(1000), [0]))
    assert space.take(np.array([500, 600, 3, 700])).tolist() == [1000, 1001, 0, 1002]
    assert space.pages == 1003


def test_a_free_extent_is_used_before_the_file_grows_and_to_its_end():
    used = np.setdiff1d(np.arange(2000), np.arange(3 * EXTENT, 4 * EXTENT))
    space = FreeSpace(2000, used)
    far = 3 * EXTENT + 5 * REACH
    assert space.take(np.array([far])).tolist() == [3 * EXTENT]
    assert space.take(np.array([far, far + 300])).tolist() == [3 * EXTENT + 1, 3 * EXTENT + 2]
    rest = space.take(np.full(EXTENT, far))
    assert rest.tolist() == [*range(3 * EXTENT + 3, 4 * EXTENT), 2000, 2001, 2002]


def test_pages_are_held_until_no_reader_is_older():
    space = FreeSpace(10, np.arange(10))
    space.hold(5, np.array([3]))
    space.hold(6, np.array([4]))
    assert space.held == 2
    space.reclaim(4)
    assert space.free.tolist() == []
    space.reclaim(5)
    assert space.free.tolist() == [3]
    space.reclaim(9)
    assert space.free.tolist() == [3, 4]


def test_a_map_made_beside_older_readers_holds_all_back():
    space = FreeSpace(10, np.arange(7))
    space.hold_free(8)
    assert space.take(np.array([8])).tolist() == [10]
    space.reclaim(8)
    assert space.free.tolist() == [7, 8, 9]


def test_the_end_is_after_the_last_page_in_use():
    space = FreeSpace(10, np.array([0, 1, 6]))
    assert space.end == 7
    space.give(np.array([6]))
    assert space.end == 2
    assert FreeSpace(5, np.empty(0, np.int64)).end == 0


@given(
    used=st.sets(st.integers(0, 299)),
    hints=st.lists(st.lists(st.integers(0, 400), max_size=90), max_size=4),
)
def test_no_page_is_given_twice(used, hints):
    space = FreeSpace(300, np.array(sorted(used), np.int64))
    taken = [int(page) for part in hints for page in space.take(np.array(part, np.int64))]
    assert len(set(taken)) == len(taken)
    assert not set(taken) & used
    space.give(np.array(taken, np.int64))
    assert set(space.free.tolist()) == set(range(space.pages)) - used
