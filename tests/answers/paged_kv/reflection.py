"""Answers to the reflection questions."""

import numpy as np

from servelab.answers import right, wrong


@wrong("half a block", case="mean empty slots")
def half_a_block(reference):
    return reference.answers | {"mean empty slots": 12}


@wrong("the most instead of the mean", case="mean empty slots")
def the_most(reference):
    return reference.answers | {"mean empty slots": 23}


@wrong("utilisation mistaken for waste", case="what 20.4 % is")
def waste(reference):
    return reference.answers | {"what 20.4 % is": "internal"}


@wrong("a fraction of a region", case="regions that fit")
def fraction(reference):
    return reference.answers | {"regions that fit": 15.36}


@wrong("the regions of the text", case="regions that fit")
def of_the_text(reference):
    return reference.answers | {"regions that fit": 7}


@wrong("continuous batching needs paging", case="batching without paging")
def needs_paging(reference):
    return reference.answers | {"batching without paging": "a"}


@wrong("nothing is computed again", case="recomputed block")
def nothing(reference):
    return reference.answers | {"recomputed block": None}


@wrong("counted from one", case="recomputed block")
def from_one(reference):
    return reference.answers | {"recomputed block": 3}


@wrong("the softmax leaks", case="why values are masked")
def softmax_leaks(reference):
    return reference.answers | {"why values are masked": "a"}


@wrong("every letter at once", case="batching without paging")
def every_letter(reference):
    return reference.answers | {"batching without paging": "abc", "why values are masked": "abc"}


@right("capitals, brackets, spaces and numpy numbers")
def other_types(reference):
    letters = {key: f" ({value.upper()}) " for key, value in reference.answers.items() if isinstance(value, str)}
    numbers = {key: np.float64(value) for key, value in reference.answers.items() if not isinstance(value, str)}
    return {**letters, **numbers}


@right("numbers as text, and another key beside them")
def as_text(reference):
    return reference.answers | {"notes": "see above", "regions that fit": "15", "mean empty slots": "11.5"}
