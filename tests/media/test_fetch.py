import asyncio
import base64
import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_omni.errors import AuraError, BadMedia, Forbidden, TooLarge
from aura_omni.media.fetch import MAX_REDIRECTS, MediaPolicy, decode_base64, fetch, is_public

PARAM = "messages[2].content[1].video_url"
NOTHING = MediaPolicy()
BODY = bytes(range(256)) * 40


class Site:
    """A server on the loopback address that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.released = threading.Event()
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                site.headers.append(dict(self.headers))
                site.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path
        if path.startswith("/to/"):
            request.send_response(302)
            request.send_header("Location", base64.urlsafe_b64decode(path[4:]).decode())
            request.end_headers()
            return
        if path == "/secret-404":
            request.send_response(404)
            request.end_headers()
            request.wfile.write(b"top secret")
            return
        request.send_response(200)
        if path == "/declared":
            request.send_header("Content-Length", str(10**12))
        if path == "/gzip":
            request.send_header("Content-Encoding", "gzip")
        if path == "/broken":
            request.send_header("Content-Length", str(len(BODY) + 1))
        request.end_headers()
        if path == "/endless":
            for _ in range(2_000):  # 128 MB, unless the client hangs up
                try:
                    request.wfile.write(bytes(65_536))
                except OSError:
                    return
        if path == "/slow":
            request.wfile.write(b"first")
            request.wfile.flush()
            self.released.wait(10)
            return
        request.wfile.write(BODY)

    def redirect(self, target: str) -> str:
        return self.url("/to/" + base64.urlsafe_b64encode(target.encode()).decode())


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    site.thread.start()
    try:
        yield site
    finally:
        site.released.set()
        site.server.shutdown()
        site.thread.join()
        site.server.server_close()


LOCAL = MediaPolicy(allowed_domains=("127.0.0.1",), timeout_s=5.0, max_bytes=1_000_000)


def got(url: str, policy: MediaPolicy = LOCAL) -> bytes:
    return asyncio.run(fetch(url, policy, param=PARAM))


def refused(url: str, policy: MediaPolicy = LOCAL, kind: type[AuraError] = BadMedia) -> str:
    with pytest.raises(kind) as caught:
        got(url, policy)
    assert caught.value.param == PARAM
    assert 400 <= caught.value.status < 500
    return caught.value.message


# ---------------------------------------------------------------- data: and base64


@given(st.binary(min_size=1, max_size=300))
def test_a05_every_spelling_of_base64_gives_the_same_bytes(data):
    bare = base64.b64encode(data).decode()
    spellings = [
        bare,
        "data:audio/wav;base64," + bare,
        "DATA:audio/webm;codecs=opus;Base64," + bare,
        "data:;base64," + bare,
        base64.encodebytes(data).decode(),
        base64.urlsafe_b64encode(data).decode(),
        bare.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
    ]
    assert [decode_base64(text, NOTHING) for text in spellings] == [data] * len(spellings)


def test_data_url_is_fetched_without_any_permission():
    assert got("data:audio/webm;codecs=opus;base64,AAEC", NOTHING) == b"\0\1\2"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("AAECA", "not a multiple of 4"),
        ("AAE", "cut off"),
        ("data:audio/wav;base64,", "empty"),
        ("", "empty"),
        ("data:audio/wav;base64", "data:<type>;base64"),
        ("data:text/plain,hello", "data:<type>;base64"),
        ("data:audio/wav;base64,!!!!", "follows the comma of the data: URL is not base64"),
        ("AA=A", "nor base64"),
        ("ééé1", "nor base64"),
        ("AAA\0", "nor base64"),
        ("question.wav", r"^'question\.wav' is neither a data:, http\(s\): or file: URL nor base64; send one of them$"),
        ("a.wav", r"^'a\.wav' is neither"),
        ("/tmp/a" * 1_000_000 + ".", r"^'/tmp/a.{50,80}' is neither"),
    ],
)
def test_a05_bad_base64_is_refused_with_its_reason(text, reason):
    with pytest.raises(BadMedia, match=reason) as caught:
        decode_base64(text, NOTHING, param=PARAM)
    assert caught.value.param == PARAM
    assert caught.value.status == 400


@pytest.mark.parametrize("size", [29, 30, 31, 32])
def test_base64_size_limit_is_exact(size):
    policy = MediaPolicy(max_bytes=30)
    text = base64.encodebytes(bytes(size)).decode()
    if size <= 30:
        assert len(decode_base64(text, policy)) == size
    else:
        with pytest.raises(TooLarge, match=f"{size} bytes, more than the limit of 30"):
            decode_base64(text, policy)


# ---------------------------------------------------------------- schemes


@pytest.mark.parametrize(
    "url",
    ["ftp://example.com/a.wav", "gopher://x/", "javascript:alert(1)", "concat:a|b", "rtsp://127.0.0.1/", "blob:null/1"],
)
def test_a20_other_schemes_are_refused_by_name(url):
    assert repr(url.split(":")[0]) in refused(url)


@pytest.mark.parametrize("url", ["", "hello", "/etc/passwd", "//example.com/x", "AAEC"])
def test_what_is_no_url_is_refused(url):
    refused(url)


@pytest.mark.parametrize(
    "url", ["http://", "http:///x", "http://[::1", "http://a b/", "http://example.com:99999/", "http://\u2028/"]
)
def test_broken_urls_are_refused(url):
    refused(url, kind=AuraError)


# ---------------------------------------------------------------- http(s)


def test_allowed_host_is_fetched_without_cookies_proxies_or_compression(site, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert got(site.url("/clip.mp4?x=1")) == BODY
    assert site.asked == ["/clip.mp4?x=1"]
    sent = {name.lower(): value for name, value in site.headers[0].items()}
    assert sent["host"] == f"127.0.0.1:{site.port}"
    assert sent["accept-encoding"] == "identity"
    assert not {"cookie", "authorization"} & sent.keys()


def test_a20_no_spelling_of_a_private_address_is_fetched_by_default(site):
    spellings = [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "0.0.0.0",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "[::ffff:127.0.0.1]",
        "user@127.0.0.1",
        "LOCALHOST.",
        "１２７.0.0.1",
    ]
    for host in spellings:
        for policy in (NOTHING, MediaPolicy(allowed_domains=("example.com",))):
            refused(site.url("/", host), policy, AuraError)  # forbidden, or no valid URL at all
    assert site.asked == []


def test_a20_allowed_name_that_resolves_inside_is_refused(site, monkeypatch):
    policy = MediaPolicy(allowed_domains=("media.example",))
    inside = ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "100.64.0.1", "::1", "fd00::1", "fe80::1"]
    for address in [*inside, "0.0.0.0", "224.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::"]:
        resolve_to(monkeypatch, ["93.184.216.34", address])  # one public address does not excuse the other
        message = refused(site.url("/", "media.example"), policy, Forbidden)
        assert "not public" in message
    assert site.asked == []


def resolve_to(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> list[str]:
    asked: list[str] = []

    def getaddrinfo(host, port, *args, **kwargs):
        asked.append(host)
        return [
            (socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


def test_a20_connection_goes_to_the_address_that_was_checked(site, monkeypatch):
    asked = resolve_to(monkeypatch, ["127.0.0.1"])
    policy = MediaPolicy(allowed_domains=("localhost",), timeout_s=5.0)
    assert got(site.url("/a", "localhost"), policy) == BODY
    assert asked == ["localhost"]  # once: there is no second look-up to answer differently
    assert site.headers[0]["Host"] == f"localhost:{site.port}"


def test_next_address_is_tried_when_one_cannot_be_reached(site, monkeypatch):
    resolve_to(monkeypatch, ["::1", "127.0.0.1"])
    assert got(site.url("/a", "localhost"), MediaPolicy(allowed_domains=("localhost",))) == BODY


def test_localhost_that_resolves_elsewhere_is_refused(site, monkeypatch):
    resolve_to(monkeypatch, ["10.0.0.1"])
    refused(site.url("/", "localhost"), MediaPolicy(allowed_domains=("localhost",)), Forbidden)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("example.com", True),
        ("cdn.example.com", True),
        ("a.b.EXAMPLE.com.", True),
        ("badexample.com", False),
        ("example.com.evil.test", False),
        ("example.co", False),
        ("com", False),
        ("10.0.0.5", True),
        ("1.10.0.0.5", False),
        ("x.localhost", False),
    ],
)
def test_domain_rule_is_the_name_and_its_subdomains(monkeypatch, host, allowed):
    asked = resolve_to(monkeypatch, [])
    policy = MediaPolicy(allowed_domains=("Example.com", "10.0.0.5", "localhost"))
    if allowed:
        assert "cannot be reached" in refused(f"https://{host}/x", policy)
        assert len(asked) == 1
    else:
        assert "allowed media domains" in refused(f"https://{host}/x", policy, Forbidden)
        assert asked == []


def test_redirect_is_followed_within_the_rules(site):
    assert got(site.redirect(site.url("/end"))) == BODY
    assert got(site.redirect("/relative")) == BODY
    assert site.asked[1::2] == ["/end", "/relative"]


def test_a20_redirect_to_a_forbidden_host_is_not_followed(site, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"top secret")
    policy = MediaPolicy(allowed_domains=("127.0.0.1",), allowed_local_path=tmp_path)
    targets = [
        site.url("/inside", "localhost"),
        site.url("/inside", "127.0.0.2"),
        site.url("/inside", "2130706433"),
        site.url("/inside", "me@127.0.0.1"),
        "http://169.254.169.254/latest/",
        secret.as_uri(),
        "data:text/plain;base64,AAEC",
        "ftp://127.0.0.1/x",
    ]
    for target in targets:
        refused(site.redirect(target), policy, Forbidden)
    assert all(path.startswith("/to/") for path in site.asked)


def test_redirects_end(site):
    url = site.url("/end")
    for _ in range(MAX_REDIRECTS):
        url = site.redirect(url)
    assert got(url) == BODY
    assert "redirects more than" in refused(site.redirect(url))


def test_oversize_body_is_cut_short(site):
    assert "1,000,000,000,000 bytes, more than the limit of 1,000,000;" in refused(site.url("/declared"), kind=TooLarge)
    assert "more than the limit of 1,000,000 bytes" in refused(site.url("/endless"), kind=TooLarge)
    exact = MediaPolicy(allowed_domains=("127.0.0.1",), max_bytes=len(BODY))
    assert got(site.url("/exact"), exact) == BODY
    less = MediaPolicy(allowed_domains=("127.0.0.1",), max_bytes=len(BODY) - 1)
    refused(site.url("/exact"), less, TooLarge)


def test_slow_body_meets_the_deadline(site):
    policy = MediaPolicy(allowed_domains=("127.0.0.1",), timeout_s=0.2)
    assert "longer than 0.2 s" in refused(site.url("/slow"), policy)


def test_answers_that_are_no_medium_are_refused_and_not_quoted(site):
    message = refused(site.url("/secret-404"))
    assert "404" in message
    assert "top secret" not in message
    assert "compressed" in refused(site.url("/gzip"))
    assert "broke after" in refused(site.url("/broken"))


def test_unreachable_and_unknown_hosts_are_refused(site, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening
        assert "cannot be reached" in refused(f"http://127.0.0.1:{closed.getsockname()[1]}/")

    def unknown(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert "cannot be resolved" in refused("http://media.example/", MediaPolicy(allowed_domains=("media.example",)))


def test_cancelled_fetch_leaves_no_connection(site):
    async def run() -> None:
        task = asyncio.create_task(fetch(site.url("/slow"), LOCAL))
        while not site.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address):
    assert is_public(ipaddress.ip_address(address))


# ---------------------------------------------------------------- file:


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "media"
    (root / "sub").mkdir(parents=True)
    (root / "a b.wav").write_bytes(b"inside")
    (tmp_path / "outside.wav").write_bytes(b"outside")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "x").write_bytes(b"outside")
    return root


def test_file_below_the_allowed_path_is_read(folder):
    policy = MediaPolicy(allowed_local_path=folder)
    (folder / "sub" / "link").symlink_to(folder / "a b.wav")
    assert got((folder / "a b.wav").as_uri(), policy) == b"inside"
    assert got(f"file://localhost{folder}/sub/../a%20b.wav", policy) == b"inside"
    assert got((folder / "sub" / "link").as_uri(), policy) == b"inside"


def test_allowed_path_may_itself_be_a_link(folder, tmp_path):
    (tmp_path / "alias").symlink_to(folder)
    assert got((folder / "a b.wav").as_uri(), MediaPolicy(allowed_local_path=tmp_path / "alias")) == b"inside"


def test_a20_files_are_forbidden_by_default(folder):
    assert "not allowed" in refused("file:///etc/passwd", NOTHING, Forbidden)
    assert "not allowed" in refused((folder / "a b.wav").as_uri(), NOTHING, Forbidden)


def test_files_outside_are_forbidden_whether_or_not_they_exist(folder, tmp_path):
    (folder / "escape").symlink_to(tmp_path / "outside.wav")
    (folder / "up").symlink_to(tmp_path)
    urls = [
        "file:///etc/passwd",
        (tmp_path / "outside.wav").as_uri(),
        (tmp_path / "missing.wav").as_uri(),
        (tmp_path / "media2" / "x").as_uri(),
        f"file://{folder}/../outside.wav",
        f"file://{folder}/%2e%2e/outside.wav",
        (folder / "escape").as_uri(),
        (folder / "up" / "outside.wav").as_uri(),
    ]
    messages = {refused(url, MediaPolicy(allowed_local_path=folder), Forbidden) for url in urls}
    assert messages == {"the file is outside the allowed local media path"}


def test_only_regular_files_of_allowed_size_are_read(folder):
    policy = MediaPolicy(allowed_local_path=folder, max_bytes=6)
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "big").write_bytes(bytes(7))
    for name in ("pipe", "sub", "loop", "missing"):
        refused((folder / name).as_uri(), policy)
    assert "7 bytes, more than the limit of 6" in refused((folder / "big").as_uri(), policy, TooLarge)
    assert got((folder / "a b.wav").as_uri(), policy) == b"inside"


@pytest.mark.parametrize("url", ["file:relative", "file://server/share/x", "file:///a%00b", "file:"])
def test_broken_file_urls_are_refused(folder, url):
    assert "file:///absolute/path" in refused(url, MediaPolicy(allowed_local_path=folder))


def test_https_checks_the_name_and_connects_to_the_address(monkeypatch):
    seen: list[httpx.Request] = []

    async def send(self, request):
        seen.append(request)
        raise httpx.ConnectError("no network here")

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", send)
    resolve_to(monkeypatch, ["93.184.216.34", "2606:4700::1111"])
    refused("https://cdn.media.example/x.mp4", MediaPolicy(allowed_domains=("media.example",)))
    assert [str(request.url) for request in seen] == ["https://93.184.216.34/x.mp4", "https://[2606:4700::1111]/x.mp4"]
    for request in seen:
        assert request.headers["host"] == "cdn.media.example"
        assert request.extensions["sni_hostname"] == "cdn.media.example"
