"""One site's side of the two-host ceremony: the token's steps, the officer's signature, and what is kept of each version.

The folder `officer/ceremonies/RING-VERSION` holds the newest messages of every version that was ever begun here, so that a
cut-off step can be begun again and no number is used twice. The token works in a child under its owner's account. On one
machine `play` holds both sides.

Where masters are not TRUSTED a site has two tokens to fill, one of them with the rotation PIN: an offer then holds a one-time key
for each, one after the other, and the answer a wrapped master for each. The maker's own rotation token takes part as one more.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from keyvault.ceremony_messages import NONCE, ORDER, Plan, Seat, Step, Transcript
from keyvault.errors import CeremonyRefused
from keyvault.hsm import RingMaster
from keyvault.one_time_keys import apart
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import verify_p256
from service.ceremony_steps import Facts, TokenProcess, token_process
from service.errors import OfficerKeyRefused
from service.isolation import Account, Isolation, establish
from service.officers import OfficerKey, person_of
from service.secrets import Secret
from service.settings import Settings
from service.site import ROTATION, Site, announce

_CEREMONIES = "ceremonies"
OAEP = "SHA_1"  # what SoftHSM 2.6.1 has; a hardware module's site may plan with SHA256


@dataclass(frozen=True)
class TokenPins:
    """Asked for when a step needs them, and kept nowhere. `rotation` is the user's PIN of the token that re-wraps."""

    officer: Callable[[], str] = field(repr=False)
    user: Callable[[], str] = field(repr=False)
    rotation: Callable[[], str] = field(repr=False, default=str)

    @classmethod
    def of_development(cls, settings: Settings) -> TokenPins:
        """Where the development installation keeps them."""
        officer, rotation = settings.officer_dir / "serving.so-pin", settings.pin_file(ROTATION)
        return cls(Secret(officer).read, settings.serving_pin.read, Secret(rotation).read)

    def of(self, token: str, *, split: bool) -> dict[str, str]:
        """What a step at this token is given. Masters that are not TRUSTED need no officer's."""
        user = self.rotation if token == ROTATION else self.user
        return {"so_pin": "" if split else self.officer(), "user_pin": user()}


class Desk:
    """One officer at one site: everything that this side of a ceremony does. Messages go in and out as transcripts so far.

    Every method raises CeremonyMessageInvalid for messages that do not hold, CeremonyRefused where a step does not fit what
    is there, and StepFailed with what the token's step said.
    """

    def __init__(self, settings: Settings, roster: Roster, key: OfficerKey, pins: TokenPins) -> None:
        self._settings, self._roster, self._key, self._pins = settings, roster, key, pins
        self.officer = person_of(key, roster)
        self._isolation: Isolation = establish(settings.state_dir, settings.site)
        self._split = Site.load(settings.site_file).split
        self._tokens = ("serving", ROTATION) if self._split else ("serving",)
        self._folder = settings.officer_dir / _CEREMONIES

    def begin(self, ring: str, receiver: str, version: int | None = None, oaep: str = OAEP) -> Transcript:
        """Plan the next version of `ring`, to be made here and received at the other site by the officer `receiver`."""
        lowest = 1 + max(self._used(ring), default=0)
        if version is not None and version < lowest:
            raise CeremonyRefused(f"version {version} of {ring} may have been used: {lowest} is the lowest that is free")
        others = [site for site in self._roster.sites if site.name != self._settings.site]
        if len(others) != 1:
            raise CeremonyRefused("a ceremony is between the roster's two sites, and this is to be one of them")
        other = others[0]
        seats = (Seat(self._settings.site, self._serial(), self.officer), Seat(other.name, other.token_serial, receiver))
        now, nonce = datetime.now(UTC), os.urandom(NONCE)
        try:
            plan = Plan(self._roster.cluster, ring, version or lowest, self._roster.digest, *seats, oaep, now, nonce)
        except ValueError as error:
            raise CeremonyRefused(f"this cannot be planned: {error}") from error
        plan.check(self._roster)
        return self._kept(Transcript.begun(plan, self._key))

    @contextmanager
    def offer(self, plan: Transcript) -> Iterator[Offer]:
        """Make the one-time key; it lives until the block ends, and in it the maker's answer can be taken."""
        self._require(plan, Step.PLAN, self._seat(plan, Step.OFFER))
        self._require_fresh(plan)
        with ExitStack() as stack:
            tokens, transport = self._receiving(stack, plan, self._tokens)
            yield Offer(self, tokens, self._kept(plan.followed(self._key, content=transport)))

    def send(self, offered: Transcript) -> Transcript:
        """Make the master here and wrap it for the offer, once."""
        self._require(offered, Step.OFFER, self._seat(offered, Step.MASTER))
        kept = self._known(offered.plan.master)
        if kept is None or kept.plan != offered.plan:
            raise CeremonyRefused("this ceremony was not begun here")
        if len(kept.messages) > 1:
            raise CeremonyRefused(f"version {offered.plan.version} was sent before: abandon it and begin a new one")
        theirs = offered.newest.content
        with ExitStack() as stack:
            own, transport = self._receiving(stack, offered, self._tokens[1:])
            wanted = base64.b64encode(theirs + transport).decode()
            pins = self._pins.of("serving", split=self._split)
            said = self._token("send", **_about(offered), **pins, transport=wanted, oaep=offered.plan.oaep)
            wrapped, attributes = base64.b64decode(said["wrapped"]), tuple(said["attributes"])
            each = len(wrapped) // len(apart(theirs + transport))
            end = len(apart(theirs)) * each
            _taken(own, wrapped[end:], attributes)
        return self._kept(offered.followed(self._key, content=wrapped[:end], attributes=attributes))

    def close(self, received: Transcript) -> Transcript:
        """Sign that both tokens hold the master: the transcript is whole."""
        self._require(received, Step.RECEIPT, self._seat(received, Step.CLOSE))
        own = self._known(received.plan.master)
        if own is None:
            raise CeremonyRefused("this ceremony was not begun here")
        received.check_follows(own, Step.RECEIPT)
        return self._kept(received.followed(self._key))

    def keep(self, transcript: Transcript) -> None:
        """Keep the whole transcript at the receiver's site too."""
        transcript.check(self._roster, verify_p256)
        own = self._known(transcript.plan.master)
        if own is not None:
            transcript.check_follows(own, Step.CLOSE)
        self._kept(transcript)

    def abandon(self, master: RingMaster, agreed: Callable[[RingMaster], bool] | None = None) -> int:
        """Destroy what is left here of a ceremony that came to nothing; returns the number of objects. Its number stays used.

        `agreed` says whether the sites' table names this version; None while there is no table yet. Raises CeremonyRefused
        for one that it names (or that this site serves), for one that is whole, and for one that no ceremony began here.
        """
        kept = self._known(master)
        if kept is None:
            raise CeremonyRefused(f"no ceremony of {master.label} was begun here")
        in_use = agreed(master) if agreed else master in Site.load(self._settings.site_file).masters
        if kept.complete or in_use:
            raise CeremonyRefused(f"{master.label} is in use: it is destroyed by approval only, see `glottis keys destroy`")
        about = {"ring": master.ring, "version": master.version}
        return sum(int(self._token("remove", name, **about, user_pin=self._user_pin(name))["objects"]) for name in self._tokens)

    def check(self, story: Transcript) -> None:
        """Raise CeremonyMessageInvalid unless every message so far holds by this desk's roster."""
        story.check(self._roster, verify_p256)

    def announce(self, story: Transcript) -> None:
        """Let this site's processes start with the master in their token, before it is there. Idempotent."""
        self.check(story)
        if self._known(story.plan.master) is None:
            self._require_fresh(story)
            self._kept(story)
        announce(self._settings, establish(self._settings.state_dir, self._settings.site), story.plan.master)

    def open_ones(self) -> list[Transcript]:
        """Ceremonies begun here that are not whole."""
        return open_ones(self._settings)

    def check_answer(self, offered: Transcript, answer: Transcript) -> None:
        """See `Offer.check`."""
        self._require(answer, Step.MASTER, self._seat(answer, Step.RECEIPT))
        answer.check_follows(offered, Step.MASTER)

    def take(self, tokens: Sequence[TokenProcess], offered: Transcript, answer: Transcript) -> Transcript:
        """See `Offer.take`."""
        self.check_answer(offered, answer)
        told = answer.newest
        received = answer.followed(self._key, attributes=_taken(tokens, told.content, told.attributes))
        received.check(self._roster, verify_p256)
        return self._kept(received)

    def _require(self, story: Transcript, newest: Step, seat: Seat) -> None:
        story.check(self._roster, verify_p256)
        story.check_follows(story, newest)
        self._require_token(seat)
        if seat.officer != self.officer:
            raise OfficerKeyRefused(f"the plan names {seat.officer} for this step, and this is a key of {self.officer}")

    def _require_token(self, seat: Seat) -> None:
        if (seat.site, seat.token_serial) != (self._settings.site, self._serial()):
            raise CeremonyRefused(f"the next step is for the token {seat.token_serial} of site {seat.site}")

    def _seat(self, story: Transcript, step: Step) -> Seat:
        return story.plan.seat(step)

    def _require_fresh(self, story: Transcript) -> None:
        """The same plan may be offered for again as long as no master came; any other use of the number is the last."""
        plan, kept = story.plan, self._known(story.plan.master)
        begun_here = kept is not None and kept.plan == plan and len(kept.messages) <= ORDER.index(Step.MASTER)
        used = self._used(plan.ring) - ({plan.version} if begun_here else set())
        if plan.version <= max(used, default=0):
            raise CeremonyRefused(
                f"version {plan.version} of {plan.ring} may have been used here: let the maker begin with {max(used) + 1} or higher"
            )

    def _used(self, ring: str) -> set[int]:
        """Numbers that were ever begun here, that the token holds, or that this site serves."""
        held = {
            number
            for name in self._tokens
            for number in self._token("versions", name, ring=ring, user_pin=self._user_pin(name))["versions"]
        }
        made = {story.plan.version for story in begun(self._settings) if story.plan.ring == ring}
        serving = {master.version for master in Site.load(self._settings.site_file).masters if master.ring == ring}
        return held | made | serving

    def _user_pin(self, name: str) -> str:
        return self._pins.rotation() if name == ROTATION else self._pins.user()

    def _token(self, step: str, name: str = "serving", /, **request: object) -> Facts:
        about = request if name == "serving" else {**request, "token": name}
        with token_process(self._settings, self._isolation.owner(name), step) as token:
            return token.ask(**about)

    def _receiving(self, stack: ExitStack, story: Transcript, names: Sequence[str]) -> tuple[list[TokenProcess], bytes]:
        """A process with a one-time key at each of these tokens, until the stack ends; and their keys, one after the other."""
        tokens, transport = [], b""
        for name in names:
            token = stack.enter_context(token_process(self._settings, self._isolation.owner(name), "receive"))
            pins = self._pins.of(name, split=self._split)
            said = token.ask(**_about(story), **pins, token=name, oaep=story.plan.oaep)
            tokens.append(token)
            transport += base64.b64decode(said["transport"])
        return tokens, transport

    def _serial(self) -> str:
        return Site.load(self._settings.site_file).tokens["serving"].serial

    def _kept(self, story: Transcript) -> Transcript:
        officer = Account.current()
        officer.folder(self._folder)
        officer.file(self._place(story.plan.master), story.encode())
        return story

    def _known(self, master: RingMaster) -> Transcript | None:
        place = self._place(master)
        return Transcript.read(place.read_bytes()) if place.exists() else None

    def _place(self, master: RingMaster) -> Path:
        return self._folder / f"{master.ring}-{master.version}.ceremony"


def open_ones(settings: Settings) -> list[Transcript]:
    """Ceremonies begun at this site that are not whole: what a desk kept, which needs no key to read."""
    return [story for story in begun(settings) if not story.complete]


def begun(settings: Settings) -> list[Transcript]:
    """Every ceremony that was begun in this state folder, in the order of their files. Raises CeremonyMessageInvalid."""
    return [Transcript.read(path.read_bytes()) for path in sorted((settings.officer_dir / _CEREMONIES).glob("*.ceremony"))]


@dataclass(frozen=True)
class Offer:
    """The receiver's half while its one-time key lives. `message` goes to the maker."""

    desk: Desk
    tokens: Sequence[TokenProcess] = field(repr=False)
    message: Transcript

    def check(self, answer: Transcript) -> None:
        """Raise CeremonyMessageInvalid unless this is the maker's answer to this offer. Another may still come."""
        self.desk.check_answer(self.message, answer)

    def take(self, answer: Transcript) -> Transcript:
        """Put the maker's answer into the site's token or tokens: works once. The receipt goes back to the maker."""
        return self.desk.take(self.tokens, self.message, answer)


def _taken(tokens: Sequence[TokenProcess], wrapped: bytes, attributes: tuple[str, ...]) -> tuple[str, ...]:
    """Give each token its part of the answer; what the first says it holds. Raises CeremonyRefused where two hold another kind."""
    each = len(wrapped) // max(1, len(tokens))
    said = [
        tuple(token.ask(wrapped=base64.b64encode(wrapped[at * each : (at + 1) * each]).decode())["attributes"])
        for at, token in enumerate(tokens)
    ]
    if len({*said}) > 1:
        raise CeremonyRefused("the two tokens of this site hold different objects: abandon this version")
    return said[0] if said else attributes


def play(maker: Desk, receiver: Desk, ring: str, version: int | None = None, *, announced: bool = False) -> Transcript:
    """Both sides on one machine, in one go: for development and the demo. Returns the whole transcript, kept at both.

    `announced` lets both sites' processes start with the master in their tokens: once there are such processes.
    """
    plan = maker.begin(ring, receiver.officer, version)
    for desk in (maker, receiver) if announced else ():
        desk.announce(plan)
    with receiver.offer(plan) as offer:
        received = offer.take(maker.send(offer.message))
    whole = maker.close(received)
    receiver.keep(whole)
    return whole


def _about(story: Transcript) -> dict[str, object]:
    return {"ring": story.plan.ring, "version": story.plan.version}
