"""Answers to the bound."""

import math
from fractions import Fraction

from servelab.answers import right, wrong


@right("by trying")
def by_trying(reference):
    def continuous_bound(lengths, slots):
        steps = 1
        while steps * slots < sum(lengths) or steps < max(lengths):
            steps += 1
        return steps

    return continuous_bound


@right("with fractions and numpy")
def with_fractions(reference):
    import numpy as np

    return lambda lengths, slots: np.int64(max([math.ceil(Fraction(sum(lengths), slots)), *lengths]))


@wrong("the work alone", case="no answer is faster than its own steps")
def work_alone(reference):
    return lambda lengths, slots: math.ceil(sum(lengths) / slots)


@wrong("the longest alone", case="all the work has to fit")
def longest_alone(reference):
    return lambda lengths, slots: max(lengths)


@wrong("the sum of both", case="no answer is faster than its own steps")
def both(reference):
    return lambda lengths, slots: max(lengths) + math.ceil(sum(lengths) / slots)


@wrong("rounded down", case="a part of a step is a step")
def rounded_down(reference):
    return lambda lengths, slots: max(max(lengths), sum(lengths) // slots)


@wrong("not rounded", case="a part of a step is a step")
def not_rounded(reference):
    return lambda lengths, slots: max(max(lengths), sum(lengths) / slots)


@wrong("FCFS steps for the bound", case="a part of a step is a step")
def fcfs(reference):
    return lambda lengths, slots: reference.fcfs_steps(lengths, slots)


@wrong("static batches", case="all the work has to fit")
def static(reference):
    return lambda lengths, slots: sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


@wrong("sorts the caller's list", case="leaves its input alone")
def sorts(reference):
    def continuous_bound(lengths, slots):
        lengths.sort()
        return max(lengths[-1], -(-sum(lengths) // slots))

    return continuous_bound
