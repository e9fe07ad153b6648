"""How long each check takes, as a share of `import torch` on the same machine at the same time.

    python benchmarks/checks.py [UNIT ...] [--json]

A learner presses Shift+Enter and waits for this: driver and judge over all public challenges, on the reference. Each
exercise runs in a process of its own, in turn with a process that imports torch, so that both meet the same load; a
time is the median over the repeats. What an exercise has to import (its own module and the reference) does not count,
because the notebook imported it long before, and torch, where an exercise needs it, is imported beforehand too. The
target is a share of at most one half.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from servelab import exercise
from servelab.paths import ROOT, find_unit, units

REPEATS = 3
MAX_SHARE = 0.5
TORCH = "import time; start = time.perf_counter(); import torch; print(time.perf_counter() - start)"
CHECK = """
import contextlib, io, sys, time
from importlib import import_module
from servelab import exercise
from servelab.checking import check
found = exercise.find(sys.argv[1])
reference = import_module(f"servelab.reference.{found.unit}")
answers = [getattr(reference, name) for name in found.answers]
if sys.argv[2] == "torch":
    import torch
with contextlib.redirect_stdout(io.StringIO()):
    start = time.perf_counter()
    check(found.name, *answers)
    taken = time.perf_counter() - start
print(taken, "torch" if "torch" in sys.modules else "-")
"""


def run(code: str, *words: str) -> list[str]:
    """What a fresh process of this Python prints."""
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def needs_torch(name: str) -> bool:
    """Whether the check of this exercise imports torch."""
    return run(CHECK, name, "-")[1] == "torch"


def measure(name: str) -> dict:
    """One exercise's times in seconds, and their ratio."""
    uses = "torch" if needs_torch(name) else "-"
    pairs = [(float(run(TORCH)[0]), float(run(CHECK, name, uses)[0])) for _ in range(REPEATS)]
    torch, check = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {"exercise": name, "check": check, "import_torch": torch, "share": check / torch, "uses_torch": uses != "-"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("units", nargs="*", metavar="UNIT")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    chosen = [find_unit(text) for text in args.units] or units()
    records = [measure(name) for unit in chosen for name in exercise.names(unit.name)]
    if args.json:
        print(json.dumps(records, indent=1))
    else:
        print(f"{'exercise':<34}{'check':>10}{'import torch':>15}{'share':>8}")
        for record in records:
            times = f"{record['check']:>8.3f} s{record['import_torch']:>13.3f} s{record['share']:>8.2f}"
            print(f"{record['exercise']:<34}{times}{'  uses torch' * record['uses_torch']}")
    return 0 if all(record["share"] <= MAX_SHARE for record in records) else 1


if __name__ == "__main__":
    raise SystemExit(main())
