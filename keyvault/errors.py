"""What the key vault refuses or cannot do. Each error's `code` is stable; its docstring is the default message."""

from __future__ import annotations

from typing import ClassVar


class KeyVaultError(Exception):
    """The key vault could not do this."""

    code: ClassVar[str] = "key_vault_error"
    fix: ClassVar[str] = "Run `glottis doctor`; it names the part that fails."

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or self.code).strip().splitlines()[0])


class HsmUnavailable(KeyVaultError):
    """The HSM did not answer."""

    code = "hsm_unavailable"
    fix = "Retry; if it lasts, check the PKCS#11 module and its token with `glottis doctor`."


class ModuleRefused(HsmUnavailable):
    """This is no PKCS#11 module that can be used."""

    code = "pkcs11_module_refused"
    fix = "Correct GLOTTIS_PKCS11_MODULE, or unset it to use SoftHSM (`apt install softhsm2`)."


class PinRejected(HsmUnavailable):
    """The token refused the PIN; no second attempt was made."""

    code = "pin_rejected"
    fix = "Put the right PIN into the PIN file and start again: one login is tried per start."


class PinThrottled(PinRejected):
    """The token refused the PIN before; it is not asked again yet."""

    code = "pin_throttled"
    fix = "Put the right PIN into the PIN file and wait until the pause is over: it keeps the token from locking itself."


class HsmTimeout(HsmUnavailable):
    """A call to the HSM did not come back in time."""

    code = "hsm_timeout"
    fix = "Retry; a worker whose calls hang is replaced. If it lasts, look at the HSM and its network."


class HsmBusy(HsmUnavailable):
    """Every session of the token is in use."""

    code = "hsm_busy"
    fix = "Retry in a moment; if it lasts, start more vault workers (GLOTTIS_VAULT_WORKERS)."


class PromiseBroken(KeyVaultError):
    """The module or token allows what a promise forbids."""

    code = "hsm_promise_broken"
    fix = "Use a module that enforces the template named in the message; do not start without it."


class KeyNotFound(KeyVaultError):
    """No such key version."""

    code = "key_version_not_found"
    fix = "Name a key version that exists; another version is never used instead."


class MasterMissing(KeyNotFound):
    """The token does not hold a master key that stored keys need."""

    code = "master_missing"
    fix = "Bring back the token that held it, or restore its backup; no new key is made in its place."


class KeyStateForbids(KeyVaultError):
    """The key's state does not allow this operation."""

    code = "key_state_forbids"
    fix = "See the key's state with `glottis keys show`."


class KeyCompromised(KeyStateForbids):
    """This master key version is compromised."""

    code = "key_compromised"
    fix = (
        "Re-wrap its keys to the serving version (glottis keys rewrap RING); to open one before, officers break the glass with a "
        "reason (glottis keys break-glass VERSION)."
    )


class KeyDestroyed(KeyStateForbids):
    """This master key version is destroyed."""

    code = "key_destroyed"
    fix = "Nothing opens what it wrapped: that is what it was destroyed for."


class RotationPinNeeded(KeyVaultError):
    """The serving token cannot re-wrap: its masters give out keys that never leave again."""

    code = "rotation_pin_needed"
    fix = "Give `glottis keys rewrap` at this site, with the rotation token's PIN; it moves what is left."


class KeyUseRefused(KeyVaultError):
    """This part of Glottis may not use this key; the token was not asked."""

    code = "key_use_refused"
    fix = "This is a fault of Glottis, or somebody's attempt: report it with the entry `hsm.use_refused` of the audit log."


class SignerRotating(KeyVaultError):
    """The next version of this signing key is published and does not sign yet."""

    code = "signer_rotating"
    fix = "`glottis keys signer list` shows when it begins to sign; give the command again after that."


class SignerInUse(KeyVaultError):
    """Signatures of this key are still accepted."""

    code = "signer_in_use"
    fix = "Rotate first; then wait until the version that follows it has signed for the least overlap."


class OverlapTooShort(KeyVaultError):
    """Two versions of a signing key need a longer overlap."""

    code = "overlap_too_short"
    fix = "Name a longer overlap: what was signed under the old version has to end, and every worker has to hear of the new one."


class UnwrapRejected(KeyVaultError):
    """The token refused to unwrap this key."""

    code = "unwrap_rejected"
    fix = "The wrapped key does not belong to this master or template; nothing was opened."


class RecordTampered(KeyVaultError):
    """A stored record does not carry the MAC it was written with."""

    code = "record_tampered"
    fix = "Somebody changed the row outside Glottis: restore it from a backup and look at the audit log."


class SigningKeyTampered(RecordTampered):
    """The record of a signing key does not carry the MAC it was written with; nothing is signed or accepted by it."""

    code = "signing_key_tampered"
    fix = "Somebody changed the table signing_key outside Glottis: put its rows back from a backup, and look at the audit log."


class SealBroken(KeyVaultError):
    """Sealed data does not open under its own key and context."""

    code = "seal_broken"
    fix = "The sealed row was changed or belongs to another voice; nothing was opened."


class CallFailed(HsmUnavailable):
    """The PKCS#11 module answered a call with an error."""

    def __init__(self, function: str, answer: str) -> None:
        super().__init__(f"{function} answered {answer}")
        self.function = function
        self.answer = answer

    def __reduce__(self) -> tuple[type[CallFailed], tuple[str, str]]:
        return CallFailed, (self.function, self.answer)  # ceremonies run in processes of their own


class KeyGone(HsmUnavailable):
    """A key that was in the token at start is not there now."""


class SessionKeyGone(HsmUnavailable):
    """The key is gone with the session that made it: begin again."""


class CeremonyRefused(KeyVaultError):
    """The token already holds what this ceremony would make."""

    code = "ceremony_refused"
    fix = "Start from a new token folder; a key under a name in use is never replaced."


class RowChanged(KeyVaultError):
    """Somebody else changed this record first."""

    code = "row_changed"
    fix = "Read the record again and retry."


class CeremonyMessageInvalid(KeyVaultError):
    """A message of the ceremony does not hold."""

    code = "ceremony_message_invalid"
    fix = "Stop, and ask the other officer what was sent; nothing was changed here. A new ceremony takes a new version."


class ReasonMissing(KeyVaultError):
    """Officers and auditors must be told why."""

    code = "reason_missing"
    fix = "Give the reason in a sentence: --reason '…'."


class DelayTooShort(KeyVaultError):
    """A destruction needs a longer delay, so that it can still be stopped."""

    code = "delay_too_short"
    fix = "Name a longer delay; GLOTTIS_DESTROY_DELAY_HOURS is the least that this installation allows."


class ScheduleInvalid(KeyVaultError):
    """This schedule says nothing that can be done."""

    code = "schedule_invalid"
    fix = "`glottis keys schedule set --help` shows what each action takes."


class NothingPending(KeyVaultError):
    """There is nothing to cancel."""

    code = "nothing_pending"
    fix = "`glottis keys list` shows which destructions have a time, and `glottis approvals` what officers are asked."


class ScheduleUnknown(KeyVaultError):
    """There is no such schedule."""

    code = "schedule_unknown"
    fix = "`glottis keys schedule list` shows every schedule."
