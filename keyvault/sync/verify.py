"""Check the two sites' history offline: certificates and the first roster, public keys only, no HSM and no database."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keyvault.errors import KeyVaultError
from keyvault.sync.errors import CertificateInvalid
from keyvault.sync.ledger import Ledger
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import Verify, verify_p256
from keyvault.sync.statement import Certificate
from keyvault.sync.table import Records


@dataclass(frozen=True)
class Summary:
    """What a checked history establishes. `void` counts epochs closed by ballots; `marks` is what officers did alone."""

    cluster: str
    epoch: int
    head: bytes
    completed: int
    void: int
    marks: tuple[str, ...]
    roster: Roster
    records: Records


def verify_certificates(certificates: Iterable[bytes], roster: bytes, *, verify: Verify = verify_p256) -> Summary:
    """Check every certificate in order of epoch, from the bytes of the roster that the cluster began with.

    The roster is the trust anchor: compare its SHA-256 with a fingerprint got elsewhere. The approvals' expiry is not
    checked here, for nothing offline says when the sites saw them. Raises CertificateInvalid with the place and the reason
    of the first thing that does not hold.
    """
    given = list(certificates)
    ledger = replay(given, Roster.decode(roster), verify)
    void = sum(Certificate.decode(certificate).proposal is None for certificate in given)
    return Summary(
        ledger.roster.cluster,
        ledger.epoch,
        ledger.head,
        len(given) - void,
        void,
        ledger.marks,
        ledger.roster,
        ledger.records,
    )


def rosters(certificates: Iterable[bytes], roster: Roster, verify: Verify = verify_p256) -> list[Roster]:
    """Every roster that these certificates establish, from the one that the cluster began with; the one in force first.

    Raises CertificateInvalid.
    """
    given, found = list(certificates), [roster]
    replay(given, roster, verify)
    for certificate in given:
        proposal = Certificate.decode(certificate).proposal
        if proposal is not None and proposal.new_roster is not None and proposal.new_roster != found[0]:
            found.insert(0, proposal.new_roster)
    return found


def replay(certificates: Iterable[bytes], roster: Roster, verify: Verify) -> Ledger:
    """The ledger after these certificates. Raises CertificateInvalid naming the first that does not hold."""
    ledger = Ledger.start(roster)
    for number, certificate in enumerate(certificates, start=1):
        try:
            ledger = ledger.accept(Certificate.decode(certificate), verify)
        except KeyVaultError as error:
            place = f"certificate {number}, after epoch {ledger.epoch}"
            raise CertificateInvalid(f"{place}: {error.code}: {error}") from error
    return ledger
