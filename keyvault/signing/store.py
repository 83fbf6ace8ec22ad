"""The table of signing keys' versions. Every function works inside the caller's transaction, and none commits it."""

from __future__ import annotations

from dataclasses import fields
from hashlib import sha256
from typing import Any

from sqlalchemy import CheckConstraint, Column, DateTime, Integer, LargeBinary, Row, Table, Text, func, select, update
from sqlalchemy.dialects.postgresql import insert as upsert

from keyvault.database import Transaction, metadata
from keyvault.errors import RecordTampered, RowChanged
from keyvault.hsm import KeyName
from keyvault.records import canonical
from keyvault.signing.versions import SigningKey

signing_key = Table(
    "signing_key",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("public_key", LargeBinary, nullable=False),
    Column("made_at", DateTime(timezone=True), nullable=False),
    Column("signs_at", DateTime(timezone=True), nullable=False),
    Column("retires_at", DateTime(timezone=True)),
    Column("destroyed_at", DateTime(timezone=True)),
    Column("row_version", Integer, nullable=False),
    Column("mac", LargeBinary, nullable=False),
    CheckConstraint("octet_length(mac) = 16", name="mac"),
)


class SigningKeyStore:
    """Rows go out as they lie: whoever uses one checks its MAC first."""

    def lock(self, transaction: Transaction, name: KeyName) -> None:
        """Wait for whoever changes versions of this key, and keep others waiting until `transaction` ends."""
        number = int.from_bytes(sha256(canonical("signing-key-lock", name.value)).digest()[:8], "big", signed=True)
        transaction.execute(select(func.pg_advisory_xact_lock(number)))

    def versions(self, transaction: Transaction, name: KeyName) -> list[SigningKey]:
        """Every version of this key, oldest first."""
        query = select(signing_key).where(signing_key.c.name == name.value).order_by(signing_key.c.version)
        return [_key(row) for row in transaction.execute(query)]

    def add(self, transaction: Transaction, key: SigningKey) -> None:
        """Insert. Raises RowChanged where the version is there already."""
        written = upsert(signing_key).values(_row(key)).on_conflict_do_nothing().returning(signing_key.c.version)
        if transaction.execute(written).one_or_none() is None:
            raise RowChanged(f"{key.text} was written by another transaction")

    def replace(self, transaction: Transaction, old: SigningKey, new: SigningKey) -> None:
        """Compare and swap: `new` stands only if the row is still `old`. Raises RowChanged."""
        c = signing_key.c
        unchanged = (c.name == old.name.value) & (c.version == old.version) & (c.mac == old.mac)
        if transaction.execute(update(signing_key).where(unchanged).values(_row(new))).rowcount != 1:
            raise RowChanged(f"{old.text} was changed by another transaction")


def _row(key: SigningKey) -> dict[str, Any]:
    values = {one.name: getattr(key, one.name) for one in fields(key)}
    return values | {"name": key.name.value}


def _key(row: Row[Any]) -> SigningKey:
    values = dict(row._mapping) | {"public_key": bytes(row.public_key), "mac": bytes(row.mac)}
    try:
        return SigningKey(**values | {"name": KeyName(row.name)})
    except ValueError:
        raise RecordTampered("a stored signing key has a name that is none of ours") from None
