"""Answers to the column- and the row-parallel layer."""

from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from servelab.answers import right, wrong

weight = (torch.arange(-16, 17) / 8).repeat(99)  # no answer reads it: some have an attribute of that name


def layers(reference, *, column=None, row=None, shard=None):
    """The three answers, some of them replaced."""
    return (
        shard or reference.shard,
        column or reference.ColumnParallelLinear,
        row or reference.RowParallelLinear,
    )


def column_of(reference, forward):
    """The reference's column layer with another ``forward(self, x)``."""

    class Column(reference.ColumnParallelLinear):
        pass

    Column.forward = forward
    return Column


def row_of(reference, forward):
    class Row(reference.RowParallelLinear):
        pass

    Row.forward = forward
    return Row


@right("einsum, parts by index arithmetic, a loop over no helper")
def by_index(reference):
    def part(full, dim, rank, size):
        rows = full.shape[dim] // size
        if rows * size != full.shape[dim]:
            raise ValueError("unequal")
        return full.narrow(dim, rank * rows, rows).contiguous().clone()

    def shard(full, dim, comm):
        return part(full, dim, comm.rank, comm.size)

    class Column(nn.Module):
        def __init__(self, weight, bias, comm, copied=False):
            super().__init__()
            self.weight = nn.Parameter(part(weight, 0, comm.rank, comm.size))
            self.register_parameter("bias", None)
            if bias is not None:
                self.bias = nn.Parameter(part(bias, 0, comm.rank, comm.size))
            self.prepare = (lambda x: x) if copied else (lambda x: reference.copy_to_ranks(x, comm))

        def forward(self, x):
            y = torch.einsum("...i,oi->...o", self.prepare(x), self.weight)
            return y if self.bias is None else y + self.bias

    class Row(nn.Module):
        def __init__(self, weight, bias, comm):
            super().__init__()
            self.comm, self.bias = comm, bias if bias is None else nn.Parameter(bias.detach().clone())
            self.weight = nn.Parameter(part(weight, 1, comm.rank, comm.size))

        def forward(self, x):
            y = reference.reduce_from_ranks(x @ self.weight.T, self.comm)
            return y + (0 if self.bias is None else self.bias)

    return shard, Column, Row


@right("numpy cuts the parts")
def numpy_cuts(reference):
    def shard(full, dim, comm):
        # numpy has no bfloat16: cut the indices
        index = np.split(np.arange(full.shape[dim]), comm.size)[comm.rank]  # raises ValueError itself
        return full.index_select(dim, torch.from_numpy(index))

    class Column(reference.ColumnParallelLinear):
        def __init__(self, weight, bias, comm, copied=False):
            nn.Module.__init__(self)
            self.comm, self.copied = comm, copied
            self.weight = nn.Parameter(shard(weight, 0, comm))
            self.bias = nn.Parameter(shard(bias, 0, comm)) if bias is not None else None

    return layers(reference, shard=shard, column=Column)


@right("no attribute for a bias that is not there")
def no_attribute(reference):
    class Column(nn.Module):
        def __init__(self, weight, bias, comm, copied=False):
            super().__init__()
            self.prepare = (lambda x: x) if copied else (lambda x: reference.copy_to_ranks(x, comm))
            self.weight = nn.Parameter(reference.shard(weight, 0, comm))
            if bias is not None:
                self.bias = nn.Parameter(reference.shard(bias, 0, comm))

        def forward(self, x):
            return F.linear(self.prepare(x), self.weight, getattr(self, "bias", None))

    class Row(nn.Module):
        def __init__(self, weight, bias, comm):
            super().__init__()
            self.comm, self.weight = comm, nn.Parameter(reference.shard(weight, 1, comm))
            if bias is not None:
                self.bias = nn.Parameter(bias.clone())

        def forward(self, x):
            return reference.reduce_from_ranks(F.linear(x, self.weight), self.comm) + getattr(self, "bias", 0)

    return layers(reference, column=Column, row=Row)


@wrong("the parameters under other names", case="holds its part and no more")
def other_names(reference):
    class Column(nn.Module):
        def __init__(self, weight, bias, comm, copied=False):
            super().__init__()
            self.inner = reference.ColumnParallelLinear(weight, bias, comm, copied)

        def forward(self, x):
            return self.inner(x)

    return layers(reference, column=Column)


@wrong("a view that keeps the whole weight", case="holds its part and no more")
def view(reference):
    class Column(reference.ColumnParallelLinear):
        def __init__(self, weight, bias, comm, copied=False):
            super().__init__(weight, bias, comm, copied)
            self.weight = nn.Parameter(weight.chunk(comm.size, 0)[comm.rank])

    return layers(reference, column=Column)


@wrong("the whole weight on every rank, cut in forward", case="holds its part and no more")
def whole(reference):
    class Row(nn.Module):
        def __init__(self, weight, bias, comm):
            super().__init__()
            self.comm, self.weight = comm, nn.Parameter(weight.clone())
            self.bias = None if bias is None else nn.Parameter(bias.clone())

        def forward(self, x):
            y = F.linear(x, self.weight.chunk(self.comm.size, 1)[self.comm.rank])
            y = reference.reduce_from_ranks(y, self.comm)
            return y if self.bias is None else y + self.bias

    return layers(reference, row=Row)


@wrong("shard cuts along the first dimension, whatever is asked for", case="shard alone: a rank's part, copied")
def first_dimension(reference):
    return layers(reference, shard=lambda full, dim, comm: reference.shard(full, 0, comm))


@wrong("shard returns a view", case="shard alone: a rank's part, copied")
def shard_view(reference):
    return layers(reference, shard=lambda full, dim, comm: full.chunk(comm.size, dim)[comm.rank])


@wrong("the whole weight beside the part", case="holds its part and no more")
def whole_beside(reference):
    class Column(reference.ColumnParallelLinear):
        def __init__(self, weight, bias, comm, copied=False):
            super().__init__(weight, bias, comm, copied)
            self.full = weight

    return layers(reference, column=Column)


@wrong("the row layer's bias is the caller's own", case="holds its part and no more")
def bias_not_copied(reference):
    class Row(reference.RowParallelLinear):
        def __init__(self, weight, bias, comm):
            super().__init__(weight, bias, comm)
            self.bias = None if bias is None else nn.Parameter(bias)

    return layers(reference, row=Row)


@wrong("the communicator called in the graph, without g", case="row layer: the sum of all parts")
def in_the_graph(reference):
    def forward(self, x):
        y = self.comm.all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias

    return layers(reference, row=row_of(reference, forward))


@wrong("nothing returned", case="row layer: the sum of all parts")
def nothing_returned(reference):
    def forward(self, x):
        reference.reduce_from_ranks(F.linear(x, self.weight), self.comm)

    return layers(reference, row=row_of(reference, forward))


@wrong("row layer splits the outputs", case="row layer: the sum of all parts")
def row_splits_outputs(reference):
    class Row(nn.Module):
        def __init__(self, weight, bias, comm):
            super().__init__()
            self.comm, self.weight = comm, nn.Parameter(weight.tensor_split(comm.size)[comm.rank].clone())
            self.bias = None if bias is None else nn.Parameter(bias.clone())

        def forward(self, x):
            part = F.linear(self.comm.all_gather(x.detach(), -1), self.weight)
            y = self.comm.all_gather(part.detach(), -1) + 0 * part.sum() + 0 * x.sum()
            return y if self.bias is None else y + self.bias

    return layers(reference, row=Row)


@wrong("every second row instead of a block", case="column layer: its own outputs")
def strided(reference):
    class Column(reference.ColumnParallelLinear):
        def __init__(self, weight, bias, comm, copied=False):
            super().__init__(weight, bias, comm, copied)
            self.weight = nn.Parameter(weight[comm.rank :: comm.size].clone())

    return layers(reference, column=Column)


@wrong("column layer gathers its outputs", case="column layer: its own outputs")
def gathers(reference):
    def forward(self, x):
        x = x if self.copied else reference.copy_to_ranks(x, self.comm)
        y = F.linear(x, self.weight, self.bias)
        return self.comm.all_gather(y.detach(), -1) + 0 * y.sum()

    return layers(reference, column=column_of(reference, forward))


@wrong("all-reduce in the column layer, too", case="column layer: its own outputs")
def column_reduces(reference):
    def forward(self, x):
        x = x if self.copied else reference.copy_to_ranks(x, self.comm)
        return reference.reduce_from_ranks(F.linear(x, self.weight, self.bias), self.comm)

    return layers(reference, column=column_of(reference, forward))


@wrong("all-reduce of the input in the column layer", case="sends no more than it must")
def column_sums_input(reference):
    def forward(self, x):
        x = x if self.copied else reference.copy_to_ranks(x, self.comm)
        self.comm.all_reduce(x.detach().clone())
        return F.linear(x, self.weight, self.bias)

    return layers(reference, column=column_of(reference, forward))


@wrong("row layer without the sum", case="row layer: the sum of all parts")
def no_sum(reference):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)

    return layers(reference, row=row_of(reference, forward))


@wrong("bias added on every rank, before the sum", case="bias added once")
def bias_t_times(reference):
    def forward(self, x):
        return reference.reduce_from_ranks(F.linear(x, self.weight, self.bias), self.comm)

    return layers(reference, row=row_of(reference, forward))


@wrong("bias of the row layer forgotten", case="bias added once")
def no_bias(reference):
    def forward(self, x):
        return reference.reduce_from_ranks(F.linear(x, self.weight), self.comm)

    return layers(reference, row=row_of(reference, forward))


@wrong("bias cut in the row layer", case="holds its part and no more")
def bias_cut(reference):
    class Row(reference.RowParallelLinear):
        def __init__(self, weight, bias, comm):
            super().__init__(weight, bias, comm)
            if bias is not None:
                zeros = torch.zeros_like(bias)
                rows = len(bias) // comm.size
                zeros[comm.rank * rows : (comm.rank + 1) * rows] = bias[comm.rank * rows : (comm.rank + 1) * rows]
                self.bias = nn.Parameter(zeros)

        def forward(self, x):
            return reference.reduce_from_ranks(F.linear(x, self.weight, self.bias), self.comm)

    return layers(reference, row=Row)


@wrong("all-reduce without a gradient", case="gradients of weights and biases")
def detached(reference):
    def forward(self, x):
        y = self.comm.all_reduce(F.linear(x, self.weight).detach().clone())
        return y + (0 if self.bias is None else self.bias) + 0 * self.weight.sum()

    return layers(reference, row=row_of(reference, forward))


@wrong("gradients summed again behind the row layer", case="gradients of weights and biases")
def g_sums_twice(reference):
    def forward(self, x):
        y = reference.reduce_from_ranks(F.linear(x, self.weight), self.comm)
        y = reference.copy_to_ranks(y, self.comm)
        return y if self.bias is None else y + self.bias

    return layers(reference, row=row_of(reference, forward))


@wrong("f missing in the column layer", case="gradient of the input")
def no_f(reference):
    return layers(reference, column=column_of(reference, lambda self, x: F.linear(x, self.weight, self.bias)))


@wrong("f although the input is copied already", case="sends no more than it must")
def copied_ignored(reference):
    def forward(self, x):
        return F.linear(reference.copy_to_ranks(x, self.comm), self.weight, self.bias)

    return layers(reference, column=column_of(reference, forward))


@wrong("row layer gathers all partial sums", case="sends no more than it must")
def gathers_sums(reference):
    def forward(self, x):
        part = F.linear(x, self.weight)
        y = part + (self.comm.all_gather(part.detach().unsqueeze(0), 0).sum(0) - part.detach())
        return y if self.bias is None else y + self.bias

    return layers(reference, row=row_of(reference, forward))


@wrong("f in front of the row layer as well", case="a column and a row layer in a row")
def f_before_row(reference):
    def forward(self, x):
        x = reference.copy_to_ranks(x, self.comm)
        y = reference.reduce_from_ranks(F.linear(x, self.weight), self.comm)
        return y if self.bias is None else y + self.bias

    return layers(reference, row=row_of(reference, forward))


@wrong("everything in float32", case="in bfloat16, too")
def float32(reference):
    def forward(self, x):
        y = reference.reduce_from_ranks(F.linear(x, self.weight), self.comm)
        y = y if self.bias is None else y + self.bias
        return y.float() if y.dtype == torch.bfloat16 else y

    def column(self, x):
        x = x if self.copied else reference.copy_to_ranks(x, self.comm)
        y = F.linear(x, self.weight, self.bias)
        return y.double()

    return layers(reference, row=row_of(reference, forward), column=column_of(reference, column))


@wrong("the group ignored", case="within its own group")
def group_ignored(reference):
    def forward(self, x):
        from servelab.ranks.communicator import Communicator

        y = reference.reduce_from_ranks(F.linear(x, self.weight), Communicator())
        return y if self.bias is None else y + self.bias

    return layers(reference, row=row_of(reference, forward))


@wrong("unequal parts accepted", case="refuses unequal parts")
def unequal(reference):
    def shard(full, dim, comm):
        return full.tensor_split(comm.size, dim)[comm.rank].clone()

    return layers(reference, shard=shard)


@wrong("refused by an assertion", case="refuses unequal parts")
def asserted(reference):
    def shard(full, dim, comm):
        assert full.shape[dim] % comm.size == 0
        return reference.shard(full, dim, comm)

    return layers(reference, shard=shard)


@wrong("only shard refuses", case="refuses unequal parts")
def only_shard(reference):
    class Column(reference.ColumnParallelLinear):
        def __init__(self, weight, bias, comm, copied=False):
            nn.Module.__init__(self)
            self.comm, self.copied = comm, copied
            self.weight = nn.Parameter(weight.tensor_split(comm.size, 0)[comm.rank].clone())
            self.bias = None if bias is None else nn.Parameter(bias.tensor_split(comm.size)[comm.rank].clone())

    return layers(reference, column=Column)


def keeping(reference, keep):
    """The reference's column layer, and what ``keep(weight)`` makes in an attribute beside it."""

    class Column(reference.ColumnParallelLinear):
        def __init__(self, weight, bias, comm, copied=False):
            super().__init__(weight, bias, comm, copied)
            self.full = keep(weight)

    return layers(reference, column=Column)


@wrong("the whole weight beside the part, detached", case="holds its part and no more")
def whole_detached(reference):
    return keeping(reference, lambda weight: weight.detach())


@wrong("the data of the whole weight beside the part", case="holds its part and no more")
def whole_data(reference):
    return keeping(reference, lambda weight: (weight.data,))


@wrong("a copy of the whole weight beside the part", case="holds its part and no more")
def whole_cloned(reference):
    return keeping(reference, lambda weight: weight.clone())


@wrong("a copy of the whole weight, transposed and flat, in a list", case="holds its part and no more")
def whole_turned(reference):
    return keeping(reference, lambda weight: [weight.T.flatten()])


@wrong("a copy of the whole weight in a numpy array", case="holds its part and no more")
def whole_array(reference):
    return keeping(reference, lambda weight: {"w": weight.float().numpy().copy()})


@wrong("the whole weight in a closure, detached", case="holds its part and no more")
def whole_in_a_closure(reference):
    def keep(weight):
        whole = weight.detach()
        return lambda: whole

    return keeping(reference, keep)


@wrong("a copy of the whole weight in a closure", case="holds its part and no more")
def copy_in_a_closure(reference):
    def keep(weight):
        whole = weight.clone()
        return lambda: whole

    return keeping(reference, keep)


@wrong("a copy of the whole weight as a function's default", case="holds its part and no more")
def copy_as_a_default(reference):
    return keeping(reference, lambda weight: partial(lambda x, whole: x, whole=weight.T.contiguous()))


@wrong("a copy of the whole weight on the class", case="holds its part and no more")
def copy_on_the_class(reference):
    class Column(reference.ColumnParallelLinear):
        def __init__(self, weight, bias, comm, copied=False):
            super().__init__(weight, bias, comm, copied)
            Column.full = weight.clone()

    return layers(reference, column=Column)


KEPT: list = []


@wrong("copies of whole weights in a global list", case="holds its part and no more")
def copies_in_a_global(reference):
    class Row(reference.RowParallelLinear):
        def __init__(self, weight, bias, comm):
            super().__init__(weight, bias, comm)
            KEPT[:] = [*KEPT[-3:], weight.clone()]

    return layers(reference, row=Row)


@wrong("the whole weight as a flat buffer", case="holds its part and no more")
def whole_buffer(reference):
    class Row(reference.RowParallelLinear):
        def __init__(self, weight, bias, comm):
            super().__init__(weight, bias, comm)
            self.register_buffer("full", weight.flatten().clone())

    return layers(reference, row=Row)


@wrong("shard copies all, and returns a view of the copy", case="shard alone: a rank's part, copied")
def view_of_a_copy(reference):
    return layers(reference, shard=lambda full, dim, comm: full.clone().chunk(comm.size, dim)[comm.rank])


@wrong("a product of two dimensions only", case="column layer: its own outputs")
def two_dimensions(reference):
    def forward(self, x):
        x = x if self.copied else reference.copy_to_ranks(x, self.comm)
        y = torch.mm(x, self.weight.t())
        return y if self.bias is None else y + self.bias

    return layers(reference, column=column_of(reference, forward))


@wrong("a product of two dimensions only, in the row layer", case="bias added once")
def two_dimensions_row(reference):
    def forward(self, x):
        y = reference.reduce_from_ranks(torch.mm(x, self.weight.t()), self.comm)
        return y if self.bias is None else y + self.bias

    return layers(reference, row=row_of(reference, forward))


@wrong("the row layer's result in float32 for bfloat16", case="in bfloat16, too")
def row_in_float32(reference):
    def forward(self, x):
        y = reference.reduce_from_ranks(F.linear(x, self.weight), self.comm)
        y = y if self.bias is None else y + self.bias
        return y.float() if y.dtype == torch.bfloat16 else y

    return layers(reference, row=row_of(reference, forward))


@wrong("products in float32 for float64", case="column layer: its own outputs")
def float32_inside(reference):
    def forward(self, x):
        x = x if self.copied else reference.copy_to_ranks(x, self.comm)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)

    return layers(reference, column=column_of(reference, forward))


@wrong("the row layer's sum in float32", case="bias added once")
def float32_sum(reference):
    def forward(self, x):
        y = reference.reduce_from_ranks(F.linear(x, self.weight).float(), self.comm).to(x.dtype)
        return y if self.bias is None else y + self.bias

    return layers(reference, row=row_of(reference, forward))


@right("the shapes and the own part's transpose remembered")
def remembered(reference):
    class Row(reference.RowParallelLinear):
        def __init__(self, weight, bias, comm):
            super().__init__(weight, bias, comm)
            self.shape, self.dtype = weight.shape, weight.dtype
            self.register_buffer("scale", torch.ones(1, dtype=weight.dtype))

        def forward(self, x):
            assert x.dtype == self.dtype and x.shape[-1] * self.comm.size == self.shape[1]
            y = reference.reduce_from_ranks(x.matmul(self.weight.t()), self.comm)
            return y if self.bias is None else self.scale * self.bias + y

    return layers(reference, row=Row)
