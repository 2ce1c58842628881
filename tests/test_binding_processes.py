"""Whole processes: how they end, how they fork, and what they say without a driver."""

import os
import subprocess
import sys

import pytest

from binding_tools import run_script
from brainstorm_dbuf import _cuda
from fake_cuda import build

SETUP = """
import gc, os, sys
import numpy as np
from brainstorm_dbuf import _cuda
context = _cuda.Context.primary(0)
context.push()
array = _cuda.pagelocked_empty((1 << 20,))
array[...] = 7
stream = _cuda.Stream()
event = _cuda.Event()
memory = _cuda.mem_alloc(array.nbytes)
registered = _cuda.register_host_memory(np.zeros(1 << 20, "f4"))
_cuda.memcpy_htod_async(memory, array, stream)
_cuda.memcpy_htod_async(memory, registered)
stream.record(event)
"""
USE = """
stream.synchronize()
event.synchronize()
"""

ENDINGS = {
    "end": USE,
    "end with work queued": "",
    "context deleted first": USE + "del context",
    "stream deleted first": USE + "del stream",
    "stream deleted first with work queued": "del stream",
    "event deleted first": USE + "del event",
    "array deleted first with work queued": "del array, memory",
    "context popped": USE + "context.pop()",
    "context popped and deleted": USE + "context.pop(); del context",
    "reference cycle": USE
    + """
class Holder: pass
holder = Holder()
holder.everything = [context, array, stream, event, memory, registered, holder]
del context, array, stream, event, memory, registered, holder
""",
    "reference cycle with work queued": """
class Holder: pass
holder = Holder()
holder.everything = [context, array, stream, event, memory, registered, holder]
del context, array, stream, event, memory, registered, holder
""",
    "closed in another order": USE
    + "memory.free(); event.close(); stream.close(); context.pop()",
    "kept by a module that goes last": "sys.kept = [array, stream, event, memory]",
    "kept by a thread that is still there": """
import threading
def wait(*things):
    threading.Event().wait()
threading.Thread(target=wait, args=(array, stream, memory), daemon=True).start()
""",
    "waiting in a thread that is still there": """
import threading
def wait():
    while True:
        stream.synchronize()
threading.Thread(target=wait, daemon=True).start()
""",
}


def test_such_a_process_has_what_these_tests_have(driver):
    """Not what lies in the folder that it starts in: under a sanitizer that is another."""
    done = run_script("from brainstorm_dbuf import _cuda; print(_cuda.__file__)")
    assert (done.stdout, done.stderr) == (_cuda.__file__ + "\n", "")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_cleanly_whatever_dies_first(driver, ending):
    done = run_script(SETUP + ENDINGS[ending])
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


# With a ring and a handler besides.
LATE_SETUP = (
    SETUP
    + """
import atexit, threading
ring = _cuda.StagingRing(_cuda.pagelocked_empty(1 << 14), 4)
values = np.arange(1 << 16, dtype="f8")
try:
    handler = _cuda.HandlerCore(3)
except RuntimeError:  # built without kernels
    handler = left = None
else:
    left = handler.ones((64, 64))

def use():
    ring.memcpy_htod_async(memory, values, "f4", stream)
    _cuda.memcpy_htod_async(memory, registered, stream)
    stream.record(event)
    event.synchronize()
    if handler is not None:
        product = handler.zeros((64, 64))
        handler.dot_mm(left, left, product)
        assert product.get()[0, 0] == 64

def destroy():
    for name in ("ring", "values", "handler", "left", "array", "stream", "event",
                 "memory", "registered", "context"):
        globals().pop(name, None)
    gc.collect()

def in_threads(function):
    def work():
        with context_of_threads:
            while True:
                function()
    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
context_of_threads = context
"""
)
LATE_ENDINGS = {
    "used at exit": "atexit.register(use)",
    "destroyed at exit": "use(); atexit.register(destroy)",
    "destroyed at exit with work queued": "atexit.register(destroy)",
    "made at exit": """
def make():
    global kept
    kept = _cuda.Stream(), _cuda.mem_alloc(64), _cuda.pagelocked_zeros(9)
    _cuda.memcpy_htod_async(kept[1], kept[2], kept[0])
atexit.register(make)
""",
    "used in a __del__ of what goes last": """
class Last:
    # What it uses are its own: the module's globals are None by now, or gone.
    def __init__(self):
        self.copy, self.args = ring.memcpy_htod_async, (memory, values, "f4", stream)
        self.array = left
    def __del__(self):
        self.copy(*self.args)
        self.args[-1].synchronize()
        if self.array is not None:
            assert self.array[:2].copy().get().sum() == 128
last = Last()
last.itself = last
sys.last = last
del last
""",
    "made in a __del__ of what goes last": """
class Last:
    def __init__(self):
        self.makers = [_cuda.Stream, _cuda.Event, _cuda.pagelocked_zeros]
        self.context = context
    def __del__(self):
        stream, event = (make(self.context) for make in self.makers[:2])
        stream.record(event)
        event.synchronize()
        assert self.makers[2](3, context=self.context).tolist() == [0, 0, 0]
last = Last()
last.itself = last
""",
    "staging and computing in threads that are still there": """
in_threads(use)
import time
time.sleep(0.2)
""",
    "made and dropped in threads that are still there": """
def make():
    with _cuda.Stream() as own:
        source = _cuda.register_host_memory(np.zeros(4096, "f4"))
        _cuda.memcpy_htod_async(memory, source, own)
        source.base.unregister()
        _cuda.mem_alloc(64).free()
in_threads(make)
import time
time.sleep(0.2)
""",
    "waited for at exit by a thread that is joined": """
def work():
    with context_of_threads:
        for _ in range(20):
            use()
thread = threading.Thread(target=work)
thread.start()
""",
}


@pytest.mark.parametrize("ending", LATE_ENDINGS)
def test_objects_may_be_used_and_made_while_the_process_ends(driver, ending):
    env = dict(os.environ)
    if "threads that are still there" in ending:
        # Python ends them inside a call, and what the call had allocated stays.
        env["ASAN_OPTIONS"] = env.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
    done = run_script(LATE_SETUP + LATE_ENDINGS[ending], env=env)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_a_process_exits_with_a_copy_still_queued(driver):
    done = run_script(SETUP + "sys.exit(3)")
    assert (done.returncode, done.stderr) == (3, "")


def test_an_uncaught_error_with_a_copy_queued_is_all_that_is_printed(driver):
    done = run_script(SETUP + "raise SystemExit('mine')")
    assert (done.returncode, done.stderr) == (1, "mine\n")


FORK = SETUP + """
from brainstorm_dbuf.errors import ForkError
fake = None
if sys.argv[1] == "fake":
    sys.path.insert(0, sys.argv[2])
    from fake_cuda import FakeCuda
    fake = FakeCuda(os.environ["BRAINSTORM_DBUF_LIBCUDA"])
pid = os.fork()
if pid == 0:
    for use in (
        lambda: _cuda.pagelocked_empty((4,)),
        lambda: _cuda.mem_alloc(4),
        lambda: _cuda.mem_alloc(4, context),
        _cuda.Context.current,
        lambda: _cuda.Context.primary(0),
        context.push,
        context.synchronize,
        lambda: context.device,
        _cuda.Stream,
        stream.synchronize,
        stream.query,
        stream.record,
        stream.close,
        lambda: stream.priority,
        event.query,
        event.record,
        event.close,
        lambda: stream.wait_event(event),
        memory.free,
        registered.base.unregister,
        lambda: _cuda.memcpy_htod(memory, array),
        lambda: _cuda.memcpy_htod_async(memory, array, stream),
        lambda: _cuda.memcpy_htod_async(int(registered.base.ptr), array),
        lambda: _cuda.is_pagelocked(np.zeros(4)),
        lambda: _cuda.Device(0),
        _cuda.device_count,
        _cuda.driver_version,
    ):
        try:
            use()
        except ForkError as error:
            assert "spawn" in str(error) and error.name == "FORKED", error
        else:
            sys.exit(f"no error from {use}")
    assert (array == 7).all()
    assert _cuda.sysinfo()["driver_version"] is None
    del array, registered, event, memory, context
    gc.collect()
    del stream
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
if fake:
    assert fake.child_calls() == 0, fake.child_calls()
stream.synchronize()
out = np.zeros(1 << 20, "f4")
_cuda.Context.current().synchronize()
_cuda.memcpy_htod(memory, array)
_cuda.memcpy_dtoh(out, memory)
assert (out == 7).all()
"""


def test_a_forked_child_is_told_so_and_leaves_the_driver_alone(driver):
    done = run_script(FORK, driver.kind, os.path.dirname(__file__))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_a_process_that_forks_before_it_starts_may_use_cuda_in_the_child(driver):
    done = run_script(
        """
        import os
        from brainstorm_dbuf import _cuda
        pid = os.fork()
        assert _cuda.device_count() >= 1
        if pid:
            assert os.waitpid(pid, 0)[1] == 0
        """.replace("\n        ", "\n")
    )
    assert (done.returncode, done.stderr) == (0, "")


SPAWN = """
import multiprocessing
import numpy as np
from brainstorm_dbuf import _cuda

def work(number):
    with _cuda.Context.primary(0):
        memory = _cuda.mem_alloc(8)
        _cuda.memcpy_htod(memory, np.full(2, number, "f4"))
        out = np.zeros(2, "f4")
        _cuda.memcpy_dtoh(out, memory)
    return out.tolist()

if __name__ == "__main__":
    assert work(1) == [1, 1]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(work, [2]) == [[2, 2]]
        pool.close()
        pool.join()
"""


def test_spawn_works(driver, tmp_path):
    script = tmp_path / "spawning.py"  # a child imports its main module from a file
    script.write_text(SPAWN)
    package = os.path.dirname(os.path.dirname(_cuda.__file__))
    path = os.pathsep.join([package, *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-X", "dev", str(script)],
        env={**os.environ, "PYTHONPATH": path},
        timeout=30,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- No driver, an old one, no device ----

CALL = """
import sys
from brainstorm_dbuf import _cuda
from brainstorm_dbuf.errors import DriverError
assert _cuda.sysinfo()["is_open"] is False
for use in (_cuda.device_count, _cuda.driver_version, _cuda.Context.current,
            lambda: _cuda.pagelocked_empty(4), lambda: _cuda.mem_alloc(4)):
    try:
        use()
    except DriverError as error:
        print(error.call, error.code, error.name, error.detail)
    else:
        sys.exit("no error")
assert _cuda.pagelocked_empty(0).shape == (0,)
assert _cuda.sysinfo()["driver_version"] is None
"""


def with_library(path):
    return {**os.environ, "BRAINSTORM_DBUF_LIBCUDA": str(path)}


def test_no_driver_is_an_error_that_says_how_to_get_one(tmp_path):
    missing = tmp_path / "libcuda.so.1"
    done = run_script(CALL, env=with_library(missing))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(set(lines)) == 1
    assert lines[0].startswith(f"dlopen 0 DRIVER_NOT_FOUND {missing} could not be opened")
    assert "NVIDIA's driver" in lines[0] and "BRAINSTORM_DBUF_LIBCUDA" in lines[0]


def test_a_library_that_is_none_is_no_driver(tmp_path):
    wrong = tmp_path / "libcuda.so.1"
    wrong.write_text("not a library")
    done = run_script(CALL, env=with_library(wrong))
    assert (done.returncode, done.stderr) == (0, "")
    assert "DRIVER_NOT_FOUND" in done.stdout


def test_the_library_may_come_later(tmp_path):
    later = tmp_path / "libcuda.so.1"
    done = run_script(
        f"""
import os
from brainstorm_dbuf import _cuda, errors
try:
    _cuda.device_count()
except errors.DriverError:
    os.symlink({str(build.build_library())!r}, {str(later)!r})
assert _cuda.device_count() == 1
""",
        env=with_library(later),
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_old_driver_is_named_as_old():
    old = build.build_library(defines=["FAKE_CUDA_OLD_DRIVER"])
    done = run_script(CALL, env=with_library(old))
    assert (done.returncode, done.stderr) == (0, "")
    assert "DRIVER_TOO_OLD" in done.stdout
    assert "cuGetProcAddress_v2" in done.stdout and "older than CUDA 12" in done.stdout


FAKE = """
import sys, os
sys.path.insert(0, sys.argv[1])
from fake_cuda import FakeCuda
fake = FakeCuda(os.environ["BRAINSTORM_DBUF_LIBCUDA"])
"""


def run_with_fake(script):
    return run_script(
        FAKE + script, os.path.dirname(__file__), env=with_library(build.build_library())
    )


def test_a_driver_without_an_entry_is_too_old():
    done = run_with_fake("fake.hide('cuMemHostRegister')" + CALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert "DRIVER_TOO_OLD" in done.stdout and "cuMemHostRegister" in done.stdout


def test_a_machine_without_a_device_says_so():
    done = run_with_fake("fake.set_device_count(0)" + CALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cuInit 100 CUDA_ERROR_NO_DEVICE" in done.stdout


def test_importing_opens_nothing():
    done = run_with_fake(
        "import brainstorm_dbuf\n"
        "from brainstorm_dbuf import _cuda\n"
        "_cuda.sysinfo(); _cuda.live_objects(); _cuda.pagelocked_empty((0, 3))\n"
        "assert not fake.calls()\n"
        "_cuda.device_count()\n"
        "assert fake.calls('cuInit') == 1\n"
        "_cuda.device_count()\n"
        "assert fake.calls('cuInit') == 1\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_two_threads_open_the_driver_once():
    done = run_with_fake(
        "import threading\n"
        "from brainstorm_dbuf import _cuda\n"
        "threads = [threading.Thread(target=_cuda.device_count) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert fake.calls('cuInit') == 1\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
