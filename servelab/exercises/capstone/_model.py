"""Small models of random weights, the same on every machine: what this unit's checks and tests run."""

from functools import cache
from random import Random

SMALL = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "max_model_len": 48,
}
SHARPNESS = 3.0  # of the weights: the larger, the more the next token depends on which tokens came where


def model(seed: int, **dims: int):
    """A model in float64, with weights of its own; ``dims`` replace dimensions of the small one."""
    from servelab.llm import LLM, LLMConfig

    config = LLMConfig(**(SMALL | dims))
    return LLM(config, {name: weight.clone() for name, weight in _weights(seed, config).items()})


@cache
def _weights(seed: int, config) -> dict:
    """Normal weights of variance SHARPNESS / inputs; embeddings are smaller, or a token would be its own successor."""
    import torch

    rng, weights = Random(seed), {}
    for name, shape in config.shapes().items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=torch.float64)
        else:
            scale = 0.2 if name == "embedding" else (SHARPNESS / shape[1]) ** 0.5
            rows = [[rng.gauss(0, scale) for _ in range(shape[1])] for _ in range(shape[0])]
            weights[name] = torch.tensor(rows, dtype=torch.float64)
    return weights
