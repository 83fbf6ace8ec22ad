"""`glottis headers`: a token and its proof for one request, for curl and for trying things out."""

from __future__ import annotations

import os

import click

from service.client import VoiceClient
from service.errors import PartMissing
from service.settings import Settings


@click.command()
@click.argument("client")
@click.argument("action", type=click.Choice(["speak", "compare", "enrol", "consent", "read"]))
@click.argument("method", type=click.Choice(["GET", "POST"]))
@click.argument("path")
@click.option("--voice", help="The voice to speak with or compare with.")
@click.option("--consent", help="The consent to enrol under.")
@click.option("--text", help="The exact text to be spoken.")
def headers(client: str, action: str, method: str, path: str, voice: str | None, consent: str | None, text: str | None) -> None:
    """Fetch a token for one request and print its two headers, in the form that `curl -H @-` reads.

    The token lives five seconds and works once: pipe it straight into curl.

    \b
    glottis headers studio speak POST /v1/audio/speech --voice ID --text "Hello." |
      curl -H @- --cert … --key … --cacert … --json '{"voice":"ID","input":"Hello."}' https://localhost:8443/v1/audio/speech
    """
    folder = Settings.load(os.environ).client_dir(client)
    if not (folder / "client.json").exists():
        raise PartMissing(
            f"there is no client {client} in {folder.parent}", fix=f"Make one: glottis clients add {client} --tenant NAME"
        )
    with VoiceClient.from_folder(folder) as found:
        token = found.token(action, voice=voice, consent=consent, text=text)
        for name, value in found.headers(method, path, token).items():
            click.echo(f"{name}: {value}")
