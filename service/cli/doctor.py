"""`glottis doctor`."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from service.checks import examine, worst
from service.cli.main import say_json
from service.exits import Ended, Exit
from service.findings import Finding
from service.settings import Settings

_MARKS = {"ok": "ok   ", "note": "note ", "fails": "FAILS"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """Check module, tokens, refusal probes, a real unwrap, database, models, isolation and processes; name each mend.

    Ends with 0 if nothing fails; else with the gravest: 3 integrity, 2 HSM, 6 conflict, 4 refused, 1 this machine, 5 in part,
    75 try again.
    """
    settings = Settings.load(os.environ)
    findings: list[Finding] = []
    for finding in examine(settings):
        findings.append(finding)
        if not as_json:
            click.echo(f"{_MARKS[finding.state]}  {finding.part}: {finding.said}")
            if finding.mend:
                click.echo(f"       {'To mend it' if finding.state == 'fails' else 'Consider'}: {finding.mend}")
    code = worst(findings)
    if as_json:
        say_json({"findings": [asdict(finding) for finding in findings], "exit": int(code)})
    if code is not Exit.OK:
        raise Ended(code)
