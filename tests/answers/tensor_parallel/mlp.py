"""Answers to the tensor-parallel MLP."""

import torch
from torch import nn
from torch.nn import functional as F

from servelab.answers import right, wrong


def changed(reference, forward=None, init=None):
    """The reference's class with another forward pass, or with something done after its constructor."""

    class MLP(reference.TensorParallelMLP):
        def __init__(self, gate, up, down, comm):
            super().__init__(gate, up, down, comm)
            if init:
                init(self, gate, up, down, comm)

    if forward:
        MLP.forward = forward
    return MLP


@right("raw parameters and matrix products")
def raw(reference):
    class MLP(nn.Module):
        def __init__(self, gate, up, down, comm):
            super().__init__()
            rows = gate.shape[0] // comm.size
            mine = slice(comm.rank * rows, (comm.rank + 1) * rows)
            self.comm = comm
            self.gate, self.up, self.down = (nn.Parameter(w.clone()) for w in (gate[mine], up[mine], down[:, mine]))

        def forward(self, x):
            x = reference.copy_to_ranks(x, self.comm)
            a = x @ self.gate.T
            return reference.reduce_from_ranks((a * torch.sigmoid(a) * (x @ self.up.T)) @ self.down.T, self.comm)

    return MLP


@right("gate and up in one product, paired by rank")
def fused(reference):
    def forward(self, x):
        both = torch.cat([self.gate.weight, self.up.weight])
        gate, up = F.linear(reference.copy_to_ranks(x, self.comm), both).chunk(2, -1)
        return self.down(up * F.silu(gate))

    return changed(reference, forward)


@wrong("gate and up stacked, then cut", case="holds its part of three matrices")
def stacked_then_cut(reference):
    class MLP(reference.TensorParallelMLP):
        def __init__(self, gate, up, down, comm):
            mixed = torch.cat([gate, up]).chunk(2 * comm.size)
            mine = mixed[2 * comm.rank], mixed[2 * comm.rank + 1]
            super().__init__(gate, up, down, comm)
            self.gate.weight, self.up.weight = (nn.Parameter(part.clone()) for part in mine)

    return MLP


@wrong("whole matrices on every rank", case="holds its part of three matrices")
def whole(reference):
    class MLP(nn.Module):
        def __init__(self, gate, up, down, comm):
            super().__init__()
            self.comm = comm
            self.gate, self.up, self.down = (nn.Parameter(w.clone()) for w in (gate, up, down))

        def forward(self, x):
            return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)

    return MLP


@wrong("the whole matrices beside the parts", case="holds its part of three matrices")
def whole_beside(reference):
    def init(self, gate, up, down, comm):
        self.sources = {"gate": gate, "up": up, "down": down}

    return changed(reference, init=init)


@wrong("activation on partial sums", case="the same values on several ranks")
def rows_first(reference):
    """gate and up are cut along their inputs; the sum comes after the activation."""

    class MLP(nn.Module):
        def __init__(self, gate, up, down, comm):
            super().__init__()
            self.comm = comm
            self.gate, self.up = (nn.Parameter(w.tensor_split(comm.size, 1)[comm.rank].clone()) for w in (gate, up))
            self.down = nn.Parameter(down.tensor_split(comm.size, 0)[comm.rank].clone())

        def forward(self, x):
            x = reference.copy_to_ranks(x, self.comm).tensor_split(self.comm.size, -1)[self.comm.rank]
            hidden = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)
            hidden = reference.reduce_from_ranks(hidden, self.comm)
            y = F.linear(hidden, self.down)
            return self.comm.all_gather(y.detach(), -1) + 0 * y.sum()

    return MLP


@wrong("silu of the product", case="the dense layer's values")
def silu_of_product(reference):
    def forward(self, x):
        x = reference.copy_to_ranks(x, self.comm)
        return self.down(F.silu(self.gate(x) * self.up(x)))

    return changed(reference, forward)


@wrong("silu on up", case="the dense layer's values")
def silu_on_up(reference):
    def forward(self, x):
        x = reference.copy_to_ranks(x, self.comm)
        return self.down(self.gate(x) * F.silu(self.up(x)))

    return changed(reference, forward)


@wrong("gelu", case="the dense layer's values")
def gelu(reference):
    def forward(self, x):
        x = reference.copy_to_ranks(x, self.comm)
        return self.down(F.gelu(self.gate(x)) * self.up(x))

    return changed(reference, forward)


@wrong("one fused layer for gate and up", case="holds its part of three matrices")
def fused_layer(reference):
    """Right values; but the docstring promises ``self.gate`` and ``self.up``."""

    class MLP(nn.Module):
        def __init__(self, gate, up, down, comm):
            super().__init__()
            parts = [reference.shard(w, 0, comm) for w in (gate, up)]
            self.comm, self.both = comm, nn.Parameter(torch.cat(parts))
            self.down = reference.RowParallelLinear(down, None, comm)

        def forward(self, x):
            gate, up = F.linear(reference.copy_to_ranks(x, self.comm), self.both).chunk(2, -1)
            return self.down(F.silu(gate) * up)

    return MLP


@wrong("no sum at the end", case="the same values on several ranks")
def no_sum(reference):
    def forward(self, x):
        x = reference.copy_to_ranks(x, self.comm)
        return F.linear(F.silu(self.gate(x)) * self.up(x), self.down.weight)

    return changed(reference, forward)


@wrong("the weights' gradients summed over the ranks", case="gradients of the weights")
def gradients_summed(reference):
    def forward(self, x):
        x = reference.copy_to_ranks(x, self.comm)
        hidden = F.silu(self.gate(x)) * self.up(x)
        down = reference.copy_to_ranks(self.down.weight, self.comm)
        return reference.reduce_from_ranks(F.linear(hidden, down), self.comm)

    return changed(reference, forward)


@wrong("f missing", case="gradient of the input")
def no_f(reference):
    return changed(reference, lambda self, x: self.down(F.silu(self.gate(x)) * self.up(x)))


@wrong("f for the gate only", case="gradient of the input")
def f_for_gate(reference):
    def forward(self, x):
        return self.down(F.silu(self.gate(reference.copy_to_ranks(x, self.comm))) * self.up(x))

    return changed(reference, forward)


@wrong("f twice: once for each column layer", case="one all-reduce forward, one backward")
def f_twice(reference):
    def init(self, gate, up, down, comm):
        self.gate, self.up = (reference.ColumnParallelLinear(w, None, comm) for w in (gate, up))

    return changed(reference, lambda self, x: self.down(F.silu(self.gate(x)) * self.up(x)), init)


@wrong("hidden values gathered in between", case="one all-reduce forward, one backward")
def gathered(reference):
    def forward(self, x):
        x = reference.copy_to_ranks(x, self.comm)
        hidden = F.silu(self.gate(x)) * self.up(x)
        self.comm.all_gather(hidden.detach(), -1)
        return self.down(hidden)

    return changed(reference, forward)


@wrong("the group ignored", case="within its own group")
def group_ignored(reference):
    class MLP(reference.TensorParallelMLP):
        def forward(self, x):
            from servelab.ranks.communicator import Communicator

            x = reference.copy_to_ranks(x, self.comm)
            hidden = F.linear(F.silu(self.gate(x)) * self.up(x), self.down.weight)
            return reference.reduce_from_ranks(hidden, Communicator())

    return MLP


@wrong("the whole gate and up stacked beside the parts", case="holds its part of three matrices")
def whole_stacked(reference):
    def init(self, gate, up, down, comm):
        self.both = torch.cat([gate, up])

    return changed(reference, init=init)


@wrong("a dictionary of detached matrices beside the parts", case="holds its part of three matrices")
def whole_detached(reference):
    def init(self, gate, up, down, comm):
        self.sources = {"down": down.detach()}

    return changed(reference, init=init)
