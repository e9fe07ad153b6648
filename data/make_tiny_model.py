"""Train the tiny model on the course's own text: ``python data/make_tiny_model.py``.

A byte is a token, and the byte 0, which the text does not contain, ends an answer. The loss on the last twentieth of
the text, which is kept out of training, is printed as it goes.
"""

import argparse
import math
import re
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from servelab.llm.kv import Windows
from servelab.llm.model import LLM, TINY, LLMConfig, Weights, save
from servelab.paths import SOLUTIONS

CONFIG = LLMConfig(
    vocab_size=256,
    hidden_size=128,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=352,
    max_model_len=1024,
)
HELD_OUT = 0.05


def course_text() -> bytes:
    """The Markdown of all units, one cell behind another, in paragraphs instead of lines."""
    cells = []
    for path in sorted(SOLUTIONS.glob("[0-9][0-9]_*.py")):
        for cell in re.split(r"^# %%", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            head, _, body = cell.partition("\n")
            if "[markdown]" in head:
                text = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
                cells.append(re.sub(r"(?<=[a-z,;]) *\n(?=[a-zA-Z`])", " ", text).strip())
    return "\n\n".join(cells).encode()


def initial(config: LLMConfig) -> Weights:
    """Normal weights of variance 1 / inputs, norms of 1."""
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[-1] ** -0.5
        for name, shape in config.shapes().items()
    }


def window_loss(model: LLM, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats of the next byte, over windows [B, T + 1]."""
    tokens, targets = windows[:, :-1], windows[:, 1:]
    positions = torch.arange(tokens.shape[1]).repeat(len(tokens))
    hidden = model.forward(tokens.flatten(), positions, Windows(tokens.shape[1]))
    return cross_entropy(model.logits(hidden), targets.flatten())


def draw_windows(text: Tensor, batch: int, length: int) -> Tensor:
    starts = torch.randint(len(text) - length, (batch,))
    return torch.stack([text[start : start + length + 1] for start in starts])


def train(steps: int, batch: int = 16, length: int = 256, peak: float = 4e-3, seed: int = 0) -> Weights:
    """Adam with a warm-up and a cosine decay; deterministic for a seed, a text and a machine."""
    torch.manual_seed(seed)
    text = torch.tensor(list(course_text()))
    cut = int(len(text) * (1 - HELD_OUT))
    weights = initial(CONFIG)
    for weight in weights.values():
        weight.requires_grad_()
    weights["embedding"].data *= 0.1
    model, optimiser = LLM(CONFIG, weights), torch.optim.AdamW(weights.values(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        rate = peak * min(1, (step + 1) / 100) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        optimiser.param_groups[0]["lr"] = rate
        loss = window_loss(model, draw_windows(text[:cut], batch, length))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimiser.step()
        if step % 100 == 0 or step == steps - 1:
            with torch.no_grad():
                held = window_loss(model, draw_windows(text[cut:], 8, length))
            print(f"step {step:5}: training {loss.item():.3f}, held out {held.item():.3f} nats a byte", flush=True)
    return {name: weight.detach() for name, weight in weights.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=TINY)
    given = parser.parse_args()
    weights = train(given.steps)
    save(given.out, CONFIG, {name: weight.half() for name, weight in weights.items()})
    print(f"{given.out}: {sum(w.numel() for w in weights.values()):,} parameters, {given.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
