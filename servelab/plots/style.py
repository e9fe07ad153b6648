"""The one style of all pictures: what each colour means, and how figures look.

A colour has one meaning in the whole course. The colours are told apart by lightness as well as by hue, so that they
hold for colour-blind readers and in grey print; areas that lie side by side carry a hatch as a second sign. Built on
the palettes of Okabe and Ito (2008) and of Paul Tol (2021).
"""

from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

COLOURS = {
    # what a step does
    "prefill": "#0072B2",
    "decode": "#56B4E9",
    "idle": "#DDDDDD",
    "preempted": "#D55E00",
    "communication": "#CC79A7",
    "compute": "#225555",
    # what a slot of KV memory holds
    "used": "#009E73",
    "reserved": "#E69F00",
    "internal": "#F0E442",
    "external": "#882255",
    # what else lies in a GPU's memory
    "weights": "#332288",
    # what a block is
    "free": "#FFFFFF",
    "cached": "#B5DDCB",
    "shared": "#00382A",
    # what a cell of a static batch's rectangle is
    "useful": "#117733",
    "padding": "#DDCC77",
    "held": "#CC6677",
    "empty": "#F2F2F2",
    # what a chunk on a rank holds, on its way to a sum
    "own share": "#F2D7B6",
    "partial sum": "#D9A05B",
    "whole sum": "#5C2A6B",
}
HATCHES = {
    "internal": "...",
    "external": "xx",
    "reserved": "//",
    "cached": "///",
    "preempted": "\\\\",
    "idle": "..",
    "padding": "...",
    "held": "xx",
    "partial sum": "//",
}
SEQUENCES = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#BBCC33")  # light: text goes on top
INK = "#222222"
RC: dict[Any, Any] = {
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.grid": False,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "servelab",
}


# A notebook shows a figure as a picture only once its backend is loaded, and making a `Figure` does not load it.
plt.switch_backend(mpl.get_backend())


def styled() -> AbstractContextManager:
    """The course's look, for the figures that are made inside: ``with styled(): ...``."""
    return mpl.rc_context(RC)


def colour(meaning: str) -> str:
    """The colour that stands for ``meaning``. Raises `KeyError` for a meaning that has none."""
    return COLOURS[meaning]


def sequence_colour(index: int) -> str:
    """The colour of the ``index``-th sequence of a picture; sequences are also named in the picture."""
    return SEQUENCES[index % len(SEQUENCES)]


def area(meaning: str, **overrides) -> dict[str, Any]:
    """Keyword arguments that draw a patch, bar or stack in the colour and hatch of ``meaning``."""
    return {"facecolor": colour(meaning), "edgecolor": INK, "linewidth": 0.6, "hatch": HATCHES.get(meaning)} | overrides


def legend_patches(*meanings: str) -> list[Patch]:
    """One patch with a label for each meaning, for ``ax.legend(handles=...)``."""
    return [Patch(label=meaning, **area(meaning)) for meaning in meanings]
