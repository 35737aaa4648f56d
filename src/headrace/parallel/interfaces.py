"""This host's network interfaces, by their addresses. Imports no torch."""

from __future__ import annotations

import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915


def addresses() -> dict[str, str]:
    """First IPv4 address -> name, of this host's network interfaces that have one."""
    known = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:  # an interface without an IPv4 address
                continue
            known[socket.inet_ntoa(answer[20:24])] = name
    return known


def interface_name(address: str) -> str:
    """Of the network interface whose first IPv4 address this is. Raises ValueError if there is none."""
    known = addresses()
    if address not in known:
        there = ", ".join(f"{a} ({n})" for a, n in sorted(known.items()))
        raise ValueError(f"rank_interface: {address} is not an address of this host; there are {there}")
    return known[address]
