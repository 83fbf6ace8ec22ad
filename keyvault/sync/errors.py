"""What the two sites and the officers' quorum refuse. Each `code` is stable; the docstring's first line is the message."""

from __future__ import annotations

from keyvault.errors import KeyVaultError


class StatementMalformed(KeyVaultError):
    """These are not the exact bytes of a statement."""

    code = "statement_malformed"
    fix = "Send the statement as its signer wrote it; nothing was changed here."


class SignatureInvalid(KeyVaultError):
    """A signature does not hold, or was made by a key that the roster does not name."""

    code = "sync_signature_invalid"
    fix = "Compare the roster's fingerprint at both sites; the message was not acted on."


class SyncRefused(KeyVaultError):
    """The proposed transaction breaks a rule."""

    code = "sync_refused"
    fix = "Propose a transaction without the fault that the message names; nothing was changed here."


class CheckpointRefused(KeyVaultError):
    """This is no checkpoint of the log that it names, or not what comes next."""

    code = "checkpoint_refused"
    fix = "Run `glottis audit check` at the site whose log it is; the other site co-signed nothing."


class LogForked(KeyVaultError):
    """The checkpoint does not continue the log that this site co-signed before."""

    code = "log_forked"
    fix = (
        "One log showed two histories, and both signed ends are kept at the site that co-signs. Find out who changed the log; if "
        "officers let it go on from an older end (log.reanchor), give their request to `glottis audit cosign-anew` there."
    )


class LogShortened(KeyVaultError):
    """The log is shorter than what this site co-signed before."""

    code = "log_shortened"
    fix = LogForked.fix


class Conflict(KeyVaultError):
    """Another transaction came first."""

    code = "sync_conflict"
    fix = "Read both sites' status and propose again at the next epoch."

    def __init__(self, message: str | None, epoch: int) -> None:
        super().__init__(f"{message or self.__doc__}; this site stands at epoch {epoch}")
        self.epoch = epoch


class PeerUnheard(KeyVaultError):
    """The other site's fresh status was not heard since this site started."""

    code = "peer_unheard"
    fix = "Bring the link to the other site up; transactions wait, and the old versions serve meanwhile."


class PeerUnavailable(KeyVaultError):
    """The other site does not answer."""

    code = "peer_unavailable"
    fix = "Bring the other site and the link to it up; the old versions serve meanwhile, and nothing is decided by waiting."


class PeerRefused(KeyVaultError):
    """The other site refused, for a reason that this release does not know."""

    code = "peer_refused"
    fix = "Run the same release at both sites; the other site's log has the reason."


class SiteUnfounded(KeyVaultError):
    """This site has no sync state yet."""

    code = "site_unfounded"
    fix = "Found the cluster from its roster, or join it as a replacement, before anything is agreed here."


class TokenForeign(KeyVaultError):
    """This token is not the one that the signed roster names for this site."""

    code = "token_not_in_roster"
    fix = "Put the roster's token back, or have officers replace this site in the roster by the new token."


class RotationTokenHolds(SyncRefused):
    """This site's rotation token still holds the version."""

    code = "rotation_token_holds"
    fix = "Give `glottis keys rotation destroy VERSION` at this site first, with the rotation token's PIN."


class KeyStillReferenced(SyncRefused):
    """Stored keys are still wrapped under this version."""

    code = "key_still_referenced"
    fix = "Re-wrap this site's keys to the serving version first; `glottis keys rewrap` goes on where it stopped."


class VoiceErased(KeyVaultError):
    """This voice was erased; its key is never taken again."""

    code = "voice_erased"
    fix = "Take over the tombstones of the other site; a copy from before the erasure brings no voice back."


class SyncStoreUnavailable(KeyVaultError):
    """The database did not keep a step of the sync."""

    code = "sync_store_unavailable"
    fix = "Bring the site's database up and repeat the step: it is done once, however often it is asked for."


class SiteBehind(KeyVaultError):
    """This site lacks epochs that the other site has closed."""

    code = "site_behind"
    fix = "Hand this site the missing certificates in order: `glottis site verify` lists them."


class SitesDiverged(KeyVaultError):
    """The two sites hold different histories."""

    code = "sites_diverged"
    fix = "Stop rotating, keep both stores, and let officers decide which site survives."


class SiteFrozen(KeyVaultError):
    """A site signed two histories; nothing changes until officers replace it."""

    code = "site_frozen"
    fix = "Look at the evidence record, find which site was copied or restored, and replace it by M of N officers."


class ProofFailed(KeyVaultError):
    """The sites did not prove that they hold the same key."""

    code = "same_key_unproved"
    fix = "Run the ceremony for this version again; the old version serves meanwhile."


class KeyQuarantined(KeyVaultError):
    """The sites disagree about this key version, so nothing new is wrapped under it."""

    code = "key_quarantined"
    fix = "Repair it by a new transaction: prove it again at both sites, or rotate to a new version."


class StoreRolledBack(KeyVaultError):
    """The store is older than the anchor inside this site's HSM."""

    code = "store_rolled_back"
    fix = "Restore a newer copy, or adopt this one with the officers' approval: `glottis restore adopt`."


class TokenRolledBack(KeyVaultError):
    """The token's anchor is older than the store: the token was restored or exchanged."""

    code = "token_rolled_back"
    fix = "Put the right token back, or adopt this one with the officers' approval; missing keys are then quarantined."


class StaleEpoch(KeyVaultError):
    """The other site was not heard for longer than the set age."""

    code = "stale_epoch"
    fix = "Bring the link to the other site up, or have officers break the glass for a limited time."


class AwaitingSync(KeyVaultError):
    """Not every site has signed for this voice's key yet."""

    code = "awaiting_sync"
    fix = "Wait until both sites have signed the batch's receipt; `glottis site status` shows the lag."


class CertificateInvalid(KeyVaultError):
    """A certificate does not hold."""

    code = "certificate_invalid"
    fix = "Get the certificate again from either site; if it still fails, somebody changed the history."


class ApprovalInvalid(KeyVaultError):
    """An approval is not an officer's signature over this operation."""

    code = "approval_invalid"
    fix = "Let the officer sign again, over this operation's digest, with a key of the roster."


class ApprovalExpired(KeyVaultError):
    """The approved operation's time is over."""

    code = "approval_expired"
    fix = "File the request again and collect fresh approvals."


class ApprovalMissing(KeyVaultError):
    """Too few officers approved this operation."""

    code = "approvals_missing"
    fix = "Collect signatures from as many different officers as the roster's quorum says; see `glottis approvals`."


class RequesterApproved(ApprovalInvalid):
    """Whoever requests an operation may not approve it."""

    code = "requester_approved"
    fix = "Let another officer approve; the requester does not count."


class RequestUnknown(KeyVaultError):
    """No request for approval of this name, or more than one."""

    code = "approval_request_unknown"
    fix = "`glottis approvals list` shows every request; the first digits of its name are enough if no other begins so."
