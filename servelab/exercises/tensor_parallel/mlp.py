"""Check of the tensor-parallel MLP."""

from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.tensor_parallel import _ranks as ranks

ANSWERS = ("TensorParallelMLP",)
HOLDS, VALUE, SEVERAL = (
    "holds its part of three matrices",
    "the dense layer's values",
    "the same values on several ranks",
)
WEIGHTS, INPUT, CALLS = "gradients of the weights", "gradient of the input", "one all-reduce forward, one backward"
GROUP = "within its own group"
CASES = (
    CaseSpec(VALUE, hint=2),
    CaseSpec(HOLDS, hint=2, weight=2),
    CaseSpec(SEVERAL, hint=2, weight=2),
    CaseSpec(WEIGHTS, hint=1, weight=2),
    CaseSpec(INPUT, hint=1, weight=2),
    CaseSpec(CALLS, hint=1, weight=3),
    CaseSpec(GROUP, hint=2),
)
MATRICES = ("gate", "up", "down")


def challenges(rng: Random) -> list[dict]:
    """One rank, then several, then two groups at the same time."""
    sizes = ((1, 2, 2, 1), (2, 2, 4, 1), (2, 3, 4, 2), (3, 4, 6, 2), (4, 3, 8, 3))
    made = [_challenge(rng, *parts) for parts in sizes]
    return [*made, _challenge(rng, 2, 3, 4, 2) | {"groups": [[0, 3], [1, 2]]}]


def _challenge(rng: Random, size: int, hidden: int, intermediate: int, tokens: int) -> dict:
    shapes: dict[str, tuple[int, ...]] = {
        "gate": (intermediate, hidden),
        "up": (intermediate, hidden),
        "down": (hidden, intermediate),
    }
    shapes |= {"x": (1, tokens, hidden), "factor": (1, tokens, hidden)}
    return {"ranks": size} | {name: ranks.draw(rng, *shape) for name, shape in shapes.items()}


def drive(challenge: dict, TensorParallelMLP) -> dict:
    return ranks.drive(challenge, _work, TensorParallelMLP)


def _work(challenge: dict, comm: Any, mlp: type) -> dict:
    given = ranks.Given({name: challenge[name] for name in MATRICES})
    layer = mlp(*given.values(), comm)
    kept = ranks.kept([layer], given, MATRICES if comm.size > 1 else ())
    x = ranks.leaf(challenge["x"])
    ranks.mark("forward", challenge.get("groups"))
    y = ranks.returned("forward", layer(x))
    value = y.detach().clone()
    ranks.mark("backward", challenge.get("groups"))
    went = ranks.backward(y, ranks.tensor(challenge["factor"]))
    weights = {name: ranks.parameter(layer, name) for name in MATRICES}
    made = {"result": value, ranks.MEMORY: kept, "elements held": ranks.held(layer)}
    return made | weights | ranks.grads(went, x=x, **weights)


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Everything is determined, but for the order of what is sent in a phase."""
    gradients = [f"gradient of {name}" for name in MATRICES]
    about = {
        HOLDS: [*MATRICES, ranks.MEMORY, "elements held"],
        VALUE if challenge["ranks"] == 1 else SEVERAL: ["result"],
        WEIGHTS: gradients,
        INPUT: ["gradient of x"],
    }
    if challenge.get("groups"):
        about = {GROUP: ["result", *gradients, "gradient of x"]}
    calls = [] if challenge.get("groups") else [CALLS]
    if "failed" in transcript:
        return ranks.failed(transcript, [*about, *calls])
    found = [ranks.compare(case, transcript, expected, names) for case, names in about.items()]
    return found + [ranks.compare_calls(case, transcript, expected, ["forward", "backward"]) for case in calls]


def show(challenge: dict) -> str:
    """What each rank does, as Python."""
    lines = [ranks.show(name, challenge[name]) for name in (*MATRICES, "x", "factor")]
    lines += ["layer = TensorParallelMLP(gate, up, down, comm)", "x.requires_grad_()", "y = layer(x)"]
    return ranks.script_of_layer(challenge, [*lines, "(y * factor).sum().backward()"], MATRICES)
