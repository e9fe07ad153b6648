"""Pictures of wasted KV memory: shares of the pool by policy, and waste per sequence against block size."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from matplotlib.figure import Figure

from servelab.plots import style

KINDS = ("used", "reserved", "internal", "external", "free")
LETTERS = {"used": "u", "reserved": "r", "internal": "i", "external": "x", "free": "."}
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
EXAMPLE = 300  # tokens of the sequence that the text works out


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
            bars = axes.barh(list(shares), widths, left=left, height=0.6, clip_on=False, **style.area(kind))
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


def slot_lines(history: Iterable[Mapping[str, int]]) -> str:
    """One line an iteration, one letter a slot: ``u`` used, ``r`` reserved, ``i`` internal, ``x`` external, ``.`` free.

    The letters stand in this order and not at the slots' addresses.
    """
    lines = ["".join(LETTERS[kind] * slots.get(kind, 0) for kind in KINDS) for slots in history]
    return "\n".join(f"{iteration:4}  {line}" for iteration, line in enumerate(lines))


def mean_waste(lengths: Iterable[int], block_size: int) -> float:
    """Empty slots in the last block, averaged over sequences of these lengths."""
    empty = [-length % block_size for length in lengths]
    return sum(empty) / len(empty)


def _percent(empty: float, length: float) -> float:
    """Empty slots as a share of the slots that a sequence takes."""
    return 100 * empty / (length + empty)


def block_size_curve(lengths: Sequence[int], block_sizes: Sequence[int] = BLOCK_SIZES) -> Figure:
    """The share of its slots that a sequence leaves empty, against block size.

    Points are measured on ``lengths``; lines are (B - 1) / 2 empty slots, for their mean length and for 300 tokens.
    """
    mean = sum(lengths) / len(lengths)
    with style.styled():
        figure = Figure(figsize=(5.2, 3.2))
        axes = figure.add_subplot()
        for length, line, label in ((EXAMPLE, ":", f"{EXAMPLE} tokens"), (mean, "--", f"{mean:.0f} tokens")):
            shares = [_percent((size - 1) / 2, length) for size in block_sizes]
            axes.plot(block_sizes, shares, line, color=style.INK, label=f"(B - 1) / 2 of {label}")
        measured = [_percent(mean_waste(lengths, size), mean) for size in block_sizes]
        axes.plot(block_sizes, measured, "o", color=style.colour("external"), label="trace, measured")
        axes.set_xscale("log", base=2)
        axes.set_xticks(block_sizes, [str(size) for size in block_sizes])
        axes.set(xlabel="block_size B", ylabel="% of the slots taken", ylim=(0, None))
        axes.legend()
        return figure


def block_size_text(lengths: Sequence[int], block_sizes: Sequence[int] = BLOCK_SIZES) -> str:
    """The figures of `block_size_curve` as a Markdown table: its text twin."""
    mean = sum(lengths) / len(lengths)
    lines = [
        f"| block_size B | (B - 1) / 2 | of {EXAMPLE} tokens | trace: empty slots | of {mean:.0f} tokens on average |"
    ]
    lines.append("|---|---|---|---|---|")
    for size in block_sizes:
        half, measured = (size - 1) / 2, mean_waste(lengths, size)
        shares = f"{_percent(half, EXAMPLE):.2f} % | {measured:.1f} | {_percent(measured, mean):.2f} %"
        lines.append(f"| {size} | {half} | {shares} |")
    return "\n".join(lines)
