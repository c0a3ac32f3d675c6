"""Experiments with joins of streams: their verdicts can fail, and their clock counts what the operators do."""

import numpy as np
import pytest

from benchmarks.streams import punctuated, run


def line(results, seconds, state=0):
    return np.array([(count, seconds(count), state) for count in results], dtype=float)


def test_cases_are_the_modules_of_the_folder():
    assert run.modules() == ["punctuated"]


@pytest.mark.parametrize(
    ("slow_first", "fast_first", "found"),
    [
        (lambda n: 500 + n, lambda n: 2 * n, 600),
        (lambda n: n, lambda n: 2 * n, 0),
        (lambda n: 2 * n, lambda n: n, None),
    ],
)
def test_a_crossover_is_found_where_one_is_faster_for_good(slow_first, fast_first, found):
    outputs = np.arange(100, 2000, 100)
    assert punctuated.crossover(line(outputs, slow_first), line(outputs, fast_first), outputs) == found


def test_the_verdict_on_purging_fails_if_batches_are_slower():
    outputs, settings = np.arange(100, 2000, 100), punctuated.QUICK
    once, batches = (
        punctuated.Run(mjoin=True, ordered=False, scheduled=True, purge_every=every) for every in (1, settings.batch)
    )
    for factor, holds in ((2, False), (0.5, True)):
        series = {once: line(outputs, lambda n: n), batches: line(outputs, lambda n, factor=factor: factor * n)}
        assert [verdict.holds for verdict in punctuated.purging_verdicts(series, outputs, settings)] == [holds]


@pytest.mark.parametrize("scheduled", [False, True])
def test_both_streams_are_retrieved_completely_and_end_together(scheduled):
    settings = punctuated.QUICK
    chosen = punctuated.Run(mjoin=True, ordered=True, scheduled=scheduled)
    steps = list(punctuated.retrievals(chosen, settings, [300, 3000]))
    assert [sum(count for side, count in steps if side == at) for at in (0, 1)] == [300, 3000]
    half = steps[: len(steps) // 2]
    assert 100 < sum(count for side, count in half if side == 0) < 200
