"""The block table of one sequence: which blocks hold its tokens, and where in the cache each token lies."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.paged_kv import _steps as steps
from servelab.exercises.paged_kv import _tables as tables

ANSWERS = ("BlockTable",)
CASES = (
    CaseSpec("takes blocks as needed", hint=1, weight=3),
    CaseSpec("finds slots", hint=2, weight=3),
    CaseSpec("gives everything back", hint=3, weight=2),
    CaseSpec("all or nothing", hint=1, weight=2),
    CaseSpec("refuses bad ranges", hint=2, weight=1),
    CaseSpec("long runs", hint=1, weight=2),
)

# case, block_size, ids in the order in which the pool hands them out, number of tables, operations
DIRECTED = (
    ("takes blocks as needed", 4, [2, 0], 1, [["append", 0, 0], ["append", 0, 1], ["append", 0, 0]]),
    # vLLM test_decode: appending inside a block takes nothing, crossing its end takes one
    ("takes blocks as needed", 2, [3, 1, 0], 1, [["append", 0, n] for n in (1, 1, 1, 1, 1)]),
    ("takes blocks as needed", 4, [5, 2, 7, 0], 1, [["append", 0, 4], ["append", 0, 1], ["append", 0, 3]]),
    ("takes blocks as needed", 4, [6, 3, 1, 4, 0], 1, [["append", 0, 3], ["append", 0, 10], ["append", 0, 4]]),
    ("takes blocks as needed", 1, [4, 2, 0], 1, [["append", 0, 2], ["append", 0, 1]]),
    ("takes blocks as needed", 2, [9, 4, 6, 1], 2, [["append", 0, 3], ["append", 1, 2], ["append", 0, 1]]),
    ("finds slots", 4, [1], 1, [["append", 0, 3], ["slots", 0, 0, 3], ["slots", 0, 1, 2], ["slots", 0, 2, 2]]),
    (
        "finds slots",
        4,
        [5, 2, 7],
        1,
        [["append", 0, 10], ["slots", 0, 0, 10], ["slots", 0, 3, 5], ["slots", 0, 8, 9], ["slots", 0, 10, 10]],
    ),
    ("finds slots", 1, [3, 0, 8], 1, [["append", 0, 3], ["slots", 0, 0, 3]]),
    ("finds slots", 16, [7, 30, 2], 1, [["append", 0, 35], ["append", 0, 3], ["slots", 0, 14, 38]]),
    ("finds slots", 3, [4, 9], 1, [["slots", 0, 0, 0], ["append", 0, 4], ["slots", 0, 2, 4]]),
    # room in the last block is not yet a token's slot
    ("refuses bad ranges", 4, [2, 5], 1, [["append", 0, 5], ["slots", 0, 4, 6], ["slots", 0, 0, 9]]),
    (
        "refuses bad ranges",
        4,
        [2],
        1,
        [["append", 0, 3], ["slots", 0, -1, 2], ["slots", 0, 2, 1], ["slots", 0, -2, -1]],
    ),
    ("all or nothing", 2, [2], 1, [["append", 0, -1], ["append", 0, 2], ["append", 0, -1], ["slots", 0, 0, 2]]),
    ("all or nothing", 2, [1], 1, [["append", 0, 3], ["append", 0, 2], ["append", 0, 1], ["append", 0, 0]]),
    # three blocks are needed and two are there: neither is kept, and what fits is still served
    ("all or nothing", 4, [3, 8, 1], 1, [["append", 0, 2], ["append", 0, 11], ["append", 0, 10], ["slots", 0, 0, 12]]),
    ("all or nothing", 4, [3, 8, 1], 2, [["append", 0, 5], ["append", 1, 5], ["append", 1, 4], ["append", 0, 3]]),
    # vllm PR#18485, PR#25067: abort before a block was taken, abort after the end
    ("gives everything back", 4, [2, 6], 1, [["release", 0], ["append", 0, 6], ["release", 0], ["release", 0]]),
    # a preempted sequence starts again with the same table
    (
        "gives everything back",
        2,
        [5, 0, 3],
        1,
        [["append", 0, 5], ["release", 0], ["slots", 0, 0, 0], ["append", 0, 3], ["slots", 0, 0, 3], ["release", 0]],
    ),
    ("gives everything back", 2, [5, 0, 3], 2, [["append", 0, 3], ["append", 1, 1], ["release", 0], ["append", 1, 4]]),
)


def challenges(rng: Random) -> list[dict]:
    """Directed cases, smallest first, then random runs of several tables on a pool that is often empty."""
    directed = [
        {"case": case, "block_size": size, "ids": ids, "tables": count, "ops": ops}
        for case, size, ids, count, ops in DIRECTED
    ]
    sizes = ((2, 3, 10), (3, 4, 15), (1, 5, 60), (3, 8, 60), (16, 11, 60))
    return [*directed, *(_random_run(rng, *run) for run in sizes)]


def _random_run(rng: Random, block_size: int, num_blocks: int, length: int) -> dict:
    """A run that knows how long each table is, so that most ranges are good ones and many are asked for again."""
    ids = rng.sample(range(3 * num_blocks), num_blocks)
    ops: list[list] = []
    tokens = [0, 0, 0]
    for _ in range(length):
        index, choice = rng.randrange(3), rng.random()
        if choice < 0.5:
            n_tokens = rng.choice([0, 1, 1, 2, block_size, rng.randint(1, 3 * block_size)])
            ops.append(["append", index, n_tokens])
            after = [n + n_tokens * (i == index) for i, n in enumerate(tokens)]
            tokens = after if sum(-(-n // block_size) for n in after) <= num_blocks else tokens
        elif choice < 0.8:
            stop = rng.choice([tokens[index], tokens[index] + 1, 1, 1])
            ops.append(["slots", index, rng.choice([0, 0, stop // 2]), stop])
        else:
            ops.append(["release", index])
            tokens[index] = 0
    return {"case": "long runs", "block_size": block_size, "ids": ids, "tables": 3, "ops": ops}


def drive(challenge: dict, table_class) -> list[dict]:
    """Run the operations and write down each outcome, what the tables hold then, and what the pool counts."""
    return tables.Run(challenge, table_class).transcript()


def judge(challenge: dict, transcript: list, expected: list) -> list[Case]:
    """Follow the run with a model of the rules; a table may order the ids that one call took as it likes."""
    return steps.judged(challenge, tables.Referee(challenge).follow, transcript)


def show(challenge: dict) -> str:
    """The run as Python."""
    return tables.show(challenge, "BlockTable")
