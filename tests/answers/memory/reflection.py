"""Named answers to unit 01's questions."""

from servelab.answers import right, wrong


@right("numbers as floats, letters in capitals")
def floats(reference):
    return {key: value.upper() if isinstance(value, str) else float(value) for key, value in reference.answers.items()}


@right("the tokens unrounded")
def unrounded(reference):
    tokens = 2 * 6_738_415_616 / 524_288
    return dict(reference.answers) | {"tokens that weigh as much as the weights": tokens}


@right("numbers to three significant digits")
def rounded(reference):
    return dict(reference.answers) | {"KV a card at TP16": 0.313, "tokens that weigh as much as the weights": 25_700}


def but(question, answer):
    return lambda reference: dict(reference.answers) | {question: answer}


two_cards = wrong("the fewest cards that hold the weights", case="cards for 70B")(but("cards for 70B", 2))
over_sixteen = wrong("2.5 over 16", case="KV a card at TP16")(but("KV a card at TP16", 0.15625))
gigabytes = wrong("GB for GiB", case="KV a card at TP16")(but("KV a card at TP16", 0.3355))
two_digits = wrong("two digits only", case="KV a card at TP16")(but("KV a card at TP16", 0.31))
experts = wrong("KV goes with the experts", case="four copies")(but("four copies", "c"))
elements = wrong("elements for bytes", case="tokens that weigh as much as the weights")(
    but("tokens that weigh as much as the weights", 12_852)
)
halves = wrong("half of the step", case="FP8 KV")(but("FP8 KV", "a"))
compute_bound = wrong("compute-bound", case="batch past the ridge")(but("batch past the ridge", "a"))
