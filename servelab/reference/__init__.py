"""``servelab.reference.<unit>``: the reference solutions as modules, out of the units' own source files.

Everything in ``solutions/NN_unit.py`` but its export-tagged cells is blanked, line by line, and the rest is compiled
under the file's own name, so that a traceback points at the true line. In a student's bundle there is no
``solutions/``: importing a reference then fails with an error that says so.
"""

import importlib.abc
import importlib.machinery
import re
import sys

from servelab.errors import CourseError
from servelab.paths import Unit, units

CELL = re.compile(r"^# %%(?!%)")
EXPORT = re.compile(r'tags\s*=\s*\[[^\]]*"export"')


def export_source(text: str) -> str:
    """The export-tagged cells of a py:percent file, every other line blank."""
    kept, exporting = [], False
    for line in text.splitlines():
        if CELL.match(line):
            exporting = EXPORT.search(line) is not None
            kept.append("")
        else:
            kept.append(line if exporting else "")
    return "\n".join(kept) + "\n"


class _Loader(importlib.abc.Loader):
    def __init__(self, unit: Unit):
        self.unit = unit

    def exec_module(self, module):
        if not self.unit.solution.exists():
            raise CourseError(
                f"the reference solutions of unit {self.unit.number} are not part of this copy of the course",
                where=str(self.unit.solution),
                mend=f"Finish unit {self.unit.number} and use your own code.",
            )
        source = export_source(self.unit.solution.read_text(encoding="utf-8"))
        module.__file__ = str(self.unit.solution)
        exec(compile(source, str(self.unit.solution), "exec"), module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        name = fullname.removeprefix(f"{__name__}.")
        unit = next((unit for unit in units() if unit.name == name), None) if name != fullname else None
        return importlib.machinery.ModuleSpec(fullname, _Loader(unit)) if unit else None


sys.meta_path.append(_Finder())
