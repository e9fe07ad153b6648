"""What one sees while an engine works: a progress bar with the time that is left, and the text of a few answers."""

from collections.abc import Mapping
from time import perf_counter

from IPython.display import display

from servelab.llm.engine import NewToken
from servelab.llm.tokenizer import Tokenizer
from servelab.plots.explore import attended

WIDTH = 30  # characters of the bar
EVERY = 0.2  # seconds between two pictures
SHOWN = 100  # last characters of an answer


class Live:
    """Follows a run: call it with the tokens of each step, as `servelab.llm.engine.serve` does.

    Parameters
    ----------
    total : int
        Tokens that the run will give, at most.
    tokenizer : Tokenizer
        Turns tokens into text as they come.
    prompts : mapping of str to str
        The requests whose text is shown, by id, with what was asked.
    """

    def __init__(self, total: int, tokenizer: Tokenizer, prompts: Mapping[str, str]):
        self.total, self.prompts, self.count = total, prompts, 0
        self.streams = {id: tokenizer.stream() for id in prompts}
        self.texts = dict.fromkeys(prompts, "")
        self.begin = self.last = perf_counter()
        self.handle = display({"text/plain": self.picture()}, raw=True, display_id=True) if attended() else None

    def __call__(self, tokens: list[NewToken]) -> None:
        """Take over the tokens of a step; the picture changes a few times a second."""
        self.count += len(tokens)
        for new in tokens:
            if new.id in self.streams:
                self.texts[new.id] += self.streams[new.id].push(new.token)
        if self.handle and perf_counter() - self.last > EVERY:
            self.last = perf_counter()
            self.handle.update({"text/plain": self.picture()}, raw=True)

    def finish(self) -> None:
        """Show the last picture; where nobody watches, the only one."""
        for id, stream in self.streams.items():
            self.texts[id] += stream.finish()
        if self.handle:
            self.handle.update({"text/plain": self.picture()}, raw=True)
        else:
            print(self.picture())

    def picture(self) -> str:
        """The bar, the rate, the time left, and the texts."""
        seconds = perf_counter() - self.begin
        rate, full = self.count / max(seconds, 1e-9), WIDTH * self.count // self.total
        left = f"{(self.total - self.count) / rate:.0f} s left" if 0 < self.count < self.total else f"{seconds:.1f} s"
        left = left if self.count else "the first step computes the prompts"
        bar = f"[{'#' * full}{'.' * (WIDTH - full)}] {self.count} of {self.total} tokens, {rate:.0f} tokens/s, {left}"
        rows = [f"  {prompt!r} -> {self.texts[id][-SHOWN:]!r}" for id, prompt in self.prompts.items()]
        return "\n".join([bar, *rows])
