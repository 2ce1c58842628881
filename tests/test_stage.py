"""stage(): np.copyto's bytes, on any number of threads."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import threading
import time
import warnings
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from binding_tools import run_script
from brainstorm_dbuf._cuda import stage

pytestmark = pytest.mark.timeout(60)

SOURCE = Path(__file__).parent.parent / "src" / "cuda" / "cpu_allowance.c"
TYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
SOURCES = [order + t for t in TYPES for order in "<>" if t[-1] != "1" or order == "<"]
SOURCES.remove(">?")
DESTS = ["f4", "f8"]
THREADS = [1, 2, 5]
# More than one thread takes a part of, and more than is streamed.
LARGE, STREAMED = 300_000, 1_100_000


def numbers(dtype, size, seed=0):
    """Any bits, special values first; NaNs are quiet, the others raise exceptions."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    native = dtype.newbyteorder("=")
    array = rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(native)
    if dtype.kind == "f":
        info = np.finfo(native)
        special = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, info.max, -info.max]
        special += [info.tiny, info.smallest_subnormal, -info.smallest_subnormal, 1 / 3]
        if dtype.itemsize == 8:  # halfway cases, float32's subnormals and beyond
            special += [1 + 2.0**-24, 1 + 3 * 2.0**-24, 1e-40, 1e-46, 1e300, -1e300]
            special += [float(np.finfo("f4").max), 3.4028235677973366e38]
        array[np.isnan(array)] = np.nan
    elif dtype.kind in "iu":
        info = np.iinfo(native)
        near = [1 << k for k in range(8 * dtype.itemsize)]
        special = [v + d for v in near for d in (-1, 0, 1)] + [info.min, info.max]
        special += [(1 << 62) + (1 << 38), (1 << 62) + (1 << 38) + 1, (1 << 63) + 1025]
        special = [v for v in special if info.min <= v <= info.max]
    else:
        special = []
    special = np.array(special, native)[:size]
    array[: len(special)] = special
    return array.astype(dtype)


def native(source):
    """Its own dtype: nothing is cast, at most the bytes are put in order."""
    return np.dtype(source).newbyteorder("=")


def check(dest_type, src, threads):
    expected = np.empty(src.shape, dest_type)
    dest = np.full(src.shape, 7, dest_type)
    before = src.tobytes()
    with np.errstate(all="ignore"):
        np.copyto(expected, src, casting="unsafe")
        stage(dest, src, threads)
    assert dest.tobytes() == expected.tobytes()
    assert src.tobytes() == before


def five_axes(array):
    return array[:6000].reshape(2, 3, 4, 5, 50)


LAYOUTS = {
    "contiguous": lambda a: a.reshape(30, -1),
    "0-d": lambda a: a[7],
    "0-sized": lambda a: a.reshape(30, -1)[:, :0],
    "transposed": lambda a: a.reshape(30, -1).T,
    "sliced": lambda a: a.reshape(30, -1)[:, 3:-5],
    "last axis strided": lambda a: a.reshape(30, -1)[:, 1::3],
    "reversed": lambda a: a[::-1],
    "reversed and strided": lambda a: a.reshape(30, -1)[::-2, ::-3],
    "broadcast": lambda a: np.broadcast_to(a[:700], (90, 700)),
    "broadcast along the last": lambda a: np.broadcast_to(a[:700, None], (700, 90)),
    "5 axes": lambda a: five_axes(a)[:, ::-1, 1:3, :, ::2],
    "5 axes transposed": lambda a: five_axes(a).transpose(3, 0, 4, 2, 1),
    "axes of one": lambda a: a[:600].reshape(1, 20, 1, 30, 1)[:, 1::2],
    "a batch of a sequence": lambda a: a.reshape(3, 20, -1)[:, 5:12],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_each_dtype_and_layout_gives_numpys_bytes(source, layout):
    src = np.asarray(LAYOUTS[layout](numbers(source, 60_000)))
    src.flags.writeable = False
    for dest_type in (*DESTS, native(source)):
        check(dest_type, src, 1)


@pytest.mark.parametrize("source", SOURCES)
def test_threads_and_streaming_give_numpys_bytes(source):
    for size, threads, dest_type in itertools.product(
        (LARGE, STREAMED + 13), THREADS, (*DESTS, native(source))
    ):
        src = numbers(source, size)
        check(dest_type, src, threads)
        check(dest_type, src[::-1], threads)
        check(dest_type, src[: size // 3 * 3].reshape(3, -1)[:, 5:-3], threads)


@pytest.mark.parametrize("threads", THREADS)
def test_a_streamed_dest_may_begin_anywhere(threads):
    src = numbers("f8", STREAMED + 3)
    block = np.zeros(STREAMED + 100, "f4")
    for start in range(17):
        dest = block[start : start + src.size]
        block[:] = 5
        with np.errstate(all="ignore"):
            stage(dest, src, threads)
            assert dest.tobytes() == src.astype("f4").tobytes()
        assert (block[:start] == 5).all() and (block[start + src.size :] == 5).all()


def test_every_half_gives_numpys_float():
    halves = np.arange(1 << 16, dtype="u2").view("f2")
    quiet = halves[~np.isnan(halves) | (halves.view("u2") & 0x200 != 0)]
    assert quiet.size > 64_000
    for order, dest_type in itertools.product("<>", DESTS):
        check(dest_type, quiet.astype(f"{order}f2"), 1)
        dest = np.empty(halves.shape, dest_type)
        stage(dest, halves.astype(f"{order}f2"))
        assert (np.isnan(dest) == np.isnan(halves)).all()


def test_a_signalling_nan_keeps_its_bits_where_there_is_no_cast():
    for dtype, bits in (("f4", 0x7F800001), ("f8", 0x7FF0000000000001)):
        word = dtype.replace("f", "u")
        src = np.full(9, bits, word).view(dtype)
        for source in (src, src.byteswap().view(src.dtype.newbyteorder())):
            dest = np.empty(9, dtype)
            stage(dest, source)
            assert (dest.view(word) == bits).all()


def test_a_bool_that_is_neither_0_nor_1_counts_as_true():
    src = np.arange(256, dtype=np.uint8).view(bool)
    for dest_type in (*DESTS, bool):
        check(dest_type, src, 1)


def test_elements_at_odd_addresses_are_read():
    packed = [("a", "u1"), ("b", "f8"), ("c", "i4"), ("d", "f2")]
    records = np.zeros(999, packed)
    records["b"], records["c"], records["d"] = np.arange(3 * 999).reshape(3, 999)
    for name, dest_type in itertools.product("bcd", DESTS):
        check(dest_type, records[name], 1)
    odd = np.frombuffer(b"x" + np.arange(999, dtype="f4").tobytes(), "f4", offset=1)
    assert not odd.flags.aligned
    for dest_type in DESTS:
        check(dest_type, odd, 1)


@hypothesis.settings(deadline=None)
@hypothesis.given(data=st.data())
def test_any_view_gives_numpys_bytes(data):
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=7))
    source = data.draw(st.sampled_from(SOURCES))
    src = numbers(source, int(np.prod(shape))).reshape(shape)
    src = src.transpose(data.draw(st.permutations(range(src.ndim))))
    if src.ndim:
        src = src[data.draw(hnp.basic_indices(src.shape, allow_newaxis=True))]
    for dest_type in DESTS:
        check(dest_type, np.asarray(src), data.draw(st.sampled_from(THREADS)))


# ---- What is left to NumPy ----


@pytest.mark.parametrize(
    ("dest_type", "source"),
    [("f4", "g"), ("f4", "O"), ("f4", "U5"), ("f4", "m8[s]"), ("f2", "f4"),
     ("i4", "f8"), (">f4", "f4"), ("f8", "g"), ("?", "i4"), ("O", "i4")],
)  # fmt: skip
def test_other_dtypes_are_copied_as_numpy_does(dest_type, source):
    src = np.arange(12).astype(source).reshape(3, 4).T
    dest, expected = np.empty(src.shape, dest_type), np.empty(src.shape, dest_type)
    np.copyto(expected, src, casting="unsafe")
    stage(dest, src)
    assert dest.tolist() == expected.tolist()


def test_complex_numbers_warn_as_with_numpy():
    with pytest.warns(np.exceptions.ComplexWarning if hasattr(np, "exceptions")
                      else np.ComplexWarning):  # fmt: skip
        stage(np.empty(3, "f4"), np.ones(3, complex))


def test_arrays_that_overlap_are_copied_as_if_they_did_not():
    for make in (
        lambda b: (b[1:], b[:-1]),
        lambda b: (b, b[::-1]),
        lambda b: (b[:50].reshape(5, 10), b[50:100].reshape(10, 5).T),
        lambda b: (b[: len(b) // 2], b[::2]),
        lambda b: (b[: len(b) // 2], b.view("i8")),
    ):
        ours, numpys = np.arange(LARGE, dtype="f4"), np.arange(LARGE, dtype="f4")
        stage(*make(ours))
        np.copyto(*make(numpys), casting="unsafe")
        assert ours.tobytes() == numpys.tobytes()


@pytest.mark.parametrize("size", [3, 2 * LARGE])
def test_a_cast_that_overflows_warns_and_raises_as_with_numpy(size):
    src, dest = np.ones(size), np.empty(size, "f4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stage(dest, src, 2)
        src[1] = 1e-300
        stage(dest, src, 2)
    refused = pytest.raises(FloatingPointError, match="underflow")
    with np.errstate(under="raise"), refused:
        stage(dest, src, 2)
    src[1] = 1e300
    with pytest.warns(RuntimeWarning, match="overflow encountered in cast"):
        stage(dest, src, 2)
    with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow"):
        stage(dest, src, 2)
    with np.errstate(over="ignore"):
        stage(dest, src, 2)
    assert dest[1] == np.inf and dest[-1] == 1
    src.view("u8")[1] = 0x7FF0000000000001
    with pytest.warns(RuntimeWarning, match="invalid value"):
        stage(dest, src, 2)
    src[1] = 1
    stage(dest, src, 2)


# ---- Refusals ----


def test_shapes_that_differ_are_refused_by_name():
    both = r"dest has the shape \(2, 3\), src the shape \(3, 2\)"
    with pytest.raises(ValueError, match=both):
        stage(np.empty((2, 3), "f4"), np.empty((3, 2)))
    with pytest.raises(ValueError, match="shape"):
        stage(np.empty((2, 3), "f4"), np.empty(3))


def test_a_dest_that_cannot_be_filled_in_one_go_is_refused():
    fixed = np.empty(4, "f4")
    fixed.flags.writeable = False
    odd = np.frombuffer(bytearray(17), "f4", offset=1)
    for dest, word in (
        (fixed, "writable"),
        (np.empty(8, "f4")[::2], "C-contiguous"),
        (np.empty((2, 2), "f4", "F"), "C-contiguous"),
        (odd, "aligned"),
    ):
        with pytest.raises(ValueError, match=f"dest is not {word}"):
            stage(dest, np.zeros(dest.shape))


def test_other_arguments_are_refused():
    array = np.empty(4, "f4")
    for arguments in (([1.0] * 4, array), (array, [1.0] * 4), (array,), (array, None)):
        with pytest.raises(TypeError):
            stage(*arguments)
    with pytest.raises(TypeError):
        stage(array, array, 1.5)
    with pytest.raises(TypeError):
        stage(array, array, workers=1)
    with pytest.raises(ValueError, match="threads must be from 0"):
        stage(array, array, -1)
    stage(array, np.ones(4), threads=10_000)
    assert (array == 1).all()


# ---- Threads and processes ----


def test_two_threads_may_stage_at_once():
    wrong = []

    def work(seed):
        src = np.random.default_rng(seed).random(LARGE)
        expected, dest = src.astype("f4"), np.empty(LARGE, "f4")
        for _ in range(150):
            dest[:] = 0
            stage(dest, src, 3)
            if not (dest == expected).all():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_python_goes_on_while_elements_are_moved():
    src, dest = np.zeros(40 << 20, np.uint8)[None], np.empty((1, 40 << 20), "f4")
    stage(dest, src, 2)
    inside, done, seen = threading.Event(), threading.Event(), []

    def watch():
        inside.wait()
        while not done.is_set():
            seen.append(time.perf_counter())

    watcher = threading.Thread(target=watch)
    watcher.start()
    inside.set()
    spans = []
    for _ in range(5):
        start = time.perf_counter()
        stage(dest, src, 1)
        spans.append((start, time.perf_counter()))
    done.set()
    watcher.join()
    middle = [(a + (b - a) / 4, b - (b - a) / 4) for a, b in spans]
    assert any(a < moment < b for moment in seen for a, b in middle)


SCRIPT = """
import os, sys, threading
import numpy as np
from brainstorm_dbuf._cuda import stage
src = np.random.default_rng(0).random(1_000_000)
expected = src.astype("f4")
def once(threads=3):
    dest = np.zeros(src.shape, "f4")
    stage(dest, src, threads)
    assert dest.tobytes() == expected.tobytes()
def threads_there():
    return len(os.listdir("/proc/self/task"))
"""


def run(script, **environment):
    done = run_script(SCRIPT + script, env={**os.environ, **environment})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_threads_are_made_once_and_a_small_copy_makes_none():
    run("""
before = threads_there()
stage(np.empty(1000, "f4"), np.ones(1000), 3)
assert threads_there() == before
once()
assert threads_there() == before + 2
for _ in range(20): once()
assert threads_there() == before + 2
once(2); once(5)
assert threads_there() == before + 4
""")


@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_makes_a_team_of_its_own(busy):
    run(f"""
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
once()
stop = []
def work():
    while not stop: once()
worker = threading.Thread(target=work)
if {busy}: worker.start()
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        assert threads_there() == 1
        once()
        os._exit(0 if threads_there() == 3 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    once()
stop.append(1)
if {busy}: worker.join()
""")


@pytest.mark.parametrize("ending", ["", "sys.exit()", "os._exit(0)"])
def test_a_process_ends_around_threads_that_copy(ending):
    run(f"""
def work():
    while True: once()
for _ in range(2): threading.Thread(target=work, daemon=True).start()
for _ in range(5): once()
{ending}
""")


def test_signals_are_left_to_pythons_threads():
    run("""
import signal
before = set(os.listdir("/proc/self/task"))
once()
for task in set(os.listdir("/proc/self/task")) - before:
    with open(f"/proc/self/task/{task}/status") as file:
        status = file.read()
    blocked = int(status.split("SigBlk:")[1].split()[0], 16)
    assert blocked & 1 << signal.SIGINT - 1
""")


def test_the_environment_sets_the_number_of_threads():
    count = "before = threads_there(); once(0); print(threads_there() - before)"
    assert run(count, BRAINSTORM_DBUF_STAGING_THREADS="1") == "0\n"
    assert run(count, BRAINSTORM_DBUF_STAGING_THREADS="4") == "3\n"
    wrong = """
for _ in range(2):
    try: once(0)
    except ValueError as error: print(error)
"""
    for value in ("0", "many", "2.5", "65"):
        said = run(wrong, BRAINSTORM_DBUF_STAGING_THREADS=value).splitlines()
        assert len(said) == 2 and f'not "{value}"' in said[0] == said[1]


def test_the_default_number_of_threads_is_that_of_the_affinity():
    environment = {"BRAINSTORM_DBUF_STAGING_THREADS": ""}
    assert run("""
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
before = threads_there(); once(0); print(threads_there() - before)
""", **environment) == "0\n"  # fmt: skip


@pytest.fixture(scope="module")
def allowance(tmp_path_factory):
    """cpu_allowance() over files of our own, where the affinity has two or more."""
    if not SOURCE.is_file():
        pytest.skip("the C source is not here")
    library = tmp_path_factory.mktemp("allowance") / "allowance.so"
    compiler = [os.environ.get("CC", "cc"), "-std=c11", "-shared", "-fPIC"]
    subprocess.run([*compiler, SOURCE, "-o", library], check=True)
    function = ctypes.CDLL(str(library)).cpu_allowance
    return lambda listing, root: function(bytes(listing), bytes(root))


CORES = len(os.sched_getaffinity(0))


@pytest.mark.skipif(CORES < 2, reason="one core allows no less than one")
@pytest.mark.parametrize(
    ("listing", "files", "count"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, CORES),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "100001 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "99999999999 100000\n"}, CORES),
        ("0::/a/b\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "max 9\n"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "7 100000\n", "cpu.max": "max 9\n"}, 1),
        ("0::/a/b\n", {"a/c/cpu.max": "7 100000\n"}, CORES),
        ("0::/a\n", {"a/cpu.max": "rubbish"}, CORES),
        ("9:cpu,cpuacct:/g\n0::/\n", {"cpu,cpuacct/g/cpu.cfs_quota_us": "9\n",
                                      "cpu,cpuacct/g/cpu.cfs_period_us": "10\n"}, 1),
        ("1:cpu:/g\n", {"cpu/cpu.cfs_quota_us": "9\n",
                        "cpu/cpu.cfs_period_us": "10\n"}, 1),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n",
                       "cpu/cpu.cfs_period_us": "9\n"}, CORES),
        ("2:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "9\n",
                          "cpu/cpu.cfs_period_us": "10\n"}, CORES),
        ("no colons\n\n0:\n", {"cpu.max": "1 2"}, CORES),
    ],
)  # fmt: skip
def test_a_cpu_quota_at_any_level_counts(allowance, tmp_path, listing, files, count):
    (tmp_path / "listing").write_text(listing)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert allowance(tmp_path / "listing", tmp_path / "root") == count


def test_without_control_groups_the_affinity_counts(allowance, tmp_path):
    assert allowance(tmp_path / "none", tmp_path / "none") == CORES
