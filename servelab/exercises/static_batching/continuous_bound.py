"""Check of `continuous_bound`: the larger of two lower bounds."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.static_batching import _batches as batches
from servelab.exercises.static_batching import _lengths as lengths

ANSWERS = ("continuous_bound",)
LONGEST, WORK = "no answer is faster than its own steps", "all the work has to fit"
ROUNDED, NO_MORE = "a part of a step is a step", "no more than the larger of the two"
CASES = (
    CaseSpec(LONGEST, 1, 2),
    CaseSpec(WORK, 1, 2),
    CaseSpec(ROUNDED, 2, 2),
    CaseSpec(NO_MORE, 1, 2, alone=False),
    CaseSpec(lengths.KEPT, 1, alone=False),
    CaseSpec(lengths.MISUSE, 1, alone=False),
)
DIRECTED: tuple[tuple[str, int, list[int]], ...] = (
    (LONGEST, 3, [4]),
    (LONGEST, 2, [5, 1, 1]),
    (WORK, 1, [1]),
    (WORK, 1, [2, 3]),
    (WORK, 2, [3, 1, 2, 2]),
    (ROUNDED, 2, [3, 3, 3]),
    (ROUNDED, 3, [2, 2, 2, 1]),
    (LONGEST, 9, lengths.Q1),
    (WORK, 9, lengths.Q1 * 10),
    (WORK, 9, [100] * 90),
    (WORK, 9, [2000] + [20] * 800),
)


def challenges(rng: Random) -> list[dict]:
    """Directed lists, then random ones, among them many for which the work is no multiple of the slots."""
    directed = [lengths.challenge(*parts) for parts in DIRECTED]
    drawn = [lengths.drawn(rng, ROUNDED, slots, n, 90) for slots, n in ((4, 18), (5, 31), (7, 80))]
    return [*directed, *drawn, *lengths.misuse()]


drive = lengths.drive


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """The number is determined; a step too many in a single slot, where nothing needs rounding, is one of rounding."""
    got, hint = transcript.get("returned"), None
    if batches.is_number(got) and challenge["slots"] == 1 and got <= sum(challenge["lengths"]) + 1:
        hint = 2
    return lengths.judge(challenge, transcript, expected, NO_MORE, 1, hint)


def show(challenge: dict) -> str:
    """The call, as Python to paste."""
    return f"continuous_bound({challenge['lengths']}, slots={challenge['slots']})"
