"""A Locust worker on another machine: `python -m kit.worker HOST:PORT`, as the load's notice says.

It sends its share of the load from here, and its rows to the master. Both machines need the same
version of the kit, and clocks that NTP keeps together: times of its requests count on its own.
"""

from __future__ import annotations

import os
import sys

from kit.load import LOCUSTFILE, worker_options
from kit.workload import WorkloadError, join_at


def main(argv: list[str]) -> None:
    """Become the worker; exit code 2 when the address is none."""
    try:
        if len(argv) != 1:
            raise WorkloadError("one address is needed: python -m kit.worker HOST:PORT")
        host, port = join_at(argv[0])
    except WorkloadError as error:
        print(f"worker: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"worker: joining the load of {host}:{port}; Ctrl-C ends it", flush=True)
    os.environ.pop("KIT_REQUESTS", None)
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *worker_options(host, port)]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(sys.argv[1:])
