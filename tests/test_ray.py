"""FromIterable over Ray Data: the numbers and the ends of training from memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import SUBPROCESS_PATH, why_no_cuda_handler
from beyond import QUIET_RAY, needs_ray

pytestmark = [pytest.mark.timeout(120), needs_ray]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """What ray_session.py saw, in the one Ray of this module."""
    seen = tmp_path_factory.mktemp("ray") / "seen.json"
    kinds = ["numpy"] + ["cuda"] * (why_no_cuda_handler() is None)
    script = Path(__file__).with_name("ray_session.py")
    run = subprocess.run(
        [sys.executable, "-W", "error", script, seen, *kinds],
        env={**os.environ, **QUIET_RAY, "PYTHONPATH": SUBPROCESS_PATH},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(seen.read_text())


@pytest.fixture(params=["numpy", "cuda"])
def handler(request, session):
    if f"parity {request.param}" not in session:
        pytest.skip(why_no_cuda_handler())
    return request.param


def test_weights_are_those_of_the_same_minibatches_from_memory(session, handler):
    # Seven minibatches an epoch, the last one shorter; the first is not prefetched.
    expected = {"equal": True, "minibatches": 14, "prefetched": 12}
    assert session[f"parity {handler}"] == expected


def test_an_error_in_the_pipeline_comes_out_of_training(session, handler):
    seen = session[f"failing {handler}"]
    assert "OSError: no such file" in seen["outcome"]
    # Ray gives up at once, with what it had ready.
    assert seen["trained"] <= 3
    assert (seen["again"], seen["left"]) == (7, [])


def test_an_early_stop_ends_the_pipeline_and_leaves_no_thread(session, handler):
    assert session[f"stopped {handler}"] == {"trained": 3, "left": []}


def test_a_ragged_column_is_named(session, handler):
    said = session[f"ragged {handler}"]
    assert said.startswith("input 'default': expected an array of numbers, got one of")
    assert "dtype object" in said
