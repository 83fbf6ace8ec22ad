"""Logs say what happened and nothing that must stay secret."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from service.log_files import last_words
from service.logs import REMOVED, without_secrets

ROOT = Path(__file__).parents[2]
SECRET = "v9-hush-hush"


def said_by(body: str) -> list[dict]:
    code = f"from service.logs import configure_logging\nimport structlog, logging\nconfigure_logging('vault-0', 'info')\n{body}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_fields_named_like_secrets_are_removed_at_any_depth():
    event = {"event": "token_minted", "access_token": SECRET, "key_version": 3, "facts": {"so_pin": SECRET, "n": 1}, "raw": b"x"}
    assert without_secrets(None, "info", event) == {
        "event": "token_minted",
        "access_token": REMOVED,
        "key_version": 3,
        "facts": {"so_pin": REMOVED, "n": 1},
        "raw": REMOVED,
    }


def test_which_key_was_refused_or_took_over_is_there_to_read():
    heard = "from keyvault.events import KeyEvent\nfrom service.vault.hsm_events import HsmEvents\n"
    [line] = said_by(
        heard + "HsmEvents().hear(KeyEvent('hsm.use_refused', {'key': 'token-signer', 'use': 'sign', 'place': 'read'}))"
    )
    assert (line["event"], line["of"], line["use"], line["place"]) == ("hsm_use_refused", "token-signer", "sign", "read")


def test_no_line_of_ours_names_a_field_that_would_be_removed():
    lost = []
    for package in ("service", "keyvault", "policies", "synth", "voiceprints"):
        for path in (ROOT / package).rglob("*.py"):
            for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
                if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id == "_log":
                    named = {word.arg: "x" for word in call.keywords if word.arg}
                    lost += [(path.name, name) for name, said in without_secrets(None, "info", named).items() if said == REMOVED]
    assert lost == []


def test_a_logged_exception_shows_no_local_variable():
    lines = said_by(
        "def f():\n  voice = 'v9-' + 'hush-hush'\n  raise ValueError('plain')\n"
        "try:\n  f()\nexcept ValueError:\n  structlog.get_logger().exception('failed')\n  logging.getLogger('x').exception('again')"
    )
    assert [line["event"] for line in lines] == ["failed", "again"]
    assert SECRET not in json.dumps(lines)
    assert lines[0]["exception"][0]["exc_type"] == "ValueError"
    assert lines[0]["process"] == lines[1]["process"] == "vault-0"


def test_what_ends_a_process_is_its_last_line_with_code_and_fix():
    lines = said_by("from keyvault.errors import PinRejected\nraise PinRejected()")
    assert lines[-1]["code"] == "pin_rejected"
    assert "PIN file" in lines[-1]["fix"]
    assert last_words(json.dumps(lines[-1]).encode())["code"] == "pin_rejected"


def test_words_of_an_unknown_error_are_not_repeated():
    lines = said_by(f"raise RuntimeError('{SECRET}')")
    assert lines[-1]["event"] == "RuntimeError"
    assert lines[-1]["stack"]
    assert SECRET not in json.dumps(lines)


def test_access_logs_are_silent_and_levels_hold():
    lines = said_by(
        "logging.getLogger('uvicorn.access').warning('GET /x?t=1')\nstructlog.get_logger().debug('d')\nlogging.info('i')"
    )
    assert [line["event"] for line in lines] == ["i"]


def test_last_words_of_a_process_that_never_spoke():
    assert last_words(b"") == {}
    assert last_words(b'{"event": "a"}\nSegmentation fault\n') == {"event": "Segmentation fault"}
