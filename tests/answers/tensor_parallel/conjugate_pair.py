"""Answers to the conjugate pair f and g."""

import torch

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


def same(x, comm):
    return x.view_as(x)


def summed(x, comm):
    return comm.all_reduce(x.clone())


F, G = function(same, summed), function(summed, same)


@right("contiguous copies, and gradients as new tensors")
def contiguous(reference):
    def copied(x, comm):
        return x.clone()

    def total(x, comm):
        return comm.all_reduce(x.detach().contiguous().clone())

    return function(copied, total), function(total, copied)


@right("by a hook and an addition")
def hooks(reference):
    """f by a hook on the gradient, g by an addition whose constant part is what the other ranks have."""

    def f(x, comm):
        y = x.view_as(x)
        y.register_hook(lambda grad: comm.all_reduce(grad.clone()))
        return y

    def g(x, comm):
        others = comm.all_reduce(x.detach().clone()) - x.detach()
        return x + others

    return f, g


@wrong("f sums forward, too", case="f passes values on")
def f_sums_forward(reference):
    return function(summed, summed), G


@wrong("f missing", case="f sums gradients")
def f_missing(reference):
    return (lambda x, comm: x), G


@wrong("f averages gradients", case="f sums gradients")
def f_averages(reference):
    return function(same, lambda grad, comm: summed(grad, comm) / comm.size), G


@wrong("g missing", case="g sums values")
def g_missing(reference):
    return F, (lambda x, comm: x)


@wrong("g takes the maximum", case="g sums values")
def g_maximum(reference):
    return F, function(lambda x, comm: comm.all_reduce(x.clone(), "max"), same)


@wrong("g sums gradients, too", case="g passes gradients on")
def g_sums_backward(reference):
    return F, function(summed, summed)


@wrong("g divides gradients by t", case="g passes gradients on")
def g_divides(reference):
    return F, function(summed, lambda grad, comm: grad / comm.size)


@wrong(
    "g averages the gradients over the ranks, which are all the same", case="one all-reduce each, of the tensor's size"
)
def g_averages(reference):
    return F, function(summed, lambda grad, comm: summed(grad, comm) / comm.size)


@wrong("g gives all ranks' sums side by side", case="g sums values")
def g_wider(reference):
    return F, function(lambda x, comm: torch.cat([summed(x, comm)] * 2), same)


@wrong("f and g exchanged", case="f passes values on")
def exchanged(reference):
    return G, F


@wrong("gathers everything and adds it up", case="one all-reduce each, of the tensor's size")
def gathers(reference):
    def total(x, comm):
        return comm.all_gather(x.unsqueeze(0), 0).sum(0)

    return function(same, total), function(total, same)


@wrong("sums twice and halves", case="one all-reduce each, of the tensor's size")
def twice(reference):
    def total(x, comm):
        summed(x, comm)
        return summed(x, comm)

    return F, function(total, same)


@wrong("g overwrites the partial sum", case="overwrites nothing")
def overwrites_input(reference):
    def total(x, comm):
        return comm.all_reduce(x).view_as(x)

    return F, function(total, same)


@wrong("f overwrites the gradient", case="overwrites nothing")
def overwrites_gradient(reference):
    return function(same, lambda grad, comm: comm.all_reduce(grad)), G


@wrong("sums over all ranks, whatever the group", case="within its own group")
def ignores_the_group(reference):
    def total(x, comm):
        from servelab.ranks.communicator import Communicator

        return Communicator().all_reduce(x.clone())

    return function(same, total), function(total, same)


@wrong("rank 0 forgets to take part", case="f sums gradients")
def rank_0_absent(reference):
    return function(same, lambda grad, comm: summed(grad, comm) if comm.rank else grad), G


@wrong("f's communicator kept on the class", case="within its own group")
def on_the_class(reference):
    class CopyToRanks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, comm):
            CopyToRanks.comm = comm
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return CopyToRanks.comm.all_reduce(grad.clone()), None

    return CopyToRanks.apply, G


@wrong("g adds up in float32", case="g sums values")
def g_in_float32(reference):
    return F, function(lambda x, comm: comm.all_reduce(x.float()).double(), same)


@wrong("neither does anything", case="f sums gradients")
def identity(reference):
    return (function(same, same),) * 2
