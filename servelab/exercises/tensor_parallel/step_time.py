"""Check of the step's time against the degree: one all-reduce, what bounds it, a step, and the fastest degree."""

from random import Random
from typing import Any

from servelab.cards import HardwareCard, hardware_card, model_card
from servelab.exercise import CaseSpec
from servelab.exercises.memory._calls import drawn, tiny
from servelab.exercises.tensor_parallel import _calls as calls
from servelab.ranks import Link

ANSWERS = ("all_reduce_seconds", "bound_by", "step_seconds", "fastest_degree")
REDUCE, BOUND = "seconds of an all-reduce", "latency or bandwidth"
ALONE, DECODE, PREFILL = "one rank: the floor alone", "a decode step", "with a prompt's tokens"
FASTEST = "the fastest degree"
CASES = (
    CaseSpec(REDUCE, hint=1, weight=3),
    CaseSpec(BOUND, hint=1, weight=2),
    CaseSpec(ALONE, hint=2, weight=2),
    CaseSpec(DECODE, hint=2, weight=3),
    CaseSpec(PREFILL, hint=2, weight=2),
    CaseSpec(FASTEST, hint=3, weight=3),
)
judge, show = calls.judge, calls.show
GPU = HardwareCard(name="small", memory_gb=1.0, bandwidth_tb_s=0.5, dense_bf16_tflops=50.0)
TWO_TB = HardwareCard(name="2 TB/s", memory_gb=80.0, bandwidth_tb_s=2.0, dense_bf16_tflops=312.0)
FAST, SLOW = Link(1e-6, 200e9), Link(5e-6, 25e9)
DEGREES = [1, 2, 4, 8, 16]


def challenges(rng: Random) -> list[dict]:
    """One all-reduce; then steps of a small model; then Qwen3-8B and Llama-3.1-70B on a fast and on a slow link."""
    link = Link(rng.randint(1, 90) / 1e6, rng.randint(1, 900) * 1e9)
    nbytes = rng.randint(1_000, 10**8)
    made = [
        calls.call(REDUCE, "all_reduce_seconds", nbytes=n, tp=t, link=via)
        for n, t, via in (
            (8, 1, Link(1.0, 1.0)),
            (8, 2, Link(1.0, 1.0)),
            (12, 4, Link(0.5, 2.0)),
            (2**27, 8, Link(0.0, 450e9)),
            (16384, 8, Link(1e-6, 450e9)),
            (nbytes, 5, link),
        )
    ]
    made += [
        calls.call(BOUND, "bound_by", nbytes=n, tp=t, link=via)
        for n, t, via in (
            (2, 2, Link(1.0, 1.0)),  # equal
            (3, 2, Link(1.0, 1.0)),
            (7, 8, Link(1.0, 1.0)),
            (3_500_000, 8, Link(1e-6, 450e9)),
            (3_700_000, 8, Link(1e-6, 450e9)),
        )
    ]
    return [*made, *_steps(rng, link), *_fastest()]


def _step(case: str, function: str, model: Any, gpu: HardwareCard, link: Link, *step: int, **more: Any) -> dict:
    """A call with (batch, context) or (batch, context, prompt_tokens)."""
    named = dict(zip(("batch", "context", "prompt_tokens"), step, strict=False))
    return calls.call(case, function, model=model, gpu=gpu, link=link, **named, **more)


def _steps(rng: Random, link: Link) -> list[dict]:
    small, qwen, h100 = tiny(num_heads=8, num_kv_heads=4), model_card("qwen3-8b"), hardware_card("h100-sxm")
    large, card = model_card("llama-3.1-70b"), drawn(rng)
    name = "step_seconds"
    return [
        _step(ALONE, name, small, GPU, Link(1.0, 1.0), 3, 500, tp=1),
        _step(ALONE, name, qwen, TWO_TB, SLOW, 1, 8192, tp=1),
        _step(DECODE, name, small, GPU, Link(1e-6, 1e9), 3, 500, tp=2),
        *(_step(DECODE, name, qwen, TWO_TB, via, 1, 8192, tp=t) for via in (FAST, SLOW) for t in DEGREES[1:]),
        _step(DECODE, name, large, h100, link, 32, 2048, tp=4),
        _step(DECODE, name, card, h100, link, rng.randint(2, 90), 777, tp=2),
        _step(PREFILL, name, small, GPU, Link(1e-6, 1e9), 0, 0, 300, tp=2),
        _step(PREFILL, name, small, GPU, Link(1e-6, 1e9), 3, 500, 42, tp=4),
        _step(PREFILL, name, large, h100, Link(1e-6, 450e9), 0, 0, 8192, tp=8),
    ]


def _fastest() -> list[dict]:
    qwen, large, h100 = model_card("qwen3-8b"), model_card("llama-3.1-70b"), hardware_card("h100-sxm")
    name = "fastest_degree"
    return [
        *(_step(FASTEST, name, qwen, TWO_TB, via, 1, 8192, degrees=DEGREES) for via in (FAST, SLOW)),
        _step(FASTEST, name, large, h100, Link(5e-6, 450e9), 32, 2048, degrees=[8, 2, 4]),
        _step(FASTEST, name, large, h100, Link(5e-6, 12.5e9), 0, 0, 8192, degrees=[16, 8, 4, 2, 1]),
        _step(FASTEST, name, qwen, TWO_TB, Link(5e-6, 25e9), 64, 2048, 2048, degrees=DEGREES),
        _step(FASTEST, name, qwen, TWO_TB, Link(1e-3, 25e9), 1, 8192, degrees=DEGREES),
    ]


def drive(challenge: dict, all_reduce_seconds, bound_by, step_seconds, fastest_degree) -> dict:
    return calls.drive(
        challenge,
        all_reduce_seconds=all_reduce_seconds,
        bound_by=bound_by,
        step_seconds=step_seconds,
        fastest_degree=fastest_degree,
    )
