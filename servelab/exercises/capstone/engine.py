"""Check of `Engine`: the tokens of every step of scripted runs, and how many forward passes gave them.

Then two whole workloads: the steps that they take, their tokens, and that no block is left in use.
"""

from dataclasses import replace
from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.capstone import _model, _workload
from servelab.exercises.capstone import _script as script
from servelab.exercises.capstone._script import add, answer, challenge, prompt, step

ANSWERS = ("Engine",)
ONE, CHUNKS, MIXED = (
    "one request from prompt to end",
    "no token before the last chunk",
    "each request gets its own token",
)
PASSES, ROWS, ENDS = "one forward pass a step", "one row of logits a request", "an answer ends"
BACK, PREEMPTED, ABORTED = "KV is given back", "a preempted request goes on", "an aborted request is gone"
AGAIN, REFUSED, IDLE = "an id comes again", "what cannot run is refused", "a step with nothing to do"
SHARED, DRAWN, WORKLOADS = "requests share nothing", "a random run", "the two workloads"
CASES = (
    CaseSpec(ONE, hint=1, weight=3),
    CaseSpec(CHUNKS, hint=2, weight=2),
    CaseSpec(MIXED, hint=2, weight=3),
    CaseSpec(PASSES, hint=1, weight=2),
    CaseSpec(ROWS, hint=2, alone=False),
    CaseSpec(ENDS, hint=3, weight=2),
    CaseSpec(BACK, hint=3, weight=2),
    CaseSpec(PREEMPTED, hint=1, weight=2),
    CaseSpec(ABORTED, hint=3, weight=2),
    CaseSpec(AGAIN, hint=3),
    CaseSpec(REFUSED, hint=3, weight=2),
    CaseSpec(IDLE, hint=1),
    CaseSpec(SHARED, hint=3),
    CaseSpec(DRAWN, hint=3, weight=2),
    CaseSpec(WORKLOADS, hint=3, weight=3),
)
SAID = ("tokens", "events", "unfinished", "given", "computed")
ALSO = {  # what else a challenge of this case tests
    MIXED: (PASSES, ROWS),
    ENDS: (BACK,),
    ABORTED: (BACK,),
}
LOOKED_AT = {PASSES: ("passes", "computed"), ROWS: ("rows",), BACK: ("used",)}
OWN = {ABORTED: (*SAID, "used"), IDLE: (*SAID, "idle", "returned"), DRAWN: (*SAID, "passes", "rows", "used")}


def challenges(rng: Random) -> list[dict]:
    """Directed runs, then random ones, then the workloads."""
    one = [step({"a": 3}, add("a", prompt(rng, 3), 3)), step({"a": 1}), step({"a": 1}), step({})]
    runs = [challenge(ONE, one), _chunks(rng), *_mixed(rng), *_ends(rng), *_preempted(rng), _aborted(rng), _again(rng)]
    runs += [_refused(rng), _idle(rng), *_shared(rng)]
    sizes = (3, 0.0, 0.0), (2, 0.15, 0.0), (4, 0.1, 0.15)  # of a block; chances of preemption and abort
    runs += [script.drawn(rng, DRAWN, 8, size, lost, gone) for size, lost, gone in sizes]
    return runs + [{"case": WORKLOADS, "workload": name, "seed": rng.randrange(1000)} for name in ("w16", "w32")]


def _chunks(rng: Random) -> dict:
    steps = [step({"a": 2}, add("a", prompt(rng, 5), 2)), step({"a": 2}), step({"a": 1}), step({"a": 1}), step({})]
    return challenge(CHUNKS, steps)


def _mixed(rng: Random) -> list[dict]:
    """Two prompts and a decode in one step; then chunks beside them, and a plan in another order every time."""
    first = [step({"a": 3}, add("a", prompt(rng, 3), 3)), step({"b": 4, "a": 1}, add("b", prompt(rng, 4), 2))]
    first += [step({"a": 1, "b": 1}), step({})]
    events = [add(id, prompt(rng, length), 3) for id, length in (("a", 2), ("b", 7), ("c", 5))]
    second = [step({"c": 2, "b": 4, "a": 2}, *events), step({"a": 1, "c": 3}), step({"b": 3, "c": 1, "a": 1})]
    second += [step({"c": 1, "b": 1}), step({"b": 1}), step({})]
    return [challenge(MIXED, first), challenge(MIXED, second, block_size=2)]


def _ends(rng: Random) -> list[dict]:
    """One answer ends with EOS, its second token, and another with its first and only token."""
    while True:
        a, b = prompt(rng, 4), prompt(rng, 3)
        said, other = answer(a, 6), answer(b, 4)
        if said[1] != said[0] and said[1] not in other:
            break
    steps = [step({"a": 4, "b": 3}, add("a", a, 6), add("b", b, 4)), step({"b": 1, "a": 1})]
    steps += [step({"b": 1, "c": 2}, add("c", prompt(rng, 2), 1)), step({"b": 1}), step({})]
    only = [step({"a": 4}, add("a", a, 6)), step({})]  # its EOS is the first token
    return [challenge(ENDS, steps, eos=said[1]), challenge(ENDS, only, eos=said[0])]


def _preempted(rng: Random) -> list[dict]:
    """In the middle of an answer, and computed again in one piece; in the middle of a prompt, and again in chunks."""
    a, b = add("a", prompt(rng, 3), 5), add("b", prompt(rng, 4), 5)
    first = [step({"a": 3, "b": 4}, a, b), step({"a": 1, "b": 1}), step({"a": 1}, preempted=["b"]), step({"a": 1})]
    first += [step({"b": 6, "a": 1}), step({"b": 1}), step({"b": 1}), step({})]
    c = add("c", prompt(rng, 6), 4)
    second = [step({"c": 4}, c), step({}, preempted=["c"]), step({"c": 5}), step({"c": 1}), step({"c": 1})]
    second += [step({}, preempted=["c"]), step({"c": 3}), step({"c": 3}), step({"c": 2}), step({"c": 1}), step({})]
    both = add("d", prompt(rng, 2), 4), add("e", prompt(rng, 3), 4)
    third = [step({"d": 2, "e": 3}, *both), step({"d": 1, "e": 1}), step({}, preempted=["e", "d"])]
    third += [step({"e": 5, "d": 4}), step({"d": 1, "e": 1}), step({})]
    runs = (first, 4), (second, 2), (third, 4)
    return [challenge(PREEMPTED, steps, block_size=size) for steps, size in runs]


def _aborted(rng: Random) -> dict:
    """A running one, a waiting one, whose id comes again, one in the middle of its prompt, one that there is not."""
    events = [add(id, prompt(rng, 5), 4) for id in "abc"]
    steps = [step({"a": 5, "c": 2}, *events), step({"c": 3}, ["abort", "a"]), step({"c": 1}, ["abort", "b"])]
    events = [add("d", prompt(rng, 5), 2), ["abort", "nobody"], add("b", prompt(rng, 3), 1)]
    steps += [step({"c": 1, "d": 3, "b": 3}, *events), step({"c": 1}, ["abort", "d"])]
    return challenge(ABORTED, [*steps, step({})])


def _again(rng: Random) -> dict:
    """The id of a finished request, and of an aborted one."""
    first, second, third = (add("a", prompt(rng, length), 2) for length in (5, 3, 4))
    steps = [step({"a": 5}, first), step({"a": 1}), step({"a": 3}, second), step({"a": 2}, ["abort", "a"], third)]
    return challenge(AGAIN, [*steps, step({"a": 2}), step({"a": 1}), step({})])


def _refused(rng: Random) -> dict:
    """By the scheduler, for the model's longest request, for a length that is not the prompt's, and for an id.

    Those that can be mended come again, and nothing may be left of their first try.
    """
    longest = _model.SMALL["max_model_len"]
    a, b = add("a", prompt(rng, 4), 3), add("b", prompt(rng, 9), longest - 9)
    c, d = (add(id, prompt(rng, 4), 1) for id in "cd")
    wrong = [add(script.REFUSED, prompt(rng, 2), 2), add("b", b[2], longest - 8), [*c, 3], [*d, 5]]
    steps = [step({"a": 4}, a, *wrong, add("a", prompt(rng, 6), 4)), step({"a": 1, "b": 9}, b)]
    steps += [step({"a": 1, "c": 4}, c), step({"b": 1, "d": 4}, d), step({}, ["abort", "b"])]
    return challenge(REFUSED, steps)


def _idle(rng: Random) -> dict:
    """Before anything is there, between two steps, and after the end."""
    steps = [step({}), step({"a": 2}, add("a", prompt(rng, 2), 2)), step({}), step({"a": 1}), step({}), step({})]
    return challenge(IDLE, steps)


def _shared(rng: Random) -> list[dict]:
    """Two requests with the very same prompt; two engines side by side; a caller who uses a prompt's list again."""
    same = prompt(rng, 4)
    first = [step({"a": 4, "b": 4}, add("a", same, 3), add("b", same, 3)), step({"b": 1}), step({"a": 1, "b": 1})]
    second = [step({"a": 3}, add("a", prompt(rng, 5), 3)), step({"a": 2}), step({"a": 1}), step({"a": 1}), step({})]
    runs = [challenge(SHARED, [*first, step({"a": 1}), step({})]), challenge(SHARED, second, twin=1)]
    third = [step({"a": 2}, add("a", prompt(rng, 4), 2)), step({"a": 2}), step({"a": 1}), step({})]
    return [*runs, challenge(SHARED, third, overwritten=1)]


def drive(asked: dict, Engine) -> dict:
    """Run the engine by the script, where attention is unit 03's, as `servelab.parts` finds it; or serve a workload."""
    from servelab.parts import paged_kv

    if asked["case"] == WORKLOADS:
        return _workload.drive(asked, Engine)
    return script.drive(asked, lambda: script.recorded_kv(asked), Engine, paged_kv)


def judge(asked: dict, transcript: dict, expected: dict) -> list[Case]:
    """Every token, pass and block is determined by the script, or by the workload."""
    if asked["case"] == WORKLOADS:
        return [_workload.judge(asked, transcript, expected)]
    found: dict[str, str] = {}
    for got, want in zip(transcript["runs"], expected["runs"], strict=True):
        found = script.compare(asked, got, want) | found
    if "tokens" in found and asked.get("overwritten"):
        found["tokens"] += "; the caller has written over the list of the prompt after add, which is the caller's right"
    if asked["case"] == SHARED and not transcript["prompts kept"]:
        found.setdefault("tokens", "a prompt that was handed over was changed; it stays the caller's")
    own = script.case(asked["case"], found, OWN.get(asked["case"], SAID))
    if own.name == ONE and not own.passed and _another_row(transcript["runs"][0], expected["runs"][0]):
        own = replace(own, hint=2)
    return [own, *(script.case(name, found, LOOKED_AT[name]) for name in ALSO.get(asked["case"], ()))]


def _another_row(got: list[dict], want: list[dict]) -> bool:
    """Whether the first step, a whole prompt, had the right pass and gave one wrong token."""
    mine, right = got[0], want[0]
    if "raised" in mine or mine["calls"] != right["calls"] or not isinstance(mine["new"], list):
        return False
    return len(mine["new"]) == 1 and type(mine["new"][0][1]) is int and mine["new"] != right["new"]


def show(asked: dict) -> str:
    """The run as Python."""
    if asked["case"] == WORKLOADS:
        return (
            "from servelab.exercises.capstone.engine import play_workload\n"
            f"play_workload(Engine, {asked['workload']!r}, seed={asked['seed']})  # of the model's weights"
        )
    return script.shown(asked, "Engine", "engine")


def play(Engine, steps: list[dict], block_size: int, eos: int, **more) -> None:
    """Run an engine by a script and print what each step gave."""
    asked = challenge(ONE, steps, block_size, eos, **more)
    script.print_runs(asked, drive(asked, Engine))


def play_workload(Engine, workload: str, seed: int) -> None:
    """Serve a workload with the check's model, print what it took, and compare with the plain loop."""
    _workload.play(Engine, workload, seed)
