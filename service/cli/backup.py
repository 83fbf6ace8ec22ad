"""`glottis backup` and `glottis restore`."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import click

from service import backups, restoring
from service.bringup import embedded_postgres
from service.cli.asking import confirmed
from service.cli.loading import Listing
from service.cli.output import json_option, say
from service.isolation import establish
from service.settings import Settings

_FOLDER = click.Path(path_type=Path)
_roster = click.option("--roster", type=click.Path(path_type=Path), help="The cluster's roster.  [default: this state folder's]")


@click.command()
@click.argument("folder", type=_FOLDER, required=False)
@json_option
def backup(folder: Path | None, as_json: bool) -> None:
    """Back this site up into FOLDER, which must be new: database, token files, roster, transcripts. Glottis must be running.

    The manifest is signed by the HSM and the backup is checked before this says that it is there. PINs and officers' keys are
    not in it: keep them elsewhere, for without the PIN the token files open nothing, and with it they open everything.
    """
    settings = Settings.load(os.environ)
    place = folder or settings.state_dir / "backups" / datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    made = backups.make(settings, embedded_postgres(settings, establish(settings.state_dir, settings.site)), place)
    facts = {"folder": str(made.folder), "site": made.site, "epoch": made.epoch, "manifest": made.digest.hex()}
    say(facts, [f"{made.folder}: site {made.site} at epoch {made.epoch}, manifest {made.digest.hex()[:16]}…"], as_json=as_json)


@click.group(cls=Listing)
def restore() -> None:
    """Put a site back from a backup. Glottis must not be running here.

    `check` a backup, `apply` it, then start. Where it is older than what this site signed for, the start is refused until
    officers adopt it: `request` writes what they sign (`glottis approvals sign`), `adopt` carries it out.
    """


@restore.command()
@click.argument("folder", type=_FOLDER)
@_roster
@json_option
def check(folder: Path, roster: Path | None, as_json: bool) -> None:
    """Check that FOLDER is a whole backup that a site of the cluster signed."""
    found = backups.check(folder, backups.roster_of(Settings.load(os.environ), roster))
    facts = {"site": found.site, "cluster": found.cluster, "epoch": found.epoch, "made_at": found.made_at}
    say(facts, [f"whole: site {found.site}, epoch {found.epoch}, made {found.made_at}"], as_json=as_json)


@restore.command()
@click.argument("folder", type=_FOLDER)
@click.option("--only", type=click.Choice(["database", "tokens"]), help="Put one part back.  [default: both]")
@_roster
@click.option("--dry-run", is_flag=True, help="Check everything and say what would be done.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def apply(folder: Path, only: str | None, roster: Path | None, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Replace this site's database and token files by those in FOLDER; token folders that are here now move aside."""
    settings = Settings.load(os.environ)
    found = backups.check(folder, backups.roster_of(settings, roster))
    parts = [only] if only else ["database", "tokens"]
    facts = {"site": found.site, "epoch": found.epoch, "made_at": found.made_at, "parts": parts}
    if dry_run:
        said = f"{' and '.join(parts)} would be replaced by those of {found.made_at}, epoch {found.epoch}"
        say(facts | {"changed": False}, [said], as_json=as_json)
        return
    if not yes:
        confirmed(f"Replace the {' and the '.join(parts)} of {settings.state_dir}?")
    done = restoring.apply(settings, found, database="database" in parts, tokens="tokens" in parts)
    lines = [f"{' and '.join(parts)} restored", *(f"what was there is in {path}" for path in done.kept)]
    lines += [f"{path} stays as it is: the log went over to a newer key after this backup was made" for path in done.left]
    say(
        facts | {"changed": True, "kept": list(done.kept), "left": list(done.left)},
        [*lines, "now start it: glottis up"],
        as_json=as_json,
    )


@restore.command()
@click.option("--reason", required=True, help="Why, in the requester's words.")
@click.option(
    "--out", type=_FOLDER, required=True, help="Where the request about database and token goes; about the log, FILE.log."
)
@json_option
def request(reason: str, out: Path, as_json: bool) -> None:
    """Write what officers must approve before this site starts, signed by it: each file is one request, for `approvals sign`.

    FILE: that database and token are used together although one is older (`restore.adopt`). FILE.log: that the audit log goes on
    from where the database ends, although it signed another end (`log.reanchor`). What is not needed is not written.
    """
    found = restoring.requests(Settings.load(os.environ), reason)
    places = {"database": out, "log": out.with_name(f"{out.name}.log")}
    for name, data in found.items():
        places[name].write_bytes(data)
    lines = [
        f"{places[name]}: let the officers read and sign it: glottis approvals sign {places[name]} --key KEY" for name in found
    ]
    say({name: str(places[name]) for name in found}, lines, as_json=as_json)


@restore.command()
@click.argument("files", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
@json_option
def adopt(files: tuple[Path, ...], as_json: bool) -> None:
    """Use what is here, as officers approved in FILES (each request, as each of them signed it). Then start: glottis up."""
    done = restoring.adopt(Settings.load(os.environ), [path.read_bytes() for path in files])
    lines = [] if done["epoch"] is None else [f"adopted at epoch {done['epoch']}"]
    if done["recovers_to"]:
        lines.append(f"it serves once it has caught up to epoch {done['recovers_to']} from the other site")
    if done["log"]:
        lines.append(
            f"the log goes on from {done['log']['from']} entries; the checkpoint that was given up is in {done['log']['kept']}"
        )
    say(done, [*lines, "now start it: glottis up"], as_json=as_json)
