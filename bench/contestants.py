"""Who trains brainstorm's example networks: brainstorm's handlers, and PyTorch.

A contestant sets up a network with its minibatch on its own device and makes training
updates, the loss read after each. It is built in a process of its own (see handlers.py):
nothing is imported here that another one of them could mind.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from example_networks import ExampleNetwork

MOMENTUM = 0.9


class Unavailable(Exception):
    """The contestant cannot take part on this machine, and why."""


class Contestant:
    """The updates of one network, as one library makes them."""

    def versions(self) -> str:
        raise NotImplementedError

    def build(self, network: ExampleNetwork) -> int:
        """Make the network and return the number of its parameters."""
        raise NotImplementedError

    def drop(self) -> None:
        """Let go of the network."""
        raise NotImplementedError

    def update(self) -> float:
        """Make one training update and return the loss."""
        raise NotImplementedError

    def takes(self, network: ExampleNetwork) -> bool:
        return True

    def set_up(self, network: ExampleNetwork, updates: int) -> tuple[int, float] | None:
        """Return the number of parameters and the seconds of an update, warmed up.

        None if the contestant has nothing to add for this network.
        """
        gc.unfreeze()
        self.drop()
        gc.collect()
        if not self.takes(network):
            return None
        parameters = self.build(network)
        self.turn(updates, 0)
        seconds, _ = self.turn(max(1, updates // 2), 0)
        # Whatever lives by now is not to be looked through during the updates.
        gc.collect()
        gc.freeze()
        return parameters, seconds

    def turn(self, updates: int, untimed: int) -> tuple[float, list[float]]:
        """Return the seconds of an update and all losses, those of `untimed` ones too."""
        losses = [self.update() for _ in range(untimed)]
        started = time.perf_counter()
        for _ in range(updates):
            losses.append(self.update())
        # Reading the last loss has waited for all but the last change of the weights.
        return (time.perf_counter() - started) / updates, losses


# ------------------------------------ brainstorm ------------------------------------ #


class Brainstorm(Contestant):
    """brainstorm with one of its handlers."""

    def __init__(self, kind: str, **options: Any) -> None:
        if kind != "pycuda":
            # brainstorm makes PyCUDA's context whenever it can import it.
            sys.modules["pycuda"] = None  # type: ignore[assignment]
        self.kind = kind
        self.net = self.stepper = self.batch = None
        try:
            make = _numpy_handler if kind == "numpy" else _gpu_handler(kind)
        except (ImportError, RuntimeError) as error:
            raise Unavailable(str(error)) from None
        self.make_handler = functools.partial(make, **options)

    def versions(self) -> str:
        import brainstorm_dbuf
        import numpy

        text = (
            f"brainstorm_dbuf {brainstorm_dbuf.__version__}, NumPy {numpy.__version__}"
        )
        if self.kind == "pycuda":
            import pycuda
            import skcuda

            text += f", PyCUDA {pycuda.VERSION_TEXT}, scikit-cuda {skcuda.__version__}"
        return text

    def build(self, network: ExampleNetwork, handler: Any = None) -> int:
        import brainstorm_dbuf  # noqa: F401  (before brainstorm)
        import brainstorm as bs

        handler = handler or self.make_handler()
        bs.global_rnd.set_seed(1)
        self.net = bs.tools.create_net_from_spec(
            "classification", network.shape[2:], network.classes, network.spec
        )
        self.net.set_handler(handler)
        self.batch = {
            name: handler.create_from_numpy(array)
            for name, array in network.minibatch().items()
        }
        self.stepper = bs.training.MomentumStepper(network.learning_rate, MOMENTUM)
        self.stepper.start(self.net)
        return math.prod(self.net.buffer.parameters.shape)

    def drop(self) -> None:
        self.net = self.stepper = self.batch = None

    def train(self) -> None:
        """Do what brainstorm's trainer does for one minibatch, but read the loss."""
        self.net.provide_external_data(self.batch)
        self.stepper.run()

    def update(self) -> float:
        self.train()
        return self.net.get_loss_values()["total_loss"]

    def rehearse(self, network: ExampleNetwork) -> None:
        """Have all compiled that the network needs: PyCUDA does it at the first use."""
        self.build(network)
        self.update()
        self.drop()

    def compare(
        self, network: ExampleNetwork, updates: int
    ) -> tuple[list[float], list[float]]:
        """Return the losses of a network's first updates, here and on NumpyHandler."""
        both = []
        for handler in (self.make_handler(), _numpy_handler()):
            self.build(network, handler)
            both.append([self.update() for _ in range(updates)])
        return both[0], both[1]

    def profile(self, network: ExampleNetwork, updates: int) -> Any:
        """Return an op_profile.Profile of the network's updates."""
        from op_profile import OpClock

        handler = self.make_handler()
        clock = OpClock(handler)
        self.build(network, handler)
        return clock.profile(self.train, self.update, updates)


def _numpy_handler() -> Any:
    import brainstorm_dbuf  # noqa: F401  (before brainstorm)
    import numpy as np
    from brainstorm.handlers import NumpyHandler

    return NumpyHandler(np.float32, seed=1)


def _gpu_handler(kind: str) -> Callable[..., Any]:
    from gpu_handlers import gpu_handler

    return gpu_handler(kind)


# -------------------------------------- PyTorch ------------------------------------- #


class Torch(Contestant):
    """PyTorch, eager, with modules of the same shapes.

    Args:
        tf32: whether matrix products and cuDNN may use TF32.
        tuned: choose cuDNN's algorithms by trial and use the fused optimizer.
        channels_last: keep images and filters in that order of memory.
    """

    def __init__(
        self, tf32: bool, tuned: bool = False, channels_last: bool = False
    ) -> None:
        try:
            import torch
        except ImportError as error:
            raise Unavailable(str(error)) from None
        if not torch.cuda.is_available():
            raise Unavailable("PyTorch sees no GPU")
        torch.zeros(1, device="cuda")
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = tuned
        torch.manual_seed(1)
        self.tuned, self.channels_last = tuned, channels_last
        self.model = self.optimizer = self.inputs = self.targets = None

    def versions(self) -> str:
        import torch

        return (
            f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN "
            f"{torch.backends.cudnn.version()}"
        )

    def takes(self, network: ExampleNetwork) -> bool:
        return network.name == "cifar10_cnn" or not self.channels_last

    def build(self, network: ExampleNetwork) -> int:
        import torch

        batch = network.minibatch()
        inputs = torch.from_numpy(batch["default"]).cuda()
        targets = torch.from_numpy(batch["targets"]).cuda()
        model = TORCH_MODELS[network.name]().cuda()
        if network.shape[0] == 1:
            inputs = inputs[0]
        if inputs.ndim == 4:
            order = torch.contiguous_format
            if self.channels_last:
                order = torch.channels_last
            inputs = inputs.permute(0, 3, 1, 2).contiguous(memory_format=order)
            model = model.to(memory_format=order)
        self.inputs, self.targets = inputs, targets.reshape(-1).long()
        self.model = model.train()
        # brainstorm takes the mean of the loss over the samples alone, not the steps,
        # and scales the learning rate by 1 - momentum.
        rate = network.learning_rate * (1 - MOMENTUM) * network.shape[0]
        self.optimizer = torch.optim.SGD(
            model.parameters(), lr=rate, momentum=MOMENTUM, fused=self.tuned or None
        )
        self.loss = torch.nn.CrossEntropyLoss()
        return sum(parameter.numel() for parameter in model.parameters())

    def drop(self) -> None:
        self.model = self.optimizer = self.inputs = self.targets = None

    def update(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def _torch_mnist_pi() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Dropout(0.2),
        nn.Linear(784, 1200),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(1200, 1200),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(1200, 10),
    )


def _torch_cifar10_cnn() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(32, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(3 * 3 * 64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def _torch_hutter_lstm() -> Any:
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(205, 1000)
            self.out = nn.Linear(1000, 205)

        def forward(self, inputs: Any) -> Any:
            hidden, _ = self.lstm(inputs)
            return self.out(hidden.flatten(0, 1))

    return Model()


TORCH_MODELS = {
    "mnist_pi": _torch_mnist_pi,
    "cifar10_cnn": _torch_cifar10_cnn,
    "hutter_lstm": _torch_hutter_lstm,
}

# ------------------------------------- the list ------------------------------------- #

CONTESTANTS = {
    "numpy": functools.partial(Brainstorm, "numpy"),
    "pycuda": functools.partial(Brainstorm, "pycuda"),
    "cuda": functools.partial(Brainstorm, "cuda"),
    "cuda-tf32": functools.partial(Brainstorm, "cuda", tf32=True),
    "torch": functools.partial(Torch, tf32=False),
    "torch-tuned": functools.partial(Torch, tf32=False, tuned=True),
    "torch-channels-last": functools.partial(
        Torch, tf32=False, tuned=True, channels_last=True
    ),
    "torch-tf32": functools.partial(Torch, tf32=True),
    "torch-tuned-tf32": functools.partial(Torch, tf32=True, tuned=True),
    "torch-channels-last-tf32": functools.partial(
        Torch, tf32=True, tuned=True, channels_last=True
    ),
}

_contestant: Contestant | None = None


def start(name: str) -> str:
    """Make this process the contestant's and return the versions of what it uses."""
    global _contestant
    _contestant = CONTESTANTS[name]()
    return _contestant.versions()


def ask(method: str, *arguments: Any) -> Any:
    """Call a method of this process's contestant."""
    return getattr(_contestant, method)(*arguments)
