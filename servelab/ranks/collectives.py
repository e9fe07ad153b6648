"""What each collective hands to every rank of its group, and what it costs: p ranks in a ring, p - 1 hops a turn.

The ring's neighbours are the group's ranks in their order. A hop takes as long as its slowest link. Sums are formed in
the order of the ranks, so they are the same in every run; a real ring adds in another order, and rounds differently.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch.distributed import ReduceOp

from servelab.ranks.record import Link

Tensors = list[torch.Tensor]
Reduction: Any = ReduceOp.RedOpType
REDUCTIONS: dict[Reduction, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.AVG: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.BAND: torch.bitwise_and,
    Reduction.BOR: torch.bitwise_or,
    Reduction.BXOR: torch.bitwise_xor,
}


@dataclass
class Contribution:
    """One rank's part in a collective: what it gives, where its result goes; ``root`` is a rank of the group."""

    inputs: Tensors = field(default_factory=list)
    outputs: Tensors = field(default_factory=list)
    root: int = 0
    op: Reduction = Reduction.SUM

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.inputs)


@dataclass(frozen=True)
class Ring:
    """The links between a group's ranks."""

    ranks: Sequence[int]
    link: Link
    links: Mapping[tuple[int, int], Link]

    def hop(self, nbytes: float, distance: int = 1) -> float:
        """Seconds until every rank has sent ``nbytes`` to the rank ``distance`` further on."""
        return max(self.between(index, index + distance).seconds(nbytes) for index in range(self.size))

    def between(self, source: int, target: int) -> Link:
        """The link between two places in the group, counted modulo its size."""
        ends = (self.ranks[source % self.size], self.ranks[target % self.size])
        return self.links.get(ends, self.link)

    @property
    def size(self) -> int:
        return len(self.ranks)


Parts = Sequence[Contribution]


@dataclass(frozen=True)
class Collective:
    """``results(parts)[r]`` is what goes into the outputs of rank r; ``price(parts, ring)`` is the seconds it takes."""

    results: Callable[[Parts], list[Tensors]]
    price: Callable[[Parts, Ring], float]

    def seconds(self, parts: Parts, ring: Ring) -> float:
        """Virtual seconds from the last rank's call to completion; one rank alone takes none."""
        return self.price(parts, ring) if ring.size > 1 else 0.0


def fold(tensors: Tensors, op: Reduction) -> torch.Tensor:
    """The tensors reduced to one, in the order given."""
    total = reduce(REDUCTIONS[op], tensors[1:], tensors[0].clone())
    return total / len(tensors) if op == Reduction.AVG else total


def _all_reduce(parts: Parts) -> list[Tensors]:
    return [[fold([part.inputs[0] for part in parts], parts[0].op)]] * len(parts)


def _reduce(parts: Parts) -> list[Tensors]:
    total = fold([part.inputs[0] for part in parts], parts[0].op)
    return [[total] * len(part.outputs) for part in parts]


def _broadcast(parts: Parts) -> list[Tensors]:
    return [parts[parts[0].root].inputs] * len(parts)


def _gather(parts: Parts) -> list[Tensors]:
    pieces = [part.inputs[0] for part in parts]
    return [pieces[: len(part.outputs)] for part in parts]


def _scatter(parts: Parts) -> list[Tensors]:
    return [[piece] for piece in parts[parts[0].root].inputs]


def _reduce_scatter(parts: Parts) -> list[Tensors]:
    return [[fold([part.inputs[index] for part in parts], parts[0].op)] for index in range(len(parts))]


def _all_to_all(parts: Parts) -> list[Tensors]:
    return [[part.inputs[index] for part in parts] for index in range(len(parts))]


def _ring_twice(parts: Parts, ring: Ring) -> float:
    """Reduce-scatter, then all-gather."""
    return 2 * (ring.size - 1) * ring.hop(parts[0].nbytes / ring.size)


def _ring_of_shards(parts: Parts, ring: Ring) -> float:
    return (ring.size - 1) * ring.hop(parts[0].nbytes / ring.size)


def _ring_of_pieces(parts: Parts, ring: Ring) -> float:
    """Every rank's whole input goes all the way round; or the root has as many pieces to send or to receive."""
    return (ring.size - 1) * ring.hop(max(tensor.nbytes for part in parts for tensor in part.inputs))


def _pipeline(parts: Parts, ring: Ring) -> float:
    """The root's tensor in small pieces, one behind the other: every hop's latency, and the bytes once."""
    return (ring.size - 2) * ring.hop(0) + ring.hop(max(part.nbytes for part in parts))


def _pairwise(parts: Parts, ring: Ring) -> float:
    """In round k every rank sends to the rank k further on."""
    size, total = ring.size, 0.0
    for distance in range(1, size):
        total += max(
            ring.between(index, index + distance).seconds(part.inputs[(index + distance) % size].nbytes)
            for index, part in enumerate(parts)
        )
    return total


COLLECTIVES = {
    "all_reduce": Collective(_all_reduce, _ring_twice),
    "broadcast": Collective(_broadcast, _pipeline),
    "reduce": Collective(_reduce, _pipeline),
    "all_gather": Collective(_gather, _ring_of_pieces),
    "all_gather_single": Collective(_gather, _ring_of_pieces),
    "gather": Collective(_gather, _ring_of_pieces),
    "scatter": Collective(_scatter, _ring_of_pieces),
    "reduce_scatter": Collective(_reduce_scatter, _ring_of_shards),
    "reduce_scatter_single": Collective(_reduce_scatter, _ring_of_shards),
    "all_to_all": Collective(_all_to_all, _pairwise),
    "all_to_all_single": Collective(_all_to_all, _pairwise),
    "barrier": Collective(lambda parts: [[] for _ in parts], lambda parts, ring: 2 * (ring.size - 1) * ring.hop(0)),
}
