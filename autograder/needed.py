"""Which cells of a submission have to be run: all but the given ones that only show something.

Half of a unit's running time is pictures and try-it cells, whose outputs a graded run drops. A given cell is left out if
it is as released, is not part of the reference (no ``export`` tag), and binds no name that a cell which is run uses: then
no answer can depend on it. Where that cannot be told, because a cell looks names up at run time, everything is run.
"""

import ast
import re
from dataclasses import dataclass

from nbformat import NotebookNode

from servelab.notebooks import grade_id

OPAQUE = re.compile(
    r"\b(globals|locals|vars|eval|exec|get_ipython|__main__|In|Out)\b|import \*|^\s*[%!?]", re.MULTILINE
)


@dataclass(frozen=True)
class Names:
    """The names that a cell binds, at any depth, and those that it uses."""

    bound: frozenset[str]
    used: frozenset[str]


def needed(cells: list[NotebookNode], released: list[NotebookNode]) -> set[int]:
    """The indices of the code cells to run."""
    given = {cell.id: cell.source for cell in released if _is_illustration(cell)}
    code = {index: cell for index, cell in enumerate(cells) if cell.cell_type == "code"}
    run = {index for index, cell in code.items() if grade_id(cell) or given.get(cell.id) != cell.source}
    names = {index: names_of(cell.source) for index, cell in code.items()}
    while True:
        read = [names[index] for index in run]
        if None in read:
            return set(code)
        wanted = frozenset[str]().union(*(each.used for each in read if each))
        more = {index for index in set(code) - run if (each := names[index]) is None or each.bound & wanted}
        if not more:
            return run
        run |= more


def _is_illustration(cell: NotebookNode) -> bool:
    return cell.cell_type == "code" and not grade_id(cell) and "export" not in cell.metadata.get("tags", [])


def names_of(source: str) -> Names | None:
    """What a cell binds and uses, or None if that cannot be read off its text."""
    if OPAQUE.search(source):
        return None
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    bound, used = set(), set()
    for node in nodes:
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            bound |= set(node.names)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            bound.add(node.name)
    return Names(frozenset(bound), frozenset(used))
