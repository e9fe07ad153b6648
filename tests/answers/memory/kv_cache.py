"""Named answers to `memory.kv_cache`."""

from dataclasses import replace

import numpy as np

from servelab.answers import right, wrong


@right("a sum over layers, with numpy integers")
def layer_by_layer(reference):
    def width(model):
        heads = model.num_kv_heads * model.head_dim
        return model.kv_lora_rank + model.qk_rope_head_dim if model.kv_lora_rank else heads + heads

    def kv_bytes_per_token(model, dtype_bytes=2):
        return np.full(model.num_layers, width(model), dtype=np.int64).sum() * dtype_bytes

    def kv_gib(model, tokens, dtype_bytes=2):
        kept = np.full(model.num_layers, tokens, dtype=np.int64)
        kept[: model.sliding_layers] = np.minimum(tokens, model.sliding_window)
        return np.float64((kept * width(model) * dtype_bytes).sum() / 1024**3)

    return kv_bytes_per_token, kv_gib


@right("the full cache less what the windows drop")
def dropped(reference):
    def kv_bytes_per_token(model, dtype_bytes=2):
        if model.kv_lora_rank > 0:
            return dtype_bytes * (model.kv_lora_rank + model.qk_rope_head_dim) * model.num_layers
        return sum(model.num_kv_heads * model.head_dim * dtype_bytes for _ in range(2 * model.num_layers))

    def kv_gib(model, tokens, dtype_bytes=2):
        one = kv_bytes_per_token(model, dtype_bytes)
        beyond = max(0, tokens - model.sliding_window) if model.sliding_layers else 0
        return (tokens * one - beyond * one // model.num_layers * model.sliding_layers) / 2**30

    return kv_bytes_per_token, kv_gib


def per_token(reference, function):
    """A wrong `kv_bytes_per_token`, with the GiB that follow from it."""

    def kv_bytes_per_token(model, dtype_bytes=2):
        return function(model, dtype_bytes)

    def kv_gib(model, tokens, dtype_bytes=2):
        full = replace(model, sliding_layers=0)
        share = reference.kv_gib(model, tokens, dtype_bytes) / reference.kv_gib(full, tokens, dtype_bytes)
        return function(model, dtype_bytes) * tokens * share / 2**30

    return kv_bytes_per_token, kv_gib


def heads_times(reference, factor):
    """The bytes of ``factor(model)`` elements a layer, except for MLA."""

    def kv_bytes_per_token(model, dtype_bytes=2):
        if model.kv_lora_rank:
            return reference.kv_bytes_per_token(model, dtype_bytes)
        return model.num_layers * factor(model) * dtype_bytes

    return per_token(reference, kv_bytes_per_token)


@wrong("forgets that K and V are two", case="keys and values of every layer")
def keys_only(reference):
    return heads_times(reference, lambda m: m.num_kv_heads * m.head_dim)


@wrong("one layer only", case="keys and values of every layer")
def one_layer(reference):
    return per_token(reference, lambda m, size=2: reference.kv_bytes_per_token(m, size) // m.num_layers)


@wrong("query heads for KV heads", case="KV heads, not query heads")
def query_heads(reference):
    return heads_times(reference, lambda m: 2 * m.num_heads * m.head_dim)


@wrong("the hidden size for the heads", case="KV heads, not query heads")
def hidden_size(reference):
    return heads_times(reference, lambda m: 2 * m.hidden_size)


@wrong("hidden size over heads for head_dim", case="head_dim from the card")
def quotient(reference):
    return heads_times(reference, lambda m: 2 * m.num_kv_heads * (m.hidden_size // m.num_heads))


@wrong("MLA as if it kept keys and values", case="latent attention")
def full_heads(reference):
    return per_token(reference, lambda m, size=2: reference.kv_bytes_per_token(replace(m, kv_lora_rank=0), size))


@wrong("MLA without the rotary key", case="latent attention")
def no_rotary(reference):
    return per_token(reference, lambda m, size=2: reference.kv_bytes_per_token(replace(m, qk_rope_head_dim=0), size))


@wrong("a latent for keys and another for values", case="latent attention")
def twice(reference):
    return per_token(reference, lambda m, size=2: reference.kv_bytes_per_token(m, size) * (2 if m.kv_lora_rank else 1))


@wrong("always two bytes", case="other bytes per element")
def always_bf16(reference):
    return per_token(reference, lambda m, size=2: reference.kv_bytes_per_token(m, 2))


@wrong("a fixed head_dim of 128 for large models", case="every card of the course")
def fixed(reference):
    return heads_times(reference, lambda m: 2 * m.num_kv_heads * (m.head_dim if m.hidden_size < 512 else 128))


@wrong("GB for GiB", case="GiB of a context")
def decimal(reference):
    def kv_gib(model, tokens, dtype_bytes=2):
        return reference.kv_gib(model, tokens, dtype_bytes) * 2**30 / 1e9

    return reference.kv_bytes_per_token, kv_gib


@wrong("windows ignored", case="sliding windows")
def no_windows(reference):
    def kv_gib(model, tokens, dtype_bytes=2):
        return reference.kv_bytes_per_token(model, dtype_bytes) * tokens / 2**30

    return reference.kv_bytes_per_token, kv_gib


@wrong("the window in every layer", case="sliding windows")
def all_windows(reference):
    def kv_gib(model, tokens, dtype_bytes=2):
        kept = min(tokens, model.sliding_window or tokens)
        return reference.kv_bytes_per_token(model, dtype_bytes) * kept / 2**30

    return reference.kv_bytes_per_token, kv_gib


@wrong("sliding layers left out of a token", case="a token before any window is full")
def full_layers_only(reference):
    def kv_bytes_per_token(model, dtype_bytes=2):
        one = reference.kv_bytes_per_token(model, dtype_bytes) // model.num_layers
        return one * (model.num_layers - model.sliding_layers)

    return kv_bytes_per_token, reference.kv_gib


@wrong("MLA known by its `q_lora_rank`", case="latent attention")
def by_the_queries(reference):
    def kv_bytes_per_token(model, dtype_bytes=2):
        return reference.kv_bytes_per_token(model if model.q_lora_rank else replace(model, kv_lora_rank=0), dtype_bytes)

    return per_token(reference, kv_bytes_per_token)
