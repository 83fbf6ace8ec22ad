"""`glottis audit`: the check of its records, bundles for auditors, and the fingerprint that they pin."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import click

import policies.audit.verify
from policies.audit.export import Range
from service.audit_bundles import check_records, export_bundle
from service.cli.loading import Listing
from service.cli.main import say_json
from service.cli.output import json_option, say, say_awaiting
from service.errors import RecordsTampered
from service.exits import Ended, Exit
from service.settings import Settings
from service.site import Site
from service.sync.admin import ask

_EXPORT_SECONDS = 600.0
"""How long an export of details may take: to stop waiting would lose what was approved once."""
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group(cls=Listing)
def audit() -> None:
    """Check the audit log, and export it for somebody who checks it without trusting us."""


@audit.command()
@json_option
def check(*, as_json: bool) -> None:
    """Check with the serving token that a vault wrote every record, that none is missing, and that the log holds them so.

    Ends with 3 and names the row if one was added, changed or deleted in the database.
    """
    try:
        rows = check_records(Settings.load(os.environ))
    except RecordsTampered as found:
        if not as_json:
            raise
        say_json({"holds": False, "code": found.code, "said": str(found)})
        raise Ended(Exit.INTEGRITY) from None
    if as_json:
        say_json({"holds": True, "records": rows})
    else:
        click.echo(f"{rows} records: all hold")


@audit.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--from", "start", type=click.IntRange(min=0), default=0, show_default=True, help="First entry.")
@click.option("--to", "end", type=click.IntRange(min=0), default=None, help="Entry after the last; default: all that is signed.")
@click.option(
    "--since", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A checkpoint to prove consistency with."
)
@click.option("--unchecked", is_flag=True, help="Export records that `glottis audit check` does not vouch for.")
@json_option
def export(file: Path, start: int, end: int | None, since: Path | None, *, unchecked: bool, as_json: bool) -> None:
    """Write a bundle: entries as they were hashed, the newest checkpoint, and the proofs.

    First it checks the records (`glottis audit check`) and ends with 3 if one does not hold; --unchecked exports them as they
    are, as evidence. It never overwrites a file.

    Give the auditor the bundle and the verifier (`glottis audit verifier`); the fingerprint
    (`glottis audit fingerprint`) must reach them another way.
    """
    if os.path.lexists(file):
        raise _taken(file)
    settings, kept = Settings.load(os.environ), None if since is None else _text(since)
    if not unchecked:
        check_records(settings)
    try:
        size = export_bundle(settings, file, wanted=Range(start, end), since=kept)
    except FileExistsError:
        raise _taken(file) from None
    facts = {"bundle": str(file), "checkpoint_size": size, "checked": not unchecked}
    if as_json:
        say_json(facts)
    else:
        click.echo(f"{file}: entries up to {size}, under the newest checkpoint")


@audit.command("export-details")
@click.option("--from", "start", type=click.IntRange(min=0), help="First entry.")
@click.option("--to", "end", type=click.IntRange(min=1), help="Entry after the last.")
@click.option("--tenant", default="", help="Only entries about this tenant.  [default: every tenant]")
@click.option("--recipient", type=_FILE, help="Whoever may read them: a P-256 public key (PEM).")
@click.option("--reason", help="Why, in a sentence: officers read it.")
@click.option("--request", metavar="ID", help="Carry request ID out, which officers approved; it works once.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where the sealed bundle goes.")
@json_option
def export_details(
    start: int | None,
    end: int | None,
    tenant: str,
    recipient: Path | None,
    reason: str | None,
    request: str | None,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Open the sealed details of entries, for one recipient's key: who asked, by which keys, about which voice's key.

    First with --from, --to, --recipient and --reason: this asks officers, who sign exactly that, and ends with 75. Once they
    approved, with --request ID and --out FILE: it writes a bundle that only the recipient opens (`glottis audit open-details`).
    The export is an entry of the log itself.
    """
    settings = Settings.load(os.environ)
    if request is not None:
        if out is None:
            raise click.UsageError("--request needs --out FILE, which must not exist yet.")
        # The request is used up by the answer: whether there is a place for it is found out before.
        with _new_file(out) as file:
            done = ask(settings, "details_export", timeout_s=_EXPORT_SECONDS, name=request)
            file.write(done["sealed"].encode())
        say({"bundle": str(out), "entries": done["entries"]}, [f"{out}: details of {done['entries']} entries"], as_json=as_json)
        return
    if start is None or end is None or recipient is None or not reason:
        raise click.UsageError("Name --from, --to, --recipient and --reason, or --request ID.")
    public = recipient.read_text(errors="replace")
    filed = ask(settings, "details_request", start=start, end=end, tenant=tenant, recipient=public, reason=reason)
    say_awaiting(filed, [], filed["request"], filed["needed"], as_json=as_json)


@audit.command("open-details")
@click.argument("file", type=_FILE)
@click.option("--key", type=_FILE, required=True, help="The recipient's private key (PEM).")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Where the bundle goes, in the clear.")
def open_details(file: Path, key: Path, out: Path) -> None:
    """Open the sealed bundle in FILE with the recipient's key: works offline. Check the result with the stand-alone verifier."""
    from service.detail_exports import opened_bundle

    with _new_file(out) as opened:
        opened.write(opened_bundle(file.read_bytes(), key.read_bytes(), None))
    click.echo(f"{out}: python3 VERIFIER {out} --fingerprint HEX")


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that only its owner reads, made now and removed again where the block fails. Raises UsageError where one is there."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise _taken(path) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _taken(path: Path) -> click.UsageError:
    return click.UsageError(f"{path} exists; name another file")


def _text(checkpoint: Path) -> str:
    try:
        return checkpoint.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise click.UsageError(f"--since: {checkpoint} is not a checkpoint: a signed note is text") from None


@audit.command()
@json_option
def fingerprint(*, as_json: bool) -> None:
    """The fingerprint of the key that signs this log: what an auditor pins, once, from a source they trust."""
    site = Site.load(Settings.load(os.environ).site_file)
    facts = {"origin": site.origin, "key": str(site.audit_key), "fingerprint": site.audit_key.fingerprint}
    if as_json:
        say_json(facts)
    else:
        click.echo(site.audit_key.fingerprint)


@audit.command()
@json_option
def cosigner(*, as_json: bool) -> None:
    """The key by which the other site co-signs this log, and how far it did: auditors give it to the verifier (--cosigner).

    Compare it with what the other site's operator reads from the roster: a key that this site alone names proves little.
    """
    found = ask(Settings.load(os.environ), "status")["log"]
    if not found["cosigners"] and not as_json:
        raise click.UsageError("One site has nobody to co-sign its log: a second one does (GLOTTIS_SITES=2).")
    say(found, found["cosigners"], as_json=as_json)
    click.echo(f"co-signed up to {found['cosigned']} of {found['size']} entries", err=True)


@audit.command("cosign-anew")
@click.argument("files", type=_FILE, nargs=-1, required=True)
@json_option
def cosign_anew(files: tuple[Path, ...], *, as_json: bool) -> None:
    """At the other site: co-sign a log that officers let go on from an older end, by the request that they signed.

    FILES are the officers' copies of FILE.log from `glottis restore request`. Without it this site goes on refusing that log
    (log_forked, log_shortened). What it saw before, forks too, is kept.
    """
    given = [base64.b64encode(file.read_bytes()).decode() for file in files]
    done = ask(Settings.load(os.environ), "cosign_anew", requests=given)
    lines = [
        f"{done['origin']}: co-signed from its next checkpoint on" if done["logs"] else f"{done['origin']} was not co-signed here"
    ]
    say(done, lines, as_json=as_json)


@audit.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def verifier(file: Path) -> None:
    """Write the stand-alone verifier: one Python file that needs nothing but Python.

    Use: python3 FILE BUNDLE --fingerprint HEX
    """
    try:
        with file.open("xb") as copy:
            copy.write(Path(policies.audit.verify.__file__).read_bytes())
    except FileExistsError:
        raise _taken(file) from None
    click.echo(f"python3 {file} BUNDLE --fingerprint HEX")
