"""Draw the README's pictures with the reference solutions: ``python data/make_pictures.py``."""

import matplotlib as mpl

mpl.use("Agg")

from servelab.paths import DATA
from servelab.plots.blocks import Frame, Recorder, small_multiples
from servelab.plots.waste import waste_bars
from servelab.reference import paged_kv
from servelab.traces import read_trace

PICTURES = DATA / "pictures"
CAPACITY = 15_728  # slots: OPT-13B on a 40 GB card (Kwon et al., SOSP 2023, Table 1)
MAX_LEN = 2048  # tokens of a sequence, the longest that OPT takes
POLICIES = ("max", "pow2", "oracle", "paged")


def sharing() -> list[Frame]:
    """Two requests with one system prompt; the second forks; both leave; a third finds the prompt cached."""
    film = Recorder(paged_kv.PrefixCache(num_blocks=8, block_size=4))
    system = list(range(8))

    def admit(name: str, prompt: list[int]):
        table = film.tables[name] = paged_kv.ForkableTable(film)
        table.blocks, table.num_tokens = film.match(prompt)
        table.append(len(prompt) - table.num_tokens)
        film.insert(prompt, table.blocks)
        return table

    a, b = admit("a", [*system, 21, 22, 23]), admit("b", [*system, 31, 32])
    film.shot("a and b share a system prompt")
    c = film.tables["c"] = b.fork()
    c.append(1)
    film.shot("c forks from b and writes: copy-on-write")
    for table in (a, b, c):
        table.release()
    film.shot("all leave; the prompt's blocks stay cached")
    admit("d", [*system, 41, 42, 43, 44, 45])
    film.shot("d finds the prompt in the cache")
    return film.frames


def main() -> None:
    """Write both pictures."""
    PICTURES.mkdir(exist_ok=True)
    small_multiples(sharing()).savefig(PICTURES / "block_map.png", dpi=110)
    chat = [r for r in read_trace("conv") if r.prompt_tokens + r.output_tokens <= MAX_LEN][:400]
    shares = {policy: paged_kv.fragmentation(chat, policy, CAPACITY) for policy in POLICIES}
    waste_bars(shares).savefig(PICTURES / "waste.png", dpi=110)


if __name__ == "__main__":
    main()
