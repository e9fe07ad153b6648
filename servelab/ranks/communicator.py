"""The collectives of one group of ranks behind one small face, whichever functions run below.

A layer that communicates takes a `Communicator`: torch's ready collectives by default, or functions of the learner's
own. Either way a call leaves one event of kind ``"collective"`` in the run's record, with the ready function's name.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from servelab.ranks import current
from servelab.ranks.record import Event

Own = Callable[[torch.Tensor, Any], Any]
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Communicator:
    """The collectives of one group. With one rank, or outside of ranks, nothing is sent or recorded.

    Autograd sees none of them, so a tensor of a graph is refused: call them in an autograd function, or detach it.

    Parameters
    ----------
    group : ProcessGroup, optional
        Of this rank; all ranks if not given.
    all_reduce, all_gather, reduce_scatter : callable, optional
        Used instead of torch's, as ``function(tensor, group)``, in place on a tensor of one dimension. For the last two
        the tensor has ``size`` equal parts, and the part with this rank's number is its own: what it gives, or gets.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        all_reduce: Own | None = None,
        all_gather: Own | None = None,
        reduce_scatter: Own | None = None,
    ):
        self.group = group
        self.ranks = tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)
        self.size = len(self.ranks)
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._own = {
            "all_reduce": all_reduce,
            "all_gather": all_gather,
            "reduce_scatter": reduce_scatter,
        }

    def __repr__(self) -> str:
        return f"Communicator(rank {self.rank} of {self.size})"

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Replace ``tensor``, in place, by the sum (or ``"max"``) over the group's ranks, and return it.

        A function of one's own sums; for the maximum torch's is used.
        """
        _require_outside_graph("all_reduce", tensor)
        if self.size > 1:
            buffer = tensor.detach().reshape(-1).contiguous()
            own = self._own["all_reduce"] if op == "sum" else None
            with self._recorded("all_reduce", buffer, own):
                own(buffer, self.group) if own else dist.all_reduce(buffer, REDUCTIONS[op], self.group)
            if buffer.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(buffer.view(tensor.shape))
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """A new tensor: those of all ranks, which have one shape, side by side along ``dim`` in the order of ranks."""
        _require_outside_graph("all_gather", tensor)
        if self.size == 1:
            return tensor.detach().clone()
        mine = tensor.detach().contiguous()
        parts = mine.new_empty(self.size, *mine.shape)
        own = self._own["all_gather"]
        with self._recorded("all_gather", mine, own):
            if own:
                parts[self.rank] = mine
                own(parts.view(-1), self.group)
            else:
                dist.all_gather(list(parts.unbind()), mine, self.group)
        return torch.cat(parts.unbind(), dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """A new tensor: of the sum over all ranks, this rank's one of ``size`` equal parts along ``dim``."""
        _require_outside_graph("reduce_scatter", tensor)
        if self.size == 1:
            return tensor.detach().clone()
        if tensor.shape[dim] % self.size:
            raise ValueError(f"{tensor.shape[dim]} along dimension {dim} cannot be cut into {self.size} equal parts")
        parts = torch.stack(tensor.detach().chunk(self.size, dim))
        mine, own = torch.empty_like(parts[0]), self._own["reduce_scatter"]
        with self._recorded("reduce_scatter", parts, own):
            if own:
                own(parts.view(-1), self.group)
                mine.copy_(parts[self.rank])
            else:
                dist.reduce_scatter(mine, list(parts.unbind()), group=self.group)
        return mine

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Replace ``tensor``, in place, by that of the group's rank ``source``, and return it."""
        _require_outside_graph("broadcast", tensor)
        if self.size > 1:
            buffer = tensor.detach().reshape(-1).contiguous()
            dist.broadcast(buffer, self.ranks[source], self.group)
            if buffer.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(buffer.view(tensor.shape))
        return tensor

    @contextmanager
    def _recorded(self, name: str, payload: torch.Tensor, own: Own | None) -> Iterator[None]:
        """Write a call of one's own function down as the engine writes down a ready one."""
        here = current.rank()
        tracer = None if here else getattr(sys.modules.get("servelab.ranks.tracing"), "active", None)
        now = (lambda: here.clock) if here else perf_counter
        start = now()
        yield
        nbytes = payload.numel() * payload.element_size()
        event = Event(dist.get_rank(), "collective", name, start, now(), None, nbytes, payload.numel(), 0, self.ranks)
        if own and here:
            here.record(event)
        elif own and tracer:
            tracer.events.append(event)


def _require_outside_graph(name: str, tensor: torch.Tensor) -> None:
    """Refuse what is no tensor, and a tensor whose gradient would be lost without a word."""
    if not isinstance(tensor, torch.Tensor):
        none = "; the gradient of a parameter that had no part in the result is None" if tensor is None else ""
        raise TypeError(f"comm.{name} takes a tensor, got an object of type {type(tensor).__name__}{none}")
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise RuntimeError(
            f"comm.{name} was given a tensor of autograd's graph, and autograd does not see what comm does: "
            "use a function with a backward pass of its own, such as f or g, or give it a detached tensor"
        )


def split(comm: Communicator, size: int) -> Communicator:
    """The communicator of the ``size`` consecutive ranks of ``comm`` among which this rank is.

    Every rank of ``comm`` has to call it. Returns ``comm`` itself where nothing is split.
    """
    if comm.size % size:
        raise ValueError(f"{comm.size} ranks cannot be split into groups of {size}")
    if size == comm.size:
        return comm
    first = comm.rank - comm.rank % size
    return Communicator(dist.new_group(list(comm.ranks[first : first + size]), use_local_synchronization=True))
