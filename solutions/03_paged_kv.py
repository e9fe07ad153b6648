# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 Paged KV
#
# Every token that a model has read leaves a key and a value in every layer: the **KV cache**. For OPT-13B in FP16 that
# is 819,200 bytes a token, so 1.56 GiB for 2048 tokens (Kwon et al., SOSP 2023, section 3). One pass over the prompt, the
# **prefill**, computes the keys and values of all its tokens. From then on the cache grows by one token a step, and
# nobody knows how long an answer will be.
#
# The servers before vLLM reserved one contiguous region a request, as long as the longest answer allowed. In the
# paper's measurements (Fig. 2) only 20.4 % to 38.2 % of that memory held tokens. With paging it was 96.3 %.

# %% [markdown]
# ## What you build
#
# | | exercise | what it answers | points | minutes |
# |---|---|---|---|---|
# | 1 | `BlockAllocator` | Which blocks are free, and who holds the others? | 13 | 25 |
# | 2 | `BlockTable` | Where in the cache is token 37 of this sequence? | 11 | 20 |
# | 3 | `ForkableTable`, `copy_blocks` | How do two sequences share a prompt and then part? | 9 | 25 |
# | 4 | `PrefixCache` | Which part of this prompt has been computed before? | 17 | 60 |
# | 5 | `fragmentation` | What did paging buy? | 11 | 50 |
# | 6 | `paged_attention` | How does attention read a cache in pieces? | 12 | 30 |
# | 7 | `online_softmax` | How does it read one piece at a time? | 8 | 30 |
# | 8 | `violations` | Is this state sound? | 7 | 15 |
# | 9 | `generate` | Does all of it give the tokens that it should? | 5 | 25 |
# | 10 | reflection | | 7 | 15 |
#
# Exercises 1 to 4 are bookkeeping: lists, counts and dictionaries. The tensors come with `copy_blocks`, and then in 6.

# %% tags=["export"]
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from servelab.checking import check
from servelab.kv import OutOfBlocks

# %% [markdown]
# ## 1. The block allocator
#
# Operating systems met the same problem with the memory of processes. They solved it with **pages**: pieces of one
# fixed size, handed out one at a time from a common pool. The KV cache gets the same treatment. A **block** holds the
# keys and values of `block_size` tokens (vLLM's default is 16), and any free block will do.
#
# The allocator is pure bookkeeping and never touches a tensor. It knows which blocks are free. For each other block it
# knows the **reference count**: how many sequences hold it. Two sequences with the same prompt can hold the same
# blocks.

# %% [markdown]
# ### A worked example
#
# `num_blocks=6`. Follow the last two columns before you write any code.
#
# | call | outcome | free | reference counts |
# |---|---|---|---|
# | `a = allocate(2)` | two ids, say `[0, 1]` | 4 | 0: 1, 1: 1 |
# | `share(a)` | a second sequence holds them too | 4 | 0: 2, 1: 2 |
# | `allocate(5)` | `OutOfBlocks`, nothing taken | 4 | 0: 2, 1: 2 |
# | `free(a)` | one holder leaves | 4 | 0: 1, 1: 1 |
# | `free(a)` | the other leaves | 6 | none |
# | `free(a)` | `ValueError`, nothing changed | 6 | none |
#
# At every moment, free blocks and held blocks add up to `num_blocks`.

# %% [markdown]
# The pool after the second row and after the fourth:
#
# ```
#  block     0    1    2    3    4    5
#          +----+----+----+----+----+----+
#  row 2   | x2 | x2 |    |    |    |    |    4 free
#          +----+----+----+----+----+----+
#  row 4   | x1 | x1 |    |    |    |    |    4 free: one holder is still there
#          +----+----+----+----+----+----+
# ```

# %% [markdown]
# ### What may go wrong
#
# A call either happens as a whole or changes nothing. Both halves of that have cost real servers their memory:
#
# - a failed allocation that keeps the blocks it already took: they are lost until the server restarts;
# - a block freed twice, then handed to two sequences, which overwrite each other. An early vLLM refused the second `free`
#   with "Double free!" ([issue 1584](https://github.com/vllm-project/vllm/issues/1584)).
#
# Each call acts for one holder. A holder has a block once or not at all, so a call that names a block twice is a mistake
# in the caller: refuse it. In [vLLM issue 42571](https://github.com/vllm-project/vllm/issues/42571) nobody did, and one
# block was in the free list twice.

# %% [markdown]
# ### Your task (about 25 minutes)
#
# Write `BlockAllocator`. At first all blocks are free. Which free ids you hand out is up to you. The list that a call is
# given is the caller's: `free(a)` leaves `a` as it was, or the second `free(a)` of the example would free nothing.
#
# Every call should cost O(1) for each block that it names or hands out, however large the pool. The check does not
# measure this; a cell below it does. Pools are large: Llama-3.1-8B needs 131,072 bytes a token, so an 80 GB card (92 % of
# it, less 16.06 GB of weights) has room for 439,000 tokens, which is 27,400 blocks of 16.

# %% [markdown]
# <details><summary>Hint 1: what to remember</summary>
#
# Two things are enough: the free ids, in something that gives and takes one id in O(1), and one count for each block.
#
# </details>
# <details><summary>Hint 2: all or nothing</summary>
#
# Look for everything that could be wrong first. Change state only after that. `share` and `free` refuse the same
# things, so one private method can look for them: at all blocks of the list, since the bad one may be the first, the
# last, or in between. In Python a negative index counts from the end of a list: block -1 does not exist, but your list
# will not say so. Go through the list that you are given, and take nothing out of it.
#
# </details>
# <details><summary>Hint 3: nearly code</summary>
#
# Keep a list of free ids as a stack. To allocate, compare the number wanted with its length, pop that many, and set
# each count to one. To share, add one to each count. To free, subtract one from each count, and push the ids whose
# count has come down to zero.
#
# </details>


# %% nbgrader={"grade_id": "block-allocator", "solution": true} tags=["export"]
class BlockAllocator:
    """Hand out the ids of KV blocks and count their holders.

    Parameters
    ----------
    num_blocks : int
        Size of the pool; ids run from 0 to ``num_blocks - 1``.
    block_size : int
        Tokens that one block holds. Sequences need it; the allocator only keeps it.

    Notes
    -----
    Each call costs O(1) for each block named or handed out, and happens as a whole or changes nothing. No call changes
    its arguments.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        ### BEGIN SOLUTION
        self._free = list(reversed(range(num_blocks)))
        self._holders = [0] * num_blocks
        ### END SOLUTION

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        ### BEGIN SOLUTION
        return len(self._free)
        ### END SOLUTION

    def ref_count(self, block: int) -> int:
        """How many hold ``block``. Raises `ValueError` if there is no such block."""
        ### BEGIN SOLUTION
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"no block {block} among {self.num_blocks}")
        return self._holders[block]
        ### END SOLUTION

    def allocate(self, n: int) -> list[int]:
        """Take ``n`` free blocks, each with one holder.

        Raises `OutOfBlocks` if fewer are free, `ValueError` if ``n`` is negative.
        """
        ### BEGIN SOLUTION
        if n < 0:
            raise ValueError(f"{n} blocks asked for")
        if n > self.num_free:
            raise OutOfBlocks(f"{n} blocks asked for, {self.num_free} free")
        taken = [self._free.pop() for _ in range(n)]
        for block in taken:
            self._holders[block] = 1
        return taken
        ### END SOLUTION

    def share(self, blocks: list[int]) -> None:
        """Add one holder to each block.

        Raises `ValueError` if a block is free, does not exist, or is named twice.
        """
        ### BEGIN SOLUTION
        self._require_held(blocks)
        for block in blocks:
            self._holders[block] += 1
        ### END SOLUTION

    def free(self, blocks: list[int]) -> None:
        """Remove one holder from each block; a block without holders is free.

        Raises `ValueError` if a block is free already, does not exist, or is named twice.
        """
        ### BEGIN SOLUTION
        self._require_held(blocks)
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)

    def _require_held(self, blocks: Sequence[int]) -> None:
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"a block is named twice in {blocks}")
        if not all(map(self.ref_count, blocks)):
            raise ValueError(f"a free block is named in {blocks}")
        ### END SOLUTION


# %% [markdown]
# Try it: the worked example on your allocator.

# %%
pool = BlockAllocator(num_blocks=6, block_size=16)
a = pool.allocate(2)
pool.share(a)
print("took", a, "- free:", pool.num_free, "- holders:", [pool.ref_count(block) for block in a])
for call, argument in [(pool.allocate, 5), (pool.free, a), (pool.free, a), (pool.free, a)]:
    try:
        call(argument)
        print(f"{call.__name__}({argument}) - free: {pool.num_free}")
    except (OutOfBlocks, ValueError) as error:
        print(f"{call.__name__}({argument}) refused: {type(error).__name__} - free: {pool.num_free}")

# %% nbgrader={"grade_id": "block-allocator-check", "grade": true, "locked": true, "points": 13}
check("paged_kv.block_allocator", BlockAllocator)

# %% [markdown]
# ### Measure it
#
# What does your class cost on larger pools? The cell allocates, shares, counts and frees ten blocks at a time while half
# of the pool is held. Look at the last column. A call that looks at the whole pool costs about ten times as much in each
# row. A ratio that stays near 1 is O(1); up to 2 may be the processor's caches.

# %%
from servelab import measure

measure.block_pool(BlockAllocator)

# %% [markdown]
# ## 2. The block table
#
# A sequence sees its tokens as positions 0, 1, 2, ... Its blocks lie anywhere in the cache. The **block table** is the
# list of its blocks in the order of its tokens, so it translates one into the other:
#
# - position `p` is in entry `p // block_size` of the table, at offset `p % block_size`;
# - its **slot**, the row of the cache with the blocks laid end to end, is `block * block_size + offset`.
#
# In unit 00 a slot was a place in a batch. Servers use the word for both. In this unit it is a row of the cache.
#
# Position 5 with `block_size=4` is in entry 1 at offset 1. If that entry says block 2, the slot is 2 * 4 + 1 = 9.

# %% [markdown]
# ### A worked example
#
# `block_size=4`. The pool happens to hand out 6, then 2, then 5.
#
# | call | returns | blocks | tokens | room in the last block |
# |---|---|---|---|---|
# | `append(3)` | `[]` | `[6]` | 3 | 1 |
# | `append(1)` | `[]` | `[6]` | 4 | 0 |
# | `append(1)` | `[]` | `[6, 2]` | 5 | 3 |
# | `slots(2, 5)` | `[26, 27, 8]` | `[6, 2]` | 5 | 3 |
# | `append(5)` | `[]` | `[6, 2, 5]` | 10 | 2 |
# | `release()` | | `[]` | 0 | |
#
# A full block is no reason to take the next one: the sequence may end there.

# %% [markdown]
# The table after `append(5)`; `.` is room for a token to come:
#
# ```
#  positions       0  1  2  3    4  5  6  7    8  9  .  .
#  block table   [     6      ,      2      ,      5      ]
#                      |             |             |
#  cache  slots    24..27         8..11        20..23
# ```
#
# What a sequence wastes is the room in its last block: at most `block_size - 1` slots. That is the whole point.

# %% [markdown]
# ### Your task (about 20 minutes)
#
# Write `append`, `slots` and `release`. The pool is any object with the methods of your `BlockAllocator`; the check
# brings its own.
#
# `append` returns a list of block copies `(src, dst)` that must be made before the new tokens are written. Here it is
# always empty. Exercise 3 fills it.
#
# A client may hang up at any time, before the first block is taken or after the last one was given back (vLLM pull
# requests [18485](https://github.com/vllm-project/vllm/pull/18485) and [25067](https://github.com/vllm-project/vllm/pull/25067)).
# So `release` may be called on an empty table, and twice.

# %% [markdown]
# <details><summary>Hint 1: how many blocks</summary>
#
# After the call the table holds the old and the new tokens. How many blocks are that, rounded up? You have some of them
# already. Ask the pool once for all that are missing: it is all or nothing, so you are too, if nothing of the table
# changes before it has answered. A negative number of tokens is refused before the pool is asked.
#
# </details>
# <details><summary>Hint 2: slots</summary>
#
# Go through the positions from `start` up to, but not including, `stop`. `divmod` gives entry and offset at once. Only
# positions that hold a token have a slot; check the range first, because a negative position would index the table from
# its end.
#
# </details>
# <details><summary>Hint 3: release</summary>
#
# Give the pool the whole list, in its order (exercise 4 needs that), and leave the table as it was when it was new.
# After that a second call has nothing to give.
#
# </details>


# %% nbgrader={"grade_id": "block-table", "solution": true} tags=["export"]
class BlockTable:
    """The blocks of one sequence, in the order of its tokens.

    Parameters
    ----------
    pool : BlockAllocator
        Where blocks come from and go back to; ``pool.block_size`` is the number of tokens in each.

    Attributes
    ----------
    blocks : list of int
        Block ids; entry ``i`` holds the tokens from ``i * block_size`` on.
    num_tokens : int
        Tokens of the sequence that have a slot.
    """

    def __init__(self, pool):
        self.pool, self.blocks, self.num_tokens = pool, [], 0

    def append(self, n_tokens: int) -> list[tuple[int, int]]:
        """Make room for ``n_tokens`` more tokens, with no block more than they need.

        Returns the block copies (source, destination) to make before the tokens are written. Raises `OutOfBlocks`,
        with nothing changed, if the pool has too few blocks; `ValueError` if ``n_tokens`` is negative.
        """
        ### BEGIN SOLUTION
        self.blocks += self.pool.allocate(self._missing(n_tokens))
        self.num_tokens += n_tokens
        return []

    def _missing(self, n_tokens: int) -> int:
        if n_tokens < 0:
            raise ValueError(f"{n_tokens} tokens to append")
        return -(-(self.num_tokens + n_tokens) // self.pool.block_size) - len(self.blocks)
        ### END SOLUTION

    def slots(self, start: int, stop: int) -> list[int]:
        """The slots in the cache of positions ``start`` to ``stop - 1``.

        Raises `ValueError` unless ``0 <= start <= stop <= num_tokens``.
        """
        ### BEGIN SOLUTION
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"positions {start} to {stop} of {self.num_tokens} tokens")
        size = self.pool.block_size
        return [self.blocks[position // size] * size + position % size for position in range(start, stop)]
        ### END SOLUTION

    def release(self) -> None:
        """Give all blocks back in one call, in the order of the table, and be empty. Does nothing on an empty table."""
        ### BEGIN SOLUTION
        self.pool.free(self.blocks)
        self.blocks, self.num_tokens = [], 0
        ### END SOLUTION


# %% [markdown]
# Try it: two sequences that grow in turn. Their blocks interleave in the cache, and neither notices.

# %%
pool = BlockAllocator(num_blocks=8, block_size=4)
one, two = BlockTable(pool), BlockTable(pool)
for n_tokens in (3, 2, 4):
    one.append(n_tokens), two.append(n_tokens)
print("one", one.blocks, "- two", two.blocks, "- free:", pool.num_free)
print("tokens 2 to 5 of one lie in slots", one.slots(2, 6))
one.release(), one.release(), two.release()
print("free after both left:", pool.num_free)

# %% nbgrader={"grade_id": "block-table-check", "grade": true, "locked": true, "points": 11}
check("paged_kv.block_table", BlockTable)

# %% [markdown]
# ## 3. Fork and copy-on-write
#
# Ask a model for four answers to one prompt (**parallel sampling**): the sequences have the prompt in common and differ
# after it. **Beam search** goes further. At every step it keeps the few most likely texts, its beams, and several of them
# may continue the same one. Four copies of the prompt's blocks would cost four times the memory. Instead the sequence
# **forks**: the new table holds the same blocks, and each of them gets one more holder. No data move.
#
# Full blocks are never written again, so they stay shared for good. The last block may have room. The first sequence
# that writes into it would change what the other reads, so it takes a block of its own, copies the old contents, and
# leaves the old block to the others: **copy-on-write**. In the paper (section 6.3) sharing saved 6.1 % to 9.8 % of the
# memory with parallel sampling and 37.6 % to 55.2 % with beam search on Alpaca.

# %% [markdown]
# ### A worked example
#
# `block_size=4`; the pool hands out 0, 1, 2, ...
#
# | call | returns | `a.blocks` | `b.blocks` | reference counts |
# |---|---|---|---|---|
# | `a.append(6)` | `[]` | `[0, 1]` | | 0: 1, 1: 1 |
# | `b = a.fork()` | a table | `[0, 1]` | `[0, 1]` | 0: 2, 1: 2 |
# | `b.append(1)` | `[(1, 2)]` | `[0, 1]` | `[0, 2]` | 0: 2, 1: 1, 2: 1 |
# | `a.append(1)` | `[]` | `[0, 1]` | `[0, 2]` | 0: 2, 1: 1, 2: 1 |
# | `b.append(2)` | `[]` | `[0, 1]` | `[0, 2, 3]` | 0: 2, 1: 1, 2: 1, 3: 1 |
#
# `a` writes into block 1 in row 4 and needs no copy: by then nobody else holds it. Who forked from whom does not matter.

# %% [markdown]
# Before and after `b.append(1)`:
#
# ```
#  a: [0, 1]   b: [0, 1]                       a: [0, 1]   b: [0, 2]
#
#  block 0  |k k k k|  x2     b.append(1)      block 0  |k k k k|  x2
#  block 1  |k k . .|  x2    ------------>     block 1  |k k . .|  a
#  block 2  |. . . .|  free   copy 1 -> 2      block 2  |k k n .|  b     n: the new token
# ```
#
# The copy comes first and the new token's write second. The other way round, the copy would wipe the token out.

# %% [markdown]
# ### Your task (about 25 minutes)
#
# Write `fork` and `append` of `ForkableTable`, and `copy_blocks`, which moves the data. `ForkableTable` inherits your
# `BlockTable`: finish exercise 2 first.
#
# `append` copies in one case only: something is written, the last block has room, and somebody else holds it too. The
# pool must have a block for the copy and all blocks for the other new tokens, or nothing happens.

# %% [markdown]
# <details><summary>Hint 1: fork</summary>
#
# Make a new `ForkableTable` over the same pool, and give it a list of its own with the same ids. Tell the pool that
# each block has one more holder; then `release` works for both tables as it is.
#
# </details>
# <details><summary>Hint 2: when to copy</summary>
#
# Three questions: are there tokens to write, does the last block have room (what is `num_tokens` modulo the block size
# then?), and does the pool count more than one holder of it? If one answer is no, the inherited `append` does the rest.
# A negative number of tokens is a no to the first question: the inherited `append` refuses it.
#
# </details>
# <details><summary>Hint 3: the copy, nearly code</summary>
#
# Take the copy's block and the missing blocks in one allocation, before anything else changes. Then put the first of
# them in the place of the old last block, the others behind it, and let go of the old block. Raise `num_tokens` here,
# too: the inherited `append` is not called in this case. Return a list with one pair, the old block first. For the data:
# assign the whole block, in the cache of the keys and in the cache of the values; go through `copies` and take nothing
# out of it.
#
# </details>


# %% tags=["export"]
import torch


# %% nbgrader={"grade_id": "fork", "solution": true} tags=["export"]
class ForkableTable(BlockTable):
    """A block table that can share its blocks with a fork and copies them on write."""

    def fork(self) -> "ForkableTable":
        """A new table with the same tokens in the same blocks, each with one more holder."""
        ### BEGIN SOLUTION
        self.pool.share(self.blocks)
        child = type(self)(self.pool)
        child.blocks, child.num_tokens = list(self.blocks), self.num_tokens
        return child
        ### END SOLUTION

    def append(self, n_tokens: int) -> list[tuple[int, int]]:
        """As `BlockTable.append`; a last block with room that others hold too is replaced by a copy.

        Returns ``[(source, destination)]`` in that case, else ``[]``.
        """
        ### BEGIN SOLUTION
        writes_inside = n_tokens and self.num_tokens % self.pool.block_size
        if not writes_inside or self.pool.ref_count(self.blocks[-1]) == 1:
            return super().append(n_tokens)
        copy, *new = self.pool.allocate(1 + self._missing(n_tokens))
        shared = self.blocks.pop()
        self.pool.free([shared])
        self.blocks += [copy, *new]
        self.num_tokens += n_tokens
        return [(shared, copy)]
        ### END SOLUTION


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, copies: list[tuple[int, int]]) -> None:
    """Copy whole blocks inside both caches, in place.

    Parameters
    ----------
    k_cache, v_cache : torch.Tensor
        ``[num_blocks, block_size, num_kv_heads, head_dim]``.
    copies : list of (int, int)
        Source and destination of each copy; no block is both. The list stays as it is.
    """
    ### BEGIN SOLUTION
    for source, destination in copies:
        k_cache[destination] = k_cache[source]
        v_cache[destination] = v_cache[source]
    ### END SOLUTION


# %% [markdown]
# Try it: two branches, with data. Each token's key is its own number, its value ten times that.

# %%
pool = BlockAllocator(num_blocks=6, block_size=4)
keys, values = torch.zeros(6, 4, 1, 1), torch.zeros(6, 4, 1, 1)


def write(table, tokens):
    copies = table.append(len(tokens))
    copy_blocks(keys, values, copies)
    rows = table.slots(table.num_tokens - len(tokens), table.num_tokens)
    keys.view(-1)[rows] = torch.tensor(tokens, dtype=torch.float32)
    values.view(-1)[rows] = 10 * torch.tensor(tokens, dtype=torch.float32)
    print("wrote", tokens, "- copies:", copies, "- blocks:", table.blocks)


a = ForkableTable(pool)
write(a, [1, 2, 3, 4, 5, 6])
b = a.fork()
write(b, [70])
write(a, [7, 8])
for name, table in (("a", a), ("b", b)):
    print(name, "reads", keys.view(-1)[table.slots(0, table.num_tokens)].int().tolist())

# %% nbgrader={"grade_id": "fork-check", "grade": true, "locked": true, "points": 9}
check("paged_kv.fork", ForkableTable, copy_blocks)

# %% [markdown]
# ## 4. The prefix cache
#
# A fork shares blocks between sequences that know each other. Most sharing is between strangers: every request of a
# product begins with the same system prompt, and every turn of a chat begins with all the turns before it. The keys and
# values of these tokens have been computed. Finding them again saves both their memory and their prefill.
#
# A **prefix cache** is a block pool that remembers what its full blocks hold. A full block that it was told of is
# **cached**: it can be found, whether somebody holds it or not. When its last holder leaves, it counts as free but stays
# cached until it is handed out.

# %% [markdown]
# ### What identifies a block
#
# The keys and values of a block depend on its own tokens and on every token before them, because attention looks back.
# They also depend on the weights: a server may add a small set of its own for each task (a **LoRA adapter**). And its
# customers, the **tenants**, may want to share nothing. So the hash of a block covers three things: the hash of the block
# before it (its **parent**), its own tokens, and a `key`, which names adapter and tenant.
#
# ```
#  tokens      [1 2 3 4]            [5 6 7 8]            [9 ...]
#  hash    h0 = H(none, 1234, key)   h1 = H(h0, 5678, key)   not full: no hash
# ```
#
# Because of the chain, one hash stands for everything up to the end of its block, yet each costs only the tokens of one
# block to compute.

# %% [markdown]
# ### Which hash
#
# If two different blocks have the same hash, a request reads the keys and values of somebody else's prompt: the answer
# is wrong, and a tenant may see another's data. Python's `hash` is no protection. For tuples of integers it is a fixed
# and public function, so equal hashes can be computed. The cell below holds two blocks that were found in a minute.
#
# vLLM added SHA-256 as an option ([pull request 15297](https://github.com/vllm-project/vllm/pull/15297)) and made it
# the default in v0.10.2 (its documentation, [pull request 29261](https://github.com/vllm-project/vllm/pull/29261)).
# The alternative is to compare the tokens themselves, and the block before with them. A block id does not name that
# block: the id stays when the block is handed out again and gets other contents. Either way is fine here.

# %%
one, other = (40007, 55817, 101852, 101088), (113913, 38631, 124316, 1000)
print("equal tokens:", one == other, "- equal hash():", hash(one) == hash(other))
print("SHA-256:", *(hashlib.sha256(repr(block).encode()).hexdigest()[:12] for block in (one, other)))

# %% [markdown]
# ### The two calls
#
# `match(tokens, key)` is asked before a prefill. It returns the blocks of the longest cached beginning and how many
# tokens they hold, and makes the caller a holder of each. A hit ends at the first block that is not there.
#
# `insert(tokens, blocks, key)` is told after a prefill: these blocks hold these tokens. It remembers the full ones. A
# part-filled last block will change, so it is never cached. The tokens of a full block never change while somebody holds
# it, so you need not handle a held block that is inserted again with other tokens or another key.
#
# **The last token is never a hit.** A model needs at least one token to compute the next one from. A prompt of 8 tokens
# in 2 blocks of 4, all cached, hits 1 block: at most `(len - 1) // block_size` of them
# ([vLLM pull request 11186](https://github.com/vllm-project/vllm/pull/11186)).

# %% [markdown]
# ### A worked example
#
# `num_blocks=4`, `block_size=2`. In the last two columns, `*` marks a block that is free and cached.
#
# | call | returns | held | free |
# |---|---|---|---|
# | `a = allocate(2)` | `[0, 1]` | 0, 1 | 2, 3 |
# | `insert([7, 8, 5], a)` | | 0, 1 | 2, 3 |
# | `b, n = match([7, 8, 5, 6])` | `[0]`, 2 | 0 (x2), 1 | 2, 3 |
# | `free(a)` | | 0 | 1, 2, 3 |
# | `free(b)` | | | 0*, 1, 2, 3 |
# | `c, n = match([7, 8, 9])` | `[0]`, 2 | 0 | 1, 2, 3 |
# | `free(c)` | | | 0*, 1, 2, 3 |
# | `d = allocate(4)` | `[1, 2, 3, 0]` | 0, 1, 2, 3 | |
# | `match([7, 8, 9])` | `[]`, 0 | 0, 1, 2, 3 | |
#
# Block 1 was part-filled, so nobody finds it. Block 0 goes last, and with it what the cache knew.

# %% [markdown]
# ### Who is evicted
#
# When blocks are needed, they are taken in this order:
#
# 1. free blocks with nothing cached, in any order;
# 2. cached blocks, the one without holders for longest first (**least recently used**);
# 3. among the blocks that one `free` call left without holders, the last in its list first.
#
# A table lists its blocks from the first token on, so rule 3 evicts the tail before the head. What remains is still a
# prefix; without its head, a tail cannot be found. A block with a holder is never evicted. Eviction is lazy: a block is
# forgotten when it is handed out, not before.

# %% [markdown]
# ```
#  free(a) with a = [4, 9, 2], then free(b) with b = [7, 1], all cached; 5 and 3 are free and uncached
#
#  handed out first -->   5  3  |  2  9  4  |  1  7   <-- handed out last
#                        uncached     a          b
#
#  match() of a's first block takes 4 out of the middle; freed again, it goes to the right end
# ```

# %% [markdown]
# ### Your task (about 60 minutes)
#
# Write `PrefixCache`: the five methods of a block pool, with the same rules as in exercise 1, and `match` and `insert`.
# `num_free` counts the free blocks, cached or not: all of them can be handed out. The cost should be O(1) for each block
# named, found or evicted, also with 10^6 blocks in the pool. Again the check does not measure this, and a cell below does.
#
# Two rules that exercise 1 did not have:
#
# - `share` accepts a cached block without holders, and takes it out of the free ones;
# - `insert` needs a block for each full block of tokens, so one block is enough for 3 tokens with `block_size=2`. More
#   blocks are fine and are not cached. All that it is given must be held.
#
# Two requests may compute the same prompt at the same time and both insert it. Keep the first, or both: either is fine,
# as long as no block is handed out twice or found after it was handed out.

# %% [markdown]
# <details><summary>Hint 1: where each block is</summary>
#
# Every block is in one of three places: held (its count is above zero), free and uncached, free and cached. The uncached
# ones can be a stack, as before. `num_free` adds up the last two. Check all that a call names, and whether there is
# enough, before changing anything: the bad block may be the first, the last, or in between. The lists of tokens and
# blocks are the caller's: to go through one backwards, use `reversed`.
#
# </details>
# <details><summary>Hint 2: finding blocks</summary>
#
# Write a function that gives the chained hashes of the full blocks of some tokens. Both calls use it; `match` uses it on
# all tokens but the last. Then two dictionaries: from a hash to the block, or blocks, that hold it, and from a block to
# its hash. Whatever goes into a hash must be unambiguous: the tokens 1, 23 are not 12, 3, the key `None` is neither the
# text "None" nor the empty text, and parent, tokens and key must not run into each other: 1, 2 with the key "34" is not
# 1, 23 with the key "4". Numbers must go in whole: a token id may need 63 bits.
#
# </details>
# <details><summary>Hint 3: nearly code, with the order of eviction</summary>
#
# The free cached blocks need a queue from which any element can leave in O(1), since a hit takes a block out of the
# middle. `collections.OrderedDict` is that: append at the end, delete by key, pop from the front. (A `deque` searches for
# what it removes, and a plain dict walks over deleted entries to find its first.)
#
# - `match`: follow the hashes while they are known, collect the blocks, then `share` them.
# - `share`: take each block out of the queue if it is there, leave its dictionary entries, and add one to its count.
# - `free`: from the last block to the first, subtract one; at zero, put it at the end of the queue if it has a hash, on
#   the stack if not.
# - `allocate`: pop from the stack, and when that is empty from the front of the queue; then delete both entries.
# - `insert`: for each full block whose hash is not known yet, write both entries. A second block with the same contents
#   stays uncached, and has no entry to delete.
#
# </details>


# %% nbgrader={"grade_id": "prefix-cache", "solution": true} tags=["export"]
class PrefixCache:
    """A block pool that finds the blocks of a prompt's cached beginning.

    Parameters
    ----------
    num_blocks, block_size : int
        As for `BlockAllocator`.

    Notes
    -----
    Each call costs O(1) for each block named, found or evicted, and happens as a whole or changes nothing. No call
    changes its arguments. Token ids are integers from 0 to ``2**63 - 1``; a key may be any text, also the empty one.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        ### BEGIN SOLUTION
        self._holders = [0] * num_blocks
        self._uncached = list(reversed(range(num_blocks)))  # free, a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, the next to be evicted first
        self._hash_of: dict[int, bytes] = {}
        self._blocks_of: dict[bytes, dict[int, None]] = {}  # duplicates, which are few: the first inserted first
        ### END SOLUTION

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached or not."""
        ### BEGIN SOLUTION
        return len(self._uncached) + len(self._cached)
        ### END SOLUTION

    def ref_count(self, block: int) -> int:
        """How many hold ``block``. Raises `ValueError` if there is no such block."""
        ### BEGIN SOLUTION
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"no block {block} among {self.num_blocks}")
        return self._holders[block]
        ### END SOLUTION

    def match(self, tokens: list[int], key: str | None = None) -> tuple[list[int], int]:
        """Become a holder of the cached blocks that ``tokens`` begin with.

        Returns the blocks and the number of tokens in them; the block that would contain the last token is never among
        them. ``None`` is a key like any other: a hit needs the same key that `insert` was given.
        """
        ### BEGIN SOLUTION
        hit = []
        for digest in self._hashes(tokens[:-1], key):
            if digest not in self._blocks_of:
                break
            hit.append(next(iter(self._blocks_of[digest])))
        self.share(hit)
        return hit, len(hit) * self.block_size
        ### END SOLUTION

    def insert(self, tokens: list[int], blocks: list[int], key: str | None = None) -> None:
        """Remember that ``blocks`` (a sequence's table) hold ``tokens``; only full blocks are remembered.

        Raises `ValueError` if a block has no holder, does not exist or is named twice, or if there are fewer blocks
        than full blocks of tokens.
        """
        ### BEGIN SOLUTION
        hashes = self._hashes(tokens, key)
        self._require(self._is_held, blocks)
        if len(blocks) < len(hashes):
            raise ValueError(f"{len(blocks)} blocks for {len(hashes)} blocks of tokens")
        for block, digest in zip(blocks, hashes, strict=False):
            self._hash_of[block] = digest
            self._blocks_of.setdefault(digest, {})[block] = None
        ### END SOLUTION

    def allocate(self, n: int) -> list[int]:
        """Take ``n`` free blocks, uncached ones first, then the least recently used; what they held is forgotten.

        Raises `OutOfBlocks` if fewer are free, `ValueError` if ``n`` is negative.
        """
        ### BEGIN SOLUTION
        if n < 0:
            raise ValueError(f"{n} blocks asked for")
        if n > self.num_free:
            raise OutOfBlocks(f"{n} blocks asked for, {self.num_free} free")
        taken = [self._uncached.pop() for _ in range(min(n, len(self._uncached)))]
        taken += [self._evict() for _ in range(n - len(taken))]
        for block in taken:
            self._holders[block] = 1
        return taken
        ### END SOLUTION

    def share(self, blocks: list[int]) -> None:
        """Add one holder to each block; a cached one that is free is then held again.

        Raises `ValueError` if a block is free and uncached, does not exist, or is named twice.
        """
        ### BEGIN SOLUTION
        self._require(self._has_contents, blocks)
        for block in blocks:
            self._cached.pop(block, None)
            self._holders[block] += 1
        ### END SOLUTION

    def free(self, blocks: list[int]) -> None:
        """Remove one holder from each block; those without holders are free, and evicted in reverse order.

        Raises `ValueError` if a block is free already, does not exist, or is named twice.
        """
        ### BEGIN SOLUTION
        self._require(self._is_held, blocks)
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._uncached.append(block)

    def _hashes(self, tokens: Sequence[int], key: str | None) -> list[bytes]:
        """The chained hash of each full block."""
        hashes, parent = [], b""
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            contents = parent, list(tokens[start : start + self.block_size]), key
            parent = hashlib.sha256(repr(contents).encode()).digest()
            hashes.append(parent)
        return hashes

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._hash_of.pop(block)
        del self._blocks_of[digest][block]
        if not self._blocks_of[digest]:
            del self._blocks_of[digest]
        return block

    def _is_held(self, block: int) -> bool:
        return 0 <= block < self.num_blocks and self._holders[block] > 0

    def _has_contents(self, block: int) -> bool:
        return self._is_held(block) or block in self._cached

    def _require(self, condition, blocks: Sequence[int]) -> None:
        if len(set(blocks)) != len(blocks) or not all(map(condition, blocks)):
            raise ValueError(f"one of {blocks} is free or named twice")
        ### END SOLUTION


# %% [markdown]
# Try it: a second request with the same system prompt, and the hit after everybody has left.

# %%
cache = PrefixCache(num_blocks=8, block_size=4)
system = [11, 12, 13, 14, 15, 16, 17, 18]
first, hit = cache.match([*system, 21, 22, 23])
first += cache.allocate(3 - len(first))
cache.insert([*system, 21, 22, 23], first)
print("first: hit", hit, "tokens - blocks", first)
second, hit = cache.match([*system, 31])
print("second: hit", hit, "tokens - blocks", second, "- free:", cache.num_free)
cache.free(first), cache.free(second)
print("both left - free:", cache.num_free, "- a third hits", cache.match([*system, 41])[1], "tokens")
print("under another key:", cache.match([*system, 41], key="tenant-2")[1], "tokens")

# %% nbgrader={"grade_id": "prefix-cache-check", "grade": true, "locked": true, "points": 17}
check("paged_kv.prefix_cache", PrefixCache)

# %% [markdown]
# ### Measure it
#
# The first table is for caches full of free blocks, half of them evicted before: a hit in the middle of the order of
# eviction, then a prompt that evicts as many. With an `OrderedDict` the last ratio is at most about 2, with a plain dict
# 3 to 4, with a list far more. The second table is for longer prompts: if a block's hash covered all tokens before it and
# not only its parent's hash, a block would cost more the longer the prompt is. There a ratio below 2 is as good as 1.

# %%
measure.prefix_cache(PrefixCache)

# %% [markdown]
# ### Watch it
#
# The next cells film your own code: a recorder stands between the tables and your cache and takes a picture on request.
# A cell of the picture is a block, filled as far as it holds tokens, with one colour for each holder. A thick frame
# means shared, hatching means that a prefix can be found there.
#
# A table starts from a hit by taking over its blocks. That is all that a scheduler has to do.

# %%
from servelab.plots.blocks import Recorder, block_stepper, describe, small_multiples

film = Recorder(PrefixCache(num_blocks=8, block_size=4))


def admit(name, prompt):
    table = film.tables[name] = ForkableTable(film)
    hit, table.num_tokens = film.match(prompt)
    table.blocks = list(hit)
    table.append(len(prompt) - table.num_tokens)
    film.insert(prompt, table.blocks)
    film.shot(f"{name} comes: prompt {len(prompt)}, hit {4 * len(hit)}")
    return table


# %%
a = admit("a", [*system, 21, 22, 23])
b = admit("b", [*system, 31, 32])
c = film.tables["c"] = b.fork()
film.shot("b forks: c")
print("c's first token of its own needs the copies", c.append(1))
film.shot("c writes")
a.release()
film.shot("a leaves")
b.release(), c.release()
film.shot("b and c leave")
d = admit("d", [*system, 41, 42, 43, 44, 45])
d.release()
film.shot("d leaves")
e = admit("e", list(range(50, 76)))

# %%
block_stepper(film.frames)

# %% [markdown]
# The same frames side by side, and as text:

# %%
pictures = small_multiples(film.frames)
print("\n".join(describe(frame) for frame in film.frames))

# %% [markdown]
# Three things to look for:
#
# - `d` comes when nobody is there, and still hits 8 tokens: the blocks of `a` and `b` were free, but not forgotten.
# - `e` needs 7 blocks of 8. It takes the uncached ones first, then the tail of what `d` left. The head survives.
# - The last block of `b` and `c` was shared until `c` wrote. Neither it nor its copy is ever hatched: it is not full.

# %% [markdown]
# ## 5. Where the memory goes
#
# You have built the paged pool. What did it buy? Kwon et al. (SOSP 2023, Fig. 2) split the KV memory of a server
# into kinds:
#
# - **used**: slots that hold a token;
# - **reserved**: empty slots that this request will fill later;
# - **internal** fragmentation: slots taken by a request that never fills them;
# - **external** fragmentation: slots that nobody has taken, while the request at the head of the queue does not fit;
# - **free**: slots that nobody has taken and nobody waits for.
#
# Reserved slots are used in the end. Until then no other request can have them. External is wider here than gaps that
# are too small: where 32 slots are needed and 16 are left, all 16 count. We count such a shortage too, like the paper's
# "external fragmentation & others".

# %% [markdown]
# ### Four policies
#
# A contiguous policy gives a request one region of slots when it is admitted, and keeps that region until the request
# has finished. The policies differ in the size that they ask for.
#
# | policy | slots that a request has |
# |---|---|
# | `"max"` | `max_len`, the longest length that the server allows |
# | `"pow2"` | its prompt, and its output rounded up to a power of two; at most `max_len` |
# | `"oracle"` | its final length exactly: prompt and output |
# | `"paged"` | blocks of 16, one more whenever its next token has no room in the last |
#
# The first three are the paper's Orca (Max), (Pow2) and (Oracle) (section 6.1). No real server can know what the oracle
# knows.

# %% [markdown]
# ### A worked example
#
# One request: prompt 5, output 9, so its final length is 14. After 4 iterations it holds 9 tokens. `max_len=32`, and
# the pool has 48 slots.
#
# | policy | taken | used | reserved | internal | not taken |
# |---|---|---|---|---|---|
# | `max` | 32 | 9 | 5 | 18 | 16 |
# | `pow2` | 5 + 16 = 21 | 9 | 5 | 7 | 27 |
# | `oracle` | 14 | 9 | 5 | 0 | 34 |
# | `paged` | 1 block, 16 | 9 | 5 | 2 | 32 |
#
# Let a request with a prompt of 20 and an output of 4 wait at the head of the queue. Under `max` it needs 32 slots and
# there are 16: they count as external. Under `oracle` it needs 24 of the 34 and is admitted.

# %% [markdown]
# The same pool under `max`, one character a slot: `u` used, `r` reserved, `i` internal, `x` external.
#
# ```
# uuuuuuuuurrrrriiiiiiiiiiiiiiiiiixxxxxxxxxxxxxxxx
# |--- region of the request ----|
# ^0       ^9   ^14               ^32          47^
# ```
#
# `count` sees a block in the same way: of its empty slots, those that the request will fill are reserved. Only the last
# block of a request has internal slots, and only from when it is taken.

# %% [markdown]
# ### The clock
#
# Iteration `i` (from 0) takes place at `i * ITERATION` seconds. In every iteration, in this order:
#
# 1. **grow**: each running request gets one token, in the order of admission;
# 2. **admit**: requests that have arrived leave the queue while the head fits. The head is never overtaken. An admitted
#    request gets all of its prompt and its first token;
# 3. **count**: every slot of the pool is of one kind;
# 4. **leave**: requests that hold their final length return their slots.
#
# The average is over all iterations until the last request has left, idle ones too. A request with n output tokens
# runs for n iterations. (A real engine writes a token's KV one iteration after it has sampled it. We count it at once.)

# %% [markdown]
# ### When the paged pool runs out
#
# A paged pool admits a request that fits now, and may run out later. Then the running request that was **admitted
# last** gives all its blocks back and returns to the head of the queue. That may be the very request that asked for a
# block. It keeps the number of tokens it had: when it is admitted again, one prefill computes them anew and gives the
# next token.
#
# The request admitted first never gives way to another, so it always finishes: nothing can wait for ever. The price is
# the work done twice, so the result counts these **preemptions**.

# %% [markdown]
# ### A preemption, step by step
#
# Two requests arrive at once: A with prompt 15 and output 20, B with prompt 15 and output 5. The pool has 48 slots,
# which are three blocks.
#
# | iteration | A: tokens / slots | B: tokens / slots | what happens |
# |---|---|---|---|
# | 0 | 16 / 16 | 16 / 16 | both are admitted; one block is free |
# | 1 | 17 / 32 | waits with 16 | A takes the block that was free. B needs one too: it gives its own back |
# | 2 to 16 | 18 to 32 / 32 | waits with 16 | B needs 32 slots for its token 17, and 16 are left: external |
# | 17 | 33 / 48 | waits with 16 | A takes the third block |
# | 19 | 35 / 48 | waits with 16 | A is complete and leaves |
# | 20 | | 17 / 32 | B is admitted again |
# | 23 | | 20 / 32 | B is complete |
#
# Over 24 iterations A holds 510 tokens and B 90, so 600 / (24 * 48) = 52.1 % of the slots are used.

# %% tags=["export"]
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from servelab.traces import Request

KINDS = ("used", "reserved", "internal", "external", "free")  # of slots
BLOCK_SIZE = 16  # tokens a block
ITERATION = 1 / 16  # seconds; a power of two, so that multiples of it are exact


@dataclass(frozen=True)
class Shares:
    """Shares of all KV slots, averaged over time: the first five add up to 1."""

    used: float
    reserved: float
    internal: float
    external: float
    free: float
    preemptions: int  # how often a request gave its blocks back
    history: tuple[dict[str, int], ...] = field(default=(), repr=False)  # what `count` found, one entry an iteration


# %% [markdown]
# A request on its way through the server. While it waits, `held` is what its next prefill has to compute.


# %% tags=["export"]
@dataclass(eq=False)  # two requests of the same lengths are still two requests
class Resident:
    """A request, the tokens that it holds, and the slots that it has taken."""

    arrival: float  # seconds
    prompt: int  # tokens
    output: int  # tokens
    held: int  # tokens
    start: int = 0  # its lowest slot; contiguous policies only
    size: int = 0  # slots taken while it runs

    @property
    def final(self) -> int:
        """Tokens that it holds when it leaves."""
        return self.prompt + self.output

    def advance(self, size: int) -> None:
        """Get one more token, with ``size`` slots taken from now on. Raises `RuntimeError` past the final length."""
        if self.held == self.final:
            raise RuntimeError(f"a request of {self.final} tokens got one more: does grow move on to the next request?")
        self.size, self.held = size, self.held + 1


def arrivals(trace: Iterable[Request], max_len: int) -> deque[Resident]:
    """The queue at the start. Raises `ValueError` for a request that could never run: it would block the rest."""
    queue = deque(Resident(r.arrival, r.prompt_tokens, r.output_tokens, held=r.prompt_tokens) for r in trace)
    if any(request.final > max_len for request in queue):
        raise ValueError(f"a request is longer than max_len={max_len}")
    return queue


# %% [markdown]
# ### Your task (about 50 minutes)
#
# The loop, `fragmentation`, and the admission, `place`, are given. Write the four functions that they use. You may also
# replace everything: only the shares and the preemptions that `fragmentation` returns are checked. If you keep
# `history`, the check also says in which iteration a count is wrong. `capacity` is a multiple of 16 in every paged trace,
# and at least `max_len`.
#
# <details><summary>Hint 1: slots_needed</summary>
#
# Three policies look at the request only. For the power of two, `(n - 1).bit_length()` says how often you have to
# double 1 to reach n. The paged policy looks at the tokens after the coming iteration: one more than `held`. Round up
# to whole blocks.
#
# </details>
# <details><summary>Hint 2: first_fit and grow</summary>
#
# Walk over the regions in the order of their addresses, not of their admission. Remember where the last one ended; the
# gap before the next one is the candidate. Do not forget the gap behind the last region.
#
# In `grow`, look at the running requests by index, because the list gets shorter at its end as you go. If one needs more
# new slots than there are, take the last of the list away and look at the same index again: the index moves on only
# after a request got its token by `advance`. Under a contiguous policy nobody ever needs new slots.
#
# </details>
# <details><summary>Hint 3: count</summary>
#
# Per request, its slots split at two points: `held`, and the smaller of `size` and `final`. Slots below the first are
# used, between the two reserved, above the second internal. What nobody has taken is external or free, all of it,
# depending on `waiting`. An iteration in which nobody runs counts like any other.
#
# </details>


# %% nbgrader={"grade_id": "fragmentation", "solution": true} tags=["export"]
def slots_needed(request: Resident, policy: str, max_len: int) -> int:
    """Slots that the request must have to hold ``held + 1`` tokens, which it will after the coming iteration."""
    ### BEGIN SOLUTION
    if policy == "max":
        return max_len
    if policy == "pow2":
        return min(request.prompt + 2 ** (request.output - 1).bit_length(), max_len)
    if policy == "oracle":
        return request.final
    return -(-(request.held + 1) // BLOCK_SIZE) * BLOCK_SIZE
    ### END SOLUTION


def first_fit(running: list[Resident], size: int, capacity: int) -> int | None:
    """The lowest slot at which a region of ``size`` slots is free, or None. O(n log n) in the running requests."""
    ### BEGIN SOLUTION
    start = 0
    for other in sorted(running, key=lambda request: request.start):
        if other.start - start >= size:
            return start
        start = other.start + other.size
    return start if start + size <= capacity else None
    ### END SOLUTION


def grow(running: list[Resident], queue: deque[Resident], policy: str, capacity: int, max_len: int) -> None:
    """Let each running request `advance`: one token each, and the slots that it needs for it.

    ``running`` is in the order of admission. If the pool has too few slots, the last of ``running`` leaves it, with all
    its slots, and becomes the head of ``queue``.
    """
    ### BEGIN SOLUTION
    index = 0
    while index < len(running):
        request = running[index]
        needed = slots_needed(request, policy, max_len)
        if needed - request.size > capacity - sum(other.size for other in running):
            queue.appendleft(running.pop())
        else:
            request.advance(needed)
            index += 1
    ### END SOLUTION


def count(running: list[Resident], capacity: int, waiting: bool) -> dict[str, int]:
    """Slots of each kind now, by the names of `Shares`. ``waiting``: an arrived request stands in the queue."""
    ### BEGIN SOLUTION
    used = sum(request.held for request in running)
    reserved = sum(min(request.size, request.final) for request in running) - used
    taken = sum(request.size for request in running)
    left = {"external": capacity - taken} if waiting else {"free": capacity - taken}
    return {"used": used, "reserved": reserved, "internal": taken - used - reserved, **left}
    ### END SOLUTION


def place(request: Resident, running: list[Resident], policy: str, capacity: int, max_len: int) -> bool:
    """Give an arrived request its slots, its prompt and its first token; False if it does not fit."""
    size = slots_needed(request, policy, max_len)
    if policy == "paged":
        start = 0 if size <= capacity - sum(other.size for other in running) else None
    else:
        start = first_fit(running, size, capacity)
    if start is None:
        return False
    request.start = start
    request.advance(size)
    return True


def fragmentation(trace: Iterable[Request], policy: str, capacity: int, max_len: int = 2048) -> Shares:
    """How ``capacity`` KV slots are used while ``trace`` (in order of arrival) is served, averaged over iterations.

    ``policy`` is one of ``"max"``, ``"pow2"``, ``"oracle"``, ``"paged"``; no request is longer than ``max_len``.
    """
    queue, running, history, preemptions = arrivals(trace, max_len), [], [], 0
    last = queue[-1].arrival / ITERATION + sum(request.output for request in queue)  # the first admitted advances
    while queue or running:
        now = len(history)
        if now > last:
            stuck = f"iteration {now}: {len(queue)} requests wait, {len(running)} run, and none advances"
            raise RuntimeError(f"{stuck}; look at first_fit and grow (hint 2)")
        before = len(running)
        grow(running, queue, policy, capacity, max_len)
        preemptions += before - len(running)
        while queue and queue[0].arrival <= now * ITERATION:
            if not place(queue[0], running, policy, capacity, max_len):
                break
            running.append(queue.popleft())
        waiting = bool(queue) and queue[0].arrival <= now * ITERATION
        history.append(count(running, capacity, waiting))
        running = [request for request in running if request.held < request.final]
    slots = [sum(found.get(kind, 0) for found in history) for kind in KINDS]
    return Shares(*(n / (len(history) * capacity) for n in slots), preemptions, tuple(history))


# %% [markdown]
# Try it. First the worked example: the request holds 9 tokens, and `count` finds the numbers of the table.

# %%
asks = Resident(arrival=0.0, prompt=5, output=9, held=9)
for policy in ("max", "pow2", "oracle", "paged"):
    asks.size = slots_needed(asks, policy, max_len=32)
    print(f"{policy:7}", count([asks], capacity=48, waiting=policy == "max"))

# %% [markdown]
# Then whole runs, a line an iteration: the two requests of the worked example under `max`, and the preemption. The
# letters are sorted by kind, whatever the addresses. Line 3 of the first run is the picture above. The run should
# average to used 0.288, reserved 0.067, internal 0.311, external 0.231, free 0.103; the second to used 0.521, with one
# preemption.

# %%
from servelab.plots import waste

for found in (
    fragmentation([Request(0.0, 5, 9), Request(0.0, 20, 4)], "max", capacity=48, max_len=32),
    fragmentation([Request(0.0, 15, 20), Request(0.0, 15, 5)], "paged", capacity=48, max_len=48),
):
    print(waste.slot_lines(found.history), found, sep="\n", end="\n\n")

# %% nbgrader={"grade_id": "fragmentation-check", "grade": true, "locked": true, "points": 11}
check("paged_kv.fragmentation", fragmentation)

# %% [markdown]
# ### The four policies on a trace
#
# 400 requests of the course's synthetic chat trace, those that fit into 2,048 tokens. The pool has 15,728 slots: 12 GiB
# of KV at 800 KiB a token, OPT-13B on one A100-40GB (Kwon et al., Table 1).

# %%
from IPython.display import Markdown, display

from servelab.traces import read_trace

chat = [r for r in read_trace("conv") if r.prompt_tokens + r.output_tokens <= 2048]


def by_policy(num_requests: int, capacity: int) -> dict[str, Shares]:
    """Your function, under all four policies."""
    return {
        policy: fragmentation(chat[:num_requests], policy, capacity) for policy in ("max", "pow2", "oracle", "paged")
    }


found = by_policy(num_requests=400, capacity=15_728)
display(waste.waste_bars(found))
display(Markdown(waste.waste_text(found)))
print("preemptions:", {policy: shares.preemptions for policy, shares in found.items()})

# %% [markdown]
# Beside it, the paper's Fig. 2 (ShareGPT lengths, in % of KV memory):
#
# | system | used | reserved | internal | external and other |
# |---|---|---|---|---|
# | Orca (Max) | 20.4 | 13.3 | 57.3 | 8.9 |
# | Orca (Pow2) | 26.8 | 17.9 | 13.6 | 41.6 |
# | Orca (Oracle) | 38.2 | 25.2 | 0 | 36.6 |
# | vLLM | 96.3 | | | |
#
# The share that vLLM does not use is 3.7 %. The paper does not split it.

# %% [markdown]
# **What agrees.** The order of the policies: each step from `max` to `paged` uses more of the memory. Internal
# fragmentation is the largest waste under `max` and does not exist under `oracle`. Knowing the future is not enough:
# even the oracle loses memory to reservations and to gaps.
#
# One number is explained by arithmetic: external under `max`. Seven regions of 2,048 tokens fit into 15,728 slots, and
# the 1,392 slots that are left over are 8.85 % of them. The paper has 8.9 % external, and 7.00 requests in the batch of
# Orca (Max) (its Fig. 13). Ours is 8.5 %, because nobody waits at the end of the trace, and then they count as free.

# %% [markdown]
# **What does not.** Our used shares are higher. A chat request of this trace has a long prompt and a short answer, so
# most of its slots are used from the first iteration on, and little is reserved for later. In ShareGPT the answers are
# longer than the prompts (Fig. 11). We also average from the first arrival to the last departure: while the pool
# empties at the end, slots are free. Under `paged` the external slots are too few for the prompt at the head of the
# queue, which comes in as a whole.
#
# **Why `paged` shows no internal fragmentation.** The empty end of a block counts as reserved as long as the request
# will fill it. Internal slots appear with a request's last block, for the few iterations until it leaves, and the pool is
# large: 0.02 % on average.
#
# The paged pool preempted 59 times. It admits whatever fits now, so some requests are computed twice. How much a server
# should hold back is a question for its scheduler.

# %% [markdown]
# Move the sliders. With few requests or a large pool nobody waits, and external turns into free.

# %%
from ipywidgets import IntSlider

from servelab.plots.explore import explore


def draw(num_requests: int, capacity: int) -> None:
    shares = by_policy(num_requests, capacity)
    display(waste.waste_bars(shares))
    display(Markdown(waste.waste_text(shares)))


explore(
    draw,
    num_requests=IntSlider(150, 10, 400, 10, continuous_update=False),
    capacity=IntSlider(15_728, 4_096, 65_536, 2_048, continuous_update=False),
)

# %% [markdown]
# ### How large should a block be?
#
# A sequence wastes at most `block_size - 1` slots, those at the end of its last block. If it is equally likely to end
# at any place in a block, the mean is (B - 1) / 2. For a sequence of 300 tokens that is 7.5 of 307.5 slots at 16, or
# 2.4 %, and 63.5 of 363.5 at 128, or 17.5 %. The sequences of the trace are longer, so the same empty slots are a
# smaller share of theirs: the picture and the table below have both.
#
# Smaller blocks waste less, but make longer block tables and shorter reads for the attention kernel. vLLM's default is
# 16. The paper finds 16 to 128 best on ShareGPT; on the shorter sequences of Alpaca 16 and 32 are good and larger ones
# much worse (Kwon et al., section 7.2).

# %%
lengths = [r.prompt_tokens + r.output_tokens for r in chat]
display(waste.block_size_curve(lengths))
display(Markdown(waste.block_size_text(lengths)))

# %% [markdown]
# ## 6. Attention through the block table
#
# So far blocks were numbers. Now they hold keys and values, and attention has to find them. Two functions do this in
# every step of a serving engine: one writes the KV of the new tokens into their slots, one lets the new tokens' queries
# attend to the whole context.
#
# The batch is **flat**: the query tokens of all requests stand one behind another, without padding. A request that
# decodes brings one token, a prefill brings its prompt or a chunk of it. A prefix hit brings the rest of a prompt whose
# beginning is in the cache.

# %% [markdown]
# ### A worked example
#
# Blocks of 4 slots. Slot 9 is offset 1 of block 2, because 9 = 2 * 4 + 1.
#
# | request | `query_lens` | `context_lens` | row of `block_tables` | its queries are at positions |
# |---|---|---|---|---|
# | 0: decodes | 1 | 6 | `[5, 2, -1]` | 5 |
# | 1: last chunk of a prompt | 3 | 9 | `[0, 4, 1]` | 6, 7, 8 |
#
# `q` has 1 + 3 = 4 rows. A context length counts the query tokens too: their KV is written first. Rows of
# `block_tables` are padded with -1.

# %% [markdown]
# What each query of request 1 may see. Its position is its place in the chunk plus `context - query` = 6.
#
# ```
#              block 0     block 4     block 1
# position   0  1  2  3  4  5  6  7  8  -  -  -
# query 6    #  #  #  #  #  #  #  .  .
# query 7    #  #  #  #  #  #  #  #  .
# query 8    #  #  #  #  #  #  #  #  #
# ```
#
# The three slots at the end of block 1 hold whatever the last owner left there. It can be NaN.

# %% [markdown]
# ### Three traps
#
# - **`-1` is a valid index.** In Python and torch it names the last element. A padding entry that is used as an index
#   reads or writes the last block.
# - **A weight of zero does not remove a value.** `0 * NaN` is NaN. Slots past the context have to stay out of the sum
#   over values, and not only out of the softmax.
# - **Query heads come in groups.** With `Hq` query heads and `Hkv` KV heads (grouped-query attention), query head `h`
#   uses KV head `h // (Hq // Hkv)`: heads 0 and 1 share KV head 0 when there are 4 and 2.

# %% [markdown]
# ### Your task (about 30 minutes)
#
# Write `write_kv`, `gather_context` and `paged_attention`. This version gathers a request's whole context and then
# computes softmax(q k^T * scale) v. Going over the requests in a Python loop is fine. Only `write_kv` and
# `paged_attention` are checked, and neither may change what it is given, except that `write_kv` fills the caches. `scale`
# is an argument: do not assume 1 / sqrt(D). The dtype is that of the arguments: mostly float32, but the models of
# exercise 9 and unit 04 run in float64.
#
# <details><summary>Hint 1: writing</summary>
#
# Look at a cache of shape `[blocks, block_size, Hkv, D]` as `[blocks * block_size, Hkv, D]`: then a slot is a row.
# `view` never copies, so an assignment through it reaches the cache. Leave the negative entries of `slot_mapping` out,
# on both sides.
#
# </details>
# <details><summary>Hint 2: gathering</summary>
#
# For each position of the context, work out its slot: the quotient by the block size picks the entry of the row, the
# remainder is the offset. Do it for a tensor of all positions at once, and index the cache, seen as slots (hint 1), with
# the result. What is never gathered cannot leak. Indexing with a tensor makes a copy, which is yours to change; views of
# the caches and of `q` are not, and torch's operations whose names end in `_` change what they are called on.
#
# </details>
# <details><summary>Hint 3: scores, heads and the causal mask</summary>
#
# Repeat each KV head as often as query heads share it, so that equal heads stand side by side (interleaved). Scores
# have the shape heads, query, context, and are multiplied by the argument `scale`. In row i, columns beyond
# `context - query + i` are hidden: set them to minus infinity before the softmax. For `query = 1` nothing is hidden.
# `torch.zeros` and its like make float32, unless they are given a `dtype`.
#
# </details>

# %% nbgrader={"grade_id": "paged-attention", "solution": true} tags=["export"]
import torch
from torch import Tensor


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write the keys and values of new tokens into their slots, in place. Changes nothing but the caches.

    Parameters
    ----------
    k_cache, v_cache : Tensor [blocks, block_size, Hkv, D]
    k, v : Tensor [T, Hkv, D], of the caches' dtype
    slot_mapping : Tensor [T], int64
        For each token ``block * block_size + offset``, or -1 for padding, which is not written.
    """
    ### BEGIN SOLUTION
    tokens = slot_mapping >= 0
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *cache.shape[2:])[slot_mapping[tokens]] = new[tokens]
    ### END SOLUTION


def gather_context(cache: Tensor, table: Tensor, context: int) -> Tensor:
    """The first ``context`` tokens of the request with this block table, [context, Hkv, D]."""
    ### BEGIN SOLUTION
    positions, block_size = torch.arange(context), cache.shape[1]
    slots = table[positions // block_size] * block_size + positions % block_size
    return cache.flatten(0, 1)[slots]
    ### END SOLUTION


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_lens: list[int],
    context_lens: list[int],
    scale: float,
) -> Tensor:
    """Causal attention of a flat batch over a paged KV cache. Does not change its arguments.

    Parameters
    ----------
    q : Tensor [T, Hq, D]
        The query tokens of all requests, one request behind another; T is the sum of ``query_lens``.
    k_cache, v_cache : Tensor [blocks, block_size, Hkv, D], of the dtype of ``q``
        The KV of the query tokens is already written. Slots that no context covers hold anything, even NaN.
    block_tables : Tensor [B, max_blocks], int64
        Padded with -1.
    query_lens, context_lens : list of int
        Per request, at least 1. A context includes its query tokens, which are its last ones.
    scale : float
        Factor on the scores.

    Returns
    -------
    Tensor [T, Hq, D], of the dtype of ``q``
    """
    ### BEGIN SOLUTION
    out, start = torch.empty_like(q), 0
    for table, query, context in zip(block_tables, query_lens, context_lens, strict=True):
        k, v = gather_context(k_cache, table, context), gather_context(v_cache, table, context)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        rows = slice(start, start + query)
        scores = torch.einsum("qhd,khd->hqk", q[rows], k) * scale
        hidden = torch.ones(query, context).triu(context - query + 1).bool()
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
        start += query
    return out
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example. The queries are 0, so each averages the values that it sees with equal weights, and the
# value of a token is its position. A query at position p must give p / 2: here 2.5, then 3, 3.5 and 4. Unused slots hold
# NaN. This looks at the mask and at the slots, not at scores, scale and heads.

# %%
k_cache, v_cache = torch.full((6, 4, 2, 8), float("nan")), torch.full((6, 4, 2, 8), float("nan"))
slots = torch.tensor([20, 21, 22, 23, 8, 9, 0, 1, 2, 3, 16, 17, 18, 19, 4, -1])  # 6 tokens, 9 tokens, padding
positions = torch.tensor([*range(6), *range(9), 99.0])
write_kv(k_cache, v_cache, torch.randn(16, 2, 8), positions[:, None, None].expand(16, 2, 8), slots)
tables = torch.tensor([[5, 2, -1], [0, 4, 1]])
out = paged_attention(torch.zeros(4, 4, 8), k_cache, v_cache, tables, [1, 3], [6, 9], scale=8**-0.5)
print("shape", list(out.shape), "- smallest and largest number of each query token:")
print(out.amin(dim=(1, 2)).tolist(), out.amax(dim=(1, 2)).tolist(), sep="\n")

# %% nbgrader={"grade_id": "paged-attention-check", "grade": true, "locked": true, "points": 12}
check("paged_kv.paged_attention", write_kv, paged_attention)

# %% [markdown]
# ## 7. One block at a time
#
# Gathering copies the whole context before the first multiplication, and the scores of a query against it are as long
# as the context. At 100,000 tokens the fast memory of a GPU has no room for either. The way out is to visit the blocks
# one by one and to keep, per query and head, a summary of what was seen. This is **online softmax** (Milakov and
# Gimelshein, 2018), the idea inside FlashAttention (Dao et al., 2022).
#
# The summary has three parts: the largest score so far (`peak`), the sum of the weights (`total`), and the weighted sum
# of the values (`mixed`). All weights are relative to `peak`: exp(score - peak).

# %% [markdown]
# ### A worked example
#
# One query, one head, values of one number, blocks of 2.
#
# | block | scores | values | `peak` | `total` | `mixed` |
# |---|---|---|---|---|---|
# | at the start | | | -inf | 0 | 0 |
# | first | 1, 2 | 10, 20 | 2 | e^-1 + 1 = 1.368 | 10 e^-1 + 20 = 23.68 |
# | second | 4, 0 | 30, 40 | 4 | 1.368 e^-2 + 1 + e^-4 = 1.203 | 23.68 e^-2 + 30 + 40 e^-4 = 33.94 |
#
# The result is `mixed / total` = 28.20, what a softmax over all four scores gives. When the peak rises from 2 to 4,
# everything summed so far shrinks by e^(2 - 4).

# %% [markdown]
# ### Why the peak
#
# float32 ends at about 3.4e38, and exp(89) is past it. A score of 100 without the peak becomes `inf`, and `inf / inf`
# is NaN. Scores far below zero fail the other way: exp(-200) is 0 in float32, and 0 / 0 is NaN too. Relative to the
# peak, the largest weight is always 1.

# %% [markdown]
# ### Your task (about 30 minutes)
#
# Write `fold_block`, which brings one block into the summary, `attend_blocks`, which visits the blocks of one request,
# and `paged_attention_blockwise`, with the arguments and the result of `paged_attention`; only the last is checked.
# Build them from torch operations; the dtype is again that of the arguments. The try-it cell compares with your
# `paged_attention`: finish exercise 6 and run its try-it cell first.
#
# **Memory.** The check records the largest tensor that your code makes. None may have more than
# `4 * block_size * Hq * D` elements for each query token of the batch: the keys of four blocks, heads repeated. Each case
# but the smallest has a context that is larger than that when it is gathered, so calling `paged_attention` earns nothing.
# In the longest, all scores of a request are larger, too. You may fold two to four blocks at a time, or step through the
# blocks of all requests together. A Python list that keeps something of every block would need the same memory again; the
# check does not see that.
#
# <details><summary>Hint 1: folding</summary>
#
# There is one peak per query and head. Find the new one first: the larger one of the old peak and the block's largest
# score. The old sums shrink by exp(old peak - new peak), both of them. Then add the block's share to each.
#
# </details>
# <details><summary>Hint 2: the start</summary>
#
# Start with a peak of minus infinity and with sums of 0. The first shrink factor is then exp(-inf) = 0. A peak that
# starts at 0 is wrong as soon as all scores are far below zero.
#
# </details>
# <details><summary>Hint 3: masks, scale and sizes</summary>
#
# The last block may be partly filled, and it counts too: cut keys and values to its tokens. In a prefill chunk, hide
# key positions beyond the query's own, as before; a later block can be hidden from a query as a whole, and then leaves
# its summary as it was. Scores are multiplied by `scale`, as in exercise 6. Repeat heads inside the loop, for one
# block; a mask is best built there too, though one for a whole context is small enough. Leave the arguments as they
# are. The sums are of the dtype of `q`.
#
# </details>

# %% nbgrader={"grade_id": "online-softmax", "solution": true} tags=["export"]
Summary = tuple[Tensor, Tensor, Tensor]


def fold_block(summary: Summary, scores: Tensor, v: Tensor) -> Summary:
    """Bring one block into a summary.

    Parameters
    ----------
    summary : (peak [H, Q], total [H, Q], mixed [H, Q, D])
    scores : Tensor [H, Q, n]
        Of the block's n tokens; minus infinity where a query may not look. In the first block every query sees at
        least one token.
    v : Tensor [n, H, D]
    """
    ### BEGIN SOLUTION
    peak, total, mixed = summary
    higher = torch.maximum(peak, scores.amax(dim=-1))
    shrink = torch.exp(peak - higher)
    weights = torch.exp(scores - higher.unsqueeze(-1))
    added = torch.einsum("hqn,nhd->hqd", weights, v)
    return higher, total * shrink + weights.sum(dim=-1), mixed * shrink.unsqueeze(-1) + added
    ### END SOLUTION


def attend_blocks(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, context: int, scale: float) -> Tensor:
    """Attention of one request's queries [Q, Hq, D] over the first ``context`` tokens of its block table."""
    ### BEGIN SOLUTION
    rows, block_size, group = q.transpose(0, 1), k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    positions = torch.arange(context - len(q), context)[:, None]
    summary = torch.full(rows.shape[:2], float("-inf")), torch.zeros(rows.shape[:2]), torch.zeros(rows.shape)
    for first in range(0, context, block_size):
        keys = torch.arange(first, min(first + block_size, context))
        block = table[first // block_size]
        k, v = (cache[block, : len(keys)].repeat_interleave(group, dim=1) for cache in (k_cache, v_cache))
        scores = torch.einsum("hqd,nhd->hqn", rows, k) * scale
        summary = fold_block(summary, scores.masked_fill(keys > positions, float("-inf")), v)
    _, total, mixed = summary
    return (mixed / total.unsqueeze(-1)).transpose(0, 1)
    ### END SOLUTION


def paged_attention_blockwise(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_lens: list[int],
    context_lens: list[int],
    scale: float,
) -> Tensor:
    """`paged_attention`, one block at a time: same arguments, left unchanged, same result, no gathered context.

    No tensor of more than ``4 * block_size * Hq * D`` elements for each query token of the batch is made on the way.
    """
    ### BEGIN SOLUTION
    out, start = torch.empty_like(q), 0
    for table, query, context in zip(block_tables, query_lens, context_lens, strict=True):
        rows = slice(start, start + query)
        out[rows] = attend_blocks(q[rows], k_cache, v_cache, table, context, scale)
        start += query
    return out
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example of this exercise, then both versions on the batch of the last one, with random values. A
# difference above 1e-5 is not rounding.

# %%
summary = (torch.tensor([[float("-inf")]]), torch.zeros(1, 1), torch.zeros(1, 1, 1))
for scores, numbers in (([1.0, 2.0], [10.0, 20.0]), ([4.0, 0.0], [30.0, 40.0])):
    summary = fold_block(summary, torch.tensor([[scores]]), torch.tensor(numbers).reshape(2, 1, 1))
    print("peak {:.0f}, total {:.3f}, mixed {:.2f}".format(*(part.item() for part in summary)))
write_kv(k_cache, v_cache, torch.randn(16, 2, 8), torch.randn(16, 2, 8), slots)
batch = torch.randn(4, 4, 8), k_cache, v_cache, tables, [1, 3], [6, 9], 8**-0.5
print("largest difference", (paged_attention(*batch) - paged_attention_blockwise(*batch)).abs().max().item())

# %% nbgrader={"grade_id": "online-softmax-check", "grade": true, "locked": true, "points": 8}
check("paged_kv.online_softmax", paged_attention_blockwise)

# %% [markdown]
# ## 8. Is this state sound?
#
# The bugs of this unit have one thing in common: the call that does the damage returns normally. A reference count that
# was not lowered, a block in the free list twice: the crash, or a stranger's answer, comes thousands of iterations
# later. vLLM has had such reports (issues 1556, 1584 and 42571 are double frees). So a server's tests look at the whole
# state after every step and ask whether it **can** be right. You write that check.

# %% [markdown]
# ### What a snapshot means
#
# A snapshot is plain data:
#
# | key | content |
# |---|---|
# | `num_blocks` | size of the pool; ids run from 0 to `num_blocks - 1` |
# | `free` | list: blocks that nobody holds and that have no content worth keeping |
# | `cached` | list: blocks that nobody holds, kept for a later prefix hit; these may be evicted |
# | `refs` | dict: block -> reference count; a block that is not named has count 0 |
# | `tables` | dict: name of a sequence -> its block ids in order |
#
# A cached block that a sequence has taken again stands in that sequence's table and no longer in `cached`.

# %% [markdown]
# ### The rules
#
# 1. Every id, wherever it is named, is in range.
# 2. Every block is in exactly one place: once in `free`, or once in `cached`, or held by tables. A block that is
#    nowhere is **leaked**.
# 3. The reference count of a block is the number of tables that hold it.
# 4. No table names a block twice.

# %% [markdown]
# ### A worked example
#
# `num_blocks=4`, tables `a: [0, 1]` and `b: [0]`, `cached=[3]`.
#
# | `free` | `refs` | what is wrong |
# |---|---|---|
# | `[2]` | 0: 2, 1: 1 | nothing |
# | `[]` | 0: 2, 1: 1 | block 2 is leaked |
# | `[2, 2]` | 0: 2, 1: 1 | block 2 is listed twice: two sequences will get it |
# | `[2, 1]` | 0: 2, 1: 1 | block 1 is free and held by `a` |
# | `[2, 3]` | 0: 2, 1: 1 | block 3 is free and cached |
# | `[2]` | 0: 1, 1: 1 | block 0 is held by two: the first to leave frees it under the other |

# %% [markdown]
# ### Your task (about 15 minutes)
#
# Write `violations`. It returns a list of text: empty if the state is sound, at least one line if it is broken. The
# wording is yours; a line for each thing that is wrong, with the block's id, is what the reader of a failed test wants.
#
# A snapshot has all five keys, and all ids and counts in it are integers. Everything else may be wrong, and must not make
# your function raise. It leaves the snapshot as it is. Its cost should be O(size of the snapshot), because it runs after
# every step of every test; the check does not measure that.
#
# <details><summary>Hint 1: ids first</summary>
#
# A negative id is a valid index of a Python list. Collect the ids from all four places into dictionaries or counters of
# your own, compare them with `range(num_blocks)`, and use no list that is indexed by block. The snapshot belongs to the
# caller: sort or empty copies only.
#
# </details>
# <details><summary>Hint 2: one place</summary>
#
# For each block, count its places: how often in `free`, how often in `cached`, and one if any table holds it. Leaked
# is 0, and 2 or more is a collision, whichever two places they are.
#
# </details>
# <details><summary>Hint 3: holders</summary>
#
# Count holders from the tables alone, one per table however often it names the block. Then compare with `refs`, for
# every block of the pool and not only for those that `refs` names.
#
# </details>


# %% nbgrader={"grade_id": "violations", "solution": true} tags=["export"]
def violations(snapshot: dict) -> list[str]:
    """What is wrong with a server's block bookkeeping, in lines of text; empty if nothing is. O(size of the snapshot).

    Parameters
    ----------
    snapshot : dict
        ``num_blocks`` (int), ``free`` and ``cached`` (lists of ids), ``refs`` (id -> count), ``tables`` (name -> ids).
        Not changed.
    """
    ### BEGIN SOLUTION
    blocks, tables, refs = range(snapshot["num_blocks"]), snapshot["tables"], snapshot["refs"]
    holders = Counter(block for table in tables.values() for block in set(table))
    places = Counter(snapshot["free"]) + Counter(snapshot["cached"]) + Counter(holders.keys())
    found = [f"block {block} does not exist" for block in {*places, *refs} if block not in blocks]
    found += [f"table {name} names a block twice" for name, table in tables.items() if len(set(table)) < len(table)]
    for block in blocks:
        if places[block] != 1:
            found.append(f"block {block} is in {places[block]} places")
        if refs.get(block, 0) != holders[block]:
            found.append(f"block {block}: its reference count is not {holders[block]}, the number of its holders")
    return found
    ### END SOLUTION


# %% [markdown]
# Try it: a sound state, and one in which a sequence left without lowering its counts.

# %%
sound = {"num_blocks": 4, "free": [2], "cached": [3], "refs": {0: 2, 1: 1}, "tables": {"a": [0, 1], "b": [0]}}
print("sound: ", violations(sound))
print("broken:", violations({**sound, "tables": {"a": [0, 1]}}))

# %% nbgrader={"grade_id": "violations-check", "grade": true, "locked": true, "points": 7}
check("paged_kv.violations", violations)

# %% [markdown]
# ## 9. A model on your pages
#
# Does all of this serve a language model? The course has a tiny one, of two layers, whose tokens are bytes. A **plain
# loop** serves it one request at a time, with the KV in one piece: compute all tokens that are new, take the likeliest
# next token, go on with that one. Now your parts take over the KV, and every answer has to be the plain loop's, token by
# token. All of it is computed in float64, so that no rounding decides between two tokens.
#
# Units 04, 06 and 11 make the same comparison with what they build.

# %% [markdown]
# ### What is missing
#
# A little glue: it asks the table for room and tells the model where everything is. The model takes a step as a **flat
# batch**, here of one request. `FlatBatch(tokens, positions, query_lens, context_lens, slot_mapping, block_tables)` has:
#
# | field | content |
# |---|---|
# | `tokens` | the ids of the new tokens, a tensor |
# | `positions` | the place of each in its sequence, a tensor |
# | `query_lens` | `[new tokens]` |
# | `context_lens` | `[all tokens so far, the new ones among them]` |
# | `slot_mapping` | the slot of each new token, a tensor |
# | `block_tables` | one row of block ids for each request, a tensor |
#
# The tensors hold int64, which `torch.tensor` makes of a list of int. The last four are arguments of your `write_kv` and `paged_attention`, which the model calls in each layer.

# %% [markdown]
# ### A worked example
#
# `block_size=4`, a prompt of the five tokens `p0` to `p4`, and the pool hands out 3, then 1. A row is a forward pass.
#
# | `tokens` | `positions` | `query_lens` | `context_lens` | `slot_mapping` | `block_tables` | gives |
# |---|---|---|---|---|---|---|
# | p0 to p4 | 0 to 4 | `[5]` | `[5]` | 12, 13, 14, 15, 4 | `[[3, 1]]` | a0 |
# | a0 | 5 | `[1]` | `[6]` | 5 | `[[3, 1]]` | a1 |
# | a1 | 6 | `[1]` | `[7]` | 6 | `[[3, 1]]` | a2 |
#
# After an answer of three tokens the table holds seven: `a2` was never fed back, so it has no slot. If a prefix cache had
# found p0 to p3 in block 3, the first row would have been p4 alone, at position 4 and in slot 4.

# %% [markdown]
# ```
#   table.num_tokens = 4, from a hit               one pass
#          |
#   p0 p1 p2 p3 | p4            --append(1)-->   p4 at position 4   --forward, logits, argmax-->   a0
#   in the pages  to compute                                                                        |
#   p0 p1 p2 p3 p4 | a0         <-------------------------------------------------------------------+
# ```

# %% [markdown]
# ### Your task (about 25 minutes)
#
# Write `generate`, a generator that yields the tokens of an answer. One `next` is one forward pass, so whoever calls it
# can let requests take turns. It goes on from what its table holds: those tokens are not computed again. It ends behind
# the end-of-sequence token, which belongs to the answer, or after `max_tokens` tokens. The table is the caller's, who
# releases it: a fork or a prefix cache may still need it.
#
# **The check runs your earlier parts, too**: `BlockAllocator`, `ForkableTable`, `PrefixCache`, `write_kv`,
# `paged_attention`, and `copy_blocks`, which your `generate` calls. One that is not written yet fails here as well, and
# one that is wrong may. The ways:
#
# - requests take turns, a token each, so that their blocks lie interleaved;
# - a prompt is computed all but its last token, then forked, and the forks go on in different ways;
# - a table is forked in the middle of an answer, and both go on;
# - each prompt begins with what the prefix cache has found of it.
#
# Slots that were never written hold NaN. The check compares tokens, and looks at which positions each pass computes and
# whether attention reads the pages once in every layer.

# %% [markdown]
# <details><summary>Hint 1: what is new</summary>
#
# In the first pass, all tokens behind those that the table holds. In every later one, the token that was yielded last.
# The list of tokens is the caller's: take a part of it, and add nothing to it.
#
# </details>
# <details><summary>Hint 2: a pass</summary>
#
# Remember `table.num_tokens`, then append, for the new tokens alone. The old number is the first position, the number
# afterwards is the length of the context, and between the two lie the slots. `pages.bind(batch)` is the third argument
# of `model.forward`. Only the last row of what it returns says what comes next: give that row to `model.logits`.
#
# </details>
# <details><summary>Hint 3: copies, turns and the end</summary>
#
# `append` returns copies of blocks. Make them before the pass, in the caches of every layer: `pages.caches` has a pair a
# layer, and your `copy_blocks` of exercise 3 moves them. A fork that is wrong from its first token has read a block
# that was never copied.
#
# Yield each token in the pass that gives it, and return if it was `model.config.eos_token_id`. Room for a token is asked
# for at the beginning of the pass that computes it: a token that ends the answer needs none. An error about two dtypes
# comes from a `write_kv` or `paged_attention` that makes a tensor in float32: run the check of exercise 6 again.
#
# </details>

# %% tags=["export"]
from collections.abc import Iterator

from servelab.llm import LLM
from servelab.llm.kv import Pages
from servelab.serving import FlatBatch


# %% nbgrader={"grade_id": "token-exact", "solution": true} tags=["export"]
def generate(model: LLM, pages: Pages, table: ForkableTable, tokens: Sequence[int], max_tokens: int) -> Iterator[int]:
    """The likeliest next token, again and again, with the KV in pages; each ``next`` runs one forward pass.

    Parameters
    ----------
    model : LLM
        ``forward(tokens, positions, kv)`` gives a hidden state [T, hidden_size], ``logits(hidden)`` the scores.
        ``config.eos_token_id`` is the id of the end-of-sequence token.
    pages : Pages
        ``caches`` has a pair (k_cache, v_cache) for each layer, ``bind(batch)`` makes the ``kv`` of a pass.
    table : ForkableTable
        Of this request. The KV of its ``num_tokens`` tokens, the first of ``tokens``, is in the pages.
    tokens : sequence of int
        The prompt, at least one token longer than what the table holds. Not changed.
    max_tokens : int
        The most tokens to yield, at least 1. The end-of-sequence token is the last one if it comes.

    Yields
    ------
    int
    """
    ### BEGIN SOLUTION
    new = tokens[table.num_tokens :]
    for _ in range(max_tokens):
        start = table.num_tokens
        copies = table.append(len(new))
        for caches in pages.caches:
            copy_blocks(*caches, copies)
        context = table.num_tokens
        slots, blocks = torch.tensor(table.slots(start, context)), torch.tensor([table.blocks])
        batch = FlatBatch(torch.tensor(new), torch.arange(start, context), [len(new)], [context], slots, blocks)
        hidden = model.forward(batch.tokens, batch.positions, pages.bind(batch))
        token = int(model.logits(hidden[-1]).argmax())
        yield token
        if token == model.config.eos_token_id:
            return
        new = [token]
    ### END SOLUTION


# %% [markdown]
# Try it: the three ways, with answers of up to 24 tokens: four requests in turns, two forks of one prompt, and four
# requests with a prefix cache, which has 48 of their tokens to find. This compares tokens only; the check looks at room
# and passes too.

# %%
from servelab.llm import thread

thread.paged_kv(generate, BlockAllocator, ForkableTable, PrefixCache, write_kv, paged_attention)

# %% nbgrader={"grade_id": "token-exact-check", "grade": true, "locked": true, "points": 5}
check("paged_kv.token_exact", generate, BlockAllocator, ForkableTable, PrefixCache, write_kv, paged_attention)

# %% [markdown]
# ## 10. Looking back
#
# Six short questions (about 7 minutes). Everything that you need stands in this unit.
#
# - **mean empty slots**: how many slots does a sequence leave empty in its last block, on average, with blocks of 24 and
#   all ends equally likely?
# - **what 20.4 % is**: Fig. 2 gives 20.4 % for Orca (Max). Which share of the KV memory is that: `"used"`, `"reserved"`,
#   `"internal"` or `"external"`?
# - **regions that fit**: the pool has 15,728 slots, and the policy is `max` with `max_len=1024`. How many requests can
#   run at once?
# - **batching without paging**: see A below.
# - **recomputed block**: a prompt of 96 tokens, blocks of 32, all three blocks cached. Which block, 0, 1 or 2, is computed
#   again?
# - **why values are masked**: see B below.

# %% [markdown]
# **A.** Orca added requests to a running batch in every iteration, and reserved the longest length for each. So:
#
# - (a) its batch could not change, because without blocks no request can join a running batch;
# - (b) it saved memory, because a request that leaves early makes room for the next;
# - (c) joining a running batch is a question of scheduling and needs no paging; paging lets more requests join.
#
# **B.** A slot beyond the context has weight 0 after the softmax. Its value still has to stay out of the sum:
#
# - (a) a softmax in float32 never gives exactly 0, so a little of the value would leak;
# - (b) the slot may hold NaN or inf, and 0 times either is NaN;
# - (c) otherwise the weights would no longer add up to 1.
#
# In the cell, replace each `None` and delete the line that raises.
#
# <details><summary>Hint 1: where to look</summary>
#
# The first three are in exercise 5: the block sizes, the table of Fig. 2, and what agrees with it. The recomputed block
# is in exercise 4: the last token is never a hit. A follows from the policy `max` of exercise 5, B from the traps of
# exercise 6.
#
# </details>

# %% nbgrader={"grade_id": "reflection", "solution": true} tags=["export"]
answers = {
    "mean empty slots": None,  # a number
    "what 20.4 % is": None,  # "used", "reserved", "internal" or "external"
    "regions that fit": None,  # a number
    "batching without paging": None,  # "a", "b" or "c"
    "recomputed block": None,  # a number
    "why values are masked": None,  # "a", "b" or "c"
}
### BEGIN SOLUTION
answers["mean empty slots"] = 11.5
answers["what 20.4 % is"] = "used"
answers["regions that fit"] = 15
answers["batching without paging"] = "c"
answers["recomputed block"] = 2
answers["why values are masked"] = "b"
### END SOLUTION

# %%
for question, answer in answers.items():
    print(f"{question}: {answer}")

# %% nbgrader={"grade_id": "reflection-check", "grade": true, "locked": true, "points": 4}
check("paged_kv.reflection", answers)

# %% [markdown]
# ### In your own words (about 8 minutes)
#
# A colleague proposes blocks of 256 tokens: "block tables get 16 times shorter, and we waste at most 255 tokens, which
# is nothing against a context of 8,192". Requests average 400 tokens, and half of them share a system prompt of
# 200 tokens. Advise for or against, in about 100 words.
#
# Three points, given by hand, one each:
#
# 1. the waste, in numbers: slots per sequence on average, and as a share of what such a request takes up;
# 2. the effect on prefix sharing: which part of a system prompt can be shared at all;
# 3. what larger blocks do improve, and a block size that you would choose, with a reason.

# %% [markdown] nbgrader={"grade_id": "trade-offs", "grade": true, "solution": true, "points": 3}
# ### BEGIN SOLUTION
# Against. A sequence wastes (256 - 1) / 2 = 127.5 slots on average: a quarter of the 400 + 127.5 that a request of
# average length takes up, against 7.5 of 407.5, or under 2 %, at 16. The 8,192 do not matter, as the requests are short.
#
# Only full blocks are shared. A system prompt of 200 tokens does not fill one block of 256, so it is shared by nobody.
# At 16, 12 blocks or 192 of its 200 tokens are.
#
# Larger blocks do make tables shorter, allocate less often and read longer runs of memory. At 400 tokens a table has 25
# entries at 16, which costs little. I would take 16, or 32 if the attention kernel measurably gains: 15.5 slots wasted,
# and 192 tokens still shared.
# ### END SOLUTION
