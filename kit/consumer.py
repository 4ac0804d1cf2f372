"""Takes jobs from the broker and has the model app answer them: a task consumer of Ray Serve.

Celery, beneath Serve's `@task_consumer`, acknowledges a message when its job has ended. What a
killed consumer had taken is then still written down, but under no name, and Celery's Redis
transport gives it back only after a time that must be longer than any job. So here each consumer
keeps what it takes under a name of its own, and holds a lease on that name: once the lease has
ended, the others (and whoever replaces it) drop what stands under it and send those jobs again.

The same look around finds jobs without any message, for instance one that was just on its way into
a consumer that died. A message too many does no harm: see `kit.jobstore`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from ray import serve
from ray.serve.exceptions import BackPressureError
from ray.serve.schema import CeleryAdapterConfig, TaskProcessorConfig
from ray.serve.task_consumer import instantiate_adapter_from_config, task_handler
from ray.serve.task_processor import CeleryTaskProcessorAdapter

from kit import broker
from kit.application import APP_NAME
from kit.jobstore import JobStore
from kit.refusal import BadRequest, cause_of

QUEUE = "kit-jobs"
UNPROCESSABLE = "kit-jobs-unprocessable"
"""Where Serve puts messages in our queue that are no jobs."""
TASK = "kit.job"
_CONSUMERS = "kit:consumers"
_BEAT_S = 1.0
_PATIENCE_S = 60.0
_log = logging.getLogger("ray.serve")


class TryAgain(Exception):
    """A job that could not be done now; Celery delivers it again after a growing pause."""


class Adapter(CeleryTaskProcessorAdapter):  # type: ignore[misc]
    """Serve's Celery adapter, with a name of each consumer's own for what it has taken."""

    def initialize(self, consumer_concurrency: int = 1) -> None:
        super().initialize(consumer_concurrency)
        options = taken_under(serve.get_replica_context().replica_tag)
        # After a broken connection Celery forgets what it took but had not begun: it comes back
        # after this time. What runs comes back too, and is not begun a second time.
        options |= {"visibility_timeout": 60, "unacked_restore_throttle": 1}
        self._app.conf.update(broker_transport_options=options)

    @property
    def works(self) -> bool:
        """Whether its Celery worker still runs."""
        return self._worker_thread is not None and self._worker_thread.is_alive()


def taken_under(name: str) -> dict[str, Any]:
    """The Redis keys of the messages that a consumer has taken, as options of the transport."""
    return {f"{k}_key": f"kit:{k}:{name}" for k in ("unacked", "unacked_index", "unacked_mutex")}


def config(broker_url: str, own_name: bool = False) -> TaskProcessorConfig:
    """How Serve reaches the queue; `own_name` for consumers."""
    adapter = Adapter if own_name else CeleryTaskProcessorAdapter
    return TaskProcessorConfig(
        queue_name=QUEUE,
        adapter=adapter,
        adapter_config=CeleryAdapterConfig(
            broker_url=broker_url,
            backend_url=broker_url,
            app_custom_config={
                "worker_prefetch_multiplier": 1,
                "worker_hijack_root_logger": False,
                "worker_redirect_stdouts": False,
                "broker_connection_max_retries": None,
                "broker_connection_retry_on_startup": True,
            },
            # How often is counted in the job's record, where a killed consumer is counted too.
            task_custom_config={"max_retries": None, "retry_backoff_max": 8, "ignore_result": True},
        ),
        max_retries=None,
        unprocessable_task_queue_name=UNPROCESSABLE,
    )


class Consumer:
    """Has the model app answer job after job, `max_ongoing_requests` at a time."""

    _adapter: Adapter  # set by @task_consumer

    def __init__(self, broker_url: str, retries: int, job_timeout_s: float, keep_s: float) -> None:
        self._retries = retries
        self._job_timeout_s = job_timeout_s
        self._redis = broker.connect(broker_url, _PATIENCE_S)
        self._store = JobStore(self._redis, keep_s)
        self._sender = instantiate_adapter_from_config(config(broker_url))
        self._name = serve.get_replica_context().replica_tag
        self._leases: set[str] = set()
        self._seen_adrift: set[str] = set()
        self._app: Any = None
        self._join()
        self._heart = threading.Thread(target=self._beat, name="kit-leases", daemon=True)
        self._heart.start()

    @task_handler(name=TASK)  # type: ignore[untyped-decorator]
    def work(self, job_id: str) -> None:
        """Do one job, if it is still to be done."""
        lease = f"{self._name}:{uuid.uuid4().hex}"
        with self._held(lease):
            job = self._store.claim(job_id, lease)
            if job is None:
                return
            if job.attempts > 1 + self._retries:
                why = (
                    f"begun {job.attempts - 1} times, never ended: {job.error or 'consumers died'}"
                )
                self._store.bury(job_id, lease, why)
                return
            try:
                answer = self._ask(self._store.body(job_id))
            except BadRequest as error:
                self._store.bury(job_id, lease, f"refused: {cause_of(error)}")
            except BackPressureError as error:
                # An overloaded app is what this queue is for: it waits, however long that takes.
                self._store.release(job_id, lease, "the app is overloaded", counts=False)
                raise TryAgain(str(error)) from None
            except Exception as error:
                # Ray puts the trace of the other side first, and what it was last.
                why = f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}"
                if job.attempts > self._retries:
                    self._store.bury(job_id, lease, f"failed {job.attempts} times, last by {why}")
                    return
                self._store.release(job_id, lease, why)
                raise TryAgain(why) from None
            else:
                self._store.finish(job_id, lease, answer)

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._app is None:
            self._app = serve.get_app_handle(APP_NAME)
        response = self._app.complete.remote(body)
        try:
            return dict(response.result(timeout_s=self._job_timeout_s))
        except TimeoutError:
            response.cancel()
            raise TimeoutError(f"no answer after {self._job_timeout_s:g} s") from None
        except BadRequest:
            raise
        except Exception:
            self._app = None  # the app may have been replaced by one with another ingress
            raise

    @contextlib.contextmanager
    def _held(self, lease: str) -> Iterator[None]:
        self._leases.add(lease)
        try:
            yield
        finally:
            self._leases.discard(lease)
            self._store.drop(lease)

    def _join(self) -> None:
        self._store.renew([self._name, *list(self._leases)])
        self._redis.sadd(_CONSUMERS, self._name)

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT_S)
            try:
                self._join()
                self._store.expire_due()
                self._look_around()
            except Exception as error:
                _log.warning("the job queue's broker is away: %s", error)

    def _look_around(self) -> None:
        """Send jobs again that have no message; two looks must agree, as messages move."""
        lost = set(unplaced(self._redis, self._store))
        for job_id in lost & self._seen_adrift:
            _log.warning("job %s is without a message: sent again", job_id)
            send(self._sender, job_id)
        self._seen_adrift = lost - self._seen_adrift

    def check_health(self) -> None:
        """Unhealthy when it takes no more jobs, or no more renews its leases."""
        if not self._adapter.works or not self._heart.is_alive():
            raise RuntimeError("the consumer of the job queue has stopped; it must be replaced")


def send(adapter: Any, job_id: str) -> None:
    """Put a message for a job into the queue."""
    adapter.enqueue_task_sync(TASK, args=[job_id], task_id=job_id, ignore_result=True)


def unplaced(client: Any, store: JobStore) -> list[str]:
    """Ids of jobs that nobody runs and no message leads to; forgets what dead consumers took."""
    adrift = store.adrift()
    placed = {_job_of(json.loads(m)) for m in client.lrange(QUEUE, 0, -1)}
    for name in client.smembers(_CONSUMERS):
        keys = taken_under(name)
        if store.alive(name):
            placed |= {_job_of(json.loads(m)[0]) for m in client.hvals(keys["unacked_key"])}
        else:
            _log.warning("consumer %s is gone: what it had taken is sent again", name)
            client.delete(keys["unacked_key"], keys["unacked_index_key"])
            client.srem(_CONSUMERS, name)
    return [job_id for job_id in adrift if job_id not in placed]


def _job_of(message: dict[str, Any]) -> str:
    return str(message.get("headers", {}).get("id"))
