"""Check of the cost models: seconds by the alpha-beta model, and the size up to which the tree is the faster one."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.collectives._ranks import expected_got, numbers
from servelab.plain import close, plain

COSTS = ("naive_cost", "ring_cost", "tree_cost", "ring_pass_cost", "all_to_all_cost")
ANSWERS = (*COSTS, "crossover")
NAIVE, RING, TREE, CROSS = "naive", "ring", "tree", "crossover"
PASS, PARTS = "one pass of the ring", "all-to-all"
ODD, ALONE, NEVER = "p that is no power of two", "one rank", "where the ring is never slower"
CASES = (
    CaseSpec(NAIVE, hint=1, weight=2),
    CaseSpec(RING, hint=1, weight=2),
    CaseSpec(TREE, hint=1, weight=2),
    CaseSpec(PASS, hint=1, weight=2),
    CaseSpec(PARTS, hint=1, weight=2),
    CaseSpec(ODD, hint=2),
    CaseSpec(ALONE, hint=2, alone=False),
    CaseSpec(CROSS, hint=3, weight=2),
    CaseSpec(NEVER, hint=3, alone=False),
)
PASSES = ((PASS, "ring_pass_cost"), (PARTS, "all_to_all_cost"))
RTOL = 1e-9


def challenges(rng: Random) -> list[dict]:
    """Round numbers first, then the links of real machines, then random ones."""
    alpha, beta = rng.uniform(1e-6, 1e-4), 1 / rng.uniform(1e9, 1e11)
    costs = [
        (NAIVE, "naive_cost", 1.0, 0.5, 4, 4),
        (RING, "ring_cost", 1.0, 0.5, 4, 4),
        (RING, "ring_cost", 1.0, 0.5, 5, 4),
        (TREE, "tree_cost", 1.0, 0.5, 4, 4),
        *((case, name, 1.0, 0.5, n, 4) for case, name in PASSES for n in (4, 5)),
        *((ODD, name, 1.0, 0.5, 6, p) for p in (3, 6) for name in COSTS),
        *((ALONE, name, 1.0, 0.5, 4, 1) for name in COSTS),
        (NAIVE, "naive_cost", alpha, beta, 1 << 20, 2),
        (RING, "ring_cost", 5e-6, 1 / 450e9, 134_217_728, 8),
        (RING, "ring_cost", alpha, beta, 16_384, 2),
        (TREE, "tree_cost", alpha, beta, 16_384, 8),
        (TREE, "tree_cost", alpha, beta, 1 << 20, 2),
        *((case, name, alpha, beta, 1 << 20, p) for case, name in PASSES for p in (2, 8)),
        *((ODD, name, alpha, beta, 1000, p) for name in COSTS for p in (5, 7, 9)),
    ]
    crossings = [(CROSS, 1.0, 0.5, 4), *((CROSS, alpha, beta, p) for p in (5, 7, 8, 64))]
    crossings += [(NEVER, 1.0, 0.5, p) for p in (2, 3)] + [(NEVER, alpha, beta, 3)]
    made = [{"case": case, "call": name, "arguments": rest} for case, name, *rest in costs]
    return made + [{"case": case, "call": "crossover", "arguments": rest} for case, *rest in crossings]


def drive(challenge: dict, *functions) -> dict:
    """The number that one function returns."""
    named = dict(zip(ANSWERS, functions, strict=True))
    return {"found": plain(named[challenge["call"]](*challenge["arguments"]))}


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Every number is determined."""
    got, want = numbers(transcript["found"]), expected["found"]
    fine = close(got, float(want), rtol=RTOL)
    tree = challenge["call"] == "tree_cost"
    hint = 1 if challenge["case"] == ODD and not tree else None  # no logarithm in these
    if challenge["case"] == TREE and isinstance(got, (int, float)) and got > want:
        hint = 2  # too many rounds
    return [Case(challenge["case"], fine, "" if fine else expected_got(want, got), hint)]


def show(challenge: dict) -> str:
    """The call, as Python to paste."""
    return f"{challenge['call']}({', '.join(map(repr, challenge['arguments']))})"
