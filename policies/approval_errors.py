"""What is refused of speech that needs two clients' word. As in `policies.errors`."""

from __future__ import annotations

from policies.errors import Denied, PolicyError

_ASK = "Ask the approver for a new approval (POST /v1/approvals): for exactly this voice, text and client, at this site."


class ApprovalInvalid(PolicyError):
    """This is no approval of this text in this voice for this client."""

    code = "dual_control_invalid"
    fix = _ASK


class ApprovalExpired(PolicyError):
    """The approval's time is over."""

    code = "dual_control_expired"
    fix = _ASK + " It is good for ten minutes."


class ApprovalUsed(PolicyError):
    """The approval was used before."""

    code = "dual_control_used"
    fix = _ASK + " Each is good for one use of the voice."


class ApprovalRequired(Denied):
    """The voice says only what a second client approved."""

    code = "dual_control_required"
    fix = "Let a client with the role approver approve it (POST /v1/approvals), and name the approval in the token request."


class ApprovalOwn(Denied):
    """Nobody approves what they are to say themselves."""

    code = "dual_control_own"
    fix = "Let another client approve it, with a certificate and a DPoP key of its own."


class ApproverRefused(Denied):
    """Who approved this may not approve any more."""

    code = "approver_refused"
    fix = "Ask another client of the tenant with the role approver: this one was revoked, or lost the role."
