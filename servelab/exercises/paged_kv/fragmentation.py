"""Check of `fragmentation`: small traces whose slot counts are determined, one policy each."""

from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.paged_kv._steps import shown
from servelab.plain import close, plain

ANSWERS = ("fragmentation",)
SIZES = (
    "reserves the longest length",
    "reserves the final length",
    "reserves a power of two",
    "takes a block at a time",
)
SPLIT = "each slot counted as what it is"
PLACED = ("first fit, lowest slot", "the last admitted gives its blocks back")
CASES = (
    *(CaseSpec(case, hint=1) for case in SIZES[:3]),
    CaseSpec(SIZES[3], hint=1, weight=2),
    CaseSpec(SPLIT, hint=3),
    CaseSpec("external only while a request waits", hint=3),
    CaseSpec("counts only the iterations and slots there are", hint=3),
    CaseSpec(PLACED[0], hint=2, weight=2),
    CaseSpec(PLACED[1], hint=2, weight=3),
)
KINDS = ("used", "reserved", "internal", "external", "free")
FOUND = (*KINDS, "preemptions")
ITERATION = 1 / 16
TOLERANCE = 1e-9

# A case, a policy, a capacity, the longest length, and requests as [arrival in iterations, prompt, output]. Before
# "first fit" no two regions stand side by side, and before the last case no pool runs out, so that a fault of either
# fails the case that is about it.
DIRECTED = (
    ("reserves the longest length", "max", 32, 16, [[0, 5, 3]]),
    ("reserves the longest length", "max", 32, 16, [[0, 5, 11]]),
    ("reserves the final length", "oracle", 32, 32, [[0, 5, 3]]),
    ("reserves the final length", "oracle", 32, 32, [[0, 4, 9]]),
    ("reserves a power of two", "pow2", 32, 32, [[0, 5, 1]]),
    ("reserves a power of two", "pow2", 64, 64, [[0, 5, 16]]),
    ("reserves a power of two", "pow2", 64, 64, [[0, 5, 17]]),
    ("reserves a power of two", "pow2", 64, 48, [[0, 20, 19]]),
    ("takes a block at a time", "paged", 48, 32, [[0, 14, 2]]),
    ("takes a block at a time", "paged", 48, 32, [[0, 15, 2]]),
    ("takes a block at a time", "paged", 96, 48, [[0, 5, 30], [1, 16, 1], [3, 31, 1]]),
    ("external only while a request waits", "max", 48, 32, [[0, 5, 3], [0, 5, 3]]),
    ("external only while a request waits", "max", 48, 32, [[0, 5, 6], [2, 5, 3], [8, 1, 1]]),
    ("external only while a request waits", "oracle", 32, 32, [[0, 10, 6], [1, 20, 12], [2, 2, 2]]),
    ("external only while a request waits", "paged", 80, 80, [[0, 33, 9], [3, 40, 2], [4, 2, 2]]),
    ("counts only the iterations and slots there are", "oracle", 16, 16, [[0, 2, 2], [7, 3, 1]]),
    ("counts only the iterations and slots there are", "max", 16, 16, [[0, 2, 2], [2, 3, 2]]),
    ("counts only the iterations and slots there are", "paged", 32, 32, [[2.5, 2, 3], [9, 18, 1]]),
    ("first fit, lowest slot", "oracle", 16, 16, [[0, 5, 3], [0, 4, 2]]),
    ("first fit, lowest slot", "max", 32, 16, [[0, 5, 11], [0, 1, 1], [1, 7, 2]]),
    ("first fit, lowest slot", "oracle", 16, 16, [[0, 1, 2], [2, 6, 2], [3, 1, 2], [4, 1, 2], [4, 3, 5]]),
    ("first fit, lowest slot", "oracle", 16, 16, [[0, 2, 1], [1, 1, 1], [1, 2, 2], [2, 1, 4], [4, 3, 1], [4, 5, 1]]),
    ("the last admitted gives its blocks back", "paged", 48, 48, [[0, 15, 20], [0, 15, 5]]),
    ("the last admitted gives its blocks back", "paged", 64, 64, [[0, 14, 40], [0, 15, 20], [1, 13, 9], [2, 9, 3]]),
)


def challenges(rng: Random) -> list[dict]:
    """Directed traces of a few requests, then random ones that keep memory full. Smallest first."""
    made = [_challenge(*parts) for parts in DIRECTED]
    made += [_challenge("first fit, lowest slot", p, 96, 40, _requests(rng, 8, 40)) for p in ("max", "pow2", "oracle")]
    for _ in range(3):
        made.append(_challenge("first fit, lowest slot", "oracle", 60, 20, _requests(rng, 60, 20)))
        made.append(_challenge("the last admitted gives its blocks back", "paged", 96, 80, _requests(rng, 12, 80)))
    return sorted(made, key=_size)


def _challenge(case: str, policy: str, capacity: int, max_len: int, requests: list) -> dict:
    return {"case": case, "policy": policy, "capacity": capacity, "max_len": max_len, "requests": requests}


def _size(challenge: dict) -> tuple[int, int]:
    """Requests, and iterations that they run for."""
    return len(challenge["requests"]), sum(output for _, _, output in challenge["requests"])


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
    """What the learner's function finds: shares and preemptions, and the counts of each iteration if it keeps them."""
    from servelab.traces import Request

    trace = [Request(arrival * ITERATION, prompt, output) for arrival, prompt, output in challenge["requests"]]
    found = fragmentation(trace, challenge["policy"], challenge["capacity"], challenge["max_len"])
    if not all(hasattr(found, name) for name in FOUND):
        return {"shares": None, "instead": plain(found), "rows": []}
    return {"shares": {name: plain(getattr(found, name)) for name in FOUND}, "rows": _rows(found)}


def _rows(found: Any) -> list:
    """Slots of each kind in each iteration. They only tell where a run went wrong: nobody has to keep them."""
    history = getattr(found, "history", ())
    if not isinstance(history, (list, tuple)) or not all(isinstance(row, dict) for row in history):
        return []
    return plain([[row.get(kind, 0) for kind in KINDS] for row in history])


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Every number is determined by the task, so it is compared with the reference's.

    Where a policy's size is the question, the number of slots taken, or not taken, is enough; what they were counted as
    is another case.
    """
    got, want = transcript["shares"], expected["shares"]
    if got is None:
        problem, hint = f"expected a Shares, got {shown(transcript['instead'])}", None
    else:
        right = close(got, want, atol=TOLERANCE)
        problem, hint = ("", None) if right else _problem(challenge, transcript, expected)
    case = challenge["case"]
    if case not in SIZES:
        return [Case(case, not problem, problem, hint)]
    return [Case(case, not problem or _same_sizes(got, want), problem, hint), Case(SPLIT, not problem, problem, hint)]


def _same_sizes(got: dict | None, want: dict) -> bool:
    """Whether as many slots were taken, whatever they were counted as, and given back as often."""
    if not got or not all(isinstance(got[name], (int, float)) for name in FOUND):
        return False
    sums = (
        close(sum(got[kind] for kind in kinds), sum(want[kind] for kind in kinds), atol=TOLERANCE)
        for kinds in (KINDS[:3], KINDS[3:])
    )
    return got["preemptions"] == want["preemptions"] and any(sums)


def _problem(challenge: dict, transcript: dict, expected: dict) -> tuple[str, int | None]:
    """The first iteration that differs, if the answer tells them apart, else the averages that do; and a hint."""
    got, want = transcript["rows"], expected["rows"]
    for iteration, (row, wanted) in enumerate(zip(got, want, strict=False)):
        if row != wanted:
            return f"iteration {iteration}: {_slots(challenge, row, wanted)}", _hint(challenge, row, wanted)
    shares, right = transcript["shares"], expected["shares"]
    averages = "; ".join(
        f"{name}: expected {_number(right[name])}, got {_number(shares[name])}"
        for name in FOUND
        if not close(shares[name], right[name], atol=TOLERANCE)
    )
    hint = None if close(shares["preemptions"], right["preemptions"]) else 2
    if got and len(got) != len(want):
        return f"expected {len(want)} iterations, got {len(got)}; {averages}", hint
    return (f"the slots of every iteration are right; {averages}" if got else averages), hint


def _hint(challenge: dict, row: list, wanted: list) -> int | None:
    """Which function an iteration's slots point at: sizes (1), placing (2) or counting (3); None if that is open.

    A fault of `slots_needed` or `count` shows in the cases before these two, and with a single request.
    """
    if challenge["case"] in PLACED:
        return 2
    if not _numbers(row) or sum(row[:3]) == sum(wanted[:3]):
        return 3
    if row[0] != wanted[0]:
        return 3 if len(challenge["requests"]) == 1 else 2
    return 1 if challenge["case"] in SIZES else None


def _numbers(row: list) -> bool:
    return all(isinstance(slots, (int, float)) for slots in row)


def _slots(challenge: dict, row: list, wanted: list) -> str:
    """The kinds of slots that differ; and their sum, where it is not the pool."""
    apart = [kind for kind, n, right in zip(KINDS, row, wanted, strict=True) if n != right]
    expected, got = (
        ", ".join(f"{kind} {_number(slots)}" for kind, slots in zip(KINDS, numbers, strict=True) if kind in apart)
        for numbers in (wanted, row)
    )
    said, capacity = f"expected {expected}; got {got}", challenge["capacity"]
    if not _numbers(row):
        return f"{said} (the kinds do not add up to {capacity} slots)"
    if sum(row[:3]) > capacity:
        return f"{said}: more slots are taken than the pool has"
    if min(row) < 0:
        return f"{said}: a kind is negative"
    if sum(row) != capacity:
        return f"{said} (the kinds do not add up to {capacity} slots)"
    return said + (_placing(sum(row[:3]) - sum(wanted[:3])) if challenge["case"] == PLACED[0] else "")


def _placing(more: int | float) -> str:
    """What a contiguous policy did other than first fit, from the number of slots taken too many."""
    if more > 0:
        return ": a request runs for which first fit has no gap yet (or regions overlap)"
    return ": a request waits for which first fit has a gap" if more < 0 else ""


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else shown(value)


def show(challenge: dict) -> str:
    """The call, as Python to paste."""
    rows = ", ".join(f"Request({a} * ITERATION, {p}, {o})" for a, p, o in challenge["requests"])
    call = f"fragmentation([{rows}], {challenge['policy']!r}, {challenge['capacity']}, {challenge['max_len']})"
    return f"found = {call}\nprint(found)\nprint(waste.slot_lines(found.history))"
