"""nbgrader's gradebook: set up from the release, and what is guarded before nbgrader touches a submission."""

import logging
import os
from pathlib import Path
from typing import Any

from nbgrader.api import Gradebook, MissingEntry
from nbgrader.preprocessors import ComputeChecksums, SaveCells

from autograder.course import Course
from servelab.errors import CourseError
from servelab.paths import put_bin_on_path

KEPT = ("timestamp.txt",)
READY = "SERVELAB_GRADEBOOK_READY"  # tells `grade`'s workers that the units are set up
_set_up: set[str] = set()


def open_gradebook(course: Course) -> Gradebook:
    """The class's gradebook; made if it does not exist. Raises `CourseError` if the database cannot be used."""
    put_bin_on_path()
    try:
        return Gradebook(course.db_url, "servelab")
    except Exception as error:
        shown = course.db_url.partition("?")[0].rpartition("@")[2]  # without a password
        problem = f"the gradebook cannot be opened: {str(error).splitlines()[0][:200]}"
        mend = "Close other programs that use it, or name another one with --db, e.g. sqlite:////path/gradebook.db"
        raise CourseError(problem, where=shown, mend=mend) from error


def set_up(course: Course, slug: str) -> None:
    """Enter a unit's cells and points, as ``nbgrader generate_assignment`` would.

    Raises `CourseError` if a graded cell was added or removed although there are submissions already.
    """
    with open_gradebook(course) as gradebook:
        gradebook.update_or_create_assignment(slug)
    resources = {"nbgrader": {"notebook": slug, "assignment": slug, "db_url": course.db_url}, "unique_key": slug}
    nb = course.release(slug)
    log = logging.getLogger("servelab.grade")
    nb, _ = ComputeChecksums(log=log).preprocess(nb, resources)
    try:
        SaveCells(log=log).preprocess(nb, resources)
    except RuntimeError as error:
        mend = (
            "Undo the change, or start a new gradebook with --db: nbgrader cannot change a unit that has submissions."
        )
        raise CourseError(f"graded cells were added or removed: {error}", where=slug, mend=mend) from None


def before_submission(assignment: str, student: str, notebooks: list[str]) -> None:
    """nbgrader's hook before each submission, by hand too: set the gradebook up, put unwelcome files aside."""
    course = Course()
    if assignment not in _set_up and READY not in os.environ:
        set_up(course, assignment)
        _set_up.add(assignment)
    for notebook in notebooks:
        put_aside(course, Path(notebook).parent)


def put_aside(course: Course, folder: Path) -> None:
    """Move everything but notebooks and the time stamp out of a submission, links included.

    nbgrader would copy it beside the graded notebook and into the student's feedback, following links.
    """
    submitted = course.state / "submitted"
    if submitted not in folder.parents:
        return
    for entry in sorted(folder.iterdir()):
        is_file = entry.is_file() and not entry.is_symlink()
        if not (is_file and (entry.suffix == ".ipynb" or entry.name in KEPT)) and entry.suffix != ".ipynb":
            target = course.state / "aside" / folder.relative_to(submitted) / entry.name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(entry, target)


def scores(course: Course, slug: str) -> dict[str, dict[str, Any]]:
    """For every student with a submission of a unit: score by grade_id, total, and what waits for a person."""
    with open_gradebook(course) as gradebook:
        try:
            submissions = gradebook.assignment_submissions(slug)
        except MissingEntry:
            return {}
        return {submission.student.id: _scores_of(submission) for submission in submissions}


def _scores_of(submission: Any) -> dict[str, Any]:
    grades = [grade for notebook in submission.notebooks for grade in notebook.grades]
    penalty = submission.late_submission_penalty or 0.0
    return {
        "cells": {grade.name: grade.score for grade in grades},
        "waiting": sorted(grade.name for grade in grades if grade.needs_manual_grade),
        "score": max(0.0, submission.score - penalty),
        "max": submission.max_score,
        "late_penalty": penalty,
        "timestamp": submission.timestamp.isoformat() if submission.timestamp else "",
    }
