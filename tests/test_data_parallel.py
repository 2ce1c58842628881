"""DataParallel: ranks with parts of each minibatch train as one with all of it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.describable import create_from_description, get_description
from brainstorm.handlers import NumpyHandler
from brainstorm_dbuf import data_parallel
from brainstorm_dbuf.access import access_for
from brainstorm_dbuf.gradient_message import DeviceMessage, StagedMessage
from brainstorm_dbuf.lockstep import Lockstep, State
from coded import Job, coded, codes
from conftest import KIND, NEEDS_FAKE, SUBPROCESS_PATH, skip_without
from beyond import mpiexec, needs_mpi
from parity import assert_same

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "data_parallel.py"
STEPPERS = ("sgd", "momentum", "nesterov", "adam")
NETS = ("mlp", "lstm", "clipped")

needs_fake = pytest.mark.skipif(KIND == "real", reason=NEEDS_FAKE)

pytestmark = pytest.mark.timeout(90)


def assert_trained_as_one(first, second, nets, steppers):
    """Two ranks of ranks.py, with half of each minibatch, and one with all of it."""
    assert list(first) == [f"{step} {net}" for net in nets for step in steppers]
    for name, seen in first.items():
        weights, alone, start = map(
            np.array, (seen["weights"], seen["alone"], seen["start"])
        )
        assert seen["weights"] == second[name]["weights"], name
        np.testing.assert_allclose(weights, alone, 1e-5, 1e-6, err_msg=name)
        # That says something: training goes a thousand times as far.
        assert np.abs(alone - start).max() > 1e-3, name
        # All but the first of each of the three epochs' six.
        assert seen["prefetched"] == second[name]["prefetched"] == 15
        assert seen["left"] == []


def on_two_ranks(tmp_path, cases, kind="numpy"):
    """Run cases of ranks.py; return what each rank saw."""
    skip_without(kind)
    run = mpiexec(HERE / "ranks.py", tmp_path, cases, kind)
    said = [path.read_text() for path in sorted(tmp_path.glob("*.err"))]
    assert run.returncode == 0, "\n".join([run.stdout, run.stderr, *said])
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]


KINDS = ["numpy", "cuda"] + ["pycuda"] * (KIND == "real")
PARITY = [
    *(("parity", kind) for kind in KINDS),
    pytest.param(("nccl", "cuda"), marks=needs_fake),
    pytest.param(("cuda_aware", "cuda"), marks=needs_fake),
]


@needs_mpi
@pytest.mark.parametrize("case", PARITY, ids=lambda case: " on ".join(case))
def test_two_ranks_train_as_one_with_both_halves_and_equal_to_the_bit(tmp_path, case):
    assert_trained_as_one(*on_two_ranks(tmp_path, *case), NETS, STEPPERS)


@needs_mpi
def test_every_trainer_and_none_give_the_same_weights(tmp_path):
    first, second = on_two_ranks(tmp_path, "brainstorms_trainer")
    assert first == second
    assert list(first) == ["bs", "plain", "feed", "by hand"]
    assert first["bs"] == first["plain"] == first["feed"] == first["by hand"]


@needs_mpi
def test_a_handler_of_float64_sends_float64(tmp_path):
    assert max(on_two_ranks(tmp_path, "float64")) < 1e-14


NOT_IN_STEP = {
    "fewer": "rank 0: at a minibatch of epoch 1; rank 1: at a minibatch of epoch 2",
    "fewer_at_the_end": "rank 0: at a minibatch of epoch 1; rank 1: training ended in "
    "epoch 1",
    "stops": "rank 0: at a minibatch of epoch 2; rank 1: training ended in epoch 2",
    "stops_after_an_epoch": "rank 0: at a minibatch of epoch 3; rank 1: training ended "
    "in epoch 2",
    "fails_in_a_hook": ("epoch 2", "OSError: no such file"),
    "fails_in_the_iterator": ("epoch 2", "OSError: no such file"),
    "fails_in_the_step": ("epoch 1", "OSError: no such file"),
    "fails_before_the_start": ("epoch 0", "AssertionError: The data names"),
    "fails_at_the_very_end": ("epoch 3", "OSError: no such file"),
    "interrupted": ("epoch 1", "KeyboardInterrupt"),
    "other_network": "they have: rank 0: 408 bytes of parameters; rank 1: 452 bytes",
}


@needs_mpi
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_fall_out_of_step_all_say_so_and_can_train_again(tmp_path, kind):
    first, second = on_two_ranks(tmp_path, "not_in_step", kind)
    assert first.pop("threads") == second.pop("threads") == []
    assert list(first) == [
        f"{case} {t}" for case in NOT_IN_STEP for t in ("dbuf", "bs")
    ]
    for name, (outcome, weights) in first.items():
        expected = NOT_IN_STEP[name.split()[0]]
        if isinstance(expected, str):
            assert expected in outcome and outcome == second[name][0], name
        else:
            epoch, error = expected
            assert f"rank 1 has left training in {epoch} with an error" in outcome
            assert second[name][0].startswith(error), name
        assert outcome.startswith(("RuntimeError: DataP", "ValueError: DataP"))
        assert weights == second[name][1], name


@needs_mpi
def test_an_error_that_nobody_catches_ends_all_ranks(tmp_path):
    run = mpiexec(HERE / "ranks.py", tmp_path, "ends_with_an_error", "numpy")
    assert run.returncode != 0
    first, second = ((tmp_path / f"{rank}.err").read_text() for rank in (0, 1))
    assert second.splitlines()[-1] == "OSError: no such file"
    error = "RuntimeError: DataParallel: rank 1 has left training in epoch 2 with an"
    assert first.splitlines()[-1].startswith(error)


@needs_mpi
def test_a_rank_that_is_killed_ends_all_ranks(tmp_path):
    run = mpiexec(HERE / "ranks.py", tmp_path, "is_killed", "numpy")
    assert run.returncode != 0
    assert not list(tmp_path.glob("*.json"))


@needs_mpi
def test_the_example_trains_alone_and_on_two_ranks():
    outputs = []
    for ranks in (1, 2):
        run = mpiexec(EXAMPLE, ranks=ranks)
        assert (run.returncode, run.stderr) == (0, ""), run.stdout + run.stderr
        outputs.append(run.stdout)
    alone = subprocess.run(
        [sys.executable, EXAMPLE],
        env={**os.environ, "PYTHONPATH": SUBPROCESS_PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (alone.returncode, alone.stderr) == (0, ""), alone.stderr
    outputs.append(alone.stdout)
    for ranks, output in zip((1, 2, 1), outputs):
        assert output.startswith(f"{ranks} rank"), output
        assert float(output.split()[-1]) > 0.93
        assert "weights equal on all ranks: True" in output


# ------------------------------------------------------------------ in this process


class Comm:
    """A communicator of mpi4py, as far as one process can be one."""

    def __init__(self, ranks=1, answer=None):
        self.ranks, self.answer, self.sums = ranks, answer, 0

    def Get_rank(self):
        return 0

    def Get_size(self):
        return self.ranks

    def Allreduce(self, in_place, array):
        self.sums += 1
        self.answer(array)


@pytest.fixture
def no_mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)


def test_without_mpi4py_it_says_how_to_get_it(no_mpi):
    with pytest.raises(ImportError, match=r"pip install 'brainstorm-dbuf\[mpi\]'"):
        dbuf.DataParallel(bs.training.SgdStepper())


@pytest.mark.parametrize(
    "stepper, comm, text",
    [
        (0.1, None, "stepper: expected one of brainstorm's steppers, got float"),
        (
            dbuf.DataParallel(bs.training.SgdStepper(), Comm()),
            None,
            "stepper: expected one of brainstorm's steppers, got DataParallel",
        ),
        (
            bs.training.SgdStepper(),
            2,
            "comm: expected a communicator of mpi4py or cupy",
        ),
    ],
)
def test_what_is_no_stepper_or_communicator_is_refused(stepper, comm, text):
    with pytest.raises(TypeError, match=text):
        dbuf.DataParallel(stepper, comm)


def test_one_rank_alone_trains_as_without_it(kind, driver, way):
    plain = Job(kind, driver, epochs=2).train(coded(3))
    job = Job(kind, driver, epochs=2)
    job.trainer.stepper = dbuf.DataParallel(job.stepper, Comm())
    job.train(coded(3))
    assert job.seen == codes(0, 1, 2) * 2
    assert_same(plain.result(), job.result())


def test_its_description_makes_it_again(monkeypatch):
    stepper = dbuf.DataParallel(bs.training.MomentumStepper(0.3, 0.9), Comm())
    description = get_description(dbuf.Trainer(stepper))
    assert description["stepper"] == {
        "@type": "DataParallel",
        "stepper": get_description(bs.training.MomentumStepper(0.3, 0.9)),
    }
    monkeypatch.setattr(data_parallel, "world", lambda: Comm(4))
    made = create_from_description(json.loads(json.dumps(description))).stepper
    assert type(made) is dbuf.DataParallel
    assert (made.ranks, made.cuda_aware, made.learning_rate) == (4, False, 0.3)


def test_attributes_are_those_of_the_stepper_inside(driver):
    job = Job("numpy", driver, epochs=3)
    inner = bs.training.MomentumStepper(0.1, 0.5)
    job.trainer.stepper = stepper = dbuf.DataParallel(inner, Comm())
    job.trainer.add_hook(
        bs.hooks.ModifyStepperAttribute(
            bs.training.MultiStep(0.1, [2], [0.02]), "learning_rate"
        )
    )
    job.train(coded(2))
    assert inner.learning_rate == stepper.learning_rate == 0.02
    assert "learning_rate" not in vars(stepper)
    stepper.note = "mine"
    assert not hasattr(inner, "note") and stepper.note == "mine"
    with pytest.raises(AttributeError, match="no_such"):
        stepper.no_such


def test_other_steppers_are_trained_by_brainstorms_own_function(driver):
    plain = inspect.unwrap(bs.Trainer.train)
    assert plain.__code__.co_filename.endswith("brainstorm/training/trainer.py")
    assert inspect.signature(plain) == inspect.signature(bs.Trainer.train)


class NcclComm:
    """A communicator of CuPy's NCCL."""

    def rank_id(self):
        return 0

    def size(self):
        return 2

    def allReduce(self, *args):
        raise AssertionError


def test_handlers_that_cannot_take_part_are_named(driver):
    class Handler(NumpyHandler):
        pass

    job = Job("numpy", driver)
    job.trainer.stepper = dbuf.DataParallel(job.stepper, NcclComm())
    with pytest.raises(TypeError, match="NCCL needs a handler.*got NumpyHandler"):
        job.train(coded(1))
    access_for.register(Handler, lambda handler: None)
    job.net.set_handler(Handler(np.float32))
    job.trainer.stepper = dbuf.DataParallel(job.stepper, Comm(2))
    with pytest.raises(TypeError, match="the gradients of a Handler cannot be reached"):
        job.train(coded(1))


def at_a_minibatch(comm):
    """Return the ranks' lockstep where the first, this one, is at a minibatch."""

    def agree(array):
        slots = array[-6:].reshape(2, 3)
        slots[1] = slots[0]

    comm.answer = agree
    lockstep = Lockstep(NumpyHandler(np.float32), comm, False)
    lockstep.start(np.zeros(4, np.float32))
    comm.sums = 0
    return lockstep


@needs_mpi
@pytest.mark.parametrize(
    "other, error, sums",
    [
        # The interrupt came before the ranks met, so the others wait still; after they
        # had met, so they will come to the next minibatch; or after one had left.
        (None, KeyboardInterrupt, 2),
        (State.TRAINS, KeyboardInterrupt, 2),
        (State.ENDED, KeyboardInterrupt, 1),
        (State.FAILED, KeyboardInterrupt, 1),
        # The communicator fails: nobody can be met by it.
        (None, RuntimeError, 1),
    ],
)
def test_a_rank_interrupted_while_it_meets_the_others_knows_whether_they_wait(
    other, error, sums, monkeypatch
):
    monkeypatch.setitem(sys.modules, "mpi4py", type(sys)("mpi4py"))
    sys.modules["mpi4py"].MPI = type("MPI", (), {"IN_PLACE": None})
    comm = Comm(2)
    lockstep = at_a_minibatch(comm)

    def interrupted(array):
        if comm.sums == 1:
            if other is not None:
                array[-3:] = other, 1, 2
            raise error

    comm.answer = interrupted
    with pytest.raises(error):
        lockstep.average(np.ones(4, np.float32), epoch=1, samples=2)
    lockstep.leave(State.FAILED, 1)
    lockstep.leave(State.FAILED, 1)
    assert comm.sums == sums


@pytest.mark.gpu
def test_nccl_adds_up_on_the_compute_stream(cuda):
    nccl = pytest.importorskip("cupy.cuda.nccl", reason="needs CuPy with NCCL")
    # It is of the context that is current, and makes the primary one so.
    with cuda.context:
        add_up_by_nccl(cuda, nccl)


def add_up_by_nccl(cuda, nccl):
    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    array = cuda.create_from_numpy(np.arange(5, dtype=np.float32))
    message = DeviceMessage(comm, 5, cuda, access_for(cuda))
    message.slots[:] = 2, 3, 4
    message.load(array, 2.0)
    message.sum()
    message.unload(array, 0.25)
    np.testing.assert_array_equal(cuda.get_numpy_copy(array), np.arange(5) / 2)
    np.testing.assert_array_equal(message.slots, [[2, 3, 4]])
    message.close()
    comm.destroy()


@pytest.mark.usefixtures("nothing_left")
def test_gradients_on_a_device_go_through_page_locked_memory(cuda):
    array = cuda.create_from_numpy(np.arange(5, dtype=np.float32))
    message = StagedMessage(Comm(), 5, cuda, access_for(cuda))
    message.load(array, 2.0)
    assert dbuf.is_pagelocked(message._values)
    np.testing.assert_array_equal(message._values, np.arange(5) * 2)
    message._values += 1
    message.unload(array, 0.5)
    np.testing.assert_array_equal(cuda.get_numpy_copy(array), np.arange(5) + 0.5)
    message.close()
