"""Every error that can end a command has an exit code of its own choosing, and the table names no error that does not exist."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator

import pytest

import keyvault
import policies
import synth
import voiceprints
from keyvault.errors import HsmTimeout, KeyVaultError
from policies.errors import PolicyError
from service import demo_attacks, exits
from service.client import Refused
from service.errors import ServiceError, StepFailed
from service.exits import BY_CODE, Exit, exit_for
from synth.errors import SynthError
from voiceprints.errors import VoiceprintError

for package in (keyvault, policies, voiceprints, synth):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name.endswith("errors"):
            importlib.import_module(module.name)


def codes(base: type[Exception]) -> Iterator[str]:
    """The code of every class of ours below `base`; tests make some of their own."""
    kinds = [base]
    for kind in kinds:
        kinds += kind.__subclasses__()
    yield from (kind.code for kind in kinds if not kind.__module__.startswith("test"))


def test_every_declared_code_has_an_exit():
    assert demo_attacks.DemoFailed.code in BY_CODE
    declared = {code for base in (KeyVaultError, PolicyError, ServiceError) for code in codes(base)}
    assert declared - BY_CODE.keys() == set()


def test_every_code_of_the_table_is_declared():
    bases = (KeyVaultError, PolicyError, ServiceError, VoiceprintError, SynthError)
    assert BY_CODE.keys() - {code for base in bases for code in codes(base)} == set()


def test_no_code_has_two_exits():
    lists = [getattr(exits, f"_{name}") for name in ("HSM", "INTEGRITY", "REFUSED", "CONFLICT", "TEMPORARY", "LOCAL")]
    counted = Counter(code for codes_ in lists for code in codes_.split())
    assert [code for code, times in counted.items() if times > 1] == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (HsmTimeout(), Exit.HSM),
        (StepFailed("the token is busy", cause="hsm_busy"), Exit.HSM),
        (Refused(403, {"code": "consent_withdrawn"}), Exit.REFUSED),
        (Refused(403, {"code": "liveness_required"}), Exit.REFUSED),
        (Refused(429, {"code": "rate_limited"}), Exit.TEMPORARY),
        (ValueError("x"), Exit.LOCAL),
    ],
)
def test_what_ends_a_command_gives_its_code(error, code):
    assert exit_for(error) is code
