"""What the batching exercises and their checks share: requests on a clock of steps, and the slots of a batch.

Step ``t`` (from 0) runs from moment ``t`` to moment ``t + 1``. Moments and durations are whole numbers of steps.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Request:
    """One request on the clock of steps.

    Parameters
    ----------
    arrival : int
        The first step in which it may run, at least 0.
    prompt : int
        Tokens of its prompt; 0 leaves the prompt out of the count of cells.
    output : int
        Tokens of its answer, at least 1. They take ``output`` steps, the first of which also reads the prompt.
    """

    arrival: int
    prompt: int
    output: int

    def __post_init__(self):
        if self.arrival < 0 or self.prompt < 0 or self.output < 1:
            raise ValueError(f"{self}: expected arrival and prompt of at least 0, output of at least 1")


@dataclass(frozen=True)
class Slot:
    """One row of a batch's rectangle, as numbers of cells, in their order from left to right.

    ``request`` is None in a slot that nobody has: all of its cells are empty.
    """

    request: Request | None
    padding: int = 0
    useful: int = 0
    held: int = 0
    empty: int = 0

    @property
    def cells(self) -> int:
        """The length of the row."""
        return self.padding + self.useful + self.held + self.empty


@dataclass(frozen=True)
class Batch:
    """A batch: it runs from moment ``start`` to moment ``finish``, when all of its answers go back together."""

    start: int
    finish: int
    slots: Sequence[Slot]

    @property
    def steps(self) -> int:
        """How many steps it runs for."""
        return self.finish - self.start

    @property
    def columns(self) -> int:
        """Columns of its rectangle: those of the prompts, and one a step."""
        return max((slot.cells for slot in self.slots), default=0)

    @property
    def prompt_columns(self) -> int:
        """Columns of the prompts, at the left of the rectangle."""
        return self.columns - self.steps


class Arrived(Protocol):
    """A request of a trace, as `servelab.traces` reads it."""

    @property
    def arrival(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...


def to_steps(trace: Iterable[Arrived], step_s: float) -> list[Request]:
    """A trace on the clock of steps, each ``step_s`` seconds long; who arrives during a step may run in the next."""
    if not step_s > 0:
        raise ValueError(f"a step takes more than {step_s} seconds")
    return [Request(math.ceil(r.arrival / step_s), r.prompt_tokens, r.output_tokens) for r in trace]


def require_lengths(lengths: Sequence[int], slots: int) -> None:
    """Raise `ValueError` unless there is a length, and every length and the number of slots is at least 1."""
    if not lengths or min(lengths) < 1 or slots < 1:
        found = f"{len(lengths)} lengths from {min(lengths)}" if lengths else "no length"
        raise ValueError(f"expected lengths and slots of at least 1, found {found}, and slots={slots}")
