"""The installer, without a network: source packages made here, folders as an index."""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import brainstorm_dbuf
from brainstorm_dbuf import install_brainstorm as installer

PACKAGE_ROOT = str(Path(brainstorm_dbuf.__file__).parent.parent)
MODULE = "brainstorm_dbuf.install_brainstorm"

PACKAGE_INFO = """\
Metadata-Version: 1.1
Name: brainstorm
Version: 0.5
Summary: A stand-in for
        brainstorm.
Author: Somebody
License: MIT
Classifier: Development Status :: 4 - Beta
Classifier: Programming Language :: Python :: 3.3
"""
FILES = {
    "PKG-INFO": PACKAGE_INFO,
    "LICENSE": "a licence\n",
    "setup.py": "raise SystemExit('the source package was run')\n",
    "brainstorm/__init__.py": "__version__ = '0.5'\n",
    "brainstorm/__about__.py": "__version__ = '0.5'\n",
    "brainstorm/handlers/__init__.py": "",
    "brainstorm/handlers/_cpuop.c": "not Python",
    "brainstorm/handlers/_cpuop.pyx": "not Python either",
    "test/test_something.py": "",
}


def sdist_bytes(files=FILES, extra=()):
    """Return a source package; `extra` are names of members that must not be taken."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        members = [(f"brainstorm-0.5/{name}", text) for name, text in files.items()]
        members += [(name, "evil") for name in extra]
        for name, text in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return raw.getvalue()


@pytest.fixture
def sdist(tmp_path, monkeypatch):
    """A source package in a folder of its own, whose hash is the expected one."""
    path = tmp_path / "index" / "brainstorm-0.5.tar.gz"
    path.parent.mkdir()
    path.write_bytes(sdist_bytes())
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(installer, "SDIST_SHA256", expected)
    return path


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """pip shall find nothing but what a test gives it."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")


# ---------------------------------------------------------------------- the wheel
def test_the_wheel_holds_the_python_part_and_nothing_else(sdist, tmp_path):
    wheel = installer.write_wheel(installer.read_sdist(sdist), tmp_path / "out")
    assert wheel.name == "brainstorm-0.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert sorted(archive.namelist()) == [
            "brainstorm-0.5.dist-info/LICENSE",
            "brainstorm-0.5.dist-info/METADATA",
            "brainstorm-0.5.dist-info/RECORD",
            "brainstorm-0.5.dist-info/WHEEL",
            "brainstorm/__about__.py",
            "brainstorm/__init__.py",
            "brainstorm/handlers/__init__.py",
        ]
        assert archive.read("brainstorm-0.5.dist-info/LICENSE") == b"a licence\n"


def test_the_wheels_record_has_the_hash_and_size_of_each_file(sdist, tmp_path):
    wheel = installer.write_wheel(installer.read_sdist(sdist), tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        record = archive.read("brainstorm-0.5.dist-info/RECORD").decode()
        rows = {row[0]: row[1:] for row in csv.reader(record.splitlines())}
        assert set(rows) == set(archive.namelist())
        assert rows.pop("brainstorm-0.5.dist-info/RECORD") == ["", ""]
        for name, (digest, size) in rows.items():
            content = archive.read(name)
            raw = hashlib.sha256(content).digest()
            text = base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
            assert digest == f"sha256={text}" and int(size) == len(content)


def test_the_wheels_metadata_names_what_brainstorm_needs(sdist, tmp_path):
    wheel = installer.write_wheel(installer.read_sdist(sdist), tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(
            archive.read("brainstorm-0.5.dist-info/METADATA")
        )
    assert metadata["Name"] == "brainstorm" and metadata["Version"] == "0.5"
    assert metadata["Summary"] == "A stand-in for brainstorm."
    assert metadata.get_all("Requires-Dist") == ["numpy", "h5py", "six"]
    assert len(metadata.get_all("Classifier")) == 2 and metadata["License"] == "MIT"


def test_the_same_source_gives_the_same_wheel(sdist, tmp_path):
    content = installer.read_sdist(sdist)
    first = installer.write_wheel(content, tmp_path / "1").read_bytes()
    assert installer.write_wheel(content, tmp_path / "2").read_bytes() == first


def test_members_outside_of_the_package_are_not_taken(tmp_path):
    names = [
        "brainstorm-0.5/brainstorm/../../evil.py",
        "/brainstorm/evil.py",
        "evil.py",
    ]
    wheel = installer.write_wheel(sdist_bytes(extra=names), tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "evil" in name]


@pytest.mark.parametrize(
    "content, text",
    [
        (b"not an archive", "damaged"),
        (sdist_bytes()[:200], "damaged"),
        (sdist_bytes({"PKG-INFO": PACKAGE_INFO}), "does not hold brainstorm"),
        (sdist_bytes({"brainstorm/__init__.py": ""}), "does not hold brainstorm"),
    ],
    ids=["text", "cut off", "no module", "no PKG-INFO"],
)
def test_an_archive_that_is_not_brainstorm_is_refused(content, text, tmp_path):
    with pytest.raises(installer.InstallError, match=text):
        installer.write_wheel(content, tmp_path)


# -------------------------------------------------------------------- the command
def test_the_command_writes_a_wheel_from_a_given_file(sdist, tmp_path, capsys):
    out = tmp_path / "a new" / "folder"
    status = installer.main(["--sdist", str(sdist), "--wheel-dir", str(out)])
    assert status == 0 and (out / installer.WHEEL_NAME).is_file()
    assert "wrote" in capsys.readouterr().out


def test_a_file_with_another_hash_is_refused(sdist, tmp_path, capsys):
    sdist.write_bytes(sdist.read_bytes() + b"x")
    status = installer.main(["--sdist", str(sdist), "--wheel-dir", str(tmp_path / "o")])
    text = capsys.readouterr().err
    assert status == 1 and "sha256" in text and "brainstorm-0.5.tar.gz" in text
    assert not (tmp_path / "o").exists()


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    assert installer.main(["--sdist", str(tmp_path / "no"), "--wheel-dir", "x"]) == 1
    assert "cannot read" in capsys.readouterr().err


def test_the_released_hash_is_the_pinned_one():
    assert installer.SDIST_SHA256 == (
        "e8fde7eb1edda32b528db80f36c90abe59647e0ce1e43ebc74ce0f7d285728fd"
    )


def test_an_installed_brainstorm_is_left_as_it_is(monkeypatch, capsys):
    monkeypatch.setattr(installer, "installed_version", lambda: "0.5")
    assert installer.main([]) == 0
    assert "already installed" in capsys.readouterr().out


def test_the_installed_brainstorm_has_a_version():
    try:
        version = importlib.metadata.version("brainstorm")
    except importlib.metadata.PackageNotFoundError:
        version = None
    assert installer.installed_version() == version


# ---------------------------------------------------------------- pip as the source
needs_pip = pytest.mark.skipif(
    not importlib.util.find_spec("pip") and installer._bundled_pip() is None,
    reason="this Python has no pip",
)


@needs_pip
def test_the_source_package_comes_from_where_pip_looks(sdist, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(sdist.parent))
    assert installer.main(["--wheel-dir", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / installer.WHEEL_NAME).is_file()


@needs_pip
def test_pips_configuration_file_is_obeyed(sdist, tmp_path, monkeypatch):
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nfind-links = {sdist.parent}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert installer.main(["--wheel-dir", str(tmp_path / "out")]) == 0


@needs_pip
def test_a_package_that_is_not_on_the_index_is_said_to_be_so(tmp_path, capsys):
    assert installer.main(["--wheel-dir", str(tmp_path)]) == 1
    text = capsys.readouterr().err
    assert "is not on the package index" in text and "--sdist FILE" in text


@needs_pip
def test_an_index_that_does_not_answer_is_said_to_be_so(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert installer.main(["--wheel-dir", str(tmp_path)]) == 1
    text = capsys.readouterr().err
    assert "could not be reached" in text and "127.0.0.1:9" in text


def test_a_python_without_any_pip_is_told_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(installer.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(installer, "_bundled_pip", lambda: None)
    assert installer.main(["--wheel-dir", str(tmp_path)]) == 1
    text = capsys.readouterr().err
    assert "no pip in this environment" in text and "ensurepip" in text


def test_site_packages_that_cannot_be_written_are_named(sdist, monkeypatch, capsys):
    class Failed:
        returncode = 1

    monkeypatch.setattr(installer, "installed_version", lambda: None)
    monkeypatch.setattr(installer.subprocess, "run", lambda *args, **kwargs: Failed)
    monkeypatch.setattr(installer.os, "access", lambda path, mode: False)
    assert installer.main(["--sdist", str(sdist), "--no-deps"]) == 1
    assert "is not writable" in capsys.readouterr().err


# ---------------------------------------------------------- a real environment
def new_environment(folder, *options):
    command = [sys.executable, "-m", "venv", "--without-pip", *options, str(folder)]
    subprocess.run(command, check=True)
    return folder / "bin" / "python"


def run_installer(python, sdist, *arguments):
    """Run the command in another environment, with the hash of the test's package."""
    script = (
        f"import sys, {MODULE} as i\n"
        f"i.SDIST_SHA256 = {installer.SDIST_SHA256!r}\n"
        f"sys.exit(i.main({['--sdist', str(sdist), *arguments]!r}))"
    )
    return run_alone(python, stub_package() + script)


def run_alone(python, script):
    """Run a script in another environment; nothing of this one is seen there."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [str(python), "-c", script], env=environment, capture_output=True, text=True
    )


def stub_package():
    """Return code that makes the package without running its __init__: the command
    must not need NumPy, which a new environment lacks."""
    return (
        "import sys, types\n"
        f"package = types.ModuleType('brainstorm_dbuf')\n"
        f"package.__path__ = [{str(Path(PACKAGE_ROOT, 'brainstorm_dbuf'))!r}]\n"
        "sys.modules['brainstorm_dbuf'] = package\n"
    )


@pytest.mark.slow
@pytest.mark.skipif(installer._bundled_pip() is None, reason="Python brings no pip")
def test_a_new_environment_without_pip_gets_brainstorm(sdist, tmp_path):
    python = new_environment(tmp_path / "environment")
    done = run_installer(python, sdist, "--no-deps")
    assert done.returncode == 0, done.stderr
    assert "brainstorm 0.5 is installed in" in done.stdout
    asked = run_alone(
        python,
        "import json, brainstorm, importlib.metadata as m\n"
        "d = m.distribution('brainstorm')\n"
        "print(json.dumps([brainstorm.__version__, d.version, d.read_text('INSTALLER')"
        ".strip(), d.read_text('direct_url.json'), sorted(map(str, d.requires))]))",
    )
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout) == [
        "0.5",
        "0.5",
        "pip",
        None,
        ["h5py", "numpy", "six"],
    ]
    again = run_installer(python, sdist, "--no-deps")
    assert again.returncode == 0 and "already installed" in again.stdout
