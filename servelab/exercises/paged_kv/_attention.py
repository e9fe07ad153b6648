"""Batches for the attention exercises: a small paged cache whose numbers follow from a challenge's seed.

Keys, queries and values are multiples of 1/8, and scales are powers of two, so every score is exact in float32 in
whatever order it is summed; only the softmax rounds.

A batch with ``marks`` shows who sees what: its queries are 0, so a query gives equal weight to whatever it sees, and
the value of slot s is 1 in dim s and 0 elsewhere.
"""

from collections.abc import Iterable
from random import Random
from typing import Any

import numpy as np

from servelab.exercise import Case
from servelab.exercises.paged_kv._steps import UNCHANGED, shown
from servelab.plain import NotPlain, close, decode_array, plain, told_apart

TOLERANCES = {  # relative and absolute, by dtype: the logarithms of large sums round more than the sums
    "float32": (5e-4, 1e-4),
    "float64": (1e-10, 1e-11),  # float32 anywhere on the way is off by 1e-8 or more
}
DTYPE = "the dtype of its arguments"
SEEN = 1e-6  # the smallest weight that counts as looking
UNUSED = {"zero": 0.0, "large": 1e4, "nan": float("nan"), "inf": float("inf")}
ARGUMENTS = ("q", "k_cache", "v_cache", "block_tables", "query_lens", "context_lens")
DEFAULTS = {
    "heads": [2, 2],
    "head_dim": 4,
    "block_size": 4,
    "num_blocks": 8,
    "scale": 1.0,
    "gain": 1,
    "offset": 0,
    "unused": "zero",
    "marks": False,
    "dtype": "float32",
}
LEGEND = {
    "requests": "[query tokens, context tokens, block ids]",
    "heads": "[query heads, KV heads]",
    "gain": "factor on q",
    "offset": "added to every key, q being positive: moves all scores",
    "unused": "what slots outside all contexts hold",
    "marks": "q is 0 and the value of slot s is 1 in dim s, so the output shows which slots were seen",
    "dtype": "of q and of both caches",
}


def batch(case: str, seed: int, requests: list, **changes) -> dict:
    """A challenge. ``requests`` are [query length, context length, block ids]."""
    return {"case": case, "seed": seed, "requests": requests, **DEFAULTS, **changes}


def marked(case: str, seed: int, requests: list, **changes) -> dict:
    """A challenge whose output shows which slots each query token saw."""
    slots = changes.get("num_blocks", DEFAULTS["num_blocks"]) * changes.get("block_size", DEFAULTS["block_size"])
    return batch(case, seed, requests, heads=[1, 1], head_dim=slots, marks=True, **changes)


def make_inputs(challenge: dict) -> tuple:
    """The arguments of ``paged_attention`` for a challenge, in order."""
    import torch

    dtype = getattr(torch, challenge["dtype"])
    rng = Random(challenge["seed"])
    requests = challenge["requests"]
    query_heads, kv_heads = challenge["heads"]
    tokens = sum(query for query, _, _ in requests)
    used = _used_slots(challenge)
    slots = range(challenge["num_blocks"] * challenge["block_size"])
    caches = []
    for gain, offset in ((1, challenge["offset"]), (1, 0)):
        rows = [_numbers(rng, kv_heads, challenge, gain, offset, slot in used) for slot in slots]
        shape = (challenge["num_blocks"], challenge["block_size"], kv_heads, challenge["head_dim"])
        caches.append(torch.tensor(rows, dtype=dtype).reshape(shape))
    queries = [_numbers(rng, query_heads, challenge, challenge["gain"], 0, True) for _ in range(tokens)]
    q = torch.tensor(queries, dtype=dtype)
    if challenge["offset"]:
        q = q.abs() + 1
    if challenge["marks"]:
        q, caches[1] = torch.zeros_like(q), torch.eye(len(slots)).reshape(caches[1].shape)
    width = max(len(blocks) for _, _, blocks in requests)
    tables = [blocks + [-1] * (width - len(blocks)) for _, _, blocks in requests]
    query_lens, context_lens = [query for query, _, _ in requests], [context for _, context, _ in requests]
    return q, *caches, torch.tensor(tables), query_lens, context_lens, challenge["scale"]


def _context_slots(challenge: dict, request: list) -> list[int]:
    """The slots of a request's tokens, in the order of their positions."""
    size, (_, context, blocks) = challenge["block_size"], request
    return [blocks[position // size] * size + position % size for position in range(context)]


def _used_slots(challenge: dict) -> set[int]:
    return {slot for request in challenge["requests"] for slot in _context_slots(challenge, request)}


def _numbers(rng: Random, heads: int, challenge: dict, gain: float, offset: float, used: bool) -> list[list[float]]:
    dim, filler = challenge["head_dim"], UNUSED[challenge["unused"]]
    made = [[gain * rng.randrange(-8, 9) / 8 + offset for _ in range(dim)] for _ in range(heads)]
    return made if used else [[filler] * dim for _ in range(heads)]


def call(challenge: dict, attention) -> dict:
    """Run the learner's attention on a challenge: what it returned, and which of its arguments it changed."""
    import torch

    inputs = make_inputs(challenge)
    with torch.no_grad():
        out = attention(*inputs)
    return {"out": returned(out, challenge), "changed": changed(ARGUMENTS, inputs, make_inputs(challenge))}


def returned(out: Any, challenge: dict) -> Any:
    """What came back, as plain data, in which an array and a tensor are the same; but not where types are judged."""
    array = challenge["case"] == DTYPE and isinstance(out, np.ndarray)
    return {"unexpected type": "numpy.ndarray"} if array else plain(out)


def changed(names: Iterable[str], arguments: Iterable, before: Iterable) -> list[str]:
    """The names of the arguments that are not as they were; NaN equals NaN."""
    pairs = zip(names, arguments, before, strict=False)
    return [name for name, now, then in pairs if not _same(now, then)]


def _same(now: Any, then: Any) -> bool:
    import torch

    if not isinstance(then, torch.Tensor):
        return now == then
    return now.shape == then.shape and torch.equal(now.nan_to_num(7.5), then.nan_to_num(7.5))


def judge_unchanged(names: list) -> Case:
    """The case of an answer that was right otherwise."""
    listed = " and ".join(str(name) for name in names)
    return Case(UNCHANGED, not names, f"{listed} changed: the caller still needs the old content" if names else "")


def compare(challenge: dict, got: Any, expected: Any) -> Case:
    """Whether the outputs agree; if not, at which token they first differ."""
    rtol, atol = TOLERANCES[challenge["dtype"]]
    if close(got, expected, rtol=rtol, atol=atol):
        return Case(challenge["case"], True)
    want = decode_array(expected)
    return Case(challenge["case"], False, misshapen(got, want) or _difference(challenge, decode_array(got), want))


def misshapen(got: Any, want: np.ndarray) -> str:
    """What something is instead of a tensor of the wanted dtype and shape, if it is not one."""
    wanted = f"expected a {want.dtype} tensor of shape {list(want.shape)}"
    try:
        array = decode_array(got)
    except NotPlain:
        return f"{wanted}, got {shown(got)}"
    same = array.shape == want.shape and array.dtype == want.dtype
    return "" if same else f"{wanted}, got {array.dtype} of shape {list(array.shape)}"


def _difference(challenge: dict, array: np.ndarray, want: np.ndarray) -> str:
    rtol, atol = TOLERANCES[challenge["dtype"]]
    apart = ~(np.abs(array - want) <= atol + rtol * np.abs(want))
    token, head, dim = (int(i) for i in np.argwhere(apart)[0])
    where = f"{_position(challenge, token)}, head {head}, dim {dim}"
    due, out = (float(numbers[token, head, dim]) for numbers in (want, array))
    rounded = abs(out - due) <= TOLERANCES["float32"][1] + TOLERANCES["float32"][0] * abs(due)
    note = "; so much comes from float32 on the way" if rounded else ""
    return f"{where}: expected {told_apart(due, out)[0]}, got {told_apart(due, out)[1]}{note}"


def _position(challenge: dict, token: int) -> str:
    for index, (query, context, _) in enumerate(challenge["requests"]):
        if token < query:
            return f"request {index} (query {query}, context {context}), query token {token}"
        token -= query
    return f"token {token}"


def sight(challenge: dict, got: Any, expected: Any) -> tuple[str, bool]:
    """Of a marked batch: the first query token that does not see what it must, and whether only the mask is at fault.

    A mask is at fault if the tokens of the context are seen in order, but ended too early or too late by a known rule.
    """
    problem = misshapen(got, decode_array(expected))
    if problem:
        return problem, False
    looks, first = [set(np.flatnonzero(row > SEEN).tolist()) for row in decode_array(got)[:, 0]], 0
    for request in challenge["requests"]:
        query, context, _ = request
        slots, seen = _context_slots(challenge, request), looks[first : first + query]
        ends = list(range(context - query + 1, context + 1))
        for row, end in enumerate(ends):
            if seen[row] != set(slots[:end]):
                message = f"{_position(challenge, first + row)} {_seen(challenge, seen[row], slots)}"
                return f"{message}; it must see {_spans(range(end))}", _by_mask(seen, slots, ends)
        first += query
    return "", False


def _by_mask(seen: list[set[int]], slots: list[int], ends: list[int]) -> bool:
    """No mask, one off by one either way, or one that takes the chunk for the beginning of its prompt."""
    everything, shorter, longer = [len(slots)] * len(ends), [end - 1 for end in ends], [end + 1 for end in ends]
    wrong = (everything, shorter, longer, list(range(1, len(ends) + 1)))
    return seen in [[set(slots[:end]) for end in rule] for rule in wrong]


def _seen(challenge: dict, seen: set[int], slots: list[int]) -> str:
    """What a query token sees, in words."""
    positions, others = [p for p, slot in enumerate(slots) if slot in seen], sorted(seen - set(slots))
    parts = [_spans(positions)] if positions else []
    if others:
        more = f" and {len(others) - 1} more" if others[1:] else ""
        parts.append(f"outside its context slot {others[0]} (block {others[0] // challenge['block_size']}){more}")
    return f"sees {' and '.join(parts) or 'nothing (its output is 0 or NaN)'}"


def _spans(positions: Iterable[int]) -> str:
    """Positions in words, e.g. ``positions 0-3, 5``."""
    spans: list[list[int]] = []
    for position in positions:
        if spans and position == spans[-1][1] + 1:
            spans[-1][1] = position
        else:
            spans.append([position, position])
    listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"position {listed}" if listed.isdigit() else f"positions {listed}"


def show_call(challenge: dict, name: str) -> str:
    """Code that makes the inputs and calls the learner's function, with the meaning of what it names."""
    named = {key: challenge[key] for key, default in DEFAULTS.items() if challenge[key] != default}
    fields = "".join(f", {key}={value!r}" for key, value in named.items())
    legend = [f"# {key}: {meaning}" for key, meaning in LEGEND.items() if key in ("requests", *named)]
    requests = f"requests={challenge['requests']!r}"
    return "\n".join(
        [
            "from servelab.exercises.paged_kv._attention import batch, make_inputs",
            *legend,
            f"challenge = batch({challenge['case']!r}, seed={challenge['seed']}, {requests}{fields})",
            f"inputs = make_inputs(challenge)  # {', '.join(ARGUMENTS)}, scale",
            f"{name}(*inputs)",
        ]
    )
