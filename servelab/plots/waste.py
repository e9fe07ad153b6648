"""Pictures of wasted KV memory: shares of the pool by policy, and waste per sequence against block size."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import matplotlib.pyplot  # noqa: F401 (with it imported, notebooks show a figure as a picture)
from matplotlib.figure import Figure

from servelab.plots import style

KINDS = ("used", "reserved", "internal", "external", "free")


class HasShares(Protocol):
    """Five shares of memory that add up to 1, as ``fragmentation`` returns them."""

    used: float
    reserved: float
    internal: float
    external: float
    free: float


def waste_bars(shares: Mapping[str, HasShares]) -> Figure:
    """One stacked bar a policy: how its memory was used, in percent, averaged over time.

    Parameters
    ----------
    shares : mapping of str to shares
        By policy, in the order to draw them in.
    """
    with style.styled():
        figure = Figure(figsize=(6.4, 3.2))
        axes = figure.add_subplot()
        left = [0.0] * len(shares)
        for kind in KINDS:
            widths = [100 * getattr(found, kind) for found in shares.values()]
            bars = axes.barh(list(shares), widths, left=left, height=0.6, **style.area(kind))
            labels = [f"{width:.0f}" if width >= 4 else "" for width in widths]
            texts = axes.bar_label(bars, labels, label_type="center")
            for text in texts:
                text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1})
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set(xlim=(0, 100), xlabel="% of KV slots")
        axes.invert_yaxis()
        figure.legend(handles=style.legend_patches(*KINDS), loc="outside upper center", ncols=len(KINDS))
        return figure


def waste_text(shares: Mapping[str, HasShares]) -> str:
    """The figures of `waste_bars` as a Markdown table: its text twin."""
    lines = [f"| policy | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"]
    for policy, found in shares.items():
        lines.append(f"| {policy} | {' | '.join(f'{100 * getattr(found, kind):.1f} %' for kind in KINDS)} |")
    return "\n".join(lines)


def mean_waste(lengths: Iterable[int], block_size: int) -> float:
    """Empty slots in the last block, averaged over sequences of these lengths."""
    empty = [-length % block_size for length in lengths]
    return sum(empty) / len(empty)


def block_size_curve(lengths: Sequence[int], block_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)) -> Figure:
    """Mean waste per sequence against block size: measured on ``lengths``, beside (block_size - 1) / 2."""
    with style.styled():
        figure = Figure(figsize=(5.2, 3.2))
        axes = figure.add_subplot()
        measured = [mean_waste(lengths, size) for size in block_sizes]
        axes.plot(block_sizes, [(size - 1) / 2 for size in block_sizes], "--", color=style.INK, label="(B - 1) / 2")
        axes.plot(block_sizes, measured, "o", color=style.colour("external"), label="trace")
        axes.set_xscale("log", base=2)
        axes.set_xticks(block_sizes, [str(size) for size in block_sizes])
        axes.set(xlabel="block_size B", ylabel="empty slots / sequence")
        axes.legend()
        return figure


def block_size_text(lengths: Sequence[int], block_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)) -> str:
    """The figures of `block_size_curve` as a Markdown table: its text twin."""
    mean_length = sum(lengths) / len(lengths)
    lines = ["| block_size | (B - 1) / 2 | trace | share of the slots taken |", "|---|---|---|---|"]
    for size in block_sizes:
        measured = mean_waste(lengths, size)
        share = measured / (mean_length + measured)
        lines.append(f"| {size} | {(size - 1) / 2} | {measured:.1f} | {100 * share:.2f} % |")
    return "\n".join(lines)
