"""Where the time goes: what is noted, what is said of it, and what it shows."""

from __future__ import annotations

import json
import math
import sys
import time

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.describable import create_from_description, get_description
from brainstorm_dbuf import timeline, timings
from brainstorm_dbuf.timings import BatchTimes, FeedSummary, summarize
from coded import Hook, Job, batch, coded, codes, stop_at
from parity import force_worker, make_handler

pytestmark = [pytest.mark.timeout(20), pytest.mark.usefixtures("nothing_left")]

COUNT = 12


class Slow(bs.data_iterators.DataIterator):
    """Coded minibatches, each of which takes a while."""

    def __init__(self, seconds, count=COUNT, samples=2):
        self.seconds, self.count, self.samples = seconds, count, samples
        super().__init__({k: v.shape for k, v in batch(0).items()}, count)

    def __call__(self, handler=None):
        for k in range(self.count):
            time.sleep(self.seconds)
            yield batch(k, samples=self.samples)


def timed(kind, driver, iterator, hooks=(), **options):
    job = Job(kind, driver, hooks=hooks, **options)
    job.trainer.timed = True
    job.train(iterator)
    return job


# -------------------------------------------------------------------- what is noted


def test_each_minibatch_has_a_record(kind, driver, way):
    job = timed(kind, driver, coded(COUNT), epochs=2)
    assert job.seen == codes(*range(COUNT)) * 2
    records = job.stats.timings.records
    assert [times.number for times in records] == list(range(2 * COUNT))
    assert job.stats.timings.batches == 2 * COUNT == job.stats.batches
    per_batch = sum(array.nbytes for array in batch(0).values())
    for times in records:
        assert times.next_begin <= times.next_end <= times.staged
        assert times.wait_begin <= times.wait_end <= times.step_begin
        assert times.step_begin <= times.step_end
        assert times.staged <= times.step_begin
        assert times.nbytes == per_batch
        assert times.wait_seconds >= 0
    # The trainer's own times do not overlap.
    for before, after in zip(records, list(records)[1:]):
        assert before.step_end <= after.wait_begin


def test_a_worker_is_told_from_the_trainer(kind, driver, monkeypatch):
    force_worker(monkeypatch)
    records = timed(kind, driver, coded(COUNT)).stats.timings.records
    assert [times.by_worker for times in records] == [False] + [True] * (COUNT - 1)


def test_copies_to_the_device_are_timed_by_its_own_events(kind, driver, slot_way):
    if kind == "numpy":
        pytest.skip("there is no copy")
    job = timed(kind, driver, coded(COUNT))
    copied = [times.copy_seconds >= 0 for times in job.stats.timings.records]
    # Of the last ones the device may not have told when it was asked.
    assert copied.count(True) >= COUNT - 2
    summary = job.stats.timings.summary(0)
    assert summary.copy >= 0
    assert math.isnan(summary.link_bytes_per_second) or (
        summary.link_bytes_per_second > 0
    )


def test_on_the_host_nothing_crosses_a_link(driver, way):
    if way == "ahead":
        pytest.skip("only what goes to a device is queued ahead")
    summary = timed("numpy", driver, coded(COUNT)).stats.timings.summary(0)
    assert math.isnan(summary.copy) and math.isnan(summary.bytes_per_second)


def test_the_times_are_those_that_were_taken(driver, monkeypatch):
    """A slow iterator and a step that takes half as long."""
    force_worker(monkeypatch)
    step = Hook(lambda _: time.sleep(0.005))
    job = timed("numpy", driver, Slow(0.01), hooks=[step])
    summary = job.stats.timings.summary(2)
    assert summary.batches == COUNT - 2
    assert 0.010 <= summary.next < 0.015
    assert 0.005 <= summary.step < 0.010
    assert 0.003 <= summary.waiting < 0.010
    # The first of them may have been on its way already when it was asked for.
    assert summary.update >= 0.009
    assert summary.prepared_by_trainer == 0
    assert summary.bound == "iterator"
    assert "bound by the iterator: next() takes 1" in job.stats.verdict


def test_nothing_is_noted_unless_asked_for(kind, driver, way):
    job = Job(kind, driver)
    job.train(coded(COUNT))
    assert job.stats.timings is None
    assert job.stats.verdict == (
        "feed: not timed (timed=True, or a hook such as MonitorFeed)"
    )


def test_only_so_many_records_are_kept(driver, monkeypatch):
    monkeypatch.setattr(timings, "RECORDS_KEPT", 5)
    found = timed("numpy", driver, coded(COUNT)).stats.timings
    assert [times.number for times in found.records] == list(range(COUNT - 5, COUNT))
    assert found.batches == COUNT


def test_a_step_that_fails_or_stops_has_no_record(kind, driver, way):
    stopped = timed(kind, driver, coded(COUNT), hooks=[stop_at(5)])
    assert stopped.stats.timings.batches == 4
    job = Job(kind, driver, hooks=[Hook(fail_at_3)])
    job.trainer.timed = True
    with pytest.raises(OSError, match="third"):
        job.train(coded(COUNT))
    assert job.stats.timings.batches == 2


def fail_at_3(update_nr, **_):
    if update_nr == 3:
        raise OSError("third")


def test_prefetch_is_timed_too(kind, driver, way):
    handler = make_handler(kind, driver)
    with dbuf.Prefetch(coded(COUNT), timed=True) as prefetch:
        for _ in range(2):
            for _ in prefetch(handler):
                time.sleep(0.001)
        found = prefetch.stats.timings
    assert found.batches == 2 * COUNT
    assert found.summary(0).step >= 0.001
    assert dbuf.Prefetch(coded(COUNT)).stats.timings is None


# ---------------------------------------------------------------- what is said of it


def times(begin, next_, staging, copy, wait, step, by_worker=True):
    """Return a record; its stages one after another."""
    record = BatchTimes(by_worker, begin, begin + next_, begin + next_ + staging, 100)
    record.copy_begin, record.copy_end = 0.0, copy
    record.wait_begin, record.wait_end = begin, begin + wait
    record.step_begin, record.step_end = begin + wait, begin + wait + step
    if by_worker:
        record.next_begin -= 100
        record.next_end -= 100
        record.staged -= 100
    return record


@pytest.mark.parametrize(
    "next_, staging, copy, wait, step, bound, says",
    [
        (1, 1, 1, 0.1, 10, "compute", "the step takes 10000.00 ms"),
        (9, 1, math.nan, 8, 1, "iterator", "next() takes 9000.00 ms a minibatch"),
        (1, 9, 9.5, 8, 1, "staging", "staging takes 9000.00 ms a minibatch"),
        (0, 0.1, 9, 8, 1, "link", "the copy takes 9000.00 ms (0.0 GB/s)"),
        # The device waits for the copy, within the step.
        (0, 0.1, 9.5, 0, 10, "link", "of an update of 10000.00 ms"),
        (0, 0.1, math.nan, 0, 10, "compute", "0% of an update of 10000.00 ms"),
        (3, 1, 4, 2, 5, "compute", "hold the trainer up for 29% of an update"),
    ],
)
def test_the_verdict_names_the_bound(next_, staging, copy, wait, step, bound, says):
    records = [times(20 * k, next_, staging, copy, wait, step) for k in range(3)]
    summary = summarize(records)
    assert summary.bound == bound
    assert f"bound by {'the ' * (bound in ('iterator', 'link'))}{bound}: " in (
        summary.verdict
    )
    assert says in summary.verdict


def test_what_the_trainer_prepares_itself_holds_it_up():
    records = [times(20 * k, 4, 1, math.nan, 5, 5, False) for k in range(3)]
    summary = summarize(records)
    assert summary.waiting == pytest.approx(0)
    assert summary.held_up == pytest.approx(0.5)
    assert summary.bound == "iterator"


def test_without_a_minibatch_there_is_no_verdict():
    assert summarize([]).bound == ""
    assert "too few minibatches" in FeedSummary().verdict


def test_the_links_rate_is_told_beside_that_of_the_feed():
    summary = summarize([times(0, 0, 0, 1e-6, 0, 1e-6)], 2e9)
    assert "(0.1 of 2.0 GB/s)" in summary.verdict


# --------------------------------------------------------------------------- hooks


def test_monitor_feed_logs_the_means_since_the_last_log(driver, capsys):
    hook = dbuf.hooks.MonitorFeed(timescale="update", interval=5, verbose=True)
    job = Job("numpy", driver, hooks=[hook], epochs=2)
    job.train(coded(COUNT))
    logs = job.trainer.logs["MonitorFeed"]
    assert set(logs) == {
        "next_ms",
        "staging_ms",
        "copy_ms",
        "waiting_ms",
        "step_ms",
        "gigabytes_per_second",
    }
    # Before training, then after updates 5, 10, 15 and 20.
    assert math.isnan(logs["step_ms"][0])
    assert len(logs["step_ms"]) == 5 and all(ms > 0 for ms in logs["step_ms"][1:])
    assert "MonitorFeed >> feed: bound by" in capsys.readouterr().out


@pytest.mark.parametrize("trainer", [bs.Trainer, dbuf.Trainer])
def test_where_nothing_is_fed_monitor_feed_logs_nan(trainer, driver):
    hook = dbuf.hooks.MonitorFeed()
    job = Job("numpy", driver, hooks=[hook], double_buffering=False)
    if trainer is bs.Trainer:
        job.trainer.__class__ = bs.Trainer
    job.train(coded(COUNT))
    logs = job.trainer.logs["MonitorFeed"]
    assert all(math.isnan(ms) for ms in logs["step_ms"])


def test_the_hooks_are_describable():
    hooks = (
        dbuf.hooks.MonitorFeed("feed", "update", 7, verbose=False),
        dbuf.hooks.SaveFeedTimeline("a.svg", 3, 2),
    )
    for hook in hooks:
        again = create_from_description(get_description(hook))
        assert type(again) is type(hook)
        assert get_description(again) == get_description(hook)
        assert again.feed_stats is None


def test_weights_and_logs_are_those_without_the_hooks(kind, driver, way, tmp_path):
    def run(*hooks):
        job = Job(kind, driver, hooks=hooks, epochs=2)
        job.train(coded(COUNT))
        return job

    hooks = (
        dbuf.hooks.MonitorFeed(verbose=False),
        dbuf.hooks.SaveFeedTimeline(tmp_path / "a.json"),
    )
    plain, watched = run(), run(*hooks)
    assert plain.seen == watched.seen
    np.testing.assert_array_equal(
        plain.net.get("parameters"), watched.net.get("parameters")
    )
    assert (
        plain.trainer.logs["rolling_training"]
        == watched.trainer.logs["rolling_training"]
    )


# ------------------------------------------------------------------------ timelines


def test_a_trace_has_each_stage_of_each_minibatch(kind, driver, tmp_path, slot_way):
    file = tmp_path / "feed.json"
    hook = dbuf.hooks.SaveFeedTimeline(file, batches=4, first=3)
    Job(kind, driver, hooks=[hook]).train(coded(COUNT))
    events = json.loads(file.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(lanes.values()) == ["iterator", "staging", "copy", "waiting", "step"]
    bars = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["minibatch"] for event in bars} == {3, 4, 5, 6}
    assert min(event["ts"] for event in bars) == 0
    assert all(event["dur"] > 0 for event in bars)
    steps = [event for event in bars if lanes[event["tid"]] == "step"]
    assert [event["name"] for event in steps] == [f"step {k}" for k in (3, 4, 5, 6)]
    for before, after in zip(steps, steps[1:]):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


@pytest.mark.parametrize("ending, magic", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_drawn(ending, magic, driver, tmp_path, capsys):
    file = tmp_path / f"feed.{ending}"
    hook = dbuf.hooks.SaveFeedTimeline(file, verbose=True)
    Job("numpy", driver, hooks=[hook]).train(coded(COUNT))
    assert file.read_bytes().startswith(magic)
    assert f"SaveFeedTimeline >> {file} shows 6 minibatches" in capsys.readouterr().out


def test_a_picture_of_the_middle_shows_the_worker(driver, tmp_path, monkeypatch):
    """Which each pass starts only after its first minibatch."""
    force_worker(monkeypatch)
    file = tmp_path / "feed.json"
    hook = dbuf.hooks.SaveFeedTimeline(file, batches=4)
    Job("numpy", driver, hooks=[hook], epochs=4).train(coded(6))
    events = json.loads(file.read_text())["traceEvents"]
    shown = {event["args"].get("minibatch") for event in events} - {None}
    # Number 12 is the first of the third pass.
    assert shown == {13, 14, 15, 16}


def test_where_there_are_few_minibatches_the_last_are_shown(driver, tmp_path):
    file = tmp_path / "feed.json"
    hook = dbuf.hooks.SaveFeedTimeline(file, batches=4, first=100)
    Job("numpy", driver, hooks=[hook]).train(coded(3))
    events = json.loads(file.read_text())["traceEvents"]
    shown = {event["args"].get("minibatch") for event in events} - {None}
    assert shown == {0, 1, 2}


def test_what_would_fail_at_the_end_fails_before_training(
    driver, tmp_path, monkeypatch
):
    for name, error in (("no/such/feed.png", FileNotFoundError), ("a.xyz", ValueError)):
        job = Job("numpy", driver, hooks=[dbuf.hooks.SaveFeedTimeline(tmp_path / name)])
        with pytest.raises(error):
            job.train(coded(COUNT))
        assert job.seen == []
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"brainstorm-dbuf\[plot\]"):
        timeline.check_can_write("feed.png")
    timeline.check_can_write("feed.json")


@pytest.mark.parametrize("wrong", [{"batches": 0}, {"first": -1}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dbuf.hooks.SaveFeedTimeline("a.png", **wrong)
