"""The ceremony of two officers at two real tokens: it ends in a transcript, or changes nothing that counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ceremony_sites import CeremonySites, make_sites

from keyvault.ceremony_messages import Step, Transcript
from keyvault.errors import CeremonyMessageInvalid, CeremonyRefused
from keyvault.hsm import RingMaster
from keyvault.pin_throttle import OFFICER_FILE
from keyvault.sync.signatures import verify_p256
from service.ceremonies import Offer, TokenPins, play
from service.ceremony_steps import token_process
from service.errors import OfficerKeyRefused, StepFailed
from service.isolation import Account
from service.lone_ceremonies import make_alone, rehearse
from service.settings import Settings
from service.site import Site


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> CeremonySites:
    return make_sites(tmp_path_factory.mktemp("sites"))


def in_token(settings: Settings, ring: str = "main") -> list[int]:
    with token_process(settings, Account.current(), "versions") as token:
        return token.ask(ring=ring, user_pin=settings.serving_pin.read())["versions"]


def pause_is_over(settings: Settings) -> None:
    """As if the pause after a refused PIN had passed."""
    (settings.token_dir("serving") / OFFICER_FILE).unlink()


def never_agreed(_: RingMaster) -> bool:
    return False


def test_two_desks_make_a_master_that_both_tokens_hold(sites: CeremonySites) -> None:
    whole = play(sites.desk("a", "ada"), sites.desk("b", "bo"), "main")
    assert whole.complete
    whole.check(sites.roster, verify_p256)
    assert whole.plan.version == 1
    again = play(sites.desk("b", "cy"), sites.desk("a", "ada"), "main")  # either site may be the maker
    assert again.plan.version == 2
    assert in_token(sites.a) == in_token(sites.b) == [1, 2]
    assert not sites.desk("a", "ada").open_ones()
    assert not sites.desk("b", "bo").open_ones()
    for settings in (sites.a, sites.b):
        kept = (settings.officer_dir / "ceremonies" / "main-2.ceremony").read_bytes()
        assert Transcript.read(kept) == again


def test_a_version_that_was_ever_begun_is_not_used_again(sites: CeremonySites) -> None:
    """B17: a number is used once, also where its ceremony came to nothing."""
    maker, receiver = sites.desk("a", "ada"), sites.desk("b", "bo")
    first = maker.begin("numbers", "bo")
    assert maker.begin("numbers", "bo").plan.version == first.plan.version + 1
    with pytest.raises(CeremonyRefused, match="3 is the lowest"):
        maker.begin("numbers", "bo", version=2)
    with receiver.offer(maker.begin("numbers", "bo", version=9)):
        pass
    with pytest.raises(CeremonyRefused, match="begin with 10"), receiver.offer(first):
        pass
    assert in_token(sites.a, "numbers") == in_token(sites.b, "numbers") == []


def test_a_cut_off_step_is_begun_again(sites: CeremonySites) -> None:
    maker, receiver = sites.desk("a", "ada"), sites.desk("b", "bo")
    plan = maker.begin("again", "bo")
    with receiver.offer(plan) as lost:
        pass  # the console is closed here: the one-time key is gone
    with receiver.offer(plan) as offer:
        with pytest.raises(CeremonyMessageInvalid, match="another ceremony"):
            offer.take(lost_answer(sites, lost))
        received = offer.take(maker.send(offer.message))
    with pytest.raises(CeremonyRefused, match="sent before"):
        maker.send(offer.message)
    with pytest.raises(CeremonyRefused, match="may have been used"), receiver.offer(plan):
        pass
    assert maker.close(received).complete
    assert in_token(sites.b, "again") == [1]


def lost_answer(sites: CeremonySites, lost: Offer) -> Transcript:
    attributes = ("EXTRACTABLE=0", "MODIFIABLE=0", "SENSITIVE=1", "TRUSTED=1")
    return lost.message.followed(sites.keys["ada"], content=b"wrapped", attributes=attributes)


def test_what_came_to_nothing_is_named_and_removed(sites: CeremonySites) -> None:
    maker, receiver = sites.desk("a", "ada"), sites.desk("b", "bo")
    with receiver.offer(maker.begin("half", "bo")) as offer:
        maker.send(offer.message)  # never arrives
    assert [story.newest.step for story in maker.open_ones() if story.plan.ring == "half"] == [Step.MASTER]
    assert in_token(sites.a, "half") == [1]
    with pytest.raises(CeremonyRefused, match="in use"):
        maker.abandon(RingMaster("half", 1), lambda _: True)
    assert maker.abandon(RingMaster("half", 1), never_agreed) == 1
    assert maker.abandon(RingMaster("half", 1), never_agreed) == 0
    assert in_token(sites.a, "half") == []
    assert maker.begin("half", "bo").plan.version == 2
    with pytest.raises(CeremonyRefused, match="no ceremony"):
        maker.abandon(RingMaster("half", 7), never_agreed)


def test_a_whole_ceremony_s_master_is_not_abandoned(sites: CeremonySites) -> None:
    play(sites.desk("a", "ada"), sites.desk("b", "bo"), "kept")
    for site, person in (("a", "ada"), ("b", "bo")):
        with pytest.raises(CeremonyRefused, match="by approval only"):
            sites.desk(site, person).abandon(RingMaster("kept", 1), never_agreed)
    assert in_token(sites.a, "kept") == in_token(sites.b, "kept") == [1]


def test_nothing_else_in_the_token_changes(sites: CeremonySites) -> None:
    """B16: making a master renews no other key, and what was there before still serves."""
    before = everything(sites)
    play(sites.desk("a", "ada"), sites.desk("b", "bo"), "onlythis")
    after = everything(sites)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 2  # one object at each site


def everything(sites: CeremonySites) -> dict[tuple[str, str], bytes]:
    return {
        (settings.site, path.name): path.read_bytes()
        for settings in (sites.a, sites.b)
        for path in settings.token_dir("serving").rglob("*.object")
        if path.name != "token.object"
    }


def test_an_offer_swapped_in_transit_makes_nothing(sites: CeremonySites) -> None:
    """The carrier's own key, signed by whoever he bribed or stole from but the receiver's officer, gets no master."""
    maker, receiver = sites.desk("a", "ada"), sites.desk("b", "bo")
    plan = maker.begin("swap", "bo")
    for person in ("ada", "cy"):
        with pytest.raises(CeremonyMessageInvalid, match="not signed by bo"):
            maker.send(plan.followed(sites.keys[person], content=b"the carrier's key"))
    with receiver.offer(plan) as offer, pytest.raises(CeremonyMessageInvalid):
        maker.send(Transcript.read(offer.message.encode()[:-64] + bytes(64)))
    assert in_token(sites.a, "swap") == []


def test_a_desk_takes_no_seat_that_is_not_its_own(sites: CeremonySites) -> None:
    plan = sites.desk("a", "ada").begin("seats", "bo")
    with pytest.raises(OfficerKeyRefused, match="names bo"), sites.desk("b", "cy").offer(plan):
        pass
    with pytest.raises(CeremonyRefused, match="next step is for the token"), sites.desk("a", "bo").offer(plan):
        pass
    with pytest.raises(CeremonyRefused, match="two different officers"):
        sites.desk("a", "ada").begin("seats", "ada")
    with pytest.raises(CeremonyMessageInvalid, match="no officer"):
        sites.desk("a", "ada").begin("seats", "eve")


def test_a_wrong_officer_s_pin_ends_the_step_and_leaves_nothing(sites: CeremonySites) -> None:
    """A16: one login attempt, no key, and the same step can be done again with the right PIN."""
    maker = sites.desk("a", "ada")
    plan = maker.begin("pins", "bo")
    with pytest.raises(StepFailed, match="refused the security officer's PIN") as refused, sites.desk("b", "bo", "no").offer(plan):
        pass
    assert refused.value.cause == "pin_rejected"
    pause_is_over(sites.b)
    with sites.desk("b", "bo").offer(plan) as offer:
        with pytest.raises(StepFailed, match="security officer"):
            sites.desk("a", "ada", "no").send(offer.message)
        pause_is_over(sites.a)
        assert in_token(sites.a, "pins") == []
        received = offer.take(maker.send(offer.message))
    assert maker.close(received).complete


def test_one_site_makes_its_master_alone(sites: CeremonySites) -> None:
    pins = TokenPins(lambda: "5207-officer", sites.a.serving_pin.read)
    make_alone(sites.a, pins, RingMaster("alone", 1))
    assert in_token(sites.a, "alone") == [1]
    with pytest.raises(StepFailed) as refused:
        make_alone(sites.a, pins, RingMaster("alone", 1))
    assert refused.value.cause == "ceremony_refused"


def test_a_rehearsal_plays_every_part_that_the_roster_has(sites: CeremonySites) -> None:
    made = rehearse(sites.a, sites.roster, sites.keys, "rehearsed")
    assert made == RingMaster("rehearsed", 1)
    assert in_token(sites.a, "rehearsed") == in_token(sites.b, "rehearsed") == [1]
    for settings in (sites.a, sites.b):  # announced, so that processes that start now take the token as it is
        assert made in Site.load(settings.site_file).masters
    alone = replace(sites.roster, sites=sites.roster.sites[:1], threshold=0)
    assert rehearse(sites.a, alone, sites.keys, "rehearsed") == RingMaster("rehearsed", 2)
    assert in_token(sites.b, "rehearsed") == [1]


def test_no_pin_is_written_anywhere(sites: CeremonySites) -> None:
    files = [path for path in sites.folder.rglob("*") if path.is_file() and path.name not in ("pin", "serving.so-pin")]
    assert not [path for path in files if b"5207-officer" in path.read_bytes() or b"8841-serving" in path.read_bytes()]
