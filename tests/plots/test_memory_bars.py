"""The picture of a card's memory shows the bytes that it was given, and its text twin says the same."""

import pytest

from servelab.plots import memory

LEDGERS = {
    "fits": memory.Ledger(memory=80e9, weights=35e9, kv=20e9),
    "too much": memory.Ledger(memory=80e9, weights=70e9, kv=30e9),
}


def test_what_is_free_and_what_is_missing():
    assert [(ledger.free, ledger.missing) for ledger in LEDGERS.values()] == [(25e9, 0), (0, 20e9)]


def test_bars_are_the_parts_and_a_line_stands_at_the_memory():
    (axes,) = memory.memory_bars(LEDGERS).axes
    drawn = [[bar.get_width() for bar in part] for part in axes.containers]
    assert drawn == [[35, 70], [20, 30], [25, 0]]
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == pytest.approx([80, 100])
    assert [list(line.get_xdata()) for line in axes.lines] == [[80, 80], [80, 80]]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(LEDGERS)


def test_a_bar_far_beyond_the_memory_is_cut_off_and_says_how_long_it_is():
    far = LEDGERS | {"far": memory.Ledger(memory=80e9, weights=141e9, kv=10_995e9)}
    (axes,) = memory.memory_bars(far).axes
    assert axes.get_xlim()[1] < 1.05 * memory.LONGEST * 80
    assert [bar.get_x() + bar.get_width() for bar in axes.containers[1]] == pytest.approx([55, 100, 240])
    assert "to 11,136 GB" in [text.get_text() for text in axes.texts]
    assert not any("to" in text.get_text() for text in memory.memory_bars(LEDGERS).axes[0].texts)


def test_the_legend_names_the_parts():
    (legend,) = memory.memory_bars(LEDGERS).legends
    assert [text.get_text() for text in legend.get_texts()] == list(memory.PARTS)


def test_the_text_twin_has_a_row_for_each_card():
    head, _, *rows = memory.memory_text(LEDGERS).splitlines()
    assert "missing GB" in head
    assert rows == [
        "| fits | 80.00 | 35.00 | 20.00 | 25.00 | 0.00 |",
        "| too much | 80.00 | 70.00 | 30.00 | 0.00 | 20.00 |",
    ]
