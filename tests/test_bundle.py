"""`servelab release`: the zip for students opens, works, and gives no solution away."""

import os
import re
import subprocess
import sys
import zipfile

import pytest

from servelab import bundle
from servelab.cli import main
from servelab.paths import ROOT, units

TRIVIAL = 30  # characters; shorter lines, such as `return result`, may stand anywhere


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The bundle, made by the command, without asking whether other units are built."""
    out = tmp_path_factory.mktemp("out") / "course.zip"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "build_unit", lambda unit, write: [])
        assert main(["release", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def unpacked(released, tmp_path_factory):
    folder = tmp_path_factory.mktemp("a student's folder")
    with zipfile.ZipFile(released) as archive:
        archive.extractall(folder)
    return folder / "servelab"


def solution_lines():
    """Every line of a reference solution that says something."""
    for unit in units():
        inside = False
        for line in unit.solution.read_text(encoding="utf-8").splitlines():
            inside = (inside or "### BEGIN SOLUTION" in line) and "### END SOLUTION" not in line
            if inside and "### BEGIN SOLUTION" not in line and len(line.strip()) > TRIVIAL:
                yield line.strip()


def test_its_readme_speaks_of_nothing_that_it_lacks(unpacked):
    text = (unpacked / "README.md").read_text(encoding="utf-8")
    assert "course.py learn" in text and "torchrun" in text and "full course" not in text
    named = {name for name in re.findall(r"[\w.]+(?=[/`])", text) if (ROOT / name).exists()}
    assert "course.py" in text and all((unpacked / name).exists() for name in named - {"work"}), named
    for absent in ("course.py test", "course.py grade", "course.py exam", "benchmarks", "solutions/"):
        assert absent not in text


def run(folder, *words, **environment):
    """Python on the unpacked course, and on it only."""
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, encoding="utf-8", errors="replace"
    )


def test_what_is_in_it(released):
    with zipfile.ZipFile(released) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
    assert len(set(names)) == len(names)
    assert {name.split("/")[0] for name in names} == {"servelab"}
    tops = {name.split("/")[1] for name in names}
    assert tops == {*bundle.FILES, *bundle.FOLDERS}
    assert not [name for name in names if "__pycache__" in name or ".ipynb_checkpoints" in name or "\\" in name]
    assert "servelab/notebooks/00_start_here/00_start_here.ipynb" in names


def test_no_solution_line_is_in_it(released):
    lines = set(solution_lines())
    assert len(lines) > 5
    with zipfile.ZipFile(released) as archive:
        texts = {name: archive.read(name).decode("utf-8", errors="replace") for name in archive.namelist()}
    for name, text in texts.items():
        assert not [line for line in lines if line in text or line.replace('"', '\\"') in text], name
        assert "BEGIN SOLUTION" not in text or name in ("servelab/servelab/exam.py", "servelab/servelab/mutants.py")


def test_the_same_course_gives_the_same_bytes(released):
    assert bundle.bundle_bytes() == released.read_bytes()


def test_progress_works(unpacked, tmp_path):
    done = run(unpacked, "-m", "servelab", "progress", SERVELAB_WORK=str(tmp_path), COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert "start_here.slot_utilisation" in done.stdout
    assert "0 / 100" in done.stdout


def test_the_reference_is_not_there(unpacked):
    done = run(unpacked, "-c", "import servelab.reference.start_here")
    assert done.returncode == 1
    assert "CourseError" in done.stderr
    assert "the reference solutions of unit 00 are not part of this copy of the course" in done.stderr
    assert "Finish unit 00 and use your own code." in done.stderr


def test_a_check_works(unpacked):
    code = "from servelab.checking import check; check('start_here.slot_utilisation', lambda lengths, batch_size: 0.5)"
    done = run(unpacked, "-c", code)
    assert "not yet right" in done.stdout
    assert "CheckFailed" in done.stderr


@pytest.mark.parametrize("words", [["build"], ["test"], ["release", "x.zip"]])
def test_other_commands_refuse(unpacked, words):
    done = run(unpacked, "-m", "servelab", *words)
    assert done.returncode == 2, done.stderr
    assert "not part of this copy" in done.stderr
    assert "Traceback" not in done.stderr


def test_refuses_to_overwrite(released, monkeypatch, capsys):
    monkeypatch.setattr(bundle, "build_unit", lambda unit, write: [])
    before = released.read_bytes()
    assert main(["release", str(released)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert released.read_bytes() == before


@pytest.mark.parametrize(
    "name, problem", [("course.tar", "does not end in .zip"), ("none/course.zip", "cannot be written")]
)
def test_refuses_a_bad_name(tmp_path, monkeypatch, capsys, name, problem):
    monkeypatch.setattr(bundle, "build_unit", lambda unit, write: [])
    assert main(["release", str(tmp_path / name)]) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_refuses_what_is_stale(tmp_path, monkeypatch, capsys):
    stale = ROOT / "notebooks" / "x.ipynb"
    monkeypatch.setattr(bundle, "build_unit", lambda unit, write: [stale])
    assert main(["release", str(tmp_path / "course.zip")]) == 2
    assert f"{stale}: what is built is stale\nRun: servelab build" in capsys.readouterr().err


def test_no_half_a_bundle(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bundle, "build_unit", lambda unit, write: [])
    monkeypatch.setattr(bundle, "FILES", ("course.py", "missing.md"))
    assert main(["release", str(tmp_path / "course.zip")]) == 2
    assert "missing.md: cannot be read" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
