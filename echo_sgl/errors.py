"""The error tree. Every message says what was given, what is allowed and what to do next."""

from __future__ import annotations

from collections.abc import Sequence


class EchoError(Exception):
    """Base of all errors that echo-sgl raises on purpose."""


class ConfigError(EchoError, ValueError):
    """A config file holds a key or a value that is not allowed."""


class ServiceTierError(EchoError, ValueError):
    """A request names a `service_tier` that this server does not serve."""

    def __init__(self, given: object, allowed: Sequence[str]) -> None:
        super().__init__(
            f"service_tier is {given!r}; allowed are {', '.join(allowed)}. "
            "Leave it out for an online request."
        )


class TermsError(EchoError, ValueError):
    """A request asks for a promise or a deadline that this server does not give."""

    def __init__(self, term: str, given: object, least_s: float, most_s: float) -> None:
        self.term = term
        super().__init__(
            f"{term} is {given!r}; allowed are seconds above 0, at least {least_s:g} and at most "
            f"{most_s:g}. Leave it out for what the server promises to all ([slo] in its config)."
        )


class UnsupportedEngineError(EchoError, RuntimeError):
    """The installed SGLang or its settings are not ones that Echo can run on."""
