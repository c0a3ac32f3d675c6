"""The paper's experiments run at toy sizes, and on the simulated disk always with the same result."""

import numpy as np
import pytest

from benchmarks.experiments import __main__ as command
from benchmarks.experiments import tpch
from benchmarks.experiments._rates import Arrived, arrive, greatest, service_rate
from benchmarks.experiments._relations import moving_keys, stream_batches, zipf_keys
from benchmarks.experiments._report import Axes, Check, Outcome, write_summary
from benchmarks.experiments._settings import QUICK
from benchmarks.experiments._world import Costs, World
from benchmarks.experiments.deadlines import _Trial
from headrace.joins import SSIJ, IndexNestedLoops, MeshJoin

FAST = ["fig9", "fig11", "fig14", "fig15", "hit_ratios"]


@pytest.fixture
def world(tmp_path):
    with World("simulated", tmp_path, QUICK.least_memory) as world:
        yield world


@pytest.mark.parametrize("name", FAST)
def test_an_experiment_gives_the_same_result_twice(world, name):
    first, second = (command.run(name, world, QUICK) for _ in range(2))
    assert first.rows == second.rows
    assert [check.ours for check in first.checks] == [check.ours for check in second.checks]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in command.EXPERIMENTS if name not in FAST])
def test_an_experiment_gives_the_same_result_twice_slowly(world, name):
    if name == "fig8" and not tpch.GENERATOR.exists():
        pytest.skip("tpchgen-cli is not installed")
    test_an_experiment_gives_the_same_result_twice(world, name)


@pytest.mark.parametrize("kind", [SSIJ, MeshJoin, IndexNestedLoops])
def test_simulated_time_is_what_was_counted(world, kind):
    relation = QUICK.usual()
    run = world.start(kind, relation, QUICK.share)
    keys = zipf_keys(relation.rows, 1.0, 500)
    for batch in stream_batches(keys, 100, relation.tuple_nbytes):
        run.operator.push(batch).drain()
    run.operator.finish().drain()
    stats, costs = run.operator.stats, Costs()
    phases = getattr(stats, "online_phases", 0) + getattr(stats, "join_phases", 0)
    reading = costs.seek * stats.seeks + costs.transfer * relation.weight * stats.pages_read
    joining = costs.tuple * (2 * stats.rows_done - stats.rows_cached) + costs.phase * relation.factor * phases
    assert run.clock() == pytest.approx(reading + joining)
    assert stats.rows_done == 500


def test_a_stream_that_comes_too_fast_overflows_and_one_that_does_not_is_served(world):
    relation = QUICK.dense(4)
    batches = stream_batches(zipf_keys(relation.rows, 0.0, 20_000), 500, relation.tuple_nbytes)

    def at(rate):
        run = world.start(SSIJ, relation, QUICK.share, **relation.as_in_the_paper(QUICK.share))
        return arrive(run, batches, [500 * (number + 1) / rate for number in range(len(batches))])

    assert at(200.0).fits
    assert at(1e6).overflowed


def test_the_device_may_be_real(tmp_path):
    with World("real", tmp_path, QUICK.least_memory) as world:
        relation = QUICK.usual()
        batches = stream_batches(zipf_keys(relation.rows, 1.0, 2_000), 200, relation.tuple_nbytes)
        served = service_rate(world.start(SSIJ, relation, QUICK.share), batches, warm=400, most=2_000)
        assert 0 < world.pace(relation) < 1, "milliseconds to seek are of another time"
    assert served.rate > 0
    assert 0 <= served.hit_ratio <= 1


@pytest.mark.parametrize(("device", "misses", "fits"), [
    ("simulated", [0], True), ("simulated", [1], False), ("real", [0, 0, 0], True), ("real", [0, 0, 1], False),
])  # fmt: skip
def test_a_rate_fits_a_deadline_if_no_trial_misses_it(tmp_path, monkeypatch, device, misses, fits):
    with World(device, tmp_path, QUICK.least_memory) as world:
        trial = _Trial(world, QUICK, 10)
        results = [
            Arrived(overflowed=False, longest_wait=float(at), deadline_misses=missed, hit_ratio=0.0, done_at=1.0)
            for at, missed in enumerate(misses)
        ]
        monkeypatch.setattr(trial, "at", lambda _: results.pop(0))
        assert trial.fits(1.0) == fits
    assert results == []
    assert (trial.last is not None) == fits
    assert not fits or trial.last.longest_wait == len(misses) - 1


def test_the_greatest_value_is_found_by_halving():
    assert greatest(lambda value: value <= 100.0, 1.0, 1e6, 20) == pytest.approx(100.0, rel=1e-3)
    assert greatest(lambda _: False, 1.0, 1e6, 20) == 1.0


@pytest.mark.parametrize("scattered", [False, True])
def test_popular_keys_are_neighbours_or_scattered(scattered):
    keys = zipf_keys(1000, 1.0, 50_000, scattered=scattered)
    popular = np.argsort(-np.bincount(keys, minlength=1000))[:10]
    assert (popular.max() < 20) != scattered


def test_an_interval_keeps_to_its_keys():
    parts = np.split(moving_keys(1000, 5, 500), 5)
    assert all((part // 200 == number).all() for number, part in enumerate(parts))


def test_the_summary_lists_claims_and_verdicts(tmp_path):
    checks = [Check("it grows", "1 to 2", holds=True), Check("it falls", "2 to 2", holds=False)]
    write_summary([Outcome("fig0", "", Axes("x", "y", "x"), [], checks)], tmp_path / "summary.md")
    lines = (tmp_path / "summary.md").read_text().splitlines()
    assert lines[2:] == [
        "| [fig0](figures/fig0.svg) | it grows | 1 to 2 | holds |",
        "|  | it falls | 2 to 2 | differs |",
    ]


def test_an_unknown_experiment_is_refused_with_the_valid_names(capsys):
    with pytest.raises(SystemExit):
        command.main(["fig2"])
    assert "the experiments are fig3, fig4" in capsys.readouterr().err
