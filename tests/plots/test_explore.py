"""Sliders where a person is, one picture where not."""

import pytest
from ipywidgets import IntSlider

from servelab.plots.blocks import Frame, block_stepper
from servelab.plots.explore import attended, explore


@pytest.mark.parametrize("name", ["NBGRADER_EXECUTION", "SERVELAB_UNATTENDED"])
def test_an_unattended_run_draws_once_and_makes_no_widget(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    drawn = []
    explore(lambda n: drawn.append(n), n=IntSlider(3, 1, 9))
    assert drawn == [3] and not attended()
    assert type(block_stepper([Frame("one", 4, (0, 1))])).__name__ == "Figure"


def test_a_person_gets_sliders(monkeypatch):
    for name in ("NBGRADER_EXECUTION", "SERVELAB_UNATTENDED"):
        monkeypatch.delenv(name, raising=False)
    drawn = []
    explore(lambda n: drawn.append(n), n=IntSlider(3, 1, 9))
    assert drawn == [3] and attended()
    assert type(block_stepper([Frame("one", 4, (0, 1))])).__name__ == "VBox"
