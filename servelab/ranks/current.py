"""Which simulated rank the code is on that runs in this thread. The engine says so; `servelab.ranks.span` asks."""

import threading
from contextlib import AbstractContextManager
from random import Random
from typing import Any, Protocol

from servelab.ranks.record import Event


class Rank(Protocol):
    """A simulated rank as the code on it finds it."""

    index: int
    device: Any  # a torch.device
    world: Any  # its state of torch.distributed
    exchange: Any  # its run's `servelab.ranks.exchange.Exchange`

    @property
    def random(self) -> Random:
        """Its random numbers, instead of the shared ones of the module `random`."""
        ...

    @property
    def clock(self) -> float:
        """Virtual seconds since the run began."""
        ...

    def record(self, event: Event) -> None:
        """Add an event of this rank to the run's record."""
        ...

    def span(self, name: str, seconds: float) -> AbstractContextManager[None]:
        """Record the block as a compute interval that moves the rank's clock on by ``seconds``."""
        ...


class _Here(threading.local):
    rank: Rank | None = None


_here = _Here()


def enter(rank: Rank | None) -> None:
    """This thread is from now on ``rank``; None ends that."""
    _here.rank = rank


def rank() -> Rank | None:
    """The rank of this thread; None outside of simulated ranks."""
    return _here.rank
