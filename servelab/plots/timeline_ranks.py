"""Pictures of runs on several ranks: when each rank computes, communicates or is idle."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from servelab.plots import style
from servelab.ranks.record import Run

KINDS = ("compute", "communication", "idle")
LETTERS = {"compute": "c", "communication": "m", "idle": "."}
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
CHARACTER = 0.0125  # of a span's name, as a share of the width


@dataclass(frozen=True)
class Interval:
    """What a rank does from ``start`` to ``end``, in seconds; ``name`` is a span's."""

    kind: str
    start: float
    end: float
    name: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def intervals(run: Run, rank: int) -> list[Interval]:
    """A rank's time from 0 to the end of the run, without gaps.

    Spans are compute. Of the rest, what a call takes from the moment at which its data begins to move is
    communication. All else is idle: waiting for another rank, and, on real ranks, what is in no span and no call; their
    record does not tell when data began to move, so there the whole call is communication.
    """
    found = [Interval("compute", e.start, e.end, e.name) for e in run.of_rank(rank) if e.kind == "compute"]
    for event in run.of_rank(rank):
        if event.kind != "compute":
            moves = Interval("communication", event.start if event.began is None else event.began, event.end)
            found += _outside(moves, found)
    found += _outside(Interval("idle", 0.0, run.seconds), found)
    return sorted((part for part in found if part.seconds > 0), key=lambda part: part.start)


def _outside(whole: Interval, taken: list[Interval]) -> list[Interval]:
    """The parts of an interval that no interval of ``taken`` covers."""
    parts, start = [], whole.start
    for other in sorted(taken, key=lambda part: part.start):
        if other.start > start:
            parts.append(Interval(whole.kind, start, min(other.start, whole.end)))
        start = max(start, other.end)
        if start >= whole.end:
            break
    else:
        parts.append(Interval(whole.kind, start, whole.end))
    return [part for part in parts if part.seconds > 0]


def seconds(run: Run, kind: str) -> list[float]:
    """How long each rank does something of ``kind``, out of `KINDS`."""
    return [sum(p.seconds for p in intervals(run, rank) if p.kind == kind) for rank in range(run.world_size)]


def bubble(run: Run) -> float:
    """The share of all ranks' time in which no span ran: of a pipeline, its bubble."""
    return 1 - sum(seconds(run, "compute")) / (run.world_size * run.seconds) if run.seconds else 0.0


def timeline(run: Run, label: Callable[[str], str] | None = None) -> Figure:
    """One row a rank, time from left to right.

    Parameters
    ----------
    run : Run
    label : callable, optional
        What to write into a span, given its name; the name itself by default. Left out where there is no room.
    """
    scale, unit = _unit(run.seconds)
    with style.styled():
        figure = Figure(figsize=(7.2, 1.2 + 0.34 * run.world_size))
        axes = figure.add_subplot()
        for rank in range(run.world_size):
            for part in intervals(run, rank):
                axes.barh(rank, part.seconds / scale, left=part.start / scale, height=0.8, **style.area(part.kind))
                text = (label or str)(part.name)
                if text and part.seconds >= CHARACTER * len(text) * run.seconds:
                    _write(axes, text, (part.start + part.end) / 2 / scale, rank)
        axes.set(xlim=(0, run.seconds / scale or 1), ylim=(run.world_size - 0.4, -0.6), xlabel=unit, ylabel="rank")
        axes.set_yticks(range(run.world_size))
        axes.spines["left"].set_visible(False)
        figure.legend(handles=style.legend_patches(*KINDS), loc="outside upper center", ncols=len(KINDS))
        return figure


def _write(axes: Axes, text: str, x: float, y: float) -> None:
    axes.text(x, y, text, ha="center", va="center", color="white", fontsize=8)


def timeline_text(run: Run) -> str:
    """The sums of `timeline` as a Markdown table, a row a rank: its text twin."""
    scale, unit = _unit(run.seconds)
    lines = [f"| rank | {' | '.join(f'{kind} {unit}' for kind in KINDS)} | idle share |", "|---" * 5 + "|"]
    sums = zip(*(seconds(run, kind) for kind in KINDS), strict=True)
    for rank, (compute, communication, idle) in enumerate(sums):
        share = idle / run.seconds if run.seconds else 0.0
        numbers = " | ".join(f"{number / scale:.2f}" for number in (compute, communication, idle))
        lines.append(f"| {rank} | {numbers} | {100 * share:.1f} % |")
    return "\n".join(lines)


def timeline_lines(run: Run, width: int = 66) -> str:
    """One line a rank, ``width`` letters for the whole run: ``c`` compute, ``m`` communication, ``.`` idle.

    A letter stands for what the rank does in the middle of its share of the time.
    """
    lines = []
    for rank in range(run.world_size):
        parts, row = intervals(run, rank), ""
        for column in range(width):
            moment = (column + 0.5) / width * run.seconds
            row += next((LETTERS[part.kind] for part in parts if part.start <= moment < part.end), " ")
        lines.append(f"rank {rank}  {row}")
    return "\n".join(lines)


def _unit(seconds: float) -> tuple[float, str]:
    """The largest unit of which a run takes at least one."""
    return next(((scale, name) for scale, name in UNITS if seconds >= scale), UNITS[0])
