"""What messages cost, in pictures: cost against size by algorithm, and an alpha-beta line through measured times."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from servelab.plots import style

SIZES = tuple(1 << index for index in range(6, 31, 2))  # bytes
LINES = {"naive": ":", "ring": "-", "tree": "--"}
# seconds of messages of 8 << 0, 2, ... 20 bytes one way between two gloo ranks, the lowest of 450, on a virtual machine
# with two cores and other work
RECORDED_SECONDS = (
    130.4e-6, 129.7e-6, 128.6e-6, 127.3e-6, 138.2e-6, 138.0e-6, 164.3e-6, 196.5e-6, 295.7e-6, 860.2e-6, 2874.8e-6,
)  # fmt: skip


def cost_curves(seconds: Mapping[str, Sequence[float]], crossover: float, sizes: Sequence[int] = SIZES) -> Figure:
    """Seconds against bytes, one line an algorithm; a vertical line marks where ring and tree cross.

    Parameters
    ----------
    seconds : mapping of str to sequence of float
        By algorithm (naive, ring, tree), for each of ``sizes``.
    crossover : float
        In bytes; drawn where it lies within the sizes.
    """
    with style.styled():
        figure = Figure(figsize=(5.6, 3.2))
        axes = figure.add_subplot()
        for name, values in seconds.items():
            axes.plot(sizes, [1e6 * value for value in values], LINES[name], color=style.INK, label=name)
        if sizes[0] <= crossover <= sizes[-1]:
            axes.axvline(crossover, color=style.colour("communication"), label="crossover of ring and tree")
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds")
        axes.set_xscale("log", base=2)
        axes.legend()
        return figure


def cost_text(seconds: Mapping[str, Sequence[float]], sizes: Sequence[int] = SIZES) -> str:
    """The figures of `cost_curves` as a Markdown table, in microseconds: its text twin."""
    lines = [f"| bytes | {' | '.join(seconds)} | fastest |", "|---" * (len(seconds) + 2) + "|"]
    for index, size in enumerate(sizes):
        row = {name: values[index] for name, values in seconds.items()}
        cells = " | ".join(f"{1e6 * value:,.1f}" for value in row.values())
        lines.append(f"| {size:,} | {cells} | {min(row, key=lambda name: row[name])} |")
    return "\n".join(lines)


def fit_picture(sizes: Sequence[int], seconds: Sequence[float], alpha: float, beta: float) -> Figure:
    """Measured times as points, and alpha + beta * size, which is no straight line on logarithmic axes."""
    with style.styled():
        figure = Figure(figsize=(5.2, 3.0))
        axes = figure.add_subplot()
        between = np.geomspace(min(sizes), max(sizes), 200)
        axes.plot(between, 1e6 * (alpha + beta * between), color=style.INK, label="alpha + beta * size")
        measured = [1e6 * value for value in seconds]
        axes.plot(sizes, measured, "o", color=style.colour("communication"), label="measured")
        axes.set(yscale="log", xlabel="bytes", ylabel="microseconds")
        axes.set_xscale("log", base=2)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.legend()
        return figure


def fit_text(sizes: Sequence[int], seconds: Sequence[float], alpha: float, beta: float) -> str:
    """The figures of `fit_picture` as a Markdown table: its text twin."""
    lines = ["| bytes | measured, us | fitted, us |", "|---|---|---|"]
    for size, value in zip(sizes, seconds, strict=True):
        lines.append(f"| {size:,} | {1e6 * value:,.1f} | {1e6 * (alpha + beta * size):,.1f} |")
    return "\n".join(lines)
