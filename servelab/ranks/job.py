"""What a rank's process is told, and what it sends back."""

from dataclasses import dataclass, field
from pathlib import Path

from servelab.ranks.flight import Post
from servelab.ranks.record import Event
from servelab.ranks.shipping import Frame


@dataclass(frozen=True)
class Job:
    """All that a process must know to be a rank of one run."""

    rank: int
    world_size: int
    backend: str
    folder: str  # of this run: payload, rendezvous, flight recorders; whoever survives removes it
    seed: int
    patience: float  # seconds until the backend itself gives up
    check_buffers: bool
    environ: dict[str, str]
    cwd: str
    path: list[str]

    def file(self, name: str) -> Path:
        """A file of this run: ``payload`` and ``store`` are there once, ``recorder`` and ``errors`` for each rank."""
        return Path(self.folder, name if name in ("payload", "store") else f"{name}{self.rank}")


@dataclass(frozen=True)
class Failure:
    """How a rank failed: by an exception of class ``kind``, or (``kind`` is empty) by the death of its process."""

    rank: int
    kind: str
    message: str
    frames: list[Frame]
    when: float


@dataclass(frozen=True)
class Outcome:
    """What a rank sends back. ``value`` is shipped bytes; all times are of perf_counter."""

    value: bytes = b""
    failure: Failure | None = None
    started: float = 0.0
    ended: float = 0.0
    events: list[Event] = field(default_factory=list)
    posts: list[Post] = field(default_factory=list)
