"""The requests of clients: their lengths and how they arrive."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.errors import ConfigurationError

_MOST_REQUESTS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Load:
    """A closed loop of clients, each with one request in flight."""

    input_tokens: int
    output_tokens: int
    concurrency: int = 1
    """Requests in flight."""
    requests_per_client: int = 10
    """All clients send the first of these at once."""
    shortest: float = 1.0
    """Lengths are drawn between this share of the number of tokens and all of it."""

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "concurrency", "requests_per_client"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"serving: {name} must be at least 1, got {getattr(self, name)}.")
        if self.concurrency > _MOST_REQUESTS:
            raise ConfigurationError(
                f"serving: concurrency must be at most {_MOST_REQUESTS}, got {self.concurrency}. Every request is "
                "followed; divide them among several deployments."
            )
        if not 0 < self.shortest <= 1:
            raise ConfigurationError(f"serving: shortest must be above 0 and at most 1, got {self.shortest}.")

    @property
    def mean_input(self) -> float:
        """Tokens of a prompt."""
        return self.input_tokens * (1 + self.shortest) / 2

    @property
    def mean_output(self) -> float:
        """Tokens of an answer."""
        return self.output_tokens * (1 + self.shortest) / 2

    @property
    def mean_context(self) -> float:
        """Tokens in the cache of a sequence that runs."""
        return self.mean_input + self.mean_output / 2
