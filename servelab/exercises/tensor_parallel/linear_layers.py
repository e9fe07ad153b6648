"""Check of the column- and the row-parallel layer: values, gradients, what a rank holds and what it sends."""

from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.tensor_parallel import _ranks as ranks

ANSWERS = ("shard", "ColumnParallelLinear", "RowParallelLinear")
HOLDS, COLUMN, ROW = "holds its part and no more", "column layer: its own outputs", "row layer: the sum of all parts"
BIAS, PAIR = "bias added once", "a column and a row layer in a row"
WEIGHTS, INPUT = "gradients of weights and biases", "gradient of the input"
CALLS, DTYPE = "sends no more than it must", "in bfloat16, too"
GROUP, MISUSE = "within its own group", "refuses unequal parts"
CASES = (
    CaseSpec(HOLDS, hint=2, weight=2),
    CaseSpec(COLUMN, hint=3, weight=2),
    CaseSpec(ROW, hint=3, weight=2),
    CaseSpec(BIAS, hint=3, weight=2),
    CaseSpec(WEIGHTS, hint=1, weight=2),
    CaseSpec(INPUT, hint=1, weight=2),
    CaseSpec(CALLS, hint=1, weight=3),
    CaseSpec(PAIR, hint=1),
    CaseSpec(DTYPE, hint=3),
    CaseSpec(GROUP, hint=2),
    CaseSpec(MISUSE, hint=2),
)
# kind, ranks, out, in, bias
DIRECTED = (
    ("column", 1, 2, 2, False),
    ("column", 2, 4, 3, False),
    ("row", 2, 3, 4, False),
    ("column", 3, 6, 5, True),
    ("row", 3, 5, 6, True),
    ("row", 1, 2, 2, True),
    ("copied", 2, 4, 3, True),
    ("row", 4, 3, 8, True),
    ("column", 4, 8, 3, True),
    ("pair", 2, 6, 5, True),
    ("pair", 4, 4, 3, True),
)
REFUSED = ((2, 3, 4, "column"), (2, 4, 3, "row"), (3, 4, 6, "column"), (4, 8, 6, "row"))


def challenges(rng: Random) -> list[dict]:
    """One rank, then several; bfloat16; two groups at the same time; sizes that cannot be cut."""
    made = [_challenge(rng, *parts) for parts in DIRECTED]
    coarse = [_challenge(rng, kind, 4, 8, 8, True) | {"dtype": "bfloat16"} for kind in ("column", "row")]
    grouped = [_challenge(rng, "pair", 2, 4, 3, True) | {"groups": [[0, 2], [1, 3]]}]
    refused = [_challenge(rng, kind, size, out, into, True) | {"misuse": True} for size, out, into, kind in REFUSED]
    return [*made, *coarse, *grouped, *refused]


def _challenge(rng: Random, kind: str, size: int, out: int, into: int, bias: bool) -> dict:
    made = {
        "kind": kind,
        "ranks": size,
        "dtype": "float64",
        "weight": ranks.draw(rng, out, into),
        "bias": ranks.draw(rng, out) if bias else None,
        "x": ranks.draw(rng, 2, into),
        "factor": ranks.draw(rng, 2, into if kind == "pair" else out),
    }
    if kind == "pair":
        made |= {"second": ranks.draw(rng, into, out), "second_bias": ranks.draw(rng, into)}
    return made


def drive(challenge: dict, shard, ColumnParallelLinear, RowParallelLinear) -> dict:
    return ranks.drive(challenge, _work, shard, ColumnParallelLinear, RowParallelLinear)


def _work(challenge: dict, comm: Any, shard: Any, column: type, row: type) -> dict:
    if challenge.get("misuse"):
        return _misuse(challenge, comm, shard, column, row)
    kind, dtype = challenge["kind"], challenge["dtype"]
    full = {name: _maybe(challenge.get(name), dtype) for name in ("weight", "bias", "second", "second_bias")}
    x, factor = ranks.tensor(challenge["x"], dtype), ranks.tensor(challenge["factor"], dtype)
    if kind == "row":
        x = x.chunk(comm.size, -1)[comm.rank].clone()
        layers = [row(full["weight"], full["bias"], comm)]
    else:
        more = {"copied": True} if kind == "copied" else {}
        layers = [column(full["weight"], full["bias"], comm, **more)]
    if kind == "pair":
        layers.append(row(full["second"], full["second_bias"], comm))
    elif kind != "row":
        factor = factor.chunk(comm.size, -1)[comm.rank]
    part = ranks.returned("shard", shard(full["weight"], 1 if kind == "row" else 0, comm))
    view = ranks.same_memory(part, full["weight"])
    made = {"shard": part.detach().clone()}
    del part
    kept = "the whole weight, by the view that shard returns" if view else ranks.kept(layers, full)
    return made | {ranks.MEMORY: kept} | _run(layers, x.requires_grad_(), factor)


def _maybe(values: Any, dtype: str) -> Any:
    return None if values is None else ranks.tensor(values, dtype)


def _run(layers: list, x: Any, factor: Any) -> dict:
    """Forward and backward through one or two layers."""
    ranks.mark("forward")
    y = ranks.returned("forward", layers[0](x))
    y = ranks.returned("forward", layers[1](y.relu())) if len(layers) > 1 else y
    value = y.detach().clone()
    ranks.mark("backward")
    (y * factor).sum().backward()
    made = {"result": value, "gradient of x": x.grad, "elements held": sum(map(ranks.held, layers))}
    for number, layer in enumerate(layers, start=1):
        of = f" of layer {number}" if len(layers) > 1 else ""
        made |= {f"weight{of}": layer.weight, f"bias{of}": layer.bias}
        made |= ranks.grads(**{f"weight{of}": layer.weight, f"bias{of}": layer.bias})
    return made


def _misuse(challenge: dict, comm: Any, shard: Any, column: type, row: type) -> dict:
    """Both the function and the layer are to raise a ValueError."""
    weight, bias = ranks.tensor(challenge["weight"]), ranks.tensor(challenge["bias"])
    dim = 1 if challenge["kind"] == "row" else 0
    shard(ranks.tensor([[0.0] * comm.size] * comm.size), dim, comm)  # what is not written has not refused anything
    calls = {"shard": lambda: shard(weight, dim, comm), "layer": lambda: (column, row)[dim](weight, bias, comm)}
    refused = {}
    for name, call in calls.items():
        try:
            refused[name] = f"no error but {type(call()).__name__}"
        except ValueError:
            refused[name] = "a ValueError"
        except (NotImplementedError, KeyboardInterrupt):
            raise
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"
    return refused


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Everything is determined: which part is whose, values, gradients, and what is sent."""
    cases = _cases(challenge)
    if "failed" in transcript:
        return ranks.failed(transcript, cases)
    if challenge.get("misuse"):
        return [ranks.compare(MISUSE, transcript, expected, ["shard", "layer"])]
    tolerance = ranks.ROUNDED if challenge["dtype"] == "bfloat16" else ranks.EXACT
    names = list(expected["ranks"][0]["made"])
    about = {
        HOLDS: [*(n for n in names if n.startswith(("shard", "weight", "bias"))), ranks.MEMORY, "elements held"],
        WEIGHTS: [n for n in names if n.startswith("gradient of") and n != "gradient of x"],
        INPUT: ["gradient of x"],
    }
    about |= {case: ["result"] for case in (COLUMN, ROW, BIAS)}
    about |= {case: [n for n in names if n not in ("elements held", ranks.MEMORY)] for case in (PAIR, DTYPE, GROUP)}
    hints = {name: 3 for name in names if "bias" in name}
    found = [
        ranks.compare(case, transcript, expected, about[case], tolerance, hints) for case in cases if case != CALLS
    ]
    sent = [ranks.compare_calls(CALLS, transcript, expected, ["forward", "backward"])] if CALLS in cases else []
    return found + sent


def _cases(challenge: dict) -> list[str]:
    """The cases that a challenge tests."""
    special = {"misuse": MISUSE, "groups": GROUP}
    found = [case for field, case in special.items() if challenge.get(field)]
    if found or challenge["dtype"] == "bfloat16":
        return found or [DTYPE]
    value = {"pair": PAIR, "row": BIAS if challenge["bias"] else ROW}.get(challenge["kind"], COLUMN)
    return [HOLDS, value, WEIGHTS, INPUT, CALLS]


def show(challenge: dict) -> str:
    """What each rank does, as Python."""
    dtype, kind = challenge["dtype"], challenge["kind"]
    given = [name for name in ("weight", "bias", "second", "second_bias", "x", "factor") if challenge.get(name)]
    lines = [
        f"{ranks.show(name, challenge[name])}.to(torch.{dtype})".replace(".to(torch.float64)", "") for name in given
    ]
    bias, own = "bias" if challenge["bias"] else "None", ".chunk(comm.size, -1)[comm.rank]"
    layer = "RowParallelLinear" if kind == "row" else "ColumnParallelLinear"
    lines += [f"layer = {layer}(weight, {bias}, comm{', copied=True' if kind == 'copied' else ''})"]
    lines += [f"x = x{own}.clone()" if kind == "row" else "", "x.requires_grad_()", "y = layer(x)"]
    lines += ["y = RowParallelLinear(second, second_bias, comm)(y.relu())"] if kind == "pair" else []
    cut = own if kind in ("column", "copied") else ""
    lines += [f"(y * factor{cut}).sum().backward()", "return y, x.grad, layer.weight.grad"]
    return ranks.script(challenge, [line for line in lines if line])
