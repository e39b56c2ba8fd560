"""HTTPS: the server's certificate, and those that its clients must have."""

from __future__ import annotations

import ssl

from weft.errors import ConfigError
from weft.serving.config.settings import ServerConfig


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What connections are encrypted with; None without --ssl-certfile.

    Raises:
        ConfigError: a file cannot be read, or is none of these.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, config)
    if config.ssl_ca_certs is not None:
        flag = f"--ssl-ca-certs {config.ssl_ca_certs}"
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:  # also ssl.SSLError
            raise ConfigError(f"{flag}: {error.strerror or error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Use the certificate as it is on disk now; ConfigError as `tls_context`."""
    assert config.ssl_certfile is not None
    # Without a password OpenSSL would ask the terminal.
    password = config.ssl_keyfile_password or ""
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: password)
    except OSError as error:  # also ssl.SSLError
        flags = f"--ssl-certfile {config.ssl_certfile}"
        if config.ssl_keyfile is not None:
            flags += f" --ssl-keyfile {config.ssl_keyfile}"
        raise ConfigError(f"{flags}: {error.strerror or error}") from None


def reload_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Use the certificate as it is on disk now; ConfigError as `tls_context`, and nothing changes.

    It is tried elsewhere first: one whose key does not suit would take away the key of before.
    """
    load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config)
    load_certificate(context, config)
