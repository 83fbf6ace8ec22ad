"""One token, used by many at once, from several processes, on a real database: exactly one of them gets in.

And with the vault killed, its database connections cut, or the postmaster killed in between: a token is used up if and only if
its intent is there.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import sqlalchemy
from house import BASE, PATHS, House
from hsm_fixtures import ServingToken, fresh_processes
from postgres_fixture import PostgresForTests

from keyvault.pkcs11_hsm import Pkcs11Hsm
from policies.errors import PolicyError
from policies.gate import Call
from policies.grants import Purpose
from policies.proofs import make_proof

PROCESSES, THREADS, CALLS = 4, 4, 64


def vault(url: str, config: Any, pin: str, masters: Any, pipe: Connection) -> None:
    """A vault's gate in a process of its own: takes lists of calls, answers what became of each."""
    hsm = Pkcs11Hsm.open(config, pin, expected_masters=masters)
    house = House(sqlalchemy.create_engine(url, pool_size=THREADS), hsm)
    with house.database.connect():
        pipe.send("ready")
    with ThreadPoolExecutor(THREADS) as threads:
        while calls := pipe.recv():
            pipe.send(list(threads.map(lambda call: outcome(house, call), calls)))
    hsm.close()


def outcome(house: House, call: Call) -> str:
    try:
        house.gate.admit(call)
    except PolicyError as refusal:
        return refusal.code
    return "admitted"


class Vaults:
    """Four vault processes on one database."""

    def __init__(self, house: House, token: ServingToken) -> None:
        url = house.database.url.render_as_string(hide_password=False)
        context = fresh_processes()
        self.pipes, self.processes = [], []
        for _ in range(PROCESSES):
            here, there = context.Pipe()
            arguments = (url, token.config, token.pin, token.facts.masters, there)
            process = context.Process(target=vault, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
            # One after the other: SoftHSM may answer GENERAL_ERROR to processes that start on one token at once.
            assert here.recv() == "ready"

    def send(self, calls: list[Call]) -> None:
        for number, pipe in enumerate(self.pipes):
            pipe.send(calls[number::PROCESSES])

    def outcomes(self) -> Counter[str]:
        """What became of the calls; of a killed process nothing is known."""
        found: Counter[str] = Counter()
        for pipe in self.pipes:
            try:
                found.update(pipe.recv())
            except (EOFError, ConnectionResetError):
                found["killed"] += 1
        return found

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send([])
            process.join(20)
            process.close()
            pipe.close()


@pytest.fixture
def vaults(house, serving_token):
    running = Vaults(house, serving_token)
    yield running
    running.close()


def uses(house: House, device, count: int = CALLS) -> tuple[str, list[Call]]:
    """One fresh token in `count` calls, each with a proof of its own."""
    token = house.token(device, Purpose.READ)
    call = house.call(device, token, Purpose.READ)
    proofs = [make_proof(device.key, "GET", BASE + PATHS[Purpose.READ], token) for _ in range(count)]
    return house.verifier.verify(token).jti, [Call(**{**vars(call), "proof": proof}) for proof in proofs]


def recorded(house: House, jti: str) -> tuple[int, int]:
    """How often this token was used up, and how many intents that admit a request name it."""
    with house.database.connect() as connection:
        used = connection.scalar(sqlalchemy.text("SELECT count(*) FROM used_token WHERE jti = :jti"), {"jti": jti})
        rows = connection.execute(sqlalchemy.text("SELECT intent_id, body FROM intent")).all()
    bodies = {row.intent_id: json.loads(bytes(row.body)) for row in rows}
    admitting = [item for item, body in bodies.items() if (body["action"], body["outcome"]) == ("request.admit", "allowed")]
    return used, sum(house.audit.disclose(item)["jti"]["value"] == jti for item in admitting)


def race(house: House, vaults: Vaults, device) -> None:
    _, calls = uses(house, device)
    vaults.send(calls)
    outcomes = vaults.outcomes()
    assert outcomes["admitted"] == 1, outcomes
    assert set(outcomes) <= {"admitted", "token_replayed", "token_expired"}, outcomes
    assert outcomes.total() == CALLS


def test_64_uses_of_one_token_in_4_processes_have_one_success(house, vaults):
    """D15: to look whether a token was used, and to note that it was, are one step."""
    device = house.client()
    for _ in range(20):
        race(house, vaults, device)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_64_uses_of_one_token_two_hundred_times(house, vaults):
    device = house.client()
    for _ in range(200):
        race(house, vaults, device)


def killed(postgres: PostgresForTests, house: House, vaults: Vaults, device, after_s: float) -> Counter[str]:
    """One race in which the postmaster is killed after so long, and started again. No second success, then or afterwards."""
    jti, calls = uses(house, device)
    vaults.send(calls)
    time.sleep(after_s)
    postgres.stop(signal.SIGKILL)
    try:
        outcomes = vaults.outcomes()
    finally:
        house.database.dispose()
        postgres.start()
    # Whoever was not answered asks again with the same token, as a client would.
    vaults.send([renewed(device, call) for call in calls[:8]])
    later = vaults.outcomes()
    used, intents = recorded(house, jti)
    assert outcomes["admitted"] + later["admitted"] <= used == intents <= 1, (outcomes, later)
    assert set(outcomes) | set(later) <= {"admitted", "token_replayed", "token_expired", "audit_unavailable"}, (outcomes, later)
    return outcomes


def renewed(device, call: Call) -> Call:
    """The same call with a proof of its own."""
    return replace(call, proof=make_proof(device.key, "GET", BASE + PATHS[Purpose.READ], call.token))


def test_the_postmaster_killed_in_between(house, vaults, postgres):
    """kill -9 of the whole database server in the middle: the token has at most one success, before and after it is back."""
    device, seen = house.client(), Counter()
    for after_s in (0.0, 0.02):
        seen += killed(postgres, house, vaults, device, after_s)
    assert seen["audit_unavailable"], "nothing was cut: the test saw nothing"
    recovered(house, vaults, device)


def recovered(house: House, vaults: Vaults, device) -> None:
    """Each connection finds out once that it is cut, and says so; after that all is as it was."""
    vaults.send(uses(house, device)[1])
    assert vaults.outcomes()["admitted"] <= 1
    race(house, vaults, device)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_postmaster_killed_many_times(house, vaults, postgres):
    device = house.client()
    for number in range(40):
        killed(postgres, house, vaults, device, number * 0.001)
    recovered(house, vaults, device)


def test_connections_cut_in_between(house, vaults):
    """Whatever is cut when: at most one use succeeds, and the token is used up exactly if its intent is there."""
    cut = sqlalchemy.text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    device = house.client()
    unavailable = 0
    for _ in range(5):
        jti, calls = uses(house, device)
        vaults.send(calls)
        with house.database.connect() as connection:
            for _ in range(10):
                connection.execute(cut)
                time.sleep(0.005)
        house.database.dispose()
        outcomes = vaults.outcomes()
        used, intents = recorded(house, jti)
        assert outcomes["admitted"] <= used == intents <= 1, outcomes
        assert set(outcomes) <= {"admitted", "token_replayed", "token_expired", "audit_unavailable"}, outcomes
        unavailable += outcomes["audit_unavailable"]
    assert unavailable, "nothing was cut: the test saw nothing"
    race(house, vaults, device)


def test_vaults_killed_in_between(house, vaults):
    """kill -9 of two vaults in the middle: the same holds, and the others go on."""
    device = house.client()
    jti, calls = uses(house, device)
    vaults.send(calls)
    time.sleep(0.01)
    for process in vaults.processes[:2]:
        process.kill()
    outcomes = vaults.outcomes()
    # The dead vaults' connections end when Postgres notices; until then nothing of theirs has been committed.
    deadline = time.monotonic() + 20
    while (found := recorded(house, jti))[0] != found[1] and time.monotonic() < deadline:
        time.sleep(0.05)
    used, intents = recorded(house, jti)
    assert outcomes["admitted"] <= used == intents <= 1, outcomes
    assert outcomes["killed"] >= 1, outcomes
    _, calls = uses(house, device, 8)
    for pipe in vaults.pipes[2:]:
        pipe.send(calls[:4])
    assert sum(pipe.recv().count("admitted") for pipe in vaults.pipes[2:]) == 1
