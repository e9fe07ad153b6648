"""Check of the column- and the row-parallel layer: values, gradients, what a rank holds and what it sends."""

from operator import mul
from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.tensor_parallel import _ranks as ranks

ANSWERS = ("shard", "ColumnParallelLinear", "RowParallelLinear")
SHARD = "shard alone: a rank's part, copied"
HOLDS, COLUMN, ROW = "holds its part and no more", "column layer: its own outputs", "row layer: the sum of all parts"
BIAS, PAIR = "bias added once", "a column and a row layer in a row"
WEIGHTS, INPUT = "gradients of weights and biases", "gradient of the input"
CALLS, DTYPE = "sends no more than it must", "in bfloat16, too"
GROUP, MISUSE = "within its own group", "refuses unequal parts"
TYPE = "type of the result"
CASES = (
    CaseSpec(SHARD, hint=2),
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
SHARDS = ((1, (2, 2), 0), (2, (4, 3), 0), (2, (3, 4), 1), (3, (6,), 0))  # ranks, shape, dimension
LAYERED = {4: [1]}  # by the number of ranks, what stands in front of the rows of a single layer's x
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
    """Parts alone; layers on one rank, then several; bfloat16; sizes that cannot be cut; two groups at once."""
    made: list[dict] = [
        {"kind": "shard", "ranks": size, "dtype": "float64", "dim": dim, "full": ranks.draw(rng, *shape)}
        for size, shape, dim in SHARDS
    ]
    made += [_challenge(rng, *parts) for parts in DIRECTED]
    coarse = [_challenge(rng, kind, 4, 8, 8, True) | {"dtype": "bfloat16"} for kind in ("column", "row")]
    grouped = [_challenge(rng, "pair", 2, 4, 3, True) | {"groups": [[0, 2], [1, 3]]}]
    refused = [_challenge(rng, kind, size, out, into, True) | {"misuse": True} for size, out, into, kind in REFUSED]
    return [*made, *coarse, *refused, *grouped]


def _challenge(rng: Random, kind: str, size: int, out: int, into: int, bias: bool) -> dict:
    rows = [*([] if kind == "pair" else LAYERED.get(size, [])), 2]
    made = {
        "kind": kind,
        "ranks": size,
        "dtype": "float64",
        "weight": ranks.draw(rng, out, into),
        "bias": ranks.draw(rng, out) if bias else None,
        "x": ranks.draw(rng, *rows, into),
        "factor": ranks.draw(rng, *rows, into if kind == "pair" else out),
    }
    if size == 3:
        made |= {name: ranks.thirds(made[name]) for name in ("x", "factor")}
    if kind == "pair":
        while not _all_active(made):
            made |= {"weight": ranks.draw(rng, out, into), "x": ranks.draw(rng, 2, into)}
        made |= {"second": ranks.draw(rng, into, out), "second_bias": ranks.draw(rng, into)}
    return made


def _all_active(made: dict) -> bool:
    """Whether every output of the first layer is above 0 for one of the rows: of the others relu leaves nothing."""
    pairs = zip(made["weight"], made["bias"], strict=True)
    return all(any(bias + sum(map(mul, row, x)) > 0 for x in made["x"]) for row, bias in pairs)


def drive(challenge: dict, shard, ColumnParallelLinear, RowParallelLinear) -> dict:
    return ranks.drive(challenge, _work, shard, ColumnParallelLinear, RowParallelLinear)


def _work(challenge: dict, comm: Any, shard: Any, column: type, row: type) -> dict:
    if challenge.get("misuse"):
        return _misuse(challenge, comm, shard, column, row)
    if challenge["kind"] == "shard":
        return _shard(challenge, comm, shard)
    kind, dtype = challenge["kind"], challenge["dtype"]
    full = ranks.Given({name: challenge.get(name) for name in ("weight", "bias", "second", "second_bias")}, dtype)
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
    biased = [full["bias"] is not None, full["second_bias"] is not None]
    cut = ("weight", "second") if comm.size > 1 else ()
    kept = ranks.kept(layers, full, cut)
    return {ranks.MEMORY: kept} | _run(layers, biased, x.requires_grad_(), factor, challenge.get("groups"))


def _shard(challenge: dict, comm: Any, shard: Any) -> dict:
    full = ranks.tensor(challenge["full"])
    part = ranks.returned("shard", shard(full, challenge["dim"], comm))
    view = ranks.same_memory(part, full) or part.untyped_storage().nbytes() > part.nbytes
    return {"shard": part.detach().clone(), ranks.MEMORY: "all of it: a view" if view else "its own"}


def _run(layers: list, biased: list[bool], x: Any, factor: Any, groups: Any) -> dict:
    """Forward and backward through one or two layers."""
    ranks.mark("forward", groups)
    y = ranks.returned("forward", layers[0](x))
    y = ranks.returned("forward", layers[1](y.relu())) if len(layers) > 1 else y
    made = {"result": y.detach().clone(), TYPE: str(y.dtype), "elements held": sum(map(ranks.held, layers))}
    ranks.mark("backward", groups)
    went = ranks.backward(y, factor)
    made |= ranks.grads(went, x=x)
    for number, layer in enumerate(layers):
        of = f" of layer {number + 1}" if len(layers) > 1 else ""
        names = ("weight", "bias") if biased[number] else ("weight",)  # without one a layer need not have the attribute
        parameters = {f"{name}{of}": ranks.parameter(layer, name) for name in names}
        made |= parameters | ranks.grads(went, **parameters)
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
    if challenge["kind"] == "shard":
        return [ranks.compare(SHARD, transcript, expected, ["shard", ranks.MEMORY])]
    tolerance = ranks.ROUNDED if challenge["dtype"] == "bfloat16" else ranks.EXACT
    names = list(expected["ranks"][0]["made"])
    about = {
        HOLDS: [*(n for n in names if n.startswith(("weight", "bias"))), ranks.MEMORY, "elements held"],
        WEIGHTS: [n for n in names if n.startswith("gradient of") and n != "gradient of x"],
        INPUT: ["gradient of x"],
    }
    about |= {case: ["result"] for case in (COLUMN, ROW, BIAS)}
    about |= {
        case: [n for n in names if n not in ("elements held", ranks.MEMORY, ranks.BACKWARD)]
        for case in (PAIR, DTYPE, GROUP)  # with the result's type, as bfloat16 is written like float32
    }
    hints = {name: 3 for name in names if "bias" in name}
    found = [
        ranks.compare(case, transcript, expected, about[case], tolerance, hints) for case in cases if case != CALLS
    ]
    sent = [ranks.compare_calls(CALLS, transcript, expected, ["forward", "backward"])] if CALLS in cases else []
    return found + sent


def _cases(challenge: dict) -> list[str]:
    """The cases that a challenge tests."""
    if challenge["kind"] == "shard":
        return [SHARD]
    special = {"misuse": MISUSE, "groups": GROUP}
    found = [case for field, case in special.items() if challenge.get(field)]
    if found or challenge["dtype"] == "bfloat16":
        return found or [DTYPE]
    value = {"pair": PAIR, "row": BIAS if challenge["bias"] else ROW}.get(challenge["kind"], COLUMN)
    return [HOLDS, value, WEIGHTS, INPUT, CALLS]


def show(challenge: dict) -> str:
    """What each rank does, as Python."""
    if challenge["kind"] == "shard":
        given = [ranks.show("full", challenge["full"]), f"part = shard(full, {challenge['dim']}, comm)"]
        given += ["own, whole = part.untyped_storage(), full.untyped_storage()"]
        given += ["view = own.nbytes() > part.nbytes or own.data_ptr() == whole.data_ptr()"]
        held = "'all of it: a view' if view else 'its own'"
        return ranks.script(challenge, given, {"shard": "part", ranks.MEMORY: held})
    dtype, kind = challenge["dtype"], challenge["kind"]
    given = [name for name in ("weight", "bias", "second", "second_bias", "x", "factor") if challenge.get(name)]
    lines = [
        f"{ranks.show(name, challenge[name])}.to(torch.{dtype})".replace(".to(torch.float64)", "") for name in given
    ]
    bias, own = "bias" if challenge["bias"] else "None", ".chunk(comm.size, -1)[comm.rank]"
    layer = "RowParallelLinear" if kind == "row" else "ColumnParallelLinear"
    if challenge.get("misuse"):
        dim = 1 if kind == "row" else 0
        return _show_misuse(
            challenge, lines[:2], {"shard": f"shard(weight, {dim}, comm)", "layer": f"{layer}(weight, bias, comm)"}
        )
    lines += [f"layer = {layer}(weight, {bias}, comm{', copied=True' if kind == 'copied' else ''})"]
    lines += [f"x = x{own}.clone()" if kind == "row" else "", "x.requires_grad_()", "y = layer(x)"]
    layers = {"": "layer"}
    if kind == "pair":
        lines += ["row = RowParallelLinear(second, second_bias, comm)", "y = row(y.relu())"]
        layers = {" of layer 1": "layer", " of layer 2": "row"}
    cut = own if kind in ("column", "copied") else ""
    lines += [f"(y * factor{cut}).sum().backward()"]
    return ranks.script(challenge, [line for line in lines if line], _shown(layers, bool(challenge["bias"])))


def _show_misuse(challenge: dict, given: list[str], calls: dict[str, str]) -> str:
    """Both calls, each with what came of it."""
    lines = [*given, "made = {}"]
    for name, call in calls.items():
        lines += ["try:", f"    made[{name!r}] = f'no error but {{type({call}).__name__}}'"]
        lines += ["except Exception as error:", f"    made[{name!r}] = f'a {{type(error).__name__}}'"]
    return f"{ranks.script(challenge, [*lines, 'return made'])}\n{ranks.PRINTED}"


def _shown(layers: dict[str, str], biased: bool) -> dict[str, str]:
    """Expressions for what is judged about layers, given by how messages call what is theirs."""
    made = {"result": "y.detach()", "gradient of x": "x.grad"}
    for of, layer in layers.items():
        for name in ("weight", "bias") if biased else ("weight",):
            made |= {f"{name}{of}": f"{layer}.{name}.detach()", f"gradient of {name}{of}": f"{layer}.{name}.grad"}
        made |= {f"{name}{of}": value for name, value in ranks.show_kept(layer).items()}
    return made
