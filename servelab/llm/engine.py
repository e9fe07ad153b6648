"""An engine as seen from outside, and a loop that serves a workload with one and writes down what happened."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Protocol

from servelab.paths import DATA
from servelab.serving import PagedKV, Request, StepPlan
from servelab.simulation import Job, Served, Step

WORKLOADS = DATA / "workloads.json"
STALLED = 3  # steps in a row that give nothing although nothing is to come


@dataclass(frozen=True)
class NewToken:
    """A token of an answer, and whether the answer ends with it."""

    id: str
    token: int
    finished: bool = False


class EngineLike(Protocol):
    """What a server drives: requests go in, steps are made, tokens come out."""

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and are neither finished nor aborted."""
        ...

    def add(self, request: Request, prompt: Sequence[int]) -> None:
        """Queue a request with the token ids of its prompt. Raises `ValueError` if it can never run."""
        ...

    def abort(self, id: str) -> None:
        """Forget a request; its KV is free at once. Nothing happens if there is no such request."""
        ...

    def step(self) -> list[NewToken]:
        """Make one step and return the tokens that it gave; none if there was nothing to do."""
        ...


@dataclass(frozen=True)
class Workload:
    """Requests that are all there at the beginning, in the order in which they came.

    Parameters
    ----------
    slots : int
        Requests that run at the same time.
    max_tokens : tuple of int
        The length of each answer.
    texts : tuple of str
        The prompt of each.
    """

    slots: int
    max_tokens: tuple[int, ...]
    texts: tuple[str, ...]

    def requests(self, encode: Callable[[str], list[int]]) -> list[tuple[Request, list[int]]]:
        """The requests with their prompts as token ids."""
        prompts = [encode(text) for text in self.texts]
        pairs = zip(prompts, self.max_tokens, strict=True)
        return [(Request(f"r{n:02}", len(prompt), most), prompt) for n, (prompt, most) in enumerate(pairs)]


def workload(name: str) -> Workload:
    """A workload of ``data/workloads.json``: ``w16`` or ``w32``."""
    data = json.loads(WORKLOADS.read_text(encoding="utf-8"))
    asked = data["workloads"][name]
    lengths = tuple(asked["max_tokens"])
    return Workload(asked["slots"], lengths, tuple(data["texts"][: len(lengths)]))


class WatchedScheduler:
    """A scheduler that keeps its last plan, and the blocks in use under it, where `serve` can see them."""

    def __init__(self, scheduler, kv: PagedKV):
        self.scheduler, self.kv = scheduler, kv
        self.plan, self.blocks_used = StepPlan(), 0

    def __getattr__(self, name: str):
        return getattr(self.scheduler, name)

    def schedule(self) -> StepPlan:
        planned = self.scheduler.schedule()
        self.plan = planned
        self.blocks_used = self.kv.num_blocks - self.kv.num_free
        return planned


@dataclass
class _Book:
    """What has been computed of each request."""

    prompts: dict[str, int]
    computed: dict[str, int] = field(default_factory=dict)

    def step(self, plan: StepPlan, start: float, end: float, blocks_used: int) -> Step:
        for id in plan.preempted:
            self.computed[id] = 0
        prefill, decode = {}, []
        for id, n in plan.scheduled.items():
            before = self.computed.get(id, 0)
            if n == 1 and before >= self.prompts[id]:
                decode.append(id)
            else:
                prefill[id] = n
            self.computed[id] = before + n
        return Step(start, end, prefill, tuple(decode), tuple(plan.preempted), blocks_used)


def serve(
    engine: EngineLike,
    scheduler: WatchedScheduler,
    requests: Iterable[tuple[Request, Sequence[int]]],
    on_step: Callable[[list[NewToken]], None] = lambda tokens: None,
    clock: Callable[[], float] = perf_counter,
) -> tuple[Served, dict[str, list[int]]]:
    """Serve requests to the end; all of them are added before the first step.

    Parameters
    ----------
    engine : EngineLike
        With nothing to do yet.
    scheduler : WatchedScheduler
        The one that the engine was given.
    requests : iterable of (Request, prompt)
        In the order in which they come.
    on_step : callable
        Called after each step with its tokens.
    clock : callable
        Seconds that only grow.

    Returns
    -------
    Served
        The steps, and when each token came, in seconds from the first step on: what the plots and metrics take.
    dict of str to list of int
        The answers.

    Raises
    ------
    RuntimeError
        If steps give nothing although requests are not finished.
    """
    asked = [(request, list(prompt)) for request, prompt in requests]
    served = Served(tuple(Job(request, request.max_tokens) for request, _ in asked))
    answers: dict[str, list[int]] = {}
    for request, prompt in asked:
        engine.add(request, prompt)
        answers[request.id] = []
    book, idle, begin = _Book({request.id: len(prompt) for request, prompt in asked}), 0, clock()
    while engine.num_unfinished:
        start = clock() - begin
        tokens = engine.step()
        end, plan = clock() - begin, scheduler.plan
        idle = 0 if plan.scheduled else idle + 1
        if idle == STALLED:
            raise RuntimeError(f"{idle} steps computed nothing, but {engine.num_unfinished} requests are not finished")
        if plan.scheduled or plan.preempted:
            served.steps.append(book.step(plan, start, end, scheduler.blocks_used))
        for new in tokens:
            answers[new.id].append(new.token)
            served.token_times.setdefault(new.id, []).append(end)
        on_step(tokens)
    return served, answers


def decode_steps(served: Served) -> int:
    """The steps in which somebody was decoded: all but those that only read prompts."""
    return sum(bool(step.decode) for step in served.steps)


def clock_of_steps() -> Callable[[], float]:
    """A clock for `serve` on which every step takes a second: it is read once at the beginning and twice in each."""
    looks = count()
    return lambda: float(next(looks) // 2)
