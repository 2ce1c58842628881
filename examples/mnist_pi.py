"""brainstorm's example mnist_pi, double-buffered: MNIST by fully connected layers.

Permutation-invariant: the network does not know which pixels are neighbours. Two hidden
layers of 1200, dropout on each layer's input, a bound on the weights of the last one.

    python examples/mnist_pi.py
    python examples/mnist_pi.py --data MNIST.hdf5 --handler cuda --epochs 500
    python examples/mnist_pi.py --plain         # brainstorm's own loop, to compare
"""

import common

import brainstorm_dbuf as dbuf

import brainstorm as bs
from brainstorm.data_iterators import Minibatches

options = common.add_data_options(common.parser(__doc__)).parse_args()
bs.global_rnd.set_seed(common.SEED)

training, validation = common.images(options, (28, 28, 1))

net = bs.tools.create_net_from_spec(
    "classification", training["default"].shape[2:], 10, "D.2 F1200 D F1200 D"
)
net.set_handler(common.make_handler(options.handler))
net.initialize(bs.initializers.Gaussian(0.01))
net.set_weight_modifiers(
    {"Output_projection": {"W": bs.value_modifiers.ConstrainL2Norm(1)}}
)

trainer = dbuf.Trainer(  # instead of bs.Trainer
    bs.training.MomentumStepper(learning_rate=0.1, momentum=0.9),
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
