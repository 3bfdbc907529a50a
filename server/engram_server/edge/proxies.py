"""Client addresses: the TCP peer, or X-Forwarded-For of trusted proxies."""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Maximum number of hops read from X-Forwarded-For.
MAX_HOPS = 16


@dataclass(frozen=True, slots=True)
class Origin:
    """The client address and, if forwarded, the proxy that reported it."""

    address: str
    proxy: str | None = None
    scheme: str | None = None  # X-Forwarded-Proto, if present


class TrustedProxies:
    """The proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted.

    Each hop of X-Forwarded-For was appended by the next one. The client is the right-most hop that
    is not a trusted proxy; anything further left was written by the client and is ignored.
    """

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks: list[Network] = [ipaddress.ip_network(each) for each in networks]

    def origin(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> Origin:
        """Find the client address from the peer and the raw headers."""
        if not self._trusts(parse_address(peer)):
            return Origin(peer)
        address = peer
        hops = _joined(headers, b"x-forwarded-for").rsplit(",", MAX_HOPS)[-MAX_HOPS:]
        for hop in reversed(hops):
            parsed = parse_address(hop.strip())
            if parsed is None:
                break  # not an address: use the last valid hop
            address = str(parsed)
            if not self._trusts(parsed):
                break
        scheme = _joined(headers, b"x-forwarded-proto").rpartition(",")[2].strip().lower()
        return Origin(address, peer, scheme if scheme in ("http", "https") else None)

    def _trusts(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._networks)


def _joined(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> str:
    """Join repeated headers into one list."""
    return ",".join(value.decode("latin-1") for each, value in headers if each == name)


def parse_address(text: str) -> Address | None:
    """Parse an address with or without a port; maps IPv4-in-IPv6 to IPv4. None if invalid."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def network_of(address: str) -> str:
    """The unit for per-address limits: an IPv4 address or an IPv6 /64 network."""
    parsed = parse_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return address if parsed is None else str(parsed)
