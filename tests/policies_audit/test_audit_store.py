"""Intents and completions: written whole or not at all, byte for byte, counted without gaps; a change by hand is named."""

import json
import signal
import threading
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest
import sqlalchemy
from audit_parts import Log, intent
from postgres_fixture import PostgresForTests
from sqlalchemy import text

from policies.audit.errors import AuditTampered, AuditUnavailable, CompletionRefused, RecordInvalid
from policies.audit.record import Stamp, body, plain
from policies.audit.store import AuditStore
from policies.audit.verify import canonical_json, commitment


def stored(log: Log, intent_id: UUID) -> bytes:
    return bytes(log.sql("SELECT body FROM intent WHERE intent_id = :id", id=intent_id)[0][0])


def test_a_body_names_no_one_and_gives_no_detail_away(log: Log) -> None:
    raw = stored(log, log.append(tenant="acme-clinic", client_id="reader-1", details={"text_sha256": "cafe" * 16}))
    found = json.loads(raw)
    assert {name: found[name] for name in ("action", "outcome", "purpose", "kind", "v", "counter")} == {
        "action": "voice.open", "outcome": "allowed", "purpose": "speak", "kind": "intent", "v": 1, "counter": 0,
    }  # fmt: skip
    for secret in (b"acme-clinic", b"reader-1", str(UUID(int=7)).encode(), b"cafecafe"):
        assert secret not in raw
    again = json.loads(stored(log, log.append(tenant="acme-clinic", client_id="other")))
    assert again["tenant"] == found["tenant"]  # the same tenant can be followed
    assert again["client"] != found["client"]
    assert found["tenant"] != found["client"]


def test_write_then_read_is_byte_identical(log: Log) -> None:
    composed, decomposed = "Zoë", unicodedata.normalize("NFD", "Zoë")
    details = {"none": None, "empty": "", "zero": 0, "least": -(2**53) + 1, "name": decomposed, "odd": '"\\\u2028\x00\t\U0001f399'}
    intent_id = log.append(action=decomposed, details=details, voice=None)
    raw = stored(log, intent_id)
    assert raw == canonical_json(json.loads(raw))
    found = json.loads(raw)
    assert found["action"] == composed
    assert found["voice"] is None
    shown = log.store.disclose(intent_id)
    assert {name: item["value"] for name, item in shown.items()} == details | {"name": composed}
    for name, item in shown.items():
        assert commitment(bytes.fromhex(item["salt"]), name, item["value"]) == found["details"][name]
    assert found["details"]["none"] != found["details"]["empty"]
    assert len({item["salt"] for item in shown.values()}) == len(details)  # showing one does not help to guess another
    log.sequence()
    assert bytes(log.sql("SELECT entry FROM leaf")[0][0]) == raw


def test_times_are_utc_with_microseconds_whatever_the_clock_says() -> None:
    east = timezone(timedelta(hours=9))
    whole = datetime(2026, 11, 30, 3, 0, 0, tzinfo=east)
    assert json.loads(body({}, Stamp("w", 0, whole)))["time"] == "2026-11-29T18:00:00.000000Z"
    assert json.loads(body({}, Stamp("w", 0, whole.replace(microsecond=5))))["time"] == "2026-11-29T18:00:00.000005Z"


@pytest.mark.parametrize(
    "details",
    [
        {"score": 0.5},
        {"flag": True},
        {"big": 2**53},
        {"half": "\ud800"},
        {"Name": 1},
        {"": 1},
        {"a b": 1},
        {"list": [1]},
        {f"n{n}": "x" for n in range(1000)},
    ],
)
def test_what_has_no_one_spelling_is_refused_and_leaves_nothing(log: Log, details: dict) -> None:
    with pytest.raises(RecordInvalid), log.database.begin() as transaction:
        log.store.append(transaction, intent(details=details))
    assert log.sql("SELECT count(*) FROM intent") == [(0,)]


def test_plain_takes_what_an_intent_may_hold() -> None:
    assert plain({"a": None, "b": "", "c": 0}) == {"a": None, "b": "", "c": 0}


def test_an_intent_commits_with_its_transaction_or_not_at_all(log: Log) -> None:
    with log.database.connect() as connection:
        connection.begin()
        log.store.append(connection, intent())
        connection.rollback()
    assert log.sql("SELECT (SELECT count(*) FROM intent), (SELECT count(*) FROM detail)") == [(0, 0)]
    first = json.loads(stored(log, log.append()))
    assert first["counter"] == 0  # the number was given out again


def test_two_intents_in_one_transaction(log: Log) -> None:
    with log.database.begin() as transaction:
        ids = [log.store.append(transaction, intent()) for _ in range(2)]
    assert [json.loads(stored(log, id_))["counter"] for id_ in ids] == [0, 1]


def test_counters_have_no_gaps_under_threads_and_rollbacks(log: Log) -> None:
    other = AuditStore(log.database, log.store._hsm)

    def work(number: int) -> None:
        store = (log.store, other)[number % 2]
        with log.database.connect() as connection:
            transaction = connection.begin()
            store.append(connection, intent())
            if number % 3 == 0:
                transaction.rollback()
            else:
                transaction.commit()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(120)))
    for store in (log.store, other):
        counters = [row[0] for row in log.sql("SELECT counter FROM intent WHERE worker = :w ORDER BY counter", w=store.worker)]
        assert counters == list(range(40))
    assert log.store.check_macs() == 80


def test_a_worker_that_waits_for_a_lost_transaction_goes_on(log: Log) -> None:
    connection = log.database.connect()
    connection.begin()
    log.store.append(connection, intent())
    waiting = threading.Thread(target=log.append)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()  # the control: appends of one worker follow one another
    connection.invalidate()  # the process died in the middle
    connection.close()
    waiting.join(10)
    assert log.sql("SELECT counter FROM intent") == [(0,)]


def test_completions(log: Log) -> None:
    intent_id = log.append()
    log.store.complete(intent_id, "spoken", {"milliseconds": 1200})
    (raw,) = log.sql("SELECT body FROM completion")[0]
    found = json.loads(bytes(raw))
    assert (found["id"], found["outcome"], found["facts"]) == (str(intent_id), "spoken", {"milliseconds": 1200})
    with pytest.raises(CompletionRefused):
        log.store.complete(intent_id, "spoken", {})
    with pytest.raises(CompletionRefused):
        log.store.complete(UUID(int=1), "spoken", {})
    with pytest.raises(RecordInvalid):
        log.store.complete(log.append(), "spoken", {"seconds": 1.5})  # type: ignore[dict-item]
    log.store.complete(log.append(), "spoken", {})
    assert log.sql("SELECT max(counter) FROM completion") == [(1,)]


def test_without_the_database_nothing_is_recorded_and_it_says_so(log: Log) -> None:
    intent_id = log.append()
    gone = sqlalchemy.create_engine(log.database.url.set(query={"host": "/nonexistent"}), poolclass=sqlalchemy.NullPool)
    store = AuditStore(gone, log.store._hsm)
    with pytest.raises(AuditUnavailable) as refused:
        store.complete(intent_id, "spoken", {})
    assert refused.value.code == "audit_unavailable"
    log.sql("DROP TABLE detail")  # a database that takes the intent and not its details
    with pytest.raises(AuditUnavailable), log.database.begin() as transaction:
        log.store.append(transaction, intent())
    assert log.sql("SELECT count(*) FROM intent") == [(1,)]


def test_erasing_details_leaves_the_record_whole(log: Log) -> None:
    intent_id = log.append()
    log.sql("DELETE FROM detail")
    assert log.store.disclose(intent_id) == {}
    assert log.store.check_macs() == 1


EDITS = {
    "another body": "body = replace(convert_from(body, 'UTF8'), 'allowed', 'denied!')::bytea",
    "another mac": "mac = set_byte(mac, 3, get_byte(mac, 3) # 1)",
    "another row's body and mac": "(body, mac) = (SELECT body, mac FROM intent WHERE counter = 0)",
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_row_is_named(log: Log, edit: str) -> None:
    ids = [log.append() for _ in range(4)]
    assert log.store.check_macs() == 4  # the control
    log.sql(f"UPDATE intent SET {EDITS[edit]} WHERE intent_id = :id", id=ids[2])
    with pytest.raises(AuditTampered) as found:
        log.store.check_macs()
    assert str(ids[2]) in str(found.value.detail)


def test_a_deleted_row_is_named(log: Log) -> None:
    ids = [log.append() for _ in range(4)]
    log.sql("DELETE FROM detail")
    log.sql("DELETE FROM intent WHERE intent_id = :id", id=ids[1])
    with pytest.raises(AuditTampered) as found:
        log.store.check_macs()
    assert f"intent {ids[2]}: worker {log.store.worker} counts 2 where 1 is due" == found.value.detail


def test_a_deleted_newest_row_is_named_once_it_was_sequenced(log: Log) -> None:
    ids = [log.append() for _ in range(3)]
    log.sequence()
    log.sql("DELETE FROM detail")
    log.sql("DELETE FROM intent WHERE intent_id = :id", id=ids[2])
    with pytest.raises(AuditTampered) as found:
        log.store.check_macs()
    assert str(ids[2]) in str(found.value.detail)


@pytest.mark.parametrize("worker", ["its own", "another"])
def test_an_inserted_row_is_named(log: Log, worker: str) -> None:
    log.append()
    at = "worker, 1" if worker == "its own" else "'w', 0"
    log.sql(f"INSERT INTO intent SELECT :id, {at}, body, mac FROM intent", id=UUID(int=99))
    with pytest.raises(AuditTampered) as found:
        log.store.check_macs()
    assert str(UUID(int=99)) in str(found.value.detail)


def test_a_mac_of_one_table_does_not_serve_in_another(log: Log) -> None:
    intent_id = log.append()
    log.sql("INSERT INTO completion SELECT intent_id, worker, 0, body, mac FROM intent")
    with pytest.raises(AuditTampered) as found:
        log.store.check_macs()
    assert found.value.detail == f"completion {intent_id}: its MAC does not hold"


def test_utc_by_default(log: Log) -> None:
    written = json.loads(stored(log, log.append()))["time"]
    assert abs(datetime.fromisoformat(written) - datetime.now(UTC)) < timedelta(seconds=30)


def trigger(log: Log, table: str, when: str, does: str) -> None:
    """What the database's owner can add to a table."""
    log.sql(f"CREATE FUNCTION evil_{table}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {does} END $$")
    log.sql(f"CREATE {when} ON {table} FOR EACH ROW EXECUTE FUNCTION evil_{table}()")


def test_a_row_that_a_trigger_drops_is_no_record_and_nothing_goes_on(log: Log) -> None:
    done = log.append()
    for table in ("detail", "intent", "completion"):
        trigger(log, table, "TRIGGER evil BEFORE INSERT", "RETURN NULL;")
    with pytest.raises(AuditUnavailable):
        log.append()
    log.sql("DROP TRIGGER evil ON intent")
    with pytest.raises(AuditUnavailable):
        log.append()  # the details alone are dropped
    with pytest.raises(AuditUnavailable):
        log.store.complete(done, "spoken", {})
    assert log.sql("SELECT (SELECT count(*) FROM intent), (SELECT count(*) FROM completion)") == [(1, 0)]
    log.sql("DROP TRIGGER evil ON detail")
    log.sql("DROP TRIGGER evil ON completion")
    log.append()
    log.store.complete(done, "spoken", {})
    assert log.store.check_macs() == 3


def test_a_row_that_a_trigger_changes_is_refused(log: Log) -> None:
    trigger(log, "intent", "TRIGGER evil BEFORE INSERT", "NEW.body := 'x'; RETURN NEW;")
    with pytest.raises(AuditUnavailable):
        log.append()


@pytest.mark.parametrize("kind", ["intent", "completion"])
def test_a_worker_refuses_a_table_that_lost_what_it_committed(log: Log, kind: str) -> None:
    ids = [log.append() for _ in range(3)]
    log.store.complete(ids[0], "spoken", {})
    log.sql("DELETE FROM completion")
    if kind == "intent":
        log.sql("DELETE FROM detail")
        log.sql("DELETE FROM intent WHERE counter = 2")
    for _ in range(2):
        with pytest.raises(AuditUnavailable) as refused:
            log.append() if kind == "intent" else log.store.complete(ids[1], "spoken", {})
        assert "the table was changed" in str(refused.value.detail)


def test_a_row_that_is_deleted_as_it_commits_stops_the_worker(log: Log) -> None:
    does = "DELETE FROM detail; DELETE FROM intent WHERE intent_id = NEW.intent_id; RETURN NULL;"
    trigger(log, "intent", "CONSTRAINT TRIGGER evil AFTER INSERT", does)
    log.sql("DROP TRIGGER evil ON intent")
    log.sql(
        "CREATE CONSTRAINT TRIGGER evil AFTER INSERT ON intent DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION evil_intent()"
    )
    log.append()
    with pytest.raises(AuditUnavailable) as refused:
        log.append()
    assert "the table was changed" in str(refused.value.detail)


def test_numbers_of_a_transaction_rolled_back_are_forgotten(log: Log) -> None:
    log.append()
    with log.database.connect() as connection:
        connection.begin()
        log.store.append(connection, intent())
        log.store.append(connection, intent())  # sees the first, which never commits
        connection.rollback()
    log.append()
    assert log.sql("SELECT counter FROM intent ORDER BY 1") == [(0,), (1,)]


def test_a_transaction_lost_in_a_crash_is_not_taken_for_another_of_its_number(log: Log, postgres: PostgresForTests) -> None:
    """After a crash Postgres gives the numbers of the transactions that it lost again: one of them commits, and it is not ours."""
    log.append()
    lost = log.database.connect()
    lost.begin()
    log.store.append(lost, intent())
    number = lost.scalar(text("SELECT pg_current_xact_id()::text::bigint"))
    postgres.stop(signal.SIGKILL)
    lost.invalidate()
    lost.close()
    log.database.dispose()
    postgres.start()
    given = [log.sql("SELECT pg_current_xact_id()::text::bigint")[0][0] for _ in range(3)]
    assert number in given, "the number was not given again: the test saw nothing"
    for _ in range(2):
        log.append()
    assert log.sql("SELECT counter FROM intent ORDER BY 1") == [(0,), (1,), (2,)]
