"""Pictures of a served trace: who runs in which iteration, how full the KV memory is, latency against throughput."""

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from servelab.plots import style
from servelab.simulation import Served, Step

LETTERS = {"prefill": "P", "decode": "d", "preempted": "x", "waits": "."}
MAX_ROWS = 40
MANY_STEPS = 150  # of a request: more are drawn without the lines between them
MS_UNTIL = 2.0  # seconds: a shorter run is drawn in milliseconds
LINES = ((0, (1, 1.5)), (0, (5, 2)), "-", (0, (5, 2, 1, 2)))
MARKERS = ("s", "^", "o", "D")


class Memory(Protocol):
    """The size of a KV memory, as `servelab.serving.PagedKV` has it."""

    num_blocks: int
    block_size: int


@dataclass(frozen=True)
class Point:
    """One run of a server: the load that it was given in requests/s, what it gave in tokens/s, its median TTFT in s."""

    rate: float
    throughput: float
    ttft: float


def timeline(served: Served, kv: Memory | None = None) -> Figure:
    """One row a request: when its prompt is computed, when it is decoded, when it is preempted; the wider, the longer.

    A white line ends a step. A thin line runs from a request's arrival to its last token. Where the server has nothing
    to do, all rows are grey. If ``kv`` is given, the panel below shows the share of KV slots that hold a token (area)
    and of those that are taken (line).

    Parameters
    ----------
    served : Served
        As `servelab.simulation.serve` returns it. The first 40 requests are drawn.
    kv : Memory, optional
        Only its size is used.
    """
    scale, unit = (1e3, "ms") if served.seconds < MS_UNTIL else (1, "s")
    height = 0.2 * len(served.jobs[:MAX_ROWS])
    with style.styled():
        figure = Figure(figsize=(7.2, 1.2 + height + (1.1 if kv else 0)))
        heights = [height, 0.8] if kv else [1]
        axes, *below = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        idle = _draw_rows(axes, served, scale)
        axes.set_xlim(0, scale * served.seconds)
        if kv:
            _draw_kv(below[0], served, kv, scale)
        (below or [axes])[-1].set_xlabel(unit)
        _legend(figure, ["prefill", "decode", "preempted", *(["idle"] if idle else [])])
        if kv:
            figure.legend(handles=_kv_handles(), loc="outside lower center", ncols=2)
        return figure


def timelines(runs: Mapping[str, Served]) -> Figure:
    """The rows of `timeline` for several runs of a few requests, one panel a run, all with one time axis.

    Parameters
    ----------
    runs : mapping of str to Served
        By name, in the order to draw them in.
    """
    seconds = max(served.seconds for served in runs.values())
    scale, unit = (1e3, "ms") if seconds < MS_UNTIL else (1, "s")
    with style.styled():
        heights = [0.2 * len(served.jobs[:MAX_ROWS]) for served in runs.values()]
        figure = Figure(figsize=(7.2, 0.9 + 0.4 * len(runs) + sum(heights)))
        panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        idle = [_draw_rows(axes, served, scale) for axes, served in zip(panels, runs.values(), strict=True)]
        for axes, name in zip(panels, runs, strict=True):
            axes.set_title(name)
        panels[-1].set(xlabel=unit, xlim=(0, scale * seconds))
        _legend(figure, ["prefill", "decode", "preempted", *(["idle"] if any(idle) else [])])
        return figure


def stall_text(runs: Mapping[str, Served]) -> str:
    """What `timelines` shows of a long prompt, as a Markdown table in ms: its text twin.

    Gaps are those between two tokens of one request. The long prompt is the longest of the run.
    """
    lines = ["| | usual gap | longest gap | TTFT of the long prompt | its steps |", "|---" * 5 + "|"]
    for name, served in runs.items():
        gaps = [after - before for times in served.token_times.values() for before, after in pairwise(times)]
        long = max((job.request for job in served.jobs), key=lambda request: request.prompt_tokens)
        ttft, steps = served.token_times[long.id][0] - long.arrival, sum(long.id in s.prefill for s in served.steps)
        moments = " | ".join(f"{1e3 * seconds:.1f}" for seconds in (median(gaps), max(gaps), ttft))
        lines.append(f"| {name} | {moments} | {steps} |")
    return "\n".join(lines)


def _draw_rows(axes: Axes, served: Served, scale: float) -> list[tuple[float, float]]:
    """A row for each request; returns when nobody was there."""
    rows = [job.request.id for job in served.jobs[:MAX_ROWS]]
    for row, id in enumerate(rows):
        _draw_row(axes, row, list(_spans(served, id)), _life(served, id), scale)
    idle = _idle(served)
    for start, end in idle:
        axes.axvspan(scale * start, scale * end, zorder=0, **style.area("idle", linewidth=0))
    axes.set(ylim=(len(rows) - 0.4, -0.6), ylabel="request")
    axes.set_yticks(range(len(rows)), rows)
    return idle


def _draw_row(axes: Axes, row: int, spans: list[tuple[str, float, float]], life: tuple, scale: float) -> None:
    axes.plot([scale * moment for moment in life], [row, row], color=style.INK, linewidth=0.8, zorder=1)
    edge = {"edgecolor": "white", "linewidth": 0.4 if len(spans) < MANY_STEPS else 0}
    for kind, look in (("prefill", edge), ("decode", edge), ("preempted", {})):
        bars = [(scale * start, scale * (end - start)) for found, start, end in spans if found == kind]
        axes.broken_barh(bars, (row - 0.4, 0.8), zorder=2, **style.area(kind, **look))


def _draw_kv(axes: Axes, served: Served, kv: Memory, scale: float = 1) -> None:
    """Slots that hold a token, as an area, and slots that are taken, as a line; none while nobody is there.

    The moment that passes between two steps belongs to the first.
    """
    moments, taken, held = [], [], []
    idle = dict(_idle(served))
    for step, tokens, following in zip(served.steps, held_tokens(served), [*served.steps[1:], None], strict=True):
        end = step.end if following is None or step.end in idle else following.start
        moments += [scale * step.start, scale * end]
        taken += [100 * (step.blocks_used or 0) / kv.num_blocks] * 2
        held += [100 * tokens / (kv.num_blocks * kv.block_size)] * 2
        if end in idle:
            moments += [scale * end, scale * idle[end]]
            taken += [0, 0]
            held += [0, 0]
    axes.fill_between(moments, held, facecolor=style.colour("used"), linewidth=0)
    axes.plot(moments, taken, color=style.INK, linewidth=0.9)
    axes.set(ylim=(0, 104), ylabel="% of KV")


def held_tokens(served: Served) -> list[int]:
    """For each step, the tokens that are in the KV cache at its end."""
    last = {id: times[-1] for id, times in served.token_times.items()}
    cached: dict[str, int] = {}
    found, total = [], 0
    for step in served.steps:
        for id in step.preempted:
            total -= cached.pop(id, 0)
        for id, n in (*step.prefill.items(), *((id, 1) for id in step.decode)):
            cached[id] = cached.get(id, 0) + n
        total += step.num_tokens
        found.append(total)
        for id in (*step.prefill, *step.decode):
            if last[id] == step.end:
                total -= cached.pop(id)
    return found


def _legend(figure: Figure, kinds: Sequence[str]) -> None:
    figure.legend(handles=[*style.legend_patches(*kinds), _line("waits")], loc="outside upper center", ncols=5)


def _kv_handles() -> list[Artist]:
    return [Patch(label="holds a token", facecolor=style.colour("used")), _line("taken")]


def _line(label: str) -> Line2D:
    return Line2D([], [], color=style.INK, linewidth=0.9, label=label)


def _life(served: Served, id: str) -> tuple[float, float]:
    """From arrival to the last token."""
    (arrival,) = (job.request.arrival for job in served.jobs if job.request.id == id)
    return arrival, served.token_times[id][-1]


def _spans(served: Served, id: str) -> Iterator[tuple[str, float, float]]:
    """What a request does, step by step; from a preemption to the next step that computes it, it is preempted."""
    lost = None
    for step in served.steps:
        if id in step.preempted:
            lost = step.start
        kind = _kind(step, id)
        if kind and lost is not None:
            yield "preempted", lost, step.start
            lost = None
        if kind:
            yield kind, step.start, step.end


def _kind(step: Step, id: str) -> str:
    return "prefill" if id in step.prefill else "decode" if id in step.decode else ""


def _idle(served: Served) -> list[tuple[float, float]]:
    """When no step runs and no request is there. Between two steps of a real engine a moment passes, too."""
    moments = [0.0, *(moment for step in served.steps for moment in (step.start, step.end))]
    gaps = [(moments[i], moments[i + 1]) for i in range(0, len(moments) - 1, 2) if moments[i + 1] > moments[i]]
    came = sorted(job.request.arrival for job in served.jobs)
    left = sorted(times[-1] for times in served.token_times.values())
    return [(start, end) for start, end in gaps if bisect(came, start) <= bisect(left, start)]


def timeline_text(served: Served) -> str:
    """The figures of `timeline` as a Markdown table, a row a request, in seconds: its text twin."""
    lines = ["| request | arrival | first step | first token | last token | preempted | steps |", "|---" * 7 + "|"]
    for job in served.jobs[:MAX_ROWS]:
        id, times = job.request.id, served.token_times[job.request.id]
        spans = list(_spans(served, id))
        lost = sum(id in step.preempted for step in served.steps)
        moments = " | ".join(f"{moment:.3f}" for moment in (job.request.arrival, spans[0][1], times[0], times[-1]))
        lines.append(f"| {id} | {moments} | {lost} | {sum(kind != 'preempted' for kind, _, _ in spans)} |")
    return "\n".join(lines)


def step_lines(served: Served) -> str:
    """One line a request and one letter a step: ``P`` prefill, ``d`` decode, ``x`` preempted, ``.`` waits.

    A request that has not arrived when a step starts, or has finished, has a blank.
    """
    width, lines = max(len(job.request.id) for job in served.jobs), []
    for job in served.jobs:
        id, lost, row = job.request.id, False, ""
        for step in served.steps:
            there = job.request.arrival <= step.start < served.token_times[id][-1]
            kind = _kind(step, id) or ("waits" if there else "")
            lost = (lost or id in step.preempted) and kind == "waits"
            row += LETTERS["preempted" if lost else kind] if kind else " "
        lines.append(f"{id:>{width}}  {row}".rstrip())
    return "\n".join(lines)


def kv_use(runs: Mapping[str, Served], kv: Memory) -> Figure:
    """Shares of the KV slots over time: those that hold a token, those taken. One panel a run, all with one time axis.

    Parameters
    ----------
    runs : mapping of str to Served
        By name, in the order to draw them in.
    kv : Memory
        Only its size is used.
    """
    with style.styled():
        figure = Figure(figsize=(7.2, 0.9 + 1.1 * len(runs)))
        panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, served) in zip(panels, runs.items(), strict=True):
            _draw_kv(axes, served, kv)
            axes.set_title(name)
        panels[-1].set(xlabel="s", xlim=(0, max(served.seconds for served in runs.values())))
        figure.legend(handles=_kv_handles(), loc="outside upper center", ncols=2)
        return figure


def kv_use_text(runs: Mapping[str, Served], kv: Memory) -> str:
    """The runs of `kv_use` as a Markdown table of means over the time in which steps run: its text twin."""
    lines = ["| | running | slots taken | holding a token | preemptions | seconds |", "|---" * 6 + "|"]
    for name, served in runs.items():
        taken = mean_over_steps(served, [step.blocks_used or 0 for step in served.steps]) / kv.num_blocks
        held = mean_over_steps(served, held_tokens(served)) / (kv.num_blocks * kv.block_size)
        lost = sum(len(step.preempted) for step in served.steps)
        row = f"{mean_running(served):.1f} | {taken:.1%} | {held:.1%} | {lost} | {served.seconds:.1f}"
        lines.append(f"| {name} | {row} |")
    return "\n".join(lines)


def mean_running(served: Served) -> float:
    """Requests that a step computes, averaged over the time in which steps run."""
    return mean_over_steps(served, [len(step.prefill) + len(step.decode) for step in served.steps])


def mean_over_steps(served: Served, values: Sequence[float]) -> float:
    """The mean of a value a step, each weighted with how long its step runs."""
    weights = [step.end - step.start for step in served.steps]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def latency_curves(curves: Mapping[str, Sequence[Point]]) -> Figure:
    """Median TTFT, on a logarithmic scale, against throughput: a line a server, from the lowest load to the highest.

    Beside the markers of the last line stand their rates.

    Parameters
    ----------
    curves : mapping of str to sequence of Point
        By server, each from the lowest rate to the highest; at most four.
    """
    with style.styled():
        figure = Figure(figsize=(6.4, 3.6))
        axes = figure.add_subplot()
        for (name, points), line, marker in zip(curves.items(), LINES, MARKERS, strict=False):
            xs, ys = [point.throughput for point in points], [point.ttft for point in points]
            axes.plot(xs, ys, color=style.INK, linestyle=line, marker=marker, markersize=5, label=name)
        for point in points:
            place = point.throughput, point.ttft
            axes.annotate(f"{point.rate:g}/s", place, (4, -11), textcoords="offset points", fontsize=8)
        axes.margins(y=0.1)  # below the lowest marker its label
        axes.set(yscale="log", xlabel="tokens/s", ylabel="median TTFT, s", xlim=(0, None))
        axes.legend()
        return figure


def latency_text(curves: Mapping[str, Sequence[Point]]) -> str:
    """The points of `latency_curves` as a Markdown table, a row a rate: its text twin."""
    lines = [f"| requests/s | {' | '.join(f'{name}: tokens/s | median TTFT s' for name in curves)} |"]
    lines.append("|---" * (1 + 2 * len(curves)) + "|")
    for points in zip(*curves.values(), strict=True):
        cells = " | ".join(f"{point.throughput:.0f} | {point.ttft:.2f}" for point in points)
        lines.append(f"| {points[0].rate:.2f} | {cells} |")
    return "\n".join(lines)
