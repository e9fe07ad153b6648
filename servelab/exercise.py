"""One exercise: challenge -> drive -> transcript -> judge -> verdict. Plain data in, plain data out.

An exercise is a module ``servelab/exercises/<unit>/<exercise>.py`` with

- ``ANSWERS``: the names of the learner's objects that the check cell passes, in order;
- ``CASES``: the things a judge looks at, as `CaseSpec`;
- ``challenges(rng) -> list``: what is asked, smallest first, as plain data;
- ``drive(challenge, *answers) -> transcript``: use the learner's objects and write down what they did, as plain data;
- ``judge(challenge, transcript, expected) -> list[Case]``: pure; names only the cases that this challenge tests;
- optionally ``show(challenge) -> str``: the challenge as a learner should read it;
- optionally ``EARLIER``: those of ``ANSWERS`` that earlier exercises ask for and this one runs, too;
- optionally ``COMPARED = False``, where the judge never looks at ``expected``: then nobody stores it.

Of an error that escapes ``drive`` the verdict shows the first 300 characters. An error class whose message is a report
of several lines says so by ``is_report = True``; then it shows up to `plain.MAX_TEXT`. One that was raised because the
learner's code had not come to an end says so by ``never_ends = True``; then no further challenge is tried.
"""

import copy
import hashlib
import importlib
import inspect
import pkgutil
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from types import FrameType, ModuleType
from typing import Any

from servelab import plain
from servelab.errors import CourseError
from servelab.threads import one_thread

PUBLIC_SEED = 2026
MAX_ERROR = 300  # of its message
NOT_RUN: dict = {}  # the outcome of a challenge that was passed over
OPEN_PART = "open part"  # the type of what is recorded when another exercise's answer is still a stub
CELL_FILE = re.compile(r"^<ipython-input|ipykernel_\d+[\\/]")  # how IPython names the code of a cell


@dataclass(frozen=True)
class CaseSpec:
    """A case as the exercise defines it: its name, the hint to open when it fails, and its share of the points.

    ``alone`` is False where code that does nothing, or refuses everything, passes: "leaves its input alone". Such a
    case counts only if one that counts alone has passed.
    """

    name: str
    hint: int = 1
    weight: int = 1
    alone: bool = True


@dataclass(frozen=True)
class Case:
    """A case as one judged challenge left it.

    ``message`` says what was expected, what came, and at which step; ``hint`` is the one to open, where this failure
    tells more than the case's own; 0 if none helps.
    """

    name: str
    passed: bool
    message: str = ""
    hint: int | None = None


@dataclass(frozen=True)
class Probe:
    """A challenge with the reference's own transcript of it, if it is compared, and the names of the cases it tests."""

    challenge: Any
    expected: Any
    cases: tuple[str, ...]

    def as_plain(self) -> dict:
        return {"challenge": self.challenge, "expected": self.expected, "cases": list(self.cases)}

    @classmethod
    def from_plain(cls, data: dict) -> "Probe":
        return cls(data["challenge"], data["expected"], tuple(data["cases"]))


@dataclass(frozen=True)
class CaseVerdict:
    """A case over all challenges: how many tested it, and the first (smallest) one that it failed on.

    ``judged`` is False where no judge found it wrong: the runs that should have tested it ended before. It earns
    nothing all the same.
    """

    spec: CaseSpec
    covered: int
    message: str = ""
    failed_on: int | None = None
    failure_hint: int | None = None
    judged: bool = True

    @property
    def passed(self) -> bool:
        return self.covered > 0 and self.failed_on is None

    @property
    def hint(self) -> int:
        """The hint to open when it failed."""
        return self.spec.hint if self.failure_hint is None else self.failure_hint


@dataclass(frozen=True)
class Verdict:
    """What a judge decided about one answer."""

    exercise: str
    cases: tuple[CaseVerdict, ...]
    note: str = ""  # why nothing could be judged; or where else the fault may lie

    @property
    def passed(self) -> bool:
        return bool(self.cases) and all(case.passed for case in self.cases)

    @property
    def unjudged(self) -> int:
        """The number of cases that no judge found right or wrong."""
        return sum(not case.judged for case in self.cases)

    @property
    def fraction(self) -> float:
        """The share of the points earned, 0 to 1."""
        total = sum(case.spec.weight for case in self.cases)
        return sum(case.spec.weight for case in self.cases if case.passed) / total if total else 0.0

    def score(self, points: float) -> float:
        """Points out of ``points``, to two decimals; full points only when every case passed."""
        return float(points) if self.passed else min(round(self.fraction * points, 2), points)

    @property
    def first_failure(self) -> CaseVerdict | None:
        """The first failed case, in the exercise's order: from basic to special; a judged one, if there is any."""
        failed = [case for case in self.cases if not case.passed]
        return next((case for case in failed if case.judged), failed[0] if failed else None)


@dataclass(frozen=True)
class Exercise:
    """An exercise, as the functions of its module."""

    name: str
    answers: tuple[str, ...]
    cases: tuple[CaseSpec, ...]
    challenges: Callable[[Random], list]
    drive: Callable[..., Any]
    judge: Callable[[Any, Any, Any], Iterable[Case]]
    version: str
    show: Callable[[Any], str] = field(default=plain.dumps)
    compared: bool = True  # whether the judge needs the reference's transcripts
    earlier: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        return self.name.partition(".")[0]

    @property
    def own(self) -> tuple[str, ...]:
        """The answers that its own solution cell defines."""
        return tuple(name for name in self.answers if name not in self.earlier)

    @property
    def grade_id(self) -> str:
        """Of its solution cell; its check cell has ``-check`` behind it."""
        return self.name.partition(".")[2].replace("_", "-")

    @property
    def check_id(self) -> str:
        return f"{self.grade_id}-check"

    def spec(self, name: str) -> CaseSpec:
        return next(spec for spec in self.cases if spec.name == name)


def from_module(module: ModuleType) -> Exercise:
    """Read an exercise off its module."""
    unit, name = module.__name__.split(".")[-2:]
    return Exercise(
        name=f"{unit}.{name}",
        answers=module.ANSWERS,
        cases=module.CASES,
        challenges=module.challenges,
        drive=module.drive,
        judge=module.judge,
        version=_version(module),
        show=getattr(module, "show", plain.dumps),
        compared=getattr(module, "COMPARED", True),
        earlier=getattr(module, "EARLIER", ()),
    )


def _version(module: ModuleType) -> str:
    """A name for this driver and judge: the exercise's source and that of its unit's helpers, ``_*.py``."""
    helpers = Path(inspect.getfile(module)).parent.glob("_[!_]*.py")
    sources = [inspect.getsource(module), *(path.read_text(encoding="utf-8") for path in sorted(helpers))]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:12]


@cache
def find(name: str) -> Exercise:
    """The exercise called ``unit.exercise``, e.g. ``paged_kv.block_allocator``."""
    unit, _, exercise = name.partition(".")
    if not (unit.isidentifier() and exercise.isidentifier()):
        raise CourseError(f"{name!r} is not the name of an exercise", mend="Names look like paged_kv.block_allocator.")
    target = f"servelab.exercises.{unit}.{exercise}"
    try:
        return from_module(importlib.import_module(target))
    except ModuleNotFoundError as error:
        if error.name not in (target, f"servelab.exercises.{unit}"):
            raise
        raise CourseError(f"there is no exercise {name!r}", mend="Restore the check cell: servelab restore.") from None


def names(unit: str) -> list[str]:
    """The names of a unit's exercises: the modules of its package that do not start with an underscore."""
    package = importlib.import_module(f"servelab.exercises.{unit}")
    return sorted(f"{unit}.{m.name}" for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def record(exercise: Exercise, challenge: Any, answers: tuple) -> dict:
    """Drive an answer through a copy of one challenge. Whatever escapes the driver is the outcome ``raised``."""
    try:
        with one_thread():
            return {"transcript": plain.loads(plain.dumps(exercise.drive(copy.deepcopy(challenge), *answers)))}
    except NotImplementedError as error:
        part = raiser(error)
        earlier = _asked_by(part, exercise)
        if earlier:
            message = f"{part} (exercise {earlier}) is not written yet, and this check runs it"
            return {"raised": {"type": OPEN_PART, "message": message}}
        return {"raised": {"type": NotImplementedError.__name__, "message": f"{part} is not written yet"}}
    except CourseError as error:  # of `servelab.parts`: an exercise of another unit
        message = f"what this builds on is not written yet: {_message(error)}"
        return {"raised": {"type": OPEN_PART, "message": message}}
    except (Exception, SystemExit) as error:
        raised = {"type": plain.type_name(error), "message": _message(error) + _place(error)}
        return {"raised": raised | ({"never_ends": True} if getattr(error, "never_ends", False) is True else {})}


def record_all(exercise: Exercise, challenges: list, answers: tuple) -> list[dict]:
    """The outcome of each challenge; after one that did not come to an end, nothing is run any more."""
    recorded = [NOT_RUN] * len(challenges)
    for index, challenge in enumerate(challenges):
        recorded[index] = record(exercise, challenge, answers)
        if never_ended(recorded[index]):
            break
    return recorded


def never_ended(outcome: dict) -> bool:
    """Whether the learner's code had to be stopped."""
    return bool(outcome.get("raised", {}).get("never_ends"))


def describe_error(error: BaseException) -> str:
    """What the learner's code raised, as they should read it: type, message, and the line of their cell, if known."""
    message = _message(error)
    return f"{plain.type_name(error)}{': ' if message else ''}{message}{_place(error)}"


def _message(error: BaseException) -> str:
    try:
        return plain.text(error, plain.MAX_TEXT if getattr(error, "is_report", False) is True else MAX_ERROR)
    except Exception:  # an error that cannot say what it is
        return ""


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    return list(traceback.walk_tb(error.__traceback__))


def _place(error: BaseException) -> str:
    """The last line of a notebook's cell that the error passed through, in brackets; empty outside a notebook.

    A method that a class inherits stands in another cell than the class, so the function is named, too.
    """
    cells = [(frame, line) for frame, line in _frames(error) if CELL_FILE.search(frame.f_code.co_filename)]
    if not cells:
        return ""
    frame, line = cells[-1]
    return f" ({frame.f_code.co_qualname.partition('.<locals>')[0]}, line {line} of its cell)"


def raiser(error: BaseException) -> str:
    """The function that raised, e.g. ``BlockAllocator.free``; the drivers' own raise for what is not written at all."""
    code = _frames(error)[-1][0].f_code
    ours = Path(__file__).parent in Path(code.co_filename).parents
    return "this" if ours else code.co_qualname.rpartition("<locals>.")[2]


def _asked_by(part: str, exercise: Exercise) -> str:
    """The other exercise of the unit whose answer a function belongs to; empty if it is none's."""
    answer = part.partition(".")[0]
    if answer in exercise.own:
        return ""
    others = (find(name) for name in names(exercise.unit))
    return next((other.name.partition(".")[2] for other in others if answer in other.own), "")


def make_probes(exercise: Exercise, rng: Random, reference: tuple) -> list[Probe]:
    """Challenges with the reference's transcripts. Raises `AssertionError` if the reference fails its own judge."""
    probes = []
    for challenge in exercise.challenges(rng):
        challenge = plain.loads(plain.dumps(challenge))  # exactly what a submission will be given
        recorded = record(exercise, challenge, reference)
        assert "transcript" in recorded, f"{exercise.name}: the reference raised {recorded['raised']} on {challenge}"
        transcript = recorded["transcript"]
        expected = transcript if exercise.compared else None
        cases = list(exercise.judge(challenge, transcript, expected))
        failed = [case for case in cases if not case.passed]
        assert not failed, f"{exercise.name}: the reference fails its own judge: {failed[0]}"
        probes.append(Probe(challenge, expected, tuple(case.name for case in cases)))
    return probes


def judge(exercise: Exercise, probes: list[Probe], recorded: Any) -> Verdict:
    """Judge the recorded outcomes of all probes, in order. Whatever is missing or malformed fails; nothing raises."""
    outcomes = recorded if isinstance(recorded, list) and len(recorded) == len(probes) else [None] * len(probes)
    covered = dict.fromkeys((spec.name for spec in exercise.cases), 0)
    failures: dict[str, tuple[int, Case]] = {}
    unjudged: dict[str, tuple[int, Case]] = {}
    for index, (probe, outcome) in enumerate(zip(probes, outcomes, strict=True)):
        found: dict[str, Case] = {}
        for case in _judge_one(exercise, probe, outcome):
            if found.setdefault(case.name, case).passed:  # of a case named twice the failure counts
                found[case.name] = case
        why = _why_unjudged(outcome, found.values())
        for name in probe.cases:
            covered[name] += 1
            if name not in found:
                unjudged.setdefault(name, (index, Case(name, False, why)))
            elif not found[name].passed:
                failures.setdefault(name, (index, found[name]))
    cases = []
    for spec in exercise.cases:
        judged = spec.name in failures or spec.name not in unjudged
        failed_on, failure = (unjudged | failures).get(spec.name, (None, Case(spec.name, True)))
        found_out = (failure.message, failed_on, failure.hint, judged)
        cases.append(CaseVerdict(spec, covered[spec.name], *found_out))
    alone = [case for case in cases if case.spec.alone and case.covered]
    if alone and not any(case.passed for case in alone):
        cases = [_worthless(case, probes) if case.passed else case for case in cases]
    return Verdict(exercise.name, tuple(cases))


def _why_unjudged(outcome: Any, found: Iterable[Case]) -> str:
    """Why a judge did not name all cases of a challenge."""
    if outcome == NOT_RUN:
        return "an earlier input did not come to an end"
    failed = next((case.name for case in found if not case.passed), None)
    return "this could not be judged" if failed is None else f'on the same input, "{failed}" failed'


def _worthless(case: CaseVerdict, probes: list[Probe]) -> CaseVerdict:
    """A passed case that proves nothing, since no other has passed."""
    first = next(index for index, probe in enumerate(probes) if case.spec.name in probe.cases)
    message = "this proves nothing by itself; it counts once another case holds"
    return replace(case, message=message, failed_on=first, judged=False)


def _judge_one(exercise: Exercise, probe: Probe, outcome: Any) -> list[Case]:
    if outcome == NOT_RUN:
        return []
    if not isinstance(outcome, dict) or outcome.keys() not in ({"transcript"}, {"raised"}):
        return [Case(name, False, "nothing was recorded") for name in probe.cases]
    if "raised" in outcome:
        raised = outcome["raised"] if isinstance(outcome["raised"], dict) else {}
        text = f"your code raised {raised.get('type')}: {raised.get('message')}"
        if raised.get("type") in (NotImplementedError.__name__, OPEN_PART):
            text = str(raised.get("message"))
        return [Case(name, False, text) for name in probe.cases]
    try:
        return list(exercise.judge(probe.challenge, outcome["transcript"], probe.expected))
    except Exception as error:  # a judge meets a transcript of a shape that no driver writes
        return [Case(name, False, f"the record cannot be read ({type(error).__name__})") for name in probe.cases]
