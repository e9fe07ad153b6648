"""Let any file through as a gradeable notebook: tolerant reading, then repair against the release.

Stock nbgrader stops a whole class's run at one duplicated ``grade_id``. Here a submission is the released notebook with
the student's answers in it, and what had to be repaired is noted.
"""

import datetime
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters import NotebookExporter
from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor

from autograder import transcripts
from autograder.course import Course
from autograder.files import read_json
from servelab.errors import CourseError
from servelab.notebooks import grade_id
from servelab.repair import read_notebook, repair

NOTES = "servelab_notes"
MAX_NOTES = 20


class TolerantExporter(NotebookExporter):
    """nbconvert's NotebookExporter for files that may be anything: nothing that it is given raises."""

    def from_filename(self, filename: str, resources: Any = None, **kw: Any) -> tuple[Any, Any]:
        path = Path(filename)
        try:
            nb, notes = read_notebook(path)
        except CourseError as error:
            nb, notes = nbformat.v4.new_notebook(), [f"{error.problem}; graded as empty"]
        if path.parent.parent.parent.name != "submitted" and not path.is_symlink():
            nb = nbformat.read(path, as_version=4)  # the grader's own file, between its two steps
        else:
            nb.metadata[NOTES] = notes
        modified = datetime.datetime.fromtimestamp(path.lstat().st_mtime, tz=datetime.UTC)
        place = {"name": path.stem, "path": str(path.parent), "modified_date": modified.strftime("%B %d, %Y")}
        resources = resources if resources is not None else {}
        resources["metadata"] = place
        return self.from_notebook_node(nb, resources=resources, **kw)


class Gate(NbGraderPreprocessor):
    """The first sanitising step: the released notebook with the submission's answers in it."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        names, course = resources["nbgrader"], Course()
        released = course.release(names["assignment"])
        notes = list(nb.metadata.get(NOTES, []))
        notes += read_json(transcripts.intake_path(course, names["assignment"], names["student"]), [])
        try:
            nb, repairs = repair(released, nb)
        except Exception as error:
            self.log.exception("a submission could not be repaired")
            nb, repairs = (
                released,
                [f"it could not be repaired ({type(error).__name__}); graded as empty"],
            )
        nb.metadata = nbformat.from_dict({**released.metadata, NOTES: (notes + repairs)[:MAX_NOTES]})
        _check_same_cells(released, nb)
        return nb, resources


def _check_same_cells(released: NotebookNode, nb: NotebookNode) -> None:
    """What nbgrader will grade is exactly what was released."""
    expected, got = ([grade_id(cell) for cell in book.cells if grade_id(cell)] for book in (released, nb))
    if expected != got:
        raise CourseError(f"the repaired notebook has the graded cells {got}, expected {expected}")
