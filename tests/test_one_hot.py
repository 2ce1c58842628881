"""One-hot data cross the link as indices; everything else is as brainstorm's OneHot."""

from __future__ import annotations

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import AddGaussianNoise, Minibatches, OneHot, Undivided
from brainstorm_dbuf.one_hot import OneHotIndices, can_stay_indices, unexpanded
from parity import SEED, assert_same, make_handler, poison_back_buffers, train

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

STEPS, SAMPLES, SYMBOLS, CLASSES = 4, 14, 7, 3


def net():
    made = bs.tools.create_net_from_spec("classification", (SYMBOLS,), CLASSES, "L5 F4")
    return made


def symbols(dtype=np.int64, low=0, high=SYMBOLS, seed=0):
    rnd = np.random.default_rng(seed)
    return rnd.integers(low, high, (STEPS, SAMPLES, 1)).astype(dtype)


def one_hot(indices, sizes=None, batch_size=4):
    targets = np.random.default_rng(1).integers(0, CLASSES, (STEPS, SAMPLES, 1))
    inner = Minibatches(batch_size, default=indices, targets=targets)
    return OneHot(inner, sizes or {"default": SYMBOLS})


def both(kind, driver, make_iterator, **kwargs):
    plain, buffered = (
        train(net, make_iterator, make_handler(kind, driver), on, **kwargs)
        for on in (False, True)
    )
    assert_same(plain, buffered)
    return buffered


@pytest.mark.parametrize("dtype", ["i8", "i4", "u1", "u8", ">i2"])
def test_training_gives_the_same_weights(dtype, kind, driver, way, monkeypatch):
    poison_back_buffers(monkeypatch)
    for mode in ["late", "random"] if driver.fake is not None else [None]:
        if mode is not None:
            driver.fake.mode(mode)
        run = both(kind, driver, lambda: one_hot(symbols(dtype)))
        assert run.stats.fallbacks == []


def test_negative_indices_count_from_the_end(kind, driver):
    both(kind, driver, lambda: one_hot(symbols(low=-SYMBOLS)))


def test_only_the_indices_cross_the_link(kernels, driver):
    def bytes_of(make_iterator):
        run = both("cuda", driver, make_iterator)
        return run.stats.back_buffer_bytes

    def inner_only():
        # The same data, expanded before.
        iterator = one_hot(symbols(), batch_size=SAMPLES)
        data = dict(iterator.iter.data)
        data["default"] = np.eye(SYMBOLS, dtype=np.float32)[data["default"][..., 0]]
        return Minibatches(SAMPLES, **data)

    narrow = bytes_of(lambda: one_hot(symbols(), batch_size=SAMPLES))
    wide = bytes_of(inner_only)
    assert narrow == 2 * 256 and wide > STEPS * SAMPLES * SYMBOLS * 4


@pytest.mark.parametrize("wrong", [SYMBOLS, -SYMBOLS - 1, 2**40])
def test_an_index_out_of_range_is_brainstorms_error(wrong, kind, driver):
    indices = symbols()
    indices[1, 2] = wrong
    texts = []
    for on in (False, True):
        with pytest.raises(IndexError) as caught:
            train(net, lambda: one_hot(indices), make_handler(kind, driver), on)
        texts.append(str(caught.value))
        del caught
    assert texts[0] == texts[1] and str(wrong) in texts[0]


def test_a_mask_of_booleans_means_what_numpy_says(kind, driver):
    def outcome(on):
        with pytest.raises((IndexError, ValueError)) as caught:
            train(net, lambda: one_hot(symbols("?")), make_handler(kind, driver), on)
        return caught.type, str(caught.value)

    assert outcome(False) == outcome(True)


def test_a_minibatch_that_finds_no_memory_is_expanded(kernels, fake, driver):
    with pytest.warns(dbuf.FeedWarning, match="ran short"):
        plain = train(net, lambda: one_hot(symbols()), make_handler("cuda", driver), 0)
        fake.set_limits(pinned_bytes=0)
        buffered = train(
            net, lambda: one_hot(symbols()), make_handler("cuda", driver), 1
        )
    assert_same(plain, buffered)


def test_prefetch_lends_the_expanded_array(kind, driver):
    bs.global_rnd.set_seed(SEED)
    iterator = one_hot(symbols())
    handler = make_handler(kind, driver)
    iterator.iter.rnd.set_seed(1)
    expected = [dict(data) for data in iterator(handler)]
    iterator.iter.rnd.set_seed(1)
    with dbuf.Prefetch(iterator) as ahead:
        count = 0
        for data, right in zip(ahead(handler), expected, strict=True):
            for name, array in data.items():
                got = handler.get_numpy_copy(array)
                np.testing.assert_array_equal(got, right[name].astype(np.float32))
            count += 1
            del data, array
    assert count == len(expected) == 4


def test_only_a_plain_one_hot_over_one_array_stays_indices():
    two = one_hot(symbols(), {"default": SYMBOLS, "targets": CLASSES})

    class Own(OneHot):
        pass

    own = Own(one_hot(symbols()).iter, {"default": SYMBOLS})
    noisy = AddGaussianNoise(one_hot(symbols()), {"default": 1.0})
    assert can_stay_indices(one_hot(symbols()))
    assert not any(map(can_stay_indices, (two, own, noisy, one_hot(symbols()).iter)))


def test_indices_expand_to_what_brainstorm_yields():
    bs.global_rnd.set_seed(SEED)
    iterator = one_hot(symbols(low=-SYMBOLS))
    iterator.iter.shuffle = False
    for data, expected in zip(unexpanded(iterator, None), iterator(None), strict=True):
        stays = data["default"]
        assert type(stays) is OneHotIndices and stays.indices.dtype == np.int32
        assert stays.shape == expected["default"].shape
        np.testing.assert_array_equal(stays.expand(), expected["default"])


@pytest.mark.parametrize("shape", [(0, 3, 1), (3, 0, 1)])
def test_no_indices_at_all_are_left_to_brainstorm(shape):
    inner = Minibatches(2, default=symbols(), targets=symbols())
    inner.shuffle = False
    iterator = OneHot(inner, {"default": SYMBOLS})
    inner.__class__ = type(
        "Empty",
        (Minibatches,),
        {"__call__": lambda self, h: iter([{"default": np.empty(shape, int)}])},
    )
    [data] = unexpanded(iterator, None)
    assert data["default"].shape == (*shape[:2], SYMBOLS)


def test_the_users_own_dict_stays_as_it_is():
    inner = Undivided(default=symbols(), targets=symbols())
    [data] = unexpanded(OneHot(inner, {"default": SYMBOLS}), None)
    assert type(data["default"]) is OneHotIndices
    np.testing.assert_array_equal(inner.data["default"], symbols())
