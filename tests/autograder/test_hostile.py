"""The whole hostile class in one run of `grade`: everybody gets what they deserve, and nothing stops the batch."""

import json
import re

import psutil
import pytest
from hostile import LIMITS, SUBMISSIONS, Submission
from toycourse import UNIT, Toy, make_toy

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, sandbox) -> tuple[Toy, dict]:
    """The class, graded: the toy course and the summary."""
    toy = make_toy(tmp_path_factory.mktemp("hostile"))
    with open(toy.root / "nbgrader_config.py", "a") as file:
        file.write(LIMITS)
    collected = tmp_path_factory.mktemp("collected")
    for submission in SUBMISSIONS:
        folder = collected / submission.student / UNIT
        folder.mkdir(parents=True)
        nb = toy.answered(**submission.answers)
        changed = submission.edit(nb)
        text = changed if isinstance(changed, str) else json.dumps(nb)
        (folder / f"{UNIT}.ipynb").write_text(text)
    shadow = collected / "a22-shadow-module" / UNIT
    shadow.mkdir(parents=True)
    (shadow / f"{UNIT}.ipynb").write_text(json.dumps(toy.answered(double="import servelab.exercise")))
    (shadow / "servelab.py").write_text("raise RuntimeError('shadowed')")
    linked = collected / "a23-symlink" / UNIT
    linked.mkdir(parents=True)
    (linked / f"{UNIT}.ipynb").symlink_to(toy.root / "autograder" / "source" / UNIT / f"{UNIT}.ipynb")
    (linked / "notes.txt").symlink_to("/etc/passwd")
    return toy, toy.grade(collected, "--jobs", "2")


@pytest.mark.parametrize("submission", SUBMISSIONS, ids=lambda submission: submission.student)
def test_earns_what_it_deserves(hostile, submission: Submission):
    toy, summary = hostile
    cells = summary["units"][UNIT]["students"][submission.student]["cells"]
    assert (cells["double-check"], cells["running-total-check"]) == (submission.double, submission.running_total)
    incidents = toy.record(submission.student)["incidents"]
    assert submission.incident in " ".join(incidents)
    assert not (submission.quiet and incidents)


def test_nobody_stops_the_batch(hostile):
    _, summary = hostile
    assert summary["failed"] == []
    assert len(summary["units"][UNIT]["students"]) == len(SUBMISSIONS) + 2


def test_repairs_are_reported(hostile):
    toy, _ = hostile
    for student in (s.student for s in SUBMISSIONS if s.student.startswith(("a12", "a13", "a14", "a26", "a27"))):
        notes = toy.record(student)["notes"]
        assert notes, student
        assert "Repaired before grading" in toy.feedback(student)
        assert student in (toy.state / "report.html").read_text()


def test_a_shadowing_module_is_not_taken_along(hostile):
    toy, summary = hostile
    assert not list(toy.state.rglob("servelab.py"))
    assert "servelab.py: not a notebook, ignored" in (toy.state / "report.html").read_text()
    assert "a22-shadow-module" in summary["units"][UNIT]["students"]


def test_a_link_is_not_followed(hostile):
    toy, summary = hostile
    assert summary["units"][UNIT]["students"]["a23-symlink"]["score"] == 0
    everything = [path for path in toy.state.rglob("*") if "a23-symlink" in str(path) and path.is_file()]
    assert not any(path.is_symlink() or "root:x:0" in path.read_text(errors="replace") for path in everything)
    assert "self.total += n" not in toy.feedback("a23-symlink")
    assert any("link" in note for note in toy.record("a23-symlink")["notes"])


def test_no_process_is_left_behind(hostile):
    assert not [p for p in psutil.process_iter(["cmdline"]) if "86417" in (p.info["cmdline"] or [])]


def test_feedback_shows_no_secret_value(hostile):
    toy, _ = hostile
    secret = json.loads((toy.state / "secret" / "challenges" / UNIT / "toy.double.json").read_text())
    for page in (toy.state / "feedback").rglob("*.html"):
        text = page.read_text()
        assert not any(re.search(rf"\b{n}\b", text) for n in secret if n >= 1000)
        assert "ValueError: secret" not in text


def test_feedback_runs_no_script_of_a_submission(hostile):
    toy, _ = hostile
    page = toy.feedback("x1-script")
    assert "<script>alert(41)" not in page
    assert "onerror=alert" not in page.replace("&lt;img src=x onerror=alert(42)&gt;", "")
    assert "Fine." in page


def test_only_scores_and_verdicts_are_left_of_the_run(hostile):
    toy, _ = hostile
    nb = json.loads((toy.state / "autograded" / "a28-honest-noise" / UNIT / f"{UNIT}.ipynb").read_text())
    for cell in nb["cells"]:
        graded = cell["metadata"].get("nbgrader", {}).get("grade")
        kinds = [output["output_type"] for output in cell.get("outputs", [])]
        assert kinds == (["execute_result", "display_data"] if graded and cell["cell_type"] == "code" else [])
    assert "transcript+json" not in json.dumps(nb)
