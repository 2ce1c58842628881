"""The README's example runs and prints what the README says it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
EXAMPLE = re.compile(r"```python\n(.*?)```\n\n```\n(.*?)```", re.DOTALL)


@pytest.mark.timeout(120)
def test_the_example_prints_the_output_shown_below_it(tmp_path):
    code, shown = EXAMPLE.search(README.read_text(encoding="utf-8")).groups()
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    # How many were prepared ahead depends on the machine's speed, the numbers do not.
    count = re.compile(r"^\d+ of", re.MULTILINE)
    assert count.sub("N of", run.stdout) == count.sub("N of", shown)
    assert int(run.stdout.rsplit("\n", 2)[1].split()[0]) > 0
