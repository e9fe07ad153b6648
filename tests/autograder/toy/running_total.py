"""Toy exercise: a class with state."""

from servelab.exercise import Case, CaseSpec
from servelab.plain import close, plain

ANSWERS = ("RunningTotal",)
CASES = (CaseSpec("one number"), CaseSpec("several numbers"))


def challenges(rng):
    return [[rng.randint(1, 99)], [rng.randint(1, 99) for _ in range(5)]]


def drive(challenge, running_total):
    total = running_total()
    return [plain(total.add(n)) for n in challenge]


def judge(challenge, transcript, expected):
    yield Case("one number" if len(challenge) == 1 else "several numbers", close(transcript, expected), "wrong total")
