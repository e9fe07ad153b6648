"""`servelab grade` as an instructor uses it: results, by-hand nbgrader, secrets, refusals, the --no-sandbox mark."""

import csv
import json
import os
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest
from hostile import RIGHT, WRONG
from toycourse import UNIT, Toy

from autograder import secret
from autograder.course import Course
from servelab.errors import CourseError

HALF = {**RIGHT, "double": "def double(n):\n    return min(2 * n, 99)", "opinion": "I *think* so."}
EXPECTED = {"alice": 10.0, "bob": 8.0, "carol": 0.0}


@pytest.fixture(scope="module")
def graded(toy, tmp_path_factory, sandbox) -> tuple[Toy, dict]:
    """Alice is right, Bob half right, Carol handed in the release."""
    root = tmp_path_factory.mktemp("graded") / "course"
    shutil.copytree(toy.root, root)
    toy = Toy(root)
    collected = tmp_path_factory.mktemp("class")
    for student, answers in {"alice": RIGHT, "bob": HALF, "carol": {}}.items():
        (collected / f"{student}.ipynb").write_text(json.dumps(toy.answered(**answers)))
    return toy, toy.grade(collected)


def totals(toy: Toy) -> dict[str, float]:
    """Scores as nbgrader's own export has them."""
    toy.run("nbgrader", "export", "--to", "exported.csv", check=0)
    with open(toy.root / "exported.csv") as file:
        return {row["student_id"]: float(row["score"]) for row in csv.DictReader(file)}


@pytest.mark.sandbox
class TestGraded:
    def test_scores(self, graded):
        toy, summary = graded
        students = summary["units"][UNIT]["students"]
        assert {name: row["score"] for name, row in students.items()} == EXPECTED
        assert summary["sandboxed"] and summary["failed"] == []
        assert totals(toy) == EXPECTED

    def test_free_text_waits_for_a_person_unless_nothing_was_written(self, graded):
        toy, summary = graded
        assert summary["units"][UNIT]["waiting"] == 1
        assert "1 answers wait for a person" in (toy.state / "report.html").read_text()

    def test_grades_csv(self, graded):
        toy, _ = graded
        with open(toy.state / "grades.csv") as file:
            rows = {row["student"]: row for row in csv.DictReader(file)}
        assert {name: float(row["score"]) for name, row in rows.items()} == EXPECTED
        assert (rows["bob"][f"{UNIT}/double-check"], rows["bob"][f"{UNIT} waiting"]) == ("2.0", "1")

    def test_feedback_names_the_failed_case(self, graded):
        toy, _ = graded
        page = toy.feedback("bob")
        assert "large numbers" in page and "servelab-verdict" in page
        assert "transcript" not in page

    def test_report_counts_failures_by_case(self, graded):
        toy, _ = graded
        page = (toy.state / "report.html").read_text()
        assert "large numbers" in page and "Every submission ran in the sandbox" in page
        assert "NOT SANDBOXED" not in page
        assert (toy.state / "secret" / "seed").read_text().strip() not in page

    def test_transcripts_are_kept_for_judging_again(self, graded):
        toy, _ = graded
        kept = json.loads((toy.state / "transcripts" / UNIT / "bob" / "double.json").read_text())
        assert kept["exercise"] == "toy.double" and len(kept["version"]) == 12
        assert (toy.state / "transcripts").stat().st_mode & 0o777 == 0o700
        assert len(json.loads(kept["recorded"])) == len(kept["challenges"])

    def test_nbgrader_by_hand_gives_the_same_grades(self, graded):
        toy, _ = graded
        toy.run("nbgrader", "autograde", UNIT, "--force", check=0)
        assert totals(toy) == EXPECTED
        before = toy.feedback("bob")
        toy.run("nbgrader", "generate_feedback", UNIT, "--force", check=0)
        assert toy.feedback("bob") == before

    def test_a_manual_grade_survives_grading_again(self, graded, hand_in):
        toy, _ = graded
        code = (
            "from autograder.gradebook import open_gradebook\nfrom autograder.course import Course\n"
            f"with open_gradebook(Course()) as g:\n    grade = g.find_grade('opinion', '{UNIT}', '{UNIT}', 'bob')\n"
            "    grade.manual_score, grade.needs_manual_grade = 1.5, False\n    g.db.commit()"
        )
        (toy.root / "manual.py").write_text(code)
        toy.run("manual", check=0)
        summary = toy.grade(hand_in({"bob": toy.answered(**HALF)}))
        assert summary["units"][UNIT]["students"]["bob"]["score"] == 9.5


@pytest.mark.sandbox
def test_a_broken_cell_is_named_without_its_text(fresh_toy, hand_in, sandbox):
    broken = fresh_toy.answered(**{**RIGHT, "double": "def double(n)\n    return SECRET_TEXT"})
    summary = fresh_toy.grade(hand_in({"alice": broken}))
    assert summary["units"][UNIT]["students"]["alice"]["score"] == 6
    assert "cell double ended with SyntaxError" in fresh_toy.record("alice")["incidents"]


@pytest.mark.sandbox
def test_another_database(fresh_toy, hand_in, tmp_path, sandbox):
    url = f"sqlite:///{tmp_path / 'other.db'}"
    fresh_toy.grade(hand_in({"alice": fresh_toy.answered(**RIGHT)}), "--db", url)
    assert not (fresh_toy.state / "gradebook.db").exists()
    with sqlite3.connect(tmp_path / "other.db") as base:
        assert base.execute("select sum(auto_score) from grade").fetchone()[0] == 10


@pytest.mark.sandbox
def test_cells_cannot_be_added_once_there_are_submissions(fresh_toy, hand_in, sandbox):
    collected = hand_in({"alice": fresh_toy.release})
    fresh_toy.grade(collected)
    source = fresh_toy.root / "solutions" / f"{UNIT}.py"
    more = '\n# %% [markdown] nbgrader={"grade_id": "more", "grade": true, "solution": true, "points": 1}\n# More.\n'
    source.write_text(source.read_text() + more)
    fresh_toy.run("servelab", "build", check=0)
    done = fresh_toy.run("servelab", "grade", str(collected), check=2)
    assert "graded cells were added or removed" in done.stderr and "Traceback" not in done.stderr


class TestWithoutSandbox:
    def test_grade_refuses_and_runs_nothing(self, fresh_toy, hand_in, tmp_path):
        fake = tmp_path / "bin" / "bwrap"
        fake.parent.mkdir()
        fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
        fake.chmod(0o755)
        collected = hand_in({"alice": fresh_toy.answered(**RIGHT)})
        path = f"{fake.parent}:{Path(sys.prefix, 'bin')}:{os.environ['PATH']}"
        done = fresh_toy.run("servelab", "grade", str(collected), PATH=path, check=2)
        assert "No permissions to create new namespace" in done.stderr and "Traceback" not in done.stderr
        assert not (fresh_toy.state / "submitted").exists()

    def test_no_sandbox_marks_every_report(self, fresh_toy, hand_in):
        collected = hand_in({"alice": fresh_toy.answered(**RIGHT), "bob": fresh_toy.answered(**WRONG)})
        summary = fresh_toy.grade(collected, "--no-sandbox")
        assert not summary["sandboxed"] and summary["units"][UNIT]["not_sandboxed"] == 2
        assert summary["units"][UNIT]["students"]["alice"]["score"] == 10
        assert "NOT SANDBOXED" in (fresh_toy.state / "report.html").read_text()
        assert "False" in (fresh_toy.state / "grades.csv").read_text().splitlines()[1]
        assert "without the sandbox" in fresh_toy.feedback("alice")


class TestSeed:
    def test_it_is_made_once_and_is_private(self, tmp_path):
        course = Course(state=tmp_path)
        path = tmp_path / "secret" / "seed"
        assert secret.seed(course) == secret.seed(course) == path.read_text().strip()
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert secret.seed(course) not in secret.fingerprint(course)

    @pytest.mark.parametrize("text", ["", "short", "g" * 64, "\0" * 64, "\xff" * 64])
    def test_a_damaged_one_is_refused(self, tmp_path, text):
        (tmp_path / "secret").mkdir()
        (tmp_path / "secret" / "seed").write_text(text, encoding="latin-1")
        with pytest.raises(CourseError, match="the seed"):
            secret.seed(Course(state=tmp_path))

    @pytest.mark.sandbox
    def test_the_sandbox_is_shown_challenges_without_answers(self, graded):
        toy, _ = graded
        shown = json.loads((toy.state / "secret" / "challenges" / UNIT / "toy.double.json").read_text())
        assert len(shown) == 4 and all(isinstance(n, int) for n in shown)


@pytest.mark.parametrize("args", [["nowhere"], [".", "--jobs", "0"], []])
def test_wrong_use_exits_with_2(toy, args):
    done = toy.run("servelab", "grade", *args, "--no-sandbox", check=2)
    assert "Traceback" not in done.stderr
