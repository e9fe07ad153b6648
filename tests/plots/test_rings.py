"""The ring hop by hop is what the ring did, also where it is another ring; the text twin says the same."""

import pytest

from servelab.plots import rings
from servelab.reference import collectives as reference


def test_the_states_of_three_ranks_are_those_of_the_units_table():
    states = rings.watch(reference.ring_all_reduce, 3, 7)
    assert [state.hop for state in states] == [0, 1, 2, 3, 4]
    assert states[0].shares == (((0,),) * 3, ((1,),) * 3, ((2,),) * 3)
    assert states[1].shares == (((0,), (0, 2), (0,)), ((1,), (1,), (0, 1)), ((1, 2), (2,), (2,)))
    assert states[2].shares[0] == ((0, 1, 2), (0, 2), (0,))
    assert states[4].shares == (((0, 1, 2),) * 3,) * 3
    assert [state.sent for state in states] == [(0, 0, 0), (2, 3, 2), (4, 5, 5), (7, 7, 7), (9, 10, 9)]


@pytest.mark.parametrize("p", [1, 2, 8])
def test_every_number_of_ranks_has_its_hops(p):
    states = rings.watch(reference.ring_all_reduce, p, 9)
    assert len(states) == 2 * (p - 1) + 1
    assert all(states[-1].kind(rank, chunk) != "partial sum" for rank in range(p) for chunk in range(p))


def test_empty_chunks_and_broken_sums_are_shown_as_such():
    state = rings.watch(reference.ring_all_reduce, 3, 2)[-1]
    assert state.kind(0, 2) == rings.EMPTY and state.shares[0][0] == (0, 1, 2)
    broken = rings.watch(lambda tensor, group=None: tensor[:1].mul_(64), 3, 6)[0]
    assert broken.shares[0] == (None, (0,), (0,))
    assert "?" in rings.picture_text(broken)


def test_the_picture_has_a_cell_for_each_chunk_and_a_bar_for_each_rank():
    state = rings.watch(reference.ring_all_reduce, 4, 16)[3]
    axes, bars = rings.picture(state).axes
    labels = [text.get_text() for text in axes.texts]
    assert labels[:4] == ["0123", "023", "03", "0"]
    assert [bar.get_width() for bar in bars.patches] == [12, 12, 12, 12]


@pytest.mark.parametrize("hop", range(7))
def test_elements_are_counted_in_whole_numbers(hop):
    state = rings.watch(reference.ring_all_reduce, 4, 2)[hop]
    bars = rings.picture(state).axes[1]
    assert all(tick == int(tick) for tick in bars.get_xticks())


def test_the_text_twin_has_the_same_figures():
    head, _, first, *rest = rings.picture_text(rings.watch(reference.ring_all_reduce, 4, 16)[3]).splitlines()
    assert head.startswith("| after hop 3 | chunk 0 |")
    assert first == "| rank 0 | 0123 | 023 | 03 | 0 | 12 | 96 |"
    assert len(rest) == 3
