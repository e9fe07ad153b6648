"""Answers to the reflection questions."""

import numpy as np

from servelab.answers import right, wrong


def instead(question, answer):
    return lambda reference: reference.answers | {question: answer}


one_a_layer = wrong("one all-reduce a layer", case="all-reduces a token")(instead("all-reduces a token", 80))
with_backward = wrong("with the backward pass", case="all-reduces a token")(instead("all-reduces a token", 320))
a_sixteenth = wrong("a head on every sixteenth card", case="KV copies")(instead("KV copies", 1))
each_card = wrong("a copy on every card", case="KV copies")(instead("KV copies", 16))
halved = wrong("KV shrinks without end", case="KV of a 70B card")(instead("KV of a 70B card", 0.5))
as_tp8 = wrong("the ratio of TP8", case="ratio at TP4")(instead("ratio at TP4", 280))
duplex = wrong("both directions' bandwidth", case="crossing point")(instead("crossing point", 7.2))
in_bytes = wrong("in bytes", case="crossing point")(instead("crossing point", 3_600_000))
weights_sent = wrong("TP sends weights", case="A, the link")(instead("A, the link", "a"))
larger = wrong("TP sends larger messages", case="A, the link")(instead("A, the link", "c"))
bandwidth = wrong("decode needs bandwidth", case="B, decoding")(instead("B, decoding", "a"))
nothing = wrong("a larger degree gives nothing", case="C, what TP8 gives")(instead("C, what TP8 gives", "a"))


@right("capitals, brackets, spaces and numpy numbers")
def other_types(reference):
    letters = {key: f" ({value.upper()}) " for key, value in reference.answers.items() if isinstance(value, str)}
    numbers = {key: np.float64(value) for key, value in reference.answers.items() if not isinstance(value, str)}
    return {**letters, **numbers}


@right("numbers as text, three digits")
def as_text(reference):
    return reference.answers | {"KV of a 70B card": "100 %", "crossing point": "3.60", "KV copies": 4.0}
