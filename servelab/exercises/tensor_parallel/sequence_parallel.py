"""Check of sequence parallelism: the gathering pair, and an MLP with its norm on each rank's own tokens."""

from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.tensor_parallel import _ranks as ranks

ANSWERS = ("gather_tokens", "scatter_tokens", "SequenceParallelMLP")
GATHER, SCATTER = "gathers all tokens", "sums, and scatters the tokens"
GATHER_BACK, SCATTER_BACK = "gradient of gathered tokens", "gradient of scattered tokens"
HOLDS, VALUE = "holds its part of the weights", "the dense layer's values"
INPUT, WEIGHTS, NORM = "gradient of the own tokens", "gradients of the weights", "gradient of the norm, summed"
OWN = "the norm of the own tokens alone"
BYTES, GROUP = "as much traffic as tensor parallelism", "within its own group"
CASES = (
    CaseSpec(GATHER, hint=1),
    CaseSpec(SCATTER, hint=1),
    CaseSpec(GATHER_BACK, hint=1, weight=2),
    CaseSpec(SCATTER_BACK, hint=1, weight=2),
    CaseSpec(HOLDS, hint=2),
    CaseSpec(VALUE, hint=2, weight=2),
    CaseSpec(OWN, hint=2, weight=2),
    CaseSpec(INPUT, hint=2, weight=2),
    CaseSpec(WEIGHTS, hint=2),
    CaseSpec(NORM, hint=3, weight=2),
    CaseSpec(BYTES, hint=1, weight=3),
    CaseSpec(GROUP, hint=2),
)
ROOTS = ("sqrt", "norm")  # in the names of torch's functions
MATRICES = ("norm", "gate", "up", "down")
WATCH = """from torch.overrides import TorchFunctionMode
found = []
class Watch(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, given = getattr(function, "__name__", ""), [*args, *(kwargs or {}).values()]
        if any(word in name for word in ("sqrt", "norm", "pow")):
            found.append((name, list(given[0].shape)))
        return function(*args, **(kwargs or {}))
with Watch():
    y = layer(x)""".splitlines()  # for a learner: what `_roots` counts
# ranks, batch, tokens, hidden
PAIRS = ((1, 1, 2, 1), (2, 1, 4, 1), (2, 2, 2, 3), (3, 2, 6, 2))
# ranks, hidden, intermediate, batch, tokens
LAYERS = ((1, 2, 2, 1, 2), (2, 2, 4, 1, 4), (3, 3, 6, 2, 3), (4, 2, 8, 2, 8))
WATCHED = (5, 2, 5, 1, 5)  # so many ranks that one norm for each token of all is more than two of the own elements


def challenges(rng: Random) -> list[dict]:
    """The two functions; the layer without ``finish_gradients``, then with it; each in two groups at the end."""
    made = [_pair(rng, kind, *parts) for parts in PAIRS for kind in ("gather", "scatter")]
    groups = {"groups": [[0, 2], [1, 3]]}
    plain_layers = [_layer(rng, *parts) for parts in LAYERS]
    layers = [*plain_layers, _layer(rng, *WATCHED) | {"watched": True}]
    layers += [layer | {"finish": True} for layer in plain_layers]
    grouped = [_pair(rng, kind, 2, 1, 2, 2, worlds=2) for kind in ("gather", "scatter")]
    grouped.append(_layer(rng, 2, 2, 4, 1, 4) | {"finish": True})
    return [*made, *layers, *(challenge | groups for challenge in grouped)]


def _pair(rng: Random, kind: str, size: int, batch: int, tokens: int, hidden: int, worlds: int = 1) -> dict:
    """Of a gather each rank gives its own tokens; of a scatter, a partial sum of all tokens."""
    after = tokens * size if kind == "gather" else tokens // size
    x, factor = ([ranks.draw(rng, batch, n, hidden) for _ in range(size * worlds)] for n in (tokens, after))
    return {"kind": kind, "ranks": size, "x": x, "factor": factor}


def _layer(rng: Random, size: int, hidden: int, intermediate: int, batch: int, tokens: int) -> dict:
    shapes: dict[str, tuple[int, ...]] = {
        "gate": (intermediate, hidden),
        "up": (intermediate, hidden),
        "down": (hidden, intermediate),
    }
    shapes |= {"norm": (hidden,), "x": (batch, tokens, hidden), "factor": (batch, tokens, hidden)}
    return {"kind": "mlp", "ranks": size} | {name: ranks.draw(rng, *shape) for name, shape in shapes.items()}


def drive(challenge: dict, gather_tokens, scatter_tokens, SequenceParallelMLP) -> dict:
    if challenge["kind"] == "mlp":
        return ranks.drive(challenge, _layer_work, SequenceParallelMLP)
    return ranks.drive(challenge, _pair_work, gather_tokens if challenge["kind"] == "gather" else scatter_tokens)


def _pair_work(challenge: dict, comm: Any, function: Any) -> dict:
    import torch.distributed as dist

    me = dist.get_rank()
    x, factor = ranks.leaf(challenge["x"][me]), ranks.tensor(challenge["factor"][me])
    given = x * 1
    before = given.detach().clone()
    ranks.mark("forward", challenge.get("groups"))
    y = ranks.returned(f"{challenge['kind']}_tokens", function(given, comm))
    made = {"result": y.detach().clone(), "given": ranks.fate(given, before)}
    ranks.mark("backward", challenge.get("groups"))
    return made | ranks.grads(ranks.backward(y, factor), x=x)


def _layer_work(challenge: dict, comm: Any, mlp: type) -> dict:
    given = ranks.Given({name: challenge[name] for name in MATRICES})
    layer = mlp(*given.values(), comm)
    kept = ranks.kept([layer], given, MATRICES if comm.size > 1 else ())
    x, factor = (ranks.tensor(challenge[n]).chunk(comm.size, 1)[comm.rank].clone() for n in ("x", "factor"))
    x.requires_grad_()
    ranks.mark("forward", challenge.get("groups"))
    roots, watched = _roots(challenge)
    with watched:
        y = ranks.returned("forward", layer(x))
    value = y.detach().clone()
    ranks.mark("backward", challenge.get("groups"))
    went = ranks.backward(y, factor)
    if challenge.get("finish") and went == ranks.DONE:
        ranks.mark("finish")
        layer.finish_gradients()
    weights = {name: ranks.parameter(layer, name) for name in MATRICES}
    made = {"result": value, ranks.MEMORY: kept, "elements held": ranks.held(layer)}
    return made | weights | ranks.grads(went, x=x, **weights) | {"roots": roots}


def _roots(challenge: dict) -> tuple[list[int], Any]:
    """A list, and a context in which the elements of every tensor of which a root is taken are written into it.

    Every norm takes a root of each token's mean square, in whatever way; no other part of the layer takes one.
    """
    from contextlib import nullcontext

    from torch.overrides import TorchFunctionMode

    found: list[int] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            name, given = getattr(function, "__name__", ""), [*args, *(kwargs or {}).values()]
            power = given[1] if "pow" in name else 1
            if any(word in name for word in ROOTS) or (isinstance(power, float) and power % 1):
                found.append(given[0].numel())
            return function(*args, **(kwargs or {}))

    return found, Watch() if challenge.get("watched") else nullcontext()


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Values are determined. The gathered input may be kept, or gathered once more in the backward pass."""
    about, finish = _about(challenge), challenge.get("finish")
    calls = [] if challenge.get("groups") or finish else [BYTES]
    if "failed" in transcript:
        return ranks.failed(transcript, [*about, *calls, *([OWN] if challenge.get("watched") else [])])
    found = [ranks.compare(case, transcript, expected, names) for case, names in about.items()]
    found += [_judge_norm(challenge, transcript, found)] if challenge.get("watched") else []
    if finish and not challenge.get("groups"):
        found.append(_judge_finish(transcript, expected))
    return found + [_judge_calls(case, challenge, transcript, expected) for case in calls]


def _judge_norm(challenge: dict, transcript: dict, found: list[Case]) -> Case:
    """A rank takes roots of its own tokens only, of each element at most twice; the values show a norm at all."""
    value = next(case for case in found if case.name == VALUE)
    if not value.passed:
        return Case(OWN, False, value.message)
    batch, tokens, hidden = (len(part) for part in (challenge["x"], challenge["x"][0], challenge["x"][0][0]))
    own = tokens // challenge["ranks"]
    for rank, mine in enumerate(transcript["ranks"]):
        roots = mine["made"]["roots"]
        if sum(roots) > 2 * batch * own * hidden or {batch * tokens, batch * tokens * hidden} & set(roots):
            expected = f"expected the norm of {batch} x {own} tokens, the rank's own"
            return Case(OWN, False, f"rank {rank}: {expected}, got that of all {batch} x {tokens}")
    return Case(OWN, True)


def _about(challenge: dict) -> dict[str, list[str]]:
    """The cases of a challenge and what they compare."""
    kind, gradients = challenge["kind"], [f"gradient of {name}" for name in ("gate", "up", "down")]
    if challenge.get("groups"):
        layer = ["result", "gradient of x", "gradient of norm", *gradients]
        return {GROUP: layer if kind == "mlp" else ["result", "gradient of x"]}
    if kind == "gather":
        return {GATHER: ["result", "given"], GATHER_BACK: ["gradient of x"]}
    if kind == "scatter":
        return {SCATTER: ["result", "given"], SCATTER_BACK: ["gradient of x"]}
    if challenge.get("finish"):
        return {WEIGHTS: gradients, NORM: ["gradient of norm"]}
    return {HOLDS: [*MATRICES, ranks.MEMORY, "elements held"], VALUE: ["result"], INPUT: ["gradient of x"]}


def _judge_calls(case: str, challenge: dict, transcript: dict, expected: dict) -> Case:
    """What is sent forward is determined; backward see `_judge_later`."""
    for rank, (mine, right) in enumerate(zip(transcript["ranks"], expected["ranks"], strict=True)):
        sent, wanted = (side["calls"].get("forward", []) for side in (mine, right))
        if sorted(sent) != sorted(wanted):
            problem = f"rank {rank}, forward: expected {ranks.listed(wanted)}, got {ranks.listed(sent)}"
            return Case(case, False, problem, 2 if challenge["kind"] == "mlp" else None)
    return _judge_later(case, challenge, transcript, expected)


def _judge_later(case: str, challenge: dict, transcript: dict, expected: dict) -> Case:
    """What is sent after the forward pass, in any order.

    A layer may gather its own tokens once more. The norm's gradient may be summed in the backward pass already.
    """
    layer = challenge["kind"] == "mlp"
    for rank, (mine, right) in enumerate(zip(transcript["ranks"], expected["ranks"], strict=True)):
        sent, wanted = (side["calls"].get("backward", []) for side in (mine, right))
        again = [call for call in right["calls"].get("forward", []) if layer and call[0] == "all_gather"]
        early = [["all_reduce", len(challenge["norm"]), call[2]] for call in again]
        allowed = [wanted, wanted + again, wanted + early, wanted + again + early]
        if sorted(sent) not in map(sorted, allowed):
            problem = ranks.stuck(mine) or _amiss(sent, wanted, "backward")
            return Case(case, False, f"rank {rank}, {problem}", 2 if layer else None)
    return Case(case, True)


def _judge_finish(transcript: dict, expected: dict) -> Case:
    """The norm's gradient is summed by one all-reduce, in `finish_gradients` or in the backward pass already."""
    for rank, (mine, right) in enumerate(zip(transcript["ranks"], expected["ranks"], strict=True)):
        wanted, sent = (side["calls"].get("finish", []) for side in (right, mine))
        sent = [call for call in mine["calls"].get("backward", []) if call in wanted] + sent
        if sorted(sent) != sorted(wanted):
            problem = ranks.stuck(mine) or _amiss(sent, wanted, "sum of the norm's gradient")
            return Case(NORM, False, f"rank {rank}, {problem}")
    return Case(NORM, True)


def _amiss(sent: list, wanted: list, when: str) -> str:
    """What is lacking, if that is all that is wrong; otherwise both sides."""
    lacking = list(wanted)
    for call in sent:
        if call not in lacking:
            return f"{when}: expected {ranks.listed(wanted)}, got {ranks.listed(sent)}"
        lacking.remove(call)
    return f"{when}: expected also {ranks.listed(lacking)}"


def show(challenge: dict) -> str:
    """What each rank does, as Python."""
    if challenge["kind"] != "mlp":
        rank = "dist.get_rank()" if challenge.get("groups") else "comm.rank"
        lines = [f"{ranks.show(name, challenge[name])}[{rank}]" for name in ("x", "factor")]
        lines += ["x.requires_grad_()", "given = x * 1", f"y = {challenge['kind']}_tokens(given, comm)"]
        lines += ["(y * factor).sum().backward()"]
        return ranks.script(challenge, lines, {"result": "y.detach()", "gradient of x": "x.grad"})
    lines = [ranks.show(name, challenge[name]) for name in (*MATRICES, "x", "factor")]
    lines += ["x, factor = (t.chunk(comm.size, 1)[comm.rank].clone() for t in (x, factor))", "x.requires_grad_()"]
    lines += ["layer = SequenceParallelMLP(norm, gate, up, down, comm)"]
    lines += WATCH if challenge.get("watched") else ["y = layer(x)"]
    lines += ["(y * factor).sum().backward()"]
    lines += ["layer.finish_gradients()"] if challenge.get("finish") else []
    more = {"norms and roots of": "found"} if challenge.get("watched") else {}
    return ranks.script_of_layer(challenge, lines, MATRICES, more)
