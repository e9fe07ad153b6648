"""How long real ranks take to start, in units of `import torch`, and what gloo costs on this machine.

    python benchmarks/ranks.py [--sizes 2 4 8] [--json]

A start is a whole `Cluster(W).run` of an empty function, from call to result: the first one of a kernel, and the
median of the later ones. Each is divided by the time of `import torch` in a fresh process, measured in turn with it. A
message of n bytes takes alpha + n / bandwidth: both are fitted, by relative least squares, to the 10th percentiles of
one-way times between two ranks; "untraced" calls the process group underneath torch.distributed, so the difference is
what recording a call costs. Target: a later start of at most half an `import torch` for W = 4.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TARGET = 0.5
REPEATS = 5
MESSAGES = [8, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23]  # bytes
FIRST_START = """
import sys, time
from servelab.ranks import Cluster
start = time.perf_counter()
Cluster(int(sys.argv[1]), backend="gloo", start_method=sys.argv[2]).run(int)
print(time.perf_counter() - start)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from servelab.ranks import pool

    starts = [start_up(size, method) for method in dict.fromkeys([pool.START_METHOD, "spawn"]) for size in args.sizes]
    links = [link("traced", send_and_receive), link("untraced", send_and_receive_untraced)]
    if args.json:
        print(json.dumps({"starts": starts, "links": links}))
    else:
        show(starts, links)
    judged = [row["later"] for row in starts if row["world_size"] == 4 and row["method"] == pool.START_METHOD]
    return 0 if all(ratio <= TARGET for ratio in judged) else 1


def show(starts: list[dict], links: list[dict]) -> None:
    print("start of Cluster(W).run, in units of `import torch`")
    for row in starts:
        print(
            f"  {row['method']:10} W={row['world_size']}: first {row['first']:.2f}, later {row['later']:.3f}"
            f"  (import torch {row['import_torch_s']:.2f} s)"
        )
    for row in links:
        print(
            f"gloo, two ranks, {row['name']}: alpha {row['alpha_us']:.0f} us, "
            f"{row['gigabytes_per_second']:.2f} GB/s, largest residual {row['residual']:.0%}"
        )


# Start


def start_up(world_size: int, method: str) -> dict:
    """A first and a later start as multiples of `import torch`."""
    from servelab.ranks import Cluster

    first = [sys.executable, "-c", FIRST_START, str(world_size), method]
    imports, firsts = [], []
    for _ in range(3):
        imports.append(seconds_of([sys.executable, "-c", "import torch"]))
        firsts.append(float(subprocess.run(first, env=environment(), stdout=subprocess.PIPE, check=True).stdout))
    cluster, laters = Cluster(world_size, backend="gloo", start_method=method), []
    cluster.run(int)
    for _ in range(REPEATS):
        start = time.perf_counter()
        cluster.run(int)
        laters.append(time.perf_counter() - start)
    unit = statistics.median(imports)
    return {
        "method": method,
        "world_size": world_size,
        "import_torch_s": round(unit, 3),
        "first": round(statistics.median(firsts) / unit, 3),
        "later": round(statistics.median(laters) / unit, 3),
    }


def seconds_of(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - start


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}


# Link


def link(name: str, exchange) -> dict:
    """Alpha and bandwidth of messages between two ranks."""
    import numpy as np

    from servelab.ranks import Cluster

    times = np.array(Cluster(2, backend="gloo").run(one_way_times, exchange, MESSAGES).values[0])
    rows = np.stack([np.ones(len(MESSAGES)), np.array(MESSAGES)], axis=1) / times[:, None]
    (alpha, beta), *_ = np.linalg.lstsq(rows, np.ones(len(MESSAGES)), rcond=None)
    return {
        "name": name,
        "alpha_us": round(alpha * 1e6, 1),
        "gigabytes_per_second": round(1e-9 / beta, 3),
        "residual": round(float(np.abs(rows @ [alpha, beta] - 1).max()), 3),
        "one_way_us": {str(size): round(float(t) * 1e6, 1) for size, t in zip(MESSAGES, times, strict=True)},
    }


def one_way_times(exchange, sizes: list[int]) -> list[float]:
    """The 10th percentile of half a round trip, for each size."""
    import torch
    import torch.distributed as dist

    found = []
    for size in sizes:
        buffer, trips = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(max(20, min(400, (1 << 26) // size))):
            start = time.perf_counter()
            for sender in (0, 1):
                exchange(buffer, dist.get_rank() == sender)
            trips.append((time.perf_counter() - start) / 2)
        found.append(sorted(trips)[len(trips) // 10])
    return found


def send_and_receive(buffer, sends: bool) -> None:
    import torch.distributed as dist

    peer = 1 - dist.get_rank()
    dist.send(buffer, peer) if sends else dist.recv(buffer, peer)


def send_and_receive_untraced(buffer, sends: bool) -> None:
    import torch.distributed as dist

    group, peer = dist.group.WORLD, 1 - dist.get_rank()
    (group.send([buffer], peer, 0) if sends else group.recv([buffer], peer, 0)).wait()


if __name__ == "__main__":
    sys.exit(main())
