"""Forking a sequence, and copy-on-write: the bookkeeping in `ForkableTable`, the data in `copy_blocks`.

Most challenges are runs of tables, as in `block_table`; with ``data``, the driver also does what an engine does after
every append: it moves the blocks, then writes the new tokens' keys and values. A challenge with ``shape`` gives
`copy_blocks` a cache of its own. The runs of "copies on write" also test what becomes of a copy that was made.
"""

from random import Random

import numpy as np

from servelab import plain
from servelab.exercise import Case, CaseSpec
from servelab.exercises.paged_kv import _steps as steps
from servelab.exercises.paged_kv import _tables as tables

ANSWERS = ("ForkableTable", "copy_blocks")
IN_PLACE = "puts the copy in place"
CASES = (
    CaseSpec("forks share", hint=1, weight=2),
    CaseSpec("copies on write", hint=2, weight=2),
    CaseSpec(IN_PLACE, hint=3, weight=2),
    CaseSpec("gives everything back", hint=1, weight=1),
    CaseSpec("copies only when needed", hint=2, weight=3),
    CaseSpec("all or nothing", hint=3, weight=2),
    CaseSpec("moves the data", hint=3, weight=2),
    CaseSpec("long runs", hint=3, weight=1),
)

# case, block_size, ids in the order in which the pool hands them out, operations
DIRECTED = (
    ("forks share", 4, [3, 1], [["append", 0, 3], ["fork", 0], ["slots", 1, 0, 3]]),
    ("forks share", 2, [3, 1, 0], [["fork", 0], ["append", 1, 1], ["append", 0, 3]]),
    ("forks share", 2, [4, 0, 7], [["append", 0, 4], ["fork", 0], ["fork", 1], ["fork", 0], ["slots", 2, 1, 4]]),
    ("copies on write", 4, [3, 1, 5], [["append", 0, 2], ["fork", 0], ["append", 1, 1], ["append", 1, 1]]),
    ("copies on write", 4, [3, 1, 5], [["append", 0, 3], ["fork", 0], ["append", 0, 1], ["append", 1, 1]]),
    (
        "copies on write",
        4,
        [5, 2, 7, 0],
        [["append", 0, 6], ["fork", 0], ["fork", 0], ["append", 1, 2], ["append", 0, 1], ["append", 2, 1]],
    ),
    ("copies on write", 4, [5, 2, 7, 0, 1], [["append", 0, 5], ["fork", 0], ["append", 1, 8], ["append", 0, 1]]),
    ("copies on write", 4, [5, 2, 7], [["append", 0, 1], ["fork", 0], ["fork", 1], ["append", 2, 1], ["append", 1, 1]]),
    # copying the shared prompt as well is what a fork is there to avoid
    ("copies only when needed", 2, [5, 2, 7, 0, 1], [["append", 0, 2], ["fork", 0], ["append", 1, 1]]),
    # the child's own block must not appear in the parent's table
    ("copies only when needed", 4, [6, 2, 5], [["append", 0, 4], ["fork", 0], ["append", 1, 1], ["append", 0, 1]]),
    ("copies only when needed", 4, [5, 2], [["append", 0, 3], ["fork", 0], ["append", 1, 0], ["append", 0, 0]]),
    ("copies only when needed", 4, [5, 2, 7], [["append", 0, 3], ["append", 0, 1], ["append", 0, 2]]),
    ("copies only when needed", 4, [3, 1], [["append", 0, 2], ["fork", 0], ["append", 1, -1], ["append", 1, 1]]),
    ("copies only when needed", 4, [3, 1], [["append", 0, 2], ["fork", 0], ["append", 0, -2], ["append", 0, 1]]),
    (
        "copies only when needed",
        4,
        [5, 2, 7, 0, 1],
        [["append", 0, 6], ["fork", 0], ["append", 0, 1], ["append", 1, 1], ["append", 0, 2], ["append", 1, 4]],
    ),
    ("copies only when needed", 4, [5, 2, 7], [["append", 0, 2], ["fork", 0], ["release", 0], ["append", 1, 1]]),
    ("copies only when needed", 4, [5, 2, 7], [["append", 0, 2], ["fork", 0], ["release", 1], ["append", 0, 1]]),
    ("copies only when needed", 1, [5, 2, 7], [["append", 0, 1], ["fork", 0], ["append", 1, 1], ["append", 0, 1]]),
    ("all or nothing", 4, [3], [["append", 0, 2], ["fork", 0], ["append", 1, 1], ["append", 0, 1]]),
    # one block is free: enough for the copy or for the new block, not for both
    ("all or nothing", 4, [3, 1], [["append", 0, 2], ["fork", 0], ["append", 1, 3], ["append", 1, 2]]),
    ("all or nothing", 4, [3, 1, 6], [["append", 0, 3], ["fork", 0], ["append", 1, 6], ["append", 1, 5]]),
    # vllm#1584 (a double free after beams that share blocks) and vllm PR#3347 (one holder for each sequence and block)
    ("gives everything back", 2, [3, 1, 6], [["append", 0, 3], ["fork", 0], ["release", 0], ["release", 1]]),
    (
        "gives everything back",
        2,
        [3, 1, 6, 4],
        [
            ["append", 0, 3],
            ["fork", 0],
            ["fork", 1],
            ["append", 1, 1],
            ["release", 1],
            ["release", 1],
            ["release", 0],
            ["append", 2, 1],
            ["release", 2],
        ],
    ),
    ("moves the data", 2, [1, 0], [["append", 0, 1], ["fork", 0], ["append", 1, 1], ["append", 0, 1]]),
    ("moves the data", 4, [6, 2, 5, 0], [["append", 0, 7], ["fork", 0], ["append", 0, 1], ["append", 1, 3]]),
)
COPIES: tuple[tuple[list[int], list[list[int]]], ...] = (
    ([2, 2, 1, 1], [[0, 1]]),
    ([3, 2, 1, 2], []),
    ([7, 4, 2, 3], [[5, 1], [2, 6], [5, 0]]),
)


def challenges(rng: Random) -> list[dict]:
    """Copies alone, then directed runs, smallest first, then random runs with data."""
    moved = [{"case": "moves the data", "shape": shape, "copies": copies} for shape, copies in COPIES]
    directed = [
        {"case": case, "block_size": size, "ids": ids, "tables": 1, "ops": ops, "data": case == "moves the data"}
        for case, size, ids, ops in DIRECTED
    ]
    sizes = ((2, 5, 8), (4, 6, 12), (2, 9, 60), (4, 14, 60), (5, 7, 60))
    return [*moved, *directed, *(_random_run(rng, *run) for run in sizes)]


def _random_run(rng: Random, block_size: int, num_blocks: int, length: int) -> dict:
    ids = rng.sample(range(2 * num_blocks), num_blocks)
    ops: list[list] = [["append", 0, block_size + 1]]
    count, alive = 1, [0]
    for _ in range(length):
        index, choice = rng.choice(alive), rng.random()
        if choice < 0.6:
            ops.append(["append", index, rng.choice([0, 1, 1, 1, 2, block_size, 2 * block_size])])
        elif choice < 0.85:
            ops.append(["fork", index])
            alive.append(count)
            count += 1
        else:
            ops.append(["release", index])
        if len(alive) > 4:
            ops.append(["release", alive.pop(rng.randrange(2))])
    return {"case": "long runs", "block_size": block_size, "ids": ids, "tables": 1, "ops": ops, "data": True}


def drive(challenge: dict, table_class, copy_blocks) -> dict:
    """Run the operations; with data, keep the caches as an engine would and read every table's tokens at the end."""
    if "shape" in challenge:
        return _drive_copies(challenge, copy_blocks)
    run = tables.Run(challenge, table_class)
    if not challenge["data"]:
        return {"run": run.transcript()}
    caches = _Caches(challenge, copy_blocks)
    return {"run": run.transcript(caches.written), "data": [steps.value(caches.read, table) for table in run.tables]}


def _copied(copy_blocks, cache, copies: list) -> dict:
    return steps.attempt(copy_blocks, cache[0], cache[1], [tuple(pair) for pair in copies])


def _drive_copies(challenge: dict, copy_blocks) -> dict:
    import torch

    cache = torch.from_numpy(_numbered(challenge["shape"]))
    outcome = _copied(copy_blocks, cache, challenge["copies"])
    return outcome | {"cache": plain.plain(cache)}


def _numbered(shape: list[int]) -> np.ndarray:
    """Two caches of ``shape`` in which no number occurs twice."""
    return np.arange(2 * np.prod(shape), dtype="float32").reshape(2, *shape)


class _Caches:
    """Keys and values of one number a token: the n-th token that a run writes has key n and value -n."""

    def __init__(self, challenge: dict, copy_blocks):
        import torch

        self.cache = torch.zeros(2, max(challenge["ids"]) + 1, challenge["block_size"], 1, 1)
        self.copy_blocks, self.count = copy_blocks, 0

    def written(self, table, n_tokens: int, copies: list) -> dict:
        """What an engine does after an append: move the blocks, then write the new tokens."""
        pairs = isinstance(copies, list) and all(isinstance(pair, list) for pair in copies)  # if not, the judge says so
        outcome = _copied(self.copy_blocks, self.cache, copies if pairs else [])
        keys = list(range(self.count + 1, self.count + n_tokens + 1))
        self.count += n_tokens
        steps.attempt(self._write, table, n_tokens, keys)  # a broken table shows in the run
        return {"copy_blocks": outcome}

    def _write(self, table, n_tokens: int, keys: list[int]) -> None:
        flat, new = self.cache.view(2, -1), self.cache.new_tensor(keys)
        flat[:, self._slots(table)[table.num_tokens - n_tokens :]] = flat.new_tensor([[1], [-1]]) * new

    def read(self, table) -> list:
        """The keys and the values of a table's tokens."""
        return self.cache.view(2, -1)[:, self._slots(table)].int().tolist()

    def _slots(self, table) -> list[int]:
        size = self.cache.shape[2]
        return [table.blocks[position // size] * size + position % size for position in range(table.num_tokens)]


class Referee(tables.Referee):
    """The rules of tables, and beside them the tokens that every table has to read back."""

    def __init__(self, challenge: dict):
        super().__init__(challenge)
        self.tokens: list[list[int]] = [[] for _ in self.tables]
        self.count = 0

    def append(self, where: str, outcome: dict, index: int, n_tokens: int) -> None:
        super().append(where, outcome, index, n_tokens)
        if "copy_blocks" in outcome:
            pairs = steps.shown_pairs(outcome["returned"])
            steps.require_done(f"copy_blocks(k_cache, v_cache, {pairs}), after {where}", outcome["copy_blocks"])
        if "returned" in outcome:
            self.tokens[index] += range(self.count + 1, self.count + n_tokens + 1)
            self.count += n_tokens

    def fork(self, where: str, outcome: dict, index: int) -> None:
        super().fork(where, outcome, index)
        self.tokens.append(list(self.tokens[index]))

    def release(self, where: str, outcome: dict, index: int) -> None:
        super().release(where, outcome, index)
        self.tokens[index] = []

    def follow_with_data(self, transcript: dict) -> None:
        self.follow(transcript["run"])
        for index, (tokens, got) in enumerate(zip(self.tokens, transcript["data"], strict=True)):
            for name, due, read in zip(("key", "value"), (tokens, [-n for n in tokens]), got, strict=True):
                wrong = next((i for i, pair in enumerate(zip(due, read, strict=True)) if pair[0] != pair[1]), None)
                if wrong is not None:
                    where = f"after the last step, at position {wrong} of t{index}"
                    raise steps.Broken(f"{where}: expected the {name} {due[wrong]} in the cache, got {read[wrong]}")


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Follow a run with a model of the rules; compare caches with what the copies had to leave."""
    if "shape" in challenge:
        return steps.judged(challenge, lambda given: _follow_copies(challenge, given), transcript)
    referee = Referee(challenge)
    if challenge["data"]:
        return steps.judged(challenge, referee.follow_with_data, transcript)
    if challenge["case"] == "copies on write":
        return _judge_copying(referee, transcript["run"])
    return steps.judged(challenge, lambda given: referee.follow(given["run"]), transcript)


def _judge_copying(referee: Referee, run: list) -> list[Case]:
    """Two cases: whether a copy was made where one was due, and all the rest about it."""
    try:
        referee.follow(run)
    except steps.Broken as broken:
        if isinstance(broken, tables.Misjudged) or not referee.copies:
            early = referee.copies > 1 or isinstance(broken, tables.Needless)
            missed = "the run broke before its end" if early else "no copy was made"
            return [Case("copies on write", False, str(broken)), Case(IN_PLACE, False, f"not reached: {missed}")]
        return [Case("copies on write", True), Case(IN_PLACE, False, str(broken))]
    return [Case("copies on write", True), Case(IN_PLACE, True)]


def _follow_copies(challenge: dict, transcript: dict) -> None:
    where = _call(challenge)
    steps.require_done(where, transcript)
    steps.require_unchanged(where, transcript)
    old, got = _numbered(challenge["shape"]), plain.decode_array(transcript["cache"])
    sources = {destination: source for source, destination in challenge["copies"]}
    for index, name in enumerate(("k_cache", "v_cache")):
        for block in range(len(old[index])):
            source = sources.get(block, block)
            if (got[index, block] != old[index, source]).any():
                due = "to be as before" if source == block else f"to be a copy of block {source}"
                raise steps.Broken(f"after {where}: expected {name}[{block}] {due}; it is not")


def _call(challenge: dict) -> str:
    return f"copy_blocks(cache[0], cache[1], {steps.shown_pairs(challenge['copies'])})"


def show(challenge: dict) -> str:
    """The run as Python."""
    if "shape" in challenge:
        size, shape = 2 * int(np.prod(challenge["shape"])), ", ".join(map(str, challenge["shape"]))
        return f"cache = torch.arange({size}.0).reshape(2, {shape})  # k_cache and v_cache\n{_call(challenge)}"
    text = tables.show(challenge, "ForkableTable")
    if challenge["data"]:
        text += "\n# after every append: copy_blocks, then the new tokens are written; the n-th has key n and value -n"
    return text
