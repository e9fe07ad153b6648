"""Which model a notebook serves: the real one where it is and somebody watches, otherwise the tiny one."""

from dataclasses import dataclass

import torch

from servelab import fetch
from servelab.llm.model import LLM, load
from servelab.llm.tokenizer import ByteTokenizer, Tokenizer
from servelab.plots.explore import attended


@dataclass(frozen=True)
class Here:
    """A model with its tokenizer and its name."""

    name: str
    model: LLM
    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        """The token ids of one message of a chat, up to where the answer begins."""
        return self.tokenizer.apply_chat_template([{"role": "user", "content": text}])


def model_here(dtype: torch.dtype | None = None, real: bool = True) -> Here:
    """SmolLM2-135M-Instruct if it is wanted, was fetched and a person is there; otherwise the tiny model.

    On a GPU where there is one, in bfloat16; otherwise in float32; or in the type that is asked for.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    if real and attended() and not fetch.problem():
        from servelab.llm import smollm

        return Here("SmolLM2-135M-Instruct", LLM(*smollm.load(dtype, device)), smollm.tokenizer())
    return Here("the tiny model", LLM(*load(dtype=dtype, device=device)), ByteTokenizer())
