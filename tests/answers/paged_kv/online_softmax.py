"""Answers to the block-wise attention exercise."""

import math
from types import FunctionType

from servelab.answers import right, wrong


def with_fold(reference, fold_block):
    """The reference's block-wise attention on another `fold_block`."""
    names = {**vars(reference), "fold_block": fold_block}
    for name in ("attend_blocks", "paged_attention_blockwise"):
        names[name] = FunctionType(getattr(reference, name).__code__, names, name)
    return names["paged_attention_blockwise"]


@wrong("softmax without running max", case="large scores")
def no_peak(reference):
    def fold_block(summary, scores, v):
        import torch

        peak, total, mixed = summary
        weights = torch.exp(scores)
        return peak, total + weights.sum(-1), mixed + torch.einsum("hqn,nhd->hqd", weights, v)

    return with_fold(reference, fold_block)


@wrong("the first block's peak for all", case="large scores")
def first_peak(reference):
    def fold_block(summary, scores, v):
        import torch

        peak, total, mixed = summary
        peak = torch.where(peak.isinf(), scores.amax(-1), peak)
        weights = torch.exp(scores - peak[..., None])
        return peak, total + weights.sum(-1), mixed + torch.einsum("hqn,nhd->hqd", weights, v)

    return with_fold(reference, fold_block)


@wrong("the peak starts at 0", case="far below zero")
def peak_from_zero(reference):
    return with_fold(
        reference, lambda summary, scores, v: reference.fold_block((summary[0].clamp(min=0), *summary[1:]), scores, v)
    )


@wrong("one peak for all queries and heads", case="large scores")
def one_peak(reference):
    def fold_block(summary, scores, v):
        import torch

        peak, total, mixed = summary
        higher = torch.maximum(peak, scores.amax())
        shrink, weights = torch.exp(peak - higher), torch.exp(scores - higher[..., None])
        added = torch.einsum("hqn,nhd->hqd", weights, v)
        return higher, total * shrink + weights.sum(-1), mixed * shrink[..., None] + added

    return with_fold(reference, fold_block)


def _filled(low):
    def make(reference):
        def fold_block(summary, scores, v):
            return reference.fold_block(summary, scores.masked_fill(scores.isinf(), low), v)

        return with_fold(reference, fold_block)

    return make


hundred = wrong("hidden scores are -100", case="far below zero")(_filled(-100.0))
thousand = wrong("hidden scores are -1000", case="far below zero")(_filled(-1000.0))


@wrong("the peak of hidden scores, too", case="large scores")
def hidden_peak(reference):
    def attention(q, k_cache, v_cache, tables, query_lens, context_lens, scale):
        import torch

        size, group, outs = k_cache.shape[1], q.shape[1] // k_cache.shape[2], []
        for rows, table, context in zip(q.split(list(query_lens)), tables, context_lens, strict=True):
            own = torch.arange(context - len(rows), context)[:, None]
            peak = q.new_full((q.shape[1], len(rows)), -torch.inf)
            total, mixed = torch.zeros_like(peak), torch.zeros_like(rows.transpose(0, 1))
            for first in range(0, context, size):
                keys = torch.arange(first, min(first + size, context))
                block = (cache[table[first // size], : len(keys)] for cache in (k_cache, v_cache))
                k, v = (x.repeat_interleave(group, dim=1) for x in block)
                scores = torch.einsum("qhd,nhd->hqn", rows, k) * scale
                higher = torch.maximum(peak, scores.amax(-1))
                shrink, weights = torch.exp(peak - higher), torch.exp(scores - higher[..., None])
                weights = weights.masked_fill(keys > own, 0.0)
                added = torch.einsum("hqn,nhd->hqd", weights, v)
                peak, total, mixed = higher, total * shrink + weights.sum(-1), mixed * shrink[..., None] + added
            outs.append((mixed / total[..., None]).transpose(0, 1))
        return torch.cat(outs)

    return attention


@wrong("an array of numpy instead of a tensor", case="the dtype of its arguments")
def numpy_array(reference):
    return lambda *arguments: reference.paged_attention_blockwise(*arguments).numpy()


def _scaled(reference, factor):
    def attention(*arguments):
        return reference.paged_attention_blockwise(*arguments[:-1], factor(arguments))

    return attention


@wrong("scale forgotten", case="scale")
def no_scale(reference):
    return _scaled(reference, lambda arguments: 1.0)


@wrong("scale is always 1 / sqrt(D)", case="scale")
def own_scale(reference):
    return _scaled(reference, lambda arguments: arguments[0].shape[-1] ** -0.5)


@wrong("scales the queries in place", case="leaves its arguments unchanged")
def scales_in_place(reference):
    def attention(q, *rest):
        q.mul_(rest[-1])
        return reference.paged_attention_blockwise(q, *rest[:-1], 1.0)

    return attention


def _folding(shrink_total, shrink_mixed):
    def fold_block(summary, scores, v):
        import torch

        peak, total, mixed = summary
        higher = torch.maximum(peak, scores.amax(-1))
        shrink = torch.exp(peak - higher)
        weights = torch.exp(scores - higher[..., None])
        total = (total * shrink if shrink_total else total) + weights.sum(-1)
        mixed = mixed * shrink[..., None] if shrink_mixed else mixed
        return higher, total, mixed + torch.einsum("hqn,nhd->hqd", weights, v)

    return fold_block


@wrong("the sum of weights is not rescaled", case="several blocks")
def total_not_rescaled(reference):
    return with_fold(reference, _folding(False, True))


@wrong("the sum of values is not rescaled", case="several blocks")
def mixed_not_rescaled(reference):
    return with_fold(reference, _folding(True, False))


@wrong("the peak falls with the newest block", case="large scores")
def newest_peak(reference):
    def fold_block(summary, scores, v):
        import torch

        peak, total, mixed = summary
        newest = scores.amax(-1)
        shrink, weights = torch.exp(peak - newest), torch.exp(scores - newest[..., None])
        return (
            newest,
            total * shrink + weights.sum(-1),
            mixed * shrink[..., None] + torch.einsum("hqn,nhd->hqd", weights, v),
        )

    return with_fold(reference, fold_block)


@wrong("blocks' softmaxes averaged", case="several blocks")
def averaged(reference):
    def fold_block(summary, scores, v):
        import torch

        peak, total, mixed = summary
        return peak, total + 1, mixed + torch.einsum("hqn,nhd->hqd", scores.softmax(-1), v)

    return with_fold(reference, fold_block)


@wrong("never divided by the sum", case="one block")
def not_divided(reference):
    def fold_block(summary, scores, v):
        import torch

        peak, total, mixed = reference.fold_block(summary, scores, v)
        return peak, torch.ones_like(total), mixed

    return with_fold(reference, fold_block)


@wrong("the last block is left out", case="each query sees what it must")
def last_block(reference):
    def attention(q, k_cache, v_cache, tables, query_lens, context_lens, scale):
        size = k_cache.shape[1]
        shorter = [
            max(query, (context - 1) // size * size) for query, context in zip(query_lens, context_lens, strict=True)
        ]
        return reference.paged_attention_blockwise(q, k_cache, v_cache, tables, query_lens, shorter, scale)

    return attention


@wrong("gather everything, then softmax", case="one block at a time")
def gathers(reference):
    return reference.paged_attention


@wrong("all scores kept, softmax at the end", case="one block at a time")
def keeps_scores(reference):
    def attention(q, k_cache, v_cache, tables, query_lens, context_lens, scale):
        import torch

        size, group, outs, start = k_cache.shape[1], q.shape[1] // k_cache.shape[2], [], 0
        for table, query, context in zip(tables, query_lens, context_lens, strict=True):
            rows, pieces = q[start : start + query], []
            spans = [(int(table[i // size]), min(size, context - i)) for i in range(0, context, size)]
            for block, n in spans:
                k = k_cache[block, :n].repeat_interleave(group, dim=1)
                pieces.append(torch.einsum("qhd,nhd->hqn", rows, k) * scale)
            scores = torch.cat(pieces, -1)
            hidden = torch.arange(context) > torch.arange(context - query, context)[:, None]
            weights, out, seen = scores.masked_fill(hidden, -torch.inf).softmax(-1), 0, 0
            for block, n in spans:
                v = v_cache[block, :n].repeat_interleave(group, dim=1)
                out = out + torch.einsum("hqn,nhd->qhd", weights[..., seen : seen + n], v)
                seen += n
            outs.append(out)
            start += query
        return torch.cat(outs)

    return attention


@wrong("a cleaned copy of the whole cache", case="one block at a time")
def copies_the_cache(reference):
    def attention(q, k_cache, v_cache, *rest):
        return reference.paged_attention_blockwise(q, k_cache.nan_to_num(), v_cache.nan_to_num(), *rest)

    return attention


@wrong("numbers worked out elsewhere", case="one block at a time")
def elsewhere(reference):
    def attention(q, k_cache, v_cache, tables, query_lens, context_lens, scale):
        import numpy as np
        import torch

        size, group, out, start = k_cache.shape[1], q.shape[1] // k_cache.shape[2], np.empty(q.shape, "float32"), 0
        keys, values = k_cache.numpy(), v_cache.numpy()
        for table, query, context in zip(tables.tolist(), query_lens, context_lens, strict=True):
            used = table[: math.ceil(context / size)]
            k, v = (x[used].reshape(-1, *x.shape[2:])[:context].repeat(group, 1) for x in (keys, values))
            scores = np.einsum("qhd,khd->hqk", q[start : start + query].numpy(), k) * scale
            scores[:, np.arange(context) > np.arange(context - query, context)[:, None]] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[start : start + query] = np.einsum("hqk,khd->qhd", weights, v)
            start += query
        return torch.from_numpy(out)

    return attention


@right("all requests step through their blocks together")
def together(reference):
    def attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        import torch

        size, heads, dim = k_cache.shape[1], q.shape[1], q.shape[2]
        kv_heads, longest, n = k_cache.shape[2], max(query_lens), len(query_lens)
        rows = q.new_zeros(n, longest, kv_heads, heads // kv_heads, dim)
        for i, part in enumerate(q.split(list(query_lens))):
            rows[i, : len(part)] = part.unflatten(1, (kv_heads, -1))
        contexts = torch.tensor(context_lens)[:, None]
        own = contexts - torch.tensor(query_lens)[:, None] + torch.arange(longest)
        peak = q.new_full(rows.shape[:-1], -1e30)
        total, mixed = torch.zeros_like(peak), torch.zeros_like(rows)
        for column in range(block_tables.shape[1]):
            position = column * size + torch.arange(size)
            blocks = block_tables[:, column].clamp(min=0)
            real = (position < contexts)[:, :, None, None]
            k, v = (torch.where(real, cache[blocks], 0.0) for cache in (k_cache, v_cache))
            scores = torch.einsum("bqkgd,bskd->bqkgs", rows, k) * scale
            seen = (position <= own[..., None]) & (position < contexts[..., None])
            seen = seen[:, :, None, None]
            higher = torch.maximum(peak, torch.where(seen, scores, -1e30).amax(-1))
            weights = torch.where(seen, torch.exp(scores - higher[..., None]), 0.0)
            shrink = torch.exp(peak - higher)
            total = total * shrink + weights.sum(-1)
            mixed = mixed * shrink[..., None] + torch.einsum("bqkgs,bskd->bqkgd", weights, v)
            peak = higher
        whole = (mixed / total[..., None]).flatten(2, 3)
        return torch.cat([whole[i, :length] for i, length in enumerate(query_lens)])

    return attention


@right("tiles of four blocks")
def tiles(reference):
    def attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        import torch

        size, group, outs = k_cache.shape[1], q.shape[1] // k_cache.shape[2], []
        for rows, table, context in zip(q.split(list(query_lens)), block_tables, context_lens, strict=True):
            own = torch.arange(context - len(rows), context)[:, None]
            summary = torch.full(rows.shape[:2], -torch.inf).T, torch.zeros(rows.shape[:2]).T, 0 * rows.transpose(0, 1)
            for first in range(0, context, 4 * size):
                blocks = table[first // size : min(first // size + 4, -(-context // size))]
                keys = torch.arange(first, min(first + 4 * size, context))
                k, v = (cache[blocks].flatten(0, 1)[: len(keys)] for cache in (k_cache, v_cache))
                k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
                scores = scale * torch.einsum("qhd,nhd->hqn", rows, k)
                summary = reference.fold_block(summary, scores.masked_fill(keys > own, -torch.inf), v)
            outs.append((summary[2] / summary[1][..., None]).transpose(0, 1))
        return torch.cat(outs)

    return attention


@right("newest block first, logsumexp merging of block results")
def merges_backwards(reference):
    def attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        import torch

        size, out, end = k_cache.shape[1], torch.empty_like(q), len(q)
        group = q.shape[1] // k_cache.shape[2]
        for row, query, context in reversed(list(zip(block_tables.tolist(), query_lens, context_lens, strict=True))):
            rows = q[end - query : end]
            answer, weight = torch.zeros_like(rows), torch.full(rows.shape[:2], -math.inf)
            for first in reversed(range(0, context, size)):
                tokens = min(size, context - first)
                k, v = (cache[row[first // size]][:tokens] for cache in (k_cache, v_cache))
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
                scores = torch.einsum("qhd,nhd->qhn", rows, k) * scale
                ahead = torch.arange(first, first + tokens)[None] > torch.arange(context - query, context)[:, None]
                scores = scores.masked_fill(ahead[:, None], -math.inf)
                block_weight = torch.logsumexp(scores, -1)
                both = torch.logaddexp(weight, block_weight)
                mine = torch.einsum("qhn,nhd->qhd", scores.softmax(-1).nan_to_num(0.0), v)
                old, new = ((part - both).exp().nan_to_num(0.0) for part in (weight, block_weight))
                answer, weight = answer * old[..., None] + mine * new[..., None], both
            out[end - query : end] = answer
            end -= query
        return out

    return attention


def _per_token(reference, ahead=0):
    """Each query token as a request of its own, whose context ends ``ahead`` tokens after it."""

    def attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        import torch

        outs = []
        for i, (query, context) in enumerate(zip(query_lens, context_lens, strict=True)):
            for end in range(context - query + 1, context + 1):
                token, table, last = len(outs), block_tables[i : i + 1], min(end + ahead, context)
                given = q[token : token + 1], k_cache, v_cache, table, [1], [last], scale
                outs.append(reference.paged_attention_blockwise(*given))
        return torch.cat(outs)

    return attention


@wrong("mask off by one: a query sees the next token", case="each query sees what it must")
def sees_the_next(reference):
    return _per_token(reference, ahead=1)


@wrong("KV heads tiled instead of interleaved", case="causal, ragged and shared heads")
def tiled_heads(reference):
    def attention(q, k_cache, *rest):
        import torch

        kv_heads = k_cache.shape[2]
        order = sorted(range(q.shape[1]), key=lambda head: head % kv_heads)
        out = torch.empty_like(q)
        out[:, order] = reference.paged_attention_blockwise(q[:, order], k_cache, *rest)
        return out

    return attention


@right("each query token is a request of its own")
def per_token(reference):
    return _per_token(reference)


@wrong("returns float32 whatever it was given", case="the dtype of its arguments")
def returns_single(reference):
    return lambda *given: reference.paged_attention_blockwise(*given).float()


@wrong("keeps its summary in float32", case="the dtype of its arguments")
def single_summary(reference):
    def fold_block(summary, scores, v):
        return tuple(part.float().to(v.dtype) for part in reference.fold_block(summary, scores, v))

    return with_fold(reference, fold_block)
