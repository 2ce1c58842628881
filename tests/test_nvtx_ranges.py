"""NVTX ranges: what a profiler sees of the feed, and that there is none without one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.describable import create_from_description, get_description
from brainstorm_dbuf import nvtx_ranges
from brainstorm_dbuf.feed import Feed
from coded import From, Hook, Job, batch, coded, codes, stop_at
from conftest import SUBPROCESS_PATH, WORKER_NAME
from nvtx_listener import build_listener
from parity import force_worker, make_handler

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("nothing_left")]

COUNT = 8
LISTENER = nvtx_ranges.LISTENER


class Profiler:
    """A stand-in for the package nvtx in a program to which a profiler listens.

    Attributes:
        events: (name of the thread, depth, name) of each range, in the order in which
            they began.
        open: the names of the ranges that each thread is in.
    """

    def __init__(self, listens=True):
        self.listens = listens
        self.domains = []
        self.events = []
        self.open = {}
        self.enabled = lambda: True

    def get_domain(self, name):
        self.domains.append(name)
        return self

    def get_event_attributes(self, message, color):
        return message if self.listens else None

    def push_range(self, attributes):
        stack = self.open.setdefault(threading.current_thread().name, [])
        self.events.append((threading.current_thread().name, len(stack), attributes))
        stack.append(attributes)

    def pop_range(self):
        self.open[threading.current_thread().name].pop()

    def names(self, thread=None):
        return Counter(
            name for where, _, name in self.events if thread in (None, where)
        )

    def is_balanced(self):
        return not any(self.open.values())


@pytest.fixture
def profiler(monkeypatch):
    found = Profiler()
    monkeypatch.setitem(sys.modules, "nvtx", found)
    monkeypatch.setenv(LISTENER, "/profiler.so")
    return found


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch):
    monkeypatch.delenv(LISTENER, raising=False)


# --------------------------------------------------------------------- who is listening


def test_without_a_profiler_nothing_is_imported(kind, driver, way, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    job = Job(kind, driver).train(coded(COUNT))
    assert job.seen == codes(*range(COUNT))
    assert job.stats.notes == []
    assert type(nvtx_ranges.new_feed(job.net.handler)) is Feed


def test_a_program_of_ones_own_does_not_import_it():
    code = (
        "import sys, brainstorm_dbuf as dbuf, brainstorm as bs\n"
        "from coded import coded_net, coded\n"
        "trainer = dbuf.Trainer(bs.training.SgdStepper(0.1), verbose=False)\n"
        "trainer.add_hook(bs.hooks.StopAfterEpoch(1))\n"
        "trainer.train(coded_net(), coded(3))\n"
        "assert trainer.feed_stats.batches == 3\n"
        "print('nvtx' in sys.modules)\n"
    )
    assert run(code) == "False\n"


def run(code, **variables):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": SUBPROCESS_PATH, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_listener_the_feed_is_the_usual_one(driver, monkeypatch):
    """As it is with nvtx=True, or where the variable is set but names nothing."""
    silent = Profiler(listens=False)
    disabled = Profiler()
    disabled.enabled = lambda: False
    handler = make_handler("numpy", driver)
    monkeypatch.setenv(LISTENER, "/profiler.so")
    for module in (silent, disabled):
        monkeypatch.setitem(sys.modules, "nvtx", module)
        for nvtx in (None, True):
            assert type(nvtx_ranges.new_feed(handler, nvtx=nvtx)) is Feed
    assert silent.domains == ["brainstorm_dbuf"] * 2


def test_a_trainer_may_be_told(driver, profiler, monkeypatch):
    job = Job("numpy", driver)
    job.trainer.nvtx = False
    job.train(coded(COUNT))
    assert profiler.domains == profiler.events == []
    monkeypatch.delenv(LISTENER)
    job = Job("numpy", driver)
    job.trainer.nvtx = True
    job.train(coded(COUNT))
    assert profiler.names()["step"] == COUNT


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_a_missing_package_is_said(module, driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", module)
    for make in (
        lambda: dbuf.Trainer(bs.training.SgdStepper(0.1), nvtx=True),
        lambda: dbuf.Prefetch(coded(1), nvtx=True),
    ):
        with pytest.raises(ImportError, match="need the package nvtx"):
            make()
    monkeypatch.setenv(LISTENER, "/profiler.so")
    job = Job("numpy", driver).train(coded(COUNT))
    assert job.seen == codes(*range(COUNT))
    (note,) = job.stats.notes
    assert note.startswith(f"a profiler listens ({LISTENER}), but NVTX ranges need")


def test_what_is_no_option_is_refused():
    with pytest.raises(TypeError, match="nvtx: expected True, False or None, got 'on'"):
        dbuf.Prefetch(coded(1), nvtx="on")
    with pytest.raises(TypeError, match="nvtx: "):
        dbuf.Trainer(bs.training.SgdStepper(0.1), nvtx=1)


def test_the_option_is_described(profiler):
    trainer = dbuf.Trainer(bs.training.SgdStepper(0.1), nvtx=True)
    assert create_from_description(get_description(trainer)).nvtx is True
    trainer = dbuf.Trainer(bs.training.SgdStepper(0.1))
    assert "nvtx" not in get_description(trainer)
    assert create_from_description(get_description(trainer)).nvtx is None


# ------------------------------------------------------------------------ what it sees


def test_each_stage_of_each_minibatch_has_a_range(kind, driver, way, profiler):
    main = threading.current_thread().name
    job = Job(kind, driver, epochs=2).train(coded(COUNT))
    assert job.seen == codes(*range(COUNT)) * 2
    assert set(profiler.domains) == {"brainstorm_dbuf"}
    assert profiler.is_balanced()
    names = profiler.names()
    assert set(names) <= set(nvtx_ranges.COLORS)
    # And the `next` that ends each pass.
    assert names["next"] == 2 * (COUNT + 1)
    assert names["step"] == 2 * COUNT
    assert profiler.names(main)["step"] == names["step"]
    if way == "worker":
        # The trainer's thread prepares the first minibatch of each pass.
        own, others = profiler.names(main), profiler.names(WORKER_NAME)
        assert own["next"] == own["staging"] == 2
        assert others["next"] == 2 * COUNT and others["staging"] == 2 * (COUNT - 1)
        assert own["hand-over"] == 2 * COUNT
        assert own["waiting"] == 2 * COUNT
        assert others["step"] == others["waiting"] == others["hand-over"] == 0
    else:
        assert profiler.names(WORKER_NAME) == {}
        assert names["waiting"] == 0
    on_device = kind != "numpy"
    if way != "automatic":
        assert names["copy"] == (2 * COUNT if on_device else 0)


def test_copies_are_queued_within_staging(kind, driver, slot_way, profiler):
    if kind == "numpy":
        pytest.skip("there is no copy")
    Job(kind, driver).train(coded(COUNT))
    inside = {}
    for thread, depth, name in profiler.events:
        inside[thread, depth] = name
        if name == "copy":
            assert inside[thread, depth - 1] == "staging"
        if name in ("next", "staging", "hand-over", "step", "waiting"):
            assert depth == 0


@pytest.mark.parametrize("fail", ["next", "stage", "step", "shape"])
def test_ranges_end_where_a_stage_fails(fail, kind, driver, way, profiler):
    def make_pass():
        for k in range(COUNT):
            if k == 4 and fail == "next":
                raise OSError("fails")
            minibatch = batch(k)
            if k == 4 and fail == "stage":
                minibatch["default"] = np.array([[["fails"]]])
            if k == 4 and fail == "shape":
                minibatch["default"] = np.zeros((1, 2, 7))  # fails
            yield minibatch

    def step(update_nr):
        if update_nr == 5 and fail == "step":
            raise OSError("fails")

    job = Job(kind, driver, hooks=[Hook(step)])
    with pytest.raises((OSError, TypeError, ValueError)):
        job.train(From(make_pass))
    assert profiler.is_balanced()
    assert profiler.names()["step"] == 4 + (fail == "step")


def test_ranges_end_with_an_early_stop(kind, driver, way, profiler):
    job = Job(kind, driver, hooks=[stop_at(3)]).train(coded(COUNT))
    assert job.seen == codes(0, 1, 2)
    assert profiler.is_balanced()
    net = Job(kind, driver).net
    for number in dbuf.run_network(net, coded(COUNT)(net.handler)):
        if number == 2:
            break
    assert profiler.is_balanced()


def test_prefetch_has_them_too(kind, driver, way, profiler):
    handler = make_handler(kind, driver)
    with dbuf.Prefetch(coded(COUNT)) as prefetch:
        for _ in range(2):
            for _ in prefetch(handler):
                pass
        for _ in prefetch(handler):
            break
    assert profiler.is_balanced()
    names = profiler.names()
    assert names["step"] == names["hand-over"] == 2 * COUNT + 1
    assert names["next"] >= 2 * (COUNT + 1) + 1


def test_with_ranges_no_back_buffer_is_allocated_twice(kind, driver, profiler):
    """Lent arrays are let go before the next minibatch, as they are without."""
    if kind != "device":
        pytest.skip("looks into the stand-in driver")
    handler = make_handler(kind, driver)
    with dbuf.Prefetch(coded(COUNT), depth=1) as prefetch:
        deque(prefetch(handler), 0)
        calls = driver.fake.calls("cuMemAlloc")
        deque(prefetch(handler), 0)
        assert driver.fake.calls("cuMemAlloc") == calls


def test_weights_are_those_without_them(kind, driver, way, profiler):
    def train(nvtx):
        job = Job(kind, driver, epochs=2)
        job.trainer.nvtx = nvtx
        return job.train(coded(COUNT))

    plain, ranged = train(False), train(None)
    assert profiler.events and plain.seen == ranged.seen
    np.testing.assert_array_equal(
        plain.net.get("parameters"), ranged.net.get("parameters")
    )


def test_timings_are_those_of_the_ranges(driver, profiler, monkeypatch):
    force_worker(monkeypatch)
    job = Job("numpy", driver)
    job.trainer.timed = True
    job.train(coded(COUNT))
    assert job.stats.timings.batches == COUNT == profiler.names()["step"]


# ------------------------------------------------------------------- the package itself


def test_a_profiler_that_nvtx_loads_hears_them(tmp_path):
    """The real package, with a library that listens as profilers do."""
    pytest.importorskip("nvtx", reason="the package nvtx is not installed")
    heard = tmp_path / "heard"
    code = (
        "import brainstorm_dbuf as dbuf, brainstorm as bs\n"
        "from coded import coded_net, coded\n"
        "trainer = dbuf.Trainer(bs.training.SgdStepper(0.1), verbose=False)\n"
        "trainer.add_hook(bs.hooks.StopAfterEpoch(1))\n"
        "trainer.train(coded_net(), coded(3))\n"
    )
    run(code, **{LISTENER: str(build_listener(tmp_path)), "NVTX_HEARD": str(heard)})
    lines = heard.read_text().splitlines()
    assert lines[0] == "domain brainstorm_dbuf"
    pushed = Counter(line[5:] for line in lines if line.startswith("push "))
    assert pushed["next"] == 4 and pushed["step"] == 3
    assert lines.count("pop") == sum(pushed.values())
