"""What the command line says, to people and to machines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

import brainstorm_dbuf as dbuf
from brainstorm_dbuf import machine
from brainstorm_dbuf.__main__ import main
from conftest import SUBPROCESS_PATH

pytestmark = pytest.mark.timeout(60)


def run(*arguments, before="", **environment):
    """Run the command line in a process of its own, after other statements."""
    code = (
        f"{before}\nimport sys\nfrom brainstorm_dbuf.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SUBPROCESS_PATH, **environment},
    )


def test_info_names_the_device_and_the_handlers(cuda, capsys):
    assert main(["info"]) == 0
    said = capsys.readouterr().out
    device = dbuf.Device(0)
    for text in (device.name, device.pci_bus_id, dbuf.__version__, "CudaHandler"):
        assert text in said
    devices = [line for line in said.splitlines() if line.startswith("device ")]
    # Only these, which name the hardware, are not wrapped.
    assert all(len(line) <= 88 for line in said.splitlines() if line not in devices)


def test_info_in_json_has_the_same(cuda, capsys):
    assert main(["info", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["trains"] and said["trains_on_device"]
    assert said["versions"]["brainstorm_dbuf"] == dbuf.__version__
    assert said["devices"][0]["name"] == dbuf.Device(0).name
    assert said["devices"][0]["memory_bytes"] == dbuf.Device(0).total_memory
    assert "CudaHandler" not in said["missing"]


def test_without_a_driver_networks_train_on_the_processor():
    done = run("info", BRAINSTORM_DBUF_LIBCUDA="/nowhere/libcuda.so.1")
    assert done.returncode == 1, done.stderr
    # PyCUDA finds the driver in its own way.
    handlers = re.search(r"trains with +(.*)", done.stdout)[1].split(", ")
    assert "NumpyHandler" in handlers and "CudaHandler" not in handlers
    assert "missing            CUDA driver: " in done.stdout
    assert "/nowhere/libcuda.so.1" in done.stdout
    assert done.stderr == ""


def test_without_brainstorm_it_says_how_to_get_it():
    done = run("info", before="import sys; sys.modules['brainstorm'] = None")
    assert done.returncode == 3, done.stderr
    said = " ".join(done.stdout.split())
    assert "trains with nothing" in said
    assert "python -m brainstorm_dbuf.install_brainstorm" in said


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["info", "--no-such"]])
def test_a_wrong_command_line_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: brainstorm-dbuf" in capsys.readouterr().err


def test_help_says_what_the_exit_status_means(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["info", "--help"])
    assert ended.value.code == 0
    assert "Exit status: 0 if networks train on a CUDA device" in capsys.readouterr().out


def test_the_link_is_what_the_system_says(tmp_path):
    directory = tmp_path / "0000:3b:00.0"
    directory.mkdir()
    for name, text in (
        ("current_link_speed", "16.0 GT/s PCIe\n"),
        ("current_link_width", "8\n"),
        ("max_link_speed", "32.0 GT/s PCIe\n"),
        ("max_link_width", "16\n"),
    ):
        (directory / name).write_text(text)
    said = machine._link_of("00000000:3B:00.0", tmp_path)
    assert said == "16.0 GT/s x8 of 32.0 GT/s x16"
    assert machine._link_of("0000:3B:00.0", tmp_path) == said
    assert machine._link_of("0000:01:00.0", tmp_path) is None
