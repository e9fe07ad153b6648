"""What a scheduler is given and what it gives back: requests, limits, step plans, and the KV memory of a server.

Counts of a request: a prompt of P tokens and an answer of n tokens take n steps (the last piece of the prompt gives the
first token). The last token is never fed back, so at most P + n - 1 tokens are in the KV cache.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from servelab.kv import OutOfBlocks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One request as the scheduler knows it: how long the answer will be is not known, only its limit.

    Parameters
    ----------
    id : str
        Unique among the requests that are not finished.
    prompt_tokens : int
        Tokens of the prompt, at least 1.
    max_tokens : int
        The answer ends after so many tokens, if the end-of-sequence token (EOS) does not come first; at least 1.
    arrival : float
        Seconds.
    priority : int
        The smaller, the more urgent.
    """

    id: str
    prompt_tokens: int
    max_tokens: int
    arrival: float = 0.0
    priority: int = 0

    def __post_init__(self):
        if self.prompt_tokens < 1 or self.max_tokens < 1:
            raise ValueError(f"{self}: expected prompt_tokens and max_tokens of at least 1")


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of a step.

    Parameters
    ----------
    max_num_seqs : int
        Requests that may run at the same time, at least 1.
    max_num_batched_tokens : int
        The token budget: tokens of a step over all requests, at least ``max_num_seqs``.
    watermark_blocks : int
        Blocks that an admission must leave free, unless nothing runs.
    eos_token_id : int
        The token that ends an answer. It counts as a token of the answer.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    watermark_blocks: int = 0
    eos_token_id: int = 2

    def __post_init__(self):
        if self.max_num_seqs < 1 or self.watermark_blocks < 0:
            raise ValueError(f"{self}: expected max_num_seqs of at least 1, watermark_blocks of at least 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(f"{self}: a budget below max_num_seqs leaves some of the running without a token")


@dataclass
class StepPlan:
    """What the next step computes: how many tokens of which request; and who lost their KV to make room."""

    scheduled: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step over all requests."""
        return sum(self.scheduled.values())


@dataclass(frozen=True)
class FlatBatch:
    """The tokens of a step, one request behind another, as unit 03's `write_kv` and `paged_attention` take them.

    Parameters
    ----------
    tokens, positions, slot_mapping : Tensor [T], int64
        Of each token its id, its place in its request counted from 0, and its slot in the KV cache.
    query_lens, context_lens : list of int
        Of each request its tokens in this step, and all its tokens that attention sees, those of this step included.
    block_tables : Tensor [B, W], int64
        Of each request its blocks, padded with -1 to the longest table.
    """

    tokens: "Tensor"
    positions: "Tensor"
    query_lens: list[int]
    context_lens: list[int]
    slot_mapping: "Tensor"
    block_tables: "Tensor"

    def to(self, device) -> "FlatBatch":
        """The same batch with its tensors on a device."""
        names = ("tokens", "positions", "slot_mapping", "block_tables")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(eq=False)
class Sequence:
    """A request with what has become of it: its answer so far, and how many of its tokens are in the KV cache.

    ``place`` is for schedulers that count the order of arrival.
    """

    request: Request
    outputs: list[int] = field(default_factory=list)
    num_computed: int = 0
    place: int = 0

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the answer so far."""
        return self.request.prompt_tokens + len(self.outputs)

    @property
    def missing(self) -> int:
        """Known tokens whose KV is not in the cache: what has to be computed before the next token can come."""
        return self.num_tokens - self.num_computed


class Pool(Protocol):
    """Unit 03's block pools."""

    num_blocks: int
    block_size: int

    @property
    def num_free(self) -> int: ...

    def allocate(self, n: int) -> list[int]: ...

    def free(self, blocks: list[int]) -> None: ...


class PagedKV:
    """The KV memory of a server: one table of blocks for each request, all from one pool.

    Parameters
    ----------
    pool : Pool
        ``BlockAllocator`` or ``PrefixCache`` of unit 03.

    Attributes
    ----------
    num_blocks, block_size : int
        The blocks of the whole memory, free or not, and the tokens that each of them holds.
    """

    def __init__(self, pool: Pool):
        self.pool, self.num_blocks, self.block_size = pool, pool.num_blocks, pool.block_size
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be reserved."""
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def blocks(self, id: str) -> list[int]:
        """The blocks of a request, in the order of its tokens; none if it has none."""
        return list(self._tables.get(id, ()))

    def adopt(self, id: str, blocks: list[int]) -> None:
        """Begin the table of a request with blocks that have a reference for it already; `release` gives them back.

        Raises
        ------
        ValueError
            If the request holds blocks.
        """
        if id in self._tables:
            raise ValueError(f"request {id} holds blocks already: its table cannot begin with others")
        if blocks:
            self._tables[id] = list(blocks)

    def reserve(self, id: str, num_tokens: int) -> None:
        """Make sure that a request has room for so many tokens in all. O(new blocks).

        Raises
        ------
        OutOfBlocks
            If there are too few free blocks. Nothing has changed then.
        """
        table = self._tables.get(id, [])
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return
        if missing > self.num_free:
            raise OutOfBlocks(f"request {id} needs {missing} more blocks, {self.num_free} are free")
        table += self.pool.allocate(missing)
        self._tables[id] = table

    def release(self, id: str) -> None:
        """Give back all blocks of a request, tail first. Nothing happens if it has none."""
        table = self._tables.pop(id, [])
        if table:
            self.pool.free(table)
