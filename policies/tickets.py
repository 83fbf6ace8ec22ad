"""Upload tickets: one enrolment by an app that has no certificate, minted by its backend, which has one.

Whoever presents a ticket enrols one voice under the consent that it names, and does nothing else. The policies decide again
when it is used, for the client that minted it: of one revoked meanwhile, or under a consent withdrawn, it is worth nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from keyvault.database import Database, Transaction, send
from policies.audit.errors import AuditError
from policies.authority import Client
from policies.caller_errors import TicketExpired, TicketUnknown, TicketUsed
from policies.engine import Policies, Question
from policies.errors import AuditUnavailable, ClientUnknown, GrantMismatch, PolicyError
from policies.gate import ADMIT, require_rows
from policies.grants import Grant, Purpose, VerifiedProof, VerifiedToken
from policies.intents import Facts, Intent, Intents, Outcome
from policies.one_time import MAX_LIFETIME_S, SECRET_BYTES, UploadTicket, digest_of, written
from policies.refusals import NotCounted, Refusals, record_refusal, refusal_details
from policies.requests import Request
from policies.store import PolicyStore, site_wide
from policies.writing.store import within

_ISSUER = "upload ticket"


@dataclass(frozen=True, repr=False)
class IssuedTicket:
    """What the backend gets, and hands to its app."""

    ticket: str
    expires_at: datetime
    max_bytes: int


class Tickets:
    """Mints tickets and takes them. Safe to call from several threads."""

    def __init__(
        self,
        *,
        database: Database,
        engine: Policies,
        store: PolicyStore,
        intents: Intents,
        refusals: Refusals,
        territory: str,
        random: Callable[[int], bytes],
        clock: Callable[[], float],
    ) -> None:
        """`random`: so many bytes from the HSM."""
        self._database = database
        self._engine = engine
        self._store = store
        self._intents = intents
        self._refusals = refusals
        self._territory = territory
        self._random = random
        self._clock = clock

    def issue(self, transaction: Transaction, grant: Grant, *, max_bytes: int, lifetime_s: int) -> IssuedTicket:
        """A ticket for the enrolment that was granted. Raises GrantMismatch, ValueError for a longer life than MAX_LIFETIME_S."""
        grant.require(Purpose.ENROL)
        token = grant.token
        if token.consent is None:
            raise GrantMismatch("the grant names no consent")
        if grant.proof is None:
            raise GrantMismatch("a ticket makes no tickets")
        if not 0 < lifetime_s <= MAX_LIFETIME_S or max_bytes <= 0:
            raise ValueError("lifetime or size of a ticket")
        secret = written(self._random(SECRET_BYTES))
        expires_at = datetime.fromtimestamp(int(self._clock()) + lifetime_s, UTC)
        digest = digest_of(secret)
        assert digest is not None
        ticket = UploadTicket(digest, token.tenant, token.client_id, token.consent, max_bytes, expires_at)
        self._store.insert(transaction, ticket)
        return IssuedTicket(secret, expires_at, max_bytes)

    def look(self, ticket: str) -> UploadTicket:
        """What the ticket is good for, before its upload is read. Nothing is used up; a refusal is recorded as in `redeem`."""
        with self._presented(ticket) as (transaction, found, _):
            if self._store.used(transaction, found):
                raise TicketUsed()
            return found

    def redeem(self, ticket: str) -> Grant:
        """Use the ticket up and admit its enrolment: when this returns, the intent is on disk. Nothing has happened otherwise.

        Raises TicketUnknown, TicketExpired, TicketUsed, what the policies refuse, and AuditUnavailable; the ticket is used up
        by success alone. The grant opens no voice: it comes with no proof.
        """
        with self._presented(ticket) as (transaction, found, client):
            now = self._clock()
            request = Request(client.cert_sha256, None, now, consent=found.consent_id)
            opening = self._store.open(transaction, request, *self._intents.place())
            authority, left = opening.authority()
            require_rows(Purpose.ENROL, authority)
            if not self._store.use_up(transaction, found):
                raise TicketUsed()
            question = Question(Purpose.ENROL, client, None, authority.consent, self._territory, self._clock(), left)
            decided_by = self._engine.at(opening.policies, transaction).decide(question).require()
            intent = _intent("allowed", found, {"policies": ",".join(decided_by)})
            intent_id = self._intents.append(transaction, intent, opening.rows, commit=True)
            return Grant(_granted(found, client, int(now)), None, intent_id, decided_by)

    @contextmanager
    def _presented(self, secret: str) -> Iterator[tuple[Transaction, UploadTicket, Client]]:
        """The ticket's row and its client's; what the block refuses is recorded once a ticket, and of no ticket only counted."""
        ticket: UploadTicket | None = None
        client: Client | None = None
        try:
            with site_wide(self._database) as transaction:
                digest = digest_of(secret)
                ticket = None if digest is None else self._store.one_time(transaction, UploadTicket, digest)
                if ticket is None:
                    raise TicketUnknown()
                send(transaction, within(ticket.tenant))  # from here on it is that tenant's request
                client = self._store.client(transaction, ticket.client_id)
                if client is None or client.tenant != ticket.tenant:
                    raise ClientUnknown()
                if self._clock() >= ticket.expires_at.timestamp():
                    raise TicketExpired()
                yield transaction, ticket, client
        except (AuditError, AuditUnavailable):
            raise  # what the log could not take is not a refusal that it could take
        except PolicyError as refusal:
            if ticket is None or client is None:
                self._refusals.count(refusal.code)
            else:
                self._record(ticket, client, refusal)
            raise

    def _record(self, ticket: UploadTicket, client: Client, refusal: PolicyError) -> None:
        once = VerifiedProof(_ISSUER, ticket.secret_sha256, int(ticket.expires_at.timestamp()))
        attempts = int(not isinstance(refusal, NotCounted))
        spend = self._store.spend(client.cert_sha256, None, self._clock(), attempts=attempts)
        intent = _intent("denied", ticket, refusal_details(refusal))
        record_refusal(self._database, self._store, self._intents, self._refusals, once, refusal, intent, spend)


def _granted(ticket: UploadTicket, client: Client, now: int) -> VerifiedToken:
    """What the ticket stands for: an enrolment that was granted to its client."""
    return VerifiedToken(
        issuer=_ISSUER,
        jti=ticket.secret_sha256,
        tenant=ticket.tenant,
        client_id=ticket.client_id,
        purpose=Purpose.ENROL,
        voice=None,
        key=None,
        consent=ticket.consent_id,
        text_sha256=None,
        max_chars=None,
        x5t_s256=client.cert_sha256,
        jkt=client.jkt,
        issued_at=now,
        expires_at=int(ticket.expires_at.timestamp()),
    )


def _intent(outcome: Outcome, ticket: UploadTicket, more: Facts) -> Intent:
    return Intent(
        action=ADMIT,
        outcome=outcome,
        tenant=ticket.tenant,
        client_id=ticket.client_id,
        voice=None,
        purpose=Purpose.ENROL.value,
        details={"ticket": ticket.secret_sha256, "consent": str(ticket.consent_id), **more},
    )
