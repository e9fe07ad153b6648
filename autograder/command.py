"""``servelab grade``: from collected notebooks to gradebook, feedback, grades.csv and a report."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from servelab.errors import CourseError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("submissions", type=Path, metavar="DIR", help="folder or zip of the collected notebooks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="submissions at a time")
    parser.add_argument("--db", default="", metavar="URL", help="the gradebook, e.g. sqlite:////path/gradebook.db")
    parser.add_argument("--no-sandbox", action="store_true", help="run submissions as yourself; marks every report")
    parser.add_argument("--json", action="store_true", help="print a summary that programs can read")


def run(args: argparse.Namespace) -> int:
    """Grade; returns 0 if every submission was graded, 1 if one could not be."""
    from autograder import gradebook, grading, intake, report, secret, trial
    from autograder.course import Course

    if args.jobs < 1:
        raise CourseError(f"--jobs {args.jobs} is not a number of processes", mend="Give 1 or more.")
    course = Course(db_url=args.db, sandbox=not args.no_sandbox)
    if course.sandbox:
        trial.require_sandbox(course)
    secret.seed(course)
    taken = intake.take_in(course, args.submissions)
    for unit in sorted({unit for _, unit in taken.submissions}):
        gradebook.set_up(course, unit)
        secret.prepare(course, unit)
    results = []
    with _Progress(len(taken.submissions), quiet=args.json) as advance:
        for result in grading.grade_all(course, taken.submissions, args.jobs):
            results.append(result)
            advance(result)
    summary = report.write_all(course, taken, results)
    failed = [result for result in results if result.problem]
    if args.json:
        print(json.dumps({**summary, "failed": [asdict(result) for result in failed]}, ensure_ascii=False))
    else:
        _tell(course, summary, failed)
    return 1 if failed else 0


class _Progress:
    """A progress bar with the time left, on stderr; nothing when ``quiet``."""

    def __init__(self, total: int, *, quiet: bool):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(
            *columns, TextColumn("left:"), TimeRemainingColumn(), console=Console(stderr=True), disable=quiet
        )
        self.task = self.bar.add_task("grading", total=total)

    def __enter__(self):
        self.bar.start()
        return self._advance

    def _advance(self, result) -> None:
        if result.problem:
            self.bar.console.print(f"{result.student}, {result.unit}: not graded: {result.problem}", markup=False)
        self.bar.advance(self.task)

    def __exit__(self, *_) -> None:
        self.bar.stop()


def _tell(course, summary: dict, failed: list) -> None:
    if not course.sandbox:
        print("NOT SANDBOXED: submissions ran as you, with your files and network. The report says so.")
    for slug, unit in summary["units"].items():
        print(f"{slug}: {unit['submissions']} submissions, mean {unit['mean']:.1f} of {unit['max']:g} points")
        if unit["waiting"]:
            print(f"  waiting for a person: {unit['waiting']} free-text answers (nbgrader formgrader)")
    if failed:
        print(f"{len(failed)} submissions could not be graded; the report says why.")
    for path in summary["files"].values():
        print(path)
