"""What settings may say as URLs."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

LOCAL_ORIGIN = re.compile(r"http://(localhost|127\.0\.0\.1)(:[1-9][0-9]{0,4})?")
"""A page under development; browsers give it WebCrypto as they do with https."""


def names_no_password(url: str | None) -> bool:
    """Whether this is no URL at all, or one of a database that holds no password, wherever one may stand."""
    if url is None:
        return True
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    # The database's client takes one from the query too (libpq: `password`, `sslpassword`).
    named = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if "password" in name.lower()]
    return "://" in url and parts.password is None and not named


def is_origin(url: str) -> bool:
    """Whether this is https://host[:port] and nothing more."""
    try:
        parts = urlsplit(url)
        plain = parts.scheme == "https" and url == f"https://{parts.netloc}" and "@" not in url
        return plain and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
