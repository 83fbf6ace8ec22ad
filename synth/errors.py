"""What synthesis refuses or cannot do. Each error's `code` is stable; its docstring is the default message."""

from __future__ import annotations

from typing import ClassVar


class SynthError(Exception):
    """Speech could not be made."""

    code: ClassVar[str] = "synthesis_failed"
    fix: ClassVar[str] = "Try again; if it lasts, run `glottis doctor`."

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or self.code).strip().splitlines()[0])


class TextRefused(SynthError):
    """This text cannot be spoken."""

    code = "unspeakable"
    fix = "Send English text in Latin letters; an answer counts what could not be voiced (X-Glottis-Skipped)."


class EmptyInput(TextRefused):
    """There is no text to speak."""

    code = "empty_input"
    fix = "Send at least one word."


class TextTooLong(TextRefused):
    """The text is longer than one request may hold."""

    code = "text_too_long"
    fix = "Split the text into several requests."


class SpeechTooLong(TextRefused):
    """The speech is longer than one request may make."""

    code = "speech_too_long"
    fix = "Send the text in parts."


class Unspeakable(TextRefused):
    """Nothing in this text can be voiced."""

    code = "unspeakable"


class SpeedRefused(SynthError):
    """The speed is outside what the model can speak."""

    code = "speed_out_of_range"
    fix = "Use a speed from 0.5 to 2.0; 1.0 is the natural pace."


class ModelRefused(SynthError):
    """A model file is not the one that was pinned."""

    code = "model_refused"
    fix = "Reinstall the locked dependencies; a model is never used with another hash."


class RuntimeConflict(SynthError):
    """More than one ONNX Runtime distribution is installed in the same place."""

    code = "onnxruntime_conflict"
    fix = "Uninstall all of the distributions named in the message, then install one of them."


class ConditioningRefused(SynthError):
    """These numbers are not the conditioning of a voice."""

    code = "conditioning_refused"
    fix = "Enrol the voice again with the model that speaks."


class SpeechTooShort(SynthError):
    """There is too little speech to measure a voice."""

    code = "too_little_speech"
    fix = "Enrol with at least ten seconds of clear speech."


class Busy(SynthError):
    """All places are taken; nothing of this request was used up."""

    code = "busy"
    fix = "Send the same request again after the seconds in Retry-After."

    def __init__(self, retry_after_s: float) -> None:
        super().__init__()
        self.retry_after_s = retry_after_s


class TurnLate(Busy):
    """The turn to speak did not come in time."""

    fix = "Fetch a fresh token and send the request again after the seconds in Retry-After."


class Cancelled(SynthError):
    """The listener left before the text was finished."""

    code = "cancelled"
    fix = "Nothing to do: no further sentence was spoken."
