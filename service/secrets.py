"""Secrets as settings name them: by the file that holds one, or the command that prints it."""

from __future__ import annotations

import shlex
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from service.errors import SecretRefused

_COMMAND_SECONDS = 15.0


@dataclass(frozen=True)
class Secret:
    """Where a secret is: a file, or a command that prints it. The secret itself is never kept here."""

    file: Path | None = None
    command: str | None = None

    def read(self) -> str:
        """The secret without its line end. Raises SecretRefused where it is missing, empty or open to other users."""
        value = self._from_command(self.command) if self.command else self._from_file()
        if not value:
            raise SecretRefused(f"the secret from {self} is empty")
        return value

    def _from_file(self) -> str:
        if self.file is None:
            raise SecretRefused("no file and no command is named for this secret")
        try:
            mode = self.file.stat().st_mode
            if stat.S_IMODE(mode) & 0o077:
                raise SecretRefused(f"{self.file} may be read by other users")
            return self.file.read_text().rstrip("\n")
        except OSError as error:
            raise SecretRefused(f"{self.file} cannot be read: {error.strerror}") from error

    def _from_command(self, command: str) -> str:
        try:
            done = subprocess.run(shlex.split(command), capture_output=True, check=False, timeout=_COMMAND_SECONDS, text=True)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SecretRefused(f"{self} did not run: {type(error).__name__}") from error
        if done.returncode != 0:
            raise SecretRefused(f"{self} ended with {done.returncode}")
        return done.stdout.rstrip("\n")

    def __str__(self) -> str:
        return f"the command {shlex.split(self.command)[0]!r}" if self.command else str(self.file)
