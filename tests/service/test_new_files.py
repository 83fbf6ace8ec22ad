"""Files of `glottis audit` appear where nothing was: no link is followed, nothing is replaced, a failure leaves nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_here import glottis_here

from service import audit_bundles
from service.audit_bundles import export_bundle


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"GLOTTIS_STATE_DIR": str(tmp_path / "state"), "HOME": str(tmp_path)}


def test_the_verifier_is_written_through_no_dangling_link(environ: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "verifier.py"
    place.symlink_to(tmp_path / "elsewhere")
    refused = glottis_here("audit", "verifier", place, environ=environ)
    assert (refused.returncode, (tmp_path / "elsewhere").exists()) == (1, False)
    assert "exists; name another file" in refused.stderr
    place.unlink()
    assert glottis_here("audit", "verifier", place, environ=environ).returncode == 0
    assert b"fingerprint" in place.read_bytes()


def test_details_are_asked_for_only_with_a_place_for_them(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(*_: object, name: str, **__: object) -> dict[str, object]:
        asked.append(name)
        raise OSError("the site process is gone")

    monkeypatch.setattr("service.cli.audit.ask", ask)
    (tmp_path / "taken").symlink_to(tmp_path / "elsewhere")
    for place in (tmp_path / "missing" / "bundle", tmp_path / "taken"):
        assert glottis_here("audit", "export-details", "--request", "ab", "--out", place, environ=environ).returncode == 1
        assert asked == []
    place = tmp_path / "bundle"
    assert glottis_here("audit", "export-details", "--request", "ab", "--out", place, environ=environ).returncode == 1
    assert (asked, place.exists()) == (["ab"], False)


def test_a_bundle_replaces_nothing_that_came_to_stand_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "bundle"

    def export(*_: object, **__: object) -> object:
        place.write_text("somebody else's")
        return SimpleNamespace(size=1)

    class Opened:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(audit_bundles, "export", export)
    monkeypatch.setattr(audit_bundles, "opened", lambda _: Opened())
    monkeypatch.setattr(audit_bundles.Site, "load", lambda _: SimpleNamespace(audit_key=None))
    settings = SimpleNamespace(site_file=tmp_path, role_url=lambda _: "")
    with pytest.raises(FileExistsError):
        export_bundle(settings, place)  # type: ignore[arg-type]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("bundle", "somebody else's")]
