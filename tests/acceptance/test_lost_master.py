"""A token that lost the master under which voices lie: named, with how many; nothing starts and nothing new is made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hsm_fixtures import in_own_process
from installation import VARIABLES, Installation

from keyvault import master_ceremony
from keyvault.hsm import RingMaster
from keyvault.pkcs11_start import TokenConfig
from service import bringup
from service.errors import HalfMade
from service.holding import held
from service.site import Site, token_config

MASTER = RingMaster("main", 1)


def up(installation: Installation) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-m", "service.cli.main", "up"]
    environ = VARIABLES | installation.settings.environ()
    return subprocess.run(argv, env=environ, capture_output=True, text=True, check=False, timeout=100)


def versions(config: TokenConfig, pin: str) -> tuple[int, ...]:
    return in_own_process(master_ceremony.versions, config, pin, "main")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_token_without_the_master_that_voices_need_is_refused_by_name(new_installation: Callable[..., Installation]) -> None:
    installation = new_installation(GLOTTIS_VAULT_WORKERS="1")
    installation.start()
    installation.voice()
    installation.stop()
    settings = installation.settings
    config = token_config(settings, "serving", Site.load(settings.site_file).tokens["serving"])
    pin = settings.serving_pin.read()
    assert versions(config, pin) == (1,)
    in_own_process(master_ceremony.removed, config, pin, MASTER)

    refused = up(installation)
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert "ring/main/1 (under which 1 stored keys lie)" in refused.stderr
    assert "no new key is made in its place" in refused.stderr
    assert versions(config, pin) == ()

    shutil.rmtree(settings.token_dir("serving"))
    with held(settings), pytest.raises(HalfMade, match=r"ring/main/1: no new key is made"):
        bringup.prepare_files(settings)
    assert not Path(settings.token_dir("serving")).exists()
