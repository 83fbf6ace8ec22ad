"""Setting up: one message where something is missing, nothing to do the second time, no traceback ever."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What setup reads, in a folder of its own."""
    for name in ("deploy", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def set_up(tree: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, tree / "deploy" / "setup.py", *arguments]
    return subprocess.run(argv, env=os.environ | environ, capture_output=True, text=True, check=False, timeout=100)


def installed(tree: Path, kind: str) -> None:
    """A finished installation as setup left it, without its half a gigabyte."""
    (tree / ".venv" / "bin").mkdir(parents=True)
    (tree / ".venv" / "pyvenv.cfg").touch()
    for name in ("python", "pip"):
        (tree / ".venv" / "bin" / name).symlink_to(sys.executable)
    code = f"import sys; sys.path.insert(0, {str(tree / 'deploy')!r}); import setup\n"
    code += f"setup.STAMP.write_text('{kind} ' + setup._fingerprint('{kind}'))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_usage():
    done = set_up(ROOT)
    assert done.returncode == 1
    assert done.stderr == "usage: python3 deploy/setup.py run|dev\n"


def test_the_second_time_takes_less_than_a_second(tree):
    installed(tree, "dev")
    for kind in ("dev", "run"):
        began = time.process_time(), time.monotonic()
        done = set_up(tree, kind, GLOTTIS_PKCS11_MODULE="/dev/null")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert time.monotonic() - began[1] < 5  # seconds here, on a busy machine; the work itself is reading four files


def test_changed_requirements_are_installed_again_and_a_failing_pip_is_one_message(tree):
    installed(tree, "run")
    (tree / "requirements" / "run.txt").write_text("no-such-package-of-glottis==1 --hash=sha256:" + "0" * 64 + "\n")
    done = set_up(tree, "run", PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull, GLOTTIS_PKCS11_MODULE="/dev/null")
    assert done.returncode == 1
    assert "pip could not finish `install`" in done.stderr
    assert "To mend it" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_python_without_venv_is_one_message(tree):
    broken = tree / "python"
    broken.write_text("#!/bin/sh\necho 'No module named venv' >&2; exit 1\n")
    broken.chmod(0o755)
    code = f"import sys; sys.path.insert(0, {str(tree / 'deploy')!r}); sys.argv[1:] = ['run']; import setup\n"
    code += f"setup._best_python = lambda: {str(broken)!r}; sys.exit(setup.main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No module named venv" in done.stderr
    assert "apt install python3-venv" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tree / ".venv").exists()


def test_no_softhsm_and_no_way_to_fetch_it_is_one_message(tree, tmp_path):
    installed(tree, "run")
    code = f"import sys; sys.path.insert(0, {str(tree / 'deploy')!r}); sys.argv[1:] = ['run']; import setup\n"
    code += "setup.SOFTHSM = (); setup.os.geteuid = lambda: 1000; sys.exit(setup.main())"
    environ = {name: value for name, value in os.environ.items() if name != "GLOTTIS_PKCS11_MODULE"} | {"PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "SoftHSM is not installed" in done.stderr
    assert "apt install softhsm2" in done.stderr
    assert "GLOTTIS_PKCS11_MODULE" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_index_is_named_anywhere():
    for path in (ROOT / "deploy" / "setup.py", ROOT / ".ci" / "run", ROOT / "Makefile", *(ROOT / "requirements").iterdir()):
        text = path.read_text()
        assert "--index-url" not in text.replace("--no-emit-index-url", "")
        assert "://" not in text or path.suffix == ".txt", path
