"""Check of `kv_room`, `max_tokens` and `max_concurrent`: how much fits beside the weights."""

from random import Random
from typing import Any

from servelab.cards import SIX_LAYOUTS, HardwareCard, Layout, ModelCard, hardware_card, model_card
from servelab.exercise import CaseSpec
from servelab.exercises.memory import _calls as calls

ANSWERS = ("kv_room", "max_tokens", "max_concurrent")
CASES = (
    CaseSpec("room beside the weights", hint=1, weight=3),
    CaseSpec("no room at all", hint=1, weight=1, alone=False),
    CaseSpec("tokens in one group of cards", hint=2, weight=2),
    CaseSpec("copies take room", hint=2, weight=2),
    CaseSpec("groups add up", hint=2, weight=2),
    CaseSpec("whole requests in each group", hint=3, weight=3),
    CaseSpec("bytes of weights and of KV", hint=1, weight=1),
)
judge, show = calls.judge, calls.show
SMALL = HardwareCard(name="small", memory_gb=0.004, bandwidth_tb_s=1.0, dense_bf16_tflops=100.0)
MODEL = calls.tiny(num_heads=8, num_layers=4, hidden_size=64, vocab_size=208, intermediate_size=104)
LATENT = calls.replace(MODEL, **calls.MLA)
WHOLE: dict[str, Any] = {"utilisation": 1.0, "overhead_bytes": 0}
PLAIN = {"weight_dtype_bytes": 2, "kv_dtype_bytes": 2}


def _call(
    case: str, function: str, layout: Layout, gpu: HardwareCard = SMALL, model: ModelCard = MODEL, **more: Any
) -> dict:
    usual = {"utilisation": 0.9, "overhead_bytes": 100_000} | PLAIN
    return calls.call(case, function, gpu=gpu, model=model, layout=layout, **(usual | more))


def _split(cards: int, **splits: int) -> Layout:
    return calls.layout(cards, **splits)


def challenges(rng: Random) -> list[dict]:
    """A small GPU first; then 70B and 235B models on 80 GB cards."""
    return [*_room(), *_tokens(), *_requests(rng), *_large(rng)]


def _room() -> list[dict]:
    """The room of one card."""
    one, two = _split(1), _split(2, heads=2)
    beside, none, sizes = "room beside the weights", "no room at all", "bytes of weights and of KV"
    tight = calls.replace(SMALL, memory_gb=0.0003)
    return [
        _call(beside, "kv_room", one, **WHOLE),
        _call(beside, "kv_room", one, utilisation=0.9, overhead_bytes=0),
        _call(beside, "kv_room", one),
        _call(beside, "kv_room", two),
        _call(none, "kv_room", one, tight),
        _call(none, "max_tokens", one, tight),
        _call(none, "max_concurrent", one, tight, tokens=100),
        _call(none, "kv_room", one, overhead_bytes=4_000_000),  # the weights alone would fit
        _call(none, "max_tokens", one, overhead_bytes=4_000_000),
        _call(sizes, "kv_room", one, weight_dtype_bytes=1, kv_dtype_bytes=2),
        _call(sizes, "max_tokens", one, weight_dtype_bytes=2, kv_dtype_bytes=1),
        _call(sizes, "max_tokens", one, weight_dtype_bytes=1, kv_dtype_bytes=2),
        _call(sizes, "max_concurrent", two, weight_dtype_bytes=0.5, kv_dtype_bytes=1, tokens=321),
    ]


def _tokens() -> list[dict]:
    one, copies, groups = "tokens in one group of cards", "copies take room", "groups add up"
    asked = [
        (one, _split(1)),
        (one, _split(2, heads=2)),
        (one, _split(2, layers=2)),
        (copies, _split(4, heads=4)),
        (copies, _split(8, heads=8)),
        (copies, _split(8, heads=8, tokens=4)),
        (copies, _split(8, heads=2)),
        (groups, _split(3, requests=3)),
        (groups, _split(8, heads=2, requests=4)),
    ]
    windowed = calls.replace(MODEL, sliding_window=50, sliding_layers=2)
    return [
        *(_call(case, "max_tokens", layout) for case, layout in asked),
        _call(one, "max_tokens", _split(2, heads=2), model=windowed),
        _call(copies, "max_tokens", _split(2, heads=2), model=LATENT),
    ]


def _requests(rng: Random) -> list[dict]:
    """Requests of one length; a request lies in one group and never across two."""
    case = "whole requests in each group"
    windowed = calls.replace(MODEL, sliding_window=50, sliding_layers=2)
    return [
        _call(case, "max_concurrent", _split(1), tokens=100, **WHOLE),
        _call(case, "max_concurrent", _split(1), tokens=1_001),
        _call(case, "max_concurrent", _split(4, requests=4), tokens=3_100),
        _call(case, "max_concurrent", _split(8, heads=2, requests=4), tokens=5_003),
        _call(case, "max_concurrent", _split(8, heads=4, tokens=2), tokens=9, **WHOLE),
        _call(case, "max_concurrent", _split(1), model=windowed, tokens=900),
        _call(case, "max_concurrent", _split(2, heads=2), model=LATENT, tokens=300, **WHOLE),
        _call(case, "max_concurrent", _split(4, heads=2, requests=2), tokens=rng.randint(500, 4_000)),
    ]


def _large(rng: Random) -> list[dict]:
    """The figures of the text, and drawn ones."""
    h100, large, moe = hardware_card("h100-sxm"), model_card("llama-3.1-70b"), model_card("qwen3-235b-a22b")
    layouts = [_split(2, heads=2), _split(4, heads=4), _split(8, heads=4, requests=2), _split(8, heads=8)]
    made = []
    for layout in layouts:
        case = "groups add up" if layout.split_requests > 1 else "tokens in one group of cards"
        made.append(_call(case, "max_tokens", layout, h100, large, utilisation=0.92, overhead_bytes=2e9))
    for layout in SIX_LAYOUTS[:4]:
        made.append(_call("whole requests in each group", "max_concurrent", layout, h100, moe, tokens=8192, **WHOLE))
    share = rng.choice((0.85, 0.88, 0.95))
    made.append(_call("copies take room", "max_tokens", _split(16, heads=16), h100, large, utilisation=share))
    return made


def drive(challenge: dict, kv_room, max_tokens, max_concurrent) -> dict:
    return calls.drive(challenge, kv_room=kv_room, max_tokens=max_tokens, max_concurrent=max_concurrent)
