"""The port at which ranks that a test starts as processes meet."""

import random
import socket


def free_port():
    """Below the ports that the system gives to connections: one of those may be taken before the ranks bind it,
    or still be that of a connection that closed a minute ago."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as limits:
        first_of_connections = int(limits.read().split()[0])
    choices = range(1024, first_of_connections if first_of_connections > 2048 else 65536)
    while True:
        port = random.SystemRandom().choice(choices)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
