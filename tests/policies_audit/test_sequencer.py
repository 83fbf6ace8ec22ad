"""The sequencer: one writer, no gaps, the same history after any crash, and a refusal where history was changed."""

import base64
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy
from audit_parts import ORIGIN, Log, filled, intent
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hsm_fixtures import SO_PIN, ServingToken, fresh_processes, in_own_process

from keyvault import ceremony, softhsm
from keyvault.hsm import KeyName
from keyvault.pkcs11_hsm import Pkcs11Hsm
from keyvault.pkcs11_start import TokenConfig
from policies.audit import sequencer, store
from policies.audit.checkpoint import LastCheckpoint, verifier_key
from policies.audit.errors import AuditDiverged, LogOccupied
from policies.audit.sequencer import Sequencer
from policies.audit.store import AuditStore
from policies.audit.tree import Tree
from policies.audit.verify import check_checkpoint, leaf_hash

FRESH = fresh_processes()


def append_many(url: str, token: TokenConfig, pin: str, masters: Any, count: int, turn: Any) -> None:
    """A vault worker: a process of its own, with its own login and its own counter."""
    with turn:  # a token is probed by one process at a time
        hsm = Pkcs11Hsm.open(token, pin, expected_masters=masters)
    engine = sqlalchemy.create_engine(url)
    vault = AuditStore(engine, hsm)
    for number in range(count):
        with engine.begin() as transaction:
            intent_id = vault.append(transaction, intent(details={"number": number}))
        if number % 2:
            vault.complete(intent_id, "spoken", {"number": number})
    engine.dispose()
    hsm.close()


def url_of(log: Log) -> str:
    return log.database.url.render_as_string(hide_password=False)


def test_six_processes_and_one_verified_log(log: Log, serving_token: ServingToken) -> None:
    arguments = (url_of(log), serving_token.config, serving_token.pin, serving_token.facts.masters, 50, FRESH.Lock())
    processes = [FRESH.Process(target=append_many, args=arguments) for _ in range(6)]
    for process in processes:
        process.start()
    with log.sequencer(batch=7) as writer:
        while any(process.is_alive() for process in processes):
            writer.step()
            time.sleep(0.02)
        while writer.step().added:
            pass
    assert [process.exitcode for process in processes] == [0] * 6
    report = log.verify()
    assert (report.size, report.intents, report.completions) == (450, 300, 150)
    assert log.store.check_macs() == 450
    assert log.sql("SELECT count(*) FROM checkpoint")[0][0] > 3
    # Every completion stands after its intent.
    order = (
        "SELECT count(*) FROM leaf i JOIN leaf c USING (ref) WHERE i.kind = 'intent' AND c.kind = 'completion' AND c.seq < i.seq"
    )
    assert log.sql(order) == [(0,)]


def test_nothing_new_means_no_new_checkpoint(log: Log) -> None:
    log.append()
    with log.sequencer() as writer:
        assert (writer.step().added, writer.step().signed) == (1, False)
    assert log.sql("SELECT count(*) FROM checkpoint") == [(1,)]


def test_an_uncommitted_intent_waits_and_later_ones_of_other_workers_do_not(log: Log) -> None:
    other = AuditStore(log.database, log.store._hsm)
    with log.sequencer() as writer:
        with log.database.begin() as slow:
            log.store.append(slow, intent())
            with log.database.begin() as quick:
                other.append(quick, intent())
            assert writer.step().size == 1
        assert writer.step().size == 2
    log.verify()


def test_one_writer_at_a_time(log: Log) -> None:
    with log.sequencer() as first:
        with pytest.raises(LogOccupied), log.sequencer():
            pass
        first.step()
    with log.sequencer() as second:
        second.step()


class Stop(BaseException):
    """Stands for the death of the process."""


MOMENTS = {
    "leaves": (store, "add_leaves"),
    "signature": (sequencer, "sign_checkpoint"),
    "file": (LastCheckpoint, "write"),
    "publication": (store, "add_checkpoint"),
}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_dying_at_any_moment_leaves_one_history(log: Log, moment: str, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(log, 2)
    kept = log.note()
    signed: list[str] = []
    place, name = MOMENTS[moment]
    real = getattr(place, name)

    def dying(*arguments: Any) -> None:
        if not before:
            real(*arguments)
        raise Stop

    def sign(data: bytes) -> bytes:
        signed.append(data.decode())
        return log.private.sign(data)

    log.append()
    log.append()
    with monkeypatch.context() as patch:
        patch.setattr(place, name, dying)
        with pytest.raises(Stop), Sequencer(log.database, log.key, sign, LastCheckpoint(log.file)) as dies:
            dies.step()
    log.append()
    log.sequence()
    assert log.verify(since=kept).size == 7
    entries = [bytes(row[0]) for row in log.sql("SELECT entry FROM leaf ORDER BY seq")]
    for text in signed:  # published or not, what was signed stays part of the one history
        _, size, root = text.split()
        assert Tree(leaf_hash(entry) for entry in entries[: int(size)]).root() == base64.b64decode(root)


def run_sequencer(url: str, secret: bytes, origin: str, file: Path) -> None:
    private = Ed25519PrivateKey.from_private_bytes(secret)
    spki = bytes.fromhex("302a300506032b6570032100") + private.public_key().public_bytes_raw()
    with Sequencer(
        sqlalchemy.create_engine(url), verifier_key(origin, spki), private.sign, LastCheckpoint(file), batch=3
    ) as writer:
        while True:
            writer.step()


def test_killed_again_and_again_while_writing(log: Log) -> None:
    arguments = (url_of(log), log.private.private_bytes_raw(), ORIGIN, log.file)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            log.store.complete(log.append(), "spoken", {})

    vault = threading.Thread(target=write)
    vault.start()
    kept = None
    try:
        for _ in range(2):
            process = FRESH.Process(target=run_sequencer, args=arguments)
            process.start()
            before = log.sql("SELECT count(*) FROM leaf")[0][0]
            deadline = time.monotonic() + 30
            while log.sql("SELECT count(*) FROM leaf")[0][0] < before + 20 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert process.pid
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            if kept is not None:
                log.verify(since=kept)
            kept = log.note()
    finally:
        stop.set()
        vault.join()
    for _ in range(100):
        try:
            log.sequence()
            break
        except LogOccupied:  # the dead process's connection is still being cleared away
            time.sleep(0.05)
    report = log.verify(since=kept)
    assert report.intents == report.completions == log.sql("SELECT count(*) FROM intent")[0][0]


REWRITES = {
    "an edited leaf": "UPDATE leaf SET entry = set_byte(entry, 9, 0) WHERE seq = 1",
    "a missing leaf": "DELETE FROM leaf WHERE seq = 1",
    "a missing last leaf": "DELETE FROM leaf WHERE seq = 3",
    "a leaf put in by hand": "INSERT INTO leaf VALUES (4, 'intent', gen_random_uuid(), 'x')",
    "a leaf far away": "INSERT INTO leaf VALUES (9, 'intent', gen_random_uuid(), 'x')",
    "a checkpoint of another size": "UPDATE checkpoint SET size = 99 WHERE size = 4",
    "an edited checkpoint": "UPDATE checkpoint SET note = replace(note, '4', '5') WHERE size = 4",
    "an older state, which agrees with itself": "DELETE FROM checkpoint WHERE size > 2; DELETE FROM leaf WHERE seq > 1",
    "nothing left": "DELETE FROM checkpoint; DELETE FROM leaf",
}


@pytest.mark.parametrize("rewrite", REWRITES)
def test_a_changed_history_is_not_signed(log: Log, rewrite: str) -> None:
    filled(log, 2)
    with log.sequencer() as writer:
        writer.step()  # the control
    for statement in REWRITES[rewrite].split(";"):
        log.sql(statement)
    count = log.sql("SELECT count(*) FROM checkpoint")
    log.append()
    with pytest.raises(AuditDiverged), log.sequencer() as again:
        again.step()
    assert log.sql("SELECT count(*) FROM checkpoint") == count


@pytest.mark.parametrize("rewrite", ["a missing last leaf", "a leaf put in by hand", "nothing left", "an edited checkpoint"])
def test_a_history_changed_under_a_running_writer_is_not_signed(log: Log, rewrite: str) -> None:
    filled(log, 2)
    with log.sequencer() as writer:
        writer.step()
        for statement in REWRITES[rewrite].split(";"):
            log.sql(statement)
        log.append()
        with pytest.raises(AuditDiverged):
            writer.step()


def test_without_its_own_file_a_log_that_was_signed_is_refused(log: Log) -> None:
    filled(log, 1)
    note = log.file.read_text()
    log.file.unlink()
    with pytest.raises(AuditDiverged) as refused, log.sequencer():
        pass
    assert "missing" in str(refused.value.detail)
    log.file.write_text(note.replace("2\n", "3\n", 1))
    with pytest.raises(AuditDiverged), log.sequencer():
        pass
    log.file.write_text(note)
    assert log.sequence() == 2


def test_another_key_does_not_continue_a_log(log: Log) -> None:
    filled(log, 1)
    other = Log(log.database, log.store, log.file, Ed25519PrivateKey.generate())
    with pytest.raises(AuditDiverged), other.sequencer():
        pass


def test_a_skipped_counter_is_reported(log: Log) -> None:
    ids = [log.append() for _ in range(3)]
    log.sql("DELETE FROM detail")
    log.sql("DELETE FROM intent WHERE intent_id = :id", id=ids[1])
    with log.sequencer() as writer:
        step = writer.step()
    assert step.added == 2
    assert step.gaps == (f"intent {ids[2]}: counter 2 where 1 is due",)


def test_a_row_slipped_in_behind_is_never_sequenced(log: Log) -> None:
    log.append()
    log.append()
    log.sequence()
    log.sql("INSERT INTO intent SELECT :id, worker, -1, body, mac FROM intent WHERE counter = 0", id=UUID(int=5))
    assert log.sequence() == 2


def test_a_sequenced_record_written_again_is_not_sequenced_again(log: Log) -> None:
    intent_id = log.append()
    with log.sequencer() as writer:
        writer.step()
        log.sql("UPDATE intent SET worker = 'w'")  # the row anew, as another worker's
        with pytest.raises(AuditDiverged):
            writer.step()
    assert log.sql("SELECT ref FROM leaf") == [(intent_id,)]


def sign_with_log_token(folder: Path, data: bytes) -> tuple[bytes, str, bytes]:
    module = softhsm.find_module()
    serial = softhsm.make_token(module, folder, "log", SO_PIN, "7719-log-pin")
    config = TokenConfig(module, "log", serial, folder)
    ceremony.log_token(config, "7719-log-pin")
    hsm = Pkcs11Hsm.open(config, "7719-log-pin", expected_masters=())
    try:
        return hsm.public_key(KeyName.CHECKPOINT_SIGNER), "", hsm.sign(KeyName.CHECKPOINT_SIGNER, data)
    finally:
        hsm.close()


def test_the_log_token_signs_notes_that_verify(tmp_path: Path) -> None:
    root = "CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I="
    text = f"{ORIGIN}\n7\n{root}\n"
    spki, _, signature = in_own_process(sign_with_log_token, tmp_path / "log", text.encode())
    key = verifier_key(ORIGIN, spki)
    note = f"{text}\n— {ORIGIN} {base64.b64encode(key.id + signature).decode()}\n"
    assert check_checkpoint(note, key).size == 7
