# Two commands do everything on a machine with Python 3.10+ and a C compiler:
#   make demo    venv, brainstorm, build, and the main job on real data
#   make test    the same set-up, then all tests
# On a machine with an NVIDIA GPU, with its own python3 and without a network:
#   make gpu-test   all tests, on the stand-in driver and on the real one
#   make gpu-bench  the benchmarks
# What that machine lacks lies as wheels or source packages in $(WHEELS).

PYTHON ?= python3
VENV ?= .venv
WHEELS ?= wheels
BIN = $(VENV)/bin
SOURCES = setup.py pyproject.toml $(wildcard src/*/*.[ch]) \
	$(wildcard brainstorm_dbuf/*.py brainstorm_dbuf/*.pyi brainstorm_dbuf/*/*.py)

.PHONY: demo test bench gpu-build gpu-test gpu-memcheck gpu-bench clean

demo: $(VENV)/installed
	$(BIN)/python examples/digits.py

test: $(VENV)/installed
	$(BIN)/python -m pytest tests

bench: $(VENV)/installed
	$(BIN)/python bench/small_batches.py

$(VENV)/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	BRAINSTORM_DBUF_WERROR=1 $(BIN)/python -m pip install --quiet ".[examples,test]"
	$(BIN)/python -m brainstorm_dbuf.install_brainstorm
	touch $@

# ------------------------------------------------------------------- on the GPU

GPU_SITE = build/gpu-site
GPU_PYTHON = PYTHONPATH=$(CURDIR)/$(GPU_SITE) $(PYTHON)
GPU_TESTS ?= tests

gpu-build:
	mkdir -p $(GPU_SITE)
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation \
		--no-warn-script-location --upgrade --target $(GPU_SITE) \
		. $(wildcard $(WHEELS)/*.whl)

gpu-test: gpu-build
	$(GPU_PYTHON) -m pytest $(GPU_TESTS)
	BRAINSTORM_DBUF_TEST_DRIVER=real $(GPU_PYTHON) -m pytest $(GPU_TESTS)

# The binding's and the feed's tests under the memory checker.
gpu-memcheck: gpu-build
	BRAINSTORM_DBUF_TEST_DRIVER=real $(GPU_PYTHON) -c "import sys; print(sys.executable)" >build/python
	PYTHONPATH=$(CURDIR)/$(GPU_SITE) BRAINSTORM_DBUF_TEST_DRIVER=real \
		compute-sanitizer --tool memcheck --error-exitcode 9 --target-processes application-only \
		$$(cat build/python) -m pytest -p no:cacheprovider -m "not slow" --timeout 300 \
		tests/test_binding_*.py tests/test_parity.py

gpu-bench: gpu-build
	$(GPU_PYTHON) bench/driver_calls.py
	$(GPU_PYTHON) bench/small_batches.py
	$(GPU_PYTHON) bench/large_batches.py

clean:
	rm -rf build dist $(VENV) *.egg-info brainstorm_dbuf/*.so
