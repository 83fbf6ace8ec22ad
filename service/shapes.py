"""Shapes of requests, shared by the edge (first look) and the vault (which trusts nobody's look but its own)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal
from uuid import UUID

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

MAX_TEXT = 4096
MAX_JSON_BYTES = 64 * 1024
MAX_FORM_BYTES = 16 * 1024
MAX_UPLOAD_BYTES = 32 * 1024 * 1024
MAX_RECORDINGS = 10
MAX_TICKET_S = 600

_SHOWN = r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+$"
"""No controls, no line separators, none of the marks that turn the direction of text: a name must not rewrite what it stands in."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=_SHOWN)]
TenantName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=_SHOWN)]


_NAME: TypeAdapter[str] = TypeAdapter(Name)
_TENANT: TypeAdapter[str] = TypeAdapter(TenantName)


def name_of(text: str) -> str | None:
    """The text if it can name a voice, else None."""
    return _fitting(_NAME, text)


def tenant_of(text: str) -> str | None:
    """The text if it can name a tenant, else None."""
    return _fitting(_TENANT, text)


def _fitting(shape: TypeAdapter[str], text: str) -> str | None:
    try:
        return shape.validate_python(text)
    except ValidationError:
        return None


def _in_utc(moment: datetime) -> datetime:
    """The same moment in UTC; ValueError where the calendar ends before it."""
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("beyond the calendar") from None


_A_VOICE = Field(examples=["6f9619ff-8b86-4d01-b42d-00cf4fc964ff"])


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SpeechRequest(Shape):
    """Speak `input` in `voice`. The token must carry the SHA-256 of `input` as UTF-8."""

    input: Annotated[str, Field(min_length=1, max_length=MAX_TEXT, examples=["Good morning."])]
    voice: Annotated[UUID, _A_VOICE]
    model: Literal["hibari"] = "hibari"
    response_format: Literal["wav", "pcm"] = "wav"
    speed: Annotated[float, Field(ge=0.25, le=4.0)] = 1.0


class ConsentRequest(Shape):
    """What a speaker allowed: purposes, territory (ISO 3166 alpha-2, or `*`), until when, and the evidence for it."""

    subject: Annotated[Name, Field(examples=["speaker 17"])]
    purposes: Annotated[list[Literal["speak", "compare", "identify"]], Field(min_length=1, max_length=3, examples=[["speak"]])]
    territory: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^([A-Z]{2}|\*)$")]], Field(min_length=1, max_length=50)
    ] = ["*"]
    expires_at: Annotated[AwareDatetime, AfterValidator(_in_utc), Field(examples=["2030-01-01T00:00:00Z"])]
    evidence: Annotated[str, Field(min_length=1, max_length=10_000, examples=["signed form 17"])]


class ConsentAnswer(Shape):
    id: UUID
    purposes: list[str]
    territory: list[str]
    expires_at: datetime
    state: str


class VoiceAnswer(Shape):
    id: UUID
    name: str
    state: str
    key_version: int
    created_at: datetime | None = None
    quality: dict[str, float] | None = None


class UploadRequest(Shape):
    """What a ticket is to be good for: a body of so many bytes, within so many seconds."""

    max_bytes: Annotated[int, Field(ge=1, le=MAX_UPLOAD_BYTES)] = MAX_UPLOAD_BYTES
    expires_in: Annotated[int, Field(ge=1, le=MAX_TICKET_S)] = MAX_TICKET_S


class UploadAnswer(Shape):
    """The ticket, which is shown once: hand it to the app, and keep it nowhere."""

    ticket: str
    expires_at: datetime
    max_bytes: int


class BrowserKeyRequest(Shape):
    """The one-time code that this browser was given."""

    code: Annotated[str, Field(min_length=1, max_length=64, examples=["A" * 43])]


class BrowserKeyAnswer(Shape):
    """Who this browser is now. `voice`: the one voice that it may reach."""

    client_id: str
    tenant: str
    roles: list[str]
    voice: UUID | None
    jkt: str


class ErasureAnswer(Shape):
    """The voice is erased at this site. Old copies of the database open it until its master key versions are destroyed."""

    id: UUID
    erased_at: datetime


class VoiceList(Shape):
    voices: list[VoiceAnswer]


class BandAnswer(Shape):
    """How near the speaker is to the voice: a band, never a score."""

    band: Literal["match", "uncertain", "no_match"]


class LivenessRequest(Shape):
    """The voice whose speaker is to say digits."""

    voice: Annotated[UUID, _A_VOICE]


class LivenessAnswer(Shape):
    """Say the digits, and send the recording to /v1/liveness/{id} before `expires_at`."""

    id: str
    digits: str
    expires_at: datetime


class LivenessPass(Shape):
    """Name it as `liveness` in the authorization details of one token, before `expires_at`."""

    liveness: str
    expires_at: datetime


class ApprovalRequest(Shape):
    """What another client is to have spoken: the voice, the SHA-256 of the text in UTF-8, and the client's name."""

    voice: Annotated[UUID, _A_VOICE]
    text_sha256: str = Field(pattern=r"^[0-9a-f]{64}$", examples=["0" * 64])
    client: str = Field(min_length=1, max_length=63, examples=["studio"])


class ApprovalAnswer(Shape):
    """The client names `approval` in the authorization details of one token, before `expires_at`."""

    id: UUID
    approval: str
    expires_at: datetime


class TokenAnswer(Shape):
    access_token: str
    token_type: Literal["DPoP", "Bearer"]
    expires_in: int
    authorization_details: list[dict[str, object]]


class ProblemBody(BaseModel):
    """What was refused, and what to do. Some refusals name measured values and thresholds beside it, never what was sent."""

    model_config = ConfigDict(extra="allow", frozen=True)

    code: str
    message: str
    fix: str
    type: str
    param: str | None = None
    """The member of `authorization_details` that does not hold, where the refusal is about one of ours."""


class Problem(Shape):
    """Every refusal has this form; `code` is stable."""

    error: ProblemBody


class Index(Shape):
    name: str
    what: str
    openapi: str
    keys: str
    health: list[str]


class Health(Shape):
    status: Literal["ok"]


class Readiness(Shape):
    """`broken`: the parts that are missing."""

    status: Literal["ready", "unready"]
    broken: list[str] | None = None


class KeySet(Shape):
    """RFC 7517."""

    keys: list[dict[str, object]]


class SpeechModel(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Shape):
    object: Literal["list"]
    data: list[SpeechModel]
