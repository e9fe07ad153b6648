"""Pictures of static batches: slot by slot, which cells are useful, padding, held or empty."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from servelab.batching import Batch
from servelab.plots import style

LABELS = ("padding", "useful", "held", "empty")  # in the order of a row, from left to right
LETTERS = {"padding": "p", "useful": "u", "held": "h", "empty": "."}
CHARACTER = 0.0125  # of a title or a tick's label, as a share of the width
GAP = 0.012  # between two batches, as a share of the width


def gantt(schedule: Sequence[Batch], labels: Sequence[str] = LABELS) -> Figure:
    """One row a slot and one column a cell, batch beside batch.

    A dashed line ends a batch's prompt columns, which take no time of their own; the columns behind it are its steps.
    Above a batch stand the moments of its start and its finish, below it the numbers of its columns, both where there
    is room; `gantt_text` has all of them. Idle time between batches is not drawn.

    Parameters
    ----------
    schedule : sequence of Batch
        As ``static_schedule`` returns it.
    labels : sequence of str
        The kinds of cells to name in the legend.
    """
    slots = max(len(batch.slots) for batch in schedule)
    gap = max(0.5, GAP * sum(batch.columns for batch in schedule))
    lefts = list(accumulate((batch.columns + gap for batch in schedule), initial=0.0))
    width = lefts.pop() - gap
    with style.styled():
        figure = Figure(figsize=(7.2, 1.3 + 0.26 * slots))
        axes = figure.add_subplot()
        titles, ticks = [], []
        for batch, left in zip(schedule, lefts, strict=True):
            _draw_batch(axes, batch, left)
            title = f"{batch.start:,}-{batch.finish:,}"
            titles.append((left + CHARACTER * width * len(title) / 2, title))
            ticks += [(place, f"{cells:,}") for place, cells in _ticks(batch, left).items()]
        for place, title in _with_room(titles, width):
            axes.text(place - CHARACTER * width * len(title) / 2, -0.7, title, va="bottom")
        ticks = _with_room(ticks, width)
        axes.set(xlim=(0, width), ylim=(slots - 0.5, -0.6), xlabel="cells of a slot", ylabel="slot")
        axes.set_yticks(range(slots))
        axes.set_xticks([place for place, _ in ticks], [label for _, label in ticks])
        axes.spines["left"].set_visible(False)
        figure.legend(handles=style.legend_patches(*labels), loc="outside upper center", ncols=len(labels))
        return figure


def _draw_batch(axes: Axes, batch: Batch, left: float) -> None:
    """The rectangle of one batch, with its first column at ``left``."""
    for row, slot in enumerate(batch.slots):
        start = left
        for label in LABELS:
            width = getattr(slot, label)
            if width:
                axes.barh(row, width, left=start, height=0.86, clip_on=False, **style.area(label))
            start += width
    if batch.prompt_columns > 0:
        border = left + batch.prompt_columns
        ends = [-0.5, len(batch.slots) - 0.5]
        axes.plot([border, border], ends, color="white", linewidth=2.6)
        axes.plot([border, border], ends, "--", color=style.INK, linewidth=1.2)


def _ticks(batch: Batch, left: float) -> dict[float, int]:
    """Where to write how many cells: at the end of a batch, and of its prompt columns where there is room."""
    prompts, columns = batch.prompt_columns, batch.columns
    middle = {left + prompts: prompts} if 0.15 * columns < prompts < 0.85 * columns else {}
    return middle | {left + columns: columns}


def _with_room(labels: list[tuple[float, str]], width: float) -> list[tuple[float, str]]:
    """Of labels with their middles, from left to right, those that do not run into the one kept before them."""
    kept, end = [], -width
    for middle, label in labels:
        half = CHARACTER * width * (len(label) + 1) / 2  # half a blank on each side
        if middle - half >= end:
            kept.append((middle, label))
            end = middle + half
    return kept


def gantt_text(schedule: Sequence[Batch]) -> str:
    """The figures of `gantt` as a Markdown table, a row a batch: its text twin."""
    lines = ["| batch | start | finish | prompt columns | useful | padding | held | empty |", "|---" * 8 + "|"]
    for index, batch in enumerate(schedule):
        cells = [sum(getattr(slot, label) for slot in batch.slots) for label in ("useful", "padding", "held", "empty")]
        row = [index, batch.start, batch.finish, batch.prompt_columns, *cells]
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def slot_lines(schedule: Sequence[Batch]) -> str:
    """One line a slot, one letter a cell: ``p`` padding, ``u`` useful, ``h`` held, ``.`` empty.

    A blank stands between prompt columns and steps.
    """
    lines = []
    for index, batch in enumerate(schedule):
        lines.append(f"batch {index}, moments {batch.start} to {batch.finish}")
        for number, slot in enumerate(batch.slots):
            row = "".join(LETTERS[label] * getattr(slot, label) for label in LABELS)
            prompt, steps = row[: batch.prompt_columns], row[batch.prompt_columns :]
            lines.append(f"  slot {number}  {prompt + ' ' * bool(prompt)}{steps}")
    return "\n".join(lines)


def shares_text(found: Mapping[str, Mapping[str, int]]) -> str:
    """Counts of ``waste`` as a Markdown table: shares of the rectangle, queueing in request-steps, a row a run."""
    kinds = ("useful", "padding", "held", "empty")
    lines = [f"| | {' | '.join(kinds)} | locked out (request-steps) | forming (request-steps) |", "|---" * 7 + "|"]
    for name, counts in found.items():
        cells = sum(counts[kind] for kind in kinds)
        shares = " | ".join(f"{100 * counts[kind] / cells:.1f} %" for kind in kinds)
        lines.append(f"| {name} | {shares} | {counts['locked_out']:,} | {counts['forming']:,} |")
    return "\n".join(lines)
