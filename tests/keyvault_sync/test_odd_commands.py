"""Whatever the operator's socket is sent is carried out, or refused with a code of its own; nothing of ours falls over."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import httpx
import pytest
from fresh_databases import FreshDatabases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_sites import Sites
from starlette.applications import Starlette
from structlog.testing import capture_logs

from keyvault.ceremony import TokenFacts
from keyvault.hsm import KeyName
from keyvault.sync.coordinator import Coordinator
from keyvault.sync.statement import Op
from service.settings import Settings
from service.site import Site
from service.sync import operator
from service.sync.arguments import Call
from service.sync.assembly import _service
from service.sync.commands import Commands


@dataclass
class Desk:
    """The whole desk of a site process, over a fake token and a real database."""

    app: Starlette
    commands: Mapping[str, Call]
    coordinator: Coordinator

    def told(self, call: str, body: bytes) -> str:
        """The code that the command ends in; empty where it was done."""

        async def asked() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://site") as client:
                return await client.post(f"/{call}", content=body)

        with capture_logs():
            answer = asyncio.run(asked())
        assert answer.status_code == 200
        said = answer.json()
        assert "Traceback" not in answer.text
        return said["error"]["code"] if "error" in said else ""


@pytest.fixture(scope="module")
def desk(databases: FreshDatabases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("site")
    with databases.one(pool_size=4) as one, databases.one(pool_size=4) as other:
        sites = Sites({"a": one, "b": other})
        (folder / "roster").write_bytes(sites.roster.encode())
        signer = {KeyName.CHECKPOINT_SIGNER: sites.a.hsm.public_key(KeyName.CHECKPOINT_SIGNER)}
        (folder / "site.json").write_text(Site(UUID(int=1), {"log": TokenFacts("log", "1", (), signer)}).to_json())
        parts = replace(sites.a.parts, database=sites.a.database)
        service = _service(Settings.load({"GLOTTIS_STATE_DIR": str(folder)}), parts, sites.a.hsm)
        commands = Commands(service)
        yield Desk(operator.create_app(commands.calls(), commands.ready), commands.calls(), service.coordinator)


TEXTS = st.sampled_from(
    [
        *("", "studio", "acme", "reader", "ring/main/1", "ring/main/0", "main", "voice", "client", "*", "token-signer", "end"),
        *(
            "AAAA",
            "A" * 43,
            "mon-fri 08:00-18:00 UTC",
            "00000000-0000-0000-0000-000000000001",
            "é",
            "-----BEGIN",
            "suspend",
            "rewrap",
        ),
    ]
) | st.text(max_size=20)
NUMBERS = st.integers() | st.sampled_from([0, -1, 1, 2**31, 2**53, 10**9])
PLAIN = st.none() | st.booleans() | NUMBERS | st.floats() | TEXTS | st.just("\ud800") | st.just("\0")
ANYTHING = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6)
OF_TYPE: Mapping[str, st.SearchStrategy[Any]] = {
    "str": TEXTS,
    "int": NUMBERS,
    "float": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "bool": st.booleans(),
    "Sequence[str]": st.lists(TEXTS, max_size=3),
    "Mapping[str, str]": st.dictionaries(TEXTS, TEXTS, max_size=3),
    "Mapping[str, int]": st.dictionaries(st.sampled_from(["requests", "seconds"]) | TEXTS, NUMBERS, max_size=3),
    "Mapping[str, Sequence[str]]": st.dictionaries(TEXTS, st.lists(TEXTS, max_size=2), max_size=2),
    "None": st.none(),
}


def _strategy(parameter: inspect.Parameter) -> st.SearchStrategy[Any]:
    annotation = str(parameter.annotation)
    if annotation.startswith("Literal["):
        return TEXTS
    return st.one_of([OF_TYPE[name] for name in annotation.split(" | ")])


def test_every_command_declares_what_it_takes(desk: Desk) -> None:
    for name, call in desk.commands.items():
        for parameter in inspect.signature(call).parameters.values():
            assert isinstance(_strategy(parameter), st.SearchStrategy), (name, parameter)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(data=st.data())
def test_odd_arguments_are_refused_with_a_code(desk: Desk, data: st.DataObject) -> None:
    call = data.draw(st.sampled_from(sorted(desk.commands)))
    declared = inspect.signature(desk.commands[call]).parameters
    fitting = st.fixed_dictionaries({name: _strategy(parameter) for name, parameter in declared.items()})
    given_ = data.draw(
        st.one_of(fitting, fitting, ANYTHING, st.dictionaries(st.sampled_from([*declared, "self"]) | TEXTS, ANYTHING))
    )
    code = desk.told(call, json.dumps(given_).encode())
    assert code != "internal_error", (call, given_)


def test_what_is_no_json_or_fits_no_command(desk: Desk) -> None:
    for body in (
        b"{",
        b"[" * 100_000,
        b"\xff\xfe{}",
        b"[]",
        b"null",
        b'{"master": NaN}',
        b'{"master": "\\ud800"}',
        b'{"hours": 1e999}',
    ):
        assert desk.told("key", body) == "command_malformed", body[:20]
    for body in (b"{}", b'{"master": 1}', b'{"master": "ring/main/1", "self": 1}', b'{"master": ["ring/main/1"]}'):
        assert desk.told("key", body) == "command_malformed", body
    assert desk.told("key", b'{"master": "x"}') == "argument_refused"
    assert desk.told("key", b'{"master": "ring/main/9"}') == "key_version_not_found"
    assert desk.told("key", b'{"master": "ring/main/1"}') == "", "the control: a good one is done"
    assert desk.told("__class__", b"{}") == "not_found"


def test_no_command_carries_a_change_of_states_or_an_act_past_its_own_conditions(desk: Desk) -> None:
    """A destruction waits its delay, whoever signed it: no door takes it, or any transaction but a roster, as it is."""
    assert desk.commands.keys().isdisjoint({"change_states", "act", "propose_act"})
    for op, code in ((Op.STATE, "sync_refused"), (Op.REPAIR, "sync_refused"), (Op.INSTALL, "sync_refused")):
        proposal = desk.coordinator.propose(op, reason="at once" if op is Op.STATE else "")
        given_ = {"proposal": base64.b64encode(proposal.encode()).decode()}
        assert desk.told("transact", json.dumps(given_).encode()) == code
    # The control: a roster comes further, to the officers whose word it lacks.
    roster = desk.coordinator.propose(Op.ROSTER, new_roster=desk.coordinator.node.ledger.roster)
    given_ = {"proposal": base64.b64encode(roster.encode()).decode()}
    assert desk.told("transact", json.dumps(given_).encode()) not in ("", "sync_refused")
