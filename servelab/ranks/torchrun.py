"""The same call under torchrun: this process is one rank of the job, on whatever node.

`Cluster(W).run(function)` joins the job's process group once, runs the function on this rank, and gives every rank the
whole `Run`: all values and events. If no rank can go on, the job is ended and says so (`servelab.ranks.lookout`); a
rank that waits for one that computes too long is told so by the backend, after the cluster's ``timeout``.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any

from servelab.ranks import current, diagnosis, matching, shipping
from servelab.ranks.errors import MismatchError, RankError, RankTimeoutError
from servelab.ranks.job import Failure, Outcome
from servelab.ranks.lines import labelled
from servelab.ranks.record import Run

if TYPE_CHECKING:
    from servelab.ranks.flight import FlightRecorder
    from servelab.ranks.processes import Cluster
    from servelab.ranks.tracing import Tracer

_numbers = count()  # of the runs of this job, in the order in which every rank makes them


def active() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def on_a_rank() -> bool:
    """Whether this code already runs on a rank of a run, real or simulated."""
    tracing = sys.modules.get("servelab.ranks.tracing")
    return current.rank() is not None or bool(tracing and tracing.active)


def run(cluster: "Cluster", function: Callable, args: tuple, kwargs: dict) -> Run:
    """Run ``function`` on this rank of the job and gather what came of it on all of them."""
    import torch.distributed as dist

    from servelab.ranks.lookout import Lookout

    _join(cluster)
    with Lookout(dist.get_rank(), cluster.world_size, cluster.stall, str(next(_numbers))) as recorder:
        outcome = _here(cluster, recorder, function, args, kwargs)
        recorder.state("finished")
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, outcome)
    posts = [post for other in gathered for post in other.posts]
    wrong = matching.mismatch(posts) or matching.left_out(posts)
    if wrong:
        raise MismatchError(wrong)
    events = [event for other in gathered for event in other.events]
    values = [shipping.loads(other.value, own_classes=True) for other in gathered]
    return Run(values, sorted(events, key=lambda event: event.start), max(other.ended for other in gathered))


def _join(cluster: "Cluster") -> None:
    """Be in the job's process group, and see to it that it is left in good order."""
    import torch
    import torch.distributed as dist

    from servelab.ranks import worker

    torch.set_num_threads(1)
    if not dist.is_initialized():
        backend = cluster.chosen_backend(int(os.environ["LOCAL_WORLD_SIZE"]))
        gpu = worker.prepare_gpu(int(os.environ["LOCAL_RANK"])) if backend == "nccl" else None
        dist.init_process_group(backend, timeout=timedelta(seconds=cluster.timeout), device_id=gpu)
        atexit.register(worker.leave_group)  # gloo aborts a process that ends inside a group
    if dist.get_world_size() != cluster.world_size:
        raise ValueError(
            f"Cluster({cluster.world_size}) in a torchrun job of {dist.get_world_size()} ranks: "
            "give torchrun as many (nodes times processes per node), or write Cluster(int(os.environ['WORLD_SIZE']))"
        )


def _here(cluster: "Cluster", recorder: "FlightRecorder", function: Callable, args: tuple, kwargs: dict) -> Outcome:
    """This rank's part; its clock starts when all ranks are there."""
    import torch.distributed as dist

    from servelab.ranks import worker
    from servelab.ranks.tracing import Tracer

    payload = shipping.dumps((function, args, kwargs))
    worker.seed_all(cluster.seed)
    tracer = Tracer(dist.get_rank(), recorder, cluster.check_buffers)
    with _traced(tracer):
        function, args, kwargs = shipping.loads(payload, own_classes=True)  # copies, as on ranks of one machine
        tracer.untraced(dist.barrier)
        recorder.state("running")
        start = perf_counter()
        value = worker.returned(function(*args, **kwargs), shipping.dumps_by_name)
        tracer.check_all_waited_for()
    end = perf_counter() - start
    events = [replace(event, start=event.start - start, end=event.end - start) for event in tracer.events]
    return Outcome(value, None, 0.0, end, events, tracer.posts)


@contextlib.contextmanager
def _traced(tracer: "Tracer") -> Iterator[None]:
    """Record what this process communicates, label what it prints, and put its errors into words."""
    from servelab.ranks import tracing, worker

    out = sys.stdout
    lines = labelled(out, tracer.rank)
    tracer.install()
    tracing.active = tracer
    try:
        with contextlib.redirect_stdout(lines):
            yield
    except Exception as error:
        raise _in_words(worker.failed(tracer.rank, error), tracer) from None
    finally:
        lines.flush()
        out.flush()
        tracing.active = None
        tracer.uninstall()


def _in_words(failure: Failure, tracer: "Tracer") -> RankError:
    text = diagnosis.failure_report(failure, [failure], "")
    last = f"{tracer.posts[-1]}" if tracer.posts else "no call"
    if "imed out" in failure.message:
        return RankTimeoutError(f"rank {failure.rank} waited in vain in {last}\n{text}")
    if diagnosis.VICTIM.search(failure.message):
        return RankError(f"another rank of the job ended first; its own report says why\n{text}")
    return diagnosis.named_error(failure.kind)(text)
