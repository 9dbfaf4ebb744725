"""Bytes behind the URLs and base64 texts of a request, within the operator's policy.

    data = await fetch(part.url, policy, param="messages[0].content[1].audio_url")
    data = decode_base64(part.data, policy, param="messages[0].content[0].input_audio")

What a URL may be
- data:    always; base64 only.
- http(s): only hosts on `allowed_domains`. "example.com" allows itself and its subdomains, on any port; such a host must
           resolve to public addresses only. "localhost" or an IP address allows exactly itself, private or not. The
           connection goes to the address that was checked, each redirect is checked anew, and neither cookies,
           credentials nor the environment's proxies take part.
- file:    only regular files that lie under `allowed_local_path` after links are resolved.
Anything else is refused by name. Messages never contain what was fetched.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import os
import socket
import stat
import string
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import httpx

from aura_omni.errors import BadMedia, Forbidden, TooLarge, shown
from aura_omni.flow import MediaLimits

MAX_REDIRECTS = 5
_READ_BYTES = 65_536
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_SPACE = b"\t\n\r "
_ALPHABET = string.ascii_letters.encode() + b"0123456789+/="

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class MediaPolicy(MediaLimits):
    """What a request may make this server read. The defaults reach nothing outside the request itself."""

    allowed_local_path: Path | None = None  # file:// URLs below this folder
    allowed_domains: tuple[str, ...] = ()  # http(s) hosts


async def fetch(url: str, policy: MediaPolicy, *, param: str | None = None) -> bytes:
    """The bytes that `url` names, all of them.

    raises Forbidden (host, address or path not allowed), TooLarge (more than policy.max_bytes), BadMedia (the rest)
    Cancelling closes the connection.
    """
    scheme, colon, _ = url.partition(":")
    scheme = scheme.lower() if colon else ""
    if scheme == "data":
        return await asyncio.to_thread(decode_base64, url, policy, param=param)
    if scheme == "file":
        return await asyncio.to_thread(_read_file, url, policy, param)
    if scheme in ("http", "https"):
        try:
            async with asyncio.timeout(policy.timeout_s):
                return await _download(url, policy, param)
        except TimeoutError:
            raise BadMedia(
                f"fetching the URL took longer than {policy.timeout_s:g} s; send the data itself, as a data: URL, "
                "or raise media.timeout_s in the deploy file",
                param=param,
            ) from None
    raise BadMedia(f"the URL scheme {scheme[:20]!r} is not supported; use data:, https:, http: or file:", param=param)


def decode_base64(text: str, policy: MediaPolicy, *, param: str | None = None) -> bytes:
    """Bytes of bare base64 or of a base64 data: URL.

    White space is skipped and the URL-safe alphabet (- and _) is accepted; padding is required, so that a text which was
    cut off is noticed. The declared media type is not used: media are read by content. The size is checked before decoding.
    """
    payload = text
    if text[:5].lower() == "data:":
        head, comma, payload = text.partition(",")
        if not comma or not head.lower().replace(" ", "").endswith(";base64"):
            raise BadMedia("the data: URL must have the form data:<type>;base64,<data>", param=param)
    if 0 < len(payload) // 4 * 3 <= policy.max_bytes:
        with suppress(ValueError):  # white space, another alphabet, or what is refused below with its reason
            return base64.b64decode(payload, validate=True)
    raw = unquote_to_bytes(payload) if "%" in payload else payload.encode("ascii", "replace")
    raw = raw.translate(_URL_SAFE, _SPACE)
    if raw.translate(None, _ALPHABET):
        raise _no_base64(text, param)
    if len(raw) % 4:
        raise BadMedia(
            f"the base64 text has {len(raw):,} characters, not a multiple of 4: it is cut off or lacks '=' padding",
            param=param,
        )
    if not raw:
        raise BadMedia("the base64 text is empty", param=param)
    size = len(raw) // 4 * 3 - raw[-2:].count(b"=")
    if size > policy.max_bytes:
        raise _too_large(size, policy, param)
    try:
        return base64.b64decode(raw, validate=True)
    except binascii.Error:
        raise _no_base64(text, param) from None


def _no_base64(text: str, param: str | None) -> BadMedia:
    if text[:5].lower() == "data:":
        return BadMedia("what follows the comma of the data: URL is not base64", param=param)
    return BadMedia(
        f"{shown(text)} is neither a data:, http(s): or file: URL nor base64; send one of them", param=param
    )


def _too_large(size: int, policy: MediaPolicy, param: str | None) -> TooLarge:
    return TooLarge(
        f"the medium has {size:,} bytes, more than the limit of {policy.max_bytes:,}; send a shorter or more "
        "compressed one, or raise media.max_bytes in the deploy file",
        param=param,
    )


# ---------------------------------------------------------------- file:


def _read_file(url: str, policy: MediaPolicy, param: str | None) -> bytes:
    root = policy.allowed_local_path
    if root is None:
        raise Forbidden(
            "file: URLs are not allowed; start the server with --allowed-local-media-path FOLDER, or send the medium itself",
            param=param,
        )
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise BadMedia("a file: URL must have the form file:///absolute/path", param=param)
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(root)):  # says the same whether or not the file exists
        raise Forbidden("the file is outside the allowed local media path", param=param)
    try:
        # All links are resolved, so another one here was put in since. Opening a pipe must not wait for its writer.
        handle = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise BadMedia("the file does not exist or cannot be read", param=param) from None
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise BadMedia("the path is not a regular file", param=param)
        if about.st_size > policy.max_bytes:
            raise _too_large(about.st_size, policy, param)
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(policy.max_bytes + 1)
    finally:
        os.close(handle)
    if len(data) > policy.max_bytes:
        raise _too_large(len(data), policy, param)
    return data


# ---------------------------------------------------------------- http(s):


async def _download(url: str, policy: MediaPolicy, param: str | None) -> bytes:
    target = _checked_url(url, policy, param)
    # The bare transport: no cookies, no redirects, no proxies of its own. Made in a thread, because reading the
    # certificate store takes tens of milliseconds.
    async with await asyncio.to_thread(httpx.AsyncHTTPTransport, trust_env=False) as transport:
        for _ in range(MAX_REDIRECTS + 1):
            async with _answer(transport, target, policy, param) as response:
                if response.status_code not in (301, 302, 303, 307, 308):
                    return await _body(response, target, policy, param)
                try:
                    target = target.join(response.headers.get("location", ""))
                except httpx.InvalidURL:
                    raise BadMedia(f"{target.host} redirects to something that is no URL", param=param) from None
            target = _checked_url(str(target), policy, param)
    raise BadMedia(f"the URL redirects more than {MAX_REDIRECTS} times", param=param)


def _checked_url(url: str, policy: MediaPolicy, param: str | None) -> httpx.URL:
    """The same parser decides here and when connecting, so no spelling of a host means two things."""
    try:
        target = httpx.URL(url)
    except httpx.InvalidURL:
        raise BadMedia("this is not a valid URL", param=param) from None
    if target.scheme not in ("http", "https") or not target.host:
        raise Forbidden(f"a redirect to the scheme {target.scheme[:20]!r} is not followed", param=param)
    if target.userinfo:
        raise Forbidden("a URL with a user name or password is not fetched", param=param)
    if not _allowed_by(target.host, policy):
        allowed = ", ".join(policy.allowed_domains) or "no domain"
        raise Forbidden(
            f"the host {target.host[:80]!r} is not on the list of allowed media domains ({allowed}); "
            "send the data itself, as a data: URL",
            param=param,
        )
    return target


def _allowed_by(host: str, policy: MediaPolicy) -> bool:
    host = _plain(host)
    for entry in map(_plain, policy.allowed_domains):
        if host == entry or (not _is_literal(entry) and host.endswith("." + entry)):
            return True
    return False


def _plain(host: str) -> str:
    return host.lower().rstrip(".").removeprefix("[").removesuffix("]")


def _is_literal(host: str) -> bool:
    """Named by the operator as an address; this alone makes a private one allowed."""
    return host == "localhost" or _address(host) is not None


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@asynccontextmanager
async def _answer(
    transport: httpx.AsyncHTTPTransport, target: httpx.URL, policy: MediaPolicy, param: str | None
) -> AsyncIterator[httpx.Response]:
    response = await _connected(transport, target, await _checked_addresses(target, param), policy, param)
    try:
        yield response
    finally:
        await response.aclose()


async def _connected(
    transport: httpx.AsyncHTTPTransport,
    target: httpx.URL,
    addresses: list[Address],
    policy: MediaPolicy,
    param: str | None,
) -> httpx.Response:
    """Connects to the addresses that were checked; a second look-up could give others. TLS still proves the name."""
    # The deadline of `fetch` limits the whole, so a body that trickles cannot renew it; here only connecting is limited,
    # so that one unreachable address leaves time for the next.
    timeout = httpx.Timeout(None, connect=policy.timeout_s / 3)
    for address in addresses:
        request = httpx.Request(
            "GET",
            target.copy_with(host=str(address)),
            headers={"Host": target.netloc.decode("ascii"), "Accept": "*/*", "Accept-Encoding": "identity"},
            extensions={"sni_hostname": target.raw_host.decode("ascii"), "timeout": timeout.as_dict()},
        )
        try:
            return await transport.handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            continue  # a machine without IPv6 routes still finds the IPv4 address
        except httpx.TransportError:
            raise BadMedia(f"{target.host} broke the connection before it answered", param=param) from None
    raise BadMedia(f"{target.host} cannot be reached", param=param)


async def _checked_addresses(target: httpx.URL, param: str | None) -> list[Address]:
    """All must be good: a name with one private address is trying something."""
    host = _plain(target.host)
    port = target.port or (443 if target.scheme == "https" else 80)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise BadMedia(f"the host {target.host[:80]!r} cannot be resolved", param=param) from None
    addresses = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in found]
    for address in addresses:
        if host == "localhost" and not address.is_loopback:
            raise Forbidden("localhost resolves to an address that is not loopback", param=param)
        if not _is_literal(host) and not is_public(address):
            raise Forbidden(f"the host {target.host[:80]!r} resolves to an address that is not public", param=param)
    return addresses


def is_public(address: Address) -> bool:
    """False for everything inside a machine or network, also when wrapped into IPv6 (mapped, 6to4, NAT64, Teredo)."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in ipaddress.IPv6Network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


async def _body(response: httpx.Response, target: httpx.URL, policy: MediaPolicy, param: str | None) -> bytes:
    if response.status_code != 200:
        raise BadMedia(f"{target.host} answered with HTTP status {response.status_code}", param=param)
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise BadMedia(f"{target.host} sent a compressed body although none was asked for", param=param)
    declared = response.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > policy.max_bytes:
        raise _too_large(int(declared), policy, param)
    data = bytearray()
    try:
        async for piece in response.aiter_raw(_READ_BYTES):
            data += piece
            if len(data) > policy.max_bytes:
                raise TooLarge(f"{target.host} sends more than the limit of {policy.max_bytes:,} bytes", param=param)
    except httpx.TransportError:
        raise BadMedia(f"the connection to {target.host} broke after {len(data):,} bytes", param=param) from None
    return bytes(data)
