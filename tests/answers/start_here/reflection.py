"""Named answers to unit 00's questions."""

from servelab.answers import right, wrong


@right("numbers as floats, letters in capitals")
def floats(reference):
    return {key: value.upper() if isinstance(value, str) else float(value) for key, value in reference.answers.items()}


@right("a percentage rounded to three digits")
def rounded(reference):
    return dict(reference.answers) | {"utilisation of ten such batches": 0.120}


@wrong("the whole batch's steps", case="steps in a slot after the answer is done")
def whole(reference):
    return dict(reference.answers) | {"steps in a slot after the answer is done": 2000}


@wrong("a larger batch", case="what raises utilisation")
def larger(reference):
    return dict(reference.answers) | {"what raises utilisation": "a"}


@wrong("ten times the utilisation", case="utilisation of ten such batches")
def tenfold(reference):
    return dict(reference.answers) | {"utilisation of ten such batches": 1.2}
