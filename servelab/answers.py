"""Named answers that prove the judges: ``tests/answers/<unit>/<exercise>.py`` marks functions with `wrong` and `right`.

Each function takes the unit's reference module and returns the answer (or a tuple, where an exercise takes several):

    @wrong("double free accepted", case="refuses misuse")
    def double_free(reference):
        class Answer(reference.BlockAllocator): ...
        return Answer

A wrong answer must lose points in the case that it names; a right one, built differently from the reference, must earn
all of them.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from servelab.exercise import Exercise
from servelab.paths import ROOT

ANSWERS = ROOT / "tests" / "answers"


@dataclass(frozen=True)
class NamedAnswer:
    """An answer with its name and, if it is wrong, the case that must catch it."""

    name: str
    make: Callable[[ModuleType], object]
    case: str = ""

    def answers(self, reference: ModuleType) -> tuple:
        made = self.make(reference)
        return made if isinstance(made, tuple) else (made,)


def wrong(name: str, *, case: str) -> Callable:
    """Mark a function that returns an answer which must fail ``case``."""
    return lambda make: NamedAnswer(name, make, case)


def right(name: str) -> Callable:
    """Mark a function that returns an answer which must earn every point."""
    return lambda make: NamedAnswer(name, make)


def named_answers(exercise: Exercise, root: Path = ANSWERS) -> list[NamedAnswer]:
    """The exercise's named answers, in the order in which its file gives them; none without a file."""
    path = root / exercise.unit / f"{exercise.name.partition('.')[2]}.py"
    if not path.exists():
        return []
    spec = importlib.util.spec_from_file_location(f"answers_{exercise.name.replace('.', '_')}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [value for value in vars(module).values() if isinstance(value, NamedAnswer)]
