"""Named answers to `paged_kv.prefix_cache`."""

import hashlib
from collections import Counter, OrderedDict
from typing import ClassVar

import numpy as np

from servelab.answers import right, wrong
from servelab.kv import OutOfBlocks


@right("keyed by the tokens themselves, evicts by time stamps, keeps only the first of two duplicates")
def time_stamps(reference):
    class Answer:
        def __init__(self, num_blocks, block_size):
            self.size, self.refs, self.clock = block_size, np.zeros(num_blocks, int), 0
            self.name_of, self.block_of = {}, {}
            self.left = {block: (-1, block) for block in range(num_blocks)}

        @property
        def num_free(self):
            return np.int64((self.refs == 0).sum())

        def ref_count(self, block):
            if block not in self.left:
                raise ValueError
            return self.refs[block]

        def names(self, tokens, key):
            full = len(tokens) // self.size
            return [(key, *tokens[: (i + 1) * self.size]) for i in range(full)]

        def match(self, tokens, key=None):
            blocks = []
            for name in self.names(tokens[: max(0, len(tokens) - 1)], key):
                if name not in self.block_of:
                    break
                blocks.append(self.block_of[name])
            self.refs[blocks] += 1
            return tuple(blocks), np.int64(len(blocks) * self.size)

        def insert(self, tokens, blocks, key=None):
            names = self.names(tokens, key)
            if len(names) > len(blocks) or not self.all_held(blocks):
                raise ValueError
            for name, block in zip(names, blocks, strict=False):
                if name not in self.block_of:
                    self.block_of[name], self.name_of[block] = block, name

        def all_held(self, blocks):
            return max(Counter(blocks).values(), default=1) == 1 and all(self.ref_count(block) for block in blocks)

        def allocate(self, n):
            if n < 0:
                raise ValueError
            if n > self.num_free:
                raise OutOfBlocks
            free = np.flatnonzero(self.refs == 0).tolist()
            taken = sorted(free, key=lambda block: (block in self.name_of, self.left[block]))[:n]
            for block in taken:
                self.refs[block] = 1
                if block in self.name_of:
                    del self.block_of[self.name_of.pop(block)]
            return taken

        def share(self, blocks):
            if not self.all_held([block for block in blocks if block not in self.name_of]):
                raise ValueError
            if len(set(blocks)) < len(blocks):
                raise ValueError
            for block in blocks:
                self.refs[block] += 1

        def free(self, blocks):
            if not self.all_held(blocks):
                raise ValueError
            self.clock += 1
            for position, block in enumerate(blocks):
                self.refs[block] -= 1
                self.left[block] = self.clock, -position

    return Answer


@right("over the learner's own allocator: a tree of nodes, and an evicted node takes its descendants along")
def tree(reference):
    class Node:
        def __init__(self, parent=None, tokens=()):
            self.parent, self.tokens, self.children, self.block = parent, tokens, {}, None

    class Answer:
        def __init__(self, num_blocks, block_size):
            self.pool = reference.BlockAllocator(num_blocks, block_size)  # cached blocks: held once more, by the tree
            self.size, self.roots, self.node_of, self.idle = block_size, {}, {}, OrderedDict()

        @property
        def num_free(self):
            return self.pool.num_free + len(self.idle)

        def ref_count(self, block):
            return self.pool.ref_count(block) - (block in self.node_of)

        def steps(self, tokens):
            starts = range(0, len(tokens) // self.size * self.size, self.size)
            return [tuple(tokens[start : start + self.size]) for start in starts]

        def match(self, tokens, key=None):
            node, blocks = self.roots.get(key, Node()), []
            for step in self.steps(tokens[:-1]):
                node = node.children.get(step)
                if node is None:
                    break
                blocks.append(node.block)
            self.share(blocks)
            return blocks, len(blocks) * self.size

        def insert(self, tokens, blocks, key=None):
            path = self.steps(tokens)
            if len(path) > len(blocks) or len(set(blocks)) < len(blocks) or not all(map(self.ref_count, blocks)):
                raise ValueError
            node = self.roots.setdefault(key, Node())
            for step, block in zip(path, blocks, strict=False):
                if step not in node.children:
                    if block in self.node_of:  # it hangs on a copy that has gone
                        self.drop(self.node_of[block])
                    child = node.children[step] = Node(node, step)
                    child.block, self.node_of[block] = block, child
                    self.pool.share([block])
                node = node.children[step]

        def drop(self, node):
            node.parent.children.pop(node.tokens, None)
            for child in [*node.children.values()]:
                self.drop(child)
            if self.node_of.pop(node.block, None) is not None:
                self.idle.pop(node.block, None)
                self.pool.free([node.block])

        def allocate(self, n):
            if n > self.num_free:
                raise OutOfBlocks
            while n > self.pool.num_free:
                self.drop(self.node_of[next(iter(self.idle))])
            return self.pool.allocate(n)

        def share(self, blocks):
            self.pool.share(blocks)
            for block in blocks:
                self.idle.pop(block, None)

        def free(self, blocks):
            if len(set(blocks)) < len(blocks) or not all(map(self.ref_count, blocks)):
                raise ValueError
            self.pool.free(blocks)
            for block in reversed(blocks):
                if block in self.node_of and self.ref_count(block) == 0:
                    self.idle[block] = True

    return Answer


@right("compares tokens: each block's contents have a number that is never given again")
def numbered(reference):
    class Answer(reference.PrefixCache):
        def _hashes(self, tokens, key):
            known, names, number = vars(self).setdefault("numbers", {}), [], 0
            for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
                name = number, tuple(tokens[start : start + self.block_size]), key
                number = known.setdefault(name, len(known) + 1)
                names.append(number)
            return names

    return Answer


@right("hashes 64-bit integers and the key's bytes, each with its length")
def packed(reference):
    class Answer(reference.PrefixCache):
        def _hashes(self, tokens, key):
            name = b"" if key is None else len(key).to_bytes(8, "little") + key.encode()
            hashes, digest = [], hashlib.sha256(name).digest()
            for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
                block = np.array(tokens[start : start + self.block_size], dtype="<i8")
                digest = hashlib.sha256(digest + block.tobytes()).digest()
                hashes.append(digest)
            return hashes

    return Answer


@right("the newest of two duplicates is found; a list as the queue")
def newest(reference):
    class Answer(reference.PrefixCache):
        def insert(self, tokens, blocks, key=None):
            hashes = self._hashes(tokens, key)
            self._require(self._is_held, blocks)
            if len(blocks) < len(hashes):
                raise ValueError
            for block, digest in zip(blocks, hashes, strict=False):
                for old in self._blocks_of.pop(digest, ()):
                    del self._hash_of[old]
                    if old in self._cached:
                        del self._cached[old]
                        self._uncached.append(old)
                self._hash_of[block], self._blocks_of[digest] = digest, OrderedDict({block: None})

    return Answer


def _base(change):
    return lambda reference: change(reference.PrefixCache)


@wrong("num_free leaves out cached blocks", case="keeps the rules of a pool")
@_base
def cached_not_free(base):
    class Answer(base):
        num_free = property(lambda self: len(self._uncached))

    return Answer


@wrong("partial allocation kept on failure", case="keeps the rules of a pool")
@_base
def partial(base):
    class Answer(base):
        def allocate(self, n):
            if n < 0:
                raise ValueError
            return [super(Answer, self).allocate(1)[0] for _ in range(n)]

    return Answer


@wrong("double free accepted", case="refuses misuse")
@_base
def double_free(base):
    class Answer(base):
        def free(self, blocks):
            super().free([block for block in dict.fromkeys(blocks) if self.ref_count(block)])

    return Answer


@wrong("only free uncached blocks cannot be freed again", case="refuses misuse")
@_base
def cached_freed_again(base):
    class Answer(base):
        def free(self, blocks):
            self._require(self._has_contents, blocks)
            super().free([block for block in blocks if self._holders[block]])

    return Answer


@wrong("registers blocks that nobody holds", case="refuses misuse")
@_base
def unheld(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            held, self._is_held = self._is_held, lambda block: True
            super().insert(tokens, blocks, key)
            self._is_held = held

    return Answer


@wrong("registers as many blocks as it was given", case="refuses misuse")
@_base
def too_short(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            super().insert(tokens[: len(blocks) * self.block_size], blocks, key)

    return Answer


@wrong("looks only at the blocks that it registers", case="refuses misuse")
@_base
def spare_unheld(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            super().insert(tokens, blocks[: max(1, len(tokens) // self.block_size)], key)

    return Answer


@wrong("looks at each block when its turn comes: share", case="refuses misuse")
@_base
def share_in_turn(base):
    class Answer(base):
        def share(self, blocks):
            if len(set(blocks)) < len(blocks):
                raise ValueError
            for block in blocks:
                super().share([block])

    return Answer


@wrong("looks at each block when its turn comes, from the end: share", case="refuses misuse")
@_base
def share_from_the_end(base):
    class Answer(base):
        def share(self, blocks):
            if len(set(blocks)) < len(blocks):
                raise ValueError
            for block in reversed(blocks):
                super().share([block])

    return Answer


@wrong("looks at each block when its turn comes: free", case="refuses misuse")
@_base
def free_in_turn(base):
    class Answer(base):
        def free(self, blocks):
            if len(set(blocks)) < len(blocks):
                raise ValueError
            for block in blocks:
                super().free([block])

    return Answer


@wrong("looks at each block when its turn comes, from the end: free", case="refuses misuse")
@_base
def free_from_the_end(base):
    class Answer(base):
        def free(self, blocks):
            if len(set(blocks)) < len(blocks):
                raise ValueError
            for block in reversed(blocks):
                super().free([block])

    return Answer


@wrong("meets a block named twice only when its turn comes", case="refuses misuse")
@_base
def twice_in_turn(base):
    class Answer(base):
        def free(self, blocks):
            self._require(self._is_held, list(set(blocks)))
            seen = set()
            for block in blocks:
                if block in seen:
                    raise ValueError
                seen.add(block)
                super().free([block])

    return Answer


@wrong("looks at the first and the last block only", case="refuses misuse")
@_base
def ends_only(base):
    class Answer(base):
        def free(self, blocks):
            self._require(self._is_held, list({*blocks[:1], *blocks[-1:]}))
            for block in blocks:
                super().free([block])

    return Answer


@wrong("a share that is refused gives back what it took, and so makes it recent", case="evicts the least recently used")
@_base
def taken_back(base):
    class Answer(base):
        def share(self, blocks):
            taken = []
            try:
                for block in blocks:
                    super().share([block])
                    taken.append(block)
                if len(set(blocks)) < len(blocks):
                    raise ValueError
            except ValueError:
                for block in taken:
                    super().free([block])
                raise

    return Answer


def _registering(order):
    """A cache whose ``insert`` looks at each block when its turn comes, in an order."""

    def change(base):
        class Answer(base):
            def insert(self, tokens, blocks, key=None):
                hashes = self._hashes(tokens, key)
                if len(blocks) < len(hashes) or len(set(blocks)) < len(blocks):
                    raise ValueError
                for block, digest in order(list(zip(blocks, hashes, strict=False))):
                    self._require(self._is_held, [block])
                    self._hash_of[block] = digest
                    self._blocks_of.setdefault(digest, {})[block] = None
                self._require(self._is_held, blocks)

        return Answer

    return _base(change)


@wrong("insert looks at each block when its turn comes", case="refuses misuse")
@_registering
def insert_in_turn(pairs):
    return pairs


@wrong("insert looks at each block when its turn comes, from the end", case="refuses misuse")
@_registering
def insert_from_the_end(pairs):
    return reversed(pairs)


@wrong("insert takes free blocks that are cached", case="refuses misuse")
@_base
def cached_inserted(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            self._require(self._has_contents, blocks)
            held, self._is_held = self._is_held, lambda block: True
            try:
                super().insert(tokens, blocks, key)
            finally:
                self._is_held = held

    return Answer


@wrong("demands a block for the part-filled tail", case="caches full blocks only")
@_base
def block_for_the_tail(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            if len(blocks) * self.block_size < len(tokens):
                raise ValueError
            super().insert(tokens, blocks, key)

    return Answer


@wrong("refuses spare blocks", case="caches full blocks only")
@_base
def no_spare(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            if len(blocks) > -(-len(tokens) // self.block_size):
                raise ValueError
            super().insert(tokens, blocks, key)

    return Answer


@wrong("free turns the caller's list round", case="leaves its arguments unchanged")
@_base
def turns_round(base):
    class Answer(base):
        def free(self, blocks):
            super().free(blocks)
            blocks.reverse()

    return Answer


@wrong("match takes the last token off the caller's list", case="leaves its arguments unchanged")
@_base
def takes_off(base):
    class Answer(base):
        def match(self, tokens, key=None):
            last = tokens.pop() if tokens else 0
            return super().match([*tokens, last], key)

    return Answer


@wrong("insert cuts the caller's list of tokens to full blocks", case="leaves its arguments unchanged")
@_base
def cuts_tokens(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            super().insert(tokens, blocks, key)
            del tokens[len(tokens) // self.block_size * self.block_size :]

    return Answer


@wrong("a free uncached block can be shared", case="refuses misuse")
@_base
def share_free(base):
    class Answer(base):
        def share(self, blocks):
            for block in blocks:
                if block in self._uncached:
                    self._uncached.remove(block)
                    self._holders[block] += 1
                else:
                    super().share([block])

    return Answer


@wrong("all caches have one dictionary, which a new one empties", case="finds cached prefixes")
@_base
def one_dictionary(base):
    class Answer(base):
        known: ClassVar[dict] = {}

        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.known.clear()
            self._blocks_of = self.known

    return Answer


@wrong("never hits", case="finds cached prefixes")
@_base
def never(base):
    class Answer(base):
        def match(self, tokens, key=None):
            return [], 0

    return Answer


@wrong("cached only while somebody holds it", case="revives cached blocks")
@_base
def while_held(base):
    class Answer(base):
        def free(self, blocks):
            super().free(blocks)
            for block in [*self._cached]:
                del self._cached[block]
                del self._blocks_of[self._hash_of.pop(block)][block]
                self._uncached.append(block)
            self._blocks_of = {digest: copies for digest, copies in self._blocks_of.items() if copies}

    return Answer


@wrong("hits only blocks that nobody holds", case="finds cached prefixes")
@_base
def only_free(base):
    class Answer(base):
        def match(self, tokens, key=None):
            hit, n_tokens = super().match(tokens, key)
            if any(self.ref_count(block) > 1 for block in hit):
                self.free(hit)
                return [], 0
            return hit, n_tokens

    return Answer


@wrong("a hit takes no reference", case="finds cached prefixes")
@_base
def no_reference(base):
    class Answer(base):
        def match(self, tokens, key=None):
            hit, n_tokens = super().match(tokens, key)
            self.free(hit)
            return hit, n_tokens

    return Answer


@wrong("insert takes a reference of its own", case="finds cached prefixes")
@_base
def insert_holds(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            super().insert(tokens, blocks, key)
            self.share(blocks)

    return Answer


@wrong("a hit goes on behind a block that is gone", case="forgets what it hands out")
@_base
def goes_on(base):
    class Answer(base):
        def match(self, tokens, key=None):
            digests = self._hashes(tokens[:-1], key)
            hit = [next(iter(self._blocks_of[digest])) for digest in digests if digest in self._blocks_of]
            self.share(hit)
            return hit, len(hit) * self.block_size

    return Answer


@wrong("all blocks of a prompt or none", case="finds cached prefixes")
@_base
def all_or_none(base):
    class Answer(base):
        def match(self, tokens, key=None):
            hit, n_tokens = super().match(tokens, key)
            if len(hit) < (len(tokens) - 1) // self.block_size:
                self.free(hit)
                return [], 0
            return hit, n_tokens

    return Answer


@wrong("a fully cached prompt hits to its end", case="leaves the last token to compute")
@_base
def to_the_end(base):
    class Answer(base):
        def match(self, tokens, key=None):
            return super().match([*tokens, 0], key)

    return Answer


@wrong("a fully cached prompt hits len - 1 tokens in all of its blocks", case="leaves the last token to compute")
@_base
def to_the_last_but_one(base):
    class Answer(base):
        def match(self, tokens, key=None):
            hit, n_tokens = super().match([*tokens, 0], key)
            return hit, min(n_tokens, max(0, len(tokens) - 1))

    return Answer


@wrong("the last block is always left out", case="leaves the last token to compute")
@_base
def last_block(base):
    class Answer(base):
        def match(self, tokens, key=None):
            return super().match(tokens[: max(0, len(tokens) - self.block_size)], key)

    return Answer


@wrong("last partial block cached", case="caches full blocks only")
@_base
def part_filled(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            super().insert(tokens, blocks, key)
            for block in blocks[len(tokens) // self.block_size :]:
                self._hash_of.setdefault(block, bytes([block]))
                self._blocks_of.setdefault(bytes([block]), OrderedDict())[block] = None

    return Answer


@wrong("last partial block cached and found", case="caches full blocks only")
@_base
def part_found(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            super().insert([*tokens, *[0] * (-len(tokens) % self.block_size)], blocks, key)

        def match(self, tokens, key=None):
            for end in range(len(tokens) - 1, 0, -1):
                hit, n_tokens = super().match([*tokens[:end], *[0] * (-end % self.block_size), 0], key)
                if n_tokens >= end:
                    return hit, end
                self.free(hit)
            return [], 0

    return Answer


def _hashed(contents):
    """A cache whose blocks are found under ``contents(parent, tokens, key, position)``."""

    def change(base):
        class Answer(base):
            def _hashes(self, tokens, key):
                hashes, parent, size = [], None, self.block_size
                for start in range(0, len(tokens) - size + 1, size):
                    parent = contents(parent, tuple(tokens[start : start + size]), key, start)
                    hashes.append(parent)
                return hashes

        return Answer

    return _base(change)


@wrong("hash without the parent", case="tells prompts apart")
@_hashed
def no_parent(parent, tokens, key, position):
    return tokens, key


@wrong("hash without the parent, but with the position", case="tells prompts apart")
@_hashed
def position_for_parent(parent, tokens, key, position):
    return tokens, key, position


@wrong("the id of the block before stands for its contents", case="forgets what it hands out")
@_base
def by_parent_block(base):
    class Answer(base):
        def _hashes(self, tokens, key):
            names, parent = [], None
            for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
                names.append((parent, tuple(tokens[start : start + self.block_size]), key))
                parent = next(iter(self._blocks_of.get(names[-1], ())), object())
            return names

        def insert(self, tokens, blocks, key=None):
            super().insert([], blocks, key)
            size, parent = self.block_size, None
            if len(tokens) // size > len(blocks):
                raise ValueError
            for start, block in zip(range(0, len(tokens) - size + 1, size), blocks, strict=False):
                name = parent, tuple(tokens[start : start + size]), key
                if name not in self._blocks_of:
                    self._hash_of[block], self._blocks_of[name] = name, {block: None}
                parent = next(iter(self._blocks_of[name]))

    return Answer


@wrong("Python's hash of the tokens, not verified", case="tells prompts apart")
@_hashed
def python_hash(parent, tokens, key, position):
    return hash((parent, tokens, key))


@wrong("Python's hash of parent, tokens and key in one row, not verified", case="tells prompts apart")
@_hashed
def python_hash_in_a_row(parent, tokens, key, position):
    return hash((parent, *tokens, key))


@wrong("Python's hash at every block but the first", case="tells prompts apart")
@_hashed
def python_hash_later(parent, tokens, key, position):
    return (parent, hash(tokens), key) if parent else (tokens, key)


@wrong("token ids run together", case="tells prompts apart")
@_hashed
def run_together(parent, tokens, key, position):
    text = f"{parent}|{''.join(map(str, tokens))}|{key!r}"
    return hashlib.sha256(text.encode()).hexdigest()


@wrong("the order of the tokens is lost", case="tells prompts apart")
@_hashed
def unordered(parent, tokens, key, position):
    return parent, tuple(sorted(tokens)), key


@wrong("a polynomial hash, not verified", case="tells prompts apart")
@_hashed
def polynomial(parent, tokens, key, position):
    digest = parent[0] if parent else 0
    for token in tokens:
        digest = digest * 31 + token
    return digest, position, key


def _polynomial(base, modulus=None):
    def contents(parent, tokens, key, position):
        digest = parent[0] if parent else 0
        for token in tokens:
            digest = digest * base + token
        return digest % modulus if modulus else digest, position, key

    return _hashed(contents)


polynomial_prime = wrong("a polynomial hash modulo a prime, not verified", case="tells prompts apart")(
    _polynomial(131, 10**9 + 7)
)
polynomial_large = wrong("a polynomial hash modulo 2**61 - 1, not verified", case="tells prompts apart")(
    _polynomial(1_000_003, 2**61 - 1)
)
polynomial_digits = wrong("tokens as digits of a number in base 2**17", case="tells prompts apart")(_polynomial(2**17))


@wrong("only the last token of a block counts", case="tells prompts apart")
@_hashed
def last_token(parent, tokens, key, position):
    return parent, tokens[-1], key


@wrong("parent and tokens run together", case="tells prompts apart")
@_hashed
def parent_run_into(parent, tokens, key, position):
    text = parent[0] if parent else ""
    return text + ",".join(map(str, tokens)), key


@wrong("parent and tokens run together, digit by digit", case="tells prompts apart")
@_hashed
def all_run_together(parent, tokens, key, position):
    text = parent[0] if parent else ""
    return text + "".join(map(str, tokens)), key


def _narrow(name, shorten):
    """A wrong answer that loses a part of every token id."""

    @wrong(f"token ids shortened: {name}", case="tells prompts apart")
    @_hashed
    def contents(parent, tokens, key, position):
        return parent, tuple(map(shorten, tokens)), key

    return contents


eight_bits = _narrow("8 bits", lambda token: token & 0xFF)
sixteen_bits = _narrow("16 bits", lambda token: token & 0xFFFF)
vocabulary = _narrow("17 bits", lambda token: token % 131072)
thirty_two_bits = _narrow("32 bits", lambda token: token & 0xFFFF_FFFF)
half_floats = _narrow("float16", lambda token: float(np.float16(min(token, 60000))))
floats = _narrow("float32", lambda token: float(np.float32(token)))
doubles = _narrow("float64", float)


@wrong("tokens and key run together", case="keeps keys apart")
@_hashed
def key_run_into(parent, tokens, key, position):
    text = str(parent) + ",".join(map(str, tokens)) + ("#" if key is None else key)
    return hashlib.sha256(text.encode()).hexdigest()


@wrong("key and tokens run together", case="keeps keys apart")
@_hashed
def key_before(parent, tokens, key, position):
    text = f"{parent}|{'' if key is None else key}{','.join(map(str, tokens))}"
    return hashlib.sha256(text.encode()).hexdigest()


def _whole(name, write):
    """A wrong answer that compares texts of everything so far, in which the key can look like tokens."""

    @wrong(f"the key can look like a block: {name}", case="keeps keys apart")
    @_hashed
    def contents(parent, tokens, key, position):
        return write(parent, list(tokens), "no key" if key is None else key)

    return contents


key_last = _whole("after the tokens", lambda parent, tokens, key: f"{parent or ''}{tokens}{key}")
key_first = _whole("before the tokens", lambda parent, tokens, key: f"{parent or key}{tokens}")
key_commas = _whole("between commas", lambda parent, tokens, key: ",".join(map(str, [parent or key, *tokens])))


@wrong("no key is the empty text", case="keeps keys apart")
@_hashed
def empty_text(parent, tokens, key, position):
    return parent, tokens, key or ""


@wrong("an empty key is no key", case="keeps keys apart")
@_hashed
def empty_is_none(parent, tokens, key, position):
    return (parent, tokens, key) if key else (parent, tokens)


@wrong("capital letters in keys are lost", case="keeps keys apart")
@_hashed
def lower_case(parent, tokens, key, position):
    return parent, tokens, key and key.lower()


@wrong("blanks around keys are lost", case="keeps keys apart")
@_hashed
def stripped(parent, tokens, key, position):
    return parent, tokens, key and key.strip()


@wrong("only the length of a key counts", case="keeps keys apart")
@_hashed
def key_length(parent, tokens, key, position):
    return parent, tokens, key and len(key)


@wrong("key ignored", case="keeps keys apart")
@_hashed
def no_key(parent, tokens, key, position):
    return parent, tokens


@wrong("only a key of one kind is kept apart", case="keeps keys apart")
@_hashed
def any_key(parent, tokens, key, position):
    return parent, tokens, key is None


@wrong("no key is the key 'None'", case="keeps keys apart")
@_hashed
def text_key(parent, tokens, key, position):
    return parent, tokens, str(key)


@wrong("no key is the empty key", case="keeps keys apart")
@_hashed
def empty_key(parent, tokens, key, position):
    return parent, tokens, key or "None"


@wrong("hit blocks not revived: handed out again", case="revives cached blocks")
@_base
def not_revived(base):
    class Answer(base):
        def share(self, blocks):
            cached = [block for block in blocks if block in self._cached]
            super().share(blocks)
            self._cached |= dict.fromkeys(cached)

    return Answer


@wrong("a hit on a free block does not count it", case="revives cached blocks")
@_base
def not_counted(base):
    class Answer(base):
        lent = 0

        def share(self, blocks):
            self.lent += sum(block in self._cached for block in blocks)
            super().share(blocks)

        num_free = property(lambda self: len(self._uncached) + len(self._cached) + self.lent)

    return Answer


@wrong("a hit is revived as a whole or not at all: its head decides", case="revives cached blocks")
@_base
def head_decides(base):
    class Answer(base):
        def share(self, blocks):
            queue = self._cached.copy()
            super().share(blocks)
            if blocks and self._holders[blocks[0]] > 1:
                self._cached = queue

    return Answer


@wrong("share refuses held blocks and free ones in one list", case="revives cached blocks")
@_base
def mixed_refused(base):
    class Answer(base):
        def share(self, blocks):
            self._require(self._is_held if any(map(self._is_held, blocks)) else self._has_contents, blocks)
            super().share(blocks)

    return Answer


@wrong("share refuses a cached block that nobody holds", case="revives cached blocks")
@_base
def share_refuses(base):
    class Answer(base):
        def share(self, blocks):
            self._require(self._is_held, blocks)
            super().share(blocks)

        def match(self, tokens, key=None):
            hidden, self._is_held = self._is_held, lambda block: True
            try:
                return super().match(tokens, key)
            finally:
                self._is_held = hidden

    return Answer


@wrong("stale hash after reuse", case="forgets what it hands out")
@_base
def stale(base):
    class Answer(base):
        def _evict(self):
            block, _ = self._cached.popitem(last=False)
            return block

    return Answer


@wrong("stale hash after reuse, as long as nobody holds the block", case="forgets what it hands out")
@_base
def stale_later(base):
    class Answer(base):
        def match(self, tokens, key=None):
            hit, _ = super().match(tokens, key)
            good = next((i for i, block in enumerate(hit) if block in self.fresh), len(hit))
            self.free(hit[good:])
            return hit[:good], good * self.block_size

        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.fresh = set()

        def _evict(self):
            block, _ = self._cached.popitem(last=False)
            self.fresh.add(block)
            return block

        def free(self, blocks):
            super().free(blocks)
            self.fresh -= {block for block in blocks if not self._holders[block]}

    return Answer


@wrong("a reused block still leads to its old hash", case="forgets what it hands out")
@_base
def half_forgotten(base):
    class Answer(base):
        def _evict(self):
            block, _ = self._cached.popitem(last=False)
            del self._blocks_of[self._hash_of[block]]
            return block

    return Answer


def _evicting(choose):
    """A cache that evicts the block ``choose(cache)``."""

    def change(base):
        class Answer(base):
            def _evict(self):
                self._cached.move_to_end(choose(self), last=False)
                return super()._evict()

        return Answer

    return _base(change)


@wrong("most recently used evicted first", case="evicts the least recently used")
@_evicting
def mru(cache):
    return next(reversed(cache._cached))


@wrong("first in, first out: the oldest insertion evicted first", case="evicts the least recently used")
@_evicting
def fifo(cache):
    return next(block for block in cache._hash_of if block in cache._cached)


@wrong("lowest id evicted first", case="evicts the least recently used")
@_evicting
def lowest(cache):
    return min(cache._cached)


@wrong("head evicted before tail", case="evicts the least recently used")
@_base
def head_first(base):
    class Answer(base):
        def free(self, blocks):
            super().free(list(reversed(blocks)))

    return Answer


@wrong("of one call's blocks the deepest in its prompt is evicted first", case="evicts the least recently used")
@_base
def by_depth(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            super().insert(tokens, blocks, key)
            self.depth = getattr(self, "depth", {}) | {block: depth for depth, block in enumerate(blocks)}

        def free(self, blocks):
            super().free(sorted(blocks, key=lambda block: getattr(self, "depth", {}).get(block, 0)))

    return Answer


@wrong("of one call's blocks the highest id is evicted first", case="evicts the least recently used")
@_base
def by_id(base):
    class Answer(base):
        def free(self, blocks):
            super().free(sorted(blocks))

    return Answer


@wrong("a hit does not make a block recent", case="evicts the least recently used")
@_base
def first_time(base):
    class Answer(base):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.since, self.ticks = {}, 0

        def free(self, blocks):
            super().free(blocks)
            for block in reversed(blocks):
                self.ticks += 1
                self.since.setdefault(block, self.ticks)
            self._cached = OrderedDict.fromkeys(sorted(self._cached, key=self.since.__getitem__))

        def _evict(self):
            block = super()._evict()
            del self.since[block]
            return block

    return Answer


@wrong("cached blocks evicted before uncached ones are used", case="evicts the least recently used")
@_base
def cached_first(base):
    class Answer(base):
        def allocate(self, n):
            self.num_free  # noqa: B018
            rest, self._uncached = self._uncached, []
            cached = len(self._cached)
            try:
                return super().allocate(n) if n <= cached else self._restored(rest, n)
            finally:
                self._uncached = self._uncached or rest if n <= cached else self._uncached

        def _restored(self, rest, n):
            self._uncached = rest
            return super().allocate(n)

    return Answer


@wrong("evicts a block that somebody holds", case="evicts the least recently used")
@_base
def referenced(base):
    class Answer(base):
        def free(self, blocks):
            super().free(blocks)
            self._cached |= {block: None for block in self._hash_of if self._holders[block] and blocks}

        num_free = property(lambda self: self._holders.count(0))

    return Answer


@wrong("an allocation that fails takes the last hit once more", case="a failed allocation changes nothing")
@_base
def touched(base):
    class Answer(base):
        last_hit = ()

        def match(self, tokens, key=None):
            self.last_hit = super().match(tokens, key)[0]
            return self.last_hit, len(self.last_hit) * self.block_size

        def allocate(self, n):
            if n > self.num_free and self.last_hit:
                self.share(self.last_hit)
            return super().allocate(n)

    return Answer


@wrong("an allocation that fails evicts first", case="a failed allocation changes nothing")
@_base
def evicts_first(base):
    class Answer(base):
        def allocate(self, n):
            if n > self.num_free:
                while self._cached:
                    self._uncached.append(self._evict())
            return super().allocate(n)

    return Answer


@wrong("an allocation that fails frees the last hit itself", case="a failed allocation changes nothing")
@_base
def frees_hit(base):
    class Answer(base):
        last_hit = ()

        def match(self, tokens, key=None):
            self.last_hit = super().match(tokens, key)[0]
            return self.last_hit, len(self.last_hit) * self.block_size

        def allocate(self, n):
            if n > self.num_free:
                self.free([block for block in self.last_hit if self.ref_count(block)])
            return super().allocate(n)

    return Answer


@wrong("a duplicate that was handed out is still found", case="lives with duplicates")
@_base
def stale_duplicate(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            super().insert(tokens, blocks, key)
            self.first = {digest: next(iter(copies)) for digest, copies in self._blocks_of.items() if len(copies) > 1}

        def match(self, tokens, key=None):
            for digest, block in getattr(self, "first", {}).items():
                self._blocks_of.setdefault(digest, OrderedDict())[block] = None
                self._hash_of.setdefault(block, digest)
            return super().match(tokens, key)

    return Answer


@wrong("a duplicate goes back to the pool although it is held", case="lives with duplicates")
@_base
def merged(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            super().insert(tokens, blocks, key)
            for copies in self._blocks_of.values():
                for block in [*copies][1:]:
                    del copies[block], self._hash_of[block]
                    self._holders[block] = 0
                    self._uncached.append(block)

    return Answer


@wrong("one block a hash, and an entry of every duplicate to delete", case="lives with duplicates")
@_base
def deleted_twice(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            hashes = self._hashes(tokens, key)
            super().insert([], blocks, key)
            if len(blocks) < len(hashes):
                raise ValueError
            for block, digest in zip(blocks, hashes, strict=False):
                self._hash_of[block], self._blocks_of[digest] = digest, {block: None}

    return Answer


@wrong("an old duplicate takes the entry of a newer one along", case="lives with duplicates")
@_base
def takes_along(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            hashes = self._hashes(tokens, key)
            super().insert([], blocks, key)
            if len(blocks) < len(hashes):
                raise ValueError
            for block, digest in zip(blocks, hashes, strict=False):
                self._hash_of[block], self._blocks_of[digest] = digest, {block: None}

        def _evict(self):
            block, _ = self._cached.popitem(last=False)
            self._blocks_of.pop(self._hash_of.pop(block), None)
            return block

    return Answer


@wrong("a duplicate cannot be inserted", case="lives with duplicates")
@_base
def refused(base):
    class Answer(base):
        def insert(self, tokens, blocks, key=None):
            super().insert(tokens, blocks, key)
            if any(len(copies) > 1 for copies in self._blocks_of.values()):
                raise ValueError

    return Answer


@wrong("forgets everything after a while", case="long runs")
@_base
def forgetful(base):
    class Answer(base):
        inserts = 0

        def insert(self, tokens, blocks, key=None):
            self.inserts += 1
            if self.inserts % 5:
                super().insert(tokens, blocks, key)

    return Answer
