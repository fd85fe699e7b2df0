"""Hosts on this machine for tests, two or more, joined by a wire.

A host is a set of namespaces: its network, mounts, name and processes. They have no names outside, so nothing outlives
the host's first process, and that ends with this one.
"""
import contextlib
import csv
import os
import shutil
import subprocess

SKIPPED = 77
NETWORK = "10.17.0"  # of the wire
LIFE = "240"  # seconds, of a host
PATIENCE = 60  # seconds, with any other process
NAMESPACES = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout


class Host:
    """Sees `disk` as `seen`."""

    # The first process of the host. Its end, which is that of its input, ends all others.
    BECOME = 'hostname "$1"; mount --bind "$2" "$3"; ip link set lo up; echo ready; read -r forever'

    def __init__(self, number, disk, seen):
        self.name, self.address = f"host-{number}", f"{NETWORK}.{number + 1}"
        self.started = []
        self.process = subprocess.Popen(
            [*NAMESPACES, "timeout", LIFE, "sh", "-ec", self.BECOME, "sh", self.name, disk, seen],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline() != "ready\n":
            self.end()
            raise RuntimeError(f"{self.name} did not come up")

    def inside(self, *command):
        pid = self.process.pid
        return ["nsenter", f"--target={pid}", "--net", "--mount", "--uts", f"--pid=/proc/{pid}/ns/pid_for_children",
                *command]

    def start(self, *command, env):
        process = subprocess.Popen(self.inside(*command), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.stdout.close()
            for process in self.started:
                process.communicate(timeout=PATIENCE)


def join(pair, wire, network):
    """Two hosts by a wire of this name, at which each has an address of this network."""
    ends = [str(host.process.pid) for host in pair]
    run("ip", "link", "add", wire, "netns", ends[0], "type", "veth", "peer", "name", wire, "netns", ends[1])
    for number, host in enumerate(pair):
        run(*host.inside("ip", "address", "add", f"{network}.{number + 1}/24", "dev", wire))
        run(*host.inside("ip", "link", "set", wire, "up"))


@contextlib.contextmanager
def two_hosts(disks, seen):
    with contextlib.ExitStack() as stack:
        hosts = []
        for number, disk in enumerate(disks):
            hosts.append(Host(number, disk, seen))
            stack.callback(hosts[-1].end)
        join(hosts, "wire", NETWORK)
        yield hosts


class Switch(Host):
    """A host that joins others, which may come and go, by a bridge in its network. It has an address itself."""

    def __init__(self, number, disk, seen):
        super().__init__(number, disk, seen)
        self.ports = 0
        # A bridge without an address of its own takes its ports' lowest, and so another one when a host comes or goes:
        # the others would send to the old one for up to a minute.
        run(*self.inside("ip", "link", "add", "wire", "address", f"02:00:00:00:00:{number:02x}", "type", "bridge"))
        self.connect(self)

    @staticmethod
    def connect(host):
        run(*host.inside("ip", "address", "add", host.address + "/24", "dev", "wire"))
        run(*host.inside("ip", "link", "set", "wire", "up"))

    def join(self, host):
        self.ports += 1
        port = f"port{self.ports}"
        run("ip", "link", "add", "wire", "netns", str(host.process.pid), "type", "veth", "peer", "name", port,
            "netns", str(self.process.pid))
        run(*self.inside("ip", "link", "set", port, "up", "master", "wire"))
        self.connect(host)


def environment(hosts, rank, ranks_of_host, own=None):
    """What torchrun sets. Without TESSERA_SAME_HOST: the ranks have to find out that they share no memory."""
    if own is None:
        own = {name: value for name, value in os.environ.items() if name != "TESSERA_SAME_HOST"}
    return {**own, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank % ranks_of_host),
            "WORLD_SIZE": str(ranks_of_host * len(hosts)), "GLOO_SOCKET_IFNAME": "wire",
            "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}


def losses(path):
    with open(path, encoding="ascii") as file:
        return {int(row["step"]): row["loss"] for row in csv.DictReader(file)}


def obstacle():
    """Why this system has no hosts for us; None: it has."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("ip", "mount", "nsenter", "timeout", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no command '{tool}'"
    attempt = "hostname host && mount --bind /tmp /tmp && ip link add wire type veth peer name eriw"
    tried = subprocess.run([*NAMESPACES, "sh", "-c", attempt], capture_output=True, text=True, timeout=PATIENCE)
    return f"the system refuses namespaces: {tried.stderr.strip()}" if tried.returncode else None
