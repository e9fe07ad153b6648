"""Check of the traffic ledger: what tensor parallelism sends, and what a pipeline boundary does."""

from random import Random

from servelab.cards import model_card
from servelab.exercise import CaseSpec
from servelab.exercises.memory._calls import drawn, tiny
from servelab.exercises.tensor_parallel import _calls as calls

ANSWERS = ("layer_elements", "tp_bytes", "boundary_bytes")
LAYER, BACKWARD, ONE = "elements of a layer", "with the backward pass", "one rank sends nothing"
FORWARD, BOUNDARY, SIZES = "bytes of a forward pass", "bytes of a pipeline boundary", "elements of other sizes"
CASES = (
    CaseSpec(ONE, alone=False),
    CaseSpec(LAYER, weight=3),
    CaseSpec(BACKWARD, weight=2),
    CaseSpec(FORWARD, weight=3),
    CaseSpec(BOUNDARY, weight=2),
    CaseSpec(SIZES),
)
judge, show = calls.judge, calls.show


def challenges(rng: Random) -> list[dict]:
    """Small numbers, then Llama-3.1-70B, then a drawn model."""
    large, card = model_card("llama-3.1-70b"), drawn(rng)
    tokens = rng.randint(3, 900)
    made = [calls.call(ONE, "layer_elements", tokens=5, hidden_size=4, tp=1)]
    made += [
        calls.call(LAYER, "layer_elements", tokens=n, hidden_size=h, tp=t)
        for n, h, t in ((1, 1, 2), (1, 1, 3), (3, 8, 4))
    ]
    made += [calls.call(LAYER, "layer_elements", tokens=tokens, hidden_size=24, tp=t) for t in (3, 8)]
    made += [
        calls.call(BACKWARD, "layer_elements", tokens=n, hidden_size=h, tp=t, backward=True)
        for n, h, t in ((1, 1, 2), (1, 1, 8), (tokens, 40, 6), (7, 3, 1))
    ]
    made += [
        calls.call(FORWARD, "tp_bytes", model=model, tokens=n, tp=t)
        for model, n, t in ((tiny(), 1, 2), (tiny(), 6, 4), (large, 8192, 8), (large, 32, 8), (card, tokens, 3))
    ]
    made += [
        calls.call(BOUNDARY, "boundary_bytes", model=m, tokens=n) for m, n in ((tiny(), 1), (large, 8192), (card, 9))
    ]
    made += [calls.call(SIZES, "boundary_bytes", model=tiny(), tokens=3, dtype_bytes=1)]
    return [*made, calls.call(SIZES, "tp_bytes", model=tiny(), tokens=3, tp=2, dtype_bytes=4)]


def drive(challenge: dict, layer_elements, tp_bytes, boundary_bytes) -> dict:
    return calls.drive(challenge, layer_elements=layer_elements, tp_bytes=tp_bytes, boundary_bytes=boundary_bytes)
