import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.storage.commit.space import EXTENT, MOST_GROWTH, REACH, FreeSpace


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


def test_pages_that_lie_together_take_the_shortest_stretch_and_then_grow_the_file():
    used = np.setdiff1d(np.arange(1000), [3, 100, 101, 110, 500, 501, 503, 900])
    space = FreeSpace(1000, used)
    start = space.find_stretch(3)
    assert start == 500
    assert space.take_onward(start, 2).tolist() == [500, 501]
    assert space.take_onward(502, 4).tolist() == [503, 900, 1000, 1001]
    assert space.free.tolist() == [3, 100, 101, 110]


def test_the_file_grows_where_free_pages_are_few_and_far_between_but_not_beyond_its_measure():
    space = FreeSpace(1000, np.setdiff1d(np.arange(1000), np.arange(0, 1000, 10)))
    assert space.find_stretch(100) == 1000
    assert space.find_stretch(1251) == 0
    half = FreeSpace(1000, np.arange(0, 1000, 2))
    assert half.find_stretch(200) == 1


def test_pages_held_for_readers_do_not_count_as_in_use():
    space = FreeSpace(1000, np.setdiff1d(np.arange(1000), np.arange(0, 1000, 10)))
    space.hold(5, np.setdiff1d(np.arange(400), np.arange(0, 400, 10)))
    assert space.find_stretch(100) == 1000
    assert space.find_stretch(400) == 0


@given(used=st.sets(st.integers(0, 59)), length=st.integers(1, 60), count=st.integers(1, 40))
def test_the_stretch_is_the_shortest_that_has_the_pages(used, length, count):
    """Against all stretches in turn."""
    used = {page for page in used if page < length}
    space = FreeSpace(length, np.array(sorted(used), np.int64))
    fits = [
        (stop - start, start)
        for start in range(length)
        for stop in range(start + 1, length + 1)
        if len(set(range(start, stop)) - used) == count
    ]
    sparse = not fits or min(fits)[0] > 2 * count
    grows = sparse and length + count <= MOST_GROWTH * len(used)
    assert space.find_stretch(count) == (length if grows else min(fits)[1] if fits else 0)


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
