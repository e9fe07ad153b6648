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
# # 06 Tensor parallelism
#
# Llama-3.1-70B has 141 GB of weights in bf16. An 80 GB card cannot hold them, and one H100 would take 42 ms just to read
# them for one token. **Tensor parallelism** (TP) cuts each weight matrix into t pieces, one a GPU. Every GPU then holds
# and reads 1/t of the weights, and all of them work on the same tokens at the same time.
#
# The price: the pieces of a product have to be put together again, in every layer, before the next one can start. In this
# unit you build the layers of Megatron-LM (Shoeybi et al., 2019), count what they send, and work out when more GPUs make
# a step slower.

# %% [markdown]
# ## What you build
#
# | | exercise | what it answers | points | minutes |
# |---|---|---|---|---|
# | 1 | `conjugate_pair` | Where do forward and backward communicate? | 9 | 20 |
# | 2 | `linear_layers` | How is one matrix cut, by columns or by rows? | 14 | 30 |
# | 3 | `mlp` | Why is one all-reduce enough for two layers? | 8 | 15 |
# | 4 | `attention` | How are heads shared out when there are few KV heads? | 15 | 40 |
# | 5 | `vocabulary` | How is a loss computed when nobody has all the logits? | 13 | 40 |
# | 6 | `sequence_parallel` | What is still on every GPU, and does splitting it cost traffic? | 10 | 30 |
# | 7 | `traffic` | How much does a layer send, compared with a pipeline boundary? | 6 | 15 |
# | 8 | `step_time` | Which degree is the fastest, and where do more GPUs lose? | 8 | 25 |
# | 9 | `token_exact` | Do all parts together still give the same answer? | 5 | 20 |
# | 10 | reflection | | 12 | 40 |
#
# Exercise 8 needs `floors` of unit 01 (memory). Two demonstrations and exercise 9's try-it cell run your `ring_all_reduce` of
# unit 05; without it the first of them says so, torch's all-reduce is used, and no exercise needs it. Both come out of your
# own notebooks once their checks have passed there.

# %% tags=["export"]
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from servelab.cards import HardwareCard, ModelCard
from servelab.checking import check
from servelab.errors import CourseError
from servelab.llm.model import LLMConfig, Weights, rotate
from servelab.parts import memory
from servelab.ranks import Link, SimCluster
from servelab.ranks.communicator import Communicator

# %% [markdown]
# ## The communicator
#
# A tensor-parallel layer needs to know its rank, the number of ranks, and how to sum over them. All of this is in one
# object, `comm`:
#
# | | what it is |
# |---|---|
# | `comm.rank`, `comm.size` | this rank's number in the group, and the number of ranks t |
# | `comm.all_reduce(tensor, op="sum")` | replaces `tensor`, **in place**, by the sum over all ranks (or the maximum, `"max"`), and returns it |
# | `comm.all_gather(tensor, dim)` | a new tensor: those of all ranks side by side, in the order of the ranks |
# | `comm.reduce_scatter(tensor, dim)` | a new tensor: this rank's one of t equal parts of the sum |
#
# All of them are plain `torch.distributed` below. `Communicator(all_reduce=f)` runs a function `f(tensor, group)` of your
# own instead. With one rank, or outside of ranks, `comm` has size 1 and does nothing.
#
# **Autograd does not see these calls.** They know no backward pass. Inside a graph a gather would cut it, and an
# all-reduce would pass gradients on as they are, which is right in some places and wrong in others. So `comm` refuses a
# tensor that takes part in a graph. What happens backward has to be said, in an autograd function: that is exercise 1.

# %% [markdown]
# Each call leaves an event in the run's record: its name, its number of elements, its group. That is what the checks
# count. Here are four simulated ranks.


# %%
def sum_of_ranks(all_reduce=None) -> Tensor:
    comm = Communicator(all_reduce=all_reduce)
    return comm.all_reduce(torch.full((8,), 10.0**comm.rank))


run = SimCluster(4).run(sum_of_ranks)
print(run.values[0])
for event in run.collectives(0):
    print(event.name, event.elements, "elements, ranks", event.ranks)

# %% [markdown]
# The same with your ring of unit 05 below: the same event, and the bytes of the ring's messages beside it, 2 x 3/4 x 32 B.
# Without unit 05 the cell says what is missing, and torch's all-reduce is used from here on.

# %%
from servelab.parts import collectives

try:
    ring = collectives.ring_all_reduce
except CourseError as missing:
    ring = None
    print(missing)
run = SimCluster(4).run(sum_of_ranks, ring)
print(run.values[0], [event.name for event in run.collectives(0)])
if ring:
    print(run.sent(0), "bytes sent by rank 0")

# %% [markdown]
# ## 1. The conjugate pair f and g
#
# Take two matrices with something elementwise between them, `y = act(x A) B`. Cut A into **columns** and B into **rows**:
#
# ```
#                    rank 0                     rank 1
#   x -- f --+--  act(x A0) B0  = y0       act(x A1) B1  = y1  --+-- g -- y = y0 + y1
#            |                                                   |
#   forward: nothing                              forward: all-reduce
#   backward: all-reduce                          backward: nothing
# ```
#
# **g** stands at the end. Each rank has a partial sum of y, and g adds them up. In the backward pass every rank gets the
# whole gradient of y, and that is already what its own part needs: d(y0 + y1)/d y0 = 1.
#
# **f** stands at the start. In the forward pass all ranks have the same x, so there is nothing to do. In the backward
# pass each rank finds only *its* contribution to the gradient of x. They have to be summed.

# %% [markdown]
# ### A worked example
#
# Two ranks, x = 3. Rank 0 computes 2x, rank 1 computes 5x. The result is y = 7x = 21, so dy/dx = 7.
#
# | | rank 0 | rank 1 |
# |---|---|---|
# | forward: f | 3 | 3 |
# | own part | 6 | 15 |
# | forward: g | **21** | **21** |
# | backward: gradient of y | 1 | 1 |
# | backward: g | 1 | 1 |
# | own gradient of x | 2 | 5 |
# | backward: f | **7** | **7** |
#
# Two mistakes are common. With an all-reduce in the backward pass of g as well, all gradients are t times too large.
# Without f, rank 0 goes on with 2 and rank 1 with 5, and every layer below gets a wrong gradient, without an error.

# %% [markdown]
# ### Your task (about 20 minutes)
#
# Write f and g as autograd functions: the four bodies. The two functions that use them are given. Autograd calls
# `backward` on the rank whose graph it is, so `comm` works there as well.
#
# <details><summary>Hint 1: what an autograd function is</summary>
#
# The forward method gets a context and the arguments; what the backward method needs later, put on the context as an
# attribute (not on the class, which all simulated ranks share). The backward method gets the context and the gradient of
# the result. It returns one gradient for each argument of the forward method, and None for those that are no tensors.
#
# </details>
# <details><summary>Hint 2: who sums when</summary>
#
# In the worked example look for the lines in which both ranks have the same bold number: one is forward, one is backward.
# Only there is anything sent, once, and it is a sum: no average, nothing gathered. The other two bodies pass on what they
# were given.
#
# </details>
# <details><summary>Hint 3: in place</summary>
#
# `comm.all_reduce` overwrites what it is given. Neither the partial sum nor a gradient is yours to overwrite: another
# operation may have kept the first one for its backward pass, and autograd may hand one and the same gradient to two
# branches. Sum a copy.
#
# </details>


# %% nbgrader={"grade_id": "conjugate-pair", "solution": true} tags=["export"]
class CopyToRanks(torch.autograd.Function):
    """f: forward nothing is sent, backward one all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """``x`` as it is."""
        ### BEGIN SOLUTION
        ctx.comm = comm
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient of ``x``, summed over the ranks; the communicator has none. ``grad`` itself stays unchanged."""
        ### BEGIN SOLUTION
        return ctx.comm.all_reduce(grad.clone()), None
        ### END SOLUTION


class ReduceFromRanks(torch.autograd.Function):
    """g: forward one all-reduce, backward nothing is sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """The sum of ``x`` over the ranks. ``x`` itself stays unchanged."""
        ### BEGIN SOLUTION
        return comm.all_reduce(x.clone())
        ### END SOLUTION

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient of ``x``; the communicator has none."""
        ### BEGIN SOLUTION
        return grad, None
        ### END SOLUTION


def copy_to_ranks(x: Tensor, comm: Communicator) -> Tensor:
    """f as a function of a tensor: see `CopyToRanks`."""
    return CopyToRanks.apply(x, comm)


def reduce_from_ranks(x: Tensor, comm: Communicator) -> Tensor:
    """g as a function of a tensor: see `ReduceFromRanks`."""
    return ReduceFromRanks.apply(x, comm)


# %% [markdown]
# Try it: the worked example on two ranks.


# %%
def seven_x() -> tuple[float, float]:
    comm = Communicator()
    x = torch.tensor([3.0], requires_grad=True)
    y = reduce_from_ranks(copy_to_ranks(x, comm) * (2.0, 5.0)[comm.rank], comm)
    y.backward()
    return y.item(), x.grad.item()


for rank, (y, gradient) in enumerate(SimCluster(2).run(seven_x).values):
    print(f"rank {rank}: y = {y}, dy/dx = {gradient}")

# %% nbgrader={"grade_id": "conjugate-pair-check", "grade": true, "locked": true, "points": 9}
check("tensor_parallel.conjugate_pair", copy_to_ranks, reduce_from_ranks)

# %% [markdown]
# ## 2. Column and row
#
# A linear layer computes `y = x Wᵀ + b`, and torch stores W as [out, in]. There are two ways to cut it:
#
# | | rank r holds | needs of x | has of y | bias |
# |---|---|---|---|---|
# | **column** parallel | out/t rows of W as torch stores it | all of it | its own out/t outputs | cut like the outputs |
# | **row** parallel | in/t columns of W as torch stores it | its own in/t inputs | a partial sum of all outputs | whole on every rank, added once, after the sum |
#
# The names come from `y = x A` with A = Wᵀ: a column of A is one output, a row of A is one input.
#
# The output of a column-parallel layer is the input that a row-parallel layer needs. Between the two nothing is sent.

# %% [markdown]
# ### A worked example
#
# W has 4 outputs and 6 inputs, t = 2:
#
# ```
#      column parallel              row parallel
#      in: 6                        in: 3     3
#    +-------------+              +------+------+
#    |   rank 0    | out: 2       |      |      |
#    +-------------+              | rank | rank | out: 4
#    |   rank 1    | out: 2       |  0   |  1   |
#    +-------------+              +------+------+
# ```
#
# A rank holds 12 of the 24 weights either way. With a bias, the column layer holds 14 numbers a rank and the row layer
# 16: its bias is not cut.
#
# If every rank added the bias *before* the sum, it would be in the result t times.

# %% [markdown]
# ### Your task (about 30 minutes)
#
# Write `shard`, `ColumnParallelLinear` and `RowParallelLinear`. Both layers get the full weight and cut their own part
# out of it, so that the result can be compared with the dense layer's. (A server reads only its own part from the file.)
#
# The part has to be a tensor of its own. A slice is a view, and a view keeps the whole matrix in memory. (`contiguous()`
# copies some slices and not others.) Nor should the layer keep the full weight anywhere else.
#
# <details><summary>Hint 1: which collective where</summary>
#
# The column layer has f in front, unless its input has been through f already. The row layer has g behind. Neither has
# both. The column layer's forward pass sends nothing at all.
#
# </details>
# <details><summary>Hint 2: shard</summary>
#
# Tensors have methods that cut them into equal parts along a dimension. Take the part with this rank's number, and copy
# it. Check first that the parts are equal: otherwise one rank would get fewer than the others, and the layers behind
# would not fit. Of the full weight nothing may outlive the constructor, not even a copy of it in an attribute, on the class
# or in a function that remembers it.
#
# </details>
# <details><summary>Hint 3: the layers</summary>
#
# In the constructor make `nn.Parameter`s named `weight` and `bias` (None without one). The column layer cuts both along
# dimension 0. The row layer cuts the weight along dimension 1, and copies the bias. In `forward` use `F.linear`; in the
# row layer without its bias, which comes after g.
#
# </details>


# %% nbgrader={"grade_id": "linear-layers", "solution": true} tags=["export"]
def shard(full: Tensor, dim: int, comm: Communicator) -> Tensor:
    """This rank's one of ``comm.size`` equal parts of ``full`` along ``dim``, in a memory of its own.

    Raises
    ------
    ValueError
        If there are no equal parts.
    """
    ### BEGIN SOLUTION
    if full.shape[dim] % comm.size:
        raise ValueError(f"{full.shape[dim]} along dimension {dim} do not divide into {comm.size} equal parts")
    return full.chunk(comm.size, dim)[comm.rank].clone()
    ### END SOLUTION


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes its own part of the outputs.

    Forward sends nothing. Backward one all-reduce of the input's size; none if ``copied``.

    Parameters
    ----------
    weight : Tensor
        The full weight, [out, in]. The rank's own part is ``self.weight``, [out / size, in].
    bias : Tensor or None
        The full bias, [out]. The rank's own part is ``self.bias``; None without one.
    copied : bool
        Whether the input has been through `copy_to_ranks` already.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, comm: Communicator, copied: bool = False):
        super().__init__()
        ### BEGIN SOLUTION
        self.comm, self.copied = comm, copied
        self.weight = nn.Parameter(shard(weight, 0, comm))
        self.bias = None if bias is None else nn.Parameter(shard(bias, 0, comm))
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """[..., in], the same on all ranks, to this rank's [..., out / size]."""
        ### BEGIN SOLUTION
        x = x if self.copied else copy_to_ranks(x, self.comm)
        return F.linear(x, self.weight, self.bias)
        ### END SOLUTION


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank computes a partial sum of all outputs, from its own part of the inputs.

    Forward one all-reduce of the output's size. Backward sends nothing.

    Parameters
    ----------
    weight : Tensor
        The full weight, [out, in]. The rank's own part is ``self.weight``, [out, in / size].
    bias : Tensor or None
        The full bias, [out]: ``self.bias`` is a copy of it, whole on every rank; None without one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, comm: Communicator):
        super().__init__()
        ### BEGIN SOLUTION
        self.comm = comm
        self.weight = nn.Parameter(shard(weight, 1, comm))
        self.bias = None if bias is None else nn.Parameter(bias.clone())
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """This rank's [..., in / size] to [..., out], the same on all ranks."""
        ### BEGIN SOLUTION
        y = reduce_from_ranks(F.linear(x, self.weight), self.comm)
        return y if self.bias is None else y + self.bias
        ### END SOLUTION


# %% [markdown]
# Try it: a column and a row layer, one behind the other, against the same layers on one rank. Outside of ranks
# `Communicator()` has size 1, so the dense layer is the same code.

# %%
generator = torch.Generator().manual_seed(0)
A, a, B, b, x = (torch.randn(shape, generator=generator).double() for shape in ((8, 6), (8,), (6, 8), (6,), (3, 6)))


def two_layers(dtype: torch.dtype, all_reduce=None) -> tuple[Tensor, int]:
    comm = Communicator(all_reduce=all_reduce)
    column = ColumnParallelLinear(A.to(dtype), a.to(dtype), comm)
    row = RowParallelLinear(B.to(dtype), b.to(dtype), comm)
    held = sum(p.numel() for p in [*column.parameters(), *row.parameters()])
    return row(torch.relu(column(x.to(dtype)))).detach().double(), held


dense, held = two_layers(torch.float64)
print(f"dense: {held} parameters, largest value {dense.abs().max():.1f}")
for dtype in (torch.float64, torch.bfloat16):
    for size in (2, 4):
        run = SimCluster(size).run(two_layers, dtype)
        difference = max((y - dense).abs().max().item() for y, _ in run.values)
        print(f"{size} ranks, {dtype}: {run.values[0][1]} parameters a rank, largest difference {difference:.1e}")

# %% nbgrader={"grade_id": "linear-layers-check", "grade": true, "locked": true, "points": 14}
check("tensor_parallel.linear_layers", shard, ColumnParallelLinear, RowParallelLinear)

# %% [markdown]
# **How exact is "equal"?** In float64 the results differ by about 1e-15: a sum over ranks adds in another order than one
# product does. The checks allow 1e-9. In bfloat16 a number has 8 significant bits. Inputs, weights and each partial sum are
# rounded to them, and differences of about half a percent of the largest value are normal. The checks allow 3 %. A bias
# that is added twice is far outside of either.

# %% [markdown]
# ## 3. The MLP
#
# The MLP of a Llama layer is `down(silu(gate(x)) * up(x))`. `gate` and `up` are column parallel and `down` is row
# parallel: one f in front, one g behind, nothing between.
#
# ```
#            +-- gate r --- silu --+
#   x -- f --+                     * -- down r -- g -- y
#            +-- up r -------------+
# ```
#
# Why not the other way around, rows first? Then `gate` would give partial sums, and silu is not linear:
# silu(a + b) is not silu(a) + silu(b). The sum would have to be complete before the activation, which is one more
# all-reduce, and the outputs would have to be cut again for `down`.

# %% [markdown]
# ### A worked example
#
# Rows first, two ranks would have two partial sums of one and the same hidden value, say 3 and -2:
#
# | | value |
# |---|---|
# | sum, then activation: silu(3 - 2) | 0.731 |
# | activation, then sum: silu(3) + silu(-2) | 2.8577 - 0.2384 = 2.6193 |
#
# Columns first, each hidden value is whole on the one rank that has it.
#
# The parameters: Llama-3.1-8B has three matrices of 4096 x 14336 in an MLP, 176.2 million weights. At t = 8 a rank holds
# 22.0 million of them.

# %% [markdown]
# ### Your task (about 15 minutes)
#
# Write `TensorParallelMLP` from the layers of exercise 2.
#
# One f serves both `gate` and `up`. If each of the two layers brings its own, the values are still right, but the
# backward pass has two all-reduces where one of the sum of both gradients is enough.
#
# <details><summary>Hint 1: once</summary>
#
# Call f yourself, once, and tell both column layers that their input is copied already.
#
# </details>
# <details><summary>Hint 2: nearly code</summary>
#
# Three layers made in the constructor, all without a bias. In `forward`: copy, then the formula above, with `F.silu`.
# The row layer brings its g along.
#
# </details>


# %% nbgrader={"grade_id": "mlp", "solution": true} tags=["export"]
class TensorParallelMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` over the ranks. One all-reduce of the input's size forward, one backward.

    Parameters
    ----------
    gate, up : Tensor
        Full weights, [intermediate, hidden]. ``self.gate`` and ``self.up`` are column-parallel layers.
    down : Tensor
        Full weight, [hidden, intermediate]. ``self.down`` is a row-parallel layer.
    """

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor, comm: Communicator):
        super().__init__()
        ### BEGIN SOLUTION
        self.comm = comm
        self.gate, self.up = (ColumnParallelLinear(w, None, comm, copied=True) for w in (gate, up))
        self.down = RowParallelLinear(down, None, comm)
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden], both the same on all ranks."""
        ### BEGIN SOLUTION
        x = copy_to_ranks(x, self.comm)
        return self.down(F.silu(self.gate(x)) * self.up(x))
        ### END SOLUTION


# %% [markdown]
# Try it: count the collectives. Five tokens with a hidden size of 8 are 40 elements.

# %%
gate, up, down = (torch.randn(shape, generator=generator) for shape in ((12, 8), (12, 8), (8, 12)))


def one_mlp() -> None:
    x = torch.ones(5, 8, requires_grad=True)
    TensorParallelMLP(gate, up, down, Communicator())(x).sum().backward()


for event in SimCluster(4).run(one_mlp).collectives(rank=0):
    print(event.name, event.elements)

# %% nbgrader={"grade_id": "mlp-check", "grade": true, "locked": true, "points": 8}
check("tensor_parallel.mlp", TensorParallelMLP)

# %% [markdown]
# ## 4. Attention
#
# Attention heads do not talk to each other before the output projection. So whole heads are shared out: the query, key
# and value projections are column parallel, cut between heads, and the output projection is row parallel. That is again
# one f in front and one g behind.
#
# Each rank keeps the keys and values of its own KV heads only. This is why TP also splits the KV cache (unit 01).
#
# With grouped-query attention (GQA), several query heads share a KV head. As long as t divides the number of KV heads,
# a rank gets whole groups. Beyond that there are more ranks than KV heads, and a KV head has to be **replicated**: on
# each of the ranks that have some of its query heads.

# %% [markdown]
# ### A worked example
#
# 8 query heads and 2 KV heads, so query heads 0-3 use KV head 0 and query heads 4-7 use KV head 1:
#
# | | rank 0 | rank 1 | rank 2 | rank 3 | copies of a KV head |
# |---|---|---|---|---|---|
# | t = 2: queries | 0-3 | 4-7 | | | |
# | t = 2: KV | 0 | 1 | | | 1 |
# | t = 4: queries | 0, 1 | 2, 3 | 4, 5 | 6, 7 | |
# | t = 4: KV | 0 | 0 | 1 | 1 | 2 |
#
# Qwen3-235B has 4 KV heads: at TP8 each is there twice. SmolLM2-135M has 9 query and 3 KV heads: t = 3 works, t = 2 does
# not.

# %% [markdown]
# ### The gradient of a replicated weight
#
# At t = 4, ranks 0 and 1 hold the same rows of the key projection, but each sees the gradient of its own query heads
# only. The true gradient is the sum of both. If it is not summed, the two copies drift apart after the first optimiser
# step, and no error is raised.
#
# This sum is over *weights*, not activations, and it may wait until the end of a step. So it is counted apart from
# the all-reduces of f and g. It runs over `replicas`, the communicator of the ranks that hold the same KV heads. Its size
# is 1 where nothing is replicated.

# %% [markdown]
# ### Your task (about 40 minutes)
#
# Write `my_heads` and `TensorParallelAttention`. Attention is causal, without positions. `F.scaled_dot_product_attention`
# knows GQA (`enable_gqa=True`).
#
# <details><summary>Hint 1: my_heads</summary>
#
# Query heads: equal consecutive blocks. KV heads: if there are at least as many as ranks, equal blocks as well. If not,
# ask which KV head the rank's first query head uses. Refuse a t that does not divide the query heads. Refuse KV heads and
# ranks of which neither number divides the other.
#
# </details>
# <details><summary>Hint 2: the layer</summary>
#
# How large `head_dim` is, the rows of q tell. The rows of the key projection that belong to a KV head are `head_dim`
# consecutive ones. Cut out those of this rank's heads, and copy them. In `forward`, f once; then three products; then
# [batch, tokens, heads * head_dim] has to become [batch, heads, tokens, head_dim] for the attention, which is asked to be
# causal, and back for the output layer.
#
# </details>
# <details><summary>Hint 3: finish_gradients</summary>
#
# It is called once after `backward`. The `grad` of the two weights that may be replicated, the keys' and the values', has
# to become the sum over `replicas`: in place is fine here.
#
# </details>


# %% nbgrader={"grade_id": "attention", "solution": true} tags=["export"]
def my_heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """The query heads and the KV heads of a rank: consecutive, and each query head's KV head among them.

    ``num_heads`` is a multiple of ``num_kv_heads``; query head i uses KV head i // (num_heads / num_kv_heads).

    Raises
    ------
    ValueError
        If ``size`` does not divide the query heads, or of ``size`` and ``num_kv_heads`` neither divides the other.
    """
    ### BEGIN SOLUTION
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ValueError(f"{num_heads} query and {num_kv_heads} KV heads do not go onto {size} ranks")
    queries, first_kv = num_heads // size, rank * num_kv_heads // size
    return (
        range(rank * queries, (rank + 1) * queries),
        range(first_kv, first_kv + max(1, num_kv_heads // size)),
    )
    ### END SOLUTION


class TensorParallelAttention(nn.Module):
    """Causal attention with its heads over the ranks. One all-reduce of the input's size forward, one backward.

    Parameters
    ----------
    q : Tensor
        Full weight, [num_heads * head_dim, hidden]; num_heads * head_dim need not be hidden.
    k, v : Tensor
        Full weights, [num_kv_heads * head_dim, hidden].
    o : Tensor
        Full weight, [hidden, num_heads * head_dim].
    replicas : Communicator
        The ranks that hold the same KV heads as this one.

    ``self.q``, ``self.k``, ``self.v`` are this rank's rows as parameters, or layers with such a ``weight``;
    ``self.o`` is a row-parallel layer.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        num_heads: int,
        num_kv_heads: int,
        comm: Communicator,
        replicas: Communicator,
    ):
        super().__init__()
        ### BEGIN SOLUTION
        self.comm, self.replicas = comm, replicas
        self.head_dim = len(q) // num_heads
        _, kv_heads = my_heads(num_heads, num_kv_heads, comm.rank, comm.size)
        rows = slice(kv_heads.start * self.head_dim, kv_heads.stop * self.head_dim)
        self.q = nn.Parameter(shard(q, 0, comm))
        self.k, self.v = nn.Parameter(k[rows].clone()), nn.Parameter(v[rows].clone())
        self.o = RowParallelLinear(o, None, comm)
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] to [batch, tokens, hidden], both the same on all ranks."""
        ### BEGIN SOLUTION
        x = copy_to_ranks(x, self.comm)
        q, k, v = (F.linear(x, w).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))
        ### END SOLUTION

    def finish_gradients(self) -> None:
        """Sum the gradients of replicated weights over their replicas. Called once, after ``backward``."""
        ### BEGIN SOLUTION
        for weight in (self.k, self.v):
            self.replicas.all_reduce(weight.grad)
        ### END SOLUTION


# %% [markdown]
# Try it: 8 query and 2 KV heads on 1, 2 and 4 ranks. The collectives of 48 elements are those of f and g (2 * 3 tokens
# with 8 elements). At t = 4, those of 16 elements are sums over two replicas: 2 rows by 8.

# %%
from servelab.ranks.communicator import split

qkvo = [torch.randn(shape, generator=generator) for shape in ((16, 8), (4, 8), (4, 8), (8, 16))]
drawn = torch.randn(2, 3, 8, generator=generator)


def one_attention() -> Tensor:
    comm = Communicator()
    replicas = split(comm, max(1, comm.size // 2))  # so many consecutive ranks share one of the 2 KV heads
    layer = TensorParallelAttention(*qkvo, 8, 2, comm, replicas)
    layer(drawn.clone().requires_grad_()).square().sum().backward()
    layer.finish_gradients()
    return layer.k.grad


print("gradient of the keys' weight, dense:", one_attention()[0, :3])
for size in (2, 4):
    run = SimCluster(size).run(one_attention)
    print(f"{size} ranks, on rank 0:", run.values[0][0, :3], [(e.elements, e.ranks) for e in run.collectives(0)])

# %% nbgrader={"grade_id": "attention-check", "grade": true, "locked": true, "points": 15}
check("tensor_parallel.attention", my_heads, TensorParallelAttention)

# %% [markdown]
# ### A whole layer
#
# Attention and MLP together: two all-reduces of activations forward and two backward, in every layer, each of batch x
# tokens x hidden elements. The norms and the additions of the residual stream in between are done by every rank for
# itself, all the same. (Exercise 6 comes back to that.)


# %%
def whole_layer() -> Tensor:
    comm = Communicator()
    attention = TensorParallelAttention(*qkvo, 8, 2, comm, split(comm, max(1, comm.size // 2))).double()
    mlp = TensorParallelMLP(gate, up, down, comm).double()
    x = drawn.double().requires_grad_()
    y = x + attention(F.rms_norm(x, (8,)))
    (y + mlp(F.rms_norm(y, (8,)))).square().sum().backward()
    return x.grad


dense = whole_layer()
for size in (2, 4):
    run = SimCluster(size).run(whole_layer)
    print(f"{size} ranks: {[event.elements for event in run.collectives(0)]} elements,", end=" ")
    difference = (run.values[0] - dense).abs().max() / dense.abs().max()
    print(f"the input's gradient differs by {difference:.0e} of its largest value")

# %% [markdown]
# The picture is a layer on four simulated ranks. Compute times are made up: 4 ms for attention and 6 ms for the MLP on
# one rank, divided by t. Move the link: at which latency does communication take as long as the computation?

# %%
from IPython.display import Markdown, display
from ipywidgets import FloatLogSlider, SelectionSlider

from servelab.plots import timeline_ranks
from servelab.plots.explore import explore
from servelab.ranks import span


def one_layer(x: Tensor) -> None:
    comm = Communicator()
    for name, seconds in (("attention", 4e-3), ("MLP", 6e-3)):
        with span(name, seconds / comm.size):
            part = x * 1
        comm.all_reduce(part)


def draw(ranks: int, latency_us: float, gb_per_s: float) -> None:
    link = Link(latency_us * 1e-6, gb_per_s * 1e9)
    run = SimCluster(ranks, link=link).run(one_layer, torch.ones(256, 4096))
    display(timeline_ranks.timeline(run))
    display(Markdown(timeline_ranks.timeline_text(run)))


explore(
    draw,
    ranks=SelectionSlider(options=[1, 2, 4, 8], value=4),
    latency_us=FloatLogSlider(20.0, min=0, max=3, continuous_update=False),
    gb_per_s=FloatLogSlider(25.0, min=0, max=3, continuous_update=False),
)

# %% [markdown]
# With four ranks and 25 GB/s it is at 166 us. The ranks compute for 2.5 ms; each of the two all-reduces has 6 rounds of
# latency, and sends 1.5 times its 4.2 MB in 0.25 ms.

# %% [markdown]
# ## 5. The vocabulary
#
# Llama-3.1 has 128,256 tokens in its vocabulary. The embedding table and the output head are the largest matrices of the
# model, and both are cut along the vocabulary: rank r holds a block of consecutive rows.
#
# **Embedding.** A rank looks up the tokens that it has a row for. For the others it takes zeros. The sum over the ranks
# is the embedding of every token: one all-reduce, g.
#
# **Head.** It is a column-parallel layer: each rank gets the logits of its own rows, [tokens, vocabulary / t].

# %% [markdown]
# ### The loss without the logits
#
# For the cross-entropy one could gather all logits. For a batch of 8,192 tokens that is 8,192 x 128,256 numbers, 2.1 GB
# in bf16, for a result of one number a token. But
#
# `loss = log(sum over the vocabulary of exp(z)) - z[label]`
#
# needs little: a sum, to which every rank adds its own part, and one logit, which one rank has.
#
# `exp` overflows (above 88.7 in float32), so a token's largest logit is subtracted first, from all logits of **this token**.
# It has to be its largest **over all ranks**: parts that were shifted by different amounts cannot be added. One maximum over
# all tokens would not do: a token whose logits lie far below another's would get `exp` = 0 everywhere, and a loss of
# log(0). That makes three numbers a token, and none of them depends on the size of the vocabulary.

# %% [markdown]
# ### A worked example
#
# One token, 4 logits on 2 ranks, label 3:
#
# | | rank 0: ids 0, 1 | rank 1: ids 2, 3 | over the ranks |
# |---|---|---|---|
# | logits | 1, 0 | 2, 4 | |
# | largest | 1 | 4 | maximum: **4** |
# | sum of exp(z - 4) | 0.0498 + 0.0183 | 0.1353 + 1 | sum: **1.2034** |
# | z[label] - 4 | not here: 0 | 0 | sum: **0** |
#
# loss = log(1.2034) - 0 = 0.185. The gradient is softmax minus one at the label: 0.041, 0.015, 0.112 and -0.169. Each rank
# can compute its own part of it from what it has, without sending anything.

# %% [markdown]
# ### Your task (about 40 minutes)
#
# Write `vocab_range`, `VocabParallelEmbedding` and `vocab_parallel_cross_entropy`. The vocabulary need not be a multiple
# of t: the parts differ by at most one row, the longer ones first. `torch.tensor_split` cuts like that.
#
# The loss may use up to three collectives, with together no more than 4 numbers a token on each rank. Its backward pass
# sends nothing.
#
# <details><summary>Hint 1: rows, and tokens of other ranks</summary>
#
# Divided by t, the vocabulary leaves a remainder: so many of the first ranks have one row more. From a token subtract the
# first row's id. Where the result is outside of your rows, use row 0 instead, so that the look-up does not fail, and set
# the result to zero. The same trick finds the label's logit. If the label is found and the loss is still wrong, look at
# what each rank subtracts.
#
# </details>
# <details><summary>Hint 2: gradients for free</summary>
#
# `reduce_from_ranks` sums forward and passes gradients on as they are. Build the loss from it and from ordinary
# operations, and autograd finds the right gradient. The maximum, one for each token and over all ranks, needs none:
# detach the logits for it. Whatever is subtracted from all of a token's logits alike does not change its loss.
#
# </details>
# <details><summary>Hint 3: two collectives</summary>
#
# The maximum is one. The sum of exponentials and the label's logit can be stacked and summed in one go: 2 numbers a
# token. Everything after that is done by every rank for itself. No rank needs the logits of another, so there is nothing to
# gather.
#
# </details>


# %% nbgrader={"grade_id": "vocabulary", "solution": true} tags=["export"]
def vocab_range(vocab_size: int, rank: int, size: int) -> range:
    """The token ids whose rows a rank holds: consecutive; parts differ by at most one, the longer ones first."""
    ### BEGIN SOLUTION
    rows, longer = divmod(vocab_size, size)
    first = rank * rows + min(rank, longer)
    return range(first, first + rows + (rank < longer))
    ### END SOLUTION


class VocabParallelEmbedding(nn.Module):
    """An embedding with its rows over the ranks. Forward one all-reduce of tokens x hidden; backward sends nothing.

    Parameters
    ----------
    weight : Tensor
        The full table, [vocab_size, hidden]. The rank's own rows are ``self.weight``.
    """

    def __init__(self, weight: Tensor, comm: Communicator):
        super().__init__()
        ### BEGIN SOLUTION
        self.comm, self.ids = comm, vocab_range(len(weight), comm.rank, comm.size)
        self.weight = nn.Parameter(weight[self.ids.start : self.ids.stop].clone())
        ### END SOLUTION

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids, [...], the same on all ranks, to [..., hidden], the same on all ranks; ``tokens`` stay unchanged."""
        ### BEGIN SOLUTION
        elsewhere = (tokens < self.ids.start) | (tokens >= self.ids.stop)
        rows = F.embedding((tokens - self.ids.start).masked_fill(elsewhere, 0), self.weight)
        return reduce_from_ranks(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.comm)
        ### END SOLUTION


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, first: int, comm: Communicator) -> Tensor:
    """The cross-entropy of each token, from logits whose vocabulary is spread over the ranks.

    Parameters
    ----------
    logits : Tensor
        This rank's, [tokens, rows]: those of the ids from ``first`` on.
    labels : Tensor
        The right token ids, [tokens], the same on all ranks. They stay unchanged.

    Returns
    -------
    Tensor
        [tokens], the same on all ranks.
    """
    ### BEGIN SOLUTION
    z = logits - comm.all_reduce(logits.detach().amax(1), op="max").unsqueeze(1)
    here = labels - first
    elsewhere = (here < 0) | (here >= z.shape[1])
    label = z.gather(1, here.masked_fill(elsewhere, 0).unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0)
    total, label = reduce_from_ranks(torch.stack([z.exp().sum(1), label]), comm)
    return total.log() - label
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example, and an embedding of 7 rows on 3 ranks.


# %%
def one_token() -> tuple[float, list]:
    comm = Communicator()
    logits = torch.tensor([[1.0, 0.0], [2.0, 4.0]])[comm.rank].unsqueeze(0).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([3]), 2 * comm.rank, comm)
    loss.sum().backward()
    return loss.item(), [round(g, 3) for g in logits.grad[0].tolist()]


run = SimCluster(2).run(one_token)
print(run.values, [(event.name, event.elements) for event in run.collectives(0)])
table = torch.arange(14.0).view(7, 2)
looked_up = SimCluster(3).run(lambda: VocabParallelEmbedding(table, Communicator())(torch.tensor([6, 0, 3])).detach())
print([len(vocab_range(7, rank, 3)) for rank in range(3)], "rows;", looked_up.values[1].tolist())

# %% nbgrader={"grade_id": "vocabulary-check", "grade": true, "locked": true, "points": 13}
check("tensor_parallel.vocabulary", vocab_range, VocabParallelEmbedding, vocab_parallel_cross_entropy)

# %% [markdown]
# ## 6. Sequence parallelism
#
# Between g of one block and f of the next, every rank holds the same [batch, tokens, hidden] and computes the same norms
# on it. Nothing of that is divided by t. In training these activations are kept for the backward pass: 10 of the 34 b s h
# bytes of a layer, attention's scores apart (Korthikanti et al., 2022).
#
# The same authors cut them along the **tokens**. A norm looks at one token at a time, so each rank can do its
# own tokens/t. Two things change:
#
# - in front of the column-parallel layers the tokens have to be gathered: f becomes an **all-gather**, and its backward
#   pass a **reduce-scatter**;
# - behind the row-parallel layer every rank needs the sum for its own tokens only: g becomes a **reduce-scatter**, and its
#   backward pass an **all-gather**.

# %% [markdown]
# ### The same traffic
#
# A ring all-reduce *is* a reduce-scatter and an all-gather (unit 05). For n = batch x tokens x hidden elements and t ranks,
# each rank sends
#
# | | forward | backward | elements a rank sends |
# |---|---|---|---|
# | TP | all-reduce (g) | all-reduce (f) | 2 x 2 n (t-1)/t |
# | with sequence parallelism | all-gather, reduce-scatter | reduce-scatter, all-gather | 4 x n (t-1)/t |
#
# which is the same. The column layers' weight gradient needs the *gathered* input once more. To keep it costs n elements
# of memory; to keep only the rank's own n/t and gather it again costs one more all-gather in the backward pass. Megatron-LM
# does the latter. Here both are right.

# %% [markdown]
# ### A worked example
#
# Two ranks, 4 tokens, hidden size 1, one batch:
#
# | | rank 0 | rank 1 |
# |---|---|---|
# | own tokens | 1, 2 | 3, 4 |
# | gathered | 1, 2, 3, 4 | 1, 2, 3, 4 |
# | partial sums of a row layer | 10, 20, 30, 40 | 1, 2, 3, 4 |
# | reduce-scattered | 11, 22 | 33, 44 |
#
# **The norm's weight** is whole on every rank, but each rank sees only its own tokens. Its gradient is a partial sum, and
# has to be summed over the ranks: once a step, counted apart, as with replicated KV heads. Megatron-LM marks such
# parameters for that sum. Forgetting it raises no error.

# %% [markdown]
# ### Your task (about 30 minutes)
#
# Write the bodies of the two autograd functions, and `SequenceParallelMLP`: an RMS norm and an MLP. Tokens are dimension 1
# of [batch, tokens, hidden]. Use `F.rms_norm` with `eps=1e-6`. Each rank norms **its own tokens only**: normed after the
# gather, the values would be the same, but every rank would do all the work and keep all of it again. The check counts.
#
# <details><summary>Hint 1: a new pair</summary>
#
# Two autograd functions again, like f and g. What one does backward, the other does forward. The communicator's calls
# return new tensors here, so there is nothing to copy.
#
# </details>
# <details><summary>Hint 2: the layer</summary>
#
# Norm on the own tokens (with the task's eps), then gather once, then two products with column shards, then one with a row
# shard, whose partial sums go straight into the scatter. The column-parallel layer of exercise 2 would bring its f along,
# the row-parallel layer would all-reduce first: take their shards, not the layers. The norm's weight is copied.
#
# </details>
# <details><summary>Hint 3: finish_gradients</summary>
#
# Which weights has a rank whole, and has seen only some tokens with? After `backward` the `grad` of that one is a partial
# sum: let the communicator complete it, in place, as for the replicated KV heads. The matrices' shards need nothing.
#
# </details>


# %% nbgrader={"grade_id": "sequence-parallel", "solution": true} tags=["export"]
class GatherTokens(torch.autograd.Function):
    """Forward one all-gather, backward one reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """This rank's [batch, tokens / size, hidden] to all tokens, [batch, tokens, hidden]."""
        ### BEGIN SOLUTION
        ctx.comm = comm
        return comm.all_gather(x, dim=1)
        ### END SOLUTION

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient of this rank's tokens, to which all ranks contribute; the communicator has none."""
        ### BEGIN SOLUTION
        return ctx.comm.reduce_scatter(grad, dim=1), None
        ### END SOLUTION


class ScatterTokens(torch.autograd.Function):
    """Forward one reduce-scatter, backward one all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """Partial sums of all tokens, [batch, tokens, hidden], to the sum for this rank's tokens."""
        ### BEGIN SOLUTION
        ctx.comm = comm
        return comm.reduce_scatter(x, dim=1)
        ### END SOLUTION

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient of the partial sums of all tokens; the communicator has none."""
        ### BEGIN SOLUTION
        return ctx.comm.all_gather(grad, dim=1), None
        ### END SOLUTION


def gather_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """`GatherTokens` as a function of a tensor."""
    return GatherTokens.apply(x, comm)


def scatter_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """`ScatterTokens` as a function of a tensor."""
    return ScatterTokens.apply(x, comm)


class SequenceParallelMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` of the RMS norm of x (eps 1e-6), with the tokens of x and the result over the ranks.

    Forward one all-gather and one reduce-scatter; backward one of each, and one more all-gather where the gathered
    input is not kept.

    Parameters
    ----------
    norm : Tensor
        Weight of the norm, [hidden]; ``self.norm`` is a copy of it as a parameter, whole on every rank.
    gate, up, down : Tensor
        Full weights, as in `TensorParallelMLP`; ``self.gate``, ``self.up`` and ``self.down`` are this rank's parts as
        parameters, or layers with such a ``weight``.
    """

    def __init__(self, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, comm: Communicator):
        super().__init__()
        ### BEGIN SOLUTION
        self.comm = comm
        self.norm = nn.Parameter(norm.clone())
        self.gate, self.up = nn.Parameter(shard(gate, 0, comm)), nn.Parameter(shard(up, 0, comm))
        self.down = nn.Parameter(shard(down, 1, comm))
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """This rank's [batch, tokens / size, hidden] to the same shape. Rank r has the r-th part of the tokens."""
        ### BEGIN SOLUTION
        x = gather_tokens(F.rms_norm(x, self.norm.shape, self.norm, eps=1e-6), self.comm)
        hidden = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)
        return scatter_tokens(F.linear(hidden, self.down), self.comm)
        ### END SOLUTION

    def finish_gradients(self) -> None:
        """Sum the gradient of the norm's weight over the ranks. Called once, after ``backward``."""
        ### BEGIN SOLUTION
        self.comm.all_reduce(self.norm.grad)
        ### END SOLUTION


# %% [markdown]
# Try it: the collectives of both MLPs with 4 tokens of 8 elements, on two ranks. An all-gather's event counts what the
# rank itself gives, so the ring sends (t - 1) times that; for a reduce-scatter it sends (t - 1)/t of what is counted.


# %%
def both_mlps(sequence_parallel: bool) -> None:
    comm = Communicator()
    x = torch.ones(1, 4 // comm.size if sequence_parallel else 4, 8, requires_grad=True)
    if sequence_parallel:
        layer = SequenceParallelMLP(torch.ones(8), gate, up, down, comm)
    else:
        layer = TensorParallelMLP(gate, up, down, comm)
    layer(x).sum().backward()


sent = {"all_reduce": lambda n, t: 2 * n * (t - 1) / t, "all_gather": lambda n, t: n * (t - 1)}
sent["reduce_scatter"] = lambda n, t: n * (t - 1) / t
for sequence_parallel in (False, True):
    calls = SimCluster(2).run(both_mlps, sequence_parallel).collectives(0)
    print([(event.name, event.elements) for event in calls], end=" ")
    print("sent:", sum(sent[event.name](event.elements, 2) for event in calls), "elements")

# %% nbgrader={"grade_id": "sequence-parallel-check", "grade": true, "locked": true, "points": 10}
check("tensor_parallel.sequence_parallel", gather_tokens, scatter_tokens, SequenceParallelMLP)

# %% [markdown]
# ## 7. The ledger
#
# How much does a layer send? Megatron-LM (Narayanan et al., 2021, section 3.2) gives **8 b s h (t-1)/t** elements for each
# GPU, layer and micro-batch of b sequences with s tokens: four all-reduces of b s h elements, two forward and two backward,
# each of which sends 2 (t-1)/t of them. Inference has the forward half, 4 b s h (t-1)/t.
#
# **Pipeline parallelism** (unit 07) cuts between layers instead. At the boundary between two stages, one activation goes
# from one GPU to the next: b s h elements. With four stages there are three boundaries, not one for each layer.

# %% [markdown]
# ### A worked example
#
# Llama-3.1-70B (80 layers, hidden size 8,192) in bf16, a prompt of 8,192 tokens, TP8:
#
# | | |
# |---|---|
# | one activation | 8,192 x 8,192 x 2 B = 134.2 MB |
# | one all-reduce, sent by each GPU | 2 x 7/8 x 134.2 MB = 234.9 MB |
# | all 160 of them | 37.58 GB |
# | one pipeline boundary | 134.2 MB |
# | ratio | **280** |
#
# The ratio is 2 x 80 x 2 x 7/8. It depends neither on the tokens nor on the hidden size, so decoding has the same one.
# This is the first half of an answer to "why is TP sensitive to the link and PP is not".

# %% [markdown]
# ### Your task (about 15 minutes)
#
# Write `layer_elements`, `tp_bytes` and `boundary_bytes`. Tokens are all tokens of a step, b s. A model card has
# `model.num_layers` and `model.hidden_size`.
#
# <details><summary>Hint 1: count all-reduces</summary>
#
# How many all-reduces does a layer have forward, and how many with the backward pass? How many elements has each, and
# which share of twice that does a rank send on a ring? Embedding and head are left out.
#
# </details>


# %% nbgrader={"grade_id": "traffic", "solution": true} tags=["export"]
def layer_elements(tokens: int, hidden_size: int, tp: int, backward: bool = False) -> float:
    """Elements that each of ``tp`` ranks sends for one layer, with ring all-reduces.

    Parameters
    ----------
    tokens : int
        Of the whole step: batch x sequence.
    backward : bool
        Whether the backward pass is counted as well.
    """
    ### BEGIN SOLUTION
    all_reduces = 4 if backward else 2
    return all_reduces * 2 * tokens * hidden_size * (tp - 1) / tp
    ### END SOLUTION


def tp_bytes(model: ModelCard, tokens: int, tp: int, dtype_bytes: int = 2) -> float:
    """Bytes that each of ``tp`` ranks sends in the layers of one forward pass."""
    ### BEGIN SOLUTION
    return model.num_layers * layer_elements(tokens, model.hidden_size, tp) * dtype_bytes
    ### END SOLUTION


def boundary_bytes(model: ModelCard, tokens: int, dtype_bytes: int = 2) -> float:
    """Bytes that cross one boundary between two pipeline stages in one forward pass."""
    ### BEGIN SOLUTION
    return tokens * model.hidden_size * dtype_bytes
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example, and a decode step of 32 requests.

# %%
from servelab.cards import hardware_card, model_card

llama = model_card("llama-3.1-70b")
for name, tokens in (("prefill, 8192 tokens", 8192), ("decode, 32 tokens", 32)):
    across, boundary = tp_bytes(llama, tokens, 8), boundary_bytes(llama, tokens)
    print(f"{name}: TP8 {across / 1e6:,.1f} MB a GPU, PP {boundary / 1e6:,.3f} MB, {across / boundary:.0f} : 1")
print(f"training, t = 8: {layer_elements(1, 1, 8, backward=True)} b s h elements a layer")

# %% nbgrader={"grade_id": "traffic-check", "grade": true, "locked": true, "points": 6}
check("tensor_parallel.traffic", layer_elements, tp_bytes, boundary_bytes)

# %% [markdown]
# ## 8. Which degree is the fastest?
#
# A ring all-reduce of N bytes over t ranks takes `2 (t-1) alpha + 2 (t-1)/t N / B` seconds (unit 05). The first term is
# **latency**: it does not depend on N and grows with t. The second is **bandwidth**: it grows with N and hardly with t.
# They are equal at N = t alpha B.
#
# B is the bandwidth **in one direction**. NVLink 4 is sold as 900 GB/s: that is both directions together, and the formula
# takes 450.
#
# | link | GB/s, one direction | source |
# |---|---|---|
# | NVLink 4 (H100) | 450 | ml-engineering, network |
# | NVLink 3 (A100) | 300 | the same |
# | PCIe 5 x16 | 63 | the same |
# | InfiniBand NDR | 50 | the same |
# | 100 Gb Ethernet | 12.5 | 100 / 8 |

# %% [markdown]
# ### A worked example
#
# Qwen3-8B decodes one token with 8,192 in the cache, on cards of 2 TB/s. It reads 16.4 GB of weights and 1.2 GB of KV, both
# divided by t, and its 36 layers have 72 all-reduces of 4,096 x 2 B = 8 KiB. In milliseconds a step:
#
# | t | reading | 1 us, 200 GB/s | 5 us, 25 GB/s |
# |---|---|---|---|
# | 1 | 8.79 | 8.79 | 8.79 |
# | 2 | 4.40 | 4.54 | 5.14 |
# | 4 | 2.20 | 2.64 | **4.39** |
# | 8 | 1.10 | **2.11** | 6.18 |
# | 16 | 0.59 | 2.75 | 11.43 |
#
# On the fast link TP8 is the fastest, and TP16 is slower. On the slow one TP4 is, and TP16 takes longer than one GPU. From
# 8 ranks on the KV cache is not divided further (8 KV heads).

# %% [markdown]
# At t = 16, an all-reduce on the slow link takes 2 x 15 x 5 us = 150 us of latency, and 0.6 us to move 15 KiB. **Decoding one
# request is latency-bound**: a link with more GB/s would not help. A prefill of 8,192 tokens moves 134 MB an all-reduce in
# the 70B model, and is **bandwidth-bound**.
#
# Decoding many requests can be either. Their tokens share one message: 32 requests of the 70B model make 524 kB. With t = 8,
# 5 us and 12.5 GB/s both terms are equal at 500 kB, with 450 GB/s at 18 MB.
#
# The alphas here are inputs for teaching, not measurements. Real libraries also choose other algorithms for small
# messages, with fewer rounds than a ring (unit 05).

# %% [markdown]
# ### Your task (about 25 minutes)
#
# Write the four functions. A step takes its floor of unit 01 (`memory.mixed_step_floor`) and the all-reduces of all layers,
# one after the other: nothing overlaps, since each layer waits for its all-reduce. One all-reduce carries all tokens of the
# step, in bf16: one for each request that is decoded, and those of the prompt.
#
# A link has `link.alpha`, its latency in seconds, and `link.bandwidth` in bytes a second. The floor takes, in this order: the
# model, the card, `batch`, `context`, `prompt_tokens` and, last, `tp`. In `step_seconds` the link and `tp` come before
# `batch`.
#
# <details><summary>Hint 1: one all-reduce</summary>
#
# Write down the formula once, with `link.alpha` and `link.bandwidth`. With t = 1 both terms are 0 by themselves. For
# `bound_by` compare the two terms; the factor 2 (t - 1) is in both.
#
# </details>
# <details><summary>Hint 2: a step</summary>
#
# Two all-reduces a layer. Their size is what crosses a pipeline boundary: exercise 7 has a function for that. Of the
# floor's arguments only the order is new.
#
# </details>
# <details><summary>Hint 3: the fastest</summary>
#
# Of all degrees, the one whose step takes the fewest seconds. They may come in any order, and any number of them.
#
# </details>


# %% nbgrader={"grade_id": "step-time", "solution": true} tags=["export"]
def all_reduce_seconds(nbytes: float, tp: int, link: Link) -> float:
    """Seconds of a ring all-reduce of ``nbytes`` over ``tp`` ranks."""
    ### BEGIN SOLUTION
    return 2 * (tp - 1) * (link.alpha + nbytes / tp / link.bandwidth)
    ### END SOLUTION


def bound_by(nbytes: float, tp: int, link: Link) -> str:
    """Which term of an all-reduce over two or more ranks is the larger one: ``"latency"`` or ``"bandwidth"``.

    Latency where they are equal.
    """
    ### BEGIN SOLUTION
    return "bandwidth" if nbytes / tp / link.bandwidth > link.alpha else "latency"
    ### END SOLUTION


def step_seconds(
    model: ModelCard, gpu: HardwareCard, link: Link, tp: int, batch: int, context: int, prompt_tokens: int = 0
) -> float:
    """Seconds of a step of ``batch`` decodes with ``context`` cached tokens each, beside a prompt's tokens, in bf16."""
    ### BEGIN SOLUTION
    floor = memory.mixed_step_floor(model, gpu, batch, context, prompt_tokens, tp)
    nbytes = boundary_bytes(model, batch + prompt_tokens)
    return floor + 2 * model.num_layers * all_reduce_seconds(nbytes, tp, link)
    ### END SOLUTION


def fastest_degree(
    model: ModelCard,
    gpu: HardwareCard,
    link: Link,
    degrees: Sequence[int],
    batch: int,
    context: int,
    prompt_tokens: int = 0,
) -> int:
    """The degree with the shortest step."""
    ### BEGIN SOLUTION
    return min(degrees, key=lambda tp: step_seconds(model, gpu, link, tp, batch, context, prompt_tokens))
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example.

# %%
qwen = model_card("qwen3-8b")
card = HardwareCard(name="2 TB/s", memory_gb=80, bandwidth_tb_s=2.0, dense_bf16_tflops=312)
fast, slow = Link(1e-6, 200e9), Link(5e-6, 25e9)
degrees = (1, 2, 4, 8, 16)
for tp in degrees:
    read, quick, late = (step_seconds(qwen, card, link, tp, 1, 8192) * 1e3 for link in (Link(), fast, slow))
    print(f"TP{tp:<2} reading {read:5.2f} ms; {quick:5.2f} ms on the fast link, {late:5.2f} ms on the slow one")
print("fastest:", [fastest_degree(qwen, card, link, degrees, 1, 8192) for link in (fast, slow)])

# %% nbgrader={"grade_id": "step-time-check", "grade": true, "locked": true, "points": 8}
check("tensor_parallel.step_time", all_reduce_seconds, bound_by, step_seconds, fastest_degree)

# %% [markdown]
# ### Explore: step time against degree
#
# On the left decoding with 4,096 tokens in each context, on the right a prefill of 8,192 tokens, on H100 cards, each with a
# scale of its own. The triangle marks the fastest degree. (Not every model fits on few cards; a floor does not know that,
# unit 01 does.) Move the sliders:
#
# - from which latency on does a decode step take longer at TP8 than at TP4, and does a higher bandwidth change that?
# - from which latency on is decoding at TP2 slower than on one GPU?
# - take a link of 12.5 instead of 450 GB/s, at 2 us: how many times as long do a prefill, 32 decodes and 1 decode take, each
#   at TP2 and at TP16?

# %%
from ipywidgets import Dropdown, IntSlider

from servelab.plots import degrees as pictures


def against_degree(model: str, batch: int, latency_us: float, gb_per_s: float) -> None:
    chosen, h100 = model_card(model), hardware_card("h100-sxm")
    link = Link(latency_us * 1e-6, gb_per_s * 1e9)
    steps = {"decode": (batch, 4096, 0), "prefill": (0, 0, 8192)}
    times = {
        name: {
            tp: pictures.Step(
                memory.mixed_step_floor(chosen, h100, *step, tp), step_seconds(chosen, h100, link, tp, *step)
            )
            for tp in degrees
        }
        for name, step in steps.items()
    }
    display(pictures.step_bars(times))
    display(Markdown(pictures.step_text(times)))


explore(
    against_degree,
    model=Dropdown(options=["qwen3-8b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"], value="llama-3.1-70b"),
    batch=IntSlider(32, 1, 256, continuous_update=False),
    latency_us=FloatLogSlider(2.0, min=0, max=3, continuous_update=False),
    gb_per_s=FloatLogSlider(450.0, min=0, max=3, step=0.05, continuous_update=False),
)

# %% [markdown]
# What your functions say to these questions, for Llama-3.1-70B:


# %%
def on_h100(tp: int, latency_us: float, gb_per_s: float, *step: int) -> float:
    link = Link(latency_us * 1e-6, gb_per_s * 1e9)
    return step_seconds(model_card("llama-3.1-70b"), hardware_card("h100-sxm"), link, tp, *step)


def slower_from(tp: int, fewer: int, gb_per_s: float, *step: int) -> float:
    tenths = range(1, 10_000)
    return next(
        us / 10 for us in tenths if on_h100(tp, us / 10, gb_per_s, *step) > on_h100(fewer, us / 10, gb_per_s, *step)
    )


for tp, fewer in ((8, 4), (2, 1)):
    limits = [f"{slower_from(tp, fewer, gb_per_s, 32, 4096)} us at {gb_per_s} GB/s" for gb_per_s in (450, 1000)]
    print(f"32 decodes, TP{tp} slower than TP{fewer} from", " and ".join(limits))
for name, step in (("prefill", (0, 0, 8192)), ("32 decodes", (32, 4096)), ("1 decode", (1, 4096))):
    times = [on_h100(tp, 2, 12.5, *step) / on_h100(tp, 2, 450, *step) for tp in (2, 4, 8, 16)]
    print(f"{name}: at TP2, 4, 8, 16", ", ".join(f"{ratio:.2f}" for ratio in times), "times as long on 12.5 GB/s")

# %% [markdown]
# ### Beside measurements
#
# gpt-fast (README) decodes Llama-2-7B in bf16, one request, on A100-80 cards joined by NVLink. In tokens a second, on 1, 2,
# 4 and 8 cards: 104.9, 168.84, 254.02 and 328.43. Eight cards are 3.13 times as fast as one.
#
# A floor cannot explain that, but the difference can be read as time per all-reduce. The cell takes the measured time of
# one card, divides it by t, and blames all that is missing on the 64 all-reduces. As other things do not divide by t
# either, that is an upper bound.

# %%
measured = {1: 104.9, 2: 168.84, 4: 254.02, 8: 328.43}
llama_2, a100 = model_card("llama-2-7b"), hardware_card("a100-80-sxm")
for tp, rate in measured.items():
    floor = step_seconds(llama_2, a100, Link(), tp, 1, 100)
    extra = (1 / rate - 1 / measured[1] / tp) / (2 * llama_2.num_layers)
    print(f"TP{tp}: {rate:6.2f} tokens/s, {rate / measured[1]:.2f} times one card;", end=" ")
    print(f"floor {1 / floor:5.0f} tokens/s; at most {extra * 1e6:4.1f} us an all-reduce")

# %% [markdown]
# The time per all-reduce, 18, 24 and 29 us, grows with t, but far less than a ring's latency would: that is 2 (t-1) alpha, so
# 1 : 3 : 7. From these numbers alone one cannot tell what most of it is.
#
# Larger degrees can be slower in absolute terms. The Ultra-Scale Playbook (Hugging Face) measured a 3B model. From TP2 on,
# each doubling cost 10.8, 12.2, 42.7 and 65.6 % of the tokens per second *and GPU*. The last one, from TP16 to TP32, means
# that twice the GPUs gave 0.69 times the tokens.
#
# Larger degrees can also be *more* than proportionally faster where KV room is scarce. A figure in the vLLM blog (2025-02-17)
# shows Llama-3.1-70B in FP8 on one H100 and on two: 923 and 12,830 KV blocks, 13.9 times as many, and 2,282 and 8,967 tokens
# a second, 3.93 times as many.

# %% [markdown]
# ### Three things that are often said
#
# - "TP costs about ten times as much traffic as PP." In a forward pass of Llama-3.1-70B at TP8 it is 280 times as much for
#   each boundary (exercise 7).
# - "On a slow link bandwidth eats what TP gains." In prefill and training, yes. In decoding a few requests the messages are
#   KiB, and it is latency, times two all-reduces a layer, times 2 (t-1) rounds. For many requests compare with t alpha B.
# - "TP belongs into one machine." It belongs into one domain of fast links. Often that is a machine with 8 GPUs; an NVL72
#   rack joins 72 GPUs in separate trays by NVLink (ml-engineering, network).

# %% [markdown]
# ### On real ranks
#
# The two layers of exercise 2 on two processes with gloo, with your ring of unit 05 under the communicator (or torch's
# all-reduce, without unit 05). The result has to be the dense one again. On a machine without real ranks the cell says so.
# It starts two processes, which can take ten seconds.


# %%
from servelab.ranks.trial import on_real_ranks

run = on_real_ranks(2, two_layers, torch.float64, ring)
if run:
    difference = max((y - two_layers(torch.float64)[0]).abs().max().item() for y, _ in run.values)
    print(f"largest difference {difference:.1e}; collectives:", [event.name for event in run.collectives(0)])
    if ring:
        nbytes = run.collectives(0)[0].nbytes
        print(f"sent by rank 0: {run.sent(0)} bytes of {nbytes}; with two ranks 2 (t-1)/t is 1")

# %% [markdown]
# ## 9. The same tokens
#
# All parts together have to compute what the model computes, and for a reader of its answers that means: the same tokens. So
# the last check of this unit lets your layers serve a model, the small trained one that comes with the course. On any number
# of ranks its greedy tokens have to be those of the plain loop on one rank, token by token. All is float64, so that no
# near-tie between two tokens decides.
#
# What is missing for that is the layer around your parts, as a server runs it: with norms, positions and a KV memory.
#
# **This check runs your parts of exercises 1 to 4**: `ColumnParallelLinear`, `RowParallelLinear`, `TensorParallelMLP`,
# `my_heads`, with f and g in them. One of these that is still open or wrong fails here too. Run their checks first: they say
# more about it.

# %% [markdown]
# ### One layer
#
# Every rank has the whole of x, the residual stream, and gets it back whole. Between the norm and g it works on its own
# heads or columns, here marked r:
#
# ```
#   x --+-- norm -- q, k, v r -- rotate q, k -- attend -- [o r -- g] -- + --+-- norm -- [MLP r -- g] -- + -- x
#       |                                                               |   |                           |
#       +---------------------------------------------------------------+   +---------------------------+
# ```
#
# A box is a layer that you have: its g is in it.
#
# `attend` is the KV memory of this layer on this rank. It is called once a step, keeps the new keys and values, and
# returns the causal attention of the queries to all that it has kept.
#
# The **rotation** writes positions into queries and keys (rotary embedding, Su et al., 2021): `rotate(q, *angles)`. It
# works on each head alone, so TP changes nothing about it. Values are not rotated.
#
# A server computes no gradients, and f does nothing in a forward pass. What is left to be sent are two g.

# %% [markdown]
# ### A worked example
#
# The model has 2 layers with a hidden size of 128, 8 query heads and 2 KV heads of 16, and an intermediate size of 352. What
# a rank holds of a layer's matrices, and keeps for each token:
#
# | | q | k and v | o | MLP | together | of the layer | keys and values |
# |---|---|---|---|---|---|---|---|
# | t = 1 | 128 x 128 | 2 x 32 x 128 | 128 x 128 | 3 x 352 x 128 | 176,128 | 100 % | 64 |
# | t = 2 | 64 x 128 | 2 x 16 x 128 | 128 x 64 | 3 x 176 x 128 | 88,064 | 50 % | 32 |
# | t = 4 | 32 x 128 | 2 x 16 x 128 | 128 x 32 | 3 x 88 x 128 | 46,080 | 26.2 % | 32 |
#
# At t = 4 there are more ranks than KV heads: k, v and the KV memory stay as large as at t = 2. A step of 5 tokens has 2
# layers x 2 all-reduces of 5 x 128 = 640 elements, on each rank. Two prompts with 24 steps each have 2 x 24 x 4 = 192.

# %% [markdown]
# ### Your task (about 20 minutes)
#
# Write `DecoderLayer`. It gets the layer's whole weights in a dictionary, and keeps its own part of the matrices, as
# parameters. The weights of the two norms stay whole.
#
# <details><summary>Hint 1: what a rank holds</summary>
#
# The queries are a column layer, the output projection is a row layer, and the MLP is ready. A column layer would cut keys
# and values into t parts. With more ranks than KV heads that is less than a head; take the rows of this rank's KV heads
# instead, as in exercise 4, and copy them.
#
# </details>
# <details><summary>Hint 2: the order</summary>
#
# Norm, three products, each as [tokens, heads, head_dim]; rotate two of them; attend; back to [tokens, heads x head_dim];
# output layer; add x. Then the second norm, the MLP, and add what went into the second norm. `F.rms_norm` takes the
# weight's shape, the weight, and the configuration's `rms_norm_eps`.
#
# </details>
# <details><summary>Hint 3: one rank is right, several are not</summary>
#
# Look at what is added before a sum and should be added after it, and at what `comm` your parts were given. There is
# nothing to be sent but what the row layers send. Keep nothing on the class: all layers, and all simulated ranks, share it.
# If too little is sent, a part of exercises 1 to 4 may have changed since its check: run these checks again.
#
# </details>


# %% nbgrader={"grade_id": "token-exact", "solution": true} tags=["export"]
class DecoderLayer(nn.Module):
    """A layer of a Llama-style decoder over the ranks, for serving. Two all-reduces of the input's size a step.

    Parameters
    ----------
    config : LLMConfig
        The whole model's: of use are ``num_heads``, ``num_kv_heads``, ``head_dim`` and ``rms_norm_eps``.
    weights : dict of str to Tensor
        The layer's whole weights: ``q``, ``k``, ``v``, ``o``, ``gate``, ``up`` and ``down``, each [out, in], and those
        of the norms before attention and MLP, ``attn_norm`` and ``mlp_norm``, [hidden].
    """

    def __init__(self, config: LLMConfig, weights: Weights, comm: Communicator):
        super().__init__()
        ### BEGIN SOLUTION
        self.config = config
        _, heads = my_heads(config.num_heads, config.num_kv_heads, comm.rank, comm.size)
        mine = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
        self.q, self.o = ColumnParallelLinear(weights["q"], None, comm), RowParallelLinear(weights["o"], None, comm)
        self.k, self.v = nn.Parameter(weights["k"][mine].clone()), nn.Parameter(weights["v"][mine].clone())
        self.mlp = TensorParallelMLP(weights["gate"], weights["up"], weights["down"], comm)
        self.attn_norm, self.mlp_norm = nn.Parameter(weights["attn_norm"]), nn.Parameter(weights["mlp_norm"])
        ### END SOLUTION

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """[tokens, hidden] to [tokens, hidden], both the same on all ranks.

        Parameters
        ----------
        x : Tensor
            The residual stream, one row for each token of a step. You may overwrite it.
        angles : tuple of Tensor
            What `rotate` takes behind a tensor [tokens, heads, head_dim].
        attend : callable
            ``attend(q, k, v)``, all [tokens, heads, head_dim] with this rank's heads, to a tensor like q. Called once.
        """
        ### BEGIN SOLUTION
        normed = F.rms_norm(x, self.attn_norm.shape, self.attn_norm, self.config.rms_norm_eps)
        flat = (self.q(normed), F.linear(normed, self.k), F.linear(normed, self.v))
        q, k, v = (each.unflatten(1, (-1, self.config.head_dim)) for each in flat)
        x = x + self.o(attend(rotate(q, *angles), rotate(k, *angles), v).flatten(1))
        return x + self.mlp(F.rms_norm(x, self.mlp_norm.shape, self.mlp_norm, self.config.rms_norm_eps))
        ### END SOLUTION


# %% [markdown]
# Try it: the model answers two prompts on 1, 2 and 4 ranks, with your ring of unit 05 between them (without unit 05, torch's
# all-reduce).

# %%
from servelab.llm import thread
from servelab.parts import collectives

try:
    between = collectives.ring_all_reduce
except CourseError as absent:
    between = None
    print(absent)
thread.tensor_parallel(DecoderLayer, between)

# %% nbgrader={"grade_id": "token-exact-check", "grade": true, "locked": true, "points": 5}
check("tensor_parallel.token_exact", DecoderLayer)

# %% [markdown]
# The plain loop on one rank and these layers on four add in another order, so the last bits of their numbers differ. The
# tokens do not: in float64 the two best scores were never that close here. In bf16, with 8 significant bits, they can be.
# Then a server with TP may give another answer than one without, and neither is wrong.

# %% [markdown]
# ## 10. Looking back
#
# Eight short questions (about 20 minutes).
#
# - **all-reduces a token**: how many all-reduces of activations does one decode step of Llama-3.1-70B (80 layers) have
#   under TP8, in the layers?
# - **KV copies**: Qwen3-235B has 4 KV heads. How many copies of a token's keys are there at TP16?
# - **KV of a 70B card**: Llama-3.1-70B has 8 KV heads. By how much does a card's KV shrink from TP8 to TP16? Give the
#   quotient of the two sizes, TP16 over TP8.
# - **ratio at TP4**: how many times as much does a GPU send in a forward pass of Llama-3.1-70B at TP4 as crosses one
#   pipeline boundary?
# - **crossing point**: at which message size, in MB, are latency and bandwidth of an all-reduce equal for t = 8,
#   alpha = 1 us and NVLink 4?
# - **A, the link**; **B, decoding**; **C, what TP8 gives**: see below.

# %% [markdown]
# **A.** Why does TP need a fast link, while PP manages with a slow one?
#
# - (a) TP sends weights, PP sends activations;
# - (b) TP sends activations in every layer, and the next operation waits for them; PP sends one activation at a boundary;
# - (c) TP sends larger messages: an all-reduce carries t activations.
#
# **B.** Decoding on TP16 over two nodes is slow: 5 us latency, 25 GB/s. What helps most, for the model of the worked
# example?
#
# - (a) a link of 50 GB/s;
# - (b) a latency of 2.5 us;
# - (c) both the same.
#
# **C.** On the slow link of the worked example (Qwen3-8B, one request, 8,192 tokens) a step takes 6.18 ms with TP8, and 4.39 ms
# with TP4. What does TP8 still give?
#
# - (a) nothing;
# - (b) more KV room on each card, so more requests at once;
# - (c) fewer all-reduces a step.
#
# In the cell, replace each `None` and delete the line that raises. Three significant digits are enough.
#
# <details><summary>Hint 1: where to look</summary>
#
# The first is in exercise 4's last part, the KV heads in its worked example and in unit 01. The ratio is in exercise 7, the
# crossing point at the start of exercise 8. B can be computed with `step_seconds`. For C think of what a card holds.
#
# </details>

# %% nbgrader={"grade_id": "reflection", "solution": true} tags=["export"]
answers = {
    "all-reduces a token": None,  # a number
    "KV copies": None,  # a number
    "KV of a 70B card": None,  # a quotient
    "ratio at TP4": None,  # a number
    "crossing point": None,  # a number, in MB of 1e6 bytes
    "A, the link": None,  # "a", "b" or "c"
    "B, decoding": None,  # "a", "b" or "c"
    "C, what TP8 gives": None,  # "a", "b" or "c"
}
### BEGIN SOLUTION
answers["all-reduces a token"] = 160
answers["KV copies"] = 4
answers["KV of a 70B card"] = 1.0
answers["ratio at TP4"] = 240
answers["crossing point"] = 3.6
answers["A, the link"] = "b"
answers["B, decoding"] = "b"
answers["C, what TP8 gives"] = "b"
### END SOLUTION

# %%
for question, answer in answers.items():
    print(f"{question}: {answer}")

# %% nbgrader={"grade_id": "reflection-check", "grade": true, "locked": true, "points": 6}
check("tensor_parallel.reflection", answers)

# %% [markdown]
# ### In your own words (about 20 minutes)
#
# Two nodes of eight H100 each, joined by 100 Gb Ethernet, serve Llama-3.1-405B in FP8 (405 GB of weights). A colleague
# proposes TP16 over both: "every GPU then reads a sixteenth of the weights, so tokens come twice as fast as with TP8 on
# one node." Advise, in about 100 words, for one request at a time with a short context: count the reading of the weights
# alone, at 3.35 TB/s a card, and the all-reduces.
#
# `step_seconds` takes bf16, so put the step together yourself: 405 GB over t cards, and `all_reduce_seconds` with
# `boundary_bytes` (activations stay bf16). A ring over both nodes is as slow as its slowest link, so take the Ethernet for
# all of its rounds; say which latency you assume for it, and which for NVLink. (The table of two sizes in unit 05 assumes
# 20 us and 1 us.)
#
# Three points, given by hand, two each:
#
# 1. the reading time that TP16 saves per step, and the communication that it adds, as numbers;
# 2. which term of the all-reduce matters when decoding one request and which in a prefill of 8,192 tokens, and why; from
#    about how many requests on does that change for decoding?
# 3. what you would do with the two nodes instead, and what TP or PP across nodes would still be good for.

# %% [markdown] nbgrader={"grade_id": "two-nodes", "grade": true, "solution": true, "points": 6}
# ### BEGIN SOLUTION
# At TP8 a GPU reads 405 / 8 = 50.6 GB in 15.1 ms a step, at TP16 25.3 GB in 7.6 ms: 7.6 ms saved. But 252 all-reduces with
# 30 rounds each over a ring that crosses Ethernet, at an assumed 20 us a round, take 152 ms. Even 2 us a round would take
# 16 ms, twice what is saved. TP8 on NVLink, at an assumed 1 us, has 14 rounds each: 3.6 ms.
#
# One request's message is 32 KiB: latency decides, and a faster Ethernet would not help. Both terms are equal at t alpha B, for
# 20 us 4 MB or about 122 requests. A prefill of 8,192 tokens sends 268 MB: bandwidth decides, 12.5 instead of 450 GB/s.
#
# I would run two replicas, TP8 each: twice the throughput, no traffic between nodes. TP8 x PP2 sends one activation a step
# over the Ethernet, if the model or its KV needs both nodes; it does not make a token faster. TP16 would only be for a model
# that does not fit otherwise and cannot be cut into stages.
# ### END SOLUTION
