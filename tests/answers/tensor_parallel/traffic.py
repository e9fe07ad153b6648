"""Answers to the traffic ledger."""

from fractions import Fraction

from servelab.answers import right, wrong


def answers(reference, *, layer=None, forward=None, boundary=None):
    """The three answers, some of them replaced."""
    return layer or reference.layer_elements, forward or reference.tp_bytes, boundary or reference.boundary_bytes


def scaled(reference, factor):
    """All of a layer's elements times ``factor(tp, backward)``, in both functions."""

    def layer(tokens, hidden_size, tp, backward=False):
        return reference.layer_elements(tokens, hidden_size, tp, backward) * factor(tp, backward)

    def forward(model, tokens, tp, dtype_bytes=2):
        return reference.tp_bytes(model, tokens, tp, dtype_bytes) * factor(tp, False)

    return answers(reference, layer=layer, forward=forward)


@right("8bsh(t-1)/t in fractions")
def fractions(reference):
    def layer(tokens, hidden_size, tp, backward=False):
        return float(Fraction(8 if backward else 4) * tokens * hidden_size * Fraction(tp - 1, tp))

    def forward(model, tokens, tp, dtype_bytes=2):
        return sum(layer(tokens, model.hidden_size, tp) for _ in range(model.num_layers)) * dtype_bytes

    return layer, forward, lambda model, tokens, dtype_bytes=2: float(dtype_bytes * model.hidden_size * tokens)


@right("ring hop by hop, in numpy")
def hops(reference):
    import numpy as np

    def layer(tokens, hidden_size, tp, backward=False):
        chunk = np.float64(tokens) * hidden_size / tp
        return np.sum(np.full(2 * (tp - 1), chunk)) * (4 if backward else 2)

    def forward(model, tokens, tp, dtype_bytes=2):
        return np.float64(model.num_layers * dtype_bytes) * layer(tokens, model.hidden_size, tp)

    return layer, forward, lambda model, tokens, dtype_bytes=2: np.int64(tokens) * model.hidden_size * dtype_bytes


@wrong("everything sent, also with one rank", case="one rank sends nothing")
def all_sent(reference):
    def layer(tokens, hidden_size, tp, backward=False):
        return (8 if backward else 4) * tokens * hidden_size

    return answers(reference, layer=layer)


@wrong("one all-reduce a layer", case="elements of a layer")
def one_all_reduce(reference):
    return scaled(reference, lambda tp, backward: 0.5)


@wrong("all t ranks together", case="elements of a layer")
def all_ranks(reference):
    return scaled(reference, lambda tp, backward: tp)


@wrong("backward as forward", case="with the backward pass")
def no_backward(reference):
    return scaled(reference, lambda tp, backward: 0.5 if backward else 1)


@wrong("backward twice as much as forward", case="with the backward pass")
def three_times(reference):
    return scaled(reference, lambda tp, backward: 1.5 if backward else 1)


@wrong("one layer only", case="bytes of a forward pass")
def one_layer(reference):
    def forward(model, tokens, tp, dtype_bytes=2):
        return reference.layer_elements(tokens, model.hidden_size, tp) * dtype_bytes

    return answers(reference, forward=forward)


@wrong("with the backward pass", case="bytes of a forward pass")
def trained(reference):
    def forward(model, tokens, tp, dtype_bytes=2):
        return 2 * reference.tp_bytes(model, tokens, tp, dtype_bytes)

    return answers(reference, forward=forward)


@wrong("heads times head_dim for the hidden size", case="bytes of a forward pass")
def heads(reference):
    def forward(model, tokens, tp, dtype_bytes=2):
        width = model.num_heads * model.head_dim
        return model.num_layers * reference.layer_elements(tokens, width, tp) * dtype_bytes

    return answers(reference, forward=forward)


@wrong("a boundary for each layer", case="bytes of a pipeline boundary")
def boundary_a_layer(reference):
    def boundary(model, tokens, dtype_bytes=2):
        return model.num_layers * reference.boundary_bytes(model, tokens, dtype_bytes)

    return answers(reference, boundary=boundary)


@wrong("a boundary sends and receives", case="bytes of a pipeline boundary")
def both_ways(reference):
    def boundary(model, tokens, dtype_bytes=2):
        return 2 * reference.boundary_bytes(model, tokens, dtype_bytes)

    return answers(reference, boundary=boundary)


@wrong("always two bytes", case="elements of other sizes")
def two_bytes(reference):
    return answers(reference, boundary=lambda model, tokens, dtype_bytes=2: reference.boundary_bytes(model, tokens))
