"""Signing keys' versions: overlap, one rotation at a time, a crash at every step, rows and tokens put back. Real database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from fakes import FakeHsm
from sqlalchemy import Engine, text
from test_lifecycle import Noted

from keyvault.errors import (
    HsmUnavailable,
    KeyNotFound,
    OverlapTooShort,
    PromiseBroken,
    SignerInUse,
    SignerRotating,
    SigningKeyTampered,
)
from keyvault.events import KeyEvent
from keyvault.hsm import ROTATING, KeyName
from keyvault.records import RecordMac
from keyvault.signing.rotation import SignerRotation
from keyvault.signing.serving import SigningKeys
from keyvault.signing.versions import LEAST_OVERLAP, LOOK_S, OVERLAP, SignerState
from policies.grants import CLOCK_TOLERANCE_S
from policies.tokens import TOKEN_LIFETIME_S

NAME = KeyName.TOKEN_SIGNER
START = datetime(2026, 3, 1, 12, tzinfo=UTC)


@dataclass
class Signing:
    """One site's signers: what rotates them, and workers that serve with them, under one clock."""

    database: Engine
    hsm: FakeHsm = field(default_factory=FakeHsm)
    now: datetime = START
    recorder: Noted = field(default_factory=Noted)

    def __post_init__(self) -> None:
        self.rotation = self.again()

    def again(self) -> SignerRotation:
        """The site process, started anew."""
        parts: dict[str, Any] = {"database": self.database, "hsm": self.hsm, "recorder": self.recorder}
        return SignerRotation(**parts, mac=RecordMac(self.hsm), clock=lambda: self.now)

    def worker(self, look_s: float = 0.0) -> SigningKeys:
        return SigningKeys(self.hsm, self.database, NAME, lambda: self.now, look_s=look_s)

    def states(self) -> dict[int, SignerState]:
        return {seen.key.version: seen.state for seen in self.rotation.all(NAME)}

    def after(self, delta: timedelta) -> None:
        self.now += delta

    def rotated(self) -> None:
        """Version 2 signs; version 1 is still accepted."""
        self.rotation.rotate(NAME, OVERLAP)
        self.after(OVERLAP)

    def sql(self, statement: str, **values: Any) -> list[Any]:
        with self.database.begin() as connection:
            result = connection.execute(text(statement), values)
            return list(result.all()) if result.returns_rows else []


@pytest.fixture
def signing(database: Engine) -> Signing:
    return Signing(database)


def test_a_version_is_published_before_it_signs_and_accepted_after_it_signed(signing: Signing) -> None:
    worker = signing.worker()
    first = signing.hsm.public_key(NAME)
    assert (worker.signer().version, list(worker)) == (1, [first])
    made = signing.rotation.rotate(NAME, OVERLAP)
    assert (worker.signer().version, list(worker)) == (1, [made.public_key, first])
    assert signing.states() == {1: SignerState.SIGNING, 2: SignerState.NEXT}
    signing.after(OVERLAP - timedelta(seconds=1))
    assert worker.signer().version == 1
    signing.after(timedelta(seconds=1))
    assert (worker.signer().version, list(worker)) == (2, [made.public_key, first])
    assert signing.states() == {1: SignerState.OVERLAPPING, 2: SignerState.SIGNING}
    signing.after(OVERLAP)
    assert list(worker) == [made.public_key], "accepted no more, also before anybody destroyed it"
    assert signing.states() == {1: SignerState.RETIRED, 2: SignerState.SIGNING}
    assert [one.version for one in signing.rotation.turn()] == [1]
    assert signing.hsm.signer_versions(NAME) == (2,)
    assert signing.states() == {1: SignerState.DESTROYED, 2: SignerState.SIGNING}
    assert signing.rotation.turn() == []
    assert [event.action for event in signing.recorder.events] == ["signer.made", "signer.destroyed"]


def test_the_least_overlap_outlasts_every_token_and_every_look() -> None:
    from service.vault.http import JWKS_AGE_S

    assert LEAST_OVERLAP.total_seconds() > TOKEN_LIFETIME_S + CLOCK_TOLERANCE_S + 2 * LOOK_S
    assert OVERLAP.total_seconds() > 2 * JWKS_AGE_S


def test_an_overlap_that_is_too_short_and_keys_without_versions_are_refused(signing: Signing) -> None:
    with pytest.raises(OverlapTooShort):
        signing.rotation.rotate(NAME, LEAST_OVERLAP - timedelta(seconds=1))
    for name in set(KeyName) - set(ROTATING):
        with pytest.raises(KeyNotFound):
            signing.rotation.rotate(name, OVERLAP)
    assert signing.hsm.signer_versions(NAME) == (1,)


def test_of_two_rotations_at_once_one_wins(signing: Signing) -> None:
    def rotate(_: int) -> str:
        try:
            return str(signing.again().rotate(NAME, OVERLAP).version)
        except SignerRotating as error:
            return error.code

    with ThreadPoolExecutor(4) as threads:
        found = sorted(threads.map(rotate, range(4)))
    assert found == ["2", *["signer_rotating"] * 3]
    assert signing.hsm.signer_versions(NAME) == (1, 2)
    assert signing.worker().signer().version == 1


def test_a_crash_before_the_commit_leaves_a_key_that_never_signs(signing: Signing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at each step of a rotation: between make and row, and between row and COMMIT."""
    monkeypatch.setattr(signing.rotation._store, "add", _killed)
    signing.worker()
    with pytest.raises(KeyboardInterrupt):
        signing.rotation.rotate(NAME, OVERLAP)
    monkeypatch.undo()
    monkeypatch.setattr(signing.recorder, "record", _killed)
    again = signing.again()
    with pytest.raises(KeyboardInterrupt):
        again.rotate(NAME, OVERLAP)
    assert len(signing.hsm.signer_versions(NAME)) == 2, "what was left by the first was destroyed by the second"
    signing.after(OVERLAP * 3)
    worker = signing.worker()
    assert (worker.signer().version, len(list(worker))) == (1, 1)
    monkeypatch.undo()
    left = max(signing.hsm.signer_versions(NAME))
    made = signing.again().rotate(NAME, OVERLAP)
    assert made.version == left + 1, "a number that the token has seen is not used again"
    assert signing.hsm.signer_versions(NAME) == (1, made.version)


def test_a_crash_between_destroying_and_writing_it_down_is_finished_by_the_next_turn(
    signing: Signing, monkeypatch: pytest.MonkeyPatch
) -> None:
    signing.rotated()
    signing.after(OVERLAP)
    monkeypatch.setattr(signing.recorder, "record", _killed)
    with pytest.raises(KeyboardInterrupt):
        signing.rotation.turn()
    monkeypatch.undo()
    assert signing.hsm.signer_versions(NAME) == (2,)
    assert signing.states()[1] is SignerState.RETIRED
    assert [one.version for one in signing.again().turn()] == [1]
    assert signing.states()[1] is SignerState.DESTROYED


def test_a_token_that_cannot_destroy_leaves_it_due(signing: Signing) -> None:
    signing.rotated()
    signing.after(OVERLAP)
    real, signing.hsm.destroy_signer = signing.hsm.destroy_signer, _unavailable  # type: ignore[method-assign]
    with pytest.raises(HsmUnavailable):
        signing.rotation.turn()
    assert signing.states()[1] is SignerState.RETIRED
    signing.hsm.destroy_signer = real  # type: ignore[method-assign]
    assert [one.version for one in signing.rotation.turn()] == [1]


def test_an_overlap_ends_early_only_when_no_token_can_live(signing: Signing) -> None:
    with pytest.raises(SignerInUse):
        signing.rotation.retire(NAME, 1)
    signing.rotation.rotate(NAME, OVERLAP)
    for version in (1, 2):
        with pytest.raises(SignerInUse):
            signing.rotation.retire(NAME, version)
    signing.after(OVERLAP + LEAST_OVERLAP - timedelta(seconds=1))
    with pytest.raises(SignerInUse):
        signing.rotation.retire(NAME, 1)
    signing.after(timedelta(seconds=1))
    assert signing.rotation.retire(NAME, 1).destroyed_at == signing.now
    assert signing.rotation.retire(NAME, 1).destroyed_at == signing.now, "given again it changes nothing"
    with pytest.raises(SignerInUse):
        signing.rotation.retire(NAME, 2)
    with pytest.raises(KeyNotFound):
        signing.rotation.retire(NAME, 9)
    assert [event.action for event in signing.recorder.events] == ["signer.made", "signer.retired", "signer.destroyed"]


def test_a_changed_row_is_refused_and_a_row_put_back_brings_nothing_back(signing: Signing) -> None:
    signing.rotated()
    [before] = signing.sql("SELECT retires_at, row_version, mac FROM signing_key WHERE version = 1")
    signing.after(OVERLAP)
    signing.rotation.turn()
    old = "UPDATE signing_key SET retires_at = :r, destroyed_at = NULL, row_version = :v, mac = :m WHERE version = 1"
    signing.now -= OVERLAP  # the row that is put back was valid at this time
    signing.sql(old, r=before.retires_at, v=before.row_version, m=bytes(before.mac))
    worker = signing.worker()
    assert list(worker) == [signing.hsm.public_key(NAME, 2)], "the token holds version 1 no more"
    signing.sql("DELETE FROM signing_key")
    with pytest.raises(KeyNotFound):
        signing.worker()
    signing.sql(
        "INSERT INTO signing_key SELECT 'token-signer', 2, 'x', now(), now(), NULL, NULL, 1, decode(repeat('00', 16), 'hex')"
    )
    with pytest.raises(SigningKeyTampered):
        signing.worker().signer()


def test_a_worker_whose_rows_somebody_edits_does_nothing_until_they_are_whole_and_says_so_once(signing: Signing) -> None:
    signing.rotated()
    heard: list[KeyEvent] = []
    worker = SigningKeys(signing.hsm, signing.database, NAME, lambda: signing.now, look_s=0, heard=heard.append)
    assert worker.signer().version == 2
    whole = "UPDATE signing_key SET signs_at = signs_at {} interval '1 hour' WHERE version = 2"
    signing.sql(whole.format("-"))
    for _ in range(3):
        for use in (worker.signer, lambda: list(worker)):
            with pytest.raises(SigningKeyTampered):
                use()
    assert [(event.action, event.facts) for event in heard] == [("signer.tampered", {"name": "token-signer"})]
    started = SigningKeys(signing.hsm, signing.database, NAME, lambda: signing.now, heard=heard.append)
    with pytest.raises(SigningKeyTampered):
        started.signer()
    assert len(heard) == 2, "each worker says it once"
    signing.sql(whole.format("+"))
    assert worker.signer().version == started.signer().version == 2
    signing.sql("UPDATE signing_key SET public_key = 'x'")
    with pytest.raises(SigningKeyTampered):
        worker.signer()
    assert len(heard) == 3


def test_a_key_of_that_name_that_is_not_the_one_that_was_made_is_refused(signing: Signing) -> None:
    signing.rotation.rotate(NAME, OVERLAP)
    signing.hsm._signers[NAME, 2] = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(PromiseBroken):
        signing.worker()


def test_a_newer_database_beside_an_older_token_signs_with_nothing_else_until_it_is_rotated(signing: Signing) -> None:
    signing.rotated()
    signing.hsm.destroy_signer(NAME, 2)
    worker = signing.worker()
    with pytest.raises(KeyNotFound):
        worker.signer()
    assert signing.rotation.rotate(NAME, OVERLAP).version == 3
    assert worker.signer().version == 3, "there is nothing to overlap with"


def test_an_older_database_beside_a_newer_token_is_mended_by_a_rotation(signing: Signing) -> None:
    signing.rotated()
    signing.after(OVERLAP)
    signing.rotation.turn()
    signing.sql("DELETE FROM signing_key")
    assert signing.again().rotate(NAME, OVERLAP).version == 3
    assert signing.hsm.signer_versions(NAME) == (3,)
    assert signing.worker().signer().version == 3


def test_what_was_destroyed_and_came_back_with_an_older_token_is_destroyed_again(signing: Signing) -> None:
    signing.rotated()
    stored = signing.hsm._signers[NAME, 1]
    signing.after(OVERLAP)
    signing.rotation.turn()
    signing.hsm._signers[NAME, 1] = stored
    assert list(signing.worker()) == [signing.hsm.public_key(NAME, 2)]
    signing.again().turn()
    assert signing.hsm.signer_versions(NAME) == (2,)


def test_what_is_too_old_is_due_once_and_what_no_row_names_is_named(signing: Signing) -> None:
    year = timedelta(days=365)
    assert signing.rotation.due(year) == []
    signing.after(year)
    assert signing.rotation.due(year) == []
    signing.after(timedelta(seconds=1))
    assert signing.rotation.due(year) == list(ROTATING)
    assert signing.rotation.due(timedelta()) == []
    signing.rotation.rotate(NAME, OVERLAP)
    assert signing.rotation.due(year) == [KeyName.PROVENANCE_SIGNER]
    assert signing.rotation.unknown(NAME) == ()
    signing.hsm.make_signer(NAME, 7)
    assert signing.rotation.unknown(NAME) == (7,)


def test_a_worker_looks_again_only_after_a_while_and_goes_on_while_the_database_is_away(signing: Signing) -> None:
    slow, quick = signing.worker(look_s=60), signing.worker()
    signing.rotation.rotate(NAME, OVERLAP)
    assert (len(list(slow)), len(list(quick))) == (1, 2)
    signing.sql("ALTER TABLE signing_key RENAME TO away")
    assert len(list(quick)) == 2
    signing.sql("ALTER TABLE away RENAME TO signing_key")


def _killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def _unavailable(*_: object) -> None:
    raise HsmUnavailable
