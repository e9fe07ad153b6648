"""Answers to sequence parallelism."""

import torch
from torch import nn
from torch.nn import functional as F

from servelab.answers import right, wrong


def function(forward, backward):
    """An autograd function of (x, comm) from two functions of (tensor, comm)."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, comm):
            ctx.comm = comm
            return forward(x, comm)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, ctx.comm), None

    return Function.apply


def gather(x, comm):
    return comm.all_gather(x, 1)


def scatter(x, comm):
    return comm.reduce_scatter(x, 1)


GATHER, SCATTER = function(gather, scatter), function(scatter, gather)


def answers(reference, *, gather=None, scatter=None, **methods):
    """The three answers; methods of the layer replaced."""

    class MLP(reference.SequenceParallelMLP):
        pass

    for name, method in methods.items():
        setattr(MLP, name, method)
    return gather or reference.gather_tokens, scatter or reference.scatter_tokens, MLP


def inner(self, x):
    """What stands between the gather and the scatter."""
    return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


def normed(self, x):
    return F.rms_norm(x, self.norm.shape, self.norm, eps=1e-6)


@right("the gathered input thrown away and gathered again")
def gathered_again(reference):
    class Columns(torch.autograd.Function):
        """Products of the gathered input with both column shards; only the rank's own tokens are kept."""

        @staticmethod
        def forward(ctx, x, gate, up, comm):
            ctx.save_for_backward(x, gate, up)
            ctx.comm = comm
            whole = gather(x, comm)
            return F.linear(whole, gate), F.linear(whole, up)

        @staticmethod
        def backward(ctx, by_gate, by_up):
            x, gate, up = ctx.saved_tensors
            whole = gather(x, ctx.comm).flatten(0, 1)
            own = scatter(by_gate @ gate + by_up @ up, ctx.comm)
            return own, by_gate.flatten(0, 1).T @ whole, by_up.flatten(0, 1).T @ whole, None

    def forward(self, x):
        a, b = Columns.apply(normed(self, x), self.gate, self.up, self.comm)
        return SCATTER(F.linear(F.silu(a) * b, self.down), self.comm)

    return answers(reference, gather=GATHER, scatter=SCATTER, forward=forward)


@right("with the norm summed in the backward pass, and a norm by hand")
def norm_in_backward(reference):
    class MLP(nn.Module):
        def __init__(self, norm, gate, up, down, comm):
            super().__init__()
            self.comm, self.norm = comm, nn.Parameter(norm.detach().clone())
            self.gate, self.up = (reference.ColumnParallelLinear(w, None, comm, copied=True) for w in (gate, up))
            self.down = reference.RowParallelLinear(down, None, comm)

        def forward(self, x):
            weight = reference.copy_to_ranks(self.norm, self.comm)
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
            x = GATHER(x, self.comm)
            return SCATTER(F.linear(F.silu(self.gate(x)) * self.up(x), self.down.weight), self.comm)

        def finish_gradients(self):
            pass

    return GATHER, SCATTER, MLP


@right("the norm's weight multiplied into the matrices")
def folded(reference):
    def forward(self, x):
        whole = GATHER(F.rms_norm(x, self.norm.shape, eps=1e-6), self.comm)
        hidden = F.silu(F.linear(whole, self.gate * self.norm)) * F.linear(whole, self.up * self.norm)
        return SCATTER(F.linear(hidden, self.down), self.comm)

    return answers(reference, gather=GATHER, scatter=SCATTER, forward=forward)


@right("flat tokens, and a norm by the length of a vector")
def flat(reference):
    def forward(self, x):
        rows = x.flatten(0, 1)
        scale = (rows.norm(dim=1, keepdim=True).expand_as(rows) ** 2 / rows.shape[1] + 1e-6) ** -0.5
        return SCATTER(inner(self, GATHER((rows * scale * self.norm).view_as(x), self.comm)), self.comm)

    return answers(reference, forward=forward)


@wrong("gathered first, then normed", case="the norm of the own tokens alone")
def norm_after_gather(reference):
    return answers(
        reference, forward=lambda self, x: SCATTER(inner(self, normed(self, GATHER(x, self.comm))), self.comm)
    )


@wrong("gathered first, then normed by hand, summed in backward", case="the norm of the own tokens alone")
def norm_after_gather_by_hand(reference):
    def forward(self, x):
        x = GATHER(x, self.comm)
        x = x * (x * x).mean(-1, keepdim=True).add(1e-6).pow(-0.5) * reference.copy_to_ranks(self.norm, self.comm)
        return SCATTER(inner(self, x), self.comm)

    return answers(reference, forward=forward, finish_gradients=lambda self: None)


@wrong("the tokens gathered, flattened, and then normed", case="the norm of the own tokens alone")
def flat_after_gather(reference):
    def forward(self, x):
        x = GATHER(x, self.comm)
        x = normed(self, x.flatten(0, 1)).view_as(x)
        return SCATTER(inner(self, x), self.comm)

    return answers(reference, forward=forward)


@wrong("the eps of the norm forgotten", case="the dense layer's values")
def no_eps(reference):
    def forward(self, x):
        x = F.rms_norm(x, self.norm.shape, self.norm, eps=0.0)
        return SCATTER(inner(self, GATHER(x, self.comm)), self.comm)

    return answers(reference, forward=forward)


@wrong("gathered in the graph, by the communicator itself", case="the dense layer's values")
def in_the_graph(reference):
    return answers(
        reference, forward=lambda self, x: SCATTER(inner(self, gather(normed(self, x), self.comm)), self.comm)
    )


@wrong("gathered along the batch", case="gathers all tokens")
def along_batch(reference):
    return answers(reference, gather=function(lambda x, comm: comm.all_gather(x, 0), lambda g, comm: scatter(g, comm)))


@wrong("the matrices' gradients gathered in the backward pass", case="as much traffic as tensor parallelism")
def gathers_gradients(reference):
    def forward(self, x):
        y = reference.SequenceParallelMLP.forward(self, x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.comm.all_gather(self.gate.detach()) is None or None)
        return y

    return answers(reference, forward=forward)


@wrong("summed instead of gathered", case="gathers all tokens")
def summed(reference):
    return answers(reference, gather=lambda x, comm: reference.reduce_from_ranks(x, comm))


@wrong("scattered without the sum", case="sums, and scatters the tokens")
def no_sum(reference):
    return answers(reference, scatter=function(lambda x, comm: x.chunk(comm.size, 1)[comm.rank].clone(), gather))


@wrong("scattered along the hidden dimension", case="sums, and scatters the tokens")
def along_hidden(reference):
    def part(x, comm):
        return comm.all_reduce(x.clone()).flatten(1).chunk(comm.size, 1)[-1 - comm.rank].unsqueeze(-1)

    return answers(reference, scatter=function(part, gather))


@wrong("the gather's gradient cut, not summed", case="gradient of gathered tokens")
def cut(reference):
    return answers(reference, gather=function(gather, lambda g, comm: g.chunk(comm.size, 1)[comm.rank].clone()))


@wrong("the scatter's gradient not gathered", case="gradient of scattered tokens")
def zero_filled(reference):
    def filled(grad, comm):
        parts = [torch.zeros_like(grad) for _ in range(comm.size)]
        parts[comm.rank] = grad
        return torch.cat(parts, 1)

    return answers(reference, scatter=function(scatter, filled))


@wrong("the scatter's gradient t times", case="gradient of scattered tokens")
def t_times(reference):
    return answers(reference, scatter=function(scatter, lambda g, comm: gather(g, comm) * comm.size))


@wrong("whole matrices on every rank", case="holds its part of the weights")
def whole(reference):
    class MLP(reference.SequenceParallelMLP):
        def __init__(self, norm, gate, up, down, comm):
            super().__init__(norm, gate, up, down, comm)
            self.gate, self.up, self.down = (nn.Parameter(w.clone()) for w in (gate, up, down))

        def forward(self, x):
            return inner(self, normed(self, x))

    return reference.gather_tokens, reference.scatter_tokens, MLP


@wrong("the gate's part a view", case="holds its part of the weights")
def gate_view(reference):
    class MLP(reference.SequenceParallelMLP):
        def __init__(self, norm, gate, up, down, comm):
            super().__init__(norm, gate, up, down, comm)
            self.gate = nn.Parameter(gate.chunk(comm.size)[comm.rank])

    return reference.gather_tokens, reference.scatter_tokens, MLP


@wrong("norm over all dimensions of the own tokens", case="the dense layer's values")
def norm_over_all(reference):
    def forward(self, x):
        x = F.rms_norm(x, x.shape[1:], eps=1e-6) * self.norm
        return SCATTER(inner(self, GATHER(x, self.comm)), self.comm)

    return answers(reference, forward=forward)


@wrong("the norm forgotten", case="the dense layer's values")
def no_norm(reference):
    return answers(reference, forward=lambda self, x: SCATTER(inner(self, GATHER(x, self.comm)), self.comm))


@wrong("f's gradient in place of the scatter's", case="gradient of the own tokens")
def detached_norm(reference):
    def forward(self, x):
        own = function(gather, lambda g, comm: g.chunk(comm.size, 1)[comm.rank].clone())
        return SCATTER(inner(self, own(normed(self, x), self.comm)), self.comm)

    return answers(reference, forward=forward)


@wrong("the matrices' gradients summed over the ranks, too", case="gradients of the weights")
def all_summed(reference):
    def finish(self):
        for weight in (self.norm, self.gate, self.up, self.down):
            self.comm.all_reduce(weight.grad)

    return answers(reference, finish_gradients=finish)


@wrong("the norm's gradient not summed", case="gradient of the norm, summed")
def norm_unsummed(reference):
    return answers(reference, finish_gradients=lambda self: None)


@wrong("finish_gradients not written yet", case="gradient of the norm, summed")
def unfinished(reference):
    def finish(self):
        raise NotImplementedError

    return answers(reference, finish_gradients=finish)


@wrong("the norm's gradient gathered, then added up", case="gradient of the norm, summed")
def norm_gathered(reference):
    def finish(self):
        self.norm.grad = self.comm.all_gather(self.norm.grad.unsqueeze(0), 0).sum(0)

    return answers(reference, finish_gradients=finish)


@wrong("the norm's gradient averaged", case="gradient of the norm, summed")
def norm_averaged(reference):
    def finish(self):
        self.norm.grad = self.comm.all_reduce(self.norm.grad) / self.comm.size

    return answers(reference, finish_gradients=finish)


@wrong("gathered, then tensor parallel, then cut", case="as much traffic as tensor parallelism")
def all_reduce_then_cut(reference):
    def forward(self, x):
        whole = reference.reduce_from_ranks(inner(self, GATHER(normed(self, x), self.comm)), self.comm)
        return SCATTER(whole / self.comm.size, self.comm)

    return answers(reference, forward=forward)


@wrong("an all-reduce and a cut instead of a reduce-scatter", case="as much traffic as tensor parallelism")
def cut_after_sum(reference):
    def part(x, comm):
        return comm.all_reduce(x.clone()).chunk(comm.size, 1)[comm.rank].clone()

    return answers(reference, scatter=function(part, gather))


@wrong("gathered once for gate and once for up", case="as much traffic as tensor parallelism")
def gathered_twice(reference):
    def forward(self, x):
        x = normed(self, x)
        a, b = (F.linear(GATHER(x, self.comm), w) for w in (self.gate, self.up))
        return SCATTER(F.linear(F.silu(a) * b, self.down), self.comm)

    return answers(reference, forward=forward)


@wrong("the group ignored", case="within its own group")
def group_ignored(reference):
    def whole(x, comm):
        from servelab.ranks.communicator import Communicator

        return Communicator().all_gather(x, 1)[:, : x.shape[1] * comm.size]

    return answers(reference, gather=function(whole, scatter))


@wrong("the norm's weight is the caller's own", case="holds its part of the weights")
def norm_of_the_caller(reference):
    class MLP(reference.SequenceParallelMLP):
        def __init__(self, norm, gate, up, down, comm):
            super().__init__(norm, gate, up, down, comm)
            self.norm = nn.Parameter(norm)

    return reference.gather_tokens, reference.scatter_tokens, MLP


@wrong("the norm's gradient summed twice, then divided by t", case="gradient of the norm, summed")
def norm_summed_twice(reference):
    def finish(self):
        for _ in range(2):
            self.comm.all_reduce(self.norm.grad)
        self.norm.grad /= self.comm.size

    return answers(reference, finish_gradients=finish)


@right("the norm's weight doubled and halved, eps in a buffer")
def eps_in_a_buffer(reference):
    class MLP(reference.SequenceParallelMLP):
        def __init__(self, norm, gate, up, down, comm):
            super().__init__(norm, gate, up, down, comm)
            self.norm = nn.Parameter(norm * 2 / 2)
            self.register_buffer("eps", torch.tensor([1e-6], dtype=norm.dtype))

        def forward(self, x):
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.norm
            return SCATTER(inner(self, GATHER(x, self.comm)), self.comm)

    return GATHER, SCATTER, MLP


@wrong("gathered, then normed token by token", case="the norm of the own tokens alone")
def token_by_token(reference):
    def forward(self, x):
        x = torch.cat([normed(self, token) for token in GATHER(x, self.comm).split(1, 1)], 1)
        return SCATTER(inner(self, x), self.comm)

    return answers(reference, forward=forward)


@wrong("gathered, then normed in as many parts as there are ranks, by hand", case="the norm of the own tokens alone")
def part_by_part(reference):
    def forward(self, x):
        parts = GATHER(x, self.comm).chunk(self.comm.size, 1)
        x = torch.cat([part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.norm for part in parts], 1)
        return SCATTER(inner(self, x), self.comm)

    return answers(reference, forward=forward)


@wrong("a copy of the whole matrices beside the parts", case="holds its part of the weights")
def copied_beside(reference):
    class MLP(reference.SequenceParallelMLP):
        def __init__(self, norm, gate, up, down, comm):
            super().__init__(norm, gate, up, down, comm)
            self.full = {"gate": gate.clone()}

    return reference.gather_tokens, reference.scatter_tokens, MLP


@wrong("the gather's communicator kept on the class", case="within its own group")
def on_the_class(reference):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, comm):
            Gather.comm = comm
            return gather(x, comm)

        @staticmethod
        def backward(ctx, grad):
            return scatter(grad, Gather.comm), None

    return answers(reference, gather=Gather.apply)
