"""What torchrun starts on every rank: rank 0 opens the group, lets the fake ranks echo and prints what it sees."""

from __future__ import annotations

from headrace.config import config_from_env
from headrace.parallel.launch import open_group, serve_if_worker
from tests.support.rank_groups import MAKER, echoes


def main() -> None:
    config = config_from_env(context_parallel_size=2)
    serve_if_worker(config.ranks.interface)
    group = open_group(config, MAKER)
    assert group.workers is not None
    try:
        reports = group.workers.wait_ready()
        print("seen", echoes(group, 1), reports[1].decode(), flush=True)
    finally:
        group.close()


if __name__ == "__main__":
    main()
