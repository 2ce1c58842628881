"""Memory that is refused from some allocation on: less is used, or it is an error."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
from binding_tools import unraisable_errors
from brainstorm_dbuf import held_memory
from coded import workers
from conftest import skip_without
from faulty import IN_SUITE, TRAININGS, counts_of_a_training, live_in_both, some_of

pytestmark = pytest.mark.timeout(60 if IN_SUITE else 3600)

ALLOCATIONS = ("cuMemAlloc", "cuMemHostAlloc", "cuMemHostRegister")
# Of one kind, or of each from the first on.
REFUSED = [(entry,) for entry in ALLOCATIONS] + [ALLOCATIONS]
WAYS = ["automatic", "ahead", "worker"]
# In the suite each training is made in one way.
CASES = [
    (*training, way)
    for number, training in enumerate(TRAININGS)
    for way in ([WAYS[number % 3]] if IN_SUITE else WAYS)
]


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(held_memory, "REGION_MIN_BYTES", 0)


@pytest.mark.parametrize("kind, name, way", CASES, indirect=["way"])
def test_memory_refused_from_an_allocation_on_is_an_error_or_made_up_for(
    kind, name, way, fake, driver
):
    skip_without(kind)
    training = TRAININGS[kind, name]
    training(driver)
    expected, counts = counts_of_a_training(training, driver)
    tried = 0
    for entries in REFUSED:
        if not all(counts[entry] for entry in entries[:1]):
            continue
        for nth in some_of(counts[entries[0]], 3):
            refuse(entries, nth, name, training, expected, fake, driver)
            tried += 1
    print(f"{tried} allocations refused, with all that followed")


def refuse(entries, nth, name, training, expected, fake, driver):
    before = live_in_both(fake)
    what = f"{entries} from number {nth} on"
    error = None
    # The first kind from its nth call on, the others from the start.
    skips = dict.fromkeys(entries, 0) | {entries[0]: nth}
    made = {entry: fake.calls(entry) for entry in entries}
    with unraisable_errors() as reported, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for entry, skip in skips.items():
            fake.fail(entry, skip, code=2, times=1 << 40)
        try:
            weights = training(driver)
        except dbuf.CudaError as caught:
            error = caught.with_traceback(None)
            error.__context__ = None
        gc.collect()
        fake.heal()
    assert any(fake.calls(e) - made[e] > skips[e] for e in entries), what
    assert workers() == [], what
    assert fake.current_context() == driver.context, what
    assert all(w.category is dbuf.FeedWarning for w in said), what
    if error is not None:
        assert isinstance(error, MemoryError), (what, error)
        assert error.call in entries and " bytes" in str(error), what
    else:
        assert np.array_equal(weights, expected), what
        # Data that are page-locked themselves need no such memory of the feed.
        is_needed = entries != ("cuMemHostAlloc",) or name not in ("direct", "held")
        assert said or not is_needed, f"{what} and nobody said so"
    assert reported == [], (what, reported)
    assert live_in_both(fake) == before, what
    again = training(driver)
    assert np.array_equal(again, expected), what
    assert live_in_both(fake) == before, what
