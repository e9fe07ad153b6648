"""What this unit's drivers and judges share: schedules as plain data, and lists as a learner should read them."""

from collections.abc import Sequence
from typing import Any

from servelab.batching import Batch, Request, Slot
from servelab.exercise import Case
from servelab.plain import close, is_array, plain, type_name

LABELS = ("padding", "useful", "held", "empty")
FIELDS = ("arrival", "prompt", "output")  # of a request
MAX_SHOWN = 12  # items of a list in a message


def requests(rows: list[list[int]]) -> list[Request]:
    """Requests from ``[arrival, prompt, output]``."""
    return [Request(*row) for row in rows]


def schedule(data: list[dict]) -> list[Batch]:
    """A schedule from plain data, as `schedule_data` writes it."""
    return [Batch(b["start"], b["finish"], tuple(map(_slot, b["slots"]))) for b in data]


def _slot(data: dict) -> Slot:
    request = Request(*data["request"]) if data["request"] else None
    return Slot(request, **{label: data[label] for label in LABELS})


def schedule_data(made: Any) -> Any:
    """What a learner's scheduler returned, as plain data; of what is no list of batches, what is wrong with it."""
    if not _is_list(made):
        return {"instead": plain(made)}
    problem = next(filter(None, map(_no_batch, range(len(made)), made)), "")
    if problem:
        return {"problem": problem}
    return [
        {"start": plain(b.start), "finish": plain(b.finish), "slots": [_slot_data(slot) for slot in b.slots]}
        for b in made
    ]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _no_batch(index: int, batch: Any) -> str:
    """Why this is not a batch of slots of requests, by the first thing in it that is of another type."""
    if not _has(batch, "start", "finish", "slots"):
        return f"batch {index} is {_a(batch)}, expected a Batch"
    if not _is_list(batch.slots):
        return f"batch {index}: slots is {_a(batch.slots)}, expected a list of Slot"
    for number, slot in enumerate(batch.slots):
        if not _has(slot, "request", *LABELS):
            return f"batch {index}, slot {number} is {_a(slot)}, expected a Slot"
        if slot.request is not None and not _has(slot.request, *FIELDS):
            return f"batch {index}, slot {number}: request is {_a(slot.request)}, expected a Request or None"
    return ""


def _has(value: Any, *names: str) -> bool:
    """Whether a value has these fields, of whatever class it is; a class itself does not count."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


def _a(value: Any) -> str:
    """A value's type, with its article."""
    name = type_name(value)[:40]
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _slot_data(slot: Any) -> dict:
    row = None if slot.request is None else [plain(getattr(slot.request, name)) for name in FIELDS]
    return {"request": row} | {label: plain(getattr(slot, label)) for label in LABELS}


def shown(value: Any) -> str:
    """A plain value, cut where it is long; what is not plain by the name of its type."""
    if isinstance(value, dict) and "unexpected type" in value:
        return f"an object of type {str(value['unexpected type'])[:40]}"
    if is_array(value):
        return f"an array of shape {str(value['shape'])[:40]}"
    if isinstance(value, list) and len(value) > MAX_SHOWN:
        return f"[{', '.join(map(repr, value[:MAX_SHOWN]))}, ... ({len(value)} in all)]"
    return repr(value)[:200]


def is_number(value: Any) -> bool:
    """Whether a plain value is a finite number."""
    return close(value, value) and isinstance(value, (int, float)) and not isinstance(value, bool)


def number(case: str, got: Any, expected: int) -> Case:
    """A count is determined: compare it exactly."""
    right = close(got, expected)
    return Case(case, right, "" if right else f"expected {expected}, got {shown(got)}")
