"""Answers to the cost models."""

import math
from fractions import Fraction

from servelab.answers import right, wrong


def models(reference, **other):
    """The reference's functions, some of them replaced."""
    names = ("naive_cost", "ring_cost", "tree_cost", "ring_pass_cost", "all_to_all_cost", "crossover")
    return tuple(other.get(name, getattr(reference, name)) for name in names)


@right("message by message")
def message_by_message(reference):
    def naive_cost(alpha, beta, n, p):
        return sum(2 * (alpha + n * beta) for _ in range(1, p))

    def ring_cost(alpha, beta, n, p):
        return sum(alpha + beta * (n / p) for _ in range(2) for _ in range(p - 1))

    def tree_cost(alpha, beta, n, p):
        seconds, reached = 0.0, 1
        while reached < p:
            seconds, reached = seconds + 2 * (alpha + n * beta), 2 * reached
        return seconds

    def ring_pass_cost(alpha, beta, n, p):
        return ring_cost(alpha, beta, n, p) / 2

    def all_to_all_cost(alpha, beta, n, p):
        return sum(alpha + beta * part for part in [n / p] * p) - alpha - beta * n / p

    def crossover(alpha, beta, p):
        """By bisection on the difference, which is a straight line."""
        at = [ring_cost(alpha, beta, n, p) - tree_cost(alpha, beta, n, p) for n in (0.0, alpha / beta)]
        return alpha / beta * at[0] / (at[0] - at[1])

    return naive_cost, ring_cost, tree_cost, ring_pass_cost, all_to_all_cost, crossover


@right("numpy floats and fractions")
def with_numpy(reference):
    import numpy as np

    def tree_cost(alpha, beta, n, p):
        return np.float64(2 * math.ceil(np.log2(p)) * (alpha + beta * n))

    def ring_cost(alpha, beta, n, p):
        return float(2 * (p - 1) * alpha + Fraction(2 * (p - 1), p) * Fraction(n) * Fraction(beta))

    def ring_pass_cost(alpha, beta, n, p):
        return np.arange(1, p).size * np.float64(alpha) + (1 - 1 / p) * n * beta

    made = {"tree_cost": tree_cost, "ring_cost": ring_cost, "ring_pass_cost": ring_pass_cost}
    return models(reference, **made, all_to_all_cost=ring_pass_cost)


@wrong("the way back of the naive one forgotten", case="naive")
def one_way(reference):
    return models(reference, naive_cost=lambda alpha, beta, n, p: (p - 1) * (alpha + n * beta))


@wrong("naive with p messages", case="naive")
def p_messages(reference):
    return models(reference, naive_cost=lambda alpha, beta, n, p: 2 * p * (alpha + n * beta))


@wrong("the ring sends the whole tensor at each hop", case="ring")
def whole(reference):
    return models(reference, ring_cost=reference.naive_cost)


@wrong("the ring goes round once", case="ring")
def once(reference):
    return models(reference, ring_cost=lambda alpha, beta, n, p: (p - 1) * (alpha + n / p * beta))


@wrong("the ring pays alpha once", case="ring")
def alpha_once(reference):
    return models(reference, ring_cost=lambda alpha, beta, n, p: alpha + 2 * (p - 1) / p * n * beta)


@wrong("bytes in whole numbers", case="ring")
def whole_bytes(reference):
    return models(reference, ring_cost=lambda alpha, beta, n, p: 2 * (p - 1) * (alpha + n // p * beta))


@wrong("a pass as long as the whole all-reduce", case="one pass of the ring")
def two_passes(reference):
    return models(reference, ring_pass_cost=reference.ring_cost)


@wrong("a pass with p hops", case="one pass of the ring")
def p_hops(reference):
    return models(reference, ring_pass_cost=lambda alpha, beta, n, p: p * (alpha + n / p * beta))


@wrong("a pass with the whole tensor at each hop", case="one pass of the ring")
def whole_pass(reference):
    return models(reference, ring_pass_cost=lambda alpha, beta, n, p: (p - 1) * (alpha + n * beta))


@wrong("a pass in chunks of whole bytes", case="one pass of the ring")
def whole_bytes_passed(reference):
    return models(reference, ring_pass_cost=lambda alpha, beta, n, p: (p - 1) * (alpha + n // p * beta))


@wrong("all parts under way at once", case="all-to-all")
def at_once(reference):
    return models(reference, all_to_all_cost=lambda alpha, beta, n, p: alpha + n / p * beta if p > 1 else 0.0)


@wrong("all parts at one latency", case="all-to-all")
def one_latency(reference):
    return models(reference, all_to_all_cost=lambda alpha, beta, n, p: (alpha if p > 1 else 0) + (p - 1) / p * n * beta)


@wrong("n bytes for each rank", case="all-to-all")
def n_for_each(reference):
    return models(reference, all_to_all_cost=lambda alpha, beta, n, p: (p - 1) * (alpha + n * beta))


@wrong("n bytes shared out among the others", case="all-to-all")
def among_the_others(reference):
    return models(reference, all_to_all_cost=lambda alpha, beta, n, p: (p - 1) * alpha + n * beta if p > 1 else 0.0)


@wrong("a message to itself", case="all-to-all")
def to_itself(reference):
    return models(reference, all_to_all_cost=lambda alpha, beta, n, p: p * (alpha + n / p * beta))


@wrong("send and receive one after the other", case="all-to-all")
def there_and_back(reference):
    return models(reference, all_to_all_cost=reference.ring_cost)


@wrong("one rank sends to itself", case="one rank")
def alone_to_itself(reference):
    return models(reference, all_to_all_cost=lambda alpha, beta, n, p: max(1, p - 1) * (alpha + n / p * beta))


@wrong("the tree goes up only", case="tree")
def up_only(reference):
    return models(reference, tree_cost=lambda alpha, beta, n, p: (p - 1).bit_length() * (alpha + n * beta))


@wrong("the tree halves what it sends", case="tree")
def halves(reference):
    return models(reference, tree_cost=lambda alpha, beta, n, p: 2 * (p - 1).bit_length() * (alpha + n / p * beta))


@wrong("the logarithm rounded down", case="p that is no power of two")
def rounded_down(reference):
    return models(reference, tree_cost=lambda alpha, beta, n, p: 2 * int(math.log2(p)) * (alpha + n * beta))


@wrong("the logarithm not rounded", case="p that is no power of two")
def not_rounded(reference):
    return models(reference, tree_cost=lambda alpha, beta, n, p: 2 * math.log2(p) * (alpha + n * beta))


@wrong("binary digits of p", case="tree")
def digits_of_p(reference):
    return models(reference, tree_cost=lambda alpha, beta, n, p: 2 * p.bit_length() * (alpha + n * beta))


@wrong("one rank pays a latency", case="one rank")
def one_pays(reference):
    def tree_cost(alpha, beta, n, p):
        return 2 * max(1, (p - 1).bit_length()) * (alpha + n * beta)

    return models(reference, tree_cost=tree_cost)


@wrong("p alpha B, where the ring's two terms are equal", case="crossover")
def terms_equal(reference):
    return models(reference, crossover=lambda alpha, beta, p: p * alpha / beta)


@wrong("the factor of the ring forgotten", case="crossover")
def factor_forgotten(reference):
    def crossover(alpha, beta, p):
        levels = (p - 1).bit_length()
        return alpha / beta * (p - 1 - levels) / levels

    return models(reference, crossover=crossover)


@wrong("at least one alpha B", case="where the ring is never slower")
def at_least(reference):
    return models(reference, crossover=lambda alpha, beta, p: reference.crossover(alpha, beta, max(p, 4)))


@wrong("nothing returned", case="naive")
def nothing(reference):
    return models(reference, naive_cost=lambda alpha, beta, n, p: None)


@wrong("a tree with as many rounds as the naive algorithm", case="tree")
def naive_rounds(reference):
    return models(reference, tree_cost=reference.naive_cost)
