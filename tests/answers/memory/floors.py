"""Named answers to `memory.floors`."""

import math
from dataclasses import replace

import numpy as np

from servelab.answers import right, wrong
from servelab.cards import Layout


def four(experts_read, mixed):
    """The four functions, where decode and prefill follow from a mixed step of the same mistakes."""

    def mixed_step_floor(m, g, batch, context, prompt_tokens, tp=1, weight_dtype_bytes=2, kv_dtype_bytes=2):
        return mixed(m, g, batch, context, prompt_tokens, tp, weight_dtype_bytes, kv_dtype_bytes)

    def decode_step_floor(model, gpu, batch, context, tp=1, weight_dtype_bytes=2, kv_dtype_bytes=2):
        return mixed(model, gpu, batch, context, 0, tp, weight_dtype_bytes, kv_dtype_bytes)

    def prefill_floor(model, gpu, tokens, tp=1, weight_dtype_bytes=2):
        return mixed(model, gpu, 0, 0, tokens, tp, weight_dtype_bytes, 2)

    def renamed(model, gpu, **more):
        return mixed_step_floor(model, gpu, **more)

    return experts_read, decode_step_floor, prefill_floor, renamed


def kv_bytes(reference, m, batch, context, tp, size):
    return batch * reference.kv_bytes_per_rank(m, context, Layout(cards=tp, split_heads=tp), size)


def weights(reference, m, experts):
    """Parameters, by group, when so many experts a layer are used."""
    parts = reference.parameters(m)
    return parts | {"experts": parts["experts"] * experts / m.num_experts if m.num_experts else 0}


def floor(reference, read, *, embedding_read=True, embedding_used=False, used=None, kv=kv_bytes, join=max):
    """A mixed step's floor, with its parts replaceable."""

    def mixed(m, g, batch, context, prompt, tp, weight_size, kv_size):
        tokens = batch + prompt
        loaded, active = weights(reference, m, read(m, tokens)), weights(reference, m, m.experts_per_token)
        if used:
            active = weights(reference, m, used(m))
        size = sum(loaded.values()) - (0 if embedding_read else loaded["embedding"])
        work = 2 * tokens * (sum(active.values()) - (0 if embedding_used else active["embedding"]))
        load = size * weight_size / tp + kv(reference, m, batch, context, tp, kv_size)
        return join(load / (g.bandwidth_tb_s * 1e12), work / tp / (g.dense_bf16_tflops * 1e12))

    return mixed


@right("group by group, with the experts by a logarithm")
def logarithm(reference):
    def experts_read(model, tokens):
        if model.num_experts == 0:
            return 0.0
        left = math.exp(tokens * math.log1p(-model.experts_per_token / model.num_experts))
        return model.num_experts - model.num_experts * left

    return four(experts_read, floor(reference, experts_read))


@right("the experts by recursion over tokens, and numpy floats")
def recursion(reference):
    def experts_read(model, tokens):
        read = 0.0
        for _ in range(tokens):
            read += (model.num_experts - read) * model.experts_per_token / max(1, model.num_experts)
        return np.float64(read)

    return four(experts_read, floor(reference, experts_read, join=lambda *times: np.max(times)))


@wrong("without the embedding", case="decode reads weights and KV")
def no_embedding(reference):
    return four(reference.experts_read, floor(reference, reference.experts_read, embedding_read=False))


@wrong("KV read once for the whole batch", case="decode reads weights and KV")
def one_context(reference):
    def kv(reference, m, batch, context, tp, size):
        return kv_bytes(reference, m, min(batch, 1), context, tp, size)

    return four(reference.experts_read, floor(reference, reference.experts_read, kv=kv))


@wrong("bytes only", case="decode reads weights and KV")
def bytes_only(reference):
    return four(reference.experts_read, floor(reference, reference.experts_read, join=lambda load, work: load))


@wrong("weights read once for each request", case="decode reads weights and KV")
def per_request(reference):
    def mixed(m, g, batch, *rest):
        return floor(reference, reference.experts_read)(m, g, batch, *rest) * max(1, batch)

    return four(reference.experts_read, mixed)


@wrong("KV over TP past the KV heads", case="several cards")
def kv_over_tp(reference):
    def kv(reference, m, batch, context, tp, size):
        return kv_bytes(reference, m, batch, context, 1, size) / tp

    return four(reference.experts_read, floor(reference, reference.experts_read, kv=kv))


@wrong("one card does all the operations", case="several cards")
def one_card(reference):
    def mixed(m, g, batch, context, prompt, tp, *sizes):
        whole = floor(reference, reference.experts_read, join=lambda load, work: work)(
            m, g, batch, context, prompt, 1, *sizes
        )
        return max(floor(reference, reference.experts_read)(m, g, batch, context, prompt, tp, *sizes), whole)

    return four(reference.experts_read, mixed)


@wrong("all experts read", case="experts that a step reads")
def all_experts(reference):
    def experts_read(model, tokens):
        return model.num_experts

    return four(experts_read, floor(reference, experts_read))


@wrong("k experts for each token, without overlap", case="experts that a step reads")
def no_overlap(reference):
    def experts_read(model, tokens):
        return min(model.num_experts, model.experts_per_token * tokens)

    return four(experts_read, floor(reference, experts_read))


@wrong("all experts compute", case="experts that a step reads")
def all_compute(reference):
    return four(reference.experts_read, floor(reference, reference.experts_read, used=lambda m: m.num_experts))


@wrong("the embedding multiplies", case="prefill: bytes or operations")
def embedding_used(reference):
    return four(reference.experts_read, floor(reference, reference.experts_read, embedding_used=True))


@wrong("one operation for a weight and a token", case="prefill: bytes or operations")
def one_operation(reference):
    mixed = floor(reference, reference.experts_read, join=lambda load, work: max(load, work / 2))
    return four(reference.experts_read, mixed)


@wrong("the two times added", case="prefill: bytes or operations")
def added(reference):
    return four(reference.experts_read, floor(reference, reference.experts_read, join=lambda load, work: load + work))


@wrong("a mixed step as a decode step and then a prefill", case="a mixed step")
def two_steps(reference):
    def mixed_step_floor(model, gpu, batch, context, prompt_tokens, **more):
        sizes = {name: value for name, value in more.items() if name != "kv_dtype_bytes"}
        decode = reference.decode_step_floor(model, gpu, batch, context, **more)
        return decode + reference.prefill_floor(model, gpu, prompt_tokens, **sizes)

    return reference.experts_read, reference.decode_step_floor, reference.prefill_floor, mixed_step_floor


@wrong("the larger of a decode step and a prefill", case="a mixed step")
def larger(reference):
    def mixed_step_floor(model, gpu, batch, context, prompt_tokens, **more):
        sizes = {name: value for name, value in more.items() if name != "kv_dtype_bytes"}
        decode = reference.decode_step_floor(model, gpu, batch, context, **more)
        return max(decode, reference.prefill_floor(model, gpu, prompt_tokens, **sizes))

    return reference.experts_read, reference.decode_step_floor, reference.prefill_floor, mixed_step_floor


@wrong("KV as large as the weights' elements", case="bytes of weights and of KV")
def one_size(reference):
    def mixed(m, g, batch, context, prompt, tp, weight_size, kv_size):
        whole = floor(reference, reference.experts_read)
        return whole(m, g, batch, context, prompt, tp, weight_size, max(1, int(weight_size)))

    return four(reference.experts_read, mixed)


@wrong("weights of one byte multiplied at twice the peak", case="bytes of weights and of KV")
def twice_the_peak(reference):
    def mixed(m, g, batch, context, prompt, tp, weight_size, kv_size):
        fast = replace(g, dense_bf16_tflops=g.dense_bf16_tflops * 2 / weight_size)
        return floor(reference, reference.experts_read)(m, fast, batch, context, prompt, tp, weight_size, kv_size)

    return four(reference.experts_read, mixed)


@wrong("milliseconds", case="decode reads weights and KV")
def milliseconds(reference):
    mixed = floor(reference, reference.experts_read, join=lambda load, work: 1e3 * max(load, work))
    return four(reference.experts_read, mixed)


@wrong("the fullest card's weights, replicated ones whole", case="several cards")
def fullest_card(reference):
    def mixed(m, g, batch, context, prompt, tp, weight_size, kv_size):
        value = floor(reference, reference.experts_read)(m, g, batch, context, prompt, tp, weight_size, kv_size)
        if m.num_experts:
            return value
        layout = Layout(cards=tp, split_heads=tp)
        load = reference.weight_bytes_per_rank(m, layout, weight_size)
        load += kv_bytes(reference, m, batch, context, tp, kv_size)
        return max(value, load / (g.bandwidth_tb_s * 1e12))

    return four(reference.experts_read, mixed)


@wrong("the prompt's tokens added to the context", case="a mixed step")
def longer_context(reference):
    def mixed(m, g, batch, context, prompt, *rest):
        work_only = floor(reference, reference.experts_read, join=lambda load, work: work)
        grown = floor(reference, reference.experts_read)(m, g, batch, context + prompt, prompt, *rest)
        return max(grown, work_only(m, g, batch, context, prompt, *rest))

    return four(reference.experts_read, mixed)


def own_mixed(reference, change):
    """Right decode and prefill steps beside a mixed step that is written apart, with ``change(settings)`` over it."""

    def mixed_step_floor(m, g, batch, context, prompt_tokens, tp=1, weight_dtype_bytes=2, kv_dtype_bytes=2):
        given = {"tp": tp, "weight_dtype_bytes": weight_dtype_bytes, "kv_dtype_bytes": kv_dtype_bytes}
        return reference.mixed_step_floor(m, g, batch, context, prompt_tokens, **(given | change(given)))

    def renamed(model, gpu, **more):
        return mixed_step_floor(model, gpu, **more)

    return reference.experts_read, reference.decode_step_floor, reference.prefill_floor, renamed


@wrong("a mixed step on one card, whatever `tp` is", case="a mixed step")
def mixed_on_one_card(reference):
    return own_mixed(reference, lambda given: {"tp": 1})


@wrong("a mixed step with bf16 weights and KV, whatever their sizes are", case="bytes of weights and of KV")
def mixed_in_bf16(reference):
    return own_mixed(reference, lambda given: {"weight_dtype_bytes": 2, "kv_dtype_bytes": 2})


@wrong("a mixed step with KV elements of the weights' size", case="bytes of weights and of KV")
def mixed_of_one_size(reference):
    return own_mixed(reference, lambda given: {"kv_dtype_bytes": given["weight_dtype_bytes"]})


def own_floor(reference, **parts):
    """The same, where the mixed step is a floor with parts of its own."""

    def mixed_step_floor(model, gpu, batch, context, prompt_tokens, tp=1, weight_dtype_bytes=2, kv_dtype_bytes=2):
        sizes = weight_dtype_bytes, kv_dtype_bytes
        return floor(reference, reference.experts_read, **parts)(model, gpu, batch, context, prompt_tokens, tp, *sizes)

    return reference.experts_read, reference.decode_step_floor, reference.prefill_floor, mixed_step_floor


@wrong("a mixed step whose KV is on one card", case="a mixed step")
def mixed_with_all_kv(reference):
    return own_floor(reference, kv=lambda ref, m, batch, context, tp, size: kv_bytes(ref, m, batch, context, 1, size))


@wrong("a mixed step whose operations are on one card", case="a mixed step")
def mixed_operations_on_one_card(reference):
    right_floor = floor(reference, reference.experts_read)

    def mixed_step_floor(model, gpu, batch, context, prompt_tokens, tp=1, weight_dtype_bytes=2, kv_dtype_bytes=2):
        given = model, gpu, batch, context, prompt_tokens
        work = floor(reference, reference.experts_read, join=lambda load, work: work)(*given, 1, 2, 2)
        return max(work, right_floor(*given, tp, weight_dtype_bytes, kv_dtype_bytes))

    return reference.experts_read, reference.decode_step_floor, reference.prefill_floor, mixed_step_floor


@wrong("a mixed step of weights of one byte at twice the peak", case="bytes of weights and of KV")
def mixed_at_twice_the_peak(reference):
    def mixed_step_floor(model, gpu, batch, context, prompt_tokens, tp=1, weight_dtype_bytes=2, kv_dtype_bytes=2):
        fast = replace(gpu, dense_bf16_tflops=gpu.dense_bf16_tflops * 2 / weight_dtype_bytes)
        sizes = weight_dtype_bytes, kv_dtype_bytes
        return reference.mixed_step_floor(model, fast, batch, context, prompt_tokens, tp, *sizes)

    return reference.experts_read, reference.decode_step_floor, reference.prefill_floor, mixed_step_floor
