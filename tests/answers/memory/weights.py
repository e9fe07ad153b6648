"""Named answers to `memory.weights`."""

from dataclasses import replace
from math import prod

import numpy as np

from servelab.answers import right, wrong

GROUPS = ("embedding", "query", "kv", "mlp", "experts", "replicated")


def shapes(m):
    """Every tensor of the model as (group, shape), as a checkpoint would list them."""
    h, n, d = m.hidden_size, m.num_heads, m.head_dim
    yield from [("embedding", (m.vocab_size, h))] * (1 if m.tied_embeddings else 2)
    yield "replicated", (m.position_rows, h)
    yield from [("replicated", (h,))] * (2 if m.all_biases else 1)
    for layer in range(m.num_layers):
        yield from [("replicated", (h,))] * (4 if m.all_biases else 2)
        if m.kv_lora_rank:
            yield from latent_shapes(m)
        else:
            yield from [("query", (n, d, h)), ("query", (h, n, d)), *[("kv", (m.num_kv_heads, d, h))] * 2]
            if m.qkv_bias:
                yield from [("query", (n, d)), *[("kv", (m.num_kv_heads, d))] * 2]
            if m.qk_norm:
                yield from [("replicated", (d,))] * 2
            if m.all_biases:
                yield "replicated", (h,)
        yield from mlp_shapes(m, layer)


def latent_shapes(m):
    h, n = m.hidden_size, m.num_heads
    key = m.qk_nope_head_dim + m.qk_rope_head_dim
    if m.q_lora_rank:
        yield from [("replicated", (h, m.q_lora_rank)), ("replicated", (m.q_lora_rank,))]
        yield "query", (m.q_lora_rank, n, key)
    else:
        yield "query", (h, n, key)
    yield from [("replicated", (h, m.kv_lora_rank + m.qk_rope_head_dim)), ("replicated", (m.kv_lora_rank,))]
    yield from [("query", (m.kv_lora_rank, n, m.qk_nope_head_dim + m.v_head_dim)), ("query", (n, m.v_head_dim, h))]


def mlp_shapes(m, layer):
    h, matrices = m.hidden_size, 3 if m.gated_mlp else 2
    if m.num_experts and layer >= m.dense_layers:
        yield "replicated", (h, m.num_experts)
        if m.router_bias:
            yield "replicated", (m.num_experts,)
        yield from [("experts", (m.num_experts, h, m.expert_size))] * matrices
        yield from [("mlp", (m.shared_experts, h, m.expert_size))] * matrices
        return
    yield from [("mlp", (h, m.intermediate_size))] * matrices
    if m.all_biases:
        yield from [("mlp", (m.intermediate_size,)), ("replicated", (h,))]


@right("tensor by tensor, as a checkpoint lists them")
def tensors(reference):
    def parameters(model):
        counts = dict.fromkeys(GROUPS, 0)
        for group, shape in shapes(model):
            counts[group] += prod(shape)
        return counts

    return parameters, lambda model, dtype_bytes=2: float(sum(parameters(model).values()) * dtype_bytes)


@right("numpy integers, groups in another order, and bytes counted by group")
def another_order(reference):
    def parameters(model):
        counts = reference.parameters(model)
        return {group: np.int64(counts[group]) for group in reversed(GROUPS)}

    return parameters, lambda model, dtype_bytes=2: sum(n * dtype_bytes for n in parameters(model).values())


@right("a flag for a group that is not there")
def flag_for_nothing(reference):
    def parameters(model):
        return {group: count > 0 and count for group, count in reference.parameters(model).items()}

    return parameters, lambda model, dtype_bytes=2: sum(parameters(model).values()) * dtype_bytes


def but(reference, change):
    """The reference's groups with ``change(model, counts)`` written over them, and the bytes that follow."""

    def parameters(model):
        counts = reference.parameters(model)
        return counts | change(model, counts)

    return parameters, lambda model, dtype_bytes=2: sum(parameters(model).values()) * dtype_bytes


def card_with(reference, case_of=lambda m: True, **changes):
    """The reference on a card with other fields."""

    def parameters(model):
        return reference.parameters(replace(model, **changes) if case_of(model) else model)

    return parameters, lambda model, dtype_bytes=2: sum(parameters(model).values()) * dtype_bytes


@wrong("query heads for KV heads", case="a dense model")
def query_heads(reference):
    return but(reference, lambda m, c: {"kv": c["kv"] * m.num_heads // m.num_kv_heads})


@wrong("no output projection", case="a dense model")
def no_output(reference):
    return but(reference, lambda m, c: {"query": c["query"] // 2})


@wrong("no norm at the end", case="a dense model")
def no_last_norm(reference):
    return but(reference, lambda m, c: {"replicated": c["replicated"] - m.hidden_size})


@wrong("a tied head counted again", case="tied embeddings")
def tied_twice(reference):
    return card_with(reference, tied_embeddings=False)


@wrong("no biases of queries, keys and values", case="biases, norms and positions")
def no_bias(reference):
    return card_with(reference, qkv_bias=False)


@wrong("no norms of queries and keys", case="biases, norms and positions")
def no_qk_norm(reference):
    return card_with(reference, qk_norm=False)


@wrong("always a gate", case="biases, norms and positions")
def gate(reference):
    return card_with(reference, gated_mlp=True)


@wrong("no table of positions", case="biases, norms and positions")
def no_positions(reference):
    return card_with(reference, position_rows=0)


@wrong("only the experts that a token uses", case="mixture of experts")
def active_only(reference):
    return but(
        reference, lambda m, c: {"experts": c["experts"] * m.experts_per_token // m.num_experts if m.num_experts else 0}
    )


@wrong("no router", case="mixture of experts")
def no_router(reference):
    def change(m, c):
        sparse = m.num_layers - m.dense_layers if m.num_experts else 0
        return {"replicated": c["replicated"] - sparse * m.num_experts * m.hidden_size}

    return but(reference, change)


@wrong("experts in the dense layers too", case="mixture of experts")
def no_dense_layers(reference):
    return card_with(reference, dense_layers=0)


@wrong("shared experts forgotten", case="mixture of experts")
def no_shared(reference):
    return card_with(reference, shared_experts=0)


@wrong("MLA as if it were GQA", case="latent attention")
def as_gqa(reference):
    return card_with(reference, kv_lora_rank=0)


@wrong("MLA without its two norms", case="latent attention")
def no_latent_norms(reference):
    def change(m, c):
        return {"replicated": c["replicated"] - m.num_layers * (m.q_lora_rank + m.kv_lora_rank) * bool(m.kv_lora_rank)}

    return but(reference, change)


@wrong("attention matrices of hidden size x hidden size", case="every card of the course")
def square(reference):
    def change(m, c):
        return {"query": c["query"] if m.kv_lora_rank else m.num_layers * 2 * m.hidden_size**2}

    return but(reference, change)


@wrong("always two bytes", case="bytes of all parts")
def always_bf16(reference):
    return reference.parameters, lambda model, dtype_bytes=2: sum(reference.parameters(model).values()) * 2


@wrong("without the embedding", case="bytes of all parts")
def no_embedding(reference):
    def weight_bytes(model, dtype_bytes=2):
        counts = reference.parameters(model)
        return (sum(counts.values()) - counts["embedding"]) * dtype_bytes

    return reference.parameters, weight_bytes


@wrong("`dense_layers` of a dense model", case="a dense model")
def nothing_dense(reference):
    return but(reference, lambda m, c: {} if m.num_experts else {"mlp": 0})


@wrong("a group left out", case="a dense model")
def left_out(reference):
    def parameters(model):
        return {group: count for group, count in reference.parameters(model).items() if group != "kv"}

    return parameters, reference.weight_bytes


@wrong("a total among the groups", case="a dense model")
def total(reference):
    return but(reference, lambda m, c: {"total": sum(c.values())})[0], reference.weight_bytes


@wrong("experts always with a gate", case="mixture of experts")
def gated_experts(reference):
    return card_with(reference, lambda m: m.num_experts > 0, gated_mlp=True)


@wrong("`dense_layers` of a dense model, where it is given", case="a dense model")
def few_dense(reference):
    def change(m, c):
        return {} if m.num_experts or not m.dense_layers else {"mlp": c["mlp"] // m.num_layers * m.dense_layers}

    return but(reference, change)
