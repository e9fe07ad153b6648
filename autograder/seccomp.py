"""A system-call filter for the sandbox: no further namespaces, and no memory that no limit counts.

A user namespace inside the sandbox could mount memory file systems without a size; ``memfd_create`` and System V shared
memory hold pages that belong to no process. They are refused with ``ENOSYS``, as if the kernel were older, so that
libraries fall back to what they did before. The filter is a few instructions of classic BPF, written for the two
processors that bubblewrap is used on; elsewhere none is installed.
"""

import contextlib
import os
import platform
import struct
import tempfile
from collections.abc import Iterator

ALLOW, ENOSYS = 0x7FFF0000, 0x00050000 | 38
LOAD, EQUAL, AT_LEAST, BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
NEW_USER = 0x10000000
# architecture -> (audit number, clone, what is refused altogether)
CALLS = {
    "x86_64": (0xC000003E, 56, {"unshare": 272, "clone3": 435, "memfd_create": 319, "memfd_secret": 447, "shmget": 29}),
    "aarch64": (
        0xC00000B7,
        220,
        {"unshare": 97, "clone3": 435, "memfd_create": 279, "memfd_secret": 447, "shmget": 194},
    ),
}


def program(machine: str) -> bytes | None:
    """The filter for a processor as the bytes that ``bwrap --seccomp`` reads, or None."""
    if machine not in CALLS:
        return None
    audit, clone, refused = CALLS[machine]
    rules: list[tuple[int, int, str, str]] = [(LOAD, ARCHITECTURE, "", ""), (EQUAL, audit, "", "refuse")]
    rules.append((LOAD, NUMBER, "", ""))
    rules.append((AT_LEAST, 0x40000000, "refuse", ""))  # the x32 table of x86_64
    rules += [(EQUAL, number, "refuse", "") for number in refused.values()]
    rules += [(EQUAL, clone, "", "allow"), (LOAD, FIRST_ARGUMENT, "", ""), (BIT, NEW_USER, "refuse", "")]
    rules += [(RETURN, ALLOW, "", ""), (RETURN, ENOSYS, "", "")]
    target = {"": 0, "allow": len(rules) - 2, "refuse": len(rules) - 1}
    jumps = lambda at, name: target[name] - at - 1 if name else 0  # noqa: E731
    steps = [(code, jumps(at, yes), jumps(at, no), value) for at, (code, value, yes, no) in enumerate(rules)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


@contextlib.contextmanager
def filter_file() -> Iterator[int | None]:
    """An open file with this machine's filter, for ``--seccomp``; None where there is none."""
    data = program(platform.machine())
    if data is None:
        yield None
        return
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        yield file.fileno()
