"""Grade submissions in parallel: a process a core, each running nbgrader's own converters on one at a time."""

import io
import logging
import os
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

from autograder import transcripts
from autograder.course import GRADEBOOK, Course
from autograder.gradebook import READY

MAX_TRIES = 2  # of one submission, if the process that grades it dies


@dataclass(frozen=True)
class Graded:
    """What came of one submission; ``problem`` is empty if it was graded."""

    student: str
    unit: str
    problem: str = ""


def grade_one(course: Course, student: str, unit: str) -> Graded:
    """Autograde one submission and write its feedback. Runs in a worker; never raises."""
    from nbgrader.converters import Autograde, GenerateFeedback
    from nbgrader.coursedir import CourseDirectory

    from autograder.settings import load

    text, log = _log_to_text(f"servelab.grade.{os.getpid()}")
    config = load(course)
    config.CourseDirectory.student_id, config.CourseDirectory.assignment_id = student, unit
    try:
        for converter in (Autograde, GenerateFeedback):
            directory = CourseDirectory(config=config, log=log)
            step = converter(coursedir=directory, config=config, log=log)
            step.force = True
            step.start()
    except (Exception, SystemExit) as error:
        problem = _reason(error, text.getvalue())
        transcripts.update_record(course, unit, student, failed=problem, exercises={})
        return Graded(student, unit, problem)
    return Graded(student, unit)


def _log_to_text(name: str) -> tuple[io.StringIO, logging.Logger]:
    """A logger whose lines are kept for the report instead of being printed."""
    text, log = io.StringIO(), logging.getLogger(name)
    log.handlers, log.propagate = [logging.StreamHandler(text)], False
    log.setLevel(logging.ERROR)
    return text, log


def _reason(error: BaseException, logged: str) -> str:
    """The line that says why: the exception under nbgrader's own, which only points at the log."""
    lines = [line.strip() for line in logged.splitlines() if line.strip()]
    causes = [line for line in lines if ": " in line and line.split(":")[0].replace(".", "").isidentifier()]
    return (causes[-1] if causes else str(error) or type(error).__name__)[:400]


def grade_all(course: Course, submissions: list[tuple[str, str]], jobs: int) -> Iterator[Graded]:
    """Grade all submissions, ``jobs`` at a time; yields each as it is done. A worker that dies loses nobody's grade."""
    os.environ |= {GRADEBOOK: course.db_url, READY: "1"}  # for the workers
    waiting = dict.fromkeys(submissions, 0)
    while waiting:
        try:
            yield from _one_pool(course, waiting, jobs)
        except BrokenProcessPool:
            for submission in [s for s, tries in waiting.items() if tries >= MAX_TRIES]:
                del waiting[submission]
                yield Graded(*submission, problem="the grading process died twice on it")


def _one_pool(course: Course, waiting: dict[tuple[str, str], int], jobs: int) -> Iterator[Graded]:
    context = get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(waiting)), context, initializer=_start, initargs=(sys.path,)) as pool:
        running: dict[Future, tuple[str, str]] = {}
        queue = list(waiting)
        while queue or running:
            while queue and len(running) < jobs:  # no more than can run: who was running is known if a worker dies
                submission = queue.pop(0)
                waiting[submission] += 1
                running[pool.submit(grade_one, course, *submission)] = submission
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                del waiting[running.pop(future)]
                yield result


def _start(path: list[str]) -> None:
    """In a new worker: this process's import path, and quiet."""
    import warnings

    sys.path[:] = path
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
