"""What the two exercises on lengths share: one call with a list, whose outcome is one number."""

from random import Random

from servelab.exercise import Case
from servelab.exercises.static_batching import _batches as batches
from servelab.plain import plain

KEPT = "leaves its input alone"
Q1 = [2000] + [20] * 8


def challenge(case: str, slots: int, lengths: list[int]) -> dict:
    return {"case": case, "slots": slots, "lengths": list(lengths)}


def drawn(rng: Random, case: str, slots: int, n: int, longest: int) -> dict:
    """Mostly short lengths and some long ones, in random order."""
    return challenge(case, slots, [rng.randint(1, rng.choice((longest // 9, longest))) for _ in range(n)])


def drive(asked: dict, function) -> dict:
    """Call the function once; its number, and whether its list is as it was."""
    lengths = list(asked["lengths"])
    returned = plain(function(lengths, asked["slots"]))
    return {"returned": returned, "unchanged": lengths == asked["lengths"]}


def judge(asked: dict, transcript: dict, expected: dict) -> list[Case]:
    """The number is determined."""
    kept = transcript["unchanged"] is True
    right = batches.number(asked["case"], transcript["returned"], expected["returned"])
    return [right, Case(KEPT, kept, "" if kept else "the list of lengths was changed")]
