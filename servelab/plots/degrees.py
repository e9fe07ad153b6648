"""Pictures of step time against the degree of tensor parallelism: what is computed, and what is communicated."""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from servelab.plots import style


@dataclass(frozen=True)
class Step:
    """A step's time in seconds: of its computation alone, and with communication."""

    compute: float
    total: float

    @property
    def communication(self) -> float:
        """What comes on top of the computation, in seconds."""
        return self.total - self.compute


def step_bars(times: Mapping[str, Mapping[int, Step]]) -> Figure:
    """One panel a kind of step, one stacked bar a degree, in milliseconds; a triangle stands over the fastest.

    Parameters
    ----------
    times : mapping of str to mapping of int to Step
        By kind (``"prefill"`` or ``"decode"``), then by degree.
    """
    with style.styled():
        figure = Figure(figsize=(3.4 * len(times), 3.0))
        for panel, (kind, by_degree) in zip(
            figure.subplots(1, len(times), squeeze=False)[0], times.items(), strict=True
        ):
            names = [f"TP{degree}" for degree in by_degree]
            compute = [1e3 * step.compute for step in by_degree.values()]
            sent = [1e3 * step.communication for step in by_degree.values()]
            panel.bar(names, compute, width=0.6, label=kind, **style.area(kind))
            panel.bar(names, sent, width=0.6, bottom=compute, **style.area("communication"))
            totals = [c + s for c, s in zip(compute, sent, strict=True)]
            best = min(range(len(totals)), key=totals.__getitem__)
            panel.plot(names[best], totals[best] + 0.05 * max(totals), "v", color=style.INK)
            panel.set(title=kind, ylabel="ms a step", ylim=(0, 1.12 * max(totals)))
        figure.legend(handles=style.legend_patches(*times, "communication"), loc="outside upper center", ncols=4)
        return figure


def step_text(times: Mapping[str, Mapping[int, Step]]) -> str:
    """The figures of `step_bars` as a Markdown table, the fastest in bold: its text twin."""
    lines = ["| | degree | floor ms | communication ms | step ms |", "|---|---|---|---|---|"]
    for kind, by_degree in times.items():
        best = min(by_degree, key=lambda degree: (by_degree[degree].total, degree))
        for degree, step in by_degree.items():
            total = f"{1e3 * step.total:.2f}"
            total = f"**{total}**" if degree == best else total
            lines.append(
                f"| {kind} | TP{degree} | {1e3 * step.compute:.2f} | {1e3 * step.communication:.2f} | {total} |"
            )
    return "\n".join(lines)
