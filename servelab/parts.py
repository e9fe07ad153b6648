"""``from servelab.parts import paged_kv``: what an earlier unit built, the learner's own code where it has passed.

In a notebook of the learner's, an exercise's cell is taken from their saved notebook if it passed its check and is
unchanged since; what is missing comes from the reference. In a student's bundle there is none: then a name of an
unfinished exercise raises an error that names the exercise, but only when it is used. The first import of a unit
says whose code runs; it holds until the kernel is restarted. Everywhere else - in a graded run, in a test, for the
reference solutions themselves - the reference runs.

The reference's objects live in a module of their own and never meet the learner's helpers. A learner's cell may call
the public functions of any exercise; one that extends a class of an exercise that is not theirs, or needs its helpers,
is passed over.
"""

import __future__

import ast
import builtins
import contextlib
import io
import linecache
import os
import symtable
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import ModuleType

import cloudpickle

from servelab import exercise as exercises
from servelab.checking import in_work, kept_result, source_hash
from servelab.errors import CourseError
from servelab.notebooks import grade_id
from servelab.paths import Unit, units

FOR_REFERENCE = "servelab.reference."
GIVEN_BY_PYTHON = {*dir(builtins), "__name__", "__doc__"}
NOT_PASSED = "has not passed its check"


def __getattr__(name: str) -> ModuleType:
    unit = next((unit for unit in units() if unit.name == name), None)
    if unit is None:
        raise AttributeError(f"the course has no unit {name!r}, or this copy does not hold it")
    asker = sys._getframe(1).f_globals.get("__name__", "")
    elsewhere = asker.startswith(FOR_REFERENCE) or not in_work()
    if _graded() or (elsewhere and unit.solution.exists()):
        return import_module(f"{FOR_REFERENCE}{name}")
    key = f"{__name__}.{name}"
    if key not in sys.modules:
        assembly = Assembly(unit)
        sys.modules[key] = assembly.module(key)
        print(assembly.report())
    return sys.modules[key]


def _graded() -> bool:
    return "SERVELAB_CHALLENGES" in os.environ or os.environ.get("NBGRADER_EXECUTION") == "autograde"


@dataclass(frozen=True)
class Names:
    """The global names of a cell: bound at its top level, those of these that are functions or classes, used, extended.

    Annotations use nothing: the cells are compiled so that these are never evaluated.
    """

    bound: frozenset[str]
    defined: frozenset[str]
    used: frozenset[str]
    extended: frozenset[str]


@cache
def names_of(source: str) -> Names | None:
    """The names of a cell, or None if it is no plain Python."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about the learner's code, e.g. its escapes
            tree = ast.parse(source)
            top, *inner = _tables(symtable.symtable(ast.unparse(_without_annotations(tree)), "cell", "exec"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    symbols = [*top.get_symbols(), *(s for table in inner for s in table.get_symbols() if s.is_global())]
    return Names(
        bound=frozenset(s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()),
        defined=frozenset(node.name for node in tree.body if isinstance(node, kinds)),
        used=frozenset(symbol.get_name() for symbol in symbols if symbol.is_referenced()),
        extended=frozenset(base.id for node in classes for base in node.bases if isinstance(base, ast.Name)),
    )


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _without_annotations(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return tree


@dataclass
class Part:
    """One cell of a unit that later units build on: an exercise's, or (without a name) a given one."""

    cell: str
    name: str
    given: str  # its source as released
    own: str  # its source in the learner's notebook
    answers: tuple[str, ...] = ()
    obstacle: str | None = None  # why the learner's source of an exercise does not run; None if it does

    @property
    def runs_own(self) -> bool:
        return self.obstacle is None

    @property
    def skeleton(self) -> Names:
        """The names of the released cell, which its text tells the learner."""
        names = names_of(self.given)
        assert names is not None
        return names

    @property
    def names(self) -> Names:
        """The names of the learner's source."""
        return names_of(self.own) or Names(*[frozenset[str]()] * 4)


@dataclass
class Assembly:
    """An earlier unit as one module, put together from the cells of the learner and of the reference."""

    unit: Unit
    reference: ModuleType | None = None
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.unit.solution.exists():
            self.reference = import_module(f"{FOR_REFERENCE}{self.unit.name}")
        self.parts = list(_parts(self.unit))

    @property
    def exercises(self) -> list[Part]:
        return [part for part in self.parts if part.name]

    @property
    def missing(self) -> dict[str, Part]:
        """The names that nobody has defined, with the exercise that asks for them."""
        if self.reference:
            return {}
        return {name: part for part in self.exercises if not part.runs_own for name in part.skeleton.defined}

    def module(self, key: str) -> ModuleType:
        """Run the cells. One of the learner's that raises is passed over, and all is run once more without it."""
        while True:
            self._pass_over_what_cannot_stand_alone()
            module = sys.modules[key] = ModuleType(key, f"Unit {self.unit.number} as servelab.parts puts it together.")
            try:
                if all(self._runs(part, module) for part in self.parts):
                    cloudpickle.register_pickle_by_value(module)  # no other process can import it
                    break
            finally:
                del sys.modules[key]  # it is there while cells run: dataclasses look their module up
        vars(module)["__getattr__"] = self._lookup
        return module

    def _pass_over_what_cannot_stand_alone(self) -> None:
        settled = False
        while not settled:
            settled = True
            for part in self.exercises:
                if part.runs_own and (lack := self._lacks(part)):
                    part.obstacle, settled = lack, False

    def _lacks(self, part: Part) -> str:
        """What the learner's cell needs and does not find, in words; empty if there is nothing."""
        there = {name for other in self.parts if other.runs_own for name in other.names.bound}
        for name in sorted(part.names.used - there - GIVEN_BY_PYTHON):
            others = [other for other in self.exercises if not other.runs_own]
            home = next((o for o in others if name in o.skeleton.bound | o.names.bound), None)
            if home is None:
                return f"it uses {name}, which no exercise's cell defines; define it in the cell"
            if name not in home.skeleton.bound or name in part.names.extended or name in self.missing:
                return f"it builds on {name}, and your {home.name} is not used"
        return ""

    def _runs(self, part: Part, module: ModuleType) -> bool:
        """Add one cell's names to the module. False if a source of the learner's raised; it will not run again."""
        try:
            if not part.runs_own:
                self._take_reference(part, module)
            elif not part.name and self._is_as_in_reference(part):
                self._borrow(part, module)
            else:
                _execute(part.own, f"{self.unit.work}, cell {part.cell}", module)
        except (Exception, SystemExit) as error:
            if part.name and part.runs_own:
                part.obstacle = f"it raised {exercises.describe_error(error)}"
                return False
            edited, part.own = part.own != part.given, part.given
            return not edited  # as given, only what rests on an unfinished exercise can fail
        return True

    def _is_as_in_reference(self, part: Part) -> bool:
        """Whether a given cell is unchanged and uses nothing of the learner's: then both sides share its objects."""
        theirs = {name for other in self.exercises if other.runs_own for name in other.names.defined}
        return self.reference is not None and part.own == part.given and not part.names.used & theirs

    def _take_reference(self, part: Part, module: ModuleType) -> None:
        """An exercise that is not the learner's; without a reference, only what its cell imports and names."""
        if self.reference:
            self._borrow(part, module)
        else:
            kept = [node for node in ast.parse(part.given).body if _is_plain(node)]
            _execute(ast.unparse(ast.Module(kept, [])), "<given>", module)

    def _borrow(self, part: Part, module: ModuleType) -> None:
        found = {name: value for name, value in vars(self.reference).items() if name in part.skeleton.bound}
        vars(module).update(found)

    def _lookup(self, name: str) -> object:
        part = self.missing.get(name)
        if part is None:
            raise AttributeError(f"unit {self.unit.number} ({self.unit.name}) has no {name!r}")
        todo = [f"  {p.name} ({', '.join(p.answers)}): {p.obstacle}" for p in self._open_under(part)]
        first = f"In {self.unit.work}, see that this passes its check; then save the notebook and restart this kernel:"
        raise CourseError(
            f"{name} comes from the exercise {part.name} of unit {self.unit.number}, which is not finished",
            where=f"{self.unit.name}.{name}",
            mend="\n".join([first, *todo]),
        )

    def _open_under(self, part: Part) -> list[Part]:
        """The exercise and those that the learner's code for it uses, directly or not, as far as they do not run."""
        found, names = [part], set(part.names.used)
        for other in reversed(self.exercises[: self.exercises.index(part)]):
            if names & other.skeleton.defined:
                names |= other.names.used
                found += [other] * (not other.runs_own)
        return found[::-1]

    def report(self) -> str:
        """Whose code runs, in one line, and one line for each cell of the learner's that is passed over."""
        others = "the reference's" if self.reference else "not finished:"
        own, rest = (
            [name for part in self.exercises if part.runs_own is whose for name in part.answers]
            for whose in (True, False)
        )
        if own and rest:
            first = f"your {', '.join(own)}; {others} {', '.join(rest)}"
        else:
            first = "your code" if own else "the reference's code" if self.reference else "no exercise is finished"
        told = [part for part in self.exercises if part.obstacle not in (None, NOT_PASSED)]
        lines = [f"  your {', '.join(part.answers)} is not used: {part.obstacle}" for part in told]
        return "\n".join([f"{self.unit.name}: {first}", *lines])


def _is_plain(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign))


def _parts(unit: Unit) -> Iterator[Part]:
    """The unit's exporting cells in order, without its questions."""
    from servelab.work import own_copy, released

    own = own_copy(unit)
    sources = {cell.id: cell.source for cell in own.cells} if own else {}
    for cell in released(unit).cells:
        if cell.cell_type != "code" or "export" not in cell.metadata.get("tags", []):
            continue
        part = Part(cell.id, grade_id(cell), cell.source, sources.get(cell.id, cell.source))
        if not part.name:
            part.own = part.own if names_of(part.own) else part.given
        elif not part.skeleton.defined:
            continue
        else:
            exercise = exercises.find(f"{unit.name}.{part.name.replace('-', '_')}")
            part.answers, part.obstacle = exercise.own, _not_proven(exercise.name, part.own)
        yield part


def _not_proven(exercise: str, source: str) -> str | None:
    """Why a cell of the learner's is not known to be right; None if it passed as it stands in the saved notebook."""
    kept = kept_result(exercise)
    if kept.get("fraction") != 1:
        return NOT_PASSED
    if not kept.get("source"):
        return "what passed its check did not come from one cell; put all of it in the exercise's cell and check again"
    if kept["source"] != source_hash(source):
        return "the saved cell is not the one that passed; save the notebook, run the check, restart this kernel"
    return None if names_of(source) else "its cell holds IPython commands or is no Python"


def _execute(source: str, file: str, module: ModuleType) -> None:
    """Run a cell, in silence, under a name by which tracebacks find its lines."""
    lines = source.splitlines(keepends=True)
    linecache.cache[file] = (len(source), None, lines, file)
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
        code = compile(source, file, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
        exec(code, vars(module))
