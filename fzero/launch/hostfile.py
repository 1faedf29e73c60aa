"""`Host`: the hosts and slots of a job, from hostfiles, filters and counts.

1. `parse_hostfile` reads lines of `host slots=N`; the order is kept, the first host has
  rank 0.
2. `choose` applies --include, --exclude, --num_nodes and --num_gpus, in DeepSpeed's
  grammar.
3. `encode` and `decode` carry the result to the agents that start the ranks.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LINE = re.compile(r"^(?P<name>[^\s=]+)\s+slots=(?P<slots>\d+)(\s.*)?$")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine and the slots (devices, one rank each) of it that a job uses.

    >>> Host("node1", (0, 1, 3))
    Host(name='node1', slots=(0, 1, 3))
    >>> Host("node1", (1, 1))
    Traceback (most recent call last):
    ValueError: host 'node1': slots must be distinct and not negative, got (1, 1)
    """

    name: str
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        if len({*self.slots}) < len(self.slots) or any(slot < 0 for slot in self.slots):
            raise ValueError(
                f"host {self.name!r}: slots must be distinct and not negative, got {self.slots}"
            )
        if not self.name or self.name.startswith("-"):
            rule = "a name must not be empty, nor begin with '-'"
            raise ValueError(f"host {self.name!r}: {rule}: ssh would take it as an option")

    @property
    def takes_first_slots(self) -> bool:
        """Whether local rank i has slot i, so that no device must be hidden from the
        ranks.
        """
        return self.slots == tuple(range(len(self.slots)))


def parse_hostfile(text: str, *, source: str = "hostfile") -> tuple[Host, ...]:
    """The hosts of a hostfile, in its order; `#` begins a comment.

    >>> parse_hostfile("a slots=2  # two devices\\n\\n# b slots=8\\nc slots=1")
    (Host(name='a', slots=(0, 1)), Host(name='c', slots=(0,)))
    >>> parse_hostfile("a slots=2\\nb slots=two")
    Traceback (most recent call last):
    ValueError: hostfile, line 2: 'b slots=two' is not 'host slots=N'; write for example 'node1 slots=8'

    Raises:
        ValueError: a line that is none, a host named twice, no host at all; the message
            names the line.
    """
    found: dict[str, tuple[int, Host]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        try:
            host = _host_of(content)
            if host.name in found:
                raise ValueError(
                    f"host {host.name!r} is in line {found[host.name][0]} already; name it once"
                )
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
        found[host.name] = number, host
    if not found:
        raise ValueError(f"{source}: names no host; write lines such as 'node1 slots=8'")
    return tuple(host for _, host in found.values())


def _host_of(line: str) -> Host:
    match = LINE.match(line)
    if match is None:
        raise ValueError(f"{line!r} is not 'host slots=N'; write for example 'node1 slots=8'")
    name, slots = match["name"], int(match["slots"])
    if slots < 1:
        raise ValueError(f"host {name!r} needs at least one slot; leave out the line otherwise")
    return Host(name, tuple(range(slots)))


def parse_filter(text: str, *, option: str) -> dict[str, tuple[int, ...] | None]:
    """The slots by host that `NODE[:slot,slot]@NODE…` names; None for all slots of a
    host.

    >>> parse_filter("a@b:0,2", option="--include")
    {'a': None, 'b': (0, 2)}
    """
    named: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        name, colon, slots = part.strip().partition(":")
        numbers = slots.split(",") if colon else []
        if not name or not all(number.strip().isdecimal() for number in numbers):
            rule = "is not 'host' or 'host:slot,slot'"
            raise ValueError(f"{option} {text!r}: {part!r} {rule}; write for example 'a@b:0,2'")
        if name in named:
            raise ValueError(
                f"{option} {text!r}: names host {name!r} twice; join its slots, as in '{name}:0,1'"
            )
        named[name] = tuple(sorted({int(number) for number in numbers})) if colon else None
    return named


def choose(
    hosts: Sequence[Host],
    *,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    slots_per_host: int | None = None,
) -> tuple[Host, ...]:
    """The hosts and slots that pass the filters; hosts without a slot are dropped.

    >>> cluster = parse_hostfile("a slots=4\\nb slots=4\\nc slots=4")
    >>> choose(cluster, include="c:1,3@a")
    (Host(name='a', slots=(0, 1, 2, 3)), Host(name='c', slots=(1, 3)))
    >>> choose(cluster, exclude="a@b:0,1")
    (Host(name='b', slots=(2, 3)), Host(name='c', slots=(0, 1, 2, 3)))
    >>> choose(cluster, num_nodes=2, slots_per_host=1)
    (Host(name='a', slots=(0,)), Host(name='b', slots=(0,)))

    Args:
        include: what alone is used; the order stays that of `hosts`.
        exclude: what is not used; not together with `include`.
        num_nodes: this many of the first hosts; not together with a filter.
        slots_per_host: slots 0 to this of every host; not together with a filter.
    """
    filters = [name for name, text in {"--include": include, "--exclude": exclude}.items() if text]
    given_counts = {"--num_nodes": num_nodes, "--num_gpus": slots_per_host}
    counts = [name for name, count in given_counts.items() if count is not None]
    if len(filters) == 2 or (filters and counts):
        raise ValueError(f"{' and '.join(filters + counts)} exclude each other: give one of them")
    if num_nodes is not None and not 1 <= num_nodes <= len(hosts):
        rule = f"must be from 1 to {len(hosts)}, the number of hosts in the hostfile"
        raise ValueError(f"--num_nodes {num_nodes}: {rule}")
    if slots_per_host is not None:
        if slots_per_host < 1:
            raise ValueError(f"--num_gpus {slots_per_host}: must be at least 1")
        hosts = [Host(host.name, tuple(range(slots_per_host))) for host in hosts]
    if not filters:
        return tuple(hosts[:num_nodes])
    text = include or exclude
    named = parse_filter(text, option=filters[0])
    have = {host.name: host.slots for host in hosts}
    for name, slots in named.items():
        if name not in have:
            hint = (
                f"; hosts are separated by @, as in '{name.replace(',', '@')}'"
                if "," in name
                else ""
            )
            raise ValueError(
                f"{filters[0]} {text!r}: there is no host {name!r}; there are "
                f"{', '.join(have)}{hint}"
            )
        if missing := {*(slots or ())} - {*have[name]}:
            raise ValueError(
                f"{filters[0]} {text!r}: host {name!r} has no slot {min(missing)}; it has "
                f"{[*have[name]]}"
            )
    picked = {
        (name, slot)
        for name, slots in named.items()
        for slot in (have[name] if slots is None else slots)
    }

    def kept(host: Host) -> Host:
        return Host(
            host.name,
            tuple(slot for slot in host.slots if ((host.name, slot) in picked) == bool(include)),
        )

    left = tuple(host for host in map(kept, hosts) if host.slots)
    if not left:
        raise ValueError(f"{filters[0]} {text!r}: leaves no slot on any host")
    return left


def encode(hosts: Iterable[Host]) -> str:
    """The hosts as one word without special characters of a shell (DeepSpeed's
    `world_info`).

    >>> encode([Host("localhost", (0, 1))])
    'eyJsb2NhbGhvc3QiOiBbMCwgMV19'
    """
    return base64.urlsafe_b64encode(
        json.dumps({host.name: host.slots for host in hosts}).encode()
    ).decode()


def decode(word: str) -> tuple[Host, ...]:
    """The hosts from a word of `encode`."""
    return tuple(
        Host(name, tuple(slots))
        for name, slots in json.loads(base64.urlsafe_b64decode(word)).items()
    )
