"""Check of `fcfs_steps`: a slot that becomes free goes to the next request of the queue at once."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.static_batching import _lengths as lengths

ANSWERS = ("fcfs_steps",)
ENOUGH, WHOLE = "a slot for everyone", "a request stays in its slot"
HANDED, ORDER = "a freed slot is taken at once", "first come, first served"
CASES = (
    CaseSpec(ENOUGH, 1, alone=False),
    CaseSpec(WHOLE, 1, 2),
    CaseSpec(ORDER, 2, 3),
    CaseSpec(HANDED, 2, 3),
    CaseSpec(lengths.KEPT, 2, alone=False),
    CaseSpec(lengths.MISUSE, 1, alone=False),
)
DIRECTED: tuple[tuple[str, int, list[int]], ...] = (
    (ENOUGH, 1, [1]),
    (ENOUGH, 4, [2, 7, 1]),
    (WHOLE, 2, [3, 3, 3]),
    (WHOLE, 3, [4, 4, 4, 4]),
    (HANDED, 1, [2, 3]),
    (HANDED, 2, [4, 1, 3]),
    (HANDED, 2, [1, 5, 2, 2]),
    (HANDED, 2, [4, 1, 2, 5]),
    (HANDED, 3, [6, 1, 4, 1, 1, 3]),
    (ORDER, 2, [1, 1, 4]),  # the longest first, or the last first, would need fewer steps
    (ORDER, 2, [1, 2, 1, 2]),  # so would the shortest first
    (ORDER, 3, [1, 2, 3, 9]),
    (ENOUGH, 9, lengths.Q1),
    (HANDED, 9, [2000] + [20] * 800),
    (WHOLE, 9, [100] * 90),
    (ORDER, 9, lengths.Q1 * 10),
)


def challenges(rng: Random) -> list[dict]:
    """Directed queues, then random ones."""
    directed = [lengths.challenge(*parts) for parts in DIRECTED]
    drawn = [lengths.drawn(rng, HANDED, slots, n, 90) for slots, n in ((4, 18), (5, 31), (7, 80))]
    return [*directed, *drawn, *lengths.misuse()]


drive = lengths.drive


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """The number is determined; with a slot for everyone, neither order nor a freed slot can make it too large.

    A step lost with each request is near enough to tell that the order is right, and that nobody is moved.
    """
    too_large = ENOUGH if challenge["case"] == ENOUGH else HANDED
    return lengths.judge(challenge, transcript, expected, too_large, len(challenge["lengths"]))


def show(challenge: dict) -> str:
    """The call, as Python to paste."""
    return f"fcfs_steps({challenge['lengths']}, slots={challenge['slots']})"
