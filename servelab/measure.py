"""How the cost of a block pool or a scheduler grows with its size, measured on the learner's own class.

No check looks at the clock, because times depend on the machine. Ratios of times on one machine depend on it much less:
a call that looks at the whole pool costs ten times as much on a pool of ten times the size.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from servelab.exercise import describe_error
from servelab.serving import Request, SchedulerConfig
from servelab.stepping import RecordedKV

CHUNK = 10  # blocks a call; it divides the sizes of all pools
BUDGET = 0.1  # seconds to fill one pool, and seconds to measure on it: slow answers are measured, too
ROUNDS = 20
RUNNING = 64  # requests that a scheduler is measured with


def block_pool(pool_class: type, sizes: Iterable[int] = (1_000, 10_000, 100_000)) -> None:
    """Print what a block costs that is allocated, shared, counted and freed, on pools of several sizes."""
    _print_costs("blocks in the pool", pool_class, sizes, _pool_cost)


def prefix_cache(cache_class: type) -> None:
    """Print what a hit and an eviction cost for each block: on pools of several sizes, and for prompts of several."""
    if _print_costs("blocks in the pool", cache_class, (1_000, 10_000, 100_000), _eviction_cost):
        _print_costs("blocks in the prompt", cache_class, (10, 100, 500), _hit_cost)


def scheduler(scheduler_class: type, waiting: Iterable[int] = (1_000, 10_000, 100_000)) -> None:
    """Print what a step of a scheduler costs with 64 requests running, while several numbers of requests wait."""
    _print_costs("requests that wait", scheduler_class, waiting, _step_cost, "a step")


def _print_costs(
    title: str, pool_class: type, sizes: Iterable[int], cost: Callable[[type, int], float], unit: str = "a block"
) -> bool:
    """Print one table; return whether there was one to print."""
    try:
        costs = {size: cost(pool_class, size) for size in sizes}
    except NotImplementedError:
        print(f"{pool_class.__name__} is not written yet: there is nothing to measure.")
        return False
    except Exception as error:  # the learner's code, so any error
        print(f"Nothing measured: your code raised {describe_error(error)}")
        return False
    first = next(iter(costs.values()))
    print(f"{title:>20}{f'time for {unit}':>19}   ratio to the first")
    for size, seconds in costs.items():
        print(f"{size:>20,}{seconds * 1e6:>16.2f} us{seconds / first:>21.1f}")
    return True


def _pool_cost(pool_class: type, num_blocks: int) -> float:
    pool = pool_class(num_blocks, 1)
    for _ in _within_budget(num_blocks // CHUNK // 2):
        pool.allocate(CHUNK)

    def once() -> None:
        blocks = pool.allocate(CHUNK)
        pool.share(blocks), pool.free(blocks), pool.free(blocks)
        assert all(pool.num_free > 0 for _ in range(CHUNK))

    return _fastest(once) / CHUNK


def _eviction_cost(cache_class: type, num_blocks: int) -> float:
    """On a cache that is full of free blocks: a hit in the middle of the order of eviction, then an eviction.

    Half of the blocks are evicted before the clock starts: a queue that keeps what it has deleted shows then.
    """
    cache = cache_class(num_blocks, 1)
    prompts: deque[list[int]] = deque()

    def compute(start: int) -> None:
        """Compute a prompt that nobody has seen, and leave it."""
        prompts.append(list(range(start, start + CHUNK)))
        blocks = cache.allocate(CHUNK)
        cache.insert(prompts[-1], blocks)
        cache.free(blocks)

    def once() -> None:
        prompt = prompts[len(prompts) // 2]
        blocks, _ = cache.match([*prompt, 0])
        cache.free(blocks)
        compute(prompts[-1][-1] + 1)

    for number in _within_budget(num_blocks // CHUNK, 20 * BUDGET):
        compute(number * CHUNK)
    for _ in _within_budget(num_blocks // CHUNK // 2, 10 * BUDGET):
        once()
    return _fastest(once, 10 * ROUNDS) / CHUNK


def _hit_cost(cache_class: type, num_blocks: int) -> float:
    cache = cache_class(num_blocks, 1)
    blocks = cache.allocate(num_blocks)
    cache.insert(list(range(num_blocks)), blocks)

    def once() -> None:
        hit, _ = cache.match(list(range(num_blocks + 1)))
        cache.free(hit)

    return _fastest(once) / num_blocks


def _step_cost(scheduler_class: type, waiting: int) -> float:
    server = scheduler_class(SchedulerConfig(RUNNING, 4096), RecordedKV(RUNNING * 64, 16))
    for number in range(RUNNING):
        server.add(Request(f"running {number}", 1, 1000))

    def once() -> None:
        plan = server.schedule()
        server.finish_step(plan, dict.fromkeys(plan.scheduled, 0))

    once()
    for number in _within_budget(waiting, 10 * BUDGET):
        server.add(Request(f"waiting {number}", 16, 16))
    return _fastest(once)


def _within_budget(count: int, budget: float = BUDGET) -> Iterator[int]:
    """Count up to ``count`` while there is time: at least once."""
    end = time.perf_counter() + budget
    for number in range(count):
        yield number
        if time.perf_counter() > end:
            return


def _fastest(call: Callable[[], None], rounds: int = ROUNDS) -> float:
    """The least of several times, in seconds: what disturbs a measurement only makes it longer."""
    times = []
    for _ in _within_budget(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
