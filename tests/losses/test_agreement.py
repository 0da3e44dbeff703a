"""What docs/losses.md says of agreement: no loss differs from its loop, or from a peer, by more."""

import pytest

from tests.losses.agreement import Check, checks, largest_differences


@pytest.mark.parametrize("check", list(checks()), ids=lambda c: f"{c.loss} {c.against}")
def test_documented_differences_are_not_exceeded(check: Check) -> None:
    double, single = largest_differences(check, batches=2)
    # Another processor may round otherwise: a few units in the last place.
    assert double <= 2e-15
    assert single <= 2e-6
