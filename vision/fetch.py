"""The bytes of an image that a request names by its URL. A client may make this host ask no one but allowed hosts."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Collection
from urllib.parse import SplitResult, quote, urljoin, urlsplit

MOST_REDIRECTS = 3
MOST_HEAD = 256  # characters of a data: URL before its comma
ESCAPED = {b"%2B": b"+", b"%2b": b"+", b"%2F": b"/", b"%2f": b"/", b"%3D": b"=", b"%3d": b"="}  # of base64 in a URL
PORTS = {"http": 80, "https": 443}
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # its addresses end with one of IPv4


def load_image_bytes(url: str, allowed_domains: Collection[str], max_bytes: int, timeout: float = 30.0) -> bytes:
    """Return the bytes in a data: URL, or load those at an http(s) URL of an allowed host.

    Args:
        allowed_domains: hosts in lower case, for `PORTS`, or HOST:PORT; also those that they redirect to must be there.
        max_bytes: the largest answer.
        timeout: seconds for all but looking names up, for which the system has a limit.

    Raises:
        ValueError: the URL is of another kind, its host is not allowed or not public, or its answer is no image's.
    """
    if url[:5].lower() == "data:":
        return _decode(url[5:], max_bytes)
    deadline, begin = time.monotonic() + timeout, url
    for _ in range(MOST_REDIRECTS + 1):
        try:
            location, data = _get(_checked(url, allowed_domains), max_bytes, deadline)
        except OSError as error:
            why = f"took more than {timeout:g} s" if time.monotonic() >= deadline else f"cannot be loaded: {error}"
            raise ValueError(f"the image at {url[:200]!r} {why}") from None
        if not location:
            return data
        url = urljoin(url, location)
    raise ValueError(f"the image at {begin[:200]!r} is redirected more than {MOST_REDIRECTS} times")


def check_address(address: str) -> None:
    """Refuse an address that is not a public one of a single host."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(ip) % 2**32) if ip in NAT64 else ip.ipv4_mapped or ip.sixtofour
        ip = inner or ip
    site_local = isinstance(ip, ipaddress.IPv6Address) and ip.is_site_local
    if not ip.is_global or ip.is_multicast or ip.is_reserved or site_local:
        raise ValueError(f"the image's host has the address {address}; images come from public addresses alone")


def _decode(data_url: str, max_bytes: int) -> bytes:
    head = data_url[:MOST_HEAD].partition(",")[0]  # nothing is made of a long text before its size is known
    kind, *parameters = head.lower().split(";")
    if len(head) == len(data_url[:MOST_HEAD]) or "base64" not in parameters or kind[:6] not in ("", "image/"):
        raise ValueError(f"the image is at {'data:' + head[:60]!r}; it must be data:image/...;base64,...")
    if len(data_url) > 2 * max_bytes + MOST_HEAD:  # with room for line ends
        raise ValueError(f"the image's data: URL has {len(data_url)} characters; the image may have {max_bytes} bytes")
    body = data_url[len(head) + 1 :].encode("ascii", "replace").translate(None, b" \t\r\n")
    for written, sign in ESCAPED.items() if b"%" in body else ():
        body = body.replace(written, sign)
    try:
        data = base64.b64decode(body, validate=True)
    except ValueError as error:
        raise ValueError(f"the image's data: URL has no base64: {error}") from None
    if len(data) > max_bytes:
        raise ValueError(f"the image's data: URL has {len(data)} bytes; it must have at most {max_bytes}")
    return data


def _checked(url: str, allowed_domains: Collection[str]) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.username is None and parts.port != 0
    except ValueError:  # of its host or port
        usable = False
    if not usable:
        raise ValueError(f"the image is at {url[:200]!r}; it must be a data:, http: or https: URL, with no user in it")
    port = parts.port or PORTS[parts.scheme]
    if not {f"{parts.hostname}:{port}", parts.hostname if port in PORTS.values() else ""} & {*allowed_domains}:
        names = ", ".join(sorted(allowed_domains)) or "none"
        raise ValueError(f"the image is at the host {parts.netloc[:200]!r}; --allowed-media-domains allows {names}")
    return parts


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to one of the host's addresses, all of which are checked; no name is looked up after that."""
    addresses = list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
    for address in addresses:
        check_address(address)
    for address in addresses:
        try:
            return socket.create_connection((address, port), max(deadline - time.monotonic(), 0.001))
        except OSError as error:
            failure = error
    raise failure


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end was faster
        sock.shutdown(socket.SHUT_RDWR)


def _get(parts: SplitResult, max_bytes: int, deadline: float) -> tuple[str, bytes]:
    """Where the URL is redirected to, or else the answer's body."""
    import http.client
    import ssl

    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or PORTS[parts.scheme]
    sock, connection = _connect(host, port, deadline), http.client.HTTPConnection(host, port)
    connection.auto_open = 0  # it would look the name up
    stopper = sock.dup()  # which ends also what comes byte for byte
    timer = threading.Timer(max(deadline - time.monotonic(), 0), _shut, (stopper,))
    timer.start()
    try:
        connection.sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host) if secure else sock
        target = quote(f"{parts.path or '/'}?{parts.query}".removesuffix("?"), safe="%/:=&?~+!$,;'@()*[]")
        headers = {"Host": parts.netloc, "Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "manta"}
        connection.request("GET", target, headers=headers)
        reply = connection.getresponse()
        if reply.status in (301, 302, 303, 307, 308) and (location := reply.headers["Location"]):
            return location, b""
        if reply.status != 200:
            raise OSError(f"the host answers {reply.status}")
        data = reply.read(max_bytes + 1) if (reply.length or 0) <= max_bytes else b""
        if len(data) > max_bytes or (reply.length or 0) > max_bytes:
            raise OSError(f"it has more than {max_bytes} bytes")
        if reply.length or time.monotonic() >= deadline:
            raise OSError("it ends too early")
        return "", data
    except http.client.HTTPException as error:
        raise OSError(f"the host's answer is no HTTP: {error!r}") from None
    finally:
        timer.cancel()
        stopper.close()
        connection.close()
        sock.close()
