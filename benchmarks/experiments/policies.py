"""Hit ratios of cache policies against the best fixed set of pages, and SSIJ against its variants.

The policies are simulated without an operator: a tuple whose page is cached is a hit, the others wait. When as many
wait as the stream threshold, a join phase reads all their pages, and the policy chooses which of these and of the
cached ones stay. Every policy has the same number of frames and the same input.
"""

import numpy as np

from benchmarks.experiments._claims import Claim, listed, percent
from benchmarks.experiments._rates import service_rate
from benchmarks.experiments._relations import moving_keys, stream_batches, zipf_keys
from benchmarks.experiments._results import Axes, Figure
from benchmarks.experiments._settings import measure
from headrace.joins import SSIJ
from headrace.storage.read import plan_cost, plan_reads, plan_reads_greedily

__all__ = ["FIGURES"]

SMALL, MAIN = 0.1, 3
ROWS_PER_PAGE = 16
ZIPF, SCATTERED = "Zipf 1", "Zipf 1, scattered"
FRAMES = 0.05  # of the pages
PLANNED = 250_000  # pages of which some are wanted
DENSE, MOST_OF_GREEDY = 0.5, 1.01
WANTED_SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, DENSE, 0.9)
LONGEST_READS = (40, 200)


class Counters:
    """Scores by use: what was joined with since the last phase, and `keep` of what the score was before.

    With 0 it is the paper's utility counter. `remember` also keeps the scores of pages that are not cached.
    """

    def __init__(self, pages, frames, keep=0.0, *, remember=False):
        self.frames = frames
        self.keep = keep
        self.remember = remember
        self.score = np.zeros(pages)
        self.cached = np.zeros(pages, dtype=bool)

    def phase(self, hits, demand):
        """Settle what stays, given how many tuples met each page in the cache and how many waited for each."""
        self.score += hits + demand
        wanted = np.flatnonzero(self.cached | (demand > 0))
        preferred = wanted[np.lexsort((~self.cached[wanted], -self.score[wanted]))][: self.frames]
        self.cached[:] = False
        self.cached[preferred] = True
        self.score *= self.keep
        if not self.remember:
            self.score[~self.cached] = 0


class LRU(Counters):
    """What a join phase reads is newer than what was in the cache."""

    def phase(self, hits, demand):
        self.score[hits > 0] = self.score.max() + 1
        read = np.flatnonzero(demand)
        self.score[read] = self.score.max() + 1 + np.arange(len(read))
        wanted = np.flatnonzero(self.cached | (demand > 0))
        newest = wanted[np.argsort(-self.score[wanted])][: self.frames]
        self.cached[:] = False
        self.cached[newest] = True


class S3FIFO(Counters):
    """Pages come into a small queue, go on to the main one if they were used there, and leave each in turn.

    Yang and others, "FIFO queues are all you need for cache eviction", SOSP 2023.
    """

    def __init__(self, pages, frames):
        super().__init__(pages, frames)
        self.small, self.main, self.ghost = [], [], {}
        self.uses = np.zeros(pages, dtype=np.int64)

    def phase(self, hits, demand):
        self.uses = np.minimum(self.uses + hits, MAIN)
        for page in np.flatnonzero(demand).tolist():
            queue = self.main if self.ghost.pop(page, None) is not None else self.small
            while len(self.small) + len(self.main) >= self.frames:
                self._evict()
            queue.append(page)
            self.uses[page] = min(int(demand[page]) - 1, MAIN)
        self.cached[:] = False
        self.cached[self.small + self.main] = True

    def _evict(self):
        if len(self.small) > SMALL * self.frames or not self.main:
            page = self.small.pop(0)
            if self.uses[page] > 0:
                self.main.append(page)
            else:
                self.ghost[page] = True
                if len(self.ghost) > self.frames:
                    self.ghost.pop(next(iter(self.ghost)))
            return
        page = self.main.pop(0)
        if self.uses[page] > 0:
            self.uses[page] -= 1
            self.main.append(page)


POLICIES = {
    "utility, cleared (paper)": Counters,
    "utility, halved": lambda pages, frames: Counters(pages, frames, 0.5),
    "utility, x 0.9": lambda pages, frames: Counters(pages, frames, 0.9),
    "remembered, halved": lambda pages, frames: Counters(pages, frames, 0.5, remember=True),
    "remembered, x 0.9": lambda pages, frames: Counters(pages, frames, 0.9, remember=True),
    "S3-FIFO": S3FIFO,
    "LRU": LRU,
}
OPTIMUM = "static optimum"
PAPER_POLICY = "utility, cleared (paper)"


def hit_ratios(_world, settings):
    """The share of tuples whose page is cached, for each policy and stream."""
    pages = settings.pages
    frames, rows = int(FRAMES * pages), []
    for stream, keys in _streams(settings).items():
        leaves = keys // ROWS_PER_PAGE
        threshold = max(1, len(leaves) // 40)
        ratios = {line: _play(make(pages, frames), leaves, threshold) for line, make in POLICIES.items()}
        ratios[OPTIMUM] = _best(leaves, pages, frames)
        rows += [{"line": line, "stream": stream, "hit_ratio": round(ratio, 4)} for line, ratio in ratios.items()]
    order = [*POLICIES, OPTIMUM]
    return sorted(rows, key=lambda row: order.index(row["line"]))


def _by_mean(rows):
    means = {line: float(np.mean(rows.values(line))) for line in POLICIES}
    paper, best = means[PAPER_POLICY], max(means, key=means.get)
    return {
        "told": ", ".join(f"{line} {100 * mean:.1f} %" for line, mean in means.items()), "best": best,
        "behind": 100 * (means[best] - paper),
    }  # fmt: skip


def _streams(settings):
    keys, count = settings.pages * ROWS_PER_PAGE, 40 * settings.pages
    rng = np.random.default_rng(11)
    streams = {"uniform": zipf_keys(keys, 0.0, count)}
    for skew in (0.5, 0.75, 1.0):
        streams[f"Zipf {skew:g}"] = zipf_keys(keys, skew, count)
        streams[f"Zipf {skew:g}, scattered"] = zipf_keys(keys, skew, count, scattered=True)
    streams["temporal locality"] = moving_keys(keys, 20, count)
    orders = rng.integers(0, keys, count // 4)  # TPC-H: lines of an order ask for products drawn uniformly
    streams["like TPC-H"] = (orders[:, None] + rng.integers(0, keys, (1, 4))).ravel() % keys
    return streams


def _play(policy, leaves, threshold):
    """Return the share of hits after the first quarter of the stream."""
    pages, step = len(policy.cached), max(1, threshold // 4)
    hits, demand = np.zeros(pages, dtype=np.int64), np.zeros(pages, dtype=np.int64)
    found = counted = waiting = 0
    for start in range(0, len(leaves), step):
        part = leaves[start : start + step]
        cached = policy.cached[part]
        np.add.at(hits, part[cached], 1)
        np.add.at(demand, part[~cached], 1)
        waiting += int((~cached).sum())
        if start >= len(leaves) // 4:
            found += int(cached.sum())
            counted += len(part)
        if waiting >= threshold:
            policy.phase(hits, demand)
            hits[:] = demand[:] = waiting = 0
    return found / counted


def _best(leaves, pages, frames):
    """Return the share of hits if the pages that will be asked for most had been cached all along."""
    rest = leaves[len(leaves) // 4 :]
    return float(np.sort(np.bincount(rest, minlength=pages))[-frames:].sum() / len(rest))


AS_IN_PAPER, SINGLE = "as in the paper", "single pages"
WITHOUT = {  # a part of SSIJ each
    "LRU": {"cache_policy": "lru"},
    "no cache": {"cache_policy": "none"},
    "half of the memory for the cache": {"memory_split": 0.5},
    "greedy read plan": {"read_plan": "greedy"},
    SINGLE: {"max_scan": 1},
}
DEFAULTS = {"stream_threshold": None, "input_threshold": None}
WAITING, RECORDS = "waiting while it pays", "and a record tier"
SWITCHES = {
    AS_IN_PAPER: {},
    "aging": {"cache_policy": "ageing"},
    **WITHOUT,
    WAITING: DEFAULTS,
    RECORDS: DEFAULTS | {"record_tier": True},
}


def variants(world, settings):
    """SSIJ with one switch changed at a time, for three streams over a relation whose keys share pages."""
    relation, rows = settings.dense(ROWS_PER_PAGE), []
    streams = _three_streams(relation, 2 * settings.phases * relation.scaled(1_000_000))
    for line, switches in SWITCHES.items():
        for stream, keys in streams.items():
            options = relation.as_in_the_paper(settings.share) | switches
            served = measure(world, settings, relation, settings.share, keys, **options)
            rows.append({"line": line, "stream": stream, "pages": relation.pages, **served})
    return rows


def read_plans(world, _settings):
    """How much more greedy read plans cost than optimal ones, over the share of the pages that are wanted."""
    costs, rows, rng = world.costs, [], np.random.default_rng(1)
    for share in WANTED_SHARES:
        wanted = np.flatnonzero(rng.random(PLANNED) < share)
        for most in LONGEST_READS:
            optimal, greedy = (plan_cost(plan(wanted, costs.seek, costs.transfer, most), costs.seek, costs.transfer)
                               for plan in (plan_reads, plan_reads_greedily))  # fmt: skip
            rows.append({"line": _reads_of(most), "wanted": share, "times": round(greedy / optimal, 4)})
    return sorted(rows, key=lambda row: row["line"])


def _reads_of(pages):
    return f"reads of at most {pages} pages"


def _by_density(rows):
    times = [row["times"] for most in LONGEST_READS for row in rows.of(_reads_of(most))]
    dense = [rows.value(_reads_of(most), DENSE) for most in LONGEST_READS]
    worst = max(rows.rows, key=lambda row: row["times"])
    return {"least": min(times), "most": worst["times"], "at": percent(worst["wanted"]),
            "dense": dense, "dense_told": listed(dense, ".3f")}  # fmt: skip


def _by_switch(rows):
    paper = rows.value(AS_IN_PAPER, ZIPF)
    rates = {line: rows.value(line, ZIPF) / paper for line in SWITCHES if line != AS_IN_PAPER}
    idle = [line for line in WITHOUT if rates[line] * rows.scatter >= 0.99]
    single = next(row for row in rows.of(SINGLE) if row["stream"] == ZIPF)  # reads the wanted pages and no others
    return {
        "wanted": percent(single["pages_read"] / single["phases"] / single["pages"]),
        "idle": idle, "idle_told": ", ".join(idle),
        "told": ", ".join(f"{line} {rates[line]:.2f}" for line in WITHOUT),
        "waiting": rates[WAITING],
    }  # fmt: skip


def _three_streams(relation, count):
    return {
        "uniform": zipf_keys(relation.domain, 0.0, count),
        ZIPF: zipf_keys(relation.domain, 1.0, count),
        SCATTERED: zipf_keys(relation.domain, 1.0, count, scattered=True),
    }


WIDE, NARROW = "wide rows", "narrow rows"
NARROW_PER_PAGE, NARROW_NBYTES = 1600, 16
WITH_TIER, WITHOUT_TIER = "with a record tier", "without"


def record_tier(world, settings):
    """SSIJ with a record tier and without, over wide rows and narrow ones, from a cold start and in the long run."""
    wide, narrow = settings.dense(ROWS_PER_PAGE), settings.dense(NARROW_PER_PAGE, pages=settings.pages // 5)
    rows = []
    for kind, relation, nbytes, count in (
        (WIDE, wide, wide.tuple_nbytes, 4 * wide.domain),
        (NARROW, narrow, NARROW_NBYTES, 3 * narrow.domain // 2),
    ):
        for stream, keys in _three_streams(relation, count).items():
            batches = stream_batches(keys, max(1, count // 600), nbytes)
            for line, tier in ((WITHOUT_TIER, False), (WITH_TIER, True)):
                for when, (warm, most) in {"cold": (0, count // 4), "long run": (count // 2, count)}.items():
                    run = world.start(SSIJ, relation, settings.share, record_tier=tier)
                    served = service_rate(run, batches, warm=warm, most=most, phases=count)
                    rows.append({"line": f"{when}, {line}", "stream": f"{stream}, {kind}", **served.row()})
    return rows


def _by_tier(rows):
    gain = {
        (when, place): rows.value(f"{when}, {WITH_TIER}", place) / rows.value(f"{when}, {WITHOUT_TIER}", place)
        for when in ("cold", "long run")
        for place in dict.fromkeys(row["stream"] for row in rows.rows)
    }
    useless = {f"{stream}, {NARROW}": gain["long run", f"{stream}, {NARROW}"] for stream in ("uniform", ZIPF)}
    apart = {f"{SCATTERED}, {kind}": gain["long run", f"{SCATTERED}, {kind}"] for kind in (WIDE, NARROW)}
    cold = {place: value for (when, place), value in gain.items() if when == "cold"}
    return {
        "worst": min(useless.values()), "least_gain": min(apart.values()), "worst_cold": min(cold.values()),
        "useless": _told(useless), "apart": _told(apart), "cold": _told(cold),
    }  # fmt: skip


def _told(times):
    return ", ".join(f"{value:.2f} ({place})" for place, value in times.items())


PLAN_REASON = Claim(
    "(Ours) Where half of the pages are wanted, a greedy read plan costs at most a hundredth more than the optimum.",
    _by_density,
    lambda f: f["least"] >= 1 and max(f["dense"]) <= MOST_OF_GREEDY,
    "{dense_told} times as much where half of the pages are wanted; at most {most:.3f} times, where {at} are",
)
POLICY_CLAIMS = (
    Claim(
        "A page's utility is the number of tuples that it joined since the last join phase.",
        _by_mean,
        lambda f: f["behind"] < 1.0,
        'mean hit ratios over the streams: {told}; the best, "{best}", is {behind:.1f} points ahead of the paper\'s',
    ),
)
VARIANT_CLAIMS = (
    Claim(
        "Each part of SSIJ contributes: cache policy, cache, adaptive split, optimal read plan, sequential reads.",
        _by_switch,
        lambda f: not f["idle"],
        "shares of the rate at Zipf 1 if one is replaced: {told}; a join phase wants {wanted} of the pages",
        partly=lambda f: len(f["idle"]) < len(WITHOUT),
        otherwise={"holds in part": "+; the rate does not fall with: {idle_told}"},
        reason=PLAN_REASON,
    ),
    Claim(
        "(Ours) Without fixed thresholds SSIJ is faster.",
        _by_switch,
        lambda f: f["waiting"] > 1,
        "{waiting:.2f} times the rate at Zipf 1",
    ),
)
TIER_CLAIMS = (
    Claim(
        "(Ours) The record tier costs at most 5 % where it cannot help.",
        _by_tier,
        lambda f: f["worst"] >= 0.95,
        "in the long run it has this many times the rate without it: {useless}",
    ),
    Claim(
        "(Ours) Where popular rows lie apart the record tier is faster.",
        _by_tier,
        lambda f: f["least_gain"] > 1,
        "in the long run it has this many times the rate without it: {apart}",
    ),
    Claim(
        "(Ours) In a cold start the record tier costs at most 5 %.",
        _by_tier,
        lambda f: f["worst_cold"] >= 0.95,
        "it has this many times the rate without it: {cold}",
        partly=lambda f: f["worst_cold"] >= 0.8,
    ),
)

FIGURES = (
    Figure("hit_ratios", "Policies of the page cache", Axes("stream", "hit_ratio", "stream", "hit ratio"), hit_ratios,
           POLICY_CLAIMS,
           f'A cache of {100 * FRAMES:g} % of the pages. "Halved" and "x 0.9" age the counters after a phase and '
           'do not clear them; "remembered" keeps the counters of pages that are not cached, too. The static optimum '
           "knows the future: the pages that the rest of the stream asks for most."),
    Figure("variants", "Variants of SSIJ", Axes("stream", "tuples_per_second", "stream", ylog=True), variants,
           VARIANT_CLAIMS,
           "One switch is changed at a time. The streams last for a few join phases from a cold start, which is too "
           "short for a record tier; the figure after the next one measures that over more."),
    Figure("read_plans", "Read plans",
           Axes("wanted", "times", "share of the pages that are wanted", "greedy, times the optimum", xlog=True),
           read_plans, (PLAN_REASON,),
           f"Plans for random pages out of {PLANNED:,}, by the simulated disk's costs."),
    Figure("record_tier", "The record tier", Axes("stream", "tuples_per_second", "stream", ylog=True), record_tier,
           TIER_CLAIMS,
           f"Rows of which {ROWS_PER_PAGE} have room in a page, where a row of the tier takes far less memory than a "
           f"row of a page, and rows of a few bytes, where it takes more. Tuples have a 64th of a page, or "
           f"{NARROW_NBYTES} bytes. The stream has 4 and 1.5 tuples for each row; the cold start is its first quarter "
           "after the first join phase, the long run its second half. The other figures use the table with wide rows."),
)  # fmt: skip
