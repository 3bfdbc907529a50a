"""Where a request comes from: the peer of its connection, or what a trusted proxy says."""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# So many proxies may stand in a row; what is further left in X-Forwarded-For is not read.
MAX_HOPS = 16


@dataclass(frozen=True, slots=True)
class Origin:
    """The client's address and, if it was not the peer, the proxy whose word that is."""

    address: str
    proxy: str | None = None
    scheme: str | None = None  # as the proxy says, if it does


class TrustedProxies:
    """The proxies whose X-Forwarded-For and X-Forwarded-Proto are believed.

    From the right, each hop of X-Forwarded-For was written by the one after it. So the client is
    the right-most hop that is no trusted proxy itself: what it wrote, further left, is hearsay.
    """

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks: list[Network] = [ipaddress.ip_network(each) for each in networks]

    def origin(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> Origin:
        """Where a request comes from, by its peer and its headers as they came."""
        if not self._trusts(parse_address(peer)):
            return Origin(peer)
        address = peer
        hops = _joined(headers, b"x-forwarded-for").rsplit(",", MAX_HOPS)[-MAX_HOPS:]
        for hop in reversed(hops):
            parsed = parse_address(hop.strip())
            if parsed is None:
                break  # not an address: the last hop that was one is all that is known
            address = str(parsed)
            if not self._trusts(parsed):
                break
        scheme = _joined(headers, b"x-forwarded-proto").rpartition(",")[2].strip().lower()
        return Origin(address, peer, scheme if scheme in ("http", "https") else None)

    def _trusts(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._networks)


def _joined(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> str:
    """A header that may be there several times, as one list."""
    return ",".join(value.decode("latin-1") for each, value in headers if each == name)


def parse_address(text: str) -> Address | None:
    """An address, with or without a port; IPv4 in IPv6 is IPv4. None if it is none."""
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
    """What counts as one address: of IPv6, the network of 64 bits that one customer gets."""
    parsed = parse_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return address if parsed is None else str(parsed)
