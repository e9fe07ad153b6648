"""What the instructor reads: grades.csv, one report page, and the summary that ``--json`` prints."""

import csv
import io
import platform
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

from jinja2 import Environment, FileSystemLoader

from autograder import gradebook, secret, transcripts
from autograder.course import Course
from autograder.files import write_text
from autograder.grading import Graded
from autograder.intake import Taken

TEMPLATES = Path(__file__).with_name("templates")


def write_all(course: Course, taken: Taken, results: list[Graded]) -> dict[str, Any]:
    """Write grades.csv and report.html over everything in the gradebook; returns the summary."""
    units = {slug: unit_rows(course, slug) for slug in course.units}
    units = {slug: rows for slug, rows in units.items() if rows}
    files = {
        "gradebook": course.db_url.partition("?")[0].rpartition("@")[2],
        "feedback": str(course.state / "feedback"),
        "grades": str(course.state / "grades.csv"),
        "report": str(course.state / "report.html"),
    }
    write_text(Path(files["grades"]), grades_csv(course, units))
    write_text(Path(files["report"]), report_page(course, units, taken, results))
    summary = {slug: _summary(rows) for slug, rows in units.items()}
    return {"sandboxed": course.sandbox, "graded": len(results), "units": summary, "files": files}


def unit_rows(course: Course, slug: str) -> list[dict[str, Any]]:
    """One row a student: scores from the gradebook, remarks and verdicts from the last run's record."""
    rows = []
    for student, grades in sorted(gradebook.scores(course, slug).items()):
        record = transcripts.read_record(course, slug, student)
        row = {
            "student": student,
            **grades,
            "sandboxed": record.get("sandboxed", False),
            "failed": record.get("failed", ""),
        }
        row |= {name: record.get(name, []) for name in ("notes", "incidents")}
        rows.append(row | {"exercises": record.get("exercises", {}), "seconds": record.get("seconds", 0.0)})
    return rows


def _summary(rows: list[dict]) -> dict[str, Any]:
    return {
        "submissions": len(rows),
        "mean": round(mean(row["score"] for row in rows), 2),
        "max": rows[0]["max"],
        "waiting": sum(len(row["waiting"]) for row in rows),
        "not_sandboxed": sum(not row["sandboxed"] for row in rows),
        "students": {row["student"]: {"score": row["score"], "cells": row["cells"]} for row in rows},
    }


def grades_csv(course: Course, units: dict[str, list[dict]]) -> str:
    """One line a student: total, then for each unit its score, its maximum, what waits, and each cell's score.

    Columns are named ``UNIT``, ``UNIT max``, ``UNIT waiting`` and ``UNIT/grade_id``. Empty means no submission.
    """
    head = ["student", "score", "max", "sandboxed"]
    table: dict[str, dict[str, Any]] = {}
    for slug, rows in units.items():
        cells = list(course.points(slug))
        head += [slug, f"{slug} max", f"{slug} waiting", *(f"{slug}/{name}" for name in cells)]
        for row in rows:
            line = table.setdefault(
                row["student"], {"student": row["student"], "score": 0.0, "max": 0.0, "sandboxed": True}
            )
            line["score"] += row["score"]
            line["max"] += row["max"]
            line["sandboxed"] &= row["sandboxed"]
            line |= {slug: row["score"], f"{slug} max": row["max"], f"{slug} waiting": len(row["waiting"])}
            line |= {f"{slug}/{name}": row["cells"].get(name, "") for name in cells}
    text = io.StringIO()
    writer = csv.DictWriter(text, head, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _rounded(value) for key, value in table[student].items()} for student in sorted(table))
    return text.getvalue()


def _rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value


def report_page(course: Course, units: dict[str, list[dict]], taken: Taken, results: list[Graded]) -> str:
    """One HTML page, complete in itself: no script, no link to anything outside."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    names = ("nbgrader", "nbclient", "ipykernel", "torch", "numpy")
    versions = {"Python": platform.python_version(), **{name: version(name) for name in names}}
    return environment.get_template("report.html.j2").render(
        units=[_unit_view(course, slug, rows) for slug, rows in units.items()],
        remarks=taken.remarks,
        failed=[result for result in results if result.problem],
        sandboxed=course.sandbox and all(row["sandboxed"] for rows in units.values() for row in rows),
        fingerprint=secret.fingerprint(course),
        versions=versions,
        when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _unit_view(course: Course, slug: str, rows: list[dict]) -> dict[str, Any]:
    points = course.points(slug)
    failures: dict[str, Counter] = {}
    for row in rows:
        for check, result in row["exercises"].items():
            missed = [case for case, passed in result["cases"].items() if not passed]
            failures.setdefault(check, Counter()).update(missed)
    return {"slug": slug, "points": points, "manual": course.manual(slug), "rows": rows, "failures": failures}
