"""What a run on several ranks leaves behind: each rank's return value, and a record of what it did when.

Pictures and judges draw on this record alone, so both engines (`servelab.ranks.simulated`, `servelab.ranks.processes`)
write it in the same form. Both give every rank the same seed (`random.seed(seed)`, `torch.manual_seed(seed)`), as a
program under torchrun would that seeds itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Link:
    """A link's cost in the alpha-beta model: a message of n bytes takes ``alpha + n * beta`` seconds.

    Parameters
    ----------
    alpha : float
        Latency in seconds.
    bandwidth : float
        Bytes per second, 1 / beta.
    """

    alpha: float = 0.0
    bandwidth: float = float("inf")

    def __post_init__(self):
        if not self.alpha >= 0 or not self.bandwidth > 0:
            raise ValueError(f"{self}: expected alpha of at least 0 seconds and a bandwidth above 0 bytes per second")

    def seconds(self, nbytes: float) -> float:
        """How long a message of ``nbytes`` takes."""
        return self.alpha + nbytes / self.bandwidth


@dataclass(frozen=True)
class Event:
    """One thing that one rank did.

    ``kind`` is one of

    - ``"compute"``: a `span` of the learner's own; ``name`` is the span's;
    - ``"send"``, ``"recv"``: a message, from the call to its completion (blocking calls), or the moment of the call
      (isend and irecv); ``peer`` is the other rank (global), ``nbytes`` the message's size;
    - ``"wait"``: from a ``wait()`` on an isend, irecv or asynchronous collective to its return; ``nbytes`` is 0;
    - ``"collective"``: ``name`` is the function (``"all_reduce"``), ``nbytes`` the size of this rank's payload (its
      tensor, its whole input list; the tensor it receives for scatter; 0 for barrier), ``ranks`` the group's global
      ranks. ``new_group`` leaves no event. The deprecated ``all_gather_into_tensor`` and ``reduce_scatter_tensor``
      are recorded under the names that torch has for them now, ``all_gather_single`` and ``reduce_scatter_single``.

    ``start`` and ``end`` are seconds since the run began: of the virtual clock on simulated ranks, of the wall clock on
    real ones. ``elements`` counts the elements of the payload. ``began`` is when data began to move: from ``start`` to
    then the rank only waited for others. Only simulated ranks know it.
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float
    peer: int | None = None
    nbytes: int = 0
    elements: int = 0
    tag: int = 0
    ranks: tuple[int, ...] = ()
    began: float | None = None


@dataclass(frozen=True)
class Run:
    """A finished run: ``values[r]`` is what the function returned on rank r, ``seconds`` how long it took."""

    values: Sequence[Any]
    events: Sequence[Event]  # in order of start
    seconds: float

    @property
    def world_size(self) -> int:
        return len(self.values)

    def of_rank(self, rank: int) -> list[Event]:
        """The events of one rank, in order of start."""
        return [event for event in self.events if event.rank == rank]

    def sent(self, rank: int) -> int:
        """Bytes that a rank sent point to point."""
        return sum(event.nbytes for event in self.of_rank(rank) if event.kind == "send")

    def collectives(self, rank: int) -> list[Event]:
        """The ready collectives that a rank called, in order."""
        return [event for event in self.of_rank(rank) if event.kind == "collective"]
