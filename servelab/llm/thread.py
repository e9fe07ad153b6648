"""The token-exact thread: however a unit's parts serve the tiny model, its greedy tokens are those of the plain loop.

Everything runs in float64, so that no near-tie between two tokens decides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from operator import index
from types import SimpleNamespace

import torch
from torch import Tensor

from servelab.llm.engine import workload
from servelab.llm.generate import greedy
from servelab.llm.kv import ContiguousKV, Pages
from servelab.llm.model import LAYER, LLM, LLMConfig, Weights, load
from servelab.ranks.communicator import Communicator
from servelab.serving import PagedKV, Request

NO_EOS = -1
MAX_TOKENS = 24
Answers = dict[str, list[int]]


def tiny_model() -> LLM:
    """The tiny model in float64."""
    return LLM(*load(dtype=torch.float64))


def untrained_model(**dimensions) -> LLM:
    """A model of these dimensions (`LLMConfig`) in float64, whose weights are sines: it says nothing, but computes."""
    config = LLMConfig(**dimensions)
    weights = {
        name: (0.7 * torch.arange(prod(shape), dtype=torch.float64) + number).sin().view(shape)
        for number, (name, shape) in enumerate(config.shapes().items())
    }
    return LLM(config, weights)


def tiny_prompts(number: int = 4) -> dict[str, list[int]]:
    """Prompts for it, as bytes; they begin alike."""
    texts = workload("w32").texts[:number]
    return {f"r{n}": list(text.encode()) for n, text in enumerate(texts)}


def plain_loop(model: LLM, prompts: Mapping[str, Sequence[int]], max_tokens: int = MAX_TOKENS) -> Answers:
    """What every way of serving must give."""
    return {id: list(greedy(model, prompt, max_tokens)) for id, prompt in prompts.items()}


def report(way: str, got: Mapping[str, Sequence[int]], want: Mapping[str, Sequence[int]], note: str = "") -> None:
    """Print a line: how many answers are those of the plain loop, and where the first other one leaves it."""
    wrong = [id for id in want if list(got.get(id, ())) != list(want[id])]
    line = f"{way:>14}: {len(want) - len(wrong)} of {len(want)} answers as in the plain loop{note}"
    if wrong:
        mine, right = list(got.get(wrong[0], ())), list(want[wrong[0]])
        at = next((n for n, pair in enumerate(zip(mine, right, strict=False)) if pair[0] != pair[1]), len(mine))
        line += f"; {wrong[0]} differs from token {at} on"
    print(line)


# -- unit 03: requests through block tables. ``unit`` has that unit's parts, by their names, as its reference has


def in_turn(
    unit, model: LLM, pages: Pages, tables: Mapping, prompts: Mapping[str, Sequence[int]], max_tokens: int = MAX_TOKENS
) -> Answers:
    """The answers of several requests that take turns, a token each. What a table holds is not computed."""
    got: Answers = {id: [] for id in prompts}
    going = {id: iter(unit.generate(model, pages, tables[id], prompt, max_tokens)) for id, prompt in prompts.items()}
    while going:
        for id, tokens in list(going.items()):
            token = next(tokens, None)
            if token is None:
                del going[id]
            else:
                got[id].append(token)
    return got


def forked(
    unit,
    model: LLM,
    pages: Pages,
    table,
    prompt: Sequence[int],
    continuations: Mapping[str, Sequence[int]],
    max_tokens: int = MAX_TOKENS,
) -> Answers:
    """The answers to continuations of a prompt of 2 tokens or more, which is computed once, all but its last token."""
    for _ in unit.generate(model, pages, table, prompt[:-1], 1):
        pass
    forks = {id: table.fork() for id in continuations}
    got = in_turn(unit, model, pages, forks, continuations, max_tokens)
    for fork in forks.values():
        fork.release()
    return got


def prefix_cached(
    unit, model: LLM, pages: Pages, cache, prompts: Mapping[str, Sequence[int]], max_tokens: int = MAX_TOKENS
) -> tuple[Answers, int]:
    """The answers of requests one after another, and how many tokens of prompts were found in the cache."""
    got: Answers = {}
    hits = 0
    for id, prompt in prompts.items():
        table = unit.ForkableTable(cache)
        table.blocks, table.num_tokens = cache.match(prompt)
        hits += table.num_tokens
        got |= in_turn(unit, model, pages, {id: table}, {id: prompt}, max_tokens)
        cache.insert([*prompt, *got[id]][: table.num_tokens], table.blocks)
        table.release()
    return got, hits


def paged_kv(
    generate: Callable,
    BlockAllocator: type,
    ForkableTable: type,
    PrefixCache: type,
    write_kv: Callable,
    paged_attention: Callable,
    num_blocks: int = 64,
    block_size: int = 8,
) -> None:
    """Serve the tiny model with `generate` on the parts of unit 03 and print how the answers compare.

    - paged: requests in turns, a token each, so that their blocks lie interleaved;
    - forked: one prompt, computed once and forked before its last token, for two that end in their own ways;
    - prefix-cached: one request after another, each beginning with what the cache has of those before.
    """
    parts = {"write_kv": write_kv, "paged_attention": paged_attention, "ForkableTable": ForkableTable}
    unit = SimpleNamespace(generate=generate, **parts)
    model, prompts = tiny_model(), tiny_prompts()
    want = plain_loop(model, prompts)

    def empty() -> Pages:
        pages = Pages.of(model, num_blocks, block_size, unit)
        for k_cache, v_cache in pages.caches:
            k_cache.fill_(torch.nan), v_cache.fill_(torch.nan)
        return pages

    pool = BlockAllocator(num_blocks, block_size)
    report("paged", in_turn(unit, model, empty(), {id: ForkableTable(pool) for id in prompts}, prompts), want)
    prompt = prompts["r0"]
    twins = {"same": prompt, "other": [*prompt[:-1], *want["r1"][:2]]}
    table = ForkableTable(BlockAllocator(num_blocks, block_size))
    report("forked", forked(unit, model, empty(), table, prompt, twins), plain_loop(model, twins))
    got, hits = prefix_cached(unit, model, empty(), PrefixCache(num_blocks, block_size), prompts)
    report("prefix-cached", got, want, f"; tokens found in the cache: {hits}")


# -- unit 04: many requests in one batch


@dataclass
class Step:
    """What a step did: its plan, how many tokens went through the model, the rows that were taken, what came of them.

    ``scores`` are the logits of the tokens in ``outputs``.
    """

    scheduled: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    computed: int = 0
    rows: Mapping[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)


class Server:
    """A scheduler, a flat batch, pages and the model: each step computes what is planned, and keeps a `Step` of it.

    Parameters
    ----------
    model : LLM
        Over all of its weights.
    scheduler : Scheduler
        Made with ``kv``.
    flatten_batch, sampled_rows : callable
        The functions of unit 04.
    kv : PagedKV
        Which blocks a request has.
    pages : Pages
        What is in the blocks; as many as ``kv`` has.
    """

    def __init__(self, model: LLM, scheduler, flatten_batch: Callable, sampled_rows: Callable, kv, pages: Pages):
        self.model, self.scheduler, self.kv, self.pages = model, scheduler, kv, pages
        self.flatten_batch, self.sampled_rows = flatten_batch, sampled_rows
        self.tokens: dict[str, list[int]] = {}  # known ones, prompt and answer
        self.num_computed: dict[str, int] = {}  # how many of them are in the pages
        self.answers: Answers = {}
        self.going: set[str] = set()
        self.steps: list[Step] = []

    def add(self, id: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Hand a request to the scheduler."""
        self.tokens[id], self.num_computed[id], self.answers[id] = list(prompt), 0, []
        self.scheduler.add(Request(id, len(prompt), max_tokens))
        self.going.add(id)

    def run(self, max_steps: int = 10_000) -> None:
        """Go on until all requests are finished or the scheduler plans nothing, for so many steps at most."""
        while self.going and len(self.steps) < max_steps:
            step = Step()
            self.steps.append(step)
            planned = self.scheduler.schedule()
            step.scheduled, step.preempted = dict(planned.scheduled), list(planned.preempted)
            if not planned.scheduled and not planned.preempted:
                return
            self.num_computed |= dict.fromkeys(planned.preempted, 0)
            if planned.scheduled:
                self._compute(planned, step)
                self.going -= set(self.scheduler.finish_step(planned, dict(step.outputs)))

    @torch.no_grad()
    def _compute(self, plan, step: Step) -> None:
        batch = self.flatten_batch(plan, self.tokens, self.num_computed, self.kv)
        kv = self.pages.bind(batch)
        hidden = self.model.forward(batch.tokens, batch.positions, kv)
        step.computed = len(hidden)
        rows = self.sampled_rows(plan, self.tokens, self.num_computed)
        step.rows = {id: index(row) for id, row in rows.items()}
        scores, said = self.model.logits(hidden[list(step.rows.values())]).max(-1)
        step.outputs = dict(zip(step.rows, said.tolist(), strict=True))
        step.scores = dict(zip(step.rows, scores.tolist(), strict=True))
        for id, n in plan.scheduled.items():
            self.num_computed[id] += n
        for id, token in step.outputs.items():
            self.tokens[id].append(token)
            self.answers[id].append(token)


def compare(server: Server, requests: Mapping[str, tuple[str, int]]) -> None:
    """Print the steps of a server, then of each request its answer and the logits, beside the plain loop's.

    Parameters
    ----------
    server : Server
        As it is after its run; the tokens are bytes.
    requests : mapping of str to (str, int)
        Of each request its prompt and ``max_tokens``.
    """
    for number, step in enumerate(server.steps):
        plan = f"scheduled {step.scheduled}" + (f", preempted {step.preempted}" if step.preempted else "")
        print(f"step {number}: {plan}; tokens through the model: {step.computed}; rows {dict(step.rows)}")
    for id, (text, max_tokens) in requests.items():
        prompt = list(text.encode())
        want = list(greedy(server.model, prompt, max_tokens))
        logits = [step.scores[id] for step in server.steps if id in step.scores]
        ways = {
            "the server": (server.answers[id], logits),
            "the plain loop": (want, answer_logits(server.model, prompt, want)),
        }
        for way, (answer, scores) in ways.items():
            print(f"{id}, {way:>14}: {bytes(answer)!r}, logits {', '.join(f'{score:.3f}' for score in scores)}")


@torch.no_grad()
def answer_logits(model: LLM, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """The largest logit at each token of an answer of the plain loop, from one pass over all of it."""
    tokens = torch.tensor([*prompt, *answer[:-1]])
    hidden = model.forward(tokens, torch.arange(len(tokens)), ContiguousKV())
    return model.logits(hidden[-len(answer) :]).amax(-1).tolist()


def continuous_batching(
    sampled_rows: Callable, flatten_batch: Callable, servers: Mapping[str, tuple[Callable, int]], unit
) -> None:
    """Serve the tiny model with schedulers of unit 04 and print how the answers compare, and what was computed.

    Parameters
    ----------
    sampled_rows, flatten_batch : callable
        The learner's.
    servers : mapping
        Of each way of serving what makes its scheduler out of a ``PagedKV``, and how many blocks of 8 there are.
    unit : module
        ``servelab.parts.paged_kv``.
    """
    model, prompts = tiny_model(), tiny_prompts()
    want = plain_loop(model, prompts)
    for way, (make, num_blocks) in servers.items():
        kv = PagedKV(unit.BlockAllocator(num_blocks, 8))
        pages = Pages.of(model, num_blocks, 8, unit)
        server = Server(model, make(kv), flatten_batch, sampled_rows, kv, pages)
        for id, prompt in prompts.items():
            server.add(id, prompt, MAX_TOKENS)
        server.run()
        rows, tokens = (sum(counts) for counts in zip(*((len(s.rows), s.computed) for s in server.steps), strict=True))
        lost = sum(len(step.preempted) for step in server.steps)
        note = f"; steps: {len(server.steps)}, tokens computed: {tokens}, rows sampled: {rows}, preemptions: {lost}"
        report(way, server.answers, want, note)


# -- unit 06: the same layers over ranks


def layer_weights(weights: Weights, layer: int) -> Weights:
    """A layer's weights, by their names within it."""
    return {name: weights[f"layers.{layer}.{name}"] for name in LAYER}


class LayeredLLM(LLM):
    """The model with the decoder layers of unit 06 in it, each made from its whole weights on every rank."""

    def __init__(self, config: LLMConfig, weights: Weights, comm: Communicator, DecoderLayer: Callable):
        super().__init__(config, weights)
        self.layers = [DecoderLayer(config, layer_weights(weights, n), comm) for n in range(config.num_layers)]

    def inputs(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What the first layer gets of a step: the embeddings, and cosine and sine of the rotations."""
        return self.weights["embedding"][tokens], self._angles(positions)

    def forward(self, tokens: Tensor, positions: Tensor, kv) -> Tensor:
        x, angles = self.inputs(tokens, positions)
        for number, layer in enumerate(self.layers):
            x = layer(x, angles, partial(kv.attend, number))
        return self._norm(x, self.weights["norm"])


def tensor_parallel(
    DecoderLayer: Callable, all_reduce: Callable | None = None, sizes: Sequence[int] = (1, 2, 4)
) -> None:
    """Run the tiny model with a layer of unit 06 on simulated ranks and print how the answers compare.

    Parameters
    ----------
    DecoderLayer : callable
        The learner's.
    all_reduce : callable, optional
        A function of one's own, as `servelab.ranks.communicator.Communicator` takes it.
    sizes : sequence of int
        Numbers of ranks.
    """
    from servelab.exercise import raiser
    from servelab.ranks import SimCluster

    model, prompts = tiny_model(), tiny_prompts(2)
    want = plain_loop(model, prompts)

    def on_a_rank() -> tuple[Answers, int]:
        mine = LayeredLLM(model.config, model.weights, Communicator(all_reduce=all_reduce), DecoderLayer)
        matrices = sum(p.numel() for p in mine.layers[0].parameters() if p.dim() > 1)
        return plain_loop(mine, prompts), matrices

    for size in sizes:
        try:
            run = SimCluster(size).run(on_a_rank)
        except NotImplementedError as error:
            print(f"{raiser(error)} is not written yet")
            return
        answers, held = run.values[0]
        same = "" if all(other == answers for other, _ in run.values) else "not "
        note = f", {same}the same on all ranks; all-reduces: {len(run.collectives(0))}, weights of a layer: {held:,}"
        report(f"TP={size}", answers, want, note)
