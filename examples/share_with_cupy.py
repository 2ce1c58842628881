"""Share a stream and arrays with CuPy 14 or newer, without a copy.

Memory is handed over by `__cuda_array_interface__`, streams by `__cuda_stream__`, in
both directions. Everything is queued; the order comes from the stream that both work
on. Ends with status 3 where there is no GPU or no CuPy.

    python examples/share_with_cupy.py
"""

import common
import numpy as np

import brainstorm_dbuf as dbuf


def main() -> None:
    handler = common.make_handler("cuda")
    try:
        import cupy
    except ImportError as error:
        raise common.refuse(
            f"CuPy is missing ({error}): pip install cupy-cuda13x", common.CANNOT
        )
    if not hasattr(cupy.cuda.Stream, "from_external"):
        raise common.refuse(
            f"CuPy 14 or newer is needed, this is {cupy.__version__}", common.CANNOT
        )
    # Arrays and streams of both lie in the device's primary context, the handler's.
    with handler.context:
        share_a_stream(cupy)
        share_arrays(cupy, handler)


def share_a_stream(cupy) -> None:
    """Copy to CuPy's array, compute on it, copy back: one stream, one wait."""
    host = dbuf.pagelocked_empty((1000, 1000))
    host[...] = np.arange(1000)
    result = dbuf.pagelocked_empty((1000, 1000))

    ours = dbuf.Stream()
    theirs = cupy.cuda.Stream.from_external(ours)  # their kernels in our stream
    with theirs:
        array = cupy.empty((1000, 1000), cupy.float32)
        dbuf.memcpy_htod_async(array, host, ours)
        array *= 2
        dbuf.memcpy_dtoh_async(result, array, theirs)  # our copy in theirs
    ours.synchronize()
    check("our stream in CuPy", result, host * 2)

    theirs = cupy.cuda.Stream(non_blocking=True)
    with theirs:
        dbuf.memcpy_htod_async(array, host, theirs)
        array += 1
        dbuf.memcpy_dtoh_async(result, array, theirs)
        done = dbuf.Event().record(theirs)
    done.synchronize()
    check("CuPy's stream in our calls", result, host + 1)


def share_arrays(cupy, handler: dbuf.CudaHandler) -> None:
    """Let CuPy work on the handler's array, and the handler on CuPy's."""
    with cupy.cuda.Stream.from_external(handler.stream):
        array = handler.create_from_numpy(np.ones((4, 5), np.float32))
        view = cupy.asarray(array)
        if view.data.ptr != array.ptr:
            raise SystemExit("FAILED: CuPy has made a copy of the handler's array")
        view *= 3
        handler.add_st(1, array, array)
        check("the handler's array in CuPy", view.get(), np.full((4, 5), 4))

        view = cupy.arange(20, dtype=cupy.float32).reshape(4, 5)
        array = handler.as_array(view)
        if array.ptr != view.data.ptr:
            raise SystemExit("FAILED: the handler has made a copy of CuPy's array")
        handler.mult_st(2, array, array)
        expected = 2 * np.arange(20, dtype=np.float32).reshape(4, 5)
        check("CuPy's array in the handler", view.get(), expected)


def check(what: str, found: np.ndarray, expected: np.ndarray) -> None:
    if not np.array_equal(found, expected):
        raise SystemExit(f"FAILED: {what}: wrong numbers")
    print(f"{what:<28} ok")


if __name__ == "__main__":
    main()
