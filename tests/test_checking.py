"""`check`: what a learner, a stock nbgrader and a grading run get from a check cell, in real kernels."""

import contextlib
import ctypes
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from importlib import import_module
from random import Random

import nbformat
import pytest
from nbclient import NotebookClient

from servelab import checking, exercise, verdicts
from servelab.checking import TRANSCRIPT_MIME, VERDICT_MIME, CheckFailed, check
from servelab.errors import CourseError
from servelab.exercise import PUBLIC_SEED
from servelab.paths import find_unit
from servelab.ranks import RankError

NAME = "start_here.slot_utilisation"
UNIT = find_unit("00")
slot_utilisation = import_module("servelab.reference.start_here").slot_utilisation
RIGHT = """def slot_utilisation(lengths, batch_size):
    if not lengths or batch_size < 1 or min(lengths) < 1:
        raise ValueError(lengths)
    cuts = range(0, len(lengths), batch_size)
    return sum(lengths) / sum(batch_size * max(lengths[cut : cut + batch_size]) for cut in cuts)
"""
WRONG = RIGHT.replace("sum(batch_size * max(lengths[cut : cut + batch_size])", "sum(max(lengths) * batch_size")
UNWRITTEN = "def slot_utilisation(lengths, batch_size):\n    raise NotImplementedError()\n"
ANSWERS = (
    'answers = {"steps in a slot after the answer is done": 1980, "what raises utilisation": "b", '
    '"utilisation of ten such batches": 0.12}\n'
)
CHECK = f'check("{NAME}", slot_utilisation)'
NOISE = """import ctypes, logging, os, sys, warnings
print("held stream", file=sys.stderr)
handler = logging.StreamHandler()  # holds on to this cell's stderr
logging.getLogger("old").addHandler(handler)
held, libc = sys.stderr, ctypes.CDLL(None) if os.name == "posix" else None
before = [os.fstat(fd) for fd in (1, 2)]


def slot_utilisation(lengths, batch_size):
    print("print")
    warnings.warn("a warning")
    logging.getLogger("old").warning("an old handler")
    logging.warning("a new handler")
    print("a held stream", file=held)
    os.write(1, b"fd 1\\n"), os.write(2, b"fd 2\\n")
    os.system("echo a child >&2")
    if libc:
        libc.write(2, b"from C\\n", 7)
    print("x" * 3000)
    return right(lengths, batch_size)
"""
CELLS = {
    "setup": "from servelab.checking import check",
    "unwritten": UNWRITTEN + CHECK,
    "wrong": WRONG + CHECK,
    "markup": "def slot_utilisation(lengths, batch_size):\n    print('<script>')\n    return '<b>&'\n" + CHECK,
    "exits": "import sys\nslot_utilisation = lambda lengths, batch_size: sys.exit('bye')\n" + CHECK,
    "right": RIGHT + "right = slot_utilisation\n" + CHECK,
    "noise": NOISE,
    "noisy": CHECK,
    "noisy and wrong": "loud = slot_utilisation\nslot_utilisation = lambda *given: (loud(*given), 0.0)[1]\n" + CHECK,
    "afterwards": (
        "print('out'), print('err', file=sys.stderr), logging.getLogger('old').error('x')\n"
        "assert before == [os.fstat(fd) for fd in (1, 2)]"
    ),
    "too many": f'check("{NAME}", right, right)',
    "unknown": 'check("start_here.nothing", right)',
}


def run(cells):
    """Run cells in one real kernel; returns each one's outputs by name."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells.values()])
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # under pytest a kernel does not watch its descriptors
        NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True).execute()
    return {name: cell.outputs for name, cell in zip(cells, notebook.cells, strict=True)}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    with contextlib.chdir(tmp_path_factory.mktemp("elsewhere")):
        return run(CELLS)


def verdict(outputs):
    (shown,) = [output.data for output in outputs if VERDICT_MIME in output.get("data", {})]
    return shown


def error(outputs):
    (shown,) = [output for output in outputs if output.output_type == "error"]
    return shown


def test_right_answer(outputs):
    (shown,) = outputs["right"]
    assert shown.output_type == "display_data"
    assert shown.data[VERDICT_MIME]["passed"] and shown.data[VERDICT_MIME]["fraction"] == 1
    assert shown.data["text/plain"].startswith(f"{NAME}: passed - 5 of 5 cases")


def test_wrong_answer(outputs):
    shown = verdict(outputs["wrong"])
    assert not shown[VERDICT_MIME]["passed"]
    assert 0 < shown[VERDICT_MIME]["fraction"] < 1
    text = shown["text/plain"]
    assert "FAIL  several batches: expected " in text
    shown = (
        'Smallest failing input of "the last batch may be partly filled":\n  slot_utilisation([1, 2, 9], batch_size=2)'
    )
    assert shown in text
    assert "Hint 2 of this exercise is about this." in text
    raised = error(outputs["wrong"])
    assert raised.ename == "CheckFailed"
    assert "2 of 5 cases failed: the last batch may be partly filled, several batches" in raised.evalue


@pytest.mark.parametrize("name", ["unwritten", "wrong", "markup", "exits", "too many", "unknown"])
def test_no_library_frames(outputs, name):
    raised = error(outputs[name])
    assert raised.traceback == [f"{raised.ename}: {raised.evalue}"]


def test_unwritten_answer(outputs):
    shown = verdict(outputs["unwritten"])
    assert shown[VERDICT_MIME] | {"text": ""} == {
        "exercise": NAME, "fraction": 0, "passed": False, "written": False, "text": "",
    }  # fmt: skip
    assert "not written yet. Fill in the cell, run it, check again." in shown["text/plain"]
    assert "<table" not in shown["text/html"]
    assert error(outputs["unwritten"]).evalue == "slot_utilisation: not written yet"


def test_an_answer_that_exits_is_a_wrong_answer(outputs):
    text = verdict(outputs["exits"])["text/plain"]
    assert "your code raised SystemExit: bye" in text or "got SystemExit" in text


def test_markup_is_escaped(outputs):
    page = verdict(outputs["markup"])["text/html"]
    assert "&lt;b&gt;&amp;" in page and "&lt;script&gt;" in page
    assert "<b>" not in page and "<script" not in page


def test_noise_is_kept_off_the_cell(outputs):
    """One display, nothing on stdout or stderr: a warning must not cost a point."""
    (shown,) = outputs["noisy"]
    assert shown.data[VERDICT_MIME]["passed"] and "Your code printed" not in shown.data["text/plain"]
    shown, _ = outputs["noisy and wrong"]
    text = shown.data["text/plain"]
    printed = text[text.index("Your code printed, on this input:") :]
    for part in ("print\n", "an old handler", "a held stream"):
        assert part in printed
    assert printed.endswith(" ...") and len(printed) < checking.MAX_SHOWN_OUTPUT + 100


def test_streams_work_again_after_a_check(outputs):
    written = {(output.name, output.text) for output in outputs["afterwards"]}
    assert written == {("stdout", "out\n"), ("stderr", "err\nx\n")}


def test_wrong_use(outputs):
    assert error(outputs["too many"]).evalue == (
        f"{NAME}: this check takes 1 answers\ncheck('{NAME}', slot_utilisation)"
    )
    assert "there is no exercise 'start_here.nothing'" in error(outputs["unknown"]).evalue


# In a script, without a kernel.


def test_a_script_prints_the_verdict(capfd):
    check(NAME, slot_utilisation)
    with pytest.raises(CheckFailed):
        check(NAME, lambda lengths, batch_size: None)
    out, err = capfd.readouterr()
    assert "passed - 5 of 5 cases" in out and "not yet right" in out
    assert err == ""


def test_every_way_of_writing_is_captured():
    """At every level, in the order of the levels: what Python wrote, then what was written below it."""
    handler = logging.StreamHandler(sys.stderr)
    with checking._captured() as printed:
        print("out"), print("err", file=sys.stderr)
        handler.emit(logging.makeLogRecord({"msg": "held"}))
        os.write(1, b"fd1"), os.write(2, b"fd2")
        if os.name == "posix":
            ctypes.CDLL(None).write(2, b"from C", 6)
        text = printed()
    for part in ("out\n", "err\n", "held\n", "fd1", "fd2", "from C"):
        assert part in text or os.name != "posix", part


def test_capture_ends_with_an_error(capfd):
    with pytest.raises(KeyboardInterrupt), checking._captured():
        raise KeyboardInterrupt
    print("again"), os.write(2, b"here")
    assert capfd.readouterr() == ("again\n", "here")


def test_endless_output_takes_no_memory():
    with checking._captured() as printed:
        for _ in range(1000):
            print("x" * 1000)
        assert sys.stdout.tell() <= checking.MAX_SHOWN_OUTPUT + 1
        assert len(printed()) == checking.MAX_SHOWN_OUTPUT + len(" ...")


def test_an_endless_answer_is_shown_shortened(capsys):
    with pytest.raises(CheckFailed):
        check(NAME, lambda lengths, batch_size: [7] * 5_000)
    assert len(capsys.readouterr().out) < 10_000


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"probes": 3}', b'{"probes": [[]]}', b"\xff", b"null"])
def test_missing_or_corrupt_challenges(tmp_path, monkeypatch, content):
    monkeypatch.setattr(checking, "DATA", tmp_path)
    path = tmp_path / "expected" / "start_here" / "slot_utilisation.json"
    path.parent.mkdir(parents=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CourseError, match="public challenges cannot be read") as caught:
        check(NAME, slot_utilisation)
    assert caught.value.where == str(path)
    assert caught.value.mend


def test_progress_that_cannot_be_kept_costs_nothing(work_folder, monkeypatch, capfd):
    """And is not said on stderr, which nbgrader would count as a failure."""
    (work_folder / "00").mkdir()
    monkeypatch.chdir(work_folder / "00")
    (work_folder / ".servelab").write_text("in the way")
    check(NAME, slot_utilisation)
    out, err = capfd.readouterr()
    assert "could not be kept" in out
    assert err == ""


def test_a_failing_check_loads_nothing_slow(work_folder):
    """A learner waits for it; nbformat with what it validates by takes seconds."""
    (work_folder / "00").mkdir()
    code = f"""
import sys
from servelab.checking import CheckFailed, check
try:
    check("{NAME}", lambda lengths, batch_size: 0)
except CheckFailed:
    print(sorted(sys.modules))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=work_folder / "00", capture_output=True, encoding="utf-8", check=True)
    assert "FAIL" in done.stdout
    assert not {"torch", "nbformat", "jsonschema", "matplotlib"} & set(re.findall(r"'([\w.]+)'", done.stdout))


def test_a_fault_may_lie_in_a_part_that_has_not_passed(work_folder, monkeypatch, capsys):
    ours = import_module("servelab.reference.static_batching")
    (work_folder / "02").mkdir()
    monkeypatch.chdir(work_folder / "02")
    said = "This uses static_schedule, which has not passed yet: the fault may be there."
    space: dict = {}
    exec(compile("def fcfs_steps(*given):\n    return [static_schedule for _ in given]", "a cell", "exec"), space)

    for passed in (False, True):
        if passed:
            check("static_batching.static_schedule", ours.static_schedule)
        with pytest.raises(CheckFailed):
            check("static_batching.fcfs_steps", space["fcfs_steps"])
        assert (said in capsys.readouterr().out) is not passed

    class PagedScheduler(import_module("servelab.reference.continuous_batching").Scheduler):
        pass

    with pytest.raises(CheckFailed):
        check("continuous_batching.paged_scheduler", PagedScheduler)
    assert "This uses Scheduler, which has not passed yet" in capsys.readouterr().out


def test_a_fault_may_lie_in_a_part_that_has_changed_since_it_passed(work_folder):
    (work_folder / "02").mkdir()
    with contextlib.chdir(work_folder / "02"):
        outputs = run(
            {
                "given": "from servelab.checking import check\nfrom servelab.reference import static_batching as ours",
                "part": "def static_schedule(*given):\n    return ours.static_schedule(*given)",
                "passes": "check('static_batching.static_schedule', static_schedule)",
                "user": "def fcfs_steps(*given):\n    return [static_schedule for _ in given]",
                "before": "check('static_batching.fcfs_steps', fcfs_steps)",
                "changed": "def static_schedule(*given):\n    return []",
                "after": "check('static_batching.fcfs_steps', fcfs_steps)",
            }
        )
    assert "the fault may be there" not in verdict(outputs["before"])["text/plain"]
    said = "This uses static_schedule, which has changed since it passed: the fault may be there."
    assert said in verdict(outputs["after"])["text/plain"]


def test_a_failure_may_name_no_hint():
    found = exercise.find(NAME)
    probes = checking.public_probes(found)
    case = exercise.CaseVerdict(found.cases[0], 1, "wrong", 0, failure_hint=0)
    assert verdicts.Shown(found, probes, exercise.Verdict(NAME, (case,))).hint == ""


def test_nothing_is_kept_outside_the_work_folder(work_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(NAME, slot_utilisation)
    assert list(work_folder.iterdir()) == []


def test_a_report_of_several_lines_is_shown_in_full_once():
    found = exercise.find(NAME)
    probes = checking.public_probes(found)
    lines = [f"    rank {rank} <waits>" for rank in range(80)]

    def deadlock(lengths, batch_size):
        raise RankError("\n".join(["nobody can go on", *lines]))

    recorded = [exercise.record(found, probe.challenge, (deadlock,)) for probe in probes]
    shown = verdicts.Shown(found, probes, exercise.judge(found, probes, recorded))
    text, page = verdicts.as_text(shown), verdicts.as_html(shown)
    assert text.count("your code raised RankError: nobody can go on") == 1 and text.count('as for "one full batch"') > 1
    assert [line[8:] for line in text.splitlines() if "<waits>" in line] == lines
    assert "nobody can go on<pre" in page and page.count("\n    rank 79 &lt;waits&gt;</pre>") == 1


def test_graders_page_keeps_the_challenge_secret():
    """A feedback page is made without probes: it names the case, never a value."""
    found = exercise.find(NAME)
    probes = checking.public_probes(found)
    recorded = [exercise.record(found, probe.challenge, (lambda lengths, batch_size: 0.123,)) for probe in probes]
    secret = verdicts.Shown(found, [], exercise.judge(found, probes, recorded))
    for page in (verdicts.as_html(secret), verdicts.as_text(secret)):
        assert "several batches" in page
        assert "0.123" not in page and "[5]" not in page and "expected" not in page


# In a grading run.


@pytest.fixture
def secret(tmp_path, monkeypatch):
    """A folder of challenges, as the sandbox gets it."""
    found = exercise.find(NAME)
    challenges = found.challenges(Random(PUBLIC_SEED + 1))
    (tmp_path / f"{NAME}.json").write_text(json.dumps(challenges), encoding="utf-8")
    monkeypatch.setenv("SERVELAB_CHALLENGES", str(tmp_path))
    return challenges


def test_a_grading_run_only_records(secret):
    outputs = run(
        {
            "setup": "from servelab.checking import check\nimport sys",
            "right": RIGHT + CHECK,
            "wrong": "def slot_utilisation(lengths, batch_size):\n    print('hi', file=sys.stderr)\n    1 / 0\n"
            + CHECK,
        }
    )
    for name in ("right", "wrong"):
        (shown,) = outputs[name]  # one output: no verdict, no error, no streams
        assert shown.data.keys() == {TRANSCRIPT_MIME, "text/plain"}
        assert shown.data["text/plain"] == f"{NAME}: recorded"
        payload = shown.data[TRANSCRIPT_MIME]
        assert payload.keys() == {"exercise", "version", "recorded"}
        assert (payload["exercise"], payload["version"]) == (NAME, exercise.find(NAME).version)
        assert len(json.loads(payload["recorded"])) == len(secret)


# With nbgrader alone.


def notebook_with(sources):
    notebook = nbformat.read(UNIT.release, as_version=4)
    for cell in notebook.cells:
        cell.source = sources.get(cell.id, cell.source)
        if "in machine()" in cell.source:
            cell.source = "print('no torch here')"
    return notebook


STUDENTS = {
    "right": {"slot-utilisation": "import warnings\n" + RIGHT, "reflection": ANSWERS},
    "stub": {},
    "partly": {"slot-utilisation": WRONG, "reflection": ANSWERS.replace("1980", "2000")},
}


@pytest.fixture(scope="module")
def grades(tmp_path_factory):
    """Scores by student and cell, from a stock nbgrader in a course folder of its own."""
    from nbgrader.api import Gradebook
    from nbgrader.apps import NbGraderAPI
    from traitlets.config import Config

    root = tmp_path_factory.mktemp("stock nbgrader")
    config = Config()
    database = f"sqlite:///{root / 'gradebook.db'}"
    config.CourseDirectory.update(root=str(root), course_id="stock", db_url=database)
    write(root / "source" / UNIT.slug, nbformat.read(UNIT.release, as_version=4))
    for student, sources in STUDENTS.items():
        write(root / "submitted" / student / UNIT.slug, notebook_with(sources))
    api = NbGraderAPI(config=config)
    with contextlib.chdir(root), warnings.catch_warnings(action="ignore"):  # of nbgrader's own database code
        assert api.generate_assignment(UNIT.slug)["success"]
        for student in STUDENTS:
            result = api.autograde(UNIT.slug, student)
            assert result["success"], result
    with Gradebook(database) as gradebook:
        submissions = [gradebook.find_submission(UNIT.slug, student) for student in STUDENTS]
        return {
            submission.student.id: {grade.name: grade.auto_score for grade in submission.notebooks[0].grades}
            for submission in submissions
        }


def write(folder, notebook):
    folder.mkdir(parents=True)
    nbformat.write(notebook, folder / f"{UNIT.slug}.ipynb")


def test_stock_nbgrader_grades(grades):
    """The degraded mode: in the submission's own process and on public challenges, but the right points."""
    assert grades["right"] == {"slot-utilisation-check": 85, "reflection-check": 15}
    assert grades["stub"] == {"slot-utilisation-check": 0, "reflection-check": 0}
    # cases of weight 2 and 3 of 9 failed, and one question of three
    assert grades["partly"] == {"slot-utilisation-check": round(85 * 4 / 9, 2), "reflection-check": 10}


@pytest.mark.parametrize("student", ["right", "stub"])
def test_nbgraders_validate_agrees(student, tmp_path, monkeypatch):
    from nbgrader.validator import Validator

    path = tmp_path / "validated.ipynb"
    nbformat.write(notebook_with(STUDENTS[student]), path)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    validator = Validator()
    validator.stream = io.StringIO()
    validator.validate_and_print(str(path))
    out = validator.stream.getvalue()
    if student == "right":
        assert out.startswith("Success!")
    else:
        assert out.startswith("VALIDATION FAILED ON 2 CELL(S)!")
        assert "CheckFailed: slot_utilisation: not written yet" in out


def test_an_interrupt_names_the_line_and_the_input():
    def endless(lengths, batch_size):
        raise KeyboardInterrupt

    with pytest.raises(CheckFailed, match=r"interrupted at somewhere in your code, on the input\nslot_utilisation\("):
        check(NAME, endless)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_an_endless_loop_is_stopped_and_the_rest_not_run(monkeypatch, capsys):
    calls, before = [], signal.getsignal(signal.SIGPROF)

    def endless(lengths, batch_size):
        calls.append(lengths)
        if len(calls) == 3:
            try:
                while True:
                    pass
            except:  # noqa: E722 (swallows the first attempt to stop it)
                calls.append(None)
            while True:
                pass
        return slot_utilisation(lengths, batch_size)

    monkeypatch.setattr(checking, "MAX_SECONDS", 0.3)
    with pytest.raises(CheckFailed):
        check(NAME, endless)
    assert len(calls) == 4
    assert "your code raised TookTooLong: stopped, because it had not returned after" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGPROF) is before and signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_an_object_instead_of_its_class_is_refused():
    with pytest.raises(CourseError, match="BlockAllocator must be the class"):
        check("paged_kv.block_allocator", object())
