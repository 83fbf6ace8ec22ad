"""`glottis` called in this process, by its real entry point: for commands of which many are tried and none starts anything."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from subprocess import CompletedProcess
from unittest import mock

from service.cli.main import main


def glottis_here(*arguments: object, environ: Mapping[str, str], answer: str | None = None) -> CompletedProcess[str]:
    """What the command said and ended with, as if it had been a process of its own with these variables and this input."""
    argv = ["glottis", *(os.fsdecode(one) if isinstance(one, bytes) else str(one) for one in arguments)]
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(sys, "stdin", io.StringIO(answer or "")),
        mock.patch.dict(os.environ, environ, clear=True),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            return CompletedProcess(argv, int(ended.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("the command did not end as a process does")
