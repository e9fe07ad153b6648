"""Frames, pictures and text of a block pool."""

import matplotlib.pyplot as plt
import pytest
from servelab.reference.paged_kv import ForkableTable, PrefixCache

from servelab.plots.blocks import Frame, Recorder, block_map, block_stepper, describe, small_multiples

SYSTEM = [1, 2, 3, 4]


@pytest.fixture(autouse=True)
def no_open_figures():
    yield
    plt.close("all")


@pytest.fixture
def film() -> Recorder:
    """A prompt of six tokens, a fork of it that writes, and the end of both, in blocks of four."""
    film = Recorder(PrefixCache(num_blocks=6, block_size=4))
    parent = film.tables["p"] = ForkableTable(film)
    parent.append(6)
    film.insert([*SYSTEM, 5, 6], parent.blocks)
    film.shot("one")
    child = film.tables["c"] = parent.fork()
    film.shot("fork")
    child.append(1)
    film.shot("write")
    parent.release(), child.release()
    film.shot("end")
    film.allocate(6)
    film.shot("all taken")
    return film


def test_frames_follow_the_run(film):
    states = [[frame.state(block) for block in range(6)] for frame in film.frames]
    assert states == [
        ["used", "used", "free", "free", "free", "free"],
        ["shared", "shared", "free", "free", "free", "free"],
        ["shared", "used", "used", "free", "free", "free"],
        ["cached", "free", "free", "free", "free", "free"],
        ["used"] * 6,
    ]
    assert [film.frames[2].filled(block) for block in (0, 1, 2, 3)] == [4, 2, 3, 0]
    assert film.frames[3].tables == {} and film.frames[4].cached == frozenset()


def test_text_twin(film):
    assert describe(film.frames[1]) == "fork | 0: p+c x2 4/4 cached; 1: p+c x2 2/4 | free: 2, 3, 4, 5"
    assert describe(film.frames[3]) == "end | nothing held | free: 0 (cached), 1, 2, 3, 4, 5"
    assert "held outside the tables" in describe(film.frames[4]) and describe(film.frames[4]).endswith("free: none")


def test_picture_has_every_block_and_its_twin(film):
    ax = block_map(film.frames[1])
    written = [text.get_text() for text in ax.texts]
    assert {"0", "5", "p+c\nx2"} <= set(written) and ax.get_title(loc="left") == "fork"
    assert ax.get_label() == describe(film.frames[1])
    block_map(film.frames[4])


def test_fill_level_and_split_colours(film):
    shared, half = Frame("", 4, (2,), {"a": ((0,), 2), "b": ((0,), 2)}), Frame("", 4, (1,), {"a": ((0,), 2)})
    sizes = [[(p.get_width(), p.get_height()) for p in block_map(frame).patches] for frame in (shared, half)]
    assert sizes[0][1:3] == [(0.45, 0.45), (0.45, 0.45)] and sizes[1][1] == (0.9, 0.45)


def test_small_multiples_has_one_picture_a_frame(film):
    figure = small_multiples(film.frames)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["one", "fork", "write", "end", "all taken", ""]


def test_stepper_steps(film):
    back, slider, forward = block_stepper(film.frames).children[0].children
    back.click()
    assert (slider.value, slider.max) == (0, 4)
    for _ in range(7):
        forward.click()
    assert slider.value == 4
    back.click()
    assert slider.value == 3
