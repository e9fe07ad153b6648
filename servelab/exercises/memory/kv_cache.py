"""Check of `kv_bytes_per_token` and `kv_gib`: the KV cache of one copy, on the course's cards and on odd ones."""

from random import Random
from typing import Any

from servelab.exercise import CaseSpec
from servelab.exercises.memory import _calls as calls

ANSWERS = ("kv_bytes_per_token", "kv_gib")
CASES = (
    CaseSpec("keys and values of every layer", hint=1, weight=2),
    CaseSpec("KV heads, not query heads", hint=1, weight=2),
    CaseSpec("head_dim from the card", hint=1, weight=2),
    CaseSpec("latent attention", hint=2, weight=2),
    CaseSpec("other bytes per element", hint=1),
    CaseSpec("every card of the course", hint=2, weight=2),
    CaseSpec("GiB of a context", hint=3, weight=2),
    CaseSpec("a token before any window is full", hint=3),
    CaseSpec("sliding windows", hint=3, weight=3),
)
judge, show = calls.judge, calls.show
WINDOW: dict[str, Any] = {"sliding_window": 100, "sliding_layers": 2}


def challenges(rng: Random) -> list[dict]:
    """Tiny cards, the course's cards, then drawn ones; before a case all that comes earlier in the order is neutral."""
    square = calls.tiny(num_heads=4, num_kv_heads=4, head_dim=10)
    per_token = [
        ("keys and values of every layer", square, 2),
        ("KV heads, not query heads", calls.tiny(num_heads=4, num_kv_heads=2, head_dim=10), 2),
        ("KV heads, not query heads", calls.tiny(num_heads=4, num_kv_heads=1, head_dim=10), 2),
        ("head_dim from the card", calls.tiny(), 2),
        ("latent attention", calls.tiny(**calls.MLA), 2),
        ("latent attention", calls.tiny(**(calls.MLA | {"q_lora_rank": 0})), 2),
        ("other bytes per element", square, 1),
        ("other bytes per element", calls.tiny(**calls.MLA), 4),
        ("a token before any window is full", calls.tiny(**WINDOW), 2),
        ("a token before any window is full", calls.tiny(sliding_window=1, sliding_layers=3, **calls.MLA), 1),
        *(("every card of the course", card, 2) for card in calls.all_models()),
        *(("every card of the course", calls.drawn(rng), rng.choice((1, 2, 4))) for _ in range(3)),
    ]
    made = [calls.call(case, "kv_bytes_per_token", model=card, dtype_bytes=size) for case, card, size in per_token]
    return [*made, *_contexts(rng)]


def _contexts(rng: Random) -> list[dict]:
    contexts = [
        ("GiB of a context", calls.tiny(), 1, 2),
        ("GiB of a context", calls.tiny(**calls.MLA), 999, 1),
        ("GiB of a context", calls.drawn(rng), rng.randint(1, 100_000), 2),
        *(("sliding windows", calls.tiny(**WINDOW), tokens, 2) for tokens in (99, 101, 1_000)),
        ("sliding windows", calls.tiny(sliding_window=64, sliding_layers=3, **calls.MLA), 65, 1),
        ("sliding windows", calls.drawn(rng, num_layers=26, sliding_window=4096, sliding_layers=13), 50_000, 2),
        *(("GiB of a context", card, 8192, 2) for card in calls.all_models()),
    ]
    return [calls.call(case, "kv_gib", model=card, tokens=n, dtype_bytes=size) for case, card, n, size in contexts]


def drive(challenge: dict, kv_bytes_per_token, kv_gib) -> dict:
    return calls.drive(challenge, kv_bytes_per_token=kv_bytes_per_token, kv_gib=kv_gib)
