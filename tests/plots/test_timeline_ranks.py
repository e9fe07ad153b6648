"""Timelines of ranks: figures that the run's record determines, and text twins that say the same."""

import pytest

from servelab.plots.timeline_ranks import bubble, intervals, seconds, timeline, timeline_lines, timeline_text
from servelab.ranks import Event, Run

RUN = Run(
    [None, None],
    [
        Event(0, "compute", "F0", 0.0, 0.02),
        Event(0, "send", "send", 0.02, 0.03, peer=1, nbytes=4, began=0.02),
        Event(1, "recv", "recv", 0.0, 0.03, peer=0, nbytes=4, began=0.02),
        Event(1, "compute", "F0", 0.03, 0.05),
        Event(0, "wait", "irecv", 0.03, 0.05, peer=1, began=0.05),
    ],
    0.05,
)


def test_a_ranks_time_is_divided_without_gaps():
    for rank in range(2):
        parts = intervals(RUN, rank)
        assert [parts[0].start, *(part.end for part in parts)] == [*(part.start for part in parts), RUN.seconds]
    assert [part.kind for part in intervals(RUN, 1)] == ["idle", "communication", "compute"]


def test_sums_and_bubble():
    assert seconds(RUN, "compute") == pytest.approx([0.02, 0.02])
    assert seconds(RUN, "communication") == pytest.approx([0.01, 0.01])
    assert seconds(RUN, "idle") == pytest.approx([0.02, 0.02])
    assert bubble(RUN) == pytest.approx(0.6)
    assert bubble(Run([None], [], 0.0)) == 0


def test_calls_inside_a_span_are_compute():
    run = Run([None], [Event(0, "send", "isend", 0.1, 0.2), Event(0, "compute", "F", 0.0, 0.3)], 0.4)
    assert [(part.kind, part.start, part.end) for part in intervals(run, 0)] == [
        ("compute", 0, 0.3),
        ("idle", 0.3, 0.4),
    ]


def test_real_ranks_do_not_tell_waiting_from_moving():
    run = Run([None], [Event(0, "recv", "recv", 0.1, 0.3, peer=0)], 0.3)
    assert [part.kind for part in intervals(run, 0)] == ["idle", "communication"]


def test_the_text_twins():
    assert timeline_text(RUN).splitlines() == [
        "| rank | compute ms | communication ms | idle ms | idle share |",
        "|---|---|---|---|---|",
        "| 0 | 20.00 | 10.00 | 20.00 | 40.0 % |",
        "| 1 | 20.00 | 10.00 | 20.00 | 40.0 % |",
    ]
    assert timeline_lines(RUN, width=10) == "rank 0  ccccmm....\nrank 1  ....mmcccc"


def test_the_picture_has_a_row_a_rank_and_names_spans():
    figure = timeline(RUN, label=str.lower)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "ms"
    assert [text.get_text() for text in axes.texts] == ["f0", "f0"]
    assert len(axes.get_yticks()) == 2
    timeline(Run([None], [], 0.0))
