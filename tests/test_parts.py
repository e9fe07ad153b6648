"""`servelab.parts`: whose code later units run, in a learner's notebook, in a student's bundle and in a graded run."""

import ast
import json
import sys
import traceback
from importlib import import_module

import nbformat
import pytest
from nbclient import NotebookClient

from servelab import work
from servelab.checking import source_hash
from servelab.errors import CourseError
from servelab.mutants import read_cells
from servelab.notebooks import grade_id
from servelab.paths import find_unit, units

UNIT, MEMORY, START = find_unit("03"), find_unit("01"), find_unit("00")
SOURCES = {
    (unit, cell.grade_id): cell.source
    for unit in (UNIT, MEMORY)
    for cell in read_cells(unit.solution.read_text(encoding="utf-8"))
    if cell.grade_id and cell.exported
}
PASSED_ON = "the saved cell is not the one that passed"


def right(name, unit=UNIT):
    """An exercise's reference cell, as if the learner had written it."""
    return SOURCES[unit, name]


def marked(name):
    """The same, with a mark on the class that it defines."""
    return f"{right(name)}\n{''.join(word.title() for word in name.split('-'))}.mine = 1\n"


def learn(unit=UNIT, *, given=None, own=(), fraction=1, source=None, **sources):
    """Write the learner's notebook: answers by grade_id with underscores, passed as they stand if nothing else is said.

    ``given`` replaces the source of given cells that start with its keys; ``own`` cells go to the end.
    """
    notebook = nbformat.read(unit.release, as_version=4)
    sources = {name.replace("_", "-"): text for name, text in sources.items()}
    for cell in notebook.cells:
        cell.source = sources.get(grade_id(cell), cell.source)
        cell.source = next((new for start, new in (given or {}).items() if cell.source.startswith(start)), cell.source)
    notebook.cells += [nbformat.v4.new_code_cell(text) for text in own]
    unit.work.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, unit.work)
    for name, text in sources.items():
        record(unit, name, {"fraction": fraction, "source": source_hash(text) if source is None else source})


def record(unit, name, kept):
    path = work.work_dir() / ".servelab" / "progress" / f"{unit.name}.{name.replace('-', '_')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept), encoding="utf-8")


@pytest.fixture(autouse=True)
def later_unit(monkeypatch, work_folder):
    """Stand where the notebook of a later unit would, in a fresh process as far as `parts` is concerned."""
    folder = work_folder / "04_later"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    for name in [name for name in sys.modules if name.startswith("servelab.parts.")]:
        del sys.modules[name]


@pytest.fixture
def bundle(monkeypatch, tmp_path):
    """A copy of the course without solutions."""
    monkeypatch.setattr("servelab.paths.SOLUTIONS", tmp_path)


def part(name="paged_kv"):
    scope = {"__name__": "__main__"}
    exec(f"from servelab.parts import {name}", scope)
    return scope[name]


def reference(name="paged_kv"):
    return import_module(f"servelab.reference.{name}")


# Whose code runs.


def test_before_anything_was_written(capsys):
    assert part().BlockAllocator is reference().BlockAllocator
    assert part("memory").kv_gib is reference("memory").kv_gib
    assert capsys.readouterr().out == "paged_kv: the reference's code\nmemory: the reference's code\n"


def test_what_passed_and_is_unchanged_is_the_learners(capsys):
    learn(block_table=marked("block-table"))
    paged_kv = part()
    assert paged_kv.BlockTable.mine
    table = paged_kv.BlockTable(paged_kv.BlockAllocator(4, 2))
    table.append(3)
    assert table.num_tokens == 3
    assert paged_kv.PrefixCache is reference().PrefixCache
    line = capsys.readouterr().out
    assert line.startswith("paged_kv: your BlockTable; the reference's BlockAllocator, ForkableTable, copy_blocks, ")
    assert line.count("\n") == 1


def test_the_references_subclass_does_not_stand_on_the_learners_class():
    """It uses helpers that only its own base class has."""
    learn(block_table="class BlockTable:\n    def __init__(self, pool):\n        self.mine = 1\n")
    paged_kv = part()
    assert paged_kv.BlockTable(None).mine
    table = paged_kv.ForkableTable(paged_kv.BlockAllocator(4, 2))
    table.append(3)
    assert table.fork().num_tokens == 3


def test_all_exercises_the_learners(capsys):
    learn(**{name: text for (unit, name), text in SOURCES.items() if unit == UNIT and name != "reflection"})
    paged_kv = part()
    assert capsys.readouterr().out == "paged_kv: your code\n"
    for name in ("BlockAllocator", "ForkableTable", "PrefixCache", "fragmentation", "violations"):
        assert getattr(paged_kv, name) is not getattr(reference(), name)
    assert issubclass(paged_kv.ForkableTable, paged_kv.BlockTable)
    assert paged_kv.Shares is reference().Shares  # given to both


def test_it_is_said_once_and_a_cells_own_output_not_repeated(capsys):
    learn(block_table=marked("block-table") + "print('from the cell')\n")
    assert part() is part()
    assert part().BlockTable.mine
    out = capsys.readouterr().out
    assert "from the cell" not in out
    assert out.count("paged_kv:") == 1


def test_given_cells_come_along_as_the_learner_edited_them():
    needs = right("block-table") + "\n\ndef halves(n):\n    return heapq.nsmallest(1, [n // 2])\n"
    learn(given={"import hashlib": "import hashlib, heapq\nfrom collections import OrderedDict"}, block_table=needs)
    assert part().halves(4) == [2]


@pytest.mark.parametrize("broken", ["1 / 0", "%matplotlib inline", "import nowhere_to_be_found"])
def test_an_edited_given_cell_that_fails_counts_as_given(broken):
    learn(given={"import hashlib": broken}, block_table=marked("block-table"))
    assert part().BlockTable.mine
    assert part().OutOfBlocks


def test_no_other_cell_runs(tmp_path):
    fatal = f"open({str(tmp_path / 'ran')!r}, 'w')"
    learn(block_table=marked("block-table"), own=[fatal])
    notebook = nbformat.read(UNIT.work, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code" and "export" not in cell.metadata.get("tags", []):
            cell.source += f"\n{fatal}"
    nbformat.write(notebook, UNIT.work)
    assert part().BlockTable.mine
    assert not (tmp_path / "ran").exists()


def test_a_given_cell_that_uses_the_learners_code_runs_on_it(monkeypatch):
    helper = "Shares = BlockTable"  # stands for a given helper below an exercise
    release = nbformat.read(UNIT.release, as_version=4)
    (cell,) = [cell for cell in release.cells if "class Shares" in cell.source]
    start, cell.source = cell.source, helper
    monkeypatch.setattr(work, "released", lambda unit: release)
    learn(given={start: helper}, block_table=marked("block-table"))
    assert part().Shares.mine


# What is passed over, and what is said then.

PASSED_OVER = {
    "failed a case": ({"fraction": 0.9, "block_table": marked("block-table")}, ""),
    "was edited after its check": ({"source": "0" * 16, "block_table": marked("block-table")}, PASSED_ON),
    "comes from several cells": ({"source": "", "block_table": marked("block-table")}, "did not come from one cell"),
    "holds a magic": ({"block_table": "%pylab\n" + marked("block-table")}, "IPython commands"),
    "does not parse": ({"block_table": marked("block-table") + "def (:"}, "no Python"),
    "raises": ({"block_table": marked("block-table") + "1 / 0"}, "it raised ZeroDivisionError"),
    "exits": ({"block_table": marked("block-table") + "raise SystemExit"}, "it raised SystemExit"),
    "uses the learner's own cell": (
        {"block_table": marked("block-table") + "def g():\n    return helper\n", "own": ["helper = 1"]},
        "it uses helper, which no exercise's cell defines",
    ),
}


@pytest.mark.parametrize("case", PASSED_OVER)
def test_passed_over(case, capsys):
    given, said = PASSED_OVER[case]
    learn(**given)
    assert part().BlockTable is reference().BlockTable
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "paged_kv: the reference's code"
    assert len(rest) == bool(said)
    if said:
        assert rest[0].startswith("  your BlockTable is not used: ")
        assert said in rest[0]


@pytest.mark.parametrize("kept", [{}, {"fraction": None}, {"fraction": True}, {"fraction": 1}])
def test_a_record_that_does_not_say_what_passed(kept):
    learn(block_table=marked("block-table"))
    record(UNIT, "block-table", kept)
    assert part().BlockTable is reference().BlockTable


@pytest.mark.parametrize("content", [b"", b"{", b'{"cells": []}'])
def test_a_broken_notebook(content):
    learn(block_table=marked("block-table"))
    UNIT.work.write_bytes(content)
    assert part().BlockTable is reference().BlockTable


def test_a_subclass_goes_with_its_base(capsys):
    learn(block_table=right("block-table"), fork=right("fork"), fraction=1)
    record(UNIT, "block-table", {"fraction": 0.5, "source": ""})
    assert part().ForkableTable is reference().ForkableTable
    assert (
        "ForkableTable, copy_blocks is not used: it builds on BlockTable, and your block-table"
        in capsys.readouterr().out
    )


def test_what_needs_a_helper_of_a_cell_that_is_passed_over_goes_with_it(capsys):
    helper = "\n\ndef _my_helper():\n    return 1\n"
    uses = marked("block-table") + "\n\ndef g():\n    return _my_helper()\n"
    learn(block_allocator=marked("block-allocator") + helper + "1 / 0", block_table=uses)
    assert part().BlockTable is reference().BlockTable
    assert "it builds on _my_helper, and your block-allocator is not used" in capsys.readouterr().out


def test_calling_a_public_function_of_another_exercise_is_no_obstacle():
    learn(MEMORY, per_rank=right("per-rank", MEMORY))
    memory = part("memory")
    assert memory.kv_bytes_per_rank is not reference("memory").kv_bytes_per_rank
    assert memory.kv_bytes_per_token is reference("memory").kv_bytes_per_token
    card = memory.model_card("llama-3.1-8b")
    args = (card, 1000, memory.Layout())
    assert memory.kv_bytes_per_rank(*args) == reference("memory").kv_bytes_per_rank(*args)


def test_a_helper_of_the_references_does_not_replace_the_learners():
    """Both call a helper the same."""
    assert "def _attention(" in right("weights", MEMORY)
    mine = (
        right("kv-cache", MEMORY) + "\n\ndef _attention():\n    return 'mine'\n\n\ndef g():\n    return _attention()\n"
    )
    learn(MEMORY, kv_cache=mine)
    assert part("memory").g() == "mine"


def test_tracebacks_show_the_learners_cell():
    learn(block_table="class BlockTable:\n    def __init__(self, pool):\n        raise KeyError(pool)\n")
    with pytest.raises(KeyError) as caught:
        part().BlockTable(7)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno) == (f"{UNIT.work}, cell block-table", 3)
    assert last.line == "raise KeyError(pool)"


# Where the reference runs, whatever the learner has.


def test_outside_the_learners_folder(monkeypatch, capsys):
    learn(block_table=marked("block-table"))
    monkeypatch.chdir(work.work_dir())  # not in a unit's folder
    assert part() is reference()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("name", "value"), [("SERVELAB_CHALLENGES", "x"), ("NBGRADER_EXECUTION", "autograde")])
def test_in_a_graded_run(monkeypatch, capsys, name, value):
    learn(block_table=marked("block-table"))
    monkeypatch.setenv(name, value)
    assert part() is reference()
    assert capsys.readouterr().out == ""


def test_nbgraders_validate_is_no_graded_run(monkeypatch):
    learn(block_table=marked("block-table"))
    monkeypatch.setenv("NBGRADER_EXECUTION", "validate")
    assert part().BlockTable.mine


def test_for_the_reference_of_a_later_unit(capsys):
    learn(block_table=marked("block-table"))
    scope = {"__name__": "servelab.reference.later"}
    exec("from servelab.parts import paged_kv", scope)
    assert scope["paged_kv"] is reference()
    assert capsys.readouterr().out == ""
    assert part().BlockTable.mine


def test_no_such_unit():
    with pytest.raises(ImportError, match="no_unit"):
        part("no_unit")


# A student's bundle.


def test_without_solutions_an_unfinished_exercise_blocks_only_what_needs_it(bundle, capsys, monkeypatch):
    learn(block_allocator=marked("block-allocator"), online_softmax=right("online-softmax"))
    paged_kv = part()
    assert paged_kv.BlockAllocator(4, 2).allocate(1)
    assert paged_kv.paged_attention_blockwise  # annotated with Tensor, which an unfinished cell imports
    with pytest.raises(CourseError) as caught:
        paged_kv.PrefixCache  # noqa: B018
    assert "exercise prefix-cache of unit 03, which is not finished" in caught.value.problem
    assert str(UNIT.work) in caught.value.mend
    assert caught.value.mend.splitlines()[1:] == ["  prefix-cache (PrefixCache): has not passed its check"]
    assert not hasattr(paged_kv, "no_such_name")
    assert capsys.readouterr().out.startswith(
        "paged_kv: your BlockAllocator, paged_attention_blockwise; not finished: BlockTable, "
    )


def test_without_solutions_what_an_unfinished_exercise_builds_on_is_named_too(bundle):
    learn(block_allocator=marked("block-allocator"), prefix_cache="class PrefixCache(ForkableTable): ...")
    with pytest.raises(CourseError) as caught:
        part().PrefixCache  # noqa: B018
    assert [line.split()[0] for line in caught.value.mend.splitlines()[1:]] == ["block-table", "fork", "prefix-cache"]


def test_without_solutions_what_calls_an_unfinished_exercise_waits_for_it(bundle, capsys):
    learn(MEMORY, capacity=right("capacity", MEMORY))
    memory = part("memory")
    assert memory.ModelCard
    with pytest.raises(CourseError, match="capacity of unit 01"):
        memory.max_tokens  # noqa: B018
    out = capsys.readouterr().out
    assert out.startswith("memory: no exercise is finished\n  your kv_room, max_tokens, max_concurrent is not used: it")


def test_without_solutions_or_folder(bundle, monkeypatch):
    """A script beside the course gets the learner's code too: there is no other."""
    learn(block_allocator=marked("block-allocator"))
    monkeypatch.chdir(work.work_dir().parent)
    assert part().BlockAllocator.mine


def test_without_solutions_a_graded_run_says_so(bundle, monkeypatch):
    monkeypatch.setenv("SERVELAB_CHALLENGES", "x")
    monkeypatch.delitem(sys.modules, "servelab.reference.paged_kv", raising=False)
    with pytest.raises(CourseError, match="not part of this copy"):
        part()


# In real kernels: what a check records is what `parts` can use.

SOLUTION = """def slot_utilisation(lengths, batch_size):
    if not lengths or batch_size < 1 or min(lengths) < 1:
        raise ValueError(lengths)
    cuts = range(0, len(lengths), batch_size)
    return sum(lengths) / sum(batch_size * max(lengths[cut : cut + batch_size]) for cut in cuts)
"""
RECORDED = {  # the cells above a check, and which of them the answer comes from; None where that is not one whole cell
    "one cell": ([SOLUTION], 0),
    "a magic, and lines at the end": (["%precision 3\n" + SOLUTION + "\n\n"], 0),
    "an older version in another cell": (["def slot_utilisation(): pass", SOLUTION], 1),
    "a newer version in another cell": ([SOLUTION, "slot_utilisation = lambda *given: 0"], 1),
    "a newer version that never ran": ([SOLUTION, "1 / 0\n" + SOLUTION], 0),
    "a decorator": (["import functools\n@functools.cache\n" + SOLUTION], 0),
    "a library": ([SOLUTION, "from statistics import mean as slot_utilisation"], None),
    "a class": (["class slot_utilisation:\n    def a(self): pass"], 0),
    "a class with data only": (["class slot_utilisation:\n    a = 1"], 0),
    "a class changed by another cell": (
        ["class slot_utilisation:\n    def a(self): pass", "slot_utilisation.b = lambda self: 1"],
        None,
    ),
    "an object that answers no questions": (
        ["class Odd:\n    def __getattr__(self, name): raise KeyError(name)", "slot_utilisation = Odd()"],
        1,
    ),
}
ASK = """from servelab import checking, exercise
print(checking._source(exercise.find("start_here.slot_utilisation"), (slot_utilisation,)))"""


def run(folder, sources):
    """Run cells in one kernel in a unit's folder; what each printed."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    folder.mkdir(parents=True, exist_ok=True)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True, resources=resources).execute()
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    sources = [source for cells, _ in RECORDED.values() for source in [*cells, ASK]]
    printed = zip(run(tmp_path_factory.mktemp("kernel"), sources), sources, strict=True)
    return dict(zip(RECORDED, (text.strip() for text, source in printed if source == ASK), strict=True))


@pytest.mark.parametrize("name", RECORDED)
def test_the_cell_that_an_answer_comes_from(recorded, name):
    cells, index = RECORDED[name]
    assert recorded[name] == ("" if index is None else source_hash(cells[index]))


def test_from_a_check_to_a_later_unit():
    learn(START)
    notebook = nbformat.read(START.work, as_version=4)
    (cell,) = [cell for cell in notebook.cells if grade_id(cell) == "slot-utilisation"]
    cell.source = SOLUTION
    nbformat.write(notebook, START.work)
    check = 'from servelab.checking import check\ncheck("start_here.slot_utilisation", slot_utilisation)'
    run(START.work.parent, [SOLUTION, check])
    use = "from servelab.parts import start_here\nprint(start_here.slot_utilisation([1, 3], 2))"
    assert run(work.work_dir() / "04_later", [use]) == ["start_here: your code\n0.6666666666666666\n"]


# In the grading sandbox.


@pytest.mark.sandbox
def test_in_the_sandbox(tmp_path):
    from autograder import sandbox, trial
    from autograder.course import Course
    from autograder.watch import Caps

    tried = trial.try_sandbox(Course())
    if not tried.works:
        pytest.skip(f"no sandbox here: {tried.problem}")
    slug = "04_continuous_batching"
    source = "from servelab.parts import paged_kv, memory\nprint(paged_kv.BlockAllocator, memory.kv_gib)"
    hidden = "import os, servelab.paths\nprint(sorted(os.listdir(servelab.paths.SOLUTIONS)))"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (source, hidden)])
    manager = sandbox.manager_for({"unit": slug, "challenges": str(tmp_path), "sandboxed": True, "caps": Caps()})
    NotebookClient(notebook, km=manager, timeout=60).execute()
    imported, seen = ("".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells)
    assert imported.startswith("<class 'servelab.reference.paged_kv.BlockAllocator'> <function kv_gib")
    assert set(ast.literal_eval(seen)) == {f"{name}.py" for name in sandbox.EARLIER[slug]}


@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.slug)
def test_the_sandbox_shows_what_a_unit_imports(unit):
    """Also what the references of these units import themselves."""
    from autograder.sandbox import EARLIER

    wanted = {unit}
    while more := {find_unit(name) for each in wanted for name in imported_parts(each)} - wanted:
        wanted |= more
    assert {each.slug for each in wanted - {unit}} <= set(EARLIER.get(unit.slug, ()))


def imported_parts(unit):
    """The names in the source's ``from servelab.parts import ...``"""
    cells = [cell.source for cell in read_cells(unit.solution.read_text(encoding="utf-8")) if not cell.markdown]
    nodes = [node for source in cells for node in ast.walk(ast.parse(source))]
    found = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "servelab.parts"]
    return {alias.name for node in found for alias in node.names}
