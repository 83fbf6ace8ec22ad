"""The gate: what is recorded happens, what is not recorded does not."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from house import TEXT, House
from sqlalchemy import text as sql

from policies import errors
from policies.authority import Role
from policies.errors import PolicyError
from policies.grants import Purpose


def last_intent(house: House) -> dict:
    with house.database.connect() as connection:
        row = connection.execute(sql("SELECT intent_id, body FROM intent ORDER BY counter DESC LIMIT 1")).one()
    details = {name: item["value"] for name, item in house.audit.disclose(row.intent_id).items()}
    return json.loads(bytes(row.body)) | {"details": details}


def test_an_honest_request_is_admitted_and_recorded(house):
    device, voice = house.client(), house.voice()
    token = house.token(device, Purpose.SPEAK, voice)
    grant = house.gate.admit(house.call(device, token, Purpose.SPEAK, voice))
    grant.require(Purpose.SPEAK, voice=voice)
    grant.recheck(house.clock(), key=grant.token.key)
    assert grant.decided_by == ("role.speaker",)
    recorded = last_intent(house)
    assert recorded["outcome"] == "allowed"
    details = recorded["details"]
    assert details["jti"] == grant.token.jti
    assert details["jkt"] == device.jkt
    assert details["x5t"] == device.x5t
    assert details["key_version"] == 1
    assert details["policies"] == "role.speaker"
    assert details["text_sha256"] == grant.token.text_sha256
    assert house.refusals.codes == {}


@pytest.mark.parametrize("purpose", [Purpose.CONSENT, Purpose.READ])
def test_purposes_without_a_voice(house, purpose):
    device = house.client()
    house.gate.admit(house.call(device, house.token(device, purpose), purpose))


def test_enrolment_is_bound_to_a_consent(house):
    device, consent, other = house.client(), house.consent(), house.consent()
    token = house.token(device, Purpose.ENROL, consent=consent.consent_id)
    with pytest.raises(errors.VoiceMismatch):
        house.gate.admit(house.call(device, token, Purpose.ENROL, consent=other.consent_id))
    assert house.gate.admit(house.call(device, token, Purpose.ENROL)).token.consent == consent.consent_id


def test_a_token_works_once(house):
    device, voice = house.client(), house.voice()
    token = house.token(device, Purpose.SPEAK, voice)
    call = house.call(device, token, Purpose.SPEAK, voice)
    house.gate.admit(call)
    intents = house.count("intent")
    with pytest.raises(errors.TokenReplayed):
        house.gate.admit(call)
    assert house.count("intent") == intents, "the same request again costs the caller nothing, so it is only counted"
    assert house.refusals.codes == {"token_replayed": 1}
    with pytest.raises(errors.TokenReplayed):
        house.gate.admit(house.call(device, token, Purpose.SPEAK, voice))
    assert last_intent(house)["details"]["code"] == "token_replayed"


def test_a_denial_leaves_the_token_and_is_recorded_once(house):
    device, voice = house.client(), house.voice()
    token = house.token(device, Purpose.SPEAK, voice)
    wrong = house.call(device, token, Purpose.SPEAK, voice, text="Another text.")
    before = house.count("intent")
    for _ in range(3):
        with pytest.raises(errors.TextMismatch):
            house.gate.admit(wrong)
    assert house.count("intent") == before + 1
    assert house.refusals.codes == {"text_mismatch": 2}
    assert house.count("used_token") == 0
    house.gate.admit(house.call(device, token, Purpose.SPEAK, voice))


def test_strangers_are_counted_and_not_logged(house):
    device, voice, stranger = house.client(), house.voice(), house.client("other")
    before = house.count("intent") + 1
    call = house.speech(device, voice)
    for changes in ({"certificate_der": stranger.certificate}, {"scheme": "Bearer"}, {"certificate_der": None}, {"proof": "x"}):
        with pytest.raises(PolicyError):
            house.gate.admit(house.call(device, call.token, Purpose.SPEAK, voice, **changes))
    assert house.count("intent") == before
    assert house.refusals.codes == {
        "binding_mismatch": 1,
        "scheme_invalid": 1,
        "certificate_required": 1,
        "proof_invalid": 1,
    }


def revoke(house: House, voice) -> None:
    with house.database.begin() as transaction:
        house.registry.revoke_client(transaction, "app")


def suspend(house: House, voice) -> None:
    with house.database.begin() as transaction:
        house.registry.suspend_voice(transaction, "acme", voice)


def withdraw(house: House, voice) -> None:
    with house.database.begin() as transaction:
        found = house.store.voice(transaction, "acme", voice)
        house.registry.withdraw_consent(transaction, found.consent_id)


def rotate_key(house: House, voice) -> None:
    with house.database.begin() as transaction:
        found = house.store.voice(transaction, "acme", voice)
        house.store.swap(transaction, found, replace(found, key_version=2))


def rotate_client(house: House, voice) -> None:
    client = house.of_client("app")
    with house.database.begin() as transaction:
        house.registry.rotate_client(transaction, "app", cert_sha256=client.cert_sha256, jkt="A" * 43)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (revoke, "client_inactive"),
        (suspend, "voice_suspended"),
        (withdraw, "consent_withdrawn"),
        (rotate_key, "voice_key_changed"),
        (rotate_client, "binding_mismatch"),
    ],
)
def test_what_changed_since_the_token_was_minted_counts(house, change, code):
    device, voice = house.client(), house.voice()
    call = house.speech(device, voice)
    change(house, voice)
    with pytest.raises(PolicyError) as refused:
        house.gate.admit(call)
    assert refused.value.code == code
    assert last_intent(house)["details"]["code"] == code
    assert house.count("used_token") == 0


def test_consent_expires_between_mint_and_use(house):
    device = house.client()
    voice = house.voice(expires_at=datetime.now(UTC) + timedelta(seconds=1))
    call = house.speech(device, voice)
    house.clock.offset = 2
    with pytest.raises(errors.ConsentExpired):
        house.gate.admit(call)


TAMPERINGS = [
    ("client", "UPDATE client SET roles = roles || ARRAY['reader']"),
    ("client", "UPDATE client SET tenant = 'other'"),
    ("client", "UPDATE client SET state = 'active', row_version = row_version + 1"),
    ("client", "UPDATE client SET state = 'nonsense'"),
    ("consent", "UPDATE consent SET expires_at = expires_at + interval '10 years'"),
    ("consent", "UPDATE consent SET purposes = '{speak,compare,identify}'"),
    ("consent", "UPDATE consent SET territory = territory || ARRAY['XX']"),
    ("consent", "UPDATE consent SET mac = decode(repeat('00', 16), 'hex')"),
    ("consent", "UPDATE consent SET mac = ''"),
    ("voice", "UPDATE voice SET name = 'Two'"),
    ("voice", "UPDATE voice SET key_version = 7"),
    ("voice", "UPDATE voice SET dek_id = gen_random_uuid()"),
    ("voice", "UPDATE voice SET mac = (SELECT mac FROM consent LIMIT 1)"),
]


@pytest.mark.parametrize(("table", "statement"), TAMPERINGS)
def test_a_row_edited_in_the_database_opens_nothing(house, table, statement):
    device, voice = house.client(), house.voice()
    call = house.speech(device, voice)
    house.edit(statement)
    with pytest.raises(errors.AuthorityRowTampered) as refused:
        house.gate.admit(call)
    assert refused.value.detail == table
    assert last_intent(house)["details"]["code"] == "authority_row_tampered"
    with pytest.raises(errors.AuthorityRowTampered):
        house.token(device, Purpose.SPEAK, voice)


def test_two_voices_rows_swapped(house):
    device, one, _ = house.client(), house.voice(), house.voice()
    call = house.speech(device, one)
    swap = "UPDATE voice SET {0} = (SELECT {0} FROM voice other WHERE other.voice_id <> voice.voice_id)"
    for column in ("dek_id", "consent_id", "created_at", "mac"):
        house.edit(swap.format(column))
    with pytest.raises(errors.AuthorityRowTampered):
        house.gate.admit(call)


def test_a_voice_pointed_at_another_consent(house):
    device, voice, generous = house.client(), house.voice(), house.consent()
    call = house.speech(device, voice)
    house.edit("UPDATE voice SET consent_id = :consent", consent=generous.consent_id)
    with pytest.raises(errors.AuthorityRowTampered):
        house.gate.admit(call)


def test_another_tenants_voice_looks_like_none(house):
    device, foreign = house.client(), house.voice("other")
    with pytest.raises(PolicyError) as refused:
        house.token(device, Purpose.SPEAK, foreign)
    with pytest.raises(PolicyError) as missing:
        house.token(device, Purpose.SPEAK, uuid4())
    assert str(refused.value) == str(missing.value)
    assert (refused.value.code, refused.value.fix) == (missing.value.code, missing.value.fix)
    assert last_intent(house)["details"]["code"] == "voice_unknown"


def test_a_token_out_of_time(house):
    device, voice = house.client(), house.voice()
    call = house.speech(device, voice)
    house.clock.offset = 5
    with pytest.raises(errors.TokenExpired):
        house.gate.admit(call)


def test_longer_text_than_granted(house):
    device, voice = house.client(), house.voice()
    details = [{"type": "glottis_voice", "actions": ["speak"], "voice": str(voice), "text_sha256": "0" * 64, "max_chars": 5}]
    request = replace(house.request(device, "speak"), authorization_details=json.dumps(details))
    token = house.minting.issue(request).access_token
    with pytest.raises(errors.TextMismatch):
        house.gate.admit(house.call(device, token, Purpose.SPEAK, voice, text=TEXT))


def test_text_that_utf8_cannot_hold_is_refused(house):
    device, voice = house.client(), house.voice()
    with pytest.raises(errors.TextMismatch):
        house.gate.admit(house.speech(device, voice, text="\ud800"))


def test_roles_decide(house):
    voice = house.voice()
    for role, purpose in (
        (Role.SPEAKER, Purpose.SPEAK),
        (Role.VERIFIER, Purpose.COMPARE),
        (Role.CONSENT_KEEPER, Purpose.CONSENT),
        (Role.READER, Purpose.READ),
    ):
        wanted = voice if purpose in (Purpose.SPEAK, Purpose.COMPARE) else None
        able = house.client(f"able-{role}", roles=(role,))
        house.gate.admit(house.call(able, house.token(able, purpose, wanted), purpose, wanted))
        unable = house.client(f"unable-{role}", roles=tuple(other for other in Role if other is not role))
        with pytest.raises(errors.Denied) as refused:
            house.token(unable, purpose, wanted)
        assert refused.value.code == "denied"
        assert refused.value.decided_by == ("no-permit",)


def test_without_a_database_nothing_happens_and_the_token_is_not_burnt(house, postgres):
    device, voice = house.client(), house.voice()
    house.clock.stop()
    call = house.speech(device, voice)
    honest = house.request(device, "read")
    postgres.stop()
    try:
        for refused in (lambda: house.gate.admit(call), lambda: house.minting.issue(honest)):
            with pytest.raises(PolicyError) as unavailable:
                refused()
            assert unavailable.value.code == "audit_unavailable"
            assert house.database.url.password not in str(vars(unavailable.value))
    finally:
        postgres.start()
    house.gate.admit(call)
    with pytest.raises(errors.TokenReplayed):
        house.gate.admit(call)


def test_an_intent_that_cannot_be_written_stops_everything(house):
    device, voice = house.client(), house.voice()
    call = house.speech(device, voice)
    house.edit("ALTER TABLE intent RENAME TO elsewhere")
    with pytest.raises(PolicyError) as unavailable:
        house.gate.admit(call)
    assert unavailable.value.code == "audit_unavailable"
    assert house.count("used_token") == 0
    house.edit("ALTER TABLE elsewhere RENAME TO intent")
    house.gate.admit(call)
    assert house.count("used_token") == 1
