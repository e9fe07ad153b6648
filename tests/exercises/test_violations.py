"""The pairs of states are what their names say, and no order of answers can be learnt by heart."""

from random import Random

import pytest

from servelab.exercises.paged_kv import violations
from servelab.reference import paged_kv as reference


@pytest.mark.parametrize("seed", [2026, *range(20)])
def test_the_reference_tells_sound_from_broken(seed):
    for case, sound, broken in violations.pairs(Random(seed)):
        assert reference.violations(violations.snapshot(sound)) == [], case
        assert reference.violations(violations.snapshot(broken)), case


@pytest.mark.parametrize("seed", [2026, *range(20)])
def test_every_case_has_both_orders(seed):
    orders: dict[str, set] = {spec.name: set() for spec in violations.CASES}
    for challenge in violations.challenges(Random(seed)):
        sound = [not reference.violations(violations.snapshot(state)) for state in challenge["states"]]
        orders[challenge["case"]].add(tuple(sound))
    assert all(found == {(True, False), (False, True)} for found in orders.values())
