"""brainstorm's example cifar10_cnn, double-buffered: CIFAR-10 by a small CNN.

Three convolutions of 5x5 with 32, 32 and 64 filters, each followed by max pooling of
3x3 in steps of 2, then a fully connected layer of 64.

    python examples/cifar10_cnn.py --samples 1000 --epochs 2
    python examples/cifar10_cnn.py --data CIFAR-10.hdf5 --handler cuda --epochs 20
    python examples/cifar10_cnn.py --plain      # brainstorm's own loop, to compare
"""

import common

import brainstorm_dbuf as dbuf

import brainstorm as bs
from brainstorm.data_iterators import Minibatches
from brainstorm.initializers import Gaussian
from brainstorm.layers import Convolution2D, FullyConnected, Pooling2D

options = common.add_data_options(common.parser(__doc__)).parse_args()
bs.global_rnd.set_seed(common.SEED)

training, validation = common.images(options, (32, 32, 3))

first, last = bs.tools.get_in_out_layers(
    "classification", training["default"].shape[2:], 10
)
layer = first
for number, filters in enumerate((32, 32, 64), 1):
    layer >>= Convolution2D(filters, (5, 5), padding=2, name=f"Conv{number}")
    layer >>= Pooling2D((3, 3), type="max", stride=(2, 2))
net = bs.Network.from_layer(layer >> FullyConnected(64, name="FC") >> last)
net.output_name = "Output.outputs.predictions"
net.set_handler(common.make_handler(options.handler))
net.initialize(
    {
        "Conv*": {"W": Gaussian(0.01), "bias": 0},
        "FC": {"W": Gaussian(0.1), "bias": 0},
        "Output_projection": {"W": Gaussian(0.1), "bias": 0},
    }
)

trainer = dbuf.Trainer(  # instead of bs.Trainer
    bs.training.MomentumStepper(learning_rate=0.01, momentum=0.9),
    double_buffering=not options.plain,
    timed=True,
)
common.train(
    net,
    trainer,
    Minibatches(100, **training),
    Minibatches(100, **validation),
    options,
)
