"""Real ranks: a function runs on W processes that communicate over gloo, or over NCCL where there are GPUs.

    run = Cluster(4).run(step, weights)      # step(weights) on four ranks
    run.values[2], run.of_rank(2)            # what rank 2 returned, and what it did when

The function may be defined in a notebook cell. It and its arguments are copied to each rank, and nothing that a rank
changes reaches the notebook, but what it returns. Under torchrun the same call makes this process one rank of the job
(`servelab.ranks.torchrun`).
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from pickle import loads as unpickle
from shutil import rmtree
from time import perf_counter
from typing import Any

from servelab.ranks import diagnosis, matching, pool, shipping, torchrun
from servelab.ranks.errors import MismatchError, RankInterruptError, RankTimeoutError
from servelab.ranks.flight import FlightRecorder
from servelab.ranks.job import Failure, Job, Outcome
from servelab.ranks.record import Run

TICK = 0.1  # seconds between two looks at the ranks
GRACE = 0.3  # seconds in which other ranks may fail too, after the first
WEEK = 7 * 24 * 3600.0
START_LIMIT = 180.0  # seconds until all ranks run; a cold machine imports torch for long


class Cluster:
    """W real ranks.

    Parameters
    ----------
    world_size : int
        Number of ranks.
    backend : str, optional
        "gloo" or "nccl"; by default NCCL if there is a GPU for every rank, else gloo.
    timeout : float
        Seconds that a run may take, its start not counted.
    stall : float
        Seconds for which every unfinished rank must have been blocked before a deadlock is looked for.
    seed : int
        Every rank seeds `random` and torch with it.
    start_method : str, optional
        "forkserver" (the default on Linux) or "spawn" (elsewhere).
    check_buffers : bool
        Copy what isend sends, and compare at ``wait()``. Turn it off to measure bandwidths.
    """

    def __init__(
        self,
        world_size: int,
        backend: str | None = None,
        timeout: float = 60.0,
        stall: float = 2.0,
        seed: int = 0,
        start_method: str | None = None,
        check_buffers: bool = True,
    ):
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}: expected at least 1 rank")
        self.world_size, self.timeout, self.stall, self.seed = world_size, timeout, stall, seed
        self.backend, self.start_method, self.check_buffers = backend, start_method, check_buffers

    def run(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Run:
        """Call ``fn(*args, **kwargs)`` on every rank and wait for all of them; nothing of them stays behind.

        Raises
        ------
        RankError
            A rank raised or died; its subclasses: `DeadlockError`, `MismatchError`, `BufferChangedError`,
            `UnwaitedError`, `RankTimeoutError`, `RankInterruptError`.
        TypeError
            If the function or an argument cannot be copied to another process.
        """
        if torchrun.active():
            return torchrun.run(self, fn, args, kwargs)
        if torchrun.on_a_rank():
            raise RuntimeError("Cluster.run was called on a rank; ranks cannot start ranks of their own")
        payload = shipping.dumps((fn, args, kwargs))
        watch = _Watch(self, payload)
        try:
            return watch.run()
        except KeyboardInterrupt:
            raise RankInterruptError("interrupted\n" + watch.report(watch.left)) from None
        finally:
            watch.end()

    def chosen_backend(self, ranks_here: int) -> str:
        """The backend that was asked for, or the one that fits this machine."""
        if self.backend:
            return self.backend
        import torch

        return "nccl" if torch.cuda.device_count() >= ranks_here else "gloo"


class _Watch:
    """One run: starts the ranks, listens to them, and says what is wrong as soon as it can be known."""

    def __init__(self, cluster: Cluster, payload: bytes):
        self.cluster, self.payload = cluster, payload
        self.members: list[pool.Member] = []
        self.recorders: list[FlightRecorder] = []
        self.left = set(range(cluster.world_size))
        self.outcomes: dict[int, Outcome] = {}
        self.failures: dict[int, Failure] = {}
        self.free: set[int] = set()
        self.stacks: dict[int, list[shipping.Frame]] = {}
        self.folder: Path | None = None
        self.hired = perf_counter()
        self.began = self.first_failure = self.compared = 0.0  # 0: not yet

    def run(self) -> Run:
        self._start()
        while self.left:
            self._listen(TICK)
            self._look()
        posts = [post for outcome in self.outcomes.values() for post in outcome.posts]
        wrong = matching.mismatch(posts) or matching.left_out(posts)
        if wrong:
            raise MismatchError(wrong)
        return self._result()

    def _start(self) -> None:
        size = self.cluster.world_size
        method = self.cluster.start_method or pool.START_METHOD
        backend = self.cluster.chosen_backend(size)
        self.members = pool.hire(size, method)
        self.folder = Path(tempfile.mkdtemp(prefix="servelab-ranks-"))
        jobs = [self._job(rank, backend) for rank in range(size)]
        jobs[0].file("payload").write_bytes(self.payload)
        self.recorders = [FlightRecorder(job.file("recorder"), create=True) for job in jobs]
        for member, job in zip(self.members, jobs, strict=True):
            member.send(job)

    def _job(self, rank: int, backend: str) -> Job:
        cluster = self.cluster
        return Job(
            rank=rank,
            world_size=cluster.world_size,
            backend=backend,
            folder=str(self.folder),
            seed=cluster.seed,
            patience=min(cluster.timeout, WEEK) + START_LIMIT,
            check_buffers=cluster.check_buffers,
            environ=dict(os.environ),
            cwd=os.getcwd(),
            path=list(sys.path),
        )

    # -- listening

    def _listen(self, seconds: float) -> None:
        """Take one message from each rank that has something to say, within ``seconds``."""
        pipes = {self.members[rank].pipe: rank for rank in self._alive()}
        for pipe in connection.wait(list(pipes), seconds):
            rank = pipes[pipe]  # type: ignore[index]
            try:
                kind, content = unpickle(self.members[rank].pipe.recv_bytes())
            except (EOFError, OSError):
                self._died(rank)
            else:
                self._heard(rank, kind, content)

    def _alive(self) -> list[int]:
        return [rank for rank in range(len(self.members)) if rank not in self.failures or self.failures[rank].kind]

    def _heard(self, rank: int, kind: str, content: Any) -> None:
        if kind in ("out", "err"):
            print(f"[rank {rank}] {content}", file=sys.stdout if kind == "out" else sys.stderr, flush=True)
        elif kind == "where":
            self.stacks[rank] = content
        elif kind == "free":
            self.free.add(rank)
        else:
            self.outcomes[rank] = content
            self.left.discard(rank)
            if content.failure:
                self._failed(content.failure)

    def _died(self, rank: int) -> None:
        current = self.recorders[rank].read().current
        code = self.members[rank].exit_code()
        self.left.discard(rank)
        self._failed(diagnosis.death(rank, code, Path(str(self.folder), f"errors{rank}"), current))

    def _failed(self, failure: Failure) -> None:
        self.failures[failure.rank] = failure
        self.first_failure = self.first_failure or perf_counter()

    # -- looking

    def _look(self) -> None:
        """Raise what can be known to be wrong by now."""
        now = perf_counter()
        if self.failures:
            if not self.left or now > self.first_failure + GRACE:
                self._raise_failure()
            return
        glances = [self.recorders[rank].glance() for rank in self.left]
        stalled = all(state == "blocked" and now > since + self.cluster.stall for state, since in glances)
        if self.left and stalled and now > self.compared + self.cluster.stall:
            self._raise_if_stuck()
        if not self.began and all(state != "starting" for state, _ in glances):
            self.began = now
        if not self.began and now > self.hired + START_LIMIT:
            raise RankTimeoutError(f"not started after {START_LIMIT:g} s\n{self.report(self.left)}")
        if self.began and now > self.began + self.cluster.timeout:
            raise RankTimeoutError(f"not finished after {self.cluster.timeout:g} s\n{self.report(self.left)}")

    def _raise_failure(self) -> None:
        cause = diagnosis.root_cause(self.failures.values())
        stopped = self.report(self.left) if self.left else ""
        text = diagnosis.failure_report(cause, self.failures.values(), stopped)
        wrong = matching.mismatch(self._board().posts)
        if wrong:
            raise MismatchError(f"{wrong}\n{text}")
        error = diagnosis.named_error(cause.kind)(text)
        error.rank = cause.rank
        raise error

    def _raise_if_stuck(self) -> None:
        """Compare what the ranks have posted. Costs milliseconds, so not at every look: slow data is no deadlock."""
        self.compared = perf_counter()
        error = diagnosis.why_stalled(self._board(), self.left, self.report)
        if error:
            raise error

    def _board(self) -> matching.Board:
        return matching.Board({rank: recorder.read() for rank, recorder in enumerate(self.recorders)})

    def report(self, ranks: Iterable[int], seconds: float = 0.5) -> str:
        """Where some ranks are; those that do not answer in time are described by their recorders."""
        if not self.recorders:
            return "  the ranks had not started"
        asked = [rank for rank in ranks if rank in self.left and self.recorders[rank].glance()[0] != "starting"]
        self.stacks = {}
        for rank in asked:
            self.members[rank].send("where")
        until = perf_counter() + seconds
        while perf_counter() < until and not set(asked) <= set(self.stacks):
            self._listen(0.02)
        return diagnosis.whereabouts(self._board(), self.stacks, ranks)

    # -- the end

    def _result(self) -> Run:
        start = min(outcome.started for outcome in self.outcomes.values())
        events = [
            replace(event, start=event.start - start, end=event.end - start)
            for outcome in self.outcomes.values()
            for event in outcome.events
        ]
        values = [shipping.loads(outcome.value, own_classes=True) for _, outcome in sorted(self.outcomes.items())]
        seconds = max(outcome.ended for outcome in self.outcomes.values()) - start
        return Run(values, sorted(events, key=lambda event: event.start), seconds)

    def end(self) -> None:
        """Leave nothing behind: no process (but idle ones, where they are dear), no file, no descriptor."""
        keepers: list[pool.Member] = []
        try:
            keepers = self._released() if self._worth_keeping() else []
            pool.keep(keepers)
        finally:
            try:
                pool.dismiss([member for member in self.members if member not in keepers])
            finally:
                for recorder in self.recorders:
                    recorder.close()
                if self.folder:
                    rmtree(self.folder, ignore_errors=True)

    def _worth_keeping(self) -> bool:
        ended_well = not self.left and not self.failures and bool(self.members)
        return ended_well and self.members[0].method in pool.KEPT

    def _released(self) -> list[pool.Member]:
        """The processes that have left their group and closed their files, and wait for the next job."""
        for member in self.members:
            member.send(None)
        until = perf_counter() + 5.0
        while perf_counter() < until and len(self.free) + len(self.failures) < len(self.members):
            self._listen(TICK)
        return [member for rank, member in enumerate(self.members) if rank in self.free]
