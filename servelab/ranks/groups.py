"""The process group behind torch.distributed on simulated ranks.

torch.distributed checks a call's arguments, then calls its process group; `SimGroup` is one that hands the call to the
run's `Exchange`. So learners' calls, and what torch builds on them (`batch_isend_irecv`, `all_gather_object`,
functional collectives, DTensor), are torch's own functions, however they were imported.
"""

import inspect
import sys
from collections.abc import Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from servelab.ranks import current
from servelab.ranks.calls import caller, size
from servelab.ranks.collectives import COLLECTIVES, REDUCTIONS, Contribution, Reduction, Tensors
from servelab.ranks.exchange import Exchange, Request
from servelab.ranks.flight import Post
from servelab.ranks.scheduler import Rank

ProcessGroup: Any = dist.ProcessGroup  # its methods are overloads that mypy would have repeated
BLOCKING = {inspect.unwrap(function).__code__ for function in (dist.send, dist.recv)}


class SimWork(dist.Work):
    """What isend, irecv and asynchronous collectives return."""

    def __init__(self, exchange: Exchange, rank: Rank, request: Request):
        super().__init__()
        self._exchange, self._rank, self._request = exchange, rank, request

    def wait(self, timeout: Any = None) -> bool:
        self._exchange.wait(self._rank, self._request)
        return True

    def is_completed(self) -> bool:
        return self._exchange.completed(self._rank, self._request)

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        post = self._request.post
        assert post.peer is not None, "no message has come yet"
        return post.ranks.index(post.peer)

    source_rank = _source_rank


class ForeignGroupError(ValueError):
    """A rank called another rank's view of a group. Under it, torch's own report of the error raises another one."""


class SimGroup(ProcessGroup):
    """A group as one of its ranks sees it.

    Parameters
    ----------
    exchange : Exchange
        The run's.
    member : Rank
        Whose view this is.
    name : str
        The same on all ranks of the group.
    ranks : sequence of int
        The group's global ranks.
    """

    def __init__(self, exchange: Exchange, member: Rank, name: str, ranks: Sequence[int]):
        super().__init__(ranks.index(member.index), len(ranks))
        self._exchange, self._member, self._name, self._ranks = exchange, member, name, tuple(ranks)

    def __repr__(self) -> str:
        return f"of the ranks {', '.join(map(str, self._ranks))}"

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return f"ranks {self._ranks}"

    def new_group(self, ranks: Sequence[int], group_name: str = "", **_: Any) -> "SimGroup | None":
        """What `torch.distributed.new_group` asks of the default group."""
        if self._member.index not in ranks:
            return None
        return SimGroup(self._exchange, self._member, group_name, ranks)

    # -- messages

    def send(self, tensors: Tensors, dst: int, tag: int) -> SimWork:
        return self._message("send", tensors[0], dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> SimWork:
        return self._message("recv", tensors[0], src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> SimWork:
        return self._message("recv", tensors[0], None, tag)

    def _message(self, kind: str, tensor: torch.Tensor, peer: int | None, tag: int) -> SimWork:
        blocking = _called_by_send_or_recv(sys._getframe(3))
        self._demand_own(kind)
        if peer is not None:
            self._demand_member(kind, peer)
        _demand_contiguous([tensor])
        post = Post(
            rank=self._member.index,
            kind=kind,
            name=kind if blocking else f"i{kind}",
            group=self._name,
            ranks=self._ranks,
            number=0,
            peer=None if peer is None else self._ranks[peer],
            tag=tag,
            where=caller(),
            **size(tensor),
        )
        request = self._exchange.message(self._member, post, tensor, blocking)
        return SimWork(self._exchange, self._member, request)

    # -- collectives

    def allreduce(self, tensors: Tensors, options: Any) -> SimWork:
        part = Contribution(tensors, tensors, op=options.reduceOp.op)
        return self._collective("all_reduce", part, tensors[0], options)

    def broadcast(self, tensors: Tensors, options: Any) -> SimWork:
        part = Contribution(tensors, tensors, options.rootRank)
        return self._collective("broadcast", part, tensors[0], options)

    def reduce(self, tensors: Tensors, options: Any) -> SimWork:
        outputs = tensors if options.rootRank == self.rank() else []
        part = Contribution(tensors, outputs, options.rootRank, options.reduceOp.op)
        return self._collective("reduce", part, tensors[0], options)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> SimWork:
        self._demand_sizes("all_gather", "output", outputs[0], inputs[0].numel())
        return self._collective("all_gather", Contribution(inputs, outputs[0]), inputs[0], options)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, options: Any) -> SimWork:
        outputs = self._parts_of("all_gather_single: the output", output, given.numel())
        return self._collective("all_gather_single", Contribution([given], outputs), given, options)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any) -> SimWork:
        """What the functional all-gather calls, with one tensor."""
        return self.all_gather_single(_only("all_gather_single", outputs), _only("all_gather_single", inputs), options)

    def gather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> SimWork:
        if outputs:
            self._demand_sizes("gather", "output", outputs[0], inputs[0].numel())
        part = Contribution(inputs, outputs[0] if outputs else [], options.rootRank)
        return self._collective("gather", part, inputs[0], options)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> SimWork:
        if inputs:
            self._demand_sizes("scatter", "input", inputs[0], outputs[0].numel())
        part = Contribution(inputs[0] if inputs else [], outputs, options.rootRank)
        return self._collective("scatter", part, outputs[0], options)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> SimWork:
        self._demand_sizes("reduce_scatter", "input", inputs[0], outputs[0].numel())
        part = Contribution(inputs[0], outputs, op=options.reduceOp.op)
        return self._collective("reduce_scatter", part, inputs[0], options)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, options: Any) -> SimWork:
        inputs = self._parts_of("reduce_scatter_single: the input", given, output.numel())
        part = Contribution(inputs, [output], op=options.reduceOp.op)
        return self._collective("reduce_scatter_single", part, given, options)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any) -> SimWork:
        """What the functional reduce-scatter calls, with one tensor."""
        return self.reduce_scatter_single(
            _only("reduce_scatter_single", outputs), _only("reduce_scatter_single", inputs), options
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any) -> SimWork:
        self._demand_sizes("all_to_all", "output", outputs)
        self._demand_sizes("all_to_all", "input", inputs)
        return self._collective("all_to_all", Contribution(inputs, outputs), inputs, options)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, output_rows: list[int], input_rows: list[int], options: Any
    ) -> SimWork:
        part = Contribution(self._split("input", given, input_rows), self._split("output", output, output_rows))
        return self._collective("all_to_all_single", part, given, options)

    def barrier(self, opts: Any) -> SimWork:
        return self._collective("barrier", Contribution(), [], opts)

    def _collective(self, name: str, part: Contribution, payload: torch.Tensor | Tensors, options: Any) -> SimWork:
        self._demand_own(name)
        self._demand_member(name, part.root)
        _demand_contiguous([*part.inputs, *part.outputs])
        post = Post(
            rank=self._member.index,
            kind="collective",
            name=name,
            group=self._name,
            ranks=self._ranks,
            number=0,
            detail=self._detail(name, part),
            splits=_splits(part) if name.startswith("all_to_all") else None,
            where=caller(),
            **size(payload),
        )
        blocking = not options.asyncOp
        request = self._exchange.collective(self._member, post, part, COLLECTIVES[name], blocking)
        return SimWork(self._exchange, self._member, request)

    def _detail(self, name: str, part: Contribution) -> str:
        """What must agree besides the sizes: the reduction and the root."""
        details = []
        if "reduce" in name:
            _demand_reducible(name, part)
            details.append(f"op={part.op.name}")
        if name in ("broadcast", "reduce", "gather", "scatter"):
            details.append(f"root={self._ranks[part.root]}")
        return ", ".join(details)

    def _demand_own(self, name: str) -> None:
        """A rank that calls another rank's view of a group would speak in its name."""
        here = current.rank()
        if here is None:
            raise ForeignGroupError(f"{name}: called in a thread of its own; a rank is one thread")
        if here.exchange is not self._exchange:
            raise ForeignGroupError(
                f"{name}: this group object is left over from an earlier run; groups end with their run: make it anew"
            )
        if here.index != self._member.index:
            raise ForeignGroupError(
                f"{name}: rank {here.index} called the group object of rank {self._member.index}; "
                "each rank has its own: keep it in a local variable, not on a class or in a global one"
            )

    def _demand_member(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size():
            raise ValueError(f"{name}: there is no rank {rank} in a group of {self.size()}")

    def _demand_sizes(self, name: str, side: str, tensors: Tensors, elements: int | None = None) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{name}: expected {self.size()} {side} tensors, one a rank, got {len(tensors)}")
        for index, tensor in enumerate(tensors if elements is not None else ()):
            if tensor.numel() != elements:
                message = f"expected {elements} elements like this rank's own tensor, got {tensor.numel()}"
                raise ValueError(f"{name}: {side} tensor {index}: {message}")

    def _parts_of(self, name: str, tensor: torch.Tensor, elements: int) -> Tensors:
        """Views of a tensor's equal parts, one a rank."""
        if tensor.numel() != elements * self.size():
            raise ValueError(f"{name} must have {self.size()} x {elements} elements, got {tensor.numel()}")
        _demand_contiguous([tensor])
        return list(tensor.view(self.size(), elements))

    def _split(self, side: str, tensor: torch.Tensor, rows: list[int]) -> Tensors:
        """Views of so many rows each of a tensor, one a rank; of equal parts where ``rows`` is empty."""
        length, size = tensor.shape[0], self.size()
        if not rows and length % size:
            raise ValueError(f"all_to_all_single: {length} {side} rows cannot be split evenly over {size} ranks")
        rows = rows or [length // size] * size
        if len(rows) != size or sum(rows) != length or min(rows) < 0:
            raise ValueError(f"all_to_all_single: {side} splits {rows} do not divide {length} rows over {size} ranks")
        _demand_contiguous([tensor])
        return list(tensor.split(rows))


def world(exchange: Exchange, member: Rank, ranks: Sequence[int], store: dist.Store) -> SimpleNamespace:
    """What torch.distributed keeps of its process groups (its ``_World``), for one rank; with the default group.

    Under its name the group is also found by functional collectives and DTensor, by thread as `isolation` sees to.
    """
    group = SimGroup(exchange, member, "0", ranks)
    _distributed_c10d._register_process_group(distributed_c10d.GroupName("0"), group)
    return SimpleNamespace(
        default_pg=group,
        pg_map={group: (dist.Backend("gloo"), store)},
        pg_names={group: "0"},
        pg_group_ranks={group: {rank: rank for rank in ranks}},
        pg_backend_config={group: "cpu:gloo"},
        group_count=1,
        tags_to_pg={"": [group]},
        pg_to_tag={group: ""},
        pg_coalesce_state={},
        pg_config_info=[],
        comms=[],
    )


def _called_by_send_or_recv(frame: FrameType | None) -> bool:
    """Whether torch's blocking function made the call: it calls isend or irecv, then waits."""
    return frame is not None and frame.f_code in BLOCKING


def _only(name: str, tensors: Tensors) -> torch.Tensor:
    if len(tensors) != 1:
        raise ValueError(f"{name}: simulated ranks take one tensor a call, got {len(tensors)}")
    return tensors[0]


def _demand_contiguous(tensors: Tensors) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous: gloo and "
                "NCCL send memory as it lies; call .contiguous() first"
            )


def _demand_reducible(name: str, part: Contribution) -> None:
    if part.op not in REDUCTIONS:
        raise ValueError(f"{name}: no reduction {part.op.name} on simulated ranks")
    if part.op == Reduction.AVG and not all(t.is_floating_point() for t in part.inputs):
        raise ValueError(f"{name}: the average of integers is not defined; use SUM and divide")


def _splits(part: Contribution) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements to and from each rank."""
    return tuple(t.numel() for t in part.inputs), tuple(t.numel() for t in part.outputs)
