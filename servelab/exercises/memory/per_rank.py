"""Check of `kv_bytes_per_rank` and `weight_bytes_per_rank`: what one card of a layout holds."""

from random import Random
from typing import Any

from servelab.cards import SIX_LAYOUTS, Layout, model_card
from servelab.exercise import CaseSpec
from servelab.exercises.memory import _calls as calls

ANSWERS = ("kv_bytes_per_rank", "weight_bytes_per_rank")
CASES = (
    CaseSpec("KV of split heads and layers", hint=1, weight=3),
    CaseSpec("more cards than KV heads", hint=1, weight=3),
    CaseSpec("split tokens and windows", hint=2, weight=2),
    CaseSpec("the latent on every card", hint=1, weight=2),
    CaseSpec("experts and requests do not split KV", hint=2, weight=2),
    CaseSpec("weights of a dense model", hint=3, weight=3),
    CaseSpec("weights of experts", hint=3, weight=2),
    CaseSpec("the six layouts", hint=2, weight=3),
    CaseSpec("refuses what does not divide", hint=1, weight=2, alone=False),
)
judge, show = calls.judge, calls.show


def _split(**splits: int) -> Layout:
    return calls.layout(**splits)


def challenges(rng: Random) -> list[dict]:
    """Tiny cards first, then Qwen3-235B-A22B in the six layouts of the text, then drawn cards."""
    return [*_kv(rng), *_weights(), *_refused(), *_six(), *_drawn(rng)]


def _kv(rng: Random) -> list[dict]:
    wide = calls.tiny(num_heads=8, num_layers=4)
    latent = calls.tiny(num_heads=8, num_layers=4, **calls.MLA)
    windowed = calls.tiny(num_heads=8, num_layers=4, sliding_window=101, sliding_layers=2)
    asked = [
        ("KV of split heads and layers", wide, 1, _split(), 2),
        ("KV of split heads and layers", wide, 7, _split(heads=2), 2),
        ("KV of split heads and layers", wide, 7, _split(layers=2), 2),
        ("KV of split heads and layers", wide, 7, _split(heads=2, layers=4), 1),
        ("more cards than KV heads", wide, 7, _split(heads=4), 2),
        ("more cards than KV heads", wide, 7, _split(heads=8, layers=2), 2),
        ("split tokens and windows", wide, 8, _split(heads=4, tokens=2), 2),
        ("split tokens and windows", wide, 7, _split(heads=4, tokens=2), 2),
        ("split tokens and windows", windowed, 250, _split(heads=2), 2),
        ("split tokens and windows", windowed, 250, _split(heads=4, tokens=2, layers=2), 2),
        ("split tokens and windows", windowed, 99, _split(heads=4, tokens=2), 2),
        ("split tokens and windows", windowed, 102, _split(heads=4, tokens=2), 2),
        ("the latent on every card", latent, 7, _split(heads=4), 2),
        ("the latent on every card", latent, 8, _split(heads=8, layers=2, tokens=2), 1),
        ("the latent on every card", latent, 7, _split(heads=8, layers=2, tokens=2), 1),
        ("the latent on every card", latent, 7, _split(layers=2), 1),
        ("the latent on every card", calls.replace(latent, q_lora_rank=0), 7, _split(heads=4), 2),
        ("experts and requests do not split KV", wide, 7, _split(heads=2, experts=8), 2),
        ("experts and requests do not split KV", wide, 7, _split(heads=2, requests=4, experts=8), 2),
        ("experts and requests do not split KV", wide, rng.randint(9, 99), _split(requests=8), 2),
    ]
    return [
        calls.call(case, "kv_bytes_per_rank", model=card, tokens=n, layout=layout, dtype_bytes=size)
        for case, card, n, layout, size in asked
    ]


def _weights() -> list[dict]:
    wide = calls.tiny(num_heads=8, num_layers=4, hidden_size=64, vocab_size=208, intermediate_size=104)
    opt_like: dict[str, Any] = {"gated_mlp": False, "qkv_bias": True, "all_biases": True, "position_rows": 51}
    experts: dict[str, Any] = {
        "num_experts": 16,
        "experts_per_token": 2,
        "expert_size": 40,
        "dense_layers": 1,
        "shared_experts": 1,
    }
    dense, routed = "weights of a dense model", "weights of experts"
    asked = [
        (dense, wide, _split(), 2),
        (dense, wide, _split(heads=2), 2),
        (dense, wide, _split(heads=2, requests=2), 1),
        (dense, wide, _split(heads=4), 2),
        (dense, wide, _split(heads=4, tokens=2), 2),
        (dense, wide, _split(heads=8, layers=2), 2),
        (dense, calls.replace(wide, **opt_like), _split(heads=2), 2),
        (dense, calls.replace(wide, **calls.MLA), _split(heads=8), 2),
        (routed, calls.replace(wide, **experts), _split(experts=8), 2),
        (routed, calls.replace(wide, **experts), _split(heads=2, experts=8), 2),
        (routed, calls.replace(wide, **experts), _split(heads=8, layers=2, experts=4), 0.5),
    ]
    return [
        calls.call(case, "weight_bytes_per_rank", model=card, layout=layout, dtype_bytes=size)
        for case, card, layout, size in asked
    ]


def _refused() -> list[dict]:
    """Layouts that do not divide a card's heads or layers: both functions refuse."""
    six, ten = calls.tiny(), calls.tiny(num_heads=12, num_kv_heads=6, num_layers=4)
    latent = calls.tiny(**calls.MLA)
    made = []
    for card, layout in (
        (six, _split(heads=4)),
        (ten, _split(heads=4)),
        (six, _split(layers=2)),
        (ten, _split(heads=8)),
        (calls.replace(ten, num_kv_heads=4), _split(heads=6)),
        (latent, _split(heads=4)),
        (latent, _split(layers=2)),
    ):
        made.append(_refuse("kv_bytes_per_rank", model=card, tokens=5, layout=layout, dtype_bytes=2))
        made.append(_refuse("weight_bytes_per_rank", model=card, layout=layout, dtype_bytes=2))
    return made


def _refuse(function: str, **arguments) -> dict:
    return calls.call("refuses what does not divide", function, **arguments)


def _six() -> list[dict]:
    """Facts of the text: 8192 tokens, 5.875 GiB over all cards in A; 64,821,419,008 bytes of weights a card in A."""
    model, case, made = model_card("qwen3-235b-a22b"), "the six layouts", []
    for layout in SIX_LAYOUTS:
        arguments = {"model": model, "layout": layout, "dtype_bytes": 2}
        made.append(calls.call(case, "kv_bytes_per_rank", tokens=8192, **arguments))
        made.append(calls.call(case, "weight_bytes_per_rank", **arguments))
    return made


def _drawn(rng: Random) -> list[dict]:
    made = []
    for _ in range(3):
        card = calls.drawn(rng, num_heads=48, num_kv_heads=4, num_layers=12)
        layout = _split(heads=rng.choice((1, 2, 4, 8)), layers=rng.choice((1, 2, 3, 4)), tokens=1)
        case = "more cards than KV heads" if layout.split_heads == 8 else "KV of split heads and layers"
        tokens = rng.randint(1, 40_000)
        made.append(calls.call(case, "kv_bytes_per_rank", model=card, tokens=tokens, layout=layout, dtype_bytes=2))
        made.append(
            calls.call("weights of a dense model", "weight_bytes_per_rank", model=card, layout=layout, dtype_bytes=2)
        )
    return made


def drive(challenge: dict, kv_bytes_per_rank, weight_bytes_per_rank) -> dict:
    return calls.drive(challenge, kv_bytes_per_rank=kv_bytes_per_rank, weight_bytes_per_rank=weight_bytes_per_rank)
