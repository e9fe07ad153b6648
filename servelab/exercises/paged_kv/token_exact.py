"""Check of `generate`: with all of the unit's parts under it, the tiny model has to give the plain loop's tokens.

What the plain loop says is in ``expected``: the reference's tokens, which a test compares with that loop. So that
nobody passes who computes the answers beside the pages, the driver writes down every forward pass: the positions that
went in, and in how many layers attention read the pages. Slots that nobody has written hold NaN.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, wraps
from itertools import islice
from random import Random
from types import SimpleNamespace
from typing import Any

from servelab.exercise import Case, CaseSpec, describe_error
from servelab.exercises.paged_kv import _steps as steps
from servelab.plain import plain

ANSWERS = ("generate", "BlockAllocator", "ForkableTable", "PrefixCache", "write_kv", "paged_attention")
EARLIER = ANSWERS[1:]
ONE, STOPS, ONCE, ROOM = "one request", "stops in time", "each token is computed once", "room for what is computed"
TURNS, FORK, CACHED = "requests in turn", "a fork goes on", "a cached prefix is not computed"
KEPT = steps.UNCHANGED
LATER = "forked after two tokens"
CASES = (
    CaseSpec(ONE, hint=2, weight=3),
    CaseSpec(ONCE, hint=1, weight=2),
    CaseSpec(ROOM, hint=3, weight=2),
    CaseSpec(STOPS, hint=3, weight=2),
    CaseSpec(TURNS, hint=3, weight=2),
    CaseSpec(FORK, hint=3, weight=3),
    CaseSpec(CACHED, hint=1, weight=3),
    CaseSpec(KEPT, hint=1),
)
LOOKED_AT = {  # the kinds of problems that fail a case
    ONE: ("tokens",),
    STOPS: ("tokens", "room"),
    ONCE: ("passes",),
    ROOM: ("room",),
    TURNS: ("nexts", "tokens", "passes", "room"),
    FORK: ("starts", "nexts", "passes", "tokens", "room"),
    CACHED: ("starts", "nexts", "passes", "tokens", "room"),
    KEPT: ("tokens", "kept"),
}
ALSO = {ONE: (ONCE, ROOM, KEPT), TURNS: (KEPT,), FORK: (KEPT,), CACHED: (KEPT,)}
NO_EOS = -1


class Unusable(RuntimeError):
    """What the learner's code made is of no use to the rest; the message says why."""

    def __init__(self, message: str, hint: int = 3):
        super().__init__(message)
        self.hint = hint


def challenges(rng: Random) -> list[dict]:
    """One request, then several in each way. Prompts are pieces of the tiny model's own texts."""
    short, long, *others = (_piece(rng, length) for length in (5, 17, 7, 10, 6))
    begin = _piece(rng, 9)
    cached = [begin + _piece(rng, 2), begin[:7] + _piece(rng, 4), begin[:8], begin[:8] + _piece(rng, 5)]
    return [
        _asked(ONE, "in turn", [short], 4, block_size=4, num_blocks=4),
        _asked(ONE, "in turn", [long], 8, block_size=3, num_blocks=10),
        _asked(STOPS, "in turn", [long], 1, block_size=3, num_blocks=8),
        _stopping(rng),
        *_stopping_elsewhere(rng),
        _asked(TURNS, "in turn", others, 6, block_size=4, num_blocks=12),
        _asked(FORK, "forked", _forks(rng), 6, block_size=8, num_blocks=12),
        _forking_later(rng),
        _asked(CACHED, "prefix-cached", cached, 4, block_size=4, num_blocks=24),
    ]


def _asked(case: str, way: str, prompts: list[str], max_tokens: int, **sizes: int) -> dict:
    return {"case": case, "way": way, "prompts": prompts, "max_tokens": max_tokens, "eos": NO_EOS} | sizes


def _piece(rng: Random, length: int) -> str:
    """Of a text of the workloads, from anywhere in it: the model is less sure in the middle of a word."""
    from servelab.llm.engine import workload

    text = rng.choice(workload("w32").texts)
    start = rng.randrange(len(text) - length)
    return text[start : start + length]


def _forks(rng: Random) -> list[str]:
    """A prompt whose last token lies early in a block, and others that go on in that block in their own ways."""
    prompt = _piece(rng, 11)
    while True:
        tails = [_piece(rng, length) for length in (4, 5)]
        if len({prompt[-1], *(tail[0] for tail in tails)}) == 3:
            return [prompt, *(prompt[:-1] + tail for tail in tails)]


def _stopping(rng: Random) -> dict:
    """Two prompts; one of them says the end-of-sequence token after a smaller and a larger token."""
    from servelab.llm.thread import plain_loop, tiny_model

    while True:
        asked = _asked(STOPS, "in turn", [_piece(rng, 6), _piece(rng, 6)], 8, block_size=4, num_blocks=8)
        answers = list(plain_loop(tiny_model(), _tokens(asked["prompts"]), 8).values())
        for eos in answers[0][2:6]:
            before = answers[0][: answers[0].index(eos)]
            if before and min(before) < eos < max(before) and eos not in answers[1]:
                return asked | {"eos": eos}


def _stopping_elsewhere(rng: Random) -> list[dict]:
    """The first token of an answer ends it; a token that stands in the prompt, and not in the answer, does not."""
    from servelab.llm.thread import plain_loop, tiny_model

    while True:
        asked = _asked(STOPS, "in turn", [_piece(rng, 7)], 4, block_size=4, num_blocks=4)
        prompts = _tokens(asked["prompts"])
        prompt, answer = prompts["r0"], plain_loop(tiny_model(), prompts, 4)["r0"]
        if others := sorted(set(prompt) - set(answer)):
            return [asked | {"eos": answer[0]}, asked | {"eos": rng.choice(others)}]


def _forking_later(rng: Random) -> dict:
    """A prompt whose answer is forked after two tokens, and what the fork goes on with: another second token."""
    from servelab.llm.thread import plain_loop, tiny_model

    while True:
        prompt = _piece(rng, 8)
        first, second = plain_loop(tiny_model(), _tokens([prompt]), 2)["r0"]
        other = rng.choice("aeinost")
        if first < 128 and ord(other) != second:
            return _asked(FORK, LATER, [prompt, f"{prompt}{chr(first)}{other}"], 6, block_size=4, num_blocks=8)


def _tokens(prompts: list[str]) -> dict[str, list[int]]:
    return {f"r{n}": list(prompt.encode()) for n, prompt in enumerate(prompts)}


def drive(asked: dict, *answers: Any) -> dict:
    """Serve the prompts with the tiny model in float64, and write down tokens, forward passes and what was held.

    Of an error only the part that it came from is written down: the learner has six of them here.
    """
    try:
        return _serve(asked, answers)
    except Unusable as error:
        return {"broke": str(error), "hint": error.hint}
    except NotImplementedError:
        raise
    except Exception as error:
        return {"broke": f"your code raised {describe_error(error)}{_origin(error)}"}


def _origin(error: Exception) -> str:
    """The last of the learner's parts that an error passed through."""
    names = [frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)]
    parts = [name for name in names if name.partition(".")[0] in ANSWERS]
    return f", in {parts[-1]}" if parts else ""


def _serve(asked: dict, answers: tuple) -> dict:
    from servelab.llm import thread

    served = _Served(asked, SimpleNamespace(**dict(zip(ANSWERS, answers, strict=True))))
    prompts, most = _tokens(asked["prompts"]), asked["max_tokens"]
    tables = {}
    if asked["way"] == "prefix-cached":
        got, _ = thread.prefix_cached(*served.parts, served.pool, prompts, most)
    elif asked["way"] == LATER:
        tables = {"the forked table": served.unit.ForkableTable(served.pool)}
        got = _forked_later(*served.parts, tables, prompts, most)
    elif asked["way"] == "forked":
        tables = {"the forked table": served.unit.ForkableTable(served.pool)}
        got = thread.forked(*served.parts, tables["the forked table"], prompts["r0"], prompts, most)
    else:
        tables = {id: served.unit.ForkableTable(served.pool) for id in prompts}
        got = thread.in_turn(*served.parts, tables, prompts, most)
    held = {id: [table.num_tokens, len(table.blocks)] for id, table in tables.items()}
    for table in tables.values():
        table.release()
    seen = {"passes": served.passes, "nexts": served.nexts, "starts": served.starts}
    kept = prompts == _tokens(asked["prompts"])
    return plain({"tokens": got, **seen, "held": held, "free": served.pool.num_free, "kept": kept})


def _forked_later(unit: Any, model: Any, pages: Any, tables: dict, prompts: dict[str, list[int]], most: int) -> dict:
    """The answers to a prompt and to another that forks from it after two tokens; the older one goes on first."""
    (older,), (first, other) = tables.values(), prompts
    going = iter(unit.generate(model, pages, older, prompts[first], most))
    got = {first: list(islice(going, 2)), other: []}
    tables["the fork"] = older.fork()
    turns = {first: going, other: iter(unit.generate(model, pages, tables["the fork"], prompts[other], most))}
    for _ in range(most):
        for id, tokens in turns.items():
            got[id] += islice(tokens, 1)
    return got


@cache
def _model() -> tuple:
    """Configuration and weights of the tiny model in float64, read once."""
    import torch

    from servelab.llm import load

    return load(dtype=torch.float64)


class _Served:
    """The tiny model on the learner's parts, watched."""

    def __init__(self, asked: dict, unit: SimpleNamespace):
        from servelab.llm import LLM
        from servelab.llm.kv import Pages

        class _CheckedPages(Pages):
            def bind(self, batch: Any) -> Any:
                if problem := _malformed(batch):
                    raise Unusable(problem, 2)
                return super().bind(batch)

        self.passes: list[dict] = []
        self.nexts: list[int] = []  # passes that the first `next` of each answer ran, and each later one
        self.starts: list[list[int]] = []  # of each answer: the tokens of its prompt, and those its table holds
        self._attended, self.unit, self._way = 0, unit, asked["way"]
        self._generate, self._attention = unit.generate, unit.paged_attention
        unit.generate, unit.paged_attention = self._limited, self._counted
        config, weights = _model()
        model = LLM(replace(config, eos_token_id=asked["eos"]), weights)
        model.forward = self._watched(model.forward)  # type: ignore[method-assign]
        sizes = asked["num_blocks"], asked["block_size"]
        self.pool = (unit.PrefixCache if asked["way"] == "prefix-cached" else unit.BlockAllocator)(*sizes)
        pages = _CheckedPages.of(model, *sizes, unit)
        for k_cache, v_cache in pages.caches:
            k_cache.fill_(float("nan")), v_cache.fill_(float("nan"))
        self.parts = unit, model, pages

    def _limited(self, model: Any, pages: Any, table: Any, tokens: list[int], most: int) -> Iterator:
        """The learner's `generate`, ended where it does not end by itself."""
        self.starts.append([len(tokens), table.num_tokens])
        if table.num_tokens >= len(tokens):
            raise Unusable(f"{_held(self._way, *self.starts[-1])}; then nothing is left to compute")
        before, going = len(self.passes), iter(self._generate(model, pages, table, tokens, most))
        for token in islice(going, most + 1):
            self.nexts.append(len(self.passes) - before)
            yield token
            before = len(self.passes)

    def _counted(self, *given: Any) -> Any:
        self._attended += 1
        out, due = self._attention(*given), given[0].dtype
        if getattr(out, "dtype", due) != due:
            raise Unusable(f"`paged_attention` returns {out.dtype} for a q of {due}; see exercise 6")
        return out

    def _watched(self, forward: Callable) -> Callable:
        """The model's `forward`, each pass of which is written down."""

        @wraps(forward)
        def watched(tokens: Any, positions: Any, kv: Any) -> Any:
            before = self._attended
            for name, given in (("tokens", tokens), ("positions", positions)):
                if not hasattr(given, "tolist"):
                    raise Unusable(f"`forward` needs {name} as a tensor, got {steps.shown(plain(given))}", 2)
            hidden = forward(tokens, positions, kv)
            layers, numbers = self._attended - before, bool(hidden.isfinite().all())
            self.passes.append({"positions": positions.tolist(), "layers": layers, "numbers": numbers})
            return hidden

        return watched


def _malformed(batch: Any) -> str:
    """What is wrong with the shapes of a batch of one request; without it the error would name an earlier part."""
    import torch

    rows = {"tokens": "[T]", "positions": "[T]", "slot_mapping": "[T]", "block_tables": "[1, W]"}
    for name, due in rows.items():
        given = getattr(batch, name, None)
        if not isinstance(given, torch.Tensor):
            return f"{name} of the FlatBatch must be a tensor {due}, got {steps.shown(plain(given))}"
        if given.dim() != 1 + (name == "block_tables") or (name == "block_tables" and len(given) != 1):
            return f"{name} of the FlatBatch must be {due}, got {list(given.shape)}"
        if given.is_floating_point():
            return f"{name} of the FlatBatch must hold int64, got {str(given.dtype).removeprefix('torch.')}"
    lengths = [len(getattr(batch, name)) for name in ("tokens", "positions", "slot_mapping")]
    if len(set(lengths)) > 1:
        return "a FlatBatch has {} tokens, {} positions and {} slots: one of each for a new token".format(*lengths)
    for name in ("query_lens", "context_lens"):
        given = plain(getattr(batch, name))
        if not isinstance(given, dict) and not (isinstance(given, list) and len(given) == 1):
            return f"{name} of the FlatBatch must be a list of one number, got {steps.shown(given)}"
    asked = plain(batch.query_lens)
    if isinstance(asked, list) and asked != lengths[:1]:
        return f"query_lens of the FlatBatch is {steps.shown(asked)}, and it has {lengths[0]} tokens"
    return ""


def _held(way: str, prompt: int, held: Any) -> str:
    """What a table holds before the first pass of an answer, and where that comes from."""
    whence = {
        "in turn": "it is new (exercise 2)",
        LATER: "the passes over its prompt and first token left it so, or `fork` did (exercise 3)",
        "forked": "the pass over the beginning of the prompt left it so, or `fork` did (exercise 3)",
        "prefix-cached": "so much has `match` found (exercise 4) of what earlier answers left in their tables",
    }
    return f"before its first pass a table holds {held} of the {prompt} tokens of its prompt: {whence[way]}"


def judge(asked: dict, transcript: dict, expected: dict) -> list[Case]:
    """Tokens, passes and room are determined."""
    if "broke" in transcript:  # what goes with the case itself stays unjudged
        return [Case(asked["case"], False, transcript["broke"], transcript.get("hint"))]
    found = {kind: (message, hint) for kind, message, hint in _problems(asked, transcript, expected)}
    names = (asked["case"], *ALSO.get(asked["case"], ()))
    return [_case(name, found) for name in names]


def _case(name: str, found: dict[str, tuple]) -> Case:
    problem, hint = next((found[kind] for kind in LOOKED_AT[name] if kind in found), ("", None))
    return Case(name, not problem, problem, hint)


def _problems(asked: dict, got: dict, want: dict) -> Iterator[tuple[str, str, int]]:
    """What is not as it should be: a kind, a message and a hint."""
    for now, due in zip(got["starts"], want["starts"], strict=False):
        if now != due:
            held = f"{steps.shown(now[1])}, not {due[1]},"
            yield "starts", _held(asked["way"], due[0], held), 3
            break
    if any(ran != 1 for ran in got["nexts"]):
        ran = next(ran for ran in got["nexts"] if ran != 1)
        yield "nexts", f"one `next` has to run one forward pass; here one runs {steps.shown(ran)}", 3
    for id, due in want["tokens"].items():
        if got["tokens"][id] != due:
            message, hint = _other_tokens(id, got, due)
            yield "tokens", message, 3 if asked["way"] in ("forked", LATER) else hint
            break
    if passes := _other_pass(got["passes"], want["passes"]):
        yield "passes", *passes
    for id, (tokens, blocks) in want["held"].items():
        if got["held"][id] != [tokens, blocks]:
            now, in_blocks = map(steps.shown, got["held"][id])
            room = f"at its end {id} has room for {now} tokens in {in_blocks} blocks, not {tokens} in {blocks}"
            yield "room", room, 3
            break
    else:
        if got["free"] != want["free"]:
            free = steps.shown(got["free"])
            left = "see `free`, `release` and `append` of exercises 1 to 4"
            yield "room", f"after all tables were released {free} blocks are free, not {want['free']}; {left}", 3
    if got["kept"] is not True:
        yield "kept", "the tokens that were handed over have changed; they stay the caller's", 1


def _other_tokens(id: str, ran: dict, due: list[int]) -> tuple[str, int]:
    """Where an answer leaves that of the plain loop."""
    got = ran["tokens"][id]
    at = next((n for n, pair in enumerate(zip(got, due, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"{id}: the plain loop gives {len(due)} tokens, you give {len(got)}", 3
    if not isinstance(got[at], int):
        return f"{id}: token {at} is {steps.shown(got[at])}; yield an int", 2
    same = f", after {at} that are right" if at else ""
    message = f"{id}: token {at} is {steps.shown(got[at])}; the plain loop says {due[at]} ({bytes([due[at]])!r}){same}"
    lost = next((n for n, done in enumerate(ran["passes"]) if done["numbers"] is not True), None)
    if lost is not None:
        causes = "a wrong slot, a copy that was not made, or exercise 6"
        message += f". Pass {lost} gives NaN: attention takes in a slot that nobody has written ({causes}), or none"
    return message, 2


def _other_pass(got: list, due: list) -> tuple[str, int] | None:
    """The first forward pass that is another than it should be."""
    for at, (now, then) in enumerate(zip(got, due, strict=False)):
        if now["positions"] != then["positions"]:
            message = f"pass {at} should compute {_span(then['positions'])}, and computes {_span(now['positions'])}"
            return message, 1 if len(now["positions"]) != len(then["positions"]) else 2
        if now["layers"] != then["layers"]:
            layers = f"{now['layers']} times, not once for each of {then['layers']} layers"
            return f"in pass {at} attention reads the pages {layers}", 2
    return None if len(got) == len(due) else (f"expected {len(due)} forward passes, got {len(got)}", 1)


def _span(positions: Any) -> str:
    listed = steps.shown(positions)
    return f"positions {listed}" if isinstance(positions, list) and len(positions) != 1 else f"position {listed[1:-1]}"


def show(asked: dict) -> str:
    """The run as Python."""
    names = ", ".join(ANSWERS)
    lead = "from servelab.exercises.paged_kv.token_exact import play  # shows the traceback of an error, too"
    return f"{lead}\n\nplay({asked!r},\n     {names})"


def play(asked: dict, *answers: Any) -> None:
    """Serve the prompts of a challenge; print each answer, the plain loop's, and what each forward pass computed."""
    from servelab.llm import LLM
    from servelab.llm.thread import plain_loop

    ran, (config, weights) = _serve(asked, answers), _model()
    due = plain_loop(
        LLM(replace(config, eos_token_id=asked["eos"]), weights), _tokens(asked["prompts"]), asked["max_tokens"]
    )
    for id, prompt in _tokens(asked["prompts"]).items():
        print(f"{id}: {bytes(prompt)!r} -> {ran['tokens'][id]}; the plain loop: {due[id]}")
    for number, done in enumerate(ran["passes"]):
        print(f"pass {number}: {_span(done['positions'])}")
