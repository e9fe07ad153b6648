"""Answers to the reflection questions."""

import numpy as np

from servelab.answers import right, wrong


def _but(reference, **changes):
    return lambda: {**reference.reflection(), **changes}


@wrong("half a block", case="mean waste of a sequence")
def half_a_block(reference):
    return _but(reference, mean_waste_tokens=8)


@wrong("the most instead of the mean", case="mean waste of a sequence")
def the_most(reference):
    return _but(reference, mean_waste_tokens=15)


@wrong("utilisation mistaken for waste", case="what 20.4 % is")
def waste(reference):
    return _but(reference, what_20_4_percent_is="waste")


@wrong("a fraction of a region", case="regions that fit")
def fraction(reference):
    return _but(reference, regions_that_fit=7.68)


@wrong("rounded up", case="regions that fit")
def rounded_up(reference):
    return _but(reference, regions_that_fit=8)


@wrong("continuous batching needs paging", case="batching without paging")
def needs_paging(reference):
    return _but(reference, orca_without_paging="a")


@wrong("nothing is recomputed", case="a fully cached prompt")
def nothing(reference):
    return _but(reference, recomputed_block=None)


@wrong("counted from one", case="a fully cached prompt")
def from_one(reference):
    return _but(reference, recomputed_block=4)


@wrong("the softmax leaks", case="why V is masked too")
def softmax_leaks(reference):
    return _but(reference, why_mask_values="a")


@wrong("every letter at once", case="batching without paging")
def every_letter(reference):
    return _but(reference, orca_without_paging="abc", why_mask_values="abc")


@wrong("left empty", case="what 20.4 % is")
def empty(reference):
    return lambda: {}


@right("capitals, spaces and numpy numbers")
def other_types(reference):
    found = reference.reflection()
    words = {key: f" {value.upper()} " for key, value in found.items() if isinstance(value, str)}
    numbers = {key: np.float64(value) for key, value in found.items() if not isinstance(value, str)}
    return lambda: {**words, **numbers}


@right("another key beside them")
def another_key(reference):
    return _but(reference, notes="see above", regions_that_fit=7.0)
