"""Answers to the paged attention exercise: `write_kv` and `paged_attention`."""

import math
from itertools import accumulate

from servelab.answers import right, wrong


def attention(expand=None, hidden=None, blocks=None, keep=None, clean=None, positions=None, factor=None, weigh=None):
    """A straightforward `paged_attention` in which single steps can be replaced by wrong ones."""

    def paged_attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        import torch

        outs, start = [], 0
        for table, query, context in zip(block_tables, query_lens, context_lens, strict=True):
            size = k_cache.shape[1]
            used = table[: blocks(context, size)] if blocks else table[: math.ceil(context / size)]
            length = keep(context, len(used) * size) if keep else context
            k, v = (cache[used].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            k, v = (clean(x) if clean else x for x in (k, v))
            group = q.shape[1] // k.shape[1]
            k, v = (expand(x, group) if expand else x.repeat_interleave(group, dim=1) for x in (k, v))
            first = positions(query, context) if positions else context - query
            own = torch.arange(first, first + query)[:, None]
            masked = torch.arange(len(k)) > own
            masked = hidden(masked, own, torch.arange(len(k)), context) if hidden else masked
            used_scale = factor(scale, q.shape[2]) if factor else scale
            scores = torch.einsum("qhd,khd->hqk", q[start : start + query], k) * used_scale
            weights = weigh(scores, masked) if weigh else scores.masked_fill(masked, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
            start += query
        return torch.cat(outs)

    return paged_attention


def _with(reference, **steps):
    return reference.write_kv, attention(**steps)


@wrong("mask off by one: a query sees the next token", case="causal inside a chunk")
def sees_the_next(reference):
    return _with(reference, hidden=lambda masked, own, keys, context: keys > own + 1)


@wrong("mask off by one: a query does not see itself", case="causal inside a chunk")
def blind_to_itself(reference):
    return _with(reference, hidden=lambda masked, own, keys, context: keys >= own)


@wrong("no causal mask", case="causal inside a chunk")
def no_mask(reference):
    return _with(reference, hidden=lambda masked, own, keys, context: masked & False)


@wrong("the chunk's offset is forgotten", case="causal inside a chunk")
def no_offset(reference):
    return _with(reference, positions=lambda query, context: 0)


@wrong("the context does not include the query", case="causal inside a chunk")
def context_excludes_query(reference):
    return _with(reference, positions=lambda query, context: context)


@wrong("KV heads tiled instead of interleaved", case="query heads share KV heads")
def tiled_heads(reference):
    return _with(reference, expand=lambda x, group: x.repeat(1, group, 1))


@wrong("every query head uses KV head 0", case="query heads share KV heads")
def first_head(reference):
    return _with(reference, expand=lambda x, group: x[:, :1].repeat(1, group * x.shape[1], 1))


@wrong("scale forgotten", case="scale")
def no_scale(reference):
    return _with(reference, factor=lambda scale, dim: 1.0)


@wrong("scale is always 1 / sqrt(D)", case="scale")
def own_scale(reference):
    return _with(reference, factor=lambda scale, dim: dim**-0.5)


def _decode_sees_all(masked, own, keys, context):
    """No mask for a single query: whatever was gathered counts."""
    return masked if len(own) > 1 else masked & False


@wrong("a block too many at a block boundary", case="finds the tokens of a context")
def boundary_block(reference):
    return _with(
        reference,
        blocks=lambda context, size: context // size + 1,
        keep=lambda context, slots: context if slots - context < 4 else slots,
        hidden=_decode_sees_all,
    )


@wrong("a partly filled block is left out", case="finds the tokens of a context")
def full_blocks_only(reference):
    return _with(reference, blocks=lambda context, size: max(1, context // size))


@wrong("the whole last block is attended to", case="block boundaries")
def whole_blocks(reference):
    return _with(reference, keep=lambda context, slots: slots, hidden=_decode_sees_all)


@wrong("garbage masked in the scores only: 0 * NaN", case="unused slots stay out")
def values_not_masked(reference):
    return _with(reference, keep=lambda context, slots: slots)


@wrong("garbage turned into zeros, which still take weight", case="unused slots stay out")
def garbage_to_zero(reference):
    return _with(
        reference,
        keep=lambda context, slots: slots,
        clean=lambda x: x.nan_to_num(0.0, 0.0, 0.0),
        hidden=_decode_sees_all,
    )


@wrong("padding -1 gathered as the last block", case="unused slots stay out")
def gathers_padding(reference):
    return _with(
        reference,
        blocks=lambda context, size: None,
        keep=lambda context, slots: slots,
    )


@wrong("garbage cleaned in the cache itself", case="leaves its arguments unchanged")
def cleans_the_cache(reference):
    def paged_attention(q, k_cache, v_cache, *rest):
        k_cache.nan_to_num_(0.0), v_cache.nan_to_num_(0.0)
        return reference.paged_attention(q, k_cache, v_cache, *rest)

    return reference.write_kv, paged_attention


@wrong("scales the queries in place", case="leaves its arguments unchanged")
def scales_in_place(reference):
    def paged_attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        q.mul_(scale)
        return reference.paged_attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, 1.0)

    return reference.write_kv, paged_attention


@wrong("a context length is counted up in place", case="leaves its arguments unchanged")
def changes_a_list(reference):
    def paged_attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        out = reference.paged_attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale)
        context_lens[0] += 1
        return out

    return reference.write_kv, paged_attention


@wrong("the block table is not used: blocks in the order of the cache", case="finds the tokens of a context")
def ignores_the_table(reference):
    def paged_attention(q, k_cache, v_cache, block_tables, *rest):
        import torch

        tables = torch.arange(block_tables.numel()).reshape(block_tables.shape)
        return reference.paged_attention(q, k_cache, v_cache, tables, *rest)

    return reference.write_kv, paged_attention


@wrong("no softmax", case="softmax of the scores")
def no_softmax(reference):
    def paged_attention(q, *rest):
        return reference.paged_attention(q * 0, *rest)

    return reference.write_kv, paged_attention


@wrong("softmax without the largest score: 0 / 0", case="softmax of the scores")
def no_peak(reference):
    def weigh(scores, masked):
        weights = scores.masked_fill(masked, float("-inf")).exp()
        return weights / weights.sum(-1, keepdim=True)

    return _with(reference, weigh=weigh)


def _filled(low):
    return lambda reference: _with(reference, weigh=lambda scores, masked: scores.masked_fill(masked, low).softmax(-1))


hundred = wrong("hidden scores are -100", case="softmax of the scores")(_filled(-100.0))
thousand = wrong("hidden scores are -1000", case="softmax of the scores")(_filled(-1000.0))


@wrong("an array of numpy instead of a tensor", case="the dtype of its arguments")
def numpy_array(reference):
    return reference.write_kv, lambda *arguments: reference.paged_attention(*arguments).numpy()


@wrong("a list of rows instead of a tensor", case="softmax of the scores")
def rows(reference):
    return reference.write_kv, lambda *arguments: list(reference.paged_attention(*arguments))


@wrong("pads the queries of the batch", case="a mixed batch")
def padded_rows(reference):
    def paged_attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        longest = max(query_lens)
        whole = reference.paged_attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale)
        return whole if longest == min(query_lens) else whole.flip(0)

    return reference.write_kv, paged_attention


@wrong("one context length for the whole batch", case="a mixed batch")
def one_context(reference):
    def paged_attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        shortest = [max(query, min(context_lens)) for query in query_lens]
        return reference.paged_attention(q, k_cache, v_cache, block_tables, query_lens, shortest, scale)

    return reference.write_kv, paged_attention


@wrong("float64 all the way", case="softmax of the scores")
def doubles(reference):
    def paged_attention(q, k_cache, v_cache, *rest):
        return reference.paged_attention(q.double(), k_cache.double(), v_cache.double(), *rest)

    return reference.write_kv, paged_attention


@wrong("the result is collected in float32, whatever q is", case="the dtype of its arguments")
def collected_in_single(reference):
    def paged_attention(q, *rest):
        import torch

        out = torch.zeros(q.shape)
        out[:] = reference.paged_attention(q, *rest)
        return out

    return reference.write_kv, paged_attention


@wrong("weights in float32", case="the dtype of its arguments")
def single_weights(reference):
    def paged_attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        import torch

        outs = []
        rows = zip(q.split(query_lens), block_tables, context_lens, strict=True)
        for row, table, context in rows:
            k, v = (reference.gather_context(cache, table, context) for cache in (k_cache, v_cache))
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", row, k) * scale
            hidden = torch.arange(context) > torch.arange(context - len(row), context)[:, None]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1, dtype=torch.float32)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outs)

    return reference.write_kv, paged_attention


def _writing(change):
    return lambda reference: (change(reference), reference.paged_attention)


@wrong("-1 writes the last slot", case="does not write padding")
@_writing
def writes_padding(reference):
    def write_kv(k_cache, v_cache, k, v, slot_mapping):
        k_cache.flatten(0, 1)[slot_mapping] = k
        v_cache.flatten(0, 1)[slot_mapping] = v

    return write_kv


@wrong("zeroes the padding tokens in place", case="leaves its arguments unchanged")
@_writing
def zeroes_padding(reference):
    def write_kv(k_cache, v_cache, k, v, slot_mapping):
        reference.write_kv(k_cache, v_cache, k, v, slot_mapping)
        k[slot_mapping < 0] = 0

    return write_kv


@wrong("padding moved to slot 0", case="does not write padding")
@_writing
def clamps_padding(reference):
    return lambda k_cache, v_cache, k, v, slots: reference.write_kv(k_cache, v_cache, k, v, slots.clamp(min=0))


@wrong("slot 0 taken for padding", case="writes each token to its slot")
@_writing
def slot_zero(reference):
    def write_kv(k_cache, v_cache, k, v, slot_mapping):
        wanted = slot_mapping > 0
        reference.write_kv(k_cache, v_cache, k[wanted], v[wanted], slot_mapping[wanted])

    return write_kv


@wrong("padding left out of the slots only", case="does not write padding")
@_writing
def shifted(reference):
    def write_kv(k_cache, v_cache, k, v, slot_mapping):
        slots = slot_mapping[slot_mapping >= 0]
        reference.write_kv(k_cache, v_cache, k[: len(slots)], v[: len(slots)], slots)

    return write_kv


@wrong("writes float32, whatever the caches hold", case="the dtype of its arguments")
@_writing
def writes_single(reference):
    return lambda k_cache, v_cache, k, v, slots: reference.write_kv(k_cache, v_cache, k.float(), v.float(), slots)


@wrong("writes into a copy", case="writes each token to its slot")
@_writing
def into_a_copy(reference):
    return lambda k_cache, v_cache, *rest: reference.write_kv(k_cache.clone(), v_cache.clone(), *rest)


@wrong("keys in both caches", case="writes each token to its slot")
@_writing
def keys_twice(reference):
    return lambda k_cache, v_cache, k, v, slots: reference.write_kv(k_cache, v_cache, k, k, slots)


@wrong("slots in the order of offset, then block", case="writes each token to its slot")
@_writing
def offset_first(reference):
    def write_kv(k_cache, v_cache, k, v, slot_mapping):
        blocks = k_cache.shape[0]
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                k_cache[slot % blocks, slot // blocks] = k[token]
                v_cache[slot % blocks, slot // blocks] = v[token]

    return write_kv


@right("a loop over tokens, and scaled_dot_product_attention with a built mask")
def with_sdpa(reference):
    def write_kv(k_cache, v_cache, k, v, slot_mapping):
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, k_cache.shape[1])
                k_cache[block, offset], v_cache[block, offset] = k[token], v[token]

    def paged_attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        size, outs = k_cache.shape[1], []
        rows = q.split(list(query_lens))
        for row, table, context in zip(rows, block_tables.tolist(), context_lens, strict=True):
            slots = torch.tensor([table[i // size] * size + i % size for i in range(context)])
            k, v = (cache.flatten(0, 1)[slots].transpose(0, 1) for cache in (k_cache, v_cache))
            visible = torch.ones(context, context).tril().bool()[-len(row) :]
            out = scaled_dot_product_attention(
                row.transpose(0, 1), k, v, attn_mask=visible, scale=scale, enable_gqa=row.shape[1] != k.shape[0]
            )
            outs.append(out.transpose(0, 1))
        return torch.cat(outs)

    return write_kv, paged_attention


@right("all requests at once, padded, with values masked too")
def vectorised(reference):
    def write_kv(k_cache, v_cache, k, v, slot_mapping):
        import torch

        (tokens,) = torch.where(slot_mapping != -1)
        slots = slot_mapping[tokens]
        where = (slots // k_cache.shape[1], slots % k_cache.shape[1])
        k_cache.index_put_(where, k[tokens])
        v_cache.index_put_(where, v[tokens])

    def paged_attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        import torch

        query, context = torch.tensor(query_lens), torch.tensor(context_lens)
        request = torch.repeat_interleave(torch.arange(len(query)), query)
        starts = torch.tensor([0, *accumulate(query_lens)][:-1])
        position = torch.arange(len(q)) - starts[request] + (context - query)[request]
        k, v = (cache[block_tables.clamp(min=0)].flatten(1, 2) for cache in (k_cache, v_cache))
        real = torch.arange(k.shape[1]) < context[:, None]
        k, v = (torch.where(real[..., None, None], x, torch.zeros(())) for x in (k, v))
        heads, kv_heads = q.shape[1], k.shape[2]
        grouped = q.reshape(len(q), kv_heads, heads // kv_heads, -1)
        scores = scale * torch.einsum("tkgd,tskd->tkgs", grouped, k[request])
        scores[~(torch.arange(k.shape[1]) <= position[:, None])[:, None, None].expand_as(scores)] = -torch.inf
        return torch.einsum("tkgs,tskd->tkgd", torch.softmax(scores, -1), v[request]).flatten(1, 2)

    return write_kv, paged_attention


@wrong("computes in float32 and returns the dtype of q", case="the dtype of its arguments")
def single(reference):
    def paged_attention(q, k_cache, v_cache, *rest):
        return reference.paged_attention(q.float(), k_cache.float(), v_cache.float(), *rest).to(q.dtype)

    return reference.write_kv, paged_attention
