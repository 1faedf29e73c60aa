"""torchrun rendezvous for the agents of a job, on one host and on many, safe against
other users of the network.

One host needs none: its agent listens on one address only, by default the loopback one,
for its own ranks. Hosts whose ranks may start again use torchrun's dynamic rendezvous.
Its state is in a store that anyone on the network can write to, and torch unpickles it.
So each state is signed with the job's secret, and an unsigned one raises before it is
unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    create_handler,
)

BACKEND = "fzero"  # the name under which torchrun finds both
SECRET = "FZERO_SECRET"
"""The variable that holds the secret of a job, the same on every host. Never an
argument: `ps` shows those.
"""
FEWEST = 16  # characters of a secret
DIGEST = hashlib.sha256
SECONDS = 300  # that agents wait for each other


@dataclass(frozen=True, slots=True)
class Secret:
    """The secret of the agents of a job. Its text is hidden in torchrun's logs of the
    configuration.

    >>> Secret("0123456789abcdef")
    Secret()
    >>> Secret("short")
    Traceback (most recent call last):
    ValueError: FZERO_SECRET: must have at least 16 characters, got 5; take for example `openssl rand -hex 16`
    """

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.text) < FEWEST:
            raise ValueError(
                f"{SECRET}: must have at least {FEWEST} characters, got {len(self.text)}; take for "
                f"example "
                "`openssl rand -hex 16`"
            )

    def sign(self, content: bytes) -> bytes:
        """The signature of `content`, which needs the secret."""
        return hmac.digest(self.text.encode(), content, DIGEST)

    @property
    def name(self) -> str:
        """A name for the job that does not reveal the secret."""
        return self.sign(b"the name of the job").hex()[:16]


class Signed(RendezvousBackend):
    """A rendezvous backend that signs states with the job's secret, and keeps them in
    another one (`inner`).
    """

    def __init__(self, inner: RendezvousBackend, secret: Secret) -> None:
        self._inner, self._secret = inner, secret

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._inner.get_state()
        return None if found is None else (self._checked(found[0]), found[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        found = self._inner.set_state(self._secret.sign(state) + state, token)
        return None if found is None else (self._checked(found[0]), found[1], found[2])

    def _checked(self, signed: bytes) -> bytes:
        size = DIGEST().digest_size
        signature, state = signed[:size], signed[size:]
        if not hmac.compare_digest(signature, self._secret.sign(state)):
            raise RendezvousStateError(
                "the state of the rendezvous was not written by an agent of this job, so it was "
                "not read; somebody else writes to its port, or another job has it: give another "
                "--master_port, in a network of your own"
            )
        return state


class OneHost(RendezvousHandler):
    """The rendezvous of one agent. It opens a new store at each start of the ranks, so
    that they see no old entries.

    The ranks use this store, which ends with the agent. No other agent waits, closes
    the rendezvous, or learns of its end.

    Args:
        address: where it listens, and nowhere else.
        port: where the first ranks meet; later ones, and all if it is 0, take a free
            one.
        run_id: the id of the job.
    """

    def __init__(self, address: str, port: int, run_id: str) -> None:
        self._address, self._port, self._run_id = address, port, run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Opens the store; the only agent has rank 0 of 1."""
        port, self._port = self._port, 0
        try:
            family, _, _, _, address = socket.getaddrinfo(
                self._address, port, type=socket.SOCK_STREAM
            )[0]
            listens = socket.create_server(address[:2], family=family, backlog=1024)
        except OSError as error:
            what = f"--master_port {port} of {self._address}"
            raise OSError(
                f"{what}: {error}; give a port that is free there, and an address of this host"
            ) from error
        port = listens.getsockname()[1]
        where = self._address, port, None, True, timedelta(seconds=SECONDS)
        fd = listens.detach()
        store = dist.TCPStore(*where, wait_for_workers=False, master_listen_fd=fd)  # type: ignore[attr-defined]
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._address, port))

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def create(params: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous of one host; or, with `secret` among the options, of several hosts
    whose ranks may start again.
    """
    if params.max_nodes == 1:
        address, _, port = params.endpoint.rpartition(":")
        return OneHost(address, int(port), params.run_id)
    secret = params.config["secret"]
    assert isinstance(secret, Secret)
    inner, store = create_backend(params)
    return create_handler(store, Signed(inner, secret), params)


rendezvous_handler_registry.register(BACKEND, create)
