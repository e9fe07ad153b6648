"""Read a notebook that may be damaged, and put a submission back into the shape in which it was released.

One function serves `restore`, `learn`'s upgrades and `grade`: take the released notebook, put in the learner's solution
sources and their own cells in place, and say what was repaired.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from servelab import plain
from servelab.errors import CourseError
from servelab.notebooks import grade_id, is_solution

MAX_BYTES = 32 << 20
MAX_CELLS = 1000
MAX_BREAKS = 100  # places in a broken file behind which reading goes on
CELL_TYPES = ("code", "markdown", "raw")
MARK_KEYS = ("grade_id", "grade", "solution", "locked", "points", "task", "schema_version")
CELL_START = re.compile(r'\{\s*"(?:attachments|cell_type|execution_count|id|metadata|outputs|source)"\s*:')
SIDES = ("ours", "theirs")
CONFLICT = re.compile(r"^<{7} ", re.MULTILINE)
CONFLICT_PARTS = {"<" * 7: "ours", "|" * 7: "base", "=" * 7: "theirs", ">" * 7: ""}


def read_notebook(path: Path, *, max_bytes: int = MAX_BYTES) -> tuple[NotebookNode, list[str]]:
    """Read a notebook as far as it can be read.

    Returns the notebook (format 4.5, outputs dropped where they are not valid) and notes on what had to be mended.
    Broken JSON is read around the breaks, and of a merge that was left half done both sides are kept.

    Raises
    ------
    CourseError
        If the file is missing, is no plain file, is too large, or holds no readable cell.
    """
    data, notes = _parse(_read_text(path, max_bytes))
    if data is None:
        raise CourseError("not a notebook: no cell can be read in it", where=str(path), mend="Hand in the .ipynb file.")
    cells = [cell for raw in data[:MAX_CELLS] if (cell := _sound_cell(raw)) is not None]
    if len(cells) < len(data):
        notes.append(f"{len(data) - len(cells)} of {len(data)} cells were not readable and are left out")
    _make_ids_unique(cells)
    return nbformat.v4.new_notebook(cells=cells), notes


def _read_text(path: Path, max_bytes: int) -> str:
    if path.is_symlink():
        raise CourseError("a symbolic link, not a notebook", where=str(path), mend="Hand in the file itself.")
    try:
        size = path.stat().st_size
        if not path.is_file():  # reading a pipe would wait for ever
            raise CourseError("not a file", where=str(path), mend="Hand in the .ipynb file.")
        if size > max_bytes:
            problem = f"larger than {max_bytes >> 20} MiB"
            raise CourseError(problem, where=str(path), mend="Clear its outputs and save it.")
        return path.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise CourseError(f"cannot be read: {error.strerror}", where=str(path)) from None


def _parse(text: str) -> tuple[list | None, list[str]]:
    """The raw cells, from whole JSON or from as much of it as can be read."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        if CONFLICT.search(text):
            return _both_sides(text)
        cells = _salvage(text)
        problem = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        return (cells or None), [f"the file is not valid JSON ({problem}); {len(cells)} cells could be saved"]
    if isinstance(data, dict) and isinstance(data.get("worksheets"), list):  # notebook format 3
        sheets = [sheet.get("cells") for sheet in data["worksheets"] if isinstance(sheet, dict)]
        cells = [cell for sheet in sheets if isinstance(sheet, list) for cell in sheet]
        return cells, ["an old notebook format was converted"]
    if isinstance(data, dict) and isinstance(data.get("cells"), list):
        return data["cells"], []
    return None, []


def _both_sides(text: str) -> tuple[list | None, list[str]]:
    """The cells of a file with git's conflict markers: ours, and those of theirs that say something else."""
    ours, theirs = ([cell for cell in _parse(_side(text, side))[0] or [] if isinstance(cell, dict)] for side in SIDES)
    known = {repr(cell.get("source")): position for position, cell in enumerate(ours, 1)}
    groups: list[list[dict]] = [[], *([cell] for cell in ours)]
    position, added = 0, 0
    for cell in theirs:  # before our version of the same cell: of two answers, the later one counts
        found = known.get(repr(cell.get("source")))
        if found is None:
            groups[position].append(cell)
        added, position = added + (found is None), found or position
    cells = [cell for group in groups for cell in group]
    return (cells or None), [f"the file holds an unfinished merge; {added} cells of its other side are kept too"]


def _side(text: str, side: str) -> str:
    """The text with one side of every conflict."""
    kept, part = [], ""
    for line in text.splitlines(keepends=True):
        if line[:7] in CONFLICT_PARTS and (part or line[0] == "<"):
            part = CONFLICT_PARTS[line[:7]]
        elif part in ("", side):
            kept.append(line)
    return "".join(kept)


def _salvage(text: str) -> list:
    """The cells of a broken file, one by one; behind a break, reading goes on at what looks like the next cell."""
    start = re.search(r'"cells"\s*:\s*\[', text)
    position, cells, decoder, breaks = start.end() if start else 0, [], json.JSONDecoder(), 0
    while breaks <= MAX_BREAKS and (begin := CELL_START.search(text, position)):
        try:
            cell, position = decoder.raw_decode(text, begin.start())
        except (ValueError, RecursionError):
            position, breaks = begin.end(), breaks + 1
            continue
        if isinstance(cell, dict) and "cell_type" in cell and ("source" in cell or "input" in cell):
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
    source = source.encode("utf-8", errors="replace").decode("utf-8")  # JSON can hold text that UTF-8 cannot
    cell = getattr(nbformat.v4, f"new_{kind}_cell")(source=source)
    if isinstance(raw.get("id"), str) and re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", raw["id"]):
        cell.id = raw["id"]
    mark = raw["metadata"].get("nbgrader") if isinstance(raw.get("metadata"), dict) else None
    if isinstance(mark, dict):
        kept = {key: mark[key] for key in MARK_KEYS if isinstance(mark.get(key), (str, int, float))}
        cell.metadata["nbgrader"] = nbformat.from_dict(kept)
    if kind == "code" and isinstance(raw.get("outputs"), list):
        cell.outputs = [nbformat.from_dict(output) for output in raw["outputs"] if _sound(output, "output")]
    if kind != "code" and _sound(raw.get("attachments"), "misc/attachments"):  # the pictures of a text cell
        cell.attachments = nbformat.from_dict(raw["attachments"])
    return cell


def _sound(value, kind: str) -> bool:
    """Whether an output or attachment is what nbformat defines, not too deep to copy, and JSON that can be written."""
    if not isinstance(value, dict):
        return False
    try:
        plain.require_plain(value)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8")
        nbformat.validate(value, ref=kind, version=4)
    except (ValueError, nbformat.ValidationError):
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
    followed; what was written into a text cell of the course becomes a cell of the learner's. Everything else - course
    text, check cells, all nbgrader metadata - is as released.

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
    given = {cell.source.strip() for notebook in (base or released, released) for cell in notebook.cells}
    match = _match(released.cells, submitted.cells, given)
    anchors = {index: position for position, index in match.chosen.items()}
    groups: list[list[NotebookNode]] = [[] for _ in range(len(released.cells) + 1)]
    for position, cell in enumerate(released.cells):
        index = match.chosen.get(position)
        found = submitted.cells[index] if index is not None else None
        groups[position + 1].append(_restored(cell, found, given, match.notes))
    last = 0
    for index, cell in enumerate(submitted.cells):
        last = anchors[index] + 1 if index in anchors else last
        if cell.source.strip() in given | {""} or (index in anchors and _stands(released.cells[anchors[index]], cell)):
            continue
        copy_of = match.spare.get(index)
        # a copy goes in front of the chosen one, so that the chosen one's definitions hold
        group = groups[last if copy_of is None else copy_of]
        renamed = index in anchors or copy_of is not None
        group.append(_own_cell(cell, name=f"copy-{cell.id}"[:64] if renamed else cell.id))
    notebook = nbformat.from_dict({**released, "cells": [cell for group in groups for cell in group]})
    _make_ids_unique(notebook.cells)
    return notebook, match.notes


def _stands(cell: NotebookNode, found: NotebookNode) -> bool:
    """Whether the submitted cell's text goes into the released cell, or (a check cell) is only reported."""
    return bool(grade_id(cell)) or cell.cell_type == found.cell_type == "code"


def _match(released: list[NotebookNode], submitted: list[NotebookNode], given: set[str]) -> _Match:
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
        match.chosen[position] = _choose(cell, [(index, submitted[index]) for index in found], given, match.notes)
        match.spare |= {index: position for index in found if index != match.chosen[position]}
    return match


def _by_content(cell: NotebookNode, submitted: list[NotebookNode], taken: set[int]) -> list[int]:
    """Cells that lost their name but define what the released solution defines, or carry the released cell's text."""
    wanted = _defined_names(cell.source) if is_solution(cell) and cell.cell_type == "code" else set()
    free = [(index, other) for index, other in enumerate(submitted) if index not in taken]
    if wanted:
        return [index for index, other in free if wanted <= _defined_names(other.source)]
    return [index for index, other in free if other.source.strip() == cell.source.strip()][:1]


def _defined_names(source: str) -> set[str]:
    """Names of the top-level functions, classes and variables, also in code that does not parse."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about the learner's code, e.g. its escapes
            body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = re.findall(r"^(?:(?:async )?def|class)\s+(\w+)|^(\w+)\s*(?::[^=\n]*)?=(?!=)", source, re.MULTILINE)
        return {name for names in found for name in names if name}
    names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def _choose(cell: NotebookNode, found: list[tuple[int, NotebookNode]], given: set[str], notes: list[str]) -> int:
    """Among copies of one cell: of a solution the last changed one, of anything else the first unchanged one."""
    changed = [index for index, other in found if other.source.strip() not in given]
    unchanged = [index for index, other in found if other.source.strip() in given]
    index = (changed[-1:] or unchanged)[0] if is_solution(cell) else (unchanged or changed)[0]
    if len(found) > 1:
        notes.append(f"{_name(cell)} stood {len(found)} times; cell {index + 1} was taken")
    return index


def _name(cell: NotebookNode) -> str:
    return grade_id(cell) or f"a given {cell.cell_type} cell"


def _restored(cell: NotebookNode, found: NotebookNode | None, given: set[str], notes: list[str]) -> NotebookNode:
    """The released cell with what the learner may change in it taken from ``found``."""
    restored = nbformat.from_dict(cell)
    if found is None:
        if grade_id(cell):
            notes.append(f"{_name(cell)} was missing and is put back{' empty' if is_solution(cell) else ''}")
        return restored
    theirs = is_solution(cell) or (not grade_id(cell) and _stands(cell, found))
    if theirs and found.source.strip() not in given:
        restored.source = found.source
        if cell.cell_type != "code" and "attachments" in found:
            restored.attachments = found.attachments
    if grade_id(cell):
        edited = not theirs and found.source.strip() not in given
        _note_changes(cell, found, edited, notes)
    if restored.source == found.source and cell.cell_type == found.cell_type == "code":
        restored.outputs = found.outputs
    return restored


def _note_changes(cell: NotebookNode, found: NotebookNode, edited: bool, notes: list[str]) -> None:
    if found.cell_type != cell.cell_type:
        notes.append(f"{_name(cell)} had become a {found.cell_type} cell")
    if edited:
        notes.append(f"the given cell {_name(cell)} had been edited; the released one is used")
    mark, expected = found.metadata.get("nbgrader", {}), cell.metadata["nbgrader"]
    if not mark:
        notes.append(f"{_name(cell)} had lost its nbgrader metadata")
    elif any(mark.get(key) != expected.get(key) for key in MARK_KEYS):
        notes.append(f"the nbgrader metadata of {_name(cell)} had been changed")


def _own_cell(cell: NotebookNode, *, name: str) -> NotebookNode:
    own = nbformat.from_dict(cell)
    own.id = name
    own.metadata.pop("nbgrader", None)
    return own
