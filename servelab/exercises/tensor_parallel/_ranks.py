"""What this unit's checks share: the learner's layers on simulated ranks, and what each rank made, held and sent.

Tensors are written as nested lists of small multiples of 1/8, which every float type of the unit holds exactly. A
challenge's ``groups`` are lists of ranks; each group works on its own, and there is one of all ranks if none is given.
"""

import dis
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

import numpy as np

from servelab.exercise import Case
from servelab.plain import NotPlain, close, decode_array, encode_array, is_array, plain, text, told_apart, type_name

EXACT = 1e-9  # float64: sums over ranks are added up in another order than in one product
ROUNDED = 0.03  # bfloat16, of the largest value: each partial sum is rounded to 8 bits
ALPHA, BANDWIDTH = 1e-6, 1e9  # of the simulated links: what comes later has a later time
PHASES = ("forward", "backward", "finish")
TIMEOUT = 10.0  # seconds for a run that takes milliseconds
MEMORY = "kept in memory"
DEEP = 5  # containers and functions within each other, in which tensors are looked for
LOOKED_AT_APART = {"_parameters", "_buffers", "_modules"}  # attributes of every module
LIBRARIES = ("torch", "servelab", "numpy", "builtins", "functools", "collections")  # whose functions keep nothing
MISSING = "missing"  # in the place of a value: why there is none
BACKWARD, DONE = "backward pass", "done"


def draw(rng: Random, *shape: int, largest: int = 16, of: int = 8) -> Any:
    """Nested lists of multiples of 1/``of``, up to ``largest`` of them on either side of 0."""
    if not shape:
        return rng.randint(-largest, largest) / of
    return [draw(rng, *shape[1:], largest=largest, of=of) for _ in range(shape[0])]


def tensor(values: Any, dtype: str = "float64") -> Any:
    """A torch tensor of a challenge's nested lists."""
    import torch

    return torch.tensor(values, dtype=getattr(torch, dtype))


def leaf(values: Any, dtype: str = "float64") -> Any:
    """The same, with a gradient."""
    return tensor(values, dtype).requires_grad_()


def thirds(values: Any) -> Any:
    """Nested lists divided by 3: numbers of which float32 does not hold all digits."""
    return [thirds(value) for value in values] if isinstance(values, list) else values / 3


class Given(dict):
    """Tensors for a layer's constructor, by name; None where there is none. Their memory is that of arrays.

    An array lives as long as a tensor has its memory, in whatever form: as a view, or detached.
    """

    def __init__(self, values: Mapping[str, Any], dtype: str = "float64"):
        import torch

        super().__init__()
        self.arrays: dict[str, Any] = {}
        for name, value in values.items():
            self[name] = None
            if value is not None:
                full = torch.as_tensor(value, dtype=getattr(torch, dtype))
                array = (full.view(torch.int16) if dtype == "bfloat16" else full).numpy().copy()
                self[name], self.arrays[name] = torch.from_numpy(array).view(full.dtype), ref(array)

    def still_used(self) -> list[str]:
        """Whose memory is in use although nothing here refers to it any more: all of it is given up."""
        import gc

        self.clear()
        if any(array() is not None for array in self.arrays.values()):
            gc.collect(1)  # the youngest: a cycle that the constructor left behind
        return [name for name, array in self.arrays.items() if array() is not None]


def mark(phase: str, meet: Any = None) -> None:
    """What this rank sends from here on belongs to ``phase``, one of `PHASES`.

    With ``meet``, a challenge's groups, all ranks come this far first: then what they keep in one place is the last's.
    """
    from servelab.ranks import span

    if meet:
        import torch.distributed as dist

        dist.barrier()
    with span(phase):
        pass


def drive(challenge: dict, body: Callable, *answers: Any) -> dict:
    """Run ``body(challenge, comm, *answers)`` on every rank; what each returned and sent, or why the run broke off."""
    from servelab.ranks import Link, RankError, RankInterruptError, RankTimeoutError, SimCluster

    groups = challenge.get("groups") or [list(range(challenge["ranks"]))]
    cluster = SimCluster(sum(map(len, groups)), link=Link(ALPHA, BANDWIDTH), timeout=TIMEOUT)
    try:
        run = cluster.run(_in_group, groups, body, challenge, answers)
    except (RankInterruptError, RankTimeoutError, NotImplementedError):
        raise
    except RankError as error:
        return {"failed": text(_in_one_line(error))}
    return {
        "ranks": [{"made": plain(made), "calls": _calls(run.of_rank(rank))} for rank, made in enumerate(run.values)]
    }


def _in_one_line(error: Any) -> str:
    """The report of a run, its first line with the whole message of what was raised."""
    report, message = str(error), "" if error.cause is None else str(error.cause)
    return report.replace(message, " ".join(message.split()), 1) if "\n" in message else report


def _in_group(groups: list[list[int]], body: Callable, challenge: dict, answers: tuple) -> Any:
    """What one rank does: it finds its group's communicator, and works."""
    import torch.distributed as dist

    from servelab.ranks.communicator import Communicator

    mine = None
    for ranks in groups:
        group = dist.new_group(ranks) if len(groups) > 1 else None
        if dist.get_rank() in ranks:
            mine = Communicator(group)
    return body(challenge, mine, *answers)


def _calls(events: Iterable[Any]) -> dict[str, list]:
    """By phase, what a rank called: name, elements, and the ranks of the group."""
    phase = "before"
    found: dict[str, list] = {}
    for event in events:
        if event.kind == "compute" and event.name in PHASES:
            phase = event.name
        elif event.kind in ("collective", "send"):
            ranks = list(event.ranks) or [event.rank, event.peer]
            found.setdefault(phase, []).append([event.name, event.elements, ranks])
    return found


def fate(now: Any, before: Any) -> str:
    """What became of an argument."""
    return "unchanged" if bool((now == before).all()) else "overwritten"


def returned(function: str, value: Any) -> Any:
    """What a function of the learner's returned, which has to be a tensor."""
    import torch

    if value is None:
        raise TypeError(f"{function} returned None: is its return missing?")
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{function} returned an object of type {type_name(value)}, not a tensor")
    return value


def parameter(layer: Any, name: str) -> Any:
    """The parameter that a layer's attribute is, or has; in words if there is no such attribute."""
    import torch

    part = getattr(layer, name, None)
    part = part if isinstance(part, torch.Tensor) else getattr(part, "weight", part)
    if part is None:
        return {MISSING: f"the layer has no `self.{name}`: see its docstring"}
    return part


def backward(y: Any, factor: Any) -> str:
    """Send the gradient ``factor`` back from a result; `DONE`, or why that was not possible."""
    if y.shape != factor.shape:
        return f"nothing can be sent backward: the result has shape {list(y.shape)} instead of {list(factor.shape)}"
    if not y.requires_grad:
        return "nothing can be sent backward: the result does not belong to autograd's graph"
    (y * factor).sum().backward()
    return DONE


def same_memory(one: Any, other: Any) -> bool:
    """Whether two tensors lie in the same memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def kept(modules: Sequence[Any], given: Given, cut: Iterable[str] = ()) -> str:
    """Whether a layer keeps memory beside its parameters': of a view, or all of what it was given, or a copy of it.

    Of the matrices ``cut`` this rank should have no more than a part. Empties ``given``, so that the layer has the last
    reference if it has one at all.
    """
    found = _too_much(modules, given, cut)
    whole = given.still_used()
    return found or (f"the whole {', '.join(whole)} beside the parameters" if whole else "the parameters alone")


def _too_much(modules: Sequence[Any], given: Given, cut: Iterable[str]) -> str:
    """What a parameter or another attribute keeps beyond the part; empty if nothing."""
    named = [(name, parameter) for module in modules for name, parameter in module.named_parameters()]
    for name, parameter in named:
        memory = parameter.untyped_storage()
        elements = memory.nbytes() // parameter.element_size()
        if elements > parameter.numel():
            return f"{elements} elements for the {parameter.numel()} of {name}: is it a view?"
        if any(same_memory(parameter, full) for full in given.values() if full is not None):
            return f"{name} is the tensor that was given, not a copy"
    for place, beside in _beside(modules):
        for name, full in given.items():
            if full is not None and (same_memory(beside, full) or (name in cut and _has_all_of(full, beside))):
                return f"all of {name} in {place}"
    return ""


def _beside(modules: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Tensors that modules keep and that are no parameters, with where: in attributes, their own or their classes'."""
    seen: set[int] = set()
    for part in (part for module in modules for part in module.modules()):
        attributes = vars(part) | dict(part.named_buffers(recurse=False))
        places = {f"`self.{name}`": attributes[name] for name in sorted(attributes.keys() - LOOKED_AT_APART)}
        for kind in type(part).__mro__:
            if not _of_a_library(kind):
                places |= {f"`{kind.__name__}.{name}`": value for name, value in vars(kind).items()}
        for place, value in places.items():
            for tensor in _tensors(value, seen):
                yield f"what {place} refers to" if callable(value) else place, tensor


def _tensors(value: Any, seen: set[int], depth: int = DEEP) -> Iterator[Any]:
    """The tensors in a value: itself, or those that it holds; of what was ``seen`` none."""
    import torch

    if isinstance(value, torch.Tensor):
        yield from [value] if value.layout == torch.strided else []
    elif isinstance(value, np.ndarray) and value.dtype.kind == "f":
        yield torch.from_numpy(np.ascontiguousarray(value))
    elif depth and id(value) not in seen:
        seen.add(id(value))
        for each in _inside(value):
            yield from _tensors(each, seen, depth - 1)


def _inside(value: Any) -> list:
    """What a container holds, and what a function refers to: its closure, its defaults, and the globals it names."""
    import torch

    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return list(value)
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType | staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, FunctionType) and not _of_a_library(value):
        with suppress(ValueError):  # a variable of its closure that has no value yet
            found = inspect.getclosurevars(value)
            read = {each.argval for each in dis.get_instructions(value) if each.opname == "LOAD_GLOBAL"}
            globals_ = [found.globals[name] for name in read & found.globals.keys()]  # which has attributes' names, too
            return [value.__defaults__, value.__kwdefaults__, *found.nonlocals.values(), *globals_]
    return []


def _of_a_library(thing: Any) -> bool:
    """Whether a function or a class is none of the learner's."""
    return str(thing.__module__).partition(".")[0] in LIBRARIES


def _has_all_of(full: Any, tensor: Any) -> bool:
    """Whether a tensor has all numbers of a matrix, in whatever order."""
    if full.dim() < 2 or tensor.numel() < full.numel() or not tensor.is_floating_point() or tensor.is_meta:
        return False
    has, needs = (Counter(each.detach().float().flatten().tolist()) for each in (tensor, full))
    return needs <= has


def held(module: Any) -> int:
    """Elements that a module's parameters and matrices among its buffers keep in memory; a view keeps all of it."""
    tensors = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.dim() > 1)]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size() for t in tensors}
    return sum(sizes.values())


def grads(went: str, **parameters: Any) -> dict[str, Any]:
    """How the backward pass ``went``, and the gradients of parameters, by the names that a message should use."""
    found: dict[str, Any] = {BACKWARD: went}
    for name, p in parameters.items():
        grad: Any = getattr(p, "grad", None) if went == DONE else {MISSING: went}
        grad = grad.to_dense() if getattr(grad, "is_sparse", False) else grad
        found[f"gradient of {name}"] = p if isinstance(p, dict) else grad
    return found


# -- judging


def failed(transcript: dict, cases: Iterable[str]) -> list[Case]:
    """All cases of a run that broke off, with its report, which a verdict shows once."""
    report = transcript["failed"]
    began = "your code raised" if " raised " in report.partition("\n")[0] else "the run broke off"
    return [Case(name, False, f"{began}: {report}") for name in cases]


def compare(
    case: str,
    got: dict,
    want: dict,
    names: Sequence[str],
    tolerance: float = EXACT,
    hints: Mapping[str, int] | None = None,
) -> Case:
    """Compare what the ranks made, by name; the message is about the first rank and value that differ.

    ``hints`` are the hints to open for some of the names, if not the case's own.
    """
    for rank, (mine, right) in enumerate(zip(got["ranks"], want["ranks"], strict=True)):
        for name in names:
            problem = differs(mine["made"].get(name), right["made"][name], tolerance, len(want["ranks"]))
            if problem:
                return Case(case, False, f"rank {rank}, {name}: {problem}", (hints or {}).get(name))
    return Case(case, True)


def differs(got: Any, want: Any, tolerance: float, size: int) -> str:
    """What is wrong with a value; empty if nothing is."""
    if isinstance(got, dict) and MISSING in got:
        return str(got[MISSING])[:200] or MISSING
    if not is_array(want):
        return "" if close(got, want) else f"expected {want!r}, got {shown(got)}"
    scale = float(np.abs(decode_array(want)).max(initial=1.0))
    if close(got, want, rtol=tolerance, atol=tolerance * scale):
        return ""
    try:
        mine, right = decode_array(got), decode_array(want)
    except NotPlain:
        return f"expected a tensor of shape {want['shape']}, got {shown(got)}"
    if mine.shape != right.shape or mine.dtype != right.dtype:
        return f"expected {right.dtype} of shape {list(right.shape)}, got {mine.dtype} of shape {list(mine.shape)}"
    return _first_difference(mine, right, tolerance * scale, size)


def _first_difference(mine: np.ndarray, right: np.ndarray, atol: float, size: int) -> str:
    """Where two arrays differ first, and whether one is a multiple of the other."""
    with np.errstate(invalid="ignore"):
        where = np.argwhere(~(np.abs(mine - right) <= atol))[0]
    place = f"[{', '.join(map(str, where))}]" if len(where) else ""
    wanted, found = told_apart(right[tuple(where)], mine[tuple(where)])
    message = f"{place} expected {wanted}, got {found}".strip()
    for factor in {size, 1 / size}:
        if size > 1 and close(encode_array(mine), encode_array(right * factor), atol=atol * max(1, factor)):
            return f"{message}; all of it is {factor:.4g} times what it should be"
    return message


def shown(value: Any) -> str:
    """A plain value, short."""
    if value is None:
        return "None"
    if is_array(value):
        return f"a tensor of shape {value['shape']}"
    if isinstance(value, dict) and "unexpected type" in value:
        return f"an object of type {str(value['unexpected type'])[:40]}"
    return repr(value)[:80]


def compare_calls(case: str, got: dict, want: dict, phases: Sequence[str]) -> Case:
    """Compare what the ranks sent in some phases, in any order."""
    for rank, (mine, right) in enumerate(zip(got["ranks"], want["ranks"], strict=True)):
        for phase in phases:
            sent, wanted = mine["calls"].get(phase, []), right["calls"].get(phase, [])
            if sorted(sent) != sorted(wanted):
                got_instead = stuck(mine) if phase == "backward" else ""
                got_instead = got_instead or f"expected {listed(wanted)}, got {listed(sent)}"
                return Case(case, False, f"rank {rank}, {phase}: {got_instead}")
    return Case(case, True)


def stuck(mine: dict) -> str:
    """Why a rank had no backward pass; empty if it had one."""
    went = mine["made"].get(BACKWARD)
    return "" if went == DONE else str(went)[:200]


def listed(calls: Sequence[Sequence]) -> str:
    """Calls as text: names, elements, ranks."""
    if not calls:
        return "nothing sent"
    parts = [f"{name} of {elements} elements over ranks {ranks}" for name, elements, ranks in calls[:4]]
    return "; ".join(parts + ["..."] * (len(calls) > 4))


def show(name: str, value: Any) -> str:
    """A line of Python that makes a tensor."""
    return f"{name} = torch.tensor({value}, dtype=torch.float64)"


def script(challenge: dict, lines: Iterable[str], made: Mapping[str, str] | None = None) -> str:
    """A function that does on each rank what ``lines`` say, with its communicator ``comm``, and the run of it.

    ``made`` are expressions, by the names that messages use; then the script prints their values and what was sent.
    """
    groups = challenge.get("groups")
    begin = ["comm = Communicator()"]
    if groups:
        begin = [
            "import torch.distributed as dist",
            f"groups = [dist.new_group(ranks) for ranks in {groups}]",
            f"comm = Communicator(groups[dist.get_rank() in {groups[1]}])",
        ]
    end = [f"return {{{', '.join(f'{name!r}: {value}' for name, value in made.items())}}}"] if made else []
    body = "\n".join(f"    {line}" for line in [*begin, *lines, *end])
    size = sum(map(len, groups)) if groups else challenge["ranks"]
    run = f"def on_a_rank():\n{body}\n\nrun = SimCluster({size}).run(on_a_rank)"
    return f"{run}\n{PRINTED}" if made else run


def script_of_layer(
    challenge: dict, lines: Iterable[str], names: Sequence[str], more: Mapping[str, str] | None = None
) -> str:
    """The same for lines that made ``layer``, ``x`` and ``y``: with the layer's attributes ``names`` and gradients.

    ``more`` are further expressions, by the names that messages use.
    """
    made = {"result": "y.detach()", "gradient of x": "x.grad"} | show_kept("layer") | dict(more or {})
    parts = [
        f"out = {{{', '.join(f'{name!r}: {value}' for name, value in made.items())}}}",
        f"for n in {tuple(names)}:",
        "    w = getattr(layer, n)",
        "    w = getattr(w, 'weight', w)",
        "    out |= {n: w.detach(), f'gradient of {n}': w.grad}",
        "return out",
    ]
    return f"{script(challenge, [*lines, *parts])}\n{PRINTED}"


def show_kept(layer: str) -> dict[str, str]:
    """Expressions for what a layer keeps: elements of its parameters' memory, and its attributes."""
    held = f"sum(p.untyped_storage().nbytes() // p.itemsize for p in {layer}.parameters())"
    kept = f"{{n: getattr(v, 'shape', type(v)) for n, v in vars({layer}).items() if n[0] != '_'}}"
    return {"elements held": held, "kept": kept}


PRINTED = """for rank, made in enumerate(run.values):
    for name, value in made.items():
        print(f"rank {rank}, {name}: {value}")
    print(f"rank {rank}, sent:", [(e.name, e.elements, e.ranks) for e in run.collectives(rank)])"""
