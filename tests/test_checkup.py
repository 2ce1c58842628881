"""What `brainstorm-dbuf check` finds, and that it finds what is wrong."""

from __future__ import annotations

import json
import math

import pytest

from brainstorm_dbuf import checkup
from brainstorm_dbuf.__main__ import main
from brainstorm_dbuf.checkup import Check, ceiling_of
from brainstorm_dbuf.machine import Survey, survey
from brainstorm_dbuf.feed import Feed
from brainstorm_dbuf.timings import BatchTimes
from conftest import KIND
from test_command_line import run

pytestmark = pytest.mark.timeout(60)

HERE = Survey()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """On the stand-in driver a processor does what the device should."""
    if KIND != "real":
        for name, size in (("SAMPLES", 16), ("FEATURES", 1200), ("UNITS", 4)):
            monkeypatch.setattr(checkup, name, size)


def test_without_a_device_the_rest_is_looked_at():
    done = run("check", BRAINSTORM_DBUF_LIBCUDA="/nowhere/libcuda.so.1")
    assert done.returncode == 0, done.stdout
    said = " ".join(done.stdout.split())
    assert "parity, NumpyHandler ok 3,466 of 3,466 weights" in said
    assert "overlap of iterator and step ok an update takes" in said
    assert "on a device - " in said and "/nowhere/libcuda.so.1" in said
    assert done.stderr == ""


def test_without_brainstorm_it_says_how_to_get_it():
    done = run("check", before="import sys; sys.modules['brainstorm'] = None")
    assert done.returncode == 3
    assert "python -m brainstorm_dbuf.install_brainstorm" in done.stderr
    assert done.stdout == ""


def test_all_of_it_on_a_device(cuda):
    checks = {check.name: check for check in checkup.checkup(survey())}
    assert list(checks) == [
        "parity, NumpyHandler",
        "parity, CudaHandler",
        "overlap of iterator and step",
        "overlap of copy and step",
        "link to device 0",
    ]
    assert all(check.passed is not False for check in checks.values()), checks
    if KIND == "real":
        assert checks["overlap of copy and step"].passed
        assert "GB/s" in checks["link to device 0"].found


def test_weights_that_differ_are_found(monkeypatch):
    """As where a minibatch is trained twice."""
    own = Feed.run_network

    def run_network(self, net, iterator, all_inputs=True):
        for number in own(self, net, iterator, all_inputs):
            yield number
            yield number

    monkeypatch.setattr(Feed, "run_network", run_network)
    first = next(checkup.checkup(HERE))
    assert first.name == "parity, NumpyHandler" and first.passed is False


def test_a_feed_that_does_not_overlap_is_found(monkeypatch):
    monkeypatch.setattr(Feed, "pays", property(lambda self: False))
    found = {check.name: check for check in checkup.checkup(HERE)}
    assert found["overlap of iterator and step"].passed is False
    assert found["parity, NumpyHandler"].passed


def test_what_cannot_run_at_all_is_a_finding(monkeypatch, capsys):
    def fails(make_handler):
        raise OSError("no such luck")

    monkeypatch.setattr(checkup, "_parity", fails)
    monkeypatch.setattr("brainstorm_dbuf.__main__.survey", lambda: HERE)
    assert main(["check"]) == 1
    said = capsys.readouterr().out
    assert "FAILED  OSError: no such luck" in said
    assert main(["check", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["passed"] is False
    assert said["checks"][0] == {
        "name": "parity, NumpyHandler",
        "passed": False,
        "found": "OSError: no such luck",
    }


@pytest.mark.parametrize(
    "copies, share",
    [
        # As the minibatch before is trained, and two ahead; a half of it in a step; none.
        ([(0, 0), (11, 14), (21, 24)], 1.0),
        ([(0, 0), (0, 0), (11, 14)], 1.0),
        ([(0, 0), (8, 12), (8, 12)], 0.5),
        ([(0, 0), (16, 19), (26, 29)], 0.0),
        ([(11, 14), (math.nan, math.nan), (math.nan, math.nan)], None),
    ],
)
def test_copies_within_steps_are_hidden(copies, share):
    records = []
    for number, times in enumerate(copies):
        record = BatchTimes(False, 0, 0, 0, 1)
        record.copy_begin, record.copy_end = times
        record.step_begin, record.step_end = 10 * number + 10, 10 * number + 15
        records.append(record)
    assert checkup._share_within_steps(records) == share


def test_a_slow_link_is_found(cuda, monkeypatch):
    monkeypatch.setattr("brainstorm_dbuf.copy_clock.link_rate", lambda *_: 25e9)
    assert checkup._link("2.5 GT/s x16 of 32.0 GT/s x16") == (
        False,
        "25.0 GB/s from page-locked memory, 40% of the 63.0 that 32.0 GT/s x16 can carry "
        "at most",
    )
    assert checkup._link("2.5 GT/s x16 of 16.0 GT/s x16")[0] is True
    assert checkup._link(None)[0] is None


@pytest.mark.parametrize(
    "state, gigabytes",
    [
        ("2.5 GT/s x1 of 2.5 GT/s x16", 4.0),
        ("2.5 GT/s x16 of 8.0 GT/s x16", 15.754),
        ("16.0 GT/s x16 of 32.0 GT/s x8", 31.508),
        ("Unknown x0 of Unknown x0", None),
        ("", None),
        (None, None),
    ],
)
def test_the_ceiling_is_that_of_the_links_best_state(state, gigabytes):
    found = ceiling_of(state)
    assert (
        found is None
        if gigabytes is None
        else found / 1e9 == pytest.approx(gigabytes, abs=1e-3)
    )


def test_a_check_is_told_in_lines_of_88():
    from brainstorm_dbuf.__main__ import check_as_text

    said = check_as_text(Check("a name", None, "words " * 30))
    assert all(len(line) <= 88 for line in said.splitlines())
