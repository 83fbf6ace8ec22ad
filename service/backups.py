"""Backups of one site: its database, its token files where the module has files, and what checks them.

A backup is a folder with a manifest that names every file by its SHA-256, signed by the site's HSM. Secrets that open tokens
(PIN files) and keys that can be made anew (TLS) are not in it. A restored site may be older than what it signed for: the
anchor in the HSM and the log's last checkpoint notice that at the next start, and officers decide (`service.restoring`).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from sqlalchemy import make_url

from keyvault.database import SITE_WIDE
from keyvault.records import canonical
from keyvault.sync.errors import SignatureInvalid
from keyvault.sync.roster import Roster
from keyvault.sync.signatures import verify_p256
from service.embedded import EmbeddedPostgres
from service.errors import BackupFailed, BackupRefused
from service.isolation import establish
from service.officers import read_roster
from service.secrets import Secret
from service.settings import Settings
from service.sync.admin import ask

DUMP_OPTIONS = ("--enable-row-security",)
"""The owner of a database is bound by row-level security, as everybody is: its dump is about the whole site, by SITE_WIDE."""
MANIFEST, SIGNATURE, DUMP, FILES = "manifest.json", "manifest.sig", "database.dump", "files.tar"
_FORMAT = 1
_TRIES = 3
_KEPT = ("site.json", "roster", "audit/checkpoint", "audit/hand-overs", "officer/ca.pem", "officer/ceremonies", "tokens")
"""What of a state folder goes into a backup; of `tokens`, everything but PINs."""
_SECRETS = frozenset({"pin", ".starting"})


@dataclass(frozen=True)
class Backup:
    """A checked backup: whose it is, the epoch that its store closed last, and when it was made."""

    folder: Path
    cluster: str
    site: str
    epoch: int
    head: str
    made_at: str
    digest: bytes


def signed_bytes(cluster: str, site: str, manifest: bytes) -> bytes:
    """What a site's HSM signs under a backup's manifest."""
    return canonical("backup/1", cluster, site, sha256(manifest).digest())


def make(settings: Settings, postgres: EmbeddedPostgres | None, folder: Path) -> Backup:
    """Write a backup of this running site into `folder`, which must not exist, and check it.

    The sites may close an epoch meanwhile; then it is made again, so that database and token files belong together. Raises
    BackupFailed, NotRunning.
    """
    for _ in range(_TRIES):
        before = ask(settings, "status")
        _private(folder)
        try:
            _dump(settings, postgres, folder / DUMP)
            _pack(settings, folder / FILES)
            after = ask(settings, "status")
            if before["head"] == after["head"]:
                return _sealed(settings, folder, after)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # half a backup would only stand in the next one's way
            raise
        shutil.rmtree(folder)
    raise BackupFailed("the sites changed their keys each time while the backup was made")


def check(folder: Path, roster: Roster) -> Backup:
    """Every file as the manifest says, and the manifest signed by a site of this roster. Raises BackupRefused naming what fails."""
    try:
        manifest, signature = (folder / MANIFEST).read_bytes(), (folder / SIGNATURE).read_bytes()
        facts: Mapping[str, Any] = json.loads(manifest)
        if facts["format"] != _FORMAT:
            raise BackupRefused(f"{folder} has the format {facts['format']}")
        verify_p256(roster.public_key(facts["site"]), signed_bytes(roster.cluster, facts["site"], manifest), signature)
        for name, digest in facts["files"].items():
            if name not in (DUMP, FILES) or _digest(folder / name) != digest:
                raise BackupRefused(f"{folder / name} is not the file that was backed up")
        digest = sha256(manifest).digest()
        return Backup(folder, facts["cluster"], facts["site"], facts["epoch"], facts["head"], facts["made_at"], digest)
    except SignatureInvalid as error:
        raise BackupRefused(f"{folder}: the manifest is not signed by a site of this roster") from error
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BackupRefused(f"{folder} is no whole backup") from error


def roster_of(settings: Settings, named: Path | None) -> Roster:
    """The roster that a backup is checked against: the one named, or this state folder's own."""
    return read_roster(named or settings.roster_file)


@contextmanager
def unpacked(backup: Backup, into: Path) -> Iterator[Path]:
    """The backup's files in a fresh private folder beside `into`, gone when the block ends."""
    place = into / ".restoring"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    try:
        with tarfile.open(backup.folder / FILES) as archive:
            _require_plain(backup, archive)
            # Pythons before 3.11.4 have no filters; what matters of this one is checked above for all.
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            archive.extractall(place)  # noqa: S202 — every member was checked
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _require_plain(backup: Backup, archive: tarfile.TarFile) -> None:
    """Raise BackupRefused for a member that is no plain file or folder below where the archive is unpacked."""
    for member in archive:
        path = Path(member.name)
        if not (member.isreg() or member.isdir()) or path.is_absolute() or ".." in path.parts:
            raise BackupRefused(f"{backup.folder / FILES} holds {member.name!a}, which is no file of a site")


@contextmanager
def postgres_tool(settings: Settings, postgres: EmbeddedPostgres | None, name: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The command line and variables of `pg_dump` or `pg_restore` for this site's database.

    The embedded server's superuser sees every row; with a database of your own it is the owner's URL. The password travels
    in a file that is gone when the block ends.
    """
    if postgres is None:
        found = shutil.which(name)
        url = make_url(settings.owner_url())
        if found is None:
            raise BackupFailed(f"{name} is not installed", fix="Install the client programs of your Postgres version.")
        program = Path(found)
    else:
        program, url = postgres.program(name), make_url(Secret(settings.superuser_file).read())
    host = dict(parse_qsl(str(url).partition("?")[2])).get("host") or url.host or "localhost"
    secret = settings.run_dir / f".{name}.{os.getpid()}"
    try:
        descriptor = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"*:*:*:*:{str(url.password).replace(chr(92), chr(92) * 2).replace(':', chr(92) + ':')}\n")
        environ = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "PGPASSFILE": str(secret), "PGHOST": host, "PGUSER": str(url.username)}
        environ["PGOPTIONS"] = SITE_WIDE
        yield [str(program)], environ | ({"PGPORT": str(url.port)} if url.port else {})
    finally:
        secret.unlink(missing_ok=True)


def run_tool(argv: list[str], environ: Mapping[str, str]) -> None:
    """Raises BackupFailed with the tool's last line."""
    done = subprocess.run(argv, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BackupFailed(f"{Path(argv[0]).name}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")


def database_name(settings: Settings) -> str:
    """The name of the database that Glottis works in."""
    return str(make_url(settings.owner_url()).database)


def _dump(settings: Settings, postgres: EmbeddedPostgres | None, target: Path) -> None:
    with postgres_tool(settings, postgres, "pg_dump") as (program, environ):
        run_tool([*program, *DUMP_OPTIONS, "--format=custom", f"--file={target}", database_name(settings)], environ)
    target.chmod(0o600)


def _pack(settings: Settings, target: Path) -> None:
    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        kind = entry.isdir() or entry.isreg()
        return entry if kind and Path(entry.name).name not in _SECRETS else None

    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        for name in _KEPT:
            if (settings.state_dir / name).exists():
                archive.add(settings.state_dir / name, name, filter=plain)


def _sealed(settings: Settings, folder: Path, status: Mapping[str, Any]) -> Backup:
    facts = {
        "format": _FORMAT,
        "cluster": status["cluster"],
        "site": status["site"],
        "epoch": status["epoch"],
        "head": status["head"],
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "isolation": establish(settings.state_dir, settings.site).describe(),
        "files": {name: _digest(folder / name) for name in (DUMP, FILES)},
    }
    manifest = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    answer = ask(settings, "seal_backup", manifest=base64.b64encode(manifest).decode())
    (folder / MANIFEST).write_bytes(manifest)
    (folder / SIGNATURE).write_bytes(base64.b64decode(answer["signature"], validate=True))
    return check(folder, roster_of(settings, None))


def _private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise BackupFailed(f"{folder} exists: a backup is never written over", fix="Name a new folder.") from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        summed = sha256()
        while chunk := file.read(1 << 20):
            summed.update(chunk)
    return summed.hexdigest()
