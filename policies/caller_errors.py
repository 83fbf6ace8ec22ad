"""What is refused of callers without a certificate: apps with a ticket, and browsers. As in `policies.errors`."""

from __future__ import annotations

from policies.errors import PolicyError

_TICKET = "Ask your backend for a new ticket (POST /v1/uploads): one lives minutes and works once."
_INVITATION = "Ask whoever invited this browser for a new code: one lives minutes and works once."


class TicketUnknown(PolicyError):
    """There is no such ticket."""

    code = "ticket_unknown"
    fix = _TICKET


class TicketExpired(PolicyError):
    """The ticket's time is over."""

    code = "ticket_expired"
    fix = _TICKET


class TicketUsed(PolicyError):
    """The ticket was used before."""

    code = "ticket_used"
    fix = _TICKET


class InvitationUnknown(PolicyError):
    """There is no such code."""

    code = "invitation_unknown"
    fix = _INVITATION


class InvitationExpired(PolicyError):
    """The code's time is over."""

    code = "invitation_expired"
    fix = _INVITATION


class InvitationUsed(PolicyError):
    """The code was used before."""

    code = "invitation_used"
    fix = _INVITATION


class BrowserRolesRefused(PolicyError):
    """A browser cannot be given these roles."""

    code = "browser_roles_refused"
    fix = "Give it one or both of the roles reader and speaker; a speaker needs the one voice that it may speak with."


class KeyUsedOtherwise(PolicyError):
    """This key is registered already: as a browser's, or as that of a client with a certificate."""

    code = "key_used_otherwise"
    fix = "Make a new key: one key is a browser's or a client's with a certificate, and stays what it was registered as."


class BrowserHasNoCertificate(PolicyError):
    """This client is a browser: it has no certificate that could be replaced."""

    code = "browser_has_no_certificate"
    fix = "Revoke it (`glottis clients revoke NAME`) and invite another."
