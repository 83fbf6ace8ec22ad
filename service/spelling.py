"""A row as exact bytes for the other site: every field that it has, so that none is forgotten when a row gets another."""

from __future__ import annotations

from dataclasses import dataclass, fields, make_dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, get_type_hints

from keyvault.sync.wire import Statement

Row = TypeVar("Row")


@dataclass(frozen=True)
class Spelling(Generic[Row]):
    """How rows of one kind are spelled, under a domain of their own. Both sites run one release while rows travel: another
    set of fields is refused, and nothing of it is kept."""

    row: type[Row]
    domain: str

    def encode(self, row: Row) -> bytes:
        """The row's exact bytes."""
        return self._statement(**vars(row)).encode()

    def decode(self, data: bytes) -> Row:
        """The row of these bytes. Raises StatementMalformed unless they are exactly what `encode` writes."""
        statement = self._statement.decode(data)
        return self.row(**{field.name: getattr(statement, field.name) for field in fields(statement)})

    @cached_property
    def _statement(self) -> type[Statement]:
        row: Any = self.row
        hints = get_type_hints(row)
        named = [(field.name, hints[field.name]) for field in fields(row)]
        made = make_dataclass(f"{row.__name__}Row", named, bases=(Statement,), namespace={"DOMAIN": self.domain}, frozen=True)
        statement: type[Statement] = made
        return statement
