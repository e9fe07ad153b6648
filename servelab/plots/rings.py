"""A ring all-reduce hop by hop: whose shares each chunk on each rank holds, and what each rank has sent."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from servelab.plots import style
from servelab.ranks import Link, Run, SimCluster, span

KINDS = ("own share", "partial sum", "whole sum")
EMPTY = "free"  # a chunk without elements
_tensors: dict[int, Any] = {}  # of the run that is being watched, by rank


@dataclass(frozen=True)
class State:
    """A ring after some hops.

    ``shares[r][c]`` are the ranks whose shares chunk c on rank r holds, None if its elements differ or are no sum of
    shares, empty if it has no elements. ``sent[r]`` counts elements, all of which are ``size`` bytes large.
    """

    hop: int
    shares: tuple[tuple[tuple[int, ...] | None, ...], ...]
    sent: tuple[int, ...]
    size: int = 8

    @property
    def p(self) -> int:
        """The number of ranks."""
        return len(self.shares)

    def kind(self, rank: int, chunk: int) -> str:
        """Which of `KINDS` a chunk on a rank is, or `EMPTY`."""
        shares = self.shares[rank][chunk]
        if shares == ():
            return EMPTY
        if shares is not None and len(shares) == self.p:
            return "whole sum"
        return "own share" if shares == (rank,) else "partial sum"


def watch(ring_all_reduce: Callable, p: int, n: int) -> list[State]:
    """Run a ring on p simulated ranks; its states before the first hop, after it, and so on to the last.

    Rank r contributes 2 to the power of r to each element, so a sum tells whose shares are in it. Every hop takes a
    second of virtual time, and a further rank looks at all tensors half a second after each.
    """
    run = SimCluster(p + 1, link=Link(alpha=1.0)).run(_rank, ring_all_reduce, p, n)
    _tensors.clear()
    looks = run.values[p]
    last = max((event.end for event in run.events if event.rank < p), default=0.0)
    return [_state(run, hop, look, p) for hop, look in enumerate(looks[: int(last) + 1])]


def _rank(ring_all_reduce: Callable, p: int, n: int) -> list | None:
    """What each rank does; the last one looks."""
    import torch
    import torch.distributed as dist

    group, rank = dist.new_group(list(range(p))), dist.get_rank()
    if rank == p:
        return [_look(1.0 if hop else 0.5, p) for hop in range(4 * p)]
    _tensors[rank] = torch.full((n,), 2**rank)
    ring_all_reduce(_tensors[rank], group)
    return None


def _look(seconds: float, p: int) -> list[list[list[int]]]:
    """The chunks of all ranks, after a pause."""
    with span("look", seconds):
        pass
    return [[chunk.tolist() for chunk in _tensors[rank].tensor_split(p)] for rank in range(p)]


def _state(run: Run, hop: int, look: list[list[list[int]]], p: int) -> State:
    shares = tuple(tuple(_shares(chunk, p) for chunk in chunks) for chunks in look)
    sends = [event for event in run.events if event.kind == "send" and event.start < hop]
    return State(hop, shares, tuple(sum(e.elements for e in sends if e.rank == rank) for rank in range(p)))


def _shares(chunk: list[int], p: int) -> tuple[int, ...] | None:
    if not chunk:
        return ()
    if len(set(chunk)) > 1 or not 0 < chunk[0] < 2**p:
        return None
    return tuple(rank for rank in range(p) if chunk[0] >> rank & 1)


def picture(state: State) -> Figure:
    """Chunks by rank, each with the ranks whose shares are in it; beside them what each rank has sent."""
    p = state.p
    with style.styled():
        figure = Figure(figsize=(7.2, 1.5 + 0.36 * p))
        axes, bars = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        for rank in range(p):
            for chunk in range(p):
                kind = state.kind(rank, chunk)
                axes.add_patch(Rectangle((chunk - 0.45, rank - 0.4), 0.9, 0.8, **style.area(kind)))
                colour = "white" if kind == "whole sum" else style.INK
                label = axes.text(chunk, rank, _label(state, rank, chunk), ha="center", va="center", color=colour)
                label.set_fontsize(min(9, 52 / p))  # as many digits as ranks have to fit in
                if kind == "partial sum":  # on a hatched area
                    label.set_bbox({"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"})
        axes.set(
            xlim=(-0.5, p - 0.5), ylim=(p - 0.5, -0.5), xlabel="chunk", ylabel="rank", title=f"after hop {state.hop}"
        )
        axes.set_xticks(range(p))
        axes.set_yticks(range(p))
        drawn = bars.barh(range(p), state.sent, height=0.6, **style.area("communication"))
        bars.bar_label(drawn, [str(count) for count in state.sent], padding=3)
        bars.set(xlabel="elements sent", xlim=(0, 1.3 * max(1, *state.sent)))
        bars.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        figure.legend(handles=style.legend_patches(*KINDS), loc="outside upper center", ncols=len(KINDS))
        return figure


def _label(state: State, rank: int, chunk: int) -> str:
    shares = state.shares[rank][chunk]
    return "?" if shares is None else "".join(map(str, shares)) or "-"


def picture_text(state: State) -> str:
    """The figures of `picture` as a Markdown table, a row a rank: its text twin."""
    p = state.p
    lines = [f"| after hop {state.hop} | {' | '.join(f'chunk {c}' for c in range(p))} | elements sent | bytes sent |"]
    lines.append("|---" * (p + 3) + "|")
    for rank in range(p):
        cells = [_label(state, rank, chunk) for chunk in range(p)]
        lines.append(f"| rank {rank} | {' | '.join(cells)} | {state.sent[rank]} | {state.size * state.sent[rank]} |")
    return "\n".join(lines)
