"""The token-exact thread: however a workload is served, every answer is that of the plain loop over one request.

In float64, so that no near-tie between two tokens decides. The servers are the course's own references.
"""

import importlib.util
import json
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from servelab.exercises.capstone import _model
from servelab.exercises.capstone._workload import BYTES
from servelab.llm import LLM, load, thread
from servelab.llm.engine import WORKLOADS, WatchedScheduler, decode_steps, serve, workload
from servelab.llm.generate import greedy
from servelab.llm.kv import Pages
from servelab.paths import DATA
from servelab.ranks import SimCluster
from servelab.ranks.communicator import Communicator
from servelab.reference import capstone, collectives, continuous_batching, paged_kv
from servelab.serving import PagedKV, Request, SchedulerConfig
from servelab.simulation import StaticBatches

TP = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 4, "intermediate_size": 24}  # 4 ranks share 2 KV heads in pairs
EOS = 0
AMPLE = 64


@dataclass(frozen=True)
class Asked:
    """A model's seed (0: the course's tiny model), requests as (prompt, max_tokens), sizes of blocks and of a small
    token budget, and ranks."""

    seed: int
    requests: tuple[tuple[tuple[int, ...], int], ...]
    block_size: int
    slots: int
    chunk: int
    ranks: tuple[int, ...]

    def pairs(self):
        return [(Request(f"r{n}", len(prompt), most), prompt) for n, (prompt, most) in enumerate(self.requests)]

    @property
    def tight(self) -> int:
        """Blocks for the largest request and one more: as few as its scheduler accepts, nearly."""
        return 1 + max(-(-(len(prompt) + most - 1) // self.block_size) for prompt, most in self.requests)


@st.composite
def workloads(draw) -> Asked:
    """A few requests, some of which begin alike."""
    token = st.integers(1, 30)
    common = draw(st.lists(token, min_size=8, max_size=8))
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        shared = draw(st.sampled_from((0, 0, 5, 8)))
        own = draw(st.lists(token, min_size=2, max_size=6))
        requests.append(((*common[:shared], *own), draw(st.integers(1, 9))))
    slots, ranks = draw(st.integers(1, 4)), (draw(st.sampled_from((2, 4))),)
    sizes = draw(st.integers(1, 4)), slots, draw(st.integers(slots, 6))
    return Asked(draw(st.integers(0, 3)), tuple(requests), *sizes, ranks)


PROSE = tuple((tuple(f"The scheduler {verb}".encode()), 12) for verb in ("admits", "is a", "preempts"))
SPOKEN = Asked(0, PROSE, 4, 3, 8, (2, 4))
CROWDED = Asked(1, (((3, 8, 4, 9, 1), 9), ((3, 8, 4, 9, 5), 9), ((3, 8, 4, 2), 7)), 2, 3, 4, (2, 4))


def model_of(seed: int) -> LLM:
    """The course's tiny model or one of random weights; both stop at the same token."""
    if seed:
        return _model.model(seed, **TP)
    config, weights = load(dtype=torch.float64)
    return LLM(replace(config, eos_token_id=EOS), weights)


class Server:
    """One way of serving: a scheduler class, blocks, a token budget, an engine on a pool of some kind."""

    def __init__(self, asked: Asked, scheduler: str, blocks: int = AMPLE, budget: int = 256, static=False, cache=False):
        self.asked, self.blocks = asked, blocks
        pool = (paged_kv.PrefixCache if cache else paged_kv.BlockAllocator)(blocks, asked.block_size)
        self.kv = (capstone.CachedKV if cache else PagedKV)(pool)
        config = SchedulerConfig(asked.slots, budget, eos_token_id=EOS)
        made = getattr(continuous_batching, scheduler)(config, self.kv)
        self.scheduler = WatchedScheduler(StaticBatches(made, asked.slots) if static else made, self.kv)
        self.engine_class = capstone.CachedEngine if cache else capstone.Engine

    def answers(self, model: LLM) -> list[list[int]]:
        """The answers, after all KV has been given back."""
        pages = Pages.of(model, self.blocks, self.asked.block_size, paged_kv)
        engine = self.engine_class(model, self.scheduler, self.kv, pages)
        self.served, answers = serve(engine, self.scheduler, self.asked.pairs())
        assert self.kv.num_free == self.blocks
        return list(answers.values())


def servers(asked: Asked) -> dict[str, Server]:
    """By name, every way in which one process serves."""
    return {
        "static": Server(asked, "Scheduler", static=True),
        "continuous": Server(asked, "Scheduler"),
        "paged": Server(asked, "PagedScheduler"),
        "preempted": Server(asked, "PagedScheduler", blocks=asked.tight),
        "chunked": Server(asked, "ChunkedScheduler", budget=asked.chunk),
        "chunked and preempted": Server(asked, "ChunkedScheduler", asked.tight, asked.chunk),
        "prefix-cached": Server(asked, "ChunkedScheduler", cache=True),
        "cached and preempted": Server(asked, "ChunkedScheduler", asked.tight, asked.chunk, cache=True),
    }


def forked(model: LLM, asked: Asked) -> tuple[list[list[int]], list[list[int]]]:
    """The answers to two continuations of the first prompt, computed once and forked, and those of the plain loop."""
    (prompt, most), *_ = asked.requests
    pages = Pages.of(model, AMPLE, asked.block_size, paged_kv)
    table = paged_kv.ForkableTable(paged_kv.BlockAllocator(AMPLE, asked.block_size))
    both = {"same": prompt, "longer": (*prompt, 7, 9)}
    got = thread.forked(paged_kv, model, pages, table, prompt, both, most)
    return list(got.values()), [list(greedy(model, tokens, most)) for tokens in both.values()]


def on_ranks(model: LLM, asked: Asked, size: int) -> list[list[int]]:
    """The answers of engines on simulated ranks, which have to agree."""

    def on_a_rank() -> list[list[int]]:
        comm = Communicator(all_reduce=collectives.ring_all_reduce)
        mine = capstone.rank_model(model.config, model.weights, comm)
        return Server(asked, "ChunkedScheduler", asked.tight, asked.chunk).answers(mine)

    values = SimCluster(size).run(on_a_rank).values
    assert all(value == values[0] for value in values)
    return values[0]


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(workloads())
@example(CROWDED)
@example(SPOKEN)
def test_every_way_of_serving_gives_the_same_tokens(asked):
    model = model_of(asked.seed)
    plain = [list(greedy(model, prompt, most)) for prompt, most in asked.requests]
    for way, server in servers(asked).items():
        assert server.answers(model) == plain, way
        lost = sum(len(step.preempted) for step in server.served.steps)
        assert lost or asked is not CROWDED or "preempted" not in way, f"{way}: nobody was preempted"
    got, want = forked(model, asked)
    assert got == want, "forked"
    for size in asked.ranks:
        assert on_ranks(model, asked, size) == plain, f"TP={size}"


@pytest.mark.parametrize(("name", "static", "steps"), [("w16", False, 255), ("w32", False, 319), ("w32", True, 636)])
def test_steps_of_the_workloads(name, static, steps):
    """Noise-free: the steps in which somebody is decoded, from a real run with a model of two dozen weights."""
    asked, model = workload(name), _model.model(0, **BYTES)
    kv = PagedKV(paged_kv.BlockAllocator(512, 16))
    config = SchedulerConfig(asked.slots, 2048, eos_token_id=-1)
    made = continuous_batching.Scheduler(config, kv)
    scheduler = WatchedScheduler(StaticBatches(made, asked.slots) if static else made, kv)
    engine = capstone.Engine(model, scheduler, kv, Pages.of(model, 512, 16, paged_kv))
    served, answers = serve(engine, scheduler, asked.requests(lambda text: list(text.encode())))
    assert decode_steps(served) == steps
    assert [len(answer) for answer in answers.values()] == list(asked.max_tokens)


def test_the_workloads_are_what_their_script_writes():
    spec = importlib.util.spec_from_file_location("make_workloads", DATA / "make_workloads.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = script.contents()
    assert json.loads(WORKLOADS.read_text(encoding="utf-8")) == made
    assert Counter(made["workloads"]["w32"]["max_tokens"]) == {16: 24, 64: 6, 256: 2}
