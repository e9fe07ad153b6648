"""Check of the step floors: how long a step takes at least, by its bytes and by its operations."""

from random import Random
from typing import Any

from servelab.cards import HardwareCard, ModelCard, hardware_card, model_card
from servelab.exercise import CaseSpec
from servelab.exercises.memory import _calls as calls

ANSWERS = ("experts_read", "decode_step_floor", "prefill_floor", "mixed_step_floor")
CASES = (
    CaseSpec("decode reads weights and KV", hint=2, weight=3),
    CaseSpec("several cards", hint=2, weight=2),
    CaseSpec("experts that a step reads", hint=3, weight=3),
    CaseSpec("prefill: bytes or operations", hint=2, weight=3),
    CaseSpec("a mixed step", hint=1, weight=2),
    CaseSpec("bytes of weights and of KV", hint=2, weight=1),
)
judge, show = calls.judge, calls.show
GPU = HardwareCard(name="small", memory_gb=1.0, bandwidth_tb_s=0.5, dense_bf16_tflops=50.0)  # ridge point 100
MODEL = calls.tiny(num_heads=8)
EXPERTS = calls.tiny(num_heads=8, **calls.MOE, dense_layers=1, shared_experts=1)
PLAIN = {"weight_dtype_bytes": 2, "kv_dtype_bytes": 2}


def challenges(rng: Random) -> list[dict]:
    """Small cards first; then 8B and 70B on an H100, and mixtures of experts."""
    return [*_decode(), *_experts(), *_prefill(), *_mixed(), *_large(rng)]


def _call(case: str, function: str, model: ModelCard = MODEL, gpu: HardwareCard = GPU, **more: Any) -> dict:
    usual = {"tp": 1} | PLAIN
    if function == "prefill_floor":
        usual.pop("kv_dtype_bytes")
    return calls.call(case, function, model=model, gpu=gpu, **(usual | more))


def _decode() -> list[dict]:
    name, cards, sizes = "decode reads weights and KV", "several cards", "bytes of weights and of KV"
    windowed = calls.replace(MODEL, sliding_window=64, sliding_layers=2)
    tied = calls.replace(MODEL, tied_embeddings=True)
    step = "decode_step_floor"
    return [
        _call(name, step, batch=1, context=1),
        _call(name, step, batch=3, context=500),
        _call(name, step, tied, batch=3, context=500),
        _call(name, step, windowed, batch=3, context=500),
        _call(name, step, calls.replace(MODEL, **calls.MLA), batch=9, context=77),
        _call(name, step, batch=1000, context=1),
        _call(cards, step, batch=3, context=500, tp=2),
        _call(cards, step, batch=3, context=500, tp=8),
        _call(cards, step, batch=1000, context=1, tp=2),
        _call(cards, "prefill_floor", tokens=700, tp=4),
        _call(cards, "prefill_floor", tokens=7, tp=4),
        _call(cards, "prefill_floor", calls.replace(MODEL, hidden_size=41), tokens=701, tp=4),
        _call(sizes, step, batch=3, context=500, weight_dtype_bytes=1),
        _call(sizes, step, batch=3, context=500, kv_dtype_bytes=1),
        _call(sizes, "prefill_floor", tokens=7, weight_dtype_bytes=0.5),
        _call(sizes, "prefill_floor", tokens=700, weight_dtype_bytes=1),  # by operations, at the bf16 peak
        _call(sizes, step, batch=1000, context=1, weight_dtype_bytes=1),
    ]


def _experts() -> list[dict]:
    name, mixtral = "experts that a step reads", model_card("mixtral-8x7b")
    counts = [(EXPERTS, 1), (EXPERTS, 2), (EXPERTS, 33), (mixtral, 1), (mixtral, 4)]
    steps = [_call(name, "decode_step_floor", EXPERTS, batch=n, context=9) for n in (1, 2, 5)]
    return [
        *(calls.call(name, "experts_read", model=card, tokens=n) for card, n in counts),
        calls.call(name, "experts_read", model=MODEL, tokens=4),
        *steps,
        _call(name, "prefill_floor", EXPERTS, tokens=3),
        _call(name, "prefill_floor", EXPERTS, tokens=5_000),
    ]


def _prefill() -> list[dict]:
    name = "prefill: bytes or operations"
    biased = calls.replace(MODEL, qkv_bias=True, qk_norm=True)
    sizes = [(MODEL, 1), (MODEL, 90), (MODEL, 400), (MODEL, 8_192), (biased, 999)]
    return [_call(name, "prefill_floor", card, tokens=n) for card, n in sizes]


def _mixed() -> list[dict]:
    """Decodes beside a chunk of a prompt: by bytes, by operations, and with nothing of one of the two."""
    name, sizes = "a mixed step", "bytes of weights and of KV"
    steps = [(MODEL, 3, 4_000, 2), (MODEL, 3, 4_000, 90), (MODEL, 40, 5, 600), (MODEL, 0, 0, 300), (MODEL, 5, 9, 0)]
    steps += [(EXPERTS, 2, 6, 1), (EXPERTS, 7, 100, 900)]
    by_bytes, by_operations = steps[0], steps[2]
    return [
        *(_mixed_step(name, *step) for step in steps),
        _mixed_step(name, *by_bytes, tp=2),
        _mixed_step(name, *by_bytes, tp=8),
        _mixed_step(name, *by_operations, tp=2),
        _mixed_step(sizes, *by_bytes, weight_dtype_bytes=1),
        _mixed_step(sizes, *by_bytes, kv_dtype_bytes=1),
        _mixed_step(sizes, *by_operations, weight_dtype_bytes=1),
    ]


def _mixed_step(case: str, card: ModelCard, batch: int, context: int, prompt: int, **more: Any) -> dict:
    return _call(case, "mixed_step_floor", card, batch=batch, context=context, prompt_tokens=prompt, **more)


def _large(rng: Random) -> list[dict]:
    h100, small, large = hardware_card("h100-sxm"), model_card("llama-3.1-8b"), model_card("llama-3.1-70b")
    made = []
    for batch in (1, 32, 128, 256):
        made.append(_call("decode reads weights and KV", "decode_step_floor", small, h100, batch=batch, context=2048))
        made.append(_call("several cards", "decode_step_floor", large, h100, batch=batch, context=2048, tp=4))
    card, batch = calls.drawn(rng), rng.randint(2, 90)
    tokens = rng.randint(20, 4_000)
    made.append(_call("decode reads weights and KV", "decode_step_floor", card, h100, batch=batch, context=tokens))
    made.append(_call("prefill: bytes or operations", "prefill_floor", card, h100, tokens=tokens))
    deep, count = model_card("deepseek-v3"), rng.randint(2, 64)
    made.append(_call("experts that a step reads", "decode_step_floor", deep, h100, batch=count, context=4096, tp=8))
    return made


def drive(challenge: dict, experts_read, decode_step_floor, prefill_floor, mixed_step_floor) -> dict:
    return calls.drive(
        challenge,
        experts_read=experts_read,
        decode_step_floor=decode_step_floor,
        prefill_floor=prefill_floor,
        mixed_step_floor=mixed_step_floor,
    )
