"""Join phases that admit arrivals, and deadlines of single tuples, under a simulated clock and a simulated disk."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_disk import READ, SEEK, Clock, SlowReader

from headrace.joins import SSIJ, Band, MeshJoin
from headrace.joins.deadlines import Deadlines, arrived
from headrace.joins.errors import JoinInputError, StreamSchemaError
from headrace.joins.input_buffer import InputBuffer

KEYS = 4000


def rows_of(keys, version=0):
    keys = np.asarray(keys, dtype=np.int64)
    return pa.table({"k": keys, "v": 10 * keys + version, "pad": [f"{key:>60}" for key in keys.tolist()]})


@pytest.fixture(scope="module")
def table(build):
    with build(rows_of(np.arange(KEYS)), ["k"], unique=True, page_size=4096) as table:
        yield table


@pytest.fixture(scope="module")
def large(build):
    with build(rows_of(np.arange(5 * KEYS)), ["k"], unique=True, page_size=4096) as table:
        yield table


def make(table, clock, seek=SEEK, **options):
    return SSIJ(table, on="k", reader=SlowReader(table, clock, seek), clock=clock, **{"memory": "256KiB"} | options)


def batch_of(keys, at=0.0, **columns):
    return pa.record_batch({"k": np.asarray(keys, dtype=np.int64), "at": np.full(len(keys), at), **columns})


def live(join, clock, arrivals, until=None):
    """Push batches when they have arrived, tick when work is due; return the wait of each result and its row."""
    waits, rows, arrivals = [], [], list(arrivals)

    def consume(output):
        for result in output:
            waits.extend((clock.now - result["at"].to_numpy()).tolist())
            rows.extend(result.to_pylist())

    while arrivals or (join.due is not None and (until is None or clock.now < until)):
        due = join.due
        if arrivals and (arrivals[0][0] <= clock.now or due is None or arrivals[0][0] <= due):
            at, batch = arrivals.pop(0)
            clock.now = max(clock.now, at)
            consume(join.push(batch, at=at))
        else:
            clock.now = max(clock.now, due)
            consume(join.tick(clock.now))
    return np.array(waits), rows


def sweep_seconds(table, **options):
    return make(table, Clock(), **options).algorithm.estimate.scan


def test_a_tuple_whose_page_is_ahead_joins_the_running_phase(table):
    clock = Clock()
    join = make(table, clock, deadline=1.0, input_threshold=1, stream_threshold=100_000)
    join.push(batch_of(range(0, KEYS, 40)), at=0.0).drain()
    clock.now = join.due
    join.tick().drain()
    assert join.stats.rows_held > 0, "the phase has only begun"
    assert join.due <= clock.now
    read = join.stats.pages_wanted
    join.push(batch_of([KEYS - 1], clock.now), at=clock.now).drain()
    while join.due is not None:
        join.tick().drain()
    assert join.stats.join_phases == 1
    assert join.stats.rows_done == join.stats.rows_in
    assert read < join.stats.pages_wanted <= table.stats.leaves, "no page was read twice"


def test_a_tuple_whose_page_was_passed_waits_for_the_next_phase(table):
    clock = Clock()
    join = make(table, clock, deadline=1.0, memory="160KiB", input_threshold=1, stream_threshold=100_000)
    join.push(batch_of(range(0, KEYS, 40)), at=0.0).drain()
    clock.now = join.due
    join.tick().drain()
    absent = next(leaf for leaf in range(table.stats.leaves) if join.store.cache.frame_map[leaf] < 0)
    key = int(table.snapshot().leaf_rows[:absent].sum())
    join.push(batch_of([key], clock.now), at=clock.now).drain()
    while join.due is not None:
        clock.now = max(clock.now, join.due)
        join.tick().drain()
    assert join.stats.join_phases == 2
    assert join.stats.rows_done == join.stats.rows_in
    assert join.stats.deadline_misses == 0


def test_without_a_deadline_a_phase_stops_for_enough_arrivals(table):
    join = make(table, Clock(), input_threshold=50, stream_threshold=1000)
    join.push(batch_of(range(0, KEYS, 5))).drain()
    output = join.push(batch_of(range(1, KEYS, 5)))
    next(output)
    assert join.stats.join_phases == 0
    later = join.push(batch_of([KEYS - 1] * 60))
    joined = [key for result in later for key in result["k"].to_pylist()]
    assert join.stats.join_phases == 1
    assert joined.count(KEYS - 1) == 60, "the arrivals have joined the phase"


SHORT_READS = {"seek": 0.002, "max_scan": 8, "memory": "1MiB"}


@pytest.mark.parametrize("scans", [1.1, 2.0])
def test_arrivals_are_served_within_one_round_at_the_rate_of_meshjoin(large, scans):
    """Without admission a tuple waits for the running phase and for its own, which is two scans."""
    clock, rng = Clock(), np.random.default_rng(7)
    mesh = MeshJoin(large, on="k", memory="1MiB", reader=SlowReader(large, Clock(), 0.002))
    mesh.push(batch_of(range(5 * KEYS))).drain()
    scan = sweep_seconds(large, **SHORT_READS)
    rate = mesh.split.chunks * mesh.split.tuples / scan
    gap = scan / 40
    keys = [rng.integers(0, 5 * KEYS, int(rate * gap)) for _ in range(400)]
    join = make(large, clock, deadline=scans * scan, **SHORT_READS)
    waits, _ = live(join, clock, [(i * gap, batch_of(part, i * gap)) for i, part in enumerate(keys)])
    assert len(waits) == join.stats.rows_in == join.stats.rows_done
    assert join.stats.deadline_misses == 0
    assert waits.max() <= scans * scan
    assert join.stats.join_phases <= 400 / 40 + 3


def test_a_page_is_read_once_a_round_however_many_arrive(large):
    clock, rng = Clock(), np.random.default_rng(8)
    scan = sweep_seconds(large, **SHORT_READS)
    join = make(large, clock, deadline=1.3 * scan, **SHORT_READS)
    gap = scan / 30
    live(join, clock, [(i * gap, batch_of(rng.integers(0, 5 * KEYS, 40), i * gap)) for i in range(300)])
    assert join.stats.deadline_misses == 0
    assert join.stats.pages_wanted <= large.stats.leaves * (300 / 30 + 2)


def expected_rows(pushed, versions, low=0, high=0, *, outer):
    """Nested loops: the rows (id, k, v) that the join returns."""
    rows = []
    for number, key, version in pushed:
        relation = versions[version]
        found = [relation[near] for near in range(key - low, key + high + 1) if near in relation]
        rows += [(number, key, value) for value in found]
        if not found and outer:
            rows.append((number, key, None))
    return sorted(rows, key=repr)


STEPS = st.lists(
    st.sampled_from(["push", "push", "push", "tick", "tick", "take", "due", "flush", "apply", "wait"]), max_size=30
)


class Session:
    """An operator, what was pushed, the versions of its relation, and the rows that came out."""

    def __init__(self, table, clock, rng, size, join):
        self.table, self.clock, self.rng, self.size, self.join = table, clock, rng, size, join
        self.versions = [{key: 10 * key for key in range(0, 2 * size, 2)}]
        self.pushed, self.got = [], []
        self.output = iter(())

    def do(self, step):
        getattr(self, step)()
        if self.rng.random() < 0.6:
            self.collect(self.output)

    def collect(self, results):
        for result in results:
            self.got.extend(zip(*(result[name].to_pylist() for name in ("id", "s", "v")), strict=True))

    def push(self):
        rng = self.rng
        keys = rng.integers(-3, 2 * self.size + 3, int(rng.choice([0, 1, 30, 300])))
        numbers = np.arange(len(self.pushed), len(self.pushed) + len(keys))
        within = pa.array(rng.choice([0.0, 0.05, 1.0, 9.0], len(keys)), mask=rng.random(len(keys)) < 0.2)
        now = len(self.versions) - 1
        self.pushed += [(int(number), int(key), now) for number, key in zip(numbers, keys, strict=True)]
        self.output = self.join.push(pa.record_batch({"id": numbers, "s": keys, "within": within}))

    def tick(self):
        self.output = self.join.tick()

    def due(self):
        if self.join.due is not None:
            self.clock.now = max(self.clock.now, self.join.due)
            self.output = self.join.tick()

    def flush(self):
        self.output = self.join.flush()

    def wait(self):
        self.clock.now += float(self.rng.choice([0.01, 0.2, 2.0]))

    def take(self):
        result = next(self.output, None)
        self.collect([] if result is None else [result])

    def apply(self):
        rng, relation, version = self.rng, self.versions[-1], len(self.versions)
        gone = np.unique(rng.choice(list(relation), 3))
        keys = np.setdiff1d(rng.integers(0, 2 * self.size, int(rng.choice([1, 20, 200]))), gone)
        self.output = self.join.apply(rows_of(keys, version), pa.table({"k": gone}))
        rest = {key: value for key, value in relation.items() if key not in set(gone.tolist())}
        self.versions.append(rest | {int(key): int(10 * key + version) for key in keys})


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=STEPS,
    how=st.sampled_from(["inner", "left"]),
    deadline=st.sampled_from([None, 0.02, 0.3, 3.0]),
    stated=st.booleans(),
    band=st.sampled_from([None, (0, 3), (120, 70)]),
    memory=st.sampled_from(["128KiB", "256KiB", "4MiB"]),
    thresholds=st.sampled_from([(None, None), (1, 50), (40, 400)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_results_are_exact_for_all_interleavings(build, steps, how, deadline, stated, band, memory, thresholds, seed):
    clock, size = Clock(), 1500
    with build(rows_of(range(0, 2 * size, 2)), ["k"], unique=True, page_size=4096) as table:
        join = SSIJ(
            table, [("s", "k")] if band is None else Band("s", "k", *band), how, memory, columns=["v"],
            clock=clock, reader=SlowReader(table, clock), deadline=deadline,
            deadline_column="within" if stated else None,
            input_threshold=thresholds[0], stream_threshold=thresholds[1],
        )  # fmt: skip
        session = Session(table, clock, np.random.default_rng(seed), size, join)
        for step in steps:
            session.do(step)
        session.collect(join.finish())
        stats = join.stats
    wanted = expected_rows(session.pushed, session.versions, *(band or (0, 0)), outer=how == "left")
    assert sorted(session.got, key=repr) == wanted
    assert stats.rows_done == stats.rows_in == len(session.pushed)
    assert stats.rows_held == 0
    assert stats.memory.peak <= stats.memory.limit


# Deadlines of single tuples


def test_the_tuples_that_are_due_first_leave_the_input_buffer_first():
    deadlines = Deadlines(5.0, "within")
    buffer = InputBuffer(deadlines)
    for at, within in ((0.0, [9.0, 1.0]), (0.5, [0.2, None])):
        batch = pa.record_batch({"k": [at, at], "within": pa.array(within, pa.float64())})
        buffer.add(batch, deadlines.stamp(batch, at))
    assert (buffer.due, buffer.tightest) == (pytest.approx(0.7), pytest.approx(0.2))
    first = buffer.take(2)
    assert sorted(first.rows["within"].to_pylist()) == [0.2, 1.0]
    assert (len(first.arrival), buffer.rows, buffer.due) == (2, 2, 5.5)
    rest = buffer.take(9)
    assert rest.rows["within"].to_pylist() == [9.0, None]
    assert arrived(rest.arrival).tolist() == [0.0, 0.5]
    assert (buffer.rows, buffer.nbytes, buffer.due) == (0, 0, np.inf)


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        (pa.array([1500, None], pa.duration("ms")), [1.5, 5.0]),
        (pa.array([2, 0], pa.int32()), [2.0, 0.0]),
        (pa.array([0.25, np.inf]), [0.25, np.inf]),
    ],
)
def test_a_deadline_is_a_duration_or_a_number_of_seconds(values, seconds):
    deadlines = Deadlines(5.0, "within")
    batch = pa.record_batch({"within": values})
    deadlines.check(batch.schema)
    assert deadlines.stamp(batch, 10.0)["due"].tolist() == [10.0 + wait for wait in seconds]


@pytest.mark.parametrize("within", [[0.5, -1.0], [0.5, np.nan], pa.array([1, -(2**62)], pa.duration("s"))])
def test_a_deadline_that_is_no_time_is_refused_before_anything_is_taken(table, within):
    join = make(table, Clock(), deadline_column="within")
    with pytest.raises(JoinInputError, match="row 1 of the batch"):
        join.push(batch_of([1, 2], within=within))
    assert join.stats.rows_in == 0
    assert join.push(batch_of([1], within=within[:1])).drain() + join.finish().drain() == 1


@pytest.mark.parametrize(
    ("columns", "message"), [({}, "no column 'within'"), ({"within": ["1s"]}, "'within' has type string")]
)
def test_a_stream_without_deadlines_is_refused(table, columns, message):
    with pytest.raises(StreamSchemaError, match=message):
        make(table, Clock(), deadline_column="within").push(batch_of([1], **columns))


def test_a_deadline_column_is_named_by_text(table):
    with pytest.raises(JoinInputError, match="name of a stream column"):
        make(table, Clock(), deadline_column=5)


def test_a_look_up_of_an_absent_key_counts_for_its_page(build):
    """A tuple without a match is complete without a read if its page is cached, like any other."""
    with build(rows_of(range(0, 2 * KEYS, 2)), ["k"], unique=True, page_size=4096) as table:
        join = make(table, Clock(), memory="160KiB", input_threshold=1, stream_threshold=10**6, record_tier=False)
        for _ in range(3):
            join.push(batch_of([4001] * 50)).drain()
            join.push(batch_of(range(0, 2 * KEYS, 100))).drain()
            join.flush().drain()
        before = join.stats
        join.push(batch_of([4001])).drain()
        assert (join.stats - before).rows_cached == 1


def test_tuples_without_a_deadline_are_never_due(table):
    join = make(table, Clock(), deadline_column="within", input_threshold=1)
    join.push(batch_of([5], within=pa.array([None], pa.float64()))).drain()
    assert join.due is None
    assert join.finish().drain() == 1


def test_tuples_in_a_hurry_do_not_wait_for_the_others(table):
    clock, rng = Clock(), np.random.default_rng(9)
    scan = sweep_seconds(table)
    hurry, patience = 6 * READ, 40 * scan
    assert hurry < scan
    join = make(table, clock, deadline_column="within", memory="160KiB", input_threshold=1, stream_threshold=10**6)
    arrivals = []
    for number in range(60):
        at, few = number * scan / 3, number % 3 == 0
        within = np.full(1 if few else 30, hurry if few else patience)
        arrivals.append((at, batch_of(rng.integers(0, KEYS, len(within)), at, within=within)))
    waits, rows = live(join, clock, arrivals)
    limits = np.array([row["within"] for row in rows])
    assert len(waits) == join.stats.rows_in
    assert (waits <= limits + 1e-9).all()
    assert join.stats.deadline_misses == 0
    assert (waits[limits == patience] > scan).any(), "the others waited to share their reads"


@settings(max_examples=30)
@given(
    allowances=st.lists(st.sampled_from([0.0, 0.02, 0.5, 4.0]), min_size=1, max_size=30),
    gap=st.sampled_from([0.0, 0.01, 0.2]),
    seed=st.integers(0, 2**32 - 1),
)
def test_lateness_is_counted_tuple_by_tuple(table, allowances, gap, seed):
    clock, rng = Clock(), np.random.default_rng(seed)
    join = make(table, clock, deadline_column="within", deadline=1.0)
    arrivals = [
        (i * gap, batch_of(rng.integers(0, KEYS, 3), i * gap, within=np.full(3, allowance)))
        for i, allowance in enumerate(allowances)
    ]
    waits, rows = live(join, clock, arrivals)
    assert len(waits) == join.stats.rows_in
    late = waits > np.array([row["within"] for row in rows]) + 1e-9
    assert join.stats.deadline_misses == int(late.sum())
    assert join.stats.longest_wait == pytest.approx(waits.max())
