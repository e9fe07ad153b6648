"""Named answers to `memory.per_rank`."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

import numpy as np

from servelab.answers import right, wrong


@right("card by card: which heads does each one get?")
def head_lists(reference):
    def kv_heads(m, layout):
        t, k = layout.split_heads, m.num_kv_heads
        if m.num_heads % t or m.num_layers % layout.split_layers or (k % t and t % k):
            raise ValueError("does not divide")
        per_card = m.num_heads // t
        group = m.num_heads // k
        return len({head // group for head in range(per_card)}) if t > k or k % t == 0 else 0

    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        heads = kv_heads(model, layout)
        width = 2 * heads * model.head_dim
        if model.kv_lora_rank:
            width = model.kv_lora_rank + model.qk_rope_head_dim
        total = 0
        for layer in range(model.num_layers):
            kept = min(tokens, model.sliding_window) if layer < model.sliding_layers else tokens
            total += ceil(kept / layout.split_tokens) * width * dtype_bytes
        return Fraction(total, layout.split_layers).__float__()

    def weight_bytes_per_rank(model, layout, dtype_bytes=2):
        heads, parts = kv_heads(model, layout), reference.parameters(model)
        shares = dict.fromkeys(parts, Fraction(1, layout.split_heads))
        shares |= {"kv": Fraction(heads, model.num_kv_heads), "experts": Fraction(1, layout.split_experts)}
        shares["replicated"] = Fraction(1)
        total = sum(parts[group] * share for group, share in shares.items()) / layout.split_layers
        return float(total * Fraction(dtype_bytes))

    return kv_bytes_per_rank, weight_bytes_per_rank


@right("a small model of what one card holds, with numpy floats")
def small_model(reference):
    def refuse(m, layout):
        t, k = layout.split_heads, m.num_kv_heads
        if m.num_heads % t != 0 or m.num_layers % layout.split_layers != 0 or max(t, k) % min(t, k) != 0:
            raise ValueError(m.name)

    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        refuse(model, layout)
        heads = -(-model.num_kv_heads // layout.split_heads)
        share = 1 if model.kv_lora_rank else heads / model.num_kv_heads
        full = (tokens + layout.split_tokens - 1) // layout.split_tokens
        short = (min(tokens, model.sliding_window) + layout.split_tokens - 1) // layout.split_tokens
        layers = np.array([model.num_layers - model.sliding_layers, model.sliding_layers]) / model.num_layers
        one = reference.kv_bytes_per_token(model, dtype_bytes) / layout.split_layers
        return np.float64(layers @ np.array([full, short]) * one * share)

    def weight_bytes_per_rank(model, layout, dtype_bytes=2):
        refuse(model, layout)
        parts = reference.parameters(model)
        kv = parts["kv"] / min(layout.split_heads, model.num_kv_heads)
        groups = sum(parts[group] for group in ("embedding", "query", "mlp")) / layout.split_heads
        total = groups + kv + parts["experts"] / layout.split_experts + parts["replicated"]
        return np.float64(total * dtype_bytes / layout.split_layers)

    return kv_bytes_per_rank, weight_bytes_per_rank


@right("refuses a number of cards that the splits do not fit, and looks at KV heads outside MLA only")
def careful(reference):
    def refuse(m, layout):
        groups = layout.split_heads * layout.split_layers * layout.split_requests
        if layout.cards % groups or layout.cards % (layout.split_layers * layout.split_experts):
            raise ValueError(f"{layout.cards} cards for {groups} parts")
        if m.num_heads % layout.split_heads or m.num_layers % layout.split_layers:
            raise ValueError("heads or layers leave a remainder")
        few, many = sorted((m.num_kv_heads, layout.split_heads))
        if not m.kv_lora_rank and many % few:
            raise ValueError("KV heads and cards are no multiple of each other")

    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        refuse(model, layout)
        return reference.kv_bytes_per_rank(model, tokens, layout, dtype_bytes)

    def weight_bytes_per_rank(model, layout, dtype_bytes=2):
        refuse(model, layout)
        return reference.weight_bytes_per_rank(model, layout, dtype_bytes)

    return kv_bytes_per_rank, weight_bytes_per_rank


@right("whole layers of each kind on a card")
def whole_layers(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        reference.kv_bytes_per_rank(model, tokens, layout, dtype_bytes)
        full, sliding = (
            ceil(layers / layout.split_layers)
            for layers in (model.num_layers - model.sliding_layers, model.sliding_layers)
        )
        kept = full * ceil(tokens / layout.split_tokens)
        kept += sliding * ceil(min(tokens, model.sliding_window) / layout.split_tokens)
        one_layer = replace(model, num_layers=1, sliding_layers=0, sliding_window=0)
        copies = replace(layout, split_layers=1, split_tokens=1)
        return kept * reference.kv_bytes_per_rank(one_layer, 1, copies, dtype_bytes)

    return kv_bytes_per_rank, reference.weight_bytes_per_rank


def kv(reference, function):
    """A wrong KV function beside the right weights."""
    return function, reference.weight_bytes_per_rank


def weights(reference, function):
    return reference.kv_bytes_per_rank, function


@wrong("total over TP, past the KV heads too", case="more cards than KV heads")
def over_tp(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        right_value = reference.kv_bytes_per_rank(model, tokens, layout, dtype_bytes)
        extra = max(1, layout.split_heads // model.num_kv_heads)
        return right_value if model.kv_lora_rank else right_value / extra

    return kv(reference, kv_bytes_per_rank)


@wrong("the heads are not split", case="KV of split heads and layers")
def whole(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        reference.kv_bytes_per_rank(model, tokens, layout, dtype_bytes)
        return reference.kv_bytes_per_rank(model, tokens, replace(layout, split_heads=1), dtype_bytes)

    return kv(reference, kv_bytes_per_rank)


@wrong("layers are not split", case="KV of split heads and layers")
def no_stages(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        return reference.kv_bytes_per_rank(model, tokens, layout, dtype_bytes) * layout.split_layers

    return kv(reference, kv_bytes_per_rank)


@wrong("the latent divided by TP", case="the latent on every card")
def latent_split(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        value = reference.kv_bytes_per_rank(model, tokens, layout, dtype_bytes)
        return value / layout.split_heads if model.kv_lora_rank else value

    return kv(reference, kv_bytes_per_rank)


@wrong("total over TP x EP", case="experts and requests do not split KV")
def over_tp_and_ep(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        value = reference.kv_bytes_per_rank(model, tokens, layout, dtype_bytes)
        return value / max(1, layout.split_experts // layout.split_heads)

    return kv(reference, kv_bytes_per_rank)


@wrong("total over TP x EP, in the table", case="the six layouts")
def over_all_cards(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        reference.kv_bytes_per_rank(model, tokens, layout, dtype_bytes)
        return reference.kv_bytes_per_token(model, dtype_bytes) * tokens / layout.cards

    return kv(reference, kv_bytes_per_rank)


@wrong("a request divided among the groups", case="experts and requests do not split KV")
def over_groups(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        return reference.kv_bytes_per_rank(model, tokens, layout, dtype_bytes) / layout.split_requests

    return kv(reference, kv_bytes_per_rank)


@wrong("tokens are not split", case="split tokens and windows")
def whole_tokens(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        return reference.kv_bytes_per_rank(model, tokens, replace(layout, split_tokens=1), dtype_bytes)

    return kv(reference, kv_bytes_per_rank)


@wrong("split tokens rounded down", case="split tokens and windows")
def floor(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        c = layout.split_tokens
        whole_layout = replace(layout, split_tokens=1)
        return reference.kv_bytes_per_rank(model, tokens // c, whole_layout, dtype_bytes)

    return kv(reference, kv_bytes_per_rank)


@wrong("windows ignored", case="split tokens and windows")
def no_windows(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        return reference.kv_bytes_per_rank(replace(model, sliding_layers=0), tokens, layout, dtype_bytes)

    return kv(reference, kv_bytes_per_rank)


@wrong("the stage with the fewest sliding layers", case="split tokens and windows")
def fullest_stage(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        reference.kv_bytes_per_rank(model, tokens, layout, dtype_bytes)
        layers = model.num_layers // layout.split_layers
        sliding = max(0, layers - (model.num_layers - model.sliding_layers))
        window = model.sliding_window if sliding else 0
        stage = replace(model, num_layers=layers, sliding_layers=sliding, sliding_window=window)
        return reference.kv_bytes_per_rank(stage, tokens, replace(layout, split_layers=1), dtype_bytes)

    return kv(reference, kv_bytes_per_rank)


@wrong("all weights over TP, norms included", case="weights of a dense model")
def all_over_tp(reference):
    def weight_bytes_per_rank(model, layout, dtype_bytes=2):
        reference.weight_bytes_per_rank(model, layout, dtype_bytes)
        return reference.weight_bytes(model, dtype_bytes) / layout.split_heads / layout.split_layers

    return weights(reference, weight_bytes_per_rank)


@wrong("weights of keys and values over TP past the KV heads", case="weights of a dense model")
def kv_over_tp(reference):
    def weight_bytes_per_rank(model, layout, dtype_bytes=2):
        right_value, kv_weights = reference.weight_bytes_per_rank(model, layout, dtype_bytes), 0
        if layout.split_heads > model.num_kv_heads:
            kv_weights = reference.parameters(model)["kv"] * dtype_bytes / layout.split_layers
        return right_value - kv_weights / model.num_kv_heads + kv_weights / layout.split_heads

    return weights(reference, weight_bytes_per_rank)


@wrong("weights divided among groups of requests", case="weights of a dense model")
def over_replicas(reference):
    def weight_bytes_per_rank(model, layout, dtype_bytes=2):
        return reference.weight_bytes_per_rank(model, layout, dtype_bytes) / layout.split_requests

    return weights(reference, weight_bytes_per_rank)


@wrong("experts divided by the head split", case="weights of experts")
def experts_over_tp(reference):
    def weight_bytes_per_rank(model, layout, dtype_bytes=2):
        return reference.weight_bytes_per_rank(model, replace(layout, split_experts=layout.split_heads), dtype_bytes)

    return weights(reference, weight_bytes_per_rank)


@wrong("everything over the expert split", case="weights of experts")
def all_over_ep(reference):
    def weight_bytes_per_rank(model, layout, dtype_bytes=2):
        reference.weight_bytes_per_rank(model, layout, dtype_bytes)
        if not model.num_experts:
            return reference.weight_bytes_per_rank(model, layout, dtype_bytes)
        return reference.weight_bytes(model, dtype_bytes) / layout.split_experts / layout.split_layers

    return weights(reference, weight_bytes_per_rank)


@wrong("takes any layout", case="refuses what does not divide")
def any_layout(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        try:
            return reference.kv_bytes_per_rank(model, tokens, layout, dtype_bytes)
        except ValueError:
            return reference.kv_bytes_per_token(model, dtype_bytes) * tokens / layout.split_heads

    return kv(reference, kv_bytes_per_rank)


def refuses_only(reference, refused):
    """Takes the layouts that ``refused(model, layout)`` does not name, as the reference takes those that divide."""

    def checked(function):
        def ranked(model, layout, **more):
            if refused(model, layout):
                raise ValueError("does not divide")
            try:
                return function(model=model, layout=layout, **more)
            except ValueError:
                return 960.0

        return ranked

    return checked(reference.kv_bytes_per_rank), checked(reference.weight_bytes_per_rank)


def no_multiple(m, layout):
    few, many = sorted((m.num_kv_heads, layout.split_heads))
    return many % few > 0


def remainder(m, layout):
    return m.num_heads % layout.split_heads > 0 or m.num_layers % layout.split_layers > 0


@wrong("KV heads refused only where they are more than the cards", case="refuses what does not divide")
def more_heads_only(reference):
    def refused(m, layout):
        return remainder(m, layout) or (layout.split_heads <= m.num_kv_heads and no_multiple(m, layout))

    return refuses_only(reference, refused)


@wrong("of MLA nothing is refused", case="refuses what does not divide")
def latent_unchecked(reference):
    return refuses_only(reference, lambda m, n: not m.kv_lora_rank and (remainder(m, n) or no_multiple(m, n)))


@wrong("of MLA only the layers are checked", case="refuses what does not divide")
def latent_layers_only(reference):
    def refused(m, layout):
        if m.kv_lora_rank:
            return m.num_layers % layout.split_layers
        return remainder(m, layout) or no_multiple(m, layout)

    return refuses_only(reference, refused)


@wrong("MLA known by its `q_lora_rank`", case="the latent on every card")
def by_the_queries(reference):
    def kv_bytes_per_rank(model, tokens, layout, dtype_bytes=2):
        known = model if model.q_lora_rank else replace(model, kv_lora_rank=0)
        return reference.kv_bytes_per_rank(known, tokens, layout, dtype_bytes)

    return kv(reference, kv_bytes_per_rank)
