"""Paged attention for serving: what unit 03 computes, with as little beside the arithmetic as PyTorch allows on a CPU.

`Pages` takes this module in place of unit 03's two functions; `FastPages` also works out once a step, for all layers,
where the contexts lie.

Requests with one new token are computed together, and their contexts are not copied. Take all keys of the cache as one
matrix: a score for each of them, and for each query, would be a product of two matrices, of which only the places that
the block tables name are wanted. That is PyTorch's ``sampled_addmm``, whose sparse pattern the block tables are. The
weighted sum of the values, picked by the same numbers, is an ``embedding_bag``. Pieces of prompts have queries enough
to pay for a copy of their context, and are computed one by one.
"""

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

from servelab.llm.kv import PagedStep, Pages
from servelab.llm.model import LLMConfig
from servelab.serving import FlatBatch

PART_COST = 256  # padding, in tokens, that costs as much as one more softmax


@dataclass(frozen=True)
class Decodes:
    """The requests with one query token, from the shortest context to the longest, in parts of like lengths.

    Parameters
    ----------
    rows : Tensor [B], int64
        Their query tokens in the flat batch.
    scores : Tensor [B * Hq, slots * Hkv], sparse CSR
        The pattern: for each query head the keys in its context, padded with keys of its own to its part's longest.
        The values are 0, and minus infinity at padding.
    columns, starts : Tensor, int32
        The pattern's columns, and where each row of it begins.
    parts : tuple of (int, int)
        Of each part the query heads and the longest context.
    """

    rows: Tensor
    scores: Tensor
    columns: Tensor
    starts: Tensor
    parts: tuple[tuple[int, int], ...]

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """The attention of the query tokens ``q`` [B, Hq, D], in the same shape."""
        keys, values = (cache.view(-1, q.shape[-1]) for cache in (k_cache, v_cache))
        scores = torch.sparse.sampled_addmm(self.scores, q.reshape(-1, q.shape[-1]), keys.t(), alpha=scale).values()
        sizes = [heads * longest for heads, longest in self.parts]
        for part, (_, longest) in zip(scores.split(sizes), self.parts, strict=True):
            part = part.view(-1, longest)
            torch.softmax(part, -1, out=part)
        return embedding_bag(self.columns, values, self.starts, mode="sum", per_sample_weights=scores).view(q.shape)


@dataclass(frozen=True)
class Chunk:
    """One request with several query tokens.

    Parameters
    ----------
    rows : slice
        Its query tokens in the flat batch.
    slots : Tensor [S], int64
        Where the keys and values of its context lie.
    mask : Tensor [Q, S], bool
        Where a query token may look.
    """

    rows: slice
    slots: Tensor
    mask: Tensor

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """The attention of the query tokens ``q`` [Q, Hq, D], in the same shape."""
        k, v = (cache.flatten(0, 1).index_select(0, self.slots).transpose(0, 1)[None] for cache in (k_cache, v_cache))
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=self.mask, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


class Contexts:
    """Where the contexts of a step lie: the same in every layer. ``shape`` is the cache's."""

    def __init__(self, batch: FlatBatch, shape: Sequence[int], num_heads: int, dtype: torch.dtype):
        first = [0, *accumulate(batch.query_lens)]
        single = [i for i, query in enumerate(batch.query_lens) if query == 1 and has_sparse()]
        single.sort(key=lambda i: batch.context_lens[i])
        self.decodes = _decodes(batch, single, first, shape, num_heads, dtype) if single else None
        taken = set(single)
        self.chunks = [
            _chunk(batch, i, slice(*rows), shape[1]) for i, rows in enumerate(pairwise(first)) if i not in taken
        ]

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """The attention of the flat batch ``q`` [T, Hq, D]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self.decodes:
            out[self.decodes.rows] = self.decodes.attend(q[self.decodes.rows], k_cache, v_cache, scale)
        for chunk in self.chunks:
            out[chunk.rows] = chunk.attend(q[chunk.rows], k_cache, v_cache, scale)
        return out


def split(contexts: Sequence[int]) -> list[range]:
    """Cut sorted context lengths into parts, where one more part costs less than the padding that it saves. O(n)."""
    parts, end = [], len(contexts)
    for start in range(len(contexts) - 2, -1, -1):
        if (contexts[end - 1] - contexts[start]) * (start + 1) > PART_COST:
            parts.append(range(start + 1, end))
            end = start + 1
    return [range(end), *reversed(parts)]


def _decodes(
    batch: FlatBatch, requests: list[int], first: list[int], shape: Sequence[int], num_heads: int, dtype: torch.dtype
) -> Decodes:
    device, group = batch.block_tables.device, num_heads // shape[2]
    heads = torch.arange(shape[2], device=device).repeat_interleave(group)[:, None]
    parts, columns, scores, lengths = [], [], [], []
    for part in split([batch.context_lens[i] for i in requests]):
        members = [requests[n] for n in part]
        contexts = torch.tensor([batch.context_lens[i] for i in members], device=device)[:, None]
        longest = batch.context_lens[members[-1]]
        places = torch.arange(longest, device=device)
        slots = _slots(batch.block_tables[members], places.minimum(contexts - 1), shape[1])  # padding is never NaN
        padding = torch.zeros(slots.shape, dtype=dtype, device=device).masked_fill(places >= contexts, -torch.inf)
        columns.append((slots[:, None] * shape[2] + heads).flatten())
        scores.append(padding[:, None].expand(-1, num_heads, -1).flatten())
        parts.append((len(part) * num_heads, longest))
        lengths += [longest] * parts[-1][0]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    flat, size = torch.cat(columns).to(torch.int32), (len(lengths), shape[0] * shape[1] * shape[2])
    pattern = torch.sparse_csr_tensor(starts, flat, torch.cat(scores), size, check_invariants=False)
    rows = torch.tensor([first[i] for i in requests], device=device)
    return Decodes(rows, pattern, flat, starts[:-1].clone(), tuple(parts))


def _chunk(batch: FlatBatch, request: int, rows: slice, block_size: int) -> Chunk:
    device, context, queries = batch.block_tables.device, batch.context_lens[request], batch.query_lens[request]
    slots = _slots(batch.block_tables[request], torch.arange(context, device=device), block_size)
    mask = torch.ones(queries, context, dtype=torch.bool, device=device).tril(context - queries)
    return Chunk(rows, slots, mask)


def _slots(tables: Tensor, places: Tensor, block_size: int) -> Tensor:
    return tables.gather(-1, places // block_size) * block_size + places % block_size


@functools.cache
def has_sparse() -> bool:
    """Whether this build of PyTorch has the sparse product; without it, decodes are computed one by one."""
    one = torch.ones(1, 1)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # PyTorch calls all of CSR "beta"
        try:
            torch.sparse.sampled_addmm(one.to_sparse_csr(), one, one)
        except RuntimeError:
            return False
    return True


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """As unit 03's: write the keys and values of new tokens into their slots; slot -1 is padding."""
    if (slot_mapping < 0).any():
        tokens = slot_mapping >= 0
        k, v, slot_mapping = k[tokens], v[tokens], slot_mapping[tokens]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, rows)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_lens: list[int],
    context_lens: list[int],
    scale: float,
) -> Tensor:
    """As unit 03's: causal attention of a flat batch over a paged KV cache."""
    nothing = torch.empty(0, dtype=torch.int64)
    batch = FlatBatch(nothing, nothing, query_lens, context_lens, nothing, block_tables)
    return Contexts(batch, k_cache.shape, q.shape[1], q.dtype).attend(q, k_cache, v_cache, scale)


@dataclass(frozen=True)
class FastPages(Pages):
    """Pages with the functions of this module, which look at a step's block tables once and not once a layer.

    For float32 and float64.
    """

    num_heads: int

    @classmethod
    def of(cls, config: LLMConfig, num_blocks: int, block_size: int, dtype=torch.float32, device="cpu") -> "FastPages":
        """Caches for a rank's heads."""
        unit = SimpleNamespace(write_kv=write_kv, paged_attention=paged_attention)
        caches = Pages.empty(config, num_blocks, block_size, unit, dtype, device).caches
        return cls(caches, write_kv, paged_attention, config.num_heads)

    def bind(self, batch: FlatBatch) -> "FastStep":
        """The pages as the KV of one step."""
        return FastStep(self, batch)


@dataclass(frozen=True)
class FastStep(PagedStep):
    """The pages during one step."""

    pages: FastPages

    @functools.cached_property
    def contexts(self) -> Contexts:
        k_cache, _ = self.pages.caches[0]
        return Contexts(self.batch, k_cache.shape, self.pages.num_heads, k_cache.dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self.pages.caches[layer]
        for cache, rows in ((k_cache, k), (v_cache, v)):
            cache.flatten(0, 1).index_copy_(0, self.batch.slot_mapping, rows)
        return self.contexts.attend(q, k_cache, v_cache, q.shape[-1] ** -0.5)
