"""Answers to the decoder layer over ranks. Some are right layers out of a wrong part of an earlier exercise."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from servelab.answers import right, wrong
from servelab.llm.model import rotate
from servelab.ranks.communicator import Communicator


def norm(layer, x, weight):
    return F.rms_norm(x, weight.shape, weight, layer.config.rms_norm_eps)


def products(layer, x):
    """Queries, keys and values of the reference's layer, by heads and not rotated."""
    x = norm(layer, x, layer.attn_norm)
    flat = (layer.q(x), F.linear(x, layer.k), F.linear(x, layer.v))
    return [each.unflatten(1, (-1, layer.config.head_dim)) for each in flat]


def mixed(layer, x, angles, attend):
    q, k, v = products(layer, x)
    return attend(rotate(q, *angles), rotate(k, *angles), v).flatten(1)


def second(layer, x):
    """What follows the attention."""
    return x + layer.mlp(norm(layer, x, layer.mlp_norm))


def changed(reference, forward=None, after=None):
    """The reference's layer with another forward pass, or with something done after its constructor."""

    class Layer(reference.DecoderLayer):
        def __init__(self, config, weights, comm):
            super().__init__(config, weights, comm)
            self.comm = comm
            if after:
                after(self, config, weights, comm)

    if forward:
        Layer.forward = forward
    return Layer


def with_parts(reference, **parts):
    """The reference's layer, out of other parts."""
    vars(reference).update(parts)
    return reference.DecoderLayer


@right("around the attention of exercise 4, whose weights it uses")
def around_attention(reference):
    class Layer(nn.Module):
        def __init__(self, config, weights, comm):
            super().__init__()
            heads = config.num_heads, config.num_kv_heads
            self.attention = reference.TensorParallelAttention(*(weights[n] for n in "qkvo"), *heads, comm, comm)
            self.mlp = reference.TensorParallelMLP(*(weights[name] for name in ("gate", "up", "down")), comm)
            self.attn_norm, self.mlp_norm, self.eps = weights["attn_norm"], weights["mlp_norm"], config.rms_norm_eps

        def forward(self, x, angles, attend):
            y, part = F.rms_norm(x, x.shape[-1:], self.attn_norm, self.eps), self.attention
            q, k, v = (F.linear(y, w).view(len(y), -1, part.head_dim) for w in (part.q, part.k, part.v))
            x += part.o(attend(rotate(q, *angles), rotate(k, *angles), v).reshape(len(y), -1))
            x += self.mlp(F.rms_norm(x, x.shape[-1:], self.mlp_norm, self.eps))
            return x

    return Layer


@right("keys' and values' weights repeated, then column layers for all three")
def repeated_weights(reference):
    class Layer(nn.Module):
        def __init__(self, config, weights, comm):
            super().__init__()
            self.config = config
            copies = max(1, comm.size // config.num_kv_heads)
            parts = {"q": weights["q"]}
            for name in "kv":
                by_head = weights[name].unflatten(0, (config.num_kv_heads, -1))
                parts[name] = by_head.repeat_interleave(copies, 0).flatten(0, 1)
            self.qkv = nn.ModuleList(reference.ColumnParallelLinear(w, None, comm) for w in parts.values())
            self.out = reference.RowParallelLinear(weights["o"], None, comm)
            self.ffn = reference.TensorParallelMLP(weights["gate"], weights["up"], weights["down"], comm)
            self.norms = nn.ParameterDict({n: w.clone() for n, w in weights.items() if n.endswith("norm")})

        def forward(self, x, angles, attend):
            y = norm(self, x, self.norms["attn_norm"])
            q, k, v = (layer(y).view(len(x), -1, self.config.head_dim) for layer in self.qkv)
            y = x + self.out(attend(rotate(q, *angles), rotate(k, *angles), v).reshape(len(x), -1))
            return y + self.ffn(norm(self, y, self.norms["mlp_norm"]))

    return Layer


@right("matrix products without any of the parts, two matrices fused")
def by_hand(reference):
    class Layer(nn.Module):
        def __init__(self, config, weights, comm):
            super().__init__()
            self.comm, self.config, dim = comm, config, config.head_dim
            queries = torch.arange(config.num_heads * dim).chunk(comm.size)[comm.rank]
            groups = config.num_heads // config.num_kv_heads
            heads = sorted({int(row) // dim // groups for row in queries})
            rows = torch.cat([torch.arange(head * dim, (head + 1) * dim) for head in heads])
            self.sizes = [len(queries), len(rows), len(rows)]
            self.qkv = nn.Parameter(torch.cat([weights["q"][queries], weights["k"][rows], weights["v"][rows]]).T)
            inner = torch.arange(config.intermediate_size).chunk(comm.size)[comm.rank]
            self.both = nn.Parameter(torch.cat([weights["gate"][inner], weights["up"][inner]]).T)
            self.o, self.down = nn.Parameter(weights["o"][:, queries].T), nn.Parameter(weights["down"][:, inner].T)
            self.scales = [weights[name].clone() for name in ("attn_norm", "mlp_norm")]

        def normed(self, x, number):
            return x / (x.pow(2).mean(1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.scales[number]

        def forward(self, x, angles, attend):
            q, k, v = (
                part.reshape(len(x), -1, self.config.head_dim)
                for part in (self.normed(x, 0) @ self.qkv).split(self.sizes, 1)
            )
            y = self.comm.all_reduce(attend(rotate(q, *angles), rotate(k, *angles), v).flatten(1) @ self.o)
            x = y.add_(x)
            gate, up = (self.normed(x, 1) @ self.both).chunk(2, 1)
            return self.comm.all_reduce((gate / (1 + torch.exp(-gate)) * up) @ self.down) + x

    return Layer


# -- wrong on one rank already


@wrong("the KV memory passed over: attention to the step's tokens only", case="a layer on one rank")
def no_memory(reference):
    def forward(self, x, angles, attend):
        q, k, v = products(self, x)
        attend(rotate(q, *angles), rotate(k, *angles), v)
        q, k, v = (each.transpose(0, 1) for each in (rotate(q, *angles), rotate(k, *angles), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return second(self, x + self.o(out.transpose(0, 1).flatten(1)))

    return changed(reference, forward)


@wrong("keys not rotated", case="a layer on one rank")
def keys_not_rotated(reference):
    def forward(self, x, angles, attend):
        q, k, v = products(self, x)
        return second(self, x + self.o(attend(rotate(q, *angles), k, v).flatten(1)))

    return changed(reference, forward)


@wrong("values rotated as well", case="a layer on one rank")
def values_rotated(reference):
    def forward(self, x, angles, attend):
        q, k, v = (rotate(each, *angles) for each in products(self, x))
        return second(self, x + self.o(attend(q, k, v).flatten(1)))

    return changed(reference, forward)


@wrong("residual around the MLP missing", case="a layer on one rank")
def no_residual(reference):
    def forward(self, x, angles, attend):
        return self.mlp(norm(self, x + self.o(mixed(self, x, angles, attend)), self.mlp_norm))

    return changed(reference, forward)


@wrong("the residual taken behind the norm", case="a layer on one rank")
def residual_behind_norm(reference):
    def forward(self, x, angles, attend):
        x = norm(self, x, self.attn_norm) + self.o(mixed(self, x, angles, attend))
        return second(self, x)

    return changed(reference, forward)


@wrong("attention and MLP side by side, from one x", case="a layer on one rank")
def side_by_side(reference):
    def forward(self, x, angles, attend):
        return x + self.o(mixed(self, x, angles, attend)) + self.mlp(norm(self, x, self.mlp_norm))

    return changed(reference, forward)


@wrong("the norm's epsilon left out", case="a layer on one rank")
def no_epsilon(reference):
    def forward(self, x, angles, attend):
        x = x + self.o(mixed(self, x, angles, attend))
        return x + self.mlp(F.rms_norm(x, self.mlp_norm.shape, self.mlp_norm))

    return changed(reference, forward)


@wrong("the tiny model's epsilon instead of the configuration's", case="a model of other dimensions")
def epsilon_of_the_tiny_model(reference):
    def after(self, config, weights, comm):
        self.config = replace(config, rms_norm_eps=1e-5)

    return changed(reference, after=after)


@wrong("heads of 16, whatever the configuration says", case="a model of other dimensions")
def heads_of_16(reference):
    def after(self, config, weights, comm):
        self.config = replace(config, head_dim=16)

    return changed(reference, after=after)


@wrong("the hidden size divided by the heads for head_dim", case="a model of other dimensions")
def hidden_by_heads(reference):
    class Layer(reference.DecoderLayer):
        def __init__(self, config, weights, comm):
            super().__init__(replace(config, head_dim=config.hidden_size // config.num_heads), weights, comm)

    return Layer


@wrong("computed in float32", case="a layer on one rank")
def in_float32(reference):
    def forward(self, x, angles, attend):
        x = x + self.o(mixed(self, x, angles, attend).float().double())
        return second(self, x)

    return changed(reference, forward)


# -- wrong on several ranks


@wrong("the residual added on every rank before the sum", case="KV heads split over the ranks")
def residual_before_sum(reference):
    def forward(self, x, angles, attend):
        part = F.linear(mixed(self, x, angles, attend), self.o.weight)
        return second(self, reference.reduce_from_ranks(x + part, self.comm))

    return changed(reference, forward)


@wrong("the first KV heads on every rank", case="KV heads split over the ranks")
def first_heads(reference):
    def after(self, config, weights, comm):
        rows = len(self.k)
        self.k, self.v = (nn.Parameter(weights[name][:rows].clone()) for name in "kv")

    return changed(reference, after=after)


@wrong("no sum behind the attention", case="KV heads split over the ranks")
def no_sum(reference):
    def forward(self, x, angles, attend):
        return second(self, x + F.linear(mixed(self, x, angles, attend), self.o.weight))

    return changed(reference, forward)


@wrong("keys and values as column layers, which cut a KV head in two", case="KV heads replicated")
def cut_in_two(reference):
    def after(self, config, weights, comm):
        self.k, self.v = (nn.Parameter(reference.shard(weights[name], 0, comm)) for name in "kv")

    return changed(reference, after=after)


@wrong("the KV head with the rank's number", case="KV heads replicated")
def rank_modulo(reference):
    def after(self, config, weights, comm):
        heads = max(1, config.num_kv_heads // comm.size)
        first = comm.rank * heads % config.num_kv_heads * config.head_dim
        rows = slice(first, first + heads * config.head_dim)
        self.k, self.v = (nn.Parameter(weights[name][rows].clone()) for name in "kv")

    return changed(reference, after=after)


@wrong("the plain layer on every rank, beside all-reduces of zeros", case="holds its part of the matrices")
def plain_layer(reference):
    """Right tokens and as many messages, but nothing is cut."""

    class Layer(reference.DecoderLayer):
        def __init__(self, config, weights, comm):
            nn.Module.__init__(self)
            self.comm, self.whole = comm, reference.DecoderLayer(config, weights, Alone())

        def forward(self, x, angles, attend):
            for _ in range(2 if self.comm.size > 1 else 0):
                self.comm.all_reduce(torch.zeros_like(x))
            return self.whole(x, angles, attend)

    return Layer


class Alone:
    """A communicator of one rank."""

    rank, size = 0, 1

    def all_reduce(self, tensor, op="sum"):
        return tensor


@wrong("all keys' and values' weights on every rank, their heads cut out later", case="holds its part of the matrices")
def all_kv_weights(reference):
    def after(self, config, weights, comm):
        self.all_k, self.all_v = (nn.Parameter(weights[name].clone()) for name in "kv")

    return changed(reference, after=after)


@wrong("the dictionary of whole weights kept", case="holds its part of the matrices")
def dictionary_kept(reference):
    def after(self, config, weights, comm):
        self.weights = weights

    return changed(reference, after=after)


@wrong("a view of the whole weights", case="holds its part of the matrices")
def view(reference):
    def after(self, config, weights, comm):
        self.q.weight = nn.Parameter(weights["q"].chunk(comm.size)[comm.rank])

    return changed(reference, after=after)


@wrong("keys and values kept once for each query head", case="as many keys and values as its heads have")
def once_a_query_head(reference):
    def forward(self, x, angles, attend):
        q, k, v = products(self, x)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (rotate(k, *angles), v))
        return second(self, x + self.o(attend(rotate(q, *angles), k, v).flatten(1)))

    return changed(reference, forward)


@wrong("keys and values gathered, so that every rank keeps all heads", case="as many keys and values as its heads have")
def kv_gathered(reference):
    def forward(self, x, angles, attend):
        q, k, v = products(self, x)
        every = [self.comm.all_gather(each, 1) for each in (rotate(q, *angles), rotate(k, *angles), v)]
        groups = every[0].shape[1] // every[1].shape[1]
        mine = slice(self.comm.rank * q.shape[1], (self.comm.rank + 1) * q.shape[1])
        out = attend(every[0], *(each.repeat_interleave(groups, 1) for each in every[1:]))
        return second(self, x + self.o(out[:, mine].flatten(1)))

    return changed(reference, forward)


@wrong("heads gathered before the output layer", case="two all-reduces a layer")
def heads_gathered(reference):
    def forward(self, x, angles, attend):
        heads = mixed(self, x, angles, attend)
        self.comm.all_gather(heads, 1)
        return second(self, x + self.o(heads))

    return changed(reference, forward)


@wrong("a third all-reduce, of the layer's result", case="two all-reduces a layer")
def third(reference):
    def forward(self, x, angles, attend):
        y = second(self, x + self.o(mixed(self, x, angles, attend)))
        return self.comm.all_reduce(y.clone()) / self.comm.size

    return changed(reference, forward)


@wrong("the weights sent around in the constructor", case="two all-reduces a layer")
def weights_sent(reference):
    def after(self, config, weights, comm):
        comm.all_reduce(weights["q"].clone())

    return changed(reference, after=after)


@wrong("the group ignored", case="within its own group")
def group_ignored(reference):
    class Layer(reference.DecoderLayer):
        def __init__(self, config, weights, comm):
            super().__init__(config, weights, comm)
            self.everybody = Communicator()

        def forward(self, x, angles, attend):
            part = F.linear(mixed(self, x, angles, attend), self.o.weight)
            return second(self, x + reference.reduce_from_ranks(part, self.everybody))

    return Layer


@wrong("a communicator of its own, over the whole world", case="within its own group")
def of_the_world(reference):
    class Layer(reference.DecoderLayer):
        def __init__(self, config, weights, comm):
            super().__init__(config, weights, Communicator())

    return Layer


@wrong("the world's communicator for all but the heads", case="within its own group")
def of_the_world_but_for_heads(reference):
    def after(self, config, weights, comm):
        everybody = Communicator()
        self.q, self.o = (
            layer(weights[name], None, everybody)
            for name, layer in (("q", reference.ColumnParallelLinear), ("o", reference.RowParallelLinear))
        )
        self.mlp = reference.TensorParallelMLP(weights["gate"], weights["up"], weights["down"], everybody)

    return changed(reference, after=after)


@wrong("the world's communicator for the MLP", case="within its own group")
def mlp_of_the_world(reference):
    def after(self, config, weights, comm):
        self.mlp = reference.TensorParallelMLP(weights["gate"], weights["up"], weights["down"], Communicator())

    return changed(reference, after=after)


@wrong("the KV heads of the world's rank", case="within its own group")
def heads_of_the_world(reference):
    def after(self, config, weights, comm):
        everybody = Communicator()
        _, heads = reference.my_heads(config.num_heads, config.num_kv_heads, everybody.rank, everybody.size)
        rows = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
        self.k, self.v = (nn.Parameter(weights[name][rows].clone()) for name in "kv")

    return changed(reference, after=after)


@wrong("g once more behind the output layer, which has one", case="two all-reduces a layer")
def second_g(reference):
    def forward(self, x, angles, attend):
        return second(self, x + reference.reduce_from_ranks(self.o(mixed(self, x, angles, attend)), self.comm))

    return changed(reference, forward)


# -- right alone, wrong as layers of a model; and wrong parts


@wrong("the weights kept on the class, which all layers share", case="the plain loop's tokens, TP=2")
def on_the_class(reference):
    def after(self, config, weights, comm):
        kept[comm.ranks[comm.rank]] = self.mlp

    def forward(self, x, angles, attend):
        x = x + self.o(mixed(self, x, angles, attend))
        return x + kept[self.comm.ranks[self.comm.rank]](norm(self, x, self.mlp_norm))

    kept = {}
    return changed(reference, forward, after)


@wrong("the query layer kept on the class, which all ranks share", case="KV heads split over the ranks")
def queries_on_the_class(reference):
    def after(self, config, weights, comm):
        kept["q"] = self.q

    def forward(self, x, angles, attend):
        normed = norm(self, x, self.attn_norm)
        flat = (kept["q"](normed), F.linear(normed, self.k), F.linear(normed, self.v))
        q, k, v = (each.unflatten(1, (-1, self.config.head_dim)) for each in flat)
        return second(self, x + self.o(attend(rotate(q, *angles), rotate(k, *angles), v).flatten(1)))

    kept = {}
    return changed(reference, forward, after)


@wrong("a row layer of exercise 2 without its sum", case="the plain loop's tokens, TP=2")
def row_without_sum(reference):
    class Row(reference.RowParallelLinear):
        def forward(self, x):
            return F.linear(x, self.weight)

    return with_parts(reference, RowParallelLinear=Row)


@wrong("an MLP of exercise 3 that is not written yet", case="the plain loop's tokens, TP=2")
def mlp_not_written(reference):
    class TensorParallelMLP(nn.Module):
        def __init__(self, gate, up, down, comm):
            raise NotImplementedError

    return with_parts(reference, TensorParallelMLP=TensorParallelMLP)


@wrong("my_heads of exercise 4 deals replicas out in turn", case="the plain loop's tokens, TP=4")
def replicas_in_turn(reference):
    whole = reference.my_heads

    def my_heads(num_heads, num_kv_heads, rank, size):
        queries, kv = whole(num_heads, num_kv_heads, rank, size)
        return queries, kv if size <= num_kv_heads else range(rank % num_kv_heads, rank % num_kv_heads + 1)

    return with_parts(reference, my_heads=my_heads)


@wrong("a column layer of exercise 2 that gathers its outputs", case="two all-reduces a layer")
def column_gathers(reference):
    class Column(reference.ColumnParallelLinear):
        def forward(self, x):
            y = super().forward(x)
            self.comm.all_gather(y.detach(), -1)
            return y

    return with_parts(reference, ColumnParallelLinear=Column)


def kv_head_of(reference, choose):
    """The KV heads' weights from another head on, where there are more ranks than KV heads."""

    def after(self, config, weights, comm):
        if comm.size > config.num_kv_heads:
            first = choose(comm, config) * config.head_dim
            rows = slice(first, first + config.head_dim)
            self.k, self.v = (nn.Parameter(weights[name][rows].clone()) for name in "kv")

    return changed(reference, after=after)


@wrong("the rank by the number of KV heads, for the KV head", case="a model of other dimensions")
def rank_by_kv_heads(reference):
    return kv_head_of(reference, lambda comm, config: comm.rank // config.num_kv_heads)


@wrong("half the rank for the KV head", case="a model of other dimensions")
def half_the_rank(reference):
    return kv_head_of(reference, lambda comm, config: comm.rank // 2)


@wrong("two KV heads, whatever the configuration says", case="a model of other dimensions")
def two_kv_heads(reference):
    return kv_head_of(reference, lambda comm, config: comm.rank * 2 // comm.size)


@wrong("a dictionary of detached weights kept", case="holds its part of the matrices")
def detached_kept(reference):
    def after(self, config, weights, comm):
        self.weights = {name: weight.detach() for name, weight in weights.items()}

    return changed(reference, after=after)


@wrong("the dense layer on every rank, nothing sent: at TP=4", case="the plain loop's tokens, TP=4")
def dense(reference):
    class Layer(reference.DecoderLayer):
        def __init__(self, config, weights, comm):
            super().__init__(config, weights, Alone())

    return Layer


@wrong("the dense layer on every rank, nothing sent: its heads", case="KV heads split over the ranks")
def dense_heads(reference):
    return dense.make(reference)
