"""`glottis verify`: the two sites' history, checked with public keys alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import click

from keyvault.sync.errors import CertificateInvalid, StatementMalformed
from keyvault.sync.roster import Roster
from keyvault.sync.verify import Summary, rosters, verify_certificates
from policies.audit.verify import Report, VerificationFailed, Verifier
from policies.witness.cosigning import cosigner_of
from service.cli.main import say_json
from service.errors import RecordsTampered
from service.officers import fingerprint

_NAMED = re.compile(r"0*([1-9][0-9]*)\.certificate")


@click.command()
@click.option(
    "--certificates",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="A folder with one file an epoch, EPOCH.certificate: `glottis site verify --save DIR` writes it.",
)
@click.option(
    "--roster",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="The roster that the cluster began with: the file `roster` of either site's state folder.",
)
@click.option(
    "--audit",
    "bundle",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An audit bundle of either site too: how far the other one's HSM co-signed it. Needs --fingerprint.",
)
@click.option("--fingerprint", "pinned", metavar="HEX", help="With --audit: the fingerprint of that log's key, from elsewhere.")
@click.option("--json", "as_json", is_flag=True, help="Print what holds as JSON.")
def verify(folder: Path, roster: Path, bundle: Path | None, pinned: str | None, as_json: bool) -> None:
    """Check what both HSMs and the officers signed, epoch by epoch. Needs no HSM, no database and no trust in who runs Glottis.

    The roster is the anchor: compare its fingerprint, which is printed, with one that you got elsewhere. Ends with 3 where
    anything does not hold.
    """
    if (bundle is None) != (pinned is None):
        raise click.UsageError("--audit and --fingerprint go together.")
    anchor = roster.read_bytes()
    try:
        found = verify_certificates(in_order(folder), anchor)
    except StatementMalformed as error:
        raise CertificateInvalid(f"{roster} is no roster: {error}") from error
    log = None if bundle is None or pinned is None else _log(bundle, pinned, rosters(in_order(folder), Roster.decode(anchor)))
    facts = _facts(found, anchor) | ({} if log is None else {"log": log._asdict()})
    if as_json:
        say_json(facts)
        return
    click.echo(f"roster {fingerprint(anchor)}, cluster {found.cluster}: compare the fingerprint")
    click.echo(f"{found.completed} transactions and {found.void} void epochs hold, up to epoch {found.epoch}")
    for record in found.records:
        click.echo(f"  {record.name}: {record.state}, held by {', '.join(record.holders) or 'nobody'}")
    if log is not None:
        by = ", ".join(f"{size} by {name}" for name, size in log.cosigned.items()) or "nothing by the other site"
        click.echo(f"log {log.origin} holds, {log.size} entries; co-signed up to {by}")
    for mark in found.marks:
        click.echo(f"  done by officers with one site: {mark}")


def _log(bundle: Path, pinned: str, known: Sequence[Roster]) -> Report:
    """What the bundle proves, with the co-signatures of every HSM that the history names. Raises RecordsTampered."""
    cosigners = {cosigner_of(roster, name) for roster in known for name in roster.names}
    try:
        with bundle.open("rb") as file:
            return Verifier(pinned, cosigners=sorted(cosigners)).verify(file)
    except VerificationFailed as failed:
        raise RecordsTampered(f"the audit bundle does not hold: {failed}") from failed


def in_order(folder: Path) -> list[bytes]:
    """The certificates by the number in their names. Raises CertificateInvalid where two files claim one epoch."""
    numbered: dict[int, Path] = {}
    for path in folder.iterdir():
        named = _NAMED.fullmatch(path.name)
        if named is None:
            continue
        epoch = int(named.group(1))
        if epoch in numbered:
            raise CertificateInvalid(f"two files are named for epoch {epoch}")
        numbered[epoch] = path
    if not numbered:
        raise click.UsageError(f"{folder} holds no file EPOCH.certificate")
    return [numbered[epoch].read_bytes() for epoch in sorted(numbered)]


def _facts(found: Summary, anchor: bytes) -> dict[str, object]:
    records = [{"name": record.name, "state": record.state.value, "holders": list(record.holders)} for record in found.records]
    return {
        "holds": True,
        "cluster": found.cluster,
        "roster_sha256": sha256(anchor).hexdigest(),
        "epoch": found.epoch,
        "head": found.head.hex(),
        "completed": found.completed,
        "void": found.void,
        "marks": list(found.marks),
        "keys": records,
    }
