"""The paper's experiments run at toy sizes, and on the simulated disk always with the same result."""

import numpy as np
import pytest

from benchmarks.experiments import __main__ as command
from benchmarks.experiments import tpch
from benchmarks.experiments._claims import Verdict
from benchmarks.experiments._rates import Arrived, arrive, closed_loop_rate, greatest, service_rate
from benchmarks.experiments._relations import moving_keys, stream_batches, zipf_keys
from benchmarks.experiments._results import DEVICES, RESULTS, Rows, load_run, save_run
from benchmarks.experiments._settings import MESH_BEST, MESH_PAPER, QUICK, contestants
from benchmarks.experiments._world import Costs, World
from benchmarks.experiments.adaptive import Moving
from benchmarks.experiments.deadlines import _Trial
from benchmarks.experiments.document import DOCUMENT, OURS, document, write_document
from headrace.joins import SSIJ, IndexNestedLoops, MeshJoin

FAST = ["fig9", "fig11", "fig14", "fig15", "hit_ratios"]


@pytest.fixture
def world(tmp_path):
    with World("simulated", tmp_path, QUICK.least_memory) as world:
        yield world


@pytest.mark.parametrize("name", FAST)
def test_an_experiment_gives_the_same_result_twice(world, name):
    figure = command.FIGURES[name]
    first, second = (figure.run(world, QUICK) for _ in range(2))
    assert first == second
    assert figure.judge(first) == figure.judge(second)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in command.FIGURES if name not in FAST])
def test_an_experiment_gives_the_same_result_twice_slowly(world, name):
    if name == "fig8" and tpch.GENERATOR is None:
        pytest.skip("tpchgen-cli is not installed")
    test_an_experiment_gives_the_same_result_twice(world, name)


def test_the_document_is_what_the_generator_makes_of_the_results():
    assert DOCUMENT.read_text(encoding="utf-8") == document(command.FIGURES.values())


def judged(device):
    """Return each claim that the results of a device decide, with its finding."""
    for figure in command.FIGURES.values():
        found = load_run(RESULTS / device, figure.name)
        rows = Rows(figure.axes, found[0]) if found else None
        yield from ((claim, claim.judge(rows)) for claim in figure.claims if rows and claim.applies(rows))


@pytest.mark.parametrize("device", DEVICES)
def test_a_claim_of_the_paper_that_does_not_hold_has_a_reason_that_does(device):
    findings = [finding for where in ("simulated", device) for finding in judged(where)]
    holding = [claim for claim, found in findings if found.verdict == Verdict.HOLDS]
    for claim, found in judged(device):
        of_the_paper = not claim.statement.startswith(OURS)
        assert found.verdict == Verdict.HOLDS or not of_the_paper or claim.reason in holding, claim.statement


@pytest.mark.parametrize("device", DEVICES)
def test_each_result_has_a_plot_in_the_document(device):
    folder = "figures" if device == "simulated" else "figures/real"
    names = sorted(path.stem for path in (RESULTS / device).glob("*.json"))
    assert set(names) <= set(command.FIGURES)
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in names:
        assert f"({folder}/{name}.svg)" in text
        assert (DOCUMENT.parent / folder / f"{name}.svg").exists()


def test_all_figures_have_results_on_the_simulated_disk():
    assert sorted(path.stem for path in (RESULTS / "simulated").glob("*.json")) == sorted(command.FIGURES)


def test_a_verdict_in_the_document_changes_with_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    results, path = tmp_path / "results", tmp_path / "experiments.md"
    for factor, verdict in ((10, "holds"), (1, "does not hold")):
        rows = [{"line": line, "memory_percent": at, "tuples_per_second": rate * at}
                for line, rate in (("SSIJ, table II", factor), ("LRU", 1)) for at in (1, 5, 10)]  # fmt: skip
        save_run(results / "simulated", "fig11", rows, {"seconds": 1})
        assert load_run(results / "simulated", "fig11") == (rows, {"seconds": 1})
        write_document([command.FIGURES["fig11"]], results, path)
        assert f"cached ones. | **{verdict}** |" in path.read_text(encoding="utf-8")
    assert (tmp_path / "figures" / "fig11.svg").exists()


def test_meshjoin_as_in_the_paper_reads_fifteen_of_its_pages(world):
    relation = QUICK.usual()
    splits = {}
    for line in (MESH_PAPER, MESH_BEST):
        run = world.start(relation=relation, share=QUICK.share, **contestants(relation, QUICK.share)[line])
        keys = zipf_keys(relation.domain, 0.0, 200)
        run.operator.push(stream_batches(keys, 200, relation.tuple_nbytes)[0]).drain()
        splits[line] = run.operator.split
        run.operator.finish().drain()
        run.close()
    assert splits[MESH_PAPER].pages * relation.weight == 15
    assert splits[MESH_BEST].pages > splits[MESH_PAPER].pages


def test_each_key_of_a_relation_has_its_rows(world):
    relation = QUICK.dense(64, rows_per_key=400, pages=50)
    run = world.start(SSIJ, relation, QUICK.share)
    keys = zipf_keys(relation.domain, 1.0, 20)
    (batch,) = stream_batches(keys, 20, relation.tuple_nbytes)
    output = [*run.operator.push(batch), *run.operator.finish()]
    assert sum(map(len, output)) == 20 * 400
    run.close()


def test_the_interval_with_the_burst_goes_on_for_long(world):
    moving = Moving(world, QUICK)
    keys = np.concatenate([batch["key"].to_numpy() for batch in moving.long_interval()])
    width = moving.relation.domain // 20
    assert len(keys) == int(14.5 * moving.each)
    assert set(keys[4 * moving.each :] // width) == {19}
    assert sum(map(len, moving.batches)) == 20 * moving.each, "all intervals are played"


def test_a_closed_loop_counts_all_tuples_and_all_time(world):
    relation = QUICK.dense(4)
    run = world.start(SSIJ, relation, QUICK.share)
    batches = stream_batches(zipf_keys(relation.domain, 0.0, 500), 100, relation.tuple_nbytes)
    began = run.clock()
    assert closed_loop_rate(run, batches) == pytest.approx(500 / (run.clock() - began))


@pytest.mark.parametrize("kind", [SSIJ, MeshJoin, IndexNestedLoops])
def test_simulated_time_is_what_was_counted(world, kind):
    relation = QUICK.usual()
    run = world.start(kind, relation, QUICK.share)
    keys = zipf_keys(relation.domain, 1.0, 500)
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
    batches = stream_batches(zipf_keys(relation.domain, 0.0, 20_000), 500, relation.tuple_nbytes)

    def at(rate):
        run = world.start(SSIJ, relation, QUICK.share, **relation.as_in_the_paper(QUICK.share))
        return arrive(run, batches, [500 * (number + 1) / rate for number in range(len(batches))])

    assert at(200.0).fits
    assert at(1e6).overflowed


def test_the_device_may_be_real(tmp_path):
    with World("real", tmp_path, QUICK.least_memory) as world:
        relation = QUICK.usual()
        batches = stream_batches(zipf_keys(relation.domain, 1.0, 2_000), 200, relation.tuple_nbytes)
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
            Arrived(
                overflowed=False,
                longest_wait=float(at),
                deadline_misses=missed,
                hit_ratio=0.0,
                done_at=1.0,
                pages_wanted=0,
                tuples_a_phase=0.0,
            )
            for at, missed in enumerate(misses)
        ]
        monkeypatch.setattr(trial, "at", lambda _: results.pop(0))
        assert trial.fits(1.0) == fits
    assert results == []
    assert (trial.last is not None) == fits
    assert not fits or trial.last.longest_wait == len(misses) - 1


@pytest.mark.parametrize("guess", [1.0, 90.0, 1e5])
def test_the_greatest_value_is_bracketed_and_then_bisected(guess):
    assert greatest(lambda value: value <= 100.0, guess, 12) == pytest.approx(100.0, rel=1e-3)


def test_the_greatest_value_is_none_or_the_most_that_was_asked_for():
    assert greatest(lambda _: False, 100.0, 5) == 0.0
    assert greatest(lambda _: True, 100.0, 5, 1e4) == 1e4


@pytest.mark.parametrize("scattered", [False, True])
def test_popular_keys_are_neighbours_or_scattered(scattered):
    keys = zipf_keys(1000, 1.0, 50_000, scattered=scattered)
    popular = np.argsort(-np.bincount(keys, minlength=1000))[:10]
    assert (popular.max() < 20) != scattered


def test_an_interval_keeps_to_its_keys():
    parts = np.split(moving_keys(1000, 5, 500), 5)
    assert all((part // 200 == number).all() for number, part in enumerate(parts))


def test_an_unknown_experiment_is_refused_with_the_valid_names(capsys):
    with pytest.raises(SystemExit):
        command.main(["fig2"])
    assert "the experiments are scaling, fig3" in capsys.readouterr().err
