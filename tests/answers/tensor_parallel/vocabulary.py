"""Answers to the vocabulary over ranks."""

import torch
from torch import nn
from torch.nn import functional as F

from servelab.answers import right, wrong


def answers(reference, *, ranges=None, embedding=None, loss=None):
    """The three answers, some of them replaced."""
    return (
        ranges or reference.vocab_range,
        embedding or reference.VocabParallelEmbedding,
        loss or reference.vocab_parallel_cross_entropy,
    )


def embedding_of(reference, forward):
    class Embedding(reference.VocabParallelEmbedding):
        pass

    Embedding.forward = forward
    return answers(reference, embedding=Embedding)


def look_up(self, tokens):
    """This rank's rows, zeros for other tokens."""
    elsewhere = (tokens < self.ids.start) | (tokens >= self.ids.stop)
    rows = F.embedding((tokens - self.ids.start).masked_fill(elsewhere, 0), self.weight)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


def label_logit(z, labels, first):
    """The label's entry, zero where it is elsewhere."""
    here = labels - first
    elsewhere = (here < 0) | (here >= z.shape[1])
    return z.gather(1, here.masked_fill(elsewhere, 0).unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0)


def top(logits, comm):
    return comm.all_reduce(logits.detach().amax(1), op="max").unsqueeze(1)


@right("one-hot products, an autograd function, three collectives")
def by_hand(reference):
    def ranges(vocab_size, rank, size):
        parts = torch.arange(vocab_size).tensor_split(size)[rank]
        return range(int(parts[0]), int(parts[-1]) + 1)

    class Embedding(nn.Module):
        def __init__(self, weight, comm):
            super().__init__()
            self.comm, self.ids = comm, ranges(len(weight), comm.rank, comm.size)
            self.weight = nn.Parameter(weight[list(self.ids)])

        def forward(self, tokens):
            hits = tokens.unsqueeze(-1) == torch.tensor(list(self.ids))
            return reference.reduce_from_ranks(hits.to(self.weight.dtype) @ self.weight, self.comm)

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, labels, first, comm):
            most = comm.all_reduce(logits.max(1).values, "max")
            weights = (logits - most.unsqueeze(1)).exp()
            total = comm.all_reduce(weights.sum(1))
            hits = labels.unsqueeze(1) == torch.arange(first, first + logits.shape[1])
            chosen = comm.all_reduce(torch.where(hits, logits, 0).sum(1))
            ctx.save_for_backward(weights / total.unsqueeze(1), hits)
            return total.log() + most - chosen

        @staticmethod
        def backward(ctx, grad):
            shares, hits = ctx.saved_tensors
            return (shares - hits.to(shares.dtype)) * grad.unsqueeze(1), None, None, None

    return ranges, Embedding, Loss.apply


@right("one all-gather of three numbers a token")
def gathered_statistics(reference):
    def loss(logits, labels, first, comm):
        most = logits.detach().amax(1)
        z = logits - most.unsqueeze(1)
        own = torch.stack([most, z.detach().exp().sum(1), label_logit(logits.detach(), labels, first)])
        tops, sums, chosen = comm.all_gather(own.unsqueeze(0), 0).unbind(1)
        highest = tops.amax(0)
        total = (sums * (tops - highest).exp()).sum(0)
        # the value is whole; the gradient comes from this rank's own part of it
        mine = z.exp().sum(1) * (most - highest).exp()
        whole = total - mine.detach() + mine
        label = label_logit(logits, labels, first)
        return whole.log() + highest - (chosen.sum(0) - label.detach() + label)

    return answers(reference, loss=loss)


@wrong("rounded down, the rest is nobody's", case="rows of each rank")
def rest_lost(reference):
    def ranges(vocab_size, rank, size):
        rows = vocab_size // size
        return range(rank * rows, (rank + 1) * rows)

    return answers(reference, ranges=ranges)


@wrong("rounded up, the last rank short", case="rows of each rank")
def last_short(reference):
    def ranges(vocab_size, rank, size):
        rows = -(-vocab_size // size)
        return range(rank * rows, min(vocab_size, (rank + 1) * rows))

    return answers(reference, ranges=ranges)


@wrong("the whole table on every rank", case="holds its rows and no more")
def whole_table(reference):
    class Embedding(nn.Module):
        def __init__(self, weight, comm):
            super().__init__()
            self.weight = nn.Parameter(weight.clone())

        def forward(self, tokens):
            return F.embedding(tokens, self.weight)

    return answers(reference, embedding=Embedding)


@wrong("a view of the whole table", case="holds its rows and no more")
def view(reference):
    class Embedding(reference.VocabParallelEmbedding):
        def __init__(self, weight, comm):
            super().__init__(weight, comm)
            self.weight = nn.Parameter(weight[self.ids.start : self.ids.stop])

    return answers(reference, embedding=Embedding)


@wrong("tokens of other ranks get row 0", case="embeddings of every rank's tokens")
def row_0(reference):
    def forward(self, tokens):
        elsewhere = (tokens < self.ids.start) | (tokens >= self.ids.stop)
        rows = F.embedding((tokens - self.ids.start).masked_fill(elsewhere, 0), self.weight)
        return reference.reduce_from_ranks(rows, self.comm)

    return embedding_of(reference, forward)


@wrong("tokens of other ranks wrapped around", case="embeddings of every rank's tokens")
def wrapped(reference):
    def forward(self, tokens):
        rows = F.embedding((tokens - self.ids.start) % len(self.weight), self.weight)
        return reference.reduce_from_ranks(rows, self.comm)

    return embedding_of(reference, forward)


@wrong("no sum of the embeddings", case="embeddings of every rank's tokens")
def no_sum(reference):
    return embedding_of(reference, look_up)


@wrong("the caller's tokens changed", case="embeddings of every rank's tokens")
def tokens_changed(reference):
    def forward(self, tokens):
        made = reference.reduce_from_ranks(look_up(self, tokens), self.comm)
        tokens -= self.ids.start
        return made

    return embedding_of(reference, forward)


@wrong("the embedding's gradient summed again", case="gradient of the embedding")
def gradient_twice(reference):
    def forward(self, tokens):
        return reference.copy_to_ranks(reference.reduce_from_ranks(look_up(self, tokens), self.comm), self.comm)

    return embedding_of(reference, forward)


@wrong("rows of other ranks get gradients through row 0", case="gradient of the embedding")
def gradient_of_row_0(reference):
    def forward(self, tokens):
        elsewhere = ((tokens < self.ids.start) | (tokens >= self.ids.stop)).unsqueeze(-1)
        rows = F.embedding((tokens - self.ids.start).clamp(0, len(self.weight) - 1), self.weight)
        rows = rows - (rows * elsewhere).detach()
        return reference.reduce_from_ranks(rows, self.comm)

    return embedding_of(reference, forward)


@wrong("embeddings gathered", case="one all-reduce for the embedding")
def gathered(reference):
    def forward(self, tokens):
        rows = look_up(self, tokens)
        return rows + (self.comm.all_gather(rows.detach().unsqueeze(0), 0).sum(0) - rows.detach())

    return embedding_of(reference, forward)


@wrong("the table gathered", case="one all-reduce for the embedding")
def table_gathered(reference):
    def forward(self, tokens):
        self.comm.all_gather(self.weight.detach()[: len(self.ids) // 2 or 1], 0)
        return reference.reduce_from_ranks(look_up(self, tokens), self.comm)

    return embedding_of(reference, forward)


@wrong("the logit alone, without the sum", case="loss of one rank")
def no_log(reference):
    def loss(logits, labels, first, comm):
        z = logits - top(logits, comm)
        total, label = reference.reduce_from_ranks(torch.stack([z.exp().sum(1), label_logit(z, labels, first)]), comm)
        return total - label

    return answers(reference, loss=loss)


@wrong("the mean over the tokens", case="loss of one rank")
def mean(reference):
    def loss(logits, labels, first, comm):
        return reference.vocab_parallel_cross_entropy(logits, labels, first, comm).mean()

    return answers(reference, loss=loss)


@wrong("labels taken as positions in the own part", case="labels of other ranks")
def positions(reference):
    def loss(logits, labels, first, comm):
        return reference.vocab_parallel_cross_entropy(logits, labels % logits.shape[1] + first, first, comm)

    return answers(reference, loss=loss)


@wrong("labels of other ranks not masked", case="labels of other ranks")
def unmasked(reference):
    def loss(logits, labels, first, comm):
        z = logits - top(logits, comm)
        here = (labels - first).clamp(0, z.shape[1] - 1)
        label = z.gather(1, here.unsqueeze(1)).squeeze(1)
        total, label = reference.reduce_from_ranks(torch.stack([z.exp().sum(1), label]), comm)
        return total.log() - label

    return answers(reference, loss=loss)


@wrong("a mask that lets the next rank's first id in", case="labels of other ranks")
def off_by_one(reference):
    def loss(logits, labels, first, comm):
        z = logits - top(logits, comm)
        here = labels - first
        elsewhere = (here < 0) | (here > z.shape[1])
        label = z.gather(1, here.clamp(0, z.shape[1] - 1).unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0)
        total, label = reference.reduce_from_ranks(torch.stack([z.exp().sum(1), label]), comm)
        return total.log() - label

    return answers(reference, loss=loss)


@wrong("nothing subtracted", case="large logits")
def overflow(reference):
    def loss(logits, labels, first, comm):
        parts = torch.stack([logits.exp().sum(1), label_logit(logits, labels, first)])
        total, label = reference.reduce_from_ranks(parts, comm)
        return total.log() - label

    return answers(reference, loss=loss)


@wrong("each rank's own maximum subtracted", case="labels of other ranks")
def own_maximum(reference):
    def loss(logits, labels, first, comm):
        z = logits - logits.detach().amax(1, keepdim=True)
        total, label = reference.reduce_from_ranks(torch.stack([z.exp().sum(1), label_logit(z, labels, first)]), comm)
        return total.log() - label

    return answers(reference, loss=loss)


def shifted(reference, most):
    """The loss with ``most(logits, comm)``, [tokens, 1] or one number, subtracted from all logits."""

    def loss(logits, labels, first, comm):
        z = logits - most(logits.detach(), comm)
        total, label = reference.reduce_from_ranks(torch.stack([z.exp().sum(1), label_logit(z, labels, first)]), comm)
        return total.log() - label

    return answers(reference, loss=loss)


@wrong("one maximum over all tokens", case="each token's own largest logit")
def one_maximum(reference):
    return shifted(reference, lambda z, comm: comm.all_reduce(z.max().reshape(1), "max"))


@wrong("one maximum over all tokens, as often as there are tokens", case="each token's own largest logit")
def one_maximum_repeated(reference):
    return shifted(reference, lambda z, comm: comm.all_reduce(z.max().expand(len(z)).clone(), "max").unsqueeze(1))


@wrong("the first token's maximum for all", case="each token's own largest logit")
def first_maximum(reference):
    return shifted(reference, lambda z, comm: comm.all_reduce(z[:1].amax(1), "max"))


@wrong("the mean of the tokens' maxima", case="each token's own largest logit")
def mean_maximum(reference):
    return shifted(reference, lambda z, comm: comm.all_reduce(z.amax(1), "max").mean())


@wrong("the communicator called in the graph, without g", case="labels of other ranks")
def in_the_graph(reference):
    def loss(logits, labels, first, comm):
        z = logits - top(logits, comm)
        total, label = comm.all_reduce(torch.stack([z.exp().sum(1), label_logit(z, labels, first)]))
        return total.log() - label

    return answers(reference, loss=loss)


@wrong("embeddings summed in the graph, without g", case="embeddings of every rank's tokens")
def embedding_in_the_graph(reference):
    return embedding_of(reference, lambda self, tokens: self.comm.all_reduce(look_up(self, tokens)))


@wrong("the sum of the maxima subtracted", case="large logits")
def sum_of_maxima(reference):
    def loss(logits, labels, first, comm):
        z = logits - comm.all_reduce(logits.detach().amax(1)).unsqueeze(1)
        total, label = reference.reduce_from_ranks(torch.stack([z.exp().sum(1), label_logit(z, labels, first)]), comm)
        return total.log() - label

    return answers(reference, loss=loss)


@wrong("the logits' gradient through the maximum, t times", case="gradient of the logits")
def gradient_summed(reference):
    def loss(logits, labels, first, comm):
        made = reference.vocab_parallel_cross_entropy(logits, labels, first, comm)
        return made * comm.size - made.detach() * (comm.size - 1)

    return answers(reference, loss=loss)


@wrong("softmax over the own part in the gradient", case="gradient of the logits")
def local_softmax(reference):
    def loss(logits, labels, first, comm):
        right = reference.vocab_parallel_cross_entropy(logits.detach(), labels, first, comm)
        local = logits.logsumexp(1) - label_logit(logits, labels, first)
        return right + local - local.detach()

    return answers(reference, loss=loss)


@wrong("no gradient at the label", case="gradient of the logits")
def no_label_gradient(reference):
    def loss(logits, labels, first, comm):
        z = logits - top(logits, comm)
        parts = torch.stack([z.exp().sum(1), label_logit(z, labels, first).detach()])
        total, label = reference.reduce_from_ranks(parts, comm)
        return total.log() - label

    return answers(reference, loss=loss)


@wrong("full logits gathered", case="few and small collectives for the loss")
def full_logits(reference):
    def loss(logits, labels, first, comm):
        everyone = comm.all_gather(logits.detach().T.contiguous(), 0).T.clone()
        everyone[:, first : first + logits.shape[1]] = logits
        return F.cross_entropy(everyone, labels, reduction="none")

    return answers(reference, loss=loss)


@wrong("one all-reduce for each token", case="few and small collectives for the loss")
def token_by_token(reference):
    def loss(logits, labels, first, comm):
        rows = zip(logits.split(1), labels.split(1), strict=True)
        return torch.cat([reference.vocab_parallel_cross_entropy(z, y, first, comm) for z, y in rows])

    return answers(reference, loss=loss)


@wrong("a sum in the backward pass", case="few and small collectives for the loss")
def backward_sends(reference):
    def loss(logits, labels, first, comm):
        made = reference.vocab_parallel_cross_entropy(logits, labels, first, comm)
        return reference.copy_to_ranks(made, comm) / comm.size + made.detach() * (1 - 1 / comm.size)

    return answers(reference, loss=loss)


@wrong("the group ignored", case="within its own group")
def group_ignored(reference):
    def forward(self, tokens):
        from servelab.ranks.communicator import Communicator

        return reference.reduce_from_ranks(look_up(self, tokens), Communicator())

    return embedding_of(reference, forward)


@wrong("the caller's labels changed", case="labels of other ranks")
def labels_changed(reference):
    def loss(logits, labels, first, comm):
        z = logits - top(logits, comm)
        labels -= first
        parts = torch.stack([z.exp().sum(1), label_logit(z, labels, 0)])
        total, label = reference.reduce_from_ranks(parts, comm)
        return total.log() - label

    return answers(reference, loss=loss)


@wrong("the loss of the own logits, nothing sent", case="few and small collectives for the loss")
def nothing_sent(reference):
    def loss(logits, labels, first, comm):
        return F.cross_entropy(logits, (labels - first).clamp(0, logits.shape[1] - 1), reduction="none")

    return answers(reference, loss=loss)


@wrong("the whole table beside the rows, detached", case="holds its rows and no more")
def whole_detached(reference):
    class Embedding(reference.VocabParallelEmbedding):
        def __init__(self, weight, comm):
            super().__init__(weight, comm)
            self.full = weight.detach()

    return answers(reference, embedding=Embedding)


@right("only the tokens that are here are looked up, with the ids in a buffer")
def looked_up_here(reference):
    class Embedding(nn.Module):
        def __init__(self, weight, comm):
            super().__init__()
            ids = reference.vocab_range(len(weight), comm.rank, comm.size)
            self.comm, self.weight = comm, nn.Parameter(weight[ids.start : ids.stop].clone())
            self.register_buffer("ids", torch.tensor(list(ids)))

        def forward(self, tokens):
            here = torch.isin(tokens, self.ids)
            y = torch.zeros(*tokens.shape, self.weight.shape[1], dtype=self.weight.dtype)
            if here.any():
                y[here] = self.weight[tokens[here] - self.ids[0]]
            return reference.reduce_from_ranks(y, self.comm)

    return answers(reference, embedding=Embedding)


@right("a sparse gradient of the table")
def sparse(reference):
    def forward(self, tokens):
        elsewhere = (tokens < self.ids.start) | (tokens >= self.ids.stop)
        rows = F.embedding((tokens - self.ids.start).masked_fill(elsewhere, 0), self.weight, sparse=True)
        return reference.reduce_from_ranks(rows * ~elsewhere.unsqueeze(-1), self.comm)

    return embedding_of(reference, forward)
