"""What is graded and where its state lies: one frozen object that every part of the grader takes."""

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from servelab import exercise as exercises
from servelab.errors import CourseError
from servelab.exercise import Exercise
from servelab.notebooks import grade_id, is_check, is_graded, is_solution
from servelab.paths import ROOT, Unit, units

GRADEBOOK = "SERVELAB_GRADEBOOK"  # overrides the gradebook's URL, for nbgrader commands run by hand too


@dataclass(frozen=True)
class Course:
    """A course to grade.

    Parameters
    ----------
    root : Path
        The repository: ``notebooks/`` and ``solutions/`` are read there, and nbgrader runs there.
    db_url : str
        SQLAlchemy's URL of nbgrader's gradebook.
    sandbox : bool
        False runs submissions as the grader itself. Every report is marked then.
    """

    root: Path = ROOT
    db_url: str = ""
    sandbox: bool = True
    state: Path = field(default=ROOT / "autograder")

    def __post_init__(self) -> None:
        default = os.environ.get(GRADEBOOK) or f"sqlite:///{self.state / 'gradebook.db'}?timeout=60"
        object.__setattr__(self, "db_url", self.db_url or default)

    def folder(self, step: str, student: str, unit: str) -> Path:
        """Where nbgrader keeps one student's unit in one step, e.g. ``submitted``."""
        return self.state / step / student / unit

    def submission(self, student: str, unit: str) -> Path:
        return self.folder("submitted", student, unit) / f"{unit}.ipynb"

    @cached_property
    def units(self) -> dict[str, Unit]:
        """The units that have a released notebook, by slug."""
        return {unit.slug: unit for unit in units() if unit.release.exists()}

    def unit(self, slug: str) -> Unit:
        if slug not in self.units:
            known = ", ".join(self.units) or "none is built; run: servelab build"
            raise CourseError(f"there is no released unit {slug!r}", mend=f"Units: {known}.")
        return self.units[slug]

    def release(self, slug: str) -> NotebookNode:
        """The notebook as it was handed out."""
        return nbformat.read(self.unit(slug).release, as_version=4)

    def points(self, slug: str) -> dict[str, float]:
        """Points by grade_id, in the order of the notebook, manually graded cells included."""
        cells = self.release(slug).cells
        return {grade_id(cell): float(cell.metadata.nbgrader.points) for cell in cells if is_graded(cell)}

    def exercises(self, slug: str) -> dict[str, Exercise]:
        """The exercises by the grade_id of their check cells. Raises `CourseError` if a check cell has none."""
        cells = [cell for cell in self.release(slug).cells if is_check(cell) and cell.cell_type == "code"]
        return {grade_id(cell): exercise_of(self.unit(slug), grade_id(cell)) for cell in cells}

    def manual(self, slug: str) -> list[str]:
        """The grade_ids of the cells that a person grades."""
        return [grade_id(cell) for cell in self.release(slug).cells if is_graded(cell) and is_solution(cell)]


def exercise_of(unit: Unit, check_id: str) -> Exercise:
    """The exercise that a check cell of this unit records."""
    return exercises.find(f"{unit.name}.{check_id.removesuffix('-check').replace('-', '_')}")
