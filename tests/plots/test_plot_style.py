"""The shared style: colours that stay apart, also for colour-blind readers."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from servelab.plots import style

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB
SIGHT = {
    "full": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
SIDE_BY_SIDE = {
    "steps": ["prefill", "decode", "idle", "preempted", "communication"],
    "ranks": ["compute", "communication", "idle"],
    "slots": ["used", "reserved", "internal", "external", "free"],
    "memory": ["weights", "used", "free"],
    "blocks": ["free", "cached", "used", "shared"],
    "cells": ["useful", "padding", "held", "empty"],
    "chunks": ["own share", "partial sum", "whole sum", "free"],
}


def lab(colour: str, sight: str) -> np.ndarray:
    """CIELAB coordinates of a colour as seen."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(np.array(SIGHT[sight]) @ linear, 0, 1) / np.array([0.95047, 1, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def nearest(colours: list[str], sight: str) -> float:
    return min(np.linalg.norm(lab(a, sight) - lab(b, sight)) for a, b in combinations(colours, 2))


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("group", SIDE_BY_SIDE)
def test_meanings_that_lie_side_by_side_are_told_apart(group, sight):
    assert nearest([style.colour(meaning) for meaning in SIDE_BY_SIDE[group]], sight) > 15


@pytest.mark.parametrize("sight", SIGHT)
def test_sequences_are_told_apart(sight):
    assert nearest(list(style.SEQUENCES), sight) > 12


def test_a_colour_has_one_meaning():
    assert len(set(style.COLOURS.values())) == len(style.COLOURS)


def test_text_is_legible_on_every_sequence_colour():
    def luminance(colour):
        rgb = np.array(to_rgb(colour))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    for colour in style.SEQUENCES:
        assert (luminance(colour) + 0.05) / (luminance(style.INK) + 0.05) > 4.5  # WCAG AA
