"""What this unit's drivers and judges share: schedules as plain data, and lists as a learner should read them."""

from typing import Any

from servelab.batching import Batch, Request, Slot
from servelab.exercise import Case
from servelab.plain import close, plain

LABELS = ("padding", "useful", "held", "empty")
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
    """What a learner's scheduler returned, as plain data; anything that is not a list of batches by its type."""
    if not isinstance(made, (list, tuple)) or not all(hasattr(batch, "slots") for batch in made):
        return {"instead": plain(made)}
    return [
        {"start": plain(b.start), "finish": plain(b.finish), "slots": [_slot_data(slot) for slot in b.slots]}
        for b in made
    ]


def _slot_data(slot: Any) -> dict:
    request = getattr(slot, "request", None)
    row = None if request is None else [plain(getattr(request, name)) for name in ("arrival", "prompt", "output")]
    return {"request": row} | {label: plain(getattr(slot, label, None)) for label in LABELS}


def shown(value: Any) -> str:
    """A plain value, cut where it is long; what is not plain by the name of its type."""
    if isinstance(value, dict) and "unexpected type" in value:
        return f"an object of type {str(value['unexpected type'])[:40]}"
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
