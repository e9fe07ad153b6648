"""The picture of step time against degree shows the numbers that it was given, and its text twin says the same."""

import pytest

from servelab.plots import degrees
from servelab.plots.degrees import Step

TIMES = {
    "decode": {1: Step(8e-3, 8e-3), 2: Step(4e-3, 5e-3), 4: Step(2e-3, 6.5e-3)},
    "prefill": {1: Step(90e-3, 90e-3), 2: Step(45e-3, 100e-3), 4: Step(22.5e-3, 80e-3)},
}


def test_bars_are_stacked_and_the_fastest_is_marked():
    panels = degrees.step_bars(TIMES).axes
    assert [panel.get_title(loc="left") for panel in panels] == list(TIMES)
    for panel, by_degree in zip(panels, TIMES.values(), strict=True):
        compute, sent = ([bar.get_height() for bar in kind] for kind in panel.containers)
        assert compute == pytest.approx([1e3 * step.compute for step in by_degree.values()])
        assert sent == pytest.approx([1e3 * step.communication for step in by_degree.values()])
        assert [bar.get_y() for bar in panel.containers[1]] == pytest.approx(compute)
        assert [label.get_text() for label in panel.get_xticklabels()] == ["TP1", "TP2", "TP4"]
    assert [panel.lines[0].get_xdata()[0] for panel in panels] == ["TP2", "TP4"]


def test_one_kind_of_step_alone():
    (panel,) = degrees.step_bars({"decode": TIMES["decode"]}).axes
    assert len(panel.containers) == 2


def test_the_text_twin_has_a_row_for_each_bar():
    head, _, *rows = degrees.step_text(TIMES).splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        "",
        "degree",
        "floor ms",
        "communication ms",
        "step ms",
    ]
    assert rows[1] == "| decode | TP2 | 4.00 | 1.00 | **5.00** |"
    assert rows[2] == "| decode | TP4 | 2.00 | 4.50 | 6.50 |"
    assert [row for row in rows if "**" in row] == [rows[1], rows[5]]
