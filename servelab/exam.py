"""``servelab exam``: the proof of the graders, as a kill table.

For every exercise the reference must score 1, and the untouched stub and bodies that do nothing 0; every named wrong
answer must lose points in the case that it was written for, every right one must score 1; and the judge must kill the
mutants of the reference. A mutant that survives is either explained as equivalent in ``tests/survivors.toml`` or a
fault.
"""

import argparse
import contextlib
import json
import os
import sys
import threading
import time
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from types import ModuleType

import servelab.exercises
from servelab import answers, exercise, mutants, paths
from servelab.errors import CourseError
from servelab.exercise import PUBLIC_SEED, Exercise, Probe, Verdict
from servelab.mutants import Cell, Change, Mutation
from servelab.workers import Stopped, TimedOut, limit_again, limited, limited_memory, run_all

EXTRA_SEED = 7919  # mutants and right answers also meet challenges that no learner has seen
MIN_KILLED = 0.98
LONG = 0.2  # seconds of CPU for one challenge
MIN_RIGHT = 2
TRIVIAL = ("pass", "return 0", "return []", "raise ValueError")  # bodies that must earn nothing either
KEY = ("where", "operator", "before", "after")


@dataclass(frozen=True)
class Roots:
    """Where the parts of the course lie; tests examine toy units elsewhere."""

    exercises: Path = paths.ROOT / "servelab" / "exercises"
    solutions: Path = paths.SOLUTIONS
    answers: Path = answers.ANSWERS
    survivors: Path = paths.ROOT / "tests" / "survivors.toml"

    def find(self, name: str) -> Exercise:
        if str(self.exercises) not in servelab.exercises.__path__:
            servelab.exercises.__path__.append(str(self.exercises))
        return exercise.find(name)

    def solution(self, unit: str) -> Path:
        found = sorted(self.solutions.glob(f"[0-9][0-9]_{unit}.py"))
        if not found:
            raise CourseError(f"unit {unit} has no solutions", where=str(self.solutions))
        return found[0]

    def explanations(self) -> list[dict]:
        """The survivors that are explained, as ``tests/survivors.toml`` lists them."""
        if not self.survivors.exists():
            return []
        return tomllib.loads(self.survivors.read_text(encoding="utf-8")).get("survivor", [])


@dataclass(frozen=True)
class Caught:
    """What a named wrong answer scored, the case that must catch it, and the cases that did."""

    score: float
    case: str
    failed: tuple[str, ...]

    @property
    def right(self) -> bool:
        return self.score < 1 and self.case in self.failed


@dataclass
class Record:
    """One row of the kill table."""

    exercise: str
    points: float | None = None
    reference: float = 0.0
    stub: float = 1.0
    wrong: dict[str, Caught] = field(default_factory=dict)
    right: dict[str, float] = field(default_factory=dict)
    killed: int = 0
    total: int = 0
    survivors: dict[Change, str] = field(default_factory=dict)  # with the reason; empty where none is given
    problems: list[str] = field(default_factory=list)

    @property
    def unit(self) -> str:
        return self.exercise.partition(".")[0]

    def faults(self) -> list[str]:
        """Everything that is not as it should be, one paragraph each."""
        found = list(self.problems)
        if self.reference != 1:
            found.append(f"the reference scores {self.reference:.2f}, not 1")
        if self.stub != 0:
            found.append(f"the untouched stub, or one that does nothing, scores {self.stub:.2f}, not 0")
        for name, caught in self.wrong.items():
            if not caught.right:
                lost = ", ".join(caught.failed) or "no case"
                found.append(f"wrong answer {name!r}: must fail {caught.case!r}, failed {lost}")
        found += [
            f"right answer {name!r} scores {score:.2f}, not 1" for name, score in self.right.items() if score != 1
        ]
        if not self.wrong or len(self.right) < MIN_RIGHT:
            found.append(
                f"{len(self.wrong)} wrong and {len(self.right)} right answers: 1 and {MIN_RIGHT} are the least"
            )
        found += [
            f"unexplained survivor, line {c.line}:\n{self._snippet(c)}" for c, why in self.survivors.items() if not why
        ]
        return found

    def _snippet(self, change: Change) -> str:
        """The survivor as an entry for the file of explanations; JSON text is TOML text."""
        entry = {"exercise": self.exercise, **_key(change), "reason": ""}
        return "\n".join(["[[survivor]]", *(f"{key} = {json.dumps(value)}" for key, value in entry.items())])

    def as_plain(self) -> dict:
        """The record that ``--json`` prints; a wrong answer's case is None if it was not the one that failed."""
        survivors = [asdict(change) | {"reason": why} for change, why in self.survivors.items()]
        return {
            "unit": self.unit,
            "exercise": self.exercise,
            "points": self.points,
            "reference": self.reference,
            "stub": self.stub,
            "wrong": {n: {"score": c.score, "case": c.case if c.right else None} for n, c in self.wrong.items()},
            "right": self.right,
            "mutants": {"killed": self.killed, "total": self.total, "survivors": survivors},
        }


@dataclass(frozen=True)
class Task:
    """One thing to find out about an exercise: about its reference, a stub, a ``named`` answer or a ``mutant``."""

    exercise: str
    kind: str
    answer: str = ""
    mutation: Mutation | None = None
    cells: tuple[Cell, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a worker found: score and failed cases of an answer; for a mutant, the change if it survived."""

    score: float = 0.0
    failed: tuple[str, ...] = ()
    case: str = ""
    survivor: Change | None = None
    counted: bool = True
    problem: str = ""


class Bench:
    """An exercise on the test bench of a worker: its unit's cells, and probes from the public and an extra seed."""

    def __init__(self, roots: Roots, name: str, cells: tuple[Cell, ...]):
        self.exercise, self.cells = roots.find(name), cells
        self.named = {answer.name: answer for answer in answers.named_answers(self.exercise, roots.answers)}
        reference = self.pick(self.load(cells))
        self.public = exercise.make_probes(self.exercise, Random(PUBLIC_SEED), reference)
        extra = exercise.make_probes(self.exercise, Random(EXTRA_SEED), reference)
        self.probes = self.public + [probe for probe in extra if probe not in self.public]
        self.costs, recorded = [], []  # seconds of CPU, and outcomes
        for probe in self.probes:
            started = time.process_time()
            recorded.append(exercise.record(self.exercise, probe.challenge, reference))
            exercise.judge(self.exercise, [probe], recorded[-1:])
            self.costs.append(time.process_time() - started)
        self.reference = exercise.judge(self.exercise, self.public, recorded[: len(self.public)])

    def limit(self, task: Task) -> float:
        """Seconds of CPU that a task may take, a mutant for its first probe; a right answer may be slow."""
        return 0.3 + 5 * self.costs[0] if task.kind == "mutant" else 5 + 20 * sum(self.costs)

    def load(self, cells: Iterable[Cell], *, forgiving: bool = False) -> ModuleType:
        """Run cells as a fresh module. Forgiving, like a notebook, goes on after a cell that raised."""
        module = ModuleType(f"examined_{self.exercise.unit}")
        sys.modules[module.__name__] = module  # dataclasses look their module up
        for cell in cells:
            try:
                exec(_compiled(cell), module.__dict__)
            except Exception:
                if not forgiving:
                    raise
        return module

    def pick(self, module: ModuleType) -> tuple:
        return tuple(getattr(module, name) for name in self.exercise.answers)

    def verdict(self, given: tuple, probes: list[Probe]) -> Verdict:
        recorded = exercise.record_all(self.exercise, [probe.challenge for probe in probes], given)
        return exercise.judge(self.exercise, probes, recorded)

    def survives(self, given: tuple) -> bool:
        """Whether an answer passes every probe; stops at the first that it fails, or takes too long for."""
        for probe, cost in zip(self.probes, self.costs, strict=True):
            limit_again(0.3 + 5 * cost)
            verdict = self.verdict(given, [probe])
            if any(case.failed_on is not None for case in verdict.cases):
                return False
        return True

    def examine(self, task: Task) -> Outcome:
        if task.mutation:
            return self.examine_mutant(task.mutation)
        if task.kind == "reference":
            return self.outcome(self.reference)
        if task.kind == "stub":
            module = self.load(task.cells, forgiving=True)
            written = all(hasattr(module, name) for name in self.exercise.answers)
            return self.outcome(self.verdict(self.pick(module), self.public)) if written else Outcome()
        return self.examine_named(self.named[task.answer])

    def examine_named(self, answer: answers.NamedAnswer) -> Outcome:
        given = answer.answers(self.load(self.cells))
        # a learner must be told by the public challenges; a right answer must also stand the others
        verdict = self.verdict_of_wrong(given, answer.case) if answer.case else self.verdict(given, self.probes)
        return replace(self.outcome(verdict), case=answer.case)

    def verdict_of_wrong(self, given: tuple, case: str) -> Verdict:
        """The verdict on the public challenges, without those that take long once the named case has failed."""
        recorded: list[dict] = []
        caught = False
        for probe, cost in zip(self.public, self.costs, strict=False):
            if caught and cost > LONG:
                recorded.append(exercise.NOT_RUN)
                continue
            recorded.append(exercise.record(self.exercise, probe.challenge, given))
            if not caught and case in probe.cases:
                found = exercise.judge(self.exercise, [probe], recorded[-1:])
                caught = any(c.spec.name == case and c.failed_on is not None for c in found.cases)
        return exercise.judge(self.exercise, self.public, recorded)

    def examine_mutant(self, mutation: Mutation) -> Outcome:
        cell = self.solution()
        mutated = mutants.mutate(cell, mutation)
        if mutated is None:
            return Outcome(counted=False)
        try:
            module = self.load(replace(c, source=mutated) if c == cell else c for c in self.cells)
            survived = self.survives(self.pick(module))
        except SyntaxError:
            return Outcome(counted=False)
        except Exception:
            return Outcome()
        return Outcome(survivor=mutants.describe(cell, mutation, mutated) if survived else None)

    def solution(self) -> Cell:
        return next(cell for cell in self.cells if cell.grade_id == self.exercise.grade_id)

    def outcome(self, verdict: Verdict) -> Outcome:
        failed = tuple(case.spec.name for case in verdict.cases if not case.passed)
        return Outcome(1.0 if verdict.passed else verdict.fraction, failed)

    def stopped(self, task: Task) -> Outcome:
        """An answer that had to be stopped fails every case."""
        case = self.named[task.answer].case if task.kind == "named" else ""
        return Outcome(failed=tuple(spec.name for spec in self.exercise.cases), case=case)


@lru_cache(maxsize=256)
def _compiled(cell: Cell):
    """A cell's code, with the line numbers of the file."""
    return compile("\n" * (cell.line - 1) + cell.source, "<examined>", "exec")


def make_examiner(roots: Roots, cells: dict[str, tuple[Cell, ...]]):
    """The function with which a worker handles its tasks; benches are made when they are first needed."""
    import cosmic_ray.plugins  # noqa: F401 (loads slowly, so once and outside any time limit)

    benches: dict[str, Bench | Outcome] = {}

    def bench(name: str) -> Bench | Outcome:
        if name not in benches:
            try:
                benches[name] = Bench(roots, name, cells[name.partition(".")[0]])
                _calm_torch()
            except Exception as error:
                benches[name] = Outcome(problem=f"{type(error).__name__}: {str(error)[:500]}")
        return benches[name]

    return partial(_examine, bench)


def _examine(bench, task: Task) -> Outcome | Stopped:
    found = bench(task.exercise)
    if isinstance(found, Outcome):
        return found
    try:
        with limited(found.limit(task)), limited_memory():
            return found.examine(task)
    except TimedOut:  # an answer's threads may still run: then this process is of no use any more
        return found.stopped(task) if threading.active_count() == 1 else Stopped("time")
    except MemoryError:
        return found.stopped(task)
    except Exception as error:
        return Outcome(problem=f"{task.kind} {task.answer or task.mutation or ''}: {type(error).__name__}: {error}")


def _calm_torch() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


class Exam:
    """The tasks of some exercises, and the records that their outcomes add up to."""

    def __init__(self, names: Iterable[str], roots: Roots):
        self.roots = roots
        self.records = {name: Record(name) for name in names}
        self.units = {record.unit for record in self.records.values()}
        self.sources = {
            unit: mutants.read_cells(roots.solution(unit).read_text(encoding="utf-8")) for unit in self.units
        }
        self.cells = {unit: tuple(c for c in cells if c.exported) for unit, cells in self.sources.items()}
        self.reasons = {_entry_key(entry): entry.get("reason", "").strip() for entry in roots.explanations()}

    def tasks(self) -> list[Task]:
        return [task for name in self.records for task in self._tasks_of(name)]

    def _tasks_of(self, name: str) -> list[Task]:
        record, subject = self.records[name], self.roots.find(name)
        cells = self.cells[record.unit]
        checks = [cell for cell in self.sources[record.unit] if cell.grade_id == subject.check_id]
        solutions = [cell for cell in cells if cell.grade_id == subject.grade_id]
        if len(checks) != 1 or len(solutions) != 1:
            found = f"{len(solutions)} exported cells {subject.grade_id!r} and {len(checks)} cells {subject.check_id!r}"
            record.problems.append(f"the unit's source has {found}, not one of each")
            return []
        record.points = checks[0].nbgrader.get("points")
        unwritten = tuple(mutants.stub(cell) for cell in cells)
        alone = tuple(mutants.stub(cell) if cell == solutions[0] else cell for cell in cells)
        trivial = [
            tuple(mutants.stub(cell, body) if cell == solutions[0] else cell for cell in cells) for body in TRIVIAL
        ]
        tasks = [Task(name, "reference"), *(Task(name, "stub", cells=each) for each in (unwritten, alone, *trivial))]
        record.stub = 0.0  # each stub may raise it
        named = answers.named_answers(subject, self.roots.answers)
        tasks += [Task(name, "named", answer.name) for answer in named]
        return tasks + [Task(name, "mutant", mutation=mutation) for mutation in mutants.mutations(solutions[0])]

    def take(self, task: Task, outcome: Outcome | Stopped) -> None:
        """Enter an outcome into its record."""
        record = self.records[task.exercise]
        if isinstance(outcome, Stopped):
            outcome = self._stopped(task, outcome)
        if outcome.problem:
            record.problems += [outcome.problem] if outcome.problem not in record.problems else []
        elif task.kind == "mutant":
            self._take_mutant(record, outcome)
        elif task.kind == "reference":
            record.reference = outcome.score
        elif task.kind == "stub":
            record.stub = max(record.stub, outcome.score)
        elif outcome.case:
            record.wrong[task.answer] = Caught(outcome.score, outcome.case, outcome.failed)
        else:
            record.right[task.answer] = outcome.score

    def _take_mutant(self, record: Record, outcome: Outcome) -> None:
        record.total += outcome.counted
        record.killed += outcome.counted and outcome.survivor is None
        if outcome.survivor:
            key = (record.exercise, *_key(outcome.survivor).values())
            record.survivors[outcome.survivor] = self.reasons.get(key, "")

    def _stopped(self, task: Task, stopped: Stopped) -> Outcome:
        """What a task that did not end means: an answer fails every case, the reference must not stop at all."""
        if task.kind == "reference":
            return Outcome(problem=f"the reference was stopped ({stopped.why})")
        subject = self.roots.find(task.exercise)
        named = {answer.name: answer for answer in answers.named_answers(subject, self.roots.answers)}
        case = named[task.answer].case if task.kind == "named" else ""
        return Outcome(failed=tuple(spec.name for spec in subject.cases), case=case)

    def finish(self) -> list[Record]:
        """The records, with the explanations that no survivor needs any more as faults."""
        for record in self.records.values():
            used = {(record.exercise, *_key(change).values()) for change in record.survivors}
            stale = [key for key in self.reasons if key[0] == record.exercise and key not in used]
            record.problems += [f"stale explanation, no such survivor: {' | '.join(key[1:])}" for key in stale]
        return list(self.records.values())


def _key(change: Change) -> dict[str, str]:
    """What names a survivor in the file of explanations, besides its exercise."""
    return {name: getattr(change, name) for name in KEY}


def _entry_key(entry: dict) -> tuple[str, ...]:
    missing = [name for name in ("exercise", *KEY) if not isinstance(entry.get(name), str)]
    if missing:
        raise CourseError(f"an explained survivor lacks {', '.join(missing)}", where="survivors.toml")
    return tuple(entry[name] for name in ("exercise", *KEY))


def examine_all(
    names: Iterable[str], roots: Roots | None = None, jobs: int | None = None, progress=None
) -> list[Record]:
    """Examine exercises, one after the other, on ``jobs`` worker processes.

    Parameters
    ----------
    names : iterable of str
        Exercises, as ``unit.exercise``.
    roots : Roots, optional
        Where the course lies.
    jobs : int, optional
        Worker processes; by default one per CPU.
    progress : callable, optional
        Called with ``(done, total, exercise)`` after every task.
    """
    exam = Exam(names, roots or Roots())
    tasks = exam.tasks()
    outcomes = run_all(tasks, partial(make_examiner, exam.roots, exam.cells), jobs or os.cpu_count() or 1)
    for done, (task, outcome) in enumerate(outcomes, start=1):
        exam.take(task, outcome)
        if progress:
            progress(done, len(tasks), task.exercise)
    return exam.finish()


def examine(name: str, roots: Roots | None = None, jobs: int | None = None) -> Record:
    """Examine one exercise; see `examine_all`."""
    return examine_all([name], roots, jobs)[0]


def unit_faults(records: list[Record]) -> list[str]:
    """What is wrong with a unit as a whole: too many mutants that no judge can tell from the reference."""
    killed, total = sum(record.killed for record in records), sum(record.total for record in records)
    if killed >= MIN_KILLED * total:
        return []
    return [f"{killed} of {total} mutants killed ({killed / total:.1%}); at least {MIN_KILLED:.0%} must be"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``servelab exam``."""
    parser.add_argument("unit", nargs="?", help="a unit, e.g. 03 (default: all)")
    parser.add_argument("--exercise", help="only this exercise, e.g. block_allocator or paged_kv.block_allocator")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="worker processes (default: all CPUs)"
    )
    parser.add_argument("--json", action="store_true", help="print records as JSON")


def run(args: argparse.Namespace) -> int:
    """Examine what ``args`` names; prints the kill table. Returns 1 if anything is not as it should be."""
    from rich.console import Console

    names = _selected(args)
    with _progress_bar() as progress:
        records = examine_all(names, jobs=args.jobs, progress=progress)
    faults = {record.exercise: record.faults() for record in records}
    if not args.exercise:
        for unit in dict.fromkeys(record.unit for record in records):
            faults[unit] = unit_faults([record for record in records if record.unit == unit])
    if args.json:
        print(json.dumps([record.as_plain() for record in records], indent=2))
    else:
        Console().print(kill_table(records))
    console = Console(stderr=args.json, markup=False, highlight=False)
    for name, found in faults.items():
        for fault in found:
            console.print(f"{name}: {fault}", soft_wrap=True)
    return 1 if any(faults.values()) else 0


def _selected(args: argparse.Namespace) -> list[str]:
    units = [paths.find_unit(args.unit)] if args.unit else paths.units()
    names = [name for unit in units for name in exercise.names(unit.name)]
    if not args.exercise:
        return names
    wanted = args.exercise.replace("-", "_")
    found = [name for name in names if wanted in (name, name.partition(".")[2])]
    if not found:
        raise CourseError(f"there is no exercise {args.exercise!r}", mend=f"Exercises: {', '.join(names)}.")
    return found


@contextlib.contextmanager
def _progress_bar():
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("mutants", total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)


def kill_table(records: list[Record]):
    """The records as a rich table."""
    from rich.table import Table

    table = Table(caption="wrong answers caught, right ones accepted, mutants killed, each out of all")
    for heading in ("unit", "exercise"):
        table.add_column(heading, overflow="fold")
    for heading in ("points", "reference", "stub", "wrong", "right", "mutants"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in records:
        table.add_row(
            record.unit,
            record.exercise.partition(".")[2],
            "-" if record.points is None else f"{record.points:g}",
            f"{record.reference:.0%}",
            f"{record.stub:.0%}",
            f"{sum(caught.right for caught in record.wrong.values())}/{len(record.wrong)}",
            f"{sum(score == 1 for score in record.right.values())}/{len(record.right)}",
            f"{record.killed}/{record.total}",
            style="red" if record.faults() else None,
        )
    return table
