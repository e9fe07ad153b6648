"""Answers to the step's time against the degree."""

from servelab.answers import right, wrong
from servelab.ranks import Link


def built(reference, *, reduce=None, bound=None, step=None, fastest=None):
    """Four answers; those that are not given use the others, as the reference does."""
    reduce = reduce or reference.all_reduce_seconds

    def usual(model, gpu, link, tp, batch, context, prompt_tokens=0):
        floor = reference.memory.mixed_step_floor(model, gpu, batch, context, prompt_tokens, tp)
        nbytes = reference.boundary_bytes(model, batch + prompt_tokens)
        return floor + 2 * model.num_layers * reduce(nbytes, tp, link)

    step = step or usual

    def best(model, gpu, link, degrees, batch, context, prompt_tokens=0):
        return min(degrees, key=lambda tp: step(model, gpu, link, tp, batch, context, prompt_tokens))

    return reduce, bound or reference.bound_by, step, fastest or best


@right("hop by hop, and a search by hand")
def hop_by_hop(reference):
    def reduce(nbytes, tp, link):
        return sum(link.seconds(nbytes / tp) for _ in range(2 * (tp - 1)))

    def bound(nbytes, tp, link):
        return "latency" if nbytes <= tp * link.alpha * link.bandwidth else "bandwidth"

    def fastest(model, gpu, link, degrees, batch, context, prompt_tokens=0):
        times = {}
        for tp in degrees:
            times[tp] = reference.step_seconds(model, gpu, link, tp, batch, context, prompt_tokens)
        return sorted(times, key=times.get)[0]

    return built(reference, reduce=reduce, bound=bound, fastest=fastest)


@right("numpy, the formula's two terms apart")
def with_numpy(reference):
    import numpy as np

    def reduce(nbytes, tp, link):
        rounds = np.float64(2 * (tp - 1))
        return rounds * link.alpha + rounds / tp * nbytes / link.bandwidth

    def fastest(model, gpu, link, degrees, batch, context, prompt_tokens=0):
        degrees = np.array(sorted(degrees))
        step = reference.step_seconds
        times = [step(model, gpu, link, int(tp), batch, context, prompt_tokens) for tp in degrees]
        return degrees[np.argmin(times)]

    return built(reference, reduce=reduce, fastest=fastest)


@wrong("latency once, not for each round", case="seconds of an all-reduce")
def latency_once(reference):
    return built(
        reference, reduce=lambda nbytes, tp, link: (tp > 1) * link.alpha + 2 * (tp - 1) / tp * nbytes / link.bandwidth
    )


@wrong("only one way around the ring", case="seconds of an all-reduce")
def half(reference):
    return built(reference, reduce=lambda nbytes, tp, link: reference.all_reduce_seconds(nbytes, tp, link) / 2)


@wrong("the whole message in each round", case="seconds of an all-reduce")
def whole_message(reference):
    return built(reference, reduce=lambda nbytes, tp, link: 2 * (tp - 1) * (link.alpha + nbytes / link.bandwidth))


@wrong("both directions' bandwidth", case="seconds of an all-reduce")
def duplex(reference):
    def reduce(nbytes, tp, link):
        return reference.all_reduce_seconds(nbytes, tp, Link(link.alpha, 2 * link.bandwidth))

    return built(reference, reduce=reduce)


@wrong("the whole message's time against one round's latency", case="latency or bandwidth")
def undivided(reference):
    return built(
        reference, bound=lambda nbytes, tp, link: "bandwidth" if nbytes / link.bandwidth > link.alpha else "latency"
    )


@wrong("the wrong way round", case="latency or bandwidth")
def exchanged(reference):
    def bound(nbytes, tp, link):
        return "latency" if reference.bound_by(nbytes, tp, link) == "bandwidth" else "bandwidth"

    return built(reference, bound=bound)


@wrong("bandwidth where both are equal", case="latency or bandwidth")
def equal(reference):
    def bound(nbytes, tp, link):
        return "bandwidth" if nbytes / tp / link.bandwidth >= link.alpha else "latency"

    return built(reference, bound=bound)


@wrong("an all-reduce with one rank as well", case="one rank: the floor alone")
def alone_too(reference):
    def step(model, gpu, link, tp, batch, context, prompt_tokens=0):
        alone = link.alpha if tp == 1 else 0
        return reference.step_seconds(model, gpu, link, tp, batch, context, prompt_tokens) + alone

    return built(reference, step=step)


def step_with(reference, change):
    """A step out of (floor, layers, nbytes, tp, link), as ``change`` puts them together."""

    def step(model, gpu, link, tp, batch, context, prompt_tokens=0):
        floor = reference.memory.mixed_step_floor(model, gpu, batch, context, prompt_tokens, tp)
        nbytes = reference.boundary_bytes(model, batch + prompt_tokens)
        return change(floor, model.num_layers, nbytes, tp, link)

    return built(reference, step=step)


@wrong("one all-reduce a layer", case="a decode step")
def one_a_layer(reference):
    reduce = reference.all_reduce_seconds
    return step_with(reference, lambda floor, layers, n, tp, link: floor + layers * reduce(n, tp, link))


@wrong("communication hidden behind computation", case="a decode step")
def overlapped(reference):
    reduce = reference.all_reduce_seconds
    return step_with(reference, lambda floor, layers, n, tp, link: max(floor, 2 * layers * reduce(n, tp, link)))


@wrong("the floor of one rank", case="a decode step")
def not_split(reference):
    def step(model, gpu, link, tp, batch, context, prompt_tokens=0):
        mine, alone = (reference.memory.mixed_step_floor(model, gpu, batch, context, prompt_tokens, t) for t in (tp, 1))
        return reference.step_seconds(model, gpu, link, tp, batch, context, prompt_tokens) - mine + alone

    return built(reference, step=step)


@wrong("the context's tokens in the all-reduce", case="a decode step")
def context_sent(reference):
    def step(model, gpu, link, tp, batch, context, prompt_tokens=0):
        floor = reference.memory.mixed_step_floor(model, gpu, batch, context, prompt_tokens, tp)
        nbytes = reference.boundary_bytes(model, batch * max(1, context) + prompt_tokens)
        return floor + 2 * model.num_layers * reference.all_reduce_seconds(nbytes, tp, link)

    return built(reference, step=step)


@wrong("the prompt's tokens not sent", case="with a prompt's tokens")
def prompt_forgotten(reference):
    def step(model, gpu, link, tp, batch, context, prompt_tokens=0):
        floor = reference.memory.mixed_step_floor(model, gpu, batch, context, prompt_tokens, tp)
        nbytes = reference.boundary_bytes(model, batch)
        return floor + 2 * model.num_layers * reference.all_reduce_seconds(nbytes, tp, link)

    return built(reference, step=step)


@wrong("the prompt not computed", case="with a prompt's tokens")
def prompt_not_computed(reference):
    def step(model, gpu, link, tp, batch, context, prompt_tokens=0):
        floor = reference.memory.decode_step_floor(model, gpu, batch, context, tp)
        nbytes = reference.boundary_bytes(model, batch + prompt_tokens)
        return floor + 2 * model.num_layers * reference.all_reduce_seconds(nbytes, tp, link)

    return built(reference, step=step)


@wrong("always the largest", case="the fastest degree")
def largest(reference):
    return built(reference, fastest=lambda model, gpu, link, degrees, *step, **more: max(degrees))


@wrong("the slowest", case="the fastest degree")
def slowest(reference):
    def fastest(model, gpu, link, degrees, batch, context, prompt_tokens=0):
        step = reference.step_seconds
        return max(degrees, key=lambda tp: step(model, gpu, link, tp, batch, context, prompt_tokens))

    return built(reference, fastest=fastest)


@wrong("stops at the first that is slower", case="the fastest degree")
def first_that_loses(reference):
    def fastest(model, gpu, link, degrees, batch, context, prompt_tokens=0):
        best, *others = degrees
        for tp in others:
            times = [reference.step_seconds(model, gpu, link, t, batch, context, prompt_tokens) for t in (best, tp)]
            if times[1] > times[0]:
                break
            best = tp
        return best

    return built(reference, fastest=fastest)


@wrong("the prompt left out of the comparison", case="the fastest degree")
def without_prompt(reference):
    def fastest(model, gpu, link, degrees, batch, context, prompt_tokens=0):
        return min(degrees, key=lambda tp: reference.step_seconds(model, gpu, link, tp, batch, context))

    return built(reference, fastest=fastest)
