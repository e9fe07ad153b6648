"""The fast attention and the fast model against unit 03's reference and the readable model, in float64."""

from random import Random

import pytest
import torch

from servelab.llm import LLM, LLMConfig, fast_attention, smollm, thread
from servelab.llm.fast_attention import fast_pages
from servelab.llm.fast_model import FastLLM
from servelab.llm.generate import greedy
from servelab.llm.kv import ContiguousKV, Pages
from servelab.reference import continuous_batching, paged_kv
from servelab.serving import FlatBatch, PagedKV, SchedulerConfig

BLOCK = 4


def step(rng: Random, heads: int, kv_heads: int, decodes: int, chunks: int, dtype=torch.float64):
    """Arguments of `paged_attention`: decodes and pieces of prompts, mixed; unused slots hold NaN."""
    lens = [(1, rng.choice((1, 5, 16, 300, 700))) for _ in range(decodes)]
    lens += [(query, query + rng.choice((0, 3, 50))) for query in (rng.randint(2, 40) for _ in range(chunks))]
    rng.shuffle(lens)
    queries, contexts = [list(column) for column in zip(*lens, strict=True)]
    used = [-(-context // BLOCK) for context in contexts]
    blocks = list(range(sum(used) + 3))
    rng.shuffle(blocks)
    tables = torch.full((len(lens), max(used) + 1), -1)
    caches = [torch.full((len(blocks), BLOCK, kv_heads, 8), torch.nan, dtype=dtype) for _ in range(2)]
    for table, count, context in zip(tables, used, contexts, strict=True):
        table[:count] = torch.tensor([blocks.pop() for _ in range(count)])
        slots = (table[:count, None] * BLOCK + torch.arange(BLOCK)).flatten()[:context]
        for cache in caches:
            cache.view(-1, kv_heads, 8)[slots] = torch.randn(context, kv_heads, 8, dtype=dtype)
    return torch.randn(sum(queries), heads, 8, dtype=dtype), *caches, tables, queries, contexts, 8**-0.5


def attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
    """The module's attention behind the signature of unit 03's."""
    nothing = torch.empty(0, dtype=torch.int64)
    batch = FlatBatch(nothing, nothing, query_lens, context_lens, nothing, block_tables)
    keys, values = fast_attention.matrix(k_cache), fast_attention.matrix(v_cache)
    return fast_attention.Contexts(batch, k_cache, q.shape[1]).attend(q, keys, values, scale)


@pytest.mark.parametrize("seed", range(12))
def test_attention_is_that_of_the_reference(seed):
    rng = Random(seed)
    torch.manual_seed(seed)
    heads, kv_heads = rng.choice(((4, 4), (6, 2), (3, 1)))
    decodes = rng.randint(0, 9)
    arguments = step(rng, heads, kv_heads, decodes, rng.randint(0 if decodes else 1, 3))
    got, want = attention(*arguments), paged_kv.paged_attention(*arguments)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, BLOCK, 2, 8), (4, 2, BLOCK, 8)])
def test_rows_are_where_slots_are_however_a_cache_lies(shape):
    cache = torch.randn(shape) if shape[1] == BLOCK else torch.randn(shape).transpose(1, 2)
    slots = torch.tensor([7, 3, 0, 12, 15])
    found = fast_attention.matrix(cache)[fast_attention.rows_of(slots, cache)]
    assert torch.equal(found, cache.flatten(0, 1)[slots])


@pytest.mark.parametrize("contexts", [[5], [5] * 8, [40] * 7 + [300], [1, 60, 61, 300, 2000], [1000] * 9])
def test_parts_hold_every_request_once_and_little_padding(contexts):
    parts = fast_attention.split(contexts)
    assert [n for part in parts for n in part] == list(range(len(contexts)))
    padded = sum(len(part) * contexts[part[-1]] for part in parts)
    assert padded <= sum(contexts) + fast_attention.PART_COST * len(parts)


def test_without_the_sparse_product_the_attention_is_the_same(monkeypatch):
    torch.manual_seed(0)
    arguments = step(Random(0), 6, 2, 5, 2)
    want = attention(*arguments)
    monkeypatch.setattr(fast_attention, "has_sparse", lambda device, dtype: False)
    torch.testing.assert_close(attention(*arguments), want, rtol=1e-12, atol=1e-12)


CONFIG = LLMConfig(
    vocab_size=64,
    hidden_size=24,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    max_model_len=128,
)


def random_weights(dtype):
    return {
        name: torch.randn(shape, dtype=dtype) * (shape[-1] ** -0.5 if len(shape) > 1 else 1)
        for name, shape in CONFIG.shapes().items()
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_the_fast_model_computes_what_the_readable_one_does(dtype, tolerance):
    torch.manual_seed(0)
    weights = random_weights(dtype)
    models, kvs = (LLM(CONFIG, weights), FastLLM(CONFIG, weights)), (ContiguousKV(), ContiguousKV())
    for tokens, start in ((torch.arange(20), 0), (torch.tensor([63]), 20)):
        positions = torch.arange(start, start + len(tokens))
        want, got = (model.logits(model.forward(tokens, positions, kv)) for model, kv in zip(models, kvs, strict=True))
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_fast_pages_hold_what_pages_hold():
    torch.manual_seed(0)
    model = LLM(CONFIG, random_weights(torch.float64))
    slow = Pages.of(model, 8, BLOCK, paged_kv)
    fast = fast_pages(model, 8, BLOCK)
    tables = torch.tensor([[3, 1, -1], [2, 0, 5]])
    slots = torch.tensor([*range(12, 16), 4, *range(8, 12), *range(4), 20])
    places = torch.tensor([*range(5), *range(9)])
    prompts = FlatBatch(torch.randint(64, (14,)), places, [5, 9], [5, 9], slots, tables)
    decode = FlatBatch(torch.tensor([8, 9]), torch.tensor([5, 9]), [1, 1], [6, 10], torch.tensor([5, 21]), tables)
    for batch in (prompts, decode):
        want, got = (model.forward(batch.tokens, batch.positions, pages.bind(batch)) for pages in (slow, fast))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("num_blocks", "budget"), [(40, 256), (11, 256), (40, 5), (11, 5)])
def test_served_with_the_fast_parts_answers_are_those_of_the_plain_loop(num_blocks, budget):
    torch.manual_seed(0)
    weights = random_weights(torch.float64)
    prompts = {f"r{n}": torch.randint(64, (length,)).tolist() for n, length in enumerate((3, 9, 14, 5))}
    want = thread.plain_loop(LLM(CONFIG, weights), prompts)
    kv = PagedKV(paged_kv.BlockAllocator(num_blocks, BLOCK))
    scheduler = continuous_batching.ChunkedScheduler(SchedulerConfig(3, budget, eos_token_id=thread.NO_EOS), kv)
    model = FastLLM(CONFIG, weights)
    parts = continuous_batching.flatten_batch, continuous_batching.sampled_rows
    server = thread.Server(model, scheduler, *parts, kv, fast_pages(model, num_blocks, BLOCK))
    for id, prompt in prompts.items():
        server.add(id, prompt, thread.MAX_TOKENS)
    server.run()
    assert server.answers == want


@pytest.mark.skipif(bool(smollm.fetch.problem()), reason="the real model is not here")
def test_the_real_model_says_the_same():
    config, weights = smollm.load()
    prompt = smollm.tokenizer().apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    with torch.no_grad():
        assert list(greedy(FastLLM(config, weights), prompt, 20)) == list(greedy(LLM(config, weights), prompt, 20))
