"""What officers and auditors hear of a site's steps: events from the difference of two states. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from keyvault.events import KeyEvent
from keyvault.sync.state import SiteState, Vote
from keyvault.sync.statement import Certificate


def events(before: SiteState | None, after: SiteState) -> Iterator[KeyEvent]:
    """One event for each thing that the state after says and the state before did not."""
    site = after.site
    if before is None:
        yield KeyEvent("sync.founded", {"site": site, "epoch": after.ledger.epoch, "roster": after.ledger.roster.digest.hex()})
        return
    yield from _phases(site, before.vote, after.vote)
    if after.withdrawn and after.withdrawn != before.withdrawn:
        yield KeyEvent("sync.withdrew", {"site": site, "epoch": after.withdrawn})
    if after.last is not None and after.ledger.epoch != before.ledger.epoch:
        yield KeyEvent("sync.closed", {"site": site, **certificate_facts(after.ledger.epoch, after.last)})
    for evidence in after.evidence[len(before.evidence) :]:
        yield KeyEvent("sync.frozen", {"site": site, "accused": evidence.first.site, "evidence": evidence.digest.hex()})
    if held := sorted({*after.quarantined} - {*before.quarantined}):
        yield KeyEvent("sync.quarantined", {"site": site, "versions": " ".join(held)})
    if freed := sorted({*before.quarantined} - {*after.quarantined}):
        yield KeyEvent("sync.released", {"site": site, "versions": " ".join(freed)})


def certificate_facts(epoch: int, certificate: Certificate) -> dict[str, str | int]:
    """A certificate as a log leaf names it: by its epoch, what it is for, the head, and the SHA-256 of its exact bytes."""
    op = str(certificate.proposal.manifest.op) if certificate.proposal else "void"
    digest = sha256(certificate.encode()).hexdigest()
    return {"epoch": epoch, "op": op, "head": certificate.head.hex(), "certificate": digest}


def _phases(site: str, before: Vote | None, after: Vote | None) -> Iterator[KeyEvent]:
    if after is None:
        return
    manifest = after.proposal.manifest
    same = before is not None and before.proposal.manifest == manifest
    facts: dict[str, str | int] = {
        "site": site,
        "epoch": manifest.epoch,
        "op": str(manifest.op),
        "manifest": manifest.digest.hex(),
    }
    if not same:
        yield KeyEvent("sync.prepared", facts)
    if after.commit and not (same and before and before.commit):
        yield KeyEvent("sync.committed", facts)
    if after.acknowledge and not (same and before and before.acknowledge):
        yield KeyEvent("sync.acknowledged", facts)
