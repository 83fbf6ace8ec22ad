"""What voiceprints refuse or cannot do. Each error's `code` is stable; its docstring is the default message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class VoiceprintError(Exception):
    """The voiceprint could not be made or used."""

    code: ClassVar[str] = "voiceprint_error"
    fix: ClassVar[str] = "Run `glottis doctor`; it names the part that fails."

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or self.code).strip().splitlines()[0])


class DecodingError(VoiceprintError):
    """The upload could not be decoded."""

    code = "audio_refused"
    fix = "Send WAV, FLAC, Ogg, MP3, M4A, WebM or AAC."


class NotAudio(DecodingError):
    """The bytes are not an audio file."""

    code = "not_audio"
    fix = "Send the file's bytes, not its name or address: WAV, FLAC, Ogg, MP3, M4A, WebM or AAC."


class UnsupportedAudio(DecodingError):
    """This kind of audio is not accepted."""

    code = "unsupported_audio"
    fix = "Convert it to WAV, FLAC, Ogg, MP3, M4A, WebM or AAC with 8 to 192 kHz and send it again."


class DamagedAudio(DecodingError):
    """The audio breaks off or is damaged in more than its last frame."""

    code = "damaged_audio"
    fix = "Export the recording again and send it whole."


class UploadTooLarge(DecodingError):
    """The upload has more bytes than one recording may have."""

    code = "upload_too_large"
    fix = "Send a shorter recording or a compressed format."


class AudioTooLong(DecodingError):
    """The recording is longer than one recording may be."""

    code = "audio_too_long"
    fix = "Cut the recording; the limit stands in the message."


class EmptyAudio(DecodingError):
    """The file holds no samples."""

    code = "audio_empty"
    fix = "Record again: the upload has a header but no sound."


class InvalidSamples(DecodingError):
    """The recording holds values that are not samples: NaN, infinity, or far beyond full scale."""

    code = "invalid_samples"
    fix = "Export floating-point audio within -1 and 1."


class DecodeTimeout(DecodingError):
    """Decoding took longer than one recording may take."""

    code = "decode_timeout"
    fix = "Send the recording as WAV or FLAC."


class DecoderUnavailable(DecodingError):
    """The jailed decoder could not be started or confined; nothing was decoded."""

    code = "decoder_unavailable"
    fix = "Retry; if it lasts, run `glottis doctor`: the kernel must offer seccomp filters to this user."


class RecogniserUnavailable(VoiceprintError):
    """The recogniser of digits could not be started or confined; nothing was opened."""

    code = "recogniser_unavailable"
    fix = "Retry; if it lasts, run `glottis doctor`: the kernel must offer seccomp filters to this user."


class DigitsUnreadable(VoiceprintError):
    """The recogniser could not finish this recording."""

    code = "digits_unreadable"
    fix = "Ask for new digits and say them again, in a few seconds and without anything else."


class RecordingUsed(VoiceprintError):
    """This recording was sent before; each counts once."""

    code = "recording_used"
    fix = "Ask for new digits and record them anew."


class NotFresh(VoiceprintError):
    """The recording is longer than the time since its digits were given out, so it began before."""

    code = "not_fresh"
    fix = "Ask for new digits, and record after they are there."


class NotLive(VoiceprintError):
    """The recording does not pass: another voice, or other digits."""

    code = "not_live"
    fix = "Ask for new digits, and let the voice's speaker say them one by one, clearly and in a quiet place."

    def __init__(self, failed: str) -> None:
        """`failed`: `digits` or `voice`, for the log. The caller does not learn which, so that it is not told where to improve."""
        self.failed = failed
        super().__init__()


@dataclass(frozen=True)
class Shortfall:
    """One gate that failed."""

    code: str
    measured: float
    threshold: float

    def __str__(self) -> str:
        return f"{self.code} (measured {self.measured:g}, threshold {self.threshold:g})"


class QualityRefused(VoiceprintError):
    """The recordings do not pass the quality gates."""

    code = "quality_refused"
    fix = "Record again as the failed gates say; the same token's consent allows another try."

    def __init__(self, failed: tuple[Shortfall, ...]) -> None:
        self.failed = failed
        super().__init__("; ".join(str(gate) for gate in failed))


class EmbeddingInvalid(VoiceprintError):
    """The encoder gave something that is not a voice embedding; nothing was stored or compared."""

    code = "embedding_invalid"
    fix = "Send another recording; if it lasts, run `glottis doctor`."


class ConditioningInvalid(VoiceprintError):
    """The engine measured values that are not numbers; nothing was stored."""

    code = "conditioning_invalid"
    fix = "Send another recording; if it lasts, run `glottis doctor`."


class ModelRefused(VoiceprintError):
    """A model file is missing, is not the pinned one, or fails its self-test."""

    code = "model_refused"
    fix = "Install Glottis again: its models ship inside the package."


class ModelMismatch(VoiceprintError):
    """The voice was enrolled with another model than the one in use."""

    code = "model_mismatch"
    fix = "Enrol the voice again with the current model."


class VoiceprintMissing(VoiceprintError):
    """The voice has no stored voiceprint."""

    code = "voiceprint_missing"
    fix = "Enrol the voice again: its sealed rows are gone."


class NotErased(VoiceprintError):
    """There is no erasure of this voice to certify."""

    code = "voice_not_erased"
    fix = "Erase it first: glottis voices erase ID."


class ErasureCertificateInvalid(VoiceprintError):
    """The certificate of erasure does not hold."""

    code = "erasure_certificate_invalid"
    fix = "Ask either site for a fresh certificate: somebody changed this one, or the roster is another cluster's."


class VoiceprintsUnavailable(VoiceprintError):
    """The database did not answer; nothing was opened."""

    code = "voiceprints_unavailable"
    fix = "Retry; if it lasts, check the database with `glottis doctor`."


class LockedMemoryExhausted(VoiceprintError):
    """No locked memory is left for another open voice; nothing was opened."""

    code = "locked_memory_exhausted"
    fix = "Retry in a moment; to serve more at once raise RLIMIT_MEMLOCK of the vault."
