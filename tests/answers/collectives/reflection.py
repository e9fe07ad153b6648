"""Answers to the reflection questions."""

import numpy as np

from servelab.answers import right, wrong


@right("numpy numbers, text in other forms")
def other_forms(reference):
    return reference.answers | {
        "bytes sent": np.int64(224),
        "root against ring": 4.0,
        "from busbw": np.float32(7.45),
        "decode": " (B) ",
        "slow link": "a.",
    }


@right("numbers as text")
def as_text(reference):
    return {key: str(value) for key, value in reference.answers.items()}


@wrong("one pass", case="bytes sent")
def one_pass(reference):
    return reference.answers | {"bytes sent": 112}


@wrong("the whole tensor twice", case="bytes sent")
def whole_twice(reference):
    return reference.answers | {"bytes sent": 256}


@wrong("tensors that leave the root", case="root against ring")
def tensors(reference):
    return reference.answers | {"root against ring": 7}


@wrong("one pass of hops", case="rounds")
def one_pass_of_hops(reference):
    return reference.answers | {"rounds": 15}


@wrong("both directions", case="which bandwidth")
def both_directions(reference):
    return reference.answers | {"which bandwidth": 900}


@wrong("busbw taken for algbw", case="from busbw")
def as_algbw(reference):
    return reference.answers | {"from busbw": 4.255}


@wrong("more bandwidth for a small message", case="decode")
def more_bandwidth(reference):
    return reference.answers | {"decode": "a"}


@wrong("an average over the links", case="slow link")
def averaged(reference):
    return reference.answers | {"slow link": "b"}


@wrong("tests prove it", case="lucky sends")
def proven(reference):
    return reference.answers | {"lucky sends": "a"}
