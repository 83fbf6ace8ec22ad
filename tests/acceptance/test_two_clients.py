"""A voice that demands dual control, and hours, from the outside: by the operator's commands and two clients' requests."""

from __future__ import annotations

import pytest
from cli_here import glottis_here
from installation import VARIABLES, Installation

from service.client import Refused, VoiceClient

TEXT = "Two of us agreed on this."


def glottis(running: Installation, *arguments: str) -> None:
    done = glottis_here(*arguments, environ=VARIABLES | running.settings.environ())
    assert done.returncode == 0, done.stderr


def refused(expected: tuple[int, str], call, *arguments, **options) -> None:
    with pytest.raises(Refused) as told:
        call(*arguments, **options)
    assert (told.value.status, told.value.code) == expected, told.value


def test_what_a_second_client_approved_is_spoken_once(running: Installation, voice: str) -> None:
    studio, second = running.client("studio"), running.client("second")
    glottis(running, "voices", "dual-control", voice)
    try:
        _both_agree(studio, second, voice)
    finally:
        glottis(running, "voices", "dual-control", voice, "--off", "--yes")
    assert studio.speak(voice, TEXT)[:4] == b"RIFF"


def _both_agree(studio: VoiceClient, second: VoiceClient, voice: str) -> None:
    refused((403, "dual_control_required"), studio.speak, voice, TEXT)
    refused((403, "dual_control_own"), studio.approve, voice, TEXT, "studio")
    approval = second.approve(voice, TEXT, "studio")
    refused((401, "dual_control_invalid"), studio.speak, voice, "Another text.", approval=approval)
    refused((401, "dual_control_invalid"), second.speak, voice, TEXT, approval=approval)
    assert studio.speak(voice, TEXT, approval=approval)[:4] == b"RIFF"
    refused((401, "dual_control_used"), studio.speak, voice, TEXT, approval=approval)


def test_hours_by_the_operators_command(running: Installation, voice: str) -> None:
    second = running.client("second")
    assert second.voice(voice)["id"] == voice
    glottis(
        running, "clients", "hours", "second", "--days", "mon-sun", "--from", "00:00", "--to", "24:00", "--zone", "Europe/Zurich"
    )
    assert second.voice(voice)["id"] == voice
    glottis(running, "clients", "hours", "second", "--always")
    assert second.voice(voice)["id"] == voice
