"""Check of `rank_model`: on any number of ranks the scores of the whole model, out of parts of its weights."""

from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.capstone import _model
from servelab.exercises.tensor_parallel import _ranks
from servelab.stepping import attempt

ANSWERS = ("rank_model",)
ALONE, SPLIT, COPIED = "one rank has the whole model", "the scores of the whole model", "KV heads are copied"
HEADS, HELD, CALLS = "a rank's numbers of heads", "a rank keeps its part only", "two all-reduces a layer"
KEPT, REFUSED = "the given weights stay as they are", "what does not divide is refused"
CASES = (
    CaseSpec(ALONE, hint=1, alone=False),  # the whole model on every rank passes these, too
    CaseSpec(SPLIT, hint=1, weight=3, alone=False),
    CaseSpec(COPIED, hint=2, weight=3, alone=False),
    CaseSpec(HEADS, hint=2, weight=2),
    CaseSpec(HELD, hint=3, weight=3),
    CaseSpec(CALLS, hint=1, alone=False),
    CaseSpec(KEPT, hint=3, alone=False),
    CaseSpec(REFUSED, hint=3, alone=False),
)
OTHERS = (HEADS, HELD, CALLS, KEPT)
COUNTS, MEMORY, CHANGED = "query and KV heads", "numbers kept in memory", "weights that were changed"
SEED = 11


def challenges(rng: Random) -> list[dict]:
    """Ranks, and the dimensions in which the model differs from the small one."""
    eight = {"num_heads": 8, "num_kv_heads": 2, "hidden_size": 8}
    good = [
        (ALONE, 1, {}),
        (SPLIT, 2, {}),
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
    """Make the model on every rank, and run a prompt and two tokens more."""
    return _ranks.drive(asked, _on_a_rank, rank_model)


def _on_a_rank(asked: dict, comm: Any, rank_model) -> dict:
    import torch

    from servelab.llm.kv import ContiguousKV

    whole = _model.model(SEED, **asked["dims"])
    before = {name: weight.clone() for name, weight in whole.weights.items()}
    outcome = attempt(rank_model, whole.config, whole.weights, comm)
    if "raised" in outcome:
        return {"raised": outcome["raised"], "message": outcome["message"]}
    if asked.get("case") == REFUSED:
        return {}
    mine: Any = outcome["returned"]
    _require_whole_heads(mine)
    scores, kv, tokens = [], ContiguousKV(), torch.tensor(asked["tokens"])
    _ranks.mark("forward")
    with torch.no_grad():
        for span in (range(3), range(3, 4), range(4, 5)):
            hidden = mine.forward(tokens[list(span)], torch.tensor(span), kv)
            scores.append(mine.logits(hidden[-1]))
    _ranks.mark("finish")
    changed = [name for name, weight in whole.weights.items() if not torch.equal(weight, before[name])]
    heads = [mine.config.num_heads, mine.config.num_kv_heads]
    return {"scores": torch.stack(scores), COUNTS: heads, MEMORY: _held(mine.weights), CHANGED: changed}


def _require_whole_heads(model: Any) -> None:
    """Without them the forward pass would fail, too, but not say of what."""
    dim = model.config.head_dim
    for name, weight in model.weights.items():
        if name.endswith((".q", ".k", ".v")) and len(weight) % dim:
            raise ValueError(f"{name} has {len(weight)} rows on this rank, which are no whole heads of size {dim}")


def _held(weights: dict) -> int:
    """Elements that the tensors keep in memory; a view keeps all that it is a view of."""
    storages = [weight.untyped_storage() for weight in weights.values()]
    sizes = {storage.data_ptr(): storage.nbytes() // 8 for storage in storages}  # float64
    return sum(sizes.values())


def judge(asked: dict, transcript: dict, expected: dict) -> list[Case]:
    """Scores, heads, elements held and calls are determined."""
    name = asked["case"]
    names = (name,) if name == REFUSED else (name, *OTHERS)
    if "failed" in transcript:
        return _ranks.failed(transcript, names)
    made = [rank["made"] for rank in transcript["ranks"]]
    problem = next(filter(None, (_problem(asked, mine) for mine in made)), "")
    if problem or name == REFUSED:
        return [Case(case, not problem, problem) for case in names]
    return [
        _ranks.compare(name, transcript, expected, ["scores"]),
        _ranks.compare(HEADS, transcript, expected, [COUNTS]),
        _ranks.compare(HELD, transcript, expected, [MEMORY]),
        _ranks.compare_calls(CALLS, transcript, expected, ["before", "forward", "finish"]),
        _ranks.compare(KEPT, transcript, expected, [CHANGED]),
    ]


def _problem(asked: dict, made: dict) -> str:
    """What a rank raised, or did not raise."""
    if asked["case"] == REFUSED:
        heads, kv_heads, mlp = (
            (_model.SMALL | asked["dims"])[name] for name in ("num_heads", "num_kv_heads", "intermediate_size")
        )
        what = f"{heads} query heads, {kv_heads} KV heads and an MLP of {mlp} on {asked['ranks']} ranks"
        came = f"it raised {made['message']}" if "raised" in made else "nothing was raised"
        return "" if made.get("raised") == "ValueError" else f"{what}: expected ValueError, {came}"
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
        return
    (right,) = whole["ranks"]
    for number, rank in enumerate(ran["ranks"]):
        made = rank["made"]
        if "raised" in made:
            print(f"rank {number}: rank_model raised {made['message']}")
            continue
        problem = _ranks.differs(made["scores"], right["made"]["scores"], _ranks.EXACT, ranks)
        sent = {phase: len(calls) for phase, calls in rank["calls"].items()}
        known = "; ".join(f"{what}: {made[what]}" for what in (COUNTS, MEMORY, CHANGED))
        print(f"rank {number}: {known}; calls: {sent}; scores: {problem or 'those of the whole model'}")


def _whole(config: Any, weights: dict, comm: Any) -> Any:
    from servelab.llm import LLM

    return LLM(config, weights)
