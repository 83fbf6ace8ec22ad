"""An auditor's bundle: whole, it verifies; changed anywhere, on either side, the verifier names what and where."""

import ast
import base64
import contextlib
import io
import json
import random
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from audit_parts import Log, filled, joined, lines
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import policies.audit.verify
from policies.audit.checkpoint import sign_checkpoint
from policies.audit.errors import AuditDiverged, LogEmpty, RangeRefused
from policies.audit.export import Range
from policies.audit.tree import Tree
from policies.audit.verify import MAX_LINE, VerificationFailed, Verifier, VerifierKey, canonical_json, commitment, leaf_hash

SOURCE = Path(policies.audit.verify.__file__)


def refused(log: Log, bundle: bytes | None = None, **options: object) -> str:
    with pytest.raises(VerificationFailed) as found:
        log.verify(bundle, **options)
    return str(found.value).split(":")[0]


def alone(bundle: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The verifier as an auditor runs it: the one file, another interpreter, nothing of ours on its path."""
    copy = bundle.with_name("verify.py")
    copy.write_bytes(SOURCE.read_bytes())
    return subprocess.run(
        [sys.executable, "-I", "-S", copy, bundle, *arguments], capture_output=True, text=True, check=False, cwd=bundle.parent
    )


def test_a_whole_bundle_verifies(log: Log) -> None:
    filled(log, 6)
    report = log.verify()
    assert (report.size, report.first, report.end, report.intents, report.completions) == (12, 0, 12, 6, 6)
    assert [line["seq"] for line in lines(log.bundle()) if "seq" in line] == list(range(12))


def test_it_verifies_on_a_machine_that_has_python_alone(log: Log, tmp_path: Path) -> None:
    filled(log, 3)
    bundle, since = tmp_path / "bundle.jsonl", tmp_path / "since"
    bundle.write_bytes(log.bundle())
    since.write_text(log.note())
    good = alone(bundle, "--fingerprint", log.key.fingerprint, "--since", str(since), "--json")
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["size"] == 6
    bundle.write_bytes(log.bundle().replace(b"allowed", b"denied!", 1))
    bad = alone(bundle, "--fingerprint", log.key.fingerprint)
    assert (bad.returncode, bad.stdout.split(":")[0]) == (3, "EDIT(0)")
    found = json.loads(alone(bundle, "--fingerprint", log.key.fingerprint, "--json").stdout)
    assert (found["ok"], found["word"], found["entries"]) == (False, "EDIT", [0, 0])
    for arguments in ([], ["--fingerprint", "abc"], ["--fingerprint", log.key.fingerprint, "--since", str(tmp_path / "none")]):
        wrong = alone(bundle, *arguments)
        assert (wrong.returncode, wrong.stdout) == (1, "")
        assert "Traceback" not in wrong.stderr
    assert alone(tmp_path / "missing", "--fingerprint", log.key.fingerprint).returncode == 1
    assert alone(tmp_path, "--fingerprint", log.key.fingerprint).returncode == 1


def test_the_verifier_loads_the_standard_library_alone() -> None:
    program = "import sys; before = set(sys.modules); import policies.audit.verify; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    ours = {name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names}
    assert ours == {"policies", "policies.audit", "policies.audit.verify"}
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported <= sys.stdlib_module_names


def test_one_changed_byte_of_an_entry_is_named_wherever_it_is(log: Log) -> None:
    filled(log, 3)
    whole = lines(log.bundle())
    for index, line in enumerate(whole):
        if "seq" not in line:
            continue
        for position in range(0, len(line["entry"]), 29):
            entry = line["entry"]
            changed = entry[:position] + chr(ord(entry[position]) ^ 1) + entry[position + 1 :]
            rows = [*whole[:index], {**line, "entry": changed}, *whole[index + 1 :]]
            assert refused(log, joined(rows)) == f"EDIT({line['seq']})"


def test_an_entry_changed_with_its_hash_is_named_through_the_checkpoints_around_it(log: Log) -> None:
    log.append()
    log.sequence()
    for _ in range(3):
        log.append()
    log.sequence()
    log.append()
    log.sequence()
    for seq, name in enumerate(["EDIT(0)", "EDIT(1..3)", "EDIT(1..3)", "EDIT(1..3)", "EDIT(4)"]):
        rows = lines(log.bundle())
        for row in rows:
            if row.get("seq") == seq:
                row["entry"] = row["entry"].replace("allowed", "denied!")
                row["leaf"] = leaf_hash(row["entry"].encode()).hex()
        assert refused(log, joined(rows)) == name


@pytest.mark.parametrize("flip", ["get_byte(entry, 40) # 1", "255"])
def test_an_entry_edited_in_postgres_is_named(log: Log, flip: str) -> None:
    filled(log, 3)
    log.sql(f"UPDATE leaf SET entry = set_byte(entry, 40, {flip}) WHERE seq = 3")
    assert refused(log) == "EDIT(3)"


def test_a_record_edited_in_postgres_is_named(log: Log) -> None:
    ids = filled(log, 3)
    log.sql("UPDATE intent SET body = set_byte(body, 40, get_byte(body, 40) # 1) WHERE intent_id = :id", id=ids[1])
    assert refused(log) == "EDIT(2)"


def test_a_record_edited_on_both_sides_is_named(log: Log) -> None:
    ids = filled(log, 3)
    log.sql("UPDATE intent SET body = set_byte(body, 40, get_byte(body, 40) # 1) WHERE intent_id = :id", id=ids[1])
    log.sql("UPDATE leaf SET entry = (SELECT body FROM intent WHERE intent_id = ref) WHERE seq = 2")
    # Its intent and its completion were signed together.
    assert refused(log) == "EDIT(2..3)"


def test_leaves_deleted_in_postgres_are_a_gap(log: Log) -> None:
    filled(log, 4)
    log.sql("DELETE FROM leaf WHERE seq = 7")
    assert refused(log).startswith("GAP")
    log.sql("DELETE FROM leaf WHERE seq = 3")
    assert refused(log) == "GAP(3)"


def test_a_record_deleted_before_it_was_sequenced_is_a_gap(log: Log) -> None:
    ids = [log.append() for _ in range(4)]
    log.sql("DELETE FROM detail")
    log.sql("DELETE FROM intent WHERE intent_id = :id", id=ids[1])
    log.sequence()
    assert refused(log) == "GAP(1)"


def test_junk_inserted_by_hand_is_named_after_it_was_sequenced(log: Log) -> None:
    log.append()
    log.sql("INSERT INTO intent VALUES (:id, 'zzz', 0, '\\xff00', decode(repeat('00', 16), 'hex'))", id=UUID(int=3))
    log.sequence()
    with pytest.raises(VerificationFailed, match=r"EDIT\(\d\): the entry is no record"):
        log.verify()


def test_entries_left_out_moved_or_repeated_are_refused(log: Log) -> None:
    filled(log, 3)
    rows = lines(log.bundle())
    places = [index for index, row in enumerate(rows) if "seq" in row]
    without = [row for index, row in enumerate(rows) if index != places[2]]
    assert refused(log, joined(without)) == "GAP(2)"
    renumbered = [{**row, "seq": row["seq"] - 1} if row.get("seq", 0) > 2 else row for row in without if "checkpoint" not in row]
    assert refused(log, joined([*renumbered, {**rows[-1], "end": 5}])).startswith("GAP")
    swapped = list(rows)
    swapped[places[2]], swapped[places[3]] = swapped[places[3]], swapped[places[2]]
    assert refused(log, joined(swapped)) == "GAP(2)"
    assert refused(log, joined(rows[:-1])) == "GAP"
    assert refused(log, joined(rows[:-4])) == "GAP"
    assert refused(log, joined([*rows, rows[-1]])) == "FORM"


def test_a_shortened_bundle_does_not_pass_as_whole(log: Log) -> None:
    filled(log, 3)
    rows = [row for row in lines(log.bundle()) if row.get("seq", 0) < 4]
    for right in ([], ["00" * 32], ["00" * 32] * 2):
        assert refused(log, joined([*rows[:-1], {**rows[-1], "end": 4, "right": right}])) in {"GAP", "EDIT(4..5)", "EDIT(4)"}


def test_ranges_prove_their_place(log: Log) -> None:
    filled(log, 5)
    for start in range(11):
        for end in range(start, 11):
            report = log.verify(log.bundle(wanted=Range(start, end)))
            assert (report.first, report.end, report.size) == (start, end, 10)
    rows = lines(log.bundle(wanted=Range(3, 7)))
    assert refused(log, joined([{**rows[0], "first": 4}, *rows[1:]])).startswith("GAP")
    rows[0]["left"][0] = "11" * 32
    assert refused(log, joined(rows)).startswith("EDIT")
    for wanted in (Range(-1), Range(0, 11), Range(4, 3)):
        with pytest.raises(RangeRefused):
            log.bundle(wanted=wanted)


def test_a_key_that_is_not_the_pinned_one_is_refused(log: Log) -> None:
    filled(log, 2)
    thief = Log(log.database, log.store, log.file, Ed25519PrivateKey.generate())
    rows = lines(log.bundle())
    tree = Tree(leaf_hash(row["entry"].encode()) for row in rows if "seq" in row)
    forged = sign_checkpoint(tree.size, tree.root(), thief.key, thief.private.sign)
    signed_by_thief = [row for row in rows if "checkpoint" not in row]
    signed_by_thief[0] = {**rows[0], "key": thief.key.text}
    bundle = joined([*signed_by_thief, {**rows[-1], "checkpoint": forged}])
    assert thief.verify(bundle).size == 4  # the control: that bundle is whole, for whoever trusts the thief
    assert refused(log, bundle) == "SIG"
    assert refused(log, joined([rows[0], *signed_by_thief[1:], {**rows[-1], "checkpoint": forged}])) == "SIG"
    with pytest.raises(AuditDiverged):
        thief.bundle()


def test_a_log_of_another_name_is_refused(log: Log) -> None:
    filled(log, 1)
    other = VerifierKey("other.example/audit", log.key.public)
    rows = lines(log.bundle())
    assert refused(log, joined([{**rows[0], "key": other.text}, *rows[1:]])) == "SIG"


def rewritten(log: Log, seq: int) -> bytes:
    """What a log that rewrites its history under its own key would hand out."""
    rows = lines(log.bundle())
    tree = Tree()
    for row in rows:
        if "seq" in row:
            if row["seq"] == seq:
                row["entry"] = row["entry"].replace("allowed", "denied!")
                row["leaf"] = leaf_hash(row["entry"].encode()).hex()
            tree.append(bytes.fromhex(row["leaf"]))
        elif "checkpoint" in row:
            row["checkpoint"] = sign_checkpoint(tree.size, tree.root(), log.key, log.private.sign)
            if row.get("consistency"):
                old = row["consistency"]["from"]
                row["consistency"]["proof"] = [item.hex() for item in tree.consistency(old, tree.size)]
    return joined(rows)


def test_since_a_checkpoint_the_log_only_grew(log: Log) -> None:
    filled(log, 2)
    kept = log.note()
    filled(log, 3)
    assert log.verify(since=kept).consistent_with == 4
    assert log.verify(log.bundle(wanted=Range(7, 9), since=kept), since=kept).consistent_with == 4
    assert refused(log, log.bundle(wanted=Range(7, 9)), since=kept) == "FORM"  # the proof is not there
    assert log.verify(log.bundle(wanted=Range(3, 9)), since=kept).consistent_with == 4  # nor is it needed


def test_fork_and_rollback(log: Log) -> None:
    filled(log, 2)
    kept_then = log.note()
    filled(log, 1)
    kept = log.note()
    forged = rewritten(log, 2)
    assert log.verify(forged).size == 6  # the control: without a checkpoint kept, a whole new history cannot be told
    assert refused(log, forged, since=kept) == "FORK"  # same size, another root
    assert refused(log, forged, since=kept_then) == "FORK"  # longer, and not an extension
    short = log.bundle()
    filled(log, 1)
    assert refused(log, short, since=log.note()) == "ROLLBACK"


def test_a_consistency_proof_cannot_be_made_up(log: Log) -> None:
    filled(log, 2)
    kept = log.note()
    filled(log, 3)
    rows = lines(log.bundle(wanted=Range(8, 9), since=kept))
    for proof in ([], rows[-1]["consistency"]["proof"][:-1], ["00" * 32] * 3):
        bundle = joined([*rows[:-1], {**rows[-1], "consistency": {"from": 4, "proof": proof}}])
        assert refused(log, bundle, since=kept) == "FORK"
    assert refused(log, since=kept.replace("4\n", "5\n", 1)) == "SIG"
    assert refused(log, since="nonsense") == "SIG"


def test_an_older_checkpoint_that_disagrees(log: Log) -> None:
    filled(log, 2)
    rows = lines(log.bundle())
    (place,) = [index for index, row in enumerate(rows[:-1]) if "checkpoint" in row and index > 1]
    two = sign_checkpoint(2, bytes(32), log.key, log.private.sign)
    assert refused(log, joined([*rows[:place], {"checkpoint": two}, *rows[place + 1 :]])) == "FORK"
    unsigned = two[:-8] + "AAAA" + two[-4:]
    assert refused(log, joined([*rows[:place], {"checkpoint": unsigned}, *rows[place + 1 :]])) == "SIG"


def test_stale(log: Log) -> None:
    filled(log, 1)
    assert log.verify(newer_than="2020").size == 2
    assert refused(log, newer_than="2999-01-01T00") == "STALE"


def test_details_are_shown_for_chosen_entries_and_checked(log: Log) -> None:
    ids = filled(log, 3)

    def disclose(intent_id: UUID) -> dict:
        return log.store.disclose(intent_id, frozenset({"number"})) if intent_id == ids[1] else {}

    bundle = log.bundle(disclose=disclose)
    assert log.verify(bundle).disclosed == 1
    rows = lines(bundle)
    (shown,) = [row["disclosed"] for row in rows if "disclosed" in row]
    assert set(shown) == {"number"}
    assert shown["number"]["value"] == 1
    shown["number"]["value"] = 2
    assert refused(log, joined(rows)) == "EDIT(2)"
    shown["other"] = shown.pop("number")
    assert refused(log, joined(rows)) == "EDIT(2)"


def test_an_empty_log_is_a_log(log: Log) -> None:
    with pytest.raises(LogEmpty):
        log.bundle()
    log.sequence()
    assert log.verify().size == 0


HOSTILE = {
    "nothing": b"",
    "no JSON": b"\x00\xff\n",
    "a zip": b"PK\x03\x04" + bytes(60) + b"\n",
    "an array": b"[]\n",
    "deep": b"[" * 200_000 + b"\n",
    "deep in an object": b'{"a":' * 40_000 + b"\n",
    "an endless line": b'{"glottis_audit_bundle":1,"key":"' + b"a" * (2 * MAX_LINE),
    "a name twice": b'{"glottis_audit_bundle":1,"glottis_audit_bundle":1}\n',
    "a float": b'{"glottis_audit_bundle":1.0}\n',
    "NaN": b'{"glottis_audit_bundle":NaN}\n',
    "a huge number": b'{"glottis_audit_bundle":' + b"9" * 100_000 + b"}\n",
    "a byte order mark": b"\xef\xbb\xbf" + b"{}\n",
    "UTF-16": '{"glottis_audit_bundle":1}\n'.encode("utf-16"),
    "another version": b'{"glottis_audit_bundle":2}\n',
    "true for one": b'{"glottis_audit_bundle":true}\n',
    "no key": b'{"glottis_audit_bundle":1,"first":0,"left":[]}\n',
}


@dataclass
class Small:
    """A whole bundle of two entries, made by hand."""

    fingerprint: str
    rows: list[dict]

    def refused(self, bundle: bytes) -> str:
        with pytest.raises(VerificationFailed) as found:
            Verifier(self.fingerprint).verify(io.BytesIO(bundle))
        return found.value.word


@pytest.fixture(scope="module")
def small() -> Small:
    private = Ed25519PrivateKey.generate()
    key = VerifierKey("voice.example/audit", private.public_key().public_bytes_raw())
    salt, rows, tree = bytes(32), [], Tree()
    for counter in range(2):
        details = {"number": commitment(salt, "number", counter)}
        body = canonical_json({"kind": "intent", "worker": "w", "counter": counter, "time": "2026", "details": details})
        tree.append(leaf_hash(body))
        rows.append({"seq": counter, "entry": body.decode(), "leaf": leaf_hash(body).hex()})
    rows[0]["disclosed"] = {"number": {"salt": salt.hex(), "value": 0}}
    head = {"glottis_audit_bundle": 1, "key": key.text, "first": 0, "left": []}
    note = sign_checkpoint(2, tree.root(), key, private.sign)
    return Small(key.fingerprint, [head, *rows, {"end": 2, "right": [], "checkpoint": note, "consistency": None}])


def test_the_small_bundle_is_whole(small: Small) -> None:
    report = Verifier(small.fingerprint).verify(io.BytesIO(joined(small.rows)))
    assert (report.size, report.disclosed) == (2, 1)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bundles_are_refused(small: Small, name: str) -> None:
    assert small.refused(HOSTILE[name]) in {"FORM", "GAP"}


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        (0, {"first": -1}),
        (0, {"first": 2**70}),
        (0, {"first": 2**61}),
        (0, {"first": True}),
        (0, {"left": ["00"]}),
        (0, {"left": [0]}),
        (0, {"left": ["00" * 32] * 500}),
        (1, {"seq": "0"}),
        (1, {"entry": 5}),
        (1, {"entry": "\ud900"}),
        (1, {"entry": "{}"}),
        (1, {"leaf": None}),
        (1, {"disclosed": []}),
        (1, {"disclosed": {"number": 5}}),
        (1, {"disclosed": {"number": {"salt": "zz", "value": 1}}}),
        (-1, {"end": "2"}),
        (-1, {"end": 1}),
        (-1, {"right": None}),
        (-1, {"right": ["00" * 32]}),
        (-1, {"checkpoint": ""}),
        (-1, {"checkpoint": "a\n" * 1000}),
    ],
)
def test_wrong_shapes_are_refused(small: Small, place: int, changes: dict) -> None:
    rows = list(small.rows)
    rows[place] = {**rows[place], **changes}
    small.refused(joined(rows))


def test_memory_does_not_grow_with_the_bundle(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies.audit.verify, "MAX_WORKERS", 3000)

    class Endless(io.RawIOBase):
        """Entries for ever, each in its place, of a new worker each."""

        def __init__(self) -> None:
            self.seq = -1

        def readline(self, size: int = -1) -> bytes:  # type: ignore[override]
            self.seq += 1
            if self.seq == 0:
                return json.dumps(small.rows[0]).encode()
            body = f'{{"kind":"intent","counter":0,"time":"t","worker":"{self.seq}"}}'
            return json.dumps({"seq": self.seq - 1, "entry": body, "leaf": leaf_hash(body.encode()).hex()}).encode()

    tracemalloc.start()
    try:
        with pytest.raises(VerificationFailed, match="FORM: more workers"):
            Verifier(small.fingerprint).verify(Endless())  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_a_forged_ed25519_signature_of_zeros_is_refused(small: Small) -> None:
    note = small.rows[-1]["checkpoint"]
    zeros = base64.b64encode(base64.b64decode(note.split()[-1])[:4] + bytes(64)).decode()
    forged = note[: note.rindex(" ") + 1] + zeros + "\n"
    assert small.refused(joined([*small.rows[:-1], {**small.rows[-1], "checkpoint": forged}])) == "SIG"


def test_no_mangled_bundle_brings_the_verifier_down(small: Small) -> None:
    whole = joined(small.rows)
    dice = random.Random(6962)
    for _ in range(1500):
        mangled = bytearray(whole)
        for _ in range(dice.randint(1, 3)):
            start = dice.randrange(len(mangled))
            match dice.randrange(4):
                case 0:
                    mangled[start] = dice.randrange(256)
                case 1:
                    del mangled[start : start + dice.randint(1, 40)]
                case 2:
                    mangled[start:start] = dice.choice(
                        [b"[", b"{", b'"', b"-", b"null", b"\n", b"1e9", b"\\ud800", b"9" * 30, b"\xff"]
                    )
                case _:
                    mangled[start:start] = mangled[start : start + dice.randint(1, 200)]
        with contextlib.suppress(VerificationFailed):
            report = Verifier(small.fingerprint).verify(io.BytesIO(bytes(mangled)))
            assert (report.size, report.intents) == (2, 2)  # what is not an entry may change: spaces, an unused proof
