"""The picture of static batches shows every cell that it was given, and its text twins say the same."""

import itertools

import matplotlib as mpl
import pytest
from matplotlib.colors import to_hex

from servelab.batching import Batch, Request, Slot
from servelab.plots import slots, style

A, B, C = Request(0, 2, 2), Request(0, 4, 5), Request(1, 3, 3)
SCHEDULE = [
    Batch(0, 5, [Slot(A, padding=2, useful=4, held=3), Slot(B, useful=9)]),
    Batch(7, 10, [Slot(C, useful=6), Slot(None, empty=6)]),
]


def bars(figure):
    """(slot, first cell, cells, colour) of every bar."""
    (axes,) = figure.axes
    return [
        (round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width(), to_hex(bar.get_facecolor()).upper())
        for container in axes.containers
        for bar in container
    ]


def test_every_run_of_cells_is_a_bar_in_the_colour_of_its_kind():
    drawn = bars(slots.gantt(SCHEDULE))
    padding, useful, held, empty = (style.colour(label) for label in slots.LABELS)
    assert drawn[:4] == [(0, 0, 2, padding), (0, 2, 4, useful), (0, 6, 3, held), (1, 0, 9, useful)]
    second = drawn[4][1]
    assert second > 9 and drawn[4:] == [(0, second, 6, useful), (1, second, 6, empty)]


def test_kinds_are_told_apart_without_colour():
    drawn = [style.area(label)["hatch"] for label in ("padding", "held")]
    assert None not in drawn and len(set(drawn)) == 2


def test_a_batch_is_titled_with_its_moments_and_its_prompt_columns_end_in_a_line():
    (axes,) = slots.gantt(SCHEDULE).axes
    assert [text.get_text() for text in axes.texts] == ["0-5", "7-10"]
    assert axes.lines[0].get_xdata()[0] == 4
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "9", "3", "6"]
    (axes,) = slots.gantt([Batch(0, 3, [Slot(Request(0, 0, 3), useful=3)])] * 9).axes
    assert [text.get_text() for text in axes.texts] == ["0-3"] * 9 and not axes.lines


@pytest.mark.parametrize("number", [1, 2, 9, 20, 200])
@pytest.mark.parametrize("steps", [(3,), (2000, 20), (1, 30), (12_345, 67_890)])
def test_labels_are_left_out_where_they_would_run_into_each_other(number, steps):
    schedule, moment = [], 0
    for index in range(number):
        n = steps[index % len(steps)]
        request = Request(0, n, n)
        schedule.append(Batch(moment, moment + n, [Slot(request, useful=2 * n)]))
        moment += n
    figure = slots.gantt(schedule)
    figure.canvas.draw()
    (axes,) = figure.axes
    for labels in (axes.texts, axes.get_xticklabels()):
        boxes = [label.get_window_extent() for label in labels]
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))
        assert len(boxes) >= min(number, 4) / len(steps)


def test_the_legend_names_what_it_is_told_to():
    (legend,) = slots.gantt(SCHEDULE, labels=("useful", "held")).legends
    assert [text.get_text() for text in legend.get_texts()] == ["useful", "held"]


def test_the_table_has_the_cells_of_each_batch():
    _, _, *rows = slots.gantt_text(SCHEDULE).splitlines()
    assert rows == ["| 0 | 0 | 5 | 4 | 13 | 2 | 3 | 0 |", "| 1 | 7 | 10 | 3 | 6 | 0 | 0 | 6 |"]


def test_one_letter_a_cell():
    assert slots.slot_lines(SCHEDULE).splitlines() == [
        "batch 0, moments 0 to 5",
        "  slot 0  ppuu uuhhh",
        "  slot 1  uuuu uuuuu",
        "batch 1, moments 7 to 10",
        "  slot 0  uuu uuu",
        "  slot 1  ... ...",
    ]


def test_shares_are_of_the_rectangle_and_queueing_is_in_steps():
    counts = {"useful": 26, "padding": 4, "held": 5, "empty": 5, "locked_out": 1500, "forming": 2}
    head, _, row = slots.shares_text({"run": counts}).splitlines()
    assert head.endswith("| locked out (request-steps) | forming (request-steps) |")
    assert row == "| run | 65.0 % | 10.0 % | 12.5 % | 12.5 % | 1,500 | 2 |"


@pytest.mark.parametrize("size", [1, 20])
def test_a_picture_can_be_drawn_of_any_number_of_batches(size, tmp_path):
    with mpl.rc_context({"figure.dpi": 40}):
        slots.gantt(SCHEDULE * size).savefig(tmp_path / "slots.png")
    assert (tmp_path / "slots.png").stat().st_size > 1000
