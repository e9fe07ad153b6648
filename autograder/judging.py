"""Turn the recorded transcripts into scores: a preprocessor between nbgrader's Execute and SaveAutoGrades.

This runs in the grader's process, on plain data only. It stores each transcript, judges it under a time limit, writes
score and verdict into the check cell, and drops every other output of the graded run.
"""

import math
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Integer

from autograder import secret, transcripts
from autograder.course import Course, exercise_of
from autograder.gate import NOTES
from servelab import exercise as exercises
from servelab import plain, verdicts
from servelab.exercise import CaseVerdict, Exercise, Probe, Verdict
from servelab.notebooks import grade_id, is_check
from servelab.workers import TimedOut, limited

TABLE = 'class="servelab-verdict table table-condensed"'  # Bootstrap's, which nbgrader's pages bring along


class Judge(NbGraderPreprocessor):
    """Judges every check cell of a notebook that has been run."""

    seconds = Integer(30, help="Time limit of judging one exercise.").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        names = resources["nbgrader"]
        self.course, self.unit, self.student = Course(), names["assignment"], names["student"]
        ran = resources.get("servelab", {"incidents": [], "sandboxed": False, "seconds": 0.0})
        results = {}
        for cell in nb.cells:
            if cell.cell_type == "code":
                outputs, cell.outputs = cell.outputs, []
                if is_check(cell):
                    results[grade_id(cell)] = self._judge_cell(cell, outputs)
        notes = nb.metadata.pop(NOTES, [])
        nb.cells[:0] = _remarks(notes, ran["incidents"], ran["sandboxed"])
        record = {"notes": notes, **ran, "exercises": results, "failed": ""}
        transcripts.update_record(self.course, self.unit, self.student, **record)
        return nb, resources

    def _judge_cell(self, cell: NotebookNode, outputs: list) -> dict:
        exercise = exercise_of(self.course.unit(self.unit), grade_id(cell))
        points = float(cell.metadata.nbgrader.points)
        probes = secret.probes(self.course, exercise)
        text, problem = recorded_text(exercise, outputs)
        if text is not None:
            challenges = [probe.challenge for probe in probes]
            kept: dict[str, Any] = {
                "exercise": exercise.name,
                "version": exercise.version,
                "seed": secret.fingerprint(self.course),
            }
            kept |= {"challenges": challenges, "recorded": text}
            transcripts.store(self.course, self.unit, self.student, exercise.name, kept)
            verdict = judge_text(exercise, probes, text, self.seconds)
        else:
            verdict = nothing(exercise, problem)
        score = clamp(verdict.score(points), points)
        cell.outputs, cell.execution_count = show(exercise, verdict, score), 1
        cases = {case.spec.name: case.passed for case in verdict.cases}
        return {"score": score, "points": points, "cases": cases, "note": verdict.note}


def recorded_text(exercise: Exercise, outputs: list) -> tuple[str | None, str]:
    """The one transcript among a check cell's outputs, or None and why there is none to judge."""
    found = [output.data[transcripts.MIME] for output in outputs if transcripts.MIME in output.get("data", {})]
    if not found:
        return None, "Nothing was recorded: the check cell did not come to its end."
    if len(found) > 1:
        return None, f"{len(found)} transcripts were recorded where one is expected."
    payload = found[0]
    if not isinstance(payload, dict) or payload.get("exercise") != exercise.name:
        return None, "The transcript belongs to another exercise."
    if not isinstance(payload.get("recorded"), str):
        return None, "The transcript cannot be read."
    return payload["recorded"], ""


def judge_text(exercise: Exercise, probes: list[Probe], text: str, seconds: float) -> Verdict:
    """Judge a transcript, whatever it holds. Never raises and does not run longer than ``seconds``."""
    try:
        with _time_limit(seconds):
            return exercises.judge(exercise, probes, plain.loads(text))
    except plain.NotPlain:
        return nothing(exercise, "The transcript is not plain data.")
    except (TimedOut, MemoryError, RecursionError) as error:
        return nothing(exercise, f"The transcript could not be judged ({type(error).__name__}).")


def _time_limit(seconds: float) -> AbstractContextManager[None]:
    """The limit, where timers work: in a main thread."""
    in_main = threading.current_thread() is threading.main_thread()
    return limited(seconds, seconds) if in_main else nullcontext()


def nothing(exercise: Exercise, note: str) -> Verdict:
    """The verdict on an exercise that cannot be judged: no case passes."""
    return Verdict(exercise.name, tuple(CaseVerdict(spec, 0, note, 0) for spec in exercise.cases), note)


def clamp(score: Any, points: float) -> float:
    """A score that nbgrader can take: a finite number from 0 to ``points``."""
    number = float(score) if isinstance(score, (int, float)) else 0.0
    return min(max(number, 0.0), points) if math.isfinite(number) else 0.0


def show(exercise: Exercise, verdict: Verdict, score: float) -> list[NotebookNode]:
    """The check cell's new outputs. The probes are left out, so that no secret challenge's values are shown."""
    shown = verdicts.Shown(exercise, [], verdict)
    html = verdicts.as_html(shown).replace('class="servelab-verdict"', TABLE)
    page = {"text/html": html, "text/plain": verdicts.as_text(shown)}
    return [
        nbformat.v4.new_output("execute_result", {"text/plain": repr(score)}, execution_count=1),
        nbformat.v4.new_output("display_data", page),
    ]


def _remarks(notes: list[str], incidents: list[str], sandboxed: bool) -> list[NotebookNode]:
    """A cell in front of the notebook that tells the student what was repaired and what went wrong."""
    said = [] if sandboxed else ["This submission was graded without the sandbox."]
    said += [
        *(f"Repaired before grading: {note}." for note in notes),
        *(f"During the run: {text}." for text in incidents),
    ]
    if not said:
        return []
    items = "\n".join(f"- {_escaped(text)}" for text in said)
    return [nbformat.v4.new_markdown_cell(f"**Remarks of the grader**\n\n{items}", id="servelab-remarks")]


def _escaped(text: str) -> str:
    """Markdown that shows the text as it is."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+!|$" else c for c in text)[:500]
