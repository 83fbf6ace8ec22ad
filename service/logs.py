"""Logs: one JSON object a line on standard output, without secrets, without the local variables of tracebacks.

What ends a process is its last line, with `code` and `fix`: the supervisor reads it there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, WrappedLogger

from service.errors import own_code

SECRET_WORDS = frozenset(
    {"pin", "password", "secret", "token", "authorization", "dpop", "proof", "key", "jwt", "cookie", "url", "embedding"}
    | {"conditioning", "vector", "samples", "audio", "text", "input", "blob", "sealed", "score"}
)
"""A logged field whose name has one of these as a part (`so_pin`, `access_token`) is written as `[removed]`."""
NAMED_PARTS = frozenset({"key_id", "key_version", "token_label", "key_state"})
"""Whole names with such a part, whose values say nothing secret."""
REMOVED = "[removed]"


def configure_logging(process: str, level: str) -> None:
    """Send structlog, the standard library's loggers and uncaught exceptions of this process to standard output as JSON."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
        _Named(process),
        without_secrets,
    ]
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, structlog.processors.JSONRenderer()],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    # Requests are counted and audited by Glottis itself; these would write paths with their query strings.
    for name in ("uvicorn.access", "httpx", "httpcore"):
        logging.getLogger(name).disabled = True
    sys.excepthook = log_uncaught


def log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The last line of a process: what ended it, its stable code and what to do, the stack by file and line alone."""
    if issubclass(kind, KeyboardInterrupt):
        return
    known = own_code(error)
    facts: dict[str, Any] = {"code": known or "unexpected", "fix": getattr(error, "mend", getattr(error, "fix", ""))}
    # The words of an error that is none of ours may quote what it choked on.
    event = str(error) if known else kind.__name__
    if known is None:
        facts["stack"] = _stack(trace)
    structlog.get_logger().critical(event, **facts)


def without_secrets(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Replace the value of every field that is named like a secret, at any depth, and every value that is raw bytes."""
    return {name: _cleaned(name, value) for name, value in event.items()}


def _cleaned(name: str, value: Any) -> Any:
    if name not in NAMED_PARTS and not SECRET_WORDS.isdisjoint(name.lower().replace("-", "_").split("_")):
        return REMOVED
    if isinstance(value, Mapping):
        return {str(inner): _cleaned(str(inner), item) for inner, item in value.items()}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return REMOVED
    if isinstance(value, (list, tuple)):
        return [_cleaned("", item) for item in value]
    return value


class _Named:
    """Adds which process speaks."""

    def __init__(self, process: str) -> None:
        self._process = process

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["process"] = self._process
        return event


def _stack(trace: TracebackType | None) -> list[str]:
    lines = []
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return lines
