"""What the checks of this unit's schedulers share: a few requests on the simulated clock, and when each token is due.

The KV memory has room for all, so "first come, first served" determines every plan but for the order within it, and a
step's length does not depend on that. The moments are worked out here once more, from the rule alone.
"""

from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from servelab.exercise import Case
from servelab.plain import plain, type_name
from servelab.serving import Request, SchedulerConfig, StepPlan
from servelab.simulation import Job, StepCost, serve
from servelab.stepping import RecordedKV, attempt

COST = {"weights": 1.0, "kv_token": 0.0, "token": 0.25}  # seconds; exact in binary, so that equal times are equal
BLOCKS = {"num_blocks": 500, "block_size": 4}


def challenge(case: str, config: dict, jobs: list[list]) -> dict:
    """A served trace as plain data. A job: id, prompt tokens, ``max_tokens``, arrival, tokens of its answer."""
    return {"case": case, "config": config, "jobs": jobs}


def drawn(rng: Random, case: str, config: dict, longest_prompt: int) -> dict:
    """A dozen requests that come at random."""
    jobs, moment = [], 0.0
    for name in "abcdefghijkl":
        moment += rng.choice((0.0, 0.0, 0.25, 1.0, 2.5, 6.0))
        most = rng.randint(1, 6)
        jobs.append([name, rng.randint(1, longest_prompt), most, moment, rng.randint(1, most)])
    return challenge(case, config, jobs)


class _Limited:
    """A scheduler that nobody asks for ever. The simulation gets to see its plans and nothing else of it."""

    def __init__(self, scheduler: Any, kv: RecordedKV, most_plans: int):
        self.scheduler, self.memory, self.left, self.plan = scheduler, kv, most_plans, None

    def add(self, request: Request) -> None:
        self.memory.allow(10_000)
        self.scheduler.add(request)

    def schedule(self) -> StepPlan:
        self.memory.allow(10_000)
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("many times as many plans as these requests need, and they are not finished")
        given: Any = self.scheduler.schedule()
        counts = getattr(given, "scheduled", None)
        if not isinstance(counts, Mapping) or not hasattr(given, "preempted"):
            raise TypeError(f"expected a StepPlan, got {type_name(given)}")
        self.plan = given
        return StepPlan({id: plain(n) for id, n in counts.items()}, list(given.preempted))

    def finish_step(self, plan: StepPlan, outputs: dict[str, int]) -> None:
        self.memory.allow(10_000)
        self.scheduler.finish_step(self.plan, outputs)


def drive(asked: dict, make: Callable[[SchedulerConfig, RecordedKV], Any]) -> dict:
    """Serve the jobs with a scheduler, made by ``make(config, kv)``; the moments of all tokens, or what it raised."""
    config, kv = SchedulerConfig(**asked["config"]), RecordedKV(**BLOCKS)
    jobs = [Job(Request(id, prompt, most, arrival), tokens) for id, prompt, most, arrival, tokens in asked["jobs"]]
    limit = 10 * sum(job.request.prompt_tokens + job.output_tokens for job in jobs)
    served = attempt(lambda: serve(_Limited(make(config, kv), kv, limit), jobs, StepCost(**COST)).token_times)
    return {"times": served["returned"]} if "returned" in served else served


def due(asked: dict, chunked: bool) -> dict[str, list[float]]:
    """When each token comes if those who run come first, then the queue in order, each as far as the limits go."""
    seats, budget = asked["config"]["max_num_seqs"], asked["config"]["max_num_batched_tokens"]
    waiting = deque(sorted(asked["jobs"], key=lambda job: job[3]))
    times: dict[str, list[float]] = {job[0]: [] for job in waiting}
    answers = {job[0]: job[4] for job in waiting}
    missing: dict[str, int] = {}  # of those who run
    clock = 0.0
    while waiting or missing:
        clock = clock if missing else max(clock, waiting[0][3])
        left, counts = budget, {}
        while waiting and waiting[0][3] <= clock and len(missing) < seats:
            first, tokens = waiting[0][:2]
            spare = budget - sum(missing.values())
            if spare < (1 if chunked else tokens):
                break
            missing[first] = tokens
            waiting.popleft()
        for id, tokens in missing.items():
            counts[id] = min(tokens, left)
            left -= counts[id]
        clock += StepCost(**COST).seconds(sum(counts.values()), 0)
        for id, tokens in counts.items():
            missing[id] -= tokens
            if not missing[id]:
                times[id].append(clock)
                missing[id] = 1
            if len(times[id]) == answers[id]:
                del missing[id]
    return times


def judged(asked: dict, transcript: dict, chunked: bool) -> list[Case]:
    """The challenge's one case: each token at its moment. The message prefers a first token that is late."""
    if "raised" in transcript:
        return [Case(asked["case"], False, f"on the simulated clock: {transcript['message']}")]
    arrivals = {job[0]: job[3] for job in asked["jobs"]}
    wrong = []
    for id, moments in due(asked, chunked).items():
        for number, moment in enumerate(moments):
            came = transcript["times"][id][number]
            if came != moment:
                message = _late(id, arrivals[id], number, len(moments), moment, came)
                wrong.append((number > 0, came < moment, min(came, moment), message))
    return [Case(asked["case"], not wrong, min(wrong)[-1] if wrong else "")]


def _late(id: str, arrival: float, number: int, count: int, due: float, came: float) -> str:
    which = "first token" if number == 0 else "last token" if number == count - 1 else f"token {number + 1}"
    name = {"first token": "TTFT ", "last token": "E2E "}.get(which, "")
    waits = [f"at {moment:g} s ({name}{moment - arrival:g} s{' after it' * (not name)})" for moment in (due, came)]
    return f"request {id!r} arrived at {arrival:g} s: expected its {which} {waits[0]}; it came {waits[1]}"


def show(asked: dict, made: str) -> str:
    """The served trace as Python; ``made`` makes the scheduler out of ``config`` and ``kv``."""
    config = ", ".join(f"{name}={value}" for name, value in asked["config"].items())
    blocks = ", ".join(f"{name}={value}" for name, value in BLOCKS.items())
    cost = ", ".join(f"{name}={value}" for name, value in COST.items())
    return "\n".join(
        [
            "from servelab.plots import iterations",
            "from servelab.simulation import Job, StepCost, serve",
            "from servelab.stepping import RecordedKV",
            f"config = SchedulerConfig({config})",
            f"kv = RecordedKV({blocks})",
            "jobs = [  # id, prompt_tokens, max_tokens, arrival; tokens of the answer",
            *(f"    Job(Request({id!r}, {p}, {most}, {at}), {n})," for id, p, most, at, n in asked["jobs"]),
            "]",
            f"# a step takes {COST['weights']:g} s, or {COST['token']:g} s a token where that is more",
            f"run = serve({made}, jobs, StepCost({cost}))",
            "print(iterations.timeline_text(run))",
        ]
    )
