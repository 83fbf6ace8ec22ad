"""`SiteHsm` over PKCS#11: keys are named, borrowed sessions do the work, plaintext passes by pointer."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from keyvault import pkcs11_objects, pkcs11_signers, quirks
from keyvault.breaker import Breaker
from keyvault.errors import KeyGone, KeyNotFound, SealBroken, UnwrapRejected
from keyvault.hsm import Canary, Figures, KeyName, NewDek, OpenDek, RingMaster, Sealed, signer_label
from keyvault.hsm_listeners import UNHEARD, Listeners
from keyvault.pkcs11_deks import (
    OpeningDek,
    SealingDek,
    SessionCanary,
    SessionKey,
    open_all,
    open_sealed,
    require_room,
    seal,
    unwrap,
    wipe_all,
)
from keyvault.pkcs11_names import Mechanism, ObjectClass
from keyvault.pkcs11_pool import SessionPool
from keyvault.pkcs11_raw import GCM_NONCE, GCM_TAG
from keyvault.pkcs11_start import Module, TokenConfig, TokenSession, starting_alone
from keyvault.pkcs11_structures import EncodedTemplate
from keyvault.pkcs11_watch import Watch
from keyvault.refusals import Held, audit, probe
from keyvault.templates import KEYS, KeyPlan

_PIECE = 100
"""Re-wraps in one operation on a session: far from what counts as a call that hangs."""

_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


class Pkcs11Hsm:
    """One token behind the `SiteHsm` protocol. Made by `open`; methods may be called from any thread of this process."""

    def __init__(
        self, pool: SessionPool, breaker: Breaker, config: TokenConfig, listeners: Listeners, profile: quirks.Profile
    ) -> None:
        self._token = pool
        self.profile, self._kind = profile, profile.masters(rotation=config.rotation)
        self._breaker = breaker
        self._listeners = listeners
        self._found = Held((), frozenset())
        self._allowed: tuple[RingMaster, ...] = ()
        self._openings = 0
        self._watch = Watch(pool, breaker, config.call_s, listeners.stuck, listeners.worn)

    @classmethod
    def open(
        cls,
        config: TokenConfig,
        pin: str,
        *,
        expected_masters: Sequence[RingMaster],
        required_masters: Sequence[RingMaster] | None = None,
        listeners: Listeners = UNHEARD,
    ) -> Pkcs11Hsm:
        """Start the module, log in once, audit the token and probe what must be refused.

        `required_masters` are all of `expected_masters` unless given. Raises HsmUnavailable, PinRejected, MasterMissing, and
        PromiseBroken where the token holds a TRUSTED object beyond `expected_masters` or an object that is none of ours, two
        keys under one name, or allows what a template forbids; ModuleRefused where it refutes its quirk profile. The module is
        stopped then.
        """
        with starting_alone(config.folder):
            module = Module(config.module, config.folder)
            try:
                profile = quirks.chosen(config.profile, *module.description)
                breaker = Breaker(listeners.breaker)
                hsm = cls(SessionPool(module, config, pin, breaker, listeners.worn), breaker, config, listeners, profile)
            except BaseException:
                module.stop()
                raise
            try:
                hsm.refresh(expected_masters, expected_masters if required_masters is None else required_masters)
                if hsm.masters():
                    with hsm._token.new_session() as session:
                        quirks.require(session, hsm.masters()[-1], profile, hsm._kind)
            except BaseException:
                hsm.close()
                raise
        return hsm

    def masters(self) -> tuple[RingMaster, ...]:
        return self._found.masters

    def refresh(self, allowed: Sequence[RingMaster], required: Sequence[RingMaster]) -> None:
        with self._token.new_session() as session:
            found = audit(session, allowed, required, self._kind)
            for master in found.masters:
                if master not in self._found.masters:
                    probe(session, master, self._kind)
        self._found, self._allowed = found, tuple(allowed)
        self._token.audit = lambda session: audit(session, self._allowed, (), self._kind)

    @property
    def failing(self) -> bool:
        """Whether the circuit breaker is open: calls fail at once, but for one that tries."""
        return self._breaker.open

    @property
    def figures(self) -> Figures:
        return self._token.figures

    @contextmanager
    def new_dek(self, master: RingMaster) -> Iterator[NewDek]:
        with self._made(master, self._kind.new_dek) as (key, wrapped):
            yield SealingDek(key, wrapped)

    @contextmanager
    def open_dek(self, master: RingMaster, wrapped: bytes) -> Iterator[OpenDek]:
        with self._unwrapped(master, wrapped, self._kind.opening) as key:
            yield OpeningDek(key)

    def open_recorded(
        self, master: RingMaster, wrapped: bytes, sealed: Sequence[Sealed], record: bytes, permit: Callable[[bytes], None]
    ) -> None:
        require_room(sealed)
        self._plan(KeyName.RECORD_MAC, Mechanism.AES_CMAC)

        def visit(session: TokenSession) -> None:
            permit(session.calls.sign(session.handle, _known(session, KeyName.RECORD_MAC.value), Mechanism.AES_CMAC, record))
            self._require(master)
            open_all(session, unwrap(session, self._master(session, master), wrapped, self._kind.opening), sealed)

        self._count(1)
        try:
            self._token.run(visit)
        except BaseException:
            wipe_all(sealed)
            raise

    def rewrap(self, wrapped: bytes, source: RingMaster, target: RingMaster) -> bytes:
        (moved,) = self.rewrap_many([wrapped], source, target)
        if isinstance(moved, UnwrapRejected):
            raise moved
        return moved

    def rewrap_many(self, wrapped: Sequence[bytes], source: RingMaster, target: RingMaster) -> list[bytes | UnwrapRejected]:
        self._require(source)
        self._require(target)

        def move(piece: Sequence[bytes]) -> list[bytes | UnwrapRejected]:
            self._count(len(piece))
            return self._token.run(
                lambda session: self._kind.rewrapped(session, self._master(session, source), self._master(session, target), piece)
            )

        return [moved for start in range(0, len(wrapped), _PIECE) for moved in move(wrapped[start : start + _PIECE])]

    def mac(self, key: KeyName, data: bytes) -> bytes:
        return self._sign(key, data, Mechanism.AES_CMAC, Mechanism.SHA256_HMAC)

    def mac_many(self, key: KeyName, data: Sequence[bytes]) -> list[bytes]:
        plan = self._plan(key, Mechanism.AES_CMAC, Mechanism.SHA256_HMAC)

        def make(session: TokenSession, piece: Sequence[bytes]) -> list[bytes]:
            handle, sign = _known(session, key.value, plan.kind), session.calls.sign
            return [sign(session.handle, handle, plan.mechanism, one) for one in piece]

        pieces = (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))
        return [mac for piece in pieces for mac in self._token.run(partial(make, piece=piece))]

    def sign(self, key: KeyName, data: bytes, version: int = 1) -> bytes:
        if version != 1:
            return self._sign_later(key, data, version)
        if KEYS[key].mechanism is Mechanism.ECDSA:
            return _low_s(self._sign(key, hashlib.sha256(data).digest(), Mechanism.ECDSA))
        return self._sign(key, data, Mechanism.EDDSA)

    def _sign_later(self, key: KeyName, data: bytes, version: int) -> bytes:
        """By a version that may have come after the start, or may be gone: that is no loss of the token's."""
        label, mechanism = signer_label(key, version), KEYS[key].mechanism
        signed = hashlib.sha256(data).digest() if mechanism is Mechanism.ECDSA else data
        made = self._token.run(
            lambda session: session.calls.sign(session.handle, session.key(label, ObjectClass.PRIVATE_KEY), mechanism, signed)
        )
        return _low_s(made) if mechanism is Mechanism.ECDSA else made

    def _sign(self, name: KeyName, data: bytes, *mechanisms: Mechanism) -> bytes:
        plan = self._plan(name, *mechanisms)
        return self._token.run(
            lambda session: session.calls.sign(session.handle, _known(session, name.value, plan.kind), plan.mechanism, data)
        )

    def public_key(self, key: KeyName, version: int = 1) -> bytes:
        if version == 1:
            self._plan(key, Mechanism.ECDSA, Mechanism.EDDSA)
        return self._token.run(lambda session: pkcs11_signers.public_key(session, key, version))

    def seal(self, key: KeyName, plaintext: bytes, aad: bytes) -> bytes:
        self._plan(key, Mechanism.AES_GCM)
        if not plaintext:
            raise ValueError("nothing to seal")
        source = ctypes.c_char_p(plaintext)
        address = ctypes.cast(source, ctypes.c_void_p).value or 0
        return self._token.run(
            lambda session: seal(session, _known(session, key.value), aad, address, len(plaintext)),
        )

    def unseal(self, key: KeyName, sealed: bytes, aad: bytes) -> bytes:
        self._plan(key, Mechanism.AES_GCM)
        length = len(sealed) - GCM_NONCE - GCM_TAG
        if length <= 0:
            raise SealBroken("sealed data is too short")
        target = (ctypes.c_ubyte * length)()
        address = ctypes.addressof(target)
        self._token.run(lambda session: open_sealed(session, _known(session, key.value), sealed, aad, address, length))
        return bytes(target)

    def random(self, length: int) -> bytes:
        return self._token.run(lambda session: session.calls.random(session.handle, length))

    def held(self) -> dict[str, tuple[str, ...]]:
        return self._token.run(lambda session: pkcs11_objects.held(session, self._kind))

    @contextmanager
    def new_canary(self, master: RingMaster) -> Iterator[Canary]:
        with self._made(master, self._kind.new_canary) as (key, blob):
            yield SessionCanary(key, blob)

    @contextmanager
    def open_canary(self, master: RingMaster, blob: bytes) -> Iterator[Canary]:
        with self._unwrapped(master, blob, self._kind.signing) as key:
            yield SessionCanary(key, blob)

    def dek_mac(self, master: RingMaster, wrapped: bytes, data: bytes) -> bytes:
        with self.open_canary(master, wrapped) as dek:
            return dek.mac(data)

    def anchors(self) -> tuple[bytes, ...]:
        return tuple(self._token.run(pkcs11_objects.anchors).values())

    def replace_anchors(self, anchor: bytes) -> None:
        self._token.run(lambda session: pkcs11_objects.replace_anchors(session, anchor))

    def signer_versions(self, key: KeyName) -> tuple[int, ...]:
        return self._token.run(lambda session: pkcs11_signers.versions(session, key))

    def make_signer(self, key: KeyName, version: int) -> bytes:
        with self._token.new_session() as session:  # not tried twice: what a first try left would look like a key of that name
            return pkcs11_signers.make(session, key, version)

    def destroy_signer(self, key: KeyName, version: int) -> None:
        self._token.run(lambda session: pkcs11_signers.destroy(session, key, version))
        with self._token.new_session() as session:
            pkcs11_signers.require_gone(session, key, version)

    def destroy_master(self, master: RingMaster) -> None:
        kept = tuple(served for served in self._found.masters if served != master)
        self._found = Held(kept, self._found.names - {master.label})  # nothing new begins with it
        self._token.run(lambda session: pkcs11_objects.destroy_master(session, master))
        with self._token.new_session() as session:
            pkcs11_objects.require_gone(session, master)

    def close(self) -> None:
        self._watch.stop()
        self._token.close()

    @contextmanager
    def _made(
        self, master: RingMaster, make: Callable[[TokenSession, int], tuple[int, bytes]]
    ) -> Iterator[tuple[SessionKey, bytes]]:
        """A session key just made, and the same wrapped, until the block ends."""
        self._require(master)
        self._count(1)
        home, (handle, wrapped) = self._token.run(lambda session: (session, make(session, self._master(session, master))))
        with SessionKey(self._token, handle, home) as key:
            yield key, wrapped

    def _unwrapped(self, master: RingMaster, wrapped: bytes, template: EncodedTemplate) -> SessionKey:
        """A session key unwrapped: the caller's `with` destroys it."""
        self._require(master)
        self._count(1)
        home, handle = self._token.run(lambda session: (session, unwrap(session, self._master(session, master), wrapped, template)))
        return SessionKey(self._token, handle, home)

    def _count(self, openings: int) -> None:
        """Count session keys made: a module that leaks with each asks for another process after so many."""
        before, limit = self._openings, self._listeners.openings
        self._openings = before + openings  # counts may be lost between threads: the limit is a round number
        if limit is not None and before < limit <= before + openings:
            self._listeners.worn(None)

    def _plan(self, name: KeyName, *mechanisms: Mechanism) -> KeyPlan:
        plan = KEYS[name]
        if plan.mechanism not in mechanisms:
            raise KeyNotFound(f"{name} is not a key for this")
        if name not in self._found.names:
            raise KeyNotFound(f"this token holds no key {name}")
        return plan

    def _master(self, session: TokenSession, master: RingMaster) -> int:
        return _known(session, master.label, trusted=self._kind.marked)

    def _require(self, master: RingMaster) -> None:
        if master not in self._found.masters:
            raise KeyNotFound(f"this token does not serve {master.label}")


def _known(session: TokenSession, label: str, kind: ObjectClass = ObjectClass.SECRET_KEY, *, trusted: bool = False) -> int:
    """The key of this name, which was there at start: that it is gone is the token's fault, not the caller's."""
    try:
        return session.key(label, kind, trusted=trusted)
    except KeyNotFound as error:
        raise KeyGone(f"{label} was in the token at start and is gone") from error


def _low_s(signature: bytes) -> bytes:
    """The one of the two valid signatures whose s is in the lower half, so that a signature cannot be varied by others."""
    s = int.from_bytes(signature[32:], "big")
    return signature[:32] + min(s, _P256_ORDER - s).to_bytes(32, "big")
