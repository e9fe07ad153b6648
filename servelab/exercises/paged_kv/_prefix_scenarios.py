"""What happens to prefix caches: the directed runs of the exercise `prefix_cache`, which explains their operations."""

from servelab.exercises.paged_kv._steps import UNCHANGED, with_one_bad

# Token ids of a 128k vocabulary; Python's hash() of the two tuples is the same number (64-bit CPython 3.8 to 3.13).
COLLIDING = [40007, 55817, 101852, 101088], [113913, 38631, 124316, 1000]


def match(holder: str, tokens: list[int], key: str | None = None) -> list:
    return ["match", holder, tokens, key]


def admit(holder: str, tokens: list[int], key: str | None = None) -> list:
    return ["admit", holder, tokens, key]


def insert(tokens: list[int], names: list, key: str | None = None) -> list:
    return ["insert", tokens, names, key]


def allocate(holder: str, n: int) -> list:
    return ["allocate", holder, n]


def finish(holder: str) -> list:
    return ["finish", holder]


def cached(holder: str, tokens: list[int], size: int, key: str | None = None) -> list[list]:
    """A prompt that was computed, and whose blocks are still held."""
    return [allocate(holder, -(-len(tokens) // size)), insert(tokens, [holder], key)]


ONE, TWO, THREE = [1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]

GOOD = [["a", 0], ["a", 1]]
BAD = (["a", 2], 5, -1, ["a", 0], ["a", 1])  # a free block, ids that do not exist, and good ones named twice


def one_bad_name(call: str, bad: list | int) -> list[list]:
    """A call with two good names and a bad one in each place; ``z`` is free and cached."""
    setup = [*cached("z", [8, 9], 2), allocate("a", 3), ["free", ["z"]], ["free", [["a", 2]]]]
    return [*setup, ["share", GOOD], *([call, names] for names in with_one_bad(GOOD, bad))]


def no_revival(bad: list | int, then: list[list]) -> list[list]:
    """A ``share`` that is refused leaves cached blocks free, and their order of eviction as it was."""
    setup = [*cached("y", [6, 7], 2), *cached("z", [8, 9], 2), allocate("a", 3), ["free", ["y"]], ["free", ["z"]]]
    refused = [["share", names] for names in with_one_bad([["y", 0], ["a", 0]], bad)]
    return [*setup, ["free", [["a", 2]]], *refused, *then]


def one_bad_block(names: list) -> list[list]:
    """An ``insert`` that is refused registers none of its blocks; later ones show what it left behind."""
    rest = [step for n in (1, 2) for step in (insert(TWO[: 2 * n], GOOD[:n]), match("c", [*THREE, 7]))]
    setup = [*cached("z", [8, 9], 2), allocate("a", 3), ["free", ["z"]], ["free", [["a", 2]]]]
    return [*setup, insert(THREE, names), match("b", [*THREE, 7]), *rest]


def under_another_key(stored: str | None, asked: tuple[str | None, ...]) -> list[list]:
    """Cached under one key, asked for under others, then under its own."""
    return [*cached("a", ONE, 2, stored), *(match("b", [1, 2, 3], key) for key in asked), match("c", [1, 2, 3], stored)]


KEYS = (None, "", "None", "0", "blue", "Blue", "blue ", "blu", "eulb", "none", "null", "#")
# how somebody may write down a block; with a key behind it, before it, or in between, it must not read as another one
WRITTEN = ("{}{}", "{},{}", "{} {}", "{}, {}", "[{}, {}]", "({}, {})", "{}|{}", "{}-{}", "{}:{}", "{}/{}", "{}_{}")


def confused(form: str, key: str | None, text: str) -> list[list]:
    """Two cached blocks, asked for under keys that contain one of them as text, with what stands around it."""
    asked, first, second = [], form.format(1, 2), form.format(3, 4)
    for between in dict.fromkeys(("", form.replace("{}", "").strip("[]()"))):
        asked.append(match("b", [3, 4, 9], f"{text}{between}{first}"))
        asked.append(match("b", [1, 2, 9], f"{text}{between}{second}{between}{text}"))
    return [*cached("a", TWO, 2, key), *asked, match("c", THREE, key)]


# case, num_blocks, block_size, operations
DIRECTED: tuple[tuple[str, int, int, list[list]], ...] = (
    (
        "keeps the rules of a pool",
        2,
        2,
        [allocate("a", 0), allocate("a", 2), allocate("b", 1), ["free", [["a", 1]]], allocate("b", 1)],
    ),
    (
        "keeps the rules of a pool",
        3,
        2,
        [allocate("a", 2), ["share", ["a"]], ["free", ["a"]], allocate("b", 2), ["free", ["a"]], allocate("b", 3)],
    ),
    ("keeps the rules of a pool", 2, 2, [*cached("a", ONE, 2), finish("a"), allocate("b", 2)]),
    (
        "refuses misuse",
        2,
        2,
        [allocate("a", -1), ["ref_count", -1], ["ref_count", 2], ["ref_count", 9], ["free", [0]], ["share", [1]]],
    ),
    (
        "refuses misuse",
        2,
        2,
        [allocate("a", 1), ["free", ["a"]], ["free", ["a"]], ["share", ["a"]], allocate("b", 2)],
    ),
    (
        "refuses misuse",
        2,
        2,
        [allocate("a", 2), ["free", [-1]], ["share", [-1]], ["free", [["a", 0], 2]], ["share", [5]]],
    ),
    (
        "refuses misuse",
        2,
        2,
        [allocate("a", 1), ["share", ["a"]], ["free", ["a", "a"]], ["share", ["a", "a"]], ["free", ["a"]]],
    ),
    # vllm#1584: a cached block is free, too
    ("refuses misuse", 2, 2, [*cached("a", ONE, 2), ["free", ["a"]], ["free", ["a"]]]),
    ("refuses misuse", 2, 2, [allocate("a", 1), ["free", ["a"]], insert(ONE, ["a"]), match("b", THREE)]),
    ("refuses misuse", 3, 2, [allocate("a", 1), insert(TWO, ["a"]), match("b", THREE)]),
    (
        "refuses misuse",
        2,
        2,
        [allocate("a", 2), insert(TWO, [["a", 0], ["a", 0]]), insert(ONE, [-1]), match("b", THREE)],
    ),
    # a block too many must be held, too
    (
        "refuses misuse",
        3,
        2,
        [allocate("a", 1), allocate("b", 1), ["free", ["b"]], insert(ONE, ["a", "b"]), match("c", THREE)],
    ),
    *(("refuses misuse", 5, 2, one_bad_name("share", bad)) for bad in BAD),
    *(("refuses misuse", 5, 2, one_bad_name("free", bad)) for bad in (*BAD, ["z", 0])),
    *(("refuses misuse", 5, 2, no_revival(bad, [])) for bad in (["a", 2], 5, -1, ["y", 0])),
    *(("refuses misuse", 5, 2, one_bad_block(names)) for bad in (*BAD, ["z", 0]) for names in with_one_bad(GOOD, bad)),
    # reversing is visible in either list; of a list and its reverse at most one is sorted
    (
        UNCHANGED,
        3,
        2,
        [*cached("a", TWO, 2), match("b", THREE), ["free", [["a", 0], ["a", 1]]], ["free", [["a", 1], ["a", 0]]]],
    ),
    (UNCHANGED, 3, 2, [*cached("a", [1, 2, 3], 2), ["share", ["a"]], match("b", ONE), match("c", [1, 2, 3])]),
    # vLLM test_prefill: a second request hits while the first still runs
    ("finds cached prefixes", 3, 2, [match("a", THREE), *cached("a", TWO, 2), match("b", THREE)]),
    ("finds cached prefixes", 3, 2, [*cached("a", TWO, 2), match("b", [1, 2, 9, 4, 5]), match("c", [9, 2, 3])]),
    # a second cache has blocks and contents of its own
    ("finds cached prefixes", 2, 2, [*cached("a", ONE, 2), ["another"], match("b", [1, 2, 3]), allocate("c", 1)]),
    ("finds cached prefixes", 4, 1, [*cached("a", [7, 6, 8], 1), match("b", [7, 6, 8, 8])]),
    (
        "finds cached prefixes",
        4,
        2,
        [allocate("a", 2), insert(ONE, [["a", 0]]), insert(TWO, ["a"]), match("b", THREE)],
    ),
    # vllm PR#11186 and PR#17999, nano-vllm#114: a prompt that is cached to its end
    (
        "leaves the last token to compute",
        3,
        2,
        [match("b", []), match("b", [1]), *cached("a", ONE, 2), match("b", []), match("b", ONE)],
    ),
    (
        "leaves the last token to compute",
        3,
        2,
        [*cached("a", TWO, 2), match("b", TWO), match("c", [1, 2, 3]), match("d", [*TWO, 5])],
    ),
    ("leaves the last token to compute", 3, 1, [*cached("a", [7, 8], 1), match("b", [7, 8]), match("c", [7])]),
    (
        "caches full blocks only",
        3,
        2,
        [*cached("a", [1, 2, 3], 2), match("b", [1, 2, 3, 4, 5]), match("c", [1, 2, 3, 9])],
    ),
    ("caches full blocks only", 2, 2, [insert([], []), *cached("a", [1], 2), match("b", [1, 2, 3])]),
    # a part-filled tail needs no block; spare blocks are fine
    ("caches full blocks only", 2, 2, [allocate("a", 1), insert([1, 2, 3], ["a"]), match("b", [1, 2, 9])]),
    ("caches full blocks only", 2, 2, [allocate("a", 2), insert(ONE, ["a"]), match("b", [1, 2, 9])]),
    (
        "caches full blocks only",
        3,
        4,
        [*cached("a", [1, 2, 3, 4, 5, 6, 7], 4), match("b", [1, 2, 3, 4, 5, 6, 7, 8, 9])],
    ),
    # the part-filled block is uncached: without a holder, nobody can share it
    (
        "caches full blocks only",
        2,
        2,
        [*cached("a", [1, 2, 3], 2), ["free", [["a", 1]]], ["share", [["a", 1]]]],
    ),
    # the same four tokens after another beginning, and at the beginning
    (
        "tells prompts apart",
        4,
        2,
        [*cached("a", TWO, 2), *cached("b", [5, 6], 2), match("c", [5, 6, 3, 4, 9]), match("d", [3, 4, 9])],
    ),
    # one block twice in a prompt
    ("tells prompts apart", 4, 1, [*cached("a", [7, 7, 8], 1), match("b", [7, 7, 8, 8])]),
    ("tells prompts apart", 2, 2, [*cached("a", ONE, 2), match("b", [2, 1, 3]), match("c", [1, 1, 2])]),
    ("tells prompts apart", 2, 2, [*cached("a", ONE, 2), match("b", [9, 2, 3]), match("c", [1, 9, 3])]),
    ("tells prompts apart", 2, 2, [*cached("a", [1, 23], 2), match("b", [12, 3, 4]), match("c", [1, 23, 4])]),
    # two blocks of one token, or of two, are not one block of their digits
    ("tells prompts apart", 2, 1, [*cached("a", [1, 2], 1), match("b", [12, 3]), match("c", [1, 2, 3])]),
    ("tells prompts apart", 2, 1, [*cached("a", [12], 1), match("b", [1, 2, 3]), match("c", [12, 3])]),
    ("tells prompts apart", 2, 2, [*cached("a", TWO, 2), match("b", [12, 34, 5]), match("c", [1, 234, 5])]),
    ("tells prompts apart", 4, 2, [*cached("a", [1, 2, 34, 5], 2), match("b", [1, 23, 4, 5, 6])]),
    # ids that differ in one high bit, and ids between which floating point does not distinguish
    (
        "tells prompts apart",
        2,
        2,
        [*cached("a", ONE, 2), *(match("b", [1 + 2**bit, 2, 3]) for bit in (8, 12, 15, 16, 17, 18, 20))],
    ),
    (
        "tells prompts apart",
        2,
        2,
        [*cached("a", ONE, 2), *(match("b", [1, 2 + 2**bit, 3]) for bit in (24, 31, 32, 48, 62))],
    ),
    *(
        ("tells prompts apart", 2, 2, [*cached("a", [1, 2**bits], 2), match("b", [1, 2**bits + 1, 3])])
        for bits in (11, 24, 53)
    ),
    # equal modulo a prime, as in many hashes: Python's hash() of an int is its value modulo 2**61 - 1
    *(
        ("tells prompts apart", 2, 2, [*cached("a", ONE, 2), match("b", [1 + p, 2, 3]), match("b", [1, 2 + p, 3])])
        for p in (10**9 + 7, 2**31 - 1, 2**61 - 1)
    ),
    # one more here and 2**17 less there: digits of a number in base 2**17
    ("tells prompts apart", 2, 2, [*cached("a", ONE, 2), match("b", [0, 2 + 2**17, 3])]),
    # NVIDIA/Megatron-LM PR#4158: a polynomial hash with factor 31 does not notice one more here and 31 less there
    ("tells prompts apart", 2, 2, [*cached("a", [1, 33], 2), match("b", [2, 2, 3]), match("c", [32, 32, 3])]),
    # vllm PR#12621: Python's hash() gives these two the same number
    ("tells prompts apart", 2, 4, [*cached("a", COLLIDING[0], 4), ["match", "b", [*COLLIDING[1], 5], None]]),
    (
        "tells prompts apart",
        4,
        4,
        [*cached("a", [9, 9, 9, 9, *COLLIDING[0]], 4), ["match", "b", [9, 9, 9, 9, *COLLIDING[1], 5], None]],
    ),
    (
        "tells prompts apart",
        4,
        1,
        [*cached("a", [1, 2, 3], 1), match("b", [2, 3, 4]), match("c", [1, 3, 4]), match("d", [1, 2, 4])],
    ),
    # vLLM test_cache_key_salting: the same tokens under another key
    (
        "keeps keys apart",
        3,
        2,
        [
            *cached("a", ONE, 2, "blue"),
            *[match(name, [1, 2, 3], key) for name, key in (("b", None), ("c", "red"), ("d", "blue"))],
        ],
    ),
    ("keeps keys apart", 3, 2, [*cached("a", ONE, 2), match("b", [1, 2, 3], "blue"), match("c", [1, 2, 3])]),
    *(
        ("keeps keys apart", 3, 2, under_another_key(stored, tuple(key for key in KEYS if key != stored)))
        for stored in KEYS[:5]
    ),
    # a key of digits: [1, 2] under "34", [1, 23] under "4" and [1, 234] without one are three blocks
    (
        "keeps keys apart",
        2,
        2,
        [
            *cached("a", ONE, 2, "34"),
            *[match("b", tokens, key) for tokens, key in (([1, 23, 3], "4"), ([1, 234, 3], None), ([1, 234, 3], ""))],
            *[match("b", tokens, key) for tokens, key in (([41, 2, 3], "3"), ([341, 2, 3], None), ([341, 2, 3], ""))],
            match("c", [1, 2, 3], "34"),
        ],
    ),
    ("keeps keys apart", 2, 2, [*cached("a", [1, 234], 2), match("b", [1, 23, 3], "4"), match("b", [1, 2, 3], "34")]),
    ("keeps keys apart", 2, 2, [*cached("a", [341, 2], 2), match("b", [41, 2, 3], "3"), match("b", [1, 2, 3], "34")]),
    *(
        ("keeps keys apart", 3, 2, confused(form, key, text))
        for key, text in ((None, ""), (None, "None"), ("5", "5"))
        for form in WRITTEN
    ),
    (
        "keeps keys apart",
        4,
        2,
        [
            *cached("a", TWO, 2, "blue"),
            *cached("b", TWO, 2, "red"),
            match("c", THREE, "red"),
            match("d", THREE, "blue"),
        ],
    ),
    ("revives cached blocks", 3, 2, [*cached("a", TWO, 2), finish("a"), match("b", THREE), finish("b")]),
    # vLLM test_prefix_caching_for_multi_turn: the next turn brings prompt and answer back
    (
        "revives cached blocks",
        6,
        2,
        [
            admit("a", [1, 2, 3, 4, 5]),
            insert([1, 2, 3, 4, 5], ["a"]),
            allocate("a", 1),
            insert([1, 2, 3, 4, 5, 6, 7], ["a"]),
            finish("a"),
            admit("b", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ],
    ),
    # vLLM test_computed_blocks_not_evicted, vllm PR#10507: a hit must survive its own request's allocation; and
    # vLLM test_evictable_cached_blocks_not_double_allocated: what a hit took is no longer free
    (
        "revives cached blocks",
        3,
        2,
        [*cached("a", TWO, 2), finish("a"), match("b", THREE), allocate("b", 1), allocate("c", 1)],
    ),
    ("revives cached blocks", 2, 2, [*cached("a", TWO, 2), finish("a"), admit("b", THREE), admit("c", TWO)]),
    (
        "revives cached blocks",
        2,
        2,
        [*cached("a", ONE, 2), ["free", ["a"]], allocate("b", 1), ["share", ["a"]], allocate("c", 1)],
    ),
    # of a hit one block is held and the other is free, either way round
    *(
        (
            "revives cached blocks",
            2,
            2,
            [*cached("a", TWO, 2), ["free", [["a", gone]]], match("b", THREE), allocate("c", 1)],
        )
        for gone in (1, 0)
    ),
    (
        "revives cached blocks",
        3,
        2,
        [
            *cached("a", TWO, 2),
            finish("a"),
            match("b", THREE),
            match("c", THREE),
            finish("b"),
            allocate("d", 2),
            allocate("d", 1),
            finish("c"),
            allocate("d", 2),
        ],
    ),
    # nano-vllm#163: a stale entry lets a later request read another one's keys and values
    (
        "forgets what it hands out",
        2,
        2,
        [
            *cached("a", ONE, 2),
            finish("a"),
            allocate("b", 2),
            match("c", [1, 2, 3]),
            finish("b"),
            match("c", [1, 2, 3]),
        ],
    ),
    (
        "forgets what it hands out",
        1,
        2,
        [
            *cached("a", ONE, 2),
            finish("a"),
            *cached("b", [3, 4], 2),
            finish("b"),
            match("c", [1, 2, 9]),
            match("d", [3, 4, 9]),
        ],
    ),
    # a block that was handed out and came back without an insert is an uncached one
    (
        "forgets what it hands out",
        2,
        2,
        [
            *cached("a", ONE, 2),
            *cached("b", [3, 4], 2),
            finish("a"),
            finish("b"),
            allocate("c", 1),
            finish("c"),
            allocate("d", 1),
            match("e", [3, 4, 5]),
        ],
    ),
    # vLLM test_hash_block_correct_reuse: a reused block that becomes a part-filled tail is not cached
    (
        "forgets what it hands out",
        2,
        2,
        [
            *cached("a", TWO, 2),
            finish("a"),
            *cached("b", [5, 6, 7], 2),
            finish("b"),
            match("c", THREE),
            match("d", [5, 6, 7]),
        ],
    ),
    # the block before a cached one gets other contents: what follows the new ones was never computed
    (
        "forgets what it hands out",
        2,
        2,
        [
            *cached("a", TWO, 2),
            ["free", [["a", 0]]],
            allocate("d", 1),
            insert([8, 9], ["d"]),
            match("c", [8, 9, 3, 4, 5]),
        ],
    ),
    # a block that is gone ends the hit, also where later blocks are still there
    (
        "forgets what it hands out",
        3,
        2,
        [
            *cached("a", THREE, 2),
            ["free", [["a", 0]]],
            ["free", [["a", 1], ["a", 2]]],
            allocate("b", 1),
            match("c", [*THREE, 7]),
        ],
    ),
    # vLLM test_evict: tail before head, so that what is left is still a prefix
    (
        "evicts the least recently used",
        3,
        2,
        [*cached("a", THREE, 2), finish("a"), allocate("b", 1), match("c", [*THREE, 7])],
    ),
    # the order of the list that was freed decides, whatever place a block has in its prompt
    (
        "evicts the least recently used",
        2,
        2,
        [*cached("a", TWO, 2), ["free", [["a", 1], ["a", 0]]], allocate("b", 1)],
    ),
    (
        "evicts the least recently used",
        2,
        2,
        [
            *cached("a", ONE, 2),
            *cached("b", [3, 4], 2),
            finish("b"),
            finish("a"),
            allocate("c", 1),
            allocate("c", 1),
        ],
    ),
    # a hit makes a block recent again
    (
        "evicts the least recently used",
        2,
        2,
        [
            *cached("a", ONE, 2),
            *cached("b", [3, 4], 2),
            finish("a"),
            finish("b"),
            match("c", [1, 2, 9]),
            finish("c"),
            allocate("d", 1),
            match("e", [1, 2, 9]),
        ],
    ),
    # free and uncached blocks first
    (
        "evicts the least recently used",
        4,
        2,
        [
            *cached("a", ONE, 2),
            finish("a"),
            allocate("b", 1),
            finish("b"),
            allocate("c", 3),
            match("d", [1, 2, 9]),
        ],
    ),
    # the part-filled block is free and uncached, so it goes before any cached block does
    (
        "evicts the least recently used",
        4,
        2,
        [*cached("a", [7, 8], 2), finish("a"), *cached("b", [1, 2, 3], 2), finish("b"), allocate("c", 2)],
    ),
    # a share that is refused changes nothing about the order
    *(("evicts the least recently used", 5, 2, no_revival(bad, [allocate("b", 2)])) for bad in (["a", 2], 5)),
    # never a block that somebody holds
    (
        "evicts the least recently used",
        3,
        2,
        [
            *cached("a", TWO, 2),
            *cached("b", [3, 4], 2),
            finish("b"),
            allocate("c", 1),
            allocate("c", 1),
            match("d", THREE),
        ],
    ),
    (
        "evicts the least recently used",
        5,
        2,
        [*cached("a", THREE, 2), *cached("b", [7, 8, 9, 9], 2), finish("a"), finish("b"), *[allocate("c", 1)] * 5],
    ),
    (
        "evicts the least recently used",
        10,
        2,
        [
            *cached("a", list(range(10)), 2),
            *cached("b", list(range(20, 26)), 2),
            finish("a"),
            finish("b"),
            match("c", [0, 1, 2, 3, 9]),
            allocate("d", 3),
            allocate("d", 3),
            finish("c"),
            allocate("d", 4),
        ],
    ),
    # vllm#11562 -> PR#11565, and vLLM test_prefill_not_enough_free_blocks_with_computed_blocks
    (
        "a failed allocation changes nothing",
        3,
        2,
        [*cached("a", TWO, 2), finish("a"), allocate("b", 1), admit("c", [*THREE, 7]), match("d", THREE)],
    ),
    # an allocation that fails evicts nothing
    (
        "a failed allocation changes nothing",
        2,
        2,
        [
            *cached("a", ONE, 2),
            finish("a"),
            allocate("b", 3),
            match("c", [1, 2, 3]),
            allocate("b", 2),
            allocate("b", 1),
        ],
    ),
    (
        "a failed allocation changes nothing",
        4,
        2,
        [
            *cached("a", TWO, 2),
            admit("b", [*THREE, *THREE]),
            finish("a"),
            admit("b", [*THREE, 7, 8]),
            admit("c", [*THREE, 7]),
        ],
    ),
    # a prompt that is cached to its end is computed again, and its last block is there twice
    (
        "lives with duplicates",
        4,
        2,
        [
            *cached("a", TWO, 2),
            finish("a"),
            admit("b", TWO),
            insert(TWO, ["b"]),
            finish("b"),
            match("c", THREE),
        ],
    ),
    # nano-vllm#219: two requests with one prompt in flight at once
    (
        "lives with duplicates",
        4,
        2,
        [
            admit("a", TWO),
            admit("b", TWO),
            insert(TWO, ["a"]),
            insert(TWO, ["b"]),
            match("c", THREE),
            finish("a"),
            finish("b"),
            finish("c"),
            match("d", THREE),
            allocate("e", 2),
            allocate("e", 1),
            finish("d"),
            allocate("e", 2),
            match("f", THREE),
        ],
    ),
    (
        "lives with duplicates",
        2,
        2,
        [
            *cached("a", ONE, 2),
            *cached("b", ONE, 2),
            finish("b"),
            allocate("c", 1),
            finish("a"),
            allocate("c", 1),
            match("d", [1, 2, 3]),
        ],
    ),
    # the first of three copies goes before the last comes, then the second: the last is still found
    (
        "lives with duplicates",
        3,
        2,
        [
            *cached("a", ONE, 2),
            *cached("b", ONE, 2),
            finish("a"),
            allocate("x", 2),
            ["free", [["x", 0]]],
            *cached("c", ONE, 2),
            finish("b"),
            allocate("y", 1),
            match("d", [1, 2, 3]),
        ],
    ),
    # the duplicate that was found first gets other contents while the other one's successor is still there
    (
        "lives with duplicates",
        5,
        2,
        [
            *cached("a", ONE, 2),
            *cached("b", TWO, 2),
            ["free", ["a"]],
            allocate("d", 3),
            insert([8, 9], [["a", 0]]),
            match("c", [8, 9, 3, 4, 5]),
        ],
    ),
)
