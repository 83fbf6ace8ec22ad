"""The main job from the outside: enrol, verify, speak, look up; and what stands in the log afterwards."""

from __future__ import annotations

import io
import json
import ssl
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from installation import Installation, recordings

from service.audit_bundles import export_bundle, verify_bundle
from service.client import Refused
from service.site import Site

TEXT = "The quick brown fox jumps over the lazy dog."


def test_the_speaker_matches_and_others_do_not(running: Installation, voice: str) -> None:
    client = running.client("studio")
    assert client.verify(voice, recordings("1998")[3]) == "match"
    assert client.verify(voice, recordings("2033")[3]) == "no_match"
    assert client.verify(voice, recordings("2414")[3]) == "no_match"


def test_speech_is_a_wav_file_of_the_right_length(running: Installation, voice: str) -> None:
    audio = running.client("studio").speak(voice, TEXT)
    with wave.open(io.BytesIO(audio)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        seconds = file.getnframes() / file.getframerate()
    assert 1.5 < seconds < 8
    pcm = running.client("studio").speak(voice, TEXT, response_format="pcm")
    assert len(pcm) == len(audio) - 44


def test_a_voice_answers_only_to_its_tenant(running: Installation, voice: str) -> None:
    from service import clients
    from service.client import VoiceClient

    folder = clients.add(running.settings, "stranger", tenant="elsewhere", roles=clients.ALL_ROLES)
    with VoiceClient.from_folder(folder) as stranger:
        for attempt in (
            lambda: stranger.speak(voice, TEXT),
            lambda: stranger.verify(voice, recordings("1998")[3]),
            lambda: stranger.voice(voice),
        ):
            with pytest.raises(Refused) as refused:
                attempt()
            assert (refused.value.status, refused.value.code) == (404, "voice_unknown")


def test_without_a_certificate_every_call_reads_a_clear_401(running: Installation, voice: str) -> None:
    """D9: the certificate reaches the application over real TLS (every other test here rests on it), and so does its absence."""
    context = ssl.create_default_context(cafile=str(running.settings.officer_dir / "ca.pem"))
    with httpx.Client(base_url=running.settings.public_base_url, verify=context) as bare:
        calls = [
            ("POST", "/oauth/token"),
            ("GET", "/v1/voices"),
            ("GET", f"/v1/voices/{voice}"),
            ("POST", f"/v1/voices/{voice}/verify"),
        ]
        for method, path in calls:
            answer = bare.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "certificate_required"), path
        assert bare.get("/healthz").json() == {"status": "ok"}
        assert bare.get("/readyz").json() == {"status": "ready"}
        assert bare.get("/.well-known/jwks.json").json()["keys"][0]["crv"] == "P-256"
        assert bare.get("/").json()["name"] == "glottis"


def test_tls_below_1_3_is_refused(running: Installation) -> None:
    context = ssl.create_default_context(cafile=str(running.settings.officer_dir / "ca.pem"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with httpx.Client(base_url=running.settings.public_base_url, verify=context) as old, pytest.raises(httpx.ConnectError):
        old.get("/healthz")


def test_bad_input_gets_a_code_and_leaves_nothing_behind(running: Installation, voice: str) -> None:
    client = running.client("studio")
    before = client.voices()
    consent = client.record_consent("nobody", ["speak"], "2100-01-01T00:00:00Z", "none")["id"]
    silence = (
        b"RIFF"
        + (36 + 320_000).to_bytes(4, "little")
        + b"WAVEfmt "
        + bytes.fromhex("1000000001000100803e0000007d00000200100064617461")
    )
    cases = {
        b"/home/somebody/voice.mp3": (415, "not_audio"),
        silence + (320_000).to_bytes(4, "little") + bytes(320_000): (422, "quality_refused"),
        b"": (422, "audio_empty"),
    }
    for upload, expected in cases.items():
        with pytest.raises(Refused) as refused:
            client.enrol("nobody", [upload], consent)
        assert (refused.value.status, refused.value.code) == expected
    with pytest.raises(Refused) as refused:
        client.speak(voice, " \u200b\n")
    assert (refused.value.status, refused.value.code) == (422, "empty_input")
    assert client.voices() == before


def test_consent_is_needed_for_the_purpose(running: Installation) -> None:
    client = running.client("studio")
    consent = client.record_consent("speaker 2033", ["compare"], "2100-01-01T00:00:00Z", "CC BY 4.0")["id"]
    voice = client.enrol("only comparing", recordings("2033")[:3], consent)["id"]
    assert client.verify(voice, recordings("2033")[3]) == "match"
    with pytest.raises(Refused) as refused:
        client.speak(voice, TEXT)
    assert (refused.value.status, refused.value.code) == (403, "consent_purpose")


def test_thirty_two_requests_at_once(running: Installation, voice: str) -> None:
    client = running.client("studio")
    client.speak(voice, TEXT)
    before = _resources(running)

    def speak(number: int) -> int:
        return len(client.speak(voice, f"Request number {number} is spoken in the same voice."))

    with ThreadPoolExecutor(32) as threads:
        sizes = list(threads.map(speak, range(32)))
    assert min(sizes) > 50_000
    after = _resources(running)
    assert after.keys() == before.keys(), "a process was lost or left over"
    assert all(after[pid] <= before[pid] + 40 for pid in before), (before, after)


def _resources(running: Installation) -> dict[int, int]:
    """Open descriptors of each of our processes; Postgres backends, which come and go with the pool, are left out."""
    pids = [pid for part in ("service.vault", "service.edge", "service.log") for pid in running.pid_of(part)]
    return {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids}


def test_logs_hold_no_secrets(running: Installation, voice: str) -> None:
    client = running.client("studio")
    token = client.token("speak", voice=voice, text="a sentence that must not be logged")
    client.call("POST", "/v1/audio/speech", token, json={"input": "a sentence that must not be logged", "voice": voice})
    pin = running.settings.serving_pin.read()
    logged = b"".join(path.read_bytes() for path in running.settings.log_dir.iterdir())
    for secret in (token, token.split(".")[2], pin, "a sentence that must not be logged"):
        assert secret.encode() not in logged
    lines = [json.loads(line) for line in (running.settings.log_dir / "log.log").read_text().splitlines()]
    lines += [json.loads(line) for line in (running.settings.log_dir / "vault-0.log").read_text().splitlines()]
    assert "log_opened" in [line["event"] for line in lines]


def test_vault_and_log_talk_to_nobody_but_their_own(running: Installation, voice: str) -> None:
    """No network socket in a process that holds a PIN: only Unix sockets, to the edge and the database."""
    running.client("studio").speak(voice, TEXT)
    network = set()
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            network.add(f"socket:[{line.split()[9]}]")
    vaults, logs = running.pid_of("service.vault"), running.pid_of("service.log")
    assert vaults
    assert logs
    assert network
    for pid in vaults + logs:
        links = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
        assert not links & network
        assert not [link for link in links if "telemetry" in link.lower() or "onnxruntime.db" in link]
        assert b"ORT_DISABLE_TELEMETRY=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_the_log_tells_it_all_and_verifies_alone(running: Installation, voice: str, tmp_path: Path) -> None:
    client = running.client("studio")
    client.speak(voice, TEXT)
    text = "said twice"
    token = client.token("speak", voice=voice, text=text)
    body = {"input": text, "voice": voice}
    intent = client.call("POST", "/v1/audio/speech", token, json=body).headers["x-glottis-intent"]
    with pytest.raises(Refused):
        client.call("POST", "/v1/audio/speech", token, json=body)
    bundle = tmp_path / "bundle.jsonl"
    fingerprint = Site.load(running.settings.site_file).audit_key.fingerprint
    _wait_for_entry(running, bundle, intent)
    assert verify_bundle(bundle, fingerprint).holds
    assert not verify_bundle(bundle, "0" * 64).holds
    said = bundle.read_text()
    assert text not in said
    assert voice not in said


def _wait_for_entry(running: Installation, bundle: Path, intent: str) -> None:
    import time

    for _ in range(50):
        bundle.unlink(missing_ok=True)
        export_bundle(running.settings, bundle)
        if intent in bundle.read_text():
            return
        time.sleep(0.1)
    raise AssertionError("the request's intent never reached the log")
