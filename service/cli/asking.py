"""Questions to whoever sits at the terminal. Where nobody can answer, the message names the option that answers instead."""

from __future__ import annotations

import click

from service.errors import NobodyAnswers
from service.exits import Ended, Exit


def confirmed(question: str, *, instead: str = "give --yes") -> None:
    """Return where the answer is yes; end with 1 where it is no: nothing was done. Raises NobodyAnswers."""
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort as ended:
        raise _unanswered(ended, question, instead) from None
    if not agreed:
        click.echo("nothing was done", err=True)
        raise Ended(Exit.LOCAL)


def typed(what: str, *, instead: str, twice: bool = False) -> str:
    """A secret, which is not shown while it is typed. Raises NobodyAnswers."""
    try:
        return str(click.prompt(what, hide_input=True, confirmation_prompt=twice, err=True))
    except click.Abort as ended:
        raise _unanswered(ended, what, instead) from None


def _unanswered(ended: click.Abort, question: str, instead: str) -> Exception:
    # click tells Ctrl-C and the end of the input apart only by what it caught.
    if isinstance(ended.__context__, EOFError):
        click.echo(err=True)
        return NobodyAnswers(f"nobody answers here: {question}", fix=f"Run this at a terminal, or {instead}.")
    return ended
