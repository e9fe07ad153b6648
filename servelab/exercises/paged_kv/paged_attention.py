"""Check of `write_kv` and `paged_attention`: where tokens land, then attention over batches of growing difficulty."""

from random import Random

import numpy as np

from servelab.exercise import Case, CaseSpec
from servelab.exercises.paged_kv._attention import (
    DTYPE,
    batch,
    call,
    changed,
    compare,
    judge_unchanged,
    marked,
    misshapen,
    show_call,
    sight,
)
from servelab.exercises.paged_kv._steps import UNCHANGED
from servelab.plain import close, decode_array, plain

ANSWERS = ("write_kv", "paged_attention")
FINDS, CAUSAL = "finds the tokens of a context", "causal inside a chunk"
CASES = (
    CaseSpec("writes each token to its slot", hint=1),
    CaseSpec("does not write padding", hint=1),
    CaseSpec(FINDS, hint=2),
    CaseSpec(CAUSAL, hint=3, weight=2),
    CaseSpec("softmax of the scores", hint=3),
    CaseSpec("scale", hint=3),
    CaseSpec("block boundaries", hint=2),
    CaseSpec("query heads share KV heads", hint=3),
    CaseSpec("unused slots stay out", hint=2, weight=2),
    CaseSpec("a mixed batch", hint=3, weight=2),
    CaseSpec(DTYPE, hint=3),
    CaseSpec(UNCHANGED, hint=2),
)
FILLER = -7.0


def challenges(rng: Random) -> list[dict]:
    """Writes, then decodes, prefill chunks and mixtures of them. Smallest first."""

    def seed() -> int:
        return rng.randrange(10**6)

    def blocks(n: int) -> list[int]:  # the last block of the cache is nobody's
        return rng.sample(range(7), n)

    one, two, three = blocks(1), blocks(2), blocks(3)
    seen = ([[1, 4, one]], [[1, 7, two]], [[2, 5, two]], [[1, 8, two]], [[2, 9, three]], [[1, 11, three]])
    return [
        _writing("writes each token to its slot", [2, 0], 2, seed()),
        _writing("writes each token to its slot", rng.sample(range(12), 5), 3, seed()),
        _writing("does not write padding", [-1, -1], 3, seed()),
        _writing("does not write padding", [5, -1, 2, -1], 3, seed()),
        *(marked(FINDS, seed(), requests) for requests in seen),
        marked(FINDS, seed(), [[1, 4, one], [1, 8, two], [1, 11, three]]),
        *(marked(CAUSAL, seed(), requests) for requests in ([[4, 4, one]], [[3, 8, two]], [[7, 11, three]])),
        batch("softmax of the scores", seed(), [[1, 4, one]], heads=[1, 1]),
        batch("softmax of the scores", seed(), [[1, 8, two]], heads=[1, 1]),
        batch("softmax of the scores", seed(), [[3, 8, two]], heads=[1, 1]),
        *(batch("softmax of the scores", seed(), [[3, 8, two]], heads=[1, 1], offset=low) for low in (-100, -300)),
        batch("scale", seed(), [[1, 8, two]], scale=0.125),
        batch("scale", seed(), [[1, 8, two]], scale=2.0),
        batch("block boundaries", seed(), [[1, 1, one]]),
        *(batch("block boundaries", seed(), [[1, context, three[: -(-context // 4)]]]) for context in (3, 5, 9, 11)),
        batch("block boundaries", seed(), [[1, 4, one], [1, 8, two], [1, 9, three]]),
        batch("query heads share KV heads", seed(), [[1, 4, one]], heads=[3, 3]),
        batch("query heads share KV heads", seed(), [[1, 8, two]], heads=[4, 2]),
        batch("query heads share KV heads", seed(), [[2, 6, two]], heads=[4, 1]),
        batch("query heads share KV heads", seed(), [[2, 6, two]], heads=[6, 2], head_dim=8),
        *(_mixed(rng, seed()) for _ in range(3)),
        *(batch("unused slots stay out", seed(), [[1, 5, blocks(2)]], unused=u) for u in ("large", "nan", "inf")),
        batch("unused slots stay out", seed(), [[1, 9, blocks(3)], [2, 2, blocks(1)]], unused="nan"),
        _writing(DTYPE, [2, 0], 2, seed(), dtype="float64"),
        batch(DTYPE, seed(), [[1, 4, one]], dtype="float64"),
        batch(DTYPE, seed(), [[3, 8, two], [1, 9, three]], heads=[4, 2], unused="nan", dtype="float64"),
        _writing(UNCHANGED, [5, -1, 2, -1], 3, seed()),
        batch(UNCHANGED, seed(), [[2, 5, two], [1, 1, one]], unused="nan", scale=0.5),
    ]


def _writing(case: str, slots: list[int], num_blocks: int, seed: int, dtype: str = "float32") -> dict:
    sizes = {"num_blocks": num_blocks, "block_size": 4, "shape": [2, 3]}
    return {"case": case, "write": slots, **sizes, "seed": seed, "dtype": dtype}


def _mixed(rng: Random, seed: int) -> dict:
    """A decode, a whole prompt, a chunk behind its earlier chunks, and a prompt that shares its first block with it."""
    block_size = rng.choice((2, 3, 5))
    ids = rng.sample(range(15), 15)  # the last block is nobody's
    prefix, requests = ids.pop(), []
    for kind in rng.sample(("decode", "prompt", "chunk", "prefix hit"), 4):
        context = rng.randint(block_size + 2, 4 * block_size - 1)
        query = {"decode": 1, "prompt": context, "chunk": context // 2, "prefix hit": context - block_size}[kind]
        first = [prefix] if kind in ("chunk", "prefix hit") else [ids.pop()]
        requests.append([query, context, first + [ids.pop() for _ in range((context - 1) // block_size)]])
    plan = {"heads": [4, 2], "head_dim": 8, "block_size": block_size, "num_blocks": 16, "unused": "nan", "scale": 0.5}
    return batch("a mixed batch", seed, requests, **plan)


def drive(challenge: dict, write_kv, paged_attention) -> dict:
    """Write tokens into a filled cache and record all of it, or run attention and record its output."""
    if "write" not in challenge:
        return call(challenge, paged_attention)
    (caches, tokens), (_, before) = _write_inputs(challenge), _write_inputs(challenge)
    write_kv(*caches, *tokens)
    found = changed(("k", "v", "slot_mapping"), tokens, before)
    return {"k_cache": plain(caches[0]), "v_cache": plain(caches[1]), "changed": found}


def _write_inputs(challenge: dict) -> tuple:
    import torch

    rng, shape, slots = Random(challenge["seed"]), challenge["shape"], challenge["write"]
    size, dtype = (challenge["num_blocks"], challenge["block_size"], *shape), getattr(torch, challenge["dtype"])
    caches = [torch.full(size, FILLER, dtype=dtype) for _ in range(2)]
    numbers = [[float(rng.randint(1, 9)) for _ in range(len(slots) * shape[0] * shape[1])] for _ in range(2)]
    k, v = (torch.tensor(row, dtype=dtype).reshape(len(slots), *shape) for row in numbers)
    return caches, (k, v, torch.tensor(slots))


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Caches and outputs are determined; they are compared with the reference's."""
    if "write" in challenge:
        case = _judge_write(challenge, transcript, expected)
    elif challenge["marks"]:
        problem, by_mask = sight(challenge, transcript["out"], expected["out"])
        return [Case(FINDS, not problem or by_mask, problem), Case(CAUSAL, not problem, problem)]
    else:
        case = compare(challenge, transcript["out"], expected["out"])
    return [judge_unchanged(transcript["changed"]) if case.passed and case.name == UNCHANGED else case]


def _judge_write(challenge: dict, transcript: dict, expected: dict) -> Case:
    for name in ("k_cache", "v_cache"):
        if not close(transcript[name], expected[name]):
            return Case(challenge["case"], False, f"{name}: {_changed(transcript[name], decode_array(expected[name]))}")
    return Case(challenge["case"], True)


def _changed(got, want: np.ndarray) -> str:
    """The slots written and the slots that should have been."""
    if problem := misshapen(got, want):
        return problem
    array = decode_array(got)
    shape = (-1, want.shape[2] * want.shape[3])
    asked, written = (np.flatnonzero((a.reshape(shape) != FILLER).any(1)).tolist() for a in (want, array))
    if asked != written:
        return f"slots {asked} should have been written, slots {written} were"
    return "the right slots were written, with other values"


def show(challenge: dict) -> str:
    """Code that makes the inputs and calls the learner's function."""
    if "write" not in challenge:
        return show_call(challenge, "paged_attention")
    size, shape = (challenge["num_blocks"], challenge["block_size"], *challenge["shape"]), challenge["shape"]
    new = f"k and v of shape ({len(challenge['write'])}, {shape[0]}, {shape[1]}), all {challenge['dtype']}"
    return f"# caches of shape {size}; {new}\n" + (
        f"write_kv(k_cache, v_cache, k, v, slot_mapping=torch.tensor({challenge['write']}))"
    )
