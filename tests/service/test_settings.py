"""Settings: working defaults, nothing unknown accepted, secrets only from private files or commands."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from service.errors import SecretRefused, SettingsRefused
from service.secrets import Secret
from service.settings import Settings
from service.settings_page import meanings, page


def test_defaults_need_nothing_but_a_home():
    settings = Settings.load({"HOME": "/home/somebody"})
    assert settings.port == 8443
    assert settings.bind == "127.0.0.1"
    assert settings.public_base_url == "https://localhost:8443"
    assert settings.embedded
    assert settings.vault_sockets[1] == settings.state_dir / "run" / "vault-1.sock"


def test_a_port_of_ones_own_moves_the_base_url():
    assert Settings.load({"GLOTTIS_PORT": "9000"}).public_base_url == "https://localhost:9000"


def test_every_setting_says_what_it_is_and_the_page_of_settings_is_up_to_date():
    assert meanings().keys() == {one.name for one in fields(Settings)}
    page_there = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    assert page_there == page(), "python -m service.settings_page > docs/settings.md"


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(SettingsRefused, match="GLOTTIS_PROT; did you mean GLOTTIS_PORT"):
        Settings.load({"GLOTTIS_PROT": "1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "eighty"),
        ("PORT", "0"),
        ("PORT", "65536"),
        ("VAULT_WORKERS", "0"),
        ("SIGNER_DAYS", "-1"),
        ("LOG_LEVEL", "loud"),
        ("PUBLIC_BASE_URL", "http://localhost"),
        ("PUBLIC_BASE_URL", "https://localhost/"),
        ("PUBLIC_BASE_URL", "https://localhost:99999"),
        ("PUBLIC_BASE_URL", "https://me:secret@localhost"),
        ("PUBLIC_BASE_URL", "https://secret@localhost:8443"),
        ("PUBLIC_BASE_URL", "https://@localhost"),
        ("BROWSER_ORIGINS", "*"),
        ("BROWSER_ORIGINS", "null"),
        ("BROWSER_ORIGINS", "https://app.example/"),
        ("BROWSER_ORIGINS", "https://app.example,"),
        ("BROWSER_ORIGINS", "https://app.example, https://secret.example"),
        ("BROWSER_ORIGINS", "http://secret.example"),
        ("BROWSER_ORIGINS", "http://localhost.secret.example"),
        ("DATABASE_URL", "postgresql+psycopg://me:secret@db/glottis"),
        ("DATABASE_URL", "postgresql+psycopg://me@db/glottis?password=secret"),
        ("DATABASE_URL", "postgresql+psycopg://me@db/glottis?application_name=a&p%61ssword=secret"),
        ("DATABASE_URL", "postgresql+psycopg://me@db/glottis?sslkey=k&sslpassword=secret"),
        ("DATABASE_URL", "postgresql+psycopg://me:secret@[db/glottis"),
        ("DATABASE_URL", "host=db user=me password=secret"),
    ],
)
def test_values_that_do_not_hold_are_refused_without_being_repeated(name, value):
    with pytest.raises(SettingsRefused) as refused:
        Settings.load({f"GLOTTIS_{name}": value})
    assert f"GLOTTIS_{name}" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_browsers_may_call_from_exactly_the_origins_that_are_set():
    assert Settings.load({}).origins == ()
    settings = Settings.load({"GLOTTIS_BROWSER_ORIGINS": "https://app.example:8443,http://localhost:8000"})
    assert settings.origins == ("https://app.example:8443", "http://localhost:8000")
    assert settings.of_site_b().origins == settings.origins


def test_a_link_may_lead_to_the_state_folder(tmp_path: Path):
    (tmp_path / "here").symlink_to(tmp_path / "there")
    assert Settings.load({"GLOTTIS_STATE_DIR": str(tmp_path / "here")}).state_dir == tmp_path / "there"


def test_a_child_reads_back_what_its_parent_had():
    settings = Settings.load({"GLOTTIS_STATE_DIR": "/srv/glottis", "GLOTTIS_PORT": "9000", "GLOTTIS_LOG_PIN_FILE": "/run/pin"})
    assert Settings.load(settings.environ()) == settings
    assert Settings.load(settings.environ(worker="vault-1", listen_fd=5)).listen_fd == 5


def test_a_secret_is_read_from_a_private_file_only(tmp_path: Path):
    file = tmp_path / "pin"
    file.write_text("hush\n")
    file.chmod(0o600)
    assert Secret(file).read() == "hush"
    file.chmod(0o640)
    with pytest.raises(SecretRefused, match="other users"):
        Secret(file).read()


@pytest.mark.parametrize("command", ["false", "no-such-program", "printf ''"])
def test_a_command_that_gives_no_secret_is_refused(command):
    with pytest.raises(SecretRefused):
        Secret(command=command).read()


def test_a_command_gives_a_secret_and_its_arguments_stay_out_of_messages():
    assert Secret(command="printf 'hush'").read() == "hush"
    assert "hush" not in str(Secret(command="printf 'hush'"))


def test_yes_and_no_are_the_words_for_yes_and_no(tmp_path):
    given = {"GLOTTIS_STATE_DIR": str(tmp_path), "GLOTTIS_SERVES": "no"}
    assert Settings.load(given).serves is False
    assert Settings.load(Settings.load(given).environ()).serves is False
    with pytest.raises(SettingsRefused, match="yes or no"):
        Settings.load(given | {"GLOTTIS_SERVES": "1"})


def test_a_second_site_is_an_installation_of_its_own_inside_the_first(tmp_path):
    first = Settings.load({"GLOTTIS_STATE_DIR": str(tmp_path), "GLOTTIS_TERRITORY": "DE", "GLOTTIS_PEER_PORT": "9000"})
    second = Settings.load(first.of_site_b().environ())
    assert second.state_dir == first.state_dir / "site-b"
    assert (second.site, second.territory, second.serves, second.port) == ("b", "DE", True, 9000)
    assert not second.starts_peer
    assert second.public_base_url == "https://localhost:9000"
    assert not first.of_site_b().token_dir("serving").is_relative_to(first.token_dir("serving"))


@pytest.mark.parametrize(
    "variables",
    [{"SITE": "c"}, {"SITES": "3"}, {"SITE": "b"}, {"PEER": "none"}, {"PEER_URL": "http://x"}, {"PEER_AGE_HOURS": "0"}],
)
def test_settings_of_sites_that_do_not_hold_are_refused(tmp_path, variables):
    with pytest.raises(SettingsRefused):
        Settings.load({"GLOTTIS_STATE_DIR": str(tmp_path)} | {f"GLOTTIS_{name}": value for name, value in variables.items()})
