"""Each claim about joins of streams holds for rows that support it, and not for rows that refute it."""

import copy

import pytest

from benchmarks.experiments._claims import Verdict
from benchmarks.experiments._results import Rows
from benchmarks.streams import _headlines, delays, many_inputs, punctuated, real_data, ripples, synthetic
from benchmarks.streams._claims import BOUND, COUNTED, DINER, HMJ, PAPER, RPJ
from benchmarks.streams._headlines import HEADLINES, headlines
from benchmarks.streams._world import LIFETIME
from benchmarks.streams.run import FIGURES


def table(name, lines, places, **columns):
    """Return rows of a figure: values of lines at places, the same as results, and columns with one value each."""
    axes = FIGURES[name].axes
    return [
        {"results": 1000 * value, **columns, "line": line, axes.x: place, axes.y: value}
        for line, values in lines.items()
        for place, value in zip(places, values, strict=True)
    ]


def put(line, *values, column=None):
    """Return a change of the rows of a line: other values, or one for all; `column` is one beside the plotted one."""

    def change(name, rows):
        some = [row for row in rows if row["line"] == line]
        assert some, line
        for row, value in zip(some, values if len(values) > 1 else values * len(some), strict=True):
            row[column or FIGURES[name].axes.y] = value
            if column is None and FIGURES[name].axes.x != "results":
                row["results"] = 1000 * value if FIGURES[name].axes.y != "results" else value

    return change


def several(*changes):
    def change(name, rows):
        for one in changes:
            one(name, rows)

    return change


BEHIND = several(put(DINER, 1), put(RPJ, 5), put(HMJ, 5))
EVEN = several(put(DINER, 10), put(RPJ, 9), put(HMJ, 9))


def real(name, data):
    papers = list(real_data.TABLE_4[data])
    lines = {
        DINER: papers, RPJ: [papers[0] / 3, *(value / 1.2 for value in papers[1:])],
        HMJ: [papers[0] / 2, *(value / 1.5 for value in papers[1:])], COUNTED: papers,
        COUNTED.replace(DINER, RPJ): [value / 2 for value in papers],
        COUNTED.replace(DINER, HMJ): [value / 3 for value in papers], BOUND: [95] * 4, PAPER: papers,
    }  # fmt: skip
    return table(name, lines, real_data.MEMORIES)


REAL = [
    put(DINER, 1),
    BEHIND,
    EVEN,
    several(put(DINER, 10), put(RPJ, 9, 8, 7, 6), put(HMJ, 9, 8, 7, 6)),
    put(COUNTED, 0.1),
]


def by_time(name):
    ours = [10, 20, 30, 40, 50]
    lines = {line: [value / (1 + at / 10) for value in ours] for at, line in enumerate(ripples.LINES)}
    return table(name, lines, ripples.PERCENT)


def spans(name):
    count = len(real_data.NOISES if name == "noise" else real_data.ROUNDED)
    rising = [20 + 10 * at for at in range(count)]
    return table(name, {DINER: rising, RPJ: [value / 2.5 for value in rising], HMJ: [5] * count}, range(1, count + 1))


SPANS = [put(DINER, 90), several(put(DINER, 1), put(RPJ, 5), put(HMJ, 5)), EVEN]


def rising_lead(name, places):
    count = len(places)
    lines = {
        DINER: [80] * count, RPJ: [60 - 8 * at for at in range(count)], HMJ: [50 - 8 * at for at in range(count)],
        BOUND: [90] * count, LIFETIME: [60 - 8 * at for at in range(count)],
    }  # fmt: skip
    return table(name, lines, places)


FALLING_LEAD = several(put(DINER, 80), put(RPJ, 20, 25, 30, 35, 40), put(HMJ, 20, 25, 30, 35, 40))
FAR_BELOW = put(BOUND, 200)


def delayed(name):
    lines = {DINER: [80] * 5, RPJ: [40] * 5, HMJ: [9] * 5}
    return table(name, lines, delays.DELAYS, buffer=1000, memory_tuples=2000, reactive=4500)


def buffered(name):
    lines = {DINER: [1_030] * 5, RPJ: [9_000] * 5, HMJ: [8_000] * 5}
    rows = table(name, lines, delays.DELAYS, memory_tuples=8_500)
    for row in rows:
        row["buffer"] = row[FIGURES[name].axes.y]
    return rows


def chained(name):
    lines = {many_inputs._line(count): [65 - count, 70, 80, 85] for count in many_inputs.COUNTS}
    return table(name, lines | {BOUND: [50, 99, 99, 99], many_inputs.HALF_BOUND: [50] * 4}, many_inputs.MEMORIES)


TWO, THREE, FOUR = map(many_inputs._line, many_inputs.COUNTS)
CHAINED = [
    several(*(put(line, 60, 50, 40, 30) for line in (TWO, THREE, FOUR))),
    put(FOUR, 20, 70, 80, 85),
    put(FOUR, 60, 61, 62, 63),
    put(FOUR, 20, 70, 80, 85),
    put(BOUND, 99),
]


def by_skew(name):
    lines = {line: [60] * 5 for line in (TWO, FOUR, many_inputs.HALF_BOUND)}
    return table(name, lines, many_inputs.SKEWS)


GAP_LINES = [f"CSCO, {DINER}", f"weather, {DINER}", f"{FOUR}, MINER"]


def by_gap(name):
    return table(name, dict(zip(GAP_LINES, ([20, 60], [10, 20], [20, 60]), strict=True)), many_inputs.GAPS)


def waiting(name):
    lines = {many_inputs._line(count): [1_004] * 5 for count in many_inputs.COUNTS}
    return table(name, lines, delays.DELAYS, buffer=1_004, reactive=10)


def star(name):
    lines = {many_inputs.MINER: [60, 61, 62, 63], many_inputs.MJOIN: [1, 2, 3, 4]}
    return table(name, lines, many_inputs.MEMORIES)


def timed(name, lines):
    places = [1_000 * at for at in range(1, 11)]
    values = {line: [rate(place) for place in places] for line, rate in lines.items()}
    return table(name, values, places, tests=500, inserts=50)


def scheduled(name):
    lines = {}
    for order in punctuated.ORDERS:
        lines[punctuated._in_order(punctuated.BEST, order)] = lambda n: n
        lines[punctuated._in_order(punctuated.USUAL, order)] = lambda n: 2 * n
    return timed(name, lines)


def against_xjoin(name):
    state = name == "state"
    lines = {}
    for order in punctuated.ORDERS:
        lines[punctuated._in_order(punctuated.MJOIN, order)] = lambda n: 50 if state else 7_000 + n
        lines[punctuated._in_order(punctuated.XJOIN, order)] = lambda n: n if state else 2 * n
    return timed(name, lines)


def slower(contestant, order):
    return put(punctuated._in_order(contestant, order), 100_000)


BATCHES = f"every {punctuated.BATCH}"
CASES = {  # rows that support all claims of a figure, and for each claim a change that refutes it
    "csco": (lambda name: real(name, real_data.CSCO), REAL),
    "ipix": (lambda name: real(name, real_data.IPIX), REAL),
    "weather": (lambda name: real(name, real_data.WEATHER), REAL),
    "noise": (spans, SPANS),
    "rounded": (spans, SPANS),
    "ranges": (lambda name: table(name, {DINER: [9] * 3, real_data.PMJ: [3] * 3}, real_data.TABLE_4),
               [put(DINER, 1)]),
    "zipf": (lambda name: rising_lead(name, synthetic.SKEWS), [BEHIND, EVEN, FAR_BELOW]),
    "means": (lambda name: rising_lead(name, synthetic.MEANS), [BEHIND, FALLING_LEAD]),
    "variances": (lambda name: rising_lead(name, synthetic.VARIANCES), [BEHIND, FALLING_LEAD]),
    "sorted": (lambda name: rising_lead(name, synthetic.INTERVALS),
               [several(put(DINER, 10), put(RPJ, 9.9), put(HMJ, 9.9))]),
    "shifting": (lambda name: rising_lead(name, synthetic.SHIFTS),
                 [BEHIND, EVEN, FALLING_LEAD, put(LIFETIME, 79), FAR_BELOW]),
    "fine_keys": (lambda name: rising_lead(name, synthetic.SHIFTS), [BEHIND, EVEN]),
    "sizes": (lambda name: table(name, {DINER: [80, 70, 60, 50, 40], RPJ: [20, 25, 30, 35, 38],
                                        HMJ: [10, 20, 25, 35, 38]}, synthetic.SIZES),
              [BEHIND, put(DINER, 40, 50, 60, 70, 80),
               several(put(DINER, 40), put(RPJ, 38, 35, 30, 25, 20), put(HMJ, 38, 35, 30, 25, 20))]),
    "delays": (delayed, [BEHIND, put(RPJ, 3_000, column="buffer"), put(HMJ, 79)]),
    "input_buffer": (buffered, [several(put(DINER, 1_200), put(DINER, 1_200, column="buffer")),
                                put(RPJ, 8_000, column="buffer"),
                                several(put(RPJ, 1_100, column="buffer"), put(HMJ, 1_100, column="buffer"))]),
    "stock_delays": (delayed, [BEHIND]),
    "outer_blocks": (lambda name: table(name, {DINER: [50] * 6}, delays.OUTER_BLOCKS),
                     [put(DINER, 50, 55, 60, 65, 70, 75)]),
    "ripples": (by_time, [put(RPJ, 60), put(ripples.XJOIN, 1, 1, 1, 1, 51)]),
    "ripples_pauses": (by_time, [put(RPJ, 5), put(ripples.XJOIN, 1, 1, 1, 1, 51)]),
    "inputs": (chained, CHAINED),
    "inputs_skew": (by_skew, [put(FOUR, 40)]),
    "gaps": (by_gap, [several(*(put(line, 60, 20) for line in GAP_LINES)), put(GAP_LINES[1], 50, 70)]),
    "inputs_buffer": (waiting, [put(THREE, 1_200, column="buffer"),
                                several(*(put(line, 0, column="reactive") for line in (TWO, THREE, FOUR)))]),
    "star": (star, [put(many_inputs.MJOIN, 90), put(many_inputs.MJOIN, 30, 40, 50, 60),
                    put(many_inputs.MJOIN, 10, 9, 8, 1)]),
    "scheduling": (scheduled, [slower(punctuated.BEST, order) for order in punctuated.ORDERS]),
    "scheduling_costs": (lambda name: table(name, {"a": [0.9, 1.1]}, (0.1, 1.0)), [put("a", 1.1, 1.2)]),
    "xjoin": (against_xjoin, [slower(punctuated.MJOIN, order) for order in punctuated.ORDERS]),
    "crossover": (lambda name: table(name, {"a": [7_000, 100]}, (250, 500)), [put("a", 100, 200)]),
    "state": (against_xjoin, [put(punctuated._in_order(punctuated.MJOIN, order), *range(990, 10_990, 1_000))
                              for order in punctuated.ORDERS]),
    "purging": (lambda name: timed(name, {punctuated.AT_ONCE: lambda n: 2 * n, BATCHES: lambda n: n}),
                [put(BATCHES, 100_000)]),
}  # fmt: skip
CLAIMS = [(name, at) for name, figure in FIGURES.items() for at in range(len(figure.claims))]


def test_every_claim_of_every_figure_has_rows_that_refute_it():
    assert {name: len(changes) for name, (_, changes) in CASES.items()} == {
        name: len(figure.claims) for name, figure in FIGURES.items()
    }


@pytest.mark.parametrize(("name", "at"), CLAIMS)
def test_a_claim_holds_for_rows_that_support_it(name, at):
    finding = FIGURES[name].claims[at].judge(Rows(FIGURES[name].axes, CASES[name][0](name)))
    assert finding.verdict == Verdict.HOLDS, finding


@pytest.mark.parametrize(("name", "at"), CLAIMS)
def test_a_claim_does_not_hold_for_rows_that_refute_it(name, at):
    make, changes = CASES[name]
    rows = copy.deepcopy(make(name))
    changes[at](name, rows)
    finding = FIGURES[name].claims[at].judge(Rows(FIGURES[name].axes, rows))
    assert finding.verdict == Verdict.FAILS, finding
    assert finding.measured


def test_a_refused_run_is_told_and_counts_for_no_ratio():
    rows = real("csco", real_data.CSCO)
    put(COUNTED.replace(DINER, HMJ), 0, column="results")("csco", rows)
    finding = FIGURES["csco"].claims[-1].judge(Rows(FIGURES["csco"].axes, rows))
    assert finding.verdict == Verdict.HOLDS
    assert "(not enough memory)" in finding.measured


def main_case(name):
    """Return rows that support the main result of a figure, and two changes: one that keeps a part of it, or not."""
    make, changes = CASES[name]
    rows = make(name)
    if name == "input_buffer":
        put(RPJ, *_headlines.PAPER_BUFFERS[RPJ], column="buffer")(name, rows)
        put(HMJ, *_headlines.PAPER_BUFFERS[HMJ], column="buffer")(name, rows)
    return rows, {
        "delays": (put(HMJ, 79), BEHIND),
        "shifting": (EVEN, BEHIND),
        "input_buffer": (put(HMJ, 40, column="buffer"), changes[0]),
        "csco": (put(DINER, 1, 2, 3, 4), put(DINER, 58, 49, 43, 28)),
        "ipix": (put(DINER, 1, 2, 3, 4), put(DINER, 82, 72, 59, 38)),
        "weather": (put(DINER, 51, 52, 53, 54), put(DINER, 29, 24, 17, 10)),
        "star": (put(many_inputs.MJOIN, 20), put(many_inputs.MJOIN, 90)),
    }[name]


@pytest.mark.parametrize("headline", HEADLINES, ids=[headline.figure for headline in HEADLINES])
def test_a_main_result_is_judged_by_the_rows_of_its_figure(headline):
    name, axes = headline.figure, FIGURES[headline.figure].axes
    rows, changes = main_case(name)
    verdicts = [headline.claim.judge(Rows(axes, rows)).verdict]
    for change in changes:
        changed = copy.deepcopy(rows)
        change(name, changed)
        verdicts.append(headline.claim.judge(Rows(axes, changed)).verdict)
    assert verdicts == [Verdict.HOLDS, Verdict.PARTLY, Verdict.FAILS]


def test_the_table_of_main_results_has_those_that_were_measured():
    table = headlines(FIGURES, {"star": CASES["star"][0]("star")}).splitlines()
    assert len(table) == 3
    assert table[-1].startswith("| MINER against MJoin")
    assert "**holds**" in table[-1]
