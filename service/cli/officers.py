"""`glottis officers`: officers' keys, the roster's officers, and changing who they are."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import click
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key, load_pem_public_key

from keyvault.sync.roster import Roster
from service.cli.asking import typed
from service.cli.loading import Listing
from service.cli.output import json_option, say, say_awaiting
from service.errors import OfficerKeyRefused
from service.officers import fingerprint, new_key, read_roster
from service.settings import Settings
from service.sync.admin import ask

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group(cls=Listing)
def officers() -> None:
    """Make an officer's key, and see or change whom the roster names. Officers are people: each has keys of his own."""


@officers.command()
@click.argument("name")
@click.option("--key", type=click.Path(path_type=Path), required=True, help="The key file to make; none is ever replaced.")
@click.option("--passphrase/--no-passphrase", default=True, show_default=True, help="Whether the file is shut by a passphrase.")
@json_option
def new(name: str, key: Path, passphrase: bool, as_json: bool) -> None:
    """Make NAME's signing key on NAME's own console, and print the public key for the roster.

    Read the fingerprint to whoever changes the roster. The key file never leaves this console; a lost one is replaced by a
    roster with a new key.
    """
    words = typed("new passphrase", instead="give --no-passphrase", twice=True) if passphrase else None
    made = new_key(key, words)
    pem = _pem(made.public)
    facts = {"officer": name, "key": str(key), "public_key": pem, "fingerprint": fingerprint(made.public)}
    say(facts, [pem.rstrip(), f"{name}'s key is in {key}; its fingerprint is {facts['fingerprint']}"], as_json=as_json)


@officers.command("list")
@click.option("--roster", type=_FILE, help="Read this file instead of asking the running site.")
@json_option
def list_(roster: Path | None, as_json: bool) -> None:
    """Show the officers of the roster, how many must approve, and each key's fingerprint."""
    known = _roster(roster)
    named = [{"officer": one.person, "fingerprints": [fingerprint(key) for key in one.keys]} for one in known.officers]
    facts: dict[str, Any] = {"officers": named, "threshold": known.threshold, "roster": known.epoch}
    lines = [f"{one['officer']}  {said}" for one in named for said in one["fingerprints"]]
    say(facts, [*lines, f"{known.threshold} must approve (roster {known.epoch})"], as_json=as_json)


@officers.command()
@click.option(
    "--add", "added", nargs=2, type=(str, _FILE), multiple=True, metavar="NAME FILE", help="An officer's public key (PEM)."
)
@click.option("--remove", "removed", multiple=True, metavar="NAME", help="An officer who leaves.")
@click.option("--threshold", type=click.IntRange(min=0), help="How many officers must approve from then on.")
@click.option("--dry-run", is_flag=True, help="Read the keys and show them, and file nothing.")
@json_option
def change(
    added: tuple[tuple[str, Path], ...], removed: tuple[str, ...], threshold: int | None, dry_run: bool, as_json: bool
) -> None:
    """File the request for a roster with other officers, keys or quorum. The officers of today's roster approve it.

    `--add` for an officer of the roster replaces all his keys by those that are given. When enough have approved, carry it out
    with `glottis approvals carry-out ID`. Ends with 75 while officers are awaited.
    """
    if not added and not removed and threshold is None:
        raise click.UsageError("Say what changes: --add, --remove or --threshold.")
    keys: dict[str, list[bytes]] = {}
    for name, path in added:
        keys.setdefault(name, []).append(_public(path))
    shown = [f"{name} gets the key {fingerprint(key)}" for name, given in keys.items() for key in given]
    shown += [f"{name} leaves" for name in removed] + ([f"{threshold} must approve"] if threshold is not None else [])
    if dry_run:
        say({"changes": shown}, shown, as_json=as_json)
        return
    texts = {name: [base64.b64encode(key).decode() for key in given] for name, given in keys.items()}
    filed = ask(Settings.load(os.environ), "approval_roster", add=texts, remove=list(removed), threshold=threshold)
    if not filed["needed"]:
        say(filed, [*shown, f"no officer is needed: glottis approvals carry-out {filed['id'][:16]}"], as_json=as_json)
        return
    say_awaiting(filed, shown, filed["id"], filed["needed"], as_json=as_json)


def _roster(path: Path | None) -> Roster:
    if path is not None:
        return read_roster(path)
    return Roster.decode(base64.b64decode(ask(Settings.load(os.environ), "roster")["roster"]))


def _public(path: Path) -> bytes:
    try:
        key = load_pem_public_key(path.read_bytes())
    except ValueError as error:
        raise OfficerKeyRefused(f"{path} holds no public key in PEM") from error
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _pem(public: bytes) -> str:
    return load_der_public_key(public).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
