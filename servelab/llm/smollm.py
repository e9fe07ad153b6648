"""The real model: SmolLM2-135M-Instruct as `fetch-model` keeps it, a GGUF file with weights and tokenizer.

Source: Allal et al., "SmolLM2: When Smol Goes Big" (2025). The file: GGUF of llama.cpp.
"""

from functools import cache

import torch
from torch import Tensor

from servelab import fetch
from servelab.errors import CourseError
from servelab.llm.model import LLMConfig, Weights
from servelab.llm.tokenizer import BPETokenizer

NAMES = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def load(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[LLMConfig, Weights]:
    """The model's configuration and its weights, dequantised: 134,515,008 numbers.

    Raises
    ------
    CourseError
        If the model is not here.
    """
    from gguf.quants import dequantize

    stored = {tensor.name: tensor for tensor in _file().tensors}
    config, weights = read_config(), {}
    for name in config.shapes():
        tensor = stored[gguf_name(name)]
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=dtype, device=device)
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(name.rpartition(".")[2])
        weights[name] = rotate_half_rows(weight, heads) if heads else weight
    return config, weights


def tokenizer() -> BPETokenizer:
    """The model's tokenizer.

    Raises
    ------
    CourseError
        If the model is not here.
    """
    tokens, merges, types, eos = (
        _field(f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "token_type", "eos_token_id")
    )
    return BPETokenizer(tokens, merges, types, eos)


def read_config() -> LLMConfig:
    """The model's dimensions, as its file states them."""
    return LLMConfig(
        vocab_size=_field("llama.vocab_size"),
        hidden_size=_field("llama.embedding_length"),
        num_layers=_field("llama.block_count"),
        num_heads=_field("llama.attention.head_count"),
        num_kv_heads=_field("llama.attention.head_count_kv"),
        head_dim=_field("llama.rope.dimension_count"),
        intermediate_size=_field("llama.feed_forward_length"),
        rope_theta=_field("llama.rope.freq_base"),
        rms_norm_eps=_field("llama.attention.layer_norm_rms_epsilon"),
        max_model_len=_field("llama.context_length"),
        eos_token_id=_field("tokenizer.ggml.eos_token_id"),
    )


def gguf_name(name: str) -> str:
    """The name in a GGUF file of one of `LLMConfig.shapes`."""
    if name in ("embedding", "norm"):
        return {"embedding": "token_embd.weight", "norm": "output_norm.weight"}[name]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{NAMES[part]}.weight"


def rotate_half_rows(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of q and k [heads * D, inputs].

    There the two elements of a rotary pair are neighbours, 2i and 2i + 1 of a head; here they are i and i + D / 2.
    """
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _field(key: str):
    return _file().fields[key].contents()


def _file():
    """The file, read once a process: its lists of tokens alone take seconds."""
    problem = fetch.problem()
    if problem:
        raise CourseError(f"the real model: {problem}", mend=fetch.MEND)
    return _read(str(fetch.model_path()))


@cache
def _read(path: str):
    from gguf import GGUFReader

    return GGUFReader(path)
