"""From the packages' errors to what a caller may read: code, fixed message, fix. Details stay in the log and the audit."""

from __future__ import annotations

from collections.abc import Mapping

from keyvault.errors import KeyVaultError
from policies.errors import AuthorizationDetailsInvalid, PolicyError
from synth.errors import SynthError
from voiceprints.errors import QualityRefused, VoiceprintError


class Refusal(Exception):
    """A refusal as it goes out. `extra` holds measured values, thresholds and names of ours, never input."""

    def __init__(self, code: str, message: str, fix: str, extra: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.code, self.fix, self.extra = code, fix, extra


def refusal_of(error: Exception) -> Refusal | None:
    """What to tell the caller about this error; None if it is none of ours, which is our fault and not the caller's."""
    match error:
        case Refusal():
            return error
        case QualityRefused():
            failed = [{"code": gate.code, "value": gate.measured, "threshold": gate.threshold} for gate in error.failed]
            return Refusal(error.code, str(error), error.fix, {"failed": failed})
        case VoiceprintError() | SynthError():
            return Refusal(error.code, str(error), error.fix)
        case AuthorizationDetailsInvalid(detail=str(detail)):
            return Refusal(error.code, str(error), f"Mend this: {detail}. {error.fix}", {"param": error.member})
        case KeyVaultError() | PolicyError():
            # Their details name keys, rows and clients: the docstring's first line is the public message.
            message = (type(error).__doc__ or error.code).strip().splitlines()[0]
            return Refusal(error.code, message, error.fix)
    return None
