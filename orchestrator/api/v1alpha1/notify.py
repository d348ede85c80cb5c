"""Messages about a job: spec.notify."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from .base import Choice, Part

Happening = Literal["failed", "recovered", "finished", "waiting", "lost-steps"]


class SecretKey(Part):
    """A value in a Secret of the job's namespace."""

    name: str = Field(min_length=1, max_length=253)
    """Name of the Secret."""
    key: str = Field(min_length=1, max_length=253)
    """Key in the Secret."""


class Notify(Choice):
    """A server that gets one POST for each thing that happens, at most one per minute and cause."""

    choices: ClassVar[tuple[str, ...]] = ("url", "secret")

    url: str | None = Field(default=None, max_length=2048)
    """Address of a webhook. It is never shown or logged."""
    secret: SecretKey | None = None
    """Secret with the address; only for Kubernetes."""
    when: Annotated[tuple[Happening, ...], Field(min_length=1, max_length=5)] = (
        "failed",
        "recovered",
        "finished",
        "waiting",
    )
    """Events to send. waiting: no nodes for a minute, or held for a user; lost-steps: recoveries
    that lost steps."""
    format: Literal["slack", "json"] = "slack"
    """slack: {"text": ...}, which Mattermost also reads; json: fields."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and not is_web_address(url):
            raise ValueError("got another text; expected a URL with http:// or https:// and a host")
        return url


def is_web_address(url: str) -> bool:
    """True if a webhook can have this URL."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable()
    except ValueError:
        return False
