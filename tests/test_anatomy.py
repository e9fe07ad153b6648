"""The anatomy of an exercise, as law for every unit's source and for every built notebook."""

import ast
import builtins
import contextlib
import importlib.util
import io
import re
import symtable
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from random import Random

import pytest

from servelab import exercise
from servelab.answers import named_answers
from servelab.exercise import PUBLIC_SEED, make_probes
from servelab.mutants import Cell, read_cells, solution_lines
from servelab.paths import Unit, units
from servelab.reference import export_source

MAX_LINES = 25  # of code in a cell or a function: blank lines, comments and docstrings do not count
MAX_SOLUTION_LINES = 80  # in a solution cell, because a class cannot be spread over cells
UNITS = [pytest.param(unit, id=unit.slug) for unit in units() if unit.solution.exists()]
EXERCISES = [
    pytest.param(unit, name, id=name) for (unit,) in (p.values for p in UNITS) for name in exercise.names(unit.name)
]
HINT = re.compile(r"<details>\s*<summary>Hint (\d+)\b")
MINUTES = re.compile(r"\b\d+ minutes\b")


@cache
def cells_of(unit: Unit) -> list[Cell]:
    return read_cells(unit.solution.read_text(encoding="utf-8"))


def position(unit: Unit, grade_id: str) -> int:
    found = [number for number, cell in enumerate(cells_of(unit)) if cell.grade_id == grade_id]
    assert len(found) == 1, f"{unit.solution.name} has {len(found)} cells with the grade_id {grade_id!r}, not one"
    return found[0]


def place(unit: Unit, cell: Cell, line: int = 1) -> str:
    return f"{unit.solution.name}:{cell.line + line - 1}"


def only_states(solution: Cell) -> bool:
    """Whether an answer only states facts: data, or a function without arguments. There is nothing to try on it."""
    defined = [n for n in ast.parse(solution.source).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    return all(isinstance(node, ast.FunctionDef) and not ast.unparse(node.args) for node in defined)


def code_lines(source: str) -> set[int]:
    """The lines that hold code: no blank lines, no comments, no docstrings."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for t in tokens if t.type not in skipped for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return lines


def lead_in(unit: Unit, name: str) -> str:
    """The Markdown between the last graded cell and an exercise's solution cell."""
    cells, number, texts = cells_of(unit), position(unit, exercise.find(name).grade_id), []
    while number and not cells[number - 1].nbgrader:
        number -= 1
        texts.insert(0, cells[number].source if cells[number].markdown else "")
    return "".join(texts)


@pytest.mark.parametrize(("unit", "name"), EXERCISES)
def test_lead_in_has_a_time_budget_and_hints(unit, name):
    text = lead_in(unit, name)
    assert MINUTES.search(text), f"{name}: the lead-in names no time budget ('about 20 minutes')"
    hints = [int(number) for number in HINT.findall(text)]
    assert hints == list(range(1, len(hints) + 1)) and 1 <= len(hints) <= 3, (
        f"{name}: hints {hints}, not 1 to 3 in order"
    )
    missing = {spec.hint for spec in exercise.find(name).cases} - set(hints)
    assert not missing, f"{name}: its cases name hints {sorted(missing)}, which the lead-in does not have"


@pytest.mark.parametrize(("unit", "name"), EXERCISES)
def test_solution_then_try_it_then_check(unit, name):
    subject, cells = exercise.find(name), cells_of(unit)
    number = position(unit, subject.grade_id)
    solution, try_it = (
        cells[number],
        [c for c in cells[number + 1 : position(unit, subject.check_id)] if not c.markdown],
    )
    assert solution.exported, f"{place(unit, solution)}: the solution cell is not tagged export"
    assert solution.nbgrader == {"grade_id": subject.grade_id, "solution": True}, place(unit, solution)
    assert try_it or only_states(solution), f"{name}: no try-it cell between solution and check"
    assert all(not cell.nbgrader and not cell.tags for cell in try_it), f"{name}: the try-it cell carries metadata"


@pytest.mark.parametrize(("unit", "name"), EXERCISES)
def test_check_cell_is_one_call(unit, name):
    subject, cells = exercise.find(name), cells_of(unit)
    check = cells[position(unit, subject.check_id)]
    expected = ", ".join([f'"{name}"', *subject.answers])
    assert check.source.strip() == f"check({expected})", place(unit, check)
    meta = dict(check.nbgrader)
    assert meta.pop("points") > 0
    assert meta == {"grade_id": subject.check_id, "grade": True, "locked": True}, place(unit, check)


@pytest.mark.parametrize("unit", UNITS)
def test_every_check_has_its_exercise_and_the_points_sum_to_100(unit):
    graded = [cell for cell in cells_of(unit) if cell.nbgrader.get("grade")]
    checks = {cell.grade_id for cell in graded if not cell.nbgrader.get("solution")}
    assert checks == {exercise.find(name).check_id for name in exercise.names(unit.name)}
    assert sum(cell.nbgrader["points"] for cell in graded) == 100


@pytest.mark.parametrize("unit", UNITS)
def test_graded_cells_are_of_known_kinds_with_kebab_case_ids(unit):
    for cell in cells_of(unit):
        if cell.nbgrader:
            assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", cell.grade_id), place(unit, cell)
            assert cell.nbgrader.get("solution") or cell.nbgrader.get("grade"), place(unit, cell)
    twice = [
        grade_id for grade_id, times in Counter(c.grade_id for c in cells_of(unit)).items() if grade_id and times > 1
    ]
    assert not twice


@pytest.mark.parametrize("unit", UNITS)
def test_every_exported_cell_belongs_to_an_exercise_or_is_given(unit):
    known = {exercise.find(name).grade_id for name in exercise.names(unit.name)}
    for cell in cells_of(unit):
        if cell.exported and cell.grade_id not in known:
            assert not cell.nbgrader and "SOLUTION" not in cell.source, place(unit, cell)
    compile(export_source(unit.solution.read_text(encoding="utf-8")), unit.solution.name, "exec")


@pytest.mark.parametrize("unit", UNITS)
def test_cells_and_functions_are_short(unit):
    long = []
    for cell in cells_of(unit):
        if cell.markdown:
            continue
        code = code_lines(cell.source)
        parts = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.FunctionDef)]
        spans = [(node.lineno, node.end_lineno, MAX_LINES, node.name) for node in parts]
        limit = MAX_SOLUTION_LINES if cell.nbgrader.get("solution") else MAX_LINES
        for first, last, most, what in [(1, len(cell.source.splitlines()), limit, "the cell"), *spans]:
            size = len(code & set(range(first, last + 1)))
            long += [f"{place(unit, cell, first)}: {what} has {size} lines, over {most}"] if size > most else []
    assert not long, "\n".join(long)


@pytest.mark.parametrize("unit", UNITS)
def test_public_functions_and_classes_are_documented_and_typed(unit):
    bare = []
    for cell in cells_of(unit):
        if not cell.exported:
            continue
        tree = ast.parse(cell.source)
        scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
        for node in (node for scope in scopes for node in scope.body):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                bare += [place(unit, cell, node.lineno)] if not ast.get_docstring(node) else []
            if isinstance(node, ast.FunctionDef):
                arguments = [
                    a for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs if a.arg != "self"
                ]
                typed = all(a.annotation for a in arguments) and (node.returns or node.name == "__init__")
                bare += [place(unit, cell, node.lineno)] if not typed and not node.name.startswith("_") else []
    assert not bare, f"no docstring or no types: {', '.join(bare)}"


@cache
def probes_of(name: str):
    subject = exercise.find(name)
    reference = importlib.import_module(f"servelab.reference.{subject.unit}")
    return make_probes(subject, Random(PUBLIC_SEED), tuple(getattr(reference, answer) for answer in subject.answers))


@pytest.mark.parametrize(("unit", "name"), EXERCISES)
def test_every_case_is_covered_and_named_by_a_wrong_answer(unit, name):
    subject, named = exercise.find(name), named_answers(exercise.find(name))
    cases = [spec.name for spec in subject.cases]
    assert len(set(cases)) == len(cases) and all(spec.weight > 0 for spec in subject.cases)
    covered = {case for probe in probes_of(name) for case in probe.cases}
    assert covered == set(cases), f"{name}: cases and what the public challenges test differ by {covered ^ set(cases)}"
    wrong = {answer.case for answer in named if answer.case}
    assert wrong == set(cases), f"{name}: cases and what the wrong answers name differ by {wrong ^ set(cases)}"
    assert sum(not answer.case for answer in named) >= 2, f"{name}: fewer than two right answers"
    assert len({answer.name for answer in named}) == len(named), f"{name}: two answers of one name"


@pytest.mark.parametrize(("unit", "name"), EXERCISES)
def test_the_smallest_challenge_comes_first_and_reads_well(unit, name):
    subject, probes = exercise.find(name), probes_of(name)
    assert len(subject.show(probes[0].challenge)) <= 1200, f"{name}: the first challenge is too large to show"
    assert all(isinstance(subject.show(probe.challenge), str) for probe in probes)


KEYWORD_ONLY = re.compile(r"[\s\W]*(?:(?:return|else|try|finally|pass|break|continue|None|self)[\s\W]*)*")


def telling_lines(unit: Unit) -> set[str]:
    """The solution lines that would give something away, without what the released part of their cell says anyway."""
    found = set()
    for cell in cells_of(unit):
        if not cell.nbgrader.get("solution") or cell.markdown:
            continue
        hidden, lines = solution_lines(cell.source), cell.source.splitlines()
        given = {line.strip() for number, line in enumerate(lines, start=1) if number not in hidden}
        kept = {lines[number - 1].strip() for number in hidden} - given
        found |= {line for line in kept if len(line) > 12 and not KEYWORD_ONLY.fullmatch(line)}
    return found


def test_what_gives_something_away():
    assert not KEYWORD_ONLY.fullmatch("return len(self._free)")
    for line in ("return self", "return None", "else:", "})", "continue"):
        assert KEYWORD_ONLY.fullmatch(line)


@pytest.mark.parametrize("unit", UNITS)
def test_no_solution_line_is_in_the_release(unit):
    import nbformat

    mend = f"run `servelab build`: {unit.release.name} is not built"
    assert unit.release.exists(), mend
    notebook = nbformat.read(unit.release, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells)
    shown = [line for line in sorted(telling_lines(unit)) if line in text]
    assert not shown, f"{unit.release.name} shows lines of the solution:\n" + "\n".join(shown)
    assert "BEGIN SOLUTION" not in text and "END SOLUTION" not in text


# -- cells that run again, in any order


class Names:
    """The global names of a cell: those that it assigns, those that it imports, those that it wants from before."""

    def __init__(self, source: str):
        table = symtable.symtable(source, "cell", "exec")
        symbols = table.get_symbols()
        self.assigned = {s.get_name() for s in symbols if s.is_assigned() and not s.is_imported()}
        self.imported = {s.get_name() for s in symbols if s.is_imported()}
        first: dict[str, bool] = {}  # whether a name is read first, by line
        uses = [node for node in _outside_functions(ast.parse(source)) if isinstance(node, ast.Name)]
        for node in sorted(uses, key=lambda node: (node.lineno, isinstance(node.ctx, ast.Load))):
            first.setdefault(node.id, isinstance(node.ctx, ast.Load))
        own = {s.get_name() for s in symbols}
        self.wanted = {name for name in own if first.get(name)} | _read_later(table)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of what runs when the cell does."""
    yield node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        for child in ast.iter_child_nodes(node):
            yield from _outside_functions(child)


def _read_later(table) -> set[str]:
    """The global names that functions read, at whatever time they are called."""
    found = set()
    for inner in table.get_children():
        comprehension = inner.get_name() in ("genexpr", "listcomp", "setcomp", "dictcomp")
        found |= {s.get_name() for s in inner.get_symbols() if s.is_global() and not comprehension} | _read_later(inner)
    return found


def conflicts(cells: list[str]) -> list[str]:
    names = [Names(cell) for cell in cells]
    assigned = Counter(name for cell in names for name in cell.assigned)
    imported = {name for cell in names for name in cell.imported}
    rebound = {name for name, times in assigned.items() if times + (name in imported) > 1}
    return [name for cell in names for name in sorted(cell.wanted & rebound)]


def test_what_a_conflict_is():
    assert conflicts(["a = 1", "a = 2", "print(a)"]) == ["a"]
    assert conflicts(["from x import a", "for a in range(2): print(a)", "print(a)"]) == ["a"]
    assert conflicts(["a = 1\ndef f():\n    return a", "a = 2"]) == ["a"]
    assert not conflicts(["a = 1\ndef f():\n    a = 2\n    return a\nprint([a for _ in f])", "a = 2\nprint(a)"])
    assert not conflicts(["def f(a):\n    return a\na = 1", "a = 2"])


@pytest.mark.parametrize("unit", UNITS)
def test_no_cell_rebinds_a_name_that_another_cell_reads(unit):
    """Else a cell that runs again, after all cells have run, would find another value, and call right answers wrong."""
    assert not conflicts([cell.source for cell in cells_of(unit) if not cell.markdown])


@pytest.mark.parametrize("unit", UNITS)
def test_no_cell_takes_a_builtin_from_the_learner(unit):
    """``for id in plan`` at the top of a cell: then the ``id(request)`` of an answer is a string's call."""
    cells = [cell for cell in cells_of(unit) if not cell.markdown]
    taken = {place(unit, cell): Names(cell.source).assigned & set(dir(builtins)) - {"_"} for cell in cells}
    assert not {where: names for where, names in taken.items() if names}


@pytest.mark.parametrize(("unit", "name"), EXERCISES)
def test_no_failing_input_takes_a_builtin_from_the_learner(unit, name):
    subject = exercise.find(name)
    for probe in probes_of(name):
        with contextlib.suppress(SyntaxError):  # some are figures, not code
            taken = Names(subject.show(probe.challenge)).assigned & set(dir(builtins))
            assert not taken, f"{name}: a shown input binds {', '.join(sorted(taken))}"
