import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.storage.errors import InputError
from headrace.storage.read.plan import plan_cost, plan_reads, plan_reads_greedily


def papers_program(pages, seek, transfer, max_scan):
    """Cost by the dynamic program of the paper, section IV-D: O(n * max_scan)."""
    best = [0.0] * (len(pages) + 1)
    for j in range(len(pages) - 1, -1, -1):
        best[j] = math.inf
        for k in range(j, len(pages)):
            length = pages[k] - pages[j] + 1
            if length > max_scan:
                break
            best[j] = min(best[j], seek + transfer * length + best[k + 1])
    return best[0]


def seegers_greedy(pages, seek, transfer, max_scan):
    """Cost by the greedy plan of Seeger et al.: the longest read without a gap that costs more than a seek."""
    cost, j = 0.0, 0
    while j < len(pages):
        k = j
        while (
            k + 1 < len(pages)
            and pages[k + 1] - pages[j] + 1 <= max_scan
            and transfer * (pages[k + 1] - pages[k] - 1) <= seek
        ):
            k += 1
        cost += seek + transfer * (pages[k] - pages[j] + 1)
        j = k + 1
    return cost


page_lists = st.lists(st.integers(1, 30), max_size=80).map(
    lambda gaps: np.cumsum([3, *gaps], dtype=np.int64)
) | st.just(np.empty(0, np.int64))
costs = st.sampled_from([0.0, 0.3, 1.0, 2.5, 7.0, 40.0, 1e4])


@given(pages=page_lists, seek=costs, transfer=costs, max_scan=st.integers(1, 60))
@example(pages=np.array([0, 3, 4, 7], np.int64), seek=10.0, transfer=1.0, max_scan=5)
def test_no_plan_is_cheaper(pages, seek, transfer, max_scan):
    cost = plan_cost(plan_reads(pages, seek, transfer, max_scan), seek, transfer)
    assert cost == pytest.approx(papers_program(pages.tolist(), seek, transfer, max_scan))
    greedy = plan_cost(plan_reads_greedily(pages, seek, transfer, max_scan), seek, transfer)
    assert greedy == pytest.approx(seegers_greedy(pages.tolist(), seek, transfer, max_scan))
    assert cost <= greedy * (1 + 1e-12)


@pytest.mark.parametrize("planner", [plan_reads, plan_reads_greedily])
@given(pages=page_lists, seek=costs, transfer=costs, max_scan=st.integers(1, 60))
def test_reads_hold_every_page_once_and_nothing_needless(planner, pages, seek, transfer, max_scan):
    plan = planner(pages, seek, transfer, max_scan)
    assert plan.pages_wanted == len(pages)
    assert (np.diff(plan.first) > 0).all()
    assert (plan.start == pages[plan.first[:-1]]).all()
    assert (plan.start + plan.length - 1 == pages[plan.first[1:] - 1]).all()
    assert (plan.length <= max_scan).all()
    assert (plan.start[1:] > plan.start[:-1] + plan.length[:-1] - 1).all()


def test_greedy_is_not_always_optimal():
    pages = [0, 2, 3, 4, 5]
    plan = plan_reads(np.array(pages, np.int64), 3.0, 1.0, 4)
    assert plan.start.tolist() == [0, 2]
    assert seegers_greedy(pages, 3.0, 1.0, 4) > plan_cost(plan, 3.0, 1.0)


def test_a_scan_of_everything_is_cut_at_max_scan():
    plan = plan_reads(np.arange(10, 1010, dtype=np.int64), 1.0, 0.1, 200)
    assert len(plan) == 5
    assert plan.pages_read == 1000


def test_page_numbers_far_out_keep_their_precision():
    pages = np.cumsum(np.random.default_rng(7).integers(1, 9, 500)) + 2**40
    plan = plan_reads(pages, 1e-4, 2e-5, 50)
    near = plan_reads(pages - 2**40, 1e-4, 2e-5, 50)
    assert plan.first.tolist() == near.first.tolist()
    assert plan.nbytes == plan.start.nbytes + plan.length.nbytes + plan.first.nbytes


@pytest.mark.parametrize(
    ("pages", "seek", "max_scan", "message"),
    [([1, 2], 1.0, 0, "at least 1"), ([1, 2], -1.0, 5, "negative"), ([2, 2], 1.0, 5, "ascending")],
)
def test_bad_input_is_refused(pages, seek, max_scan, message):
    with pytest.raises(InputError, match=message):
        plan_reads(np.array(pages, np.int64), seek, 1.0, max_scan)
