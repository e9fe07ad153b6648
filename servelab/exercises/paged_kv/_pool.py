"""A scripted block pool: what a table is driven with, so that its check does not rest on the learner's own allocator.

It hands out ids in an order that the challenge gives and counts holders. It refuses nothing but to run out: it shows a
table's mistakes to the judge and does not pass the check of the allocator itself.
"""

from collections import Counter
from collections.abc import Sequence

from servelab.kv import OutOfBlocks


class ScriptedPool:
    """Hands out ``ids`` in order; an id that its last holder gives back goes to the end of the script."""

    def __init__(self, ids: Sequence[int], block_size: int):
        self.num_blocks, self.block_size = len(ids), block_size
        self._script, self._holders = list(ids), Counter(dict.fromkeys(ids, 0))

    @property
    def num_free(self) -> int:
        return len(self._script)

    def ref_count(self, block: int) -> int:
        return self._holders[block]

    def allocate(self, n: int) -> list[int]:
        if n > len(self._script):
            raise OutOfBlocks(f"{n} blocks asked for, {len(self._script)} free")
        taken, self._script = self._script[:n], self._script[n:]
        self._holders.update(taken)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        self._holders.update(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        blocks = list(blocks)
        self._holders.subtract(blocks)
        self._script += [block for block in blocks if self._holders[block] == 0]

    def holders(self) -> dict[str, int]:
        """How many hold each block, for the transcript; negative where it was given back too often."""
        return {str(block): count for block, count in sorted(self._holders.items()) if count}
