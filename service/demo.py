"""The main job, start to end, on real speech: `glottis demo`.

Everything runs as in production, in a state folder of its own, deleted at the end unless a step failed: two sites, each with an
embedded Postgres and SoftHSM tokens of its own, edge, vault and log under `glottis up`. Nothing here reaches into the processes; it
calls the API like anybody else, and writes to the database only where it plays an attacker who can.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import wave
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from service import clients, demo_keys
from service.audit_bundles import export_bundle, verify_bundle
from service.client import VoiceClient
from service.demo_attacks import DemoFailed, Scene, all_attacks
from service.isolation import establish
from service.settings import Settings
from service.site import Site
from service.transcript import Transcript
from voiceprints.activity import Activity
from voiceprints.decoding import decode
from voiceprints.embedding import SIZE, Vector, centre, cosine
from voiceprints.encoder import Encoder

SPEECH = Path(__file__).parent.parent / "examples" / "speech"
SPEAKER, ANOTHER = "1998", "2033"
TEXT = "My voice is my own. It opens only for the key."
_START_S, _STOP_S = 180.0, 15.0
"""The first start makes tokens, two databases and the first master; a stop is given 12 s by the supervisor."""


@dataclass(frozen=True)
class Plan:
    """What the demo works with: recordings, and where the finished speech goes."""

    speech: Path
    out: Path

    def recordings(self, speaker: str) -> list[bytes]:
        found = sorted((self.speech / speaker).glob("*.flac"))
        if len(found) < 4:
            raise DemoFailed(f"{self.speech / speaker} holds {len(found)} recordings", fix="Name the folder with --speech.")
        return [path.read_bytes() for path in found]


def run(plan: Plan, transcript: Transcript) -> None:
    """Run the demo. Raises ServiceError where a step does not hold; leaves no process, and a state folder only then."""
    plan.recordings(SPEAKER)
    plan.out.mkdir(parents=True, exist_ok=True)
    with _state_folder(transcript) as folder:
        # Destructions are due at once here; an installation keeps a delay in which they can be cancelled.
        variables = {"GLOTTIS_STATE_DIR": str(folder), "GLOTTIS_PORT": str(_free_port()), "GLOTTIS_DESTROY_DELAY_HOURS": "0"}
        settings = Settings.load(variables)
        with ExitStack() as stack:
            with _started(settings, transcript) as up:
                scene = _registered(settings, plan, transcript, stack)
                _main_job(scene, plan)
                officers = demo_keys.Officers(settings)
                _keys_changed(scene, officers, plan, up)
                with transcript.step("The audit log, exported and verified by the stand-alone verifier under a pinned fingerprint"):
                    _audited(settings, plan, transcript)
            with transcript.step("A database of before the erasure is put back, and two officers adopt it beside the newer token"):
                demo_keys.adopted(officers, folder.parent / "backup")
            with _started(settings, transcript), transcript.step("The erased voice stays shut"):
                demo_keys.still_shut(scene)
    transcript.fact(f"Everything held, in {transcript.seconds:.0f} s. Listen to {plan.out / 'speech.wav'}.")


def _registered(settings: Settings, plan: Plan, transcript: Transcript, stack: ExitStack) -> Scene:
    with transcript.step("Two clients registered: certificate from the officer token's CA, DPoP key of their own"):
        honest, other = (
            stack.enter_context(VoiceClient.from_folder(clients.add(settings, name, tenant="demo", roles=clients.ALL_ROLES)))
            for name in ("studio", "rival")
        )
    with transcript.step(f"LibriSpeech speaker {SPEAKER} enrolled over mutual TLS 1.3, with a consent record"):
        return _enrolled(settings, honest, other, plan, transcript)


def _main_job(scene: Scene, plan: Plan) -> None:
    transcript = scene.transcript
    with transcript.step("Verified: another utterance of the speaker, and another speaker"):
        _verified(scene, plan)
    with transcript.step("A sentence spoken in the voice's colour, under a token that is bound to keys, voice and text"):
        _spoken(scene, plan)
    with transcript.step("Attacks"):
        all_attacks(scene)


def _keys_changed(scene: Scene, officers: demo_keys.Officers, plan: Plan, up: int) -> None:
    transcript = scene.transcript
    with transcript.step("The master key rotated at both sites by two officers, every voice's key moved inside the token"):
        demo_keys.rotated(scene, officers)
    with transcript.step("Site B stopped, and back"):
        demo_keys.alone_and_back(scene, officers, lambda: demo_keys.second_site(up))
    with transcript.step("A voice erased, and shredded at once by a rotation"):
        demo_keys.erased_for_good(scene, officers, officers.settings.state_dir.parent / "backup", plan.out)


def _enrolled(settings: Settings, honest: VoiceClient, other: VoiceClient, plan: Plan, transcript: Transcript) -> Scene:
    expiry = (datetime.now(UTC) + timedelta(days=30)).isoformat()
    voices, consents = [], []
    for speaker in (SPEAKER, ANOTHER):
        consent = honest.record_consent(
            f"LibriSpeech speaker {speaker}", ["speak", "compare"], expiry, "CC BY 4.0 recording, used for this demonstration"
        )
        voice = honest.enrol(f"speaker {speaker}", plan.recordings(speaker)[:3], consent["id"])
        voices.append(voice["id"])
        consents.append(consent["id"])
        quality = voice["quality"]
        transcript.fact(
            f"voice {voice['id']}: {quality['speech_seconds']:.1f} s of speech, {quality['snr_db']:.0f} dB over noise,"
            f" sealed under key version {voice['key_version']}"
        )
    return Scene(settings, honest, other, voices[0], voices[1], consents[0], transcript)


def _verified(scene: Scene, plan: Plan) -> None:
    same, different = plan.recordings(SPEAKER)[3], plan.recordings(ANOTHER)[3]
    for whose, recording, wanted in (("the speaker", same, "match"), ("another speaker", different, "no_match")):
        band = scene.honest.verify(scene.voice, recording)
        scene.transcript.fact(f"{whose}: {band}")
        if band != wanted:
            raise DemoFailed(f"{whose} was answered {band}, not {wanted}")


def _spoken(scene: Scene, plan: Plan) -> None:
    audio = scene.honest.speak(scene.voice, TEXT)
    path = plan.out / "speech.wav"
    path.write_bytes(audio)
    with wave.open(str(path)) as file:
        seconds = file.getnframes() / file.getframerate()
    scene.transcript.fact(f"{path}: {seconds:.1f} s, SHA-256 {hashlib.sha256(audio).hexdigest()[:16]}…")
    enrolled = plan.recordings(SPEAKER)[:3]
    spoken, itself = similarity(enrolled, [audio]), similarity(enrolled, plan.recordings(SPEAKER)[3:4])
    scene.transcript.fact(
        f"its similarity to the voiceprint: {spoken:.2f} (GE2E cosine; the speaker's own next utterance: {itself:.2f})"
    )
    scene.transcript.fact("That is voice colour, not a clone: closed-form numbers measured at enrolment colour one model voice.")


def similarity(enrolled: Sequence[bytes], others: Sequence[bytes]) -> float:
    """Cosine of two sets of recordings under the encoder, measured here from the recordings: the vault gives no scores."""
    encoder, activity = Encoder(), Activity()

    def embedding(uploads: Sequence[bytes]) -> Vector:
        samples = [decode(upload).samples for upload in uploads]
        speech = [activity.speech(part).only(part) for part in samples]
        found = np.zeros(SIZE, dtype=np.float32)
        centre(encoder.windows(speech, np.zeros), found)
        return found

    return cosine(embedding(enrolled), embedding(others))


def _audited(settings: Settings, plan: Plan, transcript: Transcript) -> None:
    fingerprint = Site.load(settings.site_file).audit_key.fingerprint
    bundle = plan.out / "audit.jsonl"
    bundle.unlink(missing_ok=True)
    size = export_bundle(settings, bundle)
    verdict = verify_bundle(bundle, fingerprint)
    if not verdict.holds:
        raise DemoFailed(f"the untouched bundle does not verify: {verdict.said}")
    transcript.fact(f"{size} entries hold under fingerprint {fingerprint[:16]}…")
    forged = plan.out / "audit-forged.jsonl"
    forged.write_bytes(_one_byte_changed(bundle.read_bytes()))
    verdict = verify_bundle(forged, fingerprint)
    if verdict.holds or "EDIT" not in verdict.said:
        raise DemoFailed(f"one changed byte was not named: {verdict.said}")
    transcript.fact(f"one byte changed: {verdict.said}")
    refused = verify_bundle(bundle, "0" * 64)
    if refused.holds:
        raise DemoFailed("a bundle verified under a fingerprint that is not the log's")


def _one_byte_changed(bundle: bytes) -> bytes:
    """An outcome `denied` rewritten: what somebody with something to hide would change."""
    lines = bundle.split(b"\n")
    for number, line in enumerate(lines):
        if b"denied" in line:
            lines[number] = line.replace(b"denied", b"denieb", 1)
            return b"\n".join(lines)
    raise DemoFailed("the bundle holds no refusal to rewrite")


@contextmanager
def _state_folder(transcript: Transcript) -> Iterator[Path]:
    """A folder of the demo's own, which the parts' users may enter; its parents stay as they are.

    It is deleted afterwards; where a step failed it is kept, because its logs say why.
    """
    folder = Path(tempfile.mkdtemp(prefix="glottis-demo-"))
    folder.chmod(0o711)
    try:
        yield folder / "state"
    except Exception:
        transcript.fact(f"a step failed; its state folder is kept, with the logs of every part in {folder / 'state' / 'log'}")
        transcript.fact(f"to look at it: GLOTTIS_STATE_DIR={folder / 'state'} glottis doctor")
        transcript.fact(f"to remove it: rm -r {folder}")
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _started(settings: Settings, transcript: Transcript) -> Iterator[int]:
    """`glottis up` in a process of its own, ready to serve, by its number; stopped at the end, whatever happens."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GLOTTIS_")} | settings.environ()
    first = not settings.site_file.exists()
    made = "tokens, the first master by a two-site ceremony, CA, certificates, Postgres 18, two sites that proved their keys"
    with transcript.step(f"Bring-up: {made}" if first else "Started again"):
        up = subprocess.Popen(
            [sys.executable, "-P", "-m", "service.cli.main", "up"], env=environ, stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            _await_ready(up)
        except BaseException:
            _stop(up)
            raise
        transcript.fact(establish(settings.state_dir).describe())
    try:
        yield up.pid
    finally:
        transcript.fact("stopping")
        _stop(up)


def _await_ready(up: subprocess.Popen[bytes]) -> None:
    assert up.stdout is not None
    said, late = b"", threading.Event()

    def give_up() -> None:
        late.set()
        up.kill()

    timer = threading.Timer(_START_S, give_up)
    timer.start()
    try:
        for line in up.stdout:
            said = line
            if b"serving" in line:
                return
    finally:
        timer.cancel()
    how = f"did not serve within {_START_S:.0f} s" if late.is_set() else "ended"
    raise DemoFailed(f"glottis up {how}: {said.decode(errors='replace').strip()}", fix="Run `glottis doctor`.")


def _stop(up: subprocess.Popen[bytes]) -> None:
    if up.poll() is None:
        up.send_signal(signal.SIGTERM)
        try:
            up.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            up.kill()
            up.wait()
    if up.stdout is not None:
        up.stdout.close()
