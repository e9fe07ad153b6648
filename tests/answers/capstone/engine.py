"""Named answers to `capstone.engine`."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from servelab.answers import right, wrong
from servelab.llm.engine import NewToken
from servelab.serving import StepPlan
from servelab.simulation import StaticBatches


def changed(reference, **methods):
    """The reference with other methods."""
    return type("Engine", (reference.Engine,), methods)


def computing(pick):
    """A `_compute` that takes row ``pick(ends, id, n)`` of each request that is due; ends are the rows behind each."""

    def _compute(self, plan):
        from servelab.reference.continuous_batching import flatten_batch

        batch = flatten_batch(plan, self.tokens, self.computed, self.kv)
        hidden = self.model.forward(batch.tokens, batch.positions, self.pages.bind(batch))
        self.computed |= dict(zip(plan.scheduled, batch.context_lens, strict=True))
        ends = dict(zip(plan.scheduled, np.cumsum(batch.query_lens), strict=True))
        due = [id for id in plan.scheduled if self.computed[id] == len(self.tokens[id])]
        rows = [int(pick(ends, id, plan.scheduled[id])) % len(hidden) for id in due]
        sampled = self.model.logits(hidden[rows]).argmax(-1).tolist()
        return dict(zip(due, sampled, strict=True))

    return _compute


@right("one list of records, positions and rows as tensors")
def one_list_of_records(reference):
    @dataclass
    class Record:
        request: object
        tokens: list
        start: int = 0

    class Engine:
        def __init__(self, model, scheduler, kv, pages):
            self.parts, self.records = (model, scheduler, kv, pages), []

        @property
        def num_unfinished(self):
            return np.int64(len(self.records))

        def find(self, id):
            return next((record for record in self.records if record.request.id == id), None)

        def add(self, request, prompt):
            limit = self.parts[0].config.max_model_len
            if len(prompt) != request.prompt_tokens or len(prompt) + request.max_tokens > limit:
                raise ValueError(request)
            self.parts[1].add(request)
            self.records.append(Record(request, [*prompt]))

        def abort(self, id):
            self.records = [record for record in self.records if record.request.id != id]
            self.parts[1].abort(id)

        def step(self):
            import torch
            from servelab.reference.continuous_batching import flatten_batch

            model, scheduler, kv, pages = self.parts
            plan = scheduler.schedule()
            for id in plan.preempted:
                self.find(id).start = 0
            if plan.num_tokens == 0:
                return ()
            known = {record.request.id: record.tokens for record in self.records}
            batch = flatten_batch(plan, known, {record.request.id: record.start for record in self.records}, kv)
            with torch.inference_mode():
                hidden = model.forward(batch.tokens, batch.positions, pages.bind(batch))
                last = torch.tensor(batch.query_lens).cumsum(0) - 1
                best = model.logits(hidden[last]).max(dim=-1).indices
            outputs = {}
            for id, token in zip(plan.scheduled, best, strict=True):
                record = self.find(id)
                record.start += plan.scheduled[id]
                if record.start == len(record.tokens):
                    outputs[id] = np.int64(token.item())
                    record.tokens.append(int(token))
            done = scheduler.finish_step(plan, outputs)
            self.records = [record for record in self.records if record.request.id not in done]
            return tuple(SimpleNamespace(id=id, token=token, finished=id in done) for id, token in outputs.items())

    return Engine


@right("sorted by length, answers in reverse order")
def another_order(reference):
    class Engine(reference.Engine):
        def _compute(self, plan):
            shuffled = StepPlan(dict(sorted(plan.scheduled.items(), key=lambda item: item[1])))
            return dict(reversed(super()._compute(shuffled).items()))

    return Engine


@right("asks for no plan when nobody is there")
def no_plan_for_nobody(reference):
    class Engine(reference.Engine):
        def step(self):
            return super().step() if self.num_unfinished else []

    return Engine


@wrong("asks for no plan in every other step", case="one request from prompt to end")
def every_other_step(reference):
    class Engine(reference.Engine):
        def step(self):
            self.rests = not getattr(self, "rests", True)
            return [] if self.rests else super().step()

    return Engine


@wrong("the token stays a tensor", case="one request from prompt to end")
def tensor_tokens(reference):
    def _compute(self, plan):
        import torch

        return {id: torch.tensor(token) for id, token in reference.Engine._compute(self, plan).items()}

    return changed(reference, _compute=_compute)


@wrong("echoes the last token and never runs the model", case="one request from prompt to end")
def echo(reference):
    def _compute(self, plan):
        for id, n in plan.scheduled.items():
            self.computed[id] += n
        return {id: self.tokens[id][-1] for id in plan.scheduled if self.computed[id] == len(self.tokens[id])}

    return changed(reference, _compute=_compute)


@wrong("runs the model and does not look at what it says", case="one request from prompt to end")
def constant(reference):
    def _compute(self, plan):
        return dict.fromkeys(reference.Engine._compute(self, plan), 1)

    return changed(reference, _compute=_compute)


@wrong("the first token of a chunk instead of the last", case="one request from prompt to end")
def first_of_the_chunk(reference):
    return changed(reference, _compute=computing(lambda ends, id, n: ends[id] - n))


@wrong("the likeliest but one", case="one request from prompt to end")
def second_best(reference):
    class Engine(reference.Engine):
        def __init__(self, model, *rest):
            super().__init__(model, *rest)
            logits = model.logits
            model.logits = lambda hidden: -logits(hidden)

    return Engine


@wrong("the new token is not fed back", case="one request from prompt to end")
def not_fed_back(reference):
    class Engine(reference.Engine):
        def step(self):
            new = super().step()
            for token in new:
                if token.id in self.tokens:
                    self.tokens[token.id][-1] = self.tokens[token.id][-2]
            return new

    return Engine


@wrong("positions count within the step", case="one request from prompt to end")
def positions_within_the_step(reference):
    class Engine(reference.Engine):
        def __init__(self, model, *rest):
            super().__init__(model, *rest)
            forward = model.forward
            model.forward = lambda tokens, positions, kv: forward(tokens, positions - positions.min(), kv)

    return Engine


@wrong("a token for a chunk that does not end the prompt", case="no token before the last chunk")
def token_for_a_chunk(reference):
    class Engine(reference.Engine):
        def step(self):
            plan = self.scheduler.schedule()
            self.computed |= dict.fromkeys(plan.preempted, 0)
            if not plan.scheduled:
                return []
            outputs = self._compute(plan)
            finished = self.scheduler.finish_step(plan, outputs)
            for id, token in outputs.items():
                self.tokens[id].append(token)
            early = [NewToken(id, 1) for id in plan.scheduled if id not in outputs]
            for id in finished:
                self._forget(id)
            return [*early, *(NewToken(id, token, id in finished) for id, token in outputs.items())]

    return Engine


@wrong("each chunk begins at the start of the prompt", case="no token before the last chunk")
def chunk_from_the_start(reference):
    class Engine(reference.Engine):
        def _compute(self, plan):
            real, self.tokens = self.tokens, dict(self.tokens)
            for id, n in plan.scheduled.items():
                start, tokens = self.computed[id], real[id]
                self.tokens[id] = tokens[:start] + tokens[:n] + tokens[start + n :]
            outputs = super()._compute(plan)
            self.tokens = real
            return outputs

    return Engine


@wrong("row number i for the i-th request", case="each request gets its own token")
def row_by_number(reference):
    return changed(reference, _compute=computing(lambda ends, id, n: list(ends).index(id)))


@wrong("the last row of the step for everybody", case="each request gets its own token")
def last_row_for_all(reference):
    return changed(reference, _compute=computing(lambda ends, id, n: -1))


@wrong("answers go out in the order of arrival", case="each request gets its own token")
def order_of_arrival(reference):
    class Engine(reference.Engine):
        def _compute(self, plan):
            outputs = super()._compute(plan)
            return dict(zip([id for id in self.tokens if id in outputs], outputs.values(), strict=True))

    return Engine


@wrong("one request after another", case="one forward pass a step")
def one_after_another(reference):
    class Engine(reference.Engine):
        def _compute(self, plan):
            outputs = {}
            for id, n in plan.scheduled.items():
                outputs |= super()._compute(StepPlan({id: n}))
            return outputs

    return Engine


@wrong("no KV: everything again in every step", case="one forward pass a step")
def without_kv(reference):
    class Engine(reference.Engine):
        def _compute(self, plan):
            ends = {id: self.computed[id] + n for id, n in plan.scheduled.items()}
            self.computed |= dict.fromkeys(ends, 0)
            return super()._compute(StepPlan(ends))

    return Engine


@wrong("the plain loop, without a batch and without pages", case="one request from prompt to end")
def plain_loop(reference):
    def _compute(self, plan):
        import torch

        from servelab.llm.kv import ContiguousKV

        outputs = {}
        for id, n in plan.scheduled.items():
            self.computed[id] += n
            if self.computed[id] == len(self.tokens[id]):
                tokens = torch.tensor(self.tokens[id])
                hidden = self.model.forward(tokens, torch.arange(len(tokens)), ContiguousKV())
                outputs[id] = int(self.model.logits(hidden[-1]).argmax())
        return outputs

    return changed(reference, _compute=_compute)


@wrong("goes on planning until there is a token", case="no token before the last chunk")
def until_a_token(reference):
    class Engine(reference.Engine):
        def step(self):
            for _ in range(3):
                new = super().step()
                if new:
                    break
            return new

    return Engine


@wrong("logits of all tokens of the step", case="one row of logits a request")
def all_logits(reference):
    class Engine(reference.Engine):
        def __init__(self, model, *rest):
            super().__init__(model, *rest)
            forward = model.forward

            def with_logits(tokens, positions, kv):
                hidden = forward(tokens, positions, kv)
                model.logits(hidden)
                return hidden

            model.forward = with_logits

    return Engine


@wrong("EOS does not end an answer", case="an answer ends")
def no_eos(reference):
    class Engine(reference.Engine):
        def step(self):
            return [replace(new, finished=False) for new in super().step()]

    return Engine


@wrong("counts tokens itself and does not hear of EOS", case="an answer ends")
def counts_itself(reference):
    class Engine(reference.Engine):
        def add(self, request, prompt):
            super().add(request, prompt)
            self.last = getattr(self, "last", {}) | {request.id: request.prompt_tokens + request.max_tokens}

        def step(self):
            plan = self.scheduler.schedule()
            self.computed |= dict.fromkeys(plan.preempted, 0)
            if not plan.scheduled:
                return []
            outputs, new = self._compute(plan), []
            self.scheduler.finish_step(plan, outputs)
            for id, token in outputs.items():
                self.tokens[id].append(token)
                new.append(NewToken(id, token, len(self.tokens[id]) == self.last[id]))
                if new[-1].finished:
                    self._forget(id)
            return new

    return Engine


@wrong("the EOS token is kept back", case="an answer ends")
def eos_kept_back(reference):
    class Engine(reference.Engine):
        def step(self):
            return [new for new in super().step() if new.token != self.scheduler.config.eos_token_id]

    return Engine


@wrong("a finished request is not forgotten", case="an answer ends")
def not_forgotten(reference):
    return changed(reference, _forget=lambda self, id: None)


@wrong("the last token does not reach the scheduler, so its KV stays", case="KV is given back")
def scheduler_not_told(reference):
    class Engine(reference.Engine):
        def step(self):
            plan = self.scheduler.schedule()
            self.computed |= dict.fromkeys(plan.preempted, 0)
            if not plan.scheduled:
                return []
            outputs = self._compute(plan)
            eos = self.scheduler.config.eos_token_id
            self.scheduler.finish_step(plan, {id: token for id, token in outputs.items() if token != eos})
            for id, token in outputs.items():
                self.tokens[id].append(token)
            return [NewToken(id, token, token == eos) for id, token in outputs.items()]

    return Engine


@wrong("wrong positions after a preemption", case="a preempted request goes on")
def positions_after_preemption(reference):
    class Engine(reference.Engine):
        def step(self):
            schedule = self.scheduler.schedule

            def without_preempted():
                plan = schedule()
                return StepPlan(plan.scheduled)

            self.scheduler.schedule = without_preempted
            try:
                return super().step()
            finally:
                self.scheduler.schedule = schedule

    return Engine


@wrong("a preempted request loses its answer", case="a preempted request goes on")
def answer_lost(reference):
    class Engine(reference.Engine):
        def add(self, request, prompt):
            super().add(request, prompt)
            self.lengths = getattr(self, "lengths", {}) | {request.id: len(prompt)}

        def step(self):
            schedule, outer = self.scheduler.schedule, self

            def forgetting():
                plan = schedule()
                for id in plan.preempted:
                    del outer.tokens[id][outer.lengths[id] :]
                return plan

            self.scheduler.schedule = forgetting
            try:
                return super().step()
            finally:
                self.scheduler.schedule = schedule

    return Engine


@wrong("only looks at who was preempted in a step that runs", case="a preempted request goes on")
def preempted_in_an_empty_step(reference):
    class Engine(reference.Engine):
        def step(self):
            before = dict(self.computed)
            new = super().step()
            if not new and before.keys() == self.computed.keys() and sum(self.computed.values()) < sum(before.values()):
                self.computed = before
            return new

    return Engine


@wrong("abort is ignored", case="an aborted request is gone")
def abort_ignored(reference):
    return changed(reference, abort=lambda self, id: None)


@wrong("abort does not reach the scheduler", case="an aborted request is gone")
def abort_not_passed_on(reference):
    return changed(reference, abort=lambda self, id: self._forget(id))


@wrong("abort reaches the scheduler only if blocks are held", case="an aborted request is gone")
def abort_of_holders(reference):
    class Engine(reference.Engine):
        def abort(self, id):
            if self.kv.blocks(id):
                self.scheduler.abort(id)
            self._forget(id)

    return Engine


@wrong("abort reaches the scheduler only if something was computed", case="an aborted request is gone")
def abort_of_computed(reference):
    class Engine(reference.Engine):
        def abort(self, id):
            if self.computed.get(id):
                self.scheduler.abort(id)
            self._forget(id)

    return Engine


@wrong("abort of an unknown request raises", case="an aborted request is gone")
def abort_raises(reference):
    class Engine(reference.Engine):
        def abort(self, id):
            self.scheduler.abort(id)
            del self.tokens[id], self.computed[id]

    return Engine


@wrong("abort takes effect with the next step", case="an aborted request is gone")
def abort_later(reference):
    class Engine(reference.Engine):
        def abort(self, id):
            self.late = [*getattr(self, "late", []), id]

        def step(self):
            for id in getattr(self, "late", []):
                super().abort(id)
            self.late = []
            return super().step()

    return Engine


@wrong("what was computed of an aborted request is still known", case="an id comes again")
def computed_is_kept(reference):
    class Engine(reference.Engine):
        def abort(self, id):
            self.scheduler.abort(id)
            self.tokens.pop(id, None)

        def add(self, request, prompt):
            kept = self.computed.get(request.id, 0)
            super().add(request, prompt)
            self.computed[request.id] = kept

    return Engine


@wrong("takes every request that the scheduler takes", case="what cannot run is refused")
def takes_all(reference):
    class Engine(reference.Engine):
        def add(self, request, prompt):
            self.scheduler.add(request)
            self.tokens[request.id], self.computed[request.id] = list(prompt), 0

    return Engine


@wrong("writes itself down before the scheduler refuses", case="what cannot run is refused")
def too_early(reference):
    class Engine(reference.Engine):
        def add(self, request, prompt):
            self.tokens[request.id], self.computed[request.id] = list(prompt), 0
            super().add(request, prompt)

    return Engine


@wrong("the longest request of the model is refused", case="what cannot run is refused")
def one_token_short(reference):
    class Engine(reference.Engine):
        def add(self, request, prompt):
            if request.prompt_tokens + request.max_tokens >= self.model.config.max_model_len:
                raise ValueError("too long")
            super().add(request, prompt)

    return Engine


@wrong("refused after the scheduler has taken it", case="what cannot run is refused")
def refused_too_late(reference):
    class Engine(reference.Engine):
        def add(self, request, prompt):
            self.scheduler.add(request)
            if len(prompt) != request.prompt_tokens:
                raise ValueError("not the length of the prompt")
            if request.prompt_tokens + request.max_tokens > self.model.config.max_model_len:
                raise ValueError("too long")
            self.tokens[request.id], self.computed[request.id] = list(prompt), 0

    return Engine


@wrong("does not look at the length of the prompt", case="what cannot run is refused")
def any_length(reference):
    class Engine(reference.Engine):
        def add(self, request, prompt):
            super().add(request, [*prompt, *[1] * request.prompt_tokens][: request.prompt_tokens])

    return Engine


@wrong("one token more than the model can hold", case="what cannot run is refused")
def one_token_long(reference):
    class Engine(reference.Engine):
        def add(self, request, prompt):
            longest = self.model.config.max_model_len + 1
            if len(prompt) != request.prompt_tokens or len(prompt) + request.max_tokens > longest:
                raise ValueError(request)
            self.scheduler.add(request)
            self.tokens[request.id], self.computed[request.id] = list(prompt), 0

    return Engine


@wrong("finish_step is called for a plan of nothing", case="a step with nothing to do")
def runs_nothing(reference):
    class Engine(reference.Engine):
        def step(self):
            schedule, plans = self.scheduler.schedule, []
            self.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
            new = super().step()
            self.scheduler.schedule = schedule
            if not plans[-1].scheduled:
                self.scheduler.finish_step(plans[-1], {})
            return new

    return Engine


@wrong("None where there is nothing", case="a step with nothing to do")
def none(reference):
    class Engine(reference.Engine):
        def step(self):
            return super().step() or None

    return Engine


@wrong("an empty dictionary where the plan is empty", case="a step with nothing to do")
def empty_dictionary(reference):
    class Engine(reference.Engine):
        def step(self):
            schedule, plans = self.scheduler.schedule, []
            self.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
            new = super().step()
            self.scheduler.schedule = schedule
            return new if plans[-1].scheduled else {}

    return Engine


@wrong("all engines share one book", case="requests share nothing")
def one_book(reference):
    class Engine(reference.Engine):
        books = ({}, {})

        def __init__(self, *parts):
            super().__init__(*parts)
            self.tokens, self.computed = self.books
            if sum(map(len, self.books)) > 100:
                self.tokens.clear(), self.computed.clear()

    return Engine


@wrong("the answer is written behind the caller's prompt", case="requests share nothing")
def prompt_not_copied(reference):
    class Engine(reference.Engine):
        def add(self, request, prompt):
            super().add(request, prompt)
            self.tokens[request.id] = prompt

    return Engine


def noting(reference, note):
    """An engine that writes a new list for each new token, and the prompt as ``note`` gives it."""

    class Engine(reference.Engine):
        def add(self, request, prompt):
            super().add(request, prompt)
            self.tokens[request.id] = note(prompt)

        def step(self):
            before = dict(self.tokens)
            self.tokens |= {id: list(tokens) for id, tokens in before.items()}
            new = super().step()
            named = {token.id for token in new}
            self.tokens |= {id: before[id] for id in self.tokens if id not in named}
            return new

    return Engine


@wrong("keeps the caller's list and never writes to it", case="requests share nothing")
def callers_list(reference):
    return noting(reference, lambda prompt: prompt)


@right("a tuple of the prompt, a new list with each token")
def prompt_as_tuple(reference):
    return noting(reference, tuple)


@wrong("hears of one preemption a step", case="a preempted request goes on")
def second_preemption(reference):
    class Engine(reference.Engine):
        def step(self):
            schedule = self.scheduler.schedule

            def only_one():
                plan = schedule()
                return StepPlan(plan.scheduled, plan.preempted[:1])

            self.scheduler.schedule = only_one
            try:
                return super().step()
            finally:
                self.scheduler.schedule = schedule

    return Engine


@wrong("room for the tokens of three requests", case="a random run")
def room_for_three(reference):
    class Engine(reference.Engine):
        def step(self):
            return super().step()[:3]

    return Engine


@wrong("rests a step when an answer has ended and others wait", case="the two workloads")
def rests(reference):
    class Engine(reference.Engine):
        resting = False

        def step(self):
            if self.resting:
                self.resting = False
                return []
            new = super().step()
            self.resting = any(token.finished for token in new) and 0 in self.computed.values()
            return new

    return Engine


@wrong("one more step at the end", case="the two workloads")
def one_more_step(reference):
    class Engine(reference.Engine):
        last = 0

        @property
        def num_unfinished(self):
            return max(len(self.tokens), self.last)

        def step(self):
            new = super().step()
            self.last = len(new)
            return new

    return Engine


@wrong("tells the scheduler of a step's end in the next step", case="the two workloads")
def a_step_late(reference):
    class Engine(reference.Engine):
        late = None

        def step(self):
            done = self.scheduler.finish_step(*self.late) if self.late else []
            for id in done:
                self._forget(id)
            plan, self.late = self.scheduler.schedule(), None
            self.computed |= dict.fromkeys(plan.preempted, 0)
            if not plan.scheduled:
                return []
            outputs = self._compute(plan)
            self.late = plan, outputs
            for id, token in outputs.items():
                self.tokens[id].append(token)
            return [NewToken(id, token) for id, token in outputs.items()]

    return Engine


@wrong("a finished request keeps its blocks", case="the two workloads")
def blocks_kept(reference):
    class Engine(reference.Engine):
        def step(self):
            release, self.kv.release = self.kv.release, lambda id: None
            try:
                return super().step()
            finally:
                self.kv.release = release

    return Engine


@wrong("a long answer's blocks are kept for its next turn", case="the two workloads")
def long_blocks_kept(reference):
    class Engine(reference.Engine):
        def step(self):
            lengths, new = {id: len(tokens) for id, tokens in self.tokens.items()}, super().step()
            for token in new:
                if token.finished and lengths[token.id] > 200:
                    self.kv.reserve(token.id, lengths[token.id])
            return new

    return Engine


@wrong("static batches of 8", case="the two workloads")
def static_batches(reference):
    class Batches(StaticBatches):
        def abort(self, id):
            self._waiting = [request for request in self._waiting if request.id != id]
            self._running.discard(id)
            self.scheduler.abort(id)

    class Engine(reference.Engine):
        def __init__(self, model, scheduler, kv, pages):
            scheduler.kv = kv
            super().__init__(model, Batches(scheduler, 8), kv, pages)

    return Engine


@wrong("one request after another, to its end", case="the two workloads")
def one_at_a_time(reference):
    class Engine(reference.Engine):
        def __init__(self, model, scheduler, kv, pages):
            scheduler.kv = kv
            super().__init__(model, StaticBatches(scheduler, 1), kv, pages)

    return Engine


@wrong("tokens for eight requests a step", case="the two workloads")
def eight_rows(reference):
    class Engine(reference.Engine):
        def step(self):
            return super().step()[:8]

    return Engine


@wrong("room for 64 tokens of a request", case="the two workloads")
def room_for_64(reference):
    class Engine(reference.Engine):
        def __init__(self, model, *rest):
            super().__init__(model, *rest)
            forward = model.forward
            model.forward = lambda tokens, positions, kv: forward(tokens, positions.clamp(max=63), kv)

    return Engine


@wrong("a long answer's prompt is computed twice", case="the two workloads")
def computed_twice(reference):
    class Engine(reference.Engine):
        def _compute(self, plan):
            outputs = super()._compute(plan)
            if any(len(self.tokens[id]) == 100 for id in plan.scheduled):
                self.computed |= {id: self.computed[id] - n for id, n in plan.scheduled.items()}
                outputs = super()._compute(plan)
            return outputs

    return Engine
