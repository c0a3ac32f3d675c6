"""Estimates from the early results of PR-Join: their intervals contain the truth as often as they say."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from headrace.joins.errors import JoinInputError
from headrace.joins.streams import Coverage, Estimate, Near, PRJoin
from headrace.joins.streams.hashing.estimates import Sample

ROWS, STEP, SEEDS = 3000, 150, 200
LEAST, MOST = 180, 199  # of 200 intervals of 95 %: outside with a probability of 0.2 %
IDS = ("id", "no")
TOTALS = {"a": ROWS, "b": ROWS}


class World:
    """Two inputs, the same in each order of arrival, and the results of their join as a matrix of values."""

    def __init__(self, domain, *, skewed):
        rng = np.random.default_rng(1)
        self.keys = rng.integers(0, domain, (2, ROWS))
        if skewed:
            self.keys = np.minimum(self.keys, rng.integers(0, domain, (2, ROWS)) ** 2 // domain)
        self.paid = rng.exponential(1 + self.keys[1] / domain)
        self.domain = domain

    def random(self, seed):
        """Return both inputs in random order."""
        rng = np.random.default_rng(seed)
        return rng.permutation(ROWS), rng.permutation(ROWS)

    def inputs(self, order):
        """Return both inputs in an order."""
        left, right = order
        return (
            pa.record_batch({"id": left, "x": self.keys[0, left]}),
            pa.record_batch({"no": right, "x": self.keys[1, right], "paid": self.paid[right]}),
        )

    def truth(self, order, share=1.0):
        """Return count, sum and mean of the join of the first tuples of each input."""
        left, right = (places[: int(share * ROWS)] for places in order)
        matches = np.bincount(self.keys[0, left], minlength=self.domain)[self.keys[1, right]]
        count, total = float(matches.sum()), float((matches * self.paid[right]).sum())
        return {"count": count, "sum": total, "mean": total / count}


def early(world, order, folder, share, *, stalls=False):
    """Return a join after a share of both inputs has arrived, and its results."""
    inputs, results = world.inputs(order), []
    join = PRJoin(
        {"a": inputs[0].schema, "b": inputs[1].schema},
        "x",
        memory=130_000,
        spill=folder,
        partitions=8,
        clock=lambda: 0.0,
    )
    for start in range(0, int(share * ROWS), STEP):
        stop = min(start + STEP, int(share * ROWS))
        for batch, name in zip(inputs, "ab", strict=True):
            results += join.push(batch.slice(start, stop - start), side=name, at=float(start))
        if stalls and start % (4 * STEP) == 0:
            results += join.tick(start + 1.0)
    return join, pa.Table.from_batches(results, join.schema)


def hits(world, orders, folder, share, aggregate, totals=TOTALS, **options):
    """Return how many intervals contain the truth, the estimates, and how many joins had spilled."""
    found, estimates, spilled = 0, [], 0
    for order in orders:
        join, results = early(world, order, folder, share, **options)
        with join:
            value = None if aggregate == "count" else "paid"
            estimates.append(join.estimate(results, aggregate, value, ids=IDS, totals=totals))
            spilled += join.coverage.ripples.any()
        truth = world.truth(order, 1.0 if totals else share)[aggregate]
        found += estimates[-1].low <= truth <= estimates[-1].high
    return found, estimates, spilled


@pytest.mark.parametrize(
    ("aggregate", "totals", "domain", "skewed", "stalls"),
    [
        ("sum", TOTALS, 300, False, False),
        ("count", TOTALS, 300, True, True),
        ("mean", None, 600, True, False),
        pytest.param("mean", TOTALS, 300, False, True, marks=pytest.mark.slow),
        pytest.param("sum", None, 300, True, True, marks=pytest.mark.slow),
        pytest.param("count", TOTALS, ROWS, False, False, marks=pytest.mark.slow),
    ],
)
def test_intervals_contain_the_truth_as_often_as_they_say(tmp_path, aggregate, totals, domain, skewed, stalls):
    world = World(domain, skewed=skewed)
    orders = [world.random(seed) for seed in range(SEEDS)]
    found, estimates, spilled = hits(world, orders, tmp_path, 0.6, aggregate, totals, stalls=stalls)
    assert LEAST <= found <= MOST
    assert spilled == SEEDS
    if totals:
        truth = world.truth(orders[0])[aggregate]
        error = np.mean([estimate.value for estimate in estimates]) - truth
        assert abs(error) < 4 * np.std([estimate.value for estimate in estimates]) / SEEDS**0.5, "biased"


def test_intervals_mean_nothing_if_inputs_are_sorted_by_what_is_summed(tmp_path):
    world = World(300, skewed=False)
    orders = [(world.random(seed)[0], np.argsort(world.paid, kind="stable")) for seed in range(20)]
    found, _, spilled = hits(world, orders, tmp_path, 0.6, "sum")
    assert found == 0
    assert spilled == 20


def test_margins_shrink_as_inputs_arrive_and_vanish_at_the_end(tmp_path):
    world = World(300, skewed=False)
    order, margins = world.random(5), []
    for share in (0.1, 0.4, 0.7, 1.0):
        join, results = early(world, order, tmp_path, share)
        with join:
            margins.append(join.estimate(results, "sum", "paid", ids=IDS, totals=TOTALS).margin)
            if share == 1.0:
                results = pa.concat_tables([results, join.finish().to_table()])
                for aggregate, truth in world.truth(order).items():
                    value = None if aggregate == "count" else "paid"
                    for totals in (TOTALS, None):
                        last = join.estimate(results, aggregate, value, ids=IDS, totals=totals)
                        assert last == Estimate(pytest.approx(truth), pytest.approx(0, abs=1e-4))
    assert margins == sorted(margins, reverse=True)
    assert margins[0] > 2 * margins[-1] > 0


def test_results_may_be_filtered_and_values_may_be_missing(tmp_path):
    world = World(300, skewed=False)
    order = world.random(6)
    join, results = early(world, order, tmp_path, 1.0)
    with join:
        results = pa.concat_tables([results, join.finish().to_table()])
        missing = pc.greater(results["paid"], 1.0)
        masked = results.set_column(4, "paid", pc.if_else(missing, None, results["paid"]))
        filtered = results.filter(pc.invert(missing)).select(["paid", "no", "id", "x"])
        wanted = filtered["paid"].to_numpy()
        for aggregate, truth in {"sum": wanted.sum(), "mean": wanted.mean()}.items():
            for table in (masked, filtered):
                assert join.estimate(table, aggregate, "paid", ids=IDS).value == pytest.approx(truth)


def sampled(values, chosen, covered):
    """Return the sample of a partition of which these tuples are covered, and the values of its results."""
    rows, columns = (np.array(tuples) for tuples in chosen)
    part = values[np.ix_(rows, columns)]
    at = np.argwhere(part != 0)
    sizes = np.array(values.shape)
    coverage = Coverage(sizes, sizes[:, None], np.array(covered)[:, None], np.zeros(1, dtype=np.int64))
    partitions = np.zeros(len(at), dtype=np.int64)
    return Sample(coverage, sizes, partitions, (at[:, 0], at[:, 1])), part[part != 0]


def test_estimate_and_variance_have_no_bias_over_all_samples():
    values = np.random.default_rng(2).integers(0, 5, (6, 5)) + np.arange(6)[:, None] * 1.0
    values[2, 3] = values[0, 4] = 0
    found = []
    for chosen in itertools.product(itertools.combinations(range(6), 4), itertools.combinations(range(5), 3)):
        sample, wanted = sampled(values, chosen, [4, 3])
        found.append(sample.total(wanted))
    estimates, variances = np.array(found).T
    assert len(estimates) == 15 * 10
    assert estimates.mean() == pytest.approx(values.sum())
    assert variances.mean() == pytest.approx(estimates.var())


def test_unusable_arguments_are_refused(tmp_path):
    world = World(300, skewed=False)
    join, results = early(world, world.random(7), tmp_path, 0.6)

    def refused(message, *arguments, table=results, ids=IDS, **options):
        with pytest.raises(JoinInputError, match=message):
            join.estimate(table, *arguments, ids=ids, **options)

    with join:
        assert join.estimate(results, ids=IDS).value > 0
        refused("`aggregate` must be", "max", "paid")
        refused("name a column for sum", "sum")
        refused("name a column for sum", "count", "paid")
        refused("`confidence` must be", confidence=1.0)
        refused("`confidence` must be", confidence="0.95")
        refused("must be a table, not list", table=results.to_batches())
        refused("no single column 'price'", "sum", "price")
        refused("no single column 'key'", ids=("key", "no"))
        refused("no single column 'x'", table=results.drop_columns(["x"]))
        refused("must have type int64", table=results.set_column(1, "x", results["x"].cast(pa.int32())))
        refused("do not identify the tuples of input 0", table=results.set_column(
            results.column_names.index("id"), "id", pa.array(np.zeros(len(results)))
        ))  # fmt: skip
        refused("must be a column of 'a' and one of 'b', but 'no' is one of 'b'", ids=("no", "id"))
        refused("must be a column of 'a' and one of 'b', but 'x' is one of 'a'", ids=("id", "x"))
        refused("two results have the same values of `ids`", ids=("x", "no"))
        half = results.slice(0, len(results) // 2)
        refused("or a result occurs twice", table=pa.concat_tables([half, half]))
        refused(
            "which is no number", "sum", "text", table=results.append_column("text", results["paid"].cast("string"))
        )
        refused("has nulls", table=results.set_column(0, "id", pa.nulls(len(results), pa.int64())))
        refused("at least the 1800 tuples that have arrived", totals={"a": 1700, "b": ROWS})
        refused("must name 'a' and 'b'", totals={"a": ROWS})
        refused("this join has given", table=pa.concat_tables([results, results]))
        refused("no result to estimate from", table=results.slice(0, 0))
        refused("no result to estimate from", table=results.schema.empty_table())


def test_too_few_tuples_are_no_sample(tmp_path):
    world = World(300, skewed=False)
    join, results = early(world, world.random(8), tmp_path, 0.004)
    with join, pytest.raises(JoinInputError, match="less than two tuples of an input, which is no sample"):
        join.estimate(results, ids=IDS, totals=TOTALS)


def test_tuples_without_a_key_count_as_tuples():
    keys = pa.array([None if at % 4 else at // 4 % 50 for at in range(4000)], pa.int64())
    rng, found = np.random.default_rng(9), []
    for _ in range(50):
        left, right = (pa.record_batch({"id": order, "x": keys.take(order)}) for order in (
            pa.array(rng.permutation(4000)), pa.array(rng.permutation(4000))
        ))  # fmt: skip
        with PRJoin({"a": left.schema, "b": right.schema}, "x", partitions=4) as join:
            results = [*join.push(left.slice(0, 1000), side="a"), *join.push(right.slice(0, 1000), side="b")]
            table = pa.Table.from_batches(results)
            found.append(join.estimate(table, ids=("id", "id_right"), totals={"a": 4000, "b": 4000}))
            assert join.coverage.rows.tolist() == [1000, 1000]
    assert np.mean([estimate.value for estimate in found]) == pytest.approx(50 * 20 * 20, rel=0.05)
    assert sum(estimate.low <= 20_000 <= estimate.high for estimate in found) >= 43


@pytest.mark.parametrize(
    ("columns", "on"),
    [
        ({"x": pa.string()}, ["x"]),
        ({"x": pa.float64(), "y": pa.int32()}, [("a.x", "b.x"), Near("a.y", "b.y", 3)]),
        ({"y": pa.int32(), "w": pa.string(), "x": pa.int64()}, ["x", "y"]),
    ],
    ids=["text", "float and band", "two columns"],
)
def test_results_are_of_the_partition_in_which_their_tuples_are_counted(columns, on):
    rng = np.random.default_rng(11)
    values = {name: pa.array(rng.integers(0, 40, 500)).cast(dtype) for name, dtype in columns.items()}
    batch = pa.record_batch({"id": pa.array(range(500)), **values})
    with PRJoin({"a": batch.schema, "b": batch.schema}, on, partitions=4) as join:
        results = [*join.push(batch, side="a"), *join.push(batch.slice(0, 400), side="b")]
        partitions = join.algorithm.partitions_of_results(pa.table(batch))
        counts = np.bincount(partitions, minlength=4)
        assert counts.tolist() == join.coverage.arrived[0].tolist() == join.coverage.covered[0].tolist()
        assert counts.min() > 0
        found = join.estimate(pa.Table.from_batches(results), ids=("id", "id_right"), totals={"a": 500, "b": 500})
        assert found.margin > 0
