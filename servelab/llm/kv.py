"""Where the model's keys and values are kept: contiguously for one request, or in pages for many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from servelab.llm.model import LLM
from servelab.serving import FlatBatch


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last tokens [.., T, Hq, D] of a context [.., S, Hkv, D] to themselves and what is before."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    new, context = q.shape[-2], k.shape[-2]
    mask = torch.ones(new, context, dtype=torch.bool, device=q.device).tril(context - new)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(-3, -2)


class Windows:
    """For training: windows of equal length side by side, each with a context of its own. Nothing is kept."""

    def __init__(self, length: int):
        self.length = length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (-1, self.length)) for x in (q, k, v))
        return causal_attention(q, k, v).flatten(0, 1)


class ContiguousKV:
    """The KV of one request, one growing tensor a layer: what a plain loop over one request needs."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self._layers:
            k, v = (torch.cat(pair) for pair in zip(self._layers[layer], (k, v), strict=True))
        self._layers[layer] = k, v
        return causal_attention(q, k, v)


@dataclass(frozen=True)
class Pages:
    """The KV of many requests in blocks: one pair of caches [blocks, block_size, Hkv, D] a layer.

    ``write_kv`` and ``paged_attention`` are those of unit 03.
    """

    caches: Sequence[tuple[Tensor, Tensor]]
    write_kv: Callable[..., None]
    paged_attention: Callable[..., Tensor]

    @classmethod
    def of(cls, model: LLM, num_blocks: int, block_size: int, unit) -> "Pages":
        """Empty caches for a model or a rank's part of it, of its type and on its device.

        ``unit`` has the two functions, as ``servelab.parts.paged_kv`` does.
        """
        config = model.config
        shape = (2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        layers = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(config.num_layers)]
        return cls([tuple(kv) for kv in layers], unit.write_kv, unit.paged_attention)

    def bind(self, batch: FlatBatch) -> "PagedStep":
        """The pages as the KV of one step; ``batch`` is what unit 04's ``flatten_batch`` returns, on any device."""
        return PagedStep(self, batch.to(self.caches[0][0].device))


@dataclass(frozen=True)
class PagedStep:
    """The pages during one step: they know where its tokens go and what each of them may see."""

    pages: Pages
    batch: FlatBatch

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (k_cache, v_cache), batch = self.pages.caches[layer], self.batch
        self.pages.write_kv(k_cache, v_cache, k, v, batch.slot_mapping)
        scale = q.shape[-1] ** -0.5
        return self.pages.paged_attention(
            q, k_cache, v_cache, batch.block_tables, batch.query_lens, batch.context_lens, scale
        )
