"""One value, one spelling: whatever else is not a statement."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sync_world import NOW, PEOPLE, SITES, Node, approve, found_pair, history, make_roster, pair_without_masters, record, rotation

from keyvault.records import canonical
from keyvault.sync.errors import SignatureInvalid, StatementMalformed
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import verify_p256
from keyvault.sync.state import SiteState
from keyvault.sync.statement import Ballot, Certificate, DekRecord, Pending, Proposal, Signed, Status, batch_root
from keyvault.sync.table import Record, merkle_root
from keyvault.sync.wire import Statement, domain_of

# RFC 6962 roots of the first n of these leaves, as published with the Certificate Transparency reference code.
LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


@pytest.mark.parametrize("count", range(9))
def test_roots_are_those_of_rfc_6962(count: int) -> None:
    assert merkle_root([bytes.fromhex(leaf) for leaf in LEAVES[:count]]).hex() == ROOTS[count]


def every_kind() -> list[Statement]:
    a, b = found_pair()
    proposal = rotation(a.ledger, 2)
    operation, approvals = approve("keys.destroy", bytes(32))
    status = Signed.decode(a.site.status(bytes(32), a.token.held()))  # type: ignore[union-attr]
    ballot = Ballot("cluster-1", 3, a.ledger.head, "a", b"")
    return [
        make_roster(),
        proposal,
        proposal.manifest,
        record(1),
        operation,
        approvals[0],
        status,
        Status.decode(status.statement),
        ballot,
        Certificate.decode(history(b)[-1]),
        a.state,
    ]


def test_every_statement_reads_back_as_itself() -> None:
    for statement in every_kind():
        again = type(statement).decode(statement.encode())
        assert again == statement
        assert again.encode() == statement.encode()


def test_every_cut_and_every_addition_is_refused() -> None:
    for statement in every_kind():
        data = statement.encode()
        for wrong in (b"", data[:-1], data + b"\x00", data[:1], data[1:], data + data, b"\x02" + data[1:]):
            with pytest.raises(StatementMalformed):
                type(statement).decode(wrong)


@given(st.data())
def test_a_changed_bit_never_reads_as_the_same_value(data: st.DataObject) -> None:
    original = make_roster()
    bits = bytearray(original.encode())
    at = data.draw(st.integers(0, len(bits) * 8 - 1))
    bits[at // 8] ^= 1 << at % 8
    try:
        changed = Roster.decode(bytes(bits))
    except StatementMalformed:
        return
    assert changed != original
    assert changed.encode() == bytes(bits)


@given(st.binary(max_size=200))
def test_noise_is_refused_and_nothing_else_is_raised(noise: bytes) -> None:
    for kind in (Roster, Certificate, SiteState, Proposal):
        with pytest.raises(StatementMalformed):
            kind.decode(noise)


@pytest.mark.parametrize("number", ["01", "+1", "-1", "1_0", "１", "", "1" * 17])
def test_numbers_have_one_spelling(number: str) -> None:
    good = record(1).encode()
    field = lambda kind, text: kind + len(text).to_bytes(4, "big") + text  # noqa: E731
    assert field(b"i", b"1") in good
    with pytest.raises(StatementMalformed):
        Record.decode(good.replace(field(b"i", b"1"), field(b"i", number.encode())))


def test_a_statement_of_another_kind_is_refused_even_with_equal_fields() -> None:
    ballot = Ballot("cluster-1", 3, bytes(32), "a", b"")
    assert domain_of(ballot.encode()) == Ballot.DOMAIN
    with pytest.raises(StatementMalformed):
        Ballot.decode(canonical("hsm-sync/2/ballot", "cluster-1", 3, bytes(32), "a", b""))
    with pytest.raises(StatementMalformed):
        Ballot.decode(canonical(Ballot.DOMAIN, "cluster-1", "3", bytes(32), "a", b""))
    with pytest.raises(StatementMalformed):
        domain_of(b"\x01")


def test_a_statement_that_claims_to_be_huge_is_refused() -> None:
    with pytest.raises(StatementMalformed):
        Roster.decode(bytes(1 << 23))
    with pytest.raises(StatementMalformed):
        Roster.decode(b"\x01s\xff\xff\xff\xffx")


def test_batches_have_one_order() -> None:
    one, two = (DekRecord(UUID(int=n), 1, "ring/main", 1, bytes(32)) for n in (1, 2))
    assert batch_root((one, two)) == merkle_root([one.encode(), two.encode()])
    for wrong in ((two, one), (one, one), ()):
        with pytest.raises(ValueError, match="sorted"):
            batch_root(wrong)


def test_a_time_of_no_year_is_another_form() -> None:
    said = Pending("ring/main/1", NOW)
    moment = canonical("x", NOW)[len(canonical("x")) :]
    odd = b"0001-01-01T00:00:00+23:59"
    assert moment in said.encode()
    with pytest.raises(StatementMalformed):
        Pending.decode(said.encode().replace(moment, b"t" + len(odd).to_bytes(4, "big") + odd))


def test_signatures_with_another_form_are_refused() -> None:
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    signer, data = SITES["a"], b"statement"
    good = signer(data)
    verify_p256(signer.public, data, good)
    high = good[:32] + (order - int.from_bytes(good[32:], "big")).to_bytes(32, "big")
    for wrong in (high, good[:-1], good + b"\x00", bytes(64), b"", good[32:] + good[:32]):
        with pytest.raises(SignatureInvalid):
            verify_p256(signer.public, data, wrong)
    with pytest.raises(SignatureInvalid):
        verify_p256(signer.public, data + b"!", good)
    with pytest.raises(SignatureInvalid):
        verify_p256(PEOPLE["ada"].public, data, good)
    with pytest.raises(SignatureInvalid):
        verify_p256(b"not a key", data, good)


def test_rosters_that_do_not_hold_together_are_refused() -> None:
    good = make_roster()
    shared = replace(good.officers[1], keys=good.officers[0].keys)
    faults = [
        {"sites": good.sites[::-1]},
        {"sites": ()},
        {"sites": good.sites + make_roster("c").sites},
        {"officers": good.officers[::-1]},
        {"officers": (good.officers[0], shared)},
        {"threshold": 1},
        {"threshold": 5},
        {"cluster": ""},
    ]
    for fault in faults:
        with pytest.raises(ValueError, match=r"."):
            replace(good, **fault)
    assert make_roster("a", threshold=0).development


def test_the_state_hides_nothing_secret_in_its_repr() -> None:
    node: Node = pair_without_masters()[0]
    assert "PRIVATE" not in repr(node.site)
    assert "Signer" not in repr(node.site)
    assert NOW.isoformat() not in node.state.awaiting()
