"""The code that README and docs show: found, run, and compared with what they show.

A block of Python is run as it stands; the plain text right below it is what it prints.
An error that ends it is printed as Python's last line about it, a warning as its class
and message. The blocks of a page go on from one another, as a reader types them in.

In docs a block may have classes:

* ``alone``: a program of its own, run after the others of the page, in the same folder;
* ``no-driver``: alone, on a machine without a CUDA driver;
* ``figures-vary`` (of what is printed): numbers are not compared, nor which devices an
  error says that there are;
* ``example-output`` (of what is printed): only what stands before the first two blanks
  of a line is compared.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_MARKDOWN = re.compile(r"^```(\w*)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_DIRECTIVE = re.compile(
    r"^(?P<indent> *)\.\. code-block:: (?P<language>\w+)\n"
    r"(?P<options>(?:(?P=indent)   :.*\n)*)"
    r"\n(?P<code>(?:(?P=indent)   .*\n|\n)+)",
    re.MULTILINE,
)
_OPTION = re.compile(r":(\w+): *(.*)")
_NUMBER = re.compile(r"\d[\d.,]*( us| ms| s)?\b")

NO_DRIVER = "/nowhere/libcuda.so.1"

_RUNNER = """
import contextlib, io, json, sys, traceback, warnings

def show(message, category, *_):
    print(f"{category.__name__}: {message}")

warnings.showwarning = show
# Python 3.12 and newer warn of every fork beside threads, which NumPy has.
warnings.filterwarnings("ignore", "This process .* is multi-threaded")
names = {"__name__": "__main__"}
printed = []
for code, place in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            exec(compile(code, place, "exec"), names)
        except Exception as error:
            print("".join(traceback.format_exception_only(error)))
    printed.append(said.getvalue())
print(json.dumps(printed))
"""


@dataclass(frozen=True)
class Block:
    """A block of code in a page.

    Attributes:
        line: that of its first line of code, from 1 on.
        shown: what the page says that it prints; None if it does not say.
        classes, shown_classes: of the block, and of what it prints.
    """

    page: Path
    line: int
    language: str
    code: str
    shown: str | None = None
    name: str | None = None
    classes: frozenset[str] = frozenset()
    shown_classes: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of code of a page, Markdown or reStructuredText."""
    text = page.read_text(encoding="utf-8")
    found = _in_markdown(text) if page.suffix == ".md" else _in_rst(text)
    blocks: list[Block] = []
    last_end = None
    for begin, end, language, code, options in found:
        classes = frozenset(options.get("class", "").split())
        if language in ("", "text"):
            is_output = last_end is not None and not text[last_end:begin].strip()
            if is_output and blocks[-1].language == "python":
                *rest, block = blocks
                shown = {"shown": code, "shown_classes": classes}
                blocks = [*rest, Block(**{**vars(block), **shown})]
        else:
            line = text.count("\n", 0, text.index(code.splitlines()[0], begin)) + 1
            name = options.get("name")
            blocks.append(Block(page, line, language, code, None, name, classes))
            last_end = end
    return blocks


def _in_markdown(text):
    for found in _MARKDOWN.finditer(text):
        yield found.start(), found.end(), found[1], found[2], {}


def _in_rst(text):
    for found in _DIRECTIVE.finditer(text):
        code = textwrap.dedent(found["code"]).rstrip("\n") + "\n"
        options = dict(_OPTION.findall(found["options"]))
        yield found.start(), found.end(), found["language"], code, options


def run_python(
    blocks: Sequence[Block], folder: Path, path: str, has_driver: bool = True
) -> list[str]:
    """Run blocks one after another in a Python of their own; return what they print."""
    environment = {**os.environ, "PYTHONPATH": path}
    if not has_driver:
        environment["BRAINSTORM_DBUF_LIBCUDA"] = NO_DRIVER
    run = subprocess.run(
        [sys.executable, "-c", _RUNNER],
        input=json.dumps([[block.code, str(block)] for block in blocks]),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    printed = json.loads(run.stdout)
    return [said.replace(NO_DRIVER, Path(NO_DRIVER).name) for said in printed]


def commands_of(block: Block) -> list[tuple[list[str], str]]:
    """Return the commands of a block of shell, and what each is shown to print."""
    commands: list[tuple[list[str], str]] = []
    for line in block.code.splitlines():
        if line.startswith("$ "):
            commands.append((shlex.split(line[2:], comments=True), ""))
        else:
            words, shown = commands.pop()
            commands.append((words, f"{shown}{line}\n"))
    return commands


def run_command(words: Sequence[str], folder: Path, path: str) -> str:
    """Run the package's command line, without a driver; return what it printed."""
    programs = {"brainstorm-dbuf": [sys.executable, "-m", "brainstorm_dbuf"]}
    run = subprocess.run(
        [*programs[words[0]], *words[1:]],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "BRAINSTORM_DBUF_LIBCUDA": NO_DRIVER},
    )
    # 1: trains on the processor only (`info`).
    assert run.returncode in (0, 1), run.stderr
    assert run.stderr == ""
    return run.stdout.replace(NO_DRIVER, Path(NO_DRIVER).name)


def comparable(text: str, classes: frozenset[str] = frozenset()) -> str:
    """Return of a printed text what must be as it is shown: not where lines break."""
    if "example-output" in classes:
        labels = (line.split("  ")[0] for line in text.splitlines())
        return "\n".join(sorted({label for label in labels if label}))
    if "figures-vary" in classes:
        text = _NUMBER.sub("#", text)
        text = re.sub(r"(sees # device)s?:.*", r"\1", text, flags=re.DOTALL)
    return " ".join(text.split())
