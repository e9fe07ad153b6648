"""Answers to tensor-parallel attention."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from servelab.answers import right, wrong


def layer(reference, **methods):
    """The answers with some methods of the layer replaced; ``after`` runs at the end of the constructor."""
    after = methods.pop("after", None)

    class Attention(reference.TensorParallelAttention):
        def __init__(self, q, k, v, o, num_heads, num_kv_heads, comm, replicas):
            super().__init__(q, k, v, o, num_heads, num_kv_heads, comm, replicas)
            if after:
                after(self, q, k, v, o, num_heads, num_kv_heads)

    for name, method in methods.items():
        setattr(Attention, name, method)
    return reference.my_heads, Attention


def attend(reference, self, x, *, f=True, causal=True):
    """The reference's forward pass up to the output layer."""
    x = reference.copy_to_ranks(x, self.comm) if f else x
    q, k, v = (F.linear(x, w).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for w in (self.q, self.k, self.v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


@right("replicas summed in the backward pass, by f on the weights")
def by_f(reference):
    def forward(self, x):
        self_k, self_v = (reference.copy_to_ranks(w, self.replicas) for w in (self.k, self.v))
        x = reference.copy_to_ranks(x, self.comm)
        q, k, v = (F.linear(x, w).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for w in (self.q, self_k, self_v))
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    return layer(reference, forward=forward, finish_gradients=lambda self: None)


@right("head by head, heads found by search, one sum for both weights")
def head_by_head(reference):
    def my_heads(num_heads, num_kv_heads, rank, size):
        if num_heads % size or not (num_kv_heads % size == 0 or size % num_kv_heads == 0):
            raise ValueError("does not divide")
        mine = [h for h in range(num_heads) if h * size // num_heads == rank]
        return mine, sorted({h * num_kv_heads // num_heads for h in mine})

    class Attention(nn.Module):
        def __init__(self, q, k, v, o, num_heads, num_kv_heads, comm, replicas):
            super().__init__()
            self.comm, self.replicas, self.dim = comm, replicas, q.shape[0] // num_heads
            heads, self.kv_heads = my_heads(num_heads, num_kv_heads, comm.rank, comm.size)
            self.groups = [self.kv_heads.index(h * num_kv_heads // num_heads) for h in heads]
            self.q = nn.Parameter(torch.cat([q[h * self.dim : (h + 1) * self.dim] for h in heads]))
            self.k, self.v = (
                nn.Parameter(torch.cat([w[h * self.dim : (h + 1) * self.dim] for h in self.kv_heads])) for w in (k, v)
            )
            self.o = nn.Parameter(torch.cat([o[:, h * self.dim : (h + 1) * self.dim] for h in heads], 1))

        def forward(self, x):
            x, tokens = reference.copy_to_ranks(x, self.comm), x.shape[1]
            q, k, v = (F.linear(x, w).split(self.dim, -1) for w in (self.q, self.k, self.v))
            hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
            outs = []
            for head, kv in enumerate(self.groups):
                scores = q[head] @ k[kv].transpose(1, 2) / math.sqrt(self.dim)
                outs.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[kv])
            return reference.reduce_from_ranks(F.linear(torch.cat(outs, -1), self.o), self.comm)

        def finish_gradients(self):
            both = self.replicas.all_reduce(torch.cat([self.k.grad, self.v.grad]))
            self.k.grad, self.v.grad = both.chunk(2)

    return my_heads, Attention


@wrong("query heads dealt out like cards", case="query heads and their KV heads")
def dealt(reference):
    def my_heads(num_heads, num_kv_heads, rank, size):
        _, kv = reference.my_heads(num_heads, num_kv_heads, rank, size)
        return range(rank, num_heads, size), kv

    return my_heads, reference.TensorParallelAttention


@wrong("KV heads as many as query heads", case="query heads and their KV heads")
def kv_like_queries(reference):
    def my_heads(num_heads, num_kv_heads, rank, size):
        queries, _ = reference.my_heads(num_heads, num_kv_heads, rank, size)
        return queries, queries

    return my_heads, reference.TensorParallelAttention


@wrong("replicas dealt out in turn", case="more ranks than KV heads")
def replicas_in_turn(reference):
    def my_heads(num_heads, num_kv_heads, rank, size):
        queries, kv = reference.my_heads(num_heads, num_kv_heads, rank, size)
        return queries, kv if size <= num_kv_heads else range(rank % num_kv_heads, rank % num_kv_heads + 1)

    return my_heads, reference.TensorParallelAttention


@wrong("no KV head beyond their number", case="more ranks than KV heads")
def none_left(reference):
    def my_heads(num_heads, num_kv_heads, rank, size):
        queries, _ = reference.my_heads(num_heads, num_kv_heads, rank, size)
        return queries, range(rank * num_kv_heads // size, (rank + 1) * num_kv_heads // size)

    return my_heads, reference.TensorParallelAttention


@wrong("anything accepted", case="refuses what does not divide")
def anything(reference):
    def my_heads(num_heads, num_kv_heads, rank, size):
        queries, kv = num_heads // size, max(1, num_kv_heads // size)
        first = rank * num_kv_heads // size
        return range(rank * queries, (rank + 1) * queries), range(first, first + kv)

    return my_heads, reference.TensorParallelAttention


@wrong("all KV heads on every rank", case="holds its heads' weights and no more")
def all_kv(reference):
    def after(self, q, k, v, o, num_heads, num_kv_heads):
        self.k, self.v = nn.Parameter(k.clone()), nn.Parameter(v.clone())
        self.kv = reference.my_heads(num_heads, num_kv_heads, self.comm.rank, self.comm.size)[1]

    def forward(self, x):
        x = reference.copy_to_ranks(x, self.comm)
        q, k, v = (F.linear(x, w).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for w in (self.q, self.k, self.v))
        k, v = (t[:, self.kv.start : self.kv.stop] for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    return layer(reference, forward=forward, after=after)


@wrong("the whole weight beside the part", case="holds its heads' weights and no more")
def whole_beside(reference):
    def after(self, q, k, v, o, num_heads, num_kv_heads):
        self.full_k = k

    return layer(reference, after=after)


@wrong("a view of the whole weight", case="holds its heads' weights and no more")
def view(reference):
    def after(self, q, k, v, o, num_heads, num_kv_heads):
        rows = reference.my_heads(num_heads, num_kv_heads, self.comm.rank, self.comm.size)[1]
        self.k = nn.Parameter(k[rows.start * self.head_dim : rows.stop * self.head_dim])

    return layer(reference, after=after)


@wrong("not causal", case="the dense layer's values")
def not_causal(reference):
    return layer(reference, forward=lambda self, x: self.o(attend(reference, self, x, causal=False)))


@wrong("g missing", case="the dense layer's values")
def no_g(reference):
    return layer(reference, forward=lambda self, x: F.linear(attend(reference, self, x), self.o.weight))


@wrong("heads and tokens mixed up on the way back", case="the dense layer's values")
def mixed_up(reference):
    def forward(self, x):
        out = attend(reference, self, x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        return self.o(out.reshape(*x.shape[:2], -1))

    return layer(reference, forward=forward)


@wrong("scaled twice", case="the dense layer's values")
def scaled_twice(reference):
    def forward(self, x):
        x = reference.copy_to_ranks(x, self.comm)
        q, k, v = (F.linear(x, w).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q = q / math.sqrt(self.head_dim)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    return layer(reference, forward=forward)


@wrong("f missing", case="gradient of the input")
def no_f(reference):
    return layer(reference, forward=lambda self, x: self.o(attend(reference, self, x, f=False)))


@wrong("f for the queries only", case="gradient of the input")
def f_for_queries(reference):
    def forward(self, x):
        inputs = (reference.copy_to_ranks(x, self.comm), x, x)
        q, k, v = (
            F.linear(i, w).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for i, w in zip(inputs, (self.q, self.k, self.v), strict=True)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    return layer(reference, forward=forward)


@wrong("every weight's gradient summed over all ranks", case="gradients of the weights")
def all_summed(reference):
    def finish(self):
        for weight in (self.q, self.k, self.v):
            self.comm.all_reduce(weight.grad)

    return layer(reference, finish_gradients=finish)


@wrong("f once for each of q, k and v", case="two all-reduces of activations")
def f_three_times(reference):
    def forward(self, x):
        q, k, v = (
            F.linear(reference.copy_to_ranks(x, self.comm), w).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    return layer(reference, forward=forward)


@wrong("keys and values gathered from all ranks", case="two all-reduces of activations")
def kv_gathered(reference):
    def forward(self, x):
        mixed = attend(reference, self, x)
        self.comm.all_gather(F.linear(x, self.k).detach(), -1)
        return self.o(mixed)

    return layer(reference, forward=forward)


@wrong("replicated gradients not summed", case="gradients of replicated weights")
def unreduced(reference):
    return layer(reference, finish_gradients=lambda self: None)


@wrong("finish_gradients not written yet", case="gradients of replicated weights")
def unfinished(reference):
    def finish(self):
        raise NotImplementedError

    return layer(reference, finish_gradients=finish)


@wrong("replicated gradients averaged", case="gradients of replicated weights")
def averaged(reference):
    def finish(self):
        for weight in (self.k, self.v):
            self.replicas.all_reduce(weight.grad).div_(self.replicas.size)

    return layer(reference, finish_gradients=finish)


@wrong("only the keys' gradient summed", case="gradients of replicated weights")
def keys_only(reference):
    def finish(self):
        self.replicas.all_reduce(self.k.grad)

    return layer(reference, finish_gradients=finish)


@wrong("replicated gradients summed over all ranks", case="gradients of replicated weights")
def over_all(reference):
    def finish(self):
        if self.replicas.size > 1:
            for weight in (self.k, self.v):
                self.comm.all_reduce(weight.grad)

    return layer(reference, finish_gradients=finish)


@wrong("replicated gradients gathered over all ranks", case="weight gradients summed apart")
def gathered(reference):
    """Right sums, out of all ranks' gradients."""

    def finish(self):
        for weight in (self.k, self.v) if self.replicas.size > 1 else ():
            everyone = self.comm.all_gather(weight.grad.unsqueeze(0))
            first = self.comm.rank - self.comm.rank % self.replicas.size
            weight.grad = everyone[first : first + self.replicas.size].sum(0)

    return layer(reference, finish_gradients=finish)


@wrong("the queries' gradient gathered as well", case="weight gradients summed apart")
def queries_too(reference):
    def finish(self):
        reference.TensorParallelAttention.finish_gradients(self)
        self.replicas.all_gather(self.q.grad)

    return layer(reference, finish_gradients=finish)


@wrong("the group ignored", case="within its own group")
def group_ignored(reference):
    def forward(self, x):
        from servelab.ranks.communicator import Communicator

        return reference.reduce_from_ranks(F.linear(attend(reference, self, x), self.o.weight), Communicator())

    return layer(reference, forward=forward)


@wrong("the KV heads of the world's rank", case="within its own group")
def heads_of_the_world(reference):
    from servelab.ranks.communicator import Communicator

    class Layer(reference.TensorParallelAttention):
        def __init__(self, q, k, v, o, num_heads, num_kv_heads, comm, replicas):
            super().__init__(q, k, v, o, num_heads, num_kv_heads, comm, replicas)
            everybody = Communicator()
            _, heads = reference.my_heads(num_heads, num_kv_heads, everybody.rank, everybody.size)
            rows = slice(heads.start * self.head_dim, heads.stop * self.head_dim)
            self.k, self.v = nn.Parameter(k[rows].clone()), nn.Parameter(v[rows].clone())

    return reference.my_heads, Layer


@wrong("all keys' and values' weights stacked beside the parts", case="holds its heads' weights and no more")
def whole_stacked(reference):
    def after(self, q, k, v, o, num_heads, num_kv_heads):
        self.kv = torch.cat([k, v])

    return layer(reference, after=after)


@wrong("the whole weight beside the part, detached", case="holds its heads' weights and no more")
def whole_detached(reference):
    def after(self, q, k, v, o, num_heads, num_kv_heads):
        self.full_o = o.detach()

    return layer(reference, after=after)


@right("the scale in a buffer, the own parts side by side once more")
def scale_in_a_buffer(reference):
    def after(self, q, k, v, o, num_heads, num_kv_heads):
        self.register_buffer("scale", torch.tensor([1 / math.sqrt(self.head_dim)], dtype=q.dtype))
        self.qkv = torch.cat([self.q, self.k, self.v]).detach()

    def forward(self, x):
        x = reference.copy_to_ranks(x, self.comm)
        q, k, v = (F.linear(x, w).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True, enable_gqa=True, scale=1.0)
        return self.o(mixed.transpose(1, 2).flatten(2))

    return layer(reference, forward=forward, after=after)
