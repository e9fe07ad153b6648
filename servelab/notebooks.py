"""Small helpers over notebooks: nbgrader's metadata, cells by name, points."""

import json
from functools import cache
from pathlib import Path

from servelab.paths import Unit


def grade_id(cell: dict) -> str:
    """The cell's nbgrader name, or an empty string."""
    mark = cell.get("metadata", {}).get("nbgrader")
    name = mark.get("grade_id") if isinstance(mark, dict) else None
    return name if isinstance(name, str) else ""


def is_solution(cell: dict) -> bool:
    """Whether the learner writes in this cell."""
    return bool(grade_id(cell)) and bool(cell["metadata"]["nbgrader"].get("solution"))


def is_graded(cell: dict) -> bool:
    """Whether the cell carries points."""
    return bool(grade_id(cell)) and bool(cell["metadata"]["nbgrader"].get("grade"))


def is_check(cell: dict) -> bool:
    """Whether the cell is a check: graded and not written by the learner."""
    return is_graded(cell) and not is_solution(cell)


@cache
def _points(path: Path, _changed: float) -> dict[str, float]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return {grade_id(cell): float(cell["metadata"]["nbgrader"]["points"]) for cell in cells if is_graded(cell)}


def points(unit: Unit) -> dict[str, float]:
    """Points by grade_id, from the unit's released notebook; empty while that is not built."""
    path = unit.release
    return _points(path, path.stat().st_mtime) if path.exists() else {}
