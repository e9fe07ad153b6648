"""Named answers to `capstone.rank_model`."""

from dataclasses import asdict, replace

from servelab.answers import right, wrong
from servelab.llm.model import LLM, LLMConfig


def checked(config, size):
    """Refuse what does not divide."""
    kv = config.num_kv_heads
    if config.num_heads % size or config.intermediate_size % size or (kv % size and size % kv):
        raise ValueError(f"{config} over {size} ranks")


def views_of(config, weights, rank, size):
    """The configuration of a rank, and its part of each weight, which is a view."""
    parts = min(size, config.num_kv_heads)
    heads = {"num_heads": config.num_heads // size, "num_kv_heads": config.num_kv_heads // parts}
    cuts = dict.fromkeys(("q", "gate", "up"), (0, size, rank)) | dict.fromkeys(("o", "down"), (1, size, rank))
    cuts |= dict.fromkeys(("k", "v"), (0, parts, rank * parts // size))
    own = dict(weights)
    for name, weight in weights.items():
        dim, count, number = cuts.get(name.rpartition(".")[2], (0, 1, 0))
        own[name] = weight.tensor_split(count, dim)[number] if count > 1 else weight
    return replace(config, **heads), own


def by_kind(reference, change):
    """An answer in which ``change(kind, weight, part, comm, config)`` makes a rank's part out of the right ``part``."""

    def rank_model(config, weights, comm):
        model = reference.rank_model(config, weights, comm)
        for name, weight in weights.items():
            model.weights[name] = change(name.rpartition(".")[2], weight, model.weights[name], comm, config)
        return model

    return rank_model


@right("rows and columns by numpy, head by head")
def by_numpy(reference):
    def rank_model(config, weights, comm):
        import torch

        checked(config, comm.size)
        rank, size, dim = comm.rank, comm.size, config.head_dim
        queries = range(rank * config.num_heads // size, (rank + 1) * config.num_heads // size)
        group = config.num_heads // config.num_kv_heads
        keys = sorted({head // group for head in queries})
        width = config.intermediate_size // size
        columns = list(range(rank * width, (rank + 1) * width))
        rows = {
            "q": [head * dim + i for head in queries for i in range(dim)],
            "k": [head * dim + i for head in keys for i in range(dim)],
            "gate": columns,
        }
        rows |= {"v": rows["k"], "up": columns}
        own = {}
        for name, weight in weights.items():
            kind, array = name.split(".")[-1], weight.numpy()
            if kind in rows:
                own[name] = torch.from_numpy(array[rows[kind]])
            elif kind in ("o", "down"):
                own[name] = torch.from_numpy(array[:, rows["q"] if kind == "o" else columns].copy())
            else:
                own[name] = weight
        dims = {**asdict(config), "num_heads": len(queries), "num_kv_heads": len(keys)}
        return LLM(LLMConfig(**dims), own, comm)

    return rank_model


@right("views first, copied afterwards")
def views_copied(reference):
    def rank_model(config, weights, comm):
        checked(config, comm.size)
        mine, own = views_of(config, weights, comm.rank, comm.size)
        return LLM(mine, {name: weight.clone() for name, weight in own.items()}, comm)

    return rank_model


@wrong("nothing is run: zeros", case="one rank has the whole model")
def zeros(reference):
    return by_kind(reference, lambda kind, weight, part, comm, config: part * 0)


@wrong("the last norm is twice as large", case="one rank has the whole model")
def twice_the_norm(reference):
    return by_kind(reference, lambda kind, weight, part, comm, config: part * 2 if kind == "norm" else part)


@wrong("the ranks' sums are not added up", case="the scores of the whole model")
def not_added(reference):
    def rank_model(config, weights, comm):
        model = reference.rank_model(config, weights, comm)
        return LLM(model.config, model.weights)

    return rank_model


@wrong("every rank has the first part", case="the scores of the whole model")
def first_part(reference):
    def change(kind, weight, part, comm, config):
        if kind in ("q", "gate", "up"):
            return weight[: len(part)].clone()
        return part

    return by_kind(reference, change)


@wrong("o is split by rows", case="the scores of the whole model")
def o_by_rows(reference):
    def change(kind, weight, part, comm, config):
        if kind != "o":
            return part
        rows = weight.chunk(comm.size)[comm.rank]
        return rows.T.contiguous() if rows.T.shape == part.shape else rows.reshape(part.shape).clone()

    return by_kind(reference, change)


@wrong("q is split by columns", case="the scores of the whole model")
def q_by_columns(reference):
    def change(kind, weight, part, comm, config):
        return weight.chunk(comm.size, 1)[comm.rank].clone() if kind == "q" else part

    return by_kind(reference, change)


@wrong("no weights but the last norm", case="a rank keeps its part only")
def no_weights(reference):
    def rank_model(config, weights, comm):
        return LLM(reference.rank_model(config, weights, comm).config, {"norm": weights["norm"]}, comm)

    return rank_model


@wrong("returns nothing", case="the scores of the whole model")
def returns_nothing(reference):
    return lambda config, weights, comm: checked(config, comm.size)


@wrong("replicas take turns instead of lying side by side", case="KV heads are copied")
def replicas_take_turns(reference):
    def change(kind, weight, part, comm, config):
        if kind in ("k", "v") and comm.size > config.num_kv_heads:
            return weight.chunk(config.num_kv_heads)[comm.rank % config.num_kv_heads].clone()
        return part

    return by_kind(reference, change)


@wrong("as many ranks to a KV head as there are KV heads", case="KV heads are copied")
def rank_by_kv_heads(reference):
    def change(kind, weight, part, comm, config):
        kv_heads = config.num_kv_heads
        if kind in ("k", "v") and comm.size > kv_heads:
            return weight.chunk(kv_heads)[min(comm.rank // kv_heads, kv_heads - 1)].clone()
        return part

    return by_kind(reference, change)


@wrong("k and v cut as q is", case="KV heads are copied")
def cut_as_q(reference):
    def change(kind, weight, part, comm, config):
        return weight.chunk(comm.size)[comm.rank] if kind in ("k", "v") else part

    return by_kind(reference, change)


@wrong("KV heads are cut in halves", case="KV heads are copied")
def heads_cut(reference):
    def change(kind, weight, part, comm, config):
        return weight.chunk(comm.size)[comm.rank].clone() if kind in ("k", "v") else part

    return by_kind(reference, change)


@wrong("more ranks than KV heads are refused", case="KV heads are copied")
def no_copies(reference):
    def rank_model(config, weights, comm):
        if config.num_kv_heads % comm.size:
            raise ValueError("too few KV heads")
        return reference.rank_model(config, weights, comm)

    return rank_model


@wrong("the whole model's numbers of heads", case="a rank's configuration")
def whole_config(reference):
    def rank_model(config, weights, comm):
        model = reference.rank_model(config, weights, comm)
        model.config = config
        return model

    return rank_model


@wrong("no KV head left for a rank", case="KV heads are copied")
def kv_heads_divided(reference):
    def rank_model(config, weights, comm):
        model = reference.rank_model(config, weights, comm)
        model.config = replace(model.config, num_kv_heads=config.num_kv_heads // comm.size)
        return model

    return rank_model


def configured(reference, **change):
    """The reference's model with a configuration in which each of ``change`` is made of the whole one and the size."""

    def rank_model(config, weights, comm):
        model = reference.rank_model(config, weights, comm)
        model.config = replace(model.config, **{name: make(config, comm.size) for name, make in change.items()})
        return model

    return rank_model


@right("the rank's part of the MLP in the configuration")
def mlp_divided(reference):
    return configured(reference, intermediate_size=lambda config, size: config.intermediate_size // size)


@wrong("hidden states are divided, too", case="a rank's configuration")
def hidden_divided(reference):
    return configured(reference, hidden_size=lambda config, size: config.hidden_size // size)


@wrong("a configuration written anew, without the end of a text", case="a rank's configuration")
def without_eos(reference):
    return configured(reference, eos_token_id=lambda config, size: 0)


def keeping(reference, attribute):
    """The reference's model, which keeps ``attribute(weights)`` beside its parts."""

    def rank_model(config, weights, comm):
        model = reference.rank_model(config, weights, comm)
        model.whole = attribute(weights)
        return model

    return rank_model


@wrong("the whole weights in an attribute", case="a rank keeps its part only")
def whole_in_attribute(reference):
    return keeping(reference, lambda weights: weights)


@wrong("the whole weights behind a function that is an attribute", case="a rank keeps its part only")
def whole_in_closure(reference):
    return keeping(reference, lambda weights: lambda: weights)


@wrong("a copy of one whole weight in a list", case="a rank keeps its part only")
def copy_in_attribute(reference):
    return keeping(reference, lambda weights: [weights["layers.0.down"].clone()])


@right("the norms and the embedding by another name, too")
def unsplit_beside(reference):
    return keeping(reference, lambda weights: [weights["embedding"], weights["norm"].clone()])


@wrong("KV heads that are copied are slices", case="a rank keeps its part only")
def copied_heads_are_slices(reference):
    def rank_model(config, weights, comm):
        model, views = reference.rank_model(config, weights, comm), views_of(config, weights, comm.rank, comm.size)[1]
        kept = {name: view for name, view in views.items() if name.endswith((".k", ".v"))}
        return LLM(model.config, model.weights | (kept if comm.size > config.num_kv_heads else {}), comm)

    return rank_model


@wrong("slices that keep the whole weights", case="a rank keeps its part only")
def views(reference):
    def rank_model(config, weights, comm):
        checked(config, comm.size)
        return LLM(*views_of(config, weights, comm.rank, comm.size), comm)

    return rank_model


@wrong("every rank computes the whole model", case="a rank keeps its part only")
def whole_model(reference):
    def rank_model(config, weights, comm):
        checked(config, comm.size)
        return LLM(reference.rank_model(config, weights, comm).config, weights)

    return rank_model


@wrong("the whole model and nothing of the ranks", case="a rank keeps its part only")
def nothing_of_the_ranks(reference):
    return lambda config, weights, comm: LLM(config, weights)


@wrong("the whole model on every rank, added up", case="a rank keeps its part only")
def whole_models_added(reference):
    return lambda config, weights, comm: LLM(config, weights, comm)


def of_whole_models(factor):
    """The whole model on every rank, with partial sums that are ``factor(comm)`` times the whole ones."""

    def rank_model(config, weights, comm):
        checked(config, comm.size)
        sums = {name: weight * factor(comm) for name, weight in weights.items() if name.endswith((".o", ".down"))}
        return LLM(config, weights | sums, comm)

    return rank_model


@wrong("the whole model on every rank, divided by their number", case="a rank's configuration")
def whole_models_divided(reference):
    return of_whole_models(lambda comm: 1 / comm.size)


@wrong("the whole model on every rank, of which the first alone adds", case="a rank keeps its part only")
def first_rank_adds(reference):
    return of_whole_models(lambda comm: comm.rank == 0)


@wrong("both KV heads on every rank", case="KV heads are copied")
def all_kv_heads(reference):
    return by_kind(reference, lambda kind, weight, part, comm, config: weight if kind in ("k", "v") else part)


@wrong("gathers every rank's part in each layer", case="two all-reduces a layer")
def too_many_calls(reference):
    def rank_model(config, weights, comm):
        model = reference.rank_model(config, weights, comm)
        forward = model.forward

        def twice(tokens, positions, kv):
            hidden = forward(tokens, positions, kv)
            return comm.all_reduce(hidden.clone()) / comm.size

        model.forward = twice
        return model

    return rank_model


@wrong("cuts the weights where they lie", case="the given weights stay as they are")
def in_place(reference):
    def rank_model(config, weights, comm):
        model = reference.rank_model(config, weights, comm)
        for name in weights:
            if name.endswith(".q"):
                weights[name].zero_()
        return model

    return rank_model


def taking(reference, take):
    """The reference's model, after ``take(weights, name)`` for each weight."""

    def rank_model(config, weights, comm):
        model = reference.rank_model(config, dict(weights), comm)
        for name in list(weights):
            take(weights, name)
        return model

    return rank_model


@wrong("takes the weights out of the caller's dictionary", case="the given weights stay as they are")
def taken_out(reference):
    return taking(reference, lambda weights, name: weights.pop(name))


@wrong("adds a weight to the caller's dictionary", case="the given weights stay as they are")
def added(reference):
    return taking(reference, lambda weights, name: weights.update({"head": weights["embedding"]}))


@wrong("what is left over is dropped", case="what does not divide is refused")
def left_over(reference):
    def rank_model(config, weights, comm):
        return LLM(config, weights, comm)

    def careless(config, weights, comm):
        try:
            return reference.rank_model(config, weights, comm)
        except ValueError:
            return rank_model(config, weights, comm)

    return careless


def by_hand(refuses):
    """Cut by hand; ``refuses(kv_heads, size)`` is all that is asked of KV heads."""

    def rank_model(config, weights, comm):
        size = comm.size
        if config.num_heads % size or config.intermediate_size % size or refuses(config.num_kv_heads, size):
            raise ValueError(config)
        mine, own = views_of(config, weights, comm.rank, size)
        return LLM(mine, {name: weight.clone() for name, weight in own.items()}, comm)

    return rank_model


@wrong("KV heads and MLP have to divide, query heads do not", case="what does not divide is refused")
def query_heads_anyhow(reference):
    def rank_model(config, weights, comm):
        checked(replace(config, num_heads=comm.size), comm.size)
        mine, own = views_of(config, weights, comm.rank, comm.size)
        return LLM(mine, {name: weight.clone() for name, weight in own.items()}, comm)

    return rank_model


@wrong("query heads and MLP have to divide, KV heads do not", case="what does not divide is refused")
def kv_heads_anyhow(reference):
    return by_hand(lambda kv_heads, size: False)


@wrong("KV heads have to divide only if there are more than ranks", case="what does not divide is refused")
def many_kv_heads(reference):
    return by_hand(lambda kv_heads, size: kv_heads > size and kv_heads % size)


@wrong("KV heads have to divide only if there are fewer than ranks", case="what does not divide is refused")
def few_kv_heads(reference):
    return by_hand(lambda kv_heads, size: kv_heads < size and size % kv_heads)


@wrong("another kind of error", case="what does not divide is refused")
def another_error(reference):
    def rank_model(config, weights, comm):
        try:
            return reference.rank_model(config, weights, comm)
        except ValueError as error:
            raise RuntimeError(str(error)) from None

    return rank_model
