"""Check of the vocabulary over ranks: embedding, and cross-entropy without gathering the logits."""

from itertools import pairwise
from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.tensor_parallel import _ranks as ranks
from servelab.plain import close, plain

ANSWERS = ("vocab_range", "VocabParallelEmbedding", "vocab_parallel_cross_entropy")
RANGE, HOLDS, LOOKUP = "rows of each rank", "holds its rows and no more", "embeddings of every rank's tokens"
TABLE, ONE = "gradient of the embedding", "one all-reduce for the embedding"
LOSS, LABELS, STABLE = "loss of one rank", "labels of other ranks", "large logits"
LEVELS = "each token's own largest logit"
LOGITS, FEW = "gradient of the logits", "few and small collectives for the loss"
GROUP = "within its own group"
CASES = (
    CaseSpec(RANGE, hint=1),
    CaseSpec(HOLDS, hint=1),
    CaseSpec(LOOKUP, hint=1, weight=2),
    CaseSpec(TABLE, hint=1, weight=2),
    CaseSpec(ONE, hint=1),
    CaseSpec(LOSS, hint=2),
    CaseSpec(FEW, hint=3, weight=3),
    CaseSpec(LABELS, hint=1, weight=2),
    CaseSpec(STABLE, hint=2, weight=2),
    CaseSpec(LEVELS, hint=2, weight=2),
    CaseSpec(LOGITS, hint=2, weight=2),
    CaseSpec(GROUP, hint=3),
)
FATE = 'fate = "unchanged" if ({} == before).all() else "overwritten"'
MOST_CALLS, MOST_PER_TOKEN = 3, 4
RANGES = ((1, 1), (4, 2), (7, 3), (8, 3), (10, 4), (128_256, 8), (50_257, 4))
# ranks, vocabulary, hidden, tokens
EMBEDDINGS = ((1, 3, 2, (2,)), (2, 4, 2, (3,)), (3, 4, 2, (4,)), (3, 7, 2, (2, 4)), (4, 12, 3, (9,)))
# ranks, vocabulary, tokens, what is added to all logits, or to each token's
LOSSES: tuple[tuple[int, int, int, float | tuple[float, ...]], ...] = (
    (1, 3, 1, 0),
    (2, 10, 2, 0),  # equal parts, and too much to be gathered
    (2, 3, 2, 0),
    (3, 31, 5, 0),
    (4, 40, 3, 0),
    (2, 16, 2, 800),
    (3, 31, 4, -900),
    (4, 40, 6, 1e5),
    (1, 3, 2, (0, 1000)),
    (2, 4, 2, (1000, 0)),
    (3, 31, 4, (0, -1000, 1000, 0)),
)


def challenges(rng: Random) -> list[dict]:
    """Ranges, embeddings, then losses: every label once on each rank, and logits that overflow."""
    made: list[dict] = [{"kind": "range", "vocabulary": v, "size": t} for v, t in RANGES]
    made += [_embedding(rng, *parts) for parts in EMBEDDINGS]
    made += [_loss(rng, *parts) for parts in LOSSES]
    groups = {"groups": [[0, 2], [1, 3]]}
    return [*made, _embedding(rng, 2, 5, 2, (4,)) | groups, _loss(rng, 2, 16, 3, 0) | groups]


def _embedding(rng: Random, size: int, vocabulary: int, hidden: int, shape: tuple[int, ...]) -> dict:
    """Every rank has rows for some of the tokens."""
    ids = [*range(vocabulary)] * 2
    while True:
        rng.shuffle(ids)
        rows = [ids[: shape[-1]], ids[-shape[-1] :]][: len(shape)]
        if _on_all_ranks([token for row in rows for token in row], vocabulary, size):
            break
    tokens: Any = rows if len(shape) == 2 else rows[0]
    table, factor = ranks.draw(rng, vocabulary, hidden), ranks.draw(rng, *shape, hidden)
    return {"kind": "embedding", "ranks": size, "table": table, "tokens": tokens, "factor": factor}


def _on_all_ranks(tokens: list[int], vocabulary: int, size: int) -> bool:
    """Whether each rank has the row of a token."""
    rows, longer = divmod(vocabulary, size)
    first = [rank * rows + min(rank, longer) for rank in range(size + 1)]
    return all(any(a <= token < b for token in tokens) for a, b in pairwise(first))


def _loss(rng: Random, size: int, vocabulary: int, tokens: int, shift: float | tuple[float, ...]) -> dict:
    """Labels are first and last ids of the ranks in turn; where all logits are shifted, one rank is far below."""
    levels = shift if isinstance(shift, tuple) else (shift,) * tokens
    drawn = ranks.draw(rng, tokens, vocabulary)
    logits = [[value + level for value in row] for row, level in zip(drawn, levels, strict=True)]
    bounds = [vocabulary * r // size for r in range(size + 1)]  # the judge's own cut: ``first`` is given
    labels = [bounds[t % size] if (t + size) % 2 == 0 else bounds[t % size + 1] - 1 for t in range(tokens)]
    case = LEVELS if isinstance(shift, tuple) else STABLE if shift else LABELS if size > 1 else LOSS
    if case == STABLE:
        for row in logits[1:]:
            row[bounds[-2] :] = [value - 5000 for value in row[bounds[-2] :]]
    made = {"logits": logits, "labels": labels, "bounds": bounds, "factor": ranks.draw(rng, tokens), "case": case}
    return {"kind": "loss", "ranks": size} | made


def drive(challenge: dict, vocab_range, VocabParallelEmbedding, vocab_parallel_cross_entropy) -> dict:
    if challenge["kind"] == "embedding":
        return ranks.drive(challenge, _embed, VocabParallelEmbedding)
    if challenge["kind"] == "loss":
        return ranks.drive(challenge, _lose, vocab_parallel_cross_entropy)
    parts = [vocab_range(challenge["vocabulary"], rank, challenge["size"]) for rank in range(challenge["size"])]
    return {"ranges": [[plain(p.start), plain(p.stop)] if isinstance(p, range) else plain(p) for p in parts]}


def _embed(challenge: dict, comm: Any, embedding: type) -> dict:
    import torch

    given = ranks.Given({"weight": challenge["table"]})
    layer = embedding(given["weight"], comm)
    kept = ranks.kept([layer], given, ["weight"] if comm.size > 1 else [])
    tokens = torch.tensor(challenge["tokens"])
    before = tokens.clone()
    ranks.mark("forward", challenge.get("groups"))
    y = ranks.returned("forward", layer(tokens))
    made = {"result": y.detach().clone(), "tokens": ranks.fate(tokens, before)}
    ranks.mark("backward", challenge.get("groups"))
    went = ranks.backward(y, ranks.tensor(challenge["factor"]))
    rows = ranks.parameter(layer, "weight")
    made |= {"rows": rows, ranks.MEMORY: kept, "elements held": ranks.held(layer)}
    return made | ranks.grads(went, rows=rows)


def _lose(challenge: dict, comm: Any, cross_entropy: Any) -> dict:
    import torch

    first, last = challenge["bounds"][comm.rank : comm.rank + 2]
    logits = ranks.tensor(challenge["logits"])[:, first:last].clone().requires_grad_()
    labels = torch.tensor(challenge["labels"])
    before = labels.clone()
    ranks.mark("forward", challenge.get("groups"))
    loss = ranks.returned("vocab_parallel_cross_entropy", cross_entropy(logits * 1, labels, first, comm))
    made = {"loss": loss.detach().clone(), "labels": ranks.fate(labels, before)}
    ranks.mark("backward", challenge.get("groups"))
    went = ranks.backward(loss, ranks.tensor(challenge["factor"]))
    return made | ranks.grads(went, logits=logits)


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Values are determined; for the loss any few small collectives will do."""
    if challenge["kind"] == "range":
        return [_judge_range(challenge, transcript, expected)]
    embedding = challenge["kind"] == "embedding"
    if embedding:
        about = {HOLDS: ["rows", ranks.MEMORY, "elements held"], LOOKUP: ["result", "tokens"]}
        about |= {TABLE: ["gradient of rows"]}
    else:
        about = {challenge["case"]: ["loss", "labels"], LOGITS: ["gradient of logits"]}
    calls = ONE if embedding else FEW
    if challenge.get("groups"):
        about = {GROUP: ["result", "gradient of rows"] if embedding else ["loss", "gradient of logits"]}
    if "failed" in transcript:
        return ranks.failed(transcript, about if challenge.get("groups") else [*about, calls])
    found = [ranks.compare(case, transcript, expected, names) for case, names in about.items()]
    if challenge.get("groups"):
        return found
    if embedding:
        return [*found, ranks.compare_calls(calls, transcript, expected, ["forward", "backward"])]
    return [*found, _judge_loss(challenge, transcript)]


def _judge_range(challenge: dict, transcript: dict, expected: dict) -> Case:
    got, want = transcript.get("ranges"), expected["ranges"]
    for rank, right in enumerate(want):
        mine = got[rank] if isinstance(got, list) and len(got) == len(want) else None
        if not close(mine, right):
            call = f"vocab_range({challenge['vocabulary']}, {rank}, {len(want)})"
            found = f"range({mine[0]}, {mine[1]})" if isinstance(mine, list) and len(mine) == 2 else ranks.shown(mine)
            return Case(RANGE, False, f"{call}: expected range({right[0]}, {right[1]}), got {found}")
    return Case(RANGE, True)


def _judge_loss(challenge: dict, transcript: dict) -> Case:
    """Up to three collectives and four numbers a token forward, nothing backward; several ranks do need one."""
    case, tokens = FEW, len(challenge["labels"])
    for rank, mine in enumerate(transcript["ranks"]):
        forward, backward = mine["calls"].get("forward", []), mine["calls"].get("backward", [])
        elements = sum(call[1] for call in forward)
        if not forward and challenge["ranks"] > 1:
            return Case(case, False, f"rank {rank}, forward: nothing sent, so the other ranks' logits cannot be in it")
        if backward:
            return Case(case, False, f"rank {rank}, backward: expected nothing sent, got {ranks.listed(backward)}")
        if len(forward) > MOST_CALLS or elements > MOST_PER_TOKEN * tokens:
            most = f"at most {MOST_CALLS} collectives with {MOST_PER_TOKEN * tokens} elements for {tokens} tokens"
            return Case(case, False, f"rank {rank}, forward: expected {most}, got {ranks.listed(forward)}")
    return Case(case, True)


def show(challenge: dict) -> str:
    """The call, or what each rank does, as Python."""
    if challenge["kind"] == "range":
        size = challenge["size"]
        return f"[vocab_range({challenge['vocabulary']}, rank, {size}) for rank in range({size})]"
    lines = [ranks.show("factor", challenge["factor"])]
    if challenge["kind"] == "embedding":
        lines += [ranks.show("table", challenge["table"]), f"tokens = torch.tensor({challenge['tokens']})"]
        lines += ["before, layer = tokens.clone(), VocabParallelEmbedding(table, comm)", "y = layer(tokens)"]
        lines += [FATE.format("tokens"), "(y * factor).sum().backward()"]
        made = {"result": "y.detach()", "tokens": "fate"}
        made |= {"rows": "layer.weight.detach()", "gradient of rows": "layer.weight.grad"} | ranks.show_kept("layer")
        return ranks.script(challenge, lines, made)
    lines += [ranks.show("logits", challenge["logits"]), f"labels = torch.tensor({challenge['labels']})"]
    lines += [f"first, last = {challenge['bounds']}[comm.rank : comm.rank + 2]"]
    lines += ["mine = logits[:, first:last].clone().requires_grad_()"]
    lines += ["before, loss = labels.clone(), vocab_parallel_cross_entropy(mine, labels, first, comm)"]
    lines += [FATE.format("labels"), "(loss * factor).sum().backward()"]
    made = {"loss": "loss.detach()", "labels": "fate", "gradient of logits": "mine.grad"}
    return ranks.script(challenge, lines, made)
