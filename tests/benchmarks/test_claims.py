"""Each claim about the paper's figures holds for rows that support it, and not for rows that refute it."""

import copy

import pytest

from benchmarks.experiments import adaptive, peers, policies, scaling, sensitivity, skew, tpch
from benchmarks.experiments.__main__ import FIGURES
from benchmarks.experiments._claims import Claim, Verdict, grows
from benchmarks.experiments._results import Axes, Rows
from benchmarks.experiments._settings import MESH_BEST, MESH_PAPER, NOW, PAPER
from benchmarks.experiments.deadlines import MESH_SLOW

K = 1000


def table(figure, lines, places, **columns):
    """Return rows of a figure: values of lines at places, and columns with a value for each place."""
    axes = FIGURES[figure].axes
    return [
        {"line": line, axes.x: place, axes.y: value} | {name: values[at] for name, values in columns.items()}
        for line, values in lines.items()
        for at, (place, value) in enumerate(zip(places, values, strict=True))
    ]


def put(*lines, **changes):
    """Return a change of rows: other values of these lines (all by default), or of other columns."""

    def change(rows):
        for line in lines or dict.fromkeys(row["line"] for row in rows):
            some = [row for row in rows if row["line"] == line]
            for name, values in changes.items():
                column = "tuples_per_second" if name == "rates" else name
                for row, value in zip(some, values if isinstance(values, list) else [values] * len(some), strict=True):
                    row[column] = value

    return change


def several(*changes):
    def change(rows):
        for one in changes:
            one(rows)

    return change


def skew_rows(figure):
    lines = {
        PAPER: [10 * K, 15 * K, 40 * K],
        NOW: [30 * K, 40 * K, 80 * K],
        MESH_PAPER: [5 * K] * 3,
        MESH_BEST: [20 * K] * 3,
    }
    return table(figure, lines, (0.0, 0.5, 1.0), hit_ratio=[0.1, 0.3, 0.7])


SKEW = [
    put(PAPER, rates=[40 * K, 15 * K, 10 * K]),
    put(MESH_PAPER, rates=[5 * K, 6 * K, 7 * K]),
    put(PAPER, rates=[1 * K, 2 * K, 4 * K]),
    put(NOW, rates=K),
]


def memory_rows(figure):
    lines = {
        skew._at(PAPER, 0.0): [3 * K, 8 * K, 10 * K],
        skew._at(PAPER, 0.5): [3.1 * K, 9 * K, 12 * K],
        skew._at(PAPER, 1.0): [3.2 * K, 20 * K, 40 * K],
        **{skew._at(NOW, at): [4 * K, 10 * K, 12 * K] for at in skew.SKEWS},
        MESH_PAPER: [500, 3 * K, 6 * K],
        MESH_BEST: [1 * K, 5 * K, 9 * K],
    }
    return table(figure, lines, (1.0, 5.0, 10.0))


PAPERS_BY_SKEW = [skew._at(PAPER, at) for at in skew.SKEWS]
MEMORY = [
    put(*PAPERS_BY_SKEW, rates=[9 * K, 8 * K, 7 * K]),
    put(PAPERS_BY_SKEW[-1], rates=K),
    put(MESH_PAPER, rates=1000 * K),
    put(*PAPERS_BY_SKEW, rates=[100, 8 * K, 9 * K]),
    put(*(skew._at(NOW, at) for at in skew.SKEWS), rates=1),
]


def k_rows(figure):
    ours = {1: [2, 3], 10: [2, 4], 100: [3, 5], 400: [4, 9]}
    lines = {f"{PAPER}, 1:{k}": [K * ratio for ratio in ratios] for k, ratios in ours.items()}
    for k in ours:
        lines |= {f"{NOW}, 1:{k}": [5 * K] * 2, f"{MESH_PAPER}, 1:{k}": [K] * 2, f"{MESH_BEST}, 1:{k}": [2 * K] * 2}
    return table(figure, lines, (1.0, 10.0)) + table(figure, {line: [10 * K] for line in PROPORTIONAL_BY_K}, (10.0,))


PAPERS_BY_K = [f"{PAPER}, 1:{k}" for k in skew.KS]
PROPORTIONAL_BY_K = [f"{skew.PROPORTIONAL}, 1:{k}" for k in skew.KS]
BY_K = [
    put(*PAPERS_BY_K, rates=500),
    put(PAPERS_BY_K[0], rates=500),
    put(PAPERS_BY_K[-1], rates=500),
    put(*PAPERS_BY_K, rates=[9 * K, 2 * K]),
    put(*PROPORTIONAL_BY_K, rates=K),
    put(*(f"{NOW}, 1:{k}" for k in skew.KS), rates=100),
]


def k_scale_rows(figure):
    lines = {PAPER: [2, 2.5, 3, 3.5], skew.PROPORTIONAL: [4, 5, 6, 7]}
    return table(figure, lines, (0.01, 0.02, 0.04, 0.08), hit_ratio=[0.6, 0.65, 0.7, 0.75])


def tpch_rows(figure):
    lines = {PAPER: [3 * K, 2 * K, 1.6 * K], NOW: [4 * K] * 3, MESH_PAPER: [K] * 3, MESH_BEST: [2 * K] * 3}
    lines[tpch.APART] = [5 * K, 3 * K, 2 * K]
    return table(figure, lines, (1.0, 5.0, 10.0), hit_ratio=[0.1, 0.2, 0.3], index_percent=[50, 10, 5])


def split_rows(figure):
    lines = {"no cache": 100, "20 % cache": 110, "50 % cache": 120, "70 % cache": 130}
    values = {line: [K * rate] * 3 for line, rate in lines.items()} | {"adaptive": [160 * K, 200 * K, 500 * K]}
    slower = {line: 0.5 + 0.1 * place for place, line in enumerate(values)}
    pushed = {adaptive._closed(line): [slower[line] * rate for rate in rates] for line, rates in values.items()}
    rows = table(figure, values | pushed, (5.0, 10.0, 15.0))
    put(bound=300 * K, reads_of_a_page=1.9)(rows)
    put(*values, reads_of_a_page=1.1)(rows)
    return rows


def split_changes(name):
    fixed = [name(line) for line in adaptive.VARIANTS if line != adaptive.ADAPTIVE]
    return [
        several(*(put(line, rates=K * rate) for line, rate in zip(fixed, (130, 120, 110, 100), strict=True))),
        put(name(adaptive.ADAPTIVE), rates=100 * K),
        put(name(adaptive.ADAPTIVE), rates=[500 * K, 200 * K, 160 * K]),
    ]


def burst_rows(figure):
    ms = {10: 800, 25: 600, 50: 500, 70: 300, adaptive.CONTROL: 2}
    rows = table(figure, {"here": list(ms.values())}, list(ms))
    put("here", absorbed_to_the_end=False, nominal_rate=400 * K, steady_rate=900 * K)(rows)
    return rows + table(figure, {"paper": list(adaptive.BURSTS.values())}, list(adaptive.BURSTS))


def control_to_the_end(rows):
    next(row for row in rows if row["increase_percent"] == adaptive.CONTROL)["absorbed_to_the_end"] = True


def input_rows(figure):
    lines = {PAPER: [10, 20, 30, 40, 50, 50, 50], sensitivity.FREE: [50] * 7}
    return table(figure, lines, sensitivity.INPUT_THRESHOLDS)


def threshold_rows(figure):
    lines = {PAPER: [1 * K, 2 * K, 3 * K, 3 * K, 3 * K, 3 * K, 2 * K], sensitivity.MORE: [6 * K] * 7}
    lines[sensitivity.PUSHED] = [1 * K, 2 * K, 3 * K, 3 * K, 3 * K, 3 * K, 3 * K]
    return table(figure, lines, sensitivity.STREAM_THRESHOLDS, tuples_a_phase=[200 * K] * 7)


def fill_rows(figure):
    rates = (10, 15, 20, 30)
    lines = {sensitivity._filled(fill): [rate, 3 * rate] for fill, rate in zip(sensitivity.FILLS, rates, strict=True)}
    return table(figure, lines, (1.0, 10.0))


def scan_rows(figure):
    hits = [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.3]
    return table(figure, {PAPER: [10, 20, 30, 40, 40, 40, 20]}, sensitivity.SCANS, hit_ratio=hits,
                 longest_read=[*sensitivity.SCANS])  # fmt: skip


def read_to_the_side(rows):
    """Make it so that no read evicts a cached page."""
    put(PAPER, hit_ratio=0.5, longest_read=[5, 25, 50, 100, 200, 200, 200])(rows)


def deadline_rows(figure):
    places = (10.0, 30.0, 60.0, 62.2, 113.2, 120.0)
    rates = [600, 2 * K, 6 * K, 26 * K, 27 * K, 28 * K]
    rows = table(figure, {PAPER: rates, NOW: rates}, places, longest_wait=[9, 29, 59, 61, 112, 119])
    put(pace=1.0, half_fits=True, more_overflows=False, more_misses=3)(rows)
    meshes = {MESH_PAPER: (5455, 560.0), MESH_BEST: (25 * K, 61.0), MESH_SLOW: (3 * K, 600.0)}
    mesh = [row for line, (rate, delay) in meshes.items() for row in table(figure, {line: [rate]}, (delay,))]
    put(pace=1.0)(mesh)
    return rows + mesh + table(figure, {"the paper": [550]}, (10,))


DEADLINES = [
    put(PAPER, rates=[100, 2 * K, 6 * K, 26 * K, 27 * K, 28 * K]),
    put(PAPER, rates=[600, 2 * K, 3 * K, 26 * K, 27 * K, 28 * K]),
    put(PAPER, rates=[600, 2 * K, 6 * K, 6 * K, 6 * K, 7 * K]),
    put(PAPER, longest_wait=[9, 29, 61, 61, 112, 119]),
    put(MESH_PAPER, deadline=60.0),
    put(MESH_SLOW, rates=6 * K),
    several(put(PAPER, rates=[600, 2 * K, 6 * K, 6 * K, 6 * K, 7 * K]), put(NOW, rates=K)),
]


def scale_rows(figure):
    rates = {PAPER: 20 * K, NOW: 40 * K, MESH_PAPER: 5 * K, MESH_BEST: 25 * K, scaling.MODEL: 25 * K}
    rows = table(figure, {line: [rate] * 3 for line, rate in rates.items()}, (0.02, 0.05, 0.1))
    del rates[scaling.MODEL]
    rows += table(figure, {scaling._real(line): [rate] for line, rate in rates.items()}, (0.02,))
    return rows + table(figure, {scaling.MODEL: [25 * K]}, (1.0,))


ALL_SCALED = [put(line, rates=[K, 2 * K, 3 * K]) for line in (PAPER, NOW, MESH_PAPER, MESH_BEST)]


def hit_rows(figure):
    lines = {line: [0.5, 0.4] for line in policies.POLICIES} | {policies.OPTIMUM: [0.6, 0.6]}
    return table(figure, lines, ("uniform", "Zipf 1"))


def variant_rows(figure):
    rates = dict.fromkeys(policies.WITHOUT, 50) | {policies.AS_IN_PAPER: 100, "aging": 100}
    rates |= {policies.WAITING: 170, policies.RECORDS: 168}
    counted = {"pages": [1000, 1000], "pages_read": [900, 900], "phases": [2, 2]}
    return table(figure, {line: [rate, rate] for line, rate in rates.items()}, ("uniform", policies.ZIPF), **counted)


def plan_rows(figure):
    lines = {policies._reads_of(most): [1.0, 1.05, 1.005] for most in policies.LONGEST_READS}
    return table(figure, lines, (0.01, 0.05, policies.DENSE))


def tier_rows(figure):
    places = [f"{stream}, {kind}" for kind in (policies.WIDE, policies.NARROW)
              for stream in ("uniform", policies.ZIPF, policies.SCATTERED)]  # fmt: skip
    rates = {
        f"{when}, {line}": [rate] * len(places)
        for when in ("cold", "long run")
        for line, rate in ((policies.WITHOUT_TIER, 100), (policies.WITH_TIER, 101))
    }
    return table(figure, rates, places)


LONG_RUN = f"long run, {policies.WITH_TIER}"
CASES = {  # rows that support all claims of a figure, and for each claim a change that refutes it
    "scaling": (scale_rows, [several(*ALL_SCALED), put(scaling.MODEL, rates=50 * K),
                             put(*(scaling._real(line) for line in (PAPER, NOW, MESH_PAPER, MESH_BEST)), rates=1)]),
    "fig3": (skew_rows, SKEW),
    "fig4": (skew_rows, SKEW),
    "fig5": (memory_rows, MEMORY),
    "fig6": (memory_rows, MEMORY),
    "fig7": (k_rows, BY_K),
    "fig7_scale": (k_scale_rows, [put(skew.PROPORTIONAL, times=[6, 5, 4, 3])]),
    "fig8": (tpch_rows, [put(PAPER, rates=K), put(tpch.APART, rates=[2 * K, 3 * K, 4 * K]), put(NOW, rates=K)]),
    "fig9": (lambda figure: table(figure, {PAPER: [3, 10, 24], peers.POOL: [1, 1, 1]}, peers.SIZES),
             [put(PAPER, rates=2)]),
    "fig10": (split_rows, [*split_changes(lambda line: line), *split_changes(adaptive._closed),
                           put(adaptive.ADAPTIVE, rates=[160 * K, 170 * K, 180 * K]),
                           put(*map(adaptive._closed, adaptive.VARIANTS), rates=K),
                           put(adaptive.NO_CACHE, reads_of_a_page=1.8), put(bound=500 * K)]),
    "table3": (burst_rows, [put("here", milliseconds=1), control_to_the_end, put("here", steady_rate=400 * K)]),
    "fig11": (lambda figure: table(figure, {PAPER: [1, 2, 3], sensitivity.LRU: [1, 1, 1]}, (1.0, 5.0, 10.0)),
              [put(PAPER, rates=1)]),
    "fig12": (input_rows, [put(PAPER, rates=10), put(sensitivity.FREE, rates=[10, 20, 30, 40, 50, 50, 50])]),
    "fig13": (threshold_rows, [put(PAPER, rates=K), put(PAPER, rates=[1, 2, 4, 8, 16, 32, 64]),
                               put(PAPER, rates=[1, 2, 4, 8, 16, 32, 64]), put(PAPER, tuples_a_phase=5 * K),
                               put(sensitivity.MORE, rates=[1, 2, 4, 8, 16, 32, 64])]),
    "fig14": (fill_rows, [put(rates=[7, 7])]),
    "fig15": (scan_rows, [put(rates=10), put(rates=[10, 20, 30, 40, 40, 40, 40]), put(hit_ratio=0.5)]),
    "fig16": (deadline_rows, DEADLINES),
    "hit_ratios": (hit_rows, [put("LRU", hit_ratio=0.9)]),
    "read_plans": (plan_rows, [put(times=1.1)]),
    "variants": (variant_rows, [put(*policies.WITHOUT, rates=100), put(policies.WAITING, rates=90)]),
    "record_tier": (tier_rows, [put(LONG_RUN, rates=[101, 101, 101, 101, 94, 101]),
                                put(LONG_RUN, rates=[101, 101, 99, 101, 101, 101]),
                                put(f"cold, {policies.WITH_TIER}", rates=[79, 101, 101, 101, 101, 101])]),
}  # fmt: skip
CLAIMS = [(name, at) for name, figure in FIGURES.items() for at in range(len(figure.claims))]


def test_every_claim_of_every_figure_has_rows_that_refute_it():
    assert {name: len(changes) for name, (_, changes) in CASES.items()} == {
        name: len(figure.claims) for name, figure in FIGURES.items()
    }


SUPPORTED_OTHERWISE = {("fig15", 2): read_to_the_side}  # where rows that support all claims would contradict themselves


@pytest.mark.parametrize(("name", "at"), CLAIMS)
def test_a_claim_holds_for_rows_that_support_it(name, at):
    make, _ = CASES[name]
    rows = make(name)
    SUPPORTED_OTHERWISE.get((name, at), several())(rows)
    finding = FIGURES[name].claims[at].judge(Rows(FIGURES[name].axes, rows))
    assert finding.verdict == Verdict.HOLDS, finding


@pytest.mark.parametrize(("name", "at"), CLAIMS)
def test_a_claim_does_not_hold_for_rows_that_refute_it(name, at):
    make, changes = CASES[name]
    rows = copy.deepcopy(make(name))
    changes[at](rows)
    finding = FIGURES[name].claims[at].judge(Rows(FIGURES[name].axes, rows))
    assert finding.verdict == Verdict.FAILS, finding
    assert finding.measured


def test_a_burst_table_whose_control_does_not_overflow_decides_nothing():
    rows = burst_rows("table3")
    control_to_the_end(rows)
    assert FIGURES["table3"].judge(rows)[0].verdict == Verdict.FAILS


@pytest.mark.parametrize(("name", "change", "at", "words"), [
    ("fig3", put(PAPER, rates=[4 * K, 6 * K, 40 * K]), 2, "0.80, 1.20, 8.00"),
    ("fig5", put(PAPERS_BY_SKEW[0], rates=[9 * K, 8 * K, 7 * K]), 0, "it does not grow at skew 0"),
    ("fig7", put(PAPERS_BY_K[1], rates=[9 * K, 2 * K]), 3, "it shrinks for 1:10"),
    ("fig8", put(PAPER, rates=[2 * K, 3 * K, K]), 0, "2.00, 3.00, 1.00"),
    ("fig9", put(PAPER, rates=[2, 10, 24]), 0, "2.0, 10.0, 24.0"),
    ("fig12", put(PAPER, rates=[10, 20, 30, 40, 50, 60, 70]), 0, "it is still growing there"),
    ("variants", put("LRU", rates=100), 0, "does not fall with: LRU"),
])  # fmt: skip
def test_a_claim_that_is_true_of_a_part_says_of_which(name, change, at, words):
    rows = CASES[name][0](name)
    change(rows)
    finding = FIGURES[name].judge(rows)[at]
    assert finding.verdict == Verdict.PARTLY
    assert words in finding.measured


def test_a_difference_within_the_scatter_of_equal_trials_counts_for_nothing():
    rows = [{"line": "a", "x": at, "y": y, "lowest": 1.0, "highest": 1.5} for at, y in enumerate((10, 9, 20))]
    data = Rows(Axes("x", "y", "x"), rows)
    assert data.scatter == 1.5
    assert grows([10, 9, 20], data.scatter)
    assert not grows([10, 9, 20])
    assert not grows([10, 11, 12], data.scatter)


def test_a_claim_about_a_contestant_that_did_not_run_is_left_out():
    rows = input_rows("fig12")
    without = [row for row in rows if row["line"] != sensitivity.FREE]
    assert len(FIGURES["fig12"].judge(rows)) == len(FIGURES["fig12"].judge(without)) + 1


def test_words_may_add_to_the_others_or_replace_them():
    claim = Claim("", lambda _: {"x": 3}, lambda _: False, "{x} apples", otherwise={Verdict.FAILS: "+, not {x} pears"})
    replaced = Claim("", lambda _: {"x": 3}, lambda _: False, "{x} apples", otherwise={Verdict.FAILS: "{x} pears"})
    assert claim.judge(None).measured == "3 apples, not 3 pears"
    assert replaced.judge(None).measured == "3 pears"
