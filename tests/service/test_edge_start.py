"""How the edge begins: its test of itself sees a server that loses certificates, and its Unix socket is the proxy's alone."""

from __future__ import annotations

import asyncio
import grp
import os
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service import programs
from service.edge import self_test, tls
from service.errors import EdgeSelfTestFailed, SettingsRefused
from service.isolation import Account, Isolation
from service.settings import Settings

THUMBPRINT = "A" * 43


def test_the_self_test_passes_with_the_libraries_that_are_here():
    asyncio.run(self_test.require_client_certificates())


def test_it_sees_a_server_that_shows_no_certificate(monkeypatch):
    monkeypatch.setattr(tls.TLSProtocol, "on_message_begin", HttpToolsProtocol.on_message_begin)
    with pytest.raises(EdgeSelfTestFailed, match="does not see"):
        asyncio.run(self_test.require_client_certificates())


def test_it_sees_one_that_keeps_another_connections(monkeypatch):
    kept: list[bytes] = []

    def begin(protocol: tls.TLSProtocol) -> None:
        HttpToolsProtocol.on_message_begin(protocol)
        kept.extend([protocol._certificate] if protocol._certificate else [])
        protocol.scope["extensions"] = {tls._EXTENSION: tls.Connection(kept[0])}

    monkeypatch.setattr(tls.TLSProtocol, "on_message_begin", begin)
    with pytest.raises(EdgeSelfTestFailed, match="does not see"):
        asyncio.run(self_test.require_client_certificates())


def test_it_sees_a_handshake_that_fails(monkeypatch):
    monkeypatch.setattr(tls.TLSProtocol, "connection_made", lambda _, transport: transport.abort())
    with pytest.raises(EdgeSelfTestFailed):
        asyncio.run(self_test.require_client_certificates())


def settings(tmp_path: Path, **variables: str) -> Settings:
    return Settings.load({"GLOTTIS_STATE_DIR": str(tmp_path), **{f"GLOTTIS_{name}": value for name, value in variables.items()}})


@pytest.mark.parametrize(
    "variables",
    [
        {"EDGE_TCP": "no"},
        {"EDGE_SOCKET": "/" + "x" * 100},
        {"PROXY_THUMBPRINTS": "A" * 42},
        {"PROXY_THUMBPRINTS": f"{THUMBPRINT}, {THUMBPRINT}"},
        {"PROXY_THUMBPRINTS": "ab:cd"},
    ],
)
def test_settings_that_do_not_hold(tmp_path, variables):
    with pytest.raises(SettingsRefused):
        settings(tmp_path, **variables)


def test_settings_that_do(tmp_path):
    found = settings(tmp_path, EDGE_TCP="no", EDGE_SOCKET="/run/g.sock", PROXY_THUMBPRINTS=f"{THUMBPRINT},{'B' * 43}")
    assert found.proxies == (THUMBPRINT, "B" * 43)
    assert Settings.load(found.environ()) == found
    assert settings(tmp_path).proxies == ()


@pytest.fixture
def at(tmp_path):
    found = settings(tmp_path, EDGE_SOCKET=str(tmp_path / "edge.sock"))
    with socket.socket(socket.AF_UNIX) as unix:
        yield unix, found, tmp_path / "edge.sock"


def test_its_owner_alone_may_connect_to_the_socket(at):
    unix, found, path = at
    programs.bind_for_proxy(unix, found)
    told = path.stat()
    assert (stat.S_IMODE(told.st_mode), told.st_uid) == (0o600, os.geteuid())


def test_or_the_group_that_is_named(at):
    unix, found, path = at
    group = grp.getgrgid(os.getegid())
    programs.bind_for_proxy(unix, replace(found, edge_socket_group=group.gr_name))
    told = path.stat()
    assert (stat.S_IMODE(told.st_mode), told.st_gid) == (0o660, group.gr_gid)


def test_a_socket_left_behind_is_replaced_and_nothing_else(at):
    unix, found, path = at
    with socket.socket(socket.AF_UNIX) as earlier:
        earlier.bind(str(path))
    programs.bind_for_proxy(unix, found)
    path.unlink()
    path.write_text("a file of somebody's")
    with socket.socket(socket.AF_UNIX) as again, pytest.raises(SettingsRefused, match="cannot listen"):
        programs.bind_for_proxy(again, found)
    assert path.read_text() == "a file of somebody's"
    with socket.socket(socket.AF_UNIX) as again, pytest.raises(SettingsRefused, match="no group"):
        programs.bind_for_proxy(again, replace(found, edge_socket=path.with_name("b"), edge_socket_group="no-such-group"))


def test_workers_on_tcp_on_the_unix_socket_or_on_both(at):
    unix, found, _ = at
    me = Account.current()
    isolation = Isolation(me, me, me, me, me, "a test")
    with socket.socket() as tcp:
        names = [[p.name for p in programs.edges(found, isolation, *pair)] for pair in ((tcp, unix), (None, unix), (tcp, None))]
    assert names == [["edge-0", "edge-proxied-0"], ["edge-proxied-0"], ["edge-0"]]
