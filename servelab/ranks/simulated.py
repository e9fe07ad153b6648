"""Simulated ranks: threads of this process that take turns on a virtual clock, with exact deadlock reports.

A run is the same every time: the order in which ranks run, sums, times and random numbers. Time passes only where the
record says so: on links, in collectives and in `servelab.ranks.span`; computing takes none. Only the CPU is used.

Each rank works on its own copy of the function, of the global variables that it uses, and of the arguments. What is
imported from a module is shared, and so are the classes of a notebook: a rank must not keep state in them.
"""

import contextlib
import functools
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # here, outside of ranks: a default argument keeps the world it is imported in

from servelab.ranks import current, groups, isolation, reports, shipping
from servelab.ranks.copies import Original
from servelab.ranks.errors import DeadlockError, RankError, RankInterruptError, RankTimeoutError
from servelab.ranks.exchange import Exchange, Request
from servelab.ranks.flight import Post, Snapshot
from servelab.ranks.matching import ranks_of
from servelab.ranks.record import Event, Link, Run
from servelab.ranks.scheduler import TICK, Rank, Scheduler
from servelab.threads import one_thread

MOST_RANKS = 64
GRACE = 0.3  # seconds that ranks have to unwind once the run has ended
_one_at_a_time = threading.Lock()


class SimCluster:
    """Ranks as threads with a virtual clock.

    Parameters
    ----------
    world_size : int
        Number of ranks.
    link : Link
        What joins every directed pair of ranks; by default it costs nothing.
    links : mapping of (int, int) to Link
        Other links, by sender and receiver.
    seed : int
        Seeds ``random`` and torch's random numbers; every rank starts with the same seed, as with `Cluster`.
    timeout : float
        Seconds of real time for one run.
    """

    def __init__(
        self,
        world_size: int,
        link: Link | None = None,
        links: Mapping[tuple[int, int], Link] | None = None,
        seed: int = 0,
        timeout: float = 60.0,
    ):
        if not isinstance(world_size, int) or not 1 <= world_size <= MOST_RANKS:
            raise ValueError(f"world_size {world_size!r}: expected a whole number from 1 to {MOST_RANKS}")
        self.world_size, self.link, self.links = world_size, link or Link(), dict(links or {})
        for ends in self.links:
            if not set(ends) <= set(range(world_size)):
                raise ValueError(f"links: {ends} does not join two of the ranks 0 to {world_size - 1}")
        self.seed, self.timeout = seed, timeout

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """Call ``fn(*args, **kwargs)`` on every rank, with plain ``torch.distributed`` inside.

        Returns
        -------
        Run
            What ``fn`` returned on each rank, the events, and the virtual seconds until the last rank returned.

        Raises
        ------
        RankError
            If a rank raised, or one of its subclasses: see `servelab.ranks.errors`.
        NotImplementedError
            If that is what a rank raised: a stub that is still to be written.
        RuntimeError
            If another simulated run is going on.
        """
        with _alone():
            return _Simulation(self, Original((fn, args, kwargs))).run()


class _Simulation:
    """One run."""

    def __init__(self, cluster: SimCluster, call: Original):
        self.cluster, self.call, self.store = cluster, call, dist.HashStore()
        self.exchange = Exchange(cluster.link, cluster.links)
        generator = torch.Generator().manual_seed(cluster.seed).get_state()
        self.ranks = [Rank(index, generator) for index in range(cluster.world_size)]
        self.scheduler = self.exchange.scheduler = Scheduler(self.ranks, self.live, self.deadlock)

    def run(self) -> Run:
        with (
            one_thread(),
            isolation.worlds_of_ranks(),
            isolation.random_by_rank(),
            isolation.labelled_output(),
        ):
            self.watch()
        self.report_failure()
        events = sorted(self.exchange.events, key=lambda event: (event.start, event.rank))
        return Run([rank.value for rank in self.ranks], events, max(rank.clock for rank in self.ranks))

    def watch(self) -> None:
        """Let the ranks run until they have finished or something ends the run."""
        end = time.monotonic() + self.cluster.timeout
        try:
            self.scheduler.start()
            while not self.scheduler.all_finished.wait(TICK) and not self.scheduler.stopping:
                if time.monotonic() > end:
                    self.scheduler.stop(RankTimeoutError(self.where(self.late())))
        except KeyboardInterrupt:
            self.scheduler.stop(RankInterruptError(self.where("interrupted")))
        except BaseException as error:  # a time limit of whoever called us
            self.scheduler.stop(error)
            raise
        finally:
            if self.scheduler.stopping:
                self.scheduler.end(GRACE)

    def live(self, rank: Rank) -> None:
        """What each rank does, on its thread."""
        world = groups.world(self.exchange, rank, range(len(self.ranks)), self.store)
        current.enter(_Here(self.exchange, rank, world, self.cluster.seed))
        try:
            with torch.autograd.set_multithreading_enabled(False):  # backward() stays on this thread
                fn, args, kwargs = self.call.copy()
                rank.value = fn(*args, **kwargs)
                self.exchange.leave(rank)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            self.scheduler.stop(self.raised(rank, error))
        finally:
            current.enter(None)

    def report_failure(self) -> None:
        failure = self.scheduler.failure
        if failure is None:
            return
        cause = getattr(failure, "cause", None)
        if isinstance(cause, NotImplementedError):
            report = f"NotImplementedError: {failure}"
            cause._render_traceback_ = lambda: [report]  # type: ignore[attr-defined]  # what IPython shows
            raise cause.with_traceback(_own_part(cause)) from None
        raise failure from None

    # -- where the ranks are

    def deadlock(self) -> RankError:
        return DeadlockError(reports.deadlock(self.snapshots()))

    def raised(self, rank: Rank, error: BaseException) -> RankError:
        if isinstance(error.__context__, groups.ForeignGroupError):
            error = error.__context__.with_traceback(error.__traceback__)
        failure = RankError(reports.raised(rank.index, error, self.snapshots(), self.stacks()))
        failure.rank, failure.cause = rank.index, error
        return failure

    def late(self) -> str:
        """Why a run that is out of time is: ranks that wait for one another in vain end it at once."""
        able = [rank.index for rank in self.ranks if rank.thread and not rank.waiting and not rank.finished]
        who = f"; {ranks_of(able)} could go on, so this is no deadlock" if able else ""
        return f"not finished after {self.cluster.timeout:g} s (the argument timeout of SimCluster){who}"

    def where(self, reason: str) -> str:
        return reports.stopped(reason, self.snapshots(), self.stacks())

    def stacks(self) -> dict[int, traceback.StackSummary]:
        """Where each rank is that does not wait."""
        frames = sys._current_frames()
        able = [rank for rank in self.ranks if rank.thread in frames and not rank.waiting and not rank.finished]
        return {rank.index: traceback.extract_stack(frames[rank.thread or 0]) for rank in able}

    def snapshots(self) -> dict[int, Snapshot]:
        """What each rank has posted, and what it is in."""
        posts: dict[int, list[Post]] = {rank.index: [] for rank in self.ranks}
        for post in self.exchange.posts:
            posts[post.rank].append(post)
        return {rank.index: _snapshot(rank, posts[rank.index]) for rank in self.ranks}


def _snapshot(rank: Rank, posts: Sequence[Post]) -> Snapshot:
    state = "finished" if rank.finished else "running" if rank.thread else "not started yet"
    return Snapshot(state, posts=tuple(posts), current=rank.waiting.post if isinstance(rank.waiting, Request) else None)


class _Here:
    """A rank as the code on it finds it: `servelab.ranks.current`."""

    device = torch.device("cpu")

    def __init__(self, exchange: Exchange, rank: Rank, world: Any, seed: int):
        self.exchange, self._rank, self.index = exchange, rank, rank.index
        self.world, self._seed = world, seed

    @functools.cached_property
    def random(self) -> random.Random:
        return random.Random(self._seed)

    @property
    def clock(self) -> float:
        return self._rank.clock

    def record(self, event: Event) -> None:
        self.exchange.events.append(event)

    def span(self, name: str, seconds: float) -> contextlib.AbstractContextManager[None]:
        return self.exchange.span(self._rank, name, seconds)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Refuse a run within a run, and one beside another: torch.distributed has one world to lend."""
    if current.rank() is not None:
        raise RuntimeError("a rank cannot start ranks of its own: SimCluster.run was called inside a simulated run")
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("another simulated run is going on in this process; wait until it has ended")
    try:
        yield
    finally:
        _one_at_a_time.release()


def _own_part(error: BaseException) -> Any:
    """A traceback from the learner's first line on."""
    step = error.__traceback__
    while step and step.tb_next and shipping.foreign(step.tb_frame.f_code.co_filename):
        step = step.tb_next
    return step
