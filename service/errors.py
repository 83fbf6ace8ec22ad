"""What the processes around the packages refuse or cannot do. `code` is stable, `fix` says what to do about it."""

from __future__ import annotations

from typing import ClassVar

OWN_PACKAGES = frozenset({"service", "synth", "voiceprints", "policies", "keyvault"})


def own_code(error: BaseException) -> str | None:
    """The stable code of an error that one of our packages declares; None for any other.

    An attribute `code` alone says nothing: SQLAlchemy's errors have one too, and their words hold statements and values.
    """
    ours = any(kind.__module__.partition(".")[0] in OWN_PACKAGES for kind in type(error).__mro__)
    code = getattr(error, "code", None)
    return code if ours and isinstance(code, str) else None


def words(error: BaseException) -> str:
    """What may be shown of an error that is none of ours: of the database's errors the kind alone, for they quote values."""
    kind = type(error)
    quotes = any(base.__module__.partition(".")[0] in ("sqlalchemy", "psycopg") for base in kind.__mro__)
    return kind.__name__ if quotes else f"{kind.__name__}: {error}"


class ServiceError(Exception):
    """Glottis could not do this."""

    code: ClassVar[str] = "service_error"
    fix: ClassVar[str] = "Run `glottis doctor`; it names the part that fails."

    def __init__(self, message: str | None = None, *, fix: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or self.code).strip().splitlines()[0])
        self.mend = fix or self.fix


class SettingsRefused(ServiceError):
    """A setting is unknown or does not hold."""

    code = "settings_refused"
    fix = "Correct the GLOTTIS_ variable named in the message; docs/settings.md lists all, each with a working default."


class SecretRefused(ServiceError):
    """A secret could not be read safely."""

    code = "secret_refused"
    fix = (
        "Keep the secret in a file that only its owner may read (chmod 600), or name a command that prints it. If the file was"
        " deleted, put it back from a backup: without a token's PIN its keys are lost."
    )


class StateFolderRefused(ServiceError):
    """The state folder cannot be used."""

    code = "state_folder_refused"
    fix = "Name another folder in GLOTTIS_STATE_DIR."


class HalfMade(StateFolderRefused):
    """An earlier first start ended before this part was whole."""

    code = "half_made"


class AlreadyRunning(ServiceError):
    """Another `glottis up` holds this state folder."""

    code = "already_running"
    fix = "Stop the other one first, or name another folder in GLOTTIS_STATE_DIR."


class PortTaken(ServiceError):
    """Another program listens on this port."""

    code = "port_taken"
    fix = "Stop that program, or choose a free port: GLOTTIS_PORT=8444 glottis up."


class EdgeSelfTestFailed(ServiceError):
    """The edge would not see clients' certificates."""

    code = "edge_self_test_failed"
    fix = "Install the libraries at the versions of requirements/run.txt (`make setup`); the edge serves nobody until this holds."


class NobodyAnswers(ServiceError):
    """A question was asked where nobody can answer."""

    code = "nobody_answers"
    fix = "Run this at a terminal."


class PartMissing(ServiceError):
    """A program or library that Glottis needs is not installed."""

    code = "part_missing"
    fix = "Run `make setup`."


class DatabaseUnavailable(ServiceError):
    """The database did not answer."""

    code = "database_unavailable"
    fix = "Look at log/postgres.log in the state folder; `glottis up` starts the embedded database again."


class DatabaseUnsuitable(ServiceError):
    """The database is too old or lacks what Glottis needs."""

    code = "database_unsuitable"
    fix = "Use Postgres 16 or newer with pgvector 0.8 or newer."


class ProcessFailed(ServiceError):
    """A process of Glottis ended and did not come back."""

    code = "process_failed"
    fix = "Read the process's file in the state folder's log/, mend what it names, and start again."

    def __init__(self, message: str, *, fix: str | None = None, cause: str = "process_failed") -> None:
        super().__init__(message, fix=fix)
        self.cause = cause
        """The code of the process's last words."""


class RequestRefused(ServiceError):
    """The certificate request does not hold."""

    code = "certificate_request_refused"
    fix = "Make a new P-256 key and a PKCS #10 request signed by it."


class StepFailed(ServiceError):
    """A step of the first start failed."""

    code = "step_failed"
    fix = "Mend what the message names and start again: finished steps are kept."

    def __init__(self, message: str, *, fix: str | None = None, cause: str = "step_failed") -> None:
        super().__init__(message, fix=fix)
        self.cause = cause
        """The code of the error that ended the step."""


class RecordsTampered(ServiceError):
    """An audit record does not hold."""

    code = "audit_tampered"
    fix = (
        "Somebody changed the database outside Glottis: keep it as evidence, and compare with a backup and an export"
        " (`glottis audit export --unchecked`)."
    )


class NoRotationToken(ServiceError):
    """This site has no rotation token: its masters are TRUSTED, and its serving token re-wraps."""

    code = "no_rotation_token"
    fix = "Nothing is to be done here: `glottis keys rewrap` and `glottis keys destroy` need no other token."


class NotRunning(ServiceError):
    """Glottis is not running."""

    code = "not_running"
    fix = "Start it: glottis up. If it runs with another state folder, name that in GLOTTIS_STATE_DIR in this terminal too."


class AdoptionIncomplete(ServiceError):
    """The audit log was signed beyond this database too, and nobody approved that it goes on from here."""

    code = "adoption_incomplete"
    fix = "Let officers sign what `glottis restore request` wrote beside the request (FILE.log) as well, and give both files."


class SiteBusy(ServiceError):
    """The site process has not answered in time."""

    code = "site_busy"
    fix = "Give the command again: the site process may be waiting for the other site. Its log is log/site.log."


class ClientNameRefused(ServiceError):
    """This cannot be a client's name."""

    code = "client_name_refused"
    fix = "Use 1 to 63 characters of a-z, 0-9, dot, dash and underscore, the first a letter or digit."


class AuthorityRefused(ServiceError):
    """This is no authority whose certificates could be taken."""

    code = "authority_refused"
    fix = "Use the PEM file of one authority's certificate (basicConstraints CA, keyUsage keyCertSign), in its time."


class AuthorityMissing(ServiceError):
    """There is no authority of this name."""

    code = "authority_missing"
    fix = "`glottis clients list-cas` shows which are trusted."


class TenantRefused(ServiceError):
    """This cannot be a tenant's name."""

    code = "tenant_refused"
    fix = "Use 1 to 64 printable characters, none that breaks a line or turns the direction of text."


class ClientExists(ServiceError):
    """There is a client of this name."""

    code = "client_exists"
    fix = "Choose another name, or give this client new keys: glottis clients rotate NAME."


class ClientMissing(ServiceError):
    """There is no client of this name."""

    code = "client_missing"
    fix = "`glottis clients list` shows who is registered."


class OfficerKeyRefused(ServiceError):
    """This is not a key that an officer can sign with."""

    code = "officer_key_refused"
    fix = "Use a P-256 key file of your own (chmod 600); `glottis officers new NAME --key FILE` makes one."


class RosterUnreadable(ServiceError):
    """The roster could not be read."""

    code = "roster_unreadable"
    fix = "Name the cluster's roster with --roster FILE; each site keeps it as `roster` in its state folder."


class IntroductionRefused(ServiceError):
    """This is no site's introduction."""

    code = "introduction_refused"
    fix = "Use what `glottis site introduce` printed at the other site, unchanged."


class SiteNotAdmitted(ServiceError):
    """This site belongs to no cluster yet."""

    code = "site_not_admitted"
    fix = (
        "Give the output of `glottis site introduce` to the first site; its `glottis site admit FILE` prints a welcome: take that"
        " with `glottis site enter FILE` here, and start again."
    )


class CeremonyAwaited(ServiceError):
    """No master key was made for this cluster yet."""

    code = "ceremony_awaited"
    fix = "Let the officers of both sites hold the ceremony, `glottis keys ceremony`, and start again."


class NothingToInstall(ServiceError):
    """No new version waits in this site's token."""

    code = "nothing_to_install"
    fix = "Make one at both sites first: glottis keys ceremony."


class RequestUnreadable(ServiceError):
    """This is no request for officers' approval."""

    code = "approval_request_unreadable"
    fix = "Export it again: glottis approvals export ID --out FILE, and carry the file unchanged."


class CommandMalformed(ServiceError):
    """This is no command of the site process, as it declares it."""

    code = "command_malformed"
    fix = "Use the command line of the same version."


class ArgumentRefused(ServiceError):
    """An argument of this command does not hold."""

    code = "argument_refused"
    fix = "Correct what the message names; `--help` of the command says what it takes."


class BackupFailed(ServiceError):
    """The backup could not be made or put back."""

    code = "backup_failed"
    fix = "Correct what the message names and begin again with a new folder; an unfinished one may be deleted."


class BackupRefused(ServiceError):
    """This is no backup of this site that could be trusted."""

    code = "backup_refused"
    fix = "Use a backup whose files were not changed; `glottis restore check FOLDER` says what fails."


class NothingToAdopt(ServiceError):
    """Database, token and log belong together: there is nothing to adopt."""

    code = "nothing_to_adopt"
    fix = "Start it: glottis up."


class PolicySetRefused(ServiceError):
    """This set of policies cannot be activated."""

    code = "policy_set_invalid"
    fix = "Correct what the message names; `glottis policy propose FOLDER --dry-run` checks it. The active set stays as it is."


class ClientAwaitsOfficers(ServiceError):
    """Officers must approve this client first."""

    code = "client_awaits_officers"
    fix = "Let officers read and approve it (glottis approvals show ID), then give the command again with --request ID."

    def __init__(self, request: str, needed: int) -> None:
        super().__init__(f"request {request[:16]} waits for {needed} officers: one of the roles is marked as needing them")
        self.request, self.needed = request, needed
        self.certificate = b""
        """The certificate that was issued already; until its row is written it opens nothing."""


class SealedBundleRefused(ServiceError):
    """These details cannot be sealed or opened with this key."""

    code = "sealed_bundle_refused"
    fix = "The recipient makes a P-256 key: openssl ecparam -name prime256v1 -genkey -noout -out KEY; openssl ec -in KEY -pubout."
