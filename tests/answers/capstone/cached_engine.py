"""Named answers to `capstone.cached_engine`."""

from servelab.answers import right, wrong
from servelab.kv import OutOfBlocks
from servelab.llm.engine import NewToken
from servelab.serving import StepPlan


def with_kv(reference, **methods):
    """The reference's engine on a memory with other methods."""
    return type("CachedKV", (reference.CachedKV,), methods), reference.CachedEngine


def with_engine(reference, **methods):
    """An engine with other methods on the reference's memory."""
    return reference.CachedKV, type("CachedEngine", (reference.CachedEngine,), methods)


@right("everything written anew, on dictionaries of tuples")
def written_anew(reference):
    class CachedKV:
        def __init__(self, pool):
            self.pool, self.num_blocks, self.block_size = pool, pool.num_blocks, pool.block_size
            self.tokens, self.held = {}, {}

        @property
        def num_free(self):
            return self.pool.num_free

        def blocks_for(self, num_tokens):
            return (num_tokens + self.block_size - 1) // self.block_size

        def blocks(self, id):
            return [*self.held.get(id, ((), 0))[0]]

        def reserve(self, id, num_tokens):
            table, found = self.held.get(id) or tuple(self.pool.match(self.tokens[id]))
            try:
                new = self.pool.allocate(max(0, self.blocks_for(num_tokens) - len(table)))
            except OutOfBlocks:
                if id not in self.held:
                    self.pool.free(table)
                raise
            if table or new:
                self.held[id] = (*table, *new), found

        def release(self, id):
            self.pool.free(list(self.held.pop(id, ((), 0))[0]))

        def num_cached(self, id):
            return self.held[id][1]

        def remember(self, id, num_tokens):
            if num_tokens:
                self.pool.insert(self.tokens[id][:num_tokens], self.blocks(id))

    class CachedEngine:
        def __init__(self, model, scheduler, kv, pages):
            self.inner, self.kv, self.scheduler = reference.Engine(model, self, kv, pages), kv, scheduler
            self.progress, self.plan = {}, StepPlan()
            kv.tokens = self.inner.tokens

        num_unfinished = property(lambda self: self.inner.num_unfinished)

        def add(self, request, prompt=None):
            if prompt is None:  # the inner engine asks its scheduler, which is this object
                return self.scheduler.add(request)
            self.inner.add(request, prompt)
            self.progress[request.id] = 0

        def abort(self, id):
            self.scheduler.abort(id)
            self.inner._forget(id)

        def schedule(self):
            return self.plan

        def finish_step(self, plan, outputs):
            for id in self.real.scheduled:
                self.kv.remember(id, max(self.progress[id], self.inner.computed[id]))
            return self.scheduler.finish_step(self.real, outputs)

        def step(self):
            self.real = self.scheduler.schedule()
            self.plan = StepPlan(preempted=list(self.real.preempted))
            for id in self.real.preempted:
                self.progress[id] = self.inner.computed[id] = 0
            for id, n in self.real.scheduled.items():
                if not self.progress[id]:
                    self.inner.computed[id] = self.kv.num_cached(id)
                self.progress[id] += n
                if self.progress[id] > self.inner.computed[id]:
                    self.plan.scheduled[id] = self.progress[id] - self.inner.computed[id]
            new = self.inner.step()
            if self.real.scheduled and not self.plan.scheduled:
                self.scheduler.finish_step(self.real, {})
            return new

    return CachedKV, CachedEngine


@right("remembers in every step, numbers where the reference has a slice")
def every_step(reference):
    class CachedKV(reference.CachedKV):
        def remember(self, id, num_tokens):
            self.pool.insert([self.tokens[id][place] for place in range(num_tokens)], tuple(self.blocks(id)))

    return CachedKV, reference.CachedEngine


@wrong("takes what is reserved for computed", case="strangers are served as before")
def reserved_is_cached(reference):
    return with_kv(reference, num_cached=lambda self, id: len(self.blocks(id)) * self.block_size)


@wrong("never asks the scheduler's memory for room", case="strangers are served as before")
def no_blocks(reference):
    def reserve(self, id, num_tokens):
        if not self.blocks(id):
            found, length = self.pool.match(self.tokens[id])
            self.adopt(id, found)
            self._full[id] = length // self.block_size

    return with_kv(reference, reserve=reserve)


@wrong("nothing is remembered", case="found tokens are not computed")
def nothing_remembered(reference):
    return with_kv(reference, remember=lambda self, id, num_tokens: None)


@wrong("what is found is computed all the same", case="found tokens are not computed")
def computed_all_the_same(reference):
    return with_kv(reference, num_cached=lambda self, id: 0)


@wrong("positions count from the end of what was found", case="found tokens are not computed")
def positions_from_the_hit(reference):
    class CachedEngine(reference.CachedEngine):
        def __init__(self, model, scheduler, kv, pages):
            super().__init__(model, scheduler, kv, pages)
            forward = model.forward

            def shifted(tokens, positions, bound):
                lens = zip(bound.batch.query_lens, bound.batch.context_lens, strict=True)
                if any(1 < n < context for n, context in lens):
                    positions = positions - positions.min()
                return forward(tokens, positions, bound)

            model.forward = shifted

    return reference.CachedKV, CachedEngine


@wrong("remembers when the scheduler has heard of the step's end", case="a finished request's blocks are found")
def remembers_late(reference):
    class CachedKV(reference.CachedKV):
        def __init__(self, pool):
            super().__init__(pool)
            self.later = {}

        def remember(self, id, num_tokens):
            self.later[id] = num_tokens

    class CachedEngine(reference.CachedEngine):
        def step(self):
            new = super().step()
            later, self.kv.later = self.kv.later, {}
            for id, num_tokens in later.items():
                if id in self.tokens and self.kv.blocks(id):
                    reference.CachedKV.remember(self.kv, id, num_tokens)
            return new

    return CachedKV, CachedEngine


@wrong("the whole prompt may be found", case="the last token is computed")
def whole_prompt(reference):
    def reserve(self, id, num_tokens):
        known = self.tokens
        if not self.blocks(id):
            self.tokens = {id: [*known[id], 0]}
        try:
            reference.CachedKV.reserve(self, id, num_tokens)
        finally:
            self.tokens = known

    return with_kv(reference, reserve=reserve)


@wrong("remembers blocks that are not full yet", case="only what was computed is found")
def not_full_yet(reference):
    def remember(self, id, num_tokens):
        held = len(self.blocks(id)) * self.block_size
        reference.CachedKV.remember(self, id, min(held, len(self.tokens[id])))

    return with_kv(reference, remember=remember)


@wrong("a step of found tokens makes a pass all the same", case="chunks of found tokens")
def pass_all_the_same(reference):
    class CachedEngine(reference.CachedEngine):
        def _compute(self, plan):
            outputs = super()._compute(plan)
            if not outputs and plan.scheduled:
                import torch

                self.model.forward(torch.tensor([1]), torch.tensor([0]), Nothing())
            return outputs

    class Nothing:
        def attend(self, layer, q, k, v):
            return q

    return reference.CachedKV, CachedEngine


@wrong("skips past the end of what the scheduler knows", case="chunks of found tokens")
def past_the_plan(reference):
    def _compute(self, plan):
        rest = StepPlan()
        for id, n in plan.scheduled.items():
            self.computed[id] = max(self.computed[id], self.kv.num_cached(id))
            rest.scheduled[id] = min(n, len(self.tokens[id]) - self.computed[id])
        outputs = reference.Engine._compute(self, rest)
        for id in plan.scheduled:
            self.kv.remember(id, self.computed[id])
        return outputs

    return with_engine(reference, _compute=_compute)


@wrong("a token for each found chunk", case="chunks of found tokens")
def token_for_found(reference):
    def step(self):
        new = reference.CachedEngine.step(self)
        named = {token.id for token in new}
        kept = [id for id in self.tokens if id not in named and self.computed[id]]
        return [*new, *(NewToken(id, self.tokens[id][0]) for id in kept)]

    return with_engine(reference, step=step)


def remembering_in_reserve(reference, when):
    """A memory that tells the pool of the blocks that it has just reserved, ``when(fresh)``."""

    def reserve(self, id, num_tokens):
        fresh = not self.blocks(id)
        reference.CachedKV.reserve(self, id, num_tokens)
        if when(fresh):
            self.pool.insert(self.tokens[id][:num_tokens], self.blocks(id))

    return with_kv(reference, reserve=reserve)


@wrong("remembers what the first reserve is asked for, before it is computed", case="only what was computed is found")
def first_reserve(reference):
    return remembering_in_reserve(reference, lambda fresh: fresh)


@wrong("remembers what every reserve is asked for, before it is computed", case="only what was computed is found")
def each_reserve(reference):
    return remembering_in_reserve(reference, lambda fresh: True)


@wrong("remembers what later reserves are asked for, before it is computed", case="only what was computed is found")
def later_reserves(reference):
    return remembering_in_reserve(reference, lambda fresh: not fresh)


@wrong("remembers after the pass all that was reserved before it", case="only what was computed is found")
def reserved_and_passed(reference):
    class CachedKV(reference.CachedKV):
        def __init__(self, pool):
            super().__init__(pool)
            self.asked = {}

        def reserve(self, id, num_tokens):
            super().reserve(id, num_tokens)
            self.asked[id] = num_tokens

        def remember(self, id, num_tokens):
            super().remember(id, max(num_tokens, self.asked[id]))

    return CachedKV, reference.CachedEngine


@wrong("asks for room as if nothing were found", case="what is shared needs no room")
def room_for_all(reference):
    def reserve(self, id, num_tokens):
        if not self.blocks(id) and self.blocks_for(num_tokens) > self.num_free:
            raise OutOfBlocks(id)
        reference.CachedKV.reserve(self, id, num_tokens)

    return with_kv(reference, reserve=reserve)


@wrong("asks for room as if nothing were there or found", case="what is shared needs no room")
def room_for_all_again(reference):
    def reserve(self, id, num_tokens):
        if self.blocks_for(num_tokens) > self.num_free:
            raise OutOfBlocks(id)
        reference.CachedKV.reserve(self, id, num_tokens)

    return with_kv(reference, reserve=reserve)


@wrong("the scheduler is not told of a step in which all was found", case="chunks of found tokens")
def not_told_of_found(reference):
    class CachedEngine(reference.CachedEngine):
        def __init__(self, model, scheduler, kv, pages):
            super().__init__(model, scheduler, kv, pages)
            forward, finish, passes = model.forward, scheduler.finish_step, []
            model.forward = lambda *given: passes.append(1) or forward(*given)
            scheduler.finish_step = lambda plan, outputs: finish(plan, outputs) if passes and passes.pop() else []

    return reference.CachedKV, CachedEngine


@wrong("only prompts are remembered", case="answers are found, too")
def prompts_only(reference):
    class CachedEngine(reference.CachedEngine):
        def add(self, request, prompt):
            super().add(request, prompt)
            self.kv.lengths = getattr(self.kv, "lengths", {}) | {request.id: len(prompt)}

    class CachedKV(reference.CachedKV):
        def remember(self, id, num_tokens):
            super().remember(id, min(num_tokens, self.lengths[id]))

    return CachedKV, CachedEngine


@wrong("the token sampled last is remembered, too", case="only what was computed is found")
def sampled_remembered(reference):
    class CachedEngine(reference.CachedEngine):
        def step(self):
            new = super().step()
            for token in new:
                known = len(self.tokens.get(token.id, ()))
                if 0 < known <= len(self.kv.blocks(token.id)) * self.kv.block_size:
                    self.kv.remember(token.id, known)
            return new

    return reference.CachedKV, CachedEngine


@wrong("a preempted request does not look again", case="a preempted request finds its blocks")
def does_not_look_again(reference):
    def reserve(self, id, num_tokens):
        self.seen = getattr(self, "seen", set())
        known = self.tokens
        if not self.blocks(id) and id in self.seen:
            self.tokens = {**known, id: known[id][:1]}
        self.seen.add(id)
        try:
            reference.CachedKV.reserve(self, id, num_tokens)
        finally:
            self.tokens = known

    return with_kv(reference, reserve=reserve)


@wrong("grows block by block and keeps what it got", case="no room changes nothing")
def block_by_block(reference):
    def reserve(self, id, num_tokens):
        fresh = not self.blocks(id)
        if fresh:
            found, _ = self.pool.match(self.tokens[id])
            self.adopt(id, found)
            self._full[id] = len(found)
        try:
            for end in range(1, num_tokens + 1):
                reference.PagedKV.reserve(self, id, end)
        except OutOfBlocks:
            if fresh:
                self.release(id)
            raise

    return with_kv(reference, reserve=reserve)


@wrong("wants room for all known tokens at the beginning", case="no room changes nothing")
def room_for_all_known(reference):
    def reserve(self, id, num_tokens):
        if not self.blocks(id):
            found, _ = self.pool.match(self.tokens[id])
            room = self.num_free
            self.pool.free(found)
            if self.blocks_for(len(self.tokens[id])) - len(found) > room:
                raise OutOfBlocks(id)
        reference.CachedKV.reserve(self, id, num_tokens)

    return with_kv(reference, reserve=reserve)


@wrong("found blocks stay taken when there is no room for the rest", case="no room changes nothing")
def found_stay_taken(reference):
    def reserve(self, id, num_tokens):
        if not self.blocks(id):
            found, length = self.pool.match(self.tokens[id])
            self.adopt(id, found)
            self._full[id] = length // self.block_size
        reference.PagedKV.reserve(self, id, num_tokens)

    return with_kv(reference, reserve=reserve)


@wrong("whoever finds no room loses all blocks", case="no room changes nothing")
def loses_all(reference):
    def reserve(self, id, num_tokens):
        try:
            reference.CachedKV.reserve(self, id, num_tokens)
        except OutOfBlocks:
            self.release(id)
            raise

    return with_kv(reference, reserve=reserve)


@wrong("whoever grows without room loses what was found", case="no room changes nothing")
def loses_found(reference):
    def reserve(self, id, num_tokens):
        held = self.blocks(id)
        try:
            reference.CachedKV.reserve(self, id, num_tokens)
        except OutOfBlocks:
            if held and self._full[id]:
                self.release(id)
            raise

    return with_kv(reference, reserve=reserve)


@wrong("the memory is never told of the tokens", case="strangers are served as before")
def never_told(reference):
    class CachedEngine(reference.CachedEngine):
        def __init__(self, model, scheduler, kv, pages):
            super().__init__(model, scheduler, kv, pages)
            kv.tokens = dict(self.tokens)

    return reference.CachedKV, CachedEngine


@wrong("what was found for an id is kept for the next", case="an id comes again")
def kept_for_the_next(reference):
    def reserve(self, id, num_tokens):
        before = self._full.get(id, 0)
        reference.CachedKV.reserve(self, id, num_tokens)
        self._full[id] = max(self._full[id], before)

    return with_kv(reference, reserve=reserve)


@wrong("tokens of the first request of an id", case="an id comes again")
def first_tokens(reference):
    class CachedEngine(reference.CachedEngine):
        def add(self, request, prompt):
            super().add(request, prompt)
            self.kv.tokens = {request.id: self.tokens[request.id], **self.kv.tokens}

        def __init__(self, model, scheduler, kv, pages):
            super().__init__(model, scheduler, kv, pages)
            kv.tokens = {}

    return reference.CachedKV, CachedEngine


@wrong("None where nothing is planned", case="a random run")
def none(reference):
    def step(self):
        schedule, plans = self.scheduler.schedule, []
        self.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
        new = reference.CachedEngine.step(self)
        self.scheduler.schedule = schedule
        return new if plans[-1].scheduled else None

    return with_engine(reference, step=step)


@wrong("remembers six times and no more", case="a random run")
def six_times(reference):
    def remember(self, id, num_tokens):
        before = self._full[id]
        if getattr(self, "times", 0) < 6:
            reference.CachedKV.remember(self, id, num_tokens)
            self.times = getattr(self, "times", 0) + (self._full[id] != before)

    return with_kv(reference, remember=remember)
