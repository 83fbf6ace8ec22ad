"""`glottis headers`: a token and its proof for one request, for curl and for trying things out."""

from __future__ import annotations

from uuid import UUID

import click
import httpx

from service.client import VoiceClient
from service.errors import NotRunning

NEEDED = {"speak": ("voice", "text"), "compare": ("voice",), "enrol": ("consent",), "consent": (), "read": (), "erase": ("voice",)}


@click.command()
@click.argument("client")
@click.argument("action", type=click.Choice(list(NEEDED)))
@click.argument("method", type=click.Choice(["GET", "POST", "DELETE"]))
@click.argument("path")
@click.option("--voice", type=click.UUID, help="The voice to speak with, to compare with or to erase.")
@click.option("--consent", type=click.UUID, help="The consent to enrol under.")
@click.option("--text", help="The exact text to be spoken.")
@click.option(
    "--bearer", is_flag=True, help="A token bound to the certificate alone, where the voice allows it: one header, no proof."
)
def headers(
    client: str, action: str, method: str, path: str, voice: UUID | None, consent: UUID | None, text: str | None, bearer: bool
) -> None:
    """Fetch a token for one request and print its two headers, in the form that `curl -H @-` reads.

    The token lives five seconds and works once: pipe it straight into curl.

    \b
    glottis headers studio speak POST /v1/audio/speech --voice ID --text "Hello." |
      curl -H @- --cert client.pem --key client.key --cacert ca.pem -o hello.wav \\
        --json '{"voice": "ID", "input": "Hello."}' https://localhost:8443/v1/audio/speech
    """
    given = {"voice": voice, "consent": consent, "text": text}
    for name in NEEDED[action]:
        if given[name] is None:
            raise click.UsageError(f"--{name} is needed for {action}")
    with VoiceClient.named(client) as found:
        try:
            token = found.token(action, voice=voice, consent=consent, text=text, bearer=bearer)
        except httpx.TransportError as error:
            raise NotRunning(f"nothing answers at {found.base_url}") from error
        shown = {"Authorization": f"Bearer {token}"} if bearer else found.headers(method, path, token)
        for name, value in shown.items():
            click.echo(f"{name}: {value}")
