"""The plain loop over one request: what every way of serving must give the same tokens as."""

from collections.abc import Iterator, Sequence

import torch

from servelab.llm.kv import ContiguousKV
from servelab.llm.model import LLM


@torch.no_grad()
def greedy(model: LLM, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
    """The likeliest next token, again and again, up to the end-of-sequence token or ``max_tokens``.

    Parameters
    ----------
    prompt : sequence of int
        Token ids, at least one.
    max_tokens : int
        The most tokens to generate.

    Yields
    ------
    int
        Token ids; the end-of-sequence token is the last one if it comes.
    """
    kv, new, position = ContiguousKV(), list(prompt), 0
    for _ in range(max_tokens):
        hidden = model.forward(torch.tensor(new), torch.arange(position, position + len(new)), kv)
        token = int(model.logits(hidden[-1]).argmax())
        yield token
        if token == model.config.eos_token_id:
            return
        position, new = position + len(new), [token]
