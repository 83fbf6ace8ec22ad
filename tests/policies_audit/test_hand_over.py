"""The log handed over to another checkpoint key: who pinned the first follows it, and no hand-over of anybody else's counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from audit_parts import ORIGIN, Log, filled, joined, lines
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from policies.audit.checkpoint import HandOvers, LastCheckpoint, hand_over, newest_key, sign_checkpoint, verifier_key
from policies.audit.errors import SigningFailed
from policies.audit.sequencer import Sequencer
from policies.audit.verify import VerificationFailed, VerifierKey, check_checkpoint


def key_of(private: Ed25519PrivateKey, origin: str = ORIGIN) -> VerifierKey:
    return verifier_key(origin, private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def sequence(log: Log, sign: Any, *handed: str) -> int:
    with Sequencer(log.database, log.key, sign, LastCheckpoint(log.file), handed=handed) as sequencer:
        while sequencer.step().added:
            pass
        return sequencer.size


def handed(log: Log) -> tuple[Ed25519PrivateKey, str]:
    """A log with entries before and after its hand-over; the second key, and the line."""
    filled(log, 2)
    second = Ed25519PrivateKey.generate()
    line = hand_over(key_of(second), check_checkpoint(log.note(), log.key).size, log.private.sign)
    log.append()
    sequence(log, second.sign, line)
    return second, line


def word(log: Log, bundle: bytes | None = None, **options: Any) -> str:
    with pytest.raises(VerificationFailed) as failed:
        log.verify(bundle, **options)
    return failed.value.word


def test_the_first_fingerprint_verifies_everything_before_and_after(log: Log) -> None:
    filled(log, 2)
    old = log.note()
    second, line = handed(log)
    assert log.verify().size == 9
    assert log.verify(since=old).consistent_with == 4
    third = Ed25519PrivateKey.generate()
    log_second = hand_over(key_of(third), 9, second.sign)
    log.append()
    sequence(log, third.sign, line, log_second)
    assert log.verify(since=old).size == 10
    assert newest_key(log.key, (line, log_second)) == key_of(third)


def test_the_old_key_signs_nothing_beyond_its_hand_over(log: Log) -> None:
    handed(log)
    kept = log.note()
    stolen = sign_checkpoint(5, check_checkpoint(kept, log.key).root, log.key, log.private.sign)
    forged = lines(log.bundle())
    forged[-1]["checkpoint"] = stolen
    assert log.verify(joined(forged)).size == 5, "alone, nothing tells it from the log before the hand-over: keep a checkpoint"
    assert word(log, joined(forged), since=kept) == "SIG"
    assert word(log, since=stolen) == "SIG"


def test_a_log_that_hands_over_to_two_keys_is_a_fork(log: Log) -> None:
    handed(log)
    other = Ed25519PrivateKey.generate()
    line = hand_over(key_of(other), 4, log.private.sign)
    root = check_checkpoint(log.note(), log.key).root
    assert word(log, since=sign_checkpoint(5, root, log.key, other.sign, (line,))) == "FORK"


def test_a_hand_over_that_does_not_hold_is_refused(log: Log) -> None:
    filled(log, 1)
    root = check_checkpoint(log.note(), log.key).root
    thief, second = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    good = hand_over(key_of(second), 2, log.private.sign)
    _, size, key, signature = good.split(" ")
    wrong = {
        "by another key": (hand_over(key_of(thief), 2, thief.sign),),
        "of another size": (f"hand-over 3 {key} {signature}",),
        "to another key": (f"hand-over 2 {key_of(thief).text} {signature}",),
        "of another log": (hand_over(key_of(thief, "other.example/audit"), 2, log.private.sign),),
        "cut": (f"hand-over {size} {key}",),
        "twice": (good, good),
        "backwards": (good, hand_over(key_of(thief), 1, second.sign)),
        "skipping one": (good, hand_over(key_of(thief), 3, log.private.sign)),
        "no number": (f"hand-over 02 {key} {signature}",),
    }
    for name, found in wrong.items():
        for private in (thief, second):
            with pytest.raises(SigningFailed):
                sign_checkpoint(2, root, log.key, private.sign, found)
            text = "\n".join([ORIGIN, "2", "x" * 43 + "=", *found])
            with pytest.raises(ValueError):
                check_checkpoint(f"{text}\n\n— {ORIGIN} AAAA\n", log.key)
        assert name


def test_the_new_key_without_its_hand_over_and_the_old_one_with_it_sign_nothing(log: Log) -> None:
    second, line = handed(log)
    root = check_checkpoint(log.note(), log.key).root
    for private, found in ((second, ()), (log.private, (line,))):
        with pytest.raises(SigningFailed):
            sign_checkpoint(5, root, log.key, private.sign, found)


def test_the_verifier_alone_follows_it(log: Log, tmp_path: Path) -> None:
    import subprocess
    import sys

    import policies.audit.verify

    handed(log)
    bundle = tmp_path / "bundle"
    bundle.write_bytes(log.bundle())
    argv = [
        sys.executable,
        "-I",
        "-S",
        str(policies.audit.verify.__file__),
        str(bundle),
        "--fingerprint",
        log.key.fingerprint,
        "--json",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["ok"] is True


def test_the_file_of_hand_overs_is_whole_and_in_order(tmp_path: Path) -> None:
    file = HandOvers(tmp_path / "hand-overs")
    assert file.read() == ()
    file.add("first")
    file.add("second")
    assert HandOvers(tmp_path / "hand-overs").read() == ("first", "second")
    assert [path.name for path in tmp_path.iterdir()] == ["hand-overs"]
