"""Calls of the binding with arguments nobody should give: a program of its own.

    python binding_fuzzer.py hypothesis|random EXAMPLES SEED [NAME...]

For each callable of ``_cuda`` and ``_cpuop`` (all that they have, or those whose
names contain one of NAME..., and none of -NAME...) so many examples of one to four
calls are drawn.
Each call is written to standard error before it is made, so that whoever runs
this knows the last one of a process that has crashed. On the stand-in driver only.

A call must return, or raise what Python code can be told by: no SystemError, an error
with words, which name the argument or the function; an error that an argument's own
code raises comes out as it is. Afterwards nothing of ours is left alive, nothing is
damaged, and nothing was reported as unraisable.
"""

from __future__ import annotations

import gc
import inspect
import os
import random
import re
import sys
import traceback
import warnings

import hypothesis
import numpy as np
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import conftest  # noqa: F401  (first: it chooses the driver)
from brainstorm_dbuf import _cpuop, _cuda
from fake_cuda import control

MIB = 1 << 20


class OwnError(Exception):
    """What an argument's own code raises."""


class Array(np.ndarray):
    """A subclass, which NumPy asks about each view."""

    def __array_finalize__(self, obj):
        self.seen = obj is not None


INTEGERS = [0, 1, 2, 3, 4, 7, 8, 16, 64, 255, 256, 4096, 65536]
INTEGERS += [-1, -2, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**62]
INTEGERS += [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 2**200]
OTHERS = [None, True, False, 0.0, 1.5, float("nan"), float("inf"), 1e300, 2j]
OTHERS += ["", "stream", "\ud800", "C", "F", b"", b"bytes", (), [], {}, set(), ...]
OTHERS += [object, slice(None), slice(0, 2, -1), slice(2**70), range(2)]
NUMBERS = [np.int8(1), np.int64(4), np.uint64(2**64 - 1), np.float32(2), np.bool_(True)]
DTYPES = ["f4", "f8", "i1", "u2", "i4", "i8", "u8", "?", "f2", "g", "c8", "O", "S3"]
DTYPES += ["U2", "M8[s]", "m8[D]", "V5", ">f4", ">i8", "f4,i4", "O,f4", "f4,>i2"]
DTYPES += ["(2,3)f4", "(0,)f4", "S0", "V0"]
SHAPES = [(), (0,), (1,), (2,), (3,), (2, 3), (3, 2), (2, 3, 4), (3, 2, 2), (16,)]
SHAPES += [(1, 4, 4, 1), (2, 3, 3, 2), (1, 2, 2, 1), (2, 2, 4, 4, 1), (0, 3), (2, 2)]


class World:
    """The objects that the calls of one example share; made as they are asked for."""

    def __init__(self, bench, choose):
        self.fake, self.handle, self.choose = bench.fake, bench.handle, choose
        self.block, self.trusted = bench.block, bench.trusted
        self.made = {}
        self.raised = self.skipped = False
        self.depth = 0
        self.trail = []

    def get(self, kind):
        if kind not in self.made:
            self.made[kind] = getattr(self, "make_" + kind)()
        return self.made[kind]

    def pick(self, options):
        return options[self.choose(len(options))]

    # ---- Objects of ours ----

    def make_context(self):
        return _cuda.Context.current()

    def make_wrong_context(self):
        return _cuda.Context.from_handle(0x1230, owner=object())

    def make_stream(self):
        return _cuda.Stream()

    def make_closed_stream(self):
        stream = _cuda.Stream()
        stream.close()
        return stream

    def make_foreign_stream(self):
        return _cuda.Stream.from_handle(self.get("stream").handle)

    def make_legacy_stream(self):
        return _cuda.Stream.legacy()

    def make_event(self):
        return _cuda.Event()

    def make_recorded_event(self):
        return self.get("stream").record()

    def make_closed_event(self):
        event = _cuda.Event()
        event.close()
        return event

    def make_memory(self):
        return _cuda.mem_alloc(4096)

    def make_small_memory(self):
        return _cuda.mem_alloc(12)

    def make_no_memory(self):
        return _cuda.mem_alloc(0)

    def make_freed_memory(self):
        memory = _cuda.mem_alloc(64)
        memory.free()
        return memory

    def make_pagelocked(self):
        return _cuda.pagelocked_zeros((4, 6))

    def make_registered(self):
        return _cuda.register_host_memory(np.zeros((8, 4), "f4"))

    def make_page_locked_memory(self):
        return self.get("pagelocked").base

    def make_registered_memory(self):
        return self.get("registered").base

    def make_ring(self):
        return _cuda.StagingRing(_cuda.pagelocked_empty((1024,)), 4)

    def make_closed_ring(self):
        ring = _cuda.StagingRing(_cuda.pagelocked_empty((64,)), 1)
        ring.close()
        return ring

    def make_device(self):
        return _cuda.Device(0)

    def make_handler(self):
        return _cuda.HandlerCore(7)

    def make_half_made_handler(self):
        return _cuda.HandlerCore.__new__(_cuda.HandlerCore)

    def make_other_handler(self):
        return _cuda.HandlerCore(device=1)

    def make_other_array(self):
        return self.get("other_handler").zeros((2, 3))

    OWN = [name[5:] for name in dir() if name.startswith("make_")]
    STREAMS = ["stream", "foreign_stream", "legacy_stream", "closed_stream"]
    EVENTS = ["event", "recorded_event", "closed_event"]
    MEMORY = ["memory", "memory", "small_memory", "no_memory", "freed_memory"]

    def own(self, names):
        name = self.pick(names)
        return self.get(name), name

    # ---- What goes wrong in the middle of a call ----

    def effect(self):
        """Do something that an argument's own code may do."""
        effects = [
            lambda: None,
            self.raise_own,
            lambda: self.get("stream").close(),
            lambda: self.get("memory").free(),
            lambda: self.get("ring").close(),
            lambda: self.get("event").close(),
            self.made.clear,
            gc.collect,
            self.renew_handler,
            self.unregister,
            self.resize,
            lambda: self.fake.drain(0, self.handle),
            self.copy,
        ]
        number = self.choose(len(effects))
        self.trail.append(number)
        self.depth += 1
        try:
            if self.depth < 4:
                effects[number]()
        finally:
            self.depth -= 1

    def raise_own(self):
        self.raised = True
        raise OwnError("by the argument itself")

    def renew_handler(self):
        for ordinal in (1, 0):
            try:
                self.get("handler").__init__(3, ordinal)
            except RuntimeError:
                pass

    def unregister(self):
        self.get("registered").base.unregister()

    def resize(self):
        for array in self.made.get("arrays", ()):
            try:
                array.resize(8 * array.size + 64)
            except (ValueError, TypeError):
                pass  # referred to, or not its own memory

    def copy(self):
        _cuda.memcpy_htod_async(self.get("memory"), self.get("pagelocked"))

    def trap(self, value):
        """Return an object that has an effect whenever it is asked for anything."""
        world, containers = self, self.made.setdefault("containers", [])

        class Trap:
            def answer(self, *ignored):
                for container in containers:
                    container.clear()
                world.effect()
                return value

            __index__ = __int__ = __float__ = __cuda_stream__ = answer
            __dlpack__ = __dlpack_device__ = __array__ = answer

            def __repr__(self):
                self.answer()
                return "trap"

            def __bool__(self):
                self.answer()
                return bool(value)

            def __eq__(self, other):
                self.answer()
                return self is other

            def __hash__(self):
                self.answer()
                return 3

            def __len__(self):
                self.answer()
                return 2

            def __getitem__(self, index):
                return self.answer() if index in (0, 1) else [][index]

            def __getattr__(self, name):
                return self.answer() if name.startswith("__cuda_array") else [][0:].x

        return Trap(), f"trap({_show(value)[:60]})"

    def liar(self):
        """Return something with an array interface that is not what it says."""
        address = self.pick([self.block.ptr, 0, -1, 2**64, "x", 1 << 47])
        interface = {
            "shape": self.pick(
                [(3,), (2, 2), (), (0,), (-1,), (2**62, 4), [3], 3, "3"]
            ),
            "typestr": self.pick(["<f4", "|u1", ">f4", "|O", "<f3", 5, None, "f4,O"]),
            "data": (address, self.pick([False, True, None, "x", np.zeros(2)])),
            "version": self.pick([3, 2, -1, "3"]),
            "strides": self.pick([None, (4,), (8, 4), (-4,), (2**62, 4), "ab", [4]]),
            "stream": self.pick([None, 0, 1, 2, 12345, -1, 2**70, "x"]),
        }
        for key in list(interface):
            what = self.choose(12)
            if what == 0:
                del interface[key]
            elif what == 1:
                interface[key] = self.anything()[0]
            elif what == 2 and isinstance(interface[key], tuple):
                interface[key] = tuple(self.trap(v)[0] for v in interface[key])
        text = f"liar({_show(interface)})"
        if self.choose(3) == 0:
            self.made.setdefault("containers", []).append(interface)
        if self.choose(3) == 0:
            world = self

            class Asked:
                @property
                def __cuda_array_interface__(self):
                    world.effect()
                    return interface

                __array_interface__ = __cuda_array_interface__

            return Asked(), text

        class Told:
            __cuda_array_interface__ = __array_interface__ = interface

        return Told(), text

    # ---- Values by kind ----

    def integer(self):
        what = self.choose(10)
        if what < 6:
            value = self.pick(INTEGERS[:13] if what < 4 else INTEGERS)
            return value, repr(value)
        if what == 6:
            value = self.pick(NUMBERS)
            return value, repr(value)
        if what == 7:
            return self.trap(self.pick(INTEGERS + ["x", None, 1.5]))
        return self.anything()

    def dtype(self):
        value = self.pick([*DTYPES, None, "no such", np.float32, int, 3])
        if self.choose(2) and isinstance(value, str) and value != "no such":
            value = np.dtype(value)
        return value, repr(value)

    def shape(self):
        what = self.choose(6)
        if what < 3:
            value = self.pick([*SHAPES, (2**62, 8), (2**63,), (-1,), (2,) * 40, "ab"])
            return value, repr(value)
        if what == 3:
            return self.integer()
        items = [self.integer() for _ in range(1 + self.choose(3))]
        values = [value for value, _ in items]
        text = ", ".join(text for _, text in items)
        if what == 4:
            return tuple(values), f"({text})"
        self.made.setdefault("containers", []).append(values)
        return values, f"[{text}]"

    def array(self, shapes=SHAPES):
        if self.choose(8) == 0:
            name = self.pick(["pagelocked", "registered"])
            array, text = self.get(name), name
        else:
            dtype = self.pick(["f4"] * 8 + ["f8"] * 3 + DTYPES)
            shape = self.pick(shapes)
            locked = self.choose(4) == 0 and "O" not in dtype and shape != ()
            try:
                make = _cuda.pagelocked_zeros if locked else np.zeros
                array = make(shape, dtype)
            except (TypeError, ValueError):
                array = np.zeros(shape, dtype)
            text = f"zeros({shape}, {dtype!r}{', locked' if locked else ''})"
            if not locked:
                self.made.setdefault("arrays", []).append(array)
        what = self.choose(14)
        if what == 0:
            array = array.T
        elif what == 1 and array.ndim:
            array = array[::-1]
        elif what == 2 and array.ndim:
            array = array[::2]
        elif what == 3:
            array = array.view(Array)
        elif what == 4:
            array = array.view()
            array.flags.writeable = False
        elif what == 5:
            array = np.broadcast_to(array, (2**40, *array.shape))
        elif what == 6 and array.ndim:
            array = as_strided(array, array.shape, (0,) * array.ndim)
        elif what == 7 and array.nbytes > 8 and not array.dtype.hasobject:
            flat = np.frombuffer(array, "u1") if array.flags.c_contiguous else None
            if flat is not None:
                array = flat[1:5].view("f4")
        elif what == 8 and array.ndim:
            array = as_strided(array[:1], (1,) * array.ndim, (2**61,) * array.ndim)
        return array, f"{text}#{what}"

    def device_array(self):
        what = self.choose(12)
        handler = self.get("handler")
        if what == 0:
            return self.own(["other_array"])
        if what == 1:
            return self.anything()
        shape = self.pick(SHAPES)
        array = handler.zeros(shape)
        if what == 2 and array.ndim:
            array = array[:1]
        elif what == 3 and array.ndim > 1:
            array = array[:, 1:]
        elif what == 4:
            array = handler.as_array(array)
        elif what == 5 and self.made.get("last") is not None:
            array = self.made["last"]
        elif what == 6:
            memory = np.array([3], "i4")
            array = handler.allocate(1)
            array.set(memory)
        self.made["last"] = array
        return array, f"device{shape}#{what}"

    def end(self):
        what = self.choose(8)
        if what < 2:
            return self.own(self.MEMORY)
        if what < 4:
            return self.array()
        if what == 4:
            return self.device_array()
        if what == 5:
            return self.liar()
        if what == 6:
            # Nothing holds the memory of a bare address: it is of a block that stays.
            if self.choose(2):
                return self.trap(self.block.ptr)
            offset = self.choose(5)
            return self.block.ptr + offset, f"address+{offset}"
        return self.anything()

    def stream(self):
        what = self.choose(6)
        if what < 3:
            return self.own(self.STREAMS)
        if what == 3:
            return None, "None"
        if what == 4:
            handle = self.get("stream").handle
            return self.trap(self.pick([(0, handle), (0, 2**70), handle, (0,), "xy"]))
        return self.integer()

    def arrays(self):
        items = [self.device_array() for _ in range(self.choose(14))]
        values = [value for value, _ in items]
        self.made.setdefault("containers", []).append(values)
        return values, "[" + ", ".join(text for _, text in items) + "]"

    def pair(self):
        what = self.choose(6)
        if what < 3:
            value = self.pick([(1, 1), (2, 2), (1, 2), (3, 1), [2, 1], (0, 1)])
            return value, repr(value)
        return self.shape()

    def batch(self):
        value, text = self.array()
        return {"default": value}, f"{{'default': {text}}}"

    def known(self):
        dtype = np.dtype(self.pick(["f4", "f8", "O"]))
        entry = ("default", self.shape()[0], self.pick([dtype, "f4", None]))
        value = self.pick([(entry,), (entry[:2],), (), [entry], ((),), (entry, entry)])
        return value, _show(value)

    def source(self):
        """An address that a kernel reads from, on trust."""
        ptr = self.trusted.ptr
        return (ptr, "address") if self.choose(2) else self.trap("x")

    def number(self):
        value = self.pick([0.0, 1.0, -2.5, float("nan"), 1e300, 3, 2**2000, "1"])
        return (value, repr(value)[:40]) if self.choose(4) else self.integer()

    def anything(self):
        self.depth += 1
        try:
            what = self.choose(9 if self.depth < 4 else 2)
            if what == 0:
                value = self.pick(OTHERS + NUMBERS)
                return value, repr(value)
            if what == 1:
                value = self.pick(INTEGERS)
                return value, repr(value)
            if what == 2:
                return self.own(self.OWN)
            makers = [self.array, self.liar, self.device_array, self.shape, self.batch]
            if what == 3:
                return self.trap(self.anything()[0])
            return makers[what - 4]()
        finally:
            self.depth -= 1

    # Names of arguments, and what is mostly given for them.
    BY_NAME = {
        "source": "source",
        "array memory arr values flat_in flat_col": "array",
        "row_indices col_indices": "array",
        "dest src": "end",
        "stream": "stream",
        "shape": "shape",
        "dtype": "dtype",
        "parameters gradients internals": "arrays",
        "window stride kernel strides": "pair",
        "data": "batch",
        "signature": "known",
        "nbytes size count width height threads places value number ordinal": "integer",
        "seed device flags mem_flags padding axis handle address priority": "integer",
        "dest_pitch src_pitch channels kernel_h kernel_w pad_t pad_l": "integer",
        "pad_b pad_r stride_h stride_w tf32 non_blocking": "integer",
        "val s mean std probability a_min a_max": "number",
        "a b m v t x y dx dy out out_a out_b cond mem mask": "device_array",
        "weights bias": "device_array",
        "inputs outputs argmax in_deltas out_deltas weight_deltas": "device_array",
        "bias_deltas": "device_array",
    }

    def value_for(self, name, of_module):
        if name == "source":
            return self.source()
        if self.choose(6) == 0:
            return self.anything()
        if name == "context":
            what = self.choose(4)
            if what < 2:
                return None, "None"
            return self.own(["context", "context", "wrong_context"])
        if name in ("event", "end"):
            return self.own(self.EVENTS)
        if name == "order":
            value = self.pick(["C", "F", "A", "", "CF", None, 5])
            return value, repr(value)
        if name == "activation":
            value = self.pick(["tanh", "sigmoid", "rel", "linear", "x", None])
            return value, repr(value)
        for names, kind in self.BY_NAME.items():
            if name in names.split():
                if of_module is _cpuop and kind == "device_array":
                    kind = "array"
                return getattr(self, kind)()
        return self.anything()


def _show(value):
    """As repr, but it does not run what the value would do."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_show, value)) + ")"
    plain = (int, float, str, bytes, type(None), np.dtype, np.generic)
    return repr(value) if isinstance(value, plain) else type(value).__name__


# ---- What there is to call ----

RECEIVERS = {
    "Context": ["context", "context", "wrong_context"],
    "Device": ["device"],
    "DeviceMemory": World.MEMORY,
    "Event": World.EVENTS,
    "HandlerCore": ["handler"] * 6 + ["half_made_handler", "other_handler"],
    "PageLockedMemory": ["page_locked_memory"],
    "RegisteredMemory": ["registered_memory"],
    "StagingRing": ["ring", "ring", "closed_ring"],
    "Stream": World.STREAMS,
}
# Inherited from object as they are: not ours.
NOT_OURS = {"__doc__", "__module__", "__getattribute__"}


def targets():
    """Return {name: (module, type or None, attribute)} of all that can be called.

    Properties are among them: they are read and set.
    """
    found = {}
    for module in (_cuda, _cpuop):
        short = module.__name__.rpartition(".")[2]
        for name, value in vars(module).items():
            if isinstance(value, type):
                if value.__module__ != module.__name__:
                    continue  # the exceptions
                found[f"{short}.{name}"] = (module, value, None)
                for attribute in sorted(set(vars(value)) - NOT_OURS):
                    found[f"{short}.{name}.{attribute}"] = (module, value, attribute)
            elif callable(value):
                found[f"{short}.{name}"] = (module, None, name)
    return found


def parameters_of(function):
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return ["key", "value"]
    return [name for name in signature.parameters if name not in ("self", "type")]


UNNAMED = re.compile(r"__\w+__$")  # CPython's own words for their argument counts


# What NumPy says of its own objects, and Python of a function of this program's.
OWN_WORDS = ["only integer scalar arrays", "truth value of", "iteration over a 0-d"]
OWN_WORDS += [
    "<locals>",
    "could not convert string to float",
    "0-dimensional",
    "returned non-",
    "entry not a",
]
OWN_WORDS += ["Tuple must have size", "invalid literal for int", "surrogates"]


def function_is_attribute(name):
    """Whether it is a property: what is set or deleted, CPython says."""
    _, of_type, attribute = targets()[name]
    return of_type is not None and hasattr(vars(of_type).get(attribute), "__set__")


class Fault(AssertionError):
    """A call did what no call may do."""


def judge(world, name, parameters, error, text):
    """Fail for an error that tells its reader nothing."""
    if isinstance(error, OwnError):
        return
    # NumPy reads their shapes, and tries again what has raised.
    if world.raised and "pagelocked_" not in name:
        raise Fault(f"{text} hides the argument's own error: {error!r}") from error
    if not isinstance(error, Exception) or isinstance(error, SystemError):
        raise Fault(f"{text} raises {error!r}") from error
    message, last = str(error), name.rpartition(".")[2]
    if not message:
        raise Fault(f"{text} raises {type(error).__name__} without words") from error
    if UNNAMED.match(last) or isinstance(error, (_cuda.CudaError, MemoryError)):
        return
    if function_is_attribute(name) or any(said in message for said in OWN_WORDS):
        return
    known = [
        *parameters,
        "context",
        "device",
        "shape",
        "stride",
        "dimension",
        last,
        "dtype",
        "data type",
        *RECEIVERS,
        "DeviceArray",
    ]
    if isinstance(error, (TypeError, ValueError, OverflowError)):
        if not any(word in message for word in known):
            raise Fault(f"{text} names no argument: {error!r}") from error


def draw_call(world, name, target):
    """Return (function, receiver, given, named, parameters, text), or None.

    None where the arguments cannot be made: their objects have been closed, say.
    """
    try:
        return _draw_call(world, name, target)
    except (OwnError, ValueError, TypeError, RuntimeError, OverflowError, KeyError):
        return None


def _draw_call(world, name, target):
    module, of_type, attribute = target
    receiver, text = None, name
    if of_type is None or attribute is None:
        function = of_type or getattr(module, attribute)
        parameters = parameters_of(function)
    else:
        short = of_type.__name__
        kinds = RECEIVERS.get(short)
        receiver, who = world.device_array() if kinds is None else world.own(kinds)
        if not isinstance(receiver, of_type):
            receiver, who = world.get("handler").zeros((2, 3)), "device(2, 3)"
        if world.choose(20) == 0:
            receiver, who = world.anything()
        text = f"{name} of {who}"
        described = vars(of_type)[attribute]
        if not callable(described) and hasattr(described, "__set__"):

            def function(value):
                return described.__get__(receiver, of_type)

            if world.choose(4) == 0:
                function = getattr(described, "__set__")
                function = lambda value, f=function: f(receiver, value)  # noqa: E731
            parameters = ["value"]
        elif isinstance(described, (staticmethod, classmethod)) or not callable(
            described
        ):
            function = getattr(of_type, attribute)
            if not callable(function):
                return None
            parameters = parameters_of(function)
        elif type(described).__name__ == "builtin_function_or_method":
            # __new__: of the type itself, mostly
            function = described
            parameters = ["cls", *parameters_of(of_type)]
        elif type(described).__name__ == "classmethod_descriptor":
            function = described.__get__(None, of_type)
            parameters = parameters_of(function)
        else:
            parameters = parameters_of(described)

            def function(*given, **named):
                return described(receiver, *given, **named)

    given, named, texts = [], {}, []
    count = len(parameters)
    odd = world.choose(12)
    if odd == 0:
        count = world.choose(count + 1)
    by_name = world.choose(count + 1) if world.choose(3) == 0 else count
    for number, parameter in enumerate(parameters[:count]):
        if parameter == "cls" and world.choose(6):
            value, said = of_type, of_type.__name__
        elif parameter in ("args", "kwargs"):
            continue
        else:
            value, said = world.value_for(parameter, module)
        if number < by_name:
            given.append(value)
            texts.append(said)
        else:
            named[parameter] = value
            texts.append(f"{parameter}={said}")
    if odd == 1:
        given.append(None)
        texts.append("None more")
    if odd == 2:
        named["no_such"] = 1
        texts.append("no_such=1")
    return function, receiver, given, named, parameters, f"{text}({', '.join(texts)})"


def one_call(world, log, name, target):
    call = draw_call(world, name, target)
    if call is None:
        world.skipped = True
        return
    function, receiver, given, named, parameters, text = call
    os.write(log, (text + "\n").encode("ascii", "backslashreplace"))
    world.trail.clear()
    world.raised = False
    before = world.fake.current_context()
    try:
        result = function(*given, **named)
    except BaseException as error:
        judge(world, name, parameters, error, f"{text} (effects {world.trail})")
    else:
        if target[2] in ("push", "__enter__") and isinstance(receiver, _cuda.Context):
            receiver.pop()
        elif isinstance(result, _cuda.Stream) or world.choose(3) == 0:
            world.made.setdefault("results", []).append(result)
    if world.fake.current_context() != before:
        world.fake.push_context(world.handle)


class Bench:
    """The stand-in driver, and what stays from one example to the next."""

    def __init__(self):
        self.fake = control.FakeCuda(os.environ["BRAINSTORM_DBUF_LIBCUDA"])
        self.fake.reset()
        self.fake.set_device_count(2)
        self.fake.set_limits(32 * MIB, 32 * MIB)
        self.handle = self.fake.create_context()
        self.context = _cuda.Context.from_handle(self.handle, owner=self)
        # Making an engine takes long. The one of device 1 comes and goes.
        self.engine = _cuda.HandlerCore(device=0)
        # Each of the context that it is used in, which waits for its own work only.
        self.trusted, self.block = self.engine.zeros(1024), _cuda.mem_alloc(4096)
        self.skipped = 0
        self.log = sys.stderr.fileno()
        gc.collect()
        gc.freeze()

    def settle(self):
        self.context.synchronize()
        try:
            self.engine.synchronize()
        except IndexError:
            pass  # an index that was not there, found out by the kernel
        gc.collect()
        if _cuda.live_objects()["contexts"] > 2:
            # What is in flight on a stream that is no object of ours is let go when
            # its context is asked, and may be all that holds the engine of device 1.
            _cuda.HandlerCore(device=1).context.synchronize()
            gc.collect()
        self.engine.trim_pool()
        # The ledger of the NULL stream keeps its events to use them again.
        return {k: n for k, n in _cuda.live_objects().items() if k != "fences"}

    def example(self, choose, name, target):
        """Make one to four calls; return what was wrong with them, or None."""
        reported = []
        sys.unraisablehook = lambda info: reported.append(repr(info.exc_value))
        before, damage = self.settle(), self.fake.damage()
        world = World(self, choose)
        fault = None
        try:
            for _ in range(1 + choose(4)):
                one_call(world, self.log, name, target)
        except Fault as error:
            fault = str(error)
            traceback.clear_frames(error.__traceback__)
        self.skipped += world.skipped
        world.made.clear()
        world.choose = None
        del world
        after = self.settle()
        # Each is one that a call would have raised, had another come.
        fine = ("OwnError", "found out on the device")
        reported = [said for said in reported if not any(f in said for f in fine)]
        if fault is None and after != before:
            fault = f"{before} has become {after}"
        if fault is None and self.fake.damage() != damage:
            fault = f"{damage} has become {self.fake.damage()}"
        if fault is None and reported:
            fault = f"reported as unraisable: {reported}"
        return fault


def run_hypothesis(bench, examples, seed, name, target):
    """Return the number of examples and what was wrong with the smallest bad one."""
    count, fault = 0, None

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
    )
    @hypothesis.given(st.data())
    def run(data):
        nonlocal count, fault
        count += 1

        def choose(options):
            return data.draw(st.integers(0, options - 1)) if options > 1 else 0

        found = bench.example(choose, name, target)
        if found is not None:
            fault = found
            raise Fault(found)

    try:
        run()
    except BaseException as error:
        if fault is None:
            raise
        del error
    return count, fault


def run_random(bench, examples, seed, name, target):
    """As run_hypothesis; quick, but it makes nothing smaller."""
    rnd = random.Random(f"{seed} {name}")
    for number in range(examples):
        os.write(bench.log, b"\n")
        fault = bench.example(rnd.randrange, name, target)
        if fault is not None:
            return number + 1, fault
    return examples, None


def is_wanted(name, parts):
    """Whether a name has one of the parts, and none of those with a - before it."""
    without = [part[1:] for part in parts if part.startswith("-")]
    of = [part for part in parts if not part.startswith("-")]
    return not any(part in name for part in without) and (
        not of or any(part in name for part in of)
    )


def main(way, examples, seed, *names):
    # Of an __index__ that gives a bool.
    warnings.simplefilter("ignore", DeprecationWarning)
    run = {"hypothesis": run_hypothesis, "random": run_random}[way]
    bench, calls, faults = Bench(), 0, 0
    for name, target in sorted(targets().items()):
        if not is_wanted(name, names):
            continue
        count, fault = run(bench, int(examples), int(seed), name, target)
        calls += count
        if fault is not None:
            faults += 1
            print(f"FAULT {name}: {fault}", flush=True)
    print(f"{calls} examples, {faults} faults, {bench.skipped} cut short", flush=True)
    return faults > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
