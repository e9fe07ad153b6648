"""Batches for the attention exercises: a small paged cache whose numbers follow from a challenge's seed.

Keys, queries and values are multiples of 1/8, and scales are powers of two, so every score is exact in float32 in
whatever order it is summed; only the softmax rounds.
"""

from random import Random
from typing import Any

import numpy as np

from servelab.exercise import Case
from servelab.plain import NotPlain, close, decode_array, plain

RTOL, ATOL = 1e-4, 1e-5
UNUSED = {"zero": 0.0, "large": 1e4, "nan": float("nan"), "inf": float("inf")}


def batch(case: str, seed: int, requests: list, **changes) -> dict:
    """A challenge. ``requests`` are [query length, context length, block ids]."""
    plan = {
        "heads": [2, 2],
        "head_dim": 4,
        "block_size": 4,
        "num_blocks": 8,
        "scale": 0.5,
        "gain": 1,
        "offset": 0,
        "unused": "zero",
    }
    return {"case": case, "seed": seed, "requests": requests, **plan, **changes}


def make_inputs(challenge: dict) -> tuple:
    """The arguments of ``paged_attention`` for a challenge, in order."""
    import torch

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
        caches.append(torch.tensor(rows, dtype=torch.float32).reshape(shape))
    q = [_numbers(rng, query_heads, challenge, challenge["gain"], 0, True) for _ in range(tokens)]
    if challenge["offset"]:
        q = [[[abs(x) + 1 for x in head] for head in token] for token in q]
    width = max(len(blocks) for _, _, blocks in requests)
    tables = [blocks + [-1] * (width - len(blocks)) for _, _, blocks in requests]
    query_lens, context_lens = [query for query, _, _ in requests], [context for _, context, _ in requests]
    return torch.tensor(q), *caches, torch.tensor(tables), query_lens, context_lens, challenge["scale"]


def _used_slots(challenge: dict) -> set[int]:
    size = challenge["block_size"]
    return {
        blocks[position // size] * size + position % size
        for _, context, blocks in challenge["requests"]
        for position in range(context)
    }


def _numbers(rng: Random, heads: int, challenge: dict, gain: float, offset: float, used: bool) -> list[list[float]]:
    dim, filler = challenge["head_dim"], UNUSED[challenge["unused"]]
    made = [[gain * rng.randrange(-8, 9) / 8 + offset for _ in range(dim)] for _ in range(heads)]
    return made if used else [[filler] * dim for _ in range(heads)]


def call(challenge: dict, attention) -> dict:
    """Run the learner's attention on a challenge: what it returned, and whether its inputs are as they were."""
    import torch

    inputs = make_inputs(challenge)
    with torch.no_grad():
        out = attention(*inputs)
    before = make_inputs(challenge)[:4]
    kept = all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(inputs[:4], before, strict=True))
    return {"out": plain(out), "inputs_kept": kept}


def compare(challenge: dict, got: Any, expected: Any) -> Case:
    """Whether the outputs agree; if not, at which token they first differ."""
    if close(got, expected, rtol=RTOL, atol=ATOL):
        return Case(challenge["case"], True)
    return Case(challenge["case"], False, _difference(challenge, got, decode_array(expected)))


def _difference(challenge: dict, got: Any, want: np.ndarray) -> str:
    try:
        array = decode_array(got)
    except NotPlain as error:
        return f"expected a float32 tensor of shape {list(want.shape)}: {error}"
    if array.shape != want.shape or array.dtype != want.dtype:
        return f"expected {want.dtype} of shape {list(want.shape)}, got {array.dtype} of shape {list(array.shape)}"
    apart = ~(np.abs(array - want) <= ATOL + RTOL * np.abs(want))
    token, head, dim = (int(i) for i in np.argwhere(apart)[0])
    where = f"{_position(challenge, token)}, head {head}, dim {dim}"
    return f"{where}: expected {want[token, head, dim]:.5f}, got {array[token, head, dim]:.5f}"


def _position(challenge: dict, token: int) -> str:
    for index, (query, context, _) in enumerate(challenge["requests"]):
        if token < query:
            return f"request {index} (query {query}, context {context}), query token {token}"
        token -= query
    return f"token {token}"


def show_call(challenge: dict, name: str) -> str:
    """Code that makes the inputs and calls the learner's function."""
    named = {key: value for key, value in challenge.items() if key not in ("case", "seed", "requests")}
    fields = ", ".join(f"{key}={value!r}" for key, value in named.items())
    first = "from servelab.exercises.paged_kv._attention import batch, make_inputs"
    made = f"batch({challenge['case']!r}, {challenge['seed']}, {challenge['requests']!r}, {fields})"
    return f"{first}\nchallenge = {made}\n{name}(*make_inputs(challenge))"
