"""Answers to the static schedule."""

from collections import deque
from dataclasses import dataclass, replace

from servelab.answers import right, wrong
from servelab.batching import Batch, Request, Slot


def rectangle(members, size, start, *, prompts=None, steps=None):
    """A batch as the task wants it, in pieces that a wrong answer can change."""
    prompts = max(r.prompt for r in members) if prompts is None else prompts
    steps = max(r.output for r in members) if steps is None else steps
    rows = [Slot(r, prompts - r.prompt, r.prompt + r.output, steps - r.output, 0) for r in members]
    rows += [Slot(None, 0, 0, 0, prompts + steps)] * (size - len(members))
    return Batch(start, start + steps, rows)


def changed(reference, change):
    """The reference's schedule with every batch changed."""
    return lambda requests, batch_size: [change(b) for b in reference.static_schedule(requests, batch_size)]


def slots_changed(reference, change):
    return changed(reference, lambda b: replace(b, slots=tuple(change(slot) for slot in b.slots)))


@right("moment by moment, with a queue")
def moment_by_moment(reference):
    def static_schedule(requests, batch_size):
        if not batch_size > 0:
            raise ValueError(batch_size)
        coming = deque(sorted(requests, key=lambda r: r.arrival))
        waiting, schedule, now, busy = [], [], 0, 0
        while coming or waiting:
            while coming and coming[0].arrival <= now:
                waiting.append(coming.popleft())
            if now >= busy and waiting and (len(waiting) >= batch_size or not coming):
                schedule.append(rectangle(waiting[:batch_size], batch_size, now))
                waiting, busy = waiting[batch_size:], schedule[-1].finish
            now += 1
        return schedule

    return static_schedule


@right("slots in the other order, own classes, numpy counts")
def other_order(reference):
    import numpy as np

    @dataclass
    class Row:
        request: Request | None
        padding: int
        useful: int
        held: int
        empty: int

    @dataclass
    class Group:
        start: int
        finish: int
        slots: list

    def static_schedule(requests, batch_size):
        found = reference.static_schedule(tuple(requests), batch_size)
        return tuple(
            Group(
                np.int64(b.start),
                np.int64(b.finish),
                [Row(s.request, *map(np.int32, (s.padding, s.useful, s.held, s.empty))) for s in reversed(b.slots)],
            )
            for b in found
        )

    return static_schedule


@right("cell by cell")
def cell_by_cell(reference):
    def static_schedule(requests, batch_size):
        if batch_size <= 0:
            raise ValueError("no slots")
        order = [requests[i] for i in sorted(range(len(requests)), key=lambda i: (requests[i].arrival, i))]
        schedule = []
        while order:
            members, order = order[:batch_size], order[batch_size:]
            start = max([schedule[-1].finish if schedule else 0, *(r.arrival for r in members)])
            prompts, steps = max(r.prompt for r in members), max(r.output for r in members)
            rows = []
            for r in [*members, *[None] * (batch_size - len(members))]:
                cells = {"padding": 0, "useful": 0, "held": 0, "empty": 0}
                for column in range(prompts + steps):
                    if r is None:
                        cells["empty"] += 1
                    elif column < prompts - r.prompt:
                        cells["padding"] += 1
                    else:
                        cells["useful" if column < prompts + r.output else "held"] += 1
                rows.append(Slot(r, **cells))
            schedule.append(Batch(start, start + steps, rows))
        return schedule

    return static_schedule


@wrong("a batch that starts before it is full", case="starts when it is full")
def too_early(reference):
    def static_schedule(requests, batch_size):
        if batch_size < 1:
            raise ValueError("no slots")
        queue, schedule, free = sorted(requests, key=lambda r: r.arrival), [], 0
        while queue:
            start = max(free, queue[0].arrival)
            members = [r for r in queue[:batch_size] if r.arrival <= start]
            schedule.append(rectangle(members, batch_size, start))
            queue, free = queue[len(members) :], schedule[-1].finish
        return schedule

    return static_schedule


@wrong("starts with its first member", case="starts when it is full")
def first_member(reference):
    return changed(reference, lambda b: _moved(b, min(s.request.arrival for s in b.slots if s.request)))


@wrong("starts although an earlier batch runs", case="starts when it is full")
def overlapping(reference):
    return changed(reference, lambda b: _moved(b, max(s.request.arrival for s in b.slots if s.request)))


@wrong("waits for the last arrival of all", case="starts when it is full")
def waits_for_all(reference):
    def static_schedule(requests, batch_size):
        late = max((r.arrival for r in requests), default=0)
        return [_moved(b, max(b.start, late)) for b in reference.static_schedule(requests, batch_size)]

    return static_schedule


def _moved(batch, start):
    return Batch(start, start + batch.finish - batch.start, batch.slots)


@wrong("the order of the list for the order of arrival", case="first come, first served")
def list_order(reference):
    def static_schedule(requests, batch_size):
        if batch_size < 1:
            raise ValueError("no slots")
        schedule, free = [], 0
        for first in range(0, len(requests), batch_size):
            members = requests[first : first + batch_size]
            schedule.append(rectangle(members, batch_size, max(free, *(r.arrival for r in members))))
            free = schedule[-1].finish
        return schedule

    return static_schedule


@wrong("like with like: sorted by length", case="first come, first served")
def sorted_by_length(reference):
    def static_schedule(requests, batch_size):
        order = sorted(requests, key=lambda r: r.output)
        groups = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        return [rectangle(g, batch_size, max(r.arrival for r in g)) for g in groups]

    return static_schedule


@wrong("a batch without requests at the end", case="first come, first served")
def empty_batch(reference):
    def static_schedule(requests, batch_size):
        made = reference.static_schedule(requests, batch_size)
        end = made[-1].finish if made else 0
        return [*made, Batch(end, end, [Slot(None)] * batch_size)]

    return static_schedule


@wrong("the last, partly filled batch never starts", case="first come, first served")
def only_full(reference):
    def static_schedule(requests, batch_size):
        return [b for b in reference.static_schedule(requests, batch_size) if all(s.request for s in b.slots)]

    return static_schedule


@wrong("utilisation over the mean: a batch lasts the mean of its answers", case="runs to its longest answer")
def over_the_mean(reference):
    def mean(b):
        lengths = [s.request.output for s in b.slots if s.request]
        return replace(b, finish=b.start + sum(lengths) // len(lengths))

    return changed(reference, mean)


@wrong("decode-only: one step too few", case="runs to its longest answer")
def decode_only(reference):
    return changed(reference, lambda b: replace(b, finish=b.finish - 1))


@wrong("the prefill as a step of its own", case="runs to its longest answer")
def extra_prefill(reference):
    return changed(reference, lambda b: replace(b, finish=b.finish + 1))


def one_by_one(lasts):
    """Full batches in order of arrival, each of which lasts ``lasts(members)`` steps; the next one waits for that."""

    def static_schedule(requests, batch_size):
        if batch_size < 1:
            raise ValueError("no slots")
        order, schedule, free = sorted(requests, key=lambda r: r.arrival), [], 0
        for first in range(0, len(order), batch_size):
            members = order[first : first + batch_size]
            made = rectangle(members, batch_size, max(free, members[-1].arrival))
            free = made.start + lasts(members)
            schedule.append(replace(made, finish=free))
        return schedule

    return static_schedule


@wrong("prompt columns take time, and the next batch waits for them", case="runs to its longest answer")
def prompts_delay(reference):
    return one_by_one(lambda members: max(r.prompt for r in members) + max(r.output for r in members))


@wrong("the next batch starts a step later", case="starts when it is full")
def a_step_later(reference):
    return changed(reference, lambda b: _moved(b, b.start + (b.start > 0)))


@wrong("a step between two batches, as part of the first", case="runs to its longest answer")
def a_step_between(reference):
    return one_by_one(lambda members: max(r.output for r in members) + 1)


@wrong("prompt columns take time", case="runs to its longest answer")
def prompts_take_time(reference):
    return changed(reference, lambda b: replace(b, finish=b.start + b.columns))


@wrong("the last request's length ends the batch", case="runs to its longest answer")
def last_ends(reference):
    def ends(b):
        return replace(b, finish=b.start + [s.request.output for s in b.slots if s.request][-1])

    return changed(reference, ends)


@wrong("padding to the own length", case="pads prompts to the batch's longest")
def own_length(reference):
    return slots_changed(reference, lambda s: replace(s, padding=0))


@wrong("padding to the longest prompt of all requests", case="pads prompts to the batch's longest")
def global_padding(reference):
    def static_schedule(requests, batch_size):
        longest = max((r.prompt for r in requests), default=0)
        return [
            rectangle([s.request for s in b.slots if s.request], batch_size, b.start, prompts=longest)
            for b in reference.static_schedule(requests, batch_size)
        ]

    return static_schedule


@wrong("held counted as useful", case="counts the tokens of prompt and answer")
def held_is_useful(reference):
    return slots_changed(reference, lambda s: replace(s, useful=s.useful + s.held, held=0))


@wrong("a finished request leaves an empty slot", case="holds what has finished")
def leaves(reference):
    return slots_changed(reference, lambda s: replace(s, held=0, empty=s.empty + s.held))


@wrong("the prompt is not useful", case="counts the tokens of prompt and answer")
def prompt_not_useful(reference):
    return slots_changed(reference, lambda s: replace(s, useful=s.request.output if s.request else 0))


@wrong("empty slots of the last batch forgotten", case="shows the empty slots")
def no_empty_slots(reference):
    return changed(reference, lambda b: replace(b, slots=tuple(s for s in b.slots if s.request)))


@wrong("an empty slot has steps and no prompt columns", case="shows the empty slots")
def empty_steps_only(reference):
    return changed(
        reference,
        lambda b: replace(b, slots=tuple(s if s.request else Slot(None, empty=b.steps) for s in b.slots)),
    )


@wrong("an empty slot is padding", case="shows the empty slots")
def empty_is_padding(reference):
    return slots_changed(reference, lambda s: s if s.request else Slot(None, padding=s.empty))


@wrong("sorts the caller's list", case="leaves its input alone")
def sorts(reference):
    def static_schedule(requests, batch_size):
        requests.sort(key=lambda r: r.arrival)
        return reference.static_schedule(requests, batch_size)

    return static_schedule


@wrong("nothing returned", case="returns a list of batches")
def nothing(reference):
    return lambda requests, batch_size: None


@wrong("no batches", case="returns a list of batches")
def no_batches(reference):
    return lambda requests, batch_size: []


@wrong("moments left out", case="returns a list of batches")
def no_moments(reference):
    return changed(reference, lambda b: replace(b, finish=None))


@wrong("an index for the request of a slot", case="returns a list of batches")
def index_of_request(reference):
    def static_schedule(requests, batch_size):
        def index(slot):
            return slot if slot.request is None else replace(slot, request=requests.index(slot.request))

        found = reference.static_schedule(requests, batch_size)
        return [replace(b, slots=[index(slot) for slot in b.slots]) for b in found]

    return static_schedule


@wrong("a list of numbers for the request of a slot", case="returns a list of batches")
def request_as_list(reference):
    def row(slot):
        r = slot.request
        return slot if r is None else replace(slot, request=[r.arrival, r.prompt, r.output])

    return slots_changed(reference, row)


@wrong("tuples for slots", case="returns a list of batches")
def tuples_for_slots(reference):
    return slots_changed(reference, lambda s: (s.request, s.padding, s.useful, s.held, s.empty))


@wrong("requests for slots", case="returns a list of batches")
def requests_for_slots(reference):
    return slots_changed(reference, lambda s: s.request)


@wrong("a number of slots for the slots", case="returns a list of batches")
def number_for_slots(reference):
    return changed(reference, lambda b: replace(b, slots=len(b.slots)))


@wrong("tuples for batches", case="returns a list of batches")
def tuples_for_batches(reference):
    return changed(reference, lambda b: (b.start, b.finish, b.slots))


@wrong("one batch and no list", case="returns a list of batches")
def no_list(reference):
    def static_schedule(requests, batch_size):
        found = reference.static_schedule(requests, batch_size)
        return found[0] if found else found

    return static_schedule


@wrong("a batch size without requests is not checked", case="refuses misuse")
def unchecked_without_requests(reference):
    return lambda requests, batch_size: reference.static_schedule(requests, batch_size) if requests else []


@wrong("only a negative batch size is refused", case="refuses misuse")
def only_negative(reference):
    def static_schedule(requests, batch_size):
        if batch_size == 0:
            return []
        return reference.static_schedule(requests, batch_size)

    return static_schedule


@wrong("everything is refused", case="refuses misuse")
def all_refused(reference):
    def static_schedule(requests, batch_size):
        raise ValueError("no")

    return static_schedule


@wrong("no check of the batch size", case="refuses misuse")
def unchecked(reference):
    return lambda requests, batch_size: reference.static_schedule(requests, max(1, batch_size))


@wrong("everybody in one batch", case="first come, first served")
def one_batch(reference):
    def static_schedule(requests, batch_size):
        if batch_size < 1:
            raise ValueError("no slots")
        return [rectangle(requests, batch_size, max(r.arrival for r in requests))] if requests else []

    return static_schedule
