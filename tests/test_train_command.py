"""`brainstorm-dbuf train`, as a new user would try it."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest

import brainstorm as bs
from brainstorm.data_iterators import Minibatches
from brainstorm_dbuf.__main__ import main
from test_command_line import run

pytestmark = pytest.mark.timeout(60)


def data_set(samples=120, seed=0):
    """Return two classes, told apart by the sign of the first feature."""
    rnd = np.random.RandomState(seed)
    features = rnd.standard_normal((1, samples, 6)).astype(np.float32)
    features[..., 0] = np.sign(features[..., 0]) * 2
    return {
        "default": features,
        "targets": (features[..., :1] > 0).astype(np.int64),
    }


@pytest.fixture
def write(tmp_path):
    def write(groups, within="/", name="data.hdf5"):
        path = tmp_path / name
        with h5py.File(path, "w") as file:
            top = file.require_group(within)
            for group, arrays in groups.items():
                for key, array in arrays.items():
                    top.require_group(group)[key] = array
        return str(path)

    return write


def train(*arguments):
    return main(["train", *map(str, arguments)])


# ------------------------------------------------------------------------- training


@pytest.mark.parametrize("within", ["/", "/normalized_split"])
@pytest.mark.parametrize("held_out", ["validation", "test"])
def test_the_best_network_is_saved(within, held_out, write, tmp_path, capsys):
    held = data_set(seed=1)
    data = write({"training": data_set(), held_out: held}, within)
    best = tmp_path / "best.hdf5"
    arguments = ("F8", "--data", data, "--epochs", 4, "--batch-size", 20)
    assert train(*arguments, "--save", best, "--handler", "numpy") == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[0] == "120 samples of (6,), 74 parameters, NumpyHandler"
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["epoch", f"{epoch}/4"] for epoch in range(1, 5)
    ]
    assert "feed: " in said.out
    scores = [float(line.split("Accuracy ")[1].split()[0]) for line in lines[1:5]]
    number = 1 + scores.index(max(scores))
    assert f"{best} has the network of epoch {number}" in said.out
    net = bs.Network.from_hdf5(str(best))
    score = bs.tools.evaluate(
        net,
        Minibatches(10, shuffle=False, **held),
        [bs.scorers.Accuracy(out_name=net.output_name)],
    )
    assert float(score["Accuracy"]) == pytest.approx(max(scores), abs=1e-3)
    assert max(scores) > 0.9


def test_without_a_validation_set_the_loss_says_which_is_best(write, tmp_path, capsys):
    best = tmp_path / "best.hdf5"
    data = write({"training": data_set()})
    arguments = ("F8", "--data", data, "--epochs", 3, "--save", best, "--json")
    assert train(*arguments, "--batch-size", 20) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["scores"] == [] and len(report["losses"]) == 3
    assert report["best_epoch"] == 1 + report["losses"].index(min(report["losses"]))
    assert report["saved"] == str(best)
    assert report["verdict"].startswith("feed: ")


def test_the_same_seed_gives_the_same_losses(write, capsys):
    data = write({"training": data_set()})
    losses = []
    for seed in (3, 3, 4):
        arguments = ("D.2 F8 D", "--data", data, "--epochs", 2, "--seed", seed)
        assert train(*arguments, "--json", "--batch-size", 20) == 0
        losses.append(json.loads(capsys.readouterr().out)["losses"])
    assert losses[0] == losses[1] != losses[2]


def test_it_trains_on_a_device(cuda, write, capsys):
    data = write({"training": data_set(), "validation": data_set(seed=1)})
    arguments = ("F8", "--data", data, "--epochs", 3, "--batch-size", 20, "--json")
    assert train(*arguments, "--handler", "cuda") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["handler"] == "CudaHandler" and max(report["scores"]) > 0.9
    assert train(*arguments) == 0
    assert json.loads(capsys.readouterr().out)["handler"] == "CudaHandler"


def test_images_sequences_and_labels(write, tmp_path, capsys):
    rnd = np.random.RandomState(0)
    images = {
        "default": rnd.randint(0, 256, (1, 40, 8, 8, 3)).astype(np.uint8),
        "targets": rnd.randint(0, 3, (1, 40, 1)),
    }
    sequences = {
        "default": rnd.standard_normal((5, 40, 4)),
        "targets": rnd.randint(0, 3, (5, 40, 1)),
    }
    labels = {
        "default": rnd.standard_normal((1, 40, 4)),
        "targets": rnd.randint(0, 2, (1, 40, 7)),
    }
    for spec, data, task, score in (
        ("C4:3 Pm2 F8", images, "classification", "Accuracy"),
        ("L6", sequences, "classification", "Accuracy"),
        ("F6", labels, "multi-label", "Hamming"),
    ):
        path = write({"training": data, "test": data})
        arguments = (spec, "--data", path, "--task", task, "--epochs", 2, "--json")
        assert train(*arguments, "--batch-size", 10, "--learning-rate", 0.001) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["score"] == score and len(report["scores"]) == 2


def test_a_timeline_is_drawn(write, tmp_path, capsys):
    picture = tmp_path / "feed.png"
    data = write({"training": data_set()})
    arguments = ("F8", "--data", data, "--epochs", 1, "--batch-size", 20)
    assert train(*arguments, "--timeline", picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"{picture} shows some minibatches" in capsys.readouterr().out


# -------------------------------------------------------------------- what is wrong


def wrong(capsys, *arguments):
    """Return what is said on standard error, in one line, of what exits with 2."""
    assert train(*arguments, "--epochs", 1) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("brainstorm-dbuf train: ") and said.err.count("\n") == 1
    return said.err


def test_a_file_that_is_not_there_or_no_hdf5(tmp_path, capsys):
    missing, text = tmp_path / "no.hdf5", tmp_path / "text.hdf5"
    text.write_text("no data")
    for path in (missing, text):
        assert f"--data {path}: " in wrong(capsys, "F8", "--data", path)


def test_data_that_are_not_as_they_must_be(write, capsys):
    good = data_set()
    for groups, says in (
        ({"test": good}, "no group 'training' in '/', only ['test']"),
        ({"training": {"default": good["default"]}}, "/training has no targets"),
        (
            {"training": {**good, "targets": good["targets"][:, :-1]}},
            "T and N differ",
        ),
        (
            {"training": {**good, "targets": good["targets"] - 1}},
            "expected classes from 0 on, of shape (T, N, 1), got int64 of (1, 120, 1) "
            "from -1 to 0",
        ),
        (
            {"training": {**good, "targets": good["targets"] + 0.5}},
            "expected classes from 0 on",
        ),
        (
            {"training": {**good, "default": good["default"][0]}},
            "default: expected numbers of shape (T, N, ...), got float32 of (120, 6)",
        ),
        (
            {"training": {**good, "default": np.array([[[b"text"]]])}},
            "default: expected numbers of shape (T, N, ...), got |S4",
        ),
        (
            {"training": good, "test": {**good, "default": good["default"][..., :4]}},
            "default differs in shape: {'training': (6,), 'validation': (4,)}",
        ),
    ):
        assert says in wrong(capsys, "F8", "--data", write(groups))


@pytest.mark.parametrize(
    "spec, says",
    [
        ("", "expected layers such as"),
        ("100", "expected layers such as"),
        ("F8 X3", "expected layers such as"),
        ("C4:3", "makes no network for samples of (6,)"),
        ("F", "makes no network"),
    ],
)
def test_a_spec_that_is_none(spec, says, write, capsys):
    data = write({"training": data_set()})
    assert says in wrong(capsys, spec, "--data", data)


def test_a_file_is_not_replaced_unless_asked_for(write, tmp_path, capsys):
    data = write({"training": data_set()})
    best = tmp_path / "best.hdf5"
    best.write_text("precious")
    arguments = ("F8", "--data", data, "--save", best, "--batch-size", 20)
    assert "it exists; --overwrite replaces it" in wrong(capsys, *arguments)
    assert best.read_text() == "precious"
    assert train(*arguments, "--epochs", 1, "--overwrite") == 0
    assert bs.Network.from_hdf5(str(best))
    capsys.readouterr()
    nowhere = tmp_path / "no" / "best.hdf5"
    said = wrong(capsys, "F8", "--data", data, "--save", nowhere)
    assert "there is no folder" in said


def test_a_timeline_that_cannot_be_written_is_refused_before_training(
    write, tmp_path, capsys
):
    data = write({"training": data_set()})
    arguments = ("F8", "--data", data, "--batch-size", 20, "--epochs", 1)
    for name in ("feed.xyz", "no/feed.png"):
        assert train(*arguments, "--timeline", tmp_path / name) == 2
        said = capsys.readouterr()
        assert said.err.startswith("brainstorm-dbuf train: --timeline: ")
        assert said.out == ""


@pytest.mark.parametrize(
    "option", [["--epochs", "0"], ["--batch-size", "-1"], ["--learning-rate", "nan"]]
)
def test_a_number_that_is_not_positive_is_a_wrong_command_line(option, capsys):
    with pytest.raises(SystemExit) as ended:
        train("F8", "--data", "x", *option)
    assert ended.value.code == 2
    assert f"argument {option[0]}: invalid positive" in capsys.readouterr().err


def test_a_handler_that_cannot_be_had_ends_with_3(write):
    done = run(
        *("train", "F8", "--handler", "cuda"),
        *("--data", write({"training": data_set()})),
        BRAINSTORM_DBUF_LIBCUDA="/nowhere/libcuda.so.1",
    )
    assert done.returncode == 3
    assert "--handler cuda: " in done.stderr and "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_brainstorm_it_says_how_to_get_it(tmp_path):
    done = run(
        *("train", "F8", "--data", "x"),
        before="import sys; sys.modules['brainstorm'] = None",
    )
    assert done.returncode == 3
    assert "python -m brainstorm_dbuf.install_brainstorm" in done.stderr
