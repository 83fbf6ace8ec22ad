"""The OpenAPI document says what is true: every call that the vault takes, every code with its status, who may call how."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import schemathesis
from starlette.routing import Route

from service.edge.app import create_app
from service.edge.document import EXAMPLES, SECURITY
from service.edge.limits import OPEN
from service.problems import STATUS
from service.vault import http


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app([]).openapi()


def calls(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(method.upper(), path): call for path, of in document["paths"].items() for method, call in of.items()}


def test_the_document_is_an_openapi_document(document: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(document).validate()
    assert document["openapi"].startswith("3.1")


def test_every_call_of_the_vault_is_described(document: dict[str, Any]) -> None:
    app = http.create_app(Mock(), Mock())  # nothing is called
    routes = [route for route in app.routes if isinstance(route, Route)]
    taken = {(method, route.path.replace(":uuid", "")) for route in routes for method in route.methods or () if method != "HEAD"}
    taken -= {("GET", "/v1/enrolments"), ("GET", "/hsm")}  # the edge's own question, and the operator's
    assert len(taken) > 10
    assert taken <= calls(document).keys()


def test_every_code_stands_at_its_status(document: dict[str, Any]) -> None:
    described = document["components"]["responses"]
    for code, status in STATUS.items():
        if status != 405:  # of paths and methods that are not described
            assert f" {code}," in described[f"Refused{status}"]["description"].replace(".", ","), code


def test_examples_are_refusals_of_their_status() -> None:
    assert {STATUS[code]: status for status, (code, _, _) in EXAMPLES.items()} == {status: status for status in EXAMPLES}


def test_every_call_says_how_its_caller_is_known(document: dict[str, Any]) -> None:
    """No certificate is asked for exactly where the edge asks for none; a call with none at all is one of the open ones."""
    for (method, path), call in calls(document).items():
        ways = call["security"]
        assert all(way.keys() <= SECURITY.keys() for way in ways)
        assert (path in OPEN) == all("certificate" not in way for way in ways) or path == "/v1/browser-keys", (method, path)
        assert ways or path in OPEN
    assert document["components"]["securitySchemes"]["certificate"]["type"] == "mutualTLS"


def test_every_refusal_has_the_one_form(document: dict[str, Any]) -> None:
    for (method, path), call in calls(document).items():
        refused = {status: answer for status, answer in call["responses"].items() if int(status) >= 400}
        assert {"400", "413", "500"} <= refused.keys(), (method, path)
        for status, answer in refused.items():
            assert answer.get("$ref") == f"#/components/responses/Refused{status}" or (path, status) == ("/readyz", "503")
    for answer in document["components"]["responses"].values():
        assert answer["content"]["application/json"]["example"]["error"].keys() >= {"code", "message", "fix"}


def test_every_body_has_an_example(document: dict[str, Any]) -> None:
    shapes = document["components"]["schemas"]
    for call in calls(document).values():
        for kind, content in call.get("requestBody", {}).get("content", {}).items():
            schema = shapes[content["schema"]["$ref"].rpartition("/")[2]] if "$ref" in content["schema"] else content["schema"]
            for name in schema.get("required", ()):
                told = schema["properties"][name]
                assert kind == "multipart/form-data" or told.keys() & {"example", "examples", "enum"}, name
