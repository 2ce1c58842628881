"""Whether a minibatch looks as the one before."""

import numpy as np
import pytest

from brainstorm_dbuf import _cuda


def test_a_minibatch_that_looks_the_same_has_the_signature():
    arrays = {"a": np.zeros((1, 2, 3), "f4"), "b": np.zeros((1, 2), ">i8")}
    seen = tuple((name, a.shape, a.dtype) for name, a in arrays.items())
    same = {"a": np.ones((1, 4, 3), "<f4")[:, ::2], "b": np.ones((1, 2), ">i8")}
    assert _cuda.has_signature(arrays, seen) and _cuda.has_signature(same, seen)

    class Sub(np.ndarray):
        pass

    class Dict(dict):
        pass

    for other in (
        {**arrays, "c": np.zeros(1)},
        {"a": arrays["a"]},
        {"b": arrays["b"], "a": arrays["a"]},
        {"a": arrays["a"], "c": arrays["b"]},
        {**arrays, "a": np.zeros((1, 2, 4), "f4")},
        {**arrays, "a": np.zeros((1, 2), "f4")},
        {**arrays, "a": np.zeros((1, 2, 3), "f8")},
        {**arrays, "b": np.zeros((1, 2), "<i8")},
        {**arrays, "a": arrays["a"].view(Sub)},
        {**arrays, "a": [1.0]},
        {**arrays, "a": None},
        Dict(arrays),
        None,
        [arrays],
    ):
        assert not _cuda.has_signature(other, seen)
    assert _cuda.has_signature({}, ())


@pytest.mark.parametrize(
    "wrong", [None, [], ((),), (("a", (1,)),), (("a", [1], np.dtype("f4")),), ("abc",)]
)
def test_what_is_no_signature_is_refused(wrong):
    with pytest.raises(TypeError, match="signature"):
        _cuda.has_signature({"a": np.zeros(1, "f4")}, wrong)
    with pytest.raises(TypeError):
        _cuda.has_signature({})
