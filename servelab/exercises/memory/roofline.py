"""Check of `ridge_point`, `critical_batch` and `attention_intensity`: which side of the roofline a step is on."""

from random import Random

from servelab.cards import HardwareCard, hardware_card, hardware_names, model_card
from servelab.exercise import CaseSpec
from servelab.exercises.memory import _calls as calls

ANSWERS = ("ridge_point", "critical_batch", "attention_intensity")
CASES = (
    CaseSpec("the ridge point", hint=1, weight=2),
    CaseSpec("critical batch of a dense model", hint=1, weight=2),
    CaseSpec("critical batch with experts", hint=2, weight=2),
    CaseSpec("quantised weights, or everything", hint=2, weight=2),
    CaseSpec("intensity of attention", hint=3, weight=2),
)
judge, show = calls.judge, calls.show
GPU = HardwareCard(name="small", memory_gb=1.0, bandwidth_tb_s=0.5, dense_bf16_tflops=60.0)


def challenges(rng: Random) -> list[dict]:
    """One small GPU, then the course's cards."""
    other = HardwareCard(name="drawn", memory_gb=9.0, bandwidth_tb_s=rng.randint(3, 90) / 10, dense_bf16_tflops=777.0)
    gpus = [GPU, other, *(calls.replace(hardware_card(name), source="") for name in hardware_names())]
    dense, quantised = "critical batch of a dense model", "quantised weights, or everything"
    routed = calls.tiny(**calls.MOE)
    batches = [
        (dense, calls.tiny(), GPU, 2, 2),
        (dense, calls.tiny(), other, 2, 2),
        ("critical batch with experts", routed, GPU, 2, 2),
        *(
            ("critical batch with experts", model_card(name), hardware_card("h100-sxm"), 2, 2)
            for name in ("mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3")
        ),
        (quantised, calls.tiny(), GPU, 1, 2),
        (quantised, calls.tiny(), GPU, 1, 1),
        (quantised, routed, other, 0.5, 2),
        (quantised, routed, other, 0.5, 1),
    ]
    latent = calls.tiny(**calls.MLA)
    cards = [(calls.tiny(), 2), (calls.tiny(num_kv_heads=6), 2), (calls.tiny(), 1), (latent, 2), (latent, 1)]
    cards.append((calls.replace(latent, q_lora_rank=0), 2))
    cards += [(model_card(name), 2) for name in ("llama-2-7b", "llama-3.1-8b", "llama-3.1-405b", "deepseek-v3")]
    return [
        *(calls.call("the ridge point", "ridge_point", gpu=gpu) for gpu in gpus),
        *(
            calls.call(
                case, "critical_batch", model=m, gpu=gpu, weight_dtype_bytes=weights, compute_dtype_bytes=compute
            )
            for case, m, gpu, weights, compute in batches
        ),
        *(
            calls.call("intensity of attention", "attention_intensity", model=card, kv_dtype_bytes=size)
            for card, size in cards
        ),
    ]


def drive(challenge: dict, ridge_point, critical_batch, attention_intensity) -> dict:
    return calls.drive(
        challenge,
        ridge_point=ridge_point,
        critical_batch=critical_batch,
        attention_intensity=attention_intensity,
    )
