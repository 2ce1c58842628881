"""``brainstorm-dbuf train``: a network from a line of text on a data set in a file."""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .commands import Refused, make_handler, need_brainstorm, positive
from .held_memory import memory_size

DESCRIPTION = """\
Train a network on a data set in brainstorm's HDF5 format.

SPEC says its layers in brainstorm's own words (brainstorm.tools.create_net_from_spec):
F100 is FullyConnected with 100 units, D Dropout, B BatchNorm, R20 Recurrent, L20 Lstm,
C32:5 Convolution2D with 32 filters of 5x5, Pm2 max pooling over 2x2. A small letter
behind the first is the activation: l, r (relu, unless said otherwise), s, t.

FILE has the groups `training` and, if possible, `validation` or `test` (at the top or in
`normalized_split`), each with `default` of shape (T, N, ...) and `targets` of shape
(T, N, 1) with the classes, from 0 on, or, for multi-label, (T, N, labels) of 0 and 1.

    brainstorm-dbuf train "F200 D F200" --data mnist.hdf5 --save best.hdf5

Exit status: 0 once trained, 2 for a wrong command line or wrong data, 3 if networks (or
with --handler those of that handler) cannot be trained here.
"""


@dataclass
class Report:
    """What came of a training; with ``--json`` it is printed.

    Attributes:
        losses: the mean training loss of each epoch.
        scores: of each epoch, on the validation set; empty where there is none.
        best_epoch: the one whose network was the best, from 1 on.
        saved: the file that holds it.
        verdict: what held training back.
    """

    spec: str
    parameters: int
    handler: str
    score: str
    losses: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    best_epoch: int = 0
    saved: str | None = None
    verdict: str = ""

    def find_best(self) -> None:
        """Set the best epoch so far, the first of equals: by score, or by loss."""
        # brainstorm's Hamming counts what is right.
        figures = self.scores or [-loss for loss in self.losses]
        self.best_epoch = 1 + figures.index(max(figures))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "spec", metavar="SPEC", help="the layers, such as 'F200 D F200'"
    )
    parser.add_argument("--data", metavar="FILE", required=True)
    parser.add_argument(
        "--task", choices=("classification", "multi-label"), default="classification"
    )
    parser.add_argument(
        "--handler",
        choices=("auto", "numpy", "cuda"),
        default="auto",
        help="auto: cuda where it can be used, else numpy",
    )
    parser.add_argument("--epochs", type=positive(int), default=10)
    parser.add_argument("--batch-size", type=positive(int), default=100)
    parser.add_argument("--learning-rate", type=positive(float), default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--save",
        metavar="FILE",
        help="keep the best network there: that of the best validation score, or without "
        "a validation set of the least training loss",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="--save may replace a file"
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="draw when each part of the feed was at work (.png, .svg, or a .json trace)",
    )


def run(options: argparse.Namespace) -> int:
    """Train; return the exit status."""
    try:
        _train(options)
    except Refused as refused:
        print(f"brainstorm-dbuf train: {refused}", file=sys.stderr)
        return refused.status
    return 0


def _train(options: argparse.Namespace) -> None:
    need_brainstorm()
    import brainstorm as bs
    import brainstorm_dbuf as dbuf
    from brainstorm.data_iterators import Minibatches

    _check_save(options)
    timeline = _timeline(options)
    sets = load(options.data, options.task)
    handler = make_handler(options.handler, options.seed)
    bs.global_rnd.set_seed(options.seed)
    net = _network(options, sets["training"])
    net.set_handler(handler)
    scorer: Any = bs.scorers.Accuracy(out_name=net.output_name)
    if options.task == "multi-label":
        scorer = bs.scorers.Hamming(out_name=net.output_name)
    report = Report(
        options.spec,
        int(np.prod(net.buffer.parameters.shape)),
        type(handler).__name__,
        scorer.__name__,
    )
    trainer = dbuf.Trainer(
        bs.training.MomentumStepper(options.learning_rate, options.momentum),
        verbose=False,
        timed=True,
    )
    iterators = {}
    if "validation" in sets:
        iterators["validation"] = dbuf.Prefetch(
            Minibatches(options.batch_size, shuffle=False, **sets["validation"])
        )
        trainer.add_hook(bs.hooks.MonitorScores("validation", [scorer], "validation"))
    if timeline is not None:
        trainer.add_hook(timeline)
    if sys.stdout.isatty() and not options.json:
        trainer.add_hook(_bar(options.epochs))
    trainer.add_hook(_epochs(options, report))
    trainer.add_hook(bs.hooks.StopAfterEpoch(options.epochs))
    if not options.json:
        images = sets["training"]["default"]
        print(
            f"{images.shape[1]:,} samples of {images.shape[2:]}, {report.parameters:,} "
            f"parameters, {report.handler}"
        )
    try:
        trainer.train(
            net, Minibatches(options.batch_size, **sets["training"]), **iterators
        )
    finally:
        for iterator in iterators.values():
            iterator.close()
    report.verdict = trainer.feed_stats.verdict
    _tell(options, report)


def _tell(options: argparse.Namespace, report: Report) -> None:
    if options.json:
        print(json.dumps(vars(report), indent=1))
        return
    if report.saved:
        print(f"{report.saved} has the network of epoch {report.best_epoch}")
    if options.timeline:
        print(f"{options.timeline} shows some minibatches on their way")
    print(textwrap.fill(report.verdict, 88))


def _epochs(options: argparse.Namespace, report: Report) -> Any:
    """Return the hook that tells of each epoch and keeps the best network."""
    import brainstorm as bs

    class Epochs(bs.hooks.Hook):
        def start(self, net, stepper, verbose, iterators):
            self.started = time.perf_counter()

        def __call__(self, epoch_nr, update_nr, net, stepper, logs):
            if not epoch_nr:
                return
            seconds = time.perf_counter() - self.started
            report.losses.append(float(logs["rolling_training"]["total_loss"][-1]))
            line = f"loss {report.losses[-1]:.4f}"
            if "validation" in logs:
                report.scores.append(float(logs["validation"][report.score][-1]))
                line += f"  validation {report.score} {report.scores[-1]:.4f}"
            report.find_best()
            is_best = report.best_epoch == epoch_nr
            if is_best and options.save:
                net.save_as_hdf5(options.save)
                report.saved = options.save
            if not options.json:
                print(
                    f"{_erase()}epoch {epoch_nr:3d}/{options.epochs}  {line}  "
                    f"{seconds:.2f} s{'  best' * is_best}",
                    flush=True,
                )
            self.started = time.perf_counter()

    return Epochs("epochs")


def _bar(epochs: int) -> Any:
    """Return the hook that shows on a terminal how far an epoch has come."""
    import brainstorm as bs

    class Bar(bs.hooks.Hook):
        def start(self, net, stepper, verbose, iterators):
            self.batches = iterators["training_data_iter"].length

        def __call__(self, epoch_nr, update_nr, net, stepper, logs):
            if update_nr:
                done = (update_nr - 1) % self.batches + 1
                bar = "=" * (40 * done // self.batches)
                print(
                    f"\repoch {epoch_nr:3d}/{epochs}  [{bar:<40}]", end="", flush=True
                )

    return Bar("bar", timescale="update")


def _erase() -> str:
    """What takes the bar off the line."""
    return "\r\033[K" if sys.stdout.isatty() else ""


def _check_save(options: argparse.Namespace) -> None:
    if not options.save:
        return
    file = Path(options.save)
    if not file.parent.is_dir():
        raise Refused(f"--save {file}: there is no folder {str(file.parent)!r}")
    if file.exists() and not options.overwrite:
        raise Refused(f"--save {file}: it exists; --overwrite replaces it")


def _timeline(options: argparse.Namespace) -> Any:
    """Return the hook that draws it, if one is wanted."""
    import brainstorm_dbuf as dbuf

    if not options.timeline:
        return None
    hook = dbuf.hooks.SaveFeedTimeline(options.timeline, verbose=False)
    try:
        hook.check()
    except (OSError, ImportError, ValueError) as error:
        raise Refused(f"--timeline: {error}") from None
    return hook


def _network(options: argparse.Namespace, data: dict[str, np.ndarray]) -> Any:
    import brainstorm as bs

    # brainstorm's own parser goes over what it does not know.
    if not re.fullmatch(r"(\s*[FBDRLCP][a-z0-9.:/|+\-\s]*)+", options.spec):
        raise Refused(
            f"SPEC {options.spec!r}: expected layers such as 'F200 D F200', each a letter "
            "of F, B, D, R, L, C and P with its arguments"
        )
    targets = data["targets"]
    classes = targets.shape[2]
    if options.task == "classification":
        classes = int(targets.max()) + 1
    try:
        return bs.tools.create_net_from_spec(
            options.task, data["default"].shape[2:], classes, options.spec
        )
    except Exception as error:  # whatever brainstorm raises where layers do not fit
        raise Refused(
            f"SPEC {options.spec!r} makes no network for samples of "
            f"{data['default'].shape[2:]}: {type(error).__name__}: {error}"
        ) from None


def load(path: str, task: str) -> dict[str, dict[str, np.ndarray]]:
    """Return the training set and, if there is one, the validation set.

    Raises:
        Refused: the file, a group or an array is missing or not as it must be.
    """
    import h5py

    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise Refused(f"--data {path}: {error}") from None
    with file:
        group = file
        if "normalized_split" in file:
            group = _group(path, file, "normalized_split")
        if "training" not in group:
            raise Refused(
                f"--data {path}: there is no group 'training' in {group.name!r}, only "
                f"{sorted(group)}"
            )
        sets = {"training": _read(path, _group(path, group, "training"), task)}
        for name in ("validation", "test"):
            if name in group:
                sets["validation"] = _read(path, _group(path, group, name), task)
                break
    for name in ("default", "targets"):
        shapes = {part: arrays[name].shape[2:] for part, arrays in sets.items()}
        if len(set(shapes.values())) > 1:
            raise Refused(f"--data {path}: {name} differs in shape: {shapes}")
    return sets


def _group(path: str, parent: Any, name: str) -> Any:
    import h5py

    found = parent.get(name)  # None for a link that leads nowhere
    if not isinstance(found, h5py.Group):
        raise Refused(
            f"--data {path}: {name!r} in {parent.name!r} is not a group but "
            f"{'a broken link' if found is None else 'a data set'}"
        )
    return found


def _array(where: str, group: Any, name: str) -> np.ndarray:
    """Read a data set once it is known to be numbers that fit into memory."""
    import h5py

    found = group.get(name)
    if not isinstance(found, h5py.Dataset) or found.shape is None:
        raise Refused(
            f"{where}/{name}: expected a data set of numbers, got "
            f"{'a broken link' if found is None else found}"
        )
    if len(found.shape) < 3 or found.dtype.kind not in "biuf" or 0 in found.shape:
        raise Refused(
            f"{where}/{name}: expected numbers of shape (T, N, ...), got "
            f"{found.dtype} of {found.shape}"
        )
    # A file of a few bytes can claim any shape.
    memory = memory_size()
    if found.nbytes > memory:
        raise Refused(
            f"{where}/{name}: {found.nbytes:,} bytes, which is more than the memory of "
            f"this machine, {memory:,}"
        )
    try:
        return found[:]
    except OSError as error:
        raise Refused(f"{where}/{name}: {error}") from None


def _read(path: str, group: Any, task: str) -> dict[str, np.ndarray]:
    where = f"--data {path}: {group.name}"
    missing = [name for name in ("default", "targets") if name not in group]
    if missing:
        raise Refused(
            f"{where} has no {' and no '.join(missing)}, only {sorted(group)}"
        )
    data = {name: _array(where, group, name) for name in ("default", "targets")}
    if data["default"].shape[:2] != data["targets"].shape[:2]:
        raise Refused(
            f"{where}: default is of {data['default'].shape} and targets of "
            f"{data['targets'].shape}: T and N differ"
        )
    targets = data["targets"]
    if task == "classification" and (
        targets.shape[2:] != (1,) or (targets != np.floor(np.abs(targets))).any()
    ):
        raise Refused(
            f"{where}/targets: expected classes from 0 on, of shape (T, N, 1), got "
            f"{targets.dtype} of {targets.shape} from {targets.min()} to {targets.max()}"
        )
    return data
