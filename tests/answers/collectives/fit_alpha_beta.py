"""Answers to the fit."""

import numpy as np

from servelab.answers import right, wrong


@right("the normal equations by hand")
def by_hand(reference):
    def fit_alpha_beta(sizes, seconds):
        weights = [1 / t**2 for t in seconds]
        total = sum(weights)
        n = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
        t = sum(w * second for w, second in zip(weights, seconds, strict=True)) / total
        rows = list(zip(weights, sizes, seconds, strict=True))
        beta = sum(w * (x - n) * (y - t) for w, x, y in rows) / sum(w * (x - n) ** 2 for w, x, _ in rows)
        return t - beta * n, beta

    return fit_alpha_beta


@right("lstsq, a list of numpy floats")
def lstsq(reference):
    def fit_alpha_beta(sizes, seconds):
        t, n = np.array(seconds), np.array(sizes, dtype=float)
        scale = n.max() or 1.0
        left = np.stack([1 / t, n / scale / t], axis=1)
        alpha, beta = np.linalg.lstsq(left, np.ones_like(t), rcond=None)[0]
        return [alpha, beta / scale]

    return fit_alpha_beta


@right("the array that polyfit returns, turned round")
def turned_round(reference):
    return lambda sizes, seconds: np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))[::-1]


@right("a pair of tensors without dimensions")
def scalars(reference):
    import torch

    return lambda sizes, seconds: tuple(map(torch.tensor, reference.fit_alpha_beta(sizes, seconds)))


@wrong("ordinary least squares", case="relative errors are squared")
def ordinary(reference):
    return lambda sizes, seconds: tuple(np.polyfit(sizes, seconds, 1)[::-1])


@wrong("weights squared once too often", case="relative errors are squared")
def squared_twice(reference):
    return lambda sizes, seconds: tuple(np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds) ** 2)[::-1])


@wrong("weighted by size", case="relative errors are squared")
def by_size(reference):
    return lambda sizes, seconds: tuple(np.polyfit(sizes, seconds, 1, w=1 / (1.0 + np.array(sizes)))[::-1])


@wrong("errors relative to the model, by the first and the last point", case="relative errors are squared")
def two_points(reference):
    def fit_alpha_beta(sizes, seconds):
        order = np.argsort(sizes)
        (n, m), (s, t) = np.array(sizes)[order[[0, -1]]], np.array(seconds)[order[[0, -1]]]
        beta = (t - s) / (m - n)
        return s - beta * n, beta

    return fit_alpha_beta


@wrong("alpha and beta swapped", case="points on a line")
def swapped(reference):
    return lambda sizes, seconds: reference.fit_alpha_beta(sizes, seconds)[::-1]


@wrong("the bandwidth instead of beta", case="points on a line")
def bandwidth(reference):
    def fit_alpha_beta(sizes, seconds):
        alpha, beta = reference.fit_alpha_beta(sizes, seconds)
        return alpha, 1 / beta

    return fit_alpha_beta


@wrong("a line through the origin", case="points on a line")
def through_origin(reference):
    def fit_alpha_beta(sizes, seconds):
        return 0.0, float(np.dot(sizes, seconds) / np.dot(sizes, sizes))

    return fit_alpha_beta


@wrong("sorts the caller's lists", case="leaves its input alone")
def sorts(reference):
    def fit_alpha_beta(sizes, seconds):
        pairs = sorted(zip(sizes, seconds, strict=True))
        sizes[:], seconds[:] = map(list, zip(*pairs, strict=True))
        return reference.fit_alpha_beta(sizes, seconds)

    return fit_alpha_beta
