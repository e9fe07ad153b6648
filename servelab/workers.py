"""Processes that run code which may hang, exhaust memory or crash, one task at a time each.

A worker stops a task itself where the platform has timers (CPU and wall time, so that a busy machine changes nothing);
where that fails its parent ends it, counts the task as stopped, and starts another.
"""

import contextlib
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, get_context
from typing import Any

WALL_LIMIT = 90.0  # seconds for one task, after which the parent ends the worker
START_LIMIT = 180.0  # seconds until a worker reports that it is ready
MEMORY = 1 << 30  # bytes that a task may add to its worker
TICK = 0.5
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Stopped:
    """A task that did not come to an end: ``time``, ``memory`` or ``crash``."""

    why: str


class TimedOut(BaseException):
    """Raised in the middle of a task; not an `Exception`, so that no driver takes it for the answer's own."""


@contextlib.contextmanager
def limited(cpu_seconds: float, wall_seconds: float = WALL_LIMIT / 3) -> Iterator[None]:
    """Raise `TimedOut` in the block once it has used so much time. No effect where there are no timers (Windows)."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_):
        raise TimedOut

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, cpu_seconds), (signal.SIGALRM, signal.ITIMER_REAL, wall_seconds))
    try:
        for number, timer, seconds in timers:
            signal.signal(number, stop)
            signal.setitimer(timer, seconds, 0.5)  # again and again: a bare except must not swallow it
        yield
    finally:
        for _, timer, _ in timers:
            signal.setitimer(timer, 0)


def limit_again(cpu_seconds: float) -> None:
    """Within `limited`: from here on, this much CPU time."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds, 0.5)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Let this process grow by `MEMORY` at most in the block, where the platform can."""
    try:
        import resource

        import psutil

        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY, hard))
    except (ImportError, ValueError, OSError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _serve(pipe, make_handler: Callable[[], Callable], path: list[str]) -> None:
    """The life of a worker: answer one task after the other. Runs in the child."""
    sys.path[:] = path
    warnings.simplefilter("ignore")
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        os.dup2(nowhere.fileno(), 1)  # for libraries that print themselves, as LAPACK does on NaN
        handle = make_handler()
        pipe.send("ready")
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                pipe.send(handle(pipe.recv()))


class Worker:
    """A child process, the task that it is at, and when it must be done."""

    def __init__(self, make_handler: Callable[[], Callable]):
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make_handler, sys.path), daemon=True)
        with _environment(ONE_THREAD):
            self.process.start()
        theirs.close()
        self.starting, self.task, self.deadline = True, None, time.monotonic() + START_LIMIT

    @property
    def idle(self) -> bool:
        return self.task is None and not self.starting

    def give(self, task: Any) -> None:
        self.task, self.deadline = task, time.monotonic() + WALL_LIMIT
        self.pipe.send(task)

    def outcome(self, ready: bool) -> Any:
        """What came of the task: the handler's result, `Stopped`, or None while it runs."""
        if ready:
            try:
                return self.pipe.recv()
            except (EOFError, OSError):
                return Stopped("crash")
        if time.monotonic() > self.deadline:
            return Stopped("time")
        return Stopped("memory") if self._overgrown() else None

    def _overgrown(self) -> bool:
        import psutil

        try:
            return psutil.Process(self.process.pid).memory_info().rss > 3 * MEMORY
        except psutil.Error:
            return False

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run_all(tasks: Iterable, make_handler: Callable[[], Callable], size: int) -> Iterator[tuple[Any, Any]]:
    """Run every task in one of ``size`` workers; yields ``(task, outcome)`` as they end.

    Parameters
    ----------
    tasks : iterable
        Anything that can be pickled.
    make_handler : callable
        Called once in every worker; returns the function that turns a task into its outcome. Can be pickled.
    size : int
        Number of workers.
    """
    waiting = deque(tasks)
    workers = [Worker(make_handler) for _ in range(max(1, min(size, len(waiting))))] if waiting else []
    try:
        while waiting or any(worker.task is not None for worker in workers):
            for worker in workers:
                if worker.idle and waiting:
                    worker.give(waiting.popleft())
            ready = connection.wait([worker.pipe for worker in workers if not worker.idle], timeout=TICK)
            for worker in [worker for worker in workers if not worker.idle]:
                outcome = worker.outcome(worker.pipe in ready)
                if outcome is None:
                    continue
                yield from _settle(worker, outcome)
                if isinstance(outcome, Stopped):
                    worker.end()
                    workers.remove(worker)
                    workers += [Worker(make_handler)] if waiting else []
    finally:
        for worker in workers:
            worker.end()


def _settle(worker: Worker, outcome: Any) -> Iterator[tuple[Any, Any]]:
    if worker.starting:
        if isinstance(outcome, Stopped):
            raise RuntimeError(f"a worker did not start ({outcome.why}); its own message is above")
        worker.starting = False
        return
    task, worker.task = worker.task, None
    yield task, outcome


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
