"""From the packages' errors to what a caller may read: code, message, fix. Details stay in the log and the audit.

Messages are fixed, but for what a recording or a text lacks (`service.problems.public_message`).
"""

from __future__ import annotations

from collections.abc import Mapping

from keyvault.errors import KeyVaultError
from policies.errors import AuthorizationDetailsInvalid, PolicyError
from service.problems import fixed_message, public_message
from synth.errors import Busy, SynthError
from voiceprints.errors import QualityRefused, VoiceprintError


class Refusal(Exception):
    """A refusal as it goes out. `extra` holds measured values, thresholds and names of ours, never input.

    `retry_after_s`: when to come again, if that is known.
    """

    def __init__(
        self, code: str, message: str, fix: str, extra: Mapping[str, object] | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.fix, self.extra, self.retry_after_s = code, fix, extra, retry_after_s


def refusal_of(error: Exception) -> Refusal | None:
    """What to tell the caller about this error; None if it is none of ours, which is our fault and not the caller's."""
    match error:
        case Refusal():
            return error
        case QualityRefused():
            failed = [{"code": gate.code, "value": gate.measured, "threshold": gate.threshold} for gate in error.failed]
            return Refusal(error.code, str(error), error.fix, {"failed": failed})
        case Busy():
            return Refusal(error.code, fixed_message(error.code, error), error.fix, retry_after_s=error.retry_after_s)
        case VoiceprintError() | SynthError():
            return Refusal(error.code, public_message(error.code, error), error.fix)
        case AuthorizationDetailsInvalid(detail=str(detail)):
            return Refusal(error.code, str(error), f"Mend this: {detail}. {error.fix}", {"param": error.member})
        case KeyVaultError() | PolicyError():
            # Their details name keys, rows and clients: the docstring's first line is the public message.
            return Refusal(error.code, fixed_message(error.code, error), error.fix)
    return None
