"""A server on a simulated clock: requests arrive, the learner's scheduler plans, a cost model times the steps.

No model runs. A request's tokens are numbered instead of sampled, and its answer ends where the trace says, with EOS.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from servelab.serving import Request, SchedulerConfig, StepPlan

FIRST_TOKEN = 1000  # simulated tokens count up from here, so none of them is an EOS


@dataclass(frozen=True)
class Job:
    """A request, and what only the simulation knows: after how many tokens the answer ends."""

    request: Request
    output_tokens: int


@dataclass(frozen=True)
class StepCost:
    """What a step takes at least: ``max(weights + kv_tokens * kv_token, tokens * token) + overhead`` seconds.

    Parameters
    ----------
    weights : float
        Seconds to read the weights, once a step.
    kv_token : float
        Seconds to read the KV of one cached token.
    token : float
        Seconds of arithmetic for one token of the step.
    overhead : float
        Seconds of everything else in a step: launches, sampling, scheduling.
    """

    weights: float
    kv_token: float
    token: float
    overhead: float = 0.0

    @classmethod
    def from_floor(cls, mixed_step_floor: Callable[..., float], model, gpu, tp: int = 1, overhead: float = 0.0):
        """Read the constants off unit 01's ``mixed_step_floor`` for a dense model on ``tp`` GPUs."""
        weights = mixed_step_floor(model, gpu, 1, 0, 0, tp)
        context, prompt = 1_000_000, 1_000_000
        kv_token = (mixed_step_floor(model, gpu, 1, context, 0, tp) - weights) / context
        return cls(weights, kv_token, mixed_step_floor(model, gpu, 0, 0, prompt, tp) / prompt, overhead)

    def seconds(self, tokens: int, kv_tokens: int) -> float:
        """A step of so many tokens whose attention reads the KV of so many cached ones."""
        return max(self.weights + kv_tokens * self.kv_token, tokens * self.token) + self.overhead


@dataclass(frozen=True)
class Step:
    """One step of the server: when it ran, and what it computed."""

    start: float
    end: float
    prefill: dict[str, int]  # tokens of prompts, and of what a preemption lost
    decode: tuple[str, ...]
    preempted: tuple[str, ...]
    blocks_used: int | None  # of the KV, while the step runs

    @property
    def num_tokens(self) -> int:
        return sum(self.prefill.values()) + len(self.decode)


@dataclass(frozen=True)
class Timing:
    """The moments of one request, in seconds: what latencies are computed from.

    Parameters
    ----------
    arrival : float
        When it came in.
    admitted : float
        When the first step began that computed some of it.
    token_times : tuple of float
        When each token of the answer was there, at least one.
    """

    arrival: float
    admitted: float
    token_times: tuple[float, ...]


@dataclass(frozen=True)
class Served:
    """Everything that happened: the steps, and the moment of each token of each request, in seconds."""

    jobs: tuple[Job, ...]
    steps: list[Step] = field(default_factory=list)
    token_times: dict[str, list[float]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The end of the last step."""
        return self.steps[-1].end if self.steps else 0.0

    def timings(self) -> list[Timing]:
        """The moments of each request, in the order of arrival."""
        admitted: dict[str, float] = {}
        for step in self.steps:
            for id in (*step.prefill, *step.decode):
                admitted.setdefault(id, step.start)
        requests = (job.request for job in self.jobs)
        return [Timing(r.arrival, admitted[r.id], tuple(self.token_times[r.id])) for r in requests]


class _Progress:
    """What the simulation knows about one request."""

    __slots__ = ("computed", "job", "known")

    def __init__(self, job: Job):
        self.job, self.known, self.computed = job, job.request.prompt_tokens, 0


def serve(scheduler, jobs: Iterable[Job], cost: StepCost, config: SchedulerConfig | None = None) -> Served:
    """Serve all jobs, each from its arrival on.

    Parameters
    ----------
    scheduler : object
        With ``add``, ``schedule`` and ``finish_step`` as unit 04 defines them.
    jobs : iterable of Job
        In any order.
    cost : StepCost
        How long steps take.
    config : SchedulerConfig, optional
        Where the EOS token is not the default one.

    Raises
    ------
    RuntimeError
        If the scheduler plans nothing while requests wait that nothing else can bring forward.
    ValueError
        If a plan computes tokens that there are not.
    """
    queue = sorted(jobs, key=lambda job: job.request.arrival)
    eos = (config or SchedulerConfig(1, 1)).eos_token_id
    live: dict[str, _Progress] = {}
    served, clock, added, idle = Served(tuple(queue)), 0.0, 0, False
    while added < len(queue) or live:
        while added < len(queue) and queue[added].request.arrival <= clock:
            scheduler.add(queue[added].request)
            live[queue[added].request.id] = _Progress(queue[added])
            added += 1
        plan = scheduler.schedule()
        if plan.scheduled:
            clock, idle = _step(scheduler, plan, live, served, clock, cost, eos), False
        elif plan.preempted and not idle:
            idle = True  # the freed blocks serve the next plan
            _forget(plan, live)
        elif added < len(queue):
            clock = max(clock, queue[added].request.arrival)
        else:
            raise RuntimeError(f"nothing is scheduled at {clock:g} s, though unfinished: {', '.join(list(live)[:5])}")
    return served


def _forget(plan: StepPlan, live: dict[str, _Progress]) -> None:
    for id in plan.preempted:
        live[id].computed = 0


def _step(scheduler, plan: StepPlan, live, served: Served, clock: float, cost: StepCost, eos: int) -> float:
    """Run one step; return its end."""
    _forget(plan, live)
    prefill, decode, outputs, kv_tokens = {}, [], {}, 0
    for id, n in plan.scheduled.items():
        state = live.get(id)
        left = state.known - state.computed if state else 0
        if state is None or not 1 <= n <= left:
            raise ValueError(f"the plan computes {n} tokens of request {id}, which has {left} left to compute")
        kv_tokens += state.computed
        if state.computed >= state.job.request.prompt_tokens and n == 1 == state.known - state.computed:
            decode.append(id)
        else:
            prefill[id] = n
        state.computed += n
        if state.computed == state.known:
            state.known += 1
            last = state.known - state.job.request.prompt_tokens >= state.job.output_tokens
            outputs[id] = eos if last else FIRST_TOKEN + state.known
    kv = getattr(scheduler, "kv", None)
    used = kv.num_blocks - kv.num_free if kv is not None else None
    end = clock + cost.seconds(plan.num_tokens, kv_tokens)
    served.steps.append(Step(clock, end, prefill, tuple(decode), tuple(plan.preempted), used))
    scheduler.finish_step(plan, dict(outputs))
    for id in outputs:
        served.token_times.setdefault(id, []).append(end)
        request, count = live[id].job.request, live[id].known - live[id].job.request.prompt_tokens
        if count in (live[id].job.output_tokens, request.max_tokens):
            del live[id]
    return end


class StaticBatches:
    """Static batching around any scheduler: nobody joins a batch that runs, however many slots have become free.

    Parameters
    ----------
    scheduler : object
        What runs a batch. Its ``max_num_seqs`` is the largest batch.
    batch_size : int
        Requests that are handed over at once; fewer if fewer wait when the batch before is done.
    """

    def __init__(self, scheduler, batch_size: int):
        self.scheduler, self.batch_size, self.kv = scheduler, batch_size, scheduler.kv
        self._waiting: list[Request] = []
        self._running: set[str] = set()

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def schedule(self) -> StepPlan:
        if not self._running:
            batch, self._waiting = self._waiting[: self.batch_size], self._waiting[self.batch_size :]
            for request in batch:
                self.scheduler.add(request)
            self._running = {request.id for request in batch}
        return self.scheduler.schedule()

    def finish_step(self, plan: StepPlan, outputs: dict[str, int]) -> list[str]:
        done = self.scheduler.finish_step(plan, outputs)
        self._running -= set(done)
        return done
