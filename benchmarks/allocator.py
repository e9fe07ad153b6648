"""Cost per block of the reference allocator and prefix cache, from 10^3 to 10^6 blocks in the pool.

    python benchmarks/allocator.py [--json]

Times are CPU times and depend on the machine. The ratios to the smallest pool should not: each repeat measures all
sizes in turn, and a ratio is the median over the repeats. Targets: a ratio of at most 1.5, and for get(64)+free(64) at
least 2 million blocks per second.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from servelab.reference.paged_kv import BlockAllocator, PrefixCache

SIZES = (10**3, 10**4, 10**5, 10**6)
BATCH = 64
REPEATS = 9
ROUNDS = 150
MAX_RATIO, MIN_BLOCKS_PER_SECOND = 1.5, 2e6

Round = Callable[[], None]


def get_and_free(pool) -> Iterator[Round]:
    """Take 64 blocks and give them back."""
    while True:
        yield lambda: pool.free(pool.allocate(BATCH))


def prompt(number: int, block_size: int) -> list[int]:
    """A prompt of 64 full blocks and one token, like no other."""
    return [number, *range(BATCH * block_size)]


def filled(num_blocks: int, block_size: int) -> tuple[PrefixCache, int]:
    """A cache of which every block is free and cached, and the number of prompts in it."""
    cache, count = PrefixCache(num_blocks, block_size), num_blocks // BATCH
    for number in range(count):
        blocks = cache.allocate(BATCH)
        cache.insert(prompt(number, block_size), blocks)
        cache.free(blocks)
    cache.allocate(num_blocks % BATCH)
    return cache, count


def hit(cache: PrefixCache, count: int, block_size: int) -> Iterator[Round]:
    """Find 64 free cached blocks and give them back; a prompt after the other, all over the pool."""
    stride, number = max(1, count * 5 // 8) | 1, 0
    while True:
        tokens = prompt(number, block_size)
        yield lambda tokens=tokens: cache.free(cache.match(tokens)[0])
        number = (number + stride) % count


def evict(cache: PrefixCache, count: int, block_size: int) -> Iterator[Round]:
    """Take 64 cached blocks from whoever used them least recently; between the rounds, cache another prompt in them."""
    number, taken = count, []

    def round_() -> None:
        taken[:] = cache.allocate(BATCH)

    while True:
        yield round_
        cache.insert(prompt(number, block_size), taken)
        cache.free(taken)
        number += 1


def nanoseconds_per_block(rounds: Iterator[Round]) -> float:
    """One repeat: CPU time of the rounds alone, not of what goes on between them."""
    spent = 0
    for _ in range(ROUNDS):
        round_ = next(rounds)
        start = time.thread_time_ns()
        round_()
        spent += time.thread_time_ns() - start
    return spent / (ROUNDS * BATCH)


def workloads(num_blocks: int, block_size: int = 16) -> dict[str, Iterator[Round]]:
    """The operations, each on a pool of its own."""
    return {
        "allocator: get(64)+free(64)": get_and_free(BlockAllocator(num_blocks, block_size)),
        "prefix cache: get(64)+free(64)": get_and_free(PrefixCache(num_blocks, block_size)),
        "prefix cache: hit on free blocks": hit(*filled(num_blocks, block_size), block_size),
        "prefix cache: eviction": evict(*filled(num_blocks, block_size), block_size),
    }


def measure() -> list[dict]:
    """One row for each operation and pool size."""
    by_size = {size: workloads(size) for size in SIZES}
    gc.collect()
    gc.disable()
    rows = []
    for name in by_size[SIZES[0]]:
        repeats = [[nanoseconds_per_block(by_size[size][name]) for size in SIZES] for _ in range(REPEATS + 1)][1:]
        for index, size in enumerate(SIZES):
            ns = statistics.median(repeat[index] for repeat in repeats)
            ratio = statistics.median(repeat[index] / repeat[0] for repeat in repeats)
            fast = "get(64)" not in name or 1e9 / ns >= MIN_BLOCKS_PER_SECOND
            row = {"operation": name, "blocks": size, "ns_per_block": ns, "ratio": ratio}
            rows.append(row | {"within_target": ratio <= MAX_RATIO and fast})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    as_json = parser.parse_args().json
    rows = measure()
    print(json.dumps(rows, indent=2) if as_json else table(rows))
    return 0 if all(row["within_target"] for row in rows) else 1


def table(rows: list[dict]) -> str:
    """The figures as text."""
    lines = [f"{'operation':34}{'blocks':>9}{'ns/block':>10}{'M blocks/s':>12}{'ratio':>7}"]
    for row in rows:
        ns, missed = row["ns_per_block"], "" if row["within_target"] else "  misses its target"
        lines.append(f"{row['operation']:34}{row['blocks']:9}{ns:10.0f}{1e3 / ns:12.2f}{row['ratio']:7.2f}{missed}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
