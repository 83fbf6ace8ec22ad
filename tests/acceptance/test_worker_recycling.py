"""Vault workers are replaced at a set count of openings; clients notice nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pytest
from installation import Installation

from service.client import VoiceClient

SENTENCE = "The quick brown fox."


def workers(running: Installation) -> set[int]:
    while True:
        with contextlib.suppress(FileNotFoundError):  # a process ended while one looked at it
            return set(running.pid_of("service.vault"))


@pytest.mark.soak
def test_workers_are_replaced_under_load_and_no_request_fails(new_installation: Callable[..., Installation]) -> None:
    running = new_installation(GLOTTIS_VAULT_OPENINGS="25")
    running.start()
    voice = running.voice()
    folder = running.settings.client_dir("studio")
    before = workers(running)
    stop, failures, spoken = threading.Event(), [], []

    def speak() -> None:
        client = VoiceClient.from_folder(folder)
        while not stop.is_set():
            try:
                spoken.append(len(client.speak(voice, SENTENCE)))
            except Exception as error:  # noqa: BLE001 — counted, and shown below
                failures.append(repr(error))
        client.close()

    threads = [threading.Thread(target=speak) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and before & workers(running):
        time.sleep(0.2)
    stop.set()
    for thread in threads:
        thread.join()
    assert not before & workers(running), "every worker of the beginning has left"
    assert failures == []
    assert len(spoken) > 25
    running.stop()
