"""Check of what batching costs: TPOT against batch size, and the two ways of giving a request its KV back."""

from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.plain import close, plain
from servelab.simulation import StepCost

ANSWERS = ("tpot_ratio", "recompute_seconds", "swap_seconds")
RATIO, RIDES, SWAPS = (
    "TPOT against that of a batch of one",
    "recomputing rides along",
    "swapping goes out and comes back",
)
CASES = (CaseSpec(RATIO, hint=1), CaseSpec(RIDES, hint=2), CaseSpec(SWAPS, hint=2))
ORDER = ("cost", "tokens", "batch", "context", "kv_bytes_per_token", "link_gb_s")
TOLERANCE = 1e-11

SMALL = {"weights": 0.005, "kv_token": 4e-8, "token": 1.5e-5, "overhead": 0.0}
SLOWER = {"weights": 0.016, "kv_token": 5e-7, "token": 8e-5, "overhead": 0.002}
BUSY = {"weights": 0.001, "kv_token": 1e-7, "token": 0.004, "overhead": 0.0}  # arithmetic decides, even for one token


def challenges(rng: Random) -> list[dict]:
    """Memory-bound and compute-bound steps, with and without an overhead."""
    ratios = [
        (SMALL, 1, 2048),
        (SMALL, 32, 2048),
        (SLOWER, 32, 2048),
        (SMALL, 600, 10),
        (BUSY, 3, 500),
        (SLOWER, rng.randint(2, 99), 700),
    ]
    recomputed = [(SMALL, 100, 8, 1000), (SMALL, 1000, 8, 1000), (SLOWER, 1000, 8, 1000), (SMALL, 400, 300, 2000)]
    recomputed += [(SMALL, 900, 500, 10), (SLOWER, rng.randint(300, 4000), rng.randint(1, 40), rng.randint(1, 3000))]
    swapped = [(1000, 131_072, 63.0), (1, 524_288, 31.5), (rng.randint(2, 9000), 819_200, 25.0)]
    made = [_call(RATIO, "tpot_ratio", cost=cost, batch=b, context=c) for cost, b, c in ratios]
    made += [_call(RIDES, "recompute_seconds", cost=cost, tokens=t, batch=b, context=c) for cost, t, b, c in recomputed]
    return made + [
        _call(SWAPS, "swap_seconds", tokens=t, kv_bytes_per_token=size, link_gb_s=link) for t, size, link in swapped
    ]


def _call(case: str, function: str, **arguments: Any) -> dict:
    return {"case": case, "function": function, "arguments": arguments}


def _arguments(challenge: dict) -> dict:
    given = challenge["arguments"]
    return given | {"cost": StepCost(**given["cost"])} if "cost" in given else given


def drive(challenge: dict, tpot_ratio, recompute_seconds, swap_seconds) -> dict:
    """Call one of the three functions once."""
    functions = dict(zip(ANSWERS, (tpot_ratio, recompute_seconds, swap_seconds), strict=True))
    return {"returned": plain(functions[challenge["function"]](**_arguments(challenge)))}


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Every value is determined, up to rounding; one that is 0 is compared to the picosecond."""
    got, want = transcript["returned"], expected["returned"]
    if close(got, want, rtol=TOLERANCE, atol=1e-12):
        return [Case(challenge["case"], True)]
    shown = f"{got:.6g}" if isinstance(got, (int, float)) and not isinstance(got, bool) else repr(got)[:200]
    return [Case(challenge["case"], False, f"{challenge['function']}: expected {want:.6g}, got {shown}")]


def show(challenge: dict) -> str:
    """The call, as Python to paste."""
    given = _arguments(challenge)
    words = ", ".join(f"{name}={given[name]!r}" for name in ORDER if name in given)
    lines = ["from servelab.simulation import StepCost"] if "cost" in challenge["arguments"] else []
    return "\n".join([*lines, f"{challenge['function']}({words})"])
