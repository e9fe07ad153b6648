"""What a step of the reference schedulers costs, while 10^3 to 10^5 requests wait; and the long run of the last check.

    python benchmarks/scheduler.py [--json]

64 requests run; about two of them end in each step and two others join. Times are CPU times and depend on the machine.
The ratios to the shortest queue should not: each repeat measures all queues in turn, and a ratio is the median over the
repeats. Targets: a ratio of at most 1.5, and 10,000 requests of the trace driven and judged in at most ten times what
`import torch` takes, the median of three pairs.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from servelab.paths import ROOT
from servelab.reference import continuous_batching as course
from servelab.reference import paged_kv
from servelab.serving import PagedKV, Request, SchedulerConfig, StepPlan

QUEUES = (10**3, 10**4, 10**5)
RUNNING, PROMPT, ANSWER = 64, 20, 32
STEPS, REPEATS, PAIRS = 100, 9, 3
MAX_RATIO, MAX_SHARE = 1.5, 10
CLASSES = {
    "Scheduler": course.Scheduler,
    "PagedScheduler": course.PagedScheduler,
    "PolicyScheduler": lambda config, kv: course.PolicyScheduler(config, kv, course.aged(0.5)),
    "ChunkedScheduler": lambda config, kv: course.ChunkedScheduler(config, kv, course.aged(0.5)),
}
TORCH = "import time; start = time.process_time(); import torch; print(time.process_time() - start)"
LONG_RUN = """
import time
from random import Random
from servelab import exercise
from servelab.reference.continuous_batching import ChunkedScheduler
found = exercise.find("continuous_batching.chunked_scheduler")
challenge = found.challenges(Random(exercise.PUBLIC_SEED))[-1]
assert challenge["trace"]
start = time.process_time()
recorded = exercise.record(found, challenge, (ChunkedScheduler,))
cases = found.judge(challenge, recorded["transcript"], None)
assert all(case.passed for case in cases)
print(time.process_time() - start)
"""


class Server:
    """A scheduler with a queue whose length stays the same."""

    def __init__(self, make, waiting: int):
        config = SchedulerConfig(RUNNING, 4 * RUNNING)
        self.scheduler = make(config, PagedKV(paged_kv.BlockAllocator(8 * RUNNING, 16)))
        self.number, self.known, self.missing = count(), {}, {}
        for _ in range(waiting + RUNNING):
            self.add()
        for _ in range(2 * ANSWER):  # until ends and arrivals are spread over the steps
            self.step()

    def add(self) -> None:
        number = next(self.number)
        self.scheduler.add(Request(str(number), PROMPT, ANSWER - number % 7, float(number), number % 3))
        self.missing[str(number)] = PROMPT

    def step(self) -> float:
        """One step; the seconds that the scheduler took for it."""
        start = time.thread_time()
        plan = self.scheduler.schedule()
        spent = time.thread_time() - start
        outputs = self.sampled(plan)
        start = time.thread_time()
        finished = self.scheduler.finish_step(plan, outputs)
        spent += time.thread_time() - start
        for id in finished:
            del self.missing[id]
            self.add()
        return spent

    def sampled(self, plan: StepPlan) -> dict[str, int]:
        """A token for each request that has none left to compute."""
        outputs = {}
        for id, n in plan.scheduled.items():
            self.missing[id] -= n
            if not self.missing[id]:
                self.missing[id], outputs[id] = 1, 1000
        return outputs


def steps() -> list[dict]:
    """One row for each class and length of the queue."""
    rows = []
    for name, make in CLASSES.items():
        servers = [Server(make, waiting) for waiting in QUEUES]
        gc.collect()
        gc.disable()
        repeats = [[statistics.median(s.step() for _ in range(STEPS)) for s in servers] for _ in range(REPEATS)]
        gc.enable()
        for index, waiting in enumerate(QUEUES):
            microseconds = 1e6 * statistics.median(repeat[index] for repeat in repeats)
            ratio = statistics.median(repeat[index] / repeat[0] for repeat in repeats)
            row = {"class": name, "waiting": waiting, "us_per_step": microseconds, "ratio": ratio}
            rows.append(row | {"within_target": ratio <= MAX_RATIO})
    return rows


def long_run() -> dict:
    """The long run's time next to that of ``import torch``, each in processes of their own, in turn."""
    pairs = [(seconds(TORCH), seconds(LONG_RUN)) for _ in range(PAIRS)]
    torch, run = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {"long_run": run, "import_torch": torch, "share": run / torch, "within_target": run <= MAX_SHARE * torch}


def seconds(code: str) -> float:
    """What a fresh process of this Python prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    as_json = parser.parse_args().json
    rows, run = steps(), long_run()
    print(json.dumps({"steps": rows, "long_run": run}, indent=2) if as_json else table(rows, run))
    return 0 if all(row["within_target"] for row in [*rows, run]) else 1


def table(rows: list[dict], run: dict) -> str:
    """The figures as text."""
    lines = [f"{'class':20}{'waiting':>9}{'us/step':>10}{'ratio':>7}"]
    for row in rows:
        missed = "" if row["within_target"] else "  misses its target"
        lines.append(f"{row['class']:20}{row['waiting']:9}{row['us_per_step']:10.1f}{row['ratio']:7.2f}{missed}")
    times = f"10,000 requests {run['long_run']:.2f} s, import torch {run['import_torch']:.2f} s of CPU time"
    return "\n".join([*lines, f"{times}: {run['share']:.2f} times (target: at most {MAX_SHARE})"])


if __name__ == "__main__":
    sys.exit(main())
