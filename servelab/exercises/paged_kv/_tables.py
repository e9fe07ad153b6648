"""Runs of block tables over a scripted pool, and the rules by which they are judged: for `block_table` and `fork`.

A run starts with ``tables`` empty tables; an operation is ``[name, table, *arguments]``, and ``fork`` adds a table.
"""

from collections import Counter
from collections.abc import Callable

from servelab.exercises.paged_kv import _steps as steps
from servelab.exercises.paged_kv._pool import ScriptedPool


class Run:
    """A run of the learner's tables: carried out, and written down."""

    def __init__(self, challenge: dict, table_class):
        self.pool = ScriptedPool(challenge["ids"], challenge["block_size"])
        self.tables = [table_class(self.pool) for _ in range(challenge["tables"])]
        self.ops = challenge["ops"]

    def transcript(self, written: Callable = lambda table, n_tokens, copies: None) -> list[dict]:
        """Run the operations; ``written(table, n_tokens, copies)`` is called after every append that succeeded."""
        entries = [self._state()]
        for name, index, *arguments in self.ops:
            if index >= len(self.tables):  # an earlier fork went wrong: the judge stops there
                break
            outcome = steps.attempt(self._fork if name == "fork" else self._call, name, index, arguments)
            if name == "append" and "returned" in outcome:
                written(self.tables[index], arguments[0], outcome["returned"])
            entries.append(outcome | self._state())
        return entries

    def _call(self, name: str, index: int, arguments: list):
        return getattr(self.tables[index], name)(*arguments)

    def _fork(self, name: str, index: int, arguments: list) -> None:
        self.tables.append(self.tables[index].fork())

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

    def follow(self, transcript: list) -> None:
        """Follow a run. Raises `Broken` at the first step that breaks a rule."""
        self.require_state("new tables", steps.entry(transcript, 0))
        for step, (name, index, *arguments) in enumerate(self.challenge["ops"], start=1):
            outcome = steps.entry(transcript, step)
            where = f"step {step}, t{index}.{name}({', '.join(map(str, arguments))})"
            getattr(self, name)(where, outcome, index, *arguments)
            self.require_state(f"after {where}", outcome)

    def require_state(self, where: str, outcome: dict) -> None:
        for index, (table, got) in enumerate(zip(self.tables, outcome["tables"], strict=False)):
            steps.require(f"{where}: t{index}.blocks", table["blocks"], got["blocks"])
            steps.require(f"{where}: t{index}.num_tokens", table["num_tokens"], got["num_tokens"])
        steps.require(f"{where}: number of tables", len(self.tables), len(outcome["tables"]))
        holders = {str(block): count for block, count in sorted(self.holders().items())}
        steps.require(f"{where}: holders of each block", holders, outcome["holders"])

    def holders(self) -> Counter:
        return Counter(block for table in self.tables for block in table["blocks"])

    def append(self, where: str, outcome: dict, index: int, n_tokens: int) -> None:
        table, holders = self.tables[index], self.holders()
        blocks, tokens = table["blocks"], table["num_tokens"]
        if n_tokens < 0:
            return steps.require_raised(where, "ValueError", outcome)
        copied = int(n_tokens > 0 and tokens % self.block_size > 0 and holders[blocks[-1]] > 1)
        new = -(-(tokens + n_tokens) // self.block_size) - len(blocks)
        free = [block for block in self.challenge["ids"] if not holders[block]]
        if copied + new > len(free):
            return steps.require_raised(where, "OutOfBlocks", outcome)
        steps.require_done(where, outcome)
        kept, got = blocks[: len(blocks) - copied], outcome["tables"][index]["blocks"]
        taken = got[len(kept) :] if steps.are_ids(got) and got[: len(kept)] == kept else None
        if taken is None or len(taken) != copied + new or not set(taken) <= set(free):
            due = f"{blocks}" + (f" with a copy of {blocks[-1]} in its place" if copied else "")
            due += f" and {new} more" if new else ""
            raise steps.Broken(f"after {where}: expected t{index}.blocks to be {due}, got {str(got)[:200]}")
        steps.require_returned(where, [[blocks[-1], taken[0]]] if copied else [], outcome)
        self.tables[index] = {"blocks": got, "num_tokens": tokens + n_tokens}

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
        self.tables.append(self.tables[index] | {"blocks": list(self.tables[index]["blocks"])})


def show(challenge: dict, table_class: str) -> str:
    """The run as Python."""
    ids, size = challenge["ids"], challenge["block_size"]
    lines = [f"pool = ...  # block_size={size}; hands out {ids}, in this order"]
    lines += [f"t{i} = {table_class}(pool)" for i in range(challenge["tables"])]
    count = challenge["tables"]
    for name, index, *arguments in challenge["ops"]:
        call = f"t{index}.{name}({', '.join(map(str, arguments))})"
        lines.append(f"t{count} = {call}" if name == "fork" else call)
        count += name == "fork"
    return "\n".join(lines)
