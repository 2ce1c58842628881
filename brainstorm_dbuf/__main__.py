"""The command line: ``brainstorm-dbuf`` and ``python -m brainstorm_dbuf``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Sequence

from . import bench_command, train_command
from .checkup import Check, checkup
from .commands import size_as_text
from .machine import Survey, survey

_INFO = """\
Say what this machine and this installation have for training, what is missing, and how
to get it. Nothing is changed.

Exit status: 0 if networks train on a CUDA device (CudaHandler), 1 if on the processor
only, 2 for a wrong command line, 3 if not at all.
"""

_CHECK = """\
See in some seconds whether double buffering is at work on this machine, and right: small
networks train to the same weights by brainstorm's own loop and by ours, iterator and step
run at the same time, and on a CUDA device also copy and step, and the link to it is as
quick as it should be.

Exit status: 0 if all of it holds (what could not be looked at is named), 1 if something
does not, 2 for a wrong command line, 3 if networks cannot be trained at all.
"""

# As shells have it: 128 and the number of the signal.
INTERRUPTED, PIPE_CLOSED = 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="brainstorm-dbuf", description="Double-buffered input for brainstorm."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run, summary, description, add_arguments in (
        (
            "info",
            _info,
            "what this machine has for training, and what is missing",
            _INFO,
            None,
        ),
        (
            "check",
            _check,
            "whether double buffering is at work here, and right",
            _CHECK,
            None,
        ),
        (
            "bench",
            bench_command.run,
            "what double buffering brings on this machine, measured",
            bench_command.DESCRIPTION,
            bench_command.add_arguments,
        ),
        (
            "train",
            train_command.run,
            "a network from a line of text on a data set in a file",
            train_command.DESCRIPTION,
            train_command.add_arguments,
        ),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        if add_arguments is not None:
            add_arguments(command)
        command.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print(f"\nbrainstorm-dbuf {options.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # who reads it, head for instance, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _info(options: argparse.Namespace) -> int:
    found = survey()
    print(json.dumps(found.as_dict(), indent=1) if options.json else as_text(found))
    return 0 if found.trains_on_device else 1 if found.trains else 3


def _check(options: argparse.Namespace) -> int:
    found = survey()
    if not found.trains:
        print(f"brainstorm-dbuf check: {found.missing['brainstorm']}", file=sys.stderr)
        return 3
    checks = []
    for check in checkup(found):
        checks.append(check)
        if not options.json:
            print(check_as_text(check), flush=True)
    passed = all(check.passed is not False for check in checks)
    if options.json:
        listed = list(map(dataclasses.asdict, checks))
        print(json.dumps({"passed": passed, "checks": listed}, indent=1))
    return 0 if passed else 1


def check_as_text(check: Check) -> str:
    said = {True: "ok", False: "FAILED", None: "-"}[check.passed]
    return textwrap.fill(
        f"{check.name:<29} {said:<7} {check.found}",
        width=88,
        subsequent_indent=" " * 38,
        break_on_hyphens=False,
    )


def as_text(found: Survey) -> str:
    lines = [f"{name:<18} {version}" for name, version in found.versions.items()]
    lines.append(f"{'CUDA driver':<18} {found.driver or 'none'}")
    for device in found.devices:
        major, minor = device.compute_capability
        lines.append(
            f"{f'device {device.ordinal}':<18} {device.name}, compute capability "
            f"{major}.{minor}, {size_as_text(device.memory_bytes)}, "
            f"PCI {device.pci_bus_id}"
            + (f", link {device.link}" if device.link else "")
        )
    locked = found.locked_limit_bytes
    lines += [
        f"{'processors':<18} {found.processors}",
        f"{'memory':<18} {size_as_text(found.memory_bytes)}, of which the process may "
        "lock " + ("all" if locked is None else size_as_text(locked)),
    ]
    handlers = ["NumpyHandler"] * found.trains
    handlers += ["CudaHandler"] * found.trains_on_device
    if found.trains and "PyCudaHandler" not in found.missing:
        handlers.append("PyCudaHandler")
    lines.append(f"{'trains with':<18} {', '.join(handlers) or 'nothing'}")
    for name, how in found.missing.items():
        lines += textwrap.wrap(
            f"{name}: {how}",
            width=88,
            initial_indent=f"{'missing':<18} ",
            subsequent_indent=" " * 19,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
