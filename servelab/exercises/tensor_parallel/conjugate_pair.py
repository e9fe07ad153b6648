"""Check of f and g: what they do to values and gradients, and what they send."""

from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.tensor_parallel import _ranks as ranks

ANSWERS = ("copy_to_ranks", "reduce_from_ranks")
F_VALUES, F_GRADIENTS = "f passes values on", "f sums gradients"
G_VALUES, G_GRADIENTS = "g sums values", "g passes gradients on"
ONCE, KEPT, GROUP = "one all-reduce each, of the tensor's size", "overwrites nothing", "within its own group"
CASES = (
    CaseSpec(F_VALUES, hint=2, alone=False),
    CaseSpec(G_VALUES, hint=2, weight=2),
    CaseSpec(F_GRADIENTS, hint=2, weight=2),
    CaseSpec(G_GRADIENTS, hint=2, weight=2, alone=False),
    CaseSpec(ONCE, hint=2, weight=2),
    CaseSpec(KEPT, hint=3, weight=2, alone=False),
    CaseSpec(GROUP, hint=1),
)
# function, number of ranks, shape, whether the gradient arrives transposed
DIRECTED = (
    ("f", 1, (2,), False),
    ("g", 1, (2,), False),
    ("f", 2, (3,), False),
    ("g", 2, (3,), False),
    ("f", 3, (2, 5), True),
    ("g", 4, (5, 2), True),
    ("f", 4, (1, 3, 2), False),
    ("g", 3, (1, 3, 2), False),
)


def challenges(rng: Random) -> list[dict]:
    """One rank, then several; then two groups of two ranks at the same time."""
    made = [_challenge(rng, name, size, shape, turned) for name, size, shape, turned in DIRECTED]
    grouped = [_challenge(rng, name, 4, (2, 2), False) | {"groups": [[0, 2], [1, 3]]} for name in "fg"]
    return made + grouped


def _challenge(rng: Random, function: str, size: int, shape: tuple[int, ...], turned: bool) -> dict:
    """Behind g all ranks have the same, so one gradient comes back to all; behind f each has its own."""
    values, factors = ([ranks.draw(rng, *shape) for _ in range(size)] for _ in range(2))
    if size == 3:
        values, factors = ranks.thirds(values), ranks.thirds(factors)
    return {
        "function": function,
        "ranks": size,
        "turned": turned,
        "x": values,
        "factor": factors if function == "f" else factors[:1] * size,
    }


def drive(challenge: dict, copy_to_ranks, reduce_from_ranks) -> dict:
    function = copy_to_ranks if challenge["function"] == "f" else reduce_from_ranks
    return ranks.drive(challenge, _work, function)


def _work(challenge: dict, comm: Any, function: Any) -> dict:
    """One rank: the function between ordinary operations, with a second branch that shares its gradient."""
    import torch.distributed as dist

    me = dist.get_rank()
    name = "copy_to_ranks" if challenge["function"] == "f" else "reduce_from_ranks"
    x, factor = ranks.leaf(challenge["x"][me]), ranks.tensor(challenge["factor"][me])
    beside = ranks.leaf(challenge["x"][me])
    branch = beside * 1  # made first, so that its gradient is used last
    given = x * 1
    before = given.detach().clone()
    ranks.mark("forward")
    y = ranks.returned(name, function(given, comm))
    made = {"result": y.detach().clone(), "given": ranks.fate(given, before)}
    ranks.mark("backward", challenge.get("groups"))
    if y.shape != branch.shape:
        return made | ranks.grads(ranks.backward(y, factor), x=x, beside=beside)
    ends = (0, -1) if challenge["turned"] else (0, 0)  # turned, the gradient arrives with its elements out of order
    went = ranks.backward((y + branch).transpose(*ends), factor.transpose(*ends))
    return made | ranks.grads(went, x=x, beside=beside)


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Everything is determined. In a group only the group's own case is judged."""
    f = challenge["function"] == "f"
    values, gradients = (F_VALUES, F_GRADIENTS) if f else (G_VALUES, G_GRADIENTS)
    if challenge.get("groups"):
        if "failed" in transcript:
            return ranks.failed(transcript, [GROUP])
        return [ranks.compare(GROUP, transcript, expected, ["result", "gradient of x"])]
    if "failed" in transcript:
        return ranks.failed(transcript, [values, gradients, ONCE, KEPT])
    return [
        ranks.compare(values, transcript, expected, ["result"]),
        ranks.compare(gradients, transcript, expected, ["gradient of x"]),
        ranks.compare_calls(ONCE, transcript, expected, ["forward", "backward"]),
        ranks.compare(KEPT, transcript, expected, ["given", "gradient of beside"]),
    ]


def show(challenge: dict) -> str:
    """What each rank does, as Python."""
    name = "copy_to_ranks" if challenge["function"] == "f" else "reduce_from_ranks"
    rank = "dist.get_rank()" if challenge.get("groups") else "comm.rank"
    lines = [f"{ranks.show(what, challenge[what])}[{rank}]" for what in ("x", "factor")]
    lines += ["beside = x.clone().requires_grad_()", "x.requires_grad_()", "branch, given = beside * 1, x * 1"]
    lines += ["before = given.detach().clone()", f"y = {name}(given, comm)"]
    lines += ['fate = "unchanged" if (given == before).all() else "overwritten"']
    turn = ".transpose(0, -1)" if challenge["turned"] else ""
    lines += [f"((y + branch){turn} * factor{turn}).sum().backward()"]
    made = {"result": "y.detach()", "given": "fate"}
    return ranks.script(challenge, lines, made | {f"gradient of {n}": f"{n}.grad" for n in ("x", "beside")})
