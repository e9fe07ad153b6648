"""Answers to the reflection questions."""

import numpy as np

from servelab.answers import right, wrong


@wrong("the straggler's slot counted, too", case="slot-steps given back")
def nine_slots(reference):
    return reference.answers | {"slot-steps given back": 17_820}


@wrong("one slot's", case="slot-steps given back")
def one_slot(reference):
    return reference.answers | {"slot-steps given back": 1980}


@wrong("continuous batching shortens the longest", case="Q1 alone")
def work_only(reference):
    return reference.answers | {"Q1 alone": 240}


@wrong("the useful share", case="padding share")
def useful_share(reference):
    return reference.answers | {"padding share": 0.325}


@wrong("the longest over the mean", case="padding share")
def over_the_mean(reference):
    return reference.answers | {"padding share": 3.08}


@wrong("the bound", case="by hand")
def bound(reference):
    return reference.answers | {"by hand": 8}


@wrong("static batches", case="by hand")
def static(reference):
    return reference.answers | {"by hand": 15}


@wrong("a straggler at the front gains nothing", case="gains nothing")
def straggler_in_front(reference):
    return reference.answers | {"gains nothing": "c"}


@wrong("no limit", case="gains most")
def no_limit(reference):
    return reference.answers | {"gains most": "b"}


@wrong("head-of-line blocking is always the largest", case="which waste")
def always_held(reference):
    return reference.answers | {"which waste": "held"}


@wrong("all queueing is being locked out", case="which waste")
def always_locked_out(reference):
    return reference.answers | {"which waste": "locked_out"}


@right("capitals, brackets, spaces and numpy numbers")
def other_types(reference):
    letters = {key: f" ({value.upper()}) " for key, value in reference.answers.items() if isinstance(value, str)}
    numbers = {key: np.float64(value) for key, value in reference.answers.items() if not isinstance(value, str)}
    return {**letters, **numbers}


@right("numbers as text, in percent")
def as_text(reference):
    return reference.answers | {"padding share": "67.5 %", "Q1 alone": "2000"}
