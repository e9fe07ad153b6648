"""Paged attention for serving: what unit 03 computes, with as little beside the arithmetic as PyTorch allows on a CPU.

`FastPages` takes the place of `Pages` and works out once a step, for all layers, where the contexts lie.

Requests with one new token are computed together, and their contexts are not copied. Take all keys of the cache as one
matrix: a score for each of them, and for each query, would be a product of two matrices, of which only the places that
the block tables name are wanted. That is PyTorch's ``sampled_addmm``, whose sparse pattern the block tables are. The
weighted sum of the values, picked by the same numbers, is an ``embedding_bag``. Where that product is missing, and on
a GPU, contexts are copied. Pieces of prompts have queries enough to pay for a copy, and are computed one by one.
"""

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

from servelab.llm.model import LLM
from servelab.serving import FlatBatch

PART_COST = 256  # padding, in tokens, that costs as much as one more softmax


@dataclass(frozen=True)
class Decodes:
    """The requests with one query token, in parts of like context lengths.

    Parameters
    ----------
    scores : Tensor [B * Hq, rows], sparse CSR
        Its pattern: for each query head the keys in its context, padded with one of its own keys to its part's longest.
        The values are overwritten in every layer.
    columns, starts : Tensor, int32
        The pattern's columns, and where each row of it begins.
    values : Tensor
        The pattern's values.
    padding : Tensor, int64
        Which of them are padding.
    parts : tuple of Tensor [heads, longest context]
        Those of each part, as a matrix.
    """

    scores: Tensor
    columns: Tensor
    starts: Tensor
    values: Tensor
    padding: Tensor
    parts: tuple[Tensor, ...]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """The attention of the query tokens ``q`` [B, Hq, D], in the same shape."""
        rows = q.reshape(-1, q.shape[-1])
        torch.sparse.sampled_addmm(self.scores, rows, keys.t(), beta=0, alpha=scale, out=self.scores)
        if len(self.padding):
            self.values.index_fill_(0, self.padding, -torch.inf)
        for part in self.parts:
            torch.softmax(part, -1, out=part)
        weighted = embedding_bag(self.columns, values, self.starts, mode="sum", per_sample_weights=self.values)
        return weighted.view(q.shape)


@dataclass(frozen=True)
class Gathered:
    """Requests with one query token, whose contexts are copied side by side: on a GPU, and without the sparse product.

    Parameters
    ----------
    rows : Tensor [B, Hkv, S], int64
        Where the keys and values of their contexts lie, padded with one of their own to the longest.
    mask : Tensor [B, 1, 1, S], bool
        What is not padding.
    """

    rows: Tensor
    mask: Tensor

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """The attention of the query tokens ``q`` [B, Hq, D], in the same shape."""
        k, v = (x.index_select(0, self.rows.flatten()).view(*self.rows.shape, -1) for x in (keys, values))
        grouped = q.unflatten(1, (self.rows.shape[1], -1))
        return scaled_dot_product_attention(grouped, k, v, attn_mask=self.mask, scale=scale).flatten(1, 2)


@dataclass(frozen=True)
class Chunk:
    """One request with several query tokens.

    Parameters
    ----------
    rows : Tensor [Hkv, S], int64
        Where the keys and values of its context lie.
    mask : Tensor [Q, S], bool
        Where a query token may look.
    """

    rows: Tensor
    mask: Tensor

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """The attention of the query tokens ``q`` [Q, Hq, D], in the same shape."""
        k, v = (x.index_select(0, self.rows.flatten()).view(1, *self.rows.shape, -1) for x in (keys, values))
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=self.mask, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


Piece = Decodes | Gathered | Chunk


class Contexts:
    """Where the contexts of a step lie in a cache: the same in every layer."""

    def __init__(self, batch: FlatBatch, cache: Tensor, num_heads: int):
        starts = [0, *accumulate(batch.query_lens)]
        decodes: list[int] = []
        chunks: list[Chunk] = []
        for i, query in enumerate(batch.query_lens):
            if query == 1:
                decodes.append(i)
            else:
                chunks.append(_chunk(batch, i, cache))
        parts = split(sorted(batch.context_lens[i] for i in decodes))
        if len(parts) > 1:
            decodes.sort(key=lambda i: batch.context_lens[i])
        places = [_places(batch, [decodes[n] for n in part], cache) for part in parts if part]
        if places and has_sparse(cache.device.type, cache.dtype):
            self.pieces: list[Piece] = [_decodes(places, cache, num_heads), *chunks]
            self.sizes = [len(decodes)]
        else:
            self.pieces = [*(Gathered(rows, mask[:, None, None]) for rows, mask in places), *chunks]
            self.sizes = [len(rows) for rows, _ in places]
        self.sizes += [len(chunk.mask) for chunk in chunks]
        taken, order = set(decodes), [starts[i] for i in decodes]
        for i, (start, end) in enumerate(pairwise(starts)):
            order += [] if i in taken else range(start, end)
        self.order = None if order == list(range(len(order))) else torch.tensor(order, device=cache.device)
        self.back = None if self.order is None else self.order.argsort()

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """The attention of the flat batch ``q`` [T, Hq, D]; keys and values as `matrix` gives them."""
        if self.order is not None:
            q = q.index_select(0, self.order)
        if len(self.pieces) == 1:
            out = self.pieces[0].attend(q, keys, values, scale)
        else:
            parts = zip(self.pieces, q.split(self.sizes), strict=True)
            out = torch.cat([piece.attend(rows, keys, values, scale) for piece, rows in parts])
        return out if self.back is None else out.index_select(0, self.back)


def split(contexts: Sequence[int]) -> list[range]:
    """Cut sorted context lengths into parts, where one more part costs less than the padding that it saves. O(n)."""
    parts, end = [], len(contexts)
    for start in range(len(contexts) - 2, -1, -1):
        if (contexts[end - 1] - contexts[start]) * (start + 1) > PART_COST:
            parts.append(range(start + 1, end))
            end = start + 1
    return [range(end), *reversed(parts)]


def matrix(cache: Tensor) -> Tensor:
    """The keys of a cache [blocks, block_size, Hkv, D] as the rows of a matrix, in whatever order they lie."""
    last = sum((size - 1) * stride for size, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True))
    width = cache.shape[3]
    return cache.as_strided((last // width + 1, width), (width, 1))


def rows_of(slots: Tensor, cache: Tensor) -> Tensor:
    """The rows of `matrix` where slots [..] of a cache are, for each KV head: [.., Hkv]."""
    blocks, places, heads = (stride // cache.shape[3] for stride in cache.stride()[:3])
    first = slots // cache.shape[1] * blocks + slots % cache.shape[1] * places
    return first[..., None] + torch.arange(cache.shape[2], device=slots.device) * heads


def _places(batch: FlatBatch, requests: Sequence[int], cache: Tensor) -> tuple[Tensor, Tensor]:
    """Where the contexts of requests lie, [B, Hkv, S], padded to the longest; and what is not padding, [B, S]."""
    lengths = [batch.context_lens[i] for i in requests]
    contexts = torch.tensor(lengths, device=cache.device)[:, None]
    places = torch.arange(max(lengths), device=cache.device)
    slots = _slots(batch.block_tables[requests], places.minimum(contexts - 1), cache.shape[1])  # padding is never NaN
    return rows_of(slots, cache).transpose(1, 2), places < contexts


def _decodes(places: Sequence[tuple[Tensor, Tensor]], cache: Tensor, num_heads: int) -> Decodes:
    columns, padding, shapes, lengths = [], [], [], []
    for rows, mask in places:
        columns.append(rows.repeat_interleave(num_heads // cache.shape[2], dim=1).flatten())
        padding.append(~mask[:, None].expand(-1, num_heads, -1).flatten())
        shapes.append((len(mask) * num_heads, mask.shape[1]))
        lengths += [mask.shape[1]] * shapes[-1][0]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    flat, shape = torch.cat(columns).to(torch.int32), (len(lengths), len(matrix(cache)))
    zeros = torch.zeros(len(flat), dtype=cache.dtype)
    pattern = torch.sparse_csr_tensor(starts, flat, zeros, shape, check_invariants=False)
    values, sizes = pattern.values(), [heads * longest for heads, longest in shapes]
    parts = tuple(part.view(each) for part, each in zip(values.split(sizes), shapes, strict=True))
    return Decodes(pattern, flat, starts[:-1].clone(), values, torch.cat(padding).nonzero()[:, 0], parts)


def _chunk(batch: FlatBatch, request: int, cache: Tensor) -> Chunk:
    device, context, queries = batch.block_tables.device, batch.context_lens[request], batch.query_lens[request]
    slots = _slots(batch.block_tables[request], torch.arange(context, device=device), cache.shape[1])
    mask = torch.ones(queries, context, dtype=torch.bool, device=device).tril(context - queries)
    return Chunk(rows_of(slots, cache).t(), mask)


def _slots(tables: Tensor, places: Tensor, block_size: int) -> Tensor:
    return tables.gather(-1, places // block_size) * block_size + places % block_size


@functools.cache
def has_sparse(device: str, dtype: torch.dtype) -> bool:
    """Whether the sparse product is there, and worth it: on a CPU, unless this build of PyTorch lacks it."""
    one = torch.ones(1, 1, dtype=dtype)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # PyTorch calls all of CSR "beta"
        try:
            torch.sparse.sampled_addmm(one.to_sparse_csr(), one, one)
        except RuntimeError:
            return False
    return device == "cpu"


@dataclass(frozen=True)
class FastPages:
    """The KV of many requests in blocks, like `Pages`, but within a block all keys of one head lie together.

    Parameters
    ----------
    caches : sequence of (Tensor, Tensor)
        Keys and values of each layer, [blocks, block_size, Hkv, D].
    num_heads : int
        Query heads.
    """

    caches: Sequence[tuple[Tensor, Tensor]]
    num_heads: int

    @functools.cached_property
    def matrices(self) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of each layer as `matrix` gives them."""
        return [(matrix(k_cache), matrix(v_cache)) for k_cache, v_cache in self.caches]

    def bind(self, batch: FlatBatch) -> "FastStep":
        """The pages as the KV of one step."""
        return FastStep(self, batch.to(self.caches[0][0].device))


@dataclass(frozen=True)
class FastStep:
    """The pages during one step, whose block tables are looked at once and not once a layer."""

    pages: FastPages
    batch: FlatBatch

    @functools.cached_property
    def rows(self) -> Tensor:
        return rows_of(self.batch.slot_mapping, self.pages.caches[0][0]).flatten()

    @functools.cached_property
    def contexts(self) -> Contexts:
        return Contexts(self.batch, self.pages.caches[0][0], self.pages.num_heads)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.pages.matrices[layer]
        keys.index_copy_(0, self.rows, k.flatten(0, 1))
        values.index_copy_(0, self.rows, v.flatten(0, 1))
        return self.contexts.attend(q, keys, values, q.shape[-1] ** -0.5)


def fast_pages(model: LLM, num_blocks: int, block_size: int) -> FastPages:
    """Empty pages for a model, of its type and on its device."""
    config = model.config
    shape = (2, num_blocks, config.num_kv_heads, block_size, config.head_dim)
    layers = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(config.num_layers)]
    return FastPages([tuple(kv.transpose(2, 3)) for kv in layers], config.num_heads)
