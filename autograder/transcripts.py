"""What is kept of a graded run: each transcript, for judging again later, and one record a submission."""

from pathlib import Path
from typing import Any

from autograder.course import Course
from autograder.files import read_json, write_json
from servelab.checking import TRANSCRIPT_MIME as MIME

__all__ = ["MIME", "intake_path", "read_record", "record_path", "store", "update_record"]


def folder(course: Course, unit: str, student: str) -> Path:
    """Where one submission's transcripts lie. They hold secret challenges: nobody else on the machine may read them."""
    top = course.state / "transcripts"
    top.mkdir(mode=0o700, parents=True, exist_ok=True)
    return top / unit / student


def store(course: Course, unit: str, student: str, exercise: str, payload: dict) -> None:
    """Keep one transcript with the challenges that it answers, named by seed and exercise version."""
    write_json(folder(course, unit, student) / f"{exercise.partition('.')[2]}.json", payload)


def record_path(course: Course, unit: str, student: str) -> Path:
    return folder(course, unit, student) / "record.json"


def intake_path(course: Course, unit: str, student: str) -> Path:
    return folder(course, unit, student) / "intake.json"


def read_record(course: Course, unit: str, student: str) -> dict[str, Any]:
    """What the last run noted about a submission; empty if there was none."""
    record = read_json(record_path(course, unit, student), {})
    return record if isinstance(record, dict) else {}


def update_record(course: Course, unit: str, student: str, **values: Any) -> None:
    write_json(record_path(course, unit, student), read_record(course, unit, student) | values)
