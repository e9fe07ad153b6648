"""Named answers to `memory.capacity`."""

from dataclasses import replace
from fractions import Fraction

import numpy as np

from servelab.answers import right, wrong

USUAL = {"utilisation": 0.92, "overhead_bytes": 2e9, "weight_dtype_bytes": 2, "kv_dtype_bytes": 2}


def trio(room, tokens, concurrent):
    """Three functions of (gpu, model, layout, settings), with the arguments that the task gives them."""

    def settings(utilisation, overhead_bytes, weight_dtype_bytes, kv_dtype_bytes):
        return utilisation, overhead_bytes, weight_dtype_bytes, kv_dtype_bytes

    def kv_room(gpu, model, layout, **more):
        return room(gpu, model, layout, *settings(**(USUAL | more)))

    def max_tokens(gpu, model, layout, **more):
        return tokens(kv_room, gpu, model, layout, USUAL | more)

    def max_concurrent(gpu, model, layout, tokens, **more):
        return concurrent(kv_room, gpu, model, layout, tokens, USUAL | more)

    return kv_room, max_tokens, max_concurrent


def right_parts(reference):
    def room(gpu, model, layout, utilisation, overhead, weight_size, kv_size):
        return reference.kv_room(gpu, model, layout, utilisation, overhead, weight_size, kv_size)

    def tokens(kv_room, gpu, model, layout, more):
        one = reference.kv_bytes_per_rank(model, layout.split_tokens, layout, more["kv_dtype_bytes"])
        return kv_room(gpu, model, layout, **more) / (one / layout.split_tokens) * layout.split_requests

    def concurrent(kv_room, gpu, model, layout, length, more):
        one = reference.kv_bytes_per_rank(model, length, layout, more["kv_dtype_bytes"])
        return int(kv_room(gpu, model, layout, **more) // one) * layout.split_requests

    return room, tokens, concurrent


@right("exact fractions")
def exact(reference):
    _, tokens, _ = right_parts(reference)

    def room(gpu, model, layout, utilisation, overhead, weight_size, kv_size):
        usable = Fraction(gpu.memory_gb) * 10**9 * Fraction(utilisation)
        weights = Fraction(reference.weight_bytes_per_rank(model, layout, weight_size))
        return float(max(Fraction(0), usable - weights - Fraction(overhead)))

    def concurrent(kv_room, gpu, model, layout, length, more):
        one = Fraction(reference.kv_bytes_per_rank(model, length, layout, more["kv_dtype_bytes"]))
        return (Fraction(kv_room(gpu, model, layout, **more)) // one) * layout.split_requests

    return trio(room, tokens, concurrent)


@right("requests admitted one at a time, with numpy")
def one_at_a_time(reference):
    def room(gpu, model, layout, utilisation, overhead, weight_size, kv_size):
        left = gpu.memory_gb * 1e9 * utilisation - reference.weight_bytes_per_rank(model, layout, weight_size)
        return np.maximum(left - overhead, 0.0)

    def tokens(kv_room, gpu, model, layout, more):
        one = reference.kv_bytes_per_rank(model, 10 * layout.split_tokens, layout, more["kv_dtype_bytes"]) / 10
        return np.float64(kv_room(gpu, model, layout, **more) * layout.split_requests * layout.split_tokens / one)

    def concurrent(kv_room, gpu, model, layout, length, more):
        one, running = reference.kv_bytes_per_rank(model, length, layout, more["kv_dtype_bytes"]), 0
        while (running + 1) * one <= kv_room(gpu, model, layout, **more):
            running += 1
        return np.int64(sum(running for _ in range(layout.split_requests)))

    return trio(room, tokens, concurrent)


def with_room(reference, room):
    return trio(room, *right_parts(reference)[1:])


@wrong("GB for GiB", case="room beside the weights")
def gib(reference):
    def room(gpu, model, layout, *rest):
        return reference.kv_room(replace(gpu, memory_gb=gpu.memory_gb * 1.073741824), model, layout, *rest)

    return with_room(reference, room)


@wrong("the overhead inside the utilisation", case="room beside the weights")
def overhead_inside(reference):
    def room(gpu, model, layout, utilisation, overhead, weight_size, kv_size):
        return reference.kv_room(gpu, model, layout, utilisation, overhead * utilisation, weight_size)

    return with_room(reference, room)


@wrong("the utilisation of what the weights leave", case="room beside the weights")
def of_the_rest(reference):
    def room(gpu, model, layout, utilisation, overhead, weight_size, kv_size):
        left = reference.kv_room(gpu, model, layout, 1.0, 0, weight_size)
        return max(0, left * utilisation - overhead)

    return with_room(reference, room)


@wrong("a negative room", case="no room at all")
def negative(reference):
    def room(gpu, model, layout, utilisation, overhead, weight_size, kv_size):
        return (
            utilisation * gpu.memory_gb * 1e9 - overhead - reference.weight_bytes_per_rank(model, layout, weight_size)
        )

    return with_room(reference, room)


@wrong("the whole model on each card", case="tokens in one group of cards")
def whole_model(reference):
    room, _, concurrent = right_parts(reference)

    def tokens(kv_room, gpu, model, layout, more):
        one = reference.kv_bytes_per_token(model, more["kv_dtype_bytes"])
        return kv_room(gpu, model, layout, **more) / one * layout.split_requests

    return trio(room, tokens, concurrent)


@wrong("the room of all cards over one copy", case="copies take room")
def one_copy(reference):
    room, _, concurrent = right_parts(reference)

    def tokens(kv_room, gpu, model, layout, more):
        one = reference.kv_bytes_per_token(model, more["kv_dtype_bytes"])
        return kv_room(gpu, model, layout, **more) * layout.cards / one

    return trio(room, tokens, concurrent)


@wrong("one token on every card of a token split", case="copies take room")
def on_every_card(reference):
    room, tokens, concurrent = right_parts(reference)

    def fewer(kv_room, gpu, model, layout, more):
        return tokens(kv_room, gpu, model, layout, more) / layout.split_tokens

    return trio(room, fewer, concurrent)


@wrong("one group only", case="groups add up")
def one_group(reference):
    room, tokens, concurrent = right_parts(reference)

    def fewer(kv_room, gpu, model, layout, more):
        return tokens(kv_room, gpu, model, layout, more) / layout.split_requests

    return trio(room, fewer, concurrent)


@wrong("requests spread over groups", case="whole requests in each group")
def spread(reference):
    room, tokens, _ = right_parts(reference)

    def concurrent(kv_room, gpu, model, layout, length, more):
        one = reference.kv_bytes_per_rank(model, length, layout, more["kv_dtype_bytes"])
        return int(kv_room(gpu, model, layout, **more) * layout.split_requests // one)

    return trio(room, tokens, concurrent)


@wrong("tokens over length, windows ignored", case="whole requests in each group")
def no_windows(reference):
    room, tokens, _ = right_parts(reference)

    def concurrent(kv_room, gpu, model, layout, length, more):
        full = replace(model, sliding_layers=0, sliding_window=0)
        one = reference.kv_bytes_per_rank(full, length, layout, more["kv_dtype_bytes"])
        return int(kv_room(gpu, model, layout, **more) // one) * layout.split_requests

    return trio(room, tokens, concurrent)


@wrong("rounded up", case="whole requests in each group")
def rounded_up(reference):
    room, tokens, concurrent = right_parts(reference)
    return trio(room, tokens, lambda *args: concurrent(*args) + args[3].split_requests)


@wrong("weights and KV of one size", case="bytes of weights and of KV")
def one_size(reference):
    def room(gpu, model, layout, utilisation, overhead, weight_size, kv_size):
        return reference.kv_room(gpu, model, layout, utilisation, overhead, kv_size)

    return with_room(reference, room)


@wrong("always a bf16 cache", case="bytes of weights and of KV")
def bf16_cache(reference):
    room, tokens, concurrent = right_parts(reference)
    return trio(room, lambda *args: tokens(*args[:-1], args[-1] | {"kv_dtype_bytes": 2}), concurrent)


@wrong("sliding layers left out of a token", case="tokens in one group of cards")
def full_layers_only(reference):
    room, tokens, concurrent = right_parts(reference)

    def more_tokens(kv_room, gpu, model, layout, more):
        full = model.num_layers - model.sliding_layers
        return tokens(kv_room, gpu, model, layout, more) * model.num_layers / full

    return trio(room, more_tokens, concurrent)


def latent_split(more, layout, model):
    """The bytes of a token, where MLA's latent is divided among the cards of a head split."""
    one = more["kv_dtype_bytes"] * (model.kv_lora_rank + model.qk_rope_head_dim)
    return one * model.num_layers / layout.split_layers / min(layout.split_heads, model.num_kv_heads)


@wrong("the latent of MLA divided among the heads, in tokens", case="copies take room")
def latent_split_in_tokens(reference):
    room, tokens, concurrent = right_parts(reference)

    def more_tokens(kv_room, gpu, model, layout, more):
        if not model.kv_lora_rank:
            return tokens(kv_room, gpu, model, layout, more)
        one = latent_split(more, layout, model)
        return kv_room(gpu, model, layout, **more) / one * layout.split_tokens * layout.split_requests

    return trio(room, more_tokens, concurrent)


@wrong("the latent of MLA divided among the heads, in requests", case="whole requests in each group")
def latent_split_in_requests(reference):
    room, tokens, concurrent = right_parts(reference)

    def more_requests(kv_room, gpu, model, layout, length, more):
        if not model.kv_lora_rank:
            return concurrent(kv_room, gpu, model, layout, length, more)
        one = latent_split(more, layout, model) * -(-length // layout.split_tokens)
        return int(kv_room(gpu, model, layout, **more) // one) * layout.split_requests

    return trio(room, tokens, more_requests)


@wrong("0 only where the weights alone do not fit", case="no room at all")
def weights_alone(reference):
    def room(gpu, model, layout, utilisation, overhead, weight_size, kv_size):
        left = reference.kv_room(gpu, model, layout, utilisation, 0, weight_size)
        return left - overhead if left > 0 else 0

    return with_room(reference, room)


@wrong("the tokens of a request split without rounding up", case="whole requests in each group")
def parts_of_tokens(reference):
    room, tokens, _ = right_parts(reference)

    def concurrent(kv_room, gpu, model, layout, length, more):
        whole = reference.kv_bytes_per_rank(model, length, replace(layout, split_tokens=1), more["kv_dtype_bytes"])
        return int(kv_room(gpu, model, layout, **more) // (whole / layout.split_tokens)) * layout.split_requests

    return trio(room, tokens, concurrent)
