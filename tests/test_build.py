"""`servelab build`: the same source gives the same bytes, what is stale is found, and nothing else is rewritten."""

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module

import nbformat
import pytest

from servelab import build, exercise, plain
from servelab.cli import main
from servelab.errors import CourseError
from servelab.notebooks import grade_id, is_solution
from servelab.paths import ROOT, Unit, find_unit, units

UNIT = find_unit("00")
SOURCE = UNIT.solution.read_text(encoding="utf-8")
EXPECTED = {
    name: build.DATA / "expected" / "start_here" / f"{name}.json" for name in ("slot_utilisation", "reflection")
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Unit 00 in a course of its own, to be built and damaged."""
    for place in (UNIT.solution, UNIT.release, *EXPECTED.values()):
        copy = tmp_path / place.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(place, copy)
    for module in ("build", "paths"):
        monkeypatch.setattr(f"servelab.{module}.ROOT", tmp_path)
    monkeypatch.setattr("servelab.paths.SOLUTIONS", tmp_path / "solutions")
    monkeypatch.setattr("servelab.paths.NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(build, "DATA", tmp_path / "data")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "autograder" / "source")
    monkeypatch.setattr(build, "units", lambda: (UNIT,))
    return tmp_path


def notebook_of(text, tmp_path):
    path = tmp_path / "source.py"
    path.write_text(text, encoding="utf-8")
    return build.source_notebook(path)


def ids(notebook):
    return [cell.id for cell in notebook.cells]


@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.slug)
def test_what_is_committed_is_what_the_sources_say(unit):
    assert build.build_unit(unit, write=False) == []


def test_check_is_clean_and_writes_nothing(tree, capsys):
    before = files(tree)
    assert main(["build", "--check"]) == 0
    assert capsys.readouterr().out == "Everything built is up to date.\n"
    assert files(tree) == before


def files(tree):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tree.rglob("*") if path.is_file()}


def test_the_same_bytes_from_nothing(tree):
    """And again after that: no file is written twice."""
    before = {path: content for path, (content, _) in files(tree).items()}
    shutil.rmtree(tree / "notebooks"), shutil.rmtree(tree / "data")
    assert main(["build"]) == 0
    after = files(tree)
    instructors = tree / "autograder" / "source" / UNIT.slug / f"{UNIT.slug}.ipynb"
    assert {path: content for path, (content, _) in after.items() if path != instructors} == before
    assert "### BEGIN SOLUTION" in instructors.read_text(encoding="utf-8")
    assert build.build_unit(UNIT) == []
    assert {path: item for path, item in files(tree).items() if path != instructors} == {
        path: item for path, item in after.items() if path != instructors
    }


@pytest.mark.parametrize("place", [UNIT.release, *EXPECTED.values()], ids=lambda path: path.name)
@pytest.mark.parametrize("change", ["edit", "remove", "crlf"])
def test_stale_files_are_found_and_mended(tree, capsys, place, change):
    path = tree / place.relative_to(ROOT)
    right = path.read_bytes()
    if change == "remove":
        path.unlink()
    else:
        path.write_bytes(right.replace(b"9", b"8") if change == "edit" else right.replace(b"\n", b"\r\n"))
    assert main(["build", "--check"]) == 1
    assert capsys.readouterr().out == f"stale: {place.relative_to(ROOT)}\n"
    assert main(["build"]) == 0
    assert path.read_bytes() == right


def test_leftovers_are_removed(tree, capsys):
    """An exercise that was renamed must not leave its old challenges behind."""
    old = tree / "data" / "expected" / "start_here" / "old_name.json"
    old.write_text("{}")
    assert main(["build", "--check"]) == 1
    assert "old_name.json" in capsys.readouterr().out
    assert old.exists()
    assert main(["build"]) == 0
    assert not old.exists()


def test_last_bits_of_floats_are_not_stale(tree):
    """They differ between processors; a build must not rewrite the file for that."""
    path = tree / "data" / "expected" / "start_here" / "slot_utilisation.json"
    text = path.read_text(encoding="utf-8")
    noisy = text.replace("0.6666666666666666", "0.6666666666666667")
    assert noisy != text
    path.write_text(noisy, encoding="utf-8")
    assert build.build_unit(UNIT) == []
    assert path.read_text(encoding="utf-8") == noisy


@pytest.mark.parametrize(
    "old, new",
    [
        ("0.6666666666666666", "0.667"),
        ('"lengths":[3,1]', '"lengths":[3,2]'),
        ('"ValueError"', '"TypeError"'),
        ('"several batches",', ""),
        ('{"cases"', '{ "cases"'),
        ("]}\n", "]}"),
    ],
)
def test_changes_are_stale(tree, old, new):
    path = tree / "data" / "expected" / "start_here" / "slot_utilisation.json"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1) if old != "]}\n" else text.rstrip("\n"), encoding="utf-8")
    assert build.build_unit(UNIT, write=False) == [path]


def test_what_is_asked_is_compared_exactly():
    """The tolerance is for the reference's floats, never for what is asked."""
    found = exercise.find("start_here.slot_utilisation")
    probes = [{"challenge": [1.0], "expected": 2.0, "cases": []}]
    old = build._expected_text(found, probes)
    assert build._same_probes(found, old, [{"challenge": [1.0], "expected": 2.00001, "cases": []}])
    assert not build._same_probes(found, old, [{"challenge": [1.00001], "expected": 2.0, "cases": []}])


@pytest.mark.parametrize("old", ["", "{", "[]", "{}", '{"probes": [{}]}', '{"probes": 3}'])
def test_broken_expected_files_are_rewritten(tree, old):
    path = tree / "data" / "expected" / "start_here" / "reflection.json"
    right = path.read_text(encoding="utf-8")
    path.write_text(old, encoding="utf-8")
    assert build.build_unit(UNIT) == [path]
    assert path.read_text(encoding="utf-8") == right


def test_public_challenges_are_what_the_exercise_asks():
    """Byte for byte: whoever pins the seed gets this file's challenges on every platform."""
    from random import Random

    for name, path in EXPECTED.items():
        asked = exercise.find(f"start_here.{name}").challenges(Random(exercise.PUBLIC_SEED))
        stored = [probe["challenge"] for probe in json.loads(path.read_text(encoding="utf-8"))["probes"]]
        assert plain.dumps(asked) == plain.dumps(stored)


# The notebook.


def test_release_holds_stubs_only():
    release = nbformat.read(UNIT.release, as_version=4)
    for cell in release.cells:
        assert "BEGIN SOLUTION" not in cell.source
        assert cell.cell_type != "code" or (cell.outputs == [] and cell.execution_count is None)
        assert not is_solution(cell) or "raise NotImplementedError()" in cell.source


def test_cell_ids_are_unique_and_stable(tmp_path):
    """Upgrades find cells by id, so an edit must change no other cell's; a graded cell's is its grade_id."""
    before = ids(notebook_of(SOURCE, tmp_path))
    assert len(set(before)) == len(before)
    assert before == ids(notebook_of(SOURCE, tmp_path))
    edited = SOURCE.replace("# ## This machine", "# ## Your machine").replace(
        "### BEGIN SOLUTION\n", "### BEGIN SOLUTION\n    # x\n", 1
    )
    after = ids(notebook_of(edited, tmp_path))
    assert [(old, new) for old, new in zip(before, after, strict=True) if old != new] == [(before[3], after[3])]
    inserted = ids(
        notebook_of(SOURCE.replace("# %% [markdown]\n", "# %% [markdown]\n# new\n\n# %% [markdown]\n", 1), tmp_path)
    )
    assert inserted[1:] == before


def test_equal_cells_have_different_ids(tmp_path):
    names = ids(notebook_of("# %%\nx = 1\n\n# %%\nx = 1\n\n# %%\nx = 1\n", tmp_path))
    assert len(set(names)) == 3
    assert all(name.startswith(names[0]) for name in names)


@pytest.mark.parametrize("names", [["a", "a"], ["A"], ["a_b"], [""], ["-a"]])
def test_bad_grade_ids_are_refused(tmp_path, names):
    mark = '{"grade_id": "%s", "solution": true}'
    text = "".join(f"# %% nbgrader={mark % name}\nx = 1\n\n" for name in names)
    with pytest.raises(CourseError, match="kebab-case") as caught:
        notebook_of(text, tmp_path)
    assert "source.py" in caught.value.where


def test_graded_cells_name_exercises():
    """A check cell calls `check` on the exercise that its grade_id names, with the answers that it asks for."""
    for unit in units():
        if not unit.release.exists():
            continue
        release = nbformat.read(unit.release, as_version=4)
        source = {grade_id(cell): cell.source.strip() for cell in release.cells if grade_id(cell)}
        for name in exercise.names(unit.name):
            found = exercise.find(name)
            call = f'check("{found.name}", {", ".join(found.answers)})'
            assert source[found.check_id] == call


def test_a_reference_that_does_not_work_is_not_built(tree, monkeypatch):
    reference = import_module("servelab.reference.start_here")

    def unwritten(lengths, batch_size):
        raise NotImplementedError

    monkeypatch.setattr(reference, "slot_utilisation", unwritten)
    with pytest.raises(AssertionError, match=r"start_here\.slot_utilisation: the reference raised"):
        build.build_unit(UNIT, write=False)


def test_without_the_sources():
    with pytest.raises(CourseError, match="not part of this copy"):
        build.build_unit(Unit("99_nowhere"), write=False)


def test_in_a_path_with_spaces(tmp_path):
    """From a checkout at another place, in a process of its own, with other hash seeds: still the same bytes."""
    root = tmp_path / "my course, ü"
    shutil.copytree(ROOT / "servelab", root / "servelab", ignore=shutil.ignore_patterns("__pycache__"))
    for place in (UNIT.solution, UNIT.release, *EXPECTED.values()):
        copy = root / place.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(place, copy)
    environment = os.environ | {"PYTHONHASHSEED": "7", "LC_ALL": "C"}
    command = [sys.executable, "-m", "servelab", "build", "--check"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (0, "Everything built is up to date.\n"), done.stderr
