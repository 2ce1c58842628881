"""The pages in docs: built without a warning, and what they show is what happens."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zlib

import pytest

import brainstorm_dbuf as dbuf
from conftest import SUBPROCESS_PATH, skip_without, why_no_pycuda
from shown_code import (
    ROOT,
    blocks_of,
    commands_of,
    comparable,
    run_command,
    run_python,
)

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.rst"))
BLOCKS = {page.relative_to(DOCS).as_posix(): blocks_of(page) for page in PAGES}

# What is not run by the tests, by its name in the page, and why.
NOT_RUN = {
    "install": "installs into an environment: make test does it",
    "install-cuda": "installs into an environment, with a driver",
    "install-pycuda": "installs into an environment, beside a CUDA toolkit",
    "install-brainstorm": "installs into an environment: make test does it",
    "nvtx": "needs Nsight Systems and a GPU",
    "benchmarks": "takes minutes: make bench, make gpu-bench",
}
# What is run where more is there than the tests install.
NEEDS = {
    "torch-loader": ("torch", False),
    "torch-dlpack": ("torch", True),
    "cupy": ("cupy", True),
    "pycuda-train": ("pycuda", True),
}
# True of machines without PyCUDA, which has a context current in the main thread.
WITHOUT_PYCUDA = {"pycuda-problem", "no-context-current"}

pytestmark = pytest.mark.timeout(60)


def check(block, printed, shown=None, classes=None):
    shown = block.shown if shown is None else shown
    classes = block.shown_classes if classes is None else classes
    if "example-output" in classes:
        # A machine may lack less, or have more.
        known = set(comparable(printed, classes).split("\n"))
        assert len(known & set(comparable(shown, classes).split("\n"))) > 5, printed
    else:
        assert comparable(printed, classes) == comparable(shown or "", classes), (
            f"{block} prints:\n{printed}"
        )


def is_alone(block):
    return not block.classes.isdisjoint({"alone", "no-driver"})


@pytest.mark.parametrize("page", [page for page in BLOCKS if BLOCKS[page]])
def test_what_a_page_shows_is_what_happens(page, driver, tmp_path):
    blocks = [b for b in BLOCKS[page] if b.name not in {*NOT_RUN, *NEEDS}]
    if why_no_pycuda() is None:
        blocks = [block for block in blocks if block.name not in WITHOUT_PYCUDA]
    python = [block for block in blocks if block.language == "python"]
    if any("CudaHandler(" in block.code for block in python):
        skip_without("cuda")
    together = [block for block in python if not is_alone(block)]
    if together:
        for block, printed in zip(
            together, run_python(together, tmp_path, SUBPROCESS_PATH)
        ):
            check(block, printed)
    for block in blocks:
        if block.language == "console":
            for words, shown in commands_of(block):
                printed = run_command(words, tmp_path, SUBPROCESS_PATH)
                if shown:
                    check(block, printed, shown, block.classes)
        elif block not in together:
            has_driver = "no-driver" not in block.classes
            [printed] = run_python([block], tmp_path, SUBPROCESS_PATH, has_driver)
            check(block, printed)


@pytest.mark.parametrize("name", NEEDS)
def test_what_needs_another_library(name, driver, tmp_path):
    [block] = (b for blocks in BLOCKS.values() for b in blocks if b.name == name)
    library, needs_gpu = NEEDS[name]
    if library == "pycuda":
        skip_without("pycuda")
    else:
        pytest.importorskip(library, reason=f"{library} is not installed")
    if needs_gpu and driver.kind == "fake":
        pytest.skip("needs a real CUDA device (make gpu-test)")
    [printed] = run_python([block], tmp_path, SUBPROCESS_PATH)
    check(block, printed)


def test_every_block_is_one_that_the_tests_know():
    names = [b.name for blocks in BLOCKS.values() for b in blocks if b.name]
    assert len(names) == len(set(names))
    assert {*NOT_RUN, *NEEDS, *WITHOUT_PYCUDA} <= set(names)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        # No other way to show code, which would go by unseen.
        other = (
            r"^(?! *\.\.).*::$|^ *>>> |^ *\.\. (code|literalinclude|parsed-literal)::"
        )
        assert not re.search(other, text, re.MULTILINE), page
        shown = len(re.findall(r"^ *\.\. code-block::", text, re.MULTILINE))
        blocks = BLOCKS[page.relative_to(DOCS).as_posix()]
        assert shown == len(blocks) + sum(b.shown is not None for b in blocks), page
        for block in blocks:
            is_run = block.language in ("python", "console")
            assert is_run != (block.name in NOT_RUN), block


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder with the built pages."""
    pytest.importorskip(
        "sphinx.application", reason="Sphinx is not installed (the extra docs)"
    )
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going"]
    done = subprocess.run(
        [*command, "-n", "-q", "-d", folder / "doctrees", DOCS, folder / "html"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder / "html"


def test_the_pages_build_without_a_warning(site):
    for page in BLOCKS:
        assert (site / page).with_suffix(".html").is_file()
    start = (site / "index.html").read_text(encoding="utf-8")
    assert f"Version {importlib.metadata.version('brainstorm-dbuf')}" in start


def test_the_reference_has_every_public_name(site):
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    names = zlib.decompress(inventory).decode()
    has = {line.split()[0] for line in names.splitlines() if " py:" in line}
    # `hooks` is a module, and there as one.
    assert {f"brainstorm_dbuf.{name}" for name in dbuf.__all__} <= has
    assert "brainstorm_dbuf._cuda.HandlerCore.dot_add_mm" in has


def test_readme_and_changelog_are_in_the_pages(site):
    changelog = (site / "changelog.html").read_text(encoding="utf-8")
    for version in re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M):
        assert re.search(rf"<h2>{re.escape(version)}<", changelog)
    performance = (site / "performance.html").read_text(encoding="utf-8")
    assert "feeds-h200.svg" in performance
    tables = re.findall(
        r"^\|.*GB/s.*\|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    figures = [cell.strip() for row in tables for cell in row.strip("|").split("|")]
    assert tables and all(f"<p>{cell}</p>" in performance for cell in figures if cell)
