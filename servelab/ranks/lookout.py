"""Under torchrun nobody watches the ranks from outside. Each has a lookout of its own: a thread that tells the others,
through the job's store, what its rank waits for, reads what they wait for, and ends the job if no rank can go on.

What is read may be old, but not wrong: the first of the waiting ranks to go on would need another that went on before.
"""

import contextlib
import os
import pickle
import sys
import threading
from datetime import timedelta
from time import perf_counter, sleep
from typing import Any

import torch.distributed as dist

from servelab.ranks import diagnosis, matching
from servelab.ranks.errors import RankError
from servelab.ranks.flight import FlightRecorder, Snapshot
from servelab.ranks.shipping import Frame
from servelab.ranks.worker import stack_of_main

EVERY = 0.25  # seconds between two looks
FAREWELL = 1.0  # seconds in which the others may find the same, before this rank ends
JOB = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


class Lookout:
    """A context in which this rank's process is ended once all unfinished ranks of the job wait in vain.

    Parameters
    ----------
    rank, size : int
        This rank, and the ranks of the job.
    stall : float
        Seconds for which a rank must have waited before the others are told.
    run : str
        Names the run; the same on all ranks.
    """

    def __init__(self, rank: int, size: int, stall: float, run: str):
        self.rank, self.size, self.stall = rank, size, stall
        self.prefix = "/".join(["servelab", *(os.environ.get(name, "") for name in JOB), run])
        self.recorder = FlightRecorder()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> FlightRecorder:
        """The recorder that the rank is to write to."""
        self._thread.start()
        return self.recorder

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join()
        self.recorder.close()

    def _watch(self) -> None:
        store, told = None, None
        while not self._over.wait(EVERY):
            state, since = self.recorder.glance()
            if state not in ("blocked", "finished") or perf_counter() < since + self.stall:
                continue
            with contextlib.suppress(RuntimeError):  # the store is gone: the job ends already
                store = store or dist.PrefixStore(self.prefix, _store())
                if told != (state, since):
                    told = state, since
                    store.set(str(self.rank), pickle.dumps(self._here()).hex())
                self._compare(store)

    def _here(self) -> tuple[Snapshot, list[Frame]]:
        """What this rank waits for, its time counted from now, and its lines."""
        snapshot = self.recorder.read()
        return snapshot._replace(since=snapshot.since - perf_counter()), stack_of_main()

    def _compare(self, store: dist.Store) -> None:
        """End the job if all ranks have told that they wait, and none of them can go on."""
        keys = [str(rank) for rank in range(self.size)]
        if not store.check(keys):
            return
        told = {rank: pickle.loads(bytes.fromhex(store.get(key).decode())) for rank, key in enumerate(keys)}
        now = perf_counter()
        board = matching.Board(
            {rank: snapshot._replace(since=now + snapshot.since) for rank, (snapshot, _) in told.items()}
        )
        waiting = {rank for rank, snapshot in board.snapshots.items() if snapshot.state == "blocked"}
        stacks = {rank: told[rank][1] for rank in waiting}
        error = diagnosis.why_stalled(board, waiting, lambda _: diagnosis.whereabouts(board, stacks, told))
        if error:
            _end(error)


def _store() -> dist.Store:
    """A connection of this thread's own to the store through which the job's ranks have met."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))


def _end(error: RankError) -> None:
    """End this process, whose main thread is in compiled code; on each node one rank says why."""
    if os.environ["LOCAL_RANK"] == "0":
        print(f"{type(error).__qualname__}: {error}", file=sys.stderr, flush=True)
    sleep(FAREWELL)
    sys.stdout.flush()
    os._exit(1)
