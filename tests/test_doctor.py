"""`servelab doctor`: each thing that can be wrong with a machine is found and comes with its mend."""

import builtins
import collections
import importlib.metadata
import json
import sys

import pytest

from autograder import trial
from servelab import doctor
from servelab.cli import main
from servelab.paths import Unit


@pytest.fixture(autouse=True)
def sandbox(monkeypatch):
    """A grading sandbox that works, without trying a real one; returns what sets another outcome."""

    def outcome(works, problem="", mend=""):
        monkeypatch.setattr(trial, "try_sandbox", lambda course: trial.Trial(works, problem, mend))

    outcome(True)
    return outcome


def findings():
    return {finding.what: finding for finding in doctor.examine()}


def test_this_machine_is_right(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ok    Python: " in out and "ok    torch: " in out and "ok    grading sandbox: works" in out
    assert "FAIL" not in out


def test_json(capsys):
    assert main(["doctor", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["what"] for record in records] == list(findings())
    assert all(record.keys() == {"what", "ok", "detail", "mend"} for record in records)


def test_machine():
    found = doctor.machine()
    assert list(found) == ["system", "python", "cores", "memory_gib", "torch", "gpus"]
    json.dumps(found)


def test_a_missing_package(monkeypatch, capsys):
    real = importlib.metadata.version

    def version(name):
        if name in ("nbgrader", "jupytext"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert findings()["packages"] == doctor.Finding(
        "packages", False, "missing: nbgrader, jupytext", "Run: python3 course.py learn"
    )
    assert main(["doctor"]) == 1
    assert "FAIL  packages: missing: nbgrader, jupytext\n      Run: python3 course.py learn" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ImportError("libcudart.so.13"), OSError("[WinError 126]"), RuntimeError("x")])
def test_a_broken_torch(monkeypatch, error):
    def broken():
        raise error

    monkeypatch.setattr(doctor, "machine", broken)
    found = findings()["torch"]
    assert found.ok is False
    assert found.detail == f"cannot be imported: {type(error).__name__}: {error}"
    assert "Remove .venv" in found.mend


def test_a_missing_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert findings()["torch"].ok is False


@pytest.mark.parametrize("version, right", [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False)])
def test_python_versions(monkeypatch, version, right):
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    found = doctor._python()
    assert found.ok is right
    assert bool(found.mend) is not right


def test_a_read_only_work_folder(monkeypatch, work_folder):
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path != work_folder)
    found = findings()["work folder"]
    assert found.ok is False
    assert found.detail == str(work_folder)
    assert "SERVELAB_WORK" in found.mend


def test_a_work_folder_that_is_not_there_yet(monkeypatch, work_folder):
    monkeypatch.setenv("SERVELAB_WORK", str(work_folder / "a" / "b" / "c"))
    assert findings()["work folder"].ok is True
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path != work_folder)
    assert findings()["work folder"].ok is False


def test_a_file_where_the_work_folder_should_be(monkeypatch, work_folder):
    (work_folder / "file").write_text("")
    monkeypatch.setenv("SERVELAB_WORK", str(work_folder / "file"))
    assert findings()["work folder"].ok is False


def test_a_full_disk(monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage(1, 1, 1 << 20))
    found = findings()["free disk"]
    assert found.ok is False
    assert "1 GiB" in found.mend


def test_a_unit_that_is_not_built(monkeypatch):
    monkeypatch.setattr(doctor, "units", lambda: (Unit("99_nowhere"),))
    found = findings()["notebooks"]
    assert (found.ok, found.mend) == (False, "Run: servelab build")
    assert "99_nowhere" in found.detail


def test_no_sandbox_is_no_fault(monkeypatch, sandbox):
    """Only who grades a class needs one."""
    sandbox(False, "no bubblewrap", "Install bubblewrap.")
    found = findings()["grading sandbox"]
    assert found.ok is None
    assert "no bubblewrap" in found.detail and found.mend == "Install bubblewrap."
    assert main(["doctor"]) == 0


@pytest.mark.parametrize("missing, text", [("autograder.trial", "not part of this copy"), ("fcntl", "not here")])
def test_a_grader_that_is_not_there_is_no_fault(monkeypatch, missing, text):
    """In a student's bundle, and on a system without what it is built on."""

    def absent(name, *args):
        if name == "autograder.trial":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, *args)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", absent)
    found = doctor._sandbox()
    assert found.ok is None
    assert text in found.detail
