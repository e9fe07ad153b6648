"""Answers to the FCFS steps."""

from servelab.answers import right, wrong
from servelab.batching import require_lengths


def listed(lengths, slots, pick=min):
    """The finish of the last request, where each next request goes to the slot that ``pick`` chooses."""
    free = [0] * slots
    for length in lengths:
        free[free.index(pick(free))] += length
    return max(free)


@right("step by step")
def step_by_step(reference):
    def fcfs_steps(lengths, slots):
        if slots <= 0 or len(lengths) == 0 or any(n <= 0 for n in lengths):
            raise ValueError("nothing to do, or nobody to do it")
        waiting, running, steps = list(lengths), [], 0
        while waiting or running:
            while waiting and len(running) < slots:
                running.append(waiting.pop(0))
            running = [left - 1 for left in running if left > 1]
            steps += 1
        return steps

    return fcfs_steps


@right("from event to event, a numpy array of slots")
def with_numpy(reference):
    import numpy as np

    def fcfs_steps(lengths, slots):
        require_lengths(lengths, slots)
        free = np.zeros(slots, dtype=np.int64)
        for length in lengths:
            free[free.argmin()] += length
        return free.max()

    return fcfs_steps


@wrong("the bound used as FCFS steps", case="a request stays in its slot")
def bound(reference):
    return lambda lengths, slots: reference.continuous_bound(lengths, slots)


@wrong("static batches", case="a freed slot is taken at once")
def static(reference):
    return lambda lengths, slots: sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


@wrong("slots in turn, whichever is free", case="a freed slot is taken at once")
def round_robin(reference):
    return lambda lengths, slots: max(sum(lengths[slot::slots]) for slot in range(slots))


@wrong("a step between two requests", case="a freed slot is taken at once")
def a_step_between(reference):
    return lambda lengths, slots: listed([n + 1 for n in lengths], slots) - 1


@wrong("the longest first", case="first come, first served")
def longest_first(reference):
    return lambda lengths, slots: listed(sorted(lengths, reverse=True), slots)


@wrong("the shortest first", case="first come, first served")
def shortest_first(reference):
    return lambda lengths, slots: listed(sorted(lengths), slots)


@wrong("the last of the queue first", case="first come, first served")
def last_first(reference):
    return lambda lengths, slots: listed(lengths[::-1], slots)


@wrong("when the last request has finished, not all", case="a slot for everyone")
def last_request(reference):
    def fcfs_steps(lengths, slots):
        free = [0] * slots
        for length in lengths:
            slot = free.index(min(free))
            free[slot] += length
        return free[slot]

    return fcfs_steps


@wrong("decode-only", case="a slot for everyone")
def decode_only(reference):
    return lambda lengths, slots: listed([n - 1 for n in lengths], slots)


@wrong("one slot", case="a slot for everyone")
def one_slot(reference):
    return lambda lengths, slots: sum(lengths)


@wrong("when the first slot is free again", case="a slot for everyone")
def first_free(reference):
    def fcfs_steps(lengths, slots):
        free = [0] * slots
        for length in lengths:
            free[free.index(min(free))] += length
        return min(free)

    return fcfs_steps


@wrong("empties the caller's list", case="leaves its input alone")
def empties(reference):
    def fcfs_steps(lengths, slots):
        free = [0] * slots
        while lengths:
            free[free.index(min(free))] += lengths.pop(0)
        return max(free)

    return fcfs_steps


@wrong("the given check deleted", case="refuses misuse")
def unchecked(reference):
    return lambda lengths, slots: listed(lengths, slots)


@wrong("lengths of 0 accepted", case="refuses misuse")
def zero_lengths(reference):
    def fcfs_steps(lengths, slots):
        return reference.fcfs_steps([max(1, n) for n in lengths], slots)

    return fcfs_steps


@wrong("no slots taken for one", case="refuses misuse")
def no_slots(reference):
    return lambda lengths, slots: reference.fcfs_steps(lengths, max(1, slots))


@wrong("no requests take no steps", case="refuses misuse")
def no_requests(reference):
    return lambda lengths, slots: reference.fcfs_steps(lengths, slots) if lengths else 0


@wrong("everything is refused", case="refuses misuse")
def all_refused(reference):
    return lambda lengths, slots: reference.fcfs_steps(lengths, 0)


@wrong("a very large number", case="first come, first served")
def very_large(reference):
    def fcfs_steps(lengths, slots):
        require_lengths(lengths, slots)
        return 10**9

    return fcfs_steps


@wrong("the longest alone", case="a slot for everyone")
def longest_alone(reference):
    def fcfs_steps(lengths, slots):
        require_lengths(lengths, slots)
        return max(lengths)

    return fcfs_steps
