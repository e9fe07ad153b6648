"""Answers to the reflection questions."""

import numpy as np

from servelab.answers import right, wrong


@wrong("the last token is fed back, too", case="tokens in the cache")
def all_tokens(reference):
    return reference.answers | {"tokens in the cache": 120}


@wrong("the answer alone", case="tokens in the cache")
def answer_alone(reference):
    return reference.answers | {"tokens in the cache": 20}


@wrong("the whole budget for the prompt", case="steps to the first token")
def whole_budget(reference):
    return reference.answers | {"steps to the first token": 4}


@wrong("a step more for the first token", case="steps to the first token")
def one_more(reference):
    return reference.answers | {"steps to the first token": 6}


@wrong("rate over number", case="mean time in the system")
def inverse(reference):
    return reference.answers | {"mean time in the system": 0.0657}


@wrong("rate times number", case="mean time in the system")
def product(reference):
    return reference.answers | {"mean time in the system": 60.8}


@wrong("the cheapest one", case="who is preempted")
def cheapest(reference):
    return reference.answers | {"who is preempted": "a"}


@wrong("the budget", case="which idea")
def budget(reference):
    return reference.answers | {"which idea": "a"}


@wrong("waiting for admission", case="what a mean hides")
def admission(reference):
    return reference.answers | {"what a mean hides": "b"}


@wrong("swapped", case="swap or recompute")
def swapped(reference):
    return reference.answers | {"swap or recompute": "b"}


@wrong("not a dictionary", case="swap or recompute")
def not_a_dictionary(reference):
    return list(reference.answers.values())


@right("rounded, in text, with brackets")
def rounded(reference):
    return reference.answers | {"mean time in the system": "15.2", "which idea": "(B)", "who is preempted": "b)"}


@right("numpy numbers")
def numpy_numbers(reference):
    return reference.answers | {
        "tokens in the cache": np.int64(119),
        "steps to the first token": np.float64(5),
        "mean time in the system": np.float32(15.21),
    }
