"""Copies of a function, with what it uses of its notebook, and of its arguments: one for each simulated rank.

Functions of cells are copied with the global variables that they use. Classes, code and modules are not: each rank has
the notebook's own, so that what a rank returns is of a class that the notebook knows. Everything importable is shared.
"""

import contextlib
import io
import pickle
import types
from collections.abc import Iterator
from typing import Any

import cloudpickle

from servelab.ranks import shipping

SHARED = (type, types.CodeType, types.ModuleType)


class Original:
    """What copies are made of.

    Parameters
    ----------
    obj : object
        Its state now is what every copy starts with.

    Raises
    ------
    TypeError
        If something in it cannot be copied (a lock, an open file, a generator).
    """

    def __init__(self, obj: Any):
        file = io.BytesIO()
        pickler = _Pickler(file)
        try:
            with _modules_are_here():
                pickler.dump(obj)
        except (TypeError, pickle.PicklingError):
            shipping.dumps(obj)  # says which variable it is
            raise
        self._data, self._shared = file.getvalue(), pickler.shared

    def copy(self) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(self._data))
        unpickler.persistent_load = self._shared.__getitem__  # type: ignore[method-assign]
        return unpickler.load()


class _Pickler(cloudpickle.Pickler):
    """cloudpickle that leaves out what is shared and notes it."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.shared: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, SHARED):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1


@contextlib.contextmanager
def _modules_are_here() -> Iterator[None]:
    """Keep cloudpickle from looking through all modules for those that a function may need elsewhere: milliseconds."""
    search = cloudpickle.cloudpickle._find_imported_submodules
    try:
        cloudpickle.cloudpickle._find_imported_submodules = lambda code, dependencies: []
        yield
    finally:
        cloudpickle.cloudpickle._find_imported_submodules = search
