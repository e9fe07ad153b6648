"""The life of a rank's process: wait for a job, become a rank, run the function, send back what came of it.

The process that started the rank talks to it over one pipe. A thread of the rank answers "where are you?" while the
main thread computes or waits, and ends the process when the other end of the pipe is gone.
"""

import contextlib
import faulthandler
import os
import pickle
import queue
import random
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from servelab.ranks import shipping, tracing
from servelab.ranks.flight import FlightRecorder
from servelab.ranks.job import Failure, Job, Outcome
from servelab.ranks.lines import Lines
from servelab.ranks.shipping import Frame

LOOPBACK = {"linux": "lo", "darwin": "lo0"}  # Windows: gloo finds an address by itself


def serve(pipe: Connection) -> None:
    """Be a rank, one job after the other, until the other end of ``pipe`` is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter signals the whole process group; the kernel decides
    torch.set_num_threads(1)  # W ranks with a thread per core each are many times slower
    _Rank(pipe).live()


class _Rank:
    def __init__(self, pipe: Connection):
        self.pipe = pipe
        self.sending = threading.Lock()
        self.jobs: queue.Queue[Job | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def live(self) -> None:
        while True:
            job = self.jobs.get()
            assert job is not None
            with _standard_streams(job.file("errors"), self.send), _recorder(job) as recorder:
                self.send("done", _run(job, recorder))
                self.jobs.get()  # stay in the group: an early leaver would break the ranks that still communicate
                leave_group()
            self.send("free", None)

    def send(self, kind: str, content: Any) -> None:
        data = pickle.dumps((kind, content))
        with self.sending:
            self.pipe.send_bytes(data)

    def _listen(self) -> None:
        folder = None
        while True:
            try:
                message = pickle.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):
                if folder:
                    shutil.rmtree(folder, ignore_errors=True)
                os._exit(1)
            if message == "where":
                with contextlib.suppress(OSError):
                    self.send("where", stack_of_main())
            else:
                folder = message.folder if message else folder
                self.jobs.put(message)


def stack_of_main() -> list[Frame]:
    """Where the main thread is, in the learner's own lines."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return shipping.frames(traceback.extract_stack(frame))


def _run(job: Job, recorder: FlightRecorder) -> Outcome:
    """Run the job's function; whatever happens in it comes back in the outcome."""
    tracer, started, value, failure = None, perf_counter(), b"", None
    try:
        _become(job)
        tracer = tracing.active = tracing.Tracer(job.rank, recorder, job.check_buffers)
        dist.barrier()
        tracer.install()
        function, args, kwargs = shipping.loads(job.file("payload").read_bytes())
        started = perf_counter()
        tracer.state("running")
        value = returned(function(*args, **kwargs))
        tracer.check_all_waited_for()
    except BaseException as error:  # sys.exit in a rank is a failure of that rank, too
        failure = failed(job.rank, error)
    ended = perf_counter()
    recorder.state("finished")
    sys.stdout.flush()
    sys.stderr.flush()
    if tracer is None:
        return Outcome(failure=failure)
    tracer.uninstall()
    tracing.active = None
    return Outcome(value, failure, started, ended, tracer.events, tracer.posts)


def returned(value: Any, dumps: Callable[[Any], bytes] = shipping.dumps) -> bytes:
    """A rank's return value as bytes."""
    try:
        return dumps(value)
    except TypeError as error:
        raise TypeError(f"the return value {error}") from None


def failed(rank: int, error: BaseException) -> Failure:
    """What there is to say about an exception, with the learner's own lines."""
    kind, now = type(error).__name__, perf_counter()
    message = "".join(traceback.format_exception_only(error)).strip()
    message = message.partition(f"{kind}: ")[2] or message.partition(kind)[2]
    frames = shipping.frames(error.__traceback__)
    return Failure(rank, kind, message, frames, now)


def _become(job: Job) -> None:
    """Take over the world of the process that started the run, and join the other ranks."""
    os.environ.clear()
    os.environ.update(job.environ)
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
    if sys.platform in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
    sys.path[:] = job.path
    os.chdir(job.cwd)
    gpu = prepare_gpu(job.rank) if job.backend == "nccl" else None
    store = dist.FileStore(str(job.file("store")), job.world_size)
    dist.init_process_group(
        job.backend,
        store=store,
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.patience),
        device_id=gpu,
    )
    seed_all(job.seed)


def prepare_gpu(local_rank: int) -> torch.device:
    """One GPU per rank; ``wait()`` and the blocking calls return when the GPU is done, so that times are true."""
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    gpu = torch.device("cuda", local_rank)
    torch.cuda.set_device(gpu)
    return gpu


def seed_all(seed: int) -> None:
    """The same seed on every rank."""
    random.seed(seed)
    torch.manual_seed(seed)


def leave_group() -> None:
    """Leave the process group, if this process is in one."""
    with contextlib.suppress(Exception):  # the function may have left it itself
        dist.destroy_process_group()


@contextlib.contextmanager
def _recorder(job: Job):
    recorder = FlightRecorder(job.file("recorder"))
    try:
        yield recorder
    finally:
        recorder.close()


@contextlib.contextmanager
def _standard_streams(errors: Path, send: Callable[[str, Any], None]):
    """Python's output goes to the notebook line by line; what C++ says, and a crash's traceback, into a file."""
    streams, descriptors = (sys.stdout, sys.stderr), (os.dup(1), os.dup(2))
    with open(errors, "w", encoding="utf-8") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        faulthandler.enable(file)
        sys.stdout, sys.stderr = Lines(lambda line: send("out", line)), Lines(lambda line: send("err", line))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
            faulthandler.disable()
            for number, descriptor in zip((1, 2), descriptors, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
