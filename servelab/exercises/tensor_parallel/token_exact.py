"""Check of a decoder layer over ranks: alone, and as the layers of the tiny model, whose tokens must not change.

All runs are in float64. What is right comes from `expected` alone: values and counts of the reference's ranks, and the
tokens of the plain loop over one request.
"""

from collections import Counter
from functools import partial
from random import Random
from typing import Any

import numpy as np

from servelab.exercise import Case, CaseSpec
from servelab.exercises.tensor_parallel import _ranks as ranks
from servelab.plain import close, decode_array, is_array

ANSWERS = ("DecoderLayer",)
ALONE, SPLIT, COPIED = "a layer on one rank", "KV heads split over the ranks", "KV heads replicated"
HELD, KEPT = "holds its part of the matrices", "as many keys and values as its heads have"
CALLS, GROUP = "two all-reduces a layer", "within its own group"
OTHER = "a model of other dimensions"
TP2, TP4 = "the plain loop's tokens, TP=2", "the plain loop's tokens, TP=4"
CASES = (
    CaseSpec(ALONE, hint=2),
    CaseSpec(HELD, hint=1),
    CaseSpec(KEPT, hint=1),
    CaseSpec(CALLS, hint=3, weight=2),
    CaseSpec(SPLIT, hint=3),
    CaseSpec(COPIED, hint=3),
    CaseSpec(OTHER, hint=2),
    CaseSpec(GROUP, hint=3),
    CaseSpec(TP2, hint=3, weight=3),
    CaseSpec(TP4, hint=3, weight=3),
)
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
STEPS = ("the prompt", "the token after it")
MATRIX_ELEMENTS, KV_ELEMENTS = "elements of matrices among parameters and buffers", "elements of keys and values"
GIVEN = ("q", "k", "v")
PHASES = {"before": "in the constructor", "forward": "in all steps"}
VERBS = ("What is ", "Explain ", "Why is there ", "When is there ")
NOUNS = ("a block table", "a KV cache", "a rank", "a prefill", "an all-reduce", "a batch")
MAX_TOKENS = 6
DIMENSIONS = {  # heads together are wider than the residual stream
    "vocab_size": 128,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 8,
    "intermediate_size": 9,
}


def challenges(rng: Random) -> list[dict]:
    """A layer of the tiny model on more and more ranks, one of another model; two groups at once; all of the model."""
    made: list[dict] = [_layer(rng, case, size) for case, size in ((ALONE, 1), (SPLIT, 2), (COPIED, 4))]
    for size, kv_heads in ((1, 3), (3, 3), (3, 1)):
        config = DIMENSIONS | {"num_kv_heads": kv_heads, "rms_norm_eps": rng.choice((0.003, 0.01, 0.03))}
        made.append(_layer(rng, OTHER, size) | {"config": config})
    made += [_grouped(rng, groups) for groups in ([[0, 2], [1, 3]], [[0, 1], [2, 3]])]
    for case, size in ((TP2, 2), (TP4, 4)):
        made.append({"case": case, "ranks": size, "prompt": _prompt(rng), "max_tokens": MAX_TOKENS})
    return made


def _prompt(rng: Random) -> list[int]:
    return list((rng.choice(VERBS) + rng.choice(NOUNS)).encode())


def _layer(rng: Random, case: str, size: int) -> dict:
    return {"case": case, "ranks": size, "layer": rng.randrange(2), "tokens": _prompt(rng)[-5:]}


def _grouped(rng: Random, groups: list[list[int]]) -> dict:
    """Two groups with tokens of their own, so that no sum over both is right."""
    made = _layer(rng, GROUP, 2) | {"groups": groups}
    while True:
        others = _prompt(rng)[-5:]
        if others != made["tokens"]:
            return made | {"others": others}


def drive(challenge: dict, DecoderLayer) -> dict:
    from servelab.llm import thread
    from servelab.llm.generate import greedy

    whole = thread.untrained_model(**challenge["config"]) if "config" in challenge else thread.tiny_model()
    if "layer" in challenge:
        return ranks.drive(challenge, _one_layer, DecoderLayer, whole)
    made = ranks.drive(challenge, _all_layers, DecoderLayer, whole)
    return made | {"plain loop": list(greedy(whole, challenge["prompt"], challenge["max_tokens"]))}


def _one_layer(challenge: dict, comm: Any, decoder_layer: Any, whole: Any) -> dict:
    """Two steps: all tokens but the last one, then that one, with the KV memory of the first."""
    import torch

    from servelab.llm import thread

    weights = thread.layer_weights(whole.weights, challenge["layer"])
    given = ranks.Given({name: weights[name] for name in MATRICES})
    layer = decoder_layer(whole.config, weights | given, comm)
    cut = [name for name in MATRICES if name not in "kv" or whole.config.num_kv_heads > 1]
    kept = ranks.kept([layer], given, cut if comm.size > 1 else ())
    model, kv = thread.LayeredLLM(whole.config, whole.weights, comm, lambda *_: layer), _watched()
    second = list(comm.ranks) in challenge.get("groups", [])[1:]
    tokens, made = torch.tensor(challenge["others" if second else "tokens"]), {}
    ranks.mark("forward")
    for name, span in zip(STEPS, torch.arange(len(tokens)).split(len(tokens) - 1), strict=True):
        x, angles = model.inputs(tokens[span], span)
        with torch.no_grad():
            made[name] = ranks.returned("forward", layer(x, angles, partial(kv.attend, 0)))
        made |= {_given(name, part): each for part, each in zip(GIVEN, kv.take(), strict=True)}
    return made | {MATRIX_ELEMENTS: _held([layer]), ranks.MEMORY: kept, KV_ELEMENTS: kv.elements}


def _all_layers(challenge: dict, comm: Any, decoder_layer: Any, whole: Any) -> dict:
    """The answer of the model with the learner's layers in it, by the same loop."""
    from servelab.llm import thread
    from servelab.llm.generate import greedy

    model = thread.LayeredLLM(whole.config, whole.weights, comm, decoder_layer)
    ranks.mark("forward")
    tokens = list(greedy(model, challenge["prompt"], challenge["max_tokens"]))
    return {"tokens": tokens, MATRIX_ELEMENTS: _held(model.layers)}


def _given(step: str, part: str) -> str:
    return f"{step}, what attend gets as {part}"


def _watched() -> Any:
    """The KV memory of one request, which counts the elements of keys and values, and remembers what it was given."""
    from servelab.llm.kv import ContiguousKV

    class Watched(ContiguousKV):
        elements = 0
        calls: tuple = ()

        def attend(self, layer: int, q: Any, k: Any, v: Any) -> Any:
            self.elements += k.numel() + v.numel()
            self.calls = (*self.calls, tuple(each.detach().clone() for each in (q, k, v)))
            return super().attend(layer, q, k, v)

        def take(self) -> tuple:
            """What the one call since the last look was given; of another number of calls what that was."""
            calls, self.calls = self.calls, ()
            return calls[0] if len(calls) == 1 else (f"{len(calls)} calls of attend instead of one",) * len(GIVEN)

    return Watched()


def _held(layers: list) -> int:
    """Elements of the matrices that layers hold: a norm's weight is whole on every rank, and may be the given one."""
    tensors = [t for layer in layers for t in (*layer.parameters(), *layer.buffers()) if t.dim() > 1]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size() for t in tensors}.values()
    )


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Everything is determined: a rank's values and tokens, its elements and what it sends."""
    case = challenge["case"]
    others = {TP2: [HELD, CALLS], TP4: [HELD, CALLS], GROUP: [], OTHER: []}.get(case, [HELD, KEPT, CALLS])
    if "failed" in transcript:
        return ranks.failed(transcript, [case, *others])
    about = {HELD: [MATRIX_ELEMENTS], KEPT: [KV_ELEMENTS]}
    if "layer" in challenge:
        about |= {HELD: [MATRIX_ELEMENTS, ranks.MEMORY]}
    values = [(_judge_layer if "layer" in challenge else _judge_tokens)(case, transcript, expected)]
    values += [ranks.compare(name, transcript, expected, about[name]) for name in (case, *others) if name in about]
    return values + ([_judge_calls(transcript, expected)] if CALLS in others else [])


def _judge_layer(case: str, transcript: dict, expected: dict) -> Case:
    """The values behind the layer, and on several ranks the heads that went into `attend`.

    Where the values are wrong, what `attend` got tells which half of the layer to look at.
    """
    found = ranks.compare(case, transcript, expected, STEPS)
    if found.passed and len(expected["ranks"]) == 1:
        return found
    given = ranks.compare(case, transcript, expected, [_given(step, part) for step in STEPS for part in GIVEN])
    if found.passed and given.passed:
        return found
    if given.passed:
        return Case(case, False, f"{found.message}; what attend gets is right")
    hint = 1 if case in (SPLIT, COPIED) and not _shared(transcript, expected) else None
    return Case(case, False, given.message + _only_later(transcript, expected), hint)


def _shared(transcript: dict, expected: dict) -> bool:
    """Whether in a step all ranks gave `attend` the same queries: no choice of heads does that, but a shared place."""
    for name in (_given(step, GIVEN[0]) for step in STEPS):
        got, want = ([side["made"].get(name) for side in made["ranks"]] for made in (transcript, expected))
        if (
            is_array(got[0])
            and all(close(each, got[0]) for each in got)
            and not any(close(each, want[0]) for each in want[1:])
        ):
            return True
    return False


def _only_later(transcript: dict, expected: dict) -> str:
    """What it may mean that the first token's keys or values are right and later ones are not."""
    for mine, right in zip(transcript["ranks"], expected["ranks"], strict=True):
        for part in GIVEN:
            got, want = (made["made"].get(_given(STEPS[0], part)) for made in (mine, right))
            if is_array(got) and is_array(want) and got["shape"] == want["shape"] and not close(got, want, rtol=1e-9):
                rows = np.isclose(decode_array(got), decode_array(want), rtol=ranks.EXACT).all((1, 2))
                return "; token 0 is right, and position 0 is not rotated" if rows[0] and not rows[1:].any() else ""
    return ""


def _judge_calls(transcript: dict, expected: dict) -> Case:
    """What is sent in a step, or before the first one, in any order."""
    for rank, (mine, right) in enumerate(zip(transcript["ranks"], expected["ranks"], strict=True)):
        for phase, when in PHASES.items():
            sent, wanted = (sorted(made["calls"].get(phase, [])) for made in (mine, right))
            if sent != wanted:
                problem = f"rank {rank}, {when}: expected {_counted(wanted)}; got {_counted(sent)}"
                return Case(CALLS, False, problem)
    return Case(CALLS, True)


def _counted(calls: list) -> str:
    """Calls as text, those of one kind and size together."""
    kinds = Counter(f"{name} of {elements} elements over ranks {group}" for name, elements, group in calls)
    return ", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "nothing sent"


def _judge_tokens(case: str, transcript: dict, expected: dict) -> Case:
    """Every rank has to say what the plain loop says, out of its part of the matrices."""
    want = expected["plain loop"]
    for rank, mine in enumerate(transcript["ranks"]):
        got = mine["made"].get("tokens")
        if not close(got, want):
            return Case(case, False, f"rank {rank}: expected the tokens {want}, got {ranks.shown(got)}")
    return ranks.compare(case, transcript, expected, [MATRIX_ELEMENTS], hints={MATRIX_ELEMENTS: 1})


def show(challenge: dict) -> str:
    """What each rank does, as Python."""
    layer = "layer" in challenge
    lines = [
        "torch.set_grad_enabled(False)",
        "model = thread.LayeredLLM(whole.config, whole.weights, comm, DecoderLayer)",
        *(_show_layer(challenge) if layer else [f"return list(greedy(model, {_asked(challenge)}))"]),
    ]
    imports = [f"from servelab.llm.{'kv import ContiguousKV' if layer else 'generate import greedy'}"]
    config = ", ".join(f"{name}={value}" for name, value in challenge.get("config", {}).items())
    made = f"whole = thread.untrained_model({config})" if config else "whole = thread.tiny_model()"
    begin = [*imports, "from servelab.llm import thread", made, ""]
    end = [
        "for rank, (prompt, token, kept, *shapes) in enumerate(run.values):",
        "    print(rank, prompt[0, :2].tolist(), token[0, :2].tolist(), 'attend got shapes', *shapes, 'kept', kept)",
    ]
    if not layer:
        end = [f"print(list(greedy(whole, {_asked(challenge)})), run.values)"]
    return "\n".join([*begin, ranks.script(challenge, lines), *end])


def _asked(challenge: dict) -> str:
    return f"{challenge['prompt']}, {challenge['max_tokens']}"


def _show_layer(challenge: dict) -> list[str]:
    """Two steps of one layer."""
    number, tokens = challenge["layer"], challenge["tokens"]
    kept = ", ".join(f"{name!r}: {value}" for name, value in ranks.show_kept(f"model.layers[{number}]").items())
    lines = [f"tokens, positions = torch.tensor({tokens}), torch.arange({len(tokens)})"]
    if "groups" in challenge:
        lines += [
            f"if dist.get_rank() in {challenge['groups'][1]}:",
            f"    tokens = torch.tensor({challenge['others']})",
        ]
    lines += ["kv, y, shapes = ContiguousKV(), [], []", "def attend(*qkv):"]
    lines += ["    shapes.append([list(each.shape) for each in qkv])", f"    return kv.attend({number}, *qkv)"]
    lines += [f"for span in positions.split({len(tokens) - 1}):", "    x, angles = model.inputs(tokens[span], span)"]
    return [*lines, f"    y.append(model.layers[{number}](x, angles, attend))", f"return *y, {{{kept}}}, *shapes"]
