"""The token-exact thread: however a unit's parts serve the tiny model, its greedy tokens are those of the plain loop.

Everything runs in float64, so that no near-tie between two tokens decides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from servelab.llm.engine import workload
from servelab.llm.generate import greedy
from servelab.llm.kv import Pages
from servelab.llm.model import LAYER, LLM, LLMConfig, Weights, load
from servelab.ranks.communicator import Communicator
from servelab.serving import FlatBatch, PagedKV, Request

NO_EOS = -1
MAX_TOKENS = 24
Answers = dict[str, list[int]]


def tiny_model() -> LLM:
    """The tiny model in float64."""
    return LLM(*load(dtype=torch.float64))


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


# -- unit 03: one request at a time, through a block table


def through_table(
    model: LLM, pages: Pages, copy_blocks: Callable, table, tokens: Sequence[int], max_tokens: int
) -> Iterator[int]:
    """Go on with a request whose first ``table.num_tokens`` tokens are in the pages; like `greedy`."""
    new = list(tokens[table.num_tokens :])
    for _ in range(max_tokens):
        copies = table.append(len(new))
        for k_cache, v_cache in pages.caches:
            copy_blocks(k_cache, v_cache, copies)
        end = table.num_tokens
        span = range(end - len(new), end)
        slots = torch.tensor(table.slots(span.start, end))
        batch = FlatBatch(torch.tensor(new), torch.tensor(span), [len(new)], [end], slots, torch.tensor([table.blocks]))
        with torch.no_grad():
            hidden = model.forward(batch.tokens, batch.positions, pages.bind(batch))
        new = [int(model.logits(hidden[-1]).argmax())]
        yield new[0]
        if new[0] == model.config.eos_token_id:
            return


def paged_kv(
    BlockAllocator: type,
    ForkableTable: type,
    copy_blocks: Callable,
    PrefixCache: type,
    write_kv: Callable,
    paged_attention: Callable,
    num_blocks: int = 64,
    block_size: int = 8,
) -> None:
    """Serve the tiny model with the parts of unit 03 and print how the answers compare.

    - paged: requests in turns, a token each, so that their blocks lie interleaved;
    - forked: one prompt, computed once and forked before its last token;
    - prefix-cached: one request after another, each beginning with what the cache has of those before.
    """
    model, prompts = tiny_model(), tiny_prompts()
    want = plain_loop(model, prompts)
    unit = SimpleNamespace(write_kv=write_kv, paged_attention=paged_attention)

    def empty() -> Pages:
        return Pages.empty(model.config, num_blocks, block_size, unit, torch.float64)

    report("paged", interleaved(model, empty(), copy_blocks, ForkableTable, BlockAllocator, prompts), want)
    prompt = prompts["r0"]
    pool = BlockAllocator(num_blocks, block_size)
    twins = forked(model, empty(), copy_blocks, ForkableTable(pool), prompt, ([*prompt], [*prompt, *want["r1"][:1]]))
    longer = plain_loop(model, {"same": prompt, "other": [*prompt, *want["r1"][:1]]})
    report("forked", dict(zip(longer, twins, strict=True)), longer)
    got, hits = prefix_cached(model, empty(), copy_blocks, ForkableTable, PrefixCache(num_blocks, block_size), prompts)
    report("prefix-cached", got, want, f"; tokens found in the cache: {hits}")


def interleaved(
    model: LLM, pages: Pages, copy_blocks: Callable, table_class: type, pool_class: type, prompts: Mapping
) -> Answers:
    """The answers of several requests that take turns."""
    k_cache, _ = pages.caches[0]
    pool = pool_class(*k_cache.shape[:2])
    got: Answers = {id: [] for id in prompts}
    going = {
        id: through_table(model, pages, copy_blocks, table_class(pool), prompt, MAX_TOKENS)
        for id, prompt in prompts.items()
    }
    while going:
        for id, tokens in list(going.items()):
            token = next(tokens, None)
            if token is None:
                del going[id]
            else:
                got[id].append(token)
    return got


def forked(
    model: LLM,
    pages: Pages,
    copy_blocks: Callable,
    table,
    prompt: Sequence[int],
    continuations: Sequence[Sequence],
    max_tokens: int = MAX_TOKENS,
) -> list[list[int]]:
    """The answers to continuations of a prompt of 2 tokens or more, which is computed once, all but its last token."""
    next(through_table(model, pages, copy_blocks, table, prompt[:-1], 1))
    forks = [(table.fork(), tokens) for tokens in continuations]
    return [list(through_table(model, pages, copy_blocks, fork, tokens, max_tokens)) for fork, tokens in forks]


def prefix_cached(
    model: LLM, pages: Pages, copy_blocks: Callable, table_class: type, cache, prompts: Mapping
) -> tuple[Answers, int]:
    """The answers of requests one after another, and how many tokens of prompts were found in the cache."""
    got: Answers = {}
    hits = 0
    for id, prompt in prompts.items():
        table = table_class(cache)
        table.blocks, table.num_tokens = cache.match(prompt)
        hits += table.num_tokens
        got[id] = list(through_table(model, pages, copy_blocks, table, prompt, MAX_TOKENS))
        cache.insert([*prompt, *got[id]][: table.num_tokens], table.blocks)
        table.release()
    return got, hits


# -- unit 04: many requests in one batch


def batched(
    model: LLM, scheduler, flatten_batch: Callable, kv, pages: Pages, prompts: Mapping, want: Mapping
) -> tuple[Answers, str]:
    """Let a scheduler serve known answers, and compare what the model says behind every token of every step.

    The scheduler is told the plain loop's tokens, so this is a test of a server and no server. Returns the tokens that
    the model gave, and how many steps, preemptions and tokens computed there were.
    """
    known = {id: list(prompt) for id, prompt in prompts.items()}
    computed, steps, lost, tokens = dict.fromkeys(known, 0), 0, 0, 0
    got: Answers = {id: [] for id in known}
    for id, prompt in prompts.items():
        scheduler.add(Request(id, len(prompt), len(want[id])))
    while any(len(got[id]) < len(want[id]) for id in known):
        plan = scheduler.schedule()
        if not plan.scheduled and not plan.preempted:
            raise RuntimeError(f"step {steps}: nothing is scheduled, but requests are not finished")
        computed |= dict.fromkeys(plan.preempted, 0)
        lost += len(plan.preempted)
        if not plan.scheduled:
            continue
        batch = flatten_batch(plan, known, computed, kv)
        with torch.no_grad():
            said = model.logits(model.forward(batch.tokens, batch.positions, pages.bind(batch))).argmax(-1)
        outputs = _compare(plan, said.split(batch.query_lens), known, computed, got, want)
        scheduler.finish_step(plan, outputs)
        steps, tokens = steps + 1, tokens + plan.num_tokens
    return got, f"; steps: {steps}, tokens computed: {tokens}, preemptions: {lost}"


def _compare(plan, said: Sequence[Tensor], known: dict, computed: dict, got: dict, want: Mapping) -> dict[str, int]:
    """Write down the tokens that are new; of those said before, a request computed again must say the same."""
    outputs = {}
    for (id, n), rows in zip(plan.scheduled.items(), said, strict=True):
        first = len(known[id]) - len(got[id])  # the place of the answer's first token
        for place, token in enumerate(rows.tolist(), start=computed[id] + 1):
            if first <= place < len(known[id]):
                got[id][place - first] = token
        computed[id] += n
        if computed[id] == len(known[id]):
            outputs[id] = want[id][len(got[id])]
            got[id].append(int(rows[-1]))
            known[id].append(outputs[id])
    return outputs


def continuous_batching(flatten_batch: Callable, servers: Mapping[str, tuple[Callable, int]], unit) -> None:
    """Serve the tiny model with schedulers of unit 04 and print how the answers compare.

    Parameters
    ----------
    flatten_batch : callable
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
        pages = Pages.empty(model.config, num_blocks, 8, unit, torch.float64)
        got, note = batched(model, make(kv), flatten_batch, kv, pages, prompts, want)
        report(way, got, want, note)


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
    from servelab.ranks import SimCluster

    model, prompts = tiny_model(), tiny_prompts(2)
    want = plain_loop(model, prompts)

    def on_a_rank() -> tuple[Answers, int]:
        mine = LayeredLLM(model.config, model.weights, Communicator(all_reduce=all_reduce), DecoderLayer)
        matrices = sum(p.numel() for p in mine.layers[0].parameters() if p.dim() > 1)
        return plain_loop(mine, prompts), matrices

    for size in sizes:
        run = SimCluster(size).run(on_a_rank)
        answers, held = run.values[0]
        same = "" if all(other == answers for other, _ in run.values) else "not "
        note = f", {same}the same on all ranks; all-reduces: {len(run.collectives(0))}, weights of a layer: {held:,}"
        report(f"TP={size}", answers, want, note)
