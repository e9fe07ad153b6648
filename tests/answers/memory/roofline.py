"""Named answers to `memory.roofline`."""

from dataclasses import replace
from fractions import Fraction

import numpy as np

from servelab.answers import right, wrong


@right("seconds against seconds, with numpy")
def seconds(reference):
    def ridge_point(gpu):
        return np.float64(gpu.dense_bf16_tflops * 1e12) / np.float64(gpu.bandwidth_tb_s * 1e12)

    def critical_batch(model, gpu, weight_dtype_bytes=2, compute_dtype_bytes=2):
        read = weight_dtype_bytes / (gpu.bandwidth_tb_s * 1e12)
        multiply = 2 / (gpu.dense_bf16_tflops * 1e12 * 2 / compute_dtype_bytes)
        used = model.experts_per_token / model.num_experts if model.num_experts else 1
        return read / (multiply * used)

    def attention_intensity(model, kv_dtype_bytes=2):
        if not model.kv_lora_rank:
            return model.num_heads / model.num_kv_heads * 2 / kv_dtype_bytes
        width = model.kv_lora_rank + model.qk_rope_head_dim
        return 2 * model.num_heads * (width + model.kv_lora_rank) / (width * kv_dtype_bytes)

    return ridge_point, critical_batch, attention_intensity


@right("exact fractions")
def fractions(reference):
    def ridge_point(gpu):
        return float(Fraction(gpu.dense_bf16_tflops) / Fraction(gpu.bandwidth_tb_s))

    def critical_batch(model, gpu, weight_dtype_bytes=2, compute_dtype_bytes=2):
        experts, used = max(1, model.num_experts), max(1, model.experts_per_token)
        ratio = Fraction(experts, used) * Fraction(weight_dtype_bytes) / Fraction(compute_dtype_bytes)
        return float(ratio * Fraction(ridge_point(gpu)))

    def attention_intensity(model, kv_dtype_bytes=2):
        latent, rope = model.kv_lora_rank, model.qk_rope_head_dim
        kept = latent + rope if latent else 2 * model.num_kv_heads * model.head_dim
        used = model.num_heads * (2 * latent + rope if latent else 2 * model.head_dim)
        return float(Fraction(2 * used, kept * kv_dtype_bytes))

    return ridge_point, critical_batch, attention_intensity


def batch_of(reference, factor):
    """A wrong critical batch: the ridge point times ``factor(model, weight size, compute size)``."""

    def critical_batch(model, gpu, weight_dtype_bytes=2, compute_dtype_bytes=2):
        return reference.ridge_point(gpu) * factor(model, weight_dtype_bytes, compute_dtype_bytes)

    return reference.ridge_point, critical_batch, reference.attention_intensity


def spread(m):
    return m.num_experts / m.experts_per_token if m.num_experts else 1


@wrong("two operations and two bytes mixed up", case="the ridge point")
def halved(reference):
    return lambda gpu: reference.ridge_point(gpu) / 2, reference.critical_batch, reference.attention_intensity


@wrong("upside down", case="the ridge point")
def inverse(reference):
    return lambda gpu: 1 / reference.ridge_point(gpu), reference.critical_batch, reference.attention_intensity


@wrong("peak over bandwidth times the bytes of a weight", case="critical batch of a dense model")
def times_two(reference):
    return batch_of(reference, lambda m, w, c: spread(m) * w * 2 / c)


@wrong("experts ignored", case="critical batch with experts")
def no_experts(reference):
    return batch_of(reference, lambda m, w, c: w / c)


@wrong("fewer tokens, because fewer experts work", case="critical batch with experts")
def fewer(reference):
    return batch_of(reference, lambda m, w, c: w / c / spread(m))


@wrong("always bf16", case="quantised weights, or everything")
def always_bf16(reference):
    return batch_of(reference, lambda m, w, c: spread(m))


@wrong("fp8 arithmetic ignored", case="quantised weights, or everything")
def weights_only(reference):
    return batch_of(reference, lambda m, w, c: spread(m) * w / 2)


@wrong("half of the keys and values", case="intensity of attention")
def keys_only(reference):
    def attention_intensity(model, kv_dtype_bytes=2):
        return reference.attention_intensity(model, kv_dtype_bytes) / 2

    return reference.ridge_point, reference.critical_batch, attention_intensity


@wrong("MLA as if it were GQA", case="intensity of attention")
def grouped(reference):
    def attention_intensity(model, kv_dtype_bytes=2):
        return model.num_heads / model.num_kv_heads * 2 / kv_dtype_bytes

    return reference.ridge_point, reference.critical_batch, attention_intensity


@wrong("the cache is always bf16", case="intensity of attention")
def bf16_cache(reference):
    def attention_intensity(model, kv_dtype_bytes=2):
        return reference.attention_intensity(model, 2)

    return reference.ridge_point, reference.critical_batch, attention_intensity


@wrong("MLA known by its `q_lora_rank`", case="intensity of attention")
def by_the_queries(reference):
    def attention_intensity(model, kv_dtype_bytes=2):
        known = model if model.q_lora_rank else replace(model, kv_lora_rank=0)
        return reference.attention_intensity(known, kv_dtype_bytes)

    return reference.ridge_point, reference.critical_batch, attention_intensity
