"""brainstorm's example hutter_lstm, double-buffered: the next character of Wikipedia.

An LSTM layer of 1000 reads the Hutter prize's text, 205 different characters, in pieces
of 100 characters, 100 pieces a minibatch. OneHot makes a row of 205 numbers of each;
what crosses the link to CudaHandler's device is its index.

    python examples/hutter_lstm.py --units 32 --samples 1000
    python examples/hutter_lstm.py --data HutterPrize.hdf5 --handler cuda
    python examples/hutter_lstm.py --plain      # brainstorm's own loop, to compare
"""

import common
import numpy as np

import brainstorm_dbuf as dbuf

import brainstorm as bs
from brainstorm.data_iterators import Minibatches, OneHot

CHARACTERS, LENGTH = 205, 100


def synthetic_text(pieces: int) -> dict:
    """Return pieces of a text of some hundred words, and the character behind each."""
    rnd = np.random.default_rng(common.SEED)
    words = [rnd.integers(1, CHARACTERS, rnd.integers(2, 9)) for _ in range(300)]
    size = pieces * LENGTH + 1
    drawn = rnd.integers(0, len(words), size)
    text = np.concatenate([[*words[word], 0] for word in drawn[: size // 3 + 1]])[:size]
    return {
        "default": text[:-1].reshape(pieces, LENGTH).T[..., None],
        "targets": text[1:].reshape(pieces, LENGTH).T[..., None],
    }


options = common.add_data_options(common.parser(__doc__))
options.add_argument(
    "--units", type=common.positive, default=1000, help="of the LSTM layer"
)
options = options.parse_args()
bs.global_rnd.set_seed(common.SEED)

if options.data:
    training, validation = common.load(options.data, "split", 3)
else:
    print(f"{options.samples:,} pieces of synthetic text (--data for a real one)")
    text = synthetic_text(options.samples + 100)
    training = {name: pieces[:, :-100] for name, pieces in text.items()}
    validation = {name: pieces[:, -100:] for name, pieces in text.items()}

net = bs.tools.create_net_from_spec(
    "classification", CHARACTERS, CHARACTERS, f"L{options.units}"
)
net.set_handler(common.make_handler(options.handler))
net.initialize(bs.initializers.Gaussian(0.01))

trainer = dbuf.Trainer(  # instead of bs.Trainer
    bs.training.MomentumStepper(learning_rate=0.01, momentum=0.9),
    double_buffering=not options.plain,
    timed=True,
)
one_hot = {"default": CHARACTERS}
common.train(
    net,
    trainer,
    OneHot(Minibatches(100, shuffle=False, **training), one_hot),
    OneHot(Minibatches(100, shuffle=False, **validation), one_hot),
    options,
)
