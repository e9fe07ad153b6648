"""The learner's folder: copies, upgrades, repairs, progress and checks from the shell, with real kernels."""

import errno
import json
import os
import re
import shutil

import nbformat
import pytest

from servelab import work
from servelab.cli import main
from servelab.errors import CourseError
from servelab.notebooks import grade_id
from servelab.paths import Unit, find_unit

UNIT = find_unit("00")
RIGHT = """def slot_utilisation(lengths, batch_size):
    if not lengths or batch_size < 1 or min(lengths) < 1:
        raise ValueError(lengths)
    cuts = range(0, len(lengths), batch_size)
    return sum(lengths) / sum(batch_size * max(lengths[cut : cut + batch_size]) for cut in cuts)
"""
WRONG = "def slot_utilisation(lengths, batch_size):\n    return 0.5\n"
ANSWERS = """answers = {
    "steps in a slot after the answer is done": 1980,
    "what raises utilisation": "B",
    "utilisation of ten such batches": 0.12,
}
"""


@pytest.fixture(autouse=True)
def one_unit(monkeypatch):
    """These tests are about the folder, not about the units: unit 00 stands for all."""
    monkeypatch.setattr(work, "units", lambda: (UNIT,))


def answer(**sources):
    """Copy unit 00 to the work folder with these solution sources, and without the cell that waits for torch."""
    if not UNIT.work.exists():
        work.bring_up_to_date()
    edit({name.replace("_", "-"): source for name, source in sources.items()})


def edit(sources):
    notebook = nbformat.read(UNIT.work, as_version=4)
    for cell in notebook.cells:
        cell.source = sources.get(grade_id(cell), cell.source)
        if "in machine()" in cell.source:
            cell.source = "print('no torch here')"
    nbformat.write(notebook, UNIT.work)


def in_work(name="slot-utilisation"):
    notebook = nbformat.read(UNIT.work, as_version=4)
    return next(cell.source for cell in notebook.cells if grade_id(cell) == name)


def backups():
    return sorted((work.work_dir() / ".servelab" / "backups").glob("*"))


def everything():
    """Every file of the work folder with its bytes."""
    return {path: path.read_bytes() for path in work.work_dir().rglob("*") if path.is_file()}


@pytest.fixture
def newer(tmp_path, monkeypatch):
    """Let a newer release of unit 00 come out: its stub and a text have other words."""

    def publish():
        release = nbformat.read(UNIT.release, as_version=4)
        release.cells[0].source = "# Start here, second edition"
        next(cell for cell in release.cells if grade_id(cell) == "slot-utilisation").source = "# a new stub"
        (tmp_path / UNIT.slug).mkdir()
        monkeypatch.setattr("servelab.paths.NOTEBOOKS", tmp_path)
        UNIT.release.write_text(nbformat.writes(release) + "\n", encoding="utf-8", newline="\n")

    return publish


# Copies and upgrades.


def test_the_first_copy_is_the_release():
    assert work.bring_up_to_date() == [f"new: {UNIT.slug}"]
    assert UNIT.work.read_bytes() == UNIT.release.read_bytes()
    before = everything()
    assert work.bring_up_to_date() == []
    assert everything() == before


def test_what_the_learner_wrote_is_left_alone():
    answer(slot_utilisation=RIGHT)
    before = everything()
    assert work.bring_up_to_date() == []
    assert everything() == before


def test_upgrade_keeps_answers_and_a_backup(newer):
    answer(slot_utilisation=RIGHT)
    old = UNIT.work.read_bytes()
    newer()
    (line,) = work.bring_up_to_date()
    (backup,) = backups()
    assert str(backup) in line
    assert backup.read_bytes() == old
    assert in_work() == RIGHT
    assert "second edition" in UNIT.work.read_text(encoding="utf-8")
    assert work.bring_up_to_date() == []


def test_upgrade_of_an_untouched_copy_is_the_new_release(newer):
    work.bring_up_to_date()
    newer()
    work.bring_up_to_date()
    assert UNIT.work.read_bytes() == UNIT.release.read_bytes()


@pytest.mark.parametrize("base", [None, b"", b'{"cells"', b"\xff\xfe"])
def test_upgrade_without_a_readable_base(newer, base):
    answer(slot_utilisation=RIGHT)
    path = work._base(UNIT)
    path.unlink() if base is None else path.write_bytes(base)
    newer()
    work.bring_up_to_date()
    assert in_work() == RIGHT
    assert work.bring_up_to_date() == []


def test_a_broken_notebook_is_not_upgraded_and_not_touched(newer):
    """And `learn` still opens the other units."""
    work.bring_up_to_date()
    UNIT.work.write_bytes(b"garbage")
    newer()
    (line,) = work.bring_up_to_date()
    assert "servelab restore 00" in line
    assert UNIT.work.read_bytes() == b"garbage"


def test_two_backups_in_one_second(monkeypatch):
    monkeypatch.setattr(work.time, "strftime", lambda _: "now")
    answer(slot_utilisation=RIGHT)
    work.restore(UNIT)
    work.restore(UNIT)
    assert len(backups()) == 2


# Restore.


def test_restore_of_a_sound_notebook_changes_nothing():
    answer(slot_utilisation=RIGHT)
    before = UNIT.work.read_bytes()
    (line,) = work.restore(UNIT)
    assert nbformat.reads(before.decode(), 4) == nbformat.read(UNIT.work, 4)
    assert str(backups()[0]) in line


def test_restore_of_a_truncated_notebook():
    answer(slot_utilisation=RIGHT, reflection=ANSWERS)
    whole = UNIT.work.read_bytes()
    broken = whole[: whole.index(b'"id": "reflection"')]
    UNIT.work.write_bytes(broken)
    notes = work.restore(UNIT)
    assert "not valid JSON" in notes[0]
    assert any("reflection was missing" in note for note in notes)
    assert in_work() == RIGHT
    assert in_work("reflection") != ANSWERS
    assert backups()[0].read_bytes() == broken


@pytest.mark.parametrize("content", [b"", b"garbage", b'{"cells": []}'])
def test_restore_of_a_notebook_without_cells(content):
    work.bring_up_to_date()
    UNIT.work.write_bytes(content)
    work.restore(UNIT)
    assert UNIT.work.read_bytes() == UNIT.release.read_bytes()
    assert backups()[0].read_bytes() == content


def test_restore_of_a_missing_notebook():
    (line,) = work.restore(UNIT)
    assert "new copy" in line
    assert UNIT.work.read_bytes() == UNIT.release.read_bytes()
    assert work.bring_up_to_date() == []


def test_restore_reads_a_notebook_full_of_pictures(monkeypatch):
    """The grader refuses what is larger than 32 MiB; the learner's own answers are not given up for that."""
    answer(slot_utilisation=RIGHT)
    monkeypatch.setattr("servelab.repair.MAX_BYTES", 10)
    work.restore(UNIT)
    assert in_work() == RIGHT


def test_restore_of_an_unreadable_notebook_changes_nothing(monkeypatch):
    answer(slot_utilisation=RIGHT)
    before = everything()
    monkeypatch.setattr(work.shutil, "copyfile", fail_with(errno.EACCES))
    with pytest.raises(CourseError, match="nothing was changed: Permission denied") as caught:
        work.restore(UNIT)
    assert caught.value.where == str(UNIT.work)
    assert everything() == before


def test_restore_of_a_folder_changes_nothing():
    UNIT.work.mkdir(parents=True)
    with pytest.raises(CourseError, match="nothing was changed"):
        work.restore(UNIT)
    assert UNIT.work.is_dir()


def test_unit_that_is_not_built():
    with pytest.raises(CourseError, match="not built"):
        work.restore(Unit("99_nowhere"))


def test_broken_release(tmp_path, monkeypatch):
    monkeypatch.setattr("servelab.paths.NOTEBOOKS", tmp_path)
    (tmp_path / UNIT.slug).mkdir()
    UNIT.release.write_bytes(b"{")
    with pytest.raises(CourseError, match="cannot be read") as caught:
        work.restore(UNIT)
    assert caught.value.where == str(UNIT.release)


def fail_with(code):
    def fail(*args, **options):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("action", [lambda: work.restore(UNIT), work.bring_up_to_date])
def test_full_disk(newer, monkeypatch, action):
    answer(slot_utilisation=RIGHT)
    newer()
    before = everything()
    monkeypatch.setattr(work.os, "replace", fail_with(errno.ENOSPC))
    with pytest.raises(CourseError, match="cannot be written: No space left") as caught:
        action()
    assert caught.value.where == str(UNIT.work)
    assert caught.value.mend
    assert everything().items() >= before.items()
    assert set(everything()) - set(before) == set(backups())


# Checks from the shell; one kernel run serves several tests.


@pytest.fixture(scope="module")
def half_right(tmp_path_factory):
    """The work folder after `servelab check 00` on a right function and untouched questions; and what it showed."""
    folder = tmp_path_factory.mktemp("half right")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVELAB_WORK", str(folder))
        patch.setattr(work, "units", lambda: (UNIT,))
        answer(slot_utilisation=RIGHT)
        shown = work.run_checks(UNIT)
    return folder, shown


@pytest.fixture
def checked(half_right, monkeypatch, tmp_path):
    """A copy of that folder, to be changed."""
    shutil.copytree(half_right[0], tmp_path / "work")
    monkeypatch.setenv("SERVELAB_WORK", str(tmp_path / "work"))


def test_check_shows_every_verdict(half_right):
    function, questions = half_right[1]
    assert (function["exercise"], function["passed"]) == ("start_here.slot_utilisation", True)
    assert (questions["exercise"], questions["passed"]) == ("start_here.reflection", False)
    assert "passed - 5 of 5 cases" in function["text"]
    assert "not written yet" in questions["text"]


def test_check_leaves_the_notebook_alone(half_right):
    notebook = nbformat.read(half_right[0] / UNIT.slug / f"{UNIT.slug}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)


def test_progress_after_checks(checked):
    function, questions = work.progress(UNIT)
    assert (function.exercise, function.points, function.fraction, function.earned) == (
        "start_here.slot_utilisation", 85, 1, 85,
    )  # fmt: skip
    assert (questions.fraction, questions.earned) == (0, 0)
    assert not function.edited_since and not questions.edited_since


@pytest.mark.parametrize("name", ["slot-utilisation", "reflection"])
def test_edited_since_the_check(checked, name):
    edit({name: "something else"})
    assert [result.edited_since for result in work.progress(UNIT)] == [name == "slot-utilisation", name == "reflection"]


def test_white_space_at_line_ends_is_no_edit(checked):
    edit({"slot-utilisation": "\n" + RIGHT.replace("\n", "  \n")})
    assert not any(result.edited_since for result in work.progress(UNIT))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b'{"fraction": "1"}', b'{"fraction": NaN}'])
def test_corrupt_progress_is_no_progress(checked, content):
    path = work.work_dir() / ".servelab" / "progress" / "start_here.slot_utilisation.json"
    assert path.exists()
    path.write_bytes(content)
    assert work.progress(UNIT)[0].fraction is None


@pytest.mark.parametrize("content", [None, b"", b"garbage"])
def test_progress_of_a_missing_or_broken_notebook(checked, content):
    UNIT.work.unlink() if content is None else UNIT.work.write_bytes(content)
    function = work.progress(UNIT)[0]
    assert (function.fraction, function.edited_since) == (1, True)


def test_progress_before_anything():
    assert [result.fraction for result in work.progress(UNIT)] == [None, None]


def test_progress_command(checked, capsys):
    assert main(["progress", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)[UNIT.slug]
    assert [(record["exercise"], record["earned"]) for record in records] == [
        ("start_here.slot_utilisation", 85),
        ("start_here.reflection", 0),
    ]
    assert main(["progress"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"slot_utilisation\D+85 / 85\D+passed", table)
    assert "85 / 100" in table


def test_check_command_on_a_right_notebook(capsys):
    """Exit code 0, and on stdout nothing but the JSON."""
    answer(slot_utilisation="import warnings\nwarnings.warn('hm')\n" + RIGHT, reflection=ANSWERS)
    assert main(["check", "00", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["passed"] for record in records] == [True, True]
    assert {record["unit"] for record in records} == {UNIT.slug}
    assert sum(result.earned for result in work.progress(UNIT)) == 100


def test_check_command_on_a_wrong_notebook_whose_kernel_dies(capsys):
    """What was reached is reported, the rest did not run, though a verdict of an earlier run is saved there."""
    answer(slot_utilisation=WRONG, reflection="import os\nos._exit(1)")
    notebook = nbformat.read(UNIT.work, as_version=4)
    check = next(cell for cell in notebook.cells if grade_id(cell) == "reflection-check")
    old = {"exercise": "start_here.reflection", "passed": True, "text": "passed"}
    check.outputs = [nbformat.v4.new_output("display_data", {work.VERDICT_MIME: old})]
    nbformat.write(notebook, UNIT.work)
    assert main(["check"]) == 1
    out, err = capsys.readouterr()
    assert "slot_utilisation: not yet right" in out
    assert 'Smallest failing input of "one full batch":' in out
    assert "reflection-check: did not run" in out
    assert "0 of 2 checks passed" in out
    assert "The kernel died" in err


def test_a_cell_that_hangs(capsys, monkeypatch):
    monkeypatch.setattr(work, "CELL_TIMEOUT", 8)
    answer(slot_utilisation=RIGHT, reflection="import time\ntime.sleep(60)")
    function, questions = work.run_checks(UNIT)
    assert function["passed"]
    assert (questions["exercise"], questions["text"]) == (None, "reflection-check: did not run")
    assert "more than 8 s" in capsys.readouterr().err


def test_check_command_before_learn(capsys):
    for command in (["check"], ["check", "00"]):
        assert main(command) == 2
        assert "course.py learn" in capsys.readouterr().err


def test_check_cell_that_shows_an_error_only():
    cell = nbformat.v4.new_code_cell(metadata={"nbgrader": {"grade_id": "a-check", "grade": True}})
    cell.outputs = [nbformat.v4.new_output("error", ename="NameError", evalue="name 'x'", traceback=[])]
    shown = {"cell": 7, "exercise": None, "passed": False, "text": "a-check: NameError: name 'x'"}
    assert work._shown(7, cell, {}) == shown
    text = "a-check: the cell a ended in SyntaxError: invalid syntax"
    assert work._shown(7, cell, {"a": "SyntaxError: invalid syntax"}) == shown | {"text": text}
