"""Makes the course's synthetic request traces: ``python data/make_traces.py [FOLDER]``.

No row of a real trace is copied. Each trace is drawn from published summary statistics of the Azure LLM inference
traces 2023 (see ``data/traces/README.md``): the prompt and output lengths follow their quantiles, and the arrivals
follow their rate and their coefficient of variation (CV, the standard deviation of the gaps between arrivals over their
mean).

The bytes are the same on every platform: only ``random.Random.random`` draws (its stream is guaranteed), every float is
rounded to a whole token or microsecond before it is used further, and sums are exact (``math.fsum``, integers).
"""

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

LEVELS = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
START = datetime(2024, 1, 1)
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
MICROSECONDS = 1_000_000

Quantiles = tuple[float, float, float, float, float, float]


@dataclass(frozen=True)
class Recipe:
    """What one trace is made from; quantiles are the minimum, p10, p50, p90, p99 and the maximum.

    The minimum is chosen, the others are published: it sets the spread of the logarithm below p10.
    """

    seed: int
    num_requests: int
    rate: float
    prompt: Quantiles
    output: Quantiles
    gaps: Callable[[random.Random, int], list[float]]


def inverse_cdf(quantiles: Quantiles, u: float) -> float:
    """The value at level ``u`` in [0, 1]: straight lines between the quantiles, in the value's logarithm."""
    for k in range(1, len(LEVELS)):
        if u <= LEVELS[k] or k == len(LEVELS) - 1:
            share = (u - LEVELS[k - 1]) / (LEVELS[k] - LEVELS[k - 1])
            low, high = quantiles[k - 1], quantiles[k]
            return low * (high / low) ** share
    raise AssertionError("unreachable")


def shuffled(rng: random.Random, values: list) -> list:
    """``values`` in random order; sorted by drawn keys, as only ``random()`` has a guaranteed stream."""
    keys = [rng.random() for _ in values]
    return [values[i] for i in sorted(range(len(values)), key=keys.__getitem__)]


def lengths(rng: random.Random, quantiles: Quantiles, n: int) -> list[int]:
    """``n`` token counts at evenly spaced levels, in random order: their quantiles are the given ones."""
    return shuffled(rng, [round(inverse_cdf(quantiles, i / (n - 1))) for i in range(n)])


def drifting_gaps(rng: random.Random, n: int) -> list[float]:
    """Nearly Poisson gaps: exponentials to the power 1.05, whose mean drifts by +-36 % in two slow waves; CV 1.09."""
    gaps = shuffled(rng, [(-math.log(1 - (i + 0.5) / n)) ** 1.05 for i in range(n)])
    return [gap * (1 + 0.36 * triangle(2 * i / n)) for i, gap in enumerate(gaps)]


def triangle(phase: float) -> float:
    """A wave between -1 and 1 with period 1."""
    return 4 * abs(phase % 1 - 0.5) - 1


def bursty_gaps(rng: random.Random, n: int) -> list[float]:
    """Bursts between long silences: mostly short gaps, and seven idle spells, which carry nearly all of the CV."""
    idle = [181.0, 132.0, 85.0, 60.0, 40.0, 30.0, 20.0]
    short: Quantiles = (0.004, 0.02, 0.07, 0.25, 1.2, 5.0)
    n_short = n - len(idle)
    return shuffled(rng, [inverse_cdf(short, i / (n_short - 1)) for i in range(n_short)] + idle)


def arrivals(recipe: Recipe, rng: random.Random) -> list[int]:
    """Arrival times in microseconds from the first request, at the recipe's mean rate."""
    gaps = recipe.gaps(rng, recipe.num_requests - 1)
    scale = len(gaps) * MICROSECONDS / recipe.rate / math.fsum(gaps)
    times = [0]
    for gap in gaps:
        times.append(times[-1] + round(gap * scale))
    return times


def build(recipe: Recipe) -> bytes:
    """The trace as the bytes of its CSV file."""
    rng = random.Random(recipe.seed)
    times = arrivals(recipe, rng)
    prompts = lengths(rng, recipe.prompt, recipe.num_requests)
    outputs = lengths(rng, recipe.output, recipe.num_requests)
    stamps = [(START + timedelta(microseconds=t)).strftime("%Y-%m-%d %H:%M:%S.%f") + "0" for t in times]
    rows = [f"{stamp},{p},{o}" for stamp, p, o in zip(stamps, prompts, outputs, strict=True)]
    return ("\n".join([HEADER, *rows]) + "\n").encode("ascii")


RECIPES = {
    "conv": Recipe(
        seed=2023,
        num_requests=10_000,
        rate=5.53,
        prompt=(64, 207, 1020, 2734, 4142, 14050),
        output=(16, 54, 129, 424, 601, 1000),
        gaps=drifting_gaps,
    ),
    "code": Recipe(
        seed=2024,
        num_requests=2_000,
        rate=2.57,
        prompt=(50, 147, 1469, 5188, 7436, 7437),
        output=(6, 7, 13, 55, 251, 1899),
        gaps=bursty_gaps,
    ),
}


def main(folder: Path) -> None:
    """Write every trace into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, recipe in RECIPES.items():
        path = folder / f"{name}.csv"
        path.write_bytes(build(recipe))
        print(f"{path}: {recipe.num_requests} requests, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "traces")
