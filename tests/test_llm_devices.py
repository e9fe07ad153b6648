"""The model, its pages and the engine on another device than the batch: nothing may stay behind, or be made elsewhere.

The meta device has no numbers but refuses to mix with the CPU, so it finds tensors that were forgotten. What the
numbers are on a GPU is tested where there is one.
"""

import pytest
import torch

from servelab.llm import LLM, load, thread
from servelab.llm.engine import WatchedScheduler, serve
from servelab.llm.fast_attention import fast_pages
from servelab.llm.fast_model import FastLLM
from servelab.llm.kv import Pages
from servelab.reference import capstone, continuous_batching, paged_kv
from servelab.serving import FlatBatch, PagedKV, Request, SchedulerConfig

BLOCKS, BLOCK = 40, 8
TABLES = torch.tensor([[3, 1, -1], [2, 0, 5], [7, -1, -1]])
MIXED = FlatBatch(
    tokens=torch.arange(7),
    positions=torch.tensor([9, 3, 4, 5, 6, 7, 2]),
    query_lens=[1, 5, 1],
    context_lens=[10, 8, 3],
    slot_mapping=torch.tensor([9, 19, 20, 21, 22, 23, 58]),
    block_tables=TABLES,
)


def readable(dtype, device):
    model = LLM(*load(dtype=dtype, device=device))
    return model, Pages.of(model, BLOCKS, BLOCK, paged_kv)


def fast(dtype, device):
    model = FastLLM(*load(dtype=dtype, device=device))
    return model, fast_pages(model, BLOCKS, BLOCK)


@pytest.mark.parametrize("kind", [LLM, FastLLM])
def test_a_batch_on_the_cpu_is_computed_where_the_model_is(kind):
    model = kind(*load(dtype=torch.bfloat16, device="meta"))
    pages = fast_pages(model, BLOCKS, BLOCK)
    logits = model.logits(model.forward(MIXED.tokens, MIXED.positions, pages.bind(MIXED)))
    assert logits.device.type == "meta" and logits.dtype == torch.bfloat16 and logits.shape == (7, 256)


@pytest.mark.parametrize("parts", [readable, fast])
def test_bfloat16_is_the_same_model_with_fewer_digits(parts):
    (exact, exact_pages), (model, pages) = readable(torch.float64, "cpu"), parts(torch.bfloat16, "cpu")
    want, got = (
        m.logits(m.forward(MIXED.tokens, MIXED.positions, p.bind(MIXED)))
        for m, p in ((exact, exact_pages), (model, pages))
    )
    assert (got - want).norm() < 0.02 * want.norm()


def answers(model, pages):
    """What the course's engine answers to four prompts, with preemptions."""
    kv = PagedKV(paged_kv.BlockAllocator(30, BLOCK))
    config = SchedulerConfig(4, 32, eos_token_id=thread.NO_EOS)
    scheduler = WatchedScheduler(continuous_batching.ChunkedScheduler(config, kv), kv)
    asked = [(Request(id, len(prompt), 24), prompt) for id, prompt in thread.tiny_prompts().items()]
    return serve(capstone.Engine(model, scheduler, kv, pages), scheduler, asked)[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("parts", [readable, fast])
def test_the_engine_serves_from_a_gpu(parts):
    want = answers(*readable(torch.float64, "cpu"))
    assert answers(*parts(torch.float64, "cuda")) == want
    rounded = answers(*parts(torch.bfloat16, "cuda"))
    pairs = [pair for id in want for pair in zip(want[id], rounded[id], strict=True)]
    assert sum(a == b for a, b in pairs) > len(pairs) / 2  # behind a near-tie that went the other way, all may differ
