"""Which cells of a submission have to be run: all but the given ones that only show something.

Half of a unit's running time is pictures and try-it cells, whose outputs a graded run drops. A given cell is left out
if it is as released, is not part of the reference (no ``export`` tag), and binds no name that a cell which is run uses:
then no answer can depend on it. Where that cannot be told, as a cell looks names up at run time, everything is run.
"""

import ast
import symtable
from collections.abc import Iterator
from dataclasses import dataclass

from nbformat import NotebookNode

from servelab.notebooks import grade_id

# through these, code can reach names that it does not spell
OPAQUE_NAMES = {"globals", "locals", "vars", "eval", "exec", "get_ipython", "In", "Out", "__"}
OPAQUE_ATTRIBUTES = {"f_globals", "f_locals", "f_back", "user_ns", "__globals__", "modules"}


@dataclass(frozen=True)
class Names:
    """The notebook's global names that a cell binds, and those that it uses."""

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
    """What a cell binds and uses among the notebook's global names, or None if that cannot be read off its text."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
        tables = list(_all_tables(symtable.symtable(source, "cell", "exec")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    symbols = [(table.get_type() == "module", symbol) for table in tables for symbol in table.get_symbols()]
    names = {symbol.get_name() for _, symbol in symbols}
    reached = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    starred = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in nodes)
    if OPAQUE_NAMES & names or OPAQUE_ATTRIBUTES & reached or starred:
        return None
    known = [symbol for outside, symbol in symbols if outside or symbol.is_global()]
    bound = {symbol.get_name() for symbol in known if symbol.is_assigned() or symbol.is_imported()}
    used = {symbol.get_name() for symbol in known if symbol.is_referenced()}
    return Names(frozenset(bound), frozenset(used))


def _all_tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _all_tables(child)
