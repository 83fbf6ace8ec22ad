"""Equivocation: two statements that one honest HSM cannot both have signed, found and checked with public keys only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from keyvault.sync.errors import CertificateInvalid
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import Verify
from keyvault.sync.statement import Ballot, Certificate, Evidence, Phase, PhaseStatement, Signed, Status
from keyvault.sync.wire import domain_of

_Claim = tuple[str, str, int]


def find(statements: Iterable[Signed]) -> Evidence | None:
    """The first contradiction among these statements, in their order. Their signatures are not checked here."""
    known: dict[_Claim, tuple[bytes, Signed]] = {}
    for signed in statements:
        for claim, value in _claims(signed):
            said, first = known.setdefault(claim, (value, signed))
            if said != value:
                return Evidence(first, signed)
    return None


def check(evidence: Evidence, roster: Roster, verify: Verify) -> str:
    """The site that contradicts itself. Raises SignatureInvalid, or CertificateInvalid if this is no contradiction."""
    if find([evidence.first, evidence.second]) is None:
        raise CertificateInvalid("these two statements do not contradict each other")
    evidence.first.check(roster, verify)
    evidence.second.check(roster, verify)
    return evidence.first.site


def statements(certificate: Certificate | None) -> tuple[Signed, ...]:
    """Every step and ballot that a certificate carries."""
    if certificate is None:
        return ()
    return (*(endorsement.step for endorsement in certificate.endorsements), *certificate.ballots)


def _claims(signed: Signed) -> Iterator[tuple[_Claim, bytes]]:
    """What a statement says that can be said only once: whom its site voted for, and with what head the epoch closed."""
    domain = domain_of(signed.statement)
    if domain == PhaseStatement.DOMAIN:
        step = PhaseStatement.decode(signed.statement)
        if step.phase is not Phase.OFFICERS:
            yield (signed.site, "vote", step.epoch), step.manifest
        if step.phase in (Phase.ACKNOWLEDGE, Phase.OFFICERS):
            yield (signed.site, "closed", step.epoch), step.manifest
    elif domain == Ballot.DOMAIN:
        ballot = Ballot.decode(signed.statement)
        yield (signed.site, "vote", ballot.epoch), ballot.manifest
    elif domain == Status.DOMAIN:
        status = Status.decode(signed.statement)
        yield (signed.site, "closed", status.epoch), status.head
