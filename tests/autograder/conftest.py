"""Fixtures: a toy course, a collection of submissions, the sandbox."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from toycourse import UNIT, Toy, make_toy

from autograder.course import Course
from autograder.trial import try_sandbox


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Toy:
    """One toy course for tests that only read it or add students of their own."""
    return make_toy(tmp_path_factory.mktemp("course"))


@pytest.fixture
def fresh_toy(toy, tmp_path) -> Toy:
    """A toy course of the test's own, without any state."""
    root = tmp_path / "course"
    shutil.copytree(toy.root, root, ignore=shutil.ignore_patterns("__pycache__", "secret", "submitted", "gradebook.db"))
    return Toy(root)


@pytest.fixture
def hand_in(tmp_path) -> Callable:
    """Write notebooks (or bytes, or text) into a collection: ``hand_in({"alice": nb})`` returns its folder."""

    def write(submissions: dict, folder: str = "collected") -> Path:
        for name, content in submissions.items():
            path = tmp_path / folder / name
            if "/" not in name and not name.endswith(".ipynb"):
                path = tmp_path / folder / name / UNIT / f"{UNIT}.ipynb"
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, nbformat.NotebookNode):
                content = json.dumps(content)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / folder

    return write


@pytest.fixture(scope="session")
def sandbox() -> None:
    """Skips the test where the sandbox does not work, with the reason."""
    trial = try_sandbox(Course())
    if not trial.works:
        pytest.skip(f"no sandbox here: {trial.problem}")
