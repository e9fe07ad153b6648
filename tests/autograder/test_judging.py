"""The judge's side: exactly one transcript, plain data only, a bounded score, whatever a submission records."""

import json
import math
import time

import nbformat
import pytest

from autograder import judging
from autograder.execute import _bytes_in
from autograder.judging import clamp, judge_text, recorded_text
from autograder.transcripts import MIME
from servelab import plain
from servelab.exercise import Case, CaseSpec, Exercise, Probe


def judge(challenge, transcript, expected):
    if transcript == "slow":
        while True:
            pass
    yield Case("twice", plain.close(transcript, expected), "not twice")


EXERCISE = Exercise("toy.twice", ("twice",), (CaseSpec("twice"),), lambda rng: [1], lambda c, f: f(c), judge, "v")
PROBES = [Probe(1, 2, ("twice",))]


def output(recorded, exercise="toy.twice", **more):
    payload = {"exercise": exercise, "version": "v", "recorded": recorded, **more}
    return nbformat.v4.new_output("display_data", {MIME: payload})


GOOD = json.dumps([{"transcript": 2}])


def test_one_transcript_is_taken():
    assert recorded_text(EXERCISE, [output(GOOD)]) == (GOOD, "")


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [output(GOOD), output(GOOD)],
        [output(GOOD, exercise="toy.other")],
        [output(7)],
        [output(None)],
        [nbformat.v4.new_output("display_data", {MIME: "text"})],
        [nbformat.v4.new_output("display_data", {MIME: [1]})],
        [nbformat.v4.new_output("execute_result", {"text/plain": "4.0"}, execution_count=1)],
        [nbformat.v4.new_output("stream", text="passed")],
        [nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])],
    ],
)
def test_anything_but_one_transcript_of_this_exercise_is_nothing(outputs):
    text, problem = recorded_text(EXERCISE, outputs)
    assert text is None
    assert problem


@pytest.mark.parametrize("text", [GOOD, '[{"transcript": 2.0}]'])
def test_right_transcripts_earn_all(text):
    assert judge_text(EXERCISE, PROBES, text, 5).score(4) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "not JSON",
        "[" * 100_000,
        "[{}]",
        '[{"transcript": NaN}]',
        '[{"transcript": Infinity}]',
        '[{"transcript": "2"}]',
        '[{"transcript": true}]',
        '[{"transcript": [2]}]',
        '[{"transcript": 2, "passed": true}]',
        '[{"transcript": 2}, {"transcript": 2}]',
        '[{"raised": {"type": "E", "message": "m"}}]',
        '[{"raised": 7}]',
        '[{"transcript": {"dtype": "object", "shape": [1], "base64": ""}}]',
        '[{"transcript": 1' + "0" * 5000 + "}]",
        " " * (plain.MAX_BYTES + 1),
    ],
)
def test_other_transcripts_earn_nothing_and_raise_nothing(text):
    assert judge_text(EXERCISE, PROBES, text, 5).score(4) == 0


def test_judging_has_a_time_limit():
    start = time.monotonic()
    verdict = judge_text(EXERCISE, PROBES, '[{"transcript": "slow"}]', 0.3)
    assert verdict.score(4) == 0
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, -1, 1e9, None, "4", True, 2.5, 0, 4])
def test_scores_are_finite_and_within_the_points(score):
    clamped = clamp(score, 4.0)
    assert isinstance(clamped, float)
    assert 0 <= clamped <= 4


def test_the_verdict_shows_no_values():
    verdict = judge_text(EXERCISE, [Probe(123456, 246912, ("twice",))], '[{"transcript": 654321}]', 5)
    shown = json.dumps(judging.show(EXERCISE, verdict, 0.0))
    assert not any(secret in shown for secret in ("123456", "246912", "654321", "not twice"))
    assert "twice" in shown


def test_nbgrader_reads_the_score_that_the_judge_wrote():
    from nbgrader.utils import determine_grade

    verdict = judge_text(EXERCISE, PROBES, GOOD, 5)
    mark = {
        "grade": True,
        "solution": False,
        "locked": True,
        "points": 4,
        "grade_id": "twice-check",
        "schema_version": 3,
    }
    for score in (0.0, 1.33, 4.0):
        cell = nbformat.v4.new_code_cell(outputs=judging.show(EXERCISE, verdict, score), metadata={"nbgrader": mark})
        assert determine_grade(cell) == (score, 4.0)


def test_output_is_counted_in_all_its_parts():
    assert _bytes_in({"data": {"text/plain": "x" * 100, MIME: {"recorded": ["y" * 50, 1]}}, "none": None}) > 150
