import threading

import pytest

from headrace.storage.file.read_ahead import read_ahead

PATIENCE = 30


def numbers(start, stop):
    return lambda: (number for number in range(start, stop))


def test_items_come_in_the_order_of_their_parts():
    parts = [numbers(10 * part, 10 * part + part) for part in range(20)]
    wanted = [number for part in parts for number in part()]
    assert list(read_ahead(parts, lambda _: 8, threads=3, limit=24)) == wanted


def test_no_parts_give_no_items():
    assert list(read_ahead([], lambda _: 1)) == []


def test_parts_are_worked_on_at_once():
    both = threading.Barrier(2, timeout=PATIENCE)

    def part():
        both.wait()
        yield 1

    assert list(read_ahead([part, part], lambda _: 1, threads=2)) == [1, 1]


def test_a_part_waits_where_its_items_reach_the_limit():
    made = []
    later_is_full = threading.Event()

    def slow():
        assert later_is_full.wait(PATIENCE)
        yield "first"

    def later():
        for number in range(100):
            made.append(number)
            if number == 3:
                later_is_full.set()
            yield number

    items = read_ahead([slow, later], lambda _: 10, threads=2, limit=30)
    assert next(items) == "first"
    assert made == [0, 1, 2, 3]  # the last one in hand
    assert list(items) == list(range(100))


def test_an_error_comes_after_the_items_before_it():
    def broken():
        yield 1
        raise ValueError("broken")

    items = read_ahead([numbers(0, 1), broken, numbers(5, 9)], lambda _: 1, threads=2)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ValueError, match="broken"):
        next(items)


def test_who_stops_early_ends_all_parts_and_waits_for_them():
    ended = []

    def endless(name):
        def part():
            try:
                while True:
                    yield name
            finally:
                ended.append(name)

        return part

    items = read_ahead([endless("a"), endless("b"), endless("c")], lambda _: 1, threads=2, limit=4)
    assert next(items) == "a"
    items.close()
    assert ended.count("a") == 1
    assert "c" not in ended
