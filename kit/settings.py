"""Every knob of a deployment, once.

A `Settings` value holds all of them. Its field definitions are the registry from which validation,
error texts, the Serve config, the tables of the docs and the widgets are derived: see `knobs()`.
Names and meanings are Ray Serve's (2.60); a knob's *cost* says what a change does to a
running deployment: `live`, from the `next batch` on, or a `restart` of its replicas.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from kit.accelerator import VISION_APPS
from kit.conflicts import conflicts
from kit.knobs import Knob, Level, describe, explain, knob, unknown

VISION_ACCELERATOR = "resnet50.t4-pytorch21.03-amp"
"""What apps for images emulate unless told: the best fit of the published curves."""

_Only = dict[str, tuple[Any, ...]]
_EMULATED: _Only = {"engine": ("emulated",)}
_VLLM: _Only = {"engine": ("vllm",)}
_REAL: _Only = {"engine": ("vllm", "torch")}
_BATCHES: _Only = {"app": ("batched", "routed", "resnet50-batched")}
_ROUTED: _Only = {"app": ("routed",)}
_TEXT_BATCHES: _Only = {"app": ("batched", "routed")}
_CONTINUOUS: _Only = {"app": ("continuous",)}
_TEXT: _Only = {"app": ("batched", "unbatched", "continuous", "routed")}
_POSTPROCESS: _Only = {"postprocess": (True,)}


class SettingsError(ValueError):
    """Settings that cannot work; the text names the value, what was allowed and what to do."""


class Settings(BaseModel):
    """All knobs of one deployment, validated and frozen. Times in seconds.

    Raises:
        SettingsError: for an unknown name, a value of the wrong type or out of bounds, or a
            combination that cannot work.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    # What runs: given to the application builder, so a change restarts its replicas.
    app: Literal[
        "batched", "unbatched", "continuous", "routed", "resnet50", "resnet50-batched"
    ] = knob(
        "batched", "app", "restart", "", "Which serving app runs. Text: static batches, one request "
        "at a time, continuous batching, or short and long requests batched apart; images: one a "
        "call, or batched",
    )  # fmt: skip
    engine: Literal["emulated", "vllm", "torch"] = knob(
        "emulated", "app", "restart", "", "What executes: an emulated accelerator, or the real engine "
        "of the app: vllm for text, torch for images",
    )  # fmt: skip
    accelerator: str = knob(
        "h100.llama-3.1-8b.bf16", "app", "restart", "", "Which accelerator and model are emulated; "
        f"unless given, apps for images take {VISION_ACCELERATOR}", only=_EMULATED,
    )  # fmt: skip
    time_scale: float = knob(
        1.0, "app", "restart", "x", "Factor on the emulated accelerator's times: above 1 is slower",
        only=_EMULATED, ge=0.001, le=1000,
    )  # fmt: skip
    load_time_s: float = knob(
        0.0, "app", "restart", "s", "Emulated time to load the model when a replica starts",
        only=_EMULATED, ge=0, le=3600,
    )  # fmt: skip
    model: str = knob(
        "", "app", "restart", "", "Model of a real engine: a folder, or a name on the hub; "
        "empty means the small one that set-up prepares, or ResNet-50 with random weights", only=_REAL,
    )  # fmt: skip
    max_model_len: int | None = knob(
        None, "app", "restart", "tokens", "Longest prompt and output together; empty means what the "
        "model takes", only=_TEXT, ge=16, le=1_000_000,
    )  # fmt: skip
    kv_cache_tokens: int | None = knob(
        None, "app", "restart", "tokens", "KV cache of the accelerator; empty means all it has",
        only=_CONTINUOUS, ge=16, le=10_000_000,
    )  # fmt: skip
    max_num_seqs: int = knob(
        128, "app", "restart", "sequences", "Continuous batching: most sequences in one step",
        only=_CONTINUOUS, ge=1, le=4096,
    )  # fmt: skip
    max_num_batched_tokens: int = knob(
        8192, "app", "restart", "tokens", "Continuous batching: most tokens computed in one step",
        only=_CONTINUOUS, ge=16, le=131_072,
    )  # fmt: skip
    enable_prefix_caching: bool = knob(
        True, "app", "restart", "", "Whether vLLM keeps the KV cache of prompts that begin alike",
        only=_VLLM,
    )  # fmt: skip
    postprocess: bool = knob(
        False, "app", "restart", "", "Whether outputs pass a Postprocess deployment on CPU: format, "
        "length, blocked words", only=_TEXT,
    )  # fmt: skip

    job_queue: bool = knob(
        False, "app", "live", "", "Whether an asynchronous job queue runs beside the app, at "
        "/jobs",
    )  # fmt: skip

    # user_config: reaches running replicas through reconfigure().
    max_batch_size: int = knob(
        8, "batching", "next batch", "requests", "Most requests in one batch",
        only=_BATCHES, ge=1, le=512,
    )  # fmt: skip
    batch_wait_timeout_s: float = knob(
        0.01, "batching", "next batch", "s", "Longest wait for a batch to fill, from its first "
        "request on", only=_BATCHES, ge=0, le=60,
    )  # fmt: skip
    hold_while_busy: bool = knob(
        True, "batching", "next batch", "", "Hold requests back while a batch runs, so that the "
        "next one fills from the backlog; False is plain @serve.batch", only=_BATCHES,
    )  # fmt: skip
    max_batch_tokens: int | None = knob(
        None, "batching", "next batch", "tokens", "Most tokens, prompts and outputs asked for, in "
        "one batch: memory runs out by tokens, not by requests; empty is no limit",
        only=_TEXT_BATCHES, ge=1, le=10_000_000,
    )  # fmt: skip
    max_new_tokens: int = knob(
        4096, "batching", "next batch", "tokens", "Cap on the output of every request, whatever it "
        "asks for", only=_TEXT, ge=1, le=131072,
    )  # fmt: skip
    route_threshold_tokens: int = knob(
        256, "batching", "live", "tokens", "Routed app: requests of more tokens, prompt and output "
        "asked for, go to the long side", only=_ROUTED, ge=1, le=1_000_000,
    )  # fmt: skip
    long_max_batch_size: int = knob(
        4, "batching", "next batch", "requests", "Routed app: max_batch_size of the long side",
        only=_ROUTED, ge=1, le=512,
    )  # fmt: skip
    long_batch_wait_timeout_s: float = knob(
        0.01, "batching", "next batch", "s", "Routed app: batch_wait_timeout_s of the long side",
        only=_ROUTED, ge=0, le=60,
    )  # fmt: skip
    prompt_template: str = knob(
        "{prompt}", "batching", "live", "", "Routed app: what every prompt is put into, where it "
        "says {prompt}", only=_ROUTED,
    )  # fmt: skip
    response_cache_entries: int = knob(
        0, "batching", "live", "answers", "Routed app: answers kept for requests that come again "
        "with temperature 0; 0 keeps none", only=_ROUTED, ge=0, le=100_000,
    )  # fmt: skip
    strip_output: bool = knob(
        True, "batching", "live", "", "Postprocess: outputs lose white space at both ends",
        only=_POSTPROCESS,
    )  # fmt: skip
    max_output_chars: int | None = knob(
        None, "batching", "live", "characters", "Postprocess: longer outputs are cut; empty cuts "
        "none", only=_POSTPROCESS, ge=1, le=1_000_000,
    )  # fmt: skip
    blocked_words: str = knob(
        "", "batching", "live", "", "Postprocess: words, separated by commas, that outputs show as "
        "***", only=_POSTPROCESS,
    )  # fmt: skip

    num_replicas: Annotated[int, Ge(1), Le(1000)] | Literal["auto"] = knob(
        1, "deployment", "live", "replicas", "A fixed number of replicas, or 'auto': between "
        "min_replicas and max_replicas",
    )  # fmt: skip
    max_ongoing_requests: int = knob(
        64, "deployment", "live", "requests", "Most requests inside one replica; the rest wait in "
        "the router", ge=1, le=100_000,
    )  # fmt: skip
    max_queued_requests: int = knob(
        -1, "deployment", "live", "requests", "Most requests waiting in the router before new ones "
        "are rejected; -1 is no limit", ge=-1, le=1_000_000,
    )  # fmt: skip
    reject_status: Literal[429, 503] = knob(
        503, "deployment", "live", "", "HTTP status of a request that max_queued_requests rejects"
    )
    retry_after_s: float | None = knob(
        1.0, "deployment", "live", "s", "Retry-After that a rejected request is told; empty tells "
        "none", ge=0, le=3600,
    )  # fmt: skip
    graceful_shutdown_timeout_s: float = knob(
        20.0, "deployment", "live", "s", "How long a stopping replica may finish its requests",
        ge=0, le=3600,
    )  # fmt: skip
    health_check_period_s: float = knob(
        10.0, "deployment", "live", "s", "Time between health checks of a replica", gt=0, le=3600
    )
    num_cpus: float = knob(
        0.1, "deployment", "restart", "CPUs", "CPUs reserved for each replica", ge=0, le=256
    )
    num_gpus: float = knob(
        0.0, "deployment", "restart", "GPUs", "GPUs reserved for each replica", ge=0, le=64
    )

    min_replicas: int = knob(1, "autoscaling", "live", "replicas", "Fewest replicas", ge=0, le=1000)
    max_replicas: int = knob(
        1, "autoscaling", "live", "replicas", "Most replicas; Ray's default of 1 never scales",
        ge=1, le=1000,
    )  # fmt: skip
    initial_replicas: int | None = knob(
        None, "autoscaling", "live", "replicas", "Replicas at the first deployment; empty means "
        "min_replicas", ge=0, le=1000,
    )  # fmt: skip
    target_ongoing_requests: float = knob(
        2.0, "autoscaling", "live", "requests", "Requests per replica, running and queued, that the "
        "autoscaler aims at", gt=0, le=10_000,
    )  # fmt: skip
    upscale_delay_s: float = knob(
        30.0, "autoscaling", "live", "s", "How long demand must be high before replicas are added",
        ge=0, le=3600,
    )  # fmt: skip
    downscale_delay_s: float = knob(
        600.0, "autoscaling", "live", "s", "How long demand must be low before replicas go",
        ge=0, le=86_400,
    )  # fmt: skip
    downscale_to_zero_delay_s: float | None = knob(
        None, "autoscaling", "live", "s", "The same for the last replica; empty means "
        "downscale_delay_s", ge=0, le=86_400,
    )  # fmt: skip
    upscaling_factor: float = knob(
        1.0, "autoscaling", "live", "x", "Gain on each step up", gt=0, le=100
    )
    downscaling_factor: float = knob(
        1.0, "autoscaling", "live", "x", "Gain on each step down", gt=0, le=100
    )
    metrics_interval_s: float = knob(
        0.5, "autoscaling", "live", "s", "How often replicas and handles report to the autoscaler "
        "(Ray's default of 10 s delays every decision)", gt=0, le=600,
    )  # fmt: skip
    look_back_period_s: float = knob(
        30.0, "autoscaling", "live", "s", "Window over which requests are averaged", gt=0, le=3600
    )
    aggregation_function: Literal["mean", "max", "min"] = knob(
        "mean", "autoscaling", "live", "", "How the readings in the window become one number"
    )

    request_timeout_s: float = knob(
        120.0, "start", "restart", "s", "After this the proxy gives up on a request", gt=0, le=3600
    )
    proxy: Literal["default", "haproxy"] = knob(
        "default", "start", "restart", "", "The HTTP entrance of Serve"
    )

    def __init__(self, **values: Any) -> None:
        strange = [k for k in values if k not in type(self).model_fields]
        if strange:
            raise SettingsError("\n".join(unknown(name, None, BY_NAME) for name in strange))
        if values.get("app") in VISION_APPS:
            values.setdefault("accelerator", VISION_ACCELERATOR)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingsError(explain(error, BY_NAME)) from None

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        if wrong := conflicts(self):
            raise SettingsError("\n".join(wrong))
        return self

    def replace(self, **changes: Any) -> Settings:
        """A copy with some knobs changed, validated as a whole.

        An accelerator that is the default of its app follows the app.

        Raises:
            SettingsError: as the constructor does.
        """
        values = self.model_dump()
        if self.accelerator == Settings(app=self.app).accelerator:
            del values["accelerator"]
        return Settings(**{**values, **changes})

    def diff(self, other: Settings) -> dict[str, tuple[Any, Any]]:
        """Knobs that differ, as name → (here, in `other`)."""
        return {
            k.name: (getattr(self, k.name), getattr(other, k.name))
            for k in knobs()
            if getattr(self, k.name) != getattr(other, k.name)
        }

    def user_config(self) -> dict[str, Any]:
        """The knobs that reach running replicas through `reconfigure`."""
        return {k.name: getattr(self, k.name) for k in knobs("batching")}


BY_NAME: dict[str, Knob] = {name: describe(Settings, name) for name in Settings.model_fields}


def knobs(level: Level | None = None) -> list[Knob]:
    """The registry, all of it or one level, in the order of definition."""
    return [k for k in BY_NAME.values() if level in (None, k.level)]
