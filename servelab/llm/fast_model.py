"""The forward pass of `servelab.llm.model`, laid out for speed on a CPU. The results are the same but for rounding.

For a few tokens a matrix product costs the reading of the weights, if it is a good one. PyTorch's general one is not at
4 to 16 rows: it takes up to 2.5 times as long. So weights that are applied to the same input are put together,
and float32 weights are reordered once into the blocks that oneDNN's kernels read (``torch.compile`` does the same). The
weights of the norms before them go into their columns.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from servelab.llm.model import KV, LLM, Communicator, LLMConfig, Weights

Product = Callable[[Tensor], Tensor]
ROWS = 8  # that the reordered weights are made for; any other number is right, too
FEW = 2  # rows up to which the general product is the faster one


@dataclass(frozen=True)
class Layer:
    """The products of a layer with what goes in."""

    qkv: Product
    o: Product
    gate_up: Product
    down: Product


class FastLLM(LLM):
    """An `LLM` that keeps its layers in the form above. It keeps two copies of the weights in float32."""

    def __init__(self, config: LLMConfig, weights: Weights, comm: Communicator | None = None):
        super().__init__(config, {name: weights[name] for name in ("embedding", "norm")}, comm)
        self.head = product(weights["embedding"])
        self.layers = [_layer(weights, f"layers.{layer}.") for layer in range(config.num_layers)]
        cos, sin = self._angles(torch.arange(config.max_model_len, device=self.device))
        self.cos, self.sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        wide = torch.promote_types(self.dtype, torch.float32)
        self.epsilon = torch.tensor(config.rms_norm_eps, dtype=wide, device=self.device)

    def forward(self, tokens: Tensor, positions: Tensor, kv: KV) -> Tensor:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        x, cos, sin = self.weights["embedding"][tokens], self.cos[positions], self.sin[positions]
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv(self._unit(x)).unflatten(-1, (-1, self.config.head_dim))
            qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
            q, k = rotate(qk, cos, sin).split((heads, kv_heads), dim=1)
            x = x + self._all_reduce(layer.o(kv.attend(number, q, k, v).flatten(1)))
            gate, up = layer.gate_up(self._unit(x)).chunk(2, dim=-1)
            x = x + self._all_reduce(layer.down(silu(gate) * up))
        return self._unit(x) * self.weights["norm"]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def _unit(self, x: Tensor) -> Tensor:
        """Rows [T, hidden_size] divided by their root mean square."""
        wide = x.to(self.epsilon.dtype)
        mean_squares = torch.add(self.epsilon, torch.linalg.vecdot(wide, wide), alpha=1 / x.shape[-1])
        return (wide * mean_squares.rsqrt_()[:, None]).to(x.dtype)


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
    def normed(norm: str, *names: str) -> Product:
        return product(torch.cat([weights[prefix + name] for name in names]) * weights[prefix + norm])

    qkv, gate_up = normed("attn_norm", "q", "k", "v"), normed("mlp_norm", "gate", "up")
    return Layer(qkv, product(weights[prefix + "o"]), gate_up, product(weights[prefix + "down"]))
