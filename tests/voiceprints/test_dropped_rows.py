"""Whoever owns the database can let a trigger drop new rows: then nothing is enrolled, and nothing is taken for written."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sound import flac, samples

from keyvault.errors import RowChanged
from policies import errors
from voiceprints.errors import VoiceprintsUnavailable

DROPPED = {"voiceprint": VoiceprintsUnavailable, "wrapped_key": RowChanged, "voice": errors.RowChanged}


@pytest.mark.parametrize("table", DROPPED)
def test_a_row_that_a_trigger_drops_is_not_taken_for_written(vault, table):
    with vault.database.begin() as connection:
        connection.execute(sa.text("CREATE FUNCTION evil() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$"))
        connection.execute(sa.text(f"CREATE TRIGGER evil BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION evil()"))
    with pytest.raises(DROPPED[table]):
        vault.enrol([samples(flac("1998", number)) for number in (1, 2)])
    with vault.database.connect() as connection:
        for name in DROPPED:
            assert connection.scalar(sa.text(f"SELECT count(*) FROM {name}")) == 0
