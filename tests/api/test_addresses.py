"""The client address of a request: only trusted proxies may report it."""

import pytest
from engram_server.edge.proxies import MAX_HOPS, Origin, TrustedProxies

PROXIES = TrustedProxies(["10.0.0.0/8", "192.0.2.1", "2001:db8::/32"])


def origin(peer, *hops, proto=None):
    headers = [(b"x-forwarded-for", hop.encode("latin-1")) for hop in hops]
    if proto is not None:
        headers.append((b"x-forwarded-proto", proto.encode()))
    return PROXIES.origin(peer, headers)


def test_forwarding_headers_of_untrusted_peers_are_ignored():
    assert origin("198.51.100.7", "203.0.113.9", proto="https") == Origin("198.51.100.7")


def test_a_trusted_proxy_names_the_client():
    assert origin("10.0.0.1", "203.0.113.9") == Origin("203.0.113.9", "10.0.0.1")


def test_the_right_most_hop_that_is_no_proxy_counts_and_not_what_the_client_wrote():
    found = origin("10.0.0.1", "127.0.0.1, 203.0.113.9, 192.0.2.1")
    assert found == Origin("203.0.113.9", "10.0.0.1")


def test_several_headers_are_one_list():
    assert origin("10.0.0.1", "1.1.1.1", "203.0.113.9", "10.9.9.9").address == "203.0.113.9"


def test_where_all_hops_are_proxies_the_first_of_them_is_the_client():
    assert origin("10.0.0.1", "10.0.0.3, 10.0.0.2") == Origin("10.0.0.3", "10.0.0.1")


@pytest.mark.parametrize(
    ("hop", "address"),
    [
        ("203.0.113.9:4711", "203.0.113.9"),
        ("[2a00::7]:443", "2a00::7"),
        ("2a00::7", "2a00::7"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("fe80::1%eth0", "fe80::1"),
    ],
)
def test_addresses_may_have_a_port_a_zone_or_brackets(hop, address):
    assert origin("10.0.0.1", hop).address == address


@pytest.mark.parametrize("hop", ["", "unknown", "203.0.113.999", "<script>", "ü", "_hidden"])
def test_what_is_no_address_tells_nothing(hop):
    assert origin("10.0.0.1", f"8.8.8.8, {hop}, 10.0.0.2") == Origin("10.0.0.2", "10.0.0.1")
    assert origin("10.0.0.1", hop) == Origin("10.0.0.1", "10.0.0.1")


def test_a_proxy_that_is_reached_over_ipv6_is_the_same_proxy():
    assert origin("::ffff:10.0.0.1", "203.0.113.9").address == "203.0.113.9"
    assert origin("2001:db8::5", "203.0.113.9").proxy == "2001:db8::5"


def test_the_scheme_is_the_proxys_word_too():
    assert origin("10.0.0.1", "203.0.113.9", proto="https").scheme == "https"
    assert origin("10.0.0.1", "203.0.113.9", proto="gopher").scheme is None


def test_endless_lists_are_not_read_to_the_end():
    hops = ", ".join(["203.0.113.9", *["10.0.0.2"] * MAX_HOPS])
    assert origin("10.0.0.1", hops).address == "10.0.0.2"
