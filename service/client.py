"""A client of Glottis: mutual TLS, one DPoP key, and a fresh token for every call.

Use it as it is, or as the shortest complete example of what a client has to do. Beside this package it needs the keys in a
client folder alone (`client.pem`, `client.key`, `dpop.key`, `ca.pem`, `client.json`), which `glottis clients add` makes.
"""

from __future__ import annotations

import hashlib
import json
import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from policies.proofs import make_proof
from service.errors import PartMissing
from service.settings import Settings


class Refused(Exception):
    """Glottis answered with an error. `code` is stable; `fix` says what to do, `retry_after` after how many seconds, if at all."""

    def __init__(self, status: int, error: Mapping[str, Any], retry_after: str | None = None) -> None:
        self.status = status
        self.retry_after = retry_after
        self.code = str(error.get("code", "unreadable_answer"))
        self.fix = str(error.get("fix", ""))
        super().__init__(f"{self.code}: {error.get('message', '')}")


class VoiceClient:
    """Talks to one Glottis server as one client. Every call fetches its own single-use token."""

    def __init__(self, base_url: str, certificate: Path, key: Path, dpop_key: Path, ca: Path) -> None:
        self.base_url = base_url.rstrip("/")
        loaded = load_pem_private_key(dpop_key.read_bytes(), None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise TypeError("the DPoP key must be a P-256 key")
        self.dpop_key = loaded
        self._nonce: str | None = None
        # One context with the certificate loaded: httpx sends none when `cert=` and `verify="ca.pem"` meet.
        context = ssl.create_default_context(cafile=str(ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(certificate, key)
        self._http = httpx.Client(base_url=self.base_url, verify=context, timeout=60.0, trust_env=False)

    @classmethod
    def from_folder(cls, folder: str | Path, base_url: str | None = None) -> Self:
        """The client whose keys are in `folder`."""
        folder = Path(folder)
        known = json.loads((folder / "client.json").read_text())
        return cls(
            base_url or known["base_url"], folder / "client.pem", folder / "client.key", folder / "dpop.key", folder / "ca.pem"
        )

    @classmethod
    def named(cls, name: str) -> Self:
        """The development client that `glottis clients add NAME` made in this installation's state folder.

        Raises PartMissing where there is none.
        """
        folder = Settings.load(os.environ).client_dir(name)
        if not (folder / "client.json").exists():
            mend = f"Make one: glottis clients add {name} --role speaker (and what else it shall do)."
            raise PartMissing(f"there is no client {name} in {folder.parent}", fix=mend)
        return cls.from_folder(folder)

    def close(self) -> None:
        """Close the connections. Leaving a `with` block does it too."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # What clients do

    def record_consent(
        self, subject: str, purposes: Sequence[str], expires_at: str, evidence: str, territory: Sequence[str] = ("*",)
    ) -> dict[str, Any]:
        """Record what a speaker allowed; returns the consent with its `id`."""
        body = {
            "subject": subject,
            "purposes": list(purposes),
            "territory": list(territory),
            "expires_at": expires_at,
            "evidence": evidence,
        }
        return self._json("POST", "/v1/consents", self.token("consent"), json=body)

    def enrol(self, name: str, recordings: Sequence[bytes], consent: str | UUID) -> dict[str, Any]:
        """Enrol a speaker from recordings (any common audio format); returns the voice with its `id`."""
        files = _files(recordings)
        return self._json("POST", "/v1/voices", self.token("enrol", consent=consent), data={"name": name}, files=files)

    def ticket(self, consent: str | UUID, **terms: int) -> dict[str, Any]:
        """An upload `ticket` for an app without a certificate, for one enrolment; terms: `max_bytes`, `expires_in` (seconds)."""
        return self._json("POST", "/v1/uploads", self.token("enrol", consent=consent), json=terms)

    def voice(self, voice: str | UUID) -> dict[str, Any]:
        """Name and state of a voice."""
        return self._json("GET", f"/v1/voices/{voice}", self.token("read"))

    def voices(self) -> list[dict[str, Any]]:
        """The tenant's voices, by name and state."""
        return list(self._json("GET", "/v1/voices", self.token("read"))["voices"])

    def erase(self, voice: str | UUID) -> dict[str, Any]:
        """Erase a voice for good; returns when."""
        return self._json("DELETE", f"/v1/voices/{voice}", self.token("erase", voice=voice))

    def verify(self, voice: str | UUID, recording: bytes) -> str:
        """`match`, `uncertain` or `no_match`: is this recording the voice's speaker?"""
        files = {"audio": ("recording", recording, "application/octet-stream")}
        return str(self._json("POST", f"/v1/voices/{voice}/verify", self.token("compare", voice=voice), files=files)["band"])

    def ask_liveness(self, voice: str | UUID) -> dict[str, Any]:
        """Digits for the voice's speaker to say: `id`, `digits`, `expires_at`."""
        return self._json("POST", "/v1/liveness", self.token("liveness", voice=voice), json={"voice": str(voice)})

    def answer_liveness(self, voice: str | UUID, challenge: str, recording: bytes) -> str:
        """Send the recording that says the digits of this challenge (its `id`); returns the pass for one token."""
        files = {"audio": ("recording", recording, "application/octet-stream")}
        path = f"/v1/liveness/{challenge}"
        return str(self._json("POST", path, self.token("liveness", voice=voice), files=files)["liveness"])

    def approve(self, voice: str | UUID, text: str, client: str) -> str:
        """Agree that `client` has this text spoken in a voice that demands dual control; returns the approval for one token."""
        body = {"voice": str(voice), "text_sha256": hashlib.sha256(text.encode()).hexdigest(), "client": client}
        token = self.token("approve", voice=voice, text=text, client=client)
        return str(self._json("POST", "/v1/approvals", token, json=body)["approval"])

    def speak(
        self,
        voice: str | UUID,
        text: str,
        *,
        response_format: str = "wav",
        speed: float = 1.0,
        liveness: str | None = None,
        approval: str | None = None,
    ) -> bytes:
        """The text, spoken: a WAV file. `liveness`: the pass, `approval`: a second client's, for a voice that demands one."""
        body = {"model": "hibari", "input": text, "voice": str(voice), "response_format": response_format, "speed": speed}
        token = self.token("speak", voice=voice, text=text, liveness=liveness, approval=approval)
        return self.call("POST", "/v1/audio/speech", token, json=body).content

    # How they prove who they are

    def token(
        self,
        action: str,
        *,
        voice: str | UUID | None = None,
        consent: str | UUID | None = None,
        text: str | None = None,
        liveness: str | None = None,
        approval: str | None = None,
        client: str | None = None,
        bearer: bool = False,
    ) -> str:
        """A token for one act: it lives five seconds and works once.

        With `bearer`, bound to the certificate alone, which the voice must allow: send it as `Authorization: Bearer`.
        """
        wanted: dict[str, Any] = {"type": "glottis_voice", "actions": [action]}
        if voice is not None:
            wanted["voice"] = str(voice)
        if consent is not None:
            wanted["consent"] = str(consent)
        if text is not None:
            wanted["text_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        named = {"liveness": liveness, "approval": approval, "client": client}
        wanted |= {name: value for name, value in named.items() if value is not None}
        form = {"grant_type": "client_credentials", "authorization_details": json.dumps([wanted])}
        if bearer:
            answer = self.send("POST", "/oauth/token", {}, data=form)
        else:
            answer = self._proved("POST", "/oauth/token", None, data=form)
        return str(answer.json()["access_token"])

    def proof(self, method: str, path: str, token: str | None = None) -> str:
        """A DPoP proof (RFC 9449) for one request, with the server's last nonce where this clock is off."""
        return make_proof(self.dpop_key, method, self.base_url + path, access_token=token, nonce=self._nonce)

    def headers(self, method: str, path: str, token: str) -> dict[str, str]:
        """The two headers that present a token."""
        return {"Authorization": f"DPoP {token}", "DPoP": self.proof(method, path, token)}

    def call(self, method: str, path: str, token: str, **options: Any) -> httpx.Response:
        """One request with a token and its proof. Raises Refused."""
        return self._proved(method, path, token, **options)

    def _proved(self, method: str, path: str, token: str | None, **options: Any) -> httpx.Response:
        """One request with a proof; a second one with the server's nonce (RFC 9449 §8), if it asks for that. Raises Refused.

        The first used nothing up: the proof is looked at before anything else.
        """
        for last in (False, True):
            headers = {"DPoP": self.proof(method, path)} if token is None else self.headers(method, path, token)
            answer = self._http.request(method, path, headers=headers, **options)
            self._nonce = answer.headers.get("DPoP-Nonce", self._nonce)
            if last or answer.is_success or "DPoP-Nonce" not in answer.headers:
                break
        return _checked(answer)

    def send(self, method: str, path: str, headers: Mapping[str, str], **options: Any) -> httpx.Response:
        """One request with these headers over this client's certificate. Raises Refused."""
        return _checked(self._http.request(method, path, headers=dict(headers), **options))

    def _json(self, method: str, path: str, token: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.call(method, path, token, **options).json()
        return found


def enrol_by_ticket(http: httpx.Client, ticket: str, name: str, recordings: Sequence[bytes]) -> dict[str, Any]:
    """What an app does with its backend's ticket, over any connection to the server. Raises Refused."""
    headers = {"Authorization": f"Ticket {ticket}"}
    answer = http.post("/v1/enrolments", headers=headers, data={"name": name}, files=_files(recordings))
    voice: dict[str, Any] = _checked(answer).json()
    return voice


def _files(recordings: Sequence[bytes]) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("audio", (f"recording-{i}", data, "application/octet-stream")) for i, data in enumerate(recordings)]


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_success:
        return answer
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": f"HTTP {answer.status_code}"}
    raise Refused(answer.status_code, error, answer.headers.get("Retry-After"))
