"""One real SoftHSM token per test process: made by the ceremony in processes of their own, opened once.

`tests/conftest.py` loads this file as a plugin: ask for the fixture `serving_token` by name. SoftHSM is one thing per process,
so every test of a process shares this token; what starts the module itself runs in a process of its own (`in_own_process`).
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest

from keyvault import ceremony, softhsm
from keyvault.ceremony import TokenFacts
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_start import TokenConfig

SO_PIN, USER_PIN = "5207-officer", "8841-serving"


@dataclass(frozen=True)
class ServingToken:
    """The token, open, and everything a test needs to open it again elsewhere."""

    hsm: Pkcs11Hsm
    config: TokenConfig
    facts: TokenFacts
    pin: str = USER_PIN
    so_pin: str = SO_PIN

    @property
    def folder(self) -> Path:
        assert self.config.folder is not None
        return self.config.folder


def fresh_processes() -> BaseContext:
    """Starts processes that hold nothing of this one, and no PKCS#11 module: forks of a server that only imported code.

    The server keeps the environment and the working folder that this process had when the first of them was started.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hsm_fixtures", "keyvault.store", "keyvault.master_ceremony", "policies.gate"])
    return context


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module-level function in a fresh process and return what it returns, or raise what it raises."""
    with ProcessPoolExecutor(1, mp_context=fresh_processes()) as pool:
        return pool.submit(function, *arguments).result()


def make_serving_token(folder: Path) -> tuple[TokenConfig, TokenFacts]:
    """An empty token and the serving ceremony on it. For a process of its own."""
    module = softhsm.find_module()
    serial = softhsm.make_token(module, folder, "serving", SO_PIN, USER_PIN)
    config = TokenConfig(module, "serving", serial, folder)
    return config, ceremony.serving_token(config, SO_PIN, USER_PIN)


def copied(token: ServingToken, folder: Path) -> TokenConfig:
    """The same token's files elsewhere, for a test that changes or breaks them."""
    shutil.copytree(token.folder, folder)
    (folder / "softhsm2.conf").write_text(f"directories.tokendir = {folder / 'objects'}\nobjectstore.backend = file\n")
    return replace(token.config, folder=folder)


@pytest.fixture(scope="session")
def serving_token(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServingToken:
    """The process's one serving token, open."""
    stash = request.config.stash
    if _TOKEN not in stash:
        folder = tmp_path_factory.mktemp("token") / "serving"
        config, facts = in_own_process(make_serving_token, folder)
        hsm = Pkcs11Hsm.open(config, USER_PIN, expected_masters=facts.masters)
        request.config.add_cleanup(hsm.close)
        stash[_TOKEN] = ServingToken(hsm, config, facts)
    return stash[_TOKEN]


_TOKEN = pytest.StashKey[ServingToken]()
