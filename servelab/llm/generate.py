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
    kv, fresh, start = ContiguousKV(), list(prompt), 0
    end_of_sequence = model.config.eos_token_id
    for _ in range(max_tokens):
        hidden = model.forward(torch.tensor(fresh), torch.arange(start, start + len(fresh)), kv)
        likeliest = int(model.logits(hidden[-1:]).argmax())
        yield likeliest
        if likeliest == end_of_sequence:
            return
        start, fresh = start + len(fresh), [likeliest]
