"""TLS 1.3 between the processes of one job, with client certificates on all connections.

A job has one self-signed certificate with its key. The controller's endpoint, the agents and the
agents' data ports all present it and trust no other: a process that holds the key belongs to the
job. The name in the certificate is the job's, not a host's; clients give it as `server_hostname`,
and a server of many jobs chooses the job's context by it (SNI). In a directory the files are
`tls.crt` and `tls.key`, as in a Kubernetes TLS Secret.

There are no session tickets: a resumed session would skip the client's proof that it has the key,
and a server of many jobs has one ticket key for all of them.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import HoldfastError

CERTIFICATE_NAME = "tls.crt"
KEY_NAME = "tls.key"

Choose = Callable[[str], ssl.SSLContext | None]
"""Server name -> the job's server context; None: no such job."""


class TlsUnusable(HoldfastError):
    """A certificate or key cannot be used."""


def files(directory: str | Path) -> tuple[Path, Path]:
    """(certificate, key) in a directory."""
    return Path(directory) / CERTIFICATE_NAME, Path(directory) / KEY_NAME


def server_context(certificate: str | Path, key: str | Path) -> ssl.SSLContext:
    """The context of a server of one job, from PEM files. Raises TlsUnusable."""
    return _load(_server(), Path(certificate), Path(key))


def client_context(certificate: str | Path, key: str | Path) -> ssl.SSLContext:
    """The context of a job's clients, from PEM files; they connect with the name in the certificate
    as `server_hostname`. Raises TlsUnusable."""
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), Path(certificate), Path(key))


def server_context_from_pem(certificate: bytes, key: bytes) -> ssl.SSLContext:
    """The same as server_context, from the contents of a Secret. Raises TlsUnusable."""
    with _private_file(certificate) as certificate_file, _private_file(key) as key_file:
        return server_context(certificate_file, key_file)


def choosing_context(choose: Choose) -> ssl.SSLContext:
    """The context of a server of many jobs: `choose` gives the context of the job that the client
    names. The handshake fails if the client names no job or an unknown one."""
    context = _server()
    _harden(context)

    def pick(
        connection: ssl.SSLObject, name: str | None, _context: ssl.SSLContext
    ) -> ssl.AlertDescription | None:
        chosen = choose(name) if name else None
        if chosen is None:
            return ssl.AlertDescription.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        # This replaces certificate and trust anchor; the requirement of a client certificate and
        # the TLS version remain the accepting context's, which are the same.
        connection.context = chosen
        return None

    context.sni_callback = pick
    return context


def _server() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0
    return context


def _harden(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET


def _load(context: ssl.SSLContext, certificate: Path, key: Path) -> ssl.SSLContext:
    _harden(context)
    try:
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(certificate)
    except OSError as error:  # ssl.SSLError is one
        raise TlsUnusable(
            f"{certificate}, {key}: got a certificate and key that cannot be used "
            f"({error.strerror or error}); expected both in PEM, the key fitting the certificate"
        ) from None
    return context


@contextlib.contextmanager
def _private_file(data: bytes) -> Iterator[Path]:
    """A temporary file that only this user can read; in memory if the system has memfd."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("holdfast-tls", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            yield Path(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return
    with tempfile.NamedTemporaryFile() as named:  # mode 0600
        named.write(data)
        named.flush()
        yield Path(named.name)
