"""Images come from data: URLs and from allowed hosts at public addresses, and never more or for longer than is said."""

from __future__ import annotations

import base64
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest

from vision import fetch
from vision.fetch import load_image_bytes

IMAGE = bytes(range(256)) * 8
TEXT, END = base64.b64encode(IMAGE).decode(), "\r\n"


ANSWERS = {  # by the first part of a path; {} is the rest of it
    "to": "307 Moved\r\nLocation: {}\r\n\r\n",
    "chunks": f"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{2 * ('7d0' + END + 'x' * 2000 + END)}0{END}{END}",
    "large": "200 OK\r\nContent-Length: 100000000000\r\n\r\n",
    "short": "200 OK\r\nContent-Length: 3000\r\n\r\nx",
    "missing": "404 Not Found\r\nContent-Length: 2\r\n\r\nno",
    "drip_head": "200 OK\r\nX: ",
    "drip_body": "200 OK\r\n\r\n",
    "noise": "\r\n220 ready\r\n",
}


class Handler(StreamRequestHandler):
    def handle(self) -> None:
        request = b"".join(iter(self.rfile.readline, b"\r\n")).decode()
        self.server.seen.append(request)
        name, _, rest = request.split()[1][1:].partition("/")
        if name == "again":
            name, rest = "to", f"/again/{int(rest) - 1}" if int(rest) > 1 else "/image"
        if name in ANSWERS:
            self.wfile.write(f"{'x' * (name == 'noise')}HTTP/1.1 {ANSWERS[name].format(rest)}".encode())
        else:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n" + IMAGE)
        while name.startswith("drip") and not self.server.stop.wait(0.02):
            self.wfile.write(b"x")


def serve(context: ssl.SSLContext | None = None) -> ThreadingTCPServer:
    server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.seen, server.stop, server.daemon_threads = [], threading.Event(), True
    server.handle_error = lambda *args: None  # clients go away
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


@pytest.fixture(scope="module")
def hosts() -> Iterator[ThreadingTCPServer]:
    server = serve()
    yield server
    server.stop.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that are looked up; all are this host, which counts as public."""
    names, lookup = [], socket.getaddrinfo

    def look(host: str, *args: object, **more: object) -> list:
        if host != "127.0.0.1":
            names.append(host)
        return lookup("127.0.0.1", *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setattr(fetch, "check_address", lambda address: None)
    return names


def load(hosts: ThreadingTCPServer, path: str, timeout: float = 20.0) -> bytes:
    url = f"http://images.example:{hosts.server_address[1]}/{path}"
    return load_image_bytes(url, [f"images.example:{hosts.server_address[1]}"], 3000, timeout)


@pytest.mark.parametrize("head", ["image/png;base64", "image/x;name=a;base64", ";base64", "IMAGE/PNG;BASE64"])
def test_a_data_url_is_decoded(head):
    assert load_image_bytes(f"data:{head},{TEXT}", [], 2048) == IMAGE
    for text in (TEXT.replace("=", "%3D").replace("+", "%2B"), TEXT[:400] + "\n" + TEXT[400:]):
        assert load_image_bytes(f"DATA:{head},{text}", [], 2048) == IMAGE


@pytest.mark.parametrize("url", ["http://evil.example/", "//images.example/", "data:image/png;base64,YWJjYWJjYWJj"])
def test_other_urls_are_refused(url, lookups):
    with pytest.raises(ValueError, match="the image"):
        load_image_bytes(url, ["images.example"], 8)
    assert not lookups


def test_no_host_is_allowed_that_is_not_named():
    with pytest.raises(ValueError, match=r"at the host 'a\.example'; --allowed-media-domains allows none"):
        load_image_bytes("https://a.example/", [], 100)
    with pytest.raises(ValueError, match=r"at the host 'a\.example:22'; --allowed-media-domains allows a\.example"):
        load_image_bytes("https://a.example:22/", ["a.example"], 100)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1%lo", "fc00::1", "fec0::1", "ff02::1", "ff0e::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:db8::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused(address, monkeypatch):
    with pytest.raises(ValueError, match="images come from public addresses alone"):
        fetch.check_address(address)
    both = [(0, 0, 0, "", (ip, 80)) for ip in ("93.184.215.14", address)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: both)
    monkeypatch.setattr(socket, "create_connection", None)  # one bad address is enough
    with pytest.raises(ValueError, match="has the address"):
        load_image_bytes("http://images.example/", ["images.example"], 100)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07::1", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are_not_refused(address):
    fetch.check_address(address)


def test_an_image_is_loaded_from_the_address_that_was_checked(hosts, lookups):
    port = hosts.server_address[1]
    url = f"http://images.example:{port}?a=b c&d=é#part"
    assert load_image_bytes(url, [f"images.example:{port}"], 3000) == IMAGE
    assert hosts.seen[-1].startswith(f"GET /?a=b%20c&d=%C3%A9 HTTP/1.1\r\nHost: images.example:{port}\r\n")
    assert lookups == ["images.example"]


def test_redirects_are_followed_three_times_to_allowed_hosts(hosts, lookups):
    assert load(hosts, "again/3") == IMAGE and len(lookups) == 4
    with pytest.raises(ValueError, match="redirected more than 3 times"):
        load(hosts, "again/4")
    for target in ("http://evil.example/", "file:///etc/passwd", "//evil.example/", "data:image/png;base64,YWJj"):
        with pytest.raises(ValueError, match="the image is at"):
            load(hosts, f"to/{target}")
    assert set(lookups) == {"images.example"}


def test_this_host_is_not_asked(hosts):
    seen = len(hosts.seen)
    with pytest.raises(ValueError, match="public addresses"):
        load_image_bytes(f"http://localhost:{(port := hosts.server_address[1])}/image", [f"localhost:{port}"], 3000)
    assert len(hosts.seen) == seen


LARGE = "it has more than 3000 bytes"
REFUSED = {"chunks": LARGE, "large": LARGE, "short": "too early", "missing": "the host answers 404", "noise": "no HTTP"}


@pytest.mark.parametrize("path", REFUSED)
def test_an_answer_that_is_no_image_is_refused(hosts, lookups, path):
    with pytest.raises(
        ValueError, match=rf"^the image at 'http://images\.example.*' cannot be loaded: .*{REFUSED[path]}"
    ):
        load(hosts, path)


@pytest.mark.parametrize("path", ["drip_head", "drip_body"])
def test_a_host_that_never_ends_is_left(hosts, lookups, path):
    with pytest.raises(ValueError, match=r"took more than 0\.2 s"):
        load(hosts, path, timeout=0.2)


def test_a_name_must_be_that_of_the_certificate(tmp_path, monkeypatch, lookups):
    if not (openssl := shutil.which("openssl")):
        pytest.skip("certificates are made by the command openssl")
    files = key, certificate = [str(tmp_path / name) for name in ("key.pem", "cert.pem")]
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=images.example", "-addext", "subjectAltName=DNS:images.example"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*reversed(files))
    server = serve(context)
    try:
        url = f"https://{{}}.example:{server.server_address[1]}/image"
        allowed = [f"{name}.example:{server.server_address[1]}" for name in ("images", "other")]
        assert load_image_bytes(url.format("images"), allowed, 3000) == IMAGE
        with pytest.raises(ValueError, match="CERTIFICATE_VERIFY_FAILED"):
            load_image_bytes(url.format("other"), allowed, 3000)
    finally:
        server.shutdown()
        server.server_close()
