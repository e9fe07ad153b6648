"""Pictures of one card's memory: weights, KV cache, what is left, and what does not fit."""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from servelab.plots import style

PARTS = ("weights", "KV", "free")
MEANINGS = ("weights", "used", "free")  # in the style's words
GB = 1e9
LONGEST = 3  # times the largest memory: where the axis ends


@dataclass(frozen=True)
class Ledger:
    """Bytes on one card: the memory that may be used, the weights and the KV cache that it shall hold."""

    memory: float
    weights: float
    kv: float

    @property
    def free(self) -> float:
        return max(0.0, self.memory - self.weights - self.kv)

    @property
    def missing(self) -> float:
        """Bytes by which weights and KV exceed the memory."""
        return max(0.0, self.weights + self.kv - self.memory)

    @property
    def parts(self) -> tuple[float, float, float]:
        """Weights, KV and free memory, as `PARTS` names them."""
        return self.weights, self.kv, self.free


def memory_bars(ledgers: Mapping[str, Ledger]) -> Figure:
    """One stacked bar a card, in GB, with a line at the memory that may be used; a bar may be longer than that.

    The axis ends at `LONGEST` times the largest memory. A longer bar is cut off there, and its length stands beside it.

    Parameters
    ----------
    ledgers : mapping of str to Ledger
        By name, in the order to draw them in.
    """
    with style.styled():
        figure = Figure(figsize=(6.4, 1.3 + 0.5 * len(ledgers)))
        axes = figure.add_subplot()
        totals = [(ledger.memory + ledger.missing) / GB for ledger in ledgers.values()]
        end = min(max(totals), LONGEST * max(ledger.memory for ledger in ledgers.values()) / GB)
        left = [0.0] * len(ledgers)
        for index, meaning in enumerate(MEANINGS):
            widths = [ledger.parts[index] / GB for ledger in ledgers.values()]
            drawn = [min(width, end - start) for width, start in zip(widths, left, strict=True)]
            bars = axes.barh(list(ledgers), drawn, left=left, height=0.6, **style.area(meaning))
            labels = [f"{width:,.1f}" if seen > end / 12 else "" for width, seen in zip(widths, drawn, strict=True)]
            for text in axes.bar_label(bars, labels, label_type="center"):
                text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1})
            left = [start + width for start, width in zip(left, drawn, strict=True)]
        for row, ledger in enumerate(ledgers.values()):
            axes.plot([ledger.memory / GB] * 2, [row - 0.42, row + 0.42], color=style.INK, linewidth=2.5)
            if totals[row] > end:
                axes.annotate(f"to {totals[row]:,.0f} GB", (1.05 * end, row), va="center", annotation_clip=False)
        axes.set(xlim=(0, 1.04 * end), xlabel="GB on one card")
        axes.invert_yaxis()
        patches = [Patch(label=part, **style.area(meaning)) for part, meaning in zip(PARTS, MEANINGS, strict=True)]
        figure.legend(handles=patches, loc="outside upper center", ncols=len(PARTS))
        return figure


def memory_text(ledgers: Mapping[str, Ledger]) -> str:
    """The figures of `memory_bars` as a Markdown table: its text twin."""
    lines = ["| | usable GB | weights GB | KV GB | free GB | missing GB |", "|---" * 6 + "|"]
    for name, ledger in ledgers.items():
        numbers = (ledger.memory, *ledger.parts, ledger.missing)
        lines.append(f"| {name} | {' | '.join(f'{number / GB:.2f}' for number in numbers)} |")
    return "\n".join(lines)
