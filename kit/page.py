"""Whether anyone looks: the pages that are connected to this notebook's kernel."""

from __future__ import annotations

import contextlib
import os
import re

import requests


def has_page() -> bool:
    """Whether someone can move widgets: a page of JupyterLab, or VS Code, which names itself."""
    return connections() is not None or "VSCODE_PID" in os.environ


def connections() -> int | None:
    """Pages connected to this kernel, as its Jupyter server counts them; None where none tells.

    The server's address and token are read from the runtime files that Jupyter writes for its user.
    """
    from IPython import get_ipython  # type: ignore[attr-defined]

    if not hasattr(get_ipython(), "kernel"):  # type: ignore[no-untyped-call]
        return None  # and without a kernel ipykernel must not be imported: it takes over widgets
    with contextlib.suppress(Exception):
        from ipykernel.connect import get_connection_file
        from jupyter_server.serverapp import list_running_servers

        found = re.search(r"kernel-(.+)\.json$", get_connection_file())
        parent = int(os.environ["JPY_PARENT_PID"])
        for server in list_running_servers():
            if found and server["pid"] == parent:
                url = f"{server['url']}api/kernels/{found[1]}"
                head = {"Authorization": f"token {server['token']}"}
                answer = requests.get(url, headers=head, timeout=2)
                return int(answer.json()["connections"])
    return None
