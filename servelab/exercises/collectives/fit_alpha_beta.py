"""Check of `fit_alpha_beta`: relative least squares, so that small messages count as much as large ones."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.collectives._ranks import expected_got, numbers, type_of
from servelab.plain import close, plain

ANSWERS = ("fit_alpha_beta",)
LINE, RELATIVE, KEPT = "points on a line", "relative errors are squared", "leaves its input alone"
CASES = (CaseSpec(LINE, hint=1, weight=2), CaseSpec(RELATIVE, hint=2, weight=3), CaseSpec(KEPT, hint=1, alone=False))
RTOL = 1e-6


def challenges(rng: Random) -> list[dict]:
    """Exact lines, then points beside one: in round numbers, then as a machine would measure them."""
    made = [
        {"case": LINE, "sizes": [0, 2, 4], "seconds": [1.0, 2.0, 3.0]},
        {"case": LINE, "sizes": [100, 8], "seconds": [6.0, 1.4]},
        {"case": RELATIVE, "sizes": [0, 0, 10], "seconds": [1.0, 2.0, 7.0]},
        {"case": RELATIVE, "sizes": [1, 2, 3], "seconds": [1.0, 1.0, 2.0]},
    ]
    for count in (2, 9, 22):
        alpha, beta = rng.uniform(1e-5, 1e-4), 1 / rng.uniform(1e9, 1e10)
        sizes = [8 << index for index in range(count)]
        noise = [1.0 if count == 2 else rng.uniform(0.8, 1.6) for _ in sizes]
        seconds = [(alpha + beta * n) * factor for n, factor in zip(sizes, noise, strict=True)]
        made.append({"case": LINE if count == 2 else RELATIVE, "sizes": sizes, "seconds": seconds})
    return made


def drive(challenge: dict, fit_alpha_beta) -> dict:
    """What the function returns, and whether its lists are as they were."""
    sizes, seconds = list(challenge["sizes"]), list(challenge["seconds"])
    found = plain(fit_alpha_beta(sizes, seconds))
    return {"found": found, "unchanged": [sizes, seconds] == [challenge["sizes"], challenge["seconds"]]}


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Both parameters are determined; a pair of any kind will do."""
    found, want = numbers(transcript["found"]), expected["found"]
    fine = isinstance(found, list) and close(found, want, rtol=RTOL, atol=0)
    kept = transcript["unchanged"] is True
    message = "" if fine else _difference(found, want)
    return [Case(challenge["case"], fine, message), Case(KEPT, kept, "" if kept else "a list was changed")]


def _difference(found, want: list) -> str:
    if not isinstance(found, list) or len(found) != 2:
        return f"expected (alpha, beta), got {type_of(found)}"
    rows = zip(("alpha", "beta"), found, want, strict=True)
    wrong = [row for row in rows if not close(row[1], row[2], rtol=RTOL)]
    return "; ".join(f"{name}: {expected_got(right, got)}" for name, got, right in wrong)


def show(challenge: dict) -> str:
    """The call, as Python to paste."""
    return f"fit_alpha_beta({challenge['sizes']}, {challenge['seconds']})"
