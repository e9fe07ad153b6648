"""Unit 00, the warm-up: the share of a static batch's slot-steps that produce a token."""

from random import Random

from servelab.exercise import Case, CaseSpec, describe_error
from servelab.plain import close, plain

ANSWERS = ("slot_utilisation",)
CASES = (
    CaseSpec("one full batch", hint=1, weight=2),
    CaseSpec("the last batch may be partly filled", hint=2, weight=2),
    CaseSpec("several batches", hint=2, weight=3),
    CaseSpec("leaves its input alone", hint=1, alone=False),
    CaseSpec("refuses misuse", hint=3, alone=False),
)
TOLERANCE = 1e-6  # a float32 is precise enough
Q1 = [2000] + [20] * 8


def challenges(rng: Random) -> list[dict]:
    """Misuse, one batch, a partly filled one, Q1 of the course, then random lengths; smallest first."""
    misuse = [{"lengths": [], "batch_size": 4}, {"lengths": [3], "batch_size": 0}, {"lengths": [3, 0], "batch_size": 2}]
    single = [{"lengths": [5], "batch_size": 1}, {"lengths": [3, 1], "batch_size": 2}, {"lengths": Q1, "batch_size": 9}]
    partial = [{"lengths": [4], "batch_size": 2}, {"lengths": [1, 2, 9], "batch_size": 2}]
    several = [{"lengths": [1, 9, 9, 1], "batch_size": 2}, {"lengths": Q1 * 3, "batch_size": 9}]
    drawn = [_random(rng, count) for count in (6, 7, 40)]
    return [*misuse, *single, *partial, *several, *drawn]


def _random(rng: Random, count: int) -> dict:
    return {"lengths": [rng.randint(1, 300) for _ in range(count)], "batch_size": rng.randint(2, 5)}


def drive(challenge: dict, slot_utilisation) -> dict:
    """Call the function once; what it returned or raised, and whether its list was changed."""
    lengths = list(challenge["lengths"])
    try:
        outcome = {"returned": plain(slot_utilisation(lengths, challenge["batch_size"])), "error": None}
    except ValueError:
        outcome = {"returned": None, "error": "ValueError"}
    except NotImplementedError:
        raise
    except Exception as error:
        outcome = {"returned": None, "error": describe_error(error)}
    return {**outcome, "unchanged": lengths == challenge["lengths"]}


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Compare with the reference: the value is determined."""
    if expected["error"]:
        return [_case("refuses misuse", expected["error"], transcript["error"] or transcript["returned"])]
    count, size = len(challenge["lengths"]), challenge["batch_size"]
    name = "one full batch" if count == size else "several batches"
    if count % size:
        name = "the last batch may be partly filled"
    if transcript["error"]:
        right = Case(name, False, f"your code raised {transcript['error']}")
    else:
        right = _case(name, expected["returned"], transcript["returned"])
    kept = transcript["unchanged"] is True
    return [right, Case("leaves its input alone", kept, "" if kept else "the list of lengths was changed")]


def _case(name: str, expected, got) -> Case:
    if close(got, expected, rtol=TOLERANCE):
        return Case(name, True)
    return Case(name, False, f"expected {expected}, got {got}")


def show(challenge: dict) -> str:
    return f"slot_utilisation({challenge['lengths']}, batch_size={challenge['batch_size']})"
