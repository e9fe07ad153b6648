"""The secret challenges of a class: a seed that never leaves the instructor's machine, and what is made from it.

``autograder/secret/`` (mode 0700) holds ``seed``; ``probes/``, challenges with the reference's own transcripts, which
only the grader's process reads; and ``challenges/<unit>/``, the bare challenges, the only part that a sandbox is shown.
"""

import hashlib
import json
import os
import re
import secrets
from importlib import import_module
from pathlib import Path
from random import Random

from autograder.course import Course
from autograder.files import write_text
from autograder.sandbox import EARLIER
from servelab import exercise as exercises
from servelab import plain
from servelab.errors import CourseError
from servelab.exercise import Exercise, Probe
from servelab.paths import Unit


def folder(course: Course) -> Path:
    path = course.state / "secret"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def seed(course: Course) -> str:
    """The class's seed; made once, with the operating system's randomness."""
    path = folder(course) / "seed"
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
    except FileExistsError:
        pass
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        mend = "Restore it from a backup: without it no earlier grade can be reproduced."
        raise CourseError(f"the seed cannot be read ({type(error).__name__})", where=str(path), mend=mend) from None
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        mend = "Restore it from a backup. Remove it only to start a new class: all challenges change with it."
        raise CourseError("the seed is damaged: 64 hexadecimal digits are expected", where=str(path), mend=mend)
    return text


def fingerprint(course: Course) -> str:
    """Names the seed without telling it; printed in reports."""
    return hashlib.sha256(f"fingerprint:{seed(course)}".encode()).hexdigest()[:12]


def challenges_folder(course: Course, slug: str) -> Path:
    """What the sandbox is shown of a unit's challenges: the questions, without the answers."""
    return folder(course) / "challenges" / slug


def prepare(course: Course, slug: str) -> None:
    """Make whatever is missing of a unit's probes and challenges."""
    target = challenges_folder(course, slug)
    target.mkdir(parents=True, exist_ok=True)
    target.chmod(0o755)
    for exercise in course.exercises(slug).values():
        path = target / f"{exercise.name}.json"
        text = plain.dumps([probe.challenge for probe in probes(course, exercise)])
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text, mode=0o644)


def probes(course: Course, exercise: Exercise) -> list[Probe]:
    """The secret challenges of an exercise with the reference's transcripts, from the cache or made anew."""
    path = folder(course) / "probes" / f"{exercise.name}.{_key(course, exercise)}.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        made = [probe.as_plain() for probe in _make(course, exercise)]
        write_text(path, plain.dumps(made), mode=0o600)
    return [Probe.from_plain(item) for item in json.loads(path.read_text(encoding="utf-8"))]


def _key(course: Course, exercise: Exercise) -> str:
    """Changes with the seed, the exercise, and the reference solutions of its unit and of those that it builds on."""
    unit = next(unit for unit in course.units.values() if unit.name == exercise.unit)
    solutions = [unit.solution, *(Unit(slug).solution for slug in EARLIER.get(unit.slug, ()))]
    sources = b"\0".join(path.read_bytes() for path in solutions if path.exists())
    parts = f"{seed(course)}:{exercise.name}:{exercise.version}:{hashlib.sha256(sources).hexdigest()}"
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def _make(course: Course, exercise: Exercise) -> list[Probe]:
    reference = import_module(f"servelab.reference.{exercise.unit}")
    answers = tuple(getattr(reference, name) for name in exercise.answers)
    return exercises.make_probes(exercise, Random(f"{seed(course)}:{exercise.name}"), answers)
