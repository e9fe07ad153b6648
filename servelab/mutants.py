"""A unit's source as cells, the stub that learners get, and mutants of the solutions.

Only code that the task is about is mutated: what lies in a solution region and is neither an annotation nor the text of
an error. The operators are cosmic-ray's, those that need no configuration.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

HEADER = re.compile(r"^# %%(?!%)(?P<options>.*)$")
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"

# Whether two equal numbers are one object is an accident of the interpreter: no judge can tell `is` from `==`, and
# other comparisons turned into `is` only repeat what turning them into `==` shows.
ACCIDENTAL = re.compile(r".*_(Is_Eq|IsNot_NotEq|(Eq|NotEq|Lt|LtE|Gt|GtE)_(Is|IsNot))")


@dataclass(frozen=True)
class Cell:
    """One cell of a py:percent file. ``line`` is its first source line in the file, counted from 1."""

    line: int
    source: str
    markdown: bool = False
    tags: tuple[str, ...] = ()
    nbgrader: dict = field(default_factory=dict, compare=False)

    @property
    def grade_id(self) -> str:
        return self.nbgrader.get("grade_id", "")

    @property
    def exported(self) -> bool:
        return "export" in self.tags


@dataclass(frozen=True)
class Mutation:
    """One use of an operator: the ``occurrence``-th place in the cell where it applies."""

    operator: str
    occurrence: int


@dataclass(frozen=True)
class Change:
    """What a mutation did, in words that survive edits elsewhere in the file."""

    operator: str
    where: str
    before: str
    after: str
    line: int = 0


def option(options: str, name: str):
    """The JSON value of ``name=`` in a cell's header, or None."""
    found = re.search(rf"(?:^|\s){name}\s*=\s*", options)
    return json.JSONDecoder().raw_decode(options[found.end() :])[0] if found else None


def read_cells(text: str) -> list[Cell]:
    """The cells of a py:percent file, without the front matter."""
    lines, cells = text.splitlines(), []
    headers = [(number, found["options"]) for number, line in enumerate(lines) if (found := HEADER.match(line))]
    stops = [number for number, _ in headers[1:]] + [len(lines)]
    for (start, options), stop in zip(headers, stops, strict=True):
        cells.append(
            Cell(
                line=start + 2,
                source="\n".join(lines[start + 1 : stop]).rstrip() + "\n",
                markdown="[markdown]" in options,
                tags=tuple(option(options, "tags") or ()),
                nbgrader=option(options, "nbgrader") or {},
            )
        )
    return cells


def solution_lines(source: str) -> set[int]:
    """The lines of a solution cell, from 1, that the release leaves out: its regions, or all of a cell without any."""
    found, inside, marked = set(), False, False
    for number, line in enumerate(source.splitlines(), start=1):
        if BEGIN in line:
            inside = marked = True
        elif END in line:
            inside = False
        elif inside:
            found.add(number)
    return found if marked else set(range(1, len(source.splitlines()) + 1))


def stub(cell: Cell, body: str = "") -> Cell:
    """The cell as learners get it, made by nbgrader itself; unchanged unless it is a solution cell.

    ``body`` is what stands there in place of what a learner is to write, if it is not nbgrader's own.
    """
    from nbformat.v4 import new_code_cell
    from nbgrader.preprocessors import ClearSolutions

    released = new_code_cell(cell.source, metadata={"nbgrader": cell.nbgrader})
    clear = ClearSolutions(code_stub={"python": body}) if body else ClearSolutions()
    released, _ = clear.preprocess_cell(released, {"language": "python"}, 0)
    return replace(cell, source=released.source)


def mutations(cell: Cell) -> Iterator[Mutation]:
    """Every use of every operator on the solution lines of a cell."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes, inside = list(ast_nodes(get_ast(cell.source))), solution_lines(cell.source)
    for name in operator_names():
        if ACCIDENTAL.fullmatch(name) or get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        spans = [span for node in nodes for span in operator.mutation_positions(node)]
        for occurrence, (start, _) in enumerate(spans):
            if start[0] in inside:
                yield Mutation(name, occurrence)


def mutate(cell: Cell, mutation: Mutation) -> str | None:
    """The mutated source of a cell, or None where the change is no change of the code or no Python."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    mutated = mutate_code(cell.source, get_operator(mutation.operator)(), mutation.occurrence)
    try:
        return mutated if mutated is not None and _meaning(mutated) != _meaning(cell.source) else None
    except SyntaxError:
        return None


def describe(cell: Cell, mutation: Mutation, mutated: str) -> Change:
    """The changed lines of a mutant and the function that they stand in."""
    old, new = cell.source.splitlines(), mutated.splitlines()
    first = next(n for n, pair in enumerate(zip([*old, None], [*new, None], strict=False)) if pair[0] != pair[1])
    same_end = 0
    while same_end < min(len(old), len(new)) - first and old[-1 - same_end] == new[-1 - same_end]:
        same_end += 1
    before, after = ("\n".join(line.strip() for line in lines[first : len(lines) - same_end]) for lines in (old, new))
    return Change(mutation.operator, _where(cell.source, first + 1), before, after, cell.line + first)


@cache
def _meaning(source: str) -> str:
    """The code without annotations and the texts of raised errors, which no task fixes."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args = [ast.Constant("") if isinstance(arg, ast.JoinedStr) else arg for arg in node.exc.args]
    return ast.dump(tree)


def _where(source: str, line: int) -> str:
    """The qualified name of the innermost function or class around a line, empty at the top level."""
    scopes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    around = [node for node in scopes if _first_line(node) <= line <= (node.end_lineno or 0)]
    return ".".join(node.name for node in sorted(around, key=_first_line))


def _first_line(scope: ast.FunctionDef | ast.ClassDef) -> int:
    return min([scope.lineno, *(decorator.lineno for decorator in scope.decorator_list)])
