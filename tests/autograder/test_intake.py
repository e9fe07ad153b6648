"""What is handed in: layouts, names, zips, junk, links; and that nothing of it can do harm or be lost."""

import json
import os
import stat
import zipfile
from dataclasses import replace

import pytest
from toycourse import UNIT

from autograder import intake
from autograder.course import Course
from servelab.errors import CourseError
from servelab.paths import Unit


@pytest.fixture
def course(toy, tmp_path, monkeypatch) -> Course:
    """The toy course, as this process sees it; state in a folder of the test's own."""
    monkeypatch.setattr(
        Unit, "release", property(lambda self: toy.root / "notebooks" / self.slug / f"{self.slug}.ipynb")
    )
    monkeypatch.setattr("autograder.course.units", lambda: (Unit(UNIT),))
    return replace(Course(), root=toy.root, state=tmp_path / "state")


def taken(course, source):
    result = intake.take_in(course, source)
    return {student: course.submission(student, unit).read_bytes() for student, unit in result.submissions}, result


def test_nbgrader_and_flat_layouts(course, toy, hand_in):
    names = ("alice", "bob/any name.ipynb", "carol.ipynb", f"dan_{UNIT}.ipynb", f"eve/{UNIT}.ipynb")
    found, _ = taken(course, hand_in(dict.fromkeys(names, toy.release)))
    assert set(found) == {"alice", "bob", "carol", "dan", "eve"}


def test_flat_files_are_known_by_their_cells_not_by_their_name(course, toy, hand_in):
    nb = toy.answered()
    for cell in nb.cells:
        cell.metadata.pop("nbgrader", None)
        cell.id = f"new-{cell.id}"[:60]
    found, _ = taken(course, hand_in({"dora.ipynb": nb}))
    assert set(found) == {"dora"}


def test_a_notebook_of_something_else_is_named_not_taken(course, toy, hand_in):
    other = {"cells": [{"cell_type": "code", "source": "x = 1", "metadata": {}, "outputs": []}], "nbformat": 4}
    source = hand_in({"alice": toy.release, "bob.ipynb": json.dumps(other)})
    found, result = taken(course, source)
    assert set(found) == {"alice"}
    assert any(student == "bob" and "ignored" in text for student, text in result.remarks)


def test_junk_is_ignored(course, toy, hand_in):
    junk = {"__MACOSX/alice/._a.ipynb": "x", ".DS_Store/x.ipynb": "x", "alice/.ipynb_checkpoints/b.ipynb": "x"}
    found, result = taken(course, hand_in({"alice": toy.release, **junk}))
    assert set(found) == {"alice"}
    assert result.remarks == []


@pytest.mark.parametrize(
    "name", ["../../evil", "a b", "*", "[x]", "-rf", ".hidden", "a/../b", "王小明", "=1+1", "x" * 300]
)
def test_names_are_safe(course, name):
    clean = intake._student((name.replace("/", "_"), "n.ipynb"))
    assert clean and not set(clean) & set("/\\*?[]= '\"") and clean[0] not in "-.=@"
    assert len(clean) < 100


def test_names_of_any_script_are_kept_and_no_two_students_become_one(course):
    assert intake._student(("王小明.ipynb",)) == "王小明"
    assert intake._student(("a b", "n.ipynb")) != intake._student(("a_b", "n.ipynb"))


def test_of_two_files_the_newest_is_taken_and_reported(course, toy, hand_in):
    source = hand_in({"alice/old.ipynb": toy.release, "alice/new.ipynb": toy.answered(double="# new")})
    os.utime(source / "alice" / "old.ipynb", (1, 1))
    found, result = taken(course, source)
    assert b"# new" in found["alice"]
    assert any("old.ipynb" in text for _, text in result.remarks)


def test_what_was_handed_in_before_is_kept(course, toy, hand_in):
    taken(course, hand_in({"alice": toy.answered(double="# first")}))
    taken(course, hand_in({"alice": toy.answered(double="# second")}))
    taken(course, hand_in({"alice": toy.answered(double="# second")}))
    earlier = list((course.state / "earlier" / "alice" / UNIT).iterdir())
    assert [b"# first" in path.read_bytes() for path in earlier] == [True]


def test_time_stamps_are_checked(course, toy, hand_in):
    stamps = {f"alice/{UNIT}/timestamp.txt": "2026-01-02 03:04:05 UTC", f"bob/{UNIT}/timestamp.txt": "garbage"}
    _, result = taken(course, hand_in({"alice": toy.release, "bob": toy.release, **stamps}))
    assert (course.folder("submitted", "alice", UNIT) / "timestamp.txt").read_text().startswith("2026-01-02")
    assert not (course.folder("submitted", "bob", UNIT) / "timestamp.txt").exists()
    assert any(student == "bob" and "timestamp" in text for student, text in result.remarks)


def make_zip(path, entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (content, mode) in entries.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content)
    return path


def test_a_zip_cannot_write_elsewhere(course, toy, tmp_path):
    text = json.dumps(toy.release)
    link = (b"/etc/passwd", stat.S_IFLNK | 0o777)
    entries = {
        f"all/alice/{UNIT}/{UNIT}.ipynb": (text, 0o644),
        f"../../evil/{UNIT}/{UNIT}.ipynb": (text, 0o644),
        f"/abs/{UNIT}/{UNIT}.ipynb": (text, 0o644),
        f"all/linked/{UNIT}/{UNIT}.ipynb": link,
    }
    found, result = taken(course, make_zip(tmp_path / "all.zip", entries))
    assert set(found) == {"alice", "linked"}
    assert b"root:" not in found["linked"]
    assert any(student == "linked" and "link" in text for student, text in result.remarks)
    written = {path.name for path in tmp_path.rglob("*") if path.is_file() and course.state not in path.parents}
    assert written == {"all.zip"}


def test_a_bomb_is_not_unpacked(course, toy, tmp_path):
    entries = {"alice.ipynb": (json.dumps(toy.release), 0o644), "bomb.ipynb": (b" " * (200 << 20), 0o644)}
    found, _ = taken(course, make_zip(tmp_path / "class.zip", entries))
    assert "alice" in found
    assert all(len(data) < 40 << 20 for data in found.values())


def test_too_many_files_are_refused(course, toy, hand_in, monkeypatch):
    monkeypatch.setattr(intake, "MAX_ENTRIES", 2)
    with pytest.raises(CourseError, match="more than 2 files"):
        intake.take_in(course, hand_in(dict.fromkeys("abcd", toy.release)))


@pytest.mark.parametrize("content", [None, b"PK\x03\x04 broken", b"text"])
def test_what_is_no_collection_is_refused(course, tmp_path, content):
    path = tmp_path / "class.zip"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CourseError, match="neither a folder nor a zip"):
        intake.take_in(course, path)


def test_an_empty_folder_is_refused(course, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CourseError, match="no submission"):
        intake.take_in(course, tmp_path / "empty")
