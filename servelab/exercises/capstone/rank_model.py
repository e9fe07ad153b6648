"""Check of `rank_model`: on any number of ranks the scores of the whole model, out of parts of its weights."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.capstone import _model
from servelab.exercises.tensor_parallel import _ranks
from servelab.plain import type_name
from servelab.stepping import attempt

ANSWERS = ("rank_model",)
ALONE, SPLIT, COPIED = "one rank has the whole model", "the scores of the whole model", "KV heads are copied"
CONFIG, HELD, CALLS = "a rank's configuration", "a rank keeps its part only", "two all-reduces a layer"
KEPT, REFUSED = "the given weights stay as they are", "what does not divide is refused"
CASES = (
    CaseSpec(ALONE, hint=1, alone=False),  # the whole model on every rank passes these, too
    CaseSpec(SPLIT, hint=1, weight=3, alone=False),
    CaseSpec(CONFIG, hint=2, weight=2),
    CaseSpec(CALLS, hint=1, alone=False),
    CaseSpec(COPIED, hint=2, weight=4, alone=False),
    CaseSpec(HELD, hint=3, weight=3),
    CaseSpec(KEPT, hint=3, alone=False),
    CaseSpec(REFUSED, hint=3, alone=False),
)
NAMED = {  # the cases that a challenge tests: what breaks where KV heads are copied says nothing of the other ranks
    COPIED: (COPIED, HELD),
    REFUSED: (REFUSED,),
}
COUNTS, MEMORY, CHANGED = "query and KV heads", "numbers kept in memory", "weights that were changed or are gone"
SHAPES, WHOLE = "shapes", "whole weights kept beside"
SAME = ("vocab_size", "hidden_size", "num_layers", "head_dim", "max_model_len", "eos_token_id")  # on every rank
SEED = 11


def challenges(rng: Random) -> list[dict]:
    """Ranks, and the dimensions in which the model differs from the small one."""
    eight = {"num_heads": 8, "num_kv_heads": 2, "hidden_size": 8}
    good = [
        (ALONE, 1, {}),
        (SPLIT, 2, {"eos_token_id": 5}),
        (SPLIT, 3, {"num_heads": 9, "num_kv_heads": 3, "intermediate_size": 15}),
        (SPLIT, 2, {"num_heads": 4, "num_kv_heads": 4, "num_layers": 1, "intermediate_size": 10}),
        (COPIED, 4, eight),
        (COPIED, 2, {"num_heads": 4, "num_kv_heads": 1, "num_layers": 1}),
        (COPIED, 6, {"num_heads": 6, "num_kv_heads": 2, "num_layers": 1, "hidden_size": 8}),
    ]
    bad = [
        (REFUSED, 2, {"intermediate_size": 23}),
        (REFUSED, 3, {"intermediate_size": 24}),
        (REFUSED, 2, {"num_heads": 6, "num_kv_heads": 3, "hidden_size": 8}),
        (REFUSED, 3, {"num_heads": 6, "num_kv_heads": 2, "hidden_size": 8}),
        (REFUSED, 4, {"num_heads": 6, "num_kv_heads": 2, "hidden_size": 8}),
    ]
    tokens = [rng.sample(range(1, 31), 5) for _ in (*good, *bad)]
    pairs = zip((*good, *bad), tokens, strict=True)
    return [{"case": case, "ranks": size, "dims": dims, "tokens": ids} for (case, size, dims), ids in pairs]


def drive(asked: dict, rank_model) -> dict:
    """Make the model on every rank, and run a prompt and two tokens more.

    If that breaks off, the model is made once more and not run, to see what the ranks have.
    """
    ran = _ranks.drive(asked, _on_a_rank, rank_model)
    return ran if "ranks" in ran else _ranks.drive(asked | {"run": False}, _on_a_rank, rank_model) | ran


def _on_a_rank(asked: dict, comm: Any, rank_model) -> dict:
    whole = _model.model(SEED, **asked["dims"])
    given = _ranks.Given(whole.weights)
    weights = dict(given)
    outcome = attempt(rank_model, whole.config, weights, comm)
    if "raised" in outcome or asked.get("case") == REFUSED:
        return {key: outcome[key] for key in ("raised", "message") if key in outcome}
    mine: Any = outcome.pop("returned")
    if not all(hasattr(mine, name) for name in ("config", "weights", "forward", "logits")):
        return {"instead": type_name(mine)}
    made = {"scores": _scores(asked, mine)} if asked.get("run", True) else {}
    made |= {COUNTS: [getattr(mine.config, name) for name in ("num_heads", "num_kv_heads")]}
    made |= {f"config.{name}": getattr(mine.config, name) for name in SAME}
    made |= {SHAPES: {name: list(weight.shape) for name, weight in mine.weights.items()}}
    made |= {MEMORY: _held(mine.weights), CHANGED: _changed(weights, whole.weights)}
    del weights
    return made | {WHOLE: _whole_beside(mine, whole.weights, given)}


def _scores(asked: dict, model: Any) -> Any:
    import torch

    from servelab.llm.kv import ContiguousKV

    scores, kv, tokens = [], ContiguousKV(), torch.tensor(asked["tokens"])
    _ranks.mark("forward")
    with torch.no_grad():
        for span in (range(3), range(3, 4), range(4, 5)):
            hidden = model.forward(tokens[list(span)], torch.tensor(span), kv)
            scores.append(model.logits(hidden[-1]))
    _ranks.mark("finish")
    return torch.stack(scores)


def _held(weights: dict) -> int:
    """Elements that the tensors keep in memory; a view keeps all that it is a view of."""
    storages = [weight.untyped_storage() for weight in weights.values()]
    sizes = {storage.data_ptr(): storage.nbytes() // 8 for storage in storages}  # float64
    return sum(sizes.values())


def _changed(weights: dict, before: dict) -> list[str]:
    """The names under which there is something else now, or nothing, or nothing was before."""
    import torch

    now = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
    same = {name for name in now.keys() & before.keys() if torch.equal(now[name], before[name])}
    return sorted((weights.keys() | before.keys()) - same)


def _whole_beside(model: Any, weights: dict, given: _ranks.Given) -> list[str]:
    """Of the weights that the model has a part of, those that it keeps whole beside: as given, or in a copy."""
    import torch

    has = {name: weight.numel() for name, weight in model.weights.items() if name in weights}
    parts = {name for name, elements in has.items() if elements < weights[name].numel()}
    attributes = getattr(model, "__dict__", {})
    beside = [tensor for name in attributes.keys() - {"weights"} for tensor in _tensors(attributes[name])]
    copies = {name for name in parts for tensor in beside if torch.equal(tensor, weights[name])}
    given.arrays = {name: array for name, array in given.arrays.items() if name in parts}
    return sorted(copies.union(given.still_used()))


def _tensors(value: Any, depth: int = 2) -> Iterator[Any]:
    """The tensors in a value: itself, or those in lists, tuples and dictionaries."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple) and depth:
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each, depth - 1)


def judge(asked: dict, transcript: dict, expected: dict) -> list[Case]:
    """Scores, configuration and calls are determined, and how much a rank may keep."""
    name = asked["case"]
    names = NAMED.get(name, (name, CONFIG, HELD, CALLS, KEPT))
    if "ranks" not in transcript:
        return _ranks.failed(transcript, names)
    problem = next(filter(None, (_problem(asked, rank["made"]) for rank in transcript["ranks"])), "")
    if name == COPIED and problem:
        return [Case(COPIED, False, problem), Case(HELD, True)]
    if problem or name == REFUSED:
        return [Case(case, not problem, problem) for case in names]
    config = [COUNTS] if name == COPIED else [COUNTS, *(f"config.{field}" for field in SAME)]
    found = [_scores_case(name, transcript, expected), _held_case(name, transcript, expected)]
    if "failed" not in transcript:
        found.append(_ranks.compare_calls(CALLS, transcript, expected, ["before", "forward", "finish"]))
    found.append(_ranks.compare(CONFIG, transcript, expected, config))
    found.append(_ranks.compare(KEPT, transcript, expected, [CHANGED]))
    if name == COPIED:  # all that is to be said of it is one case
        wrong = (case for case in found if case.name in (CONFIG, CALLS) and found[0].passed and not case.passed)
        return [replace(next(wrong, found[0]), name=COPIED), found[1]]
    return found


def _scores_case(name: str, transcript: dict, expected: dict) -> Case:
    """The scores; if they are wrong, or there are none, and a weight has a wrong shape, then that is said."""
    scores = _ranks.failed(transcript, [name])[0] if "failed" in transcript else None
    scores = scores or _ranks.compare(name, transcript, expected, ["scores"])
    for rank, (mine, right) in enumerate(zip(transcript["ranks"], expected["ranks"], strict=True)):
        for weight, shape in right["made"][SHAPES].items():
            got = mine["made"][SHAPES].get(weight, "no such weight")
            if got != shape and not scores.passed:
                message = f"{weight} on rank {rank} of {len(expected['ranks'])}: expected shape {shape}, got {got}"
                return Case(name, False, message, 2 if weight.endswith((".k", ".v")) else 1)
    return scores


def _held_case(name: str, transcript: dict, expected: dict) -> Case:
    """A rank keeps what its part has. Where KV heads are copied, less is no second fault: then the scores are wrong."""
    for rank, (mine, right) in enumerate(zip(transcript["ranks"], expected["ranks"], strict=True)):
        got, most = mine["made"][MEMORY], right["made"][MEMORY]
        if got > most or (got < most and name != COPIED):
            return Case(HELD, False, f"rank {rank}, {MEMORY}: expected {most}, got {got}")
        if mine["made"][WHOLE]:
            named = mine["made"][WHOLE][0]
            return Case(HELD, False, f"rank {rank} has its part of {named}, and keeps all of it beside")
    return Case(HELD, True)


def _problem(asked: dict, made: dict) -> str:
    """What a rank raised, or did not raise, or returned instead of a model."""
    if asked.get("case") == REFUSED:
        heads, kv_heads, mlp = (
            (_model.SMALL | asked["dims"])[name] for name in ("num_heads", "num_kv_heads", "intermediate_size")
        )
        what = f"{heads} query heads, {kv_heads} KV heads and an MLP of {mlp} on {asked['ranks']} ranks"
        came = f"it raised {made['message']}" if "raised" in made else "nothing was raised"
        return "" if made.get("raised") == "ValueError" else f"{what}: expected ValueError, {came}"
    if "instead" in made:
        missing = ": is its return missing?" if made["instead"] == "NoneType" else ""
        return f"rank_model returned an object of type {made['instead']}, not a model{missing}"
    return f"rank_model raised {made['message']}" if "raised" in made else ""


def show(asked: dict) -> str:
    """The call as Python."""
    given = f"ranks={asked['ranks']}, tokens={asked['tokens']}"
    dims = "".join(f", {name}={value}" for name, value in asked["dims"].items())
    return f"from servelab.exercises.capstone.rank_model import play\nplay(rank_model, {given}{dims})"


def play(rank_model, ranks: int, tokens: list[int], **dims: int) -> None:
    """Make the check's small model on ranks, run a prompt of 3 tokens and the others one by one, print what each has.

    ``dims`` are those in which the model differs from the small one, `servelab.exercises.capstone._model.SMALL`.
    """
    asked = {"ranks": ranks, "dims": dims, "tokens": tokens}
    whole, ran = (drive(asked | {"ranks": size}, make) for size, make in ((1, _whole), (ranks, rank_model)))
    if "failed" in ran:
        print(ran["failed"])
    right = whole["ranks"][0]["made"]
    for number, rank in enumerate(ran.get("ranks", [])):
        made, problem = rank["made"], _problem(asked, rank["made"])
        if problem:
            print(f"rank {number}: {problem}")
            continue
        known = [COUNTS, MEMORY, CHANGED, *([WHOLE] if made[WHOLE] else [])]
        known += [f"config.{name}" for name in SAME if made[f"config.{name}"] != right[f"config.{name}"]]
        told = "; ".join(f"{what}: {made[what]}" for what in known)
        if "failed" in ran:
            print(f"rank {number}: {told}; shapes: {made[SHAPES]}")
            continue
        differs = _ranks.differs(made["scores"], right["scores"], _ranks.EXACT, ranks)
        sent = {phase: len(calls) for phase, calls in rank["calls"].items()}
        print(f"rank {number}: {told}; calls: {sent}; scores: {differs or 'those of the whole model'}")


def _whole(config: Any, weights: dict, comm: Any) -> Any:
    from servelab.llm import LLM

    return LLM(config, weights)
