"""The block allocator: a pool of ids with reference counts.

An operation names a block either by its *grant*, ``[g, i]``: the i-th id that the g-th ``allocate`` of the run
returned, so that a challenge can be written without knowing which ids an allocator will choose; or, to name ids that
no allocator can have given, by the number itself. ``["another", n]`` makes a second pool of ``n`` blocks, of which
nothing is asked.
"""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.paged_kv import _steps as steps

ANSWERS = ("BlockAllocator",)
CASES = (
    CaseSpec("hands out free blocks", hint=1, weight=2),
    CaseSpec("all or nothing", hint=2, weight=2),
    CaseSpec("counts holders", hint=3, weight=3),
    CaseSpec(steps.UNCHANGED, hint=2, weight=1),
    CaseSpec("refuses misuse", hint=2, weight=3),
    CaseSpec("long runs", hint=3, weight=3),
)


def _one_bad_name(call: str, bad: list | int) -> list[list]:
    """A call with two good names and a bad one in each place."""
    good = [[0, 0], [0, 1]]
    refused = [[call, names] for names in steps.with_one_bad(good, bad)]
    return [["allocate", 3], ["share", good], ["free", [[0, 2]]], *refused]


DIRECTED: tuple[tuple[str, int, list[list]], ...] = (
    ("hands out free blocks", 1, [["allocate", 0], ["allocate", 1], ["free", [[1, 0]]], ["allocate", 1]]),
    ("hands out free blocks", 5, [["allocate", 3], ["allocate", 2], ["free", [[0, 1], [1, 1]]], ["allocate", 2]]),
    ("hands out free blocks", 2, [["share", []], ["free", []], ["allocate", 2]]),
    # a second pool has blocks of its own
    ("hands out free blocks", 2, [["allocate", 1], ["another", 2], ["allocate", 1], ["allocate", 1]]),
    ("all or nothing", 1, [["allocate", 2], ["allocate", 1], ["allocate", 1], ["allocate", 0]]),
    # vLLM tests/v1/core, test_prefill_not_enough_free_blocks: a failed allocation leaves every reference count alone
    ("all or nothing", 4, [["allocate", 2], ["allocate", 3], ["allocate", 2], ["allocate", 1]]),
    # vllm test_prefill: two holders of a prefix; the blocks are free after the second has left
    (
        "counts holders",
        3,
        [["allocate", 2], ["share", [[0, 1]]], ["free", [[0, 0], [0, 1]]], ["allocate", 2], ["free", [[0, 1]]]],
    ),
    # a block that one of two holders gave back must not be handed to a third
    ("counts holders", 2, [["allocate", 2], ["share", [[0, 0]]], ["free", [[0, 0]]], ["allocate", 1]]),
    (
        "counts holders",
        4,
        [["allocate", 1], *[["share", [[0, 0]]]] * 3, *[["free", [[0, 0]]]] * 4, ["allocate", 4]],
    ),
    # the worked example gives one list to free twice; whichever ids there are, one of these two lists is not sorted
    (steps.UNCHANGED, 2, [["allocate", 2], ["share", [[0, 0], [0, 1]]], ["free", [[0, 0], [0, 1]]]]),
    (steps.UNCHANGED, 2, [["allocate", 2], ["share", [[0, 1], [0, 0]]], ["free", [[0, 1], [0, 0]]]]),
    ("refuses misuse", 2, [["free", [0]], ["share", [1]], ["allocate", 2]]),
    # vllm#1584, "Double free! ref_count=0": raise, never return silently
    ("refuses misuse", 3, [["allocate", 2], ["free", [[0, 0]]], ["free", [[0, 0]]], ["allocate", 2]]),
    # atomic: the first id is good, the second is not
    (
        "refuses misuse",
        4,
        [["allocate", 3], ["free", [[0, 2]]], ["free", [[0, 0], [0, 2]]], ["share", [[0, 1], [0, 2]]]],
    ),
    # vllm#42571: the same block twice in one list, held once or held twice
    (
        "refuses misuse",
        3,
        [
            ["allocate", 2],
            ["free", [[0, 1], [0, 1]]],
            ["share", [[0, 0]]],
            ["free", [[0, 0], [0, 0]]],
            ["share", [[0, 1], [0, 1]]],
            ["free", [[0, 0], [0, 1]]],
        ],
    ),
    # Python's negative indices, and ids past the end; every block is held, so only the ids are wrong
    (
        "refuses misuse",
        2,
        [["allocate", 2], ["free", [-1]], ["share", [-2]], ["free", [2]], ["share", [[0, 0], 7]], ["ref_count", -1]],
    ),
    (
        "refuses misuse",
        2,
        [["ref_count", 2], ["ref_count", 9], ["ref_count", 1], ["allocate", -1], ["allocate", 1], ["allocate", -2]],
    ),
    # atomic, wherever the bad name is: a free block, ids that do not exist, a block named twice
    *(
        ("refuses misuse", 4, _one_bad_name(call, bad))
        for call in ("free", "share")
        for bad in ([0, 2], 4, -1, [0, 0], [0, 1])
    ),
)


def challenges(rng: Random) -> list[dict]:
    """Directed cases, smallest first, then random runs that keep the pool near empty."""
    directed = [
        {"case": case, "num_blocks": blocks, "block_size": 16, "ops": [list(op) for op in ops]}
        for case, blocks, ops in DIRECTED
    ]
    return [*directed, *(_random_run(rng, *run) for run in ((2, 10), (3, 15), (3, 60), (7, 60), (24, 60)))]


def _random_run(rng: Random, num_blocks: int, length: int) -> dict:
    """A run of which a model knows what is legal: mostly calls that must succeed, some that must be refused."""
    ops: list[list] = []
    holders: dict[tuple[int, int], int] = {}
    for _ in range(length):
        held = [name for name, count in holders.items() if count]
        gone = [name for name, count in holders.items() if not count]
        free = num_blocks - len(held)
        if not held or rng.random() < 0.4:
            n, grant = rng.randint(0, num_blocks // 2 + 1), sum(op[0] == "allocate" for op in ops)
            ops.append(["allocate", n])
            holders |= {(grant, i): 1 for i in range(n) if n <= free}
            continue
        named = rng.sample(held, rng.randint(1, min(4, len(held))))
        call, wrong = rng.choice(["free", "free", "share"]), rng.random() < 0.2
        ops.append([call, [list(name) for name in named]])
        if wrong:
            # one bad id among good ones: an id that does not exist, or one named twice
            ops[-1][1].insert(rng.randint(0, len(named)), rng.choice([-1, num_blocks, list(named[0])]))
            continue
        for name in named:
            holders[name] += 1 if call == "share" else -1
        for name in gone[:-8]:
            del holders[name]
    return {"case": "long runs", "num_blocks": num_blocks, "block_size": 16, "ops": ops}


def _resolve(names: list, grants: list) -> list[int]:
    return [name if isinstance(name, int) else grants[name[0]][name[1]] for name in names]


def _another(allocator_class, num_blocks: int, block_size: int) -> bool:
    return allocator_class(num_blocks, block_size) is not None


def _call(name: str, pool, argument):
    return getattr(pool, name)(argument)


def drive(challenge: dict, allocator_class) -> list[dict]:
    """Run the operations and write down each outcome and what the pool then says about itself."""
    pool = allocator_class(challenge["num_blocks"], challenge["block_size"])
    transcript = [steps.pool_state(pool, challenge["num_blocks"])]
    grants: list = []
    for name, argument in challenge["ops"]:
        try:
            argument = argument if isinstance(argument, int) else _resolve(argument, grants)
        except (IndexError, TypeError):  # an earlier allocation went wrong: the judge stops there
            break
        if name == "another":
            outcome = steps.attempt(_another, allocator_class, argument, challenge["block_size"])
        else:
            outcome = steps.attempt(_call, name, pool, argument)
        if name == "allocate":
            returned = outcome.get("returned")
            grants.append(returned if isinstance(returned, list) else [])
        transcript.append(outcome | steps.pool_state(pool, challenge["num_blocks"]))
    return transcript


class Referee:
    """The rules of a block pool: how many hold each block."""

    def __init__(self, challenge: dict):
        self.challenge, self.holders = challenge, [0] * challenge["num_blocks"]
        self.grants: list[list[int]] = []

    def follow(self, transcript: list) -> None:
        """Follow a run. Raises `Broken` at the first step that breaks a rule."""
        steps.require_state(f"after {_made(self.challenge)}", self.holders, steps.entry(transcript, 0))
        lines = zip(self.challenge["ops"], _lines(self.challenge), strict=True)
        for step, ((name, argument), line) in enumerate(lines, start=1):
            outcome = steps.entry(transcript, step)
            resolved = argument if isinstance(argument, int) else _resolve(argument, self.grants)
            where = steps.step(step, line, None if isinstance(resolved, int) else resolved)
            getattr(self, name)(where, resolved, outcome)
            steps.require_state(f"after {where}", self.holders, outcome)
            if self.challenge["case"] == steps.UNCHANGED:
                steps.require_unchanged(where, outcome)

    def allocate(self, where: str, n: int, outcome: dict) -> None:
        free = [block for block, count in enumerate(self.holders) if count == 0]
        self.grants.append([])
        if n < 0:
            steps.require_raised(where, "ValueError", outcome)
        elif n > len(free):
            steps.require_raised(where, "OutOfBlocks", outcome)
        else:
            self.grants[-1] = steps.require_granted(where, n, free, outcome)
            for block in self.grants[-1]:
                self.holders[block] = 1

    def share(self, where: str, blocks: list[int], outcome: dict) -> None:
        self._change(where, blocks, +1, outcome)

    def free(self, where: str, blocks: list[int], outcome: dict) -> None:
        self._change(where, blocks, -1, outcome)

    def _change(self, where: str, blocks: list[int], sign: int, outcome: dict) -> None:
        known = all(0 <= block < len(self.holders) for block in blocks)
        if known and len(set(blocks)) == len(blocks) and all(self.holders[block] for block in blocks):
            steps.require_done(where, outcome)
            for block in blocks:
                self.holders[block] += sign
        else:
            steps.require_raised(where, "ValueError", outcome)

    def ref_count(self, where: str, block: int, outcome: dict) -> None:
        steps.require_ref_count(where, self.holders, block, outcome)

    def another(self, where: str, n: int, outcome: dict) -> None:
        steps.require_done(where, outcome)


def judge(challenge: dict, transcript: list, expected: list) -> list[Case]:
    """Follow the run with a model of the rules; any choice of ids is right as long as the rules hold."""
    return steps.judged(challenge, Referee(challenge).follow, transcript)


def show(challenge: dict) -> str:
    """The run as Python; ``g0`` is what the first ``allocate`` returned."""
    return steps.listing([f"pool = {_made(challenge)}"], _lines(challenge))


def _made(challenge: dict) -> str:
    return f"BlockAllocator(num_blocks={challenge['num_blocks']}, block_size={challenge['block_size']})"


def _lines(challenge: dict) -> list[str]:
    lines, grants = [], 0
    for name, argument in challenge["ops"]:
        if name == "allocate":
            lines.append(f"g{grants} = pool.allocate({argument})")
            grants += 1
        elif name == "another":
            lines.append(f"another = {_made({**challenge, 'num_blocks': argument})}")
        elif isinstance(argument, int):
            lines.append(f"pool.{name}({argument})")
        else:
            named = ", ".join(str(b) if isinstance(b, int) else f"g{b[0]}[{b[1]}]" for b in argument)
            lines.append(f"pool.{name}([{named}])")
    return lines
