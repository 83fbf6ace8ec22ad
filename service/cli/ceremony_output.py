"""How `glottis keys ceremony` shows the messages so far: what people compare, and the file that goes to the other side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from keyvault.ceremony_messages import ORDER, Step, Transcript
from service.cli.main import say_json
from service.officers import fingerprint, grouped


def file_name(story: Transcript, step: Step) -> str:
    """The file of one step, named so that a folder lists a ceremony in order."""
    return f"{story.plan.ring}-{story.plan.version}.{ORDER.index(step) + 1}-{step}"


def tell(story: Transcript, out: Path | None, *, as_json: bool) -> None:
    """Write the message for the other side and show what was written."""
    place = out or Path(file_name(story, story.newest.step))
    place.write_bytes(story.encode())
    if as_json:
        say_json(story_facts(story) | {"file": str(place)})
        return
    for line in story_lines(story):
        click.echo(line)
    click.echo(f"written to {place}: give it to the other officer, who must see the same fingerprint")


def say_story(story: Transcript, sentence: str, *, as_json: bool) -> None:
    """Show the messages so far, and a sentence about them."""
    if as_json:
        say_json(story_facts(story))
        return
    for line in story_lines(story):
        click.echo(line)
    click.echo(sentence)


def fingerprints(story: Transcript) -> dict[str, str]:
    """What is compared aloud, by step."""
    return {one.message.step.value: fingerprint(one.message.encode()) for one in story.messages}


def story_facts(story: Transcript) -> dict[str, Any]:
    """The messages so far as JSON."""
    plan = story.plan
    sides = {
        name: {"site": seat.site, "token": seat.token_serial, "officer": seat.officer}
        for name, seat in (("maker", plan.maker), ("receiver", plan.receiver))
    }
    about = {"cluster": plan.cluster, "ring": plan.ring, "version": plan.version, "step": story.newest.step.value}
    return about | sides | {"fingerprints": fingerprints(story), "complete": story.complete}


def story_lines(story: Transcript) -> list[str]:
    """The messages so far for people."""
    plan = story.plan
    lines = [f"ring {plan.ring}, version {plan.version}, cluster {plan.cluster}, roster {grouped(plan.roster)}"]
    for name, seat in (("made", plan.maker), ("received", plan.receiver)):
        lines.append(f"{name} at site {seat.site} by {seat.officer}, in the token {seat.token_serial}")
    return lines + [f"{step.ljust(8)} {said}" for step, said in fingerprints(story).items()]
