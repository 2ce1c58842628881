"""Install brainstorm 0.5 into the current environment, whatever its pip.

    python -m brainstorm_dbuf.install_brainstorm
        [--sdist FILE] [--wheel-dir DIR] [--no-deps]

brainstorm's only release is a source package of 2015 that pip 25.3 and newer can
neither build nor download, and whose C part needs NumPy 1. This command takes that
package from the index that pip is set up for (or from FILE), checks it against the one
known hash, packs its Python part into a wheel and lets pip install that; the C part is
ours. Nothing of the source package is run.
"""

from __future__ import annotations

import argparse
import base64
import email
import email.message
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from .compat.locate import INSTALL_COMMAND

NAME = "brainstorm"
VERSION = "0.5"
SDIST_SHA256 = "e8fde7eb1edda32b528db80f36c90abe59647e0ce1e43ebc74ce0f7d285728fd"
REQUIREMENTS = ("numpy", "h5py", "six")
WHEEL_NAME = f"{NAME}-{VERSION}-py3-none-any.whl"
_DIST_INFO = f"{NAME}-{VERSION}.dist-info"
# The wheel's files all have this time, so that the same source gives the same wheel.
_TIME = (2015, 12, 1, 0, 0, 0)
# Exit statuses of compat/pip_fetch.py.
_NOT_ON_INDEX, _UNREACHABLE, _UNKNOWN_PIP = 3, 4, 5


class InstallError(Exception):
    """The installation cannot go on; the message says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0 done, 1 failed and said why."""
    arguments = _parser().parse_args(argv)
    try:
        _run(arguments)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=INSTALL_COMMAND,
        description="Install brainstorm 0.5 into this Python's environment.",
    )
    parser.add_argument(
        "--sdist",
        type=Path,
        metavar="FILE",
        help="take the source package brainstorm-0.5.tar.gz from FILE, not the index",
    )
    parser.add_argument(
        "--wheel-dir",
        type=Path,
        metavar="DIR",
        help="only write the wheel into DIR, install nothing",
    )
    parser.add_argument(
        "--no-deps",
        action="store_true",
        help=f"do not install what brainstorm needs ({', '.join(REQUIREMENTS)})",
    )
    return parser


def _run(arguments: argparse.Namespace) -> None:
    if arguments.wheel_dir is None:
        installed = installed_version()
        if installed == VERSION:
            print(f"brainstorm {VERSION} is already installed in {sys.prefix}")
            return
        if installed is not None:
            print(f"brainstorm {installed} is installed; {VERSION} takes its place")
    with tempfile.TemporaryDirectory(prefix="brainstorm-dbuf-") as folder:
        sdist = arguments.sdist or fetch_sdist(Path(folder))
        wheel = write_wheel(read_sdist(sdist), arguments.wheel_dir or Path(folder))
        if arguments.wheel_dir is not None:
            print(f"wrote {wheel}")
            return
        install_wheel(wheel, with_dependencies=not arguments.no_deps)
    print(f"brainstorm {VERSION} is installed in {sys.prefix}")


def installed_version() -> str | None:
    """Return the version of brainstorm in this environment, None if there is none."""
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return None


# ----------------------------------------------------------------------- the sdist
def fetch_sdist(folder: Path) -> Path:
    """Download the source package into `folder` through pip, and return the file.

    pip's own settings decide where from: index, find-links, proxy, certificates,
    credentials. pip is run in a process of its own.
    """
    script = Path(__file__).parent / "compat" / "pip_fetch.py"
    command = [sys.executable, str(script), NAME, VERSION, str(folder)]
    print(f"fetching brainstorm {VERSION} (about 250 kB) ...", flush=True)
    done = subprocess.run(
        command,
        env=_pip_environment(),
        capture_output=True,
        text=True,
        errors="replace",
    )
    said = f"\n{done.stderr.strip()}" if done.stderr.strip() else ""
    by_hand = (
        "or download brainstorm-0.5.tar.gz elsewhere and give it with --sdist FILE"
    )
    if done.returncode == 0:
        return Path(done.stdout.strip().splitlines()[-1])
    if done.returncode == _NOT_ON_INDEX:
        raise InstallError(
            f"the source package of brainstorm {VERSION} is not on the package index "
            f"that pip is set up for. Choose another (PIP_INDEX_URL, PIP_FIND_LINKS), "
            f"{by_hand}.{said}"
        )
    if done.returncode == _UNREACHABLE:
        raise InstallError(
            "the package index could not be reached. Check the network and pip's "
            f"settings (pip config list), {by_hand}.{said}"
        )
    if done.returncode == _UNKNOWN_PIP:
        raise InstallError(
            "this pip cannot be asked for a file as pip 21 to 26 can. Try another, "
            f"{by_hand}.{said}"
        )
    raise InstallError(f"pip failed (exit status {done.returncode}); {by_hand}.{said}")


def read_sdist(path: Path) -> bytes:
    """Return the content of the source package, if it is the known one."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InstallError(f"cannot read {path}: {error.strerror}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != SDIST_SHA256:
        raise InstallError(
            f"{path.name} is not brainstorm {VERSION} as it was released: its sha256 "
            f"is {found}, but must be {SDIST_SHA256}. Nothing was installed."
        )
    return content


# ----------------------------------------------------------------------- the wheel
def write_wheel(sdist: bytes, folder: Path) -> Path:
    """Write a wheel of the Python part of the source package into `folder`."""
    files = _python_part(sdist)
    record = "".join(
        f"{name},sha256={_record_hash(content)},{len(content)}\n"
        for name, content in files.items()
    )
    files[f"{_DIST_INFO}/RECORD"] = f"{record}{_DIST_INFO}/RECORD,,\n".encode()
    wheel = folder / WHEEL_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                entry = zipfile.ZipInfo(name, _TIME)
                entry.external_attr = 0o100644 << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, content)
    except OSError as error:
        raise InstallError(f"cannot write {wheel}: {error.strerror}") from None
    return wheel


def _python_part(sdist: bytes) -> dict[str, bytes]:
    """Return the wheel's files, less its RECORD, by their names in the wheel."""
    root = PurePosixPath(f"{NAME}-{VERSION}")
    modules: dict[str, bytes] = {}
    texts: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(sdist), mode="r:gz") as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if (
                    not member.isfile()
                    or root not in path.parents
                    or ".." in path.parts
                ):
                    continue
                inner = path.relative_to(root)
                content = archive.extractfile(member).read()  # type: ignore[union-attr]
                if inner.parts[0] == NAME and inner.suffix == ".py":
                    modules[str(inner)] = content
                elif str(inner) in ("LICENSE", "PKG-INFO"):
                    texts[str(inner)] = content
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InstallError(f"the source package is damaged: {error}") from None
    if f"{NAME}/__init__.py" not in modules or "PKG-INFO" not in texts:
        raise InstallError("the source package does not hold brainstorm")
    files = dict(sorted(modules.items()))
    if "LICENSE" in texts:
        files[f"{_DIST_INFO}/LICENSE"] = texts["LICENSE"]
    files[f"{_DIST_INFO}/METADATA"] = _metadata(texts["PKG-INFO"])
    files[f"{_DIST_INFO}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: brainstorm_dbuf\n"
        b"Root-Is-Purelib: true\nTag: py3-none-any\n"
    )
    return files


def _metadata(package_info: bytes) -> bytes:
    """Return the wheel's METADATA: the source package's, with the real requirements."""
    own = email.message_from_bytes(package_info)
    lines = ["Metadata-Version: 2.1", f"Name: {NAME}", f"Version: {VERSION}"]
    for field in ("Summary", "Home-page", "Author", "Author-email", "License"):
        if own[field]:
            lines.append(f"{field}: {' '.join(own[field].split())}")
    lines.append("License-File: LICENSE")
    lines += [f"Classifier: {value}" for value in own.get_all("Classifier", [])]
    lines += [f"Requires-Dist: {requirement}" for requirement in REQUIREMENTS]
    return ("\n".join(lines) + "\n").encode()


def _record_hash(content: bytes) -> str:
    digest = hashlib.sha256(content).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


# ----------------------------------------------------------------------------- pip
def install_wheel(wheel: Path, with_dependencies: bool = True) -> None:
    """Let pip install the wheel into this environment, and first what it needs.

    By name rather than by file name, so that `pip freeze` says brainstorm==0.5 and
    not the wheel's place, which is soon gone.
    """
    missing = [name for name in REQUIREMENTS if not _is_installed(name)]
    if with_dependencies and missing:
        _pip_install(missing)
    options = ["--no-index", "--no-deps", "--only-binary", NAME]
    _pip_install([*options, "--find-links", str(wheel.parent), f"{NAME}=={VERSION}"])


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _pip_install(arguments: list[str]) -> None:
    """Run `pip install` with `arguments`; its own messages are shown."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    environment = _pip_environment()
    sys.stdout.flush()
    status = subprocess.run([*command, *arguments], env=environment).returncode
    if status == 0:
        return
    site_packages = sysconfig.get_path("purelib")
    if not os.access(site_packages, os.W_OK):
        raise InstallError(
            f"{site_packages} is not writable. Use a virtual environment of your own "
            "(python -m venv), or install as the user who owns this one."
        )
    raise InstallError(
        f"pip install {arguments[-1]} failed (exit status {status}); pip's message is "
        "above. --no-deps leaves out what brainstorm needs; --wheel-dir DIR only "
        "writes the wheel, for another installer."
    )


def _pip_environment() -> dict[str, str]:
    """Return environment variables under which `python -m pip` works.

    An environment made by uv, or with --without-pip, has none: Python's own copy, which
    `ensurepip` would install, is then used without installing it.
    """
    environment = dict(os.environ)
    if importlib.util.find_spec("pip") is not None:
        return environment
    pip_wheel = _bundled_pip()
    if pip_wheel is None:
        raise InstallError(
            "there is no pip in this environment, and this Python brings none along. "
            "Install one first (python -m ensurepip, or: uv pip install pip), or write "
            "the wheel with --sdist FILE --wheel-dir DIR and install that."
        )
    paths = [str(pip_wheel), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def _bundled_pip() -> Path | None:
    """Return the pip wheel that comes with Python, None if it was taken out."""
    try:
        import ensurepip
    except ImportError:
        return None
    # Distributions that unbundle it put their own wheel into this folder.
    elsewhere = sysconfig.get_config_var("WHEEL_PKG_DIR")
    folders = [Path(ensurepip.__file__).parent / "_bundled"]
    folders += [Path(elsewhere)] if elsewhere else []
    for folder in folders:
        wheels = sorted(folder.glob("pip-*.whl"))
        if wheels:
            return wheels[-1]
    return None


if __name__ == "__main__":
    sys.exit(main())
