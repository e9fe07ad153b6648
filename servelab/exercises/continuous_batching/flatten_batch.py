"""Check of `flatten_batch`: the tokens of a plan in one row, and where attention finds what belongs to each request."""

from random import Random
from typing import Any

import numpy as np

from servelab.exercise import Case, CaseSpec
from servelab.plain import NotPlain, close, decode_array, is_array, plain, type_name
from servelab.serving import FlatBatch, PagedKV, StepPlan

ANSWERS = ("flatten_batch",)
TOKENS, POSITIONS, CONTEXTS = (
    "one request behind another",
    "positions count from the request's start",
    "a context includes the new tokens",
)
SLOTS, TABLES, KEPT = "each token has its slot", "tables are padded with -1", "leaves its arguments unchanged"
CASES = (
    CaseSpec(TOKENS, hint=1, weight=2),
    CaseSpec(POSITIONS, hint=1, weight=2),
    CaseSpec(CONTEXTS, hint=1, weight=2),
    CaseSpec(SLOTS, hint=2, weight=3),
    CaseSpec(TABLES, hint=3, weight=2),
    CaseSpec(KEPT, hint=3, alone=False),
)
FIELDS = ("tokens", "query_lens", "positions", "context_lens", "slot_mapping", "block_tables")
CASE_OF = {
    "tokens": TOKENS,
    "query_lens": TOKENS,
    "positions": POSITIONS,
    "context_lens": CONTEXTS,
    "slot_mapping": SLOTS,
    "block_tables": TABLES,
}
PER_TOKEN = ("tokens", "positions", "slot_mapping")

# A block size, and requests as [known tokens, computed, scheduled, blocks]; with nothing scheduled: not in the plan
DIRECTED: tuple[tuple[int, list[list]], ...] = (
    (4, [[2, 0, 2, [1]]]),  # a whole prompt
    (4, [[4, 3, 1, [2]]]),  # a decode
    (4, [[5, 4, 1, [2, 0]]]),  # a decode that begins a block
    (4, [[9, 3, 4, [2, 0, 5]]]),  # a chunk over the end of a block, behind an earlier one
    (4, [[6, 5, 1, [2, 5]], [7, 4, 3, [0, 3]], [2, 0, 2, [4]]]),
    (4, [[3, 2, 1, [3, 1, 6]], [6, 0, 6, [2, 5]]]),  # blocks reserved ahead
    (3, [[4, 0, 0, [6, 0]], [5, 4, 1, [4, 2]], [8, 0, 0, []], [4, 3, 1, [5, 7]]]),  # two are not in the plan
    (1, [[3, 0, 3, [5, 1, 7]], [2, 1, 1, [4, 0]]]),
)


def challenges(rng: Random) -> list[dict]:
    """Directed plans, then random ones."""
    directed = [_challenge(rng, size, requests) for size, requests in DIRECTED]
    return [*directed, *(_challenge(rng, size, _requests(rng, size, n)) for size, n in ((2, 4), (16, 6), (5, 12)))]


def _challenge(rng: Random, block_size: int, requests: list[list]) -> dict:
    """With token ids, so that each token can be told from the others, and requests in no order of their names."""
    names = rng.sample("abcdefghijklmnopqrstuvwxyz", len(requests))
    ids = rng.sample(range(1000), sum(known for known, *_ in requests))
    rows = []
    for name, (known, *rest) in zip(names, requests, strict=True):
        rows.append([name, [ids.pop() for _ in range(known)], *rest])
    return {"block_size": block_size, "requests": rows}


def _requests(rng: Random, block_size: int, n: int) -> list[list]:
    """Decodes, chunks and whole prompts; every third request sits the step out."""
    blocks, made = rng.sample(range(8 * n), 8 * n), []
    for index in range(n):
        known = rng.randint(2, 5 * block_size)
        computed, scheduled = rng.choice(((known - 1, 1), (known // 2, known - known // 2), (0, known), (0, 1)))
        if index % 3 == 2:
            scheduled = 0
        held = -(-(computed + scheduled) // block_size) + rng.choice((0, 0, 2))
        made.append([known, computed, scheduled, [blocks.pop() for _ in range(held)]])
    return made


class _Pool:
    """Hands out the blocks that the challenge names, in this order."""

    def __init__(self, block_size: int, blocks: list[int]):
        self.num_blocks, self.block_size, self._left = max(blocks) + 2, block_size, list(blocks)

    @property
    def num_free(self) -> int:
        return len(self._left)

    def allocate(self, n: int) -> list[int]:
        taken, self._left = self._left[:n], self._left[n:]
        return taken

    def free(self, blocks: list[int]) -> None:
        self._left += blocks


def inputs(challenge: dict) -> tuple[StepPlan, dict[str, list[int]], dict[str, int], PagedKV]:
    """The four arguments of ``flatten_batch``."""
    size, requests = challenge["block_size"], challenge["requests"]
    kv = PagedKV(_Pool(size, [block for *_, blocks in requests for block in blocks]))
    for name, _, _, _, blocks in requests:
        kv.reserve(name, len(blocks) * size)
    plan = StepPlan({name: scheduled for name, _, _, scheduled, _ in requests if scheduled}, ["gone"])
    others = requests[::-1]  # what is known has an order of its own
    known = {name: list(tokens) for name, tokens, *_ in others}
    return plan, known, {name: computed for name, _, computed, *_ in others}, kv


def drive(challenge: dict, flatten_batch) -> dict:
    """The fields of the batch, what was returned in place of one, and which arguments are not as they were."""
    arguments, before = inputs(challenge), inputs(challenge)
    batch = flatten_batch(*arguments)
    found = {name: plain(getattr(batch, name, None)) for name in FIELDS}
    instead = "" if isinstance(batch, FlatBatch) else type_name(batch)
    return {"batch": found, "instead": instead, "changed": _changed(challenge, arguments, before)}


def _changed(challenge: dict, arguments: tuple, before: tuple) -> list[str]:
    names = [name for name, *_ in challenge["requests"]]
    pairs = zip(("plan", "tokens", "num_computed"), arguments, before, strict=False)
    changed = [name for name, now, then in pairs if now != then or list(_keys(now)) != list(_keys(then))]
    kv, was = arguments[3], before[3]
    same = kv.num_free == was.num_free and all(kv.blocks(name) == was.blocks(name) for name in names)
    return changed if same else [*changed, "kv"]


def _keys(value: StepPlan | dict) -> dict:
    return value.scheduled if isinstance(value, StepPlan) else value


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Every field is determined, in the order of the plan."""
    instead = transcript["instead"]
    problems = {TOKENS: f"expected a FlatBatch, got an object of type {str(instead)[:40]}"} if instead != "" else {}
    for name in FIELDS:
        problem = _problem(challenge, name, transcript["batch"][name], expected["batch"][name])
        if problem:
            problems.setdefault(CASE_OF[name], f"{name}: {problem}")
    changed = transcript["changed"]
    if changed:
        problems[KEPT] = f"{' and '.join(map(str, changed))} changed"
    return [Case(spec.name, spec.name not in problems, problems.get(spec.name, "")) for spec in CASES]


def _problem(challenge: dict, name: str, got: Any, want: Any) -> str:
    """How a field differs; empty if it does not."""
    if close(got, want):
        return ""
    if not is_array(want):
        return f"expected {want}, got {_shown(got)}"
    array = decode_array(want)
    try:
        found = decode_array(got)
    except NotPlain:
        return f"expected an int64 tensor of shape {list(array.shape)}, got {_shown(got)}"
    if found.shape != array.shape or found.dtype != array.dtype:
        wanted = f"expected an int64 tensor of shape {list(array.shape)}"
        return f"{wanted}, got {found.dtype} of shape {list(found.shape)}: {found.tolist()}"[:400]
    if name not in PER_TOKEN:
        return f"expected {array.tolist()}, got {found.tolist()}"[:400]
    index = int(np.argmax(array != found))
    return f"{_place(challenge, index)}: expected {array[index]}, got {found[index]}"


def _place(challenge: dict, index: int) -> str:
    """Which token of the batch this is."""
    place = index
    for name, _, _, scheduled, _ in challenge["requests"]:
        if place < scheduled:
            return f"token {index} of the batch (request {name}, token {place} of {scheduled} in this step)"
        place -= scheduled
    return f"token {index}"


def _shown(got: Any) -> str:
    if isinstance(got, dict) and "unexpected type" in got:
        return f"an object of type {got['unexpected type']}"
    if is_array(got):
        return f"a tensor: {decode_array(got).tolist()}"[:200]
    if isinstance(got, list):
        return repr(got)[:200]
    return "nothing" if got is None else f"{type(got).__name__} {got!r}"[:200]


def show(challenge: dict) -> str:
    """Code that makes the arguments and calls the learner's function."""
    rows = "".join(f"\n    {row!r}," for row in challenge["requests"])
    return (
        "from servelab.exercises.continuous_batching.flatten_batch import inputs\n"
        "# requests in the plan's order: [id, known tokens, computed, scheduled, blocks]; tokens has another\n"
        f"requests = [{rows}\n]\n"
        f'plan, tokens, num_computed, kv = inputs({{"block_size": {challenge["block_size"]}, "requests": requests}})\n'
        "flatten_batch(plan, tokens, num_computed, kv)"
    )
