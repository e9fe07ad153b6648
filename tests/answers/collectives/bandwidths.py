"""Answers to the bandwidths."""

import numpy as np

from servelab.answers import right, wrong


def measured(factor):
    def bandwidths(collective, nbytes, seconds, p):
        return nbytes / seconds, nbytes / seconds * factor(collective, p)

    return bandwidths


ONE_PASS = ("reduce_scatter", "all_gather", "all_to_all")


@right("case by case")
def by_case(reference):
    def bandwidths(collective, nbytes, seconds, p):
        algbw = nbytes / seconds
        if collective == "all_reduce":
            return algbw, algbw * 2 * (p - 1) / p
        if collective in ("broadcast", "reduce"):
            return algbw, algbw
        return algbw, algbw * (p - 1) / p

    return bandwidths


@right("a list of numpy floats")
def with_numpy(reference):
    def bandwidths(collective, nbytes, seconds, p):
        share = 1 - 1 / p
        factors = dict.fromkeys(ONE_PASS, share) | {"all_reduce": share + share, "broadcast": 1, "reduce": 1}
        return list(np.float64(nbytes) / seconds * np.array([1.0, factors[collective]]))

    return bandwidths


@right("an array")
def array(reference):
    return lambda *arguments: np.array(reference.bandwidths(*arguments))


@wrong("time over size", case="algorithm bandwidth")
def inverse(reference):
    return lambda collective, nbytes, seconds, p: (
        seconds / nbytes,
        reference.bandwidths(collective, nbytes, seconds, p)[1],
    )


@wrong("in gigabytes", case="algorithm bandwidth")
def gigabytes(reference):
    def bandwidths(*given):
        return tuple(value / 1e9 for value in reference.bandwidths(*given))

    return bandwidths


@wrong("busbw alone", case="algorithm bandwidth")
def alone(reference):
    return lambda *given: reference.bandwidths(*given)[1]


@wrong("one pass for an all-reduce", case="all-reduce")
def one_pass(reference):
    return measured(lambda collective, p: (p - 1) / p if collective in (*ONE_PASS, "all_reduce") else 1)


@wrong("bytes over all links", case="all-reduce")
def all_links(reference):
    return measured(lambda collective, p: 2 * (p - 1) if collective == "all_reduce" else 1)


@wrong("two passes for all", case="one pass round the ring")
def two_passes(reference):
    return measured(lambda collective, p: 1 if collective in ("broadcast", "reduce") else 2 * (p - 1) / p)


@wrong("the all-to-all without a factor", case="one pass round the ring")
def no_factor(reference):
    def bandwidths(collective, *rest):
        return reference.bandwidths("broadcast" if collective == "all_to_all" else collective, *rest)

    return bandwidths


@wrong("the ring's factor for broadcast", case="broadcast and reduce")
def ring_broadcast(reference):
    return measured(lambda collective, p: (2 if collective == "all_reduce" else 1) * (p - 1) / p)


@wrong("half for reduce", case="broadcast and reduce")
def half_reduce(reference):
    def bandwidths(collective, *rest):
        return reference.bandwidths("reduce_scatter" if collective == "reduce" else collective, *rest)

    return bandwidths
