"""What the checks of schedulers with a key share: keys of the check's own, and what is left to such a scheduler."""

from collections.abc import Callable

from servelab.exercises.continuous_batching import _server as server
from servelab.serving import Sequence
from servelab.stepping import Live

# as a learner reads them: what each is for the scheduler, and for the referee
KEYS: dict[str, tuple[Callable[[Sequence], float], Callable[[Live], float]]] = {
    "lambda seq: -seq.request.priority": (lambda seq: -seq.request.priority, lambda live: -live.priority),
    "lambda seq: seq.num_tokens": (lambda seq: seq.num_tokens, lambda live: live.known),
    "lambda seq: -len(seq.outputs)": (lambda seq: -len(seq.outputs), lambda live: live.prompt - live.known),
}
HIGHEST, FEWEST, FURTHEST = KEYS


def add(step: int, id: str, prompt_tokens: int, max_tokens: int, priority: int = 0) -> list:
    """The event of a request with a priority."""
    return [step, "add", id, prompt_tokens, max_tokens, priority]


def made(name: str, key: str) -> str:
    """The scheduler as Python."""
    return f"{name}(config, kv{', ' * bool(key)}{key})"


class PolicyReferee(server.Referee):
    """The rules, less one that is left to the scheduler: it may preempt a larger key for a smaller one that waits."""

    def _preempt(self, where: str, preempted: list[str]) -> list[tuple[Live, int, int]]:
        self.first = self._head()  # before the victims join the queue
        return super()._preempt(where, preempted)

    def _check_preemption(self, where: str, victim: tuple[Live, int, int], before: dict[str, Live]) -> None:
        if self.first is None or self.rules.rank(self.first) > self.rules.rank(victim[0]):
            super()._check_preemption(where, victim, before)
