"""Check an audit bundle alone: Python 3.9 or newer, its standard library, this one file, and a fingerprint from elsewhere.

    python verify.py BUNDLE --fingerprint HEX [--since CHECKPOINT_FILE] [--newer-than TIME] [--cosigner KEY] [--json]

Every entry is hashed again from its exact bytes into an RFC 6962 tree, whose root must be the one that the log signed.
The fingerprint is the SHA-256 of the log's verifier key (`name+id+key`, C2SP signed-note); a key inside the bundle counts
only if it has that fingerprint, or if keys that count handed over to it, one after another. Exit codes: 0 all holds;
1 wrong usage or an unreadable file; 3 verification failed, and the first word says how:

EDIT      an entry (named) is not the one that the log signed
GAP       an entry is missing, or a worker's counter skips or repeats
FORK      the log signed two histories
ROLLBACK  the log is shorter than a checkpoint it signed before
SIG       a signature does not hold, was made by another key, or by one that had handed over to its successor, or is missing
STALE     nothing in the bundle is as new as asked
FORM      this is not a bundle, or it is built to harm its reader
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hashlib
import json
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, Optional

MAX_LINE = 1 << 18
MAX_WORKERS = 1 << 16
MAX_SIZE = 1 << 62
MAX_SUCCESSORS = 64


class VerificationFailed(Exception):
    """What does not hold: `word` is one of those above, `entries` the first and last sequence number it names, if any."""

    def __init__(self, word: str, message: str, entries: tuple[int, int] | None = None) -> None:
        self.word, self.entries, self.message = word, entries, message
        name = word
        if entries:
            name += f"({entries[0]})" if entries[0] == entries[1] else f"({entries[0]}..{entries[1]})"
        super().__init__(f"{name}: {message}")


# --- Merkle tree: RFC 9162, section 2.1 (the hashes of RFC 6962)


def leaf_hash(entry: bytes) -> bytes:
    """SHA-256(0x00 | entry)."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """SHA-256(0x01 | left | right)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class Frontier:
    """A tree's right edge: enough to append and to give the root; never more than one hash a level."""

    def __init__(self) -> None:
        self.size = 0
        self._edge: list[tuple[int, bytes]] = []

    def push(self, digest: bytes, level: int = 0) -> None:
        """Append a complete subtree of 2**level leaves. Raises ValueError unless the size is a multiple of that."""
        if self.size % (1 << level):
            raise ValueError("a subtree starts at a multiple of its own size")
        self.size += 1 << level
        while self._edge and self._edge[-1][0] == level:
            digest = node_hash(self._edge.pop()[1], digest)
            level += 1
        self._edge.append((level, digest))

    @property
    def edge(self) -> list[bytes]:
        """The roots of the complete subtrees of `subtrees(0, size)`, in that order: pushed again, they give this tree."""
        return [digest for _, digest in self._edge]

    def root(self) -> bytes:
        """The root over everything appended so far."""
        if not self._edge:
            return hashlib.sha256().digest()
        digest = self._edge[-1][1]
        for _, left in reversed(self._edge[:-1]):
            digest = node_hash(left, digest)
        return digest


def subtrees(start: int, end: int) -> Iterator[tuple[int, int]]:
    """The fewest complete subtrees that cover leaves [start, end), in order, as (first leaf, level)."""
    while start < end:
        level = (end - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        yield start, level
        start += 1 << level


def check_consistency(old: int, old_root: bytes, new: int, new_root: bytes, proof: list[bytes]) -> None:
    """RFC 9162, section 2.1.4.2: the first `old` of `new` leaves are those of `old_root`. Raises ValueError otherwise."""
    if not 0 < old <= new or (old == new and (proof or old_root != new_root)):
        raise ValueError("no consistency between these sizes")
    if old == new:
        return
    path = iter(proof if old & (old - 1) else [old_root, *proof])
    low, high = old - 1, new - 1
    while low & 1:
        low, high = low >> 1, high >> 1
    first = second = next(path, b"")
    for digest in path:
        if not high:
            raise ValueError("the consistency proof is too long")
        if low & 1 or low == high:
            first, second = node_hash(digest, first), node_hash(digest, second)
            while low and not low & 1:
                low, high = low >> 1, high >> 1
        else:
            second = node_hash(second, digest)
        low, high = low >> 1, high >> 1
    if high or first != old_root or second != new_root:
        raise ValueError("the consistency proof does not hold")


# --- Ed25519: RFC 8032, section 5.1, verification only, with public data only, so that time may leak

_P = 2**255 - 19
_L = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT_OF_MINUS_1 = pow(2, (_P - 1) // 4, _P)
_Point = tuple[int, int, int, int]
_NEUTRAL: _Point = (0, 1, 1, 0)


def _add(a: _Point, b: _Point) -> _Point:
    x1, y1, z1, t1 = a
    x2, y2, z2, t2 = b
    p, q = (y1 - x1) * (y2 - x2) % _P, (y1 + x1) * (y2 + x2) % _P
    r, s = 2 * t1 * t2 * _D % _P, 2 * z1 * z2 % _P
    e, f, g, h = q - p, s - r, s + r, q + p
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _point(encoded: bytes) -> _Point:
    """Decode, canonical encodings only (section 5.1.3)."""
    y = int.from_bytes(encoded, "little")
    sign, y = y >> 255, y & (2**255 - 1)
    if len(encoded) != 32 or y >= _P:
        raise ValueError("not a canonical point")
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if x * x % _P != square:
        x = x * _ROOT_OF_MINUS_1 % _P
    if x * x % _P != square or (sign and not x):
        raise ValueError("not a point of the curve")
    if x & 1 != sign:
        x = _P - x
    return x, y, 1, x * y % _P


def _encoded(point: _Point) -> bytes:
    x, y, z, _ = point
    inverse = pow(z, -1, _P)
    return (y * inverse % _P | (x * inverse % _P & 1) << 255).to_bytes(32, "little")


_BASE = _point((4 * pow(5, -1, _P) % _P).to_bytes(32, "little"))


def check_ed25519(public: bytes, message: bytes, signature: bytes) -> None:
    """Raise ValueError unless the signature holds. Strict: canonical key and s, no key of small order, R byte for byte."""
    if len(signature) != 64:
        raise ValueError("an Ed25519 signature has 64 bytes")
    s = int.from_bytes(signature[32:], "little")
    if s >= _L:
        raise ValueError("s is not reduced")
    x, y, z, t = _point(public)
    key: _Point = (-x % _P, y, z, -t % _P)
    twice = _add(key, key)
    eight = _add(_add(twice, twice), _add(twice, twice))
    if _encoded(eight) == _encoded(_NEUTRAL):
        raise ValueError("the key has small order")
    h = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % _L
    addends = (_NEUTRAL, _BASE, key, _add(_BASE, key))
    total = _NEUTRAL
    for bit in range(max(s.bit_length(), h.bit_length()) - 1, -1, -1):
        total = _add(total, total)
        chosen = (s >> bit & 1) | (h >> bit & 1) << 1
        if chosen:
            total = _add(total, addends[chosen])
    if _encoded(total) != signature[:32]:
        raise ValueError("the signature does not hold")


# --- ECDSA over P-256 with SHA-256: FIPS 186-5, section 6.4.2, verification only, with public data only

_Q = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
_Affine = Optional[tuple[int, int]]  # noqa: UP045 — `|` between types is younger than auditors' Pythons
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)


def _sum(a: _Affine, b: _Affine) -> _Affine:
    """Of two points of the curve (SP 800-186, appendix A.1.1); None is the point at infinity."""
    if a is None or b is None:
        return a or b
    (x1, y1), (x2, y2) = a, b
    if x1 == x2 and (y1 + y2) % _Q == 0:
        return None
    slope = 3 * (x1 * x1 - 1) * pow(2 * y1, -1, _Q) if a == b else (y2 - y1) * pow(x2 - x1, -1, _Q)
    x = (slope * slope - x1 - x2) % _Q
    return x, (slope * (x1 - x) - y1) % _Q


def check_p256(public: bytes, message: bytes, signature: bytes) -> None:
    """Raise ValueError unless the signature (r | s, low s) holds under this uncompressed point (0x04 | x | y)."""
    x, y = int.from_bytes(public[1:33], "big"), int.from_bytes(public[33:], "big")
    if len(public) != 65 or public[0] != 4 or max(x, y) >= _Q or (y * y - x * x * x + 3 * x - _B) % _Q:
        raise ValueError("not a point of P-256")
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
    if len(signature) != 64 or not 0 < r < _N or not 0 < s <= _N // 2:
        raise ValueError("not r | s with a low s")
    inverse = pow(s, -1, _N)
    u = int.from_bytes(hashlib.sha256(message).digest(), "big") * inverse % _N
    v = r * inverse % _N
    addends: tuple[_Affine, ...] = (None, _G, (x, y), _sum(_G, (x, y)))
    total: _Affine = None
    for bit in range(max(u.bit_length(), v.bit_length()) - 1, -1, -1):
        total = _sum(_sum(total, total), addends[(u >> bit & 1) | (v >> bit & 1) << 1])
    if total is None or total[0] % _N != r:
        raise ValueError("the signature does not hold")


# --- C2SP signed-note v1.0.0 and tlog-checkpoint v1.0.0


class VerifierKey(NamedTuple):
    """A log's name and Ed25519 key (signature type 0x01)."""

    name: str
    public: bytes

    @property
    def id(self) -> bytes:
        """The first four bytes of SHA-256(name | 0x0A | 0x01 | key)."""
        return hashlib.sha256(self.name.encode() + b"\n\x01" + self.public).digest()[:4]

    @property
    def text(self) -> str:
        """`name+id+key`, as auditors pin it."""
        return "+".join((self.name, self.id.hex(), base64.b64encode(b"\x01" + self.public).decode()))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of `text`, in hexadecimal: binds both the key and the log's name."""
        return hashlib.sha256(self.text.encode()).hexdigest()


class Checkpoint(NamedTuple):
    """A tree head."""

    origin: str
    size: int
    root: bytes


def parse_key(text: str) -> VerifierKey:
    """Read `name+id+key`. Raises ValueError."""
    name, _, rest = text.partition("+")
    key_id, _, encoded = rest.partition("+")
    raw = _base64(encoded)
    key = VerifierKey(name, raw[1:])
    if not is_key_name(name) or len(raw) != 33 or raw[:1] != b"\x01" or key.id.hex() != key_id:
        raise ValueError("not an Ed25519 verifier key")
    return key


def is_key_name(name: str) -> bool:
    """A key name is not empty and holds no space, no plus and no control character."""
    return bool(name) and "+" not in name and name.isprintable() and not any(c.isspace() for c in name)


def parse_checkpoint(note: str) -> tuple[Checkpoint, bytes, list[tuple[str, bytes]]]:
    """The tree head, the signed bytes, and the signatures as (name, id | signature). Raises ValueError. Checks no signature."""
    if any(c < " " and c != "\n" for c in note) or not note.endswith("\n"):
        raise ValueError("not a signed note")
    text, blank, tail = note.rpartition("\n\n")
    lines = text.split("\n")
    if not blank or len(lines) < 3 or not all(lines) or not re.fullmatch(r"0|[1-9][0-9]{0,18}", lines[1]):
        raise ValueError("not a checkpoint")
    root = _base64(lines[2])
    signatures = [re.fullmatch(r"— ([^ +]+) ([A-Za-z0-9+/=]+)", line) for line in tail[:-1].split("\n")[:17]]
    found = [(match[1], _base64(match[2])) for match in signatures if match]
    if len(root) != 32 or int(lines[1]) > MAX_SIZE or len(found) != len(signatures) or len(found) > 16:
        raise ValueError("not a checkpoint")
    return Checkpoint(lines[0], int(lines[1]), root), (text + "\n").encode(), found


def check_checkpoint(note: str, key: VerifierKey) -> Checkpoint:
    """The tree head that this log signed, by `key` or by the last of those that it handed over to.

    Raises ValueError; signatures of others are passed over, as the note rules say.
    """
    checkpoint, signed, signatures = parse_checkpoint(note)
    chain = successors(signed, key)
    signer = chain[-1].key if chain else key
    ours = [raw[4:] for name, raw in signatures if name == signer.name and raw[:4] == signer.id]
    if not ours or checkpoint.origin != key.name:
        raise ValueError("not signed by this log")
    for signature in ours:
        check_ed25519(signer.public, signed, signature)
    return checkpoint


class Cosigner(NamedTuple):
    """Who co-signs a log's checkpoints after seeing that each continues the one before: a name and a point of P-256.

    As C2SP tlog-cosignature v1, with ECDSA in place of Ed25519: the key stays in an HSM that makes no other kind.
    """

    name: str
    public: bytes

    @property
    def id(self) -> bytes:
        """The first four bytes of SHA-256(name | 0x0A | type | key)."""
        return hashlib.sha256(self.name.encode() + b"\n" + COSIGNER_TYPE + self.public).digest()[:4]

    @property
    def text(self) -> str:
        """`name+id+key`, as auditors pin it."""
        return "+".join((self.name, self.id.hex(), base64.b64encode(COSIGNER_TYPE + self.public).decode()))


COSIGNER_TYPE = b"\xffcosignature/v1 ecdsa-p256-sha256"
"""Signed-note leaves 0xff to whoever spells the type out."""


def parse_cosigner(text: str) -> Cosigner:
    """Read `name+id+key`. Raises ValueError."""
    name, _, rest = text.partition("+")
    key_id, _, encoded = rest.partition("+")
    raw = _base64(encoded)
    key = Cosigner(name, raw[len(COSIGNER_TYPE) :])
    if not is_key_name(name) or not raw.startswith(COSIGNER_TYPE) or len(key.public) != 65 or key.id.hex() != key_id:
        raise ValueError("not a cosigner's key")
    return key


def cosigned_text(moment: int, signed: bytes) -> bytes:
    """What a cosigner signs of a checkpoint at this Unix time. No checkpoint begins like this: a log's name holds no space."""
    return f"cosignature/v1 of {len(signed)} bytes\ntime {moment}\n".encode() + signed


def is_cosigned(note: str, cosigner: Cosigner) -> bool:
    """Whether the note has a line of this cosigner's; nothing is checked."""
    return any(name == cosigner.name and raw[:4] == cosigner.id for name, raw in parse_checkpoint(note)[2])


def check_cosignature(note: str, cosigner: Cosigner) -> int:
    """The Unix time at which this cosigner signed. Raises ValueError if it did not, or if its signature does not hold."""
    _, signed, signatures = parse_checkpoint(note)
    found = [raw[4:] for name, raw in signatures if name == cosigner.name and raw[:4] == cosigner.id]
    if not found:
        raise ValueError("not cosigned")
    moments = [int.from_bytes(raw[:8], "big") for raw in found]
    for moment, raw in zip(moments, found):  # noqa: B905 — lengths are equal; `strict` is younger than auditors' Pythons
        check_p256(cosigner.public, cosigned_text(moment, signed), raw[8:])
    return max(moments)


class Successor(NamedTuple):
    """A key that the log handed over to, and the size above which the key before it signs no more."""

    key: VerifierKey
    size: int


def successors(signed: bytes, first: VerifierKey) -> list[Successor]:
    """The keys after `first`, from a checkpoint's extension lines `hand-over SIZE KEY SIGNATURE`. Raises ValueError.

    Each signature is the key's before it. A checkpoint carries every hand-over that there was, and stands alone.
    """
    chain: list[Successor] = []
    for line in signed.decode().split("\n")[3:-1]:
        if not line.startswith("hand-over "):
            continue
        words = line.split(" ")
        before = chain[-1] if chain else Successor(first, 0)
        if len(words) != 4 or len(chain) == MAX_SUCCESSORS or not re.fullmatch(r"0|[1-9][0-9]{0,18}", words[1]):
            raise ValueError("not a hand-over")
        found = Successor(parse_key(words[2]), int(words[1]))
        if found.key.name != first.name or not before.size <= found.size <= MAX_SIZE:
            raise ValueError("a hand-over of another log, or out of its order")
        check_ed25519(before.key.public, hand_over_text(found), _base64(words[3]))
        chain.append(found)
    return chain


def hand_over_text(successor: Successor) -> bytes:
    """What a key signs to hand over. No checkpoint begins like this: a log's name holds no space."""
    return f"audit log hand-over v1\n{successor.size}\n{successor.key.text}\n".encode()


def _base64(text: str) -> bytes:
    raw = base64.b64decode(text, validate=True)
    if base64.b64encode(raw).decode() != text:
        raise ValueError("not canonical base64")
    return raw


# --- Records: the canonical JSON of entries (RFC 8785 without floating point numbers)


def canonical_json(value: Any) -> bytes:
    """Names sorted, no blanks, UTF-8: one value, one spelling."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def commitment(salt: bytes, name: str, value: str | int | None) -> str:
    """What a leaf holds of a detail: SHA-256(salt | [name, value]) in hexadecimal."""
    return hashlib.sha256(salt + canonical_json([name, value])).hexdigest()


def strict_json(text: str | bytes) -> Any:
    """Parse JSON without doubled names, floating point numbers or deep nesting. Raises ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_float=_refuse, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is no number of ours")


# --- The bundle: one JSON object a line


class Report(NamedTuple):
    """What was proved."""

    origin: str
    size: int
    root: str
    first: int
    end: int
    intents: int
    completions: int
    disclosed: int
    newest: str
    consistent_with: int | None
    cosigned: dict[str, int]
    """The largest tree that each cosigner signed for, of those that this bundle shows."""


class Verifier:
    """Reads a bundle once, line by line, in memory that does not grow with it. `verify` raises VerificationFailed."""

    def __init__(
        self, fingerprint: str, since: str | None = None, newer_than: str = "", cosigners: Sequence[Cosigner] = ()
    ) -> None:
        self._fingerprint = fingerprint.strip().lower()
        self._since_note, self._newer_than = since, newer_than
        self._tree = Frontier()
        self._first = 0
        self._counters: dict[tuple[str, str], int] = {}
        self._kinds = {"intent": 0, "completion": 0}
        self._disclosed = 0
        self._newest = ""
        self._edited: VerificationFailed | None = None
        self._gap: VerificationFailed | None = None
        self._agreed: str | None = None
        self._disagreed: str | None = None
        self._since_root: bytes | None = None
        self._chain: list[Successor] = []
        self._cosigners = tuple(cosigners)
        self._cosigned: dict[Cosigner, str] = {}

    def verify(self, bundle: BinaryIO) -> Report:
        """Check everything. Raises VerificationFailed with the first thing that does not hold."""
        lines = _lines(bundle)
        self._begin(next(lines, {}))
        for line in lines:
            if "end" in line:
                if next(lines, None) is not None:
                    raise VerificationFailed("FORM", "something follows the last line")
                return self._finish(line)
            if "checkpoint" in line:
                self._passing(_get(line, "checkpoint", str))
            else:
                self._entry(line)
        raise VerificationFailed("GAP", f"the bundle breaks off after {self._tree.size} entries")

    def _begin(self, header: dict[str, Any]) -> None:
        if header.get("glottis_audit_bundle") != 1:
            raise VerificationFailed("FORM", "this is not an audit bundle of version 1")
        try:
            self._key = parse_key(_get(header, "key", str))
        except ValueError as error:
            raise VerificationFailed("FORM", str(error)) from error
        if self._key.fingerprint != self._fingerprint:
            raise VerificationFailed("SIG", f"the bundle's key has the fingerprint {self._key.fingerprint}, not the pinned one")
        self._first = _get(header, "first", int)
        self._cover(0, self._first, _hashes(header, "left"))
        self._since = self._signed(self._since_note) if self._since_note is not None else None
        self._remember_since()

    def _entry(self, line: dict[str, Any]) -> None:
        seq = _get(line, "seq", int)
        due = self._tree.size
        if seq != due:
            raise VerificationFailed("GAP", f"entry {seq} stands where {due} belongs", (due, due))
        entry = _exact(_get(line, "entry", str))
        digest = leaf_hash(entry)
        self._tree.push(digest)
        self._remember_since()
        if digest.hex() != _get(line, "leaf", str) and self._edited is None:
            self._edited = VerificationFailed("EDIT", "the entry is not the record that was written for it", (seq, seq))
        try:
            self._record(seq, strict_json(entry), line.get("disclosed", {}))
        except (ValueError, KeyError, TypeError, AttributeError):
            self._edited = self._edited or VerificationFailed("EDIT", "the entry is no record of this log", (seq, seq))

    def _record(self, seq: int, body: dict[str, Any], disclosed: dict[str, Any]) -> None:
        """Count it, follow its worker's counter, and compare what is disclosed with its commitment."""
        kind, counter = body["kind"], body["counter"]
        self._kinds[kind] += 1
        self._newest = max(self._newest, body["time"])
        stream = (kind, body["worker"])
        expected = self._counters.get(stream, 0 if self._first == 0 else counter)
        if counter != expected and self._gap is None:
            self._gap = VerificationFailed("GAP", f"worker {stream[1]} has {kind} {counter} after {expected - 1}", (seq, seq))
        self._counters[stream] = counter + 1
        if len(self._counters) > MAX_WORKERS:
            raise VerificationFailed("FORM", "more workers than any log has")
        for name, shown in disclosed.items():
            if commitment(bytes.fromhex(shown["salt"]), name, shown["value"]) != body["details"][name]:
                raise VerificationFailed("EDIT", f"the disclosed {name!r} is not what the entry committed to", (seq, seq))
            self._disclosed += 1

    def _passing(self, note: str) -> None:
        """An older checkpoint between entries: a mark for finding the edited entry, and the log's word to be held to."""
        try:
            checkpoint = parse_checkpoint(note)[0]
        except ValueError as error:
            raise VerificationFailed("FORM", str(error)) from error
        if checkpoint.size > self._tree.size:
            raise VerificationFailed("GAP", "an entry is missing here", (self._tree.size, self._tree.size))
        if checkpoint.size < self._tree.size:
            raise VerificationFailed("FORM", "a checkpoint stands in the wrong place")
        if self._disagreed is None:
            if checkpoint.root == self._tree.root():
                self._agreed = note
                self._remember_cosigned(note)
            else:
                self._disagreed = note

    def _finish(self, line: dict[str, Any]) -> Report:
        head = self._signed(_get(line, "checkpoint", str))
        if self._since_note is not None:
            self._signed(self._since_note)  # again: the newest checkpoint may know of a hand-over that this one did not
        end = self._tree.size
        if _get(line, "end", int) != end or end > head.size:
            raise VerificationFailed("GAP", f"the bundle holds entries up to {end}, and says something else")
        self._cover(end, head.size, _hashes(line, "right"))
        self._compare(head, end)
        self._remember_cosigned(_get(line, "checkpoint", str))
        self._compare_since(head, line)
        if self._newest < self._newer_than:
            raise VerificationFailed("STALE", f"the newest entry is from {self._newest or 'never'}")
        intents, completions = self._kinds["intent"], self._kinds["completion"]
        since = self._since.size if self._since else None
        root = head.root.hex()
        counted = (intents, completions, self._disclosed, self._newest)
        return Report(head.origin, head.size, root, self._first, end, *counted, since, self._cosignatures())

    def _remember_cosigned(self, note: str) -> None:
        """A checkpoint over the very entries that are here; the newest of each cosigner counts."""
        self._cosigned.update({one: note for one in self._cosigners if is_cosigned(note, one)})

    def _cosignatures(self) -> dict[str, int]:
        found = {}
        for cosigner, note in self._cosigned.items():
            checkpoint = self._signed(note)
            try:
                check_cosignature(note, cosigner)
            except ValueError as error:
                raise VerificationFailed("SIG", f"cosignature of {cosigner.name}: {error}") from error
            found[cosigner.name] = checkpoint.size
        return found

    def _compare(self, head: Checkpoint, end: int) -> None:
        """The recomputed root against the signed one; what differs is named as closely as the bundle allows."""
        whole = self._tree.root() == head.root
        if self._edited:
            raise self._edited
        if whole and self._disagreed:
            other = self._signed(self._disagreed)
            raise VerificationFailed("FORK", f"the log signed two different trees of {other.size} entries")
        if self._gap:
            raise self._gap
        if not whole:
            first = self._signed(self._agreed).size if self._agreed else self._first
            last = self._signed(self._disagreed).size if self._disagreed else end
            raise VerificationFailed("EDIT", "the entries do not give the signed root", (first, max(first, last - 1)))

    def _compare_since(self, head: Checkpoint, line: dict[str, Any]) -> None:
        since = self._since
        if since is None or since.size == 0:
            return
        if since.size > head.size:
            raise VerificationFailed("ROLLBACK", f"the log has {head.size} entries, and had signed {since.size}")
        root = head.root if since.size == head.size else self._since_root
        if root is None:
            proof = line.get("consistency") or {}
            if proof.get("from") != since.size:
                raise VerificationFailed("FORM", f"no proof from {since.size} entries here: export it with that checkpoint")
            try:
                check_consistency(since.size, since.root, head.size, head.root, _hashes(proof, "proof"))
            except ValueError as error:
                raise VerificationFailed("FORK", str(error)) from error
        elif root != since.root:
            raise VerificationFailed("FORK", f"the log signed two different trees of {since.size} entries")

    def _remember_since(self) -> None:
        if self._since is not None and self._since.size == self._tree.size >= self._first:
            self._since_root = self._tree.root()

    def _cover(self, start: int, end: int, hashes: list[bytes]) -> None:
        """Stand in for entries that were not exported: complete subtrees, by their hashes."""
        places = list(subtrees(start, end)) if 0 <= start <= end <= MAX_SIZE else None
        if places is None or len(places) != len(hashes):
            raise VerificationFailed("GAP", f"entries {start} to {end} are neither here nor stood for")
        for (_, level), digest in zip(places, hashes):  # noqa: B905 — lengths are equal; `strict` is younger than auditors' Pythons
            self._tree.push(digest, level)

    def _signed(self, note: str) -> Checkpoint:
        """The checkpoint, by the key that signed at its size as far as any checkpoint seen so far says."""
        try:
            checkpoint = check_checkpoint(note, self._key)
            chain = successors(parse_checkpoint(note)[1], self._key)
        except ValueError as error:
            raise VerificationFailed("SIG", f"checkpoint: {error}") from error
        shorter, self._chain = sorted((chain, self._chain), key=len)
        if self._chain[: len(shorter)] != shorter:
            raise VerificationFailed("FORK", "the log handed over to two different keys")
        if len(chain) < len(self._chain) and checkpoint.size > self._chain[len(chain)].size:
            raise VerificationFailed("SIG", "the checkpoint is signed by a key that had handed over to another")
        return checkpoint


def _lines(bundle: BinaryIO) -> Iterator[dict[str, Any]]:
    while raw := bundle.readline(MAX_LINE + 1):
        if len(raw) > MAX_LINE:
            raise VerificationFailed("FORM", f"a line is longer than {MAX_LINE} bytes")
        try:
            line = strict_json(raw.decode())
        except ValueError as error:
            raise VerificationFailed("FORM", f"a line is not JSON: {error}") from error
        if not isinstance(line, dict):
            raise VerificationFailed("FORM", "a line is no object")
        yield line


def _get(line: dict[str, Any], name: str, kind: type) -> Any:
    value = line.get(name)
    if type(value) is not kind:
        raise VerificationFailed("FORM", f"{name!r} is missing or of the wrong kind")
    return value


def _exact(text: str) -> bytes:
    """An entry's bytes; those that are not UTF-8 travel as lone surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise VerificationFailed("FORM", "an entry does not stand for bytes") from error


def _hashes(line: dict[str, Any], name: str) -> list[bytes]:
    try:
        hashes = [binascii.unhexlify(item) for item in _get(line, name, list)[:128]]
    except (ValueError, TypeError) as error:
        raise VerificationFailed("FORM", f"{name!r} holds no hashes") from error
    if any(len(item) != 32 for item in hashes):
        raise VerificationFailed("FORM", f"{name!r} holds no hashes")
    return hashes


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check a Glottis audit bundle against a pinned fingerprint.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--fingerprint", required=True, help="SHA-256 of the log's verifier key, from somewhere you trust")
    parser.add_argument("--since", type=Path, metavar="CHECKPOINT_FILE", help="a checkpoint you kept: the log must extend it")
    parser.add_argument("--cosigner", action="append", default=[], metavar="KEY", help="fail unless this key cosigned a checkpoint")
    parser.add_argument("--newer-than", default="", metavar="TIME", help="fail unless an entry is newer, e.g. 2026-11-30T18")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a sentence")
    try:
        options = parser.parse_args(arguments)
    except SystemExit as error:
        return 1 if error.code else 0
    try:
        since = _read_note(options.since) if options.since else None
        if not re.fullmatch("[0-9a-fA-F]{64}", options.fingerprint):
            raise ValueError("a fingerprint has 64 hexadecimal digits")
        cosigners = [parse_cosigner(text) for text in options.cosigner]
        _plain(options.bundle)
        with options.bundle.open("rb") as bundle:
            report = Verifier(options.fingerprint, since, options.newer_than, cosigners).verify(bundle)
        require_cosigned(report, cosigners)
    except VerificationFailed as failed:
        _say(options.json, {"ok": False, "word": failed.word, "entries": failed.entries, "message": failed.message}, str(failed))
        return 3
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    text = f"OK: {report.origin}, entries {report.first} to {report.end} of {report.size}, root {report.root}"
    text += "".join(f", cosigned up to {size} by {name}" for name, size in report.cosigned.items())
    _say(options.json, {"ok": True, **report._asdict()}, text)
    return 0


def require_cosigned(report: Report, cosigners: Sequence[Cosigner]) -> None:
    """Raises VerificationFailed where one of these cosigned no checkpoint of the bundle."""
    for cosigner in cosigners:
        if cosigner.name not in report.cosigned:
            raise VerificationFailed("SIG", f"{cosigner.name} cosigned no checkpoint of this bundle")


def _plain(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is not a plain file")


def _read_note(path: Path) -> str:
    _plain(path)
    with path.open("rb") as file:
        return file.read(MAX_LINE).decode()


def _say(as_json: bool, facts: dict[str, Any], text: str) -> None:
    sys.stdout.write((json.dumps(facts) if as_json else text) + "\n")


if __name__ == "__main__":
    sys.exit(main())
