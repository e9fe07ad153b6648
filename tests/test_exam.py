"""`servelab exam` on a toy unit where everything that can be wrong is wrong, and on every real unit."""

import json
import os
import textwrap
import time
from argparse import ArgumentParser

import pytest

from servelab import exam, exercise, mutants, paths, workers
from servelab.errors import CourseError
from servelab.exam import Roots, examine, examine_all

SOLUTION = '''
# ---
# jupyter: {}
# ---

# %% [markdown]
# # A toy unit

# %% tags=["export"]
from collections import Counter

# %% nbgrader={"grade_id": "sound", "solution": true} tags=["export"]
def total(numbers: list[int]) -> int | None:
    """The sum of the numbers, None if there are none."""
    ### BEGIN SOLUTION
    if not numbers:
        return None
    result = 0
    for number in numbers:
        result += number
    return result
    ### END SOLUTION

# %% nbgrader={"grade_id": "sound-check", "grade": true, "locked": true, "points": 40}
check("TOY.sound", total)

# %% nbgrader={"grade_id": "flawed", "solution": true} tags=["export"]
def count(numbers, wanted):
    ### BEGIN SOLUTION
    found: int | None = 0
    position = 0
    while position < len(numbers):
        if numbers[position] == wanted:
            found += 1
        position += 1
    if found > 10**6:
        raise ValueError(f"{found + 1} are too many")
    return found
    ### END SOLUTION

# %% nbgrader={"grade_id": "flawed-check", "grade": true, "locked": true, "points": 50}
check("TOY.flawed", count)

# %% nbgrader={"grade_id": "words", "solution": true} tags=["export"]
answers = {"a": None}
### BEGIN SOLUTION
answers["a"] = "b"
### END SOLUTION

# %% nbgrader={"grade_id": "words-check", "grade": true, "locked": true, "points": 10}
check("TOY.words", answers)
'''

SOUND = """
from servelab.exercise import Case, CaseSpec
from servelab.plain import close, plain

ANSWERS = ("total",)
CASES = (CaseSpec("adds"), CaseSpec("one number"))

def challenges(rng):
    return [[], [5], [3, 0, -4], [rng.randint(10, 99) for _ in range(4)]]

def drive(numbers, total):
    return plain(total(numbers))

def judge(numbers, got, expected):
    return [Case("one number" if len(numbers) == 1 else "adds", close(got, expected))]
"""

# The judge looks at the count only where there is one, so it grants a stub's None and misses much.
FLAWED = """
from servelab.exercise import Case, CaseSpec
from servelab.plain import plain

ANSWERS = ("count",)
CASES = (CaseSpec("counts"), CaseSpec("runs"))

def challenges(rng):
    return [[[1, 2, 1], 1], [[rng.randint(0, 1) for _ in range(5)], 1]]

def drive(challenge, count):
    try:
        return plain(count(*challenge))
    except Exception as error:
        return type(error).__name__

def judge(challenge, got, expected):
    return [Case("counts", type(got) is not int or got >= 2), Case("runs", got != "NameError")]
"""

WORDS = """
from servelab.exercise import Case, CaseSpec
from servelab.plain import plain

ANSWERS = ("answers",)
CASES = (CaseSpec("a"),)

def challenges(rng):
    return ["a"]

def drive(name, answers):
    return plain(answers[name])

def judge(name, got, expected):
    return [Case("a", got == expected)]
"""

SOUND_ANSWERS = """
from servelab.answers import right, wrong

@wrong("first only", case="adds")
def first(reference):
    return lambda numbers: numbers[0] if numbers else None

@wrong("hangs", case="adds")
def hangs(reference):
    def total(numbers):
        while True:
            pass
    return total

@right("built in")
def built_in(reference):
    return lambda numbers: sum(numbers) if numbers else None

@right("from the reference")
def subclass(reference):
    return lambda numbers: reference.total(list(numbers))
"""

FLAWED_ANSWERS = """
from servelab.answers import right, wrong

@wrong("always seven", case="counts")
def seven(reference):
    return lambda numbers, wanted: 7

@wrong("caught elsewhere", case="runs")
def elsewhere(reference):
    return lambda numbers, wanted: 0

@right("judged too hard")
def hard(reference):
    return lambda numbers, wanted: 1

@right("breaks")
def breaks(reference):
    return reference.nothing
"""

WORDS_ANSWERS = """
from servelab.answers import right, wrong

@wrong("c", case="a")
def c(reference):
    return {"a": "c"}

@right("a copy")
def copy(reference):
    return dict(reference.answers)

@right("with more in it")
def more(reference):
    return {"a": "b", "c": 1}
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A unit of three exercises: one as it should be, one with every fault, one whose answer is data."""
    root = tmp_path_factory.mktemp("course")
    parts = {"sound": (SOUND, SOUND_ANSWERS), "flawed": (FLAWED, FLAWED_ANSWERS), "words": (WORDS, WORDS_ANSWERS)}
    unit = "toy_unit"
    for folder in (root / "exercises" / unit, root / "answers" / unit, root / "solutions"):
        folder.mkdir(parents=True)
    (root / "exercises" / unit / "__init__.py").write_text("", encoding="utf-8")
    for name, (module, answers) in parts.items():
        (root / "exercises" / unit / f"{name}.py").write_text(module, encoding="utf-8")
        (root / "answers" / unit / f"{name}.py").write_text(answers, encoding="utf-8")
    (root / "solutions" / f"00_{unit}.py").write_text(SOLUTION.replace("TOY", unit), encoding="utf-8")
    return Roots(root / "exercises", root / "solutions", root / "answers", root / "survivors.toml")


@pytest.fixture(scope="module")
def records(toy):
    names = [f"toy_unit.{name}" for name in ("sound", "flawed", "words")]
    progress = []
    found = examine_all(names, toy, jobs=2, progress=lambda *args: progress.append(args))
    assert progress[-1][0] == progress[-1][1]
    return {record.exercise.partition(".")[2]: record for record in found}


def test_a_sound_exercise_has_no_faults(records):
    record = records["sound"]
    assert record.faults() == []
    assert (record.points, record.reference, record.stub) == (40, 1, 0)
    assert record.right == {"built in": 1, "from the reference": 1}
    assert record.killed == record.total > 4


def test_a_wrong_answer_that_hangs_fails_every_case(records):
    caught = records["sound"].wrong["hangs"]
    assert caught.score == 0 and caught.failed == ("adds", "one number") and caught.right


def test_an_answer_that_is_data(records):
    record = records["words"]
    assert record.faults() == [] and record.total == 0


@pytest.mark.parametrize(
    "fault",
    [
        "the untouched stub, or one that does nothing, scores 1.00, not 0",
        "wrong answer 'always seven': must fail 'counts', failed no case",
        "wrong answer 'caught elsewhere': must fail 'runs', failed counts",
        "right answer 'judged too hard' scores 0.50, not 1",
        "named breaks: AttributeError",
        "2 wrong and 1 right answers: 1 and 2 are the least",
        "unexplained survivor",
    ],
)
def test_every_fault_is_reported(records, fault):
    assert any(found.startswith(fault) for found in records["flawed"].faults())


def test_a_hanging_mutant_counts_as_killed(records):
    record = records["flawed"]
    hanging = [change for change in record.survivors if change.before == "position += 1"]
    assert not any(change.after == "position += 0" for change in hanging)
    assert record.total > record.killed > 0


def test_annotations_and_error_texts_are_not_mutated(records):
    changes = records["flawed"].survivors
    assert {c.after for c in changes if "int | None" in c.before} == {"found: int | None = 1"}
    assert not any("too many" in change.before for change in changes)


def test_json_record(records):
    plain = json.loads(json.dumps(records["flawed"].as_plain()))
    assert list(plain) == ["unit", "exercise", "points", "reference", "stub", "wrong", "right", "mutants"]
    assert plain["wrong"]["always seven"] == {"score": 1.0, "case": None}
    assert records["sound"].as_plain()["wrong"]["first only"] == {"score": 0.5, "case": "adds"}
    survivor = plain["mutants"]["survivors"][0]
    assert survivor["where"] == "count" and survivor["reason"] == "" and survivor["line"] > 30


def test_the_kill_table_has_a_row_for_each_exercise(records):
    from rich.console import Console

    console = Console(width=80)
    with console.capture() as captured:
        console.print(exam.kill_table(list(records.values())))
    rows = [[part.strip() for part in line.split("│")[1:-1]] for line in captured.get().splitlines() if "│" in line]
    assert rows[0] == ["toy_unit", "sound", "40", "100%", "0%", "2/2", "2/2", rows[0][-1]]
    assert [row[1] for row in rows] == ["sound", "flawed", "words"]


def test_explained_survivors_are_no_faults_and_stale_explanations_are(toy, records):
    entries = [fault.split("\n", 1)[1] for fault in records["flawed"].faults() if "unexplained" in fault]
    text = "\n".join(entries).replace('reason = ""', 'reason = "the judge is a toy"')
    stale = '\n[[survivor]]\nexercise = "toy_unit.flawed"\nwhere = "gone"\noperator = "x"\nbefore = ""\nafter = ""\n'
    toy.survivors.write_text(text + stale + 'reason = "old"\n', encoding="utf-8")
    try:
        faults = examine("toy_unit.flawed", toy, jobs=2).faults()
    finally:
        toy.survivors.unlink()
    assert not any("unexplained" in fault for fault in faults)
    assert any(fault.startswith("stale explanation, no such survivor: gone | x") for fault in faults)


def loud():
    """A handler for a worker that prints past Python, as compiled libraries do."""
    return lambda task: (os.write(1, b"noise") and print("noise")) or task


def test_nothing_that_an_answer_prints_gets_between_the_json(capfd):
    assert list(workers.run_all(["a"], loud, 1)) == [("a", "a")]
    assert capfd.readouterr().out == ""


def test_too_many_equivalents_are_a_fault_of_the_unit(records):
    assert exam.unit_faults([records["sound"]]) == [] == exam.unit_faults([records["words"]])
    assert "at least 98%" in exam.unit_faults([records["flawed"]])[0]


def broken(toy, tmp_path, old, new):
    source = next(toy.solutions.iterdir())
    changed = source.read_text(encoding="utf-8").replace(old, new)
    assert changed != source.read_text(encoding="utf-8")
    (tmp_path / source.name).write_text(changed, encoding="utf-8")
    return Roots(toy.exercises, tmp_path, toy.answers, toy.survivors)


def test_a_broken_reference_is_a_fault(toy, tmp_path):
    roots = broken(toy, tmp_path, "    result = 0\n", "    result = 0 / 0\n")
    faults = examine("toy_unit.sound", roots, jobs=1).faults()
    assert any("the reference raised" in fault for fault in faults)
    assert "the reference scores 0.00, not 1" in faults


def test_an_exercise_without_its_cells_is_a_fault(toy, tmp_path):
    roots = broken(toy, tmp_path, '"sound-check"', '"other-check"')
    assert "1 exported cells 'sound' and 0 cells 'sound-check'" in examine("toy_unit.sound", roots, jobs=1).faults()[0]


def test_an_explanation_must_be_complete(toy, tmp_path):
    path = tmp_path / "survivors.toml"
    path.write_text('[[survivor]]\nexercise = "toy_unit.sound"\n', encoding="utf-8")
    with pytest.raises(CourseError, match="lacks where, operator, before, after"):
        examine("toy_unit.sound", Roots(toy.exercises, toy.solutions, toy.answers, path), jobs=1)


CELL = mutants.Cell(
    7,
    textwrap.dedent(
        '''\
        class Pool:
            """A pool of 3."""

            size: int = 2 + 1

            @property
            def free(self) -> int | None:
                given = 1 + 1
                ### BEGIN SOLUTION
                kept: int | None = 5
                raise ValueError(f"{kept + 1} blocks")
                ### END SOLUTION
                return given
        '''
    ),
    nbgrader={"grade_id": "pool", "solution": True},
)


def test_only_the_code_of_a_solution_region_is_mutated():
    found = {mutants.mutate(CELL, mutation) for mutation in mutants.mutations(CELL)} - {None}
    assert {" ".join(text.split()) for text in found} == {
        " ".join(CELL.source.replace("None = 5", f"None = {number}").split()) for number in (4, 6)
    }


def test_a_change_is_described_by_its_place_and_text():
    mutation = next(m for m in mutants.mutations(CELL) if mutants.mutate(CELL, m))
    change = mutants.describe(CELL, mutation, mutants.mutate(CELL, mutation))
    assert (change.where, change.before, change.line) == ("Pool.free", "kept: int | None = 5", 16)


def test_the_stub_is_nbgraders_own():
    source = mutants.stub(CELL).source
    assert "        # YOUR CODE HERE\n        raise NotImplementedError()\n        return given" in source
    assert mutants.stub(mutants.Cell(1, "x = 1\n")).source == "x = 1\n"


def test_cells_know_their_lines_and_metadata():
    cells = mutants.read_cells(SOLUTION)
    lines = SOLUTION.splitlines()
    assert cells[0].markdown and not cells[1].markdown and cells[1].exported and not cells[3].exported
    assert [cell.grade_id for cell in cells[2:4]] == ["sound", "sound-check"] and cells[3].nbgrader["points"] == 40
    for cell in cells:
        assert lines[cell.line - 1 : cell.line - 1 + len(cell.source.splitlines())] == cell.source.splitlines()


def make_misbehaving():
    return misbehave


def misbehave(task):
    if task == "hang":
        with workers.limited(60):
            time.sleep(60)
    if task == "exit":
        import os

        os._exit(3)
    if task == "grow":
        with workers.limited_memory():
            bytearray(4 * workers.MEMORY)
    return task


@pytest.fixture
def short_limits(monkeypatch):
    monkeypatch.setattr(workers, "WALL_LIMIT", 2.0)


def test_workers_outlive_their_tasks(short_limits):
    outcomes = dict(workers.run_all(["hang", "exit", "a", "b"], make_misbehaving, size=2))
    assert outcomes == {"hang": workers.Stopped("time"), "exit": workers.Stopped("crash"), "a": "a", "b": "b"}


def test_no_tasks_need_no_workers():
    assert list(workers.run_all([], make_misbehaving, size=2)) == []


def test_a_task_is_stopped_by_its_own_process():
    started = time.monotonic()
    with pytest.raises(workers.TimedOut), workers.limited(0.2):
        while True:
            try:
                pass
            except Exception:
                raise AssertionError from None
    assert time.monotonic() - started < 10


def test_memory_is_limited_and_given_back():
    pytest.importorskip("resource")
    with pytest.raises(MemoryError), workers.limited_memory():
        bytearray(4 * workers.MEMORY)
    assert len(bytearray(2 * workers.MEMORY)) == 2 * workers.MEMORY


def parse(*words):
    parser = ArgumentParser()
    exam.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("words", [["77"], ["--exercise", "nothing"]])
def test_wrong_use_is_explained(words):
    with pytest.raises(CourseError) as caught:
        exam.run(parse(*words))
    assert caught.value.mend


def test_explanations_name_exercises():
    known = {name for unit in paths.units() for name in exercise.names(unit.name)}
    assert {entry["exercise"] for entry in Roots().explanations()} <= known


@pytest.mark.parametrize("unit", [unit.slug for unit in paths.units()])
def test_kill_table(unit):
    records = examine_all(exercise.names(paths.find_unit(unit).name))
    faults = [f"{record.exercise}: {fault}" for record in records for fault in record.faults()]
    faults += exam.unit_faults(records)
    assert records and not faults, "\n".join(faults)
