"""The sandbox: a Jupyter kernel in bubblewrap, by whitelist. What is not named here does not exist inside.

Inside: the system's programs and libraries and this Python, read-only; the ``servelab`` package and ``data/``; this
unit's secret challenges (the questions only); the reference solutions of the earlier units that it builds on. Never the
other solutions, the grader, the seed, the gradebook or anybody's submission. There is no network, and what can be
written is a small private memory file system that ends with the kernel.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from itertools import count
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from autograder.seccomp import filter_file
from autograder.watch import Caps, Watch
from servelab.paths import DATA, ROOT, Unit

NAME = "servelab-sandbox"
HOME, WORK, CHALLENGES = "/tmp/home", "/tmp/work", "/challenges"
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin")
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "fonts", "localtime")
KEPT = (
    "LANG",
    "LC_ALL",
    "TZ",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "NBGRADER_EXECUTION",
    "MKL_ENABLE_INSTRUCTIONS",
)
MAX_MESSAGE = 64 << 20
EARLIER = {  # unit -> those whose `servelab.parts` it imports
    "04_continuous_batching": ("03_paged_kv", "01_memory"),
    "06_tensor_parallel": ("01_memory", "05_collectives"),
    "11_capstone": ("01_memory", "03_paged_kv", "04_continuous_batching", "05_collectives", "06_tensor_parallel"),
}
_serial = count()


@dataclass(frozen=True)
class View:
    """What one kernel is shown: files read-only, and one folder of sockets."""

    challenges: Path
    sockets: Path
    read_only: tuple[Path, ...] = ()
    caps: Caps = field(default_factory=Caps)

    @classmethod
    def of_unit(cls, slug: str, challenges: Path, sockets: Path, caps: Caps) -> "View":
        earlier = tuple(Unit(name).solution for name in EARLIER.get(slug, ()))
        return cls(challenges, sockets, (ROOT / "servelab", DATA, *earlier), caps)


def own_uid() -> int:
    """A user id for one kernel: its own when the grader is root, so that limits counted per user hold."""
    if os.geteuid() != 0:
        return os.geteuid()
    number = os.getpid() * 8 + next(_serial) % 8
    mapped = max((int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines()), default=0)
    return 1_900_000_000 + number % 90_000_000 if mapped > 2_000_000_000 else 20_000 + number % 40_000


def environment(challenges: str, home: str) -> dict[str, str]:
    """The kernel's environment: a few named variables of the grader's, the rest made here."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    folders = {
        "HOME": home,
        "IPYTHONDIR": f"{home}/.ipython",
        "MPLCONFIGDIR": f"{home}/mpl",
        "JUPYTER_RUNTIME_DIR": home,
    }
    return {
        "LANG": "C.UTF-8",
        **kept,
        **threads,
        **folders,
        "PATH": f"{Path(sys.prefix, 'bin')}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "SERVELAB_CHALLENGES": challenges,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "MPLBACKEND": "Agg",  # figures are not kept, so none is rendered
        "USER": "student",
        "LOGNAME": "student",
    }


def command(view: View, argv: list[str], uid: int, seccomp: int | None = None) -> list[str]:
    """The whole command line that runs ``argv`` in the sandbox."""
    root = os.geteuid() == 0
    users = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if root else ["--unshare-user"]
    names = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    args = ["bwrap", "--die-with-parent", "--new-session", *users, *names, "--hostname", "localhost", "--clearenv"]
    args += ["--seccomp", str(seccomp)] if seccomp is not None else []
    for name, value in environment(CHALLENGES, HOME).items():
        args += ["--setenv", name, value]
    system, course = list(_system(view)), list(_course(view))
    mounts = [*_parents(system), *system, *_writable(view), *_parents(course), *course]
    args += [word for words in mounts for word in words]
    args += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK, "--"]
    return [*args, *_limits(view.caps), *(_drop_to(uid) if root else []), *argv]


def _system(view: View) -> Iterator[list[str]]:
    """Programs and libraries, and the little of /etc that they need; the accounts in it are made up."""
    for path in SYSTEM:
        if os.path.islink(path):
            yield ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            yield ["--ro-bind", path, path]
    for name in ETC:
        yield ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in ("passwd", "group", "hosts"):
        yield ["--ro-bind", str(view.sockets / name), f"/etc/{name}"]
    yield ["--proc", "/proc"]
    yield ["--ro-bind-try", "/sys/devices/system/cpu", "/sys/devices/system/cpu"]


def _writable(view: View) -> Iterator[list[str]]:
    yield ["--dev", "/dev"]
    for path in ("/dev/shm", "/tmp"):
        yield ["--perms", "1777", "--size", str(view.caps.disk), "--tmpfs", path]
    yield from (["--perms", "0777", "--dir", path] for path in (HOME, WORK))


def _course(view: View) -> Iterator[list[str]]:
    """This Python with every link on the way to it, what the notebook imports, the challenges, the sockets."""
    folders = [Path(sys.base_prefix), Path(sys.prefix), *view.read_only]
    yield from (["--ro-bind", str(path), str(path)] for path in folders if not _under(path, SYSTEM))
    yield from _links(Path(sys.executable), [str(path) for path in folders])
    yield ["--ro-bind", str(view.challenges), CHALLENGES]
    yield ["--bind", str(view.sockets), str(view.sockets)]


def _links(path: Path, bound: list[str]) -> Iterator[list[str]]:
    """The symbolic links between ``sys.executable`` and the real Python that lie in no bound folder."""
    while path.is_symlink():
        target = os.readlink(path)
        if not _under(path, [*SYSTEM, *bound]):
            yield ["--symlink", target, str(path)]
        path = path.parent / target


def _under(path: Path, folders: Iterable[str]) -> bool:
    return any(path == Path(folder) or Path(folder) in path.parents for folder in folders)


def _parents(mounts: list[list[str]]) -> Iterator[list[str]]:
    """Folders on the way to a mount, readable by all (bubblewrap would make them for root alone)."""
    ends = [Path(words[-1]) for words in mounts]
    ways = {parent for end in ends for parent in end.parents} - {Path("/"), Path("/tmp")}
    yield from (["--perms", "0755", "--dir", str(path)] for path in sorted(ways) if not _under(path, SYSTEM))


def _limits(caps: Caps) -> list[str]:
    return [
        "prlimit",
        "--core=0:0",
        f"--data={caps.process_memory}:{caps.process_memory}",
        f"--fsize={caps.file}:{caps.file}",
        f"--nproc={caps.threads}:{caps.threads}",
        f"--nofile={caps.open_files}:{caps.open_files}",
        f"--cpu={caps.cpu_seconds}:{caps.cpu_seconds}",
    ]


def _drop_to(uid: int) -> list[str]:
    return [
        "setpriv",
        "--reuid",
        str(uid),
        "--regid",
        str(uid),
        "--clear-groups",
        "--inh-caps=-all",
        "--no-new-privs",
        "--",
    ]


def make_sockets(uid: int) -> Path:
    """A short private folder for the kernel's sockets, with the three files of /etc that are made for it."""
    folder = Path(tempfile.mkdtemp(prefix="sl-", dir="/tmp"))
    (folder / "passwd").write_text(f"student:x:{uid}:{uid}::{HOME}:/bin/sh\n")
    (folder / "group").write_text(f"student:x:{uid}:\n")
    (folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    return folder


def hand_over(folder: Path, uid: int) -> None:
    """Let the kernel's user write in the socket folder, until it is locked."""
    for path in (folder, *folder.iterdir()):
        os.chown(path, uid, uid)


class SandboxProvisioner(LocalProvisioner):
    """Starts and ends kernels: in the sandbox, or, with ``sandboxed: false``, as the grader in a scratch folder."""

    def __init__(self, **kwargs: Any) -> None:
        self.settings = {key: kwargs.pop(key) for key in ("unit", "challenges", "sandboxed", "caps") if key in kwargs}
        super().__init__(**kwargs)
        self.caps = self.settings.get("caps") or Caps()
        self.uid = own_uid()
        self.folder: Path | None = None
        self.watch: Watch | None = None

    @property
    def breach(self) -> str:
        """Which cap the kernel was killed for; empty if it was not."""
        return self.watch.breach if self.watch else ""

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        self.folder = make_sockets(self.uid)
        manager: Any = self.parent
        manager.transport, manager.ip = "ipc", str(self.folder / "k")  # sockets are k-1 to k-5
        manager.cache_ports = False
        manager.connection_file = str(self.folder / "connection.json")
        return await super().pre_launch(**kwargs)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        assert self.folder is not None
        sandboxed = self.settings.get("sandboxed", True)
        quiet = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
            "start_new_session": True,
        }
        if sandboxed:
            hand_over(self.folder, self.uid)
            challenges = Path(self.settings["challenges"])
            view = View.of_unit(self.settings["unit"], challenges, self.folder, self.caps)
            with filter_file() as rules:
                words = command(view, cmd, self.uid, rules)
                passed = () if rules is None else (rules,)
                env = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
                info = await super().launch_kernel(words, cwd="/", env=env, pass_fds=passed, **quiet)
        else:
            home = self.folder / "home"
            home.mkdir()
            env = environment(self.settings["challenges"], str(home))
            info = await super().launch_kernel(cmd, cwd=str(home), env=env, **quiet)
        assert self.process is not None
        self.watch = Watch(self.process.pid, self.caps, self.folder, self.kill_now)
        return info

    def lock(self) -> None:
        """Once the sockets exist, let nothing more be written there (as root; else the watch's cap stands alone)."""
        if self.folder and os.geteuid() == 0:
            os.chown(self.folder, 0, 0)
            self.folder.chmod(0o755)

    def kill_now(self) -> None:
        """End the kernel and everything that it started, at once and from any thread."""
        if self.pgid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pgid, signal.SIGKILL)  # bwrap; its pid namespace dies with it

    async def cleanup(self, restart: bool = False) -> None:
        if self.watch:
            self.watch.stop()
        await super().cleanup(restart)
        if self.folder and not restart:
            shutil.rmtree(self.folder, ignore_errors=True)


class SandboxManager(AsyncKernelManager):
    """A kernel manager that takes no kernel specification from anywhere else."""

    settings: dict[str, Any]

    @property
    def box(self) -> SandboxProvisioner:
        """The provisioner, once a kernel was asked for."""
        assert isinstance(self.provisioner, SandboxProvisioner)
        return self.provisioner

    @property
    def kernel_spec(self) -> KernelSpec:
        stanza = {"provisioner_name": NAME, "config": self.settings}
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name=NAME,
            language="python",
            metadata={"kernel_provisioner": stanza},
        )


def manager_for(settings: dict[str, Any]) -> SandboxManager:
    """A manager of one kernel. Registers the provisioner, which then works without an installed entry point."""
    factory = KernelProvisionerFactory.instance()
    group = "jupyter_client.kernel_provisioners"
    factory.provisioners.setdefault(NAME, EntryPoint(NAME, "autograder.sandbox:SandboxProvisioner", group))
    manager = SandboxManager(transport_encryption="disabled")
    manager.settings = settings
    manager.context.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)  # for its sockets: larger ones never reach this process
    return manager
