"""The experiments with joins of streams: made data, equal memory, simulated arrivals, bounds, and the document."""

import itertools
import re

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from benchmarks.experiments._results import load_run, save_run
from benchmarks.streams import punctuated, run
from benchmarks.streams._bound import most_online
from benchmarks.streams._data import TUPLE, batch, matches, near_matches, stock, zipf
from benchmarks.streams._world import (
    FULL,
    LIFETIME,
    OPERATORS,
    PAIR,
    QUICK,
    Settings,
    arrivals,
    memory_for,
    online,
)
from benchmarks.streams.document import DOCUMENT, PLOTS, RESULTS, document, write_document
from headrace.joins.streams import DINER, RPJ


def test_matches_are_counted_as_duckdb_counts_them():
    left, right = zipf(500, 40, 1, 5)
    connection = duckdb.connect()
    connection.register("l", pa.table({"x": left}))
    connection.register("r", pa.table({"x": right}))
    count = "SELECT count(*) FROM l JOIN r ON "
    assert matches(left, right) == connection.sql(count + "l.x = r.x").fetchall()[0][0]
    assert near_matches(left, right, 3) == connection.sql(count + "abs(l.x - r.x) <= 3").fetchall()[0][0]


def test_tuples_have_the_size_of_those_in_the_paper():
    assert batch(np.arange(10), np.arange(10)).nbytes == 10 * TUPLE


def test_rounded_prices_are_multiples_of_five_cents():
    for keys in stock(2000, 400, 1, rounded=1.0):
        assert (keys % 20 == 0).all()


def test_arrivals_are_in_order_and_pause_after_each_fragment():
    settings = Settings()
    streams = (np.arange(1000), np.arange(1000))
    plain = arrivals(streams, settings, 3)
    delayed = arrivals(streams, settings, 3, fragments=10, delay=0.5)
    for found in (plain, delayed):
        assert (np.diff(found.times) >= 0).all()
        for side in (0, 1):
            assert found.ids[found.sides == side].tolist() == list(range(1000))
    assert delayed.times[-1] == pytest.approx(1.45 * plain.times[-1], rel=0.1)


@pytest.mark.parametrize("name", [*OPERATORS, LIFETIME])
def test_a_run_ends_with_a_part_of_the_results(name):
    keys = stock(2000, 60, 1)
    settings = Settings(max_new_arrivals=50)
    arriving = arrivals(keys, settings, 7, fragments=4, delay=0.5)
    found = online(name, arriving, 200_000, settings)
    assert 0 < found.reactive < found.results < matches(*keys)
    assert found.buffers
    assert found == online(name, arriving, 200_000, settings)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_hold_as_many_tuples_as_they_should(name, tmp_path):
    memory, most = memory_for(name, 1000), 0
    with PAIR.make(name, memory, tmp_path) as join:
        for at in range(100):
            ids = np.arange(20 * at, 20 * at + 20)
            join.push(batch(ids, ids * 1_000_000), side="ab"[at % 2]).drain()
            most = max(most, join.stats.rows_in_memory)
    assert 950 <= most <= 1100


def test_results_that_are_counted_are_those_that_are_built(tmp_path):
    keys = stock(1000, 60, 1)
    arriving = arrivals(keys, Settings(), 7)
    with PAIR.make("DINER", "8MiB", tmp_path) as join:
        built = [result for side in (0, 1) for result in join.push(batch(np.arange(500), keys[side]), side="ab"[side])]
    assert online("DINER", arriving, 8 << 20, Settings()).results == sum(map(len, built)) == matches(*keys)


def test_the_other_rpj_does_not_age_its_counts(tmp_path):
    keys = np.zeros(64, dtype=np.int64)
    with PAIR.make(LIFETIME, "1MiB", tmp_path) as lifetime, PAIR.make("RPJ", "1MiB", tmp_path) as aging:
        for at in range(200):
            for join in (lifetime, aging):
                join.push(batch(np.arange(64), keys + at * (at % 2)), side="ab"[at % 2]).drain()
        assert lifetime.algorithm.recent.sum() == 200 * 64
        assert aging.algorithm.recent.sum() < 200 * 64


def exhaustive(sides, keys, tuples):
    """Return the most results of any policy, by trying all: each tuple leaves at some time, or never."""
    number, best = len(keys), 0
    pairs = [(i, j) for i, j in itertools.combinations(range(number), 2) if keys[i] == keys[j] and sides[i] != sides[j]]
    for ends in itertools.product(*(range(i, number) for i in range(number))):
        if all(sum(i < at <= end for i, end in enumerate(ends)) <= tuples for at in range(number)):
            best = max(best, sum(j <= ends[i] for i, j in pairs))
    return best


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tuples", [1, 2])
def test_no_policy_exceeds_the_bound(seed, tuples):
    rng = np.random.default_rng(seed)
    sides, keys = rng.integers(0, 2, 6), rng.integers(0, 2, 6)
    assert (
        exhaustive(sides, keys, tuples)
        <= most_online(sides, keys, tuples)
        <= matches(keys[sides == 0], keys[sides == 1])
    )


def test_the_bound_is_near_what_a_good_policy_has():
    keys = zipf(1000, 50, 1, 3)
    arriving = arrivals(keys, Settings(), 7)
    bound = most_online(arriving.sides, arriving.keys, 2000)
    assert bound == matches(*keys), "all tuples fit"
    small = most_online(arriving.sides, arriving.keys, 400)
    assert small / 2 < online("DINER", arriving, memory_for("DINER", 400), Settings()).results <= small


@pytest.mark.parametrize("name", ["DINER", "PR-Join"])
def test_results_by_time_are_those_that_a_run_up_to_then_has(name):
    arriving = arrivals(zipf(1000, 100, 0, 3), Settings(), 7)
    run = online(name, arriving, memory_for(name, 400), Settings())
    ends = arriving.times[-1], 100 * arriving.times[-1]
    assert 0 < run.until(ends[0] / 2) < run.until(ends[0]) <= run.until(ends[1]) == run.results


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_both_streams_are_retrieved_completely(scheduled, even):
    settings = punctuated.Settings(news=300, even=even)
    chosen = punctuated.Run(mjoin=True, ordered=True, scheduled=scheduled)
    steps = list(punctuated.retrievals(chosen, settings, [300, 3000]))
    assert [sum(count for side, count in steps if side == at) for at in (0, 1)] == [300, 3000]
    last_news = max(at for at, (side, _) in enumerate(steps) if side == 0)
    before = sum(count for side, count in steps[:last_news] if side == 1)
    assert (before < 500) if even else (before > 2500)


def played(results, seconds):
    rates = np.zeros((len(results), 6))
    rates[:, 0] = np.diff([seconds(count) for count in results], prepend=0)
    return punctuated.Played(np.array(results), np.zeros(len(results)), rates)


@pytest.mark.parametrize(("slow_first", "fast_first", "found"), [
    (lambda n: 500 + n, lambda n: 2 * n, 600), (lambda n: n, lambda n: 2 * n, 0), (lambda n: 2 * n, lambda n: n, None),
])  # fmt: skip
def test_a_crossover_is_found_where_one_is_faster_for_good(slow_first, fast_first, found):
    outputs = np.arange(100, 2000, 100)
    pair = played(outputs, slow_first), played(outputs, fast_first)
    assert punctuated.crossover(*pair, outputs, punctuated.Units()) == found


def test_time_is_the_sum_of_what_operations_cost():
    work = np.array([[1, 0, 500, 0, 0, 0], [0, 2, 0, 3, 4, 1]], dtype=float)
    units = punctuated.Units(take=2, insert=1, compare=5, buckets=500, output=1, test=0.5, punctuation=10)
    assert units.seconds(work) == pytest.approx([7e-6, 24e-6])


def test_a_run_of_mjoin_counts_its_punctuations_and_ends_with_all_results():
    settings = punctuated.Settings(news=40)
    found = punctuated.play(punctuated.Run(mjoin=True, ordered=True), settings)
    assert found.results[-1] == 10 * (40 + 9)
    assert found.work[:, 5].sum() == 40
    assert (np.diff(found.results) >= 0).all()


def test_the_document_is_what_the_generator_makes_of_the_results():
    assert DOCUMENT.read_text(encoding="utf-8") == document(run.FIGURES.values())


def test_the_document_shows_each_result_and_names_the_figures_without_one():
    names = {path.stem for path in RESULTS.glob("*.json")}
    assert names <= set(run.FIGURES)
    text = DOCUMENT.read_text(encoding="utf-8")
    assert set(re.findall(rf"\({PLOTS}/(\w+)\.svg\)", text)) == names
    for name in names:
        assert (DOCUMENT.parent / PLOTS / f"{name}.svg").exists()
    (listed,) = re.findall(r"no results here: (.*?)\. `python", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == set(run.FIGURES) - names


def test_a_verdict_in_the_document_changes_with_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    results, path = tmp_path / "results", tmp_path / "experiments-streams.md"
    for ours, verdict in ((9, "holds"), (1, "does not hold")):
        rows = [{"line": line, "data": data, "share": share, "results": share}
                for line, share in (("DINER", ours), ("PMJ", 3)) for data in ("CSCO", "IPIX", "weather")]  # fmt: skip
        save_run(results, "ranges", rows, {"seconds": 1})
        write_document([run.FIGURES["ranges"]], results, path)
        assert f"online than PMJ. | **{verdict}** |" in path.read_text(encoding="utf-8")
    assert (tmp_path / PLOTS / "ranges.svg").exists()


def test_the_command_leaves_rows_and_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    run.main(["purging", "--quick", "--out", str(tmp_path)])
    rows, known = load_run(tmp_path, "purging")
    assert known["seconds"] >= 0
    assert {row["line"] for row in rows} == {"at once", "every 100"}
    assert (tmp_path / "purging.svg").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", run.FIGURES)
def test_every_experiment_runs_with_less_data(name):
    assert run.FIGURES[name].judge(run.FIGURES[name].run(QUICK))


def test_an_unknown_experiment_is_refused_with_the_valid_names(capsys):
    with pytest.raises(SystemExit):
        run.main(["fig2"])
    assert "the experiments are csco, ipix" in capsys.readouterr().err


def test_operators_are_those_of_the_package():
    assert {name: PAIR.make(name, "1MiB", None).__class__ for name in ("DINER", "RPJ")} == {"DINER": DINER, "RPJ": RPJ}
    assert FULL.of(10) == 10
