"""Which hosts a sandbox may reach: the rules of a list, and what they say of a host and of an address. Pure.

The rules are Harbor's: a host name, ``*.name`` (every name below it, not itself), an address, a network; no ports. A
name is reached only where it is listed as one: a network lets in addresses as such, and names no name.

Invariants: a host has one spelling here, whatever it came as (case, a dot at its end, an IPv4 address inside an IPv6
one); numbers that are not plainly an address are refused, not guessed at; an address that is not public (loopback,
link-local, private, multicast, one that another protocol would translate) or that is the machine's own is reached only
where an entry names it: itself, or a network that has no public address.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

PORT = 3128
"""Of the proxy, on the loopback of each sandbox that has a list."""
MOST_ENTRIES = 256
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_ALLOWED = "allowed are a host name, *.name, an address or a network such as 10.0.0.0/8, without a port"
# Python's own `is_global` differs between its versions. What is not in 2000::/3 is nobody's or local.
_NOT_PUBLIC: dict[int, tuple[Network, ...]] = {
    4: tuple(
        IPv4Network(text)
        for text in (
            "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
            "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24",
            "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
        )
    ),
    6: tuple(
        IPv6Network(text)
        for text in (
            "::/3", "4000::/2", "8000::/1", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
        )
    ),
}  # fmt: skip


def variables(network: str) -> dict[str, str]:
    """Environment of the commands of a sandbox: where its proxy is, and what is not asked of it."""
    if network != "allowlist":
        return {}
    url = f"http://127.0.0.1:{PORT}"
    found = {"http_proxy": url, "https_proxy": url, "no_proxy": "localhost,127.0.0.1,::1"}
    return found | {name.upper(): value for name, value in found.items()}


class HostError(ValueError):
    """One sentence that names the host and what is allowed."""


@dataclass(frozen=True)
class Target:
    """A host that somebody wants to reach."""

    host: str
    """In its one spelling."""
    address: Address | None
    """Where the host is an address itself."""


def target(text: str) -> Target:
    """Read a host, without a port; an IPv6 address with or without brackets. Raises `HostError`."""
    host = text.lower()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise HostError(f"host is {text[:100]!r}; allowed in brackets is an IPv6 address")
    address = _address(host)
    if address is not None:
        return Target(str(address), address)
    name = _name(host)
    if name is None:
        raise HostError(f"host is {text[:100]!r}; allowed is a name of letters, digits, '-' and '.', or an address")
    return Target(name, None)


def _address(text: str) -> Address | None:
    if "%" in text:  # a zone means something on this machine only
        return None
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return plain(address)


def plain(address: Address) -> Address:
    """The IPv4 address that an IPv6 one only wraps."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _name(text: str) -> str | None:
    name = text.removesuffix(".")
    labels = name.split(".")
    # What ends in a number is an address to some resolvers: 2130706433, 0177.0.0.1, 0x7f.1, 127.1.
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels) or _NUMBER.fullmatch(labels[-1]):
        return None
    return name


def is_public(address: Address) -> bool:
    """Whether an address is one of the open network; `plain` ones only."""
    return not any(address in network for network in _NOT_PUBLIC[address.version])


def _has_no_public(network: Network) -> bool:
    if isinstance(network, IPv4Network):
        return any(network.subnet_of(other) for other in _NOT_PUBLIC[4] if isinstance(other, IPv4Network))
    return any(network.subnet_of(other) for other in _NOT_PUBLIC[6] if isinstance(other, IPv6Network))


@dataclass(frozen=True)
class Allowlist:
    """What may be reached."""

    names: frozenset[str] = frozenset()
    below: tuple[str, ...] = ()
    """``.name`` for each ``*.name``."""
    networks: tuple[Network, ...] = ()
    words: tuple[str, ...] = ()
    """The entries, in the order and the spelling in which they are told."""

    def lists(self, wanted: Target) -> bool:
        """Whether a host is on the list; a name that is not is not even resolved."""
        if wanted.address is not None:
            return any(wanted.address in network for network in self.networks)
        return wanted.host in self.names or wanted.host.endswith(self.below)

    def objection(self, address: Address, *, own: bool = False) -> str | None:
        """Why the address of a listed host may not be reached, or None. ``address`` is a `plain` one, ``own`` whether
        it is one of the machine's.
        """
        within = [network for network in self.networks if address in network]
        if any(network.num_addresses == 1 or _has_no_public(network) for network in within):
            return None
        if not is_public(address):
            return f"{address} is not a public address, which has to be listed itself"
        if own:
            return f"{address} is an address of the machine itself, which has to be listed itself"
        return None


def parse(entries: Iterable[str]) -> Allowlist:
    """Read a list; raises `HostError` with the entry that is not allowed."""
    names: dict[str, None] = {}
    below: dict[str, None] = {}
    networks: dict[Network, None] = {}
    words: dict[str, None] = {}
    for entry in entries:
        text = entry.lower()
        word = _read(text, names, below, networks)
        if word is None:
            raise HostError(f"allowed_hosts has {entry[:100]!r}; {_ALLOWED}")
        words[word] = None
    if len(words) > MOST_ENTRIES:
        raise HostError(f"allowed_hosts has {len(words)} entries; allowed are {MOST_ENTRIES}")
    return Allowlist(frozenset(names), tuple(below), tuple(networks), tuple(words))


def _read(text: str, names: dict[str, None], below: dict[str, None], networks: dict[Network, None]) -> str | None:
    """Put an entry where it belongs; its one spelling, None where it is not allowed."""
    if "/" in text:
        network = _network(text)
        if network is None:
            return None
        networks[network] = None
        return str(network)
    address = _address(text)
    if address is not None:
        networks[ipaddress.ip_network(address)] = None
        return str(address)
    name = _name(text.removeprefix("*."))
    if name is None:
        return None
    if text.startswith("*."):
        below[f".{name}"] = None
        return f"*.{name}"
    names[name] = None
    return name


def _network(text: str) -> Network | None:
    """``10.0.0.0/8``; one with an address's own bits is not meant as it reads."""
    if "%" in text:
        return None
    try:
        network = ipaddress.ip_network(text, strict=True)
    except ValueError:
        return None
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        wrapped = network.network_address.ipv4_mapped
        assert wrapped is not None, "it is within the wrapped ones"
        return IPv4Network((wrapped, network.prefixlen - 96))
    return network
