"""The pictures of a served trace show the moments and the slots that it had, and their text twins say the same."""

from types import SimpleNamespace

import matplotlib as mpl
import pytest
from matplotlib.colors import to_hex

from servelab.plots import iterations, style
from servelab.serving import Request
from servelab.simulation import Job, Served, Step, StepCost, serve

KV = SimpleNamespace(num_blocks=10, block_size=4)
JOBS = (Job(Request("a", 4, 3), 3), Job(Request("b", 3, 2, arrival=1.0), 2), Job(Request("c", 2, 1, arrival=9.0), 1))
STEPS = [
    Step(0.0, 2.0, {"a": 4}, (), (), 1),
    Step(2.0, 5.0, {"b": 3}, ("a",), (), 3),
    Step(5.0, 6.0, {}, ("a",), ("b",), 2),
    Step(6.0, 8.0, {"b": 4}, (), (), 1),
    Step(9.0, 10.0, {"c": 2}, (), (), 1),
]
SERVED = Served(JOBS, STEPS, {"a": [2.0, 5.0, 6.0], "b": [5.0, 8.0], "c": [10.0]})


def bars(axes):
    """(row, start, width, colour) of every bar, by row and start."""
    found = []
    for collection in axes.collections:
        if type(collection).__name__ != "PolyCollection":
            continue
        for path in collection.get_paths():
            (left, bottom), (right, top) = path.get_extents().get_points()
            colour = to_hex(collection.get_facecolor()[0]).upper()
            found.append((round((bottom + top) / 2), left, pytest.approx(right - left), colour))
    return sorted(found, key=lambda bar: bar[:2])


def test_every_step_of_a_request_is_a_bar_as_wide_as_the_step_is_long():
    (axes,) = iterations.timeline(SERVED).axes
    prefill, decode, preempted = (style.colour(kind) for kind in ("prefill", "decode", "preempted"))
    assert bars(axes) == [
        (0, 0, 2, prefill),
        (0, 2, 3, decode),
        (0, 5, 1, decode),
        (1, 2, 3, prefill),
        (1, 5, 1, preempted),
        (1, 6, 2, prefill),
        (2, 9, 1, prefill),
    ]
    assert [list(line.get_xdata()) for line in axes.lines] == [[0, 6], [1, 8], [9, 10]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]


def test_where_no_step_runs_all_rows_are_idle():
    (axes,) = iterations.timeline(SERVED).axes
    (idle,) = axes.patches
    assert (idle.get_x(), idle.get_width()) == (8, 1)
    assert to_hex(idle.get_facecolor()).upper() == style.colour("idle")


def test_short_runs_are_in_milliseconds():
    short = Served((JOBS[0],), [Step(0.0, 0.5, {"a": 4}, (), (), 1)], {"a": [0.5]})
    (axes,) = iterations.timeline(short).axes
    assert axes.get_xlabel() == "ms" and axes.get_xlim() == (0, 500)
    assert iterations.timeline(SERVED).axes[0].get_xlabel() == "s"


def test_slots_that_hold_tokens_and_slots_that_are_taken():
    assert iterations.held_tokens(SERVED) == [4, 8, 6, 4, 2]
    _, axes = iterations.timeline(SERVED, KV).axes
    (taken,) = axes.lines
    assert list(taken.get_ydata()) == [10, 10, 30, 30, 20, 20, 10, 10, 0, 0, 10, 10]
    assert list(taken.get_xdata()) == [0, 2, 2, 5, 5, 6, 6, 8, 8, 9, 9, 10]
    (held,) = axes.collections
    assert max(point[1] for point in held.get_paths()[0].vertices) == 20


def test_the_moments_between_the_steps_of_a_real_run_are_no_idleness():
    """The line keeps its value up to the next step, unless nobody is there."""
    steps = [Step(s.start + 0.01, s.end, s.prefill, s.decode, s.preempted, s.blocks_used) for s in STEPS]
    served = Served(JOBS, steps, SERVED.token_times)
    upper, lower = iterations.timeline(served, KV).axes
    (taken,) = lower.lines
    assert list(taken.get_xdata()) == [0.01, 2.01, 2.01, 5.01, 5.01, 6.01, 6.01, 8, 8, 9.01, 9.01, 10]
    assert list(taken.get_ydata()) == [10, 10, 30, 30, 20, 20, 10, 10, 0, 0, 10, 10]
    assert len(upper.patches) == 1
    assert "idle" in [text.get_text() for text in upper.figure.legends[0].get_texts()]
    busy = iterations.timeline(Served(JOBS[:2], steps[:-1], dict(list(SERVED.token_times.items())[:2])))
    assert "idle" not in [text.get_text() for text in busy.legends[0].get_texts()]


def test_the_twins_say_the_same():
    _, _, *rows = iterations.timeline_text(SERVED).splitlines()
    assert rows == [
        "| a | 0.000 | 0.000 | 2.000 | 6.000 | 0 | 3 |",
        "| b | 1.000 | 2.000 | 5.000 | 8.000 | 1 | 2 |",
        "| c | 9.000 | 9.000 | 10.000 | 10.000 | 0 | 1 |",
    ]
    assert iterations.step_lines(SERVED).splitlines() == ["a  Pdd", "b   PxP", "c      P"]


def test_means_are_weighted_with_time():
    assert iterations.mean_running(SERVED) == pytest.approx((2 * 1 + 3 * 2 + 1 * 1 + 2 * 1 + 1 * 1) / 9)
    (row,) = iterations.kv_use_text({"run": SERVED}, KV).splitlines()[2:]
    taken, held = (2 + 9 + 2 + 2 + 1) / 90, (8 + 24 + 6 + 8 + 2) / 360
    assert row == f"| run | 1.3 | {taken:.1%} | {held:.1%} | 1 | 10.0 |"


def test_one_panel_a_run_on_one_time_axis():
    panels = iterations.kv_use({"one": SERVED, "two": SERVED}, KV).axes
    assert [axes.get_title(loc="left") for axes in panels] == ["one", "two"]
    assert {axes.get_xlim() for axes in panels} == {(0, 10)}


def test_timelines_have_the_rows_of_each_run_on_one_time_axis():
    short = Served((JOBS[0],), [Step(0.0, 0.5, {"a": 4}, (), (), 1)], {"a": [0.5]})
    upper, lower = iterations.timelines({"one": SERVED, "two": short}).axes
    assert [axes.get_title(loc="left") for axes in (upper, lower)] == ["one", "two"]
    assert bars(upper) == bars(iterations.timeline(SERVED).axes[0]) and len(bars(lower)) == 1
    assert upper.get_xlim() == lower.get_xlim() == (0, 10) and lower.get_xlabel() == "s"
    assert len(upper.patches) == 1 and not lower.patches
    assert "idle" in [text.get_text() for text in upper.figure.legends[0].get_texts()]


def test_the_stall_in_words():
    (row,) = iterations.stall_text({"run": SERVED}).splitlines()[2:]
    assert row == "| run | 3000.0 | 3000.0 | 2000.0 | 1 |"  # gaps of 3, 1 and 3 s; a has the longest prompt


def test_curves_and_their_twin():
    points = {
        "static": [iterations.Point(1, 90, 3.2), iterations.Point(2, 149, 22.8)],
        "paged": [iterations.Point(1, 92, 0.06), iterations.Point(2, 179, 0.07)],
    }
    (axes,) = iterations.latency_curves(points).axes
    drawn = [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    assert drawn == [("static", [90, 149], [3.2, 22.8]), ("paged", [92, 179], [0.06, 0.07])]
    assert len({line.get_marker() for line in axes.lines}) == 2
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("1/s", (92, 0.06)), ("2/s", (179, 0.07))]
    _, _, *rows = iterations.latency_text(points).splitlines()
    assert rows == ["| 1.00 | 90 | 3.20 | 92 | 0.06 |", "| 2.00 | 149 | 22.80 | 179 | 0.07 |"]


class OneAtATime:
    """The plainest server: one request after another."""

    def __init__(self):
        self.queue, self.fresh = [], True

    def add(self, request):
        self.queue.append(request)

    def schedule(self):
        return SimpleNamespace(
            scheduled={r.id: r.prompt_tokens if self.fresh else 1 for r in self.queue[:1]},
            preempted=[],
            num_tokens=self.queue[0].prompt_tokens if self.fresh else 1,
        )

    def finish_step(self, plan, outputs):
        self.fresh = 2 in outputs.values()
        if self.fresh:
            del self.queue[0]
        return []


@pytest.mark.parametrize("number", [1, 60])
def test_what_serve_returns_can_be_drawn(number, tmp_path):
    jobs = [Job(Request(str(n), 5, 4), 4) for n in range(number)]
    served = serve(OneAtATime(), jobs, StepCost(0.01, 0.0, 0.001))
    with mpl.rc_context({"figure.dpi": 40}):
        iterations.timeline(served).savefig(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 1000
    assert len(iterations.timeline_text(served).splitlines()) == 2 + min(number, iterations.MAX_ROWS)
    first = served.timings()[0]
    assert (first.arrival, first.admitted, len(first.token_times)) == (0.0, 0.0, 4)
