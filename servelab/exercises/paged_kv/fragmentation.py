"""Check of `fragmentation`: small traces whose slot counts are determined, one policy each."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.plain import close, plain

ANSWERS = ("fragmentation",)
CASES = (
    CaseSpec("reserves the longest length", hint=1),
    CaseSpec("reserves a power of two", hint=1),
    CaseSpec("reserves the final length", hint=1),
    CaseSpec("counts only the iterations and slots there are", hint=3),
    CaseSpec("external only while a request waits", hint=3),
    CaseSpec("first fit, lowest slot", hint=2, weight=2),
    CaseSpec("takes a block at a time", hint=1, weight=2),
    CaseSpec("the newest gives its blocks back", hint=2, weight=3),
)
FOUND = ("used", "reserved", "internal", "external", "free", "preemptions")
ITERATION = 1 / 16
TOLERANCE = 1e-9

# A case, a policy, a capacity, the longest length, and requests as [arrival in iterations, prompt, output].
DIRECTED = (
    ("reserves the longest length", "max", 32, 16, [[0, 5, 3]]),
    ("reserves the longest length", "max", 32, 16, [[0, 5, 11], [0, 1, 1], [1, 7, 2]]),
    ("reserves a power of two", "pow2", 32, 32, [[0, 5, 1]]),
    ("reserves a power of two", "pow2", 64, 64, [[0, 5, 16]]),
    ("reserves a power of two", "pow2", 64, 64, [[0, 5, 17]]),
    ("reserves a power of two", "pow2", 64, 48, [[0, 20, 19]]),
    ("reserves the final length", "oracle", 32, 32, [[0, 5, 3]]),
    ("reserves the final length", "oracle", 32, 32, [[0, 5, 3], [0, 4, 9]]),
    ("counts only the iterations and slots there are", "oracle", 16, 16, [[0, 2, 2], [7, 3, 1]]),
    ("counts only the iterations and slots there are", "max", 16, 16, [[0, 2, 2], [2, 3, 2]]),
    ("counts only the iterations and slots there are", "paged", 32, 32, [[2.5, 2, 3], [9, 18, 1]]),
    ("external only while a request waits", "max", 48, 32, [[0, 5, 3], [0, 5, 3]]),
    ("external only while a request waits", "max", 48, 32, [[0, 5, 6], [2, 5, 3], [12, 1, 1]]),
    ("external only while a request waits", "oracle", 32, 32, [[0, 10, 6], [1, 10, 8], [2, 2, 2]]),
    ("external only while a request waits", "paged", 48, 48, [[0, 20, 9], [3, 30, 2], [4, 2, 2]]),
    ("first fit, lowest slot", "oracle", 16, 16, [[0, 1, 2], [2, 6, 2], [3, 1, 2], [4, 1, 2], [4, 3, 5]]),
    ("first fit, lowest slot", "oracle", 16, 16, [[0, 2, 1], [1, 1, 1], [1, 2, 2], [2, 1, 4], [4, 3, 1], [4, 5, 1]]),
    ("takes a block at a time", "paged", 32, 32, [[0, 14, 2]]),
    ("takes a block at a time", "paged", 32, 32, [[0, 15, 2]]),
    ("takes a block at a time", "paged", 96, 48, [[0, 5, 30], [1, 16, 1], [3, 31, 1]]),
    ("the newest gives its blocks back", "paged", 48, 48, [[0, 15, 20], [0, 15, 5]]),
    ("the newest gives its blocks back", "paged", 64, 64, [[0, 14, 40], [0, 15, 20], [1, 13, 9], [2, 9, 3]]),
)


def challenges(rng: Random) -> list[dict]:
    """Directed traces of a few requests, then random ones that keep memory full. Smallest first."""
    made = [_challenge(*parts) for parts in DIRECTED]
    crowded = (("reserves the longest length", "max"), ("reserves a power of two", "pow2"))
    made += [_challenge(case, policy, 96, 40, _requests(rng, 8, 40)) for case, policy in crowded]
    made += [_challenge("external only while a request waits", "oracle", 64, 40, _requests(rng, 10, 40))]
    for _ in range(3):
        made.append(_challenge("first fit, lowest slot", "oracle", 60, 20, _requests(rng, 60, 20)))
        made.append(_challenge("the newest gives its blocks back", "paged", 96, 80, _requests(rng, 12, 80)))
    return made


def _challenge(case: str, policy: str, capacity: int, max_len: int, requests: list) -> dict:
    return {"case": case, "policy": policy, "capacity": capacity, "max_len": max_len, "requests": requests}


def _requests(rng: Random, n: int, max_len: int) -> list[list]:
    """Requests of mixed lengths, two iterations apart on average."""
    made, now = [], 0.0
    for _ in range(n):
        total = rng.randint(2, max_len)
        prompt = rng.randint(1, total - 1)
        made.append([now, prompt, total - prompt])
        now += rng.choice((0, 0, 1, 2.5, 6))
    return made


def drive(challenge: dict, fragmentation) -> dict:
    """The shares and the number of preemptions that the learner's function finds."""
    from servelab.traces import Request

    trace = [Request(arrival * ITERATION, prompt, output) for arrival, prompt, output in challenge["requests"]]
    found = fragmentation(trace, challenge["policy"], challenge["capacity"], challenge["max_len"])
    return {name: plain(getattr(found, name)) for name in FOUND}


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Every number is determined by the task, so it is compared with the reference's."""
    wrong = [name for name in FOUND if not close(transcript[name], expected[name], atol=TOLERANCE)]
    message = "; ".join(
        f"{name}: expected {_number(expected[name])}, got {_number(transcript[name])}" for name in wrong
    )
    return [Case(challenge["case"], not wrong, message)]


def _number(value) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value!r}"[:60]


def show(challenge: dict) -> str:
    """The call, as Python to paste."""
    rows = ", ".join(f"Request({a} * ITERATION, {p}, {o})" for a, p, o in challenge["requests"])
    return f"fragmentation([{rows}], {challenge['policy']!r}, {challenge['capacity']}, {challenge['max_len']})"
