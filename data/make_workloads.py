"""Write ``workloads.json``, two long-tailed workloads of the last unit: ``python data/make_workloads.py``.

Most answers are short, a few are long: w16 is 12 answers of 16 tokens, 3 of 64 and 1 of 256, all of which run at once;
w32 is twice that, through 8 slots. How many steps w32 takes depends on the order. It is the first shuffled order, over
the seeds 0, 1, 2, ..., in which static batches of 8 take 636 steps that decode and first come, first served takes 319.
"""

import heapq
import json
from itertools import count
from pathlib import Path
from random import Random

LENGTHS = {"w16": [16] * 12 + [64] * 3 + [256], "w32": [16] * 24 + [64] * 6 + [256] * 2}
SLOTS = {"w16": 16, "w32": 8}
STATIC, CONTINUOUS = 636, 319
TEXTS = (
    "Why is the KV cache so large?",
    "What does a block table hold?",
    "Explain prefill and decode.",
    "When is a request preempted?",
    "What is a prefix hit?",
    "Why do short answers wait?",
    "What does a scheduler decide?",
    "How long is a step?",
)
KINDS = ("In one sentence: ", "For a beginner: ", "With an example: ", "Step by step: ")


def static_steps(lengths: list[int], slots: int) -> int:
    """Steps that decode, in batches that nobody joins: each batch's longest answer, without its first token."""
    return sum(max(lengths[start : start + slots]) - 1 for start in range(0, len(lengths), slots))


def continuous_steps(lengths: list[int], slots: int) -> int:
    """Steps that decode, when a free slot goes to the next at once: all steps but the first, which only prefills."""
    ends = [0] * slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends) - 1


def order(lengths: list[int], seed: int) -> list[int]:
    """The lengths, shuffled."""
    shuffled = list(lengths)
    Random(seed).shuffle(shuffled)
    return shuffled


def find_seed() -> int:
    """The first seed whose order of w32 takes both numbers of steps."""
    for seed in count():
        lengths = order(LENGTHS["w32"], seed)
        if (static_steps(lengths, 8), continuous_steps(lengths, 8)) == (STATIC, CONTINUOUS):
            return seed
    raise AssertionError


def contents() -> dict:
    """What the file holds."""
    seed = find_seed()
    workloads = {name: {"slots": SLOTS[name], "max_tokens": order(lengths, seed)} for name, lengths in LENGTHS.items()}
    texts = [kind + text for kind in KINDS for text in TEXTS]
    return {"seed": seed, "workloads": workloads, "texts": texts}


def main() -> None:
    path = Path(__file__).with_name("workloads.json")
    path.write_text(json.dumps(contents(), indent=1) + "\n", encoding="utf-8")
    print(f"{path}: seed {contents()['seed']}")


if __name__ == "__main__":
    main()
