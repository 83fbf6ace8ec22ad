"""`glottis demo`."""

from __future__ import annotations

from pathlib import Path

import click

from service import demo as story
from service.transcript import Transcript


@click.command()
@click.option("--speech", type=click.Path(file_okay=False, path_type=Path), default=story.SPEECH, help="Folder of recordings.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("demo-out"), show_default=True)
def demo(speech: Path, out: Path) -> None:
    """Run the main job on real speech, with attacks that are refused, in a state folder of its own.

    The folder is deleted afterwards; where a step fails it is kept, and the last lines say where it is and how to remove it.
    Writes the spoken sentence and the audit bundle to the folder named by --out.
    """
    story.run(story.Plan(speech.absolute(), out.absolute()), Transcript(click.echo))
