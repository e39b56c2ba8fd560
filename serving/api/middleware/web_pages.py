"""Middleware to refuse requests from foreign web pages.

A browser lets any page send requests to this server, even if it listens only on this machine.
The page cannot read the responses without CORS, but a form can upload files. So a write (any method
but GET, HEAD and OPTIONS) must not come from a foreign page. Browsers name the page in `Origin`,
and its relation to this server in `Sec-Fetch-Site`; no script can change them.

A page can also let its own host name point to 127.0.0.1 (DNS rebinding). For the browser, page and
server are then the same site, and the page reads everything. Only `Host` shows it. A server on
loopback without API keys therefore checks the host's name. Such a page has a name, so an IP address
as host is always accepted.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.errors import shown
from weft.serving.api.errors import error_response
from weft.serving.config.settings import ServerConfig

_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class PageGuard:
    """ASGI middleware: 403 for writes from foreign pages, and for foreign host names.

    Args:
        app: the next application.
        config: has the allowed origins and host names, and the server's own address.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._origins = config.origins
        self._hosts = _checked_hosts(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        message = self._foreign_host(headers)
        if message is None and scope["method"] not in _READS:
            message = self._foreign_page(headers)
        if message is None:
            await self._app(scope, receive, send)
            return
        # The body is not read, so the connection ends with this response.
        close = {} if scope["method"] in _READS else {"connection": "close"}
        await error_response(403, message, headers=close)(scope, receive, send)

    def _foreign_host(self, headers: Headers) -> str | None:
        """Return the error for a foreign `Host`."""
        host = headers.get("host", "")
        if self._hosts is None or not host:  # HTTP/1.0; browsers do not use it
            return None
        name = _host_name(host)
        if _is_address(name) or name in self._hosts or name.endswith(".localhost"):
            return None
        return (
            f"the Host header is {shown(host)}, which is not a name of this server; if it should "
            "be, start weft with --allowed-hosts NAME"
        )

    def _foreign_page(self, headers: Headers) -> str | None:
        """Return the error for a request from a foreign page."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if "*" in self._origins or origin in self._origins or site == "same-origin":
            return None
        own = site in (None, "none")  # "none": the user's own action, such as a typed address
        if origin is not None and not (own and _is_at(origin, headers.get("host", ""))):
            name, value = "Origin", origin
        elif site is not None and not own:
            name, value = "Sec-Fetch-Site", site
        else:
            return None
        return (
            f"the {name} header is {shown(value)}: another web page sent this request; to allow "
            "the page, start weft with --cors-origins ORIGIN"
        )


def _checked_hosts(config: ServerConfig) -> frozenset[str] | None:
    """Return the allowed names in `Host`; None if any name is allowed."""
    named = config.host_names
    without_keys = config.api_key is None and config.api_key_file is None
    if "*" in named or not (named or (without_keys and _is_loopback(config.host))):
        return None
    return named | {"localhost", config.host.lower()}


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_at(origin: str, host: str) -> bool:
    """Return whether an origin has this host and port; a proxy may have changed the scheme."""
    return origin.partition("://")[2] == host.lower()


def _host_name(host: str) -> str:
    """Return the name in a host with a port, in lower case; "" if it is malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""
