"""The operator's commands to the site process: JSON over HTTP on a Unix socket, which only whoever started Glottis may open.

`ask` is the client for the command line and the supervisor; the other end is `service.sync.operator`. A command runs to its
end even if the asker leaves: each is safe to give again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import Any

from service.errors import NotRunning, SiteBusy
from service.settings import Settings

Facts = dict[str, Any]
ANSWER_SECONDS = 120.0


class SiteRefused(Exception):
    """What the site process refused, with its own code, so that a command ends with the exit code of that."""

    def __init__(self, code: str, message: str, fix: str) -> None:
        super().__init__(message)
        self.code, self.fix = code, fix


def ask(settings: Settings, call: str, *, timeout_s: float = ANSWER_SECONDS, **request: Any) -> Facts:
    """Give one command to this folder's site process and return what it answers. Raises SiteRefused, SiteBusy, NotRunning."""
    connection = http.client.HTTPConnection("site")
    with socket.socket(socket.AF_UNIX) as unix, contextlib.closing(connection):
        unix.settimeout(timeout_s)
        try:
            unix.connect(str(settings.admin_socket))
            connection.sock = unix
            connection.request("POST", f"/{call}", json.dumps(request), {"Connection": "close"})
            answer: Facts = json.loads(connection.getresponse().read())
        except PermissionError as error:
            raise NotRunning("another user started this Glottis", fix="Run this as the user who started it.") from error
        except TimeoutError as error:
            raise SiteBusy(f"no answer within {timeout_s:.0f} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NotRunning(f"no site process answers in {settings.state_dir}") from error
    if "error" in answer:
        raise SiteRefused(**answer["error"])
    return answer
