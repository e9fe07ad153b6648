"""Sliders over a picture; the picture alone where nobody is there to move them."""

import os
from collections.abc import Callable


def attended() -> bool:
    """Whether a person may move a slider: not while nbgrader or `servelab check` runs the notebook.

    A widget that draws answers over the kernel's channels while its cell runs, and an unattended client (nbclient) can
    wait for the cell's own answer until its time-out.
    """
    return not (os.environ.get("NBGRADER_EXECUTION") or os.environ.get("SERVELAB_UNATTENDED"))


def explore(draw: Callable[..., None], **sliders) -> None:
    """Call ``draw`` with the values of ipywidgets sliders, again whenever one moves; once where nobody is there."""
    if not attended():
        draw(**{name: slider.value for name, slider in sliders.items()})
        return
    import ipywidgets

    ipywidgets.interact(draw, **sliders)
