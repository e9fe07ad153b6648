"""Reading damaged notebooks and putting submissions back into shape: nothing of the learner's is ever lost."""

import copy
import json
import os

import nbformat
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nbgrader.nbgraderformat import MetadataValidator

from servelab.errors import CourseError
from servelab.notebooks import grade_id, is_solution
from servelab.paths import find_unit
from servelab.repair import MAX_BYTES, MAX_CELLS, read_notebook, repair

RELEASE = find_unit("00").release
TEXT = RELEASE.read_text(encoding="utf-8")
ANSWER = "def slot_utilisation(lengths, batch_size):\n    return 0.5  # mine"
OTHER = "def slot_utilisation(lengths, batch_size):\n    return 0.25  # mine too"
TRY_IT = "print(slot_utilisation([1, 2], batch_size=2))"


@pytest.fixture
def release():
    return nbformat.reads(TEXT, as_version=4)


@pytest.fixture
def raw():
    """The released notebook as JSON, to be damaged."""
    return json.loads(TEXT)


@pytest.fixture
def read(tmp_path):
    """Write a notebook's text, bytes or JSON to a file and read it."""

    def write_and_read(content, **options):
        path = tmp_path / "submitted.ipynb"
        if not isinstance(content, (str, bytes)):
            content = json.dumps(content)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return read_notebook(path, **options)

    return write_and_read


@pytest.fixture
def mend(release, read):
    """Read a damaged notebook and repair it; everything that holds for every repair is checked here."""

    def read_and_repair(content, **options):
        submitted, _ = read(content)
        before = copy.deepcopy(submitted)
        repaired, notes = repair(release, submitted, **options)
        assert submitted == before
        assert_sound(repaired, release)
        return repaired, notes

    return read_and_repair


def assert_sound(repaired, release):
    MetadataValidator().validate_nb(repaired)
    kept = [cell for cell in repaired.cells if grade_id(cell)]
    assert [grade_id(cell) for cell in kept] == [grade_id(cell) for cell in release.cells if grade_id(cell)]
    assert [cell.metadata for cell in kept] == [cell.metadata for cell in release.cells if grade_id(cell)]
    ids = [cell.id for cell in repaired.cells]
    assert len(set(ids)) == len(ids)
    assert [name for name in ids if name in {cell.id for cell in release.cells}] == [cell.id for cell in release.cells]
    nbformat.validate(repaired)


def cell_of(notebook, name):
    """The cell with this grade_id or id, in a notebook or in its JSON."""
    return next(cell for cell in notebook["cells"] if name in (grade_id(cell), cell.get("id")))


def try_it(notebook):
    return next(cell for cell in notebook["cells"] if "worked example: {" in "".join(cell["source"]))


def own(source, kind="code", **more):
    extra = {"outputs": [], "execution_count": None} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": source, **extra, **more}


def sources(notebook):
    return [cell.source for cell in notebook.cells]


# Reading.


def test_every_complete_cell_of_a_truncated_file_is_read(read, raw, release):
    lines = json.dumps(raw, indent=1)
    ends, position = [], 0
    for cell in raw["cells"]:
        text = json.dumps(cell)
        decoder = json.JSONDecoder()
        position = lines.index('{\n   "cell_type"', position)
        found, position = decoder.raw_decode(lines, position)
        assert json.dumps(found) == text
        ends.append(position)
    for length in range(0, len(lines), 50):
        complete = sum(end <= length for end in ends)
        if not complete:
            with pytest.raises(CourseError, match="no cell can be read"):
                read(lines[:length])
            continue
        notebook, notes = read(lines[:length])
        assert sources(notebook) == sources(release)[:complete]
        assert f"{complete} cells could be saved" in notes[0]


def test_reading_goes_on_behind_a_break(read, raw, release):
    """Two lines lost in the middle of a file must not cost the cells below them."""
    text = json.dumps(raw, indent=1)
    start = text.index('"id": "code-fb8f220511"')
    notebook, _ = read(text[:start] + text[start + 200 :])
    assert len(notebook.cells) in (len(release.cells) - 1, len(release.cells) - 2)
    assert notebook.cells[-1].source == release.cells[-1].source


@pytest.mark.parametrize("opening", ["{", "[", '{"cell_type":', '{"cells":[', "<<<<<<< HEAD\n"])
def test_hostile_text_is_refused_in_linear_time(read, opening):
    with pytest.raises(CourseError):
        read(opening * (200_000 // len(opening)))


def test_deep_json(read, raw):
    raw["cells"][4]["outputs"] = [
        {"output_type": "display_data", "metadata": {}, "data": {"application/json": deep(40)}},
        {"output_type": "stream", "name": "stdout", "text": "kept"},
    ]
    raw["cells"][5]["metadata"] = {"nbgrader": {"grade_id": "x", "deep": deep(400)}}
    notebook, _ = read(raw)
    assert [output.output_type for output in notebook.cells[4].outputs] == ["stream"]
    assert notebook.cells[5].metadata.nbgrader == {"grade_id": "x"}
    notebook, notes = read(TEXT.replace('"metadata": {}', '"metadata": ' + "[" * 5000 + "]" * 5000, 1))
    assert len(notebook.cells) == len(raw["cells"]) - 1
    assert "RecursionError" in notes[0]


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def test_text_that_cannot_be_written(read, raw):
    """A lone surrogate is valid JSON, but no UTF-8; NaN is valid Python, but no JSON."""
    cell_of(raw, "slot-utilisation")["source"] = 'x = "\ud800"'
    raw["cells"][4]["outputs"] = [
        {"output_type": "display_data", "metadata": {}, "data": {"application/json": value}}
        for value in ("\udfff", float("nan"))
    ]
    notebook, _ = read(raw)
    nbformat.writes(notebook).encode("utf-8")
    assert notebook.cells[4].outputs == []
    assert cell_of(notebook, "slot-utilisation").source == 'x = "?"'


def test_byte_order_mark_and_foreign_bytes(read, release):
    assert sources(read(b"\xef\xbb\xbf" + TEXT.encode())[0]) == sources(release)
    notebook, _ = read(TEXT.encode().replace(b"This machine", b"This \xff\xfe machine"))
    assert len(notebook.cells) == len(release.cells)


@pytest.mark.parametrize("worksheets", [[], ["x"], [{"cells": 3}], [{}], [None]])
def test_format_3_without_cells(read, worksheets):
    notebook, notes = read({"worksheets": worksheets, "nbformat": 3})
    assert notebook.cells == []
    assert "old notebook format" in notes[0]


def test_format_3(mend, release):
    old = nbformat.v3.new_notebook(worksheets=[nbformat.v3.new_worksheet()])
    cells = old.worksheets[0].cells
    cells.append(nbformat.v3.new_heading_cell("My title", level=2))
    cells.append(nbformat.v3.new_code_cell(ANSWER))
    cells.append(nbformat.v3.new_text_cell("markdown", "My thoughts"))
    repaired, _ = mend(nbformat.v3.writes_json(old))
    assert cell_of(repaired, "slot-utilisation").source == ANSWER
    assert {"My title", "My thoughts"} <= set(sources(repaired))


CONFLICTS = ["<<<<<<< HEAD\n{ours}=======\n{theirs}>>>>>>> other\n"]
CONFLICTS.append("<<<<<<< HEAD\n{ours}||||||| base\nwhat both had\n=======\n{theirs}>>>>>>> other\n")


@pytest.mark.parametrize("conflict", CONFLICTS)
def test_git_conflict_keeps_both_sides(mend, raw, conflict):
    """Ours counts, theirs stays in front of it; a cell that only they have keeps its place."""
    cell_of(raw, "slot-utilisation")["source"] = ["OURS"]
    raw["cells"].insert(raw["cells"].index(try_it(raw)) + 1, own(["THEIRS ALONE"], id="their-own"))
    lines = json.dumps(raw, indent=1).splitlines(keepends=True)
    answer = lines.index('    "OURS"\n')
    sides = {"ours": f"    {json.dumps(ANSWER)}\n", "theirs": f"    {json.dumps(OTHER)}\n"}
    alone = next(number for number, line in enumerate(lines) if "THEIRS ALONE" in line)
    lines[answer] = conflict.format(**sides)
    lines[alone] = conflict.format(ours='    "WE ALONE"\n', theirs=lines[alone])
    repaired, _ = mend("".join(lines))
    assert cell_of(repaired, "slot-utilisation").source == ANSWER
    texts = sources(repaired)
    assert texts.index(OTHER) < texts.index(ANSWER) < texts.index("WE ALONE")
    assert texts.index(try_it(repaired).source) < texts.index("THEIRS ALONE") < texts.index("WE ALONE")


@pytest.mark.parametrize(
    "content", ["", " \n", "null", "[]", "7", '"x"', "{}", '{"cells": {}}', "PK\x03\x04", "\0" * 99]
)
def test_no_notebook(read, content):
    with pytest.raises(CourseError, match="no cell can be read"):
        read(content)


def test_what_is_not_a_file(tmp_path):
    link = tmp_path / "link.ipynb"
    link.symlink_to(RELEASE)
    for path, problem in ((tmp_path, "not a file"), (link, "symbolic link"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(CourseError, match=problem) as caught:
            read_notebook(path)
        assert caught.value.where == str(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.ipynb")
    with pytest.raises(CourseError, match="not a file"):
        read_notebook(tmp_path / "pipe.ipynb")


def test_huge_file(tmp_path):
    path = tmp_path / "huge.ipynb"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(CourseError, match="larger than 32 MiB"):
        read_notebook(path)


def test_too_many_cells(read):
    notebook, notes = read({"cells": [own("1")] * (MAX_CELLS + 5)})
    assert len(notebook.cells) == MAX_CELLS
    assert notes == [f"5 of {MAX_CELLS + 5} cells were not readable and are left out"]


def test_cells_of_every_wrong_shape(read):
    wrong = [None, 3, "x", [], {}, {"cell_type": ["code"]}, {"cell_type": "code", "source": 7}, own([1]), own({})]
    right = [own("a\nb"), own(["a\n", "b"]), own([]), {"cell_type": "raw"}, own("a", metadata=[]), own("a", id=5)]
    right += [own("a", outputs="x"), own("a", outputs=[3, {}, {"output_type": "stream"}]), own("t", "markdown")]
    notebook, notes = read({"cells": wrong + right})
    nbformat.validate(notebook)
    assert sources(notebook) == ["a\nb", "a\nb", "", "", "a", "a", "a", "a", "t"]
    assert notes == [f"{len(wrong)} of {len(wrong + right)} cells were not readable and are left out"]


def test_ids_duplicated_or_missing(mend, raw, release):
    for cell in raw["cells"]:
        cell["id"] = "same"
    cell_of(raw, "slot-utilisation")["source"] = ANSWER
    repaired, _ = mend(raw)
    assert cell_of(repaired, "slot-utilisation").source == ANSWER
    assert len(repaired.cells) == len(release.cells)
    for cell in raw["cells"]:
        del cell["id"]
    repaired, notes = mend(raw | {"nbformat_minor": 4})
    assert cell_of(repaired, "slot-utilisation").source == ANSWER
    assert len(repaired.cells) == len(release.cells)
    assert notes == []


# Repair.


def test_untouched_and_merely_answered_notebooks_need_no_repair(mend, raw, release):
    assert mend(raw) == (release, [])
    cell_of(raw, "slot-utilisation")["source"] = ANSWER
    try_it(raw)["source"] = TRY_IT
    cell_of(raw, "slot-utilisation-check")["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "hi"}]
    repaired, notes = mend(raw)
    assert notes == []
    assert cell_of(repaired, "slot-utilisation").source == ANSWER
    assert TRY_IT in sources(repaired)
    assert cell_of(repaired, "slot-utilisation-check").outputs[0].text == "hi"
    assert len(repaired.cells) == len(release.cells)


@pytest.mark.parametrize("kind", ["markdown", "raw"])
def test_changed_cell_type(mend, raw, kind):
    for name, text in (("slot-utilisation", ANSWER), ("slot-utilisation-check", None)):
        cell = cell_of(raw, name)
        cell["cell_type"] = kind
        cell["source"] = text or cell["source"]
    repaired, notes = mend(raw)
    assert cell_of(repaired, "slot-utilisation").cell_type == "code"
    assert cell_of(repaired, "slot-utilisation").source == ANSWER
    assert [note for note in notes if f"had become a {kind} cell" in note] == notes


def test_a_try_it_cell_that_became_text_stays_text(mend, raw, release):
    """Turning a cell into text is how one switches it off; repair must not switch it on again."""
    try_it(raw).update(cell_type="raw", source=TRY_IT)
    repaired, _ = mend(raw)
    assert [cell.cell_type for cell in repaired.cells if cell.source == TRY_IT] == ["raw"]
    assert len(repaired.cells) == len(release.cells) + 1


@pytest.mark.parametrize(
    "gone", [["slot-utilisation"], ["slot-utilisation-check"], ["slot-utilisation", "slot-utilisation-check"]]
)
def test_deleted_cells_come_back(mend, raw, release, gone):
    raw["cells"] = [cell for cell in raw["cells"] if cell["id"] not in gone]
    repaired, notes = mend(raw)
    assert repaired.cells == release.cells
    assert notes == [f"{name} was missing and is put back{'' if name.endswith('check') else ' empty'}" for name in gone]


def test_edited_check_cell(mend, raw, release):
    cell_of(raw, "slot-utilisation-check")["source"] = "print('passed')"
    repaired, notes = mend(raw)
    assert repaired.cells == release.cells
    assert notes == ["the given cell slot-utilisation-check had been edited; the released one is used"]


def test_stripped_metadata_is_found_by_id(mend, raw):
    for cell in raw["cells"]:
        cell["metadata"] = {}
    cell_of(raw, "slot-utilisation")["source"] = ANSWER
    repaired, notes = mend(raw)
    assert cell_of(repaired, "slot-utilisation").source == ANSWER
    assert len([note for note in notes if "had lost its nbgrader metadata" in note]) == 4


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER,
        ANSWER + "\n    return (",
        "import math\n\n" + ANSWER,
        "%matplotlib inline\n" + ANSWER,
        "slot_utilisation = max",
    ],
)
def test_nameless_solutions_are_found_by_what_they_define(mend, raw, release, answer):
    cell_of(raw, "slot-utilisation")["source"] = answer
    cell_of(raw, "reflection")["source"] = "answers: dict = {"
    for cell in raw["cells"]:
        cell["metadata"] = {}
        del cell["id"]
    repaired, _ = mend(raw)
    assert cell_of(repaired, "slot-utilisation").source == answer
    assert cell_of(repaired, "reflection").source == "answers: dict = {"
    assert len(repaired.cells) == len(release.cells)


@pytest.mark.parametrize("offset", [0, 1])
def test_of_two_copies_the_changed_one_wins(mend, raw, release, offset):
    """Copy and paste duplicates a grade_id. An untouched copy is dropped, wherever it stands."""
    stub = cell_of(raw, "slot-utilisation")
    position = raw["cells"].index(stub)
    raw["cells"].insert(position + offset, {**copy.deepcopy(stub), "id": "pasted", "source": ANSWER})
    repaired, notes = mend(raw)
    assert cell_of(repaired, "slot-utilisation").source == ANSWER
    assert len(repaired.cells) == len(release.cells)
    assert notes == [f"slot-utilisation stood 2 times; cell {position + offset + 1} was taken"]


def test_of_two_changed_copies_the_last_counts_and_both_stay(mend, raw, release):
    stub = cell_of(raw, "slot-utilisation")
    raw["cells"].insert(raw["cells"].index(stub) + 1, {**copy.deepcopy(stub), "id": "pasted", "source": ANSWER})
    stub["source"] = OTHER
    repaired, _ = mend(raw)
    assert cell_of(repaired, "slot-utilisation").source == ANSWER
    at = sources(repaired).index(ANSWER)
    assert repaired.cells[at - 1].source == OTHER
    assert not grade_id(repaired.cells[at - 1])
    assert len(repaired.cells) == len(release.cells) + 1


def test_copies_of_a_check_cell(mend, raw, release):
    check = cell_of(raw, "slot-utilisation-check")
    raw["cells"].insert(0, {**copy.deepcopy(check), "id": "pasted", "source": "check = print"})
    repaired, _ = mend(raw)
    assert cell_of(repaired, "slot-utilisation-check").source == check["source"][0]
    assert "check = print" in sources(repaired)


@pytest.mark.parametrize("change", [{"schema_version": 99}, {"points": 1000}, {"solution": True}, {"grade": "yes"}])
def test_foreign_metadata(mend, raw, release, change):
    cell_of(raw, "slot-utilisation-check")["metadata"]["nbgrader"].update(change)
    assert mend(raw) == (release, ["the nbgrader metadata of slot-utilisation-check had been changed"])


def test_unknown_grade_id(mend, raw):
    raw["cells"].append(own("mine", metadata={"nbgrader": {"grade_id": "bonus", "points": 50, "grade": True}}))
    repaired, notes = mend(raw)
    assert repaired.cells[-1].source == "mine"
    assert "nbgrader" not in repaired.cells[-1].metadata
    assert "unknown grade_id" in notes[0]


def test_moved_cells_go_back_and_own_cells_keep_their_neighbour(mend, raw, release):
    raw["cells"].reverse()
    raw["cells"].insert(0, own("first"))
    raw["cells"].insert(raw["cells"].index(cell_of(raw, "reflection")) + 1, own("behind reflection", "markdown"))
    repaired, _ = mend(raw)
    texts = sources(repaired)
    assert texts[0] == "first"
    assert texts[texts.index("behind reflection") - 1] == cell_of(release, "reflection").source
    assert [text for text in texts if text in set(sources(release))] == sources(release)


@pytest.mark.parametrize("kind", ["code", "markdown", "raw"])
def test_own_cells_stay_in_place(mend, raw, release, kind):
    for position in range(len(raw["cells"]), -1, -1):
        raw["cells"].insert(position, own(f"own {position}", kind))
    repaired, notes = mend(raw)
    assert sources(repaired)[0::2] == [f"own {n}" for n in range(len(release.cells) + 1)]
    assert sources(repaired)[1::2] == sources(release)
    assert notes == []


def test_notes_written_into_course_text_stay(mend, raw, release):
    given_text = cell_of(raw, "markdown-fedec989a6")
    given_text["source"] = [*given_text["source"], "\n\nMy note: ask about this."]
    given_text["attachments"] = {"sketch.png": {"image/png": "aGk="}}
    repaired, _ = mend(raw)
    at = [cell.id for cell in repaired.cells].index("markdown-fedec989a6")
    assert repaired.cells[at].source == cell_of(release, "markdown-fedec989a6").source
    assert repaired.cells[at + 1].source.endswith("ask about this.")
    assert repaired.cells[at + 1].attachments == given_text["attachments"]


def test_repairing_twice_changes_nothing(mend, raw, release):
    cell_of(raw, "slot-utilisation")["source"] = ANSWER
    cell_of(raw, "markdown-fedec989a6")["source"] = "my text"
    raw["cells"].insert(3, {**copy.deepcopy(cell_of(raw, "slot-utilisation")), "source": OTHER})
    once, _ = mend(raw)
    assert mend(nbformat.writes(once)) == (once, [])


# Free text.


@pytest.fixture
def essay(release):
    """A unit with a question in free text, graded by hand."""
    mark = {"grade": True, "solution": True, "locked": False, "task": False, "schema_version": 3}
    cell = nbformat.v4.new_markdown_cell("Your answer here", id="essay")
    cell.metadata["nbgrader"] = nbformat.from_dict({**mark, "grade_id": "essay", "points": 10, "cell_type": "markdown"})
    release.cells.append(cell)
    return release


def test_free_text(essay, read):
    written = copy.deepcopy(essay)
    cell = written.cells[-1]
    cell.source = "Because of fragmentation."
    cell["attachments"] = {"sketch.png": {"image/png": "aGk="}}
    submitted, _ = read(nbformat.writes(written))
    assert repair(essay, submitted) == (written, [])
    submitted.cells.append(nbformat.from_dict({**submitted.cells[-1], "id": "b", "source": "On second thoughts, no."}))
    repaired, _ = repair(essay, submitted)
    assert [cell.source for cell in repaired.cells[-2:]] == ["Because of fragmentation.", "On second thoughts, no."]
    assert repaired.cells[-1].id == "essay"
    del submitted.cells[-2:]
    assert repair(essay, submitted) == (essay, ["essay was missing and is put back empty"])


def test_free_text_without_a_name(essay, read):
    """Without metadata and id a text cell cannot be told from an own one; what was written stays all the same."""
    raw = json.loads(nbformat.writes(essay))
    raw["cells"][-1] = own("Because of fragmentation.", "markdown")
    repaired, notes = repair(essay, read(raw)[0])
    assert "Because of fragmentation." in sources(repaired)
    assert notes == ["essay was missing and is put back empty"]


# Upgrades.


@pytest.fixture
def upgrade(raw, release):
    """A newer release, in which the stub, the try-it cell, a text and a check differ and a text is new."""
    newer = copy.deepcopy(release)
    cell_of(newer, "slot-utilisation").source = "# a better stub\nraise NotImplementedError()"
    cell_of(newer, "slot-utilisation-check").source = "check('start_here.slot_utilisation', slot_utilisation) "
    for cell in (try_it(newer), cell_of(newer, "markdown-fedec989a6")):
        cell.id, cell.source = f"{cell.cell_type}-new", f"# {cell.cell_type}, in new words"
    newer.cells.insert(5, nbformat.v4.new_markdown_cell("A new paragraph", id="markdown-added"))
    return newer


def test_what_was_not_edited_is_upgraded(upgrade, raw, release, read):
    repaired, notes = repair(upgrade, read(raw)[0], base=release)
    assert repaired == upgrade
    assert notes == []


def test_what_was_edited_survives_an_upgrade(upgrade, raw, release, read):
    cell_of(raw, "slot-utilisation")["source"] = ANSWER
    try_it(raw)["source"] = TRY_IT
    cell_of(raw, "markdown-fedec989a6")["source"] = "My notes"
    raw["cells"].insert(2, own("mine", "markdown"))
    repaired, notes = repair(upgrade, read(raw)[0], base=release)
    assert_sound(repaired, upgrade)
    assert notes == []
    assert cell_of(repaired, "slot-utilisation").source == ANSWER
    assert {TRY_IT, "My notes", "mine"} <= set(sources(repaired))
    assert [text for text in sources(repaired) if text in set(sources(release)) - set(sources(upgrade))] == []


def test_an_old_stub_is_no_answer(upgrade, raw, release, read):
    """Of a written answer and a copy of the stub of an older release, the answer is taken."""
    stub = cell_of(raw, "slot-utilisation")
    raw["cells"].append({**copy.deepcopy(stub), "id": "pasted"})
    stub["source"] = ANSWER
    repaired, _ = repair(upgrade, read(raw)[0], base=release)
    assert cell_of(repaired, "slot-utilisation").source == ANSWER


# Anything at all.


SOURCES = ["", ANSWER, OTHER, "mine = 1", "mine = 2", "mine ="]
METADATA = [{}, None, {"nbgrader": 3}, *({"nbgrader": {"grade_id": name}} for name in ("reflection", "y", 3))]
CHANGES = {
    "source": st.sampled_from(SOURCES),
    "cell_type": st.sampled_from(["code", "markdown", "raw"]),
    "id": st.sampled_from(["reflection", "slot-utilisation", "slot-utilisation-check", "x", "copy-x", None]),
    "metadata": st.sampled_from(METADATA),
}


def damage(draw, cells):
    """Change a notebook's JSON as a learner, a merge tool or a converter might."""
    for _ in range(draw(st.integers(1, 8))):
        if not cells:
            return
        cell, where = draw(st.sampled_from(cells)), draw(st.integers(0, len(cells)))
        kind = draw(st.sampled_from(["delete", "copy", "move", "own", *CHANGES]))
        if kind in CHANGES:
            cell[kind] = draw(CHANGES[kind])
        if kind in ("delete", "move"):
            cells.remove(cell)
        if kind == "copy":
            cell = copy.deepcopy(cell) | {"source": draw(st.sampled_from([cell["source"], ANSWER, OTHER]))}
        if kind == "own":
            cell = own(draw(st.sampled_from(SOURCES)), draw(CHANGES["cell_type"]))
        if kind in ("copy", "move", "own"):
            cells.insert(where, cell)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_damage_loses_what_the_learner_wrote(data, read):
    release = nbformat.reads(TEXT, as_version=4)
    raw = json.loads(TEXT)
    damage(data.draw, raw["cells"])
    submitted, _ = read(raw)
    repaired, notes = repair(release, submitted)
    assert_sound(repaired, release)
    kept = {cell.source.strip() for cell in [*repaired.cells, *release.cells]} | {""}
    reported = " ".join(notes)
    for cell in submitted.cells:
        named = grade_id(cell) or cell.id
        edited_check = f"the given cell {named} had been edited" in reported
        assert cell.source.strip() in kept or edited_check, (cell, notes)
    again, _ = repair(release, repaired)
    assert again == repaired


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(start=st.integers(0, len(TEXT)), length=st.integers(0, 400), junk=st.text(max_size=20))
def test_a_hole_in_the_file_never_raises(start, length, junk, read):
    """Whatever can be read is repaired; a solution that can be read is there."""
    release = nbformat.reads(TEXT, as_version=4)
    text = TEXT.replace('"    raise NotImplementedError()"', '"    return 0.5"', 1)
    assert text != TEXT
    try:
        submitted, _ = read(text[:start] + junk + text[start + length :])
    except CourseError:
        return
    repaired, _ = repair(release, submitted)
    assert_sound(repaired, release)
    for cell in submitted.cells:
        if is_solution(cell) and grade_id(cell) in {grade_id(known) for known in release.cells if is_solution(known)}:
            assert cell.source in sources(repaired)
