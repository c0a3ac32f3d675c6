"""A contestant in a process of its own: it waits until a memory group holds it, then loads, joins and reports."""

import multiprocessing
import signal
import time
import traceback

from benchmarks.peers._groups import MemoryGroup
from benchmarks.peers._inputs import forget, remember
from headrace.joins import keep_little_freed_memory

__all__ = ["Contestant", "ContestantError"]

LONGEST = 4  # maximum length of a round, relative to its target: it ends with a join phase, which may come late
CONTEXT = multiprocessing.get_context("spawn")


class ContestantError(Exception):
    """A contestant failed or was killed; the message says how."""


class Contestant:
    """The controlling side: starts the contestant's process, sets its limit, and requests runs.

    The limit of the group is what the idle process took at most, and `limit`; there is no group without that. The
    table is not in the system's cache when it begins, unless it is to be `remembered` there.
    """

    def __init__(self, name, engine, setup, stream, each, limit, *, remembered=False):
        self.name = name
        self._prepare = remember if remembered else forget
        self.group = self.idle = self._process = None
        self._limit = limit
        self._of = engine, setup, stream, each

    def open(self):
        """Load the library and the table, then limit the memory and let the contestant take it."""
        self._prepare(self._of[1].table)
        self._connection, far = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(far, *self._of))  # no daemon: stores have processes
        self._process.start()
        far.close()
        self.group = None if self._limit is None else MemoryGroup.create(str(self._process.pid))
        if self.group:
            self.group.add(self._process.pid)
        idle, reserve = self._ask("open")
        self.idle = reserve + (self.group.peak if self.group else idle)
        if self.group:
            self.group.limit(self.idle + self._limit)
        self._ask("start")

    def reopen(self):
        """Restart in a new process."""
        self.close()
        self.open()

    def run(self, seconds, choice, tuples=0):
        """Join for `seconds` and at least `tuples` tuples; return the counters."""
        return self._ask("run", seconds, choice, tuples)

    def arrive(self, *arguments):
        """Let tuples arrive by the clock. See `benchmarks.peers._arrivals.arrive` for the arguments."""
        return self._ask("arrive", *arguments)

    def finish(self):
        """Return the number of pushed tuples, and the tally of all results."""
        return self._ask("finish")

    def close(self):
        """End the process, if there is one, and remove its group."""
        if self._process is None:
            return
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        if self.group:
            self.group.remove()

    def _ask(self, *command):
        try:
            self._connection.send(command)
            done, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            end = "was killed for want of memory" if code == -signal.SIGKILL else f"ended with {code}"
            raise ContestantError(f"{self.name} {end}") from None
        if not done:
            raise ContestantError(f"{self.name} failed: {answer}")
        return answer


def _serve(connection, engine, setup, stream, each):
    keep_little_freed_memory()
    runner = _Runner(engine, setup, stream, each)
    while True:
        try:
            command, *arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(runner, command)(*arguments)))
        except Exception:  # noqa: BLE001 - any error goes to the measuring process
            connection.send((False, traceback.format_exc()))


class _Runner:
    """Executes requests in the contestant's process."""

    def __init__(self, engine, setup, stream, each):
        self._of = engine, setup, stream, each

    def open(self):
        import resource  # noqa: PLC0415 - nothing is loaded before the group holds the process

        from benchmarks.peers._inputs import StreamFile  # noqa: PLC0415 - as above
        from benchmarks.peers._joiners import joiner  # noqa: PLC0415 - as above
        from benchmarks.peers._tally import Tally  # noqa: PLC0415 - as above

        engine, setup, stream, each = self._of
        self._stream = StreamFile(stream, each)
        self._stream.take(250_000)
        self._stream.at = 0
        self._tally = Tally()
        self._joiner = joiner(engine, setup)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, self._joiner.reserve

    def start(self):
        self._joiner.start()

    def run(self, seconds, choice, tuples):
        joiner = self._joiner
        joiner.configure(choice)
        done, spent, longest, settled = joiner.done, 0.0, 0.0, False
        rows, processor = self._tally.rows, time.process_time()
        while spent < seconds or (not settled and spent < LONGEST * seconds):
            held = joiner.held
            took = self._join(choice.batch_rows)
            spent, longest = spent + took, max(longest, took)
            settled = joiner.held <= held and joiner.done - done >= max(1, tuples)
        spent += self._settle()
        return {
            "tuples": joiner.done - done, "seconds": spent, "processor_seconds": time.process_time() - processor,
            "longest_batch_seconds": longest, "result_rows": self._tally.rows - rows, **joiner.details(),
        }  # fmt: skip

    def arrive(self, *arguments):
        from benchmarks.peers._arrivals import arrive  # noqa: PLC0415 - as above

        outcome, tally = arrive(self._joiner, self._stream, *arguments)
        self._tally += tally
        self._settle()
        return outcome

    def configure(self, choice):
        self._joiner.configure(choice)

    def _settle(self):
        """Join tuples that cannot wait for the next turn; return the seconds."""
        began = time.perf_counter()
        self._tally += self._joiner.settle()
        return time.perf_counter() - began

    def finish(self):
        return self._stream.at, self._tally + self._joiner.finish()

    def _join(self, batch_rows):
        """Join a batch, or leave it in the stream if that fails; return the seconds."""
        at = self._stream.at
        try:
            tally, seconds = self._joiner.timed(self._stream.take(batch_rows))
        except Exception:
            self._stream.at = at
            raise
        self._tally += tally
        return seconds
