"""Check of `paged_attention_blockwise`: the values, large scores, and the largest tensor made on the way.

Each case but the smallest has a context that, gathered, is larger than a tensor may be: to gather is not this task.
A copy of the whole cache costs "one block at a time" alone.
What is wrong with the values of a prefill chunk is told by other cases than "one block at a time".
"""

import math
from dataclasses import replace
from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.paged_kv._attention import (
    ARGUMENTS,
    DTYPE,
    batch,
    call,
    changed,
    compare,
    judge_unchanged,
    make_inputs,
    marked,
    returned,
    show_call,
    sight,
)
from servelab.exercises.paged_kv._steps import UNCHANGED

ANSWERS = ("paged_attention_blockwise",)
SEES, MIXED, SIZES = "each query sees what it must", "causal, ragged and shared heads", "one block at a time"
CASES = (
    CaseSpec(SEES, hint=3),
    CaseSpec("one block", hint=1, alone=False),
    CaseSpec("scale", hint=3),
    CaseSpec("several blocks", hint=1),
    CaseSpec("large scores", hint=1),
    CaseSpec("far below zero", hint=2),
    CaseSpec(MIXED, hint=3),
    CaseSpec(DTYPE, hint=3),
    CaseSpec(UNCHANGED, hint=3),
    CaseSpec(SIZES, hint=3, weight=5),
)
TILE = 4  # blocks whose keys, with heads repeated, one tensor may hold for each query token


def challenges(rng: Random) -> list[dict]:
    """One block, several, scores that overflow, mixtures, and contexts of many blocks. Smallest first."""

    def seed() -> int:
        return rng.randrange(10**6)

    def blocks(n: int, of: int = 8) -> list[int]:
        return rng.sample(range(of), n)

    one_head = {"heads": [1, 1]}
    seen = ([[1, 3, blocks(1)]], [[1, 4, blocks(1)]], [[1, 7, blocks(2)]], [[4, 4, blocks(1)]], [[3, 11, blocks(3)]])
    return [
        *(marked(SEES, seed(), requests) for requests in seen),
        marked(SEES, seed(), [[1, 22, blocks(6)]]),
        *(batch("one block", seed(), [[1, context, blocks(1)]], head_dim=1, **one_head) for context in (3, 4)),
        batch("scale", seed(), [[1, 4, blocks(1)]], scale=0.125),
        batch("scale", seed(), [[1, 18, blocks(5)]], scale=2.0),
        batch("several blocks", seed(), [[1, 8, blocks(2)]], **one_head),
        batch("several blocks", seed(), [[1, 20, blocks(5)]], gain=2),
        batch("several blocks", seed(), [[1, 10, blocks(3)], [1, 5, blocks(2)]], gain=2),
        *(batch("large scores", seed(), [[1, 19, blocks(5)]], gain=gain) for gain in (64, 128)),
        *(batch("large scores", seed(), [[6, 16, blocks(4)]], heads=[4, 4], gain=gain) for gain in (128, 1024)),
        batch("far below zero", seed(), [[1, 7, blocks(2)]], offset=-40),
        *(batch("far below zero", seed(), [[3, 8, blocks(2)]], offset=offset) for offset in (-100, -300)),
        batch("far below zero", seed(), [[1, 23, blocks(6)]], offset=-100),
        batch(MIXED, seed(), [[6, 6, blocks(2)], [1, 9, blocks(3)]], heads=[4, 2]),
        batch(MIXED, seed(), [[2, 38, blocks(10, 16)]], heads=[4, 4], num_blocks=16),
        *(_mixed(rng, seed()) for _ in range(2)),
        batch(DTYPE, seed(), [[1, 4, blocks(1)]], dtype="float64"),
        batch(DTYPE, seed(), [[1, 8, blocks(2)], [1, 9, blocks(3)]], heads=[4, 2], dtype="float64"),
        batch(DTYPE, seed(), [[1, 17, blocks(5)]], dtype="float64"),
        batch(UNCHANGED, seed(), [[1, 21, blocks(6, 7)]], unused="nan", scale=0.5),
        _long(seed(), [[1, 98, blocks(25, 31)]]),
        _long(seed(), [[1, 254, blocks(64, 64)], [1, 41, blocks(11, 64)]]),
        _long(seed(), [[6, 254, blocks(64, 64)]]),
    ]


def _mixed(rng: Random, seed: int) -> dict:
    ids = rng.sample(range(15), 15)
    requests = []
    for query in (1, rng.randint(3, 5), rng.randint(6, 9)):
        context = query + rng.randint(0, 7)
        requests.append([query, context, [ids.pop() for _ in range(-(-context // 4))]])
    plan = {"heads": [6, 3], "head_dim": 8, "num_blocks": 16, "unused": "nan", "gain": 8, "scale": 0.5}
    return batch(MIXED, seed, requests, **plan)


def _long(seed: int, requests: list) -> dict:
    return batch(SIZES, seed, requests, heads=[4, 2], num_blocks=64)


def most_elements(challenge: dict) -> int:
    """The most elements that one tensor may have; every gathered context and all its scores have more.

    A few blocks of keys for every query token and query head: stepping through small tiles of blocks, or through the
    blocks of all requests or query tokens together, is as right as one block of one request at a time.
    """
    tokens = sum(query for query, _, _ in challenge["requests"])
    return TILE * challenge["block_size"] * challenge["heads"][0] * challenge["head_dim"] * tokens


def is_long(challenge: dict) -> bool:
    """Whether a context, gathered, has more elements than one tensor may have."""
    longest = max(context for _, context, _ in challenge["requests"])
    return longest * challenge["heads"][1] * challenge["head_dim"] > most_elements(challenge)


def drive(challenge: dict, attention) -> dict:
    """Run the learner's function; of a long context, record the most elements that any tensor it made has room for."""
    if not is_long(challenge):
        return call(challenge, attention)
    import torch

    inputs = make_inputs(challenge)
    copies = set() if challenge["case"] == SIZES else _copies(challenge)
    with torch.no_grad(), _recorder(inputs, copies) as recorder:
        out = attention(*inputs)
    recorder.see(out)
    found = changed(ARGUMENTS, inputs, make_inputs(challenge))
    return {"out": returned(out, challenge), "changed": found, "largest": recorder.largest, "made": recorder.made}


def _copies(challenge: dict) -> set[int]:
    """The elements of a copy of the whole cache, as it is or with its heads repeated: too much, but no gathering."""
    heads, kv_heads = challenge["heads"]
    slots = challenge["num_blocks"] * challenge["block_size"] * challenge["head_dim"]
    return {slots * kv_heads, slots * heads}


def _recorder(inputs: tuple, ignored: set[int]):
    """A mode that sees the result of every torch operation, and keeps the size of the largest storage made by one."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    given = {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor)}

    class Recorder(TorchDispatchMode):
        largest, made = 0, 0

        @classmethod
        def _should_skip_dynamo(cls):  # torch's own switch: otherwise the first use imports torch._dynamo, for seconds
            return False

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for value in result if isinstance(result, (list, tuple)) else (result,):
                self.see(value)
            return result

        def see(self, value) -> None:
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in given:
                self.made += 1
                size = math.ceil(value.untyped_storage().nbytes() / value.element_size())
                self.largest = max(self.largest, 0 if size in ignored else size)

    return Recorder()


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Outputs are determined; sizes stay below what a few blocks of each request need."""
    case = _judge_values(challenge, transcript, expected)
    chunk = case.name == SIZES and any(query > 1 for query, _, _ in challenge["requests"])
    sizes = [_judge_sizes(challenge, transcript)] if is_long(challenge) and (chunk or case.passed) else []
    if chunk:
        return [replace(case, name=MIXED), *sizes]
    return sizes or [case]


def _judge_values(challenge: dict, transcript: dict, expected: dict) -> Case:
    if challenge["marks"]:
        problem, _ = sight(challenge, transcript["out"], expected["out"])
        return Case(SEES, not problem, problem)
    case = compare(challenge, transcript["out"], expected["out"])
    return judge_unchanged(transcript["changed"]) if case.passed and case.name == UNCHANGED else case


def _judge_sizes(challenge: dict, transcript: dict) -> Case:
    most, largest, made = most_elements(challenge), transcript["largest"], transcript["made"]
    blocks = max(len(blocks) for _, _, blocks in challenge["requests"])
    tokens = sum(query for query, _, _ in challenge["requests"])
    message = ""
    if type(made) is not int or made < blocks:
        message = f"{made} tensors were made for a context of {blocks} blocks: use torch operations, block by block"
    elif type(largest) is not int or largest > most:
        limit = f"{TILE} * block_size * Hq * D = {most // tokens} for each query token; query tokens: {tokens}"
        message = f"a tensor of {largest} elements was made, and none may have more than {most} ({limit})"
    return Case(challenge["case"], not message, message, hint=3)


def show(challenge: dict) -> str:
    """Code that makes the inputs and calls the learner's function."""
    return show_call(challenge, "paged_attention_blockwise")
