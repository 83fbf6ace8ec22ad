"""`glottis headers`: a token and its proof for one request, for curl and for trying things out."""

from __future__ import annotations

from typing import Any

import click
import httpx

from policies.grants import Purpose
from service.client import VoiceClient
from service.errors import NotRunning

NEEDED = {
    Purpose.SPEAK: ("voice", "text"),
    Purpose.COMPARE: ("voice",),
    Purpose.ENROL: ("consent",),
    Purpose.CONSENT: (),
    Purpose.READ: (),
    Purpose.ERASE: ("voice",),
    Purpose.LIVENESS: ("voice",),
    Purpose.APPROVE: ("voice", "text", "speaker"),
}
"""Which options a purpose cannot do without."""


@click.command()
@click.argument("client")
@click.argument("action", type=click.Choice([purpose.value for purpose in NEEDED]))
@click.argument("method", type=click.Choice(["GET", "POST", "DELETE"]))
@click.argument("path")
@click.option("--voice", type=click.UUID, help="The voice that it is about; all but consent, enrol and read name one.")
@click.option("--consent", type=click.UUID, help="The consent to enrol under.")
@click.option("--text", help="The exact text to be spoken, or to be approved.")
@click.option("--speaker", help="For approve: the client that may have the text spoken.")
@click.option("--liveness", help="The pass that an answer to POST /v1/liveness/{id} gave, for a voice that demands it.")
@click.option("--approval", help="The approval of POST /v1/approvals, for a voice that demands it.")
@click.option(
    "--bearer", is_flag=True, help="A token bound to the certificate alone, where the voice allows it: one header, no proof."
)
def headers(client: str, action: str, method: str, path: str, *, bearer: bool, speaker: str | None, **named: Any) -> None:
    """Fetch a token for one request and print its two headers, in the form that `curl -H @-` reads.

    The token lives five seconds and works once: pipe it straight into curl.

    \b
    glottis headers studio speak POST /v1/audio/speech --voice ID --text "Hello." |
      curl -H @- --cert client.pem --key client.key --cacert ca.pem -o hello.wav \\
        --json '{"voice": "ID", "input": "Hello."}' https://localhost:8443/v1/audio/speech
    """
    given = {"speaker": speaker, **named}
    for name in NEEDED[Purpose(action)]:
        if given[name] is None:
            raise click.UsageError(f"--{name} is needed for {action}")
    with VoiceClient.named(client) as found:
        try:
            token = found.token(action, bearer=bearer, client=speaker, **named)
        except httpx.TransportError as error:
            raise NotRunning(f"nothing answers at {found.base_url}") from error
        shown = {"Authorization": f"Bearer {token}"} if bearer else found.headers(method, path, token)
        for name, value in shown.items():
            click.echo(f"{name}: {value}")
