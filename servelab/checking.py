"""``check``: the one function that a check cell calls.

Self-paced, it drives the learner's objects through the public challenges, judges at once, shows the verdict and raises
when a case failed. In a graded run (``$SERVELAB_CHALLENGES`` names a folder of secret challenges) it only records: the
transcript leaves as the cell's output and is judged elsewhere. Run by a stock nbgrader, it also emits its score as the
cell's result, which nbgrader takes as partial credit.
"""

import contextlib
import dis
import hashlib
import inspect
import io
import json
import linecache
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

from servelab import exercise as exercises
from servelab import plain, verdicts
from servelab.errors import CourseError
from servelab.exercise import Exercise, Probe, Verdict
from servelab.notebooks import points
from servelab.paths import DATA, find_unit, work_dir

TRANSCRIPT_MIME = "application/vnd.servelab.transcript+json"
VERDICT_MIME = "application/vnd.servelab.verdict+json"
MAX_SHOWN_OUTPUT = 2000
MAX_SECONDS = 60.0  # of computing for one challenge; the slowest right answers take a tenth of it


class TookTooLong(BaseException):
    """The learner's code was stopped; not an `Exception`, so that no driver takes it for the code's own."""


class CheckFailed(AssertionError):
    """A case failed; what and why is shown above. Carries no library traceback into the notebook."""

    def _render_traceback_(self) -> list[str]:
        return [f"CheckFailed: {self}"]


def check(name: str, *answers) -> None:
    """Check the learner's objects against an exercise and show the verdict.

    Parameters
    ----------
    name : str
        The exercise, e.g. ``"paged_kv.block_allocator"``.
    *answers
        What the exercise asks for: a class, or one or more functions.

    Raises
    ------
    CheckFailed
        If a case failed, so that nbgrader's Validate button agrees with what is shown.
    """
    exercise = exercises.find(name)
    _require_answers(exercise, answers)
    secret = os.environ.get("SERVELAB_CHALLENGES")
    if secret:
        _record_for_the_grader(exercise, answers, Path(secret))
        return
    probes = public_probes(exercise)
    recorded, printed = _drive_all(exercise, probes, answers)
    verdict = exercises.judge(exercise, probes, recorded)
    unwritten = not verdict.passed and all(_not_written(outcome) for outcome in recorded)
    if not (verdict.passed or unwritten):
        verdict = replace(verdict, note=_unproven(exercise, answers))
    failed_on = verdict.first_failure.failed_on if verdict.first_failure else None
    _show(exercise, probes, verdict, "" if failed_on is None else printed[failed_on], unwritten)
    _remember(exercise, verdict, answers)
    _emit_score(exercise, verdict)
    if unwritten:
        raise CheckFailed(f"{', '.join(exercise.own)}: not written yet")
    if not verdict.passed:
        failed = [case.spec.name for case in verdict.cases if not case.passed and case.judged]
        unjudged = f", {verdict.unjudged} not judged" if verdict.unjudged else ""
        which = f": {', '.join(failed)}" if failed else ""
        raise CheckFailed(f"{len(failed)} of {len(verdict.cases)} cases failed{unjudged}{which}")


def _require_answers(exercise: Exercise, answers: tuple) -> None:
    """Refuse the wrong number of answers, and an object where its class is asked for."""
    mend = f"check({', '.join([repr(exercise.name), *exercise.answers])})"
    if len(answers) != len(exercise.answers):
        raise CourseError(f"this check takes {len(exercise.answers)} answers", where=exercise.name, mend=mend)
    for name, answer in zip(exercise.answers, answers, strict=True):
        if name[0].isupper() and not isinstance(answer, type):
            raise CourseError(f"{name} must be the class, not an object of it", where=exercise.name, mend=mend)


def _drive_all(exercise: Exercise, probes: list[Probe], answers: tuple) -> tuple[list[dict], list[str]]:
    """The outcome of each probe, and what the learner's code printed during it.

    After one that does not end none is run any more, so that nobody waits once for each.
    """
    recorded: list[dict] = [exercises.NOT_RUN] * len(probes)
    printed = [""] * len(probes)
    for index, probe in enumerate(probes):
        try:
            with _captured() as output, _limited(MAX_SECONDS):
                recorded[index] = exercises.record(exercise, probe.challenge, answers)
                printed[index] = output()
            if exercises.never_ended(recorded[index]):
                break
        except TookTooLong as stop:
            message = f"stopped, because it had not returned after {MAX_SECONDS:.0f} s on this input"
            place = exercises.describe_error(stop).removeprefix(type(stop).__name__)
            recorded[index] = {"raised": {"type": type(stop).__name__, "message": message + place}}
            break
        except KeyboardInterrupt as stop:
            where = exercises.describe_error(stop).partition("(")[2].rstrip(")") or "somewhere in your code"
            raise CheckFailed(f"interrupted at {where}, on the input\n{exercise.show(probe.challenge)}") from None
    return recorded, printed


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in the block once this process has computed for so long in it.

    Computing time passes neither while the machine sleeps nor while others use it. No effect where Python has no such
    timer (Windows), and outside the main thread.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGPROF, stop)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, 0.5)  # again and again: a bare except must not swallow it
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def public_probes(exercise: Exercise) -> list[Probe]:
    """The exercise's public challenges with the reference's transcripts, from ``data/expected``."""
    path = DATA / "expected" / exercise.unit / f"{exercise.name.partition('.')[2]}.json"
    try:
        text = path.read_text(encoding="utf-8")
        return [Probe.from_plain(item) for item in json.loads(text)["probes"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"the public challenges cannot be read ({type(error).__name__})"
        raise CourseError(problem, where=str(path), mend="Get this file again from the course.") from None


def _record_for_the_grader(exercise: Exercise, answers: tuple, folder: Path) -> None:
    challenges = json.loads((folder / f"{exercise.name}.json").read_text(encoding="utf-8"))
    with _captured():
        recorded = exercises.record_all(exercise, challenges, answers)
    payload = {"exercise": exercise.name, "version": exercise.version, "recorded": plain.dumps(recorded)}
    _display({TRANSCRIPT_MIME: payload, "text/plain": f"{exercise.name}: recorded"})


def _not_written(outcome: dict) -> bool:
    return outcome.get("raised", {}).get("type") == "NotImplementedError"


def _show(exercise: Exercise, probes: list[Probe], verdict: Verdict, printed: str, unwritten: bool) -> None:
    if unwritten:
        text = f"{exercise.name}: {', '.join(exercise.own)} not written yet. Fill in the cell, run it, check again."
        page = verdicts.paragraph(text)
    else:
        shown = verdicts.Shown(exercise, probes, verdict, printed)
        text, page = verdicts.as_text(shown), verdicts.as_html(shown)
    summary = {
        "exercise": exercise.name,
        "fraction": verdict.fraction,
        "passed": verdict.passed,
        "written": not unwritten,
        "text": text,
    }
    _display({"text/html": page, "text/plain": text, VERDICT_MIME: summary})


def _display(bundle: dict) -> None:
    if _shell() is None:
        print(bundle["text/plain"])
        return
    from IPython.display import display

    display(bundle, raw=True)


def _shell():
    """The running IPython shell, or None (in a script, or where IPython is not installed)."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module else None


def _emit_score(exercise: Exercise, verdict: Verdict) -> None:
    """Under a stock nbgrader's autograde, leave the points as the cell's result; it reads them as partial credit."""
    if os.environ.get("NBGRADER_EXECUTION") == "autograde" and _shell() is not None:
        worth = points(find_unit(exercise.unit)).get(exercise.check_id, 0.0)
        _shell().displayhook(verdict.score(worth))


def in_work() -> bool:
    """Whether this runs on a notebook of the learner's: in a folder below ``work/``."""
    try:
        return work_dir().resolve() in Path.cwd().resolve().parents
    except OSError:  # a folder that was removed
        return False


def _remember(exercise: Exercise, verdict: Verdict, answers: tuple) -> None:
    """Write the result down for `servelab progress`, when this runs on a learner's notebook in ``work/``."""
    if not in_work():
        return
    path = _kept(exercise.name)
    result = {
        "exercise": exercise.name,
        "fraction": verdict.fraction,
        "when": int(time.time()),
        "source": _source(exercise, answers),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(result, file)
        os.replace(scratch, path)
    except OSError as error:
        print(f"The result could not be kept for `progress`: {error}")  # on stderr it would cost points in nbgrader


def kept_result(name: str) -> dict:
    """What the last check of an exercise left for `progress`; empty if there was none or it cannot be read."""
    try:
        kept = json.loads(_kept(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    fraction = kept.get("fraction") if isinstance(kept, dict) else None
    sound = isinstance(fraction, (int, float)) and not isinstance(fraction, bool) and 0 <= fraction <= 1
    return kept if sound else {}


def _kept(name: str) -> Path:
    return work_dir() / ".servelab" / "progress" / f"{name}.json"


def source_hash(source: str) -> str:
    """A short name for a cell's source, blind to white space at the ends of lines."""
    text = "\n".join(line.rstrip() for line in source.strip().splitlines())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source(exercise: Exercise, answers: tuple) -> str:
    """The hash of the one executed cell that the exercise's own answers come from; empty if there is no such cell."""
    history = getattr(_shell(), "history_manager", None)
    own = [answer for name, answer in zip(exercise.answers, answers, strict=True) if name in exercise.own]
    files = {file for answer in own for file in _files(answer)}
    if history is None or not all(exercises.CELL_FILE.search(file) for file in files):
        return ""
    cells = list(zip(history.input_hist_raw, history.input_hist_parsed, strict=False))[::-1]
    texts = {"".join(linecache.getlines(file)).strip() for file in files}
    if texts:
        found = [raw for raw, code in cells if {code.strip()} == texts]
    else:  # plain values do not know their cell
        name = re.escape(exercise.own[0])
        defines = re.compile(rf"^(?:(?:class|def) {name}\b|{name}\s*(?::[^=\n]*)?=(?!=))", re.MULTILINE)
        found = [raw for raw, _ in cells if defines.search(raw)]
    return source_hash(found[0]) if found else ""


def _files(answer: Any) -> Iterator[str]:
    """The files of an answer's code."""
    return (code.co_filename for code in _codes(answer))


def _codes(answer: Any) -> Iterator[CodeType]:
    """The code of a function, or of a class's own methods; of a decorated one, the decorated code."""
    for member in vars(answer).values() if isinstance(answer, type) else [answer]:
        for name in ("", "__func__", "func", "fget", "fset"):  # of class methods, partial functions, properties
            with contextlib.suppress(Exception):  # an object that answers no questions
                inner = inspect.unwrap(getattr(member, name) if name else member)
                if inspect.isfunction(inner) and inner.__code__.co_filename != "<string>":  # a dataclass's own methods
                    yield inner.__code__


def _unproven(exercise: Exercise, answers: tuple) -> str:
    """Which answers to other exercises of the unit these use that have not passed their own checks, in words."""
    if not in_work():
        return ""
    used = set(exercise.earlier)
    for answer in answers:
        used |= {kind.__name__ for kind in answer.__mro__[1:]} if isinstance(answer, type) else set()
        used |= {name for code in _codes(answer) for name in _names(code)}
    open_: dict[str, list[str]] = {}
    for other in (exercises.find(name) for name in exercises.names(exercise.unit) if name != exercise.name):
        called = [name for name in other.own if name in used]
        if called and (why := _doubt(other)):
            open_.setdefault(why, []).extend(called)
    said = (
        f"{', '.join(called)}, which {'has' if len(called) == 1 else 'have'} {why}" for why, called in open_.items()
    )
    return f"This uses {'; '.join(said)}: the fault may be there." if open_ else ""


def _doubt(exercise: Exercise) -> str:
    """Why the answers to an exercise, as they are defined now, are not known to be right; empty if they are."""
    kept = kept_result(exercise.name)
    if kept.get("fraction") != 1:
        return "not passed yet"
    defined = getattr(_shell(), "user_ns", {})
    now = _source(exercise, tuple(defined.get(name) for name in exercise.answers))
    return "changed since it passed" if now and kept.get("source") not in ("", now) else ""


def _names(code: CodeType) -> Iterator[str]:
    """The global names that code uses, inner functions included."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


class _Start(io.StringIO):
    """Text that keeps its beginning only, so that a print in a long loop cannot fill the memory."""

    def write(self, text: str) -> int:
        super().write(text[: max(0, MAX_SHOWN_OUTPUT + 1 - self.tell())])
        return len(text)


@contextlib.contextmanager
def _captured() -> Iterator:
    """Hold back everything that is written to stdout and stderr, by Python and by C code below it.

    Yields a function that returns the text so far, shortened. A warning or a log line must never cost a point, and
    nbgrader counts anything on stderr as a failure.
    """
    text = _Start()
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryFile())
        sys.stdout.flush(), sys.stderr.flush()
        for fd in (1, 2):
            stack.enter_context(_redirected(fd, scratch.fileno()))
        for stream in (sys.stdout, sys.stderr):
            stack.enter_context(_diverted(stream, text))
        stack.enter_context(contextlib.redirect_stdout(text))
        stack.enter_context(contextlib.redirect_stderr(text))

        def printed() -> str:
            scratch.seek(0)
            whole = text.getvalue() + scratch.read(MAX_SHOWN_OUTPUT + 1).decode(errors="replace")
            return whole if len(whole) <= MAX_SHOWN_OUTPUT else whole[:MAX_SHOWN_OUTPUT] + " ..."

        yield printed


@contextlib.contextmanager
def _diverted(stream, text: io.StringIO) -> Iterator[None]:
    """Divert a notebook's stream itself: a log handler made in an earlier cell holds on to it."""
    with contextlib.suppress(AttributeError):  # a plain file takes none; its writes arrive at the descriptor
        stream.write = text.write
    try:
        yield
    finally:
        stream.flush()
        with contextlib.suppress(AttributeError):
            del stream.write


@contextlib.contextmanager
def _redirected(fd: int, target: int) -> Iterator[None]:
    saved = None
    with contextlib.suppress(OSError):  # a process without that descriptor has nothing to capture there
        saved = os.dup(fd)
        os.dup2(target, fd)
    try:
        yield
    finally:
        if saved is not None:
            os.dup2(saved, fd)
            os.close(saved)
