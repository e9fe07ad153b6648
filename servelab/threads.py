"""How many threads torch computes with."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch, where it is loaded, compute on one core: on small tensors threads that share a core only wait.

    Pools of threads for several ranks in one process are many times slower.
    """
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 1
    try:
        if torch:
            torch.set_num_threads(1)
        yield
    finally:
        if torch:
            torch.set_num_threads(threads)
