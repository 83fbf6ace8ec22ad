"""The attacks of the demo: each is refused with its code, and the same request without the attack is accepted.

An attack that is not refused, or a request that should be accepted and is not, ends the demo.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text as sql

from service import step
from service.client import Refused, VoiceClient
from service.errors import ServiceError
from service.isolation import establish
from service.schema import opened
from service.settings import Settings
from service.transcript import Transcript

SPEECH = "/v1/audio/speech"


class DemoFailed(ServiceError):
    """The demo did not show what it promises."""

    code = "demo_failed"
    fix = "This is a defect: run `make test`, and report the step that failed with the lines above."


@dataclass(frozen=True)
class Scene:
    """Who is there: an honest client, another registered client, and two voices."""

    settings: Settings
    honest: VoiceClient
    other: VoiceClient
    voice: str
    second_voice: str
    consent: str
    transcript: Transcript

    def body(self, text: str) -> dict[str, Any]:
        return {"model": "hibari", "input": text, "voice": self.voice, "response_format": "wav"}

    def token(self, text: str) -> str:
        return self.honest.token("speak", voice=self.voice, text=text)

    def accepted(self, text: str, token: str) -> None:
        self.honest.call("POST", SPEECH, token, json=self.body(text))


def refusal(attempt: Callable[[], object], *, expected: str) -> str:
    """The code that the attempt was refused with. Raises DemoFailed if it was not, or with another code."""
    try:
        attempt()
    except Refused as refused:
        if refused.code == expected:
            return refused.code
        raise DemoFailed(f"expected {expected}, got {refused.code}") from refused
    raise DemoFailed(f"an attack succeeded that must be refused with {expected}")


def all_attacks(scene: Scene) -> None:
    """Run every attack of the demo."""
    replay(scene)
    other_certificate(scene)
    other_dpop_key(scene)
    other_text(scene)
    too_late(scene)
    swapped_rows(scene)
    edited_consent(scene)
    weaker_unwrap(scene)


def replay(scene: Scene) -> None:
    text = "A token speaks once."
    token = scene.token(text)
    scene.accepted(text, token)
    code = refusal(lambda: scene.accepted(text, token), expected="token_replayed")
    scene.transcript.refused("the same token again", code, "its first use")


def other_certificate(scene: Scene) -> None:
    text = "A token belongs to one certificate."
    token = scene.token(text)
    headers = scene.honest.headers("POST", SPEECH, token)
    code = refusal(lambda: scene.other.send("POST", SPEECH, headers, json=scene.body(text)), expected="binding_mismatch")
    scene.accepted(text, token)
    scene.transcript.refused(
        "a stolen token with its proof, over another client's certificate", code, "the same token over its own"
    )


def other_dpop_key(scene: Scene) -> None:
    text = "A token belongs to one key."
    token = scene.token(text)
    forged = scene.honest.headers("POST", SPEECH, token) | {"DPoP": scene.other.proof("POST", SPEECH, token)}
    code = refusal(lambda: scene.honest.send("POST", SPEECH, forged, json=scene.body(text)), expected="binding_mismatch")
    scene.accepted(text, token)
    scene.transcript.refused("a proof by another client's DPoP key", code, "a proof by its own key")


def other_text(scene: Scene) -> None:
    text = "Please send ten euros."
    token = scene.token(text)
    code = refusal(lambda: scene.accepted("Please send ten thousand euros.", token), expected="text_mismatch")
    scene.accepted(text, token)
    scene.transcript.refused("another text under the same token", code, "the text it was issued for")


def too_late(scene: Scene) -> None:
    text = "A token lives five seconds."
    late, prompt = scene.token(text), scene.token(text)
    scene.accepted(text, prompt)
    time.sleep(5.2)
    code = refusal(lambda: scene.accepted(text, late), expected="token_expired")
    scene.transcript.refused("a token after five seconds", code, "its twin at once")


def swapped_rows(scene: Scene) -> None:
    text = "A voice's rows open only as its own."
    with _database_changed(scene, _SWAP_SEALED, _SWAP_SEALED):
        code = refusal(lambda: scene.accepted(text, scene.token(text)), expected="seal_broken")
    scene.accepted(text, scene.token(text))
    scene.transcript.refused("two voices' sealed rows swapped in the database", code, "the rows as they were written")


def edited_consent(scene: Scene) -> None:
    text = "A consent is what the speaker said."
    with _database_changed(scene, _EXTEND_CONSENT, _SHORTEN_CONSENT):
        code = refusal(lambda: scene.accepted(text, scene.token(text)), expected="authority_row_tampered")
    scene.accepted(text, scene.token(text))
    scene.transcript.refused("a consent extended by a year in the database", code, "the consent as it was given")


def weaker_unwrap(scene: Scene) -> None:
    """With the serving PIN, straight at the token, in a process of its own."""
    account = establish(scene.settings.state_dir).vault
    answers = step.call(scene.settings, account, "try_unwraps")
    if answers.pop("the full template") != "OK":
        raise DemoFailed("the token refused the right template")
    allowed = [attempt for attempt, answer in answers.items() if answer == "OK"]
    if allowed or not answers:
        raise DemoFailed(f"the token unwrapped a voice's key with {', '.join(allowed) or 'no attempt made'}")
    given = ", ".join(sorted(set(answers.values())))
    attack = f"C_UnwrapKey with {len(answers)} weaker templates, such as SENSITIVE False, with the serving PIN"
    scene.transcript.refused(attack, given, "the full template")


_SWAP_SEALED = """
UPDATE voiceprint AS mine SET sealed = theirs.sealed FROM voiceprint AS theirs
WHERE mine.voice_id IN (:voice, :second) AND theirs.voice_id IN (:voice, :second)
  AND mine.voice_id <> theirs.voice_id AND mine.kind = theirs.kind"""
_EXTEND_CONSENT = "UPDATE consent SET expires_at = expires_at + interval '365 days' WHERE consent_id = :consent"
_SHORTEN_CONSENT = "UPDATE consent SET expires_at = expires_at - interval '365 days' WHERE consent_id = :consent"


@contextmanager
def _database_changed(scene: Scene, change: str, undo: str) -> Iterator[None]:
    """The database written by somebody who owns it, and put right again."""
    _write(scene, change)
    try:
        yield
    finally:
        _write(scene, undo)


def _write(scene: Scene, statement: str) -> None:
    names = {"voice": scene.voice, "second": scene.second_voice, "consent": scene.consent}
    with opened(scene.settings.role_url("owner")) as database, database.begin() as transaction:
        found = transaction.execute(sql(statement), {name: value for name, value in names.items() if f":{name}" in statement})
        if found.rowcount < 1:
            raise DemoFailed("the demo changed no row")
