"""``servelab build``: ``solutions/NN_unit.py`` -> ``notebooks/NN_unit/NN_unit.ipynb`` and ``data/expected/``.

The stripping is nbgrader's own ``generate_assignment``, run in a temporary root because it deletes its target first.
The same source gives the same bytes on every run and platform: cell ids come from grade_ids, outputs are empty, and
public transcripts are rewritten only when they are no longer close to the reference's (the last bits of a float differ
between processors).
"""

import argparse
import hashlib
import logging
import re
import tempfile
from importlib import import_module
from pathlib import Path
from random import Random

import nbformat
from nbformat import NotebookNode

from servelab import exercise as exercises
from servelab import plain
from servelab.errors import CourseError
from servelab.exercise import PUBLIC_SEED, Exercise
from servelab.paths import DATA, ROOT, Unit, units

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"}
MARK = {"grade": False, "solution": False, "locked": False, "task": False, "schema_version": 3}
SOURCE = ROOT / "autograder" / "source"  # the instructor's notebooks, solutions included; git-ignored
FLOAT_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if anything built is stale")


def run(args: argparse.Namespace) -> int:
    """Build every unit, or say what is stale."""
    stale = [path for unit in units() for path in build_unit(unit, write=not args.check)]
    for path in stale:
        print(f"{'stale' if args.check else 'written'}: {path.relative_to(ROOT)}")
    if not stale:
        print("Everything built is up to date.")
    return 1 if stale and args.check else 0


def build_unit(unit: Unit, *, write: bool = True) -> list[Path]:
    """Build one unit; return the files that changed (or, without ``write``, would change)."""
    source = source_notebook(unit.solution)
    outputs = {unit.release: notebook_text(release_notebook(unit, source))}
    outputs |= dict(expected_file(exercises.find(name)) for name in exercises.names(unit.name))
    changed = [path for path, text in outputs.items() if _read(path) != text]
    leftovers = [path for path in sorted((DATA / "expected" / unit.name).glob("*.json")) if path not in outputs]
    if write:
        for path in changed:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(outputs[path], encoding="utf-8", newline="\n")
        for path in leftovers:
            path.unlink()
        instructors = SOURCE / unit.slug / f"{unit.slug}.ipynb"
        instructors.parent.mkdir(parents=True, exist_ok=True)
        instructors.write_text(notebook_text(source), encoding="utf-8", newline="\n")
    return changed + leftovers


def _read(path: Path) -> str | None:
    return path.read_bytes().decode("utf-8") if path.exists() else None


def notebook_text(notebook: NotebookNode) -> str:
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n"


def source_notebook(path: Path) -> NotebookNode:
    """Read a py:percent source as a notebook with stable cell ids and complete nbgrader metadata."""
    import jupytext

    if not path.exists():
        raise CourseError("is not part of this copy of the course", where=str(path), mend="Use a full copy.")
    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": LANGUAGE})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: set[str] = set()
    for cell in notebook.cells:
        cell.metadata.pop("lines_to_next_cell", None)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if "nbgrader" in cell.metadata:
            cell.metadata["nbgrader"] = nbformat.from_dict(MARK | cell.metadata["nbgrader"])
        cell.id = _cell_id(cell, seen, path)
        seen.add(cell.id)
    nbformat.validate(notebook)
    return notebook


def _cell_id(cell: NotebookNode, seen: set[str], path: Path) -> str:
    """The grade_id, or a name from the cell's own text, so that an edit elsewhere changes no other id."""
    if "nbgrader" in cell.metadata:
        name = cell.metadata["nbgrader"].get("grade_id", "")
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) or name in seen:
            raise CourseError(f"grade_id {name!r} is not kebab-case or not unique", where=str(path))
        return name
    digest = hashlib.sha256(cell.source.encode()).hexdigest()[:10]
    return next(name for n in range(1000) if (name := f"{cell.cell_type}-{digest}" + f"-{n}" * (n > 0)) not in seen)


def release_notebook(unit: Unit, source: NotebookNode) -> NotebookNode:
    """Let nbgrader make the student version, in a temporary root and without a gradebook."""
    from nbgrader.converters import GenerateAssignment
    from nbgrader.coursedir import CourseDirectory
    from traitlets.config import Config

    with tempfile.TemporaryDirectory(prefix="servelab-build-") as root:
        folder = Path(root, "source", unit.slug)
        folder.mkdir(parents=True)
        (folder / f"{unit.slug}.ipynb").write_text(notebook_text(source), encoding="utf-8", newline="\n")
        config = Config()
        config.CourseDirectory.root = root
        config.GenerateAssignment.no_database = True
        config.SaveCells.enabled = False
        config.CourseDirectory.assignment_id = unit.slug
        log = logging.getLogger("servelab.build")
        log.setLevel(logging.ERROR)
        course = CourseDirectory(config=config, log=log)
        converter = GenerateAssignment(coursedir=course, config=config, log=log)
        converter.start()
        notebook = nbformat.read(Path(root, "release", unit.slug, f"{unit.slug}.ipynb"), as_version=4)
    return notebook


def expected_file(exercise: Exercise) -> tuple[Path, str]:
    """The path and text of an exercise's public challenges with the reference's transcripts, one probe a line."""
    path = DATA / "expected" / exercise.unit / f"{exercise.name.partition('.')[2]}.json"
    reference = import_module(f"servelab.reference.{exercise.unit}")
    answers = tuple(getattr(reference, name) for name in exercise.answers)
    probes = [probe.as_plain() for probe in exercises.make_probes(exercise, Random(PUBLIC_SEED), answers)]
    text = _expected_text(exercise, probes)
    old = _read(path)
    if old is not None and old != text and _same_probes(exercise, old, probes):
        text = old
    return path, text


def _expected_text(exercise: Exercise, probes: list[dict]) -> str:
    lines = ",\n".join(plain.dumps(probe) for probe in probes)
    return f'{{"exercise":"{exercise.name}","probes":[\n{lines}\n]}}\n'


def _same_probes(exercise: Exercise, old: str, probes: list[dict]) -> bool:
    """Whether the file on disk differs from the new probes in the last bits of floats at most."""
    try:
        before = plain.loads(old)
    except plain.NotPlain:
        return False
    found = before.get("probes") if isinstance(before, dict) else None
    if not isinstance(found, list) or _expected_text(exercise, found) != old:
        return False
    return plain.close(found, probes, **FLOAT_TOLERANCE) and all(
        plain.close(b["challenge"], p["challenge"]) for b, p in zip(found, probes, strict=True)
    )
