"""Three real SoftHSM tokens in the split profile: two sites' serving tokens and a rotation token, with two master versions.

Made once a test process. Every token has a process of its own, because a process has one PKCS#11 module.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hsm_fixtures import SO_PIN, USER_PIN, fresh_processes

from keyvault import ceremony, master_ceremony, softhsm
from keyvault.hsm import RingMaster
from keyvault.master_ceremony import Pins
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_start import TokenConfig

ROTATION_PIN = "6617-rotation"
PROFILE = "softhsm-split"
ONE, TWO = RingMaster("main", 1), RingMaster("main", 2)
MASTERS = (ONE, TWO)
_FRESH = fresh_processes()


@dataclass(frozen=True)
class SplitSites:
    """The tokens, and the message that carried `ONE` to the second site's serving token."""

    a: TokenProcess
    b: TokenProcess
    rotation: TokenProcess
    recorded: bytes
    attributes: tuple[tuple[str, ...], ...]


def pin_of(config: TokenConfig) -> str:
    return ROTATION_PIN if config.rotation else USER_PIN


def opened(config: TokenConfig, masters: Sequence[RingMaster] = MASTERS) -> Pkcs11Hsm:
    return Pkcs11Hsm.open(config, pin_of(config), expected_masters=masters)


def make_empty(folder: Path, label: str, rotation: bool) -> TokenConfig:
    """A token without masters; a serving one has every other key of a vault."""
    module, pin = softhsm.find_module(), ROTATION_PIN if rotation else USER_PIN
    serial = softhsm.make_token(module, folder, label, SO_PIN, pin)
    config = TokenConfig(module, label, serial, folder, profile=PROFILE, rotation=rotation)
    if not rotation:
        ceremony.serving_token(config, "", pin, ring=None)
    return config


_HELD: dict[str, Any] = {}
"""In a token's process: the ceremony that waits for its answer."""


def offer(config: TokenConfig, master: RingMaster) -> bytes:
    block = master_ceremony.receiving(config, Pins("", pin_of(config)), master)
    receiver = block.__enter__()
    _HELD.update(block=block, receiver=receiver)
    return receiver.transport


def take(wrapped: bytes) -> tuple[str, ...]:
    try:
        attributes: tuple[str, ...] = _HELD["receiver"].take(wrapped)
        return attributes
    finally:
        _HELD["block"].__exit__(None, None, None)


@dataclass(frozen=True)
class TokenProcess:
    """One token and the process that uses it."""

    pool: ProcessPoolExecutor
    config: TokenConfig

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.pool.submit(function, *arguments).result()


def carry(maker: TokenProcess, others: Sequence[TokenProcess], master: RingMaster) -> tuple[list[bytes], list[tuple[str, ...]]]:
    """One new master into every token: the messages by receiver, and what each token says of its object, the maker's first."""
    offers = [other.pool.submit(offer, other.config, master) for other in others]
    transport = b"".join(future.result() for future in offers)
    pins = Pins("", pin_of(maker.config))
    wrapped, mine = maker(master_ceremony.made_and_wrapped, maker.config, pins, master, transport)
    size = len(wrapped) // len(others)
    messages = [wrapped[at : at + size] for at in range(0, len(wrapped), size)]
    return messages, [mine, *(other(take, message) for other, message in zip(others, messages, strict=True))]


@pytest.fixture(scope="session")
def split_sites() -> Iterator[SplitSites]:
    folder = Path(tempfile.mkdtemp(prefix="glottis-split-"))
    names = [("serving-a", False), ("serving-b", False), ("rotation-a", True)]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        pools = [stack.enter_context(ProcessPoolExecutor(1, mp_context=_FRESH)) for _ in names]
        made = [pool.submit(make_empty, folder / names[at][0], *names[at]) for at, pool in enumerate(pools)]
        a, b, rotation = (TokenProcess(pool, future.result()) for pool, future in zip(pools, made, strict=True))
        messages, told = carry(a, (b, rotation), ONE)
        carry(a, (b, rotation), TWO)
        yield SplitSites(a, b, rotation, messages[0], tuple(told))
