"""Every benchmark runs to its end and says what it measured. No figure is looked at: this machine has other things to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["hsm", "tokens"])
def test_a_benchmark_says_what_it_measured(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", "--quick"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=1700
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(line["metric"].startswith(name) and line["value"] > 0 and line["against"] > 0 for line in lines)
    assert [line for line in lines if line["goal"] is not None]
