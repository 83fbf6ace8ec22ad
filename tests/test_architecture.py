"""Rules about the code itself that import-linter cannot see."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("keyvault", "policies", "voiceprints", "synth", "service", "migrations")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SHIPPED = [*SOURCES, *sorted((ROOT / "deploy").rglob("*.py"))]

MOST_LINES, MOST_FUNCTION_LINES = 350, 45
LONG_FILES = {
    # One file on purpose: an auditor reads, copies and runs it alone.
    "policies/audit/verify.py": 770,
}
RAW_PKCS11 = {"keyvault/pkcs11_raw.py", "keyvault/pkcs11_start.py"}
"""Where C_ functions of a module are called through ctypes; elsewhere they are only named in messages."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), relative(path))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`."""
    script = f"import sys\n{code}\nprint('\\n'.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=relative)
def test_an_init_file_is_a_docstring_and_nothing_else(path):
    tree = parsed(path)
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_the_import_contracts_hold():
    done = subprocess.run([Path(sys.prefix) / "bin" / "lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


FORBIDDEN_CIPHERS = re.compile(
    r"cryptography\.hazmat\.primitives\.(ciphers|keywrap|cmac|_serialization)|cryptography\.fernet|Crypto\.|nacl\."
)


@pytest.mark.parametrize("package", ["keyvault", "voiceprints"])
def test_no_key_is_used_outside_the_token(package):
    found = {
        (relative(path), name)
        for path in SOURCES
        if relative(path).startswith(f"{package}/")
        for name in imported(parsed(path))
        if FORBIDDEN_CIPHERS.match(name)
    }
    assert found == set()


def test_the_cipher_rule_sees_a_breach():
    tree = ast.parse(
        "from cryptography.hazmat.primitives.ciphers.aead import AESGCM\nfrom cryptography.hazmat.primitives import keywrap"
    )
    assert [name for name in imported(tree) if FORBIDDEN_CIPHERS.match(name)] == list(imported(tree))


def _raw_calls(tree: ast.AST) -> set[str]:
    """PKCS#11 functions reached as attributes or by name in getattr: `library.C_Sign`."""
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for name in attributes if re.fullmatch(r"C_[A-Z]\w+", name)}


def test_raw_pkcs11_calls_stand_in_one_place():
    found = {relative(path) for path in SOURCES if _raw_calls(parsed(path))}
    assert found <= RAW_PKCS11
    named = {relative(path) for path in SOURCES if {"ctypes.CDLL", "CDLL"} & _calls(parsed(path))}
    doors = RAW_PKCS11 | {"keyvault/locked.py", "service/isolation.py", "voiceprints/jail.py", "voiceprints/decoding_child.py"}
    assert named <= doors, "ctypes loads libraries elsewhere"


def _calls(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_the_auditors_file_needs_the_standard_library_alone():
    code = "import importlib.util as u; s = u.spec_from_file_location('verify', 'policies/audit/verify.py')\n"
    code += "m = u.module_from_spec(s); sys.modules['verify'] = m; s.loader.exec_module(m)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys\n{code}\nprint(sorted(sys.modules))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert modules_after("import policies.audit.verify").isdisjoint(
        {"keyvault", "sqlalchemy", "jwt", "pkcs11", "cryptography", "numpy"}
    )


def test_the_edge_loads_neither_keys_nor_database():
    loaded = modules_after("import service.edge.app, service.edge.__main__")
    assert "fastapi" in loaded  # the control: it really was imported
    assert loaded.isdisjoint({"keyvault", "synth", "sqlalchemy", "psycopg", "pkcs11", "hibari"})


@pytest.mark.parametrize("path", SHIPPED, ids=relative)
def test_nothing_is_unfinished(path):
    text = path.read_text()
    assert "NotImplementedError" not in text
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)


@pytest.mark.parametrize("path", SHIPPED, ids=relative)
def test_files_and_functions_stay_short(path):
    assert len(path.read_text().splitlines()) <= LONG_FILES.get(relative(path), MOST_LINES)
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{relative(path)}:{node.name}"
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MOST_FUNCTION_LINES, f"{name} has {length} lines"


def test_setup_and_the_token_door_look_for_softhsm_in_the_same_places():
    sys.path.insert(0, str(ROOT / "deploy"))
    try:
        import setup
    finally:
        sys.path.pop(0)
    from keyvault import softhsm

    assert {Path(path).parent.as_posix() for path in setup.SOFTHSM} == set(softhsm._SYSTEM)


def test_every_package_is_in_what_is_installed():
    """A list of packages by name is forgotten when one is added; an editable installation does not show it."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert found == {"include": [f"{package}*" for package in PACKAGES]}
    folders = {path.parent for path in SOURCES if path.suffix == ".py"}
    assert [relative(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
