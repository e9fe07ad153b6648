"""The prefix cache: a block pool that remembers what its blocks hold, also after their last holder has left.

A run has *holders*, named by a letter, each with a list of blocks. Operations:

- ``["match", holder, tokens, key]``: the holder's blocks are those that ``match`` returned;
- ``["allocate", holder, n]``: ``n`` more blocks for the holder;
- ``["admit", holder, tokens, key]``: what a scheduler does: ``match``, then ``allocate`` the blocks that the rest of
  the prompt needs, and if that fails ``free`` the blocks of the hit;
- ``["insert", tokens, names, key]``, ``["share", names]``, ``["free", names]``, ``["ref_count", block]``;
- ``["finish", holder]``: ``free`` all its blocks, in the order of its table; the holder has none then;
- ``["another"]``: make a second cache, of which nothing is asked.

A name is a holder (all its blocks), ``[holder, i]``, or a number: an id that no pool can have given.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.paged_kv import _steps as steps
from servelab.exercises.paged_kv._prefix_scenarios import DIRECTED
from servelab.listing import IF_RAISED

ANSWERS = ("PrefixCache",)
CASES = (
    CaseSpec("keeps the rules of a pool", hint=1, weight=1),
    CaseSpec("finds cached prefixes", hint=2, weight=3),
    CaseSpec("refuses misuse", hint=1, weight=1),
    CaseSpec("caches full blocks only", hint=2, weight=1),
    CaseSpec("leaves the last token to compute", hint=2, weight=2),
    CaseSpec("revives cached blocks", hint=3, weight=2),
    CaseSpec("forgets what it hands out", hint=3, weight=2),
    CaseSpec("evicts the least recently used", hint=3, weight=3),
    CaseSpec("tells prompts apart", hint=2, weight=3),
    CaseSpec("keeps keys apart", hint=2, weight=1),
    CaseSpec("a failed allocation changes nothing", hint=1, weight=2),
    CaseSpec("lives with duplicates", hint=3, weight=1),
    CaseSpec(steps.UNCHANGED, hint=1, weight=1),
    CaseSpec("long runs", hint=3, weight=2),
)


def challenges(rng: Random) -> list[dict]:
    """Directed cases, then random runs of requests that share prompts, on a pool under pressure."""
    directed = [
        {"case": case, "num_blocks": blocks, "block_size": size, "ops": ops} for case, blocks, size, ops in DIRECTED
    ]
    sizes = ((1, 4, 12), (2, 5, 16), (1, 7, 65), (2, 12, 65), (3, 20, 65))
    return [*directed, *(_random_run(rng, *run) for run in sizes)]


def _random_run(rng: Random, block_size: int, num_blocks: int, length: int) -> dict:
    """Requests come, register what they computed, grow by a token, and leave; a vocabulary of three tokens."""
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 3) * block_size)] for _ in range(3)]
    running: dict[str, tuple[list[int], str | None]] = {}
    ops: list[list] = []
    for number in range(length):
        choice = rng.random()
        if not running or choice < 0.3:
            name, key = f"r{number}", rng.choice([None, None, "blue"])
            tokens = [*rng.choice(prompts), *(rng.randrange(3) for _ in range(rng.randint(0, 2 * block_size)))]
            running[name] = tokens, key
            ops.append(["admit", name, tokens, key])
            continue
        name = rng.choice(list(running))
        tokens, key = running[name]
        if choice < 0.6:
            ops.append(["insert", tokens[: rng.randint(0, len(tokens)) if choice < 0.4 else len(tokens)], [name], key])
        elif choice < 0.7:
            ops.append(["allocate", name, 1])
        else:
            ops.append(["finish", name])
            del running[name]
    return {"case": "long runs", "num_blocks": num_blocks, "block_size": block_size, "ops": ops}


def _resolve(names: list, tables: dict[str, list[int]]) -> list[int]:
    blocks: list[int] = []
    for name in names:
        if isinstance(name, int):
            blocks.append(name)
        else:
            blocks += tables.get(name, []) if isinstance(name, str) else [tables[name[0]][name[1]]]
    return blocks


class _Run:
    """A run on the learner's cache: who holds which blocks, and the outcome of every call."""

    def __init__(self, cache, block_size: int, make: Callable):
        self.cache, self.block_size, self.make = cache, block_size, make
        self.tables: dict[str, list[int]] = {}

    def call(self, method: str, *arguments) -> dict:
        return steps.attempt(lambda *given: getattr(self.cache, method)(*given), *arguments)

    def match(self, holder: str, tokens: list[int], key: str | None) -> list[dict]:
        outcome = self.call("match", list(tokens), *([] if key is None else [key]))
        match outcome:
            case {"returned": [[*blocks], _]}:
                self.tables[holder] = blocks
            case _:  # for the judge to see
                self.tables[holder] = []
        return [outcome]

    def allocate(self, holder: str, n: int) -> list[dict]:
        outcome = self.call("allocate", n)
        if isinstance(outcome.get("returned"), list):
            self.tables.setdefault(holder, []).extend(outcome["returned"])
        return [outcome]

    def admit(self, holder: str, tokens: list[int], key: str | None) -> list[dict]:
        calls = self.match(holder, tokens, key)
        calls += self.allocate(holder, -(-len(tokens) // self.block_size) - len(self.tables[holder]))
        if "raised" in calls[-1]:
            calls += self.finish(holder)
        return calls

    def finish(self, holder: str) -> list[dict]:
        return [self.call("free", self.tables.pop(holder, []))]

    def insert(self, tokens: list[int], names: list, key: str | None) -> list[dict]:
        blocks = _resolve(names, self.tables)
        return [self.call("insert", tokens, blocks, *([] if key is None else [key]))]

    def share(self, names: list) -> list[dict]:
        return [self.call("share", _resolve(names, self.tables))]

    def free(self, names: list) -> list[dict]:
        return [self.call("free", _resolve(names, self.tables))]

    def ref_count(self, block: int) -> list[dict]:
        return [self.call("ref_count", block)]

    def another(self) -> list[dict]:
        return [steps.attempt(lambda: self.make() is not None)]


def drive(challenge: dict, cache_class) -> list[dict]:
    """Run the operations and write down the outcome of each call and what the pool then says about itself."""
    make = partial(cache_class, challenge["num_blocks"], challenge["block_size"])
    cache = make()
    run = _Run(cache, challenge["block_size"], make)
    transcript = [steps.pool_state(cache, challenge["num_blocks"])]
    for name, *arguments in challenge["ops"]:
        try:
            calls = getattr(run, name)(*arguments)
        except (IndexError, KeyError, TypeError):  # an earlier call went wrong: the judge stops there
            break
        transcript.append({"calls": calls} | steps.pool_state(cache, challenge["num_blocks"]))
    return transcript


@dataclass
class Content:
    """Tokens after a beginning, under a key: what one full block can hold.

    ``certain`` is whether every sound cache finds it. Some know the first of several copies only, some the newest: once
    one of these has been handed out, or one of the block before it, a miss is as good as a hit.
    """

    children: list["Content"] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    relied_on: list[int] = field(default_factory=list)  # the first copy, then whichever a cache may take for the newest
    lost: bool = False  # by caches that forget what follows a block with it

    @property
    def certain(self) -> bool:
        return not self.lost and set(self.relied_on) <= set(self.blocks)

    def add(self, block: int) -> None:
        """The block holds this now."""
        first, *newest = self.relied_on or [block]
        known = block in self.blocks
        self.blocks += [] if known else [block]
        if len(self.blocks) == 1:
            self.relied_on, self.lost = [block, block], False
        else:
            self.relied_on = [first if first in self.blocks else block, *(newest if known else []), block]

    def drop(self, block: int) -> None:
        """The block is handed out."""
        self.blocks.remove(block)
        if not self.blocks:
            self.relied_on, self.lost = [], False
        if not self.blocks or block in self.relied_on:
            for child in self.children:
                child.lose()

    def lose(self) -> None:
        """A block before it was handed out."""
        self.lost = bool(self.blocks)
        for child in self.children:
            child.lose()


class Referee:
    """The rules of a prefix cache: who holds each block, what it holds, and since when nobody holds it."""

    def __init__(self, challenge: dict):
        self.challenge, self.block_size = challenge, challenge["block_size"]
        self.holders = [0] * challenge["num_blocks"]
        self.content: dict[int, Content] = {}
        self.known: dict[tuple, Content] = {}
        self.left: dict[int, tuple[int, int]] = {}  # when the last holder left: earlier is evicted first
        self.tables: dict[str, list[int]] = {}
        self.now, self.where = 0, ""
        self.lines = iter(enumerate(_lines(challenge), start=1))
        self.outcomes: Iterator[dict] = iter(())

    def follow(self, transcript: list) -> None:
        """Follow a run. Raises `Broken` at the first step that breaks a rule."""
        steps.require_state(f"after {_made(self.challenge)}", self.holders, steps.entry(transcript, 0))
        for now, (name, *arguments) in enumerate(self.challenge["ops"], start=1):
            outcome = steps.entry(transcript, now)
            self.now, self.outcomes = now, iter(outcome["calls"])
            getattr(self, name)(*arguments)
            steps.require_state(f"after {self.where}", self.holders, outcome)
            if self.challenge["case"] == steps.UNCHANGED:
                for call in outcome["calls"]:
                    steps.require_unchanged(self.where, call)

    def next_call(self, blocks: list[int] | None = None) -> tuple[str, dict]:
        """The next line of the listing, with the ids that a name in it stands for, and its outcome."""
        step, line = next(self.lines)
        self.where = steps.step(step, line, blocks)
        return self.where, next(self.outcomes)

    def path(self, tokens: list[int], key: str | None) -> list[Content]:
        """The contents of the full blocks of ``tokens``."""
        path, parent = [], None
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            name = id(parent), tuple(tokens[end - self.block_size : end]), key
            if name not in self.known:
                self.known[name] = Content()
                if parent:
                    parent.children.append(self.known[name])
            parent = self.known[name]
            path.append(parent)
        return path

    def match(self, holder: str, tokens: list[int], key: str | None) -> None:
        where, outcome = self.next_call()
        path = self.path(tokens[:-1], key)
        live = next((i for i, content in enumerate(path) if not content.blocks), len(path))
        certain = next((i for i, content in enumerate(path[:live]) if not content.certain), live)
        due = " or ".join(map(str, dict.fromkeys((certain, live))))
        expected = f"{where}: expected a hit of {due} {'block' if due == '1' else 'blocks'}"
        blocks, n_tokens = self.pair(expected, outcome)
        if not (steps.are_ids(blocks) and certain <= len(blocks) <= live):
            raise steps.Broken(f"{expected}{steps.found(blocks, 'a list of int')}")
        for position, (block, content) in enumerate(zip(blocks, path, strict=False)):
            if block not in content.blocks:
                due = " or ".join(map(str, content.blocks))
                raise steps.Broken(f"{where}: expected block {due} at position {position} of the hit, got {block}")
        steps.require(f"{where}: n_tokens", len(blocks) * self.block_size, n_tokens)
        self.tables[holder] = list(blocks)
        for block in blocks:
            self.holders[block] += 1

    def pair(self, expected: str, outcome: dict) -> tuple[Any, Any]:
        """The two things that a ``match`` returned; ``expected`` says where and what it had to find."""
        returned = outcome.get("returned")
        if not (isinstance(returned, list) and len(returned) == 2 and not isinstance(returned[0], int)):
            due = "" if "raised" in outcome else " as a pair (blocks, n_tokens)"
            raise steps.Broken(f"{expected}{due}{steps.instead(outcome, 'a pair')}")
        return returned[0], returned[1]

    def allocate(self, holder: str, n: int) -> None:
        where, outcome = self.next_call()
        free = [block for block, count in enumerate(self.holders) if not count]
        if n < 0:
            steps.require_raised(where, "ValueError", outcome)
        elif n > len(free):
            steps.require_raised(where, "OutOfBlocks", outcome)
        else:
            got = steps.require_granted(where, n, free, outcome)
            self.require_eviction_order(where, free, set(got))
            self.tables.setdefault(holder, []).extend(got)
            for block in got:
                self.forget(block)
                self.holders[block] = 1

    def require_eviction_order(self, where: str, free: list[int], got: set[int]) -> None:
        cached = sorted((block for block in free if self.is_cached(block)), key=self.left.__getitem__)
        evicted = [block for block in cached if block in got]
        spared = [block for block in free if block not in self.content and block not in got]
        if evicted and spared:
            raise steps.Broken(f"{where}: expected uncached block {spared[0]} to go first, got {sorted(got)}")
        due = cached[: len(evicted)]
        if evicted != due:
            raise steps.Broken(f"{where}: expected {due} to be evicted, least recently used first, got {evicted}")

    def is_cached(self, block: int) -> bool:
        """Whether every sound cache still has what the block holds."""
        content = self.content.get(block)
        return content is not None and content.certain and len(content.blocks) == 1

    def forget(self, block: int) -> None:
        """The block is handed out: what it held is gone, and what hangs on it may be."""
        content = self.content.pop(block, None)
        if content is not None:
            content.drop(block)

    def insert(self, tokens: list[int], names: list, key: str | None) -> None:
        blocks, path = _resolve(names, self.tables), self.path(tokens, key)
        where, outcome = self.next_call(blocks)
        if len(blocks) < len(path) or not self.are_held(blocks):
            return steps.require_raised(where, "ValueError", outcome)
        steps.require_done(where, outcome)
        for block, content in zip(blocks, path, strict=False):
            self.content[block] = content
            content.add(block)

    def share(self, names: list) -> None:
        blocks = _resolve(names, self.tables)
        where, outcome = self.next_call(blocks)
        if not self.are_held(blocks, or_cached=True):
            return steps.require_raised(where, "ValueError", outcome)
        steps.require_done(where, outcome)
        for block in blocks:
            self.holders[block] += 1

    def free(self, names: list) -> None:
        blocks = _resolve(names, self.tables)
        self.leave(blocks, *self.next_call(blocks))

    def finish(self, holder: str) -> None:
        blocks = self.tables.pop(holder, [])
        self.leave(blocks, *self.next_call(blocks))

    def leave(self, blocks: list[int], where: str, outcome: dict) -> None:
        if not self.are_held(blocks):
            return steps.require_raised(where, "ValueError", outcome)
        steps.require_done(where, outcome)
        for position, block in enumerate(blocks):
            self.holders[block] -= 1
            self.left[block] = self.now, -position

    def are_held(self, blocks: list[int], or_cached: bool = False) -> bool:
        exist = len(set(blocks)) == len(blocks) and all(0 <= block < len(self.holders) for block in blocks)
        return exist and all(self.holders[block] or (or_cached and self.is_cached(block)) for block in blocks)

    def admit(self, holder: str, tokens: list[int], key: str | None) -> None:
        self.match(holder, tokens, key)
        needed = -(-len(tokens) // self.block_size) - len(self.tables[holder])
        possible = needed <= self.holders.count(0)
        self.allocate(holder, needed)
        if not possible:
            hit = self.tables.pop(holder)
            self.leave(hit, f"{self.where}: cache.free({holder}) with blocks {hit}", next(self.outcomes))

    def ref_count(self, block: int) -> None:
        where, outcome = self.next_call()
        steps.require_ref_count(where, self.holders, block, outcome)

    def another(self) -> None:
        steps.require_done(*self.next_call())


def judge(challenge: dict, transcript: list, expected: list) -> list[Case]:
    """Follow the run with a model of the rules: any choice of ids is right, and any sound way with duplicates."""
    found = steps.judged(challenge, Referee(challenge).follow, transcript)
    raised = challenge["case"] == "lives with duplicates" and any("your code raised" in case.message for case in found)
    return [replace(case, hint=3) for case in found] if raised else found


def show(challenge: dict) -> str:
    """The run as Python; a holder's letter names the list of its blocks."""
    return steps.listing([f"cache = {_made(challenge)}"], _lines(challenge))


def _made(challenge: dict) -> str:
    return f"PrefixCache(num_blocks={challenge['num_blocks']}, block_size={challenge['block_size']})"


def _lines(challenge: dict) -> list[str]:
    lines: list[str] = []
    held: set[str] = set()
    for name, *arguments in challenge["ops"]:
        made = [f"another = {_made(challenge)}"]
        lines += made if name == "another" else _as_python(name, arguments, challenge["block_size"], held)
    return lines


def _as_python(name: str, arguments: list, block_size: int, held: set[str]) -> list[str]:
    if name in ("match", "admit"):
        holder, tokens, key = arguments
        held.add(holder)
        call = [f"{holder}, n_tokens = cache.match({tokens}{_key(key)})"]
        rest = f"{holder} += cache.allocate({-(-len(tokens) // block_size)} - len({holder}))"
        return call + ([f"{rest}  # {IF_RAISED}cache.free({holder})"] if name == "admit" else [])
    if name == "allocate":
        holder, n = arguments
        sign = "+=" if holder in held else "="
        held.add(holder)
        return [f"{holder} {sign} cache.allocate({n})"]
    if name == "finish":
        held.discard(arguments[0])
        return [f"cache.free({arguments[0]})"]
    if name == "insert":
        tokens, names, key = arguments
        return [f"cache.insert({tokens}, {_names(names)}{_key(key)})"]
    return [f"cache.{name}({arguments[0] if name == 'ref_count' else _names(arguments[0])})"]


def _key(key: str | None) -> str:
    return "" if key is None else f", key={key!r}"


def _names(names: list) -> str:
    if len(names) == 1 and isinstance(names[0], str):
        return names[0]
    parts = [n if isinstance(n, str) else str(n) if isinstance(n, int) else f"{n[0]}[{n[1]}]" for n in names]
    return " + ".join(parts) if all(isinstance(n, str) for n in names) and parts else f"[{', '.join(parts)}]"
