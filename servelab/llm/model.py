"""The forward pass of a Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The tokens of a step come as one flat batch, one request behind another, so nothing is padded. What is not arithmetic on
single tokens is an argument: ``kv`` keeps keys and values and computes attention over them, ``comm`` adds up what the
ranks of a tensor-parallel group have computed. Static, continuous, paged, prefix-cached and tensor-parallel serving all
run this one function.

Sources: Touvron et al., "LLaMA" (2023), section 2.2; Su et al., "RoFormer" (2021); Ainslie et al., "GQA" (2023).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from servelab.errors import CourseError
from servelab.paths import DATA

TINY = DATA / "tiny_llm.safetensors"
Weights = dict[str, Tensor]
LAYER = ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")


@dataclass(frozen=True)
class LLMConfig:
    """The dimensions of the model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    max_model_len: int = 2048
    eos_token_id: int = 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight. A linear layer's is [outputs, inputs]."""
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = {
            "attn_norm": (hidden,),
            "q": (queries, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden, queries),
            "mlp_norm": (hidden,),
            "gate": (self.intermediate_size, hidden),
            "up": (self.intermediate_size, hidden),
            "down": (hidden, self.intermediate_size),
        }
        names = {f"layers.{i}.{name}": shape for i in range(self.num_layers) for name, shape in layer.items()}
        return {"embedding": (self.vocab_size, hidden), **names, "norm": (hidden,)}


class Communicator(Protocol):
    """A tensor-parallel group, as far as the forward pass needs it."""

    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor: ...


class KV(Protocol):
    """Where keys and values are kept during one step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep the new tokens' ``k`` and ``v`` [T, Hkv, D]; return the causal attention of ``q`` [T, Hq, D]."""
        ...


class LLM:
    """The model on one rank: ``weights`` are the whole ones, or this rank's part of them."""

    def __init__(self, config: LLMConfig, weights: Weights, comm: Communicator | None = None):
        self.config, self.weights, self.comm = config, weights, comm
        self.device, self.dtype = weights["norm"].device, weights["norm"].dtype
        half = torch.arange(0, config.head_dim, 2, device=self.device, dtype=torch.float64)
        self.frequencies = config.rope_theta ** (-half / config.head_dim)

    def forward(self, tokens: Tensor, positions: Tensor, kv: KV) -> Tensor:
        """The hidden state behind each token of a flat batch.

        Parameters
        ----------
        tokens, positions : Tensor [T], int64
            Token ids, and the place of each in its own request; on any device.
        kv : KV
            The KV memory, bound to this batch.

        Returns
        -------
        Tensor [T, hidden_size]
        """
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        x, angles = self.weights["embedding"][tokens], self._angles(positions)
        for layer in range(self.config.num_layers):
            w = {name: self.weights[f"layers.{layer}.{name}"] for name in LAYER}
            x = x + self._attention(layer, w, self._norm(x, w["attn_norm"]), angles, kv)
            x = x + self._mlp(w, self._norm(x, w["mlp_norm"]))
        return self._norm(x, self.weights["norm"])

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary [T, vocab_size]; the output head is the embedding."""
        return linear(hidden, self.weights["embedding"])

    def _attention(self, layer: int, w: Weights, x: Tensor, angles: tuple[Tensor, Tensor], kv: KV) -> Tensor:
        q, k, v = (linear(x, w[name]).unflatten(-1, (-1, self.config.head_dim)) for name in ("q", "k", "v"))
        out = kv.attend(layer, rotate(q, *angles), rotate(k, *angles), v)
        return self._all_reduce(linear(out.flatten(-2), w["o"]))

    def _mlp(self, w: Weights, x: Tensor) -> Tensor:
        return self._all_reduce(linear(silu(linear(x, w["gate"])) * linear(x, w["up"]), w["down"]))

    def _all_reduce(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(x) if self.comm is not None and self.comm.size > 1 else x

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # the sum of squares needs more than bfloat16's 8 bits
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (wide * scale).to(x.dtype) * weight

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each token's rotations, [T, 1, head_dim / 2]."""
        angles = (positions[:, None] * self.frequencies)[:, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [T, H, D]: element i turns with element i + D / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def save(path: Path, config: LLMConfig, weights: Weights) -> None:
    """Write a model as one safetensors file, its configuration in the file's metadata."""
    from safetensors.torch import save_file

    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, path, {"config": json.dumps(asdict(config))}
    )


def load(path: Path = TINY, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[LLMConfig, Weights]:
    """Read a model that `save` wrote.

    Raises
    ------
    CourseError
        If there is no such file, or it is not such a model.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            config = LLMConfig(**json.loads(file.metadata()["config"]))
            weights = {name: file.get_tensor(name).to(device, dtype) for name in config.shapes()}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CourseError(
            f"the model cannot be read ({type(error).__name__}: {error})", where=str(path), mend="Get this file again."
        ) from None
    wrong = [name for name, shape in config.shapes().items() if tuple(weights[name].shape) != shape]
    if wrong:
        raise CourseError(f"the weight {wrong[0]} has a wrong shape", where=str(path), mend="Get this file again.")
    return config, weights
