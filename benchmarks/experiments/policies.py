"""Hit ratios of policies that choose which pages stay, against the best fixed choice; and SSIJ against its variants.

The policies are played without an operator: tuples whose page is cached are hits, the others wait; when a stream
threshold of them waits, all their pages come by, and the policy says which of these and of the cached ones stay. Every
policy has the same number of frames and sees the same.
"""

import numpy as np

from benchmarks.experiments._relations import moving_keys, zipf_keys
from benchmarks.experiments._report import Axes, Check, Outcome
from benchmarks.experiments._settings import measure

__all__ = ["hit_ratios", "variants"]

SMALL, MAIN = 0.1, 3
ROWS_PER_PAGE = 16
FRAMES = 0.05  # of the pages


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


def hit_ratios(_world, settings):
    """The share of tuples whose page is cached, for each policy and stream."""
    pages = settings.pages
    frames, rows = int(FRAMES * pages), []
    for stream, keys in _streams(settings).items():
        leaves = keys // ROWS_PER_PAGE
        threshold = max(1, len(leaves) // 40)
        for line, make in POLICIES.items():
            rows.append(
                {"line": line, "stream": stream, "hit_ratio": round(_play(make(pages, frames), leaves, threshold), 4)}
            )
        rows.append({"line": OPTIMUM, "stream": stream, "hit_ratio": round(_best(leaves, pages, frames), 4)})
    axes = Axes("stream", "hit_ratio", "stream", "hit ratio")
    outcome = Outcome("hit_ratios", "Which pages stay", axes, sorted(rows, key=lambda row: row["line"]))
    outcome.checks.append(_policy_check(outcome))
    return outcome


def _policy_check(outcome):
    means = {line: float(np.mean(outcome.values(line))) for line in POLICIES}
    paper = next(iter(POLICIES))
    best = max(means, key=means.get)
    return Check(
        "a page is worth the tuples it joined with since the last join phase",
        f"mean hit ratios over the streams: {', '.join(f'{line} {mean:.1%}' for line, mean in means.items())}",
        means[best] - means[paper] < 0.01,
    )


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


SWITCHES = {
    "as in the paper": {},
    "ageing": {"cache_policy": "ageing"},
    "LRU": {"cache_policy": "lru"},
    "no cache": {"cache_policy": "none"},
    "half of the memory for the cache": {"memory_split": 0.5},
    "greedy read plan": {"read_plan": "greedy"},
    "single pages": {"max_scan": 1},
    "waiting while it pays": {"stream_threshold": None, "input_threshold": None},
    "and a record tier": {"stream_threshold": None, "input_threshold": None, "record_tier": True},
}


def variants(world, settings):
    """SSIJ with one switch thrown at a time, for three streams over a relation whose keys share pages."""
    relation, rows = settings.dense(ROWS_PER_PAGE), []
    count = 2 * settings.phases * relation.scaled(1_000_000)
    streams = {
        "uniform": zipf_keys(relation.rows, 0.0, count),
        "Zipf 1": zipf_keys(relation.rows, 1.0, count),
        "Zipf 1, scattered": zipf_keys(relation.rows, 1.0, count, scattered=True),
    }
    for line, switches in SWITCHES.items():
        for stream, keys in streams.items():
            options = relation.as_in_the_paper(settings.share) | switches
            served = measure(world, settings, relation, settings.share, keys, **options)
            rows.append({"line": line, "stream": stream, **served.row()})
    axes = Axes("stream", "tuples_per_second", "stream", ylog=True)
    outcome = Outcome("variants", "SSIJ and its variants", axes, rows)
    papers = outcome.values("as in the paper")
    worse = [line for line in list(SWITCHES)[2:7] if outcome.values(line)[1] < 0.99 * papers[1]]
    outcome.checks.append(
        Check(
            "each part of SSIJ contributes: policy, cache, adaptive split, optimal plan, sequential reads",
            "; ".join(f"{line} {outcome.values(line)[1] / papers[1]:.2f}" for line in list(SWITCHES)[1:])
            + " of the rate, at Zipf 1",
            len(worse) == 5,
        )
    )
    return outcome
