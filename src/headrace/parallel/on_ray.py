"""Workers on a Ray cluster: a placement group with one bundle per worker, and in each an actor that is the worker.

Needs the extra headrace[ray]. Ray only starts and ends the processes; what ranks say to each other goes over the
links that all ways of starting share.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from headrace.config import EngineConfig
from headrace.parallel.supervisor import WorkerProcess
from headrace.parallel.worker import rank_main

PLACE_S = 60
"""So long the cluster may take to find room for the workers."""

REACH_S = 5.0

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    missing: ImportError | None = None
except ImportError as error:
    missing = error


def start(config: EngineConfig, address: str, secret: str, met: ExitStack) -> Mapping[int, WorkerProcess]:
    """Starts the workers on the cluster that RAY_ADDRESS names, or the one that runs on this host.

    Raises ValueError without Ray, without a cluster, where it has no room, or where the driver's address is a loopback
    address and the cluster has other hosts.
    """
    if missing is not None:
        raise ValueError(f"distributed_backend ray needs the package: pip install 'headrace[ray]' ({missing})")
    _attach()
    _check_hosts(config.ranks.interface)
    workers = config.ranks.context * config.ranks.tensor - 1
    cpus = config.model.threads or 1
    group = placement_group([{"CPU": cpus}] * workers, strategy="SPREAD")
    if not group.wait(PLACE_S):
        remove_placement_group(group)
        raise ValueError(
            f"the Ray cluster found no room for {workers} workers of {cpus} CPUs each within {PLACE_S} s: "
            "add nodes, or ask for fewer ranks or --threads"
        )
    ranks = range(1, workers + 1)
    place = RayPlacement(group, set(ranks))
    return {rank: RayWorker(place, rank, cpus, (address, secret, config.ranks.interface)) for rank in ranks}


def _attach() -> None:
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "auto")
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=REACH_S).close()
        ray.init(address=address)
    except OSError as error:
        raise ValueError(
            f"no Ray cluster at {address!r}: run 'ray start --head' on this host, or set RAY_ADDRESS ({error})"
        ) from error


def _check_hosts(interface: str) -> None:
    hosts = sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})
    if len(hosts) > 1 and interface.startswith("127."):
        raise ValueError(
            f"rank_interface {interface} reaches no other host, and the Ray cluster has {', '.join(hosts)}: "
            "give this host's address"
        )


class RayMember:
    """The actor: its one call is the worker's life."""

    def serve(self, address: str, secret: str, rank: int, driver_interface: str) -> int:
        loopback = driver_interface.startswith("127.")
        return rank_main(address, secret, rank, driver_interface if loopback else ray.util.get_node_ip_address())


@dataclass
class RayPlacement:
    """The placement group and its actors that have not ended; it is given back with the last of them."""

    group: Any
    left: set[int]

    def leave(self, rank: int) -> None:
        if rank in self.left:
            self.left.discard(rank)
            if not self.left:
                remove_placement_group(self.group)


class RayWorker:
    """A WorkerProcess."""

    def __init__(self, place: RayPlacement, rank: int, cpus: int, where: tuple[str, str, str]) -> None:
        address, secret, interface = where
        strategy = PlacementGroupSchedulingStrategy(placement_group=place.group, placement_group_bundle_index=rank - 1)
        made = ray.remote(RayMember).options(num_cpus=cpus, max_restarts=0, scheduling_strategy=strategy)
        self._place, self._rank = place, rank
        self._actor = made.remote()
        self._life = self._actor.serve.remote(address, secret, rank, interface)

    def ended(self) -> str | None:
        done, _ = ray.wait([self._life], timeout=0)
        if not done:
            return None
        self._place.leave(self._rank)
        try:
            return f"its Ray actor ended with status {ray.get(self._life)}"
        except ray.exceptions.RayError as error:
            return f"its Ray actor ended: {str(error).strip().splitlines()[0]}"

    def terminate(self) -> None:
        ray.kill(self._actor)

    kill = terminate
