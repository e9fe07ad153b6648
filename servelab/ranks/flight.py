"""The flight recorder: what each rank has posted and what it is in, in a file that outlives the rank.

A rank writes into a memory-mapped file of its own (about 3 microseconds a call) and the process that started it reads
there: without asking, so that a rank that computes is not disturbed, and after the rank's death too.
"""

import contextlib
import mmap
import os
import pickle
import struct
import time
from pathlib import Path
from typing import NamedTuple

STATES = ("starting", "running", "blocked", "finished")
HEADER = struct.Struct("<BdQQ")  # state; since when; calls posted so far; the call that it is blocked in
SLOT_HEAD = struct.Struct("<QH")  # number of the call; length of its pickle
SLOT, SLOTS = 512, 2048


class Post(NamedTuple):
    """One communication call as its rank posted it.

    ``number`` counts, from 1, the calls on the same channel: messages of one kind between two ranks of a group with one
    tag, or the collectives of a group. The n-th send meets the n-th receive, and n-th collectives meet each other.
    """

    rank: int
    kind: str  # "send", "recv", "collective"
    name: str  # the function: "isend", "all_reduce"
    group: str
    ranks: tuple[int, ...]  # the group's, global
    number: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    elements: int = 0
    nbytes: int = 0
    peer: int | None = None  # global; None in a receive from any source
    tag: int = 0
    detail: str = ""  # what must agree besides the size: the reduction, the root
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # all_to_all: elements to and from each rank
    where: tuple[str, int, str] = ("", 0, "")  # file, line, function

    @property
    def channel(self) -> tuple:
        """Equal for the two sides of a message, and for all ranks of a collective."""
        if self.kind == "collective":
            return (self.group,)
        ends = (self.rank, self.peer) if self.kind == "send" else (self.peer, self.rank)
        return (self.group, *ends, self.tag)

    def __str__(self) -> str:
        tensor = f"{self.shape} {self.dtype}" if self.dtype else ""
        if self.kind == "collective":
            return f"{self.name}({', '.join(filter(None, (tensor, self.detail)))})"
        end = "dst" if self.kind == "send" else "src"
        return f"{self.name}({end}={self.peer}, tag={self.tag}, {tensor})"


class Snapshot(NamedTuple):
    """What the recorder says of a rank; ``current`` is the call that it is blocked in."""

    state: str = "starting"
    since: float = 0.0  # time.perf_counter, one clock for all processes of a machine
    posts: tuple[Post, ...] = ()  # the last `SLOTS` calls
    current: Post | None = None


class FlightRecorder:
    """One rank's recorder. The starting process creates it; the rank opens it and writes.

    Without a ``path`` it is for the threads of one process.
    """

    def __init__(self, path: Path | None = None, create: bool = False):
        size = HEADER.size + SLOT * SLOTS
        if path is None:
            self.memory = mmap.mmap(-1, size)
        else:
            if create:
                path.touch()
                os.truncate(path, size)
            with open(path, "r+b") as file:
                self.memory = mmap.mmap(file.fileno(), size)
        self.posted = 0

    def state(self, name: str, call: int = 0) -> None:
        """Write down what the rank does from now on; ``call`` is what it is blocked in."""
        HEADER.pack_into(self.memory, 0, STATES.index(name), time.perf_counter(), self.posted, call)

    def post(self, post: Post) -> int:
        """Write down a call before it is made; returns its number in this recorder."""
        data = pickle.dumps(tuple(post))
        if len(data) > SLOT - SLOT_HEAD.size:
            data = pickle.dumps(tuple(post._replace(where=("", 0, ""), splits=None, shape=())))
        self.posted += 1
        at = self._slot(self.posted)
        SLOT_HEAD.pack_into(self.memory, at, self.posted, len(data))
        self.memory[at + SLOT_HEAD.size : at + SLOT_HEAD.size + len(data)] = data
        return self.posted

    def read(self) -> Snapshot:
        """What the rank has written, up to now."""
        state, since, _, call = HEADER.unpack_from(self.memory, 0)
        posts = dict(sorted(filter(None, map(self._at, range(SLOTS)))))
        current = posts.get(call) if STATES[state] == "blocked" else None
        return Snapshot(STATES[state], since, tuple(posts.values()), current)

    def glance(self) -> tuple[str, float]:
        """The state and since when, without the calls."""
        state, since, _, _ = HEADER.unpack_from(self.memory, 0)
        return STATES[state], since

    def close(self) -> None:
        self.memory.close()

    def _slot(self, call: int) -> int:
        return HEADER.size + (call % SLOTS) * SLOT

    def _at(self, call: int) -> tuple[int, Post] | None:
        at = self._slot(call)
        number, length = SLOT_HEAD.unpack_from(self.memory, at)
        if number:
            with contextlib.suppress(Exception):  # half written: the rank died, or is just writing it
                return number, Post(*pickle.loads(self.memory[at + SLOT_HEAD.size : at + SLOT_HEAD.size + length]))
        return None
