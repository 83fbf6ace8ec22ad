"""What our re-wrap costs against plain calls: unwrap, wrap, destroy and UPDATE of the same batches, by as many workers.

Called by `bench/hsm.py`. A real token and an embedded Postgres that writes durably are made in a temporary folder. Ours is
`Rewrapping.run` with its record MACs, compare-and-swap and one event a page in the audit log. Its measure is plain ctypes
with every buffer made beforehand and one UPDATE of blob and version a batch, on a table with the same indexes; it reads no
row, checks no MAC and writes none. Both take turns on slices of the keys, so that a busy machine slows both.
"""

from __future__ import annotations

import multiprocessing
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

import pkcs11
import psycopg
from pkcs11 import Attribute as A
from sqlalchemy import create_engine, insert, make_url, text

from bench.lines import report_share
from bench.plain_token import PlainMoves
from keyvault import ceremony, softhsm
from keyvault.database import SITE_WIDE
from keyvault.hsm import RingMaster
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_start import TokenConfig
from keyvault.records import KeyRef, RecordMac, WrappedKey
from keyvault.rings import Rings
from keyvault.rotation import PAGE, Part, Rewrapping
from keyvault.states import KeyState
from keyvault.store import KeyStore, wrapped_key
from policies.audit.store import AuditStore
from service import schema
from service.embedded import SUPERUSER, EmbeddedPostgres
from service.isolation import establish
from service.key_events import KeyEventRecorder

GOAL, WORKERS, SLICES = 0.7, 2, 10
ROWS, QUICK_ROWS, DEKS = 100_000, 6_000, 500
OLD, NEW = RingMaster("main", 1), RingMaster("main", 2)
PIN, SO_PIN = "bench-user", "bench-officer"
_MOVE = """
    UPDATE plain_key AS k SET ring_version = 2, blob = new.blob
    FROM unnest(%s::uuid[], %s::bytea[]) AS new(dek_id, blob) WHERE k.dek_id = new.dek_id
"""


@dataclass(frozen=True)
class Place:
    """Where a worker finds token and database."""

    token: TokenConfig
    url: str


@dataclass
class Spent:
    """Keys moved, and seconds in all, in the token and in the database; of ours, the record MACs apart."""

    keys: int = 0
    all_s: float = 0.0
    token_s: float = 0.0
    macs_s: float = 0.0
    database_s: float = 0.0


class TimedHsm:
    """The token with the time that its work took."""

    def __init__(self, hsm: Pkcs11Hsm, spent: Spent) -> None:
        self._hsm, self._spent = hsm, spent
        self.masters, self.mac = hsm.masters, hsm.mac

    def rewrap_many(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._hsm.rewrap_many(*arguments)
        finally:
            self._spent.token_s += time.perf_counter() - started

    def mac_many(self, *arguments: Any) -> list[bytes]:
        started = time.perf_counter()
        try:
            return self._hsm.mac_many(*arguments)
        finally:
            self._spent.macs_s += time.perf_counter() - started


class TimedStore(KeyStore):
    """The store with the time that its moves took."""

    def __init__(self, spent: Spent) -> None:
        self._spent = spent

    def move_keys(self, *arguments: Any) -> int:
        started = time.perf_counter()
        try:
            return super().move_keys(*arguments)
        finally:
            self._spent.database_s += time.perf_counter() - started


class Ours:
    """A worker of the real re-wrap."""

    def __init__(self, place: Place) -> None:
        self.spent = Spent()
        self._hsm = Pkcs11Hsm.open(place.token, PIN, expected_masters=(OLD, NEW))
        hsm: Any = TimedHsm(self._hsm, self.spent)
        database = create_engine(place.url, connect_args={"options": SITE_WIDE})
        recorder = KeyEventRecorder(AuditStore(database, self._hsm))
        self._rewrapping = Rewrapping(database, hsm, TimedStore(self.spent), recorder, RecordMac(hsm))

    def __call__(self, part: Part) -> None:
        outcome = self._rewrapping.run(self._rewrapping.plan(OLD.ring), part)
        if outcome.bad or outcome.left:
            raise ValueError("a key was not moved")
        self.spent.keys += outcome.moved


class Plain:
    """A worker of plain calls, with the blobs already in memory."""

    def __init__(self, place: Place) -> None:
        self.spent = Spent()
        self._hsm = Pkcs11Hsm.open(place.token, PIN, expected_masters=(OLD, NEW))  # logs the process in
        token = pkcs11.lib(str(place.token.module)).get_token(token_label=place.token.label)
        session = token.open(rw=True)
        ((source,), (target,)) = (list(session.get_objects({A.LABEL: master.label})) for master in (OLD, NEW))
        self._move = PlainMoves(str(place.token.module), session, source, target)
        url = make_url(place.url)
        self._database = psycopg.connect(
            host=str(url.query["host"]), user=url.username, password=str(url.password), dbname=url.database
        )
        self._rows = self._database.execute("SELECT dek_id, blob FROM plain_key ORDER BY dek_id").fetchall()
        self._database.commit()

    def __call__(self, part: Part) -> None:
        rows = [row for row in self._rows if part.first <= row[0] <= part.last]
        for start in range(0, len(rows), PAGE):
            page = rows[start : start + PAGE]
            began = time.perf_counter()
            blobs = [self._move(blob) for _, blob in page]
            between = time.perf_counter()
            self._database.execute(_MOVE, ([dek_id for dek_id, _ in page], blobs))
            updated = time.perf_counter()
            self._database.commit()
            self.spent.token_s += between - began
            self.spent.database_s += updated - between
        self.spent.keys += len(rows)


def work(kind: type[Ours] | type[Plain], place: Place, pipe: Connection) -> None:
    """A worker process: does each part that it is sent, and says what it has spent so far."""
    worker = kind(place)
    pipe.send(worker.spent)
    while (part := pipe.recv()) is not None:
        started = time.perf_counter()
        worker(part)
        worker.spent.all_s += time.perf_counter() - started
        pipe.send(worker.spent)


class Crew:
    """The workers of one kind, and the wall time of their slices."""

    def __init__(self, kind: type[Ours] | type[Plain], place: Place) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(kind, place, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self.spent = [pipe.recv() for pipe in self._pipes]
        self.seconds = 0.0

    def slice(self, number: int) -> None:
        """All workers at once, each on its part of this slice."""
        started = time.perf_counter()
        for index, pipe in enumerate(self._pipes):
            pipe.send(Part(number * WORKERS + index, SLICES * WORKERS))
        self.spent = [pipe.recv() for pipe in self._pipes]
        self.seconds += time.perf_counter() - started

    def stop(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()

    def rate(self, *parts: str) -> float:
        """Keys a second of all workers; by the time of these parts alone, or by the wall."""
        keys = sum(spent.keys for spent in self.spent)
        if not parts:
            return keys / self.seconds
        return keys * WORKERS / sum(getattr(spent, part) for spent in self.spent for part in parts)


def measure_rewrapping(rows: int) -> None:
    """Ours against plain calls, the token's part and the UPDATE's also apart."""
    base = Path(tempfile.mkdtemp(prefix="glottis-bench-"))
    base.chmod(0o711)  # the database's user must get through
    try:
        with _place(base) as place:
            _in_own_process(fill, place, rows)
            ours, plain = Crew(Ours, place), Crew(Plain, place)
            for number in range(SLICES):
                for crew in (ours, plain) if number % 2 else (plain, ours):
                    crew.slice(number)
            for crew in (ours, plain):
                crew.stop()
            report_share("hsm.rewrap", ours.rate(), "keys/s", plain.rate(), GOAL)
            report_share("hsm.rewrap.token", ours.rate("token_s"), "keys/s", plain.rate("token_s"), None)
            report_share("hsm.rewrap.token_with_macs", ours.rate("token_s", "macs_s"), "keys/s", plain.rate("token_s"), None)
            report_share("hsm.rewrap.update", ours.rate("database_s"), "keys/s", plain.rate("database_s"), None)
    finally:
        shutil.rmtree(base, ignore_errors=True)


@contextmanager
def _place(base: Path) -> Iterator[Place]:
    """A token with two masters and a database with every table, serving."""
    token = _in_own_process(make_token, base / "token")
    _in_own_process(add_master, token)
    postgres = EmbeddedPostgres(base / "pg", base / "run", establish(base).database)
    password, roles = secrets.token_hex(16), {role: secrets.token_hex(16) for role in (schema.OWNER, schema.VAULT, schema.LOG)}
    postgres.create(password)
    with postgres.serving(password):
        owner = postgres.url(schema.OWNER, roles[schema.OWNER])
        schema.provision(postgres.url(SUPERUSER, password, "postgres"), owner, roles)
        schema.migrate(owner)
        with schema.opened(owner) as engine, engine.begin() as transaction:
            transaction.execute(text("CREATE TABLE plain_key (LIKE wrapped_key INCLUDING ALL)"))
            transaction.execute(text(f"GRANT SELECT, INSERT, UPDATE ON plain_key TO {schema.VAULT}"))
        yield Place(token, postgres.url(schema.VAULT, roles[schema.VAULT]))


def make_token(folder: Path) -> TokenConfig:
    """A serving token. For a process of its own, as the next ones."""
    module = softhsm.find_module()
    config = TokenConfig(module, "bench", softhsm.make_token(module, folder, "bench", SO_PIN, PIN), folder)
    ceremony.serving_token(config, SO_PIN, PIN)
    return config


def add_master(config: TokenConfig) -> None:
    ceremony.add_master(config, SO_PIN, PIN, NEW)


def fill(place: Place, rows: int) -> None:
    """So many keys under the first master, in both tables; then the second one serves. Few of the blobs differ."""
    hsm = Pkcs11Hsm.open(place.token, PIN, expected_masters=(OLD, NEW))
    mac, store, now, database = (
        RecordMac(hsm),
        KeyStore(),
        datetime.now(UTC),
        create_engine(place.url, connect_args={"options": SITE_WIDE}),
    )
    rings = Rings(hsm, store, KeyEventRecorder(AuditStore(database, hsm)), mac)
    blobs = []
    for _ in range(DEKS):
        with hsm.new_dek(OLD) as dek:
            blobs.append(dek.wrapped)
    with database.begin() as transaction:
        for master, state in ((OLD, KeyState.DEACTIVATED), (NEW, KeyState.ACTIVE)):
            rings.mirror(transaction, master, state, now)
        for start in range(0, rows, PAGE):
            page = [_row(mac, blobs[number % DEKS], now) for number in range(start, min(start + PAGE, rows))]
            transaction.execute(insert(wrapped_key), page)
        transaction.execute(text("INSERT INTO plain_key SELECT * FROM wrapped_key"))
    hsm.close()


def _row(mac: RecordMac, blob: bytes, now: datetime) -> dict[str, Any]:
    key = WrappedKey(KeyRef(uuid4(), 1, OLD.ring, OLD.version), "bench", uuid4(), KeyState.ACTIVE, blob, now, OLD.version)
    names = [column.name for column in wrapped_key.c]
    return dict(zip(names, (*key.fields, mac.make(WrappedKey.DOMAIN, *key.fields)), strict=True))


def _in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
