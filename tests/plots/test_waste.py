"""The pictures of wasted memory show the numbers that they were given, and their text twins say the same."""

from types import SimpleNamespace

import pytest

from servelab.plots import waste

SHARES = {
    "max": SimpleNamespace(used=0.2, reserved=0.13, internal=0.57, external=0.1, free=0.0),
    "paged": SimpleNamespace(used=0.96, reserved=0.01, internal=0.01, external=0.0, free=0.02),
}


def test_bars_are_the_shares_and_fill_each_row():
    (axes,) = waste.waste_bars(SHARES).axes
    drawn = [[bar.get_width() for bar in kind] for kind in axes.containers]
    assert drawn == [[pytest.approx(100 * getattr(s, kind)) for s in SHARES.values()] for kind in waste.KINDS]
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == [pytest.approx(100)] * len(SHARES)
    assert [label.get_text() for label in axes.get_yticklabels()] == list(SHARES)


def test_the_text_twin_has_a_row_for_each_policy():
    head, _, *rows = waste.waste_text(SHARES).splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == ["policy", *waste.KINDS]
    assert rows[0] == "| max | 20.0 % | 13.0 % | 57.0 % | 10.0 % | 0.0 % |"
    assert rows[1].startswith("| paged | 96.0 %")


@pytest.mark.parametrize(("length", "empty"), [(1, 15), (15, 1), (16, 0), (17, 15), (32, 0)])
def test_waste_is_what_the_last_block_leaves_empty(length, empty):
    assert waste.mean_waste([length], 16) == empty


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_waste_over_every_end_of_a_block_has_the_mean_that_the_text_gives(block_size):
    assert waste.mean_waste(range(1, block_size + 1), block_size) == (block_size - 1) / 2


def test_a_line_an_iteration_and_a_letter_a_slot():
    history = [{"used": 2, "reserved": 1, "internal": 1, "external": 2}, {"free": 4, "used": 2}]
    assert waste.slot_lines(history).splitlines() == ["   0  uurixx", "   1  uu...."]


def test_the_curve_and_its_twin_show_what_was_measured():
    lengths = [1, 16, 17, 40]  # 18.5 on average
    (axes,) = waste.block_size_curve(lengths, (1, 16)).axes
    example, mean, points = axes.lines
    assert list(example.get_ydata()) == [0, pytest.approx(100 * 7.5 / 307.5)]
    assert list(mean.get_ydata()) == [0, pytest.approx(100 * 7.5 / (18.5 + 7.5))]
    measured = (15 + 0 + 15 + 8) / 4
    assert list(points.get_ydata()) == [0, pytest.approx(100 * measured / (18.5 + measured))]
    assert waste.block_size_text(lengths, (1, 16)).splitlines()[-1] == "| 16 | 7.5 | 2.44 % | 9.5 | 33.93 % |"
