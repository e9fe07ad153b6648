"""The forward pass of `servelab.llm.model`, laid out for speed on a CPU. The results are the same but for rounding.

For a few tokens a matrix product costs the reading of the weights, if it is a good one. PyTorch's general one is not at
4 to 16 rows: it takes up to 2.5 times as long. So weights that are applied to the same input are put together,
and float32 weights are reordered once into the blocks that oneDNN's kernels read (``torch.compile`` does the same).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from servelab.llm.model import KV, LLM, Communicator, LLMConfig, Weights

Product = Callable[[Tensor], Tensor]
ROWS = 8  # that the reordered weights are made for; any other number is right, too
FEW = 2  # rows up to which the general product is the faster one


@dataclass(frozen=True)
class Layer:
    """The norms of a layer, and its products with what goes in."""

    attn_norm: Tensor
    qkv: Product
    o: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product


class FastLLM(LLM):
    """An `LLM` that keeps its layers in the form above. It keeps two copies of the weights in float32."""

    def __init__(self, config: LLMConfig, weights: Weights, comm: Communicator | None = None):
        super().__init__(config, {name: weights[name] for name in ("embedding", "norm")}, comm)
        self.head = product(weights["embedding"])
        self.layers = [_layer(weights, f"layers.{layer}.") for layer in range(config.num_layers)]
        cos, sin = self._angles(torch.arange(config.max_model_len, device=weights["norm"].device))
        self.cos, self.sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def forward(self, tokens: Tensor, positions: Tensor, kv: KV) -> Tensor:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        x, cos, sin = self.weights["embedding"][tokens], self.cos[positions], self.sin[positions]
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv(self._norm(x, layer.attn_norm)).unflatten(-1, (-1, self.config.head_dim))
            qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
            q, k = rotate(qk, cos, sin).split((heads, kv_heads), dim=1)
            x = x + self._all_reduce(layer.o(kv.attend(number, q, k, v).flatten(1)))
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + self._all_reduce(layer.down(silu(gate) * up))
        return self._norm(x, self.weights["norm"])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [T, H, D], with the cosine of each element and the sine that its partner is multiplied by."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([second, first], dim=-1), sin)


def product(weight: Tensor) -> Product:
    """The product of the rows of a matrix with ``weight`` [outputs, inputs]."""
    if weight.dtype == torch.float32 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        return lambda x: (
            linear(x, weight) if len(x) <= FEW else torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        )
    return lambda x: linear(x, weight)


def _layer(weights: Weights, prefix: str) -> Layer:
    def together(*names: str) -> Product:
        return product(torch.cat([weights[prefix + name] for name in names]))

    norms = weights[prefix + "attn_norm"], weights[prefix + "mlp_norm"]
    return Layer(norms[0], together("q", "k", "v"), together("o"), norms[1], together("gate", "up"), together("down"))
