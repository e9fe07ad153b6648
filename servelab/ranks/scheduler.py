"""Simulated ranks take turns: one runs at a time, the one whose virtual clock is the lowest.

Each rank is a thread that waits for its own baton, a lock. Whoever stops running picks the next rank and releases that
rank's baton, so a hand-over costs one thread switch. As no rank ever runs ahead of a ready rank with a lower clock,
what happens at a virtual time is known when a clock gets there, and every run is the same.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from servelab.ranks.errors import RankError

TICK = 0.05  # seconds between two looks at ranks that have been told to stop
MOST_REFUSALS = 100


class Stopped(BaseException):
    """Unwinds a rank whose run has ended; not an `Exception`, so that code on ranks does not handle it."""


class Pending(Protocol):
    """What a rank can wait for."""

    done: float | None  # when it is complete, once that is known


class Rank:
    """One rank: its clock in virtual seconds, what it waits for, its random state, and what its function returned.

    Parameters
    ----------
    index : int
        The global rank.
    generator : tensor
        State of torch's default generator to begin with.
    """

    def __init__(self, index: int, generator: torch.Tensor):
        self.index, self.generator = index, generator
        self.clock = 0.0
        self.waiting: Pending | None = None
        self.finished = False
        self.refusals = 0  # of the order to unwind
        self.value: Any = None
        self.thread: int | None = None  # identifier of the thread, once it runs
        self.baton = threading.Lock()
        self.baton.acquire()


class Scheduler:
    """Whose turn it is.

    Parameters
    ----------
    ranks : list of Rank
    main : callable
        What each rank does, on a thread of its own: ``main(rank)``.
    deadlock : callable
        Returns the error to report when unfinished ranks are left and all of them wait.
    """

    def __init__(self, ranks: list[Rank], main: Callable[[Rank], None], deadlock: Callable[[], RankError]):
        self.ranks, self._main, self._deadlock = ranks, main, deadlock
        self.failure: BaseException | None = None
        self.stopping = False
        self.running: Rank | None = None
        self.all_finished = threading.Event()

    def start(self) -> None:
        """Give every rank its thread, and the first one its turn."""
        for rank in self.ranks:
            threading.Thread(target=self._live, args=(rank,), name=f"rank {rank.index}", daemon=True).start()
        self._hand_over(self._next())

    def advance(self, rank: Rank, clock: float) -> None:
        """Move the running rank's clock forward, then let those that are behind it go first."""
        if clock > rank.clock:
            rank.clock = clock
            self._take_turns(rank)

    def block(self, rank: Rank, pending: Pending) -> None:
        """Let others run until somebody calls `wake` for ``pending``."""
        rank.waiting = pending
        self._take_turns(rank)

    def wake(self, rank: Rank, pending: Pending) -> None:
        """Make a rank ready again if ``pending`` is what it waits for."""
        if rank.waiting is pending and pending.done is not None:
            rank.waiting = None
            rank.clock = max(rank.clock, pending.done)

    def check(self, rank: Rank) -> None:
        """Unwind a rank if the run has ended. One that catches even that, again and again, is put to sleep for good."""
        if self.stopping:
            rank.refusals += 1
            if rank.refusals > MOST_REFUSALS:
                rank.finished = True
                self._hand_over(self._next())
                threading.Event().wait()
            raise Stopped

    def fail(self, rank: Rank, error: BaseException) -> None:
        """End the run with ``error``, unless it ends already, and unwind the rank that runs."""
        self.stop(error)
        self.check(rank)

    def stop(self, error: BaseException) -> None:
        """Every rank unwinds at its next turn. The first error is the one that the run ends with."""
        if not self.stopping:
            self.failure, self.stopping = error, True

    def end(self, grace: float) -> None:
        """Wait up to ``grace`` seconds until all ranks have unwound; one that runs on in Python is torn out of it.

        A rank that does not come back to Python, out of a sleep for example, is left behind: nothing ends a thread. It
        unwinds when it comes back.
        """
        for _ in range(max(1, round(grace / TICK))):
            running = self.running
            if running and running.thread and not running.finished:
                _raise_in(running.thread)
            if self.all_finished.wait(TICK):
                return
        for rank in self.ranks:
            _release(rank.baton)

    def _live(self, rank: Rank) -> None:
        """The life of a rank's thread."""
        try:
            rank.baton.acquire()
            rank.thread = threading.get_ident()
            if not self.stopping:
                torch.set_rng_state(rank.generator)
                self._main(rank)
        except Stopped:
            pass
        finally:
            rank.finished = True
            self._hand_over(self._next())

    def _take_turns(self, rank: Rank) -> None:
        """Hand the turn to the rank whose it is, and come back when it is this one's again."""
        chosen = self._next()
        if chosen is not rank:
            rank.generator = torch.get_rng_state()
            self._hand_over(chosen)
            rank.baton.acquire()
            if not self.stopping:
                torch.set_rng_state(rank.generator)
        self.check(rank)

    def _hand_over(self, chosen: Rank | None) -> None:
        self.running = chosen
        if chosen is None:
            self.all_finished.set()
        else:
            _release(chosen.baton)

    def _next(self) -> Rank | None:
        """The ready rank with the lowest clock, the one that runs if it has it too; None after the last.

        In a run that ends, all that have yet to unwind are ready.
        """
        unfinished = [rank for rank in self.ranks if not rank.finished]
        ready = [rank for rank in unfinished if rank.waiting is None]
        if unfinished and not ready and not self.stopping:
            self.stop(self._deadlock())
        candidates = unfinished if self.stopping else ready
        return min(candidates, key=lambda rank: (rank.clock, rank is not self.running), default=None)


def _release(baton: threading.Lock) -> None:
    """Give a baton to the rank that waits for it; no harm where it has it, as when all are let go at the end."""
    with contextlib.suppress(RuntimeError):
        baton.release()


def _raise_in(thread: int) -> None:
    """Raise `Stopped` in a thread, at its next step in Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stopped))
