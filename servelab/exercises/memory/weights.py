"""Check of `parameters` and `weight_bytes`: published parameter counts exactly, and cards of odd sizes."""

from random import Random

from servelab.exercise import CaseSpec
from servelab.exercises.memory import _calls as calls

ANSWERS = ("parameters", "weight_bytes")
CASES = (
    CaseSpec("a dense model", hint=1, weight=3),
    CaseSpec("tied embeddings", hint=1, weight=2),
    CaseSpec("biases, norms and positions", hint=2, weight=3),
    CaseSpec("mixture of experts", hint=2, weight=3),
    CaseSpec("latent attention", hint=3, weight=3),
    CaseSpec("every card of the course", hint=3, weight=3),
    CaseSpec("bytes of all parts", hint=1, weight=2),
)
judge, show = calls.judge, calls.show
OPT_LIKE = {"gated_mlp": False, "qkv_bias": True, "all_biases": True}


def challenges(rng: Random) -> list[dict]:
    """One part at a time on tiny cards, then the course's cards and drawn ones."""
    moe = calls.MOE
    cards = [
        ("a dense model", calls.tiny(num_heads=2, num_kv_heads=2, head_dim=20)),
        ("a dense model", calls.tiny()),
        ("a dense model", calls.tiny(dense_layers=1)),
        ("tied embeddings", calls.tiny(tied_embeddings=True)),
        ("biases, norms and positions", calls.tiny(qkv_bias=True)),
        ("biases, norms and positions", calls.tiny(qk_norm=True)),
        ("biases, norms and positions", calls.tiny(gated_mlp=False)),
        ("biases, norms and positions", calls.tiny(**OPT_LIKE, position_rows=51)),
        ("biases, norms and positions", calls.tiny(hidden_size=41, qkv_bias=True, all_biases=True, qk_norm=True)),
        ("mixture of experts", calls.tiny(**moe)),
        ("mixture of experts", calls.tiny(**moe, dense_layers=1, shared_experts=2)),
        ("mixture of experts", calls.tiny(**moe, shared_experts=1, gated_mlp=False)),
        ("mixture of experts", calls.tiny(**moe, hidden_size=41, dense_layers=2, router_bias=True)),
        ("latent attention", calls.tiny(**calls.MLA)),
        ("latent attention", calls.tiny(**(calls.MLA | {"q_lora_rank": 0}))),
        ("latent attention", calls.tiny(**calls.MLA, **moe, dense_layers=1, shared_experts=1, router_bias=True)),
        *(("every card of the course", card) for card in calls.all_models()),
        ("every card of the course", calls.drawn(rng)),
        ("every card of the course", calls.drawn(rng, num_layers=9, dense_layers=rng.randint(1, 4), **moe)),
    ]
    made = [calls.call(case, "parameters", model=card) for case, card in cards]
    sizes = [(calls.tiny(), 2), (calls.tiny(**moe), 1), (calls.tiny(**calls.MLA), 0.5), (calls.drawn(rng), 4)]
    whole = [calls.call("bytes of all parts", "weight_bytes", model=card, dtype_bytes=size) for card, size in sizes]
    return [*made[:16], *whole, *made[16:]]


def drive(challenge: dict, parameters, weight_bytes) -> dict:
    return calls.drive(challenge, parameters=parameters, weight_bytes=weight_bytes)
