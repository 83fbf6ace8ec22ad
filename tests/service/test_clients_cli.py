"""`glottis clients add`: what it cannot do is refused before anything is made, in one plain message."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_here import glottis_here
from whole_service import PYTHON_PATH

ADD = ["clients", "add", "app"]


def refused(state_dir: Path, *arguments: str | bytes) -> str:
    done = glottis_here(*arguments, environ=PYTHON_PATH | {"GLOTTIS_STATE_DIR": str(state_dir)})
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr
    assert list(state_dir.iterdir()) == []
    return done.stderr


@pytest.mark.parametrize("tenant", ["a\nb", "\u202eevil", "a\u2028b", "\x1b[2J", "", "x" * 65])
def test_a_tenant_that_would_deceive_is_refused_and_not_repeated_as_it_is(tmp_path, tenant):
    said = refused(tmp_path, *ADD, "--role", "reader", "--tenant", tenant)
    assert "[tenant_refused]" in said
    assert not tenant or tenant not in said or tenant.isalnum()


def test_an_argument_that_is_no_text_is_one_message(tmp_path):
    said = refused(tmp_path, *ADD, "--role", "reader", "--tenant", b"caf\xe9")
    assert "argument 7 is not text" in said
    assert "'caf\\udce9'" in said


@pytest.mark.parametrize("option", [("--tenant", "default"), ("--role", "reader")])
def test_replace_takes_no_option_that_it_would_ignore(tmp_path, option):
    assert "leave out --tenant and --role" in refused(tmp_path, *ADD, "--replace", *option)


def test_a_new_client_needs_a_role(tmp_path):
    assert "Missing option '--role'" in refused(tmp_path, *ADD)
