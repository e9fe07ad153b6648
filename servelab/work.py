"""The learner's folder: copy the units to ``work/``, upgrade them with answers kept, repair them, run their checks."""

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat

from servelab.build import notebook_text
from servelab.checking import VERDICT_MIME, kept_result, source_hash
from servelab.errors import CourseError
from servelab.notebooks import grade_id, is_check, is_solution, points
from servelab.paths import Unit, find_unit, units, work_dir
from servelab.repair import read_notebook, repair

CELL_TIMEOUT = 300  # seconds; an explore cell on a slow laptop takes a few
SPINS = "10000"  # rounds that a thread of torch waits awake; by default so many that one neighbour stalls them all
LARGEST = 1 << 30  # bytes; on the learner's own machine a notebook full of pictures is read too


def _state() -> Path:
    return work_dir() / ".servelab"


def _base(unit: Unit) -> Path:
    """The release that the learner's copy was made from."""
    return _state() / "base" / f"{unit.slug}.ipynb"


def _write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    scratch = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8", newline="\n")
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise CourseError(
            f"cannot be written: {error.strerror}", where=str(path), mend="Free space or mend its permissions."
        ) from None


def _back_up(unit: Unit) -> Path:
    """Copy the learner's notebook aside; nothing is replaced without this."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = _state() / "backups"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        candidates = (folder / f"{unit.slug}-{stamp}{f'-{n}' * (n > 0)}.ipynb" for n in range(1000))
        target = next(path for path in candidates if not path.exists())
        shutil.copyfile(unit.work, target)
    except OSError as error:
        raise CourseError(
            f"cannot be backed up, so nothing was changed: {error.strerror}", where=str(unit.work)
        ) from None
    return target


def released(unit: Unit) -> nbformat.NotebookNode:
    """The unit's built notebook."""
    if not unit.release.exists():
        raise CourseError("this unit is not built", where=str(unit.release), mend="Run: servelab build")
    try:
        return nbformat.read(unit.release, as_version=4)
    except (OSError, ValueError):
        mend = "Get this file again from the course."
        raise CourseError("the unit's notebook cannot be read", where=str(unit.release), mend=mend) from None


def bring_up_to_date() -> list[str]:
    """Copy every unit that is not in ``work/`` yet and merge newer releases into the others; say what was done."""
    return [line for unit in units() if unit.release.exists() and (line := _bring_up_to_date(unit))]


def _bring_up_to_date(unit: Unit) -> str:
    text = unit.release.read_bytes()
    if not unit.work.exists():
        _start_afresh(unit)
        return f"new: {unit.slug}"
    if _base(unit).exists() and _base(unit).read_bytes() == text:
        return ""
    try:
        submitted, _ = read_notebook(unit.work, max_bytes=LARGEST)
    except CourseError as error:  # one broken notebook does not keep the learner from the others
        return f"not upgraded: {unit.slug} ({error.problem}); mend it with: servelab restore {unit.number}"
    backup = _back_up(unit)
    merged, _ = repair(released(unit), submitted, base=_base_notebook(unit))
    _write(unit.work, notebook_text(merged))
    _write(_base(unit), text.decode("utf-8"))
    return f"upgraded: {unit.slug}, answers kept (the old one is {backup})"


def _start_afresh(unit: Unit) -> None:
    text = notebook_text(released(unit))
    _write(unit.work, text)
    _write(_base(unit), text)


def _base_notebook(unit: Unit) -> nbformat.NotebookNode | None:
    """The release that the learner's copy was made from; None if that file is missing or broken."""
    try:
        return read_notebook(_base(unit))[0]
    except CourseError:
        return None


def restore(unit: Unit) -> list[str]:
    """Repair the learner's notebook, answers kept; returns what was done, the backup's place last."""
    release = released(unit)
    if not unit.work.exists():
        _start_afresh(unit)
        return [f"{unit.work} was missing: a new copy is there"]
    backup = _back_up(unit)
    try:
        submitted, notes = read_notebook(unit.work, max_bytes=LARGEST)
    except CourseError as error:
        submitted, notes = nbformat.v4.new_notebook(), [f"nothing could be read in it ({error.problem})"]
    repaired, more = repair(release, submitted, base=_base_notebook(unit))
    _write(unit.work, notebook_text(repaired))
    _write(_base(unit), notebook_text(release))
    return [*notes, *more, f"the notebook as it was: {backup}"]


def own_copy(unit: Unit) -> nbformat.NotebookNode | None:
    """The learner's notebook, repaired but not written; None if there is none that can be read."""
    try:
        return repair(released(unit), read_notebook(unit.work, max_bytes=LARGEST)[0], base=_base_notebook(unit))[0]
    except CourseError:
        return None


@dataclass(frozen=True)
class Result:
    """Where one exercise stands: ``fraction`` of its points, and whether its cell was edited since it was checked."""

    exercise: str
    points: float
    fraction: float | None = None
    edited_since: bool = False

    @property
    def earned(self) -> float:
        return round((self.fraction or 0.0) * self.points, 2)


def progress(unit: Unit) -> list[Result]:
    """Where each judged exercise of the unit stands, in the notebook's order, from the results that checks left."""
    sources = {}
    with contextlib.suppress(CourseError):  # a missing or broken notebook; what its checks showed is still known
        cells = read_notebook(unit.work, max_bytes=LARGEST)[0].cells
        sources = {grade_id(cell): cell.source for cell in cells if is_solution(cell)}
    results = []
    for name, value in points(unit).items():
        if not name.endswith("-check"):
            continue
        solution = name.removesuffix("-check")
        exercise = f"{unit.name}.{solution.replace('-', '_')}"
        kept = kept_result(exercise)
        edited = bool(kept.get("source")) and kept["source"] != source_hash(sources.get(solution, ""))
        results.append(Result(exercise, value, kept.get("fraction"), edited))
    return results


def run_checks(unit: Unit) -> list[dict]:
    """Run the learner's notebook in a kernel and return what its check cells showed, in order.

    Returns
    -------
    list of dict
        ``{"cell", "exercise", "passed", "text"}``; a check cell that showed no verdict has ``exercise`` None and the
        error's text.
    """
    if not unit.work.exists():
        raise CourseError("there is no such notebook yet", where=str(unit.work), mend="Run: python3 course.py learn")
    notebook, _ = read_notebook(unit.work, max_bytes=LARGEST)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []  # a verdict of an earlier run must not stand for a cell that is not reached
    _execute(notebook, unit)
    broken = {grade_id(cell): error for cell in notebook.cells if is_solution(cell) and (error := _error(cell))}
    return [_shown(index, cell, broken) for index, cell in enumerate(notebook.cells, 1) if is_check(cell)]


def _error(cell: dict) -> str:
    """The error that the cell ended in, or an empty string."""
    errors = [output for output in cell.get("outputs", []) if output.get("output_type") == "error"]
    return f"{errors[0].get('ename')}: {errors[0].get('evalue')}" if errors else ""


def _execute(notebook: nbformat.NotebookNode, unit: Unit) -> None:
    """Run all cells in place, with a progress bar; say what kept the rest from running."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    started: list[nbformat.NotebookNode] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"running {unit.slug}", total=len(notebook.cells))
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT,
            allow_errors=True,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(unit.work.parent)}},
            on_cell_start=lambda cell, cell_index: started.append(cell),
            on_cell_complete=lambda cell, cell_index: bar.update(task, completed=cell_index + 1),
        )
        try:
            client.execute(env={**os.environ, "SERVELAB_UNATTENDED": "1"})
        except CellTimeoutError:
            print(
                f"{_last(started)} ran for more than {CELL_TIMEOUT} s; what is below it did not run.", file=sys.stderr
            )
        except DeadKernelError:
            print(
                f"The kernel died in {_last(started)} (out of memory?); what is below it did not run.", file=sys.stderr
            )
        except (KeyboardInterrupt, AssertionError) as stop:  # nbclient turns Ctrl-C into either
            if isinstance(stop, KeyboardInterrupt) or isinstance(stop.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise


def _last(started: list[nbformat.NotebookNode]) -> str:
    """The cell that was running, as a person would look for it."""
    if not started:
        return "the first cell"
    first_line = next((line for line in started[-1].source.splitlines() if line.strip()), "")
    return f"the cell {grade_id(started[-1]) or repr(first_line[:60])}"


def _shown(index: int, cell: dict, broken: dict[str, str]) -> dict:
    """What a check cell showed; if it showed no verdict, the error of its solution cell, or else its own."""
    for output in cell.get("outputs", []):
        if VERDICT_MIME in output.get("data", {}):
            verdict = output["data"][VERDICT_MIME]
            return {
                "cell": index,
                "exercise": verdict["exercise"],
                "passed": verdict["passed"],
                "text": verdict["text"],
            }
    name, own = grade_id(cell), _error(cell)
    solution = name.removesuffix("-check")
    text = f"{name}: {own or 'did not run'}"
    if solution in broken and own.startswith("NameError"):
        text = f"{name}: the cell {solution} ended in {broken[solution]}"
    return {"cell": index, "exercise": None, "passed": False, "text": text}


def command_learn(args: argparse.Namespace) -> int:
    """Bring ``work/`` up to date and open JupyterLab on the start page."""
    for line in bring_up_to_date():
        print(line)
    start = units()[0]
    page = f"/lab/tree/{start.slug}/{start.slug}.ipynb"
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={work_dir()}", f"--LabApp.default_url={page}"]
    if args.no_browser:
        command.append("--no-browser")
    if args.port is not None:
        command.append(f"--port={args.port}")
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in args.rest:
        command.append("--allow-root")
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    print(f"Opening JupyterLab on {work_dir()} (stop it with Ctrl-C)", flush=True)
    return _run([*command, *args.rest])


def _run(command: list[str]) -> int:
    """Become the command (POSIX), or run it and pass its exit code on (Windows)."""
    if os.name == "posix":
        os.execv(command[0], command)
    import subprocess

    return subprocess.call(command)


def command_check(args: argparse.Namespace) -> int:
    """Run one unit's checks, or every unit's."""
    chosen = [find_unit(args.unit)] if args.unit else [unit for unit in units() if unit.work.exists()]
    if not chosen:
        raise CourseError("there is no notebook yet", where=str(work_dir()), mend="Run: python3 course.py learn")
    results = [{"unit": unit.slug, **shown} for unit in chosen for shown in run_checks(unit)]
    if args.json:
        print(json.dumps(results, indent=1))
    else:
        for shown in results:
            print(f"{shown['text']}\n")
        print(f"{sum(shown['passed'] for shown in results)} of {len(results)} checks passed")
    return 0 if results and all(shown["passed"] for shown in results) else 1


def command_progress(args: argparse.Namespace) -> int:
    """Show where every unit stands."""
    table = {unit.slug: progress(unit) for unit in units()}
    if args.json:
        records = {slug: [vars(result) | {"earned": result.earned} for result in rows] for slug, rows in table.items()}
        print(json.dumps(records, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    view = Table("unit", "exercise", "points", "state")
    for slug, rows in table.items():
        earned, total = sum(row.earned for row in rows), sum(row.points for row in rows)
        by_hand = sum(points(find_unit(slug)).values()) - total
        view.add_row(slug, "", f"{earned:g} / {total:g}", f"and {by_hand:g} by hand" if by_hand else "", style="bold")
        for row in rows:
            state = "not checked yet" if row.fraction is None else "passed" if row.fraction == 1 else "not yet right"
            state += ", edited since" if row.edited_since else ""
            view.add_row("", row.exercise, f"{row.earned:g} / {row.points:g}", state)
    Console().print(view)
    return 0


def command_restore(args: argparse.Namespace) -> int:
    """Repair one notebook of the learner's."""
    for line in restore(find_unit(args.unit)):
        print(line)
    return 0
