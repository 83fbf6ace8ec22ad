"""The HSM in our words: what Glottis asks of a token, and what each answer promises.

Implemented over PKCS#11 by `pkcs11_hsm.py` and, for faults that a real token cannot be made to show on demand, by a fake
in the tests that passes the same contract tests. No method ever returns the bytes of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from keyvault.errors import UnwrapRejected

if TYPE_CHECKING:  # whoever only names keys need not load numpy
    from keyvault.locked import LockedBuffer

DEFAULT_RING = "main"
"""The ring of every tenant that has none of its own."""


class KeyName(StrEnum):
    """Long-lived keys by purpose: one key, one use (SP 800-57 Part 1, 5.2). The label inside the token is the value."""

    RECORD_MAC = "record-mac"  # AES-CMAC over wrapped-key records and authority rows
    TOKEN_SIGNER = "token-signer"  # noqa: S105 — a label; P-256: access tokens
    PROVENANCE_SIGNER = "provenance-signer"  # P-256: receipts
    SITE_IDENTITY = "site-identity"  # P-256: sync statements
    AUDIT_PSEUDONYM = "audit-pseudonym"  # HMAC-SHA256: pseudonyms in log leaves
    AUDIT_DETAIL = "audit-detail"  # AES-256-GCM: details beside the leaves
    CHECKPOINT_SIGNER = "checkpoint-signer"  # Ed25519, log token
    CERTIFICATE_AUTHORITY = "certificate-authority"  # P-256, officer token


ROTATING = (KeyName.TOKEN_SIGNER, KeyName.PROVENANCE_SIGNER)
"""Signing keys of the serving token that have versions. The first one's label is the name alone, as tokens hold it from before."""
VERSIONED = (*ROTATING, KeyName.CHECKPOINT_SIGNER)
"""These and the audit log's, whose versions follow each other by a hand-over in the log itself."""


def signer_label(key: KeyName, version: int) -> str:
    """The label of one version of a signing key inside the token."""
    return key.value if version == 1 else f"{key.value}/{version}"


@dataclass(frozen=True, order=True)
class RingMaster:
    """A master key (KEK) version of a ring. Version numbers start at 1 and are never used again."""

    ring: str
    version: int

    @property
    def label(self) -> str:
        return f"ring/{self.ring}/{self.version}"

    @classmethod
    def named(cls, label: str) -> RingMaster:
        """The master of this label. Raises ValueError for a label that is none."""
        kind, _, rest = label.partition("/")
        ring, _, version = rest.rpartition("/")
        if kind != "ring" or not ring or not version.isdecimal():
            raise ValueError(f"{label!r} is no ring master's label")
        return cls(ring, int(version))


class NewDek(Protocol):
    """A voice's AES-256 key just made in the token, for sealing only, until the `with` block ends."""

    @property
    def wrapped(self) -> bytes:
        """The key wrapped under its ring master (AES key wrap, RFC 3394)."""

    def seal(self, plaintext: LockedBuffer, length: int, aad: bytes) -> bytes:
        """AES-256-GCM of the first `length` bytes, read from the locked buffer by pointer: nonce(12) | ciphertext | tag(16)."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """Data under a voice's key, nonce(12) | ciphertext | tag(16), and where its plaintext goes: to `target` from `offset` on."""

    data: bytes
    aad: bytes
    target: LockedBuffer
    offset: int = 0


class OpenDek(Protocol):
    """A voice's key unwrapped in the token, for opening only, until the `with` block ends."""

    def open_into(self, sealed: bytes, aad: bytes, target: LockedBuffer, offset: int = 0) -> int:
        """Decrypt straight into `target` at `offset`; returns the length. Raises SealBroken, and leaves zeros there."""


@dataclass
class Figures:
    """What happened to a token's sessions since this process opened it: counts, and nothing of what was done in them."""

    sessions_replaced: int = 0
    """Sessions that were lost one by one."""
    recoveries: int = 0
    """Times that the module was initialized and logged in anew."""
    timeouts: int = 0
    """Calls that hung longer than they may."""


class Hsm(Protocol):
    """One token, logged in once for the life of the process. Methods may be called from any thread."""

    def masters(self) -> tuple[RingMaster, ...]:
        """Ring masters that the token holds, TRUSTED and checked at start, in order."""

    def new_dek(self, master: RingMaster) -> AbstractContextManager[NewDek]:
        """Make a DEK as a session object and wrap it under `master`; destroyed when the block ends. Raises KeyNotFound."""

    def open_dek(self, master: RingMaster, wrapped: bytes) -> AbstractContextManager[OpenDek]:
        """Unwrap with the full template, for a probe; destroyed when the block ends. Raises KeyNotFound, UnwrapRejected."""

    def open_recorded(
        self, master: RingMaster, wrapped: bytes, sealed: Sequence[Sealed], record: bytes, permit: Callable[[bytes], None]
    ) -> None:
        """A stored key's data opened in one visit to the token: `record` gets its MAC of RECORD_MAC, `permit` is called with it,
        the key is unwrapped, the data decrypted each to its place, the key destroyed.

        `permit` is the last thing before C_UnwrapKey: what it raises, nothing is unwrapped for. It may be called again where a
        session is lost meanwhile, and must not use the token. Raises KeyNotFound, UnwrapRejected, SealBroken: zeros then stand
        in every place.
        """

    def rewrap(self, wrapped: bytes, source: RingMaster, target: RingMaster) -> bytes:
        """The same DEK under another master, inside the token. Raises KeyNotFound, UnwrapRejected, and RotationPinNeeded in a
        token whose masters are not TRUSTED: there another token does it."""

    def rewrap_many(self, wrapped: Sequence[bytes], source: RingMaster, target: RingMaster) -> list[bytes | UnwrapRejected]:
        """`rewrap` of each, on one session, in order: the new blob, or why the token refused this one.

        Raises KeyNotFound, HsmUnavailable, RotationPinNeeded: then none of it counts.
        """

    def mac(self, key: KeyName, data: bytes) -> bytes:
        """AES-CMAC (16 bytes) with RECORD_MAC, HMAC-SHA256 (32 bytes) with AUDIT_PSEUDONYM."""

    def mac_many(self, key: KeyName, data: Sequence[bytes]) -> list[bytes]:
        """`mac` of each, in order, without giving the session back between them."""

    def sign(self, key: KeyName, data: bytes, version: int = 1) -> bytes:
        """P-256 keys: ECDSA over SHA-256, low-S, raw r||s (64 bytes). Ed25519 keys: RFC 8032 (64 bytes).

        Raises KeyNotFound for a version that the token does not hold.
        """

    def public_key(self, key: KeyName, version: int = 1) -> bytes:
        """SubjectPublicKeyInfo, DER, as it stands in the token now. Raises KeyNotFound."""

    def seal(self, key: KeyName, plaintext: bytes, aad: bytes) -> bytes:
        """AES-256-GCM under a key that stays in the token (AUDIT_DETAIL): nonce(12) | ciphertext | tag(16)."""

    def unseal(self, key: KeyName, sealed: bytes, aad: bytes) -> bytes:
        """Open what `seal` made. Raises SealBroken."""

    def random(self, length: int) -> bytes:
        """Random bytes from the token."""

    @property
    def figures(self) -> Figures:
        """What happened to its sessions so far."""

    def close(self) -> None:
        """Log out and let the module go. Idempotent."""


class Canary(Protocol):
    """A random AES session key that proves, by equal CMACs, that two tokens hold the same master; gone when the block ends."""

    @property
    def blob(self) -> bytes:
        """The session key wrapped under the master."""

    def mac(self, data: bytes) -> bytes:
        """AES-CMAC of `data` under the session key, 16 bytes."""


class SiteHsm(Hsm, Protocol):
    """What hsm-sync/1 and the life of a master ask of a token, beyond serving."""

    def held(self) -> Mapping[str, tuple[str, ...]]:
        """Every TRUSTED ring master that is in the token now, by label, with the attributes that both sites must agree on
        ("EXTRACTABLE=0", "TRUSTED=1", …), sorted. What differs by birthplace (LOCAL, ALWAYS_SENSITIVE) is left out."""

    def refresh(self, allowed: Sequence[RingMaster], required: Sequence[RingMaster]) -> None:
        """Audit the token again, probe masters that are new, and serve with what it holds: after a ceremony or a destruction.

        Raises PromiseBroken for a TRUSTED object beyond `allowed`, KeyNotFound for a `required` one that is missing; what
        `masters` answers stays as it was then.
        """

    def new_canary(self, master: RingMaster) -> AbstractContextManager[Canary]:
        """Make a session key and wrap it under `master`. Raises KeyNotFound."""

    def open_canary(self, master: RingMaster, blob: bytes) -> AbstractContextManager[Canary]:
        """Unwrap the other site's session key, for signing only. Raises KeyNotFound, UnwrapRejected."""

    def dek_mac(self, master: RingMaster, wrapped: bytes, data: bytes) -> bytes:
        """AES-CMAC (16 bytes) of `data` under a wrapped DEK, unwrapped for signing only: two sites compare what they hold.

        Raises KeyNotFound, UnwrapRejected.
        """

    def anchors(self) -> tuple[bytes, ...]:
        """The values of the token's anchor objects (private CKO_DATA), in no order."""

    def replace_anchors(self, anchor: bytes) -> None:
        """Write a new anchor object, then destroy the others: a crash between leaves both, and the highest counts."""

    def signer_versions(self, key: KeyName) -> tuple[int, ...]:
        """Which versions of a signing key have any object in the token now, in order."""

    def make_signer(self, key: KeyName, version: int) -> bytes:
        """Generate one more version of a key of VERSIONED in the token; its public half. Raises CeremonyRefused if it is there."""

    def destroy_signer(self, key: KeyName, version: int) -> None:
        """Destroy both halves, and look again in a new session that nothing is left. Idempotent. Raises HsmUnavailable if not."""

    def destroy_master(self, master: RingMaster) -> None:
        """Destroy every object of this master, clones too, and look again in a new session that none is left.

        Idempotent. Raises HsmUnavailable where one is still there.
        """
