"""Slots are as narrow as the rows of the pages allow, and there are enough of them or none."""

import numpy as np
import pytest

from headrace.storage.probe.row_hash import SlotForm

ROWS = 100


def facts(*, keys, columns, bitmap=0):
    """What is known of some pages: least keys, and of each column the bases and the bytes."""
    pages = np.zeros((len(keys), 3 + 2 * len(columns)), dtype=np.uint64)
    pages[:, 0] = keys
    pages[:, 2] = (ROWS << 32) | (2 << 16)
    for at, (bases, nbytes) in enumerate(columns):
        pages[:, 3 + 2 * at] = np.array(bases, dtype=np.int64).view(np.uint64)
        pages[:, 4 + 2 * at] = (nbytes << 48) | (bitmap << 32)
    return pages


@pytest.mark.parametrize(
    ("bases", "nbytes", "width"),
    [([5, 5], 0, 0), ([0, 255], 1, 2), ([-3, 250], 1, 2), ([-(2**62), 2**62], 1, 8), ([7, 9], 8, 8)],
)
def test_words_take_what_is_between_the_least_and_the_greatest(bases, nbytes, width):
    form = SlotForm.of(facts(keys=[10, 900], columns=[(bases, nbytes)]), np.uint64(1000))
    assert form.widths.tolist() == [width]
    assert (form.low, form.key_nbytes, form.nulls_nbytes) == (10, 2, 0)
    assert form.stride == 2 + width
    below = (bases[0] - int(form.bases[0])) % 2**64
    above = 256**width - 1 - (below + bases[1] - bases[0] + 256**nbytes - 1)
    if width < 8:  # else all words fit
        assert above - 1 <= below <= above, "what is left is divided between smaller and greater words"


@pytest.mark.parametrize(
    ("other", "greatest", "holds"),
    [
        ({}, 1000, True),
        ({"columns": [([-200], 1)]}, 1000, True),  # within two bytes around 100 to 1254
        ({"columns": [([-40_000], 1)]}, 1000, False),
        ({"columns": [([33_000], 2)]}, 1000, False),
        ({"columns": [([100], 3)]}, 1000, False),
        ({"columns": [([100], 8)]}, 1000, False),
        ({"bitmap": 40}, 1000, False),
        ({"keys": [9]}, 1000, False),
        ({}, 1001, False),
    ],
)
def test_slots_hold_other_pages_whose_rows_are_as_narrow(other, greatest, holds):
    form = SlotForm.of(facts(keys=[10, 900], columns=[([100, 999], 1)]), np.uint64(1000))
    page = facts(**{"keys": [50], "columns": [([100], 1)], **other})
    assert form.holds(page, np.uint64(greatest)) == holds


def test_a_word_of_eight_bytes_holds_any_value():
    form = SlotForm.of(facts(keys=[0], columns=[([7], 8)]), np.uint64(9))
    for base in (-(2**63), 0, 2**63 - 1):
        assert form.holds(facts(keys=[1], columns=[([base], 8)]), np.uint64(9))


def test_slots_with_nulls_hold_pages_with_and_without_them():
    form = SlotForm.of(facts(keys=[0], columns=[([0], 1)], bitmap=40), np.uint64(9))
    for bitmap in (0, 40):
        assert form.holds(facts(keys=[1], columns=[([0], 1)], bitmap=bitmap), np.uint64(9))


def test_nulls_are_marked_where_a_page_has_any():
    form = SlotForm.of(facts(keys=[0], columns=[([0], 1)] * 9, bitmap=40), np.uint64(9))
    assert (form.nulls_nbytes, form.stride) == (2, 1 + 2 + 9)


def test_keys_and_columns_that_are_too_many_have_no_form():
    assert SlotForm.of(facts(keys=[0], columns=[([0], 1)]), np.uint64(2**64 - 1)) is None
    assert SlotForm.of(facts(keys=[1], columns=[([0], 1)]), np.uint64(2**64 - 1)).key_nbytes == 8
    assert SlotForm.of(facts(keys=[0], columns=[([0], 1)] * 65), np.uint64(9)) is None


def test_slots_keep_within_the_memory():
    form = SlotForm.of(facts(keys=[0], columns=[([0], 4)]), np.uint64(2**31))
    rows = 1_000_000
    assert form.slots(rows, 1 << 30, ascending=False) == 2 * rows
    for most in range(form.nbytes(rows), form.nbytes(3 * rows), 999_983):
        for ascending in (True, False):
            slots = form.slots(rows, most, ascending=ascending)
            assert slots == 0 or (slots > 1.3 * rows and form.nbytes(slots) <= most)
    assert form.slots(rows, form.nbytes(rows), ascending=True) == 0


def test_slots_in_key_order_are_as_few_as_the_densest_page_allows():
    columns = [([0] * 3, 1)]
    even = SlotForm.of(facts(keys=[0, 1000, 2000], columns=columns), np.uint64(2999))
    assert even.slots(300, 1 << 20, ascending=True) == 400
    uneven = SlotForm.of(facts(keys=[0, 1000, 1900], columns=columns), np.uint64(4299))
    assert uneven.slots(300, 1 << 20, ascending=True) == np.ceil(uneven.even_slots) == 526
    assert (
        SlotForm.of(facts(keys=[0, 1, 2], columns=columns), np.uint64(9999)).slots(300, 1 << 20, ascending=True) == 600
    )


@pytest.mark.parametrize(
    ("lows", "greatest", "least"),
    [
        ([0, 100, 200], 299, 330),  # as many keys as rows
        ([0, 1000, 2000], 2999, 330),  # a tenth of the keys are there
        ([0, 100, 1100], 2099, 2310),  # the first page's keys are as close as the slots
        ([0], 2**32, None),
    ],
)
def test_slots_ascend_with_keys_where_each_page_has_enough(lows, greatest, least):
    form = SlotForm.of(facts(keys=lows, columns=[([0] * len(lows), 1)]), np.uint64(greatest))
    assert form.ascends(10**12) == (least is not None)
    if least is not None:
        assert form.ascends(least + 1)
        assert not form.ascends(least - 1)
