"""Take in what was collected: a folder or zip of notebooks, in nbgrader's layout or flat, with whatever else is in it.

Nothing is unpacked or copied but notebooks and time stamps, under names made here: a path in a zip that climbs out of
it, a link, a bomb or a file of the operating system changes nothing. What is not taken is named in the report.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
import unicodedata
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath

from nbgrader.utils import parse_utc

from autograder import transcripts
from autograder.course import Course
from autograder.files import write_bytes, write_json
from servelab.build import notebook_text
from servelab.errors import CourseError
from servelab.notebooks import grade_id
from servelab.repair import MAX_BYTES, read_notebook

MAX_ENTRIES = 50_000
MAX_TOTAL = 4 << 30
JUNK = {".ds_store", "__macosx", "thumbs.db", "desktop.ini", ".ipynb_checkpoints", "__pycache__", ".git"}


@dataclass(frozen=True)
class Found:
    """A file that was handed in: its path in the collection, its age, and how to read it; no reader for a link."""

    path: PurePosixPath
    modified: float
    size: int
    read: Callable[[], bytes] | None


@dataclass
class Taken:
    """What was taken in: (student, unit) pairs, and remarks on files, by the student concerned ('' for none)."""

    submissions: list[tuple[str, str]] = field(default_factory=list)
    remarks: list[tuple[str, str]] = field(default_factory=list)


def take_in(course: Course, source: Path) -> Taken:
    """Copy all submissions of a folder or zip to ``autograder/submitted``. Raises `CourseError` if there is none."""
    with contextlib.ExitStack() as stack:
        return _take(course, source, list(_list(source, stack)))


def _take(course: Course, source: Path, files: list[Found]) -> Taken:
    taken = Taken()
    wrapper = _wrapper([file.path for file in files], zipped=not source.is_dir())
    choices: dict[tuple[str, str], list[Found]] = {}
    for file in files:
        parts = file.path.parts[wrapper:]
        if any(part.lower() in JUNK or part.startswith("._") for part in parts):
            continue
        if file.path.suffix != ".ipynb":
            if file.path.name != "timestamp.txt":
                taken.remarks.append(
                    (_student(parts) if len(parts) > 1 else "", f"{file.path}: not a notebook, ignored")
                )
            continue
        _place(course, file, parts, choices, taken)
    stamps = {file.path.parent: file for file in files if file.path.name == "timestamp.txt" and file.read}
    for (student, unit), found in sorted(choices.items()):
        _store(course, student, unit, sorted(found, key=lambda file: file.modified), stamps, taken)
    if not taken.submissions:
        mend = "Expected STUDENT/UNIT/UNIT.ipynb or STUDENT.ipynb in a folder or zip."
        raise CourseError("no submission of a unit of this course is in it", where=str(source), mend=mend)
    return taken


def _list(source: Path, stack: contextlib.ExitStack) -> Iterator[Found]:
    if source.is_dir():
        entries = _list_folder(source)
    elif zipfile.is_zipfile(source):
        entries = _list_zip(source, stack)
    else:
        mend = "Give a folder, or a .zip that holds one." if source.exists() else "Check the path."
        raise CourseError("is neither a folder nor a zip file", where=str(source), mend=mend)
    total = 0
    for number, file in enumerate(entries):
        total += file.size
        if number >= MAX_ENTRIES or total > MAX_TOTAL:
            problem = f"holds more than {MAX_ENTRIES} files or {MAX_TOTAL >> 30} GiB"
            raise CourseError(problem, where=str(source), mend="Collect the notebooks alone.")
        yield file


def _list_folder(source: Path) -> Iterator[Found]:
    for folder, folders, names in os.walk(source):  # does not follow links
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in sorted(names + links):
            path = Path(folder, name)
            status = path.lstat()
            regular = stat.S_ISREG(status.st_mode)
            relative = PurePosixPath(path.relative_to(source).as_posix())
            reader = (lambda path=path: _read_bounded(path)) if regular else None
            yield Found(relative, status.st_mtime, status.st_size if regular else 0, reader)


def _read_bounded(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
        return file.read(MAX_BYTES + 1)


def _list_zip(source: Path, stack: contextlib.ExitStack) -> Iterator[Found]:
    try:
        archive = stack.enter_context(zipfile.ZipFile(source))
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise CourseError(f"the zip file is damaged: {error}", where=str(source)) from None
    for info in archive.infolist():
        path = PurePosixPath(info.filename.replace("\\", "/"))
        if info.is_dir() or path.is_absolute() or ".." in path.parts or not path.parts:
            continue
        kind = stat.S_IFMT(info.external_attr >> 16)
        reader = (lambda info=info: _read_entry(archive, info)) if kind in (0, stat.S_IFREG) else None
        size = min(info.file_size, MAX_BYTES + 1) if path.suffix == ".ipynb" else 0
        yield Found(path, _zip_time(info), size, reader)


def _read_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    try:
        with archive.open(info) as file:
            return file.read(MAX_BYTES + 1)
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, OSError, ValueError):
        return b""  # damaged, encrypted or packed in a way that is not read here: treated as an unreadable notebook


def _zip_time(info: zipfile.ZipInfo) -> float:
    try:
        return datetime(*info.date_time).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def _wrapper(paths: list[PurePosixPath], *, zipped: bool) -> int:
    """1 if everything lies in one outer folder that is not a student, as in the zip of a folder; else 0."""
    notebooks = [path for path in paths if path.suffix == ".ipynb" and path.parts[0].lower() not in JUNK]
    if not notebooks or len({path.parts[0] for path in notebooks}) != 1:
        return 0
    direct = sum(len(path.parts) == 2 for path in notebooks)
    return int(all(len(path.parts) == 4 for path in notebooks) or (zipped and direct > 1))


def _place(course: Course, file: Found, parts: tuple[str, ...], choices: dict, taken: Taken) -> None:
    """Decide whose notebook of which unit a file is."""
    if len(parts) == 1:  # ALICE_03_paged_kv.ipynb is ALICE's
        parts = (next((name for slug in course.units if (name := _without(parts[0], slug))), parts[0]),)
    student = _student(parts)
    unit = next((part for part in (*parts[1:-1], Path(parts[-1]).stem) if part in course.units), "")
    unit = unit or next((slug for slug in course.units if _without(file.path.name, slug)), "")
    unit = unit or _unit_by_content(course, file, taken, student)
    if unit:
        choices.setdefault((student, unit), []).append(file)
    else:
        taken.remarks.append((student, f"{file.path}: not a notebook of this course, ignored"))


def _without(name: str, slug: str) -> str:
    """A flat file's name without the unit's behind it, or an empty string if it does not end so."""
    stem = name.removesuffix(".ipynb")
    return f"{rest}.ipynb" if stem.endswith(slug) and (rest := stem.removesuffix(slug).rstrip("_- ")) else ""


def _student(parts: tuple[str, ...]) -> str:
    """The student's name as nbgrader can take it: letters, digits and ``_ . @ -`` of any script."""
    raw = unicodedata.normalize("NFC", parts[0] if len(parts) > 1 else Path(parts[0]).stem)
    clean = re.sub(r"[^\w.@-]+", "_", raw).lstrip("._-@")[:80]
    if clean != raw:  # two names that clean to the same one must not become one student
        clean = f"{clean or 'student'}~{hashlib.sha256(raw.encode('utf-8', 'replace')).hexdigest()[:6]}".replace(
            "~", "-"
        )
    return clean


def _unit_by_content(course: Course, file: Found, taken: Taken, student: str) -> str:
    """The unit whose cells a notebook has most of: by grade_id, else by cell id, else by defined names."""
    if file.read is None:
        only = list(course.units)
        return only[0] if len(only) == 1 else ""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "notebook.ipynb")
        path.write_bytes(file.read())
        try:
            nb, _ = read_notebook(path)
        except CourseError:
            return next(iter(course.units)) if len(course.units) == 1 else ""
    marks = {grade_id(cell) for cell in nb.cells} - {""} | {cell.id for cell in nb.cells}
    sources = {cell.source.strip() for cell in nb.cells} - {""}
    scores = {}
    for slug in course.units:
        cells = course.release(slug).cells
        names = {grade_id(cell) for cell in cells} - {""} | {cell.id for cell in cells}
        texts = {cell.source.strip() for cell in cells}
        defined = {name for cell in cells for name in re.findall(r"^(?:class|def) (\w+)", cell.source, re.M)}
        written = sum(bool(re.search(rf"^(class|def) {name}\b", "\n".join(sources), re.M)) for name in defined)
        scores[slug] = 2 * len(marks & names) + len(sources & texts) + written
    best = max(scores, key=lambda slug: scores[slug], default="")
    return best if best and scores[best] > 0 else ""


def _store(course: Course, student: str, unit: str, found: list[Found], stamps: dict, taken: Taken) -> None:
    """Write one submission, unless it is there already. What was there before is kept in ``autograder/earlier``."""
    file, notes = found[-1], []
    if len(found) > 1:
        others = ", ".join(str(other.path) for other in found[:-1])
        notes.append(
            f"{len(found)} files for this unit were handed in; the newest, {file.path}, was taken, not {others}"
        )
    if file.read is None:
        data = notebook_text(course.release(unit)).encode()
        notes.append("the notebook handed in is a link, not a file; graded as an empty submission")
    else:
        data = file.read()
    if len(data) > MAX_BYTES:
        data = notebook_text(course.release(unit)).encode()
        notes.append(f"the notebook is larger than {MAX_BYTES >> 20} MiB; graded as an empty submission")
    target = course.submission(student, unit)
    _replace(course, target, data)
    stamp = stamps.get(file.path.parent) if len(file.path.parts) > 1 else None
    _store_stamp(target.parent / "timestamp.txt", stamp, notes)
    write_json(transcripts.intake_path(course, unit, student), notes)
    taken.submissions.append((student, unit))
    taken.remarks += [(student, f"{unit}: {note}") for note in notes]


def _replace(course: Course, target: Path, data: bytes) -> None:
    if target.is_symlink():
        target.unlink()
    if target.exists():
        before = target.read_bytes()
        if before == data:
            return
        name = f"{target.stem}.{hashlib.sha256(before).hexdigest()[:8]}.ipynb"
        write_bytes(course.state / "earlier" / target.parent.relative_to(course.state / "submitted") / name, before)
    write_bytes(target, data)


def _store_stamp(target: Path, stamp: Found | None, notes: list[str]) -> None:
    """The time of submission, if one was handed in that nbgrader can read."""
    if stamp is None or stamp.read is None:
        target.unlink(missing_ok=True)
        return
    text = stamp.read()[:100].decode("utf-8", "replace").strip()
    try:
        parse_utc(text)
        write_bytes(target, text.encode())
    except (ValueError, OverflowError, TypeError):
        target.unlink(missing_ok=True)
        notes.append(f"timestamp.txt does not hold a time ({json.dumps(text[:40])}) and is ignored")
