"""Answers to the invariant checker exercise."""

from collections import Counter

from servelab.answers import right, wrong


@wrong("always empty", case="leaked block")
def always_empty(reference):
    return lambda snapshot: []


@wrong("always something", case="free and held")
def always_something(reference):
    return lambda snapshot: ["something is wrong"]


@wrong("reports on every second call", case="leaked block")
def every_second(reference):
    calls = []

    def violations(snapshot):
        calls.append(snapshot)
        return ["something is wrong"] if len(calls) % 2 == 0 else []

    return violations


@wrong("returns None when all is well", case="leaked block")
def none_when_sound(reference):
    return lambda snapshot: reference.violations(snapshot) or None


@wrong("returns True and False", case="listed twice")
def booleans(reference):
    return lambda snapshot: bool(reference.violations(snapshot))


@wrong("compares numbers of blocks only", case="wrong reference count")
def counts_only(reference):
    def violations(s):
        held = {block for table in s["tables"].values() for block in table}
        total = len(s["free"]) + len(s["cached"]) + len(held)
        return [] if total == s["num_blocks"] else [f"{total} of {s['num_blocks']}"]

    return violations


def _parts(s):
    held = {block for table in s["tables"].values() for block in table}
    return set(s["free"]), set(s["cached"]), held


@wrong("looks at sets, so a double entry is lost", case="listed twice")
def sets_only(reference):
    return lambda s: reference.violations({**s, "free": list(set(s["free"])), "cached": list(set(s["cached"]))})


@wrong("looks at overlaps, not at leaks", case="leaked block")
def no_leaks(reference):
    return lambda s: [line for line in reference.violations(s) if "in 0 places" not in line]


@wrong("cached blocks are not looked at", case="cached and held")
def ignores_cached(reference):
    def violations(s):
        free, cached, held = _parts(s)
        return reference.violations({**s, "cached": sorted(cached - held - free)})

    return violations


@wrong("a cached block in the free list passes", case="free and cached")
def free_and_cached(reference):
    return lambda s: reference.violations({**s, "cached": [b for b in s["cached"] if b not in s["free"]]})


@wrong("a table naming a free block passes", case="free and held")
def free_and_held(reference):
    def violations(s):
        held = _parts(s)[2]
        return reference.violations({**s, "free": [block for block in s["free"] if block not in held]})

    return violations


@wrong("counts every block that is held once", case="wrong reference count")
def any_count(reference):
    def violations(s):
        holders = Counter(block for table in s["tables"].values() for block in set(table))
        same = {block for block in s["refs"] if s["refs"][block]} == set(holders)
        return reference.violations({**s, "refs": dict(holders)} if same else s)

    return violations


@wrong("looks only at the counts that refs names", case="wrong reference count")
def named_counts(reference):
    def violations(s):
        holders = Counter(block for table in s["tables"].values() for block in set(table))
        return reference.violations({**s, "refs": {**holders, **s["refs"]}})

    return violations


@wrong("looks only at the counts of held blocks", case="wrong reference count")
def held_counts(reference):
    def violations(s):
        held = _parts(s)[2]
        return reference.violations({**s, "refs": {b: n for b, n in s["refs"].items() if b in held}})

    return violations


@wrong("counts entries of tables instead of tables", case="twice in one table")
def entries(reference):
    def violations(s):
        entries = Counter(block for table in s["tables"].values() for block in table)
        tables = {f"{name} {i}": [block] for name, table in s["tables"].items() for i, block in enumerate(table)}
        same = all(s["refs"].get(block, 0) == n for block, n in entries.items())
        return reference.violations({**s, "tables": tables}) if same else reference.violations(s)

    return violations


@wrong("a list indexed by block takes -1 for the last one", case="id out of range")
def negative_index(reference):
    def violations(s):
        places, holders = [0] * s["num_blocks"], [0] * s["num_blocks"]
        for block in [*s["free"], *s["cached"]]:
            places[block] += 1
        for table in s["tables"].values():
            for block in table:
                holders[block] += 1
        return [
            f"block {b}"
            for b in range(s["num_blocks"])
            if places[b] + (holders[b] > 0) != 1 or s["refs"].get(b, 0) != holders[b]
        ]

    return violations


@wrong("an IndexError tells which ids do not exist", case="id out of range")
def index_error(reference):
    def violations(s):
        n, found = s["num_blocks"], []
        places, holders, refs = [0] * n, [0] * n, [0] * n

        def add(counts, block, number=1):
            try:
                counts[block] += number
            except IndexError:
                found.append(f"block {block}")

        for block in [*s["free"], *s["cached"]]:
            add(places, block)
        for table in s["tables"].values():
            found.extend(["twice"] * (len(set(table)) < len(table)))
            for block in set(table):
                add(holders, block)
        for block, count in s["refs"].items():
            add(refs, block, count)
        found += [f"block {b}" for b in range(n) if places[b] + (holders[b] > 0) != 1 or refs[b] != holders[b]]
        return found

    return violations


@wrong("only ids past the end are out of range", case="id out of range")
def past_the_end(reference):
    def violations(s):
        lost = {"free": [b for b in s["free"] if b >= 0], "refs": {b: n for b, n in s["refs"].items() if b >= 0}}
        return reference.violations({**s, **lost})

    return violations


@wrong("only blocks of the pool are looked at", case="id out of range")
def range_ignored(reference):
    return lambda s: [line for line in reference.violations(s) if "does not exist" not in line]


@wrong("sorts the free list", case="leaves its arguments unchanged")
def sorts(reference):
    def violations(s):
        s["free"].sort()
        return reference.violations(s)

    return violations


@wrong("empties the counts", case="leaves its arguments unchanged")
def empties(reference):
    def violations(s):
        found = reference.violations(s)
        s["refs"].clear()
        return found

    return violations


@wrong("a generator of lines", case="leaked block")
def generator(reference):
    return lambda s: (line for line in reference.violations(s))


@right("one assertion after another")
def assertions(reference):
    def violations(snapshot):
        pool = set(range(snapshot["num_blocks"]))
        free, cached, tables = snapshot["free"], snapshot["cached"], list(snapshot["tables"].values())
        held = [block for table in tables for block in table]
        found = []
        if not (set(free) | set(cached) | set(held) | set(snapshot["refs"])) <= pool:
            found.append("an id out of range")
        if pool - set(free) - set(cached) - set(held):
            found.append("a leak")
        for a, b in ((free, cached), (cached, held), (held, free)):
            if set(a) & set(b):
                found.append("a block in two places")
        if any(len(part) != len(set(part)) for part in (free, cached, *tables)):
            found.append("a block twice")
        truth = Counter(held)
        if any(snapshot["refs"].get(block, 0) != truth[block] for block in {*pool, *held, *snapshot["refs"]}):
            found.append("a count")
        return found

    return violations


@right("rebuilds the state from the tables and compares, as text objects")
def rebuilds(reference):
    class Line(str):
        pass

    def violations(snapshot):
        n = snapshot["num_blocks"]
        holders: dict[int, set] = {}
        for name, table in snapshot["tables"].items():
            for block in table:
                holders.setdefault(block, set()).add(name)
        everything = sorted([*snapshot["free"], *snapshot["cached"], *holders])
        found = [] if everything == list(range(n)) else [Line("the places do not add up")]
        if {b: c for b, c in snapshot["refs"].items() if c} != {b: len(names) for b, names in holders.items()}:
            found.append(Line("the counts do not add up"))
        if any(not 0 <= b < n for b in snapshot["refs"]):
            found.append(Line("a count of no block"))
        if sum(map(len, snapshot["tables"].values())) != sum(map(len, holders.values())):
            found.append(Line("a table names a block twice"))
        return found

    return violations
