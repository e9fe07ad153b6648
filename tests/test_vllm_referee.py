"""An independent referee: the reference scheduler, set to the choices of vLLM 0.33.0, replays 200 recorded runs of it.

At every step the two must agree on the tokens scheduled for each request, the victims, the prefix hits, who finished
and the blocks in use. `VllmScheduler` is the course's scheduler with vLLM's choices; the unit's text explains them.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

from servelab.reference import continuous_batching as course
from servelab.reference import paged_kv
from servelab.serving import PagedKV, Request, SchedulerConfig, Sequence, StepPlan

RECORDED = Path(__file__).parent / "data" / "vllm_schedule.jsonl.gz"
FIELDS = ("scheduled", "preempted", "cached_tokens", "finished", "running", "blocks_used")
IN_ANY_ORDER = ("preempted", "finished")
NO_TOKEN = -1  # the recorded runs ignore EOS


class PeekingCache(paged_kv.PrefixCache):
    """Unit 03's prefix cache, which can also say what a prompt would hit without holding it."""

    def peek(self, tokens: list[int]) -> list[int]:
        known = takewhile(self._blocks_of.__contains__, self._hashes(tokens[:-1], None))
        return [next(iter(self._blocks_of[digest])) for digest in known]


class CachedKV(PagedKV):
    """KV memory of which a request's first blocks may come out of the prefix cache."""

    def __init__(self, pool: PeekingCache, caching: bool):
        super().__init__(pool)
        self.caching = caching

    def hit(self, tokens: list[int]) -> list[int]:
        return self.pool.peek(tokens) if self.caching else []

    def adopt(self, id: str, blocks: list[int]) -> None:
        self.pool.share(blocks)
        self._tables[id] = list(blocks)

    def remember(self, id: str, tokens: list[int]) -> None:
        if self.caching:
            self.pool.insert(tokens, self.blocks(id))


class VllmScheduler(course.ChunkedScheduler):
    """The course's scheduler with the choices of vLLM 0.33.0."""

    def __init__(self, settings: dict, prompts: dict[str, list[int]]):
        limits = settings["max_num_seqs"], settings["max_num_batched_tokens"]
        pool = PeekingCache(settings["num_blocks"], settings["block_size"])
        kv = CachedKV(pool, settings["prefix_caching"])
        self.by_priority, self.chunked = settings["policy"] == "priority", settings["chunked_prefill"]
        key = course.by_priority if self.by_priority else lambda seq: 0
        super().__init__(SchedulerConfig(*limits, eos_token_id=NO_TOKEN), kv, key)
        self.prompts, self.cached_tokens = prompts, {}

    def _rank(self, seq: Sequence) -> tuple:
        """Under priorities, equals in the order of arrival, and then of their names."""
        return (self.key(seq), seq.request.arrival, seq.id) if self.by_priority else super()._rank(seq)

    def _victim(self) -> Sequence:
        """Of equal priorities and arrivals, the one admitted first."""
        return max(self.running.values(), key=lambda seq: self._rank(seq)[: 2 if self.by_priority else None])

    def _chunk(self, seq: Sequence) -> int:
        """Chunks may be switched off; then a prompt has to fit into what is left of the budget."""
        chunk = super()._chunk(seq)
        return chunk if self.chunked or chunk == seq.missing else 0

    def schedule(self) -> StepPlan:
        self.cached_tokens = {}
        return super().schedule()

    def _admit(self, plan: StepPlan) -> None:
        """Look for a cached beginning first; what it hits needs neither computing nor, if somebody holds it, room."""
        while (seq := self._head()) and len(self.running) < self.config.max_num_seqs and self.left:
            hit = self.kv.hit(self._tokens(seq))
            seq.num_computed = len(hit) * self.kv.block_size
            n, idle = self._chunk(seq), sum(not self.kv.pool.ref_count(block) for block in hit)
            if not n or self.kv.blocks_for(seq.num_tokens) - len(hit) + idle > self.kv.num_free:
                seq.num_computed = 0
                break
            self._dequeue()
            self.kv.adopt(seq.id, hit)
            self.kv.reserve(seq.id, seq.num_computed + n)
            self.cached_tokens |= {seq.id: seq.num_computed} if hit else {}
            self.running[seq.id] = seq
            self._schedule(seq, n, plan)

    def _schedule(self, seq: Sequence, n: int, plan: StepPlan) -> None:
        """Blocks are remembered as soon as they are planned, so that a later request of the same step hits them."""
        super()._schedule(seq, n, plan)
        self.kv.remember(seq.id, self._tokens(seq)[: seq.num_computed + n])

    def _tokens(self, seq: Sequence) -> list[int]:
        return self.prompts[seq.id] + seq.outputs


@cache
def recorded_runs() -> list[dict]:
    with gzip.open(RECORDED, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def requests_of(run: dict) -> dict[int, list[Request]]:
    """The requests that arrive before each step; no answer is longer than the model's context allows."""
    arriving, longest = defaultdict(list), run["config"]["max_model_len"]
    for r in run["requests"]:
        limit = min(r["max_tokens"], longest - len(r["prompt"]))
        arriving[r["arrival_step"]].append(Request(r["id"], len(r["prompt"]), limit, r["arrival_step"], r["priority"]))
    return arriving


def replay(run: dict, scheduler_class: type[VllmScheduler]) -> Iterator[tuple[dict, dict]]:
    """For each step what was recorded and what the course's scheduler does."""
    scheduler = scheduler_class(run["config"], {r["id"]: r["prompt"] for r in run["requests"]})
    arriving, kv = requests_of(run), scheduler.kv
    for number, recorded in enumerate(run["steps"]):
        for request in arriving[number]:
            scheduler.add(request)
        plan = scheduler.schedule()
        running, used = list(scheduler.running), kv.num_blocks - kv.num_free
        ready = [id for id, n in plan.scheduled.items() if n == scheduler.running[id].missing]
        sampled = {id: 1_000_000 + 1000 * int(id) + scheduler.running[id].num_tokens for id in ready}
        finished = scheduler.finish_step(plan, sampled)
        scheduled = list(plan.scheduled.items())
        found = scheduled, plan.preempted, scheduler.cached_tokens, finished, running, used
        yield recorded, dict(zip(FIELDS, found, strict=True))


def differences(run: dict, scheduler_class: type[VllmScheduler]) -> list[str]:
    """Where the first step that differs does so; a scheduler that gives up differs there too."""
    steps = replay(run, scheduler_class)
    for number in range(len(run["steps"])):
        try:
            recorded, found = next(steps)
        except Exception as error:
            return [f"step {number}: {type(error).__name__}: {error}"]
        recorded = recorded | {"scheduled": list(recorded["scheduled"].items())}
        for field in IN_ANY_ORDER:
            recorded, found = recorded | {field: sorted(recorded[field])}, found | {field: sorted(found[field])}
        wrong = [f"step {number}, {f}: vLLM {recorded[f]}, ours {found[f]}" for f in FIELDS if recorded[f] != found[f]]
        if wrong:
            return wrong
    return []


def kind(run: dict) -> tuple:
    settings = run["config"]
    return settings["policy"], settings["prefix_caching"], settings["chunked_prefill"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "prefix cache"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole prompts", "chunks"])
def test_the_reference_replays_vllm_step_by_step(policy, caching, chunked):
    runs = [run for run in recorded_runs() if kind(run) == (policy, caching, chunked)]
    assert runs
    wrong = {number: found for number, run in enumerate(runs) if (found := differences(run, VllmScheduler))}
    assert not wrong, f"{len(wrong)} of {len(runs)} runs differ; the first: {next(iter(wrong.items()))}"


def test_the_recordings_are_the_200_that_they_should_be():
    steps = [step for run in recorded_runs() for step in run["steps"]]
    assert (len(recorded_runs()), len(steps)) == (200, 26_137)
    assert sum(len(step["preempted"]) for step in steps) == 209
    assert sum(len(step["cached_tokens"]) for step in steps) == 277


@pytest.mark.parametrize("choice", ["_rank", "_victim", "_chunk", "_admit", "_schedule"])
def test_each_choice_tells_the_two_apart(choice):
    """With the course's own method in place of vLLM's choice, a run differs: no choice is there for nothing."""
    undone = type("Undone", (VllmScheduler,), {choice: getattr(course.ChunkedScheduler, choice)})
    assert any(differences(run, undone) for run in recorded_runs())
