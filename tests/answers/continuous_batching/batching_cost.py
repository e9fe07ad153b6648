"""Named answers to `continuous_batching.batching_cost`."""

from servelab.answers import right, wrong


@right("by unit 01's formula, from the constants")
def from_constants(reference):
    def step(cost, tokens, kv):
        by_memory, by_arithmetic = cost.weights + kv * cost.kv_token, tokens * cost.token
        return (by_memory if by_memory > by_arithmetic else by_arithmetic) + cost.overhead

    def tpot_ratio(cost, batch, context):
        return step(cost, batch, batch * context) / step(cost, 1, context)

    def recompute_seconds(cost, tokens, batch, context):
        return step(cost, tokens + batch, context * batch) - step(cost, batch, context * batch)

    return (
        tpot_ratio,
        recompute_seconds,
        lambda tokens, kv_bytes_per_token, link_gb_s: tokens * kv_bytes_per_token / link_gb_s / 5e8,
    )


@right("as arithmetic that is left over")
def left_over(reference):
    def recompute_seconds(cost, tokens, batch, context):
        memory = cost.weights + batch * context * cost.kv_token
        return max(0.0, (batch + tokens) * cost.token - max(memory, batch * cost.token))

    def swap_seconds(tokens, kv_bytes_per_token, link_gb_s):
        one_way = tokens * kv_bytes_per_token / (link_gb_s * 1_000_000_000)
        return one_way + one_way

    return reference.tpot_ratio, recompute_seconds, swap_seconds


def with_ratio(reference, tpot_ratio):
    return tpot_ratio, reference.recompute_seconds, reference.swap_seconds


def with_recompute(reference, recompute_seconds):
    return reference.tpot_ratio, recompute_seconds, reference.swap_seconds


def with_swap(reference, swap_seconds):
    return reference.tpot_ratio, reference.recompute_seconds, swap_seconds


@wrong("the gain in throughput", case="TPOT against that of a batch of one")
def gain(reference):
    return with_ratio(reference, lambda cost, batch, context: batch / reference.tpot_ratio(cost, batch, context))


@wrong("a batch of one without its context", case="TPOT against that of a batch of one")
def no_context(reference):
    return with_ratio(reference, lambda cost, batch, context: cost.seconds(batch, batch * context) / cost.seconds(1, 0))


@wrong("one context for the whole batch", case="TPOT against that of a batch of one")
def one_context(reference):
    return with_ratio(reference, lambda cost, batch, context: cost.seconds(batch, context) / cost.seconds(1, context))


@wrong("the batch's contexts are computed again", case="TPOT against that of a batch of one")
def prefilled(reference):
    return with_ratio(
        reference, lambda cost, batch, context: cost.seconds(batch * context, 0) / cost.seconds(context, 0)
    )


@wrong("milliseconds instead of a ratio", case="TPOT against that of a batch of one")
def milliseconds(reference):
    return with_ratio(reference, lambda cost, batch, context: 1e3 * cost.seconds(batch, batch * context))


@wrong("recomputed in a step of its own", case="recomputing rides along")
def own_step(reference):
    return with_recompute(reference, lambda cost, tokens, batch, context: cost.seconds(tokens, 0))


@wrong("the whole step counted", case="recomputing rides along")
def whole_step(reference):
    return with_recompute(reference, lambda cost, tokens, batch, context: cost.seconds(batch + tokens, batch * context))


@wrong("arithmetic is never free", case="recomputing rides along")
def never_free(reference):
    return with_recompute(reference, lambda cost, tokens, batch, context: tokens * cost.token)


@wrong("the recomputed tokens are read from the cache, too", case="recomputing rides along")
def read_too(reference):
    def recompute_seconds(cost, tokens, batch, context):
        return cost.seconds(batch + tokens, batch * context + tokens) - cost.seconds(batch, batch * context)

    return with_recompute(reference, recompute_seconds)


@wrong("the others' tokens are not in the step", case="recomputing rides along")
def without_others(reference):
    def recompute_seconds(cost, tokens, batch, context):
        return cost.seconds(tokens, batch * context) - cost.seconds(batch, batch * context)

    return with_recompute(reference, recompute_seconds)


@wrong("one way only", case="swapping goes out and comes back")
def one_way(reference):
    return with_swap(
        reference, lambda tokens, kv_bytes_per_token, link_gb_s: tokens * kv_bytes_per_token / (link_gb_s * 1e9)
    )


@wrong("GB of 2^30", case="swapping goes out and comes back")
def gib(reference):
    return with_swap(
        reference, lambda tokens, kv_bytes_per_token, link_gb_s: 2 * tokens * kv_bytes_per_token / (link_gb_s * 2**30)
    )


@wrong("gigabits", case="swapping goes out and comes back")
def gigabits(reference):
    return with_swap(
        reference, lambda tokens, kv_bytes_per_token, link_gb_s: 16 * tokens * kv_bytes_per_token / (link_gb_s * 1e9)
    )


@wrong("the link's two directions added up", case="swapping goes out and comes back")
def both_directions(reference):
    return with_swap(
        reference,
        lambda tokens, kv_bytes_per_token, link_gb_s: 2 * tokens * kv_bytes_per_token / (2 * link_gb_s * 1e9),
    )
