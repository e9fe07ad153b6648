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
# # 05 Collectives
#
# Several GPUs that work on one model have to bring their partial results together. In tensor parallelism (unit 06) each
# rank computes a part of a sum, and every rank needs the whole: an **all-reduce**, twice per layer in a forward pass
# (Shoeybi et al., Megatron-LM, 2019). For a model of 80 layers that is 160 all-reduces for each decoded token.
#
# The library call is one line. What it costs depends on the algorithm behind it, and there are several. In this unit
# you write them yourself out of sends and receives, count what they send, and predict their time.

# %% [markdown]
# ## What you build
#
# | | exercise | what it answers | points | minutes |
# |---|---|---|---|---|
# | 1 | `naive_all_reduce` | How do ranks talk to each other? | 8 | 15 |
# | 2 | `exchange` | How can all of them send at once without a deadlock? | 10 | 15 |
# | 3 | `ring_reduce_scatter` | How is a sum built while it goes round? | 15 | 30 |
# | 4 | `ring_all_gather` | How does everybody get all of it? | 8 | 10 |
# | 5 | `ring_all_reduce` | What does a ring send? | 8 | 10 |
# | 6 | `tree_all_reduce` | And if the messages are small? | 10 | 25 |
# | 7 | `costs` | How long does each take, and which one is faster? | 9 | 20 |
# | 8 | `bandwidths` | What do benchmarks report? | 4 | 10 |
# | 9 | `fit_alpha_beta` | What are alpha and beta of this machine? | 6 | 15 |
# | 10 | `all_to_all` | What if everybody has something for everybody? | 8 | 15 |
# | 11 | reflection | | 14 | 30 |
#
# About three hours in all.

# %% [markdown]
# ## Ranks
#
# Your functions are ordinary `torch.distributed` code. Every **rank** runs the same function; what it does depends on
# its number. The code of a rank runs in one thread and starts no others. Two engines run it:
#
# - `SimCluster(p)` simulates p ranks in this notebook. Time is virtual, so runs repeat exactly, links have the latency
#   and bandwidth that you give them, and a deadlock is reported at once. The checks use it.
# - `Cluster(p)` starts p processes, which talk over gloo (NCCL where there is a GPU for each). It shows that your code
#   is the real thing.
#
# Both return a `Run`: `values` has what the function returned on each rank, `events` every message, `seconds` the time.

# %% tags=["export"]
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from servelab.checking import check

# %%
from servelab.ranks import Link, RankError, SimCluster, device


def hello() -> torch.Tensor:
    """Rank 0 sends two numbers to rank 1."""
    tensor = torch.tensor([3.0, 4.0]) if dist.get_rank() == 0 else torch.zeros(2)
    if dist.get_rank() == 0:
        dist.send(tensor, group_dst=1)
    else:
        dist.recv(tensor, group_src=0)
    return tensor


hello_run = SimCluster(2, link=Link(alpha=5e-6, bandwidth=1e9)).run(hello)
print(hello_run.values)
print([(event.rank, event.kind, event.peer, event.nbytes) for event in hello_run.events])
print(f"{hello_run.seconds * 1e6:.3f} microseconds: alpha 5 us, and 8 bytes at 1 GB/s")

# %% [markdown]
# ### Groups
#
# Later units run several collectives side by side, each in its own **group** of ranks. So every function of this unit
# has a parameter `group`; `None` means all ranks. A rank then has two numbers:
#
# | | ask with | in the group of the ranks 0, 2, 4 |
# |---|---|---|
# | global rank | `dist.get_rank()` | 0, 2, 4 |
# | group rank | `dist.get_rank(group)` | 0, 1, 2 |
#
# `dist.get_world_size(group)` is the number of ranks in the group. Positionally, `send(tensor, 1)` means the *global*
# rank 1, with any group. To count within the group, name the argument: `dist.send(tensor, group=group, group_dst=1)`
# means the second rank of the group. `recv` has `group_src=`, `dist.P2POp` has `group_peer=`. Where `group` is None,
# both numbers are the same.

# %% [markdown]
# ## 1. The naive all-reduce
#
# Every rank sends its tensor to the first rank of the group, the root. The root adds them up and sends the sum back to
# each.
#
# | p = 4 | rank 0 | rank 1 | rank 2 | rank 3 |
# |---|---|---|---|---|
# | before | 1, 5 | 2, 6 | 3, 7 | 4, 8 |
# | rank 0 has received and added | 10, 26 | 2, 6 | 3, 7 | 4, 8 |
# | rank 0 has sent | 10, 26 | 10, 26 | 10, 26 | 10, 26 |
#
# ```
#  1 ──┐             ┌── 1
#  2 ──┼──> 0   0 ───┼── 2
#  3 ──┘             └── 3
# ```
#
# All tensors have the same size n. All ranks together send 2(p-1)n elements, and the root's link carries all of them.

# %% [markdown]
# ### Your task (about 15 minutes)
#
# Write `naive_all_reduce`. It works **in place**: afterwards the tensor itself holds the sum, as with
# `dist.all_reduce`. Use `dist.send` and `dist.recv`. The ready collectives are what you are writing: the check sees
# calls to them, and a sum that one of them may have made earns no points.
#
# Nothing moves before both sides have made their call, so each send needs its receive on the other side. Then `recv`
# returns when the message has arrived, and `send` as soon as the last byte has left; that byte may still be on its way.
#
# <details><summary>Hint 1: who does what</summary>
#
# There are two kinds of rank. The root receives from everybody, adds, and sends to everybody. Any other rank sends its
# tensor to the root, then receives into the same tensor. Adding must change the tensor, not make a new one. `dist.send`
# and `dist.recv` are all that it takes; no call of `dist.all_reduce`, `dist.reduce` or `dist.broadcast`.
#
# </details>
# <details><summary>Hint 2: the root</summary>
#
# The root needs a second tensor of the same kind to receive into. One after the other, it receives from the ranks 1 to
# p - 1 and adds each at once. Only when it has all of them does it begin to send. With one rank there is nobody to
# receive from, and nothing to do.
#
# </details>
# <details><summary>Hint 3: groups</summary>
#
# Ask for the rank and for the number of ranks *in the group*, pass the group on to each send and receive, and name the
# other side by its number in the group: `group_dst` and `group_src`.
#
# </details>


# %% nbgrader={"grade_id": "naive-all-reduce", "solution": true} tags=["export"]
def naive_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum a tensor over the ranks of a group, in place, by way of the group's first rank.

    The root sends and receives (p - 1) n elements, every other rank n.

    Parameters
    ----------
    tensor : torch.Tensor
        Contiguous, of the same shape and dtype on every rank. Holds the sum afterwards.
    group : ProcessGroup, optional
        Whose ranks take part; all of them call this. None is everybody.
    """
    ### BEGIN SOLUTION
    if dist.get_rank(group) > 0:
        dist.send(tensor, group=group, group_dst=0)
        dist.recv(tensor, group=group, group_src=0)
        return
    others = range(1, dist.get_world_size(group))
    incoming = torch.empty_like(tensor)
    for rank in others:
        dist.recv(incoming, group=group, group_src=rank)
        tensor += incoming
    for rank in others:
        dist.send(tensor, group=group, group_dst=rank)
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example. `on_ranks` is what the cells below use to call one of your functions on simulated ranks.
# (Every rank gets its own copy of what the function refers to, so the list here stays as it is.)


# %%
def on_ranks(collective, tensors: Sequence[torch.Tensor], link: Link | None = None):
    """Call ``collective`` on as many simulated ranks as there are tensors; ``values`` are the tensors afterwards."""

    def one_rank():
        tensor = tensors[dist.get_rank()]
        collective(tensor)
        return tensor

    return SimCluster(len(tensors), link=link or Link()).run(one_rank)


naive_run = on_ranks(naive_all_reduce, [torch.tensor([rank + 1, rank + 5]) for rank in range(4)])
print(naive_run.values)
print("elements sent:", [naive_run.sent(rank) // 8 for rank in range(4)], "of 8 bytes each")

# %% nbgrader={"grade_id": "naive-all-reduce-check", "grade": true, "locked": true, "points": 8}
check("collectives.naive_all_reduce", naive_all_reduce)

# %% [markdown]
# ## 2. Everybody sends at once
#
# The root was the bottleneck: at any time one message moved, and the other links were idle. In a **ring** each rank
# sends to the rank after it, all at the same time. The first attempt is one line for each direction:


# %%
def send_first() -> None:
    """Every rank sends to the next one, then receives from the one before."""
    rank, p = dist.get_rank(), dist.get_world_size()
    dist.send(torch.ones(1), group_dst=(rank + 1) % p)
    dist.recv(torch.empty(1), group_src=(rank - 1) % p)


try:
    SimCluster(3).run(send_first)
except RankError as error:
    print(error)

# %% [markdown]
# Nobody receives, because everybody is still sending. A send that is not buffered is a **rendezvous**: it waits until
# the other side receives. gloo does that at every size, and NCCL wants sends and receives that need each other started
# together, in one batch (it calls that a group call). MPI may buffer small messages; then such code works in a test
# with small tensors and hangs with large ones.
#
# The way out is to start both and then wait for both:
#
# - `work = dist.isend(tensor, ...)` and `work = dist.irecv(tensor, ...)` return at once; `work.wait()` returns when
#   `send` or `recv` would have. Until then, do not change what is sent and do not read what is received. (A loop that
#   asks `is_completed()` is no substitute: in the simulation each question takes 10 µs of virtual time.)
# - `dist.P2POp(dist.isend, tensor, group=group, group_peer=1)` describes a send to group rank 1 without starting it, and
#   the same with `dist.irecv` a receive. `dist.batch_isend_irecv` takes a list of them, starts all together and returns
#   a list of works. NCCL needs this form where two ranks send to each other.

# %% [markdown]
# ### A worked example
#
# p = 3, each rank sends to the next and receives from the one before. The tensors need not have equal sizes.
#
# | rank | outgoing | to | source | incoming afterwards |
# |---|---|---|---|---|
# | 0 | 7 | 1 | 2 | 9, 9, 9 |
# | 1 | 8, 8 | 2 | 0 | 7 |
# | 2 | 9, 9, 9 | 0 | 1 | 8, 8 |
#
# ```
#  0 ──> 1 ──> 2 ──┐       one message on every link, at the same time
#  └───────────────┘
# ```

# %% [markdown]
# ### Your task (about 15 minutes)
#
# Write `exchange`. MPI calls it `MPI_Sendrecv`. `to` and `source` are ranks *of the group*, and a rank may be its own
# partner: then incoming gets a copy, and no message is sent. The ring and the all-to-all will stand on this function.
#
# <details><summary>Hint 1: both at once</summary>
#
# Neither of the blocking calls can come first on all ranks. Sending first on even ranks and receiving first on odd ones
# is no way out: if rank 0 and rank 2 have each other for partners, both send first. Where partners are neighbours on a
# ring it ends, but takes twice as long, with an odd number of ranks up to three times. Start a send and a receive that
# both return at once, then wait for both.
#
# </details>
# <details><summary>Hint 2: with whom, and with itself</summary>
#
# Outgoing goes to `to`, and incoming is filled from `source`; mixed up, the sizes do not fit. If the rank is its own
# partner, no message is needed (`dist.send` refuses one; `isend` may not, and the check does). Copy the contents of one
# tensor into the other. Outgoing stays as it is.
#
# </details>
# <details><summary>Hint 3: nearly code</summary>
#
# If `to` is this rank's number in the group, copy and return. Otherwise make a list of two `P2POp`, each with the group
# and with `group_peer`; hand it to `batch_isend_irecv`; wait for each of the works that it returns.
#
# </details>


# %% nbgrader={"grade_id": "exchange", "solution": true} tags=["export"]
def exchange(
    outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int, group: dist.ProcessGroup | None = None
) -> None:
    """Send a tensor to one rank while receiving another one from a rank; return when both are done.

    Parameters
    ----------
    outgoing : torch.Tensor
        What to send. Contiguous; not changed.
    to : int
        Rank of the group that receives it.
    incoming : torch.Tensor
        Contiguous; overwritten by what ``source`` sends, which has its size and dtype.
    source : int
        Rank of the group that sends it. This rank itself exactly if ``to`` is this rank.
    group : ProcessGroup, optional
        None is everybody.
    """
    ### BEGIN SOLUTION
    if to == dist.get_rank(group):
        incoming.copy_(outgoing)
        return
    operations = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=to),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example, on links that take one second for a message.


# %%
def pass_on() -> torch.Tensor:
    """Rank r sends r + 1 numbers to the next rank."""
    rank, p = dist.get_rank(), dist.get_world_size()
    source = (rank - 1) % p
    incoming = torch.empty(source + 1)
    exchange(torch.full((rank + 1,), 7.0 + rank), (rank + 1) % p, incoming, source)
    return incoming


shift_run = SimCluster(3, link=Link(alpha=1.0)).run(pass_on)
print(shift_run.values, f"{shift_run.seconds:g} second")

# %% nbgrader={"grade_id": "exchange-check", "grade": true, "locked": true, "points": 10}
check("collectives.exchange", exchange)

# %% [markdown]
# ## 3. The first half of the ring: reduce-scatter
#
# Cut the tensor into p **chunks**. Chunk c starts its way at rank c + 1 and goes round the ring, to rank c + 2, and so
# on. Each rank that it comes to adds its own share. After p - 1 hops it arrives at rank c, and the sum is complete. As
# there are p chunks, each at another place of the ring, every rank sends and receives in every hop.
#
# At the end rank r holds the sum of chunk r, and of no other chunk: a **reduce-scatter**. (Patarasuk and Yuan, 2009,
# show that no all-reduce gets by with less traffic per rank than this and the second half.)

# %% [markdown]
# ### A worked example
#
# p = 3. Written in a cell is whose shares the rank has added up in that chunk; "012" is complete.
#
# | | chunk 0 | chunk 1 | chunk 2 | sends | receives |
# |---|---|---|---|---|---|
# | rank 0 | 0 | 0 | 0 | chunk 2 | chunk 1 |
# | rank 1 | 1 | 1 | 1 | chunk 0 | chunk 2 |
# | rank 2 | 2 | 2 | 2 | chunk 1 | chunk 0 |
# | *after hop 1* | | | | | |
# | rank 0 | 0 | 02 | 0 | chunk 1 | chunk 0 |
# | rank 1 | 1 | 1 | 01 | chunk 2 | chunk 1 |
# | rank 2 | 12 | 2 | 2 | chunk 0 | chunk 2 |
# | *after hop 2* | | | | | |
# | rank 0 | **012** | 02 | 0 | | |
# | rank 1 | 1 | **012** | 01 | | |
# | rank 2 | 12 | 2 | **012** | | |

# %% [markdown]
# ### The chunks
#
# The size n need not be a multiple of p: chunks differ by one element at most, the longer ones first. `tensor_split` of
# torch cuts so. For n = 7 and p = 3 the sizes are 3, 2, 2; for n = 2 and p = 4 they are 1, 1, 0, 0; an empty chunk may
# be sent or skipped. Nothing is padded: rank r sends n elements less its own chunk.
#
# Chunks are **views**: adding to a chunk in place changes the tensor. `tensor_split` returns them in a tuple, and
# `chunks[i] += ...` would also put something new into the tuple, which Python refuses: give the chunk a name first, or
# use the tensor's method `add_`.
#
# The tensor must lie in one piece of memory (*contiguous*). `tensor.view(-1)` is a flat view, or an error if there is
# none. `tensor.reshape(-1)` makes a copy in that case without a word, and the sums would land in the copy.

# %% [markdown]
# ### Your task (about 30 minutes)
#
# Write `ring_reduce_scatter`, for a tensor of any shape. What the other chunks hold afterwards does not matter.
# `exchange` does the sending. A ring that goes the other way round, on all ranks, passes as well. But all chunks go the
# same way: two half rings in opposite directions are another algorithm, which the check turns down.
#
# A tensor that is not contiguous is refused with an error, as by `dist.all_reduce`. (Reducing it correctly is accepted,
# too. What must not happen is that it comes back unchanged.)
#
# <details><summary>Hint 1: a hop</summary>
#
# In each of p - 1 hops, a rank sends one chunk to the rank after it and receives another one from the rank before it,
# in one exchange. What arrives must be *added* to the rank's own chunk, so receive it into a buffer. A rank never talks
# to anybody else.
#
# </details>
# <details><summary>Hint 2: which chunk</summary>
#
# Read the table above: in the first hop rank r sends the chunk with the number before its own, and receives the one
# before that. In each later hop it sends what it has just received and added to. So both numbers go down by one a hop,
# and wrap around: modulo p. In the last hop the rank receives its own chunk.
#
# </details>
# <details><summary>Hint 3: sizes, groups, and what to return</summary>
#
# The chunk that arrives may be one element shorter than the longest, and the buffer must fit it exactly, in size and
# dtype: make a new one for each hop, or use the front of one that has the size of chunk 0. All numbers, of ranks and of
# chunks, are numbers in the group. Cut a flat view, not the first dimension, and no flattening that may copy. Return
# this rank's chunk of it, a view and no clone. With one rank there is no hop, and its chunk is the whole tensor, flat.
#
# </details>


# %% nbgrader={"grade_id": "ring-reduce-scatter", "solution": true} tags=["export"]
def ring_reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum a tensor over the ranks of a group, in place; rank r gets chunk r of p. p - 1 hops round the ring.

    Rank r sends n elements less its own chunk.

    Parameters
    ----------
    tensor : torch.Tensor
        Contiguous, of the same shape and dtype on every rank, of any size. Afterwards its chunk r, as `tensor_split`
        cuts the flat tensor into p, holds the sum; the rest is undefined.
    group : ProcessGroup, optional
        None is everybody.

    Returns
    -------
    torch.Tensor
        Chunk r: a flat view of the tensor.

    Raises
    ------
    RuntimeError
        If the tensor is not contiguous.
    """
    ### BEGIN SOLUTION
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.view(-1).tensor_split(p)
    for hop in range(1, p):
        mine = chunks[(rank - hop - 1) % p]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - hop) % p], (rank + 1) % p, incoming, (rank - 1) % p, group)
        mine += incoming
    return chunks[rank]
    ### END SOLUTION


# %% [markdown]
# Try it: rank r contributes 10 to the power of r, so each digit shows whether that rank's share is in. n = 7, p = 3.

# %%
scatter_run = on_ranks(ring_reduce_scatter, [torch.full((7,), 10**rank) for rank in range(3)])
for rank, tensor in enumerate(scatter_run.values):
    print(f"rank {rank}:", [chunk.tolist() for chunk in tensor.tensor_split(3)], scatter_run.sent(rank) // 8, "sent")

# %% nbgrader={"grade_id": "ring-reduce-scatter-check", "grade": true, "locked": true, "points": 15}
check("collectives.ring_reduce_scatter", ring_reduce_scatter)

# %% [markdown]
# ## 4. The second half: all-gather
#
# Rank r holds chunk r, complete. Now every rank needs all of them: the chunks go round once more, and this time a rank
# keeps what arrives instead of adding it.
#
# p = 3; a dot is anything:
#
# | | before | sends, receives | after hop 1 | sends, receives | after hop 2 |
# |---|---|---|---|---|---|
# | rank 0 | A . . | 0, 2 | A . C | 2, 1 | A B C |
# | rank 1 | . B . | 1, 0 | A B . | 0, 2 | A B C |
# | rank 2 | . . C | 2, 1 | . B C | 1, 0 | A B C |

# %% [markdown]
# ### Your task (about 10 minutes)
#
# Write `ring_all_gather`, in place, for a tensor of any shape. For one that is not contiguous the same holds as in the
# reduce-scatter.
#
# <details><summary>Hint 1: no buffer</summary>
#
# Nothing is added, so a chunk can be received right where it belongs. The chunk that is sent meanwhile is another one.
# The neighbours are the same as before.
#
# </details>
# <details><summary>Hint 2: which chunk</summary>
#
# A rank starts with its own chunk; in each later hop it passes on what has just arrived. What arrives is always the
# chunk with the number before the one that it sends. One rank alone has everything already.
#
# </details>
# <details><summary>Hint 3: sizes and groups</summary>
#
# Cut the flat view as in the reduce-scatter. Then every chunk has its right size at its right place, the short and the
# empty ones, too. Numbers are those of the group.
#
# </details>


# %% nbgrader={"grade_id": "ring-all-gather", "solution": true} tags=["export"]
def ring_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Collect chunk r from rank r, for all p ranks of a group, in place. p - 1 hops round the ring.

    Each rank sends n elements less one chunk, that of a neighbour.

    Parameters
    ----------
    tensor : torch.Tensor
        Contiguous, of the same shape and dtype on every rank, of any size. On rank r, chunk r of it, as `tensor_split`
        cuts the flat tensor into p, is what everybody gets; the other chunks are overwritten.
    group : ProcessGroup, optional
        None is everybody.

    Raises
    ------
    RuntimeError
        If the tensor is not contiguous.
    """
    ### BEGIN SOLUTION
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.view(-1).tensor_split(p)
    for hop in range(p - 1):
        passed, received = chunks[(rank - hop) % p], chunks[(rank - hop - 1) % p]
        exchange(passed, (rank + 1) % p, received, (rank - 1) % p, group)
    ### END SOLUTION


# %%
gather_run = on_ranks(ring_all_gather, [torch.full((7,), rank) for rank in range(3)])
print(gather_run.values)

# %% nbgrader={"grade_id": "ring-all-gather-check", "grade": true, "locked": true, "points": 8}
check("collectives.ring_all_gather", ring_all_gather)

# %% [markdown]
# ## 5. The ring all-reduce
#
# A reduce-scatter, then an all-gather. Each rank sends 2n elements less two chunks, that is 2(p-1)n/p if p divides n:
# nearly 2n, however many ranks there are. In the naive algorithm the root sends (p-1)n.
#
# | p = 4, n = 8 | rank 0 | rank 1 | rank 2 | rank 3 | all |
# |---|---|---|---|---|---|
# | naive, elements sent | 24 | 8 | 8 | 8 | 48 |
# | ring, elements sent | 12 | 12 | 12 | 12 | 48 |
#
# The sum is the same, 2(p-1)n. The ring spreads it evenly, and all links work at the same time.

# %% [markdown]
# ### Your task (about 10 minutes)
#
# Write `ring_all_reduce`, in place, for a tensor of any shape and size. In each half of it all chunks go the same way
# round. A tensor that is not contiguous is refused with an error, as by `dist.all_reduce`. (Reducing it correctly is
# accepted, too. What must not happen is that it comes back unchanged.)
#
# <details><summary>Hint 1: two calls</summary>
#
# Both halves are written, and both work in place on the same chunks. What the first leaves in chunk r of rank r is what
# the second starts from; they may go round in opposite directions. If something fails here and the checks above have
# passed, look at the order and at the group.
#
# </details>
# <details><summary>Hint 2: sizes and shapes</summary>
#
# Chunks differ by one element at most, some are empty where there are fewer elements than ranks, and nothing is padded.
# With one rank there is nothing to do. Cut the flat view into chunks, not the first dimension: a tensor of shape (2, 5)
# has ten elements to share out, and a tensor without dimensions has one. Any flattening that may copy loses the result.
#
# </details>


# %% nbgrader={"grade_id": "ring-all-reduce", "solution": true} tags=["export"]
def ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum a tensor over the p ranks of a group, in place. 2(p - 1) hops round the ring.

    All ranks together send 2(p - 1) n elements, each 2n less two chunks.

    Parameters
    ----------
    tensor : torch.Tensor
        Contiguous, of the same shape and dtype on every rank, of any size. Holds the sum afterwards.
    group : ProcessGroup, optional
        None is everybody.

    Raises
    ------
    RuntimeError
        If the tensor is not contiguous.
    """
    ### BEGIN SOLUTION
    ring_reduce_scatter(tensor, group)
    ring_all_gather(tensor, group)
    ### END SOLUTION


# %%
ring_run = on_ranks(ring_all_reduce, [torch.full((2, 4), 10**rank) for rank in range(4)])
print(ring_run.values[3])
print("elements sent:", [ring_run.sent(rank) // 8 for rank in range(4)])

# %% nbgrader={"grade_id": "ring-all-reduce-check", "grade": true, "locked": true, "points": 8}
check("collectives.ring_all_reduce", ring_all_reduce)

# %% [markdown]
# ### Hop by hop
#
# The picture is drawn from a run of *your* ring: a further rank looks at all tensors after each hop. Every cell is a
# chunk on a rank, with the ranks whose shares are in it; the bars are what each rank has sent. Move `hop`, then look at
# what is complete after the first p - 1 hops and how it spreads in the others; there are 2(p - 1) of them. With n = 2
# and p = 4, which rank of a ring in the direction of the tables sends most, and why?
#
# <details><summary>Answer</summary>
#
# Rank 2. The chunks 0 and 1 have an element each, 2 and 3 are empty. In the first half a rank sends all chunks but its
# own, in the second all but that of the next rank. For rank 2 both are empty ones, so it sends 2 + 2 elements. The
# ranks 0 to 3 send 2, 3, 4 and 3. (The other way round the empty chunks come together at rank 3: 3, 2, 3 and 4.)
#
# </details>

# %%
from IPython.display import Markdown, display
from ipywidgets import IntSlider

from servelab.plots import rings
from servelab.plots.explore import explore


def step(p: int, n: int, hop: int) -> None:
    states = rings.watch(ring_all_reduce, p, n)
    state = states[min(hop, len(states) - 1)]
    display(rings.picture(state))
    display(Markdown(rings.picture_text(state)))


explore(
    step,
    p=IntSlider(4, 1, 8, continuous_update=False),
    n=IntSlider(16, 0, 64, continuous_update=False),
    hop=IntSlider(3, 0, 14, continuous_update=False),
)

# %% [markdown]
# ### On real processes
#
# The same function over gloo, with a size that p does not divide, beside `dist.all_reduce`. (`on_real_ranks` runs it on
# a `Cluster`, or says why it cannot.)

# %%
from servelab.ranks.trial import on_real_ranks


def proof(n: int) -> float:
    """The largest difference between your ring and the library's all-reduce."""
    mine = torch.randn(n, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
    theirs = mine.clone()
    ring_all_reduce(mine)
    dist.all_reduce(theirs)
    return (mine - theirs).abs().max().item()


proof_run = on_real_ranks(3, proof, 100_003)
if proof_run:
    print("largest differences:", [f"{value:.1e}" for value in proof_run.values])
    print("bytes sent by your ring:", [proof_run.sent(rank) for rank in range(3)], "- the tensor has", 4 * 100_003)

# %% [markdown]
# ## 6. A tree
#
# Each hop of the ring costs a latency, however small the chunk: 2(p-1) of them. For a small tensor that is all there is
# to pay. A **binomial tree** pays fewer. On the way up the sum is gathered: in round k (from 0) the ranks pair up at a
# distance of 2 to the power of k, and the upper one of a pair sends what it has to the lower one. After ceil(log2 p)
# rounds rank 0 has the sum. On the way down it spreads, along the same pairs in reverse order. (Thakur, Rabenseifner
# and Gropp, 2005, compare trees, rings and recursive doubling.)

# %% [markdown]
# ### A worked example
#
# p = 6. An arrow is a message; all messages of a round move at the same time.
#
# | round | distance | up | down, in reverse |
# |---|---|---|---|
# | 0 | 1 | 1 → 0, 3 → 2, 5 → 4 | 0 → 1, 2 → 3, 4 → 5 |
# | 1 | 2 | 2 → 0 | 0 → 2 |
# | 2 | 4 | 4 → 0 | 0 → 4 |
#
# ```
#        0
#      / | \
#     4  2  1
#     |  |
#     5  3
# ```
#
# In round 1, rank 4 would pair up with rank 6, which does not exist: it waits. ceil(log2 6) = 3 rounds up and 3 down,
# and 10 messages of n elements in all.

# %% [markdown]
# ### Your task (about 25 minutes)
#
# Write `tree_all_reduce`, in place, for any p. The check asks for at most ceil(log2 p) rounds each way, in each of which
# a rank sends one message at most, and that no rank sends or receives more than ceil(log2 p) tensors. Another algorithm
# that keeps to these limits passes as well: recursive doubling, for example. Two sends that a rank starts at the same
# time are two messages in one round. The distances are given.
#
# <details><summary>Hint 1: the way up</summary>
#
# Go through the distances in order, each of them once. Only a rank that is a multiple of the distance has a part in the
# round: all others have sent before. Of a pair, the upper rank sends, and the lower one receives and adds, by way of a
# second tensor of the same shape and dtype. Pairs are disjoint, so plain sends and receives cannot deadlock. All
# numbers are those of the group: `group_dst`, `group_src`.
#
# </details>
# <details><summary>Hint 2: the way down</summary>
#
# Take the distances in reverse order. The pairs are the same, and now the lower rank sends. Nobody adds.
#
# </details>
# <details><summary>Hint 3: the partner, for any p</summary>
#
# Even multiples of the distance have their partner above, odd ones below: flip the bit of the distance in the rank
# (`^`). The partner may not exist, if p is no power of two: look before you talk to it. For p = 1 there are no
# distances.
#
# </details>


# %% nbgrader={"grade_id": "tree-all-reduce", "solution": true} tags=["export"]
def tree_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum a tensor over the p ranks of a group, in place, in at most 2 ceil(log2 p) rounds.

    No rank sends or receives more than ceil(log2 p) tensors.

    Parameters
    ----------
    tensor : torch.Tensor
        Contiguous, of the same shape and dtype on every rank. Holds the sum afterwards.
    group : ProcessGroup, optional
        None is everybody.
    """
    distances = [2**level for level in range((dist.get_world_size(group) - 1).bit_length())]  # 1, 2, 4, ... below p
    ### BEGIN SOLUTION
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    incoming = torch.empty_like(tensor)
    for distance in distances:
        partner = rank ^ distance
        if rank % distance or partner >= p:
            continue
        if rank > partner:
            dist.send(tensor, group=group, group_dst=partner)
        else:
            dist.recv(incoming, group=group, group_src=partner)
            tensor += incoming
    for distance in reversed(distances):
        partner = rank ^ distance
        if rank % distance or partner >= p:
            continue
        if rank > partner:
            dist.recv(tensor, group=group, group_src=partner)
        else:
            dist.send(tensor, group=group, group_dst=partner)
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example on links that carry one tensor a second, so that seconds are rounds.

# %%
tree_run = on_ranks(tree_all_reduce, [torch.tensor([10**rank]) for rank in range(6)], Link(bandwidth=8))
print(tree_run.values, f"{tree_run.seconds:g} rounds")
tree_messages = [(event.rank, event.peer) for event in tree_run.events if event.kind == "send"]
print(f"{len(tree_messages)} messages:", tree_messages)

# %% nbgrader={"grade_id": "tree-all-reduce-check", "grade": true, "locked": true, "points": 10}
check("collectives.tree_all_reduce", tree_all_reduce)

# %% [markdown]
# ## 7. What each of them costs
#
# The **alpha-beta model**: a message of m bytes takes alpha + m beta seconds. alpha is the latency, beta the inverse of
# the bandwidth of one direction. A rank can send one message and receive one at the same time, and no more than that; a
# message keeps both of its ends busy from its start to its end. Additions are free. n is the tensor's size in bytes.
#
# | algorithm | messages one after the other | bytes of each |
# |---|---|---|
# | naive | p - 1 to the root, p - 1 from it | n |
# | ring | 2(p-1) hops | n/p |
# | tree | ceil(log2 p) rounds up, as many down | n |
# | one pass of the ring: reduce-scatter, all-gather | p - 1 hops | n/p |
# | all-to-all | p - 1 shifts | n/p |
#
# With alpha = 1 s, beta = 0.5 s per byte, n = 4 bytes and p = 4: naive 6(1 + 2) = 18 s, ring 6(1 + 0.5) = 9 s, tree
# 4(1 + 2) = 12 s. One pass of the ring has half its hops: 3(1 + 0.5) = 4.5 s. If p does not divide n, take n/p as it is.

# %% [markdown]
# ### The all-to-all
#
# Exercise 10 comes to it: each rank has n bytes, a part of n/p for each rank, and its own part stays. The others go out
# in p - 1 **shifts**: in the k-th, every rank sends to the rank k places on and receives from the one k places back. That
# is one exchange for all of them, and it takes alpha + n/p beta. Numbers as above: 3(1 + 0.5) = 4.5 s.
#
# The model lets any two ranks talk at full speed. So it makes no difference that a pass of the ring needs p links and the
# shifts need one between any two ranks; where ranks share links, it does.

# %% [markdown]
# ### The crossover
#
# For small tensors alpha decides, and the tree has fewer rounds. For large ones n beta decides, and the ring has less
# to send. In between, at one size, both take equally long. With the alpha, beta and p above that is n = 1.6 bytes: ring
# 6(1 + 0.2) = 7.2 s, tree 4(1 + 0.8) = 7.2 s.
#
# For p = 2 and p = 3 the ring has no more rounds than the tree: it is never slower, and the crossover is 0.

# %% [markdown]
# ### Your task (about 20 minutes)
#
# Write the six functions. In the last two costs all parts, or chunks, have n/p bytes.
#
# <details><summary>Hint 1: rounds times a round</summary>
#
# Each cost is the number of rounds times the cost of one message of that round. The table has both.
#
# </details>
# <details><summary>Hint 2: logarithms without rounding errors</summary>
#
# The number of rounds up is the number of binary digits of p - 1, which an int can tell exactly. A logarithm in
# floating point can be off by one ulp, and then ceil is off by a whole round. With one rank every cost is 0.
#
# </details>
# <details><summary>Hint 3: the crossover</summary>
#
# Set the costs equal and solve for n. On one side stands alpha times the rounds that the ring has more, on the other n
# beta times what the tree sends more: its rounds, less what a rank of the ring sends in units of n.
#
# </details>


# %% nbgrader={"grade_id": "costs", "solution": true} tags=["export"]
def naive_cost(alpha: float, beta: float, n: float, p: int) -> float:
    """Seconds of a naive all-reduce of n bytes over p ranks; alpha in seconds, beta in seconds per byte."""
    ### BEGIN SOLUTION
    return 2 * (p - 1) * (alpha + n * beta)
    ### END SOLUTION


def ring_cost(alpha: float, beta: float, n: float, p: int) -> float:
    """Seconds of a ring all-reduce of n bytes over p ranks."""
    ### BEGIN SOLUTION
    return 2 * (p - 1) * (alpha + n / p * beta)
    ### END SOLUTION


def tree_cost(alpha: float, beta: float, n: float, p: int) -> float:
    """Seconds of a tree all-reduce of n bytes over p ranks."""
    ### BEGIN SOLUTION
    return 2 * (p - 1).bit_length() * (alpha + n * beta)
    ### END SOLUTION


def ring_pass_cost(alpha: float, beta: float, n: float, p: int) -> float:
    """Seconds of a ring reduce-scatter, or of a ring all-gather, of n bytes over p ranks."""
    ### BEGIN SOLUTION
    return (p - 1) * (alpha + n / p * beta)
    ### END SOLUTION


def all_to_all_cost(alpha: float, beta: float, n: float, p: int) -> float:
    """Seconds of an all-to-all over p ranks, each with n bytes in p equal parts, one of them its own."""
    ### BEGIN SOLUTION
    return (p - 1) * (alpha + n / p * beta)
    ### END SOLUTION


def crossover(alpha: float, beta: float, p: int) -> float:
    """The size in bytes at which ring and tree take equally long; the tree is faster below. p is at least 2."""
    ### BEGIN SOLUTION
    levels = (p - 1).bit_length()
    return alpha * (p - 1 - levels) / (beta * (levels - (p - 1) / p))
    ### END SOLUTION


# %% [markdown]
# Try it, and compare with the virtual clock: the model's prediction beside the time that your own functions take on
# simulated ranks. The simulation differs from the model in one point: `send` returns when the last byte has left (see
# exercise 1), so a sender is free again one alpha earlier than its message arrives. The root's way back costs
# alpha once, and the naive time comes out (p-2) alpha lower. The pictures further below are the model's.

# %%
p, link = 8, Link(alpha=5e-6, bandwidth=1e9)
alpha, beta = link.alpha, 1 / link.bandwidth
pairs = (
    *((naive_cost, naive_all_reduce), (ring_cost, ring_all_reduce), (tree_cost, tree_all_reduce)),
    *((ring_pass_cost, ring_reduce_scatter), (ring_pass_cost, ring_all_gather)),
)
lines = ["| bytes | algorithm | model, us | virtual clock, us |", "|---|---|---|---|"]
for zeros in (torch.zeros(8, dtype=torch.int64), torch.zeros(8192, dtype=torch.int64)):
    for cost, collective in pairs:
        model = cost(alpha, beta, zeros.nbytes, p)
        timed = on_ranks(collective, [zeros] * p, link).seconds
        lines.append(f"| {zeros.nbytes:,} | {collective.__name__} | {1e6 * model:.2f} | {1e6 * timed:.2f} |")
display(Markdown("\n".join(lines)))
print(f"crossover of ring and tree: {crossover(alpha, beta, p):,.0f} bytes")

# %% nbgrader={"grade_id": "costs-check", "grade": true, "locked": true, "points": 9}
check("collectives.costs", naive_cost, ring_cost, tree_cost, ring_pass_cost, all_to_all_cost, crossover)

# %% [markdown]
# ### Two sizes that matter
#
# Llama-3.1-70B has a hidden size of 8,192. In bf16 one all-reduce of a tensor-parallel layer has 16 KiB for one decoded
# token, and 128 MiB for a prompt of 8,192 tokens. The table is for a ring of eight ranks. Bandwidths are of one
# direction, from the vendors' figures as collected in Bekman's *Machine Learning Engineering*. The alpha are assumed:
# they depend on the library and the machine, and exercise 9 measures one. Beside each time stands the share of it that
# is alpha.

# %%
lines = [
    "| link | GB/s | alpha, us | 16 KiB, us | its alpha | 128 MiB, us | its alpha | crossover, KiB |",
    "|---" * 8 + "|",
]
for name, gb_s, us in (("NVLink 4", 450, 1), ("PCIe 5 x16", 63, 2), ("NDR InfiniBand", 50, 5), ("100 GbE", 12.5, 20)):
    alpha, beta = us * 1e-6, 1 / (gb_s * 1e9)
    row = [name, gb_s, us]
    for n in (1 << 14, 1 << 27):
        seconds = ring_cost(alpha, beta, n, 8)
        row += [f"{1e6 * seconds:,.1f}", f"{ring_cost(alpha, 0, n, 8) / seconds:.1%}"]
    row.append(f"{crossover(alpha, beta, 8) / 1024:,.0f}")
    lines.append(f"| {' | '.join(map(str, row))} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# With these alpha, a decode step's all-reduce is latency-bound on every one of these links: more bandwidth hardly makes
# it faster. A prefill's is bandwidth-bound.
#
# A trap: NVLink 4 is sold as 900 GB/s. That is both directions together. A rank of the ring sends at 450 GB/s.
#
# In the picture, try p = 2 as well: naive and tree are the same then, and there is no crossover to mark.

# %%
from ipywidgets import FloatLogSlider

from servelab.plots import links


def compare(p: int, alpha_us: float, gb_s: float) -> None:
    costs = {"naive": naive_cost, "ring": ring_cost, "tree": tree_cost}
    found = {name: [cost(alpha_us * 1e-6, 1e-9 / gb_s, n, p) for n in links.SIZES] for name, cost in costs.items()}
    display(links.cost_curves(found, crossover(alpha_us * 1e-6, 1e-9 / gb_s, p)))
    display(Markdown(links.cost_text(found)))


explore(
    compare,
    p=IntSlider(8, 2, 64, continuous_update=False),
    alpha_us=FloatLogSlider(5, min=-1, max=2, continuous_update=False),
    gb_s=FloatLogSlider(50, min=0, max=3, continuous_update=False),
)

# %% [markdown]
# ## 8. What benchmarks report
#
# `all_reduce_perf` of nccl-tests prints a time and two bandwidths (its `doc/PERFORMANCE.md` defines them):
#
# - **algbw** is the size S over the time. For reduce-scatter, all-gather and all-to-all, S is the whole array, not one
#   rank's part.
# - **busbw** is algbw times a factor that depends on the collective and on p. It is the rate at which each rank would
#   have to send if the best possible algorithm ran, so it can be compared with the link, whatever p is.
#
# | collective | factor |
# |---|---|
# | all-reduce | 2(p-1)/p |
# | reduce-scatter, all-gather, all-to-all | (p-1)/p |
# | broadcast, reduce | 1 |
#
# Example: an all-reduce of 1 GB over 4 ranks in 0.5 s has algbw 2 GB/s and busbw 3 GB/s.

# %% [markdown]
# ### Your task (about 10 minutes)
#
# Write `bandwidths`.
#
# <details><summary>Hint 1: the all-reduce</summary>
#
# Size over time first; the size is that of the whole array, as it is given. A ring's rank sends 2(p-1)/p times the size
# in that time, and that rate is the bus bandwidth. Both are in bytes per second, in a tuple.
#
# </details>
# <details><summary>Hint 2: the others</summary>
#
# An all-reduce is two passes round the ring; the three of the second row are one pass. For the last row both bandwidths
# are the same number.
#
# </details>


# %% nbgrader={"grade_id": "bandwidths", "solution": true} tags=["export"]
def bandwidths(collective: str, nbytes: float, seconds: float, p: int) -> tuple[float, float]:
    """Algorithm bandwidth and bus bandwidth in bytes per second, as nccl-tests define them.

    Parameters
    ----------
    collective : str
        ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"all_to_all"``, ``"broadcast"`` or ``"reduce"``.
    nbytes : float
        Size of the whole array.
    seconds : float
        What the collective took.
    p : int
        Number of ranks.
    """
    ### BEGIN SOLUTION
    passes = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
    factor = passes[collective] * (p - 1) / p if collective in passes else 1
    return nbytes / seconds, nbytes / seconds * factor
    ### END SOLUTION


# %%
algbw, busbw = bandwidths("all_reduce", 1e9, 0.5, 4)
print(f"algbw {algbw / 1e9:.1f} GB/s, busbw {busbw / 1e9:.1f} GB/s")

# %% nbgrader={"grade_id": "bandwidths-check", "grade": true, "locked": true, "points": 4}
check("collectives.bandwidths", bandwidths)

# %% [markdown]
# ## 9. The alpha and beta of this machine
#
# Send messages of many sizes from one process to another and back, note the times, and fit a line. The sizes go from a
# few bytes to megabytes, and the times from microseconds to milliseconds. An ordinary least-squares fit minimises the
# *absolute* errors: the largest messages decide alone, and alpha, which is microseconds, comes out as noise. So
# minimise the **relative** errors: the sum over all points of ((alpha + beta nᵢ - tᵢ) / tᵢ)².
#
# Three points: sizes 0, 0 and 10 bytes, times 1, 2 and 7 s. The line passes through the last one. At size 0, alpha =
# 1.2 has the errors (0.2/1)² + (0.8/2)² = 0.2, and no other alpha has less. The mean, 1.5, has 0.3125. So alpha = 1.2
# and beta = (7 - 1.2)/10 = 0.58.

# %% [markdown]
# ### Your task (about 15 minutes)
#
# Write `fit_alpha_beta`. NumPy may do the fitting.
#
# <details><summary>Hint 1: a line through points</summary>
#
# It is a fit of a polynomial of degree 1, times against sizes. alpha is its value at 0 and beta its slope. Return alpha
# first; NumPy returns the highest power first.
#
# </details>
# <details><summary>Hint 2: weights</summary>
#
# Dividing an error by its time is giving it the weight of one over the time. `np.polyfit` has a parameter for weights;
# it multiplies the errors before they are squared.
#
# </details>


# %% nbgrader={"grade_id": "fit-alpha-beta", "solution": true} tags=["export"]
def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit ``seconds = alpha + beta * size`` by relative least squares.

    Parameters
    ----------
    sizes : sequence of float
        Bytes of each message; at least two different ones.
    seconds : sequence of float
        What each took, above 0.

    Returns
    -------
    alpha, beta : float
        In seconds, and in seconds per byte.
    """
    ### BEGIN SOLUTION
    beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / np.asarray(seconds))
    return float(alpha), float(beta)
    ### END SOLUTION


# %%
print(fit_alpha_beta([0, 0, 10], [1.0, 2.0, 7.0]))

# %% nbgrader={"grade_id": "fit-alpha-beta-check", "grade": true, "locked": true, "points": 6}
check("collectives.fit_alpha_beta", fit_alpha_beta)

# %% [markdown]
# ### Measure
#
# Two processes play ping-pong; half of a round trip is one way. The lowest of the times is taken for each size: what
# disturbs a measurement makes it longer, never shorter. A time that is far too long in spite of that hardly moves the
# line: its relative error is nearly 1, however long it is. Where real ranks cannot run, times noted on another machine
# are used instead.

# %%
import time


def ping_pong(sizes: Sequence[int], repeats: int) -> list[float]:
    """The lowest one-way time in seconds for each size, between ranks 0 and 1."""
    found = []
    for size in sizes:
        tensor, times = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(repeats):
            start = time.perf_counter()
            for sender in (0, 1):
                if dist.get_rank() == sender:
                    dist.send(tensor, 1 - sender)
                else:
                    dist.recv(tensor, sender)
            times.append((time.perf_counter() - start) / 2)
        found.append(min(times))
    return found


ping_sizes = [8 << index for index in range(0, 21, 2)]
ping_run = on_real_ranks(2, ping_pong, ping_sizes, 15, backend="gloo")
ping_seconds = ping_run.values[0] if ping_run else links.RECORDED_SECONDS
fitted = fit_alpha_beta(ping_sizes, ping_seconds)
print(f"alpha {1e6 * fitted[0]:.0f} us, bandwidth {1e-9 / fitted[1]:.2f} GB/s")
print(f"crossover of ring and tree for p = 8: {crossover(*fitted, 8):,.0f} bytes")
display(links.fit_picture(ping_sizes, ping_seconds, *fitted))
display(Markdown(links.fit_text(ping_sizes, ping_seconds, *fitted)))

# %% [markdown]
# ### Does the model predict?
#
# The time of your ring and your tree on two real ranks, beside what alpha and beta say. The model takes for granted what
# two processes on one machine need not have:
#
# - *Both directions at once at full speed.* In ping-pong one message moves at a time. In a hop of the ring two do, and
#   the same cores and the same memory copy both.
# - *A core for everybody.* A hop is over when the slower rank is done, and gloo moves the bytes in a further thread of
#   each process. If one of them waits for a core, its neighbours wait with it, at every hop anew.
# - *Additions, new buffers and Python cost nothing.*
#
# The first columns are one `exchange` of half the tensor: a hop of the ring for p = 2. Where that takes much longer than
# one message of its size, so does the ring, twice, and the tree can win although the model favours the ring: with two
# ranks it sends in one direction at a time.


# %%
def race(sizes: Sequence[int], repeats: int) -> list[list[float]]:
    """Lowest seconds of an exchange of half, of ring and of tree for each size in bytes, on this rank."""
    other, found = 1 - dist.get_rank(), []
    for size in sizes:
        tensor, half, room = (torch.zeros(n) for n in (size // 4, size // 8, size // 8))
        calls = ((exchange, half, other, room, other), (ring_all_reduce, tensor), (tree_all_reduce, tensor))
        times = []
        for collective, *arguments in calls * repeats:
            dist.barrier()
            start = time.perf_counter()
            collective(*arguments)
            times.append(time.perf_counter() - start)
        found.append([min(times[which::3]) for which in range(3)])
    return found


race_sizes = [1 << 10, 1 << 16, 1 << 22]
race_run = on_real_ranks(2, race, race_sizes, 20, backend="gloo")
lines = ["| bytes | half, exchanged, us | model | ring, us | model | tree, us | model |", "|---" * 7 + "|"]
for index, size in enumerate(race_sizes if race_run else ()):
    models = (fitted[0] + fitted[1] * size / 2, ring_cost(*fitted, size, 2), tree_cost(*fitted, size, 2))
    row = [
        f"{1e6 * max(rank[index][which] for rank in race_run.values):,.0f} | {1e6 * models[which]:,.0f}"
        for which in range(3)
    ]
    lines.append(f"| {size:,} | {' | '.join(row)} |")
if race_run:
    display(Markdown("\n".join(lines)))

# %% [markdown]
# An example, from a virtual machine with two cores that were busy with other work as well, at 4 MiB: the exchange of a
# half took 4.3 ms (model: 1.1), the ring 10.8 ms (2.2), the tree 5.4 ms (3.9). At 1 KiB the ring took 0.9 ms (0.5), the
# tree 0.5 ms (0.5). Another machine gives other numbers, and so does the next run.
#
# The model describes ranks that each have a processor and a link of their own. Before you trust a prediction, measure
# what it takes for granted: here, one exchange. With more ranks than cores, expect nothing of it.

# %% [markdown]
# ## 10. All-to-all
#
# In an all-reduce everybody gets the same. In an **all-to-all** rank i has a part for each rank j, and every part is
# different: it is a transposition. Expert parallelism sends each token to the rank of its expert in this way, so the
# parts have unequal sizes, and some are empty.
#
# p = 3; "21" is the part from rank 2 to rank 1:
#
# | | inputs | outputs afterwards |
# |---|---|---|
# | rank 0 | 00, 01, 02 | 00, 10, 20 |
# | rank 1 | 10, 11, 12 | 01, 11, 21 |
# | rank 2 | 20, 21, 22 | 02, 12, 22 |

# %% [markdown]
# ### Your task (about 15 minutes)
#
# Write `all_to_all`, with the arguments of `dist.all_to_all`: outputs first. Each part goes in one message, straight to
# the rank that needs it; a rank's part for itself is copied. The caller has made the outputs with the right sizes. The
# check does not look at the time: which messages can move at once depends on the order of the pairs, and that is free.
#
# <details><summary>Hint 1: what goes where</summary>
#
# Output i of a rank is what rank i had for it. Copy your own part first: `inputs[rank]` into `outputs[rank]`, with no
# message. Write into the given outputs; a new tensor put into the list is not what the caller holds. Whatever moves
# goes by `exchange`, or by sends and receives of your own, and not by a ready collective. With one rank nothing moves:
# `batch_isend_irecv` does not take an empty list.
#
# </details>
# <details><summary>Hint 2: in pairs</summary>
#
# For each shift from 1 to p - 1, send to the rank `shift` places above and receive from the rank `shift` places below,
# modulo p. That is an exchange: everybody sends one message and receives one. Any p works, and empty parts need no
# special case.
#
# </details>
# <details><summary>Hint 3: groups</summary>
#
# Rank and number of ranks are those of the group, and `exchange` takes group ranks already.
#
# </details>


# %% nbgrader={"grade_id": "all-to-all", "solution": true} tags=["export"]
def all_to_all(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Send part j of the inputs to rank j, for all p ranks of a group, and receive part i of the outputs from rank i.

    A rank sends its inputs without its own part, in p - 1 messages at most.

    Parameters
    ----------
    outputs : sequence of p torch.Tensor
        Contiguous; output i has the size and dtype of rank i's part for this rank, and is overwritten by it.
    inputs : sequence of p torch.Tensor
        Contiguous, of any sizes, also empty; not changed.
    group : ProcessGroup, optional
        None is everybody.
    """
    ### BEGIN SOLUTION
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    for shift in range(p):
        to, source = (rank + shift) % p, (rank - shift) % p
        exchange(inputs[to], to, outputs[source], source, group)
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example, where rank i has i + 1 copies of each number.


# %%
def transpose() -> list[list[float]]:
    rank, p = dist.get_rank(), dist.get_world_size()
    outputs = [torch.empty(source + 1) for source in range(p)]
    all_to_all(outputs, [torch.full((rank + 1,), 10.0 * rank + to) for to in range(p)])
    return [output.tolist() for output in outputs]


for rank, parts in enumerate(SimCluster(3).run(transpose).values):
    print(f"rank {rank}: {parts}")

# %% [markdown]
# And its time for equal parts, beside `all_to_all_cost`. If yours takes longer, some ranks wait while others talk. If it
# takes less, a rank has several messages under way at once: the model forbids that, the simulation does not.


# %%
def equal_parts(n: int) -> None:
    p = dist.get_world_size()
    all_to_all([torch.empty(n // p) for _ in range(p)], [torch.empty(n // p) for _ in range(p)])


p, link = 8, Link(alpha=5e-6, bandwidth=1e9)
for n in (16, 16_384):
    model, timed = (
        all_to_all_cost(link.alpha, 1 / link.bandwidth, 4 * n, p),
        SimCluster(p, link=link).run(equal_parts, n),
    )
    print(f"{4 * n:,} bytes: model {1e6 * model:.2f} us, virtual clock {1e6 * timed.seconds:.2f} us")

# %% nbgrader={"grade_id": "all-to-all-check", "grade": true, "locked": true, "points": 8}
check("collectives.all_to_all", all_to_all)

# %% [markdown]
# ## 11. Looking back
#
# Eight short questions (about 15 minutes).
#
# - **bytes sent**: a ring all-reduce of 128 MiB over 8 ranks. How many MiB does each rank send?
# - **root against ring**: p = 8. How many times as much as a rank of the ring does the naive root send?
# - **rounds**: how many hops does a ring all-reduce have with 16 ranks?
# - **which bandwidth**: NVLink 4 is advertised with 900 GB/s. How many GB/s belong into `ring_cost`?
# - **from busbw**: a node with 8 A100 reports a busbw of 235 GB/s for all-reduce (Bekman). How many milliseconds does
#   an all-reduce of 1 GB (10 to the power of 9 bytes) take, to three digits?
# - **decode**, **slow link**, **lucky sends**: see below.

# %% [markdown]
# **decode.** A ring all-reduce of 16 KiB over 8 ranks takes 72 µs, with alpha = 5 µs. What makes it much faster?
#
# - (a) twice the bandwidth;
# - (b) an algorithm with fewer rounds;
# - (c) cutting the tensor into smaller chunks.
#
# **slow link.** One of the p links of a ring has a tenth of the bandwidth of the others. The tensor is large. How much
# longer does the all-reduce take?
#
# - (a) nearly ten times as long;
# - (b) 1 + 9/p times as long, because one link in p is slow;
# - (c) about as long, because only one rank sends over it.

# %% [markdown]
# **lucky sends.** Code in which all ranks first send and then receive has passed all its tests over MPI with small
# tensors. What can you say of it?
#
# - (a) it is right: the tests prove it;
# - (b) it hangs wherever sends are not buffered, and over MPI for messages above some size;
# - (c) it is right, but slow.
#
# In the cell, replace each `None` and delete the line that raises.
#
# <details><summary>Hint 1: where to look</summary>
#
# The first three are in the tables of exercises 5 and 7, the next two in exercises 7 and 8. For the slow link you can
# give `SimCluster` a `links={(0, 1): Link(...)}`. The rendezvous is in exercise 2.
#
# </details>

# %% nbgrader={"grade_id": "reflection", "solution": true} tags=["export"]
answers = {
    "bytes sent": None,  # a number, in MiB
    "root against ring": None,  # a number
    "rounds": None,  # a number
    "which bandwidth": None,  # a number, in GB/s
    "from busbw": None,  # a number, in milliseconds
    "decode": None,  # "a", "b" or "c"
    "slow link": None,  # "a", "b" or "c"
    "lucky sends": None,  # "a", "b" or "c"
}
### BEGIN SOLUTION
answers["bytes sent"] = 224
answers["root against ring"] = 4
answers["rounds"] = 30
answers["which bandwidth"] = 450
answers["from busbw"] = 7.447
answers["decode"] = "b"
answers["slow link"] = "a"
answers["lucky sends"] = "b"
### END SOLUTION

# %%
for question, answer in answers.items():
    print(f"{question}: {answer}")

# %% nbgrader={"grade_id": "reflection-check", "grade": true, "locked": true, "points": 8}
check("collectives.reflection", answers)

# %% [markdown]
# ### In your own words (about 15 minutes)
#
# A team serves Llama-3.1-70B with tensor parallelism over 8 GPUs in two machines, four in each, joined by 100 Gb/s
# Ethernet. Decoding is slow. Somebody proposes 400 Gb/s network cards, somebody else a better all-reduce. Advise, in
# about 120 words, with numbers from this unit. Take alpha and bandwidth from the table of links. Only two of the eight
# links of the ring cross the Ethernet, but every hop is as slow as its slowest link. Inside a machine, take NVLink 4.
# In a tree only some rounds cross. `tree_cost` with the Ethernet's alpha and bandwidth counts every round as a slow
# one, so it gives too much. If you would rather measure: `SimCluster` takes `links=`, a dictionary with a key `(i, j)`
# for each pair that crosses, in both directions.
#
# Three points, given by hand, two each:
#
# 1. how long the 160 all-reduces of a decode step take, and which term of the cost that is;
# 2. what four times the bandwidth would change for decoding and for prefill;
# 3. what would help: an algorithm, or another place for the ranks, with the reason.

# %% [markdown] nbgrader={"grade_id": "slow-decode", "grade": true, "solution": true, "points": 6}
# ### BEGIN SOLUTION
# One all-reduce of a decoded token has 16 KiB. With alpha = 20 µs over Ethernet, a ring of 8 pays 14 alpha = 280 µs and
# about 2 µs for its bytes: 160 of them are 45 ms, all of it latency. Four times the bandwidth saves less than 1 % of
# that.
#
# In prefill it is the other way round: 128 MiB take 19.1 ms, 18.8 ms for the bytes and 0.28 ms of latency, so faster
# cards make prefill's communication nearly four times as fast.
#
# For decoding, a tree has 6 rounds instead of 14: 20 ms instead of 45 if all of them crossed the network. With the ranks
# 0 to 3 in one machine only two do, and with alpha = 1 µs inside it is 7.5 ms. (`tree_cost` alone gives the first
# figure, `SimCluster` the second; either one counts if it is said which rounds are slow.) Best: no tensor parallelism
# across machines. TP 4 in each machine and two pipeline stages or two replicas leave one crossing, or none, instead of
# 160.
# ### END SOLUTION
