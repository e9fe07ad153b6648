"""Answers to the count of the wastes."""

from servelab.answers import right, wrong

LABELS = ("useful", "padding", "held", "empty")


def changed(reference, change):
    """The reference's counts with some of them changed: ``change(schedule, counts)`` returns those."""

    def waste(schedule):
        found = reference.waste(schedule)
        return found | change(schedule, found)

    return waste


def requests(schedule):
    """Each request with its batch, and the moment at which the batch before it ended."""
    free = 0
    for batch in schedule:
        yield from ((slot.request, batch, free) for slot in batch.slots if slot.request)
        free = batch.finish


@right("step by step")
def step_by_step(reference):
    def waste(schedule):
        counts = {label: sum(getattr(s, label) for b in schedule for s in b.slots) for label in LABELS}
        waits = [(step < free) for r, b, free in requests(schedule) for step in range(r.arrival, b.start)]
        return counts | {"locked_out": sum(waits), "forming": len(waits) - sum(waits), "total": sum(counts.values())}

    return waste


@right("numpy, from the lengths of the requests")
def with_numpy(reference):
    import numpy as np

    def waste(schedule):
        rows = np.zeros(6, dtype=np.int64)
        free = 0
        for batch in schedule:
            for slot in batch.slots:
                r = slot.request
                if r is None:
                    rows[3] += batch.columns
                    continue
                rows[0] += r.prompt + r.output
                rows[1] += batch.prompt_columns - r.prompt
                rows[2] += batch.steps - r.output
                rows[4] += np.clip(free - r.arrival, 0, None)
                rows[5] += min(batch.start - r.arrival, batch.start - free)
            free = batch.finish
        return dict(zip([*LABELS, "locked_out", "forming"], rows, strict=True))

    return waste


@right("forming until the last arrival")
def until_the_last_arrival(reference):
    def waste(schedule):
        forming, free = 0, 0
        for batch in schedule:
            arrivals = [slot.request.arrival for slot in batch.slots if slot.request]
            forming += sum(max(0, max(arrivals) - max(free, arrival)) for arrival in arrivals)
            free = batch.finish
        return reference.waste(schedule) | {"forming": forming}

    return waste


@right("the requests served again, by the rule of the schedule")
def served_again(reference):
    def waste(schedule):
        members = [slot.request for batch in schedule for slot in batch.slots if slot.request]
        size = len(schedule[0].slots) if schedule else 1
        return reference.waste(reference.static_schedule(members, size))

    return waste


@wrong("held counted as useful", case="useful cells")
def held_is_useful(reference):
    return changed(reference, lambda s, f: {"useful": f["useful"] + f["held"], "held": 0})


@wrong("output tokens only", case="useful cells")
def output_only(reference):
    return changed(reference, lambda s, f: {"useful": sum(r.output for r, _, _ in requests(s))})


@wrong("shares instead of cells", case="useful cells")
def shares(reference):
    def divided(schedule, found):
        total = sum(found[label] for label in LABELS) or 1
        return {label: found[label] / total for label in LABELS}

    return changed(reference, divided)


@wrong("the last batch only", case="padding cells")
def last_batch(reference):
    return lambda schedule: reference.waste(schedule[-1:])


@wrong("padding to the longest of all", case="padding cells")
def global_padding(reference):
    def padded(schedule, found):
        prompts = [r.prompt for r, _, _ in requests(schedule)]
        return {"padding": len(prompts) * max(prompts, default=0) - sum(prompts)}

    return changed(reference, padded)


@wrong("held cells over the mean answer", case="held cells")
def over_the_mean(reference):
    def held(schedule, found):
        slots = [s for b in schedule for s in b.slots if s.request]
        mean = sum(s.request.output for s in slots) / max(1, len(slots))
        return {"held": sum(max(0, s.request.output - mean) for s in slots)}

    return changed(reference, held)


@wrong("held in the longest answer's slot, too", case="held cells")
def all_held(reference):
    return changed(reference, lambda s, f: {"held": sum(b.steps for b in s for slot in b.slots if slot.held)})


@wrong("empty slots forgotten", case="empty cells")
def no_empty(reference):
    return changed(reference, lambda s, f: {"empty": 0})


@wrong("slots instead of cells", case="empty cells")
def slots_not_cells(reference):
    return changed(reference, lambda s, f: {"empty": sum(slot.request is None for b in s for slot in b.slots)})


@wrong("queueing counted from the batch's start", case="locked out by an earlier batch")
def from_the_start(reference):
    return changed(reference, lambda s, f: {"locked_out": sum(max(0, free - b.start) for _, b, free in requests(s))})


@wrong("all queueing is an earlier batch's fault", case="locked out by an earlier batch")
def all_locked_out(reference):
    return changed(reference, lambda s, f: {"locked_out": f["locked_out"] + f["forming"]})


@wrong("queueing until the answer is returned", case="locked out by an earlier batch")
def until_returned(reference):
    return changed(reference, lambda s, f: {"locked_out": sum(b.finish - r.arrival for r, b, _ in requests(s))})


@wrong("requests instead of request-steps", case="locked out by an earlier batch")
def number_of_requests(reference):
    return changed(reference, lambda s, f: {"locked_out": sum(r.arrival < free for r, _, free in requests(s))})


@wrong("early arrivals earn steps back", case="locked out by an earlier batch")
def negative(reference):
    return changed(reference, lambda s, f: {"locked_out": sum(free - r.arrival for r, _, free in requests(s))})


@wrong("forming from arrival, though an earlier batch runs", case="waiting for the batch to fill")
def from_arrival(reference):
    return changed(reference, lambda s, f: {"forming": sum(b.start - r.arrival for r, b, _ in requests(s))})


@wrong("forming: the idle time of the server", case="waiting for the batch to fill")
def idle_time(reference):
    def idle(schedule, found):
        ends = [0, *(b.finish for b in schedule)]
        return {"forming": sum(b.start - end for b, end in zip(schedule, ends, strict=False))}

    return changed(reference, idle)
