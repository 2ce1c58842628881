"""Double-buffered training gives the numbers of brainstorm's own, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

import brainstorm as bs
from brainstorm_dbuf import access, held_memory
from networks import NETWORKS, minibatches
from parity import (
    assert_same,
    force_worker,
    make_handler,
    poison_back_buffers,
    skip_what_pycuda_cannot,
    train,
)

# How minibatches come to the device, and of which dtypes they are: gathered and cast,
# the same in pieces through a short ring, straight into the network, by the handler or
# through the ring, from where they lie, and as narrow as they are.
THROUGH_SLOTS = {"MOST_PUT_BYTES": 0}
IN_PIECES = {
    **THROUGH_SLOTS,
    "LEAST_PLACE_BYTES": 64,
    "MOST_PLACE_BYTES": 64,
    "STAGING_PLACES": 3,
}
AS_IT_LIES = {"DIRECT_COPY_MIN_BYTES": 0, "ROW_MIN_BYTES": 0}
IN_PLACE = {**THROUGH_SLOTS, **AS_IT_LIES}
PATHS = {
    "staged": (None, THROUGH_SLOTS),
    "in pieces": (None, IN_PIECES),
    "set": (None, {}),
    "put": (None, {"MOST_SET_BYTES": 0}),
    "put in place": ("float32", AS_IT_LIES),
    "in place": ("float32", IN_PLACE),
    "narrow": ("narrow", IN_PIECES),
    "narrow, in place": ("narrow", IN_PLACE),
}

# When the stand-in driver runs what is queued.
MODES = ["late", "random", "eager"]


def modes_for(kind, driver):
    on_device = driver.fake is not None and kind != "numpy"
    return MODES if on_device else [None]


@pytest.fixture(params=PATHS)
def cast(request, kind, monkeypatch):
    """Put small minibatches on one of PATHS; return how their dtypes are to be."""
    cast, thresholds = PATHS[request.param]
    if kind == "numpy" and thresholds:
        pytest.skip("nothing is copied to a device")
    for name, value in thresholds.items():
        module = access if hasattr(access, name) else held_memory
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(held_memory, "REGION_MIN_BYTES", 0)
    return cast


def runs(kind, driver, name, seed=0, modes=(None,), size=4, cast=None, **kwargs):
    """Return the plain run and the double-buffered one in each mode of the driver."""

    def one(double_buffering, mode=None):
        if driver.fake is not None:
            driver.fake.mode(mode or "late", seed)
        return train(
            NETWORKS[name],
            lambda: minibatches(name, np.random.default_rng(seed), size, cast),
            make_handler(kind, driver),
            double_buffering,
            **kwargs,
        )

    with skip_what_pycuda_cannot(kind):
        plain = one(False)
    return plain, [one(True, mode) for mode in modes]


@pytest.mark.parametrize("name", NETWORKS)
def test_each_kind_of_network_trains_to_the_same_weights(
    name, kind, cast, driver, monkeypatch
):
    force_worker(monkeypatch)
    poison_back_buffers(monkeypatch)
    modes = modes_for(kind, driver)
    plain, buffered = runs(kind, driver, name, modes=modes, cast=cast, delays=7)
    assert np.isfinite(plain.weights).all()
    for run in buffered:
        assert_same(plain, run)
        # All but the first minibatch of each of the three epochs.
        assert run.stats.prefetched == run.stats.batches - 3
        assert run.stats.workers == 3
        assert run.stats.fallbacks == []


@pytest.mark.parametrize("name", NETWORKS)
def test_without_a_worker_the_weights_are_the_same_too(name, kind, cast, driver):
    plain, (buffered,) = runs(kind, driver, name, cast=cast)
    assert_same(plain, buffered)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_ragged_minibatches_in_any_order_and_depth(
    depth, seed, kind, cast, driver, monkeypatch
):
    force_worker(monkeypatch)
    poison_back_buffers(monkeypatch)
    plain, (buffered,) = runs(
        kind,
        driver,
        "lstm with a mask",
        seed=seed,
        modes=["random"],
        size=3,
        cast=cast,
        delays=seed,
        depth=depth,
    )
    assert_same(plain, buffered)


def test_a_monitor_at_every_update_resizes_the_network_and_changes_nothing(
    kind, driver, monkeypatch
):
    force_worker(monkeypatch)
    poison_back_buffers(monkeypatch)
    name = "batch normalisation"

    def monitor(iter_name):
        return lambda: bs.hooks.MonitorScores(
            iter_name,
            [bs.scorers.Accuracy()],
            name=iter_name,
            timescale="update",
        )

    def named():
        rnd = np.random.default_rng(99)
        return {
            "larger": minibatches(name, rnd, 7, samples=15),
            "smaller": minibatches(name, rnd, 1, samples=2),
            "longer": minibatches(name, rnd, 5, samples=5, steps=9),
        }

    plain, buffered = runs(
        kind,
        driver,
        name,
        modes=modes_for(kind, driver),
        hooks=[monitor("larger"), monitor("smaller"), monitor("longer")],
        named=named,
    )
    for run in buffered:
        assert_same(plain, run)
