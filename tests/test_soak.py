"""The soak (soak.py) for a moment, and that it would notice."""

from __future__ import annotations

import pytest

import soak
from brainstorm_dbuf import input_layer
from brainstorm_dbuf.back_buffers import DeviceSlot

pytestmark = pytest.mark.timeout(60)


def test_a_few_rounds(kind, driver):
    samples, ends = soak.soak(kind, driver, 0.03)
    assert sum(ends.values()) == len(samples.seconds) > 3


def test_a_leak_shows(driver, monkeypatch):
    kept = []
    new_slot = input_layer.DoubleBufferedInput._new_slot

    def leaking(self):
        kept.append(new_slot(self))
        return kept[-1]

    monkeypatch.setattr(input_layer.DoubleBufferedInput, "_new_slot", leaking)
    samples, _ = soak.soak("device" if driver.fake else "pycuda", driver, 0.03)
    assert any(line.startswith("events: ") for line in samples.grown())
    kept.clear()


def test_wrong_weights_show(fake, driver, monkeypatch):
    """The copy to the network no longer waits for the one to the device."""
    monkeypatch.setattr(DeviceSlot, "_record_consumed", lambda self: None)
    with pytest.raises(AssertionError, match="^round "):
        soak.soak("device", driver, 0.5)
