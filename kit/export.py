"""What serves now, as the file that `serve deploy FILE` takes."""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import yaml  # type: ignore[import-untyped]

from kit import store
from kit.cluster import ServingError
from kit.settings import Settings

if TYPE_CHECKING:
    from kit.connection import Connection
    from kit.experiment import Slo


def serve_config(source: Connection | Settings) -> dict[str, Any]:
    """The whole declarative config: of what `source` serves, or of settings nobody serves yet.

    Settings are deployed as `kit.start()` would, on the loopback interface; without the job queue,
    whose broker is made when it starts.

    Raises:
        ServingError: when nothing is deployed.
    """
    from kit.serving import declarative  # brings requests and Ray's client

    if isinstance(source, Settings):
        return declarative(source)
    if source.settings is None:
        raise ServingError(
            "nothing is deployed, so there is no config: call deploy(settings) first"
        )
    return source.config(source.settings)


def write_serve_config(
    source: Connection | Settings,
    path: Path,
    slo: Slo | Mapping[str, float | None] | None = None,
    summary: Mapping[str, Any] | None = None,
) -> Path:
    """Write `serve_config` as YAML, with a comment that says what it is.

    Passwords in a broker's address are left out: the file is made to be handed on.

    Args:
        source: what serves, or settings.
        path: of the file; folders above it are made.
        slo: the promises that these settings were tuned for, named in the comment.
        summary: what was measured with them (`kit.summary.of`), named beside each promise.

    Returns:
        `path`.

    Raises:
        ServingError: as `serve_config` does.
        StoreError: when the file cannot be written.
    """
    config = serve_config(source)
    settings = source if isinstance(source, Settings) else source.settings
    assert settings is not None
    lines = [*_about(source, settings), *_promises(slo, summary or {}), *_mind(settings)]
    for app in config["applications"]:
        broker_url = app.get("args", {}).get("broker_url")
        if broker_url:
            lines += _without_password(app, broker_url)
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"# {line}".rstrip() + "\n" for line in lines) + text)
    except OSError as error:
        raise store.StoreError(f"cannot write {path}: {error.strerror}") from None
    return path


def _about(source: Connection | Settings, settings: Settings) -> list[str]:
    now = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds")
    here = store.environment()
    from kit.foreign import Foreign

    theirs = isinstance(source, Foreign)
    name = source.title if isinstance(source, Foreign) else f"{settings.app} app"
    served = "settings that were not serving" if isinstance(source, Settings) else "what served"
    return [
        f"Ray Serve config of the {name}: deploy it with `serve deploy {{this file}}`.",
        f"Written {now} of {served} then, by the Serve tuning kit "
        f"{importlib.metadata.version('serve-tuning-kit')} (revision {here['git_revision']}, "
        f"Ray {here['packages'].get('ray', 'unknown')}).",
        *([] if theirs else ["The package `kit` must be importable on the cluster."]),
    ]


def _promises(
    slo: Slo | Mapping[str, float | None] | None, summary: Mapping[str, Any]
) -> list[str]:
    if slo is None:
        return []
    limits = slo if isinstance(slo, Mapping) else asdict(slo)
    lines = []
    for name, limit_s in limits.items():
        if limit_s is None:
            continue
        line = f"Promise: {name.removesuffix('_s').replace('_', ' ')} ≤ {limit_s:g} s"
        measured_s = summary.get(name)
        lines.append(line + ("" if measured_s is None else f", measured {measured_s:.3g} s"))
    share = summary.get("good_fraction")
    return lines + ([f"Within all promises: {share:.1%} of the attempts."] if share else [])


def _mind(settings: Settings) -> list[str]:
    lines = [
        "Set before Ray starts, not here: RAY_SERVE_ENABLE_HA_PROXY="
        f"{int(settings.proxy == 'haproxy')}",
        "The kit listens on the loopback interface only; elsewhere, change http_options.host.",
    ]
    if settings.num_replicas != "auto":
        lines.append(
            f"A fixed number of replicas ({settings.num_replicas}) is min = max: taking "
            "autoscaling_config away would restart them all."
        )
    return lines


def _without_password(app: dict[str, Any], url: str) -> list[str]:
    """Take the password out of a broker's address; what there is to know about the address."""
    lines = [
        "The job queue's broker lived as long as the process that served: name one that stays."
    ]
    parts = urlsplit(url)
    if parts.password is None:
        return lines
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    app["args"] = app["args"] | {"broker_url": bare}
    return ["The job queue's broker wants the user and password that were left out here."]
