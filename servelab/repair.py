"""Read a notebook that may be damaged, and put a submission back into the shape in which it was released.

One function serves `restore`, `learn`'s upgrades and `grade`: take the released notebook, put in the learner's solution
sources and their own cells in place, and say what was repaired.
"""

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from servelab.errors import CourseError
from servelab.notebooks import grade_id, is_solution

MAX_BYTES = 32 << 20
MAX_CELLS = 1000
CELL_TYPES = ("code", "markdown", "raw")


def read_notebook(path: Path) -> tuple[NotebookNode, list[str]]:
    """Read a notebook as far as it can be read.

    Returns the notebook (format 4.5, outputs dropped where they are not valid) and notes on what had to be mended.
    Truncated JSON is read up to where it breaks.

    Raises
    ------
    CourseError
        If the file is missing, is a symbolic link, is too large, or holds no readable cell.
    """
    if path.is_symlink():
        raise CourseError("a symbolic link, not a notebook", where=str(path), mend="Hand in the file itself.")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CourseError(
                f"larger than {MAX_BYTES >> 20} MiB", where=str(path), mend="Clear its outputs and save it."
            )
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise CourseError(f"cannot be read: {error.strerror}", where=str(path)) from None
    data, notes = _parse(text)
    if data is None:
        raise CourseError("not a notebook: no cell can be read in it", where=str(path), mend="Hand in the .ipynb file.")
    cells = [cell for raw in data[:MAX_CELLS] if (cell := _sound_cell(raw)) is not None]
    if len(cells) < len(data):
        notes.append(f"{len(data) - len(cells)} of {len(data)} cells were not readable and are left out")
    notebook = nbformat.v4.new_notebook(cells=cells)
    _make_ids_unique(notebook.cells)
    return notebook, notes


def _parse(text: str) -> tuple[list | None, list[str]]:
    """The raw cells, from whole JSON or from as much of it as can be read."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        cells = _salvage(text)
        problem = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        return (cells or None), [f"the file is not valid JSON ({problem}); {len(cells)} cells could be saved"]
    if isinstance(data, dict) and isinstance(data.get("worksheets"), list):  # notebook format 3
        sheets = [sheet.get("cells", []) for sheet in data["worksheets"] if isinstance(sheet, dict)]
        return [cell for sheet in sheets for cell in sheet], ["an old notebook format was converted"]
    if isinstance(data, dict) and isinstance(data.get("cells"), list):
        return data["cells"], []
    return None, []


def _salvage(text: str) -> list:
    """The cells of a broken file, one by one, until one does not parse."""
    start = re.search(r'"cells"\s*:\s*\[', text)
    position, cells, decoder = start.end() if start else len(text), [], json.JSONDecoder()
    while position < len(text):
        while text[position : position + 1] in {*" \t\r\n,"}:
            position += 1
        try:
            cell, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            break
        cells.append(cell)
    return cells


def _sound_cell(raw) -> NotebookNode | None:
    """A valid cell with what could be kept of a raw one: type, source, id, nbgrader's mark, valid outputs."""
    if not isinstance(raw, dict) or raw.get("cell_type") not in (*CELL_TYPES, "heading"):
        return None
    source = raw.get("source", raw.get("input", ""))
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        return None
    kind = raw["cell_type"] if raw["cell_type"] in CELL_TYPES else "markdown"
    cell = getattr(nbformat.v4, f"new_{kind}_cell")(source=source)
    if isinstance(raw.get("id"), str) and re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", raw["id"]):
        cell.id = raw["id"]
    mark = raw["metadata"].get("nbgrader") if isinstance(raw.get("metadata"), dict) else None
    if isinstance(mark, dict):
        cell.metadata["nbgrader"] = nbformat.from_dict(mark)
    if kind == "code" and isinstance(raw.get("outputs"), list):
        cell.outputs = [nbformat.from_dict(output) for output in raw["outputs"] if _sound_output(output)]
    return cell


def _sound_output(output) -> bool:
    try:
        nbformat.validate(output, ref="output", version=4)
    except Exception:
        return False
    return True


def _make_ids_unique(cells: Iterable[NotebookNode]) -> None:
    seen: set[str] = set()
    for cell in cells:
        name, n = cell.id, 1
        while cell.id in seen:
            n += 1
            cell.id = f"{name[:56]}-{n}"
        seen.add(cell.id)


@dataclass
class _Match:
    """Which submitted cell stands for which released one."""

    chosen: dict[int, int] = field(default_factory=dict)  # released index -> submitted index
    spare: dict[int, int] = field(default_factory=dict)  # submitted copy that was not chosen -> released index
    notes: list[str] = field(default_factory=list)


def repair(
    released: NotebookNode, submitted: NotebookNode, *, base: NotebookNode | None = None
) -> tuple[NotebookNode, list[str]]:
    """The released notebook with the learner's work in it.

    Kept of the submission: the source of each solution cell, found by its grade_id, else by its cell id, else by the
    names that it defines; edited try-it cells; and the learner's own cells, each behind the released cell that it
    followed. Everything else - course text, check cells, all nbgrader metadata - is as released.

    Parameters
    ----------
    released : NotebookNode
        The notebook as handed out now.
    submitted : NotebookNode
        The learner's notebook, as `read_notebook` returns it.
    base : NotebookNode, optional
        The release that the learner's copy was made from, if that is an older one; tells the learner's edits from ours.

    Returns
    -------
    notebook, notes
        ``notes`` names each repair; empty for a notebook in which only answers were filled in.
    """
    match = _match(released.cells, submitted.cells)
    originals = {cell.id: cell.source for cell in (base or released).cells}
    anchors = {index: position for position, index in match.chosen.items()}
    cells: list[list[NotebookNode]] = [[] for _ in range(len(released.cells) + 1)]
    for position, cell in enumerate(released.cells):
        index = match.chosen.get(position)
        found = submitted.cells[index] if index is not None else None
        cells[position + 1].append(_restored(cell, found, originals.get(cell.id, cell.source), match.notes))
    last = 0
    for index, cell in enumerate(submitted.cells):
        if index in anchors:
            last = anchors[index] + 1
        elif not _repeats(cell, originals.values()):
            copy_of = match.spare.get(index)
            if copy_of is None:
                cells[last].append(_own_cell(cell))
            else:  # runs before the chosen one, so that the chosen one's definitions hold
                cells[copy_of].append(_own_cell(cell, name=f"copy-{cell.id}"[:64]))
    notebook = nbformat.from_dict({**released, "cells": [cell for group in cells for cell in group]})
    _make_ids_unique(notebook.cells)
    return notebook, match.notes


def _match(released: list[NotebookNode], submitted: list[NotebookNode]) -> _Match:
    match = _Match()
    by_name = {grade_id(cell): position for position, cell in enumerate(released) if grade_id(cell)}
    by_id = {cell.id: position for position, cell in enumerate(released)}
    candidates: dict[int, list[int]] = {}
    for index, cell in enumerate(submitted):
        position = by_name.get(grade_id(cell), by_id.get(cell.id))
        if position is None and grade_id(cell):
            match.notes.append(f"cell {index + 1} has an unknown grade_id and is treated as the learner's own cell")
        if position is not None:
            candidates.setdefault(position, []).append(index)
    for position, cell in enumerate(released):
        found = candidates.get(position) or _by_content(cell, submitted, {i for c in candidates.values() for i in c})
        if not found:
            continue
        candidates[position] = found
        match.chosen[position] = _choose(cell, [(index, submitted[index]) for index in found], match.notes)
        match.spare |= {index: position for index in found if index != match.chosen[position]}
    return match


def _by_content(cell: NotebookNode, submitted: list[NotebookNode], taken: set[int]) -> list[int]:
    """Cells that lost their name but carry the released cell's text, or define what its solution has to define."""
    wanted = _defined_names(cell.source) if is_solution(cell) and cell.cell_type == "code" else set()
    free = [(index, other) for index, other in enumerate(submitted) if index not in taken]
    same = [index for index, other in free if other.source.strip() == cell.source.strip()]
    return same[:1] or [index for index, other in free if wanted and wanted <= _defined_names(other.source)]


def _defined_names(source: str) -> set[str]:
    """Names of the top-level functions, classes and variables, also in code that does not parse."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(re.findall(r"^(?:def|class)\s+(\w+)", source, re.MULTILINE))
    names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def _choose(cell: NotebookNode, found: list[tuple[int, NotebookNode]], notes: list[str]) -> int:
    """Among copies of one cell: the last that differs from the released text, else the first."""
    changed = [index for index, other in found if other.source.strip() != cell.source.strip()]
    index = changed[-1] if changed and is_solution(cell) else found[0][0]
    if len(found) > 1:
        notes.append(f"{_name(cell)} stood {len(found)} times; cell {index + 1} was taken")
    return index


def _name(cell: NotebookNode) -> str:
    return grade_id(cell) or f"a given {cell.cell_type} cell"


def _restored(cell: NotebookNode, found: NotebookNode | None, original: str, notes: list[str]) -> NotebookNode:
    """The released cell with what the learner may change in it taken from ``found``."""
    restored = nbformat.from_dict(cell)
    if found is None:
        if grade_id(cell):
            notes.append(f"{_name(cell)} was missing and is put back{' empty' if is_solution(cell) else ''}")
        return restored
    theirs = is_solution(cell) or (cell.cell_type == "code" and not grade_id(cell))
    if theirs and found.source != original:
        restored.source = found.source
    if grade_id(cell):
        _note_changes(cell, found, original, theirs, notes)
    if restored.source == found.source and cell.cell_type == found.cell_type == "code":
        restored.outputs = found.outputs
    return restored


def _note_changes(cell: NotebookNode, found: NotebookNode, original: str, theirs: bool, notes: list[str]) -> None:
    if found.cell_type != cell.cell_type:
        notes.append(f"{_name(cell)} had become a {found.cell_type} cell")
    if not theirs and found.source.strip() not in (original.strip(), cell.source.strip()):
        notes.append(f"the given cell {_name(cell)} had been edited; the released one is used")
    mark, expected = found.metadata.get("nbgrader", {}), cell.metadata["nbgrader"]
    kept = ("grade_id", "grade", "solution", "locked", "points", "task", "schema_version")
    if not mark:
        notes.append(f"{_name(cell)} had lost its nbgrader metadata")
    elif any(mark.get(key) != expected.get(key) for key in kept):
        notes.append(f"the nbgrader metadata of {_name(cell)} had been changed")


def _repeats(cell: NotebookNode, originals: Iterable[str]) -> bool:
    """Whether a cell only repeats given text, so that nothing of the learner's is in it."""
    return cell.source.strip() in {"", *(text.strip() for text in originals)}


def _own_cell(cell: NotebookNode, *, name: str = "") -> NotebookNode:
    own = nbformat.from_dict(cell)
    own.id = name or own.id
    own.metadata.pop("nbgrader", None)
    return own
