"""Check of the metrics: each a function of moments, in seconds, that the challenge gives."""

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.plain import close, decode_array, is_array, plain
from servelab.simulation import Timing

ANSWERS = ("ttft", "e2e", "itl", "tpot", "percentile", "throughput", "goodput")
TTFT, E2E, ITL = "TTFT from the arrival", "E2E from the arrival to the last token", "ITL is every gap"
TPOT, ALONE = "TPOT leaves the first token out", "an answer of one token has no TPOT"
LINEAR, RUN = "percentiles between two values", "throughput: tokens of answers over the whole run"
LONE = "goodput: one token breaks no limit on TPOT"
BOTH, RATES, KEPT = "goodput: 90 % meet both limits", "goodput: highest rate, per GPU", "leaves its input alone"
CASES = (
    CaseSpec(TTFT, hint=1),
    CaseSpec(E2E, hint=1),
    CaseSpec(ITL, hint=1),
    CaseSpec(TPOT, hint=1, weight=2),
    CaseSpec(ALONE, hint=1, alone=False),
    CaseSpec(LINEAR, hint=2, weight=2),
    CaseSpec(RUN, hint=2, weight=2),
    CaseSpec(BOTH, hint=3, weight=2),
    CaseSpec(RATES, hint=3, weight=2),
    CaseSpec(LONE, hint=3),
    CaseSpec(KEPT, hint=2),
)
TICK = 1 / 64  # all moments are multiples, so that their differences are exact
TOLERANCE = 1e-9
ONE = ("ttft", "e2e", "itl", "tpot")


def challenges(rng: Random) -> list[dict]:
    """One request at a time, then lists of numbers, then runs. Moments are in ticks."""
    requests = [
        [0, 0, [32]],
        [64, 96, [128, 134, 147, 185]],
        [0, 2, [8, 40, 50]],
        *(_request(rng, 40 * n, n) for n in (2, 5, 9)),
    ]
    cases = {"ttft": TTFT, "e2e": E2E, "itl": ITL, "tpot": TPOT}
    single = [_call(cases[name], name, timing=request) for request in requests for name in ONE]
    for challenge in single:
        if challenge["function"] == "tpot" and len(challenge["timing"][2]) == 1:
            challenge["case"] = ALONE
    return [*single, *_percentiles(rng), *_throughputs(rng), *_goodputs(rng)]


def _call(case: str, function: str, **given: Any) -> dict:
    return {"case": case, "function": function, **given}


def _request(rng: Random, arrival: int, n: int) -> list:
    """A request with an answer of n tokens: [arrival, admitted, moments], in ticks."""
    moments = [arrival + rng.randint(20, 90)]
    for _ in range(n - 1):
        moments.append(moments[-1] + rng.randint(2, 30))
    return [arrival, arrival + rng.randint(1, 19), moments]


def _percentiles(rng: Random) -> list[dict]:
    asked = [([3.0], 50), ([1.0, 2.0], 50), ([40.0, 10.0, 100.0, 20.0, 30.0], 90), ([5.0, 1.0, 3.0], 0)]
    asked += [([5.0, 1.0, 3.0], 100), ([2.0, 2.0, 7.0, 1.0], 25)]
    asked += [([float(rng.randint(0, 900)) for _ in range(n)], p) for n, p in ((11, 99), (30, 95), (101, 37))]
    made = [_call(LINEAR, "percentile", values=values, p=p) for values, p in asked]
    return [*made, _call(KEPT, "percentile", values=[9.0, 4.0, 6.0, 5.0], p=50)]


def _throughputs(rng: Random) -> list[dict]:
    late = [[64, 70, [128, 192]], [0, 32, [64, 96, 128]]]  # the earlier one comes second
    pause = [[0, 8, [16, 32]], [640, 648, [704]]]  # the server is idle in between
    many = [_request(rng, rng.randint(0, 400), rng.randint(1, 9)) for _ in range(12)]
    return [_call(RUN, "throughput", timings=t) for t in ([[0, 0, [64]]], late, pause, many)] + [
        _call(KEPT, "throughput", timings=late)
    ]


def _meets(first: int = 32, per_token: int = 8, n: int = 5, arrival: int = 64) -> list:
    """A request with this TTFT and this TPOT, in ticks; gaps are uneven, so that the mean counts."""
    moments = [arrival + first]
    for index in range(n - 1):
        moments.append(moments[-1] + (per_token + (-4 if index % 2 else 4) if n % 2 else per_token))
    return [arrival, arrival + 1, moments]


def _goodputs(rng: Random) -> list[dict]:
    """Limits of 1 s and 0.25 s, which are 64 and 16 ticks."""
    good, edge, slow, stalls, both = _meets(), _meets(64, 16), _meets(65), _meets(32, 17), _meets(400, 90)
    lone, late_lone = _meets(n=1), _meets(90, n=1)
    runs = [
        (BOTH, [[1, [good] * 10]]),
        (BOTH, [[1, [good] * 6 + [both]]]),
        (BOTH, [[1, [edge] * 10]]),
        (BOTH, [[1, [good] * 9 + [both]]]),
        (BOTH, [[1, [good] * 8 + [both] * 2]]),
        (BOTH, [[1, [good] * 9 + [slow]]]),
        (BOTH, [[1, [good] * 17 + [both] * 3]]),
        (BOTH, [[1, [good] * 43 + [both] * 5]]),  # 89.6 %
        (BOTH, [[1, [good] * 8 + [slow] * 2]]),
        (BOTH, [[1, [good] * 8 + [stalls] * 2]]),
        (BOTH, [[1, [good] * 8 + [slow, stalls]]]),
        (LONE, [[1, [lone] * 10]]),
        (LONE, [[1, [lone] * 15 + [good] * 4 + [slow]]]),
        (LONE, [[1, [late_lone] * 2 + [good] * 8]]),
        (RATES, [[1, [good] * 5], [2, [good] * 5], [4, [both] * 5]]),
        (RATES, [[4, [both] * 5], [1, [good] * 5], [2, [good] * 5], [3, [slow] * 5]]),
        (RATES, [[1, [good] * 4], [2, [both] * 4], [3, [good] * 4]]),
        (RATES, [[0.5, [both] * 4], [2.5, [good] * 4]]),
        (RATES, [[3, [good] * 4], [1, [good] * 4], [4, [both] * 4], [2, [good] * 4]]),
    ]
    made = [_call(case, "goodput", runs=run, gpus=1) for case, run in runs]
    mixed = [
        [rate, [_meets(rng.randint(1, 60 + 9 * rate), rng.randint(5, 17)) for _ in range(20)]] for rate in (1, 2, 3)
    ]
    made += [_call(BOTH, "goodput", runs=mixed, gpus=1)]
    grid = [[1, [good] * 5], [2, [good] * 5], [6, [good] * 5], [8, [both] * 5]]
    made += [_call(RATES, "goodput", runs=grid, gpus=gpus) for gpus in (1, 4)]
    return [*made, _call(KEPT, "goodput", runs=grid, gpus=2)]


def _timing(row: list) -> Timing:
    arrival, admitted, moments = row
    return Timing(arrival * TICK, admitted * TICK, tuple(moment * TICK for moment in moments))


def _arguments(challenge: dict) -> list:
    """What the function is called with."""
    if "timing" in challenge:
        return [_timing(challenge["timing"])]
    if "values" in challenge:
        return [list(challenge["values"]), challenge["p"]]
    if "timings" in challenge:
        return [[_timing(row) for row in challenge["timings"]]]
    return [goodput_runs(challenge["runs"]), 1.0, 0.25, challenge["gpus"]]


def drive(challenge: dict, *functions: Callable) -> dict:
    """Call one of the functions once; what it returned, and whether what it was given is as it was."""
    function = dict(zip(ANSWERS, functions, strict=True))[challenge["function"]]
    given, before = _arguments(challenge), _arguments(challenge)
    return {"returned": plain(_listed(function(*given))), "unchanged": given == before}


def _listed(value: Any) -> Any:
    """An iterator over gaps as a list."""
    return list(value) if hasattr(value, "__next__") and isinstance(value, Iterable) else value


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Every value is determined, up to rounding."""
    case, got, want = challenge["case"], transcript["returned"], expected["returned"]
    right = close(_numbers(got), want, rtol=TOLERANCE, atol=TOLERANCE)
    message = "" if right else f"{challenge['function']}: expected {_shown(want)}, got {_shown(got)}"
    if case == KEPT and right and transcript["unchanged"] is not True:
        return [Case(KEPT, False, f"{challenge['function']} changed what it was given")]
    return [Case(case, right, message)]


def _numbers(got: Any) -> Any:
    """A one-dimensional array as the list of its numbers."""
    return decode_array(got).tolist() if is_array(got) else got


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object of type {str(value.get('unexpected type', 'dict'))[:40]}"
    if isinstance(value, list):
        return f"[{', '.join(_shown(item) for item in value[:12])}]"
    return f"{value:.9g}" if isinstance(value, float) else repr(value)[:200]


def show(challenge: dict) -> str:
    """The call, as Python to paste."""
    name = challenge["function"]
    if "values" in challenge:
        return f"percentile({challenge['values']}, {challenge['p']})"
    if "runs" not in challenge:
        given = ", ".join(map(repr, _arguments(challenge)))
        return f"from servelab.simulation import Timing\n{name}({given})"
    module = "servelab.exercises.continuous_batching.metrics"
    rows = "".join(f"\n    [{rate}, {_runs_shown(rows)}]," for rate, rows in challenge["runs"])
    return (
        f"from {module} import goodput_runs\n"
        "# for each rate, requests as [arrival, admitted, moments of the tokens], in 1/64 s\n"
        f"runs = goodput_runs([{rows}\n])\n"
        f"goodput(runs, 1.0, 0.25, gpus={challenge['gpus']})"
    )


def goodput_runs(rows: list[list]) -> dict[float, list[Timing]]:
    """Runs by rate, from rows in ticks."""
    return {rate: [_timing(row) for row in requests] for rate, requests in rows}


def _runs_shown(rows: list[list]) -> str:
    """Requests of a run; equal ones behind each other as a product."""
    parts: list[list] = []
    for row in rows:
        if parts and parts[-1][0] == row:
            parts[-1][1] += 1
        else:
            parts.append([row, 1])
    return " + ".join(f"[{row!r}] * {times}" if times > 1 else f"[{row!r}]" for row, times in parts)
