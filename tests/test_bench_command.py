"""`brainstorm-dbuf bench`, as a new user would try it, and that it measures right."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import SUBPROCESS_PATH
from test_command_line import run

from brainstorm_dbuf import bench, bench_command
from brainstorm_dbuf.__main__ import main
from brainstorm_dbuf.bench import Row, Workload
from brainstorm_dbuf.feed import Feed

pytestmark = pytest.mark.timeout(60)

SHORT = ("--batch-mib", "0.01", "--seconds", "0.01", "--batch-size", "64")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(bench, "DATA_BYTES", 1 << 18)


def in_json(capsys, *arguments):
    assert main(["bench", *SHORT, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------- what it measures
def test_each_source_and_size_is_a_row(capsys):
    sizes = ("--batch-mib", "0.01", "0.05", "0.01", "--batch-size", "32")
    assert main(["bench", *SHORT, *sizes, "--handler", "numpy", "--rounds", "1"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert all(len(line) <= 88 for line in lines)
    assert " ".join(lines[:2]).startswith("NumpyHandler on ")
    assert "minibatches of 32 samples, 128 units" in " ".join(lines[:2])
    head, *rows = [line.split() for line in lines[2:7]]
    assert head[:7] == "source minibatch iterator link step plain buffered".split()
    assert [(row[0], row[1]) for row in rows] == [
        ("held", "10"),
        ("held", "51"),
        ("noise", "10"),
        ("noise", "51"),
    ]
    for _, _, unit, iterator, link, step, plain, buffered, gain, share, bound in rows:
        assert unit == "KiB" and link == "-"
        assert bound == ("step" if float(step) >= float(iterator) else "iterator")
        assert float(plain) / float(buffered) == pytest.approx(float(gain), 0.05, 0.006)
        part = {"step": step, "iterator": iterator}[bound]
        assert float(part) / float(buffered) == pytest.approx(float(share), 0.05, 0.006)


def test_in_json_has_the_rounds_and_the_machine(capsys):
    told = in_json(capsys, "--source", "noise", "--handler", "numpy", "--rounds", "3")
    assert told["handler"] == "NumpyHandler" and told["batch_size"] == 64
    assert told["link_bytes_per_second"] is None
    assert told["machine"]["versions"]["brainstorm"] == "0.5"
    (row,) = told["rows"]
    assert row["source"] == "noise" and row["nbytes"] == 64 * 41 * 4
    assert row["identical"] is True and row["failed"] is None
    assert set(row["rounds"]) == {"plain", "buffered", "iterator", "step"}
    for name, figures in row["rounds"].items():
        assert len(figures) == 3
        median = row["alone"][name] if name in row["alone"] else row[name]
        assert median == sorted(figures)[1] > 0
    assert row["bound"] == max(row["alone"], key=row["alone"].get)
    assert row["gain"] == row["plain"] / row["buffered"]
    assert row["of_bound"] == row["alone"][row["bound"]] / row["buffered"]


def test_an_iterator_that_waits_is_hidden(monkeypatch):
    """A step and an iterator of about the same time, neither of them the processor's."""

    class Waits(bench._Repeated):
        def __call__(self, handler=None):
            for minibatch in super().__call__(handler):
                time.sleep(0.01)
                yield minibatch

    class Clock(bench.UpdateClock):
        def __call__(self, **others):
            time.sleep(0.01)
            super().__call__(**others)

    monkeypatch.setattr(bench, "_Repeated", Waits)
    monkeypatch.setattr(bench, "UpdateClock", Clock)
    handler = bench_command.make_handler("numpy", 1)
    row = bench.measure(Workload("held", 8, 8, 4), handler, None, 0.1, 3)
    assert row.is_right and row.bound == "iterator"
    assert row.alone["iterator"] >= 0.01
    assert 0.01 <= row.buffered < row.plain
    assert row.plain >= 0.02
    assert row.gain > 1.2


def test_it_measures_on_a_device(cuda, capsys, monkeypatch):
    monkeypatch.setattr(bench, "link_of", lambda handler: 1e9)
    told = in_json(capsys, "--handler", "cuda", "--rounds", "1")
    assert told["handler"] == "CudaHandler"
    assert told["link_bytes_per_second"] == 1e9
    assert told["machine"]["trains_on_device"]
    for row in told["rows"]:
        assert row["alone"]["link"] == row["nbytes"] / 1e9
        assert row["identical"] is True and row["fallbacks"] == []
    assert main(["bench", *SHORT, "--source", "held", "--rounds", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("CudaHandler on ") and "link 1.0 GB/s" in said  # by itself


def test_the_link_is_that_of_the_handlers_device(cuda, monkeypatch):
    monkeypatch.setattr(bench, "link_rate", lambda context, stream: (context, stream))
    context, stream = bench.link_of(cuda)
    assert context == cuda.context and stream != cuda.stream
    assert bench.link_of(bench_command.make_handler("numpy", 1)) is None
    assert bench.link_of(object()) is None


def test_a_link_that_cannot_be_measured_bounds_nothing(cuda, capsys, monkeypatch):
    monkeypatch.setattr(bench, "link_of", lambda handler: math.nan)
    told = in_json(capsys, "--rounds", "1", "--source", "held")
    assert told["link_bytes_per_second"] is None
    assert set(told["rows"][0]["alone"]) == {"iterator", "step"}
    assert main(["bench", *SHORT, "--source", "held", "--rounds", "1"]) == 0
    assert "link not measured" in " ".join(capsys.readouterr().out.split())


# -------------------------------------------------------------------- what goes wrong
def test_weights_that_differ_are_told(monkeypatch, capsys):
    """As where the feed hands over what is not the iterator's."""
    own = Feed.run_network

    def run_network(self, net, iterator, all_inputs=True):
        for number in own(self, net, iterator, all_inputs):
            net.buffer.Input.outputs.default[...] = 0.5
            yield number

    monkeypatch.setattr(Feed, "run_network", run_network)
    arguments = ("--handler", "numpy", "--source", "held", "--rounds", "1")
    assert main(["bench", *SHORT, *arguments]) == 1
    assert "WEIGHTS DIFFER" in capsys.readouterr().out
    assert main(["bench", *SHORT, *arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["rows"][0]["identical"] is False


def test_a_row_that_fails_does_not_end_the_others(monkeypatch, capsys):
    def fails(minibatches):
        raise MemoryError("no such luck " * 10)

    monkeypatch.setitem(bench.SOURCES, "held", fails)
    arguments = ("--handler", "numpy", "--rounds", "1")
    assert main(["bench", *SHORT, *arguments]) == 1
    said = capsys.readouterr().out
    assert all(len(line) <= 88 for line in said.splitlines())
    assert re.search(r"^held +10 KiB FAILED  MemoryError: no such luck", said, re.M)
    assert re.search(r"^noise +10 KiB +\d", said, re.M)
    assert main(["bench", *SHORT, *arguments, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["failed"].startswith("MemoryError: no such luck")
    assert rows[0]["plain"] is None and rows[0]["rounds"] == {}
    assert rows[1]["failed"] is None


def test_what_the_feed_did_instead_is_told():
    row = Row("held", 4096, {"iterator": 1.0, "step": 2.0}, 3.0, 2.5)
    row.fallbacks.append("page-locked memory is short " * 5)
    first, *notes = bench_command.row_as_text(row).splitlines()
    assert first.split()[-3:] == ["1.20", "0.80", "step"]
    assert " ".join(" ".join(notes).split()) == row.fallbacks[0].strip()
    assert all(len(note) <= 88 for note in notes)


def test_rounds_that_differ_are_told(monkeypatch, capsys):
    def measured(quickest):
        rounds = {"plain": [2.0, 2.1], "buffered": [quickest, 1.5]}
        alone = {"iterator": 1.0, "step": 1.0}
        return lambda *_: Row("held", 4096, alone, 2.0, 1.5, rounds=rounds)

    arguments = ("bench", "--handler", "numpy", "--source", "held", *SHORT)
    monkeypatch.setattr(bench, "measure", measured(1.4))
    assert main(arguments) == 0
    assert "differ" not in capsys.readouterr().out
    monkeypatch.setattr(bench, "measure", measured(0.5))
    assert main(arguments) == 0
    assert "in one row by a factor of 3.0: if other" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--handler", "gpu"], "argument --handler: invalid choice: 'gpu'"),
        (["--source", "disk"], "argument --source: invalid choice: 'disk'"),
        (["--batch-mib"], "argument --batch-mib: expected at least one argument"),
        (["--batch-mib", "1", "0"], "--batch-mib: invalid positive float value: '0'"),
        (["--batch-mib", "inf"], "--batch-mib: invalid positive float value: 'inf'"),
        (["--seconds", "nan"], "argument --seconds: invalid positive float value"),
        (["--rounds", "0"], "argument --rounds: invalid positive int value: '0'"),
        (["--units", "1.5"], "argument --units: invalid positive int value: '1.5'"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(arguments, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--batch-mib", "1e9"], ["--units", "999999999"], ["--batch-size", "999999999"]],
)
def test_more_memory_than_there_is_is_refused_before_anything_runs(arguments, capsys):
    assert main(["bench", "--handler", "numpy", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("brainstorm-dbuf bench: ") and arguments[0] in said.err
    assert "GiB of memory, more than this process may use" in said.err


def test_a_handler_that_cannot_be_had_ends_with_3():
    done = run("bench", "--handler", "cuda", BRAINSTORM_DBUF_LIBCUDA="/nowhere/libcuda")
    assert done.returncode == 3 and done.stdout == ""
    assert "bench: --handler cuda: " in done.stderr and "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_brainstorm_it_says_how_to_get_it():
    done = run("bench", before="import sys; sys.modules['brainstorm'] = None")
    assert done.returncode == 3 and done.stdout == ""
    assert "python -m brainstorm_dbuf.install_brainstorm" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_ctrl_c_ends_it_at_once(arguments):
    code = (
        "import sys\nimport brainstorm_dbuf.bench\n"
        "from brainstorm_dbuf.__main__ import main\n"
        "print('begun', file=sys.stderr, flush=True)\nsys.exit(main(sys.argv[1:]))"
    )
    options = ("bench", "--handler", "numpy", "--seconds", "50", *arguments)
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SUBPROCESS_PATH},
    )
    assert process.stderr.readline() == "begun\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said == "\nbrainstorm-dbuf bench: interrupted\n"


def test_a_pipe_that_is_closed_ends_it_quietly():
    done = run(
        *("bench", "--handler", "numpy", *SHORT),
        before="import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1)",
    )
    assert done.returncode == 141 and done.stderr == ""


# ---------------------------------------------------------------------- its workloads
def test_minibatches_are_the_same_each_time_and_all_of_one_size():
    for source in bench.SOURCES:
        load = Workload(source, 8, 6, 4)
        data = load.data_set()
        passes = [list(load.iterator(data, 11)(None)) for _ in range(2)]
        assert [len(minibatches) for minibatches in passes] == [11, 11]
        for one, other in zip(*passes, strict=True):
            assert one["default"].shape == (1, 8, 6)
            assert one["targets"].shape == (1, 8, 1)
            assert np.array_equal(one["default"], other["default"])


def test_the_data_are_more_than_the_caches_hold_but_no_more_than_needed(monkeypatch):
    monkeypatch.setattr(bench, "DATA_BYTES", 64 << 20)
    for features, distinct in ((10, 256), (1024, 64), (65536, 4), (262144, 4)):
        load = Workload("held", 256, features, 128)
        assert load.distinct == distinct
        assert load.memory_bytes > load.nbytes * distinct
