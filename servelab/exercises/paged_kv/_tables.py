"""Runs of block tables over a scripted pool, and the rules by which they are judged: for `block_table` and `fork`.

A run starts with ``tables`` empty tables; an operation is ``[name, table, *arguments]``, and ``fork`` adds a table.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from servelab.exercises.paged_kv import _steps as steps
from servelab.exercises.paged_kv._pool import ScriptedPool
from servelab.plain import type_name


class Misjudged(steps.Broken):
    """A last block was written into although others hold it, or something else was wrong about when to copy."""


class Needless(Misjudged):
    """Blocks were copied without need."""


class Run:
    """A run of the learner's tables: carried out, and written down."""

    def __init__(self, challenge: dict, table_class):
        self.pool = ScriptedPool(challenge["ids"], challenge["block_size"])
        self.tables = [table_class(self.pool) for _ in range(challenge["tables"])]
        self.ops = challenge["ops"]

    def transcript(self, written: Callable = lambda table, n_tokens, copies: {}) -> list[dict]:
        """Run the operations; ``written(table, n_tokens, copies)`` adds to the entry of an append that succeeded."""
        entries = [self._state()]
        for name, index, *arguments in self.ops:
            if index >= len(self.tables):  # an earlier fork went wrong: the judge stops there
                break
            outcome = steps.attempt(self._fork if name == "fork" else self._call, name, index, arguments)
            if name == "append" and "returned" in outcome:
                outcome |= written(self.tables[index], arguments[0], outcome["returned"])
            entries.append(outcome | self._state())
        return entries

    def _call(self, name: str, index: int, arguments: list):
        return getattr(self.tables[index], name)(*arguments)

    def _fork(self, name: str, index: int, arguments: list) -> str | None:
        """Go on with the fork; if it is no table that can be forked, return what it is."""
        child = self.tables[index].fork()
        if not hasattr(child, "fork"):
            return "None" if child is None else type_name(child)
        self.tables.append(child)
        return None

    def _state(self) -> dict:
        contents = [
            {"blocks": steps.value(getattr, table, "blocks"), "num_tokens": steps.value(getattr, table, "num_tokens")}
            for table in self.tables
        ]
        return {"tables": contents, "holders": self.pool.holders()}


class Referee:
    """The rules of block tables: what each holds, and so how many hold each block."""

    def __init__(self, challenge: dict):
        self.challenge, self.block_size = challenge, challenge["block_size"]
        self.tables: list[dict] = [{"blocks": [], "num_tokens": 0} for _ in range(challenge["tables"])]
        self.copies = 0  # appends so far that had to copy

    def follow(self, transcript: list) -> None:
        """Follow a run. Raises `Broken` at the first step that breaks a rule."""
        self.require_state("new tables", steps.entry(transcript, 0))
        for step, ((name, index, *arguments), line) in enumerate(
            zip(self.challenge["ops"], lines(self.challenge), strict=True), start=1
        ):
            outcome, where = steps.entry(transcript, step), steps.step(step, line)
            getattr(self, name)(where, outcome, index, *arguments)
            self.require_state(f"after {where}", outcome)

    def require_state(self, where: str, outcome: dict) -> None:
        for index, (table, got) in enumerate(zip(self.tables, outcome["tables"], strict=True)):
            steps.require(f"{where}: t{index}.blocks", table["blocks"], got["blocks"])
            steps.require(f"{where}: t{index}.num_tokens", table["num_tokens"], got["num_tokens"])
        due, got = {str(block): count for block, count in self.holders().items()}, outcome["holders"]
        for block in sorted({*due, *got}, key=lambda block: (len(block), block)):
            expected = due.get(block, 0)
            steps.require(f"{where}: the pool's ref_count({block})", expected, got.get(block, 0))

    def holders(self) -> Counter:
        return Counter(block for table in self.tables for block in table["blocks"])

    def append(self, where: str, outcome: dict, index: int, n_tokens: int) -> None:
        table, holders = self.tables[index], self.holders()
        blocks, tokens = table["blocks"], table["num_tokens"]
        if n_tokens < 0:
            return steps.require_raised(where, "ValueError", outcome, steps.shown_pairs)
        copied = int(n_tokens > 0 and tokens % self.block_size > 0 and holders[blocks[-1]] > 1)
        new = -(-(tokens + n_tokens) // self.block_size) - len(blocks)
        free = [block for block in self.challenge["ids"] if not holders[block]]
        if copied + new > len(free):
            return steps.require_raised(where, "OutOfBlocks", outcome, steps.shown_pairs)
        self.copies += copied
        steps.require_done(where, outcome)
        got = outcome["tables"][index]["blocks"]
        self.require_taken(f"after {where}: t{index}.blocks", blocks, got, copied, new, free)
        copies = [[blocks[-1], got[len(blocks) - 1]]] if copied else []
        steps.require_returned(where, copies, outcome, steps.shown_pairs)
        self.tables[index] = {"blocks": got, "num_tokens": tokens + n_tokens}

    def require_taken(self, where: str, blocks: list[int], got: Any, copied: int, new: int, free: list[int]) -> None:
        """Stop the run unless ``got`` is the old blocks, the last one replaced if ``copied``, and ``new`` free ones."""
        kept = blocks[: len(blocks) - copied]
        due = [f"{steps.shown(kept)} as before"] if kept else []
        due += [f"block {blocks[-1]} to be replaced by a fresh one"] if copied else []
        due += [f"{new} more"] if new else []
        message = f"{where}: expected {' and '.join(due) or '[]'}{steps.found(got, 'a list of int')}"
        if not steps.are_ids(got):
            raise steps.Broken(message)
        taken = got[len(kept) :]
        if got[: len(kept)] != kept or len(taken) != copied + new or not set(taken) <= set(free):
            stayed = got[: len(blocks)] == blocks
            one_replaced = got[: len(blocks) - 1] == blocks[:-1] and bool(blocks)
            more_replaced = len(got) == len(blocks) + new and not set(kept) <= set(got)
            if copied and stayed:
                raise Misjudged(message)
            raise (Needless if (more_replaced if copied else one_replaced and not stayed) else steps.Broken)(message)

    def slots(self, where: str, outcome: dict, index: int, start: int, stop: int) -> None:
        table = self.tables[index]
        if not 0 <= start <= stop <= table["num_tokens"]:
            return steps.require_raised(where, "ValueError", outcome)
        size = self.block_size
        flat = [table["blocks"][position // size] * size + position % size for position in range(start, stop)]
        steps.require_returned(where, flat, outcome)

    def release(self, where: str, outcome: dict, index: int) -> None:
        steps.require_done(where, outcome)
        self.tables[index] = {"blocks": [], "num_tokens": 0}

    def fork(self, where: str, outcome: dict, index: int) -> None:
        steps.require_done(where, outcome)
        if outcome["returned"] is not None:
            raise steps.Broken(f"{where}: expected a ForkableTable, got {str(outcome['returned'])[:40]}")
        self.tables.append(self.tables[index] | {"blocks": list(self.tables[index]["blocks"])})


def show(challenge: dict, table_class: str) -> str:
    """The run as Python."""
    given = [
        "from servelab.exercises.paged_kv._pool import ScriptedPool",
        f"pool = ScriptedPool({challenge['ids']}, block_size={challenge['block_size']})  # gives ids in this order",
    ]
    given += [f"t{i} = {table_class}(pool)" for i in range(challenge["tables"])]
    return steps.listing(given, lines(challenge))


def lines(challenge: dict) -> list[str]:
    """One line of Python for each operation."""
    calls, count = [], challenge["tables"]
    for name, index, *arguments in challenge["ops"]:
        call = f"t{index}.{name}({', '.join(map(str, arguments))})"
        calls.append(f"t{count} = {call}" if name == "fork" else call)
        count += name == "fork"
    return calls
