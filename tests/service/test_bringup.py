"""The first start: whole or taken up again; every later one changes nothing; each part belongs to its own user."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from whole_service import PYTHON_PATH, ROOT, brought_up, free_port, glottis, state  # noqa: F401 — fixtures

from service import bringup, step
from service.errors import AlreadyRunning, HalfMade, StateFolderRefused, StepFailed
from service.holding import held
from service.isolation import establish
from service.settings import Settings
from service.site import Site


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.relative_to(folder).parts[0].startswith(("pg", "run", "postgres"))
    }


def test_a_second_start_changes_nothing(state):  # noqa: F811
    before = snapshot(state.state_dir)
    with held(state):
        bringup.prepare(state)
    assert snapshot(state.state_dir) == before


def test_secrets_are_their_owners_alone(state):  # noqa: F811
    isolation = establish(state.state_dir)
    owners = {
        state.pin_file("serving"): isolation.vault,
        state.pin_file("log"): isolation.log,
        state.url_file("vault"): isolation.vault,
        state.url_file("log"): isolation.log,
        state.url_file("owner"): isolation.officer,
        state.superuser_file: isolation.officer,
        state.tls_dir / "server.key": isolation.edge,
        state.officer_dir / "serving.so-pin": isolation.officer,
        state.pin_file("officer"): isolation.officer,
    }
    for path, owner in owners.items():
        assert path.stat().st_uid == owner.uid, path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    for name in bringup.TOKENS:
        assert stat.S_IMODE(state.token_dir(name).stat().st_mode) == 0o700


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives each part its own user")
def test_the_edges_user_reads_no_secret_of_others(state):  # noqa: F811
    edge = establish(state.state_dir).edge
    assert edge.name == "glottis-edge"
    names = [path for path in state.state_dir.rglob("*") if path.is_file()]
    script = 'while IFS= read -r name; do test -r "$name" && echo "$name"; done; true'
    done = subprocess.run(
        ["sh", "-c", script],
        input="".join(f"{name}\n" for name in names),
        user=edge.uid,
        group=edge.gid,
        extra_groups=[],
        check=True,
        capture_output=True,
        text=True,
    )
    readable = [str(Path(name).relative_to(state.state_dir)) for name in done.stdout.splitlines()]
    assert sorted(readable) == ["roster", "site.json", "tls/ca.pem", "tls/server.key", "tls/server.pem"]
    assert pwd.getpwuid(edge.uid).pw_shell == "/usr/sbin/nologin"


def test_site_json_holds_public_facts_and_is_read_back(state):  # noqa: F811
    site = Site.load(state.site_file)
    assert [master.label for master in site.masters] == ["ring/main/1"]
    assert site.audit_key.fingerprint in state.site_file.read_text()
    for name in bringup.TOKENS:
        assert state.pin_file(name).read_text().strip() not in state.site_file.read_text()


@pytest.mark.parametrize("missing", ["objects", "softhsm2.conf", "token.json"])
def test_a_token_that_lost_a_part_is_named_and_left_alone(state, missing):  # noqa: F811
    part = state.token_dir("serving") / missing
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    with held(state), pytest.raises(HalfMade, match=f"lacks {missing}") as refused:
        bringup.prepare_files(state)
    assert str(state.state_dir) in refused.value.mend
    assert state.pin_file("serving").exists()


@pytest.mark.parametrize("place", ["objects", "objects/link"])
def test_a_link_in_a_token_is_named_and_its_target_keeps_owner_and_mode(state, tmp_path, place):  # noqa: F811
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    before = victim.stat()
    link = state.token_dir("serving") / place
    if link.is_dir():
        shutil.rmtree(link)
    link.symlink_to(victim)
    with held(state), pytest.raises(StateFolderRefused, match=f"{link} is a link"):
        bringup.prepare_files(state)
    assert (victim.stat().st_uid, victim.stat().st_mode) == (before.st_uid, before.st_mode)


def test_a_lost_superuser_file_is_named(state):  # noqa: F811
    state.superuser_file.unlink()
    with held(state), pytest.raises(HalfMade, match=r"superuser\.url is missing"):
        bringup.prepare_files(state)


def test_an_unreadable_site_file_is_named(state):  # noqa: F811
    state.site_file.write_text("{")
    with held(state), pytest.raises(HalfMade, match="cannot be read"):
        bringup.prepare_files(state)


def test_a_start_cut_off_anywhere_is_taken_up_again(state):  # noqa: F811
    """Each state that a cut leaves: steps end by a rename, so a cut leaves them done or undone, with an unfinished sibling."""
    serving = Site.load(state.site_file).tokens["serving"].serial
    shutil.rmtree(state.token_dir("log"))
    (state.token_dir("log.new")).mkdir()
    (state.token_dir("log.new") / "pin").write_text("half")
    (state.tls_dir / "server.pem").unlink()
    state.url_file("vault").unlink()
    state.site_file.unlink()
    with held(state):
        made = bringup.prepare(state)
    assert made.site.tokens["serving"].serial == serving
    assert not state.token_dir("log.new").exists()
    for name in ("serving", "log", "officer"):
        owner = {"serving": made.isolation.vault, "log": made.isolation.log}.get(name, made.isolation.officer)
        step.call(state, owner, "probe_token", name=name)


def test_a_wrong_pin_is_one_clear_failure(state):  # noqa: F811
    state.pin_file("serving").write_text("wrong\n")
    with pytest.raises(StepFailed, match="refused the PIN") as failed:
        step.call(state, establish(state.state_dir).vault, "probe_token", name="serving")
    assert failed.value.cause == "pin_rejected"
    assert "wrong" not in str(failed.value)


def test_one_process_at_a_time_holds_a_folder(state_dir):
    settings = Settings.load({"GLOTTIS_STATE_DIR": str(state_dir / "s")})
    with held(settings), pytest.raises(AlreadyRunning), held(settings):
        pass
    with held(settings):
        pass


def test_a_folder_with_other_things_in_it_is_left_as_it_is(state_dir):
    (state_dir / "letters").write_text("dear")
    state_dir.chmod(0o755)
    with (
        pytest.raises(StateFolderRefused, match="not of Glottis"),
        held(Settings.load({"GLOTTIS_STATE_DIR": str(state_dir)})),
    ):
        pass
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o755
    assert [path.name for path in state_dir.iterdir()] == ["letters"]


def test_a_missing_module_is_said_before_anything_is_made(state_dir):
    variables = {"GLOTTIS_STATE_DIR": str(state_dir / "s"), "GLOTTIS_PKCS11_MODULE": str(state_dir / "none.so")}
    done = glottis(Settings.load(variables | {"GLOTTIS_PORT": str(free_port())}), "up")
    assert done.returncode == 2
    assert "none.so" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not (state_dir / "s" / "tokens").exists()


def test_pins_never_stand_in_arguments_or_environment(state_dir, tmp_path):
    """A spy in place of the interpreter notes what a step is started with."""
    spy = tmp_path / "python"
    spy.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/seen; env >> {tmp_path}/seen; exec {sys.executable} "$@"\n')
    spy.chmod(0o755)
    code = (
        "import sys; sys.executable = sys.argv[2]\n"
        "from service import step; from service.settings import Settings; from service.isolation import Account\n"
        "s = Settings.load({'GLOTTIS_STATE_DIR': sys.argv[1]}); f = s.state_dir / 'log.new'; f.mkdir(parents=True)\n"
        "step.call(s, Account.current(), 'make_token', name='log', folder=str(f), so_pin='so-7731', user_pin='us-9902')\n"
    )
    argv = [sys.executable, "-c", code, state_dir / "s", spy]
    subprocess.run(argv, env=PYTHON_PATH, cwd=ROOT, check=True, capture_output=True)
    seen = (tmp_path / "seen").read_text()
    assert "GLOTTIS_STATE_DIR" in seen
    assert "so-7731" not in seen
    assert "us-9902" not in seen
