"""What a simulated run borrows from the process and gives back: torch.distributed's world, random numbers, output.

All of it is by thread: a rank sees its own, every other thread what it saw before. Each function here is a context
manager that leaves nothing behind, however its block ends.
"""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from servelab.ranks import current
from servelab.ranks.lines import Lines, labelled


class _ByThread:
    """Stands for torch.distributed's only world: each rank finds its own in it, other threads the real one."""

    def __init__(self, real: Any):
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        rank = current.rank()
        return getattr(rank.world if rank else self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        rank = current.rank()
        setattr(rank.world if rank else self._real, name, value)


@contextlib.contextmanager
def worlds_of_ranks() -> Iterator[None]:
    """Let torch.distributed's functions find the process groups of the rank that calls them."""
    real = distributed_c10d._world
    by_thread: Callable[[bool], None] = _distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    try:
        distributed_c10d._world = _ByThread(real)  # type: ignore[assignment]
        by_thread(True)  # where groups are found by name: a group has the same name on all ranks
        yield
    finally:
        by_thread(False)
        distributed_c10d._world = real


@contextlib.contextmanager
def random_by_rank() -> Iterator[None]:
    """Let ``random``'s functions draw from the rank's own generator, and put torch's back at the end.

    `Scheduler` gives each rank its own state of torch's. A function that was imported out of ``random`` before the run
    is not covered.
    """
    functions = {name: value for name, value in vars(random).items() if getattr(value, "__self__", None) is _SHARED}
    generator = torch.get_rng_state()
    try:
        for name, function in functions.items():
            setattr(random, name, _by_rank(name, function))
        yield
    finally:
        vars(random).update(functions)
        torch.set_rng_state(generator)


def _by_rank(name: str, shared: Callable) -> Callable:
    def drawn(*args: Any, **kwargs: Any) -> Any:
        rank = current.rank()
        return (getattr(rank.random, name) if rank else shared)(*args, **kwargs)

    return drawn


_SHARED = random.random.__self__  # type: ignore[attr-defined]


class _Labelled:
    """An output stream that labels what a rank writes."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._lines: dict[int, Lines] = {}

    def write(self, text: str) -> int:
        rank = current.rank()
        if rank is None:
            return self._stream.write(text)
        return self._lines.setdefault(rank.index, labelled(self._stream, rank.index)).write(text)

    def end(self) -> None:
        """Write the lines that ranks have not ended."""
        for _, lines in sorted(self._lines.items()):
            lines.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def labelled_output() -> Iterator[None]:
    """Say with each line on stdout and stderr which rank wrote it."""
    real, labelled = (sys.stdout, sys.stderr), (_Labelled(sys.stdout), _Labelled(sys.stderr))
    try:
        sys.stdout, sys.stderr = labelled
        yield
    finally:
        sys.stdout, sys.stderr = real
        for stream in labelled:
            stream.end()
