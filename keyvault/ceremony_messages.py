"""The two-host ceremony's messages: five signed statements that two officers pass to and fro, and the checks of their chain.

The maker's officer plans, the receiver's officer offers a one-time key, the maker sends the wrapped master, the receiver
says what the token holds, the maker closes. Each message repeats the whole plan (cluster, ring, version, roster, both tokens,
both officers), names the digest of the message before, and is signed by its officer's own key. Every file that is passed
holds all messages so far, so that each step checks the whole story and the last file is the transcript. Pure; only public
keys are needed, so anybody can check a transcript offline.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from keyvault.errors import CeremonyMessageInvalid
from keyvault.hsm import RingMaster
from keyvault.sync.errors import SignatureInvalid, StatementMalformed
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import Sign, Verify
from keyvault.sync.wire import Statement, is_digest, require

NONCE = 32
_RING = re.compile("[a-z0-9][a-z0-9-]{0,31}")
_ALWAYS = frozenset({"SENSITIVE=1", "EXTRACTABLE=0", "MODIFIABLE=0"})
_TRUSTED, _SHUT = "TRUSTED=1", "COPYABLE=0"


class Step(StrEnum):
    """The messages in their order."""

    PLAN = "plan"
    OFFER = "offer"
    MASTER = "master"
    RECEIPT = "receipt"
    CLOSE = "close"


ORDER = tuple(Step)
_BY_MAKER = (Step.PLAN, Step.MASTER, Step.CLOSE)
_WITH_CONTENT = (Step.OFFER, Step.MASTER)
_WITH_ATTRIBUTES = (Step.MASTER, Step.RECEIPT)


@dataclass(frozen=True)
class Seat(Statement):
    """One side of the ceremony: which site, which token, and which person sits there."""

    DOMAIN = "ceremony/1/seat"
    site: str
    token_serial: str
    officer: str

    def __post_init__(self) -> None:
        require(bool(self.site and self.token_serial and self.officer), "a seat names a site, a token and an officer")


@dataclass(frozen=True)
class Plan(Statement):
    """What is to be made and by whom. `roster` is the roster's digest; `oaep` the hash of the transport's padding."""

    DOMAIN = "ceremony/1/plan"
    cluster: str
    ring: str
    version: int
    roster: bytes
    maker: Seat
    receiver: Seat
    oaep: str
    begun_at: datetime
    nonce: bytes

    def __post_init__(self) -> None:
        require(_RING.fullmatch(self.ring) is not None, "a ring's name has 1 to 32 characters of a-z, 0-9 and dash")
        require(self.version > 0 and is_digest(self.roster) and len(self.nonce) == NONCE, "a plan has a version and a roster")
        require(self.maker.site != self.receiver.site, "a master is carried from one site to the other")
        require(self.maker.token_serial != self.receiver.token_serial, "two sites have two tokens")
        require(self.maker.officer != self.receiver.officer, "two different officers hold a ceremony")
        require(self.oaep in ("SHA_1", "SHA256"), "OAEP's hash is SHA_1 or SHA256")
        require(self.begun_at.tzinfo is not None, "a plan's time names its zone")

    @property
    def master(self) -> RingMaster:
        return RingMaster(self.ring, self.version)

    def seat(self, step: Step) -> Seat:
        """Who writes this message."""
        return self.maker if step in _BY_MAKER else self.receiver

    def check(self, roster: Roster) -> None:
        """Raise CeremonyMessageInvalid unless this plan is for this roster, its tokens and its officers."""
        if (self.cluster, self.roster) != (roster.cluster, roster.digest):
            raise CeremonyMessageInvalid("the plan was made for another cluster or another roster")
        people = {officer.person for officer in roster.officers}
        tokens = {site.name: site.token_serial for site in roster.sites}
        for seat in (self.maker, self.receiver):
            if tokens.get(seat.site) != seat.token_serial:
                raise CeremonyMessageInvalid(f"the roster knows no token {seat.token_serial} at site {seat.site!r}")
            if seat.officer not in people:
                raise CeremonyMessageInvalid(f"the roster knows no officer {seat.officer!r}")


@dataclass(frozen=True)
class Message(Statement):
    """One message. `previous` is the digest of the one before; `content` the one-time public key (SubjectPublicKeyInfo, DER)
    of an offer or the wrapped master, several where a site has several tokens; `attributes` are what a token says of the master
    that it holds."""

    DOMAIN = "ceremony/1/message"
    plan: Plan
    step: Step
    previous: bytes
    content: bytes
    attributes: tuple[str, ...]

    def __post_init__(self) -> None:
        require(is_digest(self.previous, empty=self.step is Step.PLAN), "a message names the one before it")
        require(self.step is not Step.PLAN or not self.previous, "nothing comes before the plan")
        require(bool(self.content) == (self.step in _WITH_CONTENT), "offer and master carry something, others do not")
        require(bool(self.attributes) == (self.step in _WITH_ATTRIBUTES), "master and receipt name attributes, others do not")
        require(list(self.attributes) == sorted(set(self.attributes)), "attributes are sorted, each once")


@dataclass(frozen=True)
class SignedMessage(Statement):
    """A message and its officer's signature over it."""

    DOMAIN = "ceremony/1/signed"
    message: Message
    signature: bytes

    def check(self, roster: Roster, verify: Verify) -> None:
        """Raise CeremonyMessageInvalid unless the officer of this step signed it, with a key of the roster."""
        step, person = self.message.step, self.message.plan.seat(self.message.step).officer
        for key in (key for officer in roster.officers if officer.person == person for key in officer.keys):
            try:
                return verify(key, self.message.encode(), self.signature)
            except SignatureInvalid:
                continue
        raise CeremonyMessageInvalid(f"the {step} is not signed by {person}")


@dataclass(frozen=True)
class Transcript(Statement):
    """Every message so far, in order. The whole ceremony has five."""

    DOMAIN = "ceremony/1/transcript"
    messages: tuple[SignedMessage, ...]

    def __post_init__(self) -> None:
        require(0 < len(self.messages) <= len(ORDER), "a ceremony has one to five messages")

    @classmethod
    def begun(cls, plan: Plan, sign: Sign) -> Transcript:
        """The plan, signed by the maker's officer."""
        return cls((_signed(Message(plan, Step.PLAN, b"", b"", ()), sign),))

    @classmethod
    def read(cls, data: bytes) -> Transcript:
        """Raises CeremonyMessageInvalid unless these are exactly a transcript's bytes."""
        try:
            return cls.decode(data)
        except StatementMalformed as error:
            raise CeremonyMessageInvalid(f"the file is no whole ceremony message: {error}") from error

    def followed(self, sign: Sign, *, content: bytes = b"", attributes: tuple[str, ...] = ()) -> Transcript:
        """This and the next message, signed."""
        message = Message(self.plan, ORDER[len(self.messages)], self.newest.digest, content, attributes)
        return Transcript((*self.messages, _signed(message, sign)))

    @property
    def plan(self) -> Plan:
        return self.messages[0].message.plan

    @property
    def newest(self) -> Message:
        return self.messages[-1].message

    @property
    def complete(self) -> bool:
        return self.newest.step is Step.CLOSE

    def message(self, step: Step) -> Message:
        """The message of this step, which must be there."""
        return self.messages[ORDER.index(step)].message

    def check(self, roster: Roster, verify: Verify) -> None:
        """Raise CeremonyMessageInvalid naming the first message that does not hold."""
        self.plan.check(roster)
        previous = b""
        for wanted, signed in zip(ORDER, self.messages, strict=False):
            message = signed.message
            if message.step is not wanted:
                raise CeremonyMessageInvalid(f"a {message.step} stands where the {wanted} belongs")
            if message.plan != self.plan:
                raise CeremonyMessageInvalid(f"the {wanted} belongs to another ceremony")
            if message.previous != previous:
                raise CeremonyMessageInvalid(f"the {wanted} answers another message than the one before it")
            signed.check(roster, verify)
            previous = message.digest
        self._check_attributes()

    def check_follows(self, own: Transcript, newest: Step) -> None:
        """Raise CeremonyMessageInvalid unless this is `own` and the messages up to `newest`."""
        if self.messages[: len(own.messages)] != own.messages:
            raise CeremonyMessageInvalid("this answers another ceremony than the one begun here")
        if self.newest.step is not newest:
            raise CeremonyMessageInvalid(f"the {newest} is wanted here, and this ends with the {self.newest.step}")

    def _check_attributes(self) -> None:
        """Both sites hold the same kind of object, shut for good: trusted, or one that cannot even be copied."""
        told = [one.message for one in self.messages if one.message.step in _WITH_ATTRIBUTES]
        for message in told:
            mark = _SHUT if _SHUT in message.attributes else _TRUSTED
            if lacking := sorted({*_ALWAYS, mark} - set(message.attributes)):
                raise CeremonyMessageInvalid(f"by the {message.step}, the token's master is not {', '.join(lacking)}")
            if different := sorted(set(message.attributes) ^ set(told[0].attributes)):
                raise CeremonyMessageInvalid(f"the two tokens hold different objects: {', '.join(different)}")


def _signed(message: Message, sign: Sign) -> SignedMessage:
    return SignedMessage(message, sign(message.encode()))
