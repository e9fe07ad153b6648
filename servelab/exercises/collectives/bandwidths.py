"""Check of `bandwidths`: algorithm and bus bandwidth, as nccl-tests define them."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.collectives._ranks import expected_got, numbers
from servelab.plain import close, plain

ANSWERS = ("bandwidths",)
ALGBW, REDUCE, HALF, ROOTED = "algorithm bandwidth", "all-reduce", "one pass round the ring", "broadcast and reduce"
CASES = (
    CaseSpec(ALGBW, hint=1, weight=2),
    CaseSpec(REDUCE, hint=1, weight=2),
    CaseSpec(HALF, hint=2, weight=2),
    CaseSpec(ROOTED, hint=2),
)
KINDS = {
    "all_reduce": REDUCE,
    "reduce_scatter": HALF,
    "all_gather": HALF,
    "all_to_all": HALF,
    "broadcast": ROOTED,
    "reduce": ROOTED,
}
RTOL = 1e-9


def challenges(rng: Random) -> list[dict]:
    """Every collective, with three numbers of ranks."""
    sizes = [(kind, *row) for kind in KINDS for row in ((1e9, 0.5, 4), (7.0, 2.0, 3))]
    sizes += [(kind, float(rng.randint(10**6, 10**9)), rng.uniform(0.001, 0.1), rng.randint(5, 64)) for kind in KINDS]
    return [{"arguments": list(row)} for row in sizes]


def drive(challenge: dict, bandwidths) -> dict:
    """The pair that the function returns."""
    return {"found": plain(bandwidths(*challenge["arguments"]))}


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Both numbers are determined; a pair of any kind will do."""
    found, want = numbers(transcript["found"]), expected["found"]
    if not isinstance(found, list) or len(found) != 2:
        message = "expected a tuple of two numbers, (algbw, busbw)"
        return [Case(case, False, message) for case in (ALGBW, KINDS[challenge["arguments"][0]])]
    cases = (ALGBW, KINDS[challenge["arguments"][0]])
    return [_case(*row) for row in zip(cases, ("algbw", "busbw"), found, want, strict=True)]


def _case(case: str, name: str, got, want: float) -> Case:
    fine = close(got, float(want), rtol=RTOL)
    return Case(case, fine, "" if fine else f"{name}: {expected_got(want, got, ' bytes/s')}")


def show(challenge: dict) -> str:
    """The call, as Python to paste."""
    return f"bandwidths({', '.join(map(repr, challenge['arguments']))})"
