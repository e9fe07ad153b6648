"""Check of `static_schedule`: who is in which batch, when it runs, and what each cell of its rectangle is."""

from collections.abc import Callable
from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.static_batching import _batches as batches
from servelab.plain import close, dumps, plain, text

ANSWERS = ("static_schedule",)
RETURNS, USEFUL = "returns a list of batches", "counts the tokens of prompt and answer"
SERVED, STARTS, RUNS = "first come, first served", "starts when it is full", "runs to its longest answer"
PADS, HOLDS, EMPTY = "pads prompts to the batch's longest", "holds what has finished", "shows the empty slots"
KEPT, MISUSE = "leaves its input alone", "refuses misuse"
CASES = (
    CaseSpec(RETURNS, hint=2),
    CaseSpec(SERVED, hint=1, weight=3),
    CaseSpec(STARTS, hint=1, weight=3),
    CaseSpec(RUNS, hint=2, weight=3),
    CaseSpec(PADS, hint=3, weight=2),
    CaseSpec(USEFUL, hint=3),
    CaseSpec(HOLDS, hint=3, weight=2),
    CaseSpec(EMPTY, hint=3, weight=2),
    CaseSpec(KEPT, hint=1),
    CaseSpec(MISUSE, hint=2),
)
Q1 = [[0, 0, 2000]] + [[0, 0, 20]] * 8

# A batch size and requests as [arrival, prompt, output]; smallest first
DIRECTED: tuple[tuple[int, list[list[int]]], ...] = (
    (2, []),
    (1, [[0, 3, 1]]),
    (1, [[4, 0, 2]]),
    (2, [[0, 1, 1], [0, 4, 3]]),
    (2, [[0, 2, 2], [3, 2, 2]]),  # the first waits for the second
    (3, [[0, 2, 2], [1, 5, 4]]),  # no arrivals remain: it starts partly filled
    (1, [[0, 1, 5], [1, 1, 2], [9, 1, 3]]),  # the second is locked out, the third finds the server idle
    (2, [[5, 2, 1], [0, 3, 2], [1, 4, 3], [5, 1, 1]]),  # not in order of arrival
    (2, [[0, 2, 3], [0, 5, 3], [0, 2, 1], [1, 4, 6], [2, 9, 2]]),  # each batch has its own longest prompt
    (2, [[0, 6, 1], [0, 6, 1], [0, 6, 8], [0, 6, 2]]),
    (2, [[0, 3, 9], [0, 3, 1], [4, 2, 2], [30, 2, 2], [31, 7, 1]]),
    (4, [[0, 64, 1], [0, 128, 1], [0, 512, 1], [0, 2048, 1]]),
    (9, Q1),
    (9, Q1 * 2),
)


def challenges(rng: Random) -> list[dict]:
    """Misuse, directed cases, then random ones with requests out of order and gaps between arrivals."""
    misuse = [{"batch_size": size, "requests": rows} for size in (0, -1) for rows in ([], [[0, 1, 1], [2, 1, 1]])]
    directed = [{"batch_size": size, "requests": [list(row) for row in rows]} for size, rows in DIRECTED]
    drawn = [{"batch_size": size, "requests": _requests(rng, n)} for size, n in ((3, 7), (4, 16), (5, 33))]
    return [*misuse, *directed, *drawn]


def _requests(rng: Random, n: int) -> list[list[int]]:
    made, now = [], 0
    for _ in range(n):
        now += rng.choice((0, 0, 1, 4, 15))
        made.append([now, rng.randint(0, 40), rng.randint(1, 12)])
    rng.shuffle(made)
    return made


def drive(challenge: dict, static_schedule) -> dict:
    """Call the function once; its schedule or its refusal, and whether its list is as it was."""
    given = batches.requests(challenge["requests"])
    before = list(given)
    if challenge["batch_size"] < 1:
        static_schedule([], 1)  # what is not written, or refuses everything, has not refused this
        try:
            return {"instead": plain(static_schedule(given, challenge["batch_size"]))}
        except ValueError as error:
            return {"refused": text(error, 200)}
    made = batches.schedule_data(static_schedule(given, challenge["batch_size"]))
    return {"schedule": made, "unchanged": given == before}


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Batches and cells are determined; which slot of its batch a request has is not."""
    if "refused" in expected:
        refused = "refused" in transcript
        got = "" if refused else f"expected a ValueError, got {batches.shown(transcript['instead'])}"
        return [Case(MISUSE, refused, got)]
    problem = _no_schedule(challenge, transcript["schedule"])
    if problem:
        return [Case(RETURNS, False, problem)]
    kept = transcript["unchanged"] is True
    return [
        Case(RETURNS, True),
        *_compare(challenge, transcript["schedule"], expected["schedule"]),
        Case(KEPT, kept, "" if kept else "the list was changed"),
    ]


def _no_schedule(challenge: dict, got: list | dict) -> str:
    """Why this is not a schedule at all."""
    if isinstance(got, dict):
        if "problem" in got:
            return str(got["problem"])[:200]
        return f"expected a list of Batch, got {batches.shown(got['instead'])}"
    if challenge["requests"] and not got:
        return "expected a list of Batch, got an empty list"
    for index, batch in enumerate(got):
        for name in ("start", "finish"):
            if not batches.is_number(batch[name]):
                return f"batch {index}, {name}: expected a number, got {batches.shown(batch[name])}"
    return ""


def _compare(challenge: dict, got: list, want: list) -> list[Case]:
    """The order of the requests, then how they are cut into batches, then everything else."""
    problem = _out_of_order(challenge, got)
    if problem:
        return [Case(SERVED, False, problem)]
    for index, (mine, right) in enumerate(zip(got, want, strict=False)):
        if len(_taken(mine)) != len(_taken(right)):
            message = f"batch {index}: expected {len(_taken(right))} requests, got {len(_taken(mine))}"
            return [Case(SERVED, True), Case(STARTS, False, message)]
    pairs = list(zip(got, want, strict=True))
    return [Case(SERVED, True), _starts(pairs), *(_case(case, look, pairs) for case, look in LOOKS.items())]


def _out_of_order(challenge: dict, got: list[dict]) -> str:
    """What is wrong with the order in which requests get into batches, however few of its slots a batch uses."""
    queue, first = sorted(challenge["requests"], key=lambda row: row[0]), 0
    for index, batch in enumerate(got):
        members = [slot["request"] for slot in _taken(batch)]
        if not members:
            return f"batch {index} has no request"
        if len(members) > challenge["batch_size"] + 1:  # one too many is no mistake of order
            return f"batch {index}: {len(members)} requests in {challenge['batch_size']} slots"
        wanted = sorted(queue[first : first + len(members)], key=dumps)
        if not close(members, wanted):
            return f"batch {index}: expected {_named(wanted) or 'no request'}, got {_named(members)}"
        first += len(members)
    return "" if first == len(queue) else f"{_named(queue[first:])}: in no batch"


def _named(rows: list) -> str:
    names = [f"Request({', '.join(map(batches.shown, row))})" for row in rows[: batches.MAX_SHOWN]]
    return ", ".join(names + ["..."] * (len(rows) > len(names)))


def _case(case: str, look: Callable[[dict], list], pairs: list[tuple[dict, dict]]) -> Case:
    """One side of all batches, as names and values; the message is about the first value that differs."""
    for index, batch in enumerate(pairs):
        for (name, found), (_, right) in zip(*map(look, batch), strict=True):
            if not close(found, right):
                return Case(
                    case, False, f"batch {index}, {name}: expected {batches.shown(right)}, got {batches.shown(found)}"
                )
    return Case(case, True)


def _taken(batch: dict) -> list[dict]:
    """The slots that have a request, in an order of our own; of equal requests it does not matter which is which."""
    return sorted((slot for slot in batch["slots"] if slot["request"]), key=lambda slot: dumps(slot["request"]))


def _starts(pairs: list[tuple[dict, dict]]) -> Case:
    """A start is right, too, if nothing but the answer's own finish of the batch before has moved it."""
    free = 0
    for index, (mine, right) in enumerate(pairs):
        full = max(slot["request"][0] for slot in _taken(right))
        if mine["start"] not in (right["start"], max(free, full)):
            return Case(STARTS, False, f"batch {index}, start: expected {right['start']}, got {mine['start']}")
        free = mine["finish"]
    return Case(STARTS, True)


def _duration(batch: dict) -> list:
    return [("finish - start", batch["finish"] - batch["start"])]


def _cells(batch: dict, label: str) -> list:
    return [(f"{_named([slot['request']])}: {label}", slot[label]) for slot in _taken(batch)]


def _padding(batch: dict) -> list:
    return _cells(batch, "padding")


def _useful(batch: dict) -> list:
    return _cells(batch, "useful")


def _held(batch: dict) -> list:
    return _cells(batch, "held")


def _empty(batch: dict) -> list:
    """Slots, the cells of those without a request by label, and empty cells in the others."""
    free = [[slot[label] for label in batches.LABELS] for slot in batch["slots"] if not slot["request"]]
    cells = f"[{', '.join(batches.LABELS)}] of the slots that nobody has"
    return [("number of slots", len(batch["slots"])), (cells, free), *_cells(batch, "empty")]


LOOKS = {RUNS: _duration, PADS: _padding, USEFUL: _useful, HOLDS: _held, EMPTY: _empty}


def show(challenge: dict) -> str:
    """The call, as Python to paste."""
    rows = ", ".join(f"Request({a}, {p}, {o})" for a, p, o in challenge["requests"])
    return f"static_schedule([{rows}], batch_size={challenge['batch_size']})"
