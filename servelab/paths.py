"""Where things lie: the course's root, a unit's notebook, the learner's ``work/``."""

import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import platformdirs

from servelab.errors import CourseError

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
NOTEBOOKS = ROOT / "notebooks"
SOLUTIONS = ROOT / "solutions"


def cache_dir() -> Path:
    """Where downloads are kept: ``$SERVELAB_CACHE``, or a folder of ours where the system keeps caches."""
    return Path(os.environ.get("SERVELAB_CACHE") or platformdirs.user_cache_path("servelab", appauthor=False))


def work_dir() -> Path:
    """The folder that the learner writes in: ``work/``, or ``$SERVELAB_WORK``."""
    return Path(os.environ.get("SERVELAB_WORK") or ROOT / "work")


@dataclass(frozen=True)
class Unit:
    """One unit of the course, named by its notebook's folder, e.g. ``03_paged_kv``."""

    slug: str

    @property
    def number(self) -> str:
        return self.slug.partition("_")[0]

    @property
    def name(self) -> str:
        """The unit's Python name, e.g. ``paged_kv``."""
        return self.slug.partition("_")[2]

    @property
    def release(self) -> Path:
        """The built notebook, as handed out."""
        return NOTEBOOKS / self.slug / f"{self.slug}.ipynb"

    @property
    def solution(self) -> Path:
        """The unit's source: course text and reference solutions."""
        return SOLUTIONS / f"{self.slug}.py"

    @property
    def work(self) -> Path:
        """The learner's copy."""
        return work_dir() / self.slug / f"{self.slug}.ipynb"


@cache
def units() -> tuple[Unit, ...]:
    """All units, in course order: those with a source, and, in a bundle without sources, those with a notebook."""
    slugs = {path.stem for path in SOLUTIONS.glob("[0-9][0-9]_*.py")}
    slugs |= {path.name for path in NOTEBOOKS.glob("[0-9][0-9]_*") if path.is_dir()}
    return tuple(Unit(slug) for slug in sorted(slugs))


def find_unit(text: str) -> Unit:
    """The unit that ``text`` names: ``03``, ``3``, ``paged_kv`` or ``03_paged_kv``."""
    for unit in units():
        if text in (unit.number, unit.number.lstrip("0") or "0", unit.name, unit.slug):
            return unit
    known = ", ".join(f"{unit.number} ({unit.name})" for unit in units())
    raise CourseError(f"there is no unit {text!r}", mend=f"Units: {known}.")


def put_bin_on_path() -> None:
    """Make the environment's programs findable: nbgrader starts ``alembic`` by name."""
    bin_folder = str(Path(sys.executable).parent)
    if bin_folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([bin_folder, os.environ.get("PATH", "")])
