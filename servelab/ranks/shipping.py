"""Functions of notebook cells as bytes, and tracebacks as the learner knows them.

A cell's function is pickled by value, with the cell's name (``Cell In[4]``) and its source lines, so that an error on
a rank says where it happened in the notebook even where there is no notebook. Everything importable is pickled by
reference.
"""

import contextlib
import functools
import inspect
import io
import linecache
import os
import pickle
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

INSTALLED = {"site-packages", "dist-packages"}
HARNESS = str(Path(__file__).resolve().parents[1]) + os.sep
STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_names: dict[str, str] = {}  # file name of a shipped cell -> what the learner calls it


class Frame(NamedTuple):
    """One line of a traceback: ``place`` is a cell ("Cell In[4]") or a file, ``source`` the line itself."""

    place: str
    line: int
    function: str
    source: str

    def __str__(self) -> str:
        head = f"{self.place}, line {self.line}" + (f", in {self.function}" if self.function != "<module>" else "")
        return f"{head}\n    {self.source}" if self.source else head


class _Pickler(cloudpickle.Pickler):
    """cloudpickle that keeps the file names of code (since 3.1.3 it writes ``<dynamic-code>`` instead)."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.files: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            self.files.add(obj.co_filename)
            make, args = cloudpickle.Pickler.dispatch_table[types.CodeType](obj)
            return _named_code, (make, args, obj.co_filename)
        return super().reducer_override(obj)


def _named_code(make, args: tuple, file: str) -> types.CodeType:
    return make(*args).replace(co_filename=file)


def dumps(obj: Any) -> bytes:
    """``obj`` as bytes: what cells and scripts define by value, with their source lines; the rest by reference.

    Raises
    ------
    TypeError
        If something in it cannot leave its process (a lock, an open file, a generator).
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(obj)
    except (TypeError, pickle.PicklingError) as error:
        raise TypeError(f"{_culprit(obj)} cannot be sent to another rank or process: {error}") from error
    cells = {name: (place(name), linecache.getlines(name)) for name in pickler.files if not os.path.exists(name)}
    return pickle.dumps((cells, file.getvalue()))


def dumps_by_name(obj: Any) -> bytes:
    """The same for processes that have run the same program: what has a name in it goes by that, if all of it has."""
    try:
        return pickle.dumps(({}, pickle.dumps(obj)))
    except (TypeError, AttributeError, pickle.PicklingError):
        return dumps(obj)


def _culprit(obj: Any) -> str:
    """The name of what stopped `obj` from being pickled: a global or closure variable of a function, if that is it."""
    for function in obj if isinstance(obj, tuple) else (obj,):
        if not inspect.isfunction(function):
            continue
        used = inspect.getclosurevars(function)
        for name, value in {**used.globals, **used.nonlocals}.items():
            try:
                cloudpickle.dumps(value)
            except Exception:  # pickling runs code of the value's own class
                return f"{name!r}, which {function.__qualname__} uses,"
    return f"{type(obj).__name__} object" if not isinstance(obj, tuple) else "an argument or the function"


def loads(data: bytes, own_classes: bool = False) -> Any:
    """A new copy of what `dumps` was given; tracebacks through it name the cells that it came from.

    Parameters
    ----------
    data : bytes
    own_classes : bool
        Whether classes that came from this process stay as they are here. Else they take over, methods and all, what
        they are in ``data``.
    """
    cells, payload = pickle.loads(data)
    for name, (place, lines) in cells.items():
        _names[name] = place
        if lines:
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return _Homecoming(io.BytesIO(payload)).load() if own_classes else pickle.loads(payload)


class _Homecoming(pickle.Unpickler):
    """Finds classes of this process that cloudpickle has shipped before, and leaves them as they are.

    cloudpickle knows them again by a number, but gives them the methods that they had elsewhere, with the global
    variables of there.
    """

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._own = list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values())

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return functools.partial(self._set_up, found) if name == "_class_setstate" else found

    def _set_up(self, set_state: Callable, cls: type, state: Any) -> type:
        return cls if any(cls is own for own in self._own) else set_state(cls, state)


def frames(where: types.TracebackType | Iterable[traceback.FrameSummary] | None) -> list[Frame]:
    """The learner's own lines in a traceback, or in a stack from `traceback.extract_stack`, outermost first.

    Frames of libraries and of this package are left out, unless nothing else is there: then the innermost stays.
    """
    if where is None:
        return []
    stack = list(traceback.extract_tb(where) if isinstance(where, types.TracebackType) else where)
    own = [frame for frame in stack if not foreign(frame.filename)] or stack[-1:]
    return [Frame(place(f.filename), f.lineno or 0, f.name, f.line or "") for f in own]


def frame(file: str, line: int, function: str) -> Frame:
    """A frame of which only the position is known."""
    return Frame(place(file), line, function, linecache.getline(file, line).strip())


def show(stack: Iterable[Frame], indent: str = "  ") -> str:
    """Frames as indented text, two lines each."""
    return "\n".join(indent + line for frame in stack for line in str(frame).split("\n"))


def place(file: str) -> str:
    """What the learner calls a file of code: its cell, or its path from here."""
    cell = _cell(file) or _names.get(file)
    if cell:
        return cell
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


@functools.cache
def foreign(file: str) -> bool:
    """Whether a file belongs to Python, to a library or to this package, and not to the learner."""
    return file.startswith(("<frozen", "<string>", HARNESS, *STDLIB)) or bool(INSTALLED & set(Path(file).parts))


def _cell(file: str) -> str | None:
    """``Cell In[4]``, if this process is a notebook kernel and the file one of its cells."""
    getipython = sys.modules.get("IPython.core.getipython")
    shell = getipython.get_ipython() if getipython else None
    if shell is None:
        return None
    with contextlib.suppress(AttributeError, TypeError):  # another IPython, or not a cell
        return " ".join(shell.compile.format_code_name(file))
    return None
