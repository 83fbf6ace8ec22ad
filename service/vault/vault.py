"""What one vault worker does for a request: gate, open, compute, forget, complete. Synchronous; called from threads.

Every method that opens a voice follows the same order: places and text first (nothing used up), then the gate's one
transaction, then the voice in one locked buffer, then a completion that says what came of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from keyvault.database import Database, Statement, Transaction
from keyvault.hsm import Hsm
from policies.authority import Voice
from policies.browsers import BrowserKeys, Presented
from policies.dual_control import DualControl, Utterance
from policies.errors import VoiceUnknown
from policies.gate import Gate
from policies.grants import Binding, Grant, Purpose
from policies.intents import Intents
from policies.liveness import Challenge, Liveness
from policies.minting import IssuedToken, Minting, TokenRequest
from policies.registry import Registry
from policies.store import PolicyStore, durable, site_wide
from policies.tickets import Tickets
from policies.writing.store import within
from service import frames
from service.refusals import Refusal, refusal_of
from service.shapes import ApprovalRequest, ConsentRequest, SpeechRequest, UploadRequest, name_of
from service.vault.agreement import Agreement
from service.vault.exchange import Credentials, Done, Listener, SpokenAudio
from service.vault.readiness import Readiness
from synth.audio import pcm16, wav
from synth.speech import Speech
from voiceprints.enrolment import Enrolment
from voiceprints.erasure import Erasure
from voiceprints.errors import NotLive
from voiceprints.matching import Matching
from voiceprints.opening import OpenVoices
from voiceprints.presence import Presence, owner_of
from voiceprints.quality import Quality

RECEIPT_S = 2.0
"""How long an enrolment's answer waits for the other site's receipt; after that it says `awaiting_sync`."""
_LOOK_S = 0.05


@dataclass(frozen=True)
class Vault:
    """The use cases of one vault worker, joined in `service.wiring`."""

    database: Database
    gate: Gate
    minting: Minting
    tickets: Tickets
    browsers: BrowserKeys
    registry: Registry
    store: PolicyStore
    intents: Intents
    enrolment: Enrolment
    erasure: Erasure
    opening: OpenVoices
    matching: Matching
    liveness: Liveness
    dual_control: DualControl
    presence: Presence
    speech: Speech
    ready: Readiness
    hsm: Hsm = field(repr=False)
    jwks: Callable[[], dict[str, list[dict[str, Any]]]]
    agreement: Agreement
    receipt_of: Callable[[str, UUID], bool] | None
    """Whether every site has signed for the key of a tenant's voice; None where there is one site, and nothing waits."""

    def readiness(self) -> list[str]:
        """Names of the parts that do not work; empty when all do."""
        return self.ready.broken()

    def issue(self, credentials: Credentials, grant_type: str, details: str) -> IssuedToken:
        """A key-bound token."""
        request = TokenRequest(
            method=credentials.method,
            path=credentials.path,
            proof=credentials.proof,
            certificate_der=credentials.certificate,
            grant_type=grant_type,
            authorization_details=details,
        )
        return self.minting.issue(request)

    def record_consent(self, credentials: Credentials, body: ConsentRequest) -> Done:
        """Write down what a speaker allowed."""
        grant = self.gate.admit(credentials.call(Purpose.CONSENT))
        with self._completing(grant, "recorded"), durable(self.database, grant.token.tenant) as transaction:
            consent = self.registry.record_consent(
                transaction,
                tenant=grant.token.tenant,
                subject=body.subject,
                purposes=body.purposes,
                territory=body.territory,
                expires_at=body.expires_at,
                evidence=body.evidence,
            )
        answer = {
            "id": str(consent.consent_id),
            "purposes": list(consent.purposes),
            "territory": list(consent.territory),
            "expires_at": consent.expires_at.isoformat(),
            "state": consent.state.value,
        }
        return Done(grant.intent_id, answer)

    def admit_enrolment(self, credentials: Credentials) -> Grant:
        """The gate for an enrolment, before its recordings arrive."""
        self.agreement.require_fresh()
        return self.gate.admit(credentials.call(Purpose.ENROL))

    def register_browser(self, credentials: Credentials, code: str) -> Done:
        """Register the key that signed the proof."""
        presented = Presented(credentials.method, credentials.path, code, credentials.proof or "")
        client, intent_id = self.browsers.register(presented)
        voice = None if client.voice_id is None else str(client.voice_id)
        known = {"client_id": client.client_id, "tenant": client.tenant, "roles": list(client.roles)}
        return Done(intent_id, {**known, "voice": voice, "jkt": client.jkt})

    def issue_ticket(self, credentials: Credentials, body: UploadRequest) -> Done:
        """A ticket with which an app without a certificate enrols one speaker under the consent that the token names."""
        grant = self.gate.admit(credentials.call(Purpose.ENROL))
        with self._completing(grant, "ticket_issued"), durable(self.database, grant.token.tenant) as transaction:
            made = self.tickets.issue(transaction, grant, max_bytes=body.max_bytes, lifetime_s=body.expires_in)
        answer = {"ticket": made.ticket, "expires_at": made.expires_at.isoformat(), "max_bytes": made.max_bytes}
        return Done(grant.intent_id, answer)

    def ticket_limit(self, ticket: str) -> int:
        """How many bytes the upload of this ticket may have. Nothing is used up."""
        self.agreement.require_fresh()
        return self.tickets.look(ticket).max_bytes

    def admit_upload(self, ticket: str) -> Grant:
        """The gate for an enrolment by ticket, before its recordings arrive."""
        self.agreement.require_fresh()
        return self.tickets.redeem(ticket)

    def enrol(self, grant: Grant, frame: frames.Upload | frames.Refused | None) -> Done:
        """Measure, seal and register a voice, or leave nothing behind."""
        with self._completing(grant, "enrolled") as facts:
            upload = _uploaded(frame)
            name = name_of(upload.fields.get("name", ""))
            if name is None:
                raise Refusal(
                    "invalid_request", "The voice needs a name.", "Send the form field `name`: 1 to 100 printable characters."
                )
            enrolled = self.enrolment.enrol(upload.recordings, name, grant)
            facts["speech_milliseconds"] = round(enrolled.quality.speech_seconds * 1000)
        state = "active" if self._signed_everywhere(grant.token.tenant, enrolled.voice_id) else "awaiting_sync"
        answer = {"id": str(enrolled.voice_id), "name": enrolled.name, "state": state, "key_version": enrolled.key.version}
        return Done(grant.intent_id, {**answer, "quality": _measured(enrolled.quality)})

    def voices(self, credentials: Credentials) -> Done:
        """The tenant's voices, by name and state."""
        grant = self.gate.admit(credentials.call(Purpose.READ))
        with self._completing(grant, "read"), durable(self.database, grant.token.tenant) as transaction:
            found = self._own(transaction, grant) if grant.token.bound is Binding.KEY else self._all(transaction, grant)
        return Done(grant.intent_id, {"voices": [_described(voice) for voice in found]})

    def voice(self, credentials: Credentials, voice_id: UUID) -> Done:
        """One of the tenant's voices. Raises VoiceUnknown."""
        grant = self.gate.admit(credentials.call(Purpose.READ))
        with self._completing(grant, "read"), durable(self.database, grant.token.tenant) as transaction:
            found = self.store.voice(transaction, grant.token.tenant, voice_id)
            if found is None or (grant.token.bound is Binding.KEY and found not in self._own(transaction, grant)):
                raise VoiceUnknown()
        return Done(grant.intent_id, _described(found))

    def _all(self, transaction: Transaction, grant: Grant) -> tuple[Voice, ...]:
        return self.store.voices(transaction, grant.token.tenant)

    def _own(self, transaction: Transaction, grant: Grant) -> tuple[Voice, ...]:
        """What a browser may read: the voice that its key was invited for, or none."""
        client = self.store.client(transaction, grant.token.client_id)
        if client is None or client.voice_id is None:
            return ()
        found = self.store.voice(transaction, grant.token.tenant, client.voice_id)
        return () if found is None else (found,)

    def erase(self, credentials: Credentials, voice_id: UUID) -> Done:
        """Erase one of the tenant's voices, whatever became of its consent. Raises VoiceUnknown, also for one erased before."""
        grant = self.gate.admit(credentials.call(Purpose.ERASE, voice=voice_id))
        # Also rows that name another tenant, because somebody changed them, are this voice's, and go.
        with self._completing(grant, "erased"), site_wide(self.database) as transaction:
            done = self.erasure.erase(transaction, voice_id, tenant=grant.token.tenant)
        return Done(grant.intent_id, {"id": str(voice_id), "erased_at": done.tombstone.erased_at.isoformat()})

    def admit_comparison(self, credentials: Credentials, voice: UUID) -> Grant:
        """The gate for a comparison, before the recording arrives."""
        self.agreement.require_fresh()
        return self.gate.admit(credentials.call(Purpose.COMPARE, voice=voice))

    def verify(self, grant: Grant, frame: frames.Upload | frames.Refused | None) -> Done:
        """Is this recording the voice's speaker? A band, never a score."""
        with self._completing(grant, "compared") as facts:
            recording = _one_recording(frame)
            assert grant.token.voice is not None
            band = self.matching.compare(recording, grant.token.voice, grant)
            facts["band"] = band.value
        return Done(grant.intent_id, {"band": band.value})

    def ask_liveness(self, credentials: Credentials, voice: UUID) -> Done:
        """Digits for the voice's speaker to say."""
        grant = self.gate.admit(credentials.call(Purpose.LIVENESS, voice=voice))
        with self._completing(grant, "asked"):
            asked = self.liveness.ask(owner_of(grant))
        return Done(grant.intent_id, {"id": asked.text, "digits": asked.digits, "expires_at": _moment(asked.expires_at)})

    def admit_answer(self, credentials: Credentials, challenge: str) -> tuple[Grant, Challenge]:
        """The gate for an answer, before the recording arrives. The challenge is used up."""
        self.agreement.require_fresh()
        grant = self.gate.admit(credentials.call(Purpose.LIVENESS, challenge=challenge))
        return grant, self.liveness.read(challenge, owner_of(grant))

    def hear_answer(self, admitted: tuple[Grant, Challenge], frame: frames.Upload | frames.Refused | None) -> Done:
        """Does this recording say the digits in the voice? A pass for one use of the voice, or a refusal."""
        grant, challenge = admitted
        with self._completing(grant, "heard") as facts:
            recording = _one_recording(frame)
            try:
                self.presence.require(recording, challenge, grant)
            except NotLive as refusal:
                facts["failed"] = refusal.failed
                raise
            passed = self.liveness.passed(challenge, owner_of(grant))
        return Done(grant.intent_id, {"liveness": passed.text, "expires_at": _moment(passed.expires_at)})

    def approve(self, credentials: Credentials, body: ApprovalRequest) -> Done:
        """One client's word for what another is to have spoken, once."""
        named = {"voice": body.voice, "text_sha256": body.text_sha256, "beneficiary": body.client}
        grant = self.gate.admit(credentials.call(Purpose.APPROVE, **named))
        with self._completing(grant, "approved") as facts:
            utterance = Utterance(grant.token.tenant, body.client, body.voice, body.text_sha256)
            made = self.dual_control.approve(utterance, grant.token.client_id)
            facts["approval"] = str(made.id)
        return Done(grant.intent_id, {"id": str(made.id), "approval": made.text, "expires_at": _moment(made.expires_at)})

    def speak(self, credentials: Credentials, body: SpeechRequest, listener: Listener) -> SpokenAudio:
        """Speak a text in a voice. The voice is open from just after the gate until the last sentence, and no longer.

        Raises Cancelled when the listener leaves; what had been made by then stands in the completion.
        """
        script = self.speech.read(body.input)
        with self.speech.reserve() as turn:
            listener.attend(turn)
            self.agreement.require_fresh()
            grant = self.gate.admit(credentials.call(Purpose.SPEAK, voice=body.voice, text=body.input))
            with (
                self._completing(grant, "spoken") as facts,
                self.opening.opened(body.voice, grant, scratch_bytes=self.speech.scratch_bytes) as voice,
            ):
                spoken = self.speech.speak(voice, script, turn=turn, speed=body.speed)
                rate = self.speech.sample_rate
                try:
                    audio = wav(spoken, rate) if body.response_format == "wav" else b"".join(pcm16(block) for block in spoken)
                finally:
                    facts["milliseconds"] = round(spoken.facts.seconds * 1000)
                    facts["characters"] = spoken.facts.characters
        return SpokenAudio(grant.intent_id, audio, len(spoken.facts.skipped))

    def _signed_everywhere(self, tenant: str, voice: UUID) -> bool:
        """Wait a moment for the other site's receipt: most often the voice can speak as soon as its enroller knows its id."""
        if self.receipt_of is None:
            return True
        until = time.monotonic() + RECEIPT_S
        while not self.receipt_of(tenant, voice):
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK_S)
        return True

    @contextmanager
    def _completing(self, grant: Grant, outcome: str) -> Iterator[dict[str, str | int]]:
        """Record what came of the grant: `outcome` with the facts put into the dictionary, or the code of what failed."""
        facts: dict[str, str | int] = {}
        try:
            yield facts
        except Exception as error:
            known = refusal_of(error)
            self.intents.complete(grant.intent_id, known.code if known else "internal_error", facts, *self._spent(grant, facts))
            raise
        self.intents.complete(grant.intent_id, outcome, facts, *self._spent(grant, facts))

    def _spent(self, grant: Grant, facts: Mapping[str, str | int]) -> list[Statement]:
        """What counts against the quotas: speech that was made, also by one who left before its end, and a failed answer."""
        token, now = grant.token, time.time()
        if spoken := int(facts.get("milliseconds", 0)):
            return [within(token.tenant), self.store.spend(token.caller, token.voice, now, milliseconds=spoken)]
        return [within(token.tenant), self.store.spend(token.caller, None, now, attempts=1)] if "failed" in facts else []


def _uploaded(frame: frames.Upload | frames.Refused | None) -> frames.Upload:
    if frame is None:
        raise Refusal("client_disconnected", "The client left before the upload was complete.", "Send it again with a fresh token.")
    if isinstance(frame, frames.Refused):
        raise Refusal(frame.code, frame.message, frame.fix)
    return frame


def _one_recording(frame: frames.Upload | frames.Refused | None) -> frames.Samples:
    upload = _uploaded(frame)
    if len(upload.recordings) != 1:
        raise Refusal("invalid_request", "One recording is heard at a time.", "Send one file in the field `audio`.")
    return upload.recordings[0]


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _described(voice: Voice) -> dict[str, Any]:
    return {
        "id": str(voice.voice_id),
        "name": voice.name,
        "state": voice.state.value,
        "key_version": voice.key_version,
        "created_at": voice.created_at.isoformat(),
    }


def _measured(quality: Quality) -> dict[str, float]:
    """What the recordings were like: properties of the sound, not of the voice."""
    return {name: round(float(value), 4) for name, value in asdict(quality).items() if value is not None}
