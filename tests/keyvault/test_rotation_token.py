"""Re-wrap on the real soft HSM and a real database, each run in a process of its own, which kill -9 may end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from hsm_fixtures import SO_PIN, USER_PIN, in_own_process, make_serving_token
from postgres_fixture import PostgresForTests
from sqlalchemy import Engine, text

from keyvault import ceremony
from keyvault.hsm import RingMaster
from keyvault.pkcs11_start import TokenConfig

CHILD = Path(__file__).with_name("rotation_child.py")
VOICES = 14
STEPS = {"read": 0, "wrapped": 1, "written": 1, "told": 2}
"""Each step, and how many pages are durable when it is reached for the second time: a page is read while another is worked on."""


def add_master(config: TokenConfig) -> None:
    ceremony.add_master(config, SO_PIN, USER_PIN, RingMaster("main", 2))


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A token with two versions of the ring's master."""
    config, _ = in_own_process(make_serving_token, tmp_path_factory.mktemp("rotation") / "serving")
    in_own_process(add_master, config)
    return {
        "module": str(config.module),
        "label": config.label,
        "serial": config.serial,
        "folder": str(config.folder),
        "pin": USER_PIN,
    }


@dataclass
class Site:
    token: dict[str, str]
    database: str
    sealed: Path

    def start(self, *calls: tuple[str, dict]) -> subprocess.Popen[str]:
        request = {"token": self.token, "database": self.database, "sealed": str(self.sealed), "do": calls}
        return subprocess.Popen(
            [sys.executable, CHILD, json.dumps(request)], stdout=subprocess.PIPE, text=True, cwd=CHILD.parents[2]
        )

    def run(self, *calls: tuple[str, dict]) -> list:
        """What each call said; last, where a signal ended the process, its number."""
        with self.start(*calls) as child:
            said, _ = child.communicate(timeout=60)
        return [json.loads(line) for line in said.splitlines()] + ([-child.returncode] if child.returncode else [])


@pytest.fixture
def site(token: dict[str, str], postgres: PostgresForTests, database: Engine, tmp_path: Path) -> Site:
    """Voices under version 1, after which version 2 serves."""
    found = Site(token, postgres.url(str(database.url.database)), tmp_path)
    found.run(("enrol", {"count": VOICES}), ("rotate", {}))
    return found


def test_killed_at_every_step_each_next_run_goes_on(site):
    """B7: kill -9 at every step boundary; restart resumes, no row that nobody can open."""
    moved = 0
    for step, durable in STEPS.items():
        opened, ended = site.run(("open", {}), ("rewrap", {"page": 2, "die": [step, 2]}))
        assert ended == signal.SIGKILL
        assert opened["opened"] == VOICES
        assert opened["under"].get("2", 0) == moved
        moved += 2 * durable
    left = VOICES - moved
    opened, finished, after, again = site.run(("open", {}), ("rewrap", {"page": 3}), ("open", {}), ("rewrap", {"page": 3}))
    assert opened == {"opened": VOICES, "under": {"1": left, "2": moved}}
    assert finished == {"moved": left, "left": 0, "bad": {}}
    assert after == {"opened": VOICES, "under": {"2": VOICES}}
    assert again == {"moved": 0, "left": 0, "bad": {}}


def test_end_to_end_with_two_workers_and_a_bad_row(site, database):
    """B10: the whole of it on the real soft HSM, and the bad row named."""
    with database.begin() as transaction:
        ids = sorted(transaction.scalars(text("SELECT dek_id FROM wrapped_key")))
        swap = "UPDATE wrapped_key a SET blob = b.blob FROM wrapped_key b WHERE a.dek_id = :one AND b.dek_id = :two"
        transaction.execute(text(swap), {"one": ids[2], "two": ids[5]})
    workers = [site.start(("rewrap", {"page": 2, "part": [index, 2]})) for index in range(2)]
    outcomes = [json.loads(worker.communicate(timeout=60)[0]) for worker in workers]
    assert sum(outcome["moved"] for outcome in outcomes) == VOICES - 1
    assert {UUID(dek): code for outcome in outcomes for dek, code in outcome["bad"].items()} == {ids[2]: "record_tampered"}
    with database.begin() as transaction:
        assert transaction.scalar(text("SELECT count(*) FROM wrapped_key WHERE ring_version = 1")) == 1


@pytest.mark.soak
def test_killed_at_two_hundred_random_moments(token, postgres, database, tmp_path):
    """B7, by the clock: whatever the moment, no key is lost and the run ends complete."""
    import random
    import time

    site, chance = Site(token, postgres.url(str(database.url.database)), tmp_path), random.Random(7)
    site.run(("enrol", {"count": 400}), ("rotate", {}))
    kills = 0
    while kills < 200:
        child = site.start(("rewrap", {"page": 5}))
        time.sleep(chance.uniform(0.2, 0.8))
        child.kill()
        child.communicate()
        kills += 1
        if kills % 40 == 0:
            assert site.run(("open", {}))[0]["opened"] == 400
    assert site.run(("rewrap", {"page": 50}), ("open", {}))[1] == {"opened": 400, "under": {"2": 400}}
