"""A rotation as the mint and the verifier see it: the `kid` follows the signer, and a retired one's tokens are refused."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fakes import FakeHsm
from house import BASE, House
from sqlalchemy import Engine

from keyvault.hsm import KeyName
from keyvault.records import RecordMac
from keyvault.signing.rotation import SignerRotation
from keyvault.signing.serving import SigningKeys
from keyvault.signing.versions import OVERLAP
from policies import jws
from policies.errors import TokenInvalid
from policies.grants import Purpose
from policies.tokens import Entitlement, TokenMint, TokenVerifier, jwks, key_id
from service.key_events import KeyEventRecorder

THUMBPRINT = "A" * 43


class Rotating(House):
    """A house whose workers look at every token, and the site process that rotates. The clock is stopped."""

    def __init__(self, database: Engine) -> None:
        super().__init__(database, FakeHsm())
        self.clock.stopped = float(int(time.time()))
        parts: dict[str, Any] = {
            "database": database,
            "hsm": self.hsm,
            "mac": RecordMac(self.hsm),
            "recorder": KeyEventRecorder(self.audit),
        }
        self.rotation = SignerRotation(**parts, clock=self.moment)

    def moment(self) -> datetime:
        return datetime.fromtimestamp(self.clock(), UTC)

    def keys(self) -> SigningKeys:
        return SigningKeys(self.hsm, self.database, KeyName.TOKEN_SIGNER, self.moment, look_s=0)

    def after(self, delta: timedelta) -> None:
        self.clock.offset += delta.total_seconds()


def test_a_token_under_a_retired_key_is_refused_and_one_in_the_overlap_holds(database: Engine) -> None:
    house = Rotating(database)
    keys = house.keys()
    minting, verifier = TokenMint(house.hsm, keys, BASE, BASE, house.clock), TokenVerifier(keys, BASE, BASE, house.clock)

    def mint() -> tuple[str, str]:
        token = minting.mint(Entitlement(minting.new_jti(), "acme", "app", Purpose.READ, THUMBPRINT, THUMBPRINT))
        return token, str(jws.split(token, limit=4096).header["kid"])

    token, first = mint()
    house.rotation.rotate(KeyName.TOKEN_SIGNER, OVERLAP)
    published = jwks(keys)["keys"]
    assert [key["kid"] for key in published][1] == first
    assert {(key["alg"], key["use"], key["kty"], "d" in key) for key in published} == {("ES256", "sig", "EC", False)}
    house.after(OVERLAP - timedelta(seconds=1))
    token, kid = mint()
    assert kid == first
    house.after(timedelta(seconds=1))
    assert verifier.verify(token).purpose is Purpose.READ, "signed a second before the switch, and good for its whole life"
    other, second = mint()
    assert second == published[0]["kid"] == key_id(house.hsm.public_key(KeyName.TOKEN_SIGNER, 2)) != first
    assert verifier.verify(other).purpose is Purpose.READ
    late = house.moment() + OVERLAP  # of the keys alone: the token itself is still fresh
    retired = SigningKeys(house.hsm, database, KeyName.TOKEN_SIGNER, lambda: late, look_s=0)
    with pytest.raises(TokenInvalid):
        TokenVerifier(retired, BASE, BASE, house.clock).verify(token)
    assert TokenVerifier(retired, BASE, BASE, house.clock).verify(other).purpose is Purpose.READ
    assert [key["kid"] for key in jwks(retired)["keys"]] == [second]
