"""Answers to the reflection questions."""

import numpy as np

from servelab.answers import right, wrong


@wrong("with the first tokens", case="sorted and static")
def with_first(reference):
    return reference.answers | {"sorted and static": 304}


@wrong("in the order of the file", case="sorted and static")
def in_order(reference):
    return reference.answers | {"sorted and static": 636}


@wrong("tokens over slots", case="fewest steps")
def over_slots(reference):
    return reference.answers | {"fewest steps": 160}


@wrong("with the step that only prefills", case="fewest steps")
def with_the_prefill(reference):
    return reference.answers | {"fewest steps": 256}


@wrong("as many as there are KV heads and query heads", case="ranks of SmolLM2")
def nine(reference):
    return reference.answers | {"ranks of SmolLM2": 9}


@wrong("one all-reduce a layer", case="numbers a step")
def one_a_layer(reference):
    return reference.answers | {"numbers a step": 30 * 8 * 576}


@wrong("a third of each hidden state", case="numbers a step")
def a_third(reference):
    return reference.answers | {"numbers a step": 60 * 8 * 576 // 3}


@wrong("more arithmetic", case="slower on ranks")
def more_arithmetic(reference):
    return reference.answers | {"slower on ranks": "a"}


@wrong("the long ones", case="who gains")
def long_ones(reference):
    return reference.answers | {"who gains": "b"}


@wrong("a mistake in the scheduler", case="other tokens")
def mistake(reference):
    return reference.answers | {"other tokens": "a"}


@wrong("not a dictionary", case="other tokens")
def not_a_dictionary(reference):
    return list(reference.answers.values())


@right("in text, with brackets")
def in_text(reference):
    words = {"sorted and static": "300", "numbers a step": "276,480", "who gains": "(A)", "other tokens": "c)"}
    return reference.answers | words


@right("numpy numbers")
def numpy_numbers(reference):
    return reference.answers | {"fewest steps": np.int64(255), "numbers a step": np.float64(276480)}
