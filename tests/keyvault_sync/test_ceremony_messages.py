"""The ceremony's messages: one whole chain holds, and everything else is refused with the message named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_world import NOW, PEOPLE, Signer, make_roster

from keyvault.ceremony_messages import ORDER, Message, Plan, Seat, SignedMessage, Step, Transcript
from keyvault.errors import CeremonyMessageInvalid
from keyvault.sync.signatures import verify_p256

ROSTER = make_roster()
HELD = ("EXTRACTABLE=0", "MODIFIABLE=0", "SENSITIVE=1", "TRUSTED=1")


def plan(nonce: bytes = bytes(32), **changes: object) -> Plan:
    maker, receiver = Seat("a", "serial-a", "ada"), Seat("b", "serial-b", "bo")
    made = Plan(ROSTER.cluster, "main", 2, ROSTER.digest, maker, receiver, "SHA_1", NOW, nonce)
    return replace(made, **changes)  # type: ignore[arg-type]


def held(made: Plan | None = None, upto: Step = Step.CLOSE, **signers: Signer) -> Transcript:
    """The ceremony up to a step, signed by whom the plan names, or by others."""
    made = made or plan()
    ada, bo = (signers.get(name, PEOPLE[name]) for name in ("ada", "bo"))
    story = Transcript.begun(made, ada)
    nexts: list[Callable[[Transcript], Transcript]] = [
        lambda one: one.followed(bo, content=b"one-time key"),
        lambda one: one.followed(ada, content=b"wrapped", attributes=HELD),
        lambda one: one.followed(bo, attributes=HELD),
        lambda one: one.followed(ada),
    ]
    for follow in nexts[: ORDER.index(upto)]:
        story = follow(story)
    return story


def refused(story: Transcript, words: str, roster: object = ROSTER) -> None:
    with pytest.raises(CeremonyMessageInvalid, match=words):
        story.check(roster, verify_p256)  # type: ignore[arg-type]


def swapped(story: Transcript, step: Step, signed: SignedMessage) -> Transcript:
    at = ORDER.index(step)
    return Transcript((*story.messages[:at], signed, *story.messages[at + 1 :]))


def test_a_whole_ceremony_holds_by_public_keys_alone() -> None:
    for step in Step:
        story = Transcript.read(held(upto=step).encode())
        story.check(ROSTER, verify_p256)
        assert story.complete == (step is Step.CLOSE)


def test_a_one_time_key_swapped_in_transit_is_refused() -> None:
    """Whoever carries the offer puts in a key of his own, to be sent the master."""
    story = held(upto=Step.OFFER)
    offer = story.messages[1]
    stolen = replace(offer.message, content=b"the carrier's key")
    refused(swapped(story, Step.OFFER, replace(offer, message=stolen)), "offer is not signed by bo")
    forged = SignedMessage(stolen, Signer()(stolen.encode()))
    refused(swapped(story, Step.OFFER, forged), "offer is not signed by bo")
    # The maker's own officer cannot stand in for the other one either.
    refused(swapped(story, Step.OFFER, SignedMessage(stolen, PEOPLE["ada"](stolen.encode()))), "offer is not signed by bo")


def test_an_answer_of_another_ceremony_is_refused() -> None:
    ours, other = held(upto=Step.OFFER), held(plan(nonce=b"2" * 32), upto=Step.MASTER)
    refused(Transcript((*ours.messages, other.messages[2])), "master belongs to another ceremony")
    # The same plan, begun again with another one-time key: the old answer does not fit the new offer.
    again = held(upto=Step.PLAN).followed(PEOPLE["bo"], content=b"another one-time key")
    refused(Transcript((*again.messages, held(upto=Step.MASTER).messages[2])), "master answers another message")
    with pytest.raises(CeremonyMessageInvalid, match="another ceremony than the one begun here"):
        other.check_follows(ours, Step.MASTER)


def test_a_step_out_of_its_place_is_refused() -> None:
    story = held()
    refused(Transcript((story.messages[0], story.messages[2])), "master stands where the offer")
    refused(Transcript(story.messages[1:]), "offer stands where the plan")
    with pytest.raises(CeremonyMessageInvalid, match="the master is wanted here"):
        story.check_follows(Transcript(story.messages[:2]), Step.MASTER)


def test_officers_who_are_not_the_plan_s_are_refused() -> None:
    refused(held(ada=PEOPLE["cy"]), "plan is not signed by ada")
    refused(held(bo=PEOPLE["cy"]), "offer is not signed by bo")
    refused(held(bo=Signer()), "offer is not signed by bo")
    refused(held(plan(receiver=Seat("b", "serial-b", "eve")), bo=Signer()), "no officer 'eve'")


def test_one_person_does_not_hold_a_ceremony_alone() -> None:
    with pytest.raises(ValueError, match="two different officers"):
        plan(receiver=Seat("b", "serial-b", "ada"))
    with pytest.raises(ValueError, match="one site to the other"):
        plan(receiver=Seat("a", "serial-b", "bo"))
    with pytest.raises(ValueError, match="two tokens"):
        plan(receiver=Seat("b", "serial-a", "bo"))


def test_another_cluster_roster_or_token_is_refused() -> None:
    refused(held(), "another roster", make_roster(epoch=2))
    refused(held(plan(cluster="other")), "another cluster")
    refused(held(plan(maker=Seat("a", "serial-x", "ada"))), "no token serial-x")


def test_tokens_that_hold_different_or_open_objects_are_refused() -> None:
    story = held(upto=Step.MASTER)
    other = story.followed(PEOPLE["bo"], attributes=(*HELD, "WRAP=1"))
    refused(other, "different objects: WRAP=1")
    weak = tuple(one for one in HELD if one != "TRUSTED=1")
    refused(held(upto=Step.OFFER).followed(PEOPLE["ada"], content=b"wrapped", attributes=weak), "not TRUSTED=1")


def test_a_plan_names_its_ring_and_version_well() -> None:
    for changes in ({"ring": "Main"}, {"ring": "a/b"}, {"version": 0}, {"roster": b""}, {"nonce": b""}, {"oaep": "MD5"}):
        with pytest.raises(ValueError):
            plan(**changes)
    with pytest.raises(ValueError):
        plan(begun_at=datetime(2026, 12, 1))  # noqa: DTZ001 — no zone, on purpose


@pytest.mark.parametrize("step", Step)
def test_a_message_carries_exactly_what_its_step_does(step: Step) -> None:
    right = held().message(step)
    for wrong in (
        {"previous": b"" if right.previous else bytes(32)},
        {"content": b"" if right.content else b"more"},
        {"attributes": () if right.attributes else HELD},
        {"attributes": tuple(reversed(right.attributes)) if right.attributes else HELD},
    ):
        with pytest.raises(ValueError):
            replace(right, **wrong)


_WHOLE = held().encode()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(_WHOLE) - 1), st.integers(1, 255))
def test_a_changed_byte_anywhere_is_noticed(at: int, mask: int) -> None:
    changed = bytearray(_WHOLE)
    changed[at] ^= mask
    with pytest.raises(CeremonyMessageInvalid):
        Transcript.read(bytes(changed)).check(ROSTER, verify_p256)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, len(_WHOLE) - 1), st.binary(min_size=1, max_size=64))
def test_a_cut_or_extended_file_is_refused(cut: int, more: bytes) -> None:
    for data in (_WHOLE[:cut], _WHOLE + more):
        with pytest.raises(CeremonyMessageInvalid):
            Transcript.read(data)


def test_a_message_is_no_other_statement() -> None:
    message = held().newest
    assert Message.decode(message.encode()) == message
    with pytest.raises(CeremonyMessageInvalid):
        Transcript.read(message.encode())
