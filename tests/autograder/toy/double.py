"""Toy exercise: twice a number; small and large numbers are two cases."""

from servelab.exercise import Case, CaseSpec
from servelab.plain import close, plain

ANSWERS = ("double",)
CASES = (CaseSpec("small numbers"), CaseSpec("large numbers"))


def challenges(rng):
    return [rng.randint(1, 9), rng.randint(1, 9), rng.randint(1000, 10**6), rng.randint(1000, 10**6)]


def drive(challenge, double):
    return plain(double(challenge))


def judge(challenge, transcript, expected):
    name = "small numbers" if challenge < 1000 else "large numbers"
    yield Case(name, close(transcript, expected), f"double({challenge}): expected {expected}, got {transcript}")
