"""The trial of the record tier: reads with it and without it, and a tier that is inactive where pages serve as well."""

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins import SSIJ
from headrace.joins.ssij.memory.tier_trial import TierTrial

KEYS = 1_000_000
MANY = 100_000


def measured(trial, cost, *, active, begin=(0, 0.0)):
    """Note three ends of phases in one mode; between the last two a tuple costs this much. Return the last."""
    done, seconds = begin
    trial.phase_ends(done, seconds, active=active)
    trial.phase_ends(done, seconds, active=active)
    end = (done + MANY, seconds + MANY * cost)
    trial.phase_ends(*end, active=active)
    return end


@pytest.mark.parametrize(("with_tier", "pays"), [(0.5e-6, True), (0.96e-6, True), (0.99e-6, False), (2e-6, False)])
def test_the_tier_pays_if_it_saves_a_few_percent_of_the_reads(with_tier, pays):
    trial = TierTrial()
    end = measured(trial, 1e-6, active=False)
    measured(trial, with_tier, active=True, begin=end)
    assert trial.pays is pays


def test_nothing_is_known_before_both_modes_were_measured():
    trial = TierTrial()
    assert trial.pays is None
    end = measured(trial, 1e-6, active=True)
    assert trial.pays is None
    trial.restart(active=False)
    assert trial.with_tier == pytest.approx(1e-6)
    measured(trial, 2e-6, active=False, begin=end)
    assert trial.pays is True


def test_phases_after_a_change_of_mode_count_for_neither():
    trial = TierTrial()
    done, seconds = measured(trial, 1e-6, active=False)
    trial.restart(active=True)
    trial.phase_ends(done + MANY, seconds + 100.0, active=True)
    trial.phase_ends(done + 2 * MANY, seconds + 200.0, active=True)
    assert trial.with_tier is None
    trial.phase_ends(done + 3 * MANY, seconds + 200.0 + MANY * 3e-6, active=True)
    assert trial.with_tier == pytest.approx(3e-6)


def test_few_tuples_are_measured_together_with_those_of_the_next_phases():
    trial = TierTrial()
    for phase in range(9):
        trial.phase_ends(phase * 10_000, phase * 0.02, active=False)
        assert (trial.without is None) == (phase < 8)
    assert trial.without == pytest.approx(2e-6)


@pytest.fixture(scope="module")
def table(build):
    rng = np.random.default_rng(2)
    rows = pa.table({"k": np.arange(KEYS), "v": rng.integers(0, 1 << 40, KEYS)})
    with build(rows, ["k"], unique=True, page_size=4096) as table:
        yield table


def zipf(rng, size):
    return np.exp(rng.random(size) * np.log(KEYS)).astype(np.int64)


def read_by(table, batches, **options):
    """Return the pages read for a tuple in the last third of the stream, and whether the tier is active at the end."""
    join = SSIJ(table, on="k", memory=table.stats.bytes // 8, **options)
    for at, keys in enumerate(batches):
        if at == 2 * len(batches) // 3:
            before = join.stats
        join.push(pa.record_batch({"k": keys})).drain()
    counted = join.stats - before
    return counted.pages_read / counted.rows_done, counted.memory.records > 0


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_tier_is_inactive_where_cached_pages_serve_as_many_tuples(table, apart):
    with_tier = without = 0.0
    for seed in range(4, 7):  # reads of one stream vary by a tenth with the place at which the last phase ends
        rng = np.random.default_rng(seed)
        batches = [zipf(rng, 20_000) for _ in range(120)]
        if apart:
            batches = [keys * 7919 % KEYS for keys in batches]
        pages, active = read_by(table, batches)
        assert active == apart
        with_tier += pages
        without += read_by(table, batches, record_tier=False)[0]
    assert with_tier < (0.9 if apart else 1.05) * without
