"""What the two exercises on lengths share: one call with a list, whose outcome is one number."""

from random import Random

from servelab.exercise import Case
from servelab.exercises.static_batching import _batches as batches
from servelab.plain import plain, text

KEPT, MISUSE = "leaves its input alone", "refuses misuse"
MISUSED: tuple[tuple[int, list[int]], ...] = ((1, []), (1, [2, 0]), (0, [2]))  # slots, lengths
Q1 = [2000] + [20] * 8


def challenge(case: str, slots: int, lengths: list[int]) -> dict:
    return {"case": case, "slots": slots, "lengths": list(lengths)}


def drawn(rng: Random, case: str, slots: int, n: int, longest: int) -> dict:
    """Mostly short lengths and some long ones, in random order."""
    return challenge(case, slots, [rng.randint(1, rng.choice((longest // 9, longest))) for _ in range(n)])


def misuse() -> list[dict]:
    """Calls that have no answer."""
    return [challenge(MISUSE, slots, lengths) for slots, lengths in MISUSED]


def drive(asked: dict, function) -> dict:
    """Call the function once; its number or its refusal, and whether its list is as it was."""
    lengths = list(asked["lengths"])
    if asked["case"] == MISUSE:
        function([1], 1)  # what is not written, or refuses everything, has not refused this
        try:
            return {"instead": plain(function(lengths, asked["slots"]))}
        except ValueError as error:
            return {"refused": text(error, 200)}
    returned = plain(function(lengths, asked["slots"]))
    return {"returned": returned, "unchanged": lengths == asked["lengths"]}


def judge(
    asked: dict, transcript: dict, expected: dict, too_large: str, near: int, hint: int | None = None
) -> list[Case]:
    """The number is determined. One that is too small fails the challenge's case, one too large that of ``too_large``.

    A number that is too large by more than ``near`` steps leaves the challenge's own case unjudged: it proves nothing
    then not to be too small. ``hint`` is the one to open for a number that is too large, if it is not the case's own.
    """
    if asked["case"] == MISUSE:
        refused = "refused" in transcript
        got = "" if refused else f"expected a ValueError, got {batches.shown(transcript['instead'])}"
        return [Case(MISUSE, refused, got)]
    got, want = transcript["returned"], expected["returned"]
    message = batches.number("", got, want).message
    cases = dict.fromkeys((asked["case"], too_large), True)
    if not batches.is_number(got):
        return [Case(name, False, message) for name in (*cases, KEPT)]
    if got > want + near:
        cases = {too_large: True}
    if got != want:
        cases[asked["case"] if got < want else too_large] = False
    kept = transcript["unchanged"] is True
    return [
        *(Case(name, right, "" if right else message, hint if got > want else None) for name, right in cases.items()),
        Case(KEPT, kept, "" if kept else "the list of lengths was changed"),
    ]
