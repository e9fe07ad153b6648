"""Check of `waste`: schedules that are given as data, so that a mistake in the scheduler costs nothing here."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.static_batching import _batches as batches
from servelab.plain import plain

ANSWERS = ("waste",)
COUNTS = {
    "useful": "useful cells",
    "padding": "padding cells",
    "held": "held cells",
    "empty": "empty cells",
    "locked_out": "locked out by an earlier batch",
    "forming": "waiting for the batch to fill",
}
HINTS = {"locked_out": 2, "forming": 3}
CASES = tuple(CaseSpec(case, hint=HINTS.get(key, 1), weight=2 if key in HINTS else 1) for key, case in COUNTS.items())

# Batches as (start, columns of prompts, steps, slots); a slot is the arrival, padding cells and held cells of its
# request, or None. All of it is as `static_schedule` would have it
DIRECTED: tuple[list[tuple], ...] = (
    [],
    [(0, 2, 3, [(0, 0, 0)])],
    [(4, 0, 3, [(1, 0, 2), (4, 0, 0)])],
    [(2, 5, 4, [(2, 3, 0), (0, 0, 3), None])],
    [(0, 1, 6, [(0, 0, 0)]), (6, 1, 2, [(2, 0, 0)])],
    [(0, 1, 6, [(0, 0, 0)]), (9, 1, 2, [(9, 0, 0)])],
    [(0, 1, 6, [(0, 0, 0), (0, 1, 4)]), (9, 2, 2, [(4, 0, 0), (9, 1, 1)])],
    [
        (1, 3, 5, [(0, 0, 0), (1, 1, 4)]),
        (6, 2, 2, [(2, 0, 0), (3, 1, 1)]),
        (12, 2, 2, [(7, 0, 0), (12, 0, 1)]),
        (14, 2, 2, [(12, 0, 0), None]),
    ],
    [(0, 0, 2000, [(0, 0, 0)] + [(0, 0, 1980)] * 8)],
)


def challenges(rng: Random) -> list[list[dict]]:
    """Directed schedules, then random ones."""
    directed = [[_batch(*parts) for parts in schedule] for schedule in DIRECTED]
    return [*directed, *(_random_schedule(rng, n, slots) for n, slots in ((2, 3), (5, 4), (9, 6)))]


def _random_schedule(rng: Random, n: int, slots: int) -> list[dict]:
    """Nobody arrives before a request of an earlier batch, and each batch waits for its last arrival and the server."""
    made: list[dict] = []
    free = latest = 0
    for index in range(n):
        before, latest = latest, latest + rng.choice((0, 2, 7, 15))
        prompts, steps = rng.randint(0, 9), rng.randint(1, 9)
        arrivals = [rng.randint(before, latest) for _ in range(slots - 1)]
        rows: list = [(arrivals[0], rng.randint(0, prompts), rng.randint(0, steps - 1)), (latest, 0, 0)]
        rows += [(arrival, 0, 0) for arrival in arrivals[1:-1]]
        rows.append(None if index == n - 1 else (arrivals[-1], prompts, 0))
        made.append(_batch(max(free, latest), prompts, steps, rows))
        free = made[-1]["finish"]
    return made


def _batch(start: int, prompts: int, steps: int, rows: list) -> dict:
    """A batch as plain data: what a request does not pad is its prompt, and what it does not hold its answer."""
    slots: list[dict] = []
    for row in rows:
        if row is None:
            slots.append({"request": None, "padding": 0, "useful": 0, "held": 0, "empty": prompts + steps})
            continue
        arrival, padding, held = row
        lengths = [prompts - padding, steps - held]
        cells = {"padding": padding, "useful": sum(lengths), "held": held, "empty": 0}
        slots.append({"request": [arrival, *lengths], **cells})
    return {"start": start, "finish": start + steps, "slots": slots}


def drive(challenge: list[dict], waste) -> dict:
    """The counts that the function returns."""
    return {"found": plain(waste(batches.schedule(challenge)))}


def judge(challenge: list[dict], transcript: dict, expected: dict) -> list[Case]:
    """Every count is determined."""
    found, right = transcript["found"], expected["found"]
    if not isinstance(found, dict) or "unexpected type" in found:
        text = f"expected a dict with the keys {', '.join(COUNTS)}, got {batches.shown(found)}"
        return [Case(case, False, text) for case in COUNTS.values()]
    return [batches.number(case, found.get(key), right[key]) for key, case in COUNTS.items()]


def show(challenge: list[dict]) -> str:
    """The schedule, as Python to paste."""
    lines = []
    for batch in challenge:
        slots = ", ".join(map(_shown_slot, batch["slots"]))
        lines.append(f"    Batch({batch['start']}, {batch['finish']}, [{slots}]),")
    return "\n".join(["waste([", *lines, "])"]) if lines else "waste([])"


def _shown_slot(slot: dict) -> str:
    request = f"Request({', '.join(map(str, slot['request']))})" if slot["request"] else "None"
    return f"Slot({request}, {', '.join(str(slot[label]) for label in batches.LABELS)})"
