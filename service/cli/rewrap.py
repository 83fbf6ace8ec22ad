"""`glottis keys rewrap`: every voice's key under the master that serves, with progress on standard error."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import click

from keyvault.hsm import DEFAULT_RING
from service.cli.output import json_option, say
from service.cli.pins import rotation_option, rotation_pin
from service.exits import Ended, Exit
from service.rewrapping import MOST_WORKERS, Job, Total
from service.rewrapping import rewrap as run
from service.settings import Settings
from service.sync.admin import ask

_NAMED_ROWS = 50
"""Bad rows that are named for people; `--json` names all of them."""


@click.command()
@click.argument("ring", default=DEFAULT_RING)
@click.option(
    "--to", "target", type=click.IntRange(min=1), help="Refuse unless this version serves.  [default: the one that serves]"
)
@click.option("--workers", type=click.IntRange(1, MOST_WORKERS), default=2, show_default=True, help="Processes at once.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Keys a second, of all workers together, at most.")
@click.option("--dry-run", is_flag=True, help="Count what would be moved, by version, and move nothing.")
@rotation_option
@json_option
def rewrap(
    ring: str,
    target: int | None,
    workers: int,
    rate: float | None,
    dry_run: bool,
    rotation_pin_file: str | None,
    as_json: bool,
) -> None:
    """Move every key of RING under the version that serves, inside the token.

    Enrolling, speaking and erasing go on meanwhile. Run it again after whatever stopped it: what is left is found, what is done
    stays done, and with nothing left nothing is changed. Keys of compromised versions go first.

    Ends with 5 if a key could not be moved: it is named, with the reason (record_tampered: the row was changed outside Glottis;
    unwrap_rejected: the row is whole and the token refuses its key). Ends with 2 if the HSM stopped answering.
    """
    settings = Settings.load(os.environ)
    plan = ask(settings, "key_plan", ring=ring, target=target)
    held_back = [source for source in plan["sources"] if source["refused"]]
    if dry_run:
        say({**plan, "changed": False}, _planned(plan), as_json=as_json)
        return
    progress = Progress(plan["keys"])
    job, pin = Job(ring, plan["target"], workers, rate), rotation_pin(settings, rotation_pin_file)
    total = run(settings, job, progress.tell, pin) if plan["keys"] else Total()
    progress.end(total)
    facts = {
        "ring": ring,
        "target": plan["target"],
        "moved": total.moved,
        "left": total.left,
        "bad": [{"dek": dek, "reason": code} for dek, code in sorted(total.bad.items())],
        "held_back": held_back,
        "seconds": round(progress.seconds, 1),
    }
    say(facts, _moved(facts), as_json=as_json)
    if total.bad or total.left or held_back:
        raise Ended(Exit.PARTIAL)


class Progress:
    """How far a re-wrap is, with its rate and the time left, on standard error: one line a second, or one that changes."""

    def __init__(self, keys_: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys, self._clock = keys_, clock
        self._started = self._said = clock()
        self._in_place = sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    def tell(self, total: Total) -> None:
        """Say where it is, if the last word is a second old."""
        now = self._clock()
        if now - self._said >= 1.0:
            self._said = now
            click.echo(("\r" if self._in_place else "") + self.line(total), err=True, nl=not self._in_place)

    def line(self, total: Total) -> str:
        """`1200 of 5000 keys, 600/s, 6 s left`."""
        done = total.moved + len(total.bad)
        rate = done / self.seconds if self.seconds > 0 else 0.0
        left = f"{timedelta(seconds=round(max(0, self._keys - done) / rate))} left" if rate else "no key yet"
        bad = f", {len(total.bad)} not movable" if total.bad else ""
        return f"{done} of {self._keys} keys, {rate:.0f}/s, {left}{bad}"

    def end(self, total: Total) -> None:
        """The last word, where there was any."""
        if self._said != self._started:
            click.echo(("\r" if self._in_place else "") + self.line(total), err=True)


def _planned(plan: Mapping[str, Any]) -> list[str]:
    lines = [f"{plan['keys']} keys would be moved under ring/{plan['ring']}/{plan['target']}"]
    for source in plan["sources"]:
        why = f"; they stay: {source['refused']['said']}" if source["refused"] else ""
        lines.append(f"  from version {source['version']} ({source['state'] or 'unknown'}): {source['keys']} keys{why}")
    return lines


def _moved(facts: Mapping[str, Any]) -> list[str]:
    lines = [f"{facts['moved']} keys moved under ring/{facts['ring']}/{facts['target']} in {facts['seconds']} s"]
    lines += [f"  not moved: {row['dek']}: {row['reason']}" for row in facts["bad"][:_NAMED_ROWS]]
    more = len(facts["bad"]) - _NAMED_ROWS
    lines += [f"  and {more} more; --json names all"] if more > 0 else []
    lines += [f"  {facts['left']} keys were changed by others again and again; run this again"] if facts["left"] else []
    lines += [f"  {one['keys']} keys stay under version {one['version']}: {one['refused']['said']}" for one in facts["held_back"]]
    return lines
