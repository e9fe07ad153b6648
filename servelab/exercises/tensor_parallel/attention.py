"""Check of tensor-parallel attention: whose heads are whose, values, gradients, and sums over replicated KV heads."""

from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.tensor_parallel import _ranks as ranks
from servelab.plain import close, plain

ANSWERS = ("my_heads", "TensorParallelAttention")
HEADS, REPLICATED, REFUSES = (
    "query heads and their KV heads",
    "more ranks than KV heads",
    "refuses what does not divide",
)
HOLDS, VALUE, INPUT = "holds its heads' weights and no more", "the dense layer's values", "gradient of the input"
WEIGHTS, COPIES = "gradients of the weights", "gradients of replicated weights"
CALLS, APART = "two all-reduces of activations", "weight gradients summed apart"
GROUP = "within its own group"
CASES = (
    CaseSpec(HEADS, hint=1, weight=2),
    CaseSpec(REPLICATED, hint=1, weight=2),
    CaseSpec(HOLDS, hint=2, weight=2),
    CaseSpec(VALUE, hint=2, weight=2),
    CaseSpec(INPUT, hint=2, weight=2),
    CaseSpec(WEIGHTS, hint=2, weight=2),
    CaseSpec(CALLS, hint=2, weight=2),
    CaseSpec(COPIES, hint=3, weight=3),
    CaseSpec(APART, hint=3, weight=2),
    CaseSpec(GROUP, hint=3),
    CaseSpec(REFUSES, hint=1),
)
MATRICES = ("q", "k", "v", "o")
# query heads, KV heads, ranks; the last ones do not divide
PLACED = ((1, 1, 1), (4, 2, 2), (4, 4, 1), (6, 3, 3), (6, 6, 3), (32, 8, 4), (64, 8, 8), (9, 3, 3))
CROWDED = ((4, 2, 4), (8, 2, 4), (4, 1, 2), (64, 4, 16), (6, 3, 6), (64, 8, 16))
IMPOSSIBLE = ((9, 3, 2), (4, 2, 3), (12, 6, 4), (12, 4, 6), (6, 3, 4), (18, 6, 9))
# ranks, query heads, KV heads, head_dim, hidden
LAYERS = (
    (1, 2, 1, 2, 3),
    (2, 2, 2, 2, 3),
    (2, 4, 2, 2, 5),
    (3, 6, 3, 1, 4),
    (2, 8, 4, 1, 2),
    (2, 4, 1, 2, 3),
    (4, 4, 2, 3, 2),
)


def challenges(rng: Random) -> list[dict]:
    """Heads alone; then layers without ``finish_gradients``; then with it, at last in two groups at the same time."""
    heads = [{"heads": [h, kv], "size": t, "case": HEADS} for h, kv, t in PLACED]
    heads += [{"heads": [h, kv], "size": t, "case": REPLICATED} for h, kv, t in CROWDED]
    refused = [{"heads": [h, kv], "size": t, "case": REFUSES} for h, kv, t in IMPOSSIBLE]
    layers = [_layer(rng, *parts) for parts in LAYERS]
    grouped = [_layer(rng, 2, 4, 1, 2, 3) | {"groups": [[0, 2], [1, 3]]}]
    grouped += [_layer(rng, 2, 4, 2, 2, 3) | {"groups": [[0, 1], [2, 3]]}]
    finished = [layer | {"finish": True} for layer in [*layers, *grouped]]
    return [*heads, *layers, *finished, *refused]


def _layer(rng: Random, size: int, heads: int, kv_heads: int, head_dim: int, hidden: int) -> dict:
    shapes = {"q": (heads * head_dim, hidden), "o": (hidden, heads * head_dim)}
    shapes |= dict.fromkeys("kv", (kv_heads * head_dim, hidden))
    # of so many values that no rank's parts of q, k and v together have all numbers of v by chance
    made: dict[str, Any] = {name: ranks.draw(rng, *shapes[name], largest=100, of=100) for name in MATRICES}
    made |= {name: ranks.draw(rng, 2, 3, hidden, largest=8) for name in ("x", "factor")}
    return {"ranks": size, "heads": [heads, kv_heads], "case": "layer"} | made


def drive(challenge: dict, my_heads, TensorParallelAttention) -> dict:
    if challenge["case"] == "layer":
        return ranks.drive(challenge, _work, TensorParallelAttention)
    if challenge["case"] == REFUSES:
        my_heads(1, 1, 0, 1)  # what is not written has not refused anything
    found = []
    for rank in range(challenge["size"]):
        try:
            found.append(_heads(my_heads(*challenge["heads"], rank, challenge["size"])))
        except ValueError:
            found.append("a ValueError")
    return {"heads": found}


def _heads(found: Any) -> Any:
    """Two collections of heads as lists, in whatever form they come."""
    try:
        return [[plain(head) for head in part] for part in found]
    except TypeError:
        return plain(found)


def _work(challenge: dict, comm: Any, attention: type) -> dict:
    from servelab.ranks.communicator import split

    copies = max(1, comm.size // challenge["heads"][1])
    given = ranks.Given({name: challenge[name] for name in MATRICES})
    layer = attention(*given.values(), *challenge["heads"], comm, split(comm, copies))
    cut = "qkvo" if copies < comm.size else "qo"  # of one KV head each rank has all
    kept = ranks.kept([layer], given, cut if comm.size > 1 else ())
    x = ranks.leaf(challenge["x"])
    ranks.mark("forward", challenge.get("groups"))
    y = ranks.returned("forward", layer(x))
    value = y.detach().clone()
    ranks.mark("backward", challenge.get("groups"))
    went = ranks.backward(y, ranks.tensor(challenge["factor"]))
    if challenge.get("finish") and went == ranks.DONE:
        ranks.mark("finish")
        layer.finish_gradients()
    weights = {name: ranks.parameter(layer, name) for name in MATRICES}
    made = {"result": value, ranks.MEMORY: kept, "elements held": ranks.held(layer)}
    return made | weights | ranks.grads(went, x=x, **weights)


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Heads and values are determined. Replicated gradients may be summed in backward or after it, in one go or two."""
    if challenge["case"] != "layer":
        return [_judge_heads(challenge, transcript, expected)]
    own, copied = [f"gradient of {name}" for name in "qo"], [f"gradient of {name}" for name in "kv"]
    replicated = challenge["ranks"] > challenge["heads"][1]
    calls: list[str] = []
    if challenge.get("groups"):
        about = {GROUP: ["result", "gradient of x", *own, *copied]}
    elif challenge.get("finish"):
        about = {WEIGHTS: own, COPIES: copied} if replicated else {WEIGHTS: own + copied}
        calls = [APART] if replicated else []
    else:
        about = {HOLDS: [*MATRICES, ranks.MEMORY, "elements held"], VALUE: ["result"], INPUT: ["gradient of x"]}
        calls = [CALLS]
    if "failed" in transcript:
        return ranks.failed(transcript, [*about, *calls])
    hints = dict.fromkeys(copied, 3)
    found = [ranks.compare(case, transcript, expected, names, hints=hints) for case, names in about.items()]
    return found + [_judge_calls(case, challenge, transcript, expected) for case in calls]


def _judge_heads(challenge: dict, transcript: dict, expected: dict) -> Case:
    case, (heads, kv_heads), size = challenge["case"], challenge["heads"], challenge["size"]
    found = transcript.get("heads")
    if not isinstance(found, list) or len(found) != size:
        return Case(case, False, "no heads were returned")
    for rank, (got, want) in enumerate(zip(found, expected["heads"], strict=True)):
        if not close(got, want):
            call = f"my_heads({heads}, {kv_heads}, {rank}, {size})"
            return Case(case, False, f"{call}: expected {_words(want)}, got {_words(got)}")
    return Case(case, True)


def _words(found: Any) -> str:
    if isinstance(found, list) and len(found) == 2:
        return f"query heads {ranks.shown(found[0])} and KV heads {ranks.shown(found[1])}"
    return found if isinstance(found, str) else ranks.shown(found)


def _judge_calls(case: str, challenge: dict, transcript: dict, expected: dict) -> Case:
    """Activations: one all-reduce forward and one backward. All else: only sums of replicated gradients."""
    for rank, (mine, right) in enumerate(zip(transcript["ranks"], expected["ranks"], strict=True)):
        activation = right["calls"].get("forward", [])
        forward, backward, finish = (mine["calls"].get(phase, []) for phase in ("forward", "backward", "finish"))
        others = [call for call in backward if call not in activation]
        sums = [*others, *finish]
        if case == CALLS and (forward != activation or len(backward) - len(others) != len(activation)):
            sent = f"forward {ranks.listed(forward)}; backward {ranks.listed(backward)}"
            sent = ranks.stuck(mine) or sent
            return Case(case, False, f"rank {rank}: expected {ranks.listed(activation)}, each way; got {sent}")
        if case == CALLS and len(others) and not _replicated(challenge):
            return Case(case, False, f"rank {rank}, backward: also {ranks.listed(others)}")
        wanted = right["calls"].get("finish", [])
        if case == APART and (_size(sums) != _size(wanted) or {str(c[2]) for c in sums} != {str(c[2]) for c in wanted}):
            return Case(case, False, f"rank {rank}: expected {ranks.listed(wanted)}, got {ranks.listed(sums)}")
    return Case(case, True)


def _replicated(challenge: dict) -> bool:
    return challenge["ranks"] > challenge["heads"][1]


def _size(calls: list) -> int:
    return sum(elements for _, elements, _ in calls)


def show(challenge: dict) -> str:
    """The call, or what each rank does, as Python."""
    heads, kv_heads = challenge["heads"]
    if challenge["case"] != "layer":
        size = challenge["size"]
        return f"[my_heads({heads}, {kv_heads}, rank, {size}) for rank in range({size})]"
    lines = [ranks.show(name, challenge[name]) for name in (*MATRICES, "x", "factor")]
    copies = max(1, challenge["ranks"] // kv_heads)
    lines = ["from servelab.ranks.communicator import split", *lines]
    lines += [f"layer = TensorParallelAttention(q, k, v, o, {heads}, {kv_heads}, comm, split(comm, {copies}))"]
    lines += ["x.requires_grad_()", "y = layer(x)", "(y * factor).sum().backward()"]
    lines += ["layer.finish_gradients()"] if challenge.get("finish") else []
    return ranks.script_of_layer(challenge, lines, MATRICES)
