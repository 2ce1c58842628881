"""Host memory that runs out in the middle of a call: MemoryError, and nothing else.

The calls are made in a process of their own, by memory_attack.py, so that one that
crashes is told with its name. Below it what was found that way, one by one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import memory_attack
import numpy as np
import pytest
from binding_tools import Interface
from conftest import SUBPROCESS_PATH
from layouts import EXAMPLES

from brainstorm_dbuf import _cuda

ATTACK = Path(memory_attack.__file__)
HEADER = Path(sysconfig.get_path("include")) / "Python.h"

# Names, or parts of them, of the calls: about as many of them in each.
PARTS = ["memcpy", "handler.", "DeviceArray", "-memcpy -handler. -DeviceArray"]

pytestmark = pytest.mark.timeout(120)


@pytest.mark.skipif(not HEADER.exists(), reason=f"there is no {HEADER}")
@pytest.mark.parametrize("names", PARTS)
def test_any_allocation_may_fail(fake, kernels, names):
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", ATTACK, str(EXAMPLES)]
        + names.split(),
        env=os.environ | {"PYTHONPATH": SUBPROCESS_PATH},
        capture_output=True,
        text=True,
        timeout=110,
    )
    said = ran.stderr.splitlines()[-40:]
    assert ran.returncode == 0, "\n".join([ran.stdout, *said])
    assert " 0 faults" in ran.stdout


def test_no_call_is_left_out():
    for name in memory_attack.CALLS:
        assert any(memory_attack.is_wanted(name, part.split()) for part in PARTS), name


class Unequal(str):
    """A name that raises where a dict compares it."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        raise KeyError("compared")


@pytest.mark.parametrize("name", ["shape", "typestr", "data", "strides", "mask"])
def test_an_item_of_an_interface_that_cannot_be_looked_up_is_not_taken_for_none(
    driver, cuda, name
):
    memory = _cuda.mem_alloc(24)
    end = Interface(memory, (6,))
    described = end.__cuda_array_interface__
    described[Unequal(name)] = described.pop(name, None)
    with pytest.raises(KeyError, match="compared"):
        _cuda.memset_d8(end, 0, 24)
    with pytest.raises(KeyError, match="compared"):
        cuda.as_array(end)
    assert np.array_equal(
        cuda.as_array(Interface(cuda.zeros(6).ptr, (6,))).get(), [0] * 6
    )
