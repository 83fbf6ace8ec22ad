"""Two sites whose masters are not TRUSTED: the officers' ceremony fills four tokens, and a process of its own moves keys."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ceremony_sites import CeremonySites, make_sites
from fakes import FakeHsm
from hsm_fixtures import SO_PIN, USER_PIN, in_own_process

from keyvault import softhsm
from keyvault.ceremony import TokenFacts
from keyvault.errors import HsmUnavailable, KeyNotFound, ModuleRefused, UnwrapRejected
from keyvault.hsm import RingMaster
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.sync.signatures import verify_p256
from service import rewrapping
from service.ceremonies import Desk, TokenPins, play
from service.errors import StepFailed
from service.isolation import Account
from service.rotation_link import RotationLink, mover_at, serve_moves
from service.settings import Settings
from service.site import ROTATION, Site, announce, forget, holds_masters_twice, rotation_holds, token_config

ROTATION_PIN = "6617-rotation"
ONE = RingMaster("main", 1)
ALONE = SimpleNamespace(owner=lambda _: Account.current(), officer=Account.current(), vault=Account.current())


def rotation_token(folder: Path) -> TokenFacts:
    serial = softhsm.make_token(softhsm.find_module(), folder, "glottis-rotation", SO_PIN, ROTATION_PIN)
    return TokenFacts("glottis-rotation", serial)


def desk(sites: CeremonySites, site: str, person: str) -> Desk:
    settings = sites.a if site == "a" else sites.b
    return Desk(settings, sites.roster, sites.keys[person], TokenPins(str, lambda: USER_PIN, lambda: ROTATION_PIN))


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> CeremonySites:
    """Sites of the split profile, with one master in every token."""
    found = make_sites(tmp_path_factory.mktemp("split"))
    found = replace(found, a=replace(found.a, pkcs11_profile="softhsm-split"), b=replace(found.b, pkcs11_profile="softhsm-split"))
    for settings in (found.a, found.b):
        site = Site.load(settings.site_file)
        facts = in_own_process(rotation_token, settings.token_dir(ROTATION))
        settings.site_file.write_text(replace(site, tokens={**site.tokens, ROTATION: facts}).to_json())
    story = play(desk(found, "a", "ada"), desk(found, "b", "bo"), "main")
    story.check(found.roster, verify_p256)
    assert story.complete
    assert "COPYABLE=0" in story.messages[2].message.attributes
    for settings in (found.a, found.b):
        announce(settings, ALONE, story.plan.master)  # type: ignore[arg-type]
    return found


def born_at(settings: Settings) -> tuple[bytes, bytes]:
    hsm = serving(settings)
    try:
        with hsm.new_dek(ONE) as dek:
            blob = dek.wrapped
        return blob, hsm.dek_mac(ONE, blob, b"nonce")
    finally:
        hsm.close()


def compared_at(settings: Settings, blob: bytes) -> bytes:
    hsm = serving(settings)
    try:
        return hsm.dek_mac(ONE, blob, b"nonce")
    finally:
        hsm.close()


def serving(settings: Settings) -> Pkcs11Hsm:
    config = token_config(settings, "serving", Site.load(settings.site_file).tokens["serving"])
    return Pkcs11Hsm.open(config, USER_PIN, expected_masters=(ONE,))


@pytest.mark.soak
def test_keys_of_one_site_are_moved_at_either_and_open_at_the_other(sites: CeremonySites) -> None:
    """The link carries wrapped keys alone; what is no key of the master, and what the token lacks, is named."""
    blob, mac = in_own_process(born_at, sites.a)
    for settings, other in ((sites.a, sites.b), (sites.b, sites.a)):
        with rewrapping._mover(settings, ALONE, lambda: ROTATION_PIN) as end, mover_at(dup(end)) as mover:  # type: ignore[arg-type]
            assert isinstance(mover, RotationLink)
            moved, refused = mover.rewrap_many([blob, bytes(40)], ONE, ONE)
            assert isinstance(refused, UnwrapRejected)
            with pytest.raises(KeyNotFound, match=r"the rotation token: .*ring/main/9"):
                mover.rewrap_many([blob], ONE, RingMaster("main", 9))
        assert isinstance(moved, bytes)
        assert in_own_process(compared_at, other, moved) == mac


def dup(descriptor: int | None) -> int:
    """A worker's own copy: it is another process."""
    assert descriptor is not None
    with socket.socket(fileno=descriptor) as link:
        copy = link.dup().detach()
        link.detach()
    return copy


@pytest.mark.soak
def test_a_wrong_rotation_pin_ends_it_before_any_worker_starts(sites: CeremonySites) -> None:
    with (
        pytest.raises(StepFailed, match="refused the PIN") as refused,
        rewrapping._mover(sites.b, ALONE, lambda: "no"),  # type: ignore[arg-type]
    ):
        pass
    assert refused.value.cause == "pin_rejected"


def test_the_link_carries_pages_and_says_what_failed() -> None:
    """The other end is what the process with the rotation PIN runs; here over a token in software."""
    token, (here, there) = FakeHsm([ONE]), socket.socketpair()
    with token.new_dek(ONE) as dek:
        blob = dek.wrapped
    other = threading.Thread(target=serve_moves, args=(token, here))
    other.start()
    with there:
        link = RotationLink(there)
        moved, refused = link.rewrap_many([blob, bytes(40)], ONE, ONE)
        assert isinstance(moved, bytes)
        assert token.dek_mac(ONE, moved, b"nonce") == token.dek_mac(ONE, blob, b"nonce")
        assert isinstance(refused, UnwrapRejected)
        with pytest.raises(KeyNotFound, match=r"the rotation token: .*ring/main/9"):
            link.rewrap_many([blob], ONE, RingMaster("main", 9))
        token.fault = HsmUnavailable("away")
        with pytest.raises(HsmUnavailable, match="the rotation token: away"):
            link.rewrap_many([blob], ONE, ONE)
        link.close()
    other.join(10)
    assert not other.is_alive()


def test_a_process_that_is_gone_is_named() -> None:
    here, there = socket.socketpair()
    here.close()
    with there, pytest.raises(HsmUnavailable, match="process with the rotation token is gone"):
        RotationLink(there).rewrap_many([bytes(40)], ONE, ONE)


@pytest.mark.soak
def test_what_the_rotation_token_holds_is_what_ceremonies_and_removals_said(sites: CeremonySites) -> None:
    assert rotation_holds(sites.a, ONE)
    forget(sites.a, ALONE, ONE)  # type: ignore[arg-type]
    assert not rotation_holds(sites.a, ONE)
    assert Site.load(sites.a.site_file).masters == (ONE,)
    announce(sites.a, ALONE, ONE)  # type: ignore[arg-type]


def test_a_site_has_a_rotation_token_where_its_profile_says_so(tmp_path: Path) -> None:
    settings = Settings.load({"GLOTTIS_STATE_DIR": str(tmp_path)})
    assert [holds_masters_twice(replace(settings, pkcs11_profile=name)) for name in (None, "softhsm", "softhsm-split")] == [
        False,
        False,
        True,
    ]
    assert replace(settings, pkcs11_profile="luna").of_site_b().pkcs11_profile == "luna"
    with pytest.raises(ModuleRefused):
        holds_masters_twice(replace(settings, pkcs11_profile="lunar"))
