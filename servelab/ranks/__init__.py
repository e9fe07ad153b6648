"""One function on several ranks: simulated (`SimCluster`) or real (`Cluster`), with plain ``torch.distributed`` inside.

`SimCluster` runs the ranks as threads with a virtual clock: every run is the same, a deadlock is found at once, links
cost what their alpha-beta model says. `Cluster` runs them as processes over gloo, or NCCL where there are GPUs. What
happened is the same record on both: a `Run`. Importing this package does not import torch.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from servelab.ranks import current
from servelab.ranks.errors import (
    BufferChangedError,
    DeadlockError,
    MismatchError,
    RankError,
    RankInterruptError,
    RankTimeoutError,
    UnwaitedError,
)
from servelab.ranks.record import Event, Link, Run

if TYPE_CHECKING:
    import torch

    from servelab.ranks.processes import Cluster
    from servelab.ranks.simulated import SimCluster

__all__ = [
    "BufferChangedError",
    "Cluster",
    "DeadlockError",
    "Event",
    "Link",
    "MismatchError",
    "RankError",
    "RankInterruptError",
    "RankTimeoutError",
    "Run",
    "SimCluster",
    "UnwaitedError",
    "device",
    "span",
]


def span(name: str, seconds: float = 0.0) -> AbstractContextManager[None]:
    """Mark the block as a compute interval called ``name`` in this rank's record.

    Parameters
    ----------
    name : str
        What is computed, e.g. ``"F3"``.
    seconds : float
        What it costs on a simulated rank, whose clock moves on by so much at the end of the block, whatever the block
        took. A real rank records how long the block took, and sleeps until it took ``seconds``. Outside of ranks
        nothing happens.
    """
    here, real = current.rank(), _real_rank()
    if here:
        return here.span(name, seconds)
    return real.span(name, seconds) if real else nullcontext()


def device() -> "torch.device":
    """Where this rank's tensors belong: the CPU on simulated ranks, gloo ranks and outside of ranks; else its GPU."""
    import torch

    here, real = current.rank(), _real_rank()
    if here:
        return here.device
    return real.device() if real else torch.device("cpu")


def _real_rank() -> Any:
    """The module that records what a real rank does, if this process is one."""
    tracing = sys.modules.get("servelab.ranks.tracing")
    return tracing if tracing and tracing.active else None


def __getattr__(name: str) -> Any:
    """The engines, on first use: they import torch."""
    if name == "SimCluster":
        from servelab.ranks.simulated import SimCluster

        return SimCluster
    if name == "Cluster":
        from servelab.ranks.processes import Cluster

        return Cluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
