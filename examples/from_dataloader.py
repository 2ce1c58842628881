"""Train a brainstorm network on minibatches that something else makes.

First a generator function, then, where PyTorch is installed, a DataLoader:
`dbuf.FromIterable` makes a data iterator of either, and the minibatch after the current
one is asked for, staged and copied during the step.

    python examples/from_dataloader.py
    python examples/from_dataloader.py --handler cuda --epochs 20
    python examples/from_dataloader.py --plain  # brainstorm's own loop, to compare
"""

import time

import common
import numpy as np

import brainstorm_dbuf as dbuf

import brainstorm as bs

BATCHES, BATCH_SIZE, FEATURES = 50, 100, 256


def draw(rnd: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features of shape (samples, 256) and labels of shape (samples,)."""
    labels = rnd.integers(0, 2, samples)
    noise = rnd.standard_normal((samples, FEATURES), dtype=np.float32)
    return noise + 0.2 * labels[:, None].astype(np.float32), labels


def generate():
    """Yield an epoch of minibatches as brainstorm takes them, of shape (T, B, ...)."""
    rnd = np.random.default_rng(common.SEED)
    for _ in range(BATCHES):
        features, labels = draw(rnd, BATCH_SIZE)
        yield {"default": features[None], "targets": labels[None, :, None]}


def make_loader():
    """Return a DataLoader; its minibatches are lists of tensors of shape (B, ...)."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(common.SEED)
    arrays = draw(np.random.default_rng(common.SEED), BATCHES * BATCH_SIZE)
    data = TensorDataset(*map(torch.from_numpy, arrays))
    return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)


def train(name: str, iterator) -> None:
    bs.global_rnd.set_seed(common.SEED)
    net = bs.tools.create_net_from_spec("classification", FEATURES, 2, "F128 F128")
    net.set_handler(common.make_handler(options.handler))
    trainer = dbuf.Trainer(
        bs.training.MomentumStepper(0.01, 0.9),
        verbose=False,
        double_buffering=not options.plain,
        timed=True,
    )
    trainer.add_hook(bs.hooks.StopAfterEpoch(options.epochs))
    started = time.perf_counter()
    trainer.train(net, iterator)
    seconds = time.perf_counter() - started
    losses = trainer.logs["rolling_training"]["total_loss"]
    print(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    common.tell(trainer, seconds)


options = common.parser(__doc__).parse_args()
train("generator", dbuf.FromIterable(generate, length=BATCHES))
try:
    loader = make_loader()
except ImportError as error:
    print(f"DataLoader: left out, PyTorch is not installed ({error})")
else:
    # Tensors have no time axis: (B, ...) becomes (1, B, ...), labels (1, B, 1).
    names = ("default", "targets")
    train("DataLoader", dbuf.FromIterable(loader, names, has_time=False))
