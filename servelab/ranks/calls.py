"""What there is to write down about one call of torch.distributed: its caller, size, reduction and splits."""

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from servelab.ranks.flight import Post
from servelab.ranks.shipping import foreign

MACHINERY = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class Call:
    """A call as it was posted: where it stands in the records, and a copy of what it sends."""

    def __init__(self, post: Post, index: int, position: int, tensor: torch.Tensor | None = None):
        self.post, self.index, self.position, self.tensor = post, index, position, tensor
        self.copy = None if tensor is None else tensor.detach().clone()
        self.event: int | None = None

    def changed(self) -> bool:
        """Whether the buffer to be sent holds other bytes than when the call was made."""
        return self.tensor is not None and self.copy is not None and not same_bytes(self.tensor, self.copy)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes: NaN is not equal to itself, but it may have stayed as it was."""
    as_bytes = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*as_bytes)


def parameters(function: Callable) -> tuple[list[str], dict[str, Any]]:
    """The names of a function's parameters, and the defaults of those that have one."""
    found = inspect.signature(function).parameters
    return list(found), {name: p.default for name, p in found.items() if p.default is not inspect.Parameter.empty}


def caller() -> tuple[str, int, str]:
    """File, line and function of the learner's innermost frame; without one, of the innermost that called torch."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame:
        file = frame.f_code.co_filename
        if not foreign(file) or (found is None and not file.startswith(MACHINERY)):
            found = frame
        if not foreign(file):
            break
        frame = frame.f_back
    assert found is not None
    return found.f_code.co_filename, found.f_lineno, found.f_code.co_name


def size(payload: Any) -> dict[str, Any]:
    """Shape, dtype, elements and bytes of a tensor or a list of tensors."""
    if torch.is_tensor(payload):
        tensors, shape = [payload], tuple(payload.shape)
    else:
        tensors = [tensor for tensor in payload or () if torch.is_tensor(tensor)]
        if not tensors:
            return {}
        shape = (len(tensors), *tensors[0].shape)
    elements = sum(tensor.numel() for tensor in tensors)
    nbytes = elements * tensors[0].element_size()
    return {"shape": shape, "dtype": _name(tensors[0].dtype), "elements": elements, "nbytes": nbytes}


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def reduction(op: Any) -> str:
    return str(op).rpartition(".")[2].rstrip(">").partition(":")[0]


def splits(name: str, given: dict[str, Any], ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Elements that an all_to_all sends to, and expects from, each rank of the group."""
    if name == "all_to_all":
        lists = (given["input_tensor_list"], given["output_tensor_list"])
        return tuple(tuple(tensor.numel() for tensor in tensors) for tensors in lists)  # type: ignore[return-value]
    if name != "all_to_all_single":
        return None
    sides = []
    for tensor, rows in ((given["input"], given["input_split_sizes"]), (given["output"], given["output_split_sizes"])):
        row = tensor.numel() // max(1, tensor.shape[0])
        sides.append(tuple(n * row for n in rows or [tensor.shape[0] // ranks] * ranks))
    return tuple(sides)  # type: ignore[return-value]
