"""Pictures of a block pool: what every block holds, and for whom.

A `Recorder` stands between tables and their pool, passes every call on, and takes frames on request. It sees only what
any caller sees: the calls, what they returned, and the public attributes of the tables.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from servelab.plots import style
from servelab.plots.explore import attended

COLUMNS = 8


@dataclass(frozen=True)
class Frame:
    """The state of a pool at one moment.

    ``tables`` maps a sequence's name to its blocks and its number of tokens; ``ref_counts`` has one entry a block;
    ``cached`` are the blocks whose contents a prefix cache can find.
    """

    title: str
    block_size: int
    ref_counts: tuple[int, ...]
    tables: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    cached: frozenset[int] = frozenset()

    def holders(self, block: int) -> list[str]:
        """The names of the sequences that have ``block`` in their table."""
        return [name for name, (blocks, _) in self.tables.items() if block in blocks]

    def filled(self, block: int) -> int:
        """How many tokens the block holds; that of the holder that has written most."""
        if block in self.cached:
            return self.block_size
        written = [
            num_tokens - blocks.index(block) * self.block_size
            for blocks, num_tokens in self.tables.values()
            if block in blocks
        ]
        return max(0, min(self.block_size, max(written, default=0)))

    def state(self, block: int) -> str:
        """One of ``free``, ``cached`` (and free), ``used`` (by one holder) and ``shared``."""
        count = self.ref_counts[block]
        if count > 1:
            return "shared"
        return "used" if count else "cached" if block in self.cached else "free"


class Recorder:
    """A pool that passes every call on to ``pool`` and remembers frames.

    Give it to tables in the place of the pool, put the tables into ``tables`` by name, and call `shot`.
    """

    def __init__(self, pool):
        self.pool, self.tables, self.frames = pool, {}, []
        self._cached: set[int] = set()

    def __getattr__(self, name: str):
        return getattr(self.pool, name)

    def allocate(self, n: int) -> list[int]:
        """As the pool's; what the blocks held is forgotten."""
        taken = self.pool.allocate(n)
        self._cached -= set(taken)
        return taken

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], key: str | None = None) -> None:
        """As the prefix cache's."""
        self.pool.insert(tokens, blocks, key)
        self._cached |= set(blocks[: len(tokens) // self.pool.block_size])

    def shot(self, title: str) -> Frame:
        """Take a frame of the pool and of the tables."""
        counts = tuple(int(self.pool.ref_count(block)) for block in range(self.pool.num_blocks))
        tables = {
            name: (tuple(map(int, table.blocks)), int(table.num_tokens))
            for name, table in self.tables.items()
            if len(table.blocks)
        }
        self.frames.append(Frame(title, self.pool.block_size, counts, tables, frozenset(map(int, self._cached))))
        return self.frames[-1]


def describe(frame: Frame) -> str:
    """The picture as one line of text: every block that is held, then the free ones."""
    blocks = range(len(frame.ref_counts))
    held = [_describe_block(frame, block) for block in blocks if frame.ref_counts[block]]
    free = [
        f"{block} (cached)" if block in frame.cached else str(block) for block in blocks if not frame.ref_counts[block]
    ]
    return f"{frame.title} | {'; '.join(held) or 'nothing held'} | free: {', '.join(free) or 'none'}"


def _describe_block(frame: Frame, block: int) -> str:
    names = "+".join(frame.holders(block)) or "held outside the tables"
    count = f" x{frame.ref_counts[block]}" if frame.ref_counts[block] > 1 else ""
    cached = " cached" if block in frame.cached else ""
    return f"{block}: {names}{count} {frame.filled(block)}/{frame.block_size}{cached}"


def block_map(frame: Frame, ax: Axes | None = None, names: Sequence[str] | None = None) -> Axes:
    """Draw one frame: a cell a block, in the colours of its holders, filled as far as it holds tokens.

    ``names`` fixes the order of the colours, so that a sequence keeps its own over several frames. The number in a
    corner is the block's id; ``x2`` is a reference count; hatching means cached.
    """
    names = list(names if names is not None else frame.tables)
    columns = min(COLUMNS, len(frame.ref_counts))
    rows = math.ceil(len(frame.ref_counts) / columns)
    with style.styled():
        if ax is None:
            ax = plt.subplots(figsize=(1 + 0.75 * columns, 0.6 + 0.75 * rows))[1]
        for block in range(len(frame.ref_counts)):
            _draw_block(ax, frame, block, names, (block % columns, rows - 1 - block // columns))
        ax.set(xlim=(-0.1, columns), ylim=(-0.1, rows), aspect="equal", title=frame.title)
        ax.axis("off")
        ax.set_label(describe(frame))
    return ax


def _draw_block(ax: Axes, frame: Frame, block: int, names: list[str], corner: tuple[float, float]) -> None:
    (x, y), size = corner, 0.9
    state, holders = frame.state(block), frame.holders(block)
    ax.add_patch(Rectangle((x, y), size, size, **style.area("free", hatch=None)))
    level = size * frame.filled(block) / frame.block_size
    if state == "cached":
        ax.add_patch(Rectangle((x, y), size, size, **style.area("cached")))
    for part, name in enumerate(holders):
        width = size / len(holders)
        colour = style.sequence_colour(names.index(name))
        hatch = style.HATCHES["cached"] if block in frame.cached else None
        look: dict[str, Any] = {"facecolor": colour, "edgecolor": style.INK, "linewidth": 0.4, "hatch": hatch}
        ax.add_patch(Rectangle((x + part * width, y), width, level, **look))
    if state == "used" and not holders:
        ax.add_patch(Rectangle((x, y), size, size, **style.area("used")))
    if state == "shared":
        frame_only: dict[str, Any] = {"fill": False, "edgecolor": style.colour("shared"), "linewidth": 2.2}
        ax.add_patch(Rectangle((x, y), size, size, **frame_only))
    label = "\n".join(["+".join(holders), *([f"x{frame.ref_counts[block]}"] if state == "shared" else [])])
    paper = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}
    if label:
        ax.text(x + size / 2, y + size * 0.42, label, ha="center", va="center", fontsize=8, color=style.INK, bbox=paper)
    ax.text(x + 0.06, y + size - 0.06, str(block), ha="left", va="top", fontsize=6, color=style.INK, bbox=paper)


def legend(ax: Axes) -> None:
    """Say beside the picture what white, hatching and a thick frame mean."""
    shared = Patch(label="shared", fill=False, edgecolor=style.colour("shared"), linewidth=2.2)
    ax.legend(handles=[*style.legend_patches("free", "cached"), shared], loc="center left", bbox_to_anchor=(1, 0.5))


def small_multiples(frames: Sequence[Frame], columns: int = 2) -> Figure:
    """All frames beside each other: the picture for readers without widgets."""
    names = _names(frames)
    rows = math.ceil(len(frames) / columns)
    with style.styled():
        height = 0.45 + 0.62 * math.ceil(len(frames[0].ref_counts) / COLUMNS)
        figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, height * rows), squeeze=False)
        for ax in axes.flat:
            ax.axis("off")
        for frame, ax in zip(frames, axes.flat, strict=False):
            block_map(frame, ax, names)
        legend(axes.flat[columns - 1])
    return figure


def block_stepper(frames: Sequence[Frame]):
    """Step through the frames with a slider and two buttons.

    Returns the widget; or, where nobody is there to move it, the figure of the last frame.
    """
    if not attended():
        figure = small_multiples(frames[-1:])
        plt.close(figure)  # shown as the cell's value, and not once more
        return figure
    import ipywidgets

    names, last = _names(frames), len(frames) - 1
    slider = ipywidgets.IntSlider(0, 0, last, description="step", continuous_update=False)
    back, forward = ipywidgets.Button(description="previous"), ipywidgets.Button(description="next")
    back.on_click(lambda _: setattr(slider, "value", max(0, slider.value - 1)))
    forward.on_click(lambda _: setattr(slider, "value", min(last, slider.value + 1)))
    picture = ipywidgets.interactive_output(lambda step: _show(frames[step], names), {"step": slider})
    return ipywidgets.VBox([ipywidgets.HBox([back, slider, forward]), picture])


def _show(frame: Frame, names: list[str]) -> None:
    """Draw a frame and write its text beside it, where the cursor of a widget's output is."""
    block_map(frame, names=names)
    plt.show()
    print(describe(frame))


def _names(frames: Sequence[Frame]) -> list[str]:
    return list(dict.fromkeys(name for frame in frames for name in frame.tables))
