"""Answers to the bound."""

import math
from fractions import Fraction

from servelab.answers import right, wrong
from servelab.batching import require_lengths


@right("by trying")
def by_trying(reference):
    def continuous_bound(lengths, slots):
        if not lengths or min(lengths) < 1 or slots < 1:
            raise ValueError("no bound")
        steps = 1
        while steps * slots < sum(lengths) or steps < max(lengths):
            steps += 1
        return steps

    return continuous_bound


@right("with fractions and numpy")
def with_fractions(reference):
    import numpy as np

    def continuous_bound(lengths, slots):
        require_lengths(lengths, slots)
        return np.int64(max([math.ceil(Fraction(sum(lengths), slots)), *lengths]))

    return continuous_bound


@wrong("the work alone", case="no answer is faster than its own steps")
def work_alone(reference):
    return lambda lengths, slots: math.ceil(sum(lengths) / slots)


@wrong("the longest alone", case="all the work has to fit")
def longest_alone(reference):
    return lambda lengths, slots: max(lengths)


@wrong("the sum of both", case="no more than the larger of the two")
def both(reference):
    return lambda lengths, slots: max(lengths) + math.ceil(sum(lengths) / slots)


@wrong("rounded down", case="a part of a step is a step")
def rounded_down(reference):
    return lambda lengths, slots: max(max(lengths), sum(lengths) // slots)


@wrong("not rounded", case="a part of a step is a step")
def not_rounded(reference):
    return lambda lengths, slots: max(max(lengths), sum(lengths) / slots)


@wrong("one more than rounded down", case="no more than the larger of the two")
def one_more(reference):
    return lambda lengths, slots: max(max(lengths), sum(lengths) // slots + 1)


@wrong("nothing returned", case="no answer is faster than its own steps")
def nothing(reference):
    return lambda lengths, slots: None


@wrong("FCFS steps for the bound", case="no more than the larger of the two")
def fcfs(reference):
    return lambda lengths, slots: reference.fcfs_steps(lengths, slots)


@wrong("static batches", case="no more than the larger of the two")
def static(reference):
    return lambda lengths, slots: sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


@wrong("sorts the caller's list", case="leaves its input alone")
def sorts(reference):
    def continuous_bound(lengths, slots):
        lengths.sort()
        return max(lengths[-1], -(-sum(lengths) // slots))

    return continuous_bound


@wrong("the given check deleted", case="refuses misuse")
def unchecked(reference):
    return lambda lengths, slots: max(max(lengths), -(-sum(lengths) // slots))


@wrong("lengths of 0 accepted", case="refuses misuse")
def zero_lengths(reference):
    def continuous_bound(lengths, slots):
        return reference.continuous_bound([max(1, n) for n in lengths], slots)

    return continuous_bound


@wrong("no slots taken for one", case="refuses misuse")
def no_slots(reference):
    return lambda lengths, slots: reference.continuous_bound(lengths, max(1, slots))


@wrong("no requests take no steps", case="refuses misuse")
def no_requests(reference):
    return lambda lengths, slots: reference.continuous_bound(lengths, slots) if lengths else 0


@wrong("everything is refused", case="refuses misuse")
def all_refused(reference):
    return lambda lengths, slots: reference.continuous_bound(lengths, 0)


@wrong("all the tokens, a slot or nine", case="no answer is faster than its own steps")
def all_tokens(reference):
    def continuous_bound(lengths, slots):
        require_lengths(lengths, slots)
        return sum(lengths)

    return continuous_bound


@wrong("a very large number", case="all the work has to fit")
def very_large(reference):
    def continuous_bound(lengths, slots):
        require_lengths(lengths, slots)
        return 10**9

    return continuous_bound
