"""The certificate of erasure: what was erased, how far, and which HSM says so. Made at a site, checked anywhere.

One JSON document: `erasure` holds the fields, `digests` the SHA-256 of each field's canonical JSON together with its name, and
`signatures` each site's ECDSA P-256 signature over the canonical JSON of the digests. So a changed field is named, and a
changed digest breaks every signature. Checking needs public keys alone: the roster, and for the destruction of ring versions
the sites' own history, which the certificate quotes by epoch and SHA-256.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from keyvault.errors import KeyVaultError
from keyvault.records import RingVersion, Tombstone
from keyvault.states import KeyState
from keyvault.sync.errors import SignatureInvalid
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import Sign, Verify, verify_p256
from keyvault.sync.statement import Certificate
from keyvault.sync.verify import verify_certificates
from keyvault.tombstones import MISSING
from policies.audit.verify import canonical_json, strict_json
from voiceprints.errors import ErasureCertificateInvalid

MAX_BYTES = 1 << 20
_FORMAT = "glottis_erasure_certificate"
_DOMAIN = b"glottis-erasure-certificate/1\n"
_FIELDS = frozenset(
    {"cluster", "site", "sites", "voice", "tenant", "keys", "ring_versions", "stage"}
    | {"erased_at", "peer_erased_at", "shredded_at", "issued_at", "not_covered"}
)
NOT_COVERED = (
    "recordings of the speaker that were kept outside Glottis, and speech that was made before the erasure",
    "copies of the database that other systems keep: they open the voice until the stage is shredded, and not after it",
    "the consent and its evidence, which stay as the record of what was allowed",
)


@dataclass(frozen=True)
class Destruction:
    """Where the sites' history says that a version was destroyed. `at`: when the epoch closed at the site that certifies."""

    epoch: int
    certificate_sha256: str
    at: datetime | None


def destructions(history: Sequence[bytes], closed: Mapping[int, datetime]) -> dict[str, Destruction]:
    """By label (`ring/main/1`), from the certificates of the sites' history in order."""
    found: dict[str, Destruction] = {}
    for data in history:
        proposal = Certificate.decode(data).proposal
        for record in proposal.records if proposal else ():
            if proposal and record.state is KeyState.DESTROYED and record.name not in found:
                epoch = proposal.manifest.epoch
                found[record.name] = Destruction(epoch, sha256(data).hexdigest(), closed.get(epoch))
    return found


def replaced_sites(history: Sequence[bytes]) -> list[str]:
    """What officers did without one of the sites: its token may still hold what was destroyed elsewhere."""
    proposals = [proposal for data in history if (proposal := Certificate.decode(data).proposal)]
    acts = [proposal.manifest for proposal in proposals if proposal.manifest.op.by_officers]
    return [f"a site's own token, where officers ended its part alone: epoch {act.epoch}, {act.op}, {act.reason}" for act in acts]


def fields_of(
    stone: Tombstone, versions: Sequence[RingVersion], history: Sequence[bytes], closed: Mapping[int, datetime], roster: Roster
) -> dict[str, Any]:
    """What one site can say of an erasure, but for who says it and when. The rows' MACs were checked before."""
    known, destroyed = {version.version: version for version in versions}, destructions(history, closed)
    ring_versions = []
    for number in range(stone.first_ring_version, stone.last_ring_version + 1):
        state = known[number].state.value if number in known else "unknown"
        gone = destroyed.get(f"ring/{stone.ring}/{number}") if state == KeyState.DESTROYED else None
        where = {"epoch": gone.epoch, "certificate_sha256": gone.certificate_sha256} if gone else {}
        at = {"destroyed_at": _time(gone.at)} if gone and gone.at else {}
        ring_versions.append({"name": f"ring/{stone.ring}/{number}", "state": state, **where, **at})
    return {
        "cluster": roster.cluster,
        "sites": list(roster.names),
        "voice": str(stone.voice),
        "tenant": stone.tenant,
        "keys": [{"version": n, "id": None if dek == MISSING else str(dek)} for n, dek in enumerate(stone.dek_ids, start=1)],
        "ring_versions": ring_versions,
        "stage": "erased" if stone.shredded_at is None else "shredded",
        "erased_at": _time(stone.erased_at),
        "peer_erased_at": _time(stone.peer_erased_at),
        "shredded_at": _time(stone.shredded_at),
        "not_covered": [*NOT_COVERED, *replaced_sites(history)],
    }


def issue(fields: Mapping[str, Any], site: str, now: datetime, sign: Sign) -> dict[str, Any]:
    """The document, signed by this site."""
    erasure = {**fields, "site": site, "issued_at": _time(now)}
    digests = {name: _digest(name, value) for name, value in erasure.items()}
    return {_FORMAT: 1, "erasure": erasure, "digests": digests, "signatures": [_signature(digests, site, sign)]}


def countersign(document: bytes, fields: Mapping[str, Any], site: str, roster: Roster, sign: Sign) -> dict[str, Any]:
    """The other site's document with this site's signature, if this site can say the same.

    The same voice, keys and ring versions, and a stage that this site has reached too; times are each site's own. Raises
    ErasureCertificateInvalid with what differs.
    """
    verify(document, roster)
    found: dict[str, Any] = strict_json(document)
    erasure = found["erasure"]
    for name in ("cluster", "voice", "tenant", "keys"):
        if erasure[name] != fields[name]:
            raise ErasureCertificateInvalid(f"this site knows another value of {name}")
    if erasure["stage"] == "shredded" and fields["stage"] != "shredded":
        raise ErasureCertificateInvalid("stage: at this site the voice is not shredded yet")
    mine, theirs = ({entry["name"]: entry["state"] for entry in one["ring_versions"]} for one in (fields, erasure))
    if mine != theirs:
        raise ErasureCertificateInvalid("this site knows another value of ring_versions")
    others = [signature for signature in found["signatures"] if signature["site"] != site]
    return {**found, "signatures": [*others, _signature(found["digests"], site, sign)]}


def verify(
    document: bytes, roster: Roster, history: Sequence[bytes] = (), *, verify_signature: Verify = verify_p256
) -> dict[str, Any]:
    """Check a certificate offline; returns its fields and, under `signed_by`, the sites whose signatures hold.

    `roster` is the anchor: compare its fingerprint. With `history`, the sites' certificates from the first epoch on, each
    destruction is looked up there, and the signers are those of the roster that the history leads to. Raises
    ErasureCertificateInvalid naming what does not hold.
    """
    found = _shaped(document)
    erasure, digests = found["erasure"], found["digests"]
    for name in sorted(erasure.keys() | digests.keys() | _FIELDS):
        if name not in erasure or name not in _FIELDS:
            raise ErasureCertificateInvalid(f"{name}: a field is missing, or is none of a certificate")
        if digests.get(name) != _digest(name, erasure[name]):
            raise ErasureCertificateInvalid(f"{name}: this is not what was signed")
    if history:
        roster = _replayed(history, roster, erasure["ring_versions"])
    signed = [_signer(signature, digests, roster, verify_signature) for signature in found["signatures"]]
    if len(signed) != len(set(signed)) or erasure["site"] not in signed:
        raise ErasureCertificateInvalid("signatures: the site that issued it has not signed it, or one stands twice")
    if erasure["cluster"] != roster.cluster:
        raise ErasureCertificateInvalid("cluster: the roster is another cluster's")
    states = {entry["state"] for entry in erasure["ring_versions"]}
    if erasure["stage"] == "shredded" and (states != {KeyState.DESTROYED.value} or not erasure["shredded_at"]):
        raise ErasureCertificateInvalid("stage: shredded, and not every ring version is destroyed")
    return {**erasure, "signed_by": signed}


def _shaped(document: bytes) -> dict[str, Any]:
    try:
        found = strict_json(document) if len(document) <= MAX_BYTES else None
    except ValueError as error:
        raise ErasureCertificateInvalid(f"the file is no certificate: {error}") from error
    shape = {_FORMAT: int, "erasure": dict, "digests": dict, "signatures": list}
    if not isinstance(found, dict) or found.keys() != shape.keys() or found[_FORMAT] != 1:
        raise ErasureCertificateInvalid("the file is no certificate of erasure")
    for name, kind in shape.items():
        if not isinstance(found[name], kind):
            raise ErasureCertificateInvalid(f"{name}: it has another form")
    if not found["signatures"]:
        raise ErasureCertificateInvalid("signatures: nobody signed this")
    return found


def _signer(signature: Any, digests: Mapping[str, str], roster: Roster, verify_signature: Verify) -> str:
    try:
        site = str(signature["site"])
        raw = base64.b64decode(signature["signature"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ErasureCertificateInvalid("signatures: one has another form") from error
    try:
        verify_signature(roster.public_key(site), _message(digests), raw)
    except SignatureInvalid as error:
        raise ErasureCertificateInvalid(
            f"signatures: {site}'s does not hold: a digest was changed, or another key signed"
        ) from error
    return site


def _replayed(history: Sequence[bytes], roster: Roster, ring_versions: Sequence[Mapping[str, Any]]) -> Roster:
    """The roster that the history leads to, once every destruction that is claimed stands in it."""
    try:
        summary = verify_certificates(history, roster.encode())
    except KeyVaultError as error:
        raise ErasureCertificateInvalid(f"the sites' history does not hold: {error}") from error
    destroyed = destructions(history, {})
    agreed = {record.name for record in summary.records}
    for entry in ring_versions:
        # A number whose transaction came to nothing never was agreed on: it wrapped no key.
        if entry["state"] != KeyState.DESTROYED or (entry["name"] not in agreed and "epoch" not in entry):
            continue
        there = destroyed.get(entry["name"])
        if there is None or (entry.get("epoch"), entry.get("certificate_sha256")) != (there.epoch, there.certificate_sha256):
            raise ErasureCertificateInvalid(f"ring_versions: the sites' history does not say so of {entry['name']}")
    return summary.roster


def _signature(digests: Mapping[str, str], site: str, sign: Sign) -> dict[str, str]:
    return {"site": site, "signature": base64.b64encode(sign(_message(digests))).decode()}


def _message(digests: Mapping[str, str]) -> bytes:
    return _DOMAIN + canonical_json(dict(digests))


def _digest(name: str, value: Any) -> str:
    return sha256(canonical_json([name, value])).hexdigest()


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat(timespec="seconds")
