"""The job queue: nothing is lost and nothing is done twice, whoever is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import requests
from conftest import BASE

from kit import broker, consumer, jobs, leftovers
from kit.application import JOBS_NAME, application
from kit.jobstore import Job, JobStore
from kit.serving import Serving, ServingError
from kit.settings import Settings

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)
SHORT = {"prompt": "one two three", "max_tokens": 4}
LONG = {"prompt": "one two three", "max_tokens": 1500}
"""About two seconds on the shared cluster."""


def eventually(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


# --- the broker and the records, without a cluster ---


def test_a_missing_redis_server_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(broker.BrokerError, match=r"apt install redis-server.*KIT_BROKER_URL"):
        broker.start()


@pytest.mark.parametrize("url", ["redis://u:secret@127.0.0.1:1/0", "nonsense"])
def test_a_named_broker_that_does_not_answer_is_named_without_its_password(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(broker.BROKER_URL, url)
    with pytest.raises(broker.BrokerError, match="must be a URL like redis://") as error:
        broker.named()
    assert "secret" not in str(error.value)


@needs_redis
def test_a_broker_is_private_and_stop_ends_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with broker.start() as own:
        assert own.process is not None
        socket = Path(own.url.removeprefix("redis+socket://"))
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        assert broker.connect(own.url).config_get("port") == {"port": "0"}
        record = leftovers._folder() / f"{os.getpid()}.json"
        assert str(own.process.pid) in json.loads(record.read_text())
        monkeypatch.setenv(broker.BROKER_URL, own.url)
        named = broker.named()
        assert named is not None
        named.stop()
        assert own.process.poll() is None, "a named broker is not ours to stop"
    assert own.process.poll() is not None
    assert not socket.parent.exists()


@needs_redis
def test_a_killed_broker_has_its_jobs_when_started_on_its_folder(tmp_path: Path) -> None:
    first = broker.start(tmp_path)
    job = JobStore(broker.connect(first.url)).create(SHORT)
    with pytest.raises(broker.BrokerError, match="another broker works on"):
        broker.start(tmp_path)
    assert first.process is not None
    first.process.kill()
    first.process.wait()
    with broker.start(tmp_path) as second:
        store = JobStore(broker.connect(second.url))
        assert store.get(job.id) == job
        assert store.body(job.id) == SHORT
    first.stop()


@pytest.fixture
def client() -> Iterator[Any]:
    with broker.start() as own, broker.connect(own.url) as client:
        yield client


@needs_redis
def test_a_job_has_one_runner_and_one_result(client: redis.Redis) -> None:
    store = JobStore(client)
    job = store.create(SHORT)
    assert store.claim(job.id, "a") is not None
    assert store.claim(job.id, "b") is None, "delivered twice, begun once"
    store.drop("a")  # as when its holder was killed
    assert store.adrift() == [job.id]
    taken = store.claim(job.id, "b")
    assert taken is not None
    assert taken.attempts == 2
    assert not store.finish(job.id, "a", {"text": "late"}), "who was taken over has no say"
    assert store.finish(job.id, "b", {"text": "right"})
    assert store.claim(job.id, "c") is None
    ended = store.get(job.id)
    assert ended is not None
    assert ended.result == {"text": "right"}
    assert store.counts() == {s: int(s == "done") for s in store.counts()}


@needs_redis
def test_jobs_without_a_message_are_found(client: redis.Redis) -> None:
    store = JobStore(client)
    placed, taken, lost = (store.create(SHORT).id for _ in range(3))

    def message(job_id: str) -> dict[str, Any]:
        return {"headers": {"id": job_id}}

    client.rpush(consumer.QUEUE, json.dumps(message(placed)))
    key = consumer.taken_under("c1")["unacked_key"]
    client.hset(key, "tag", json.dumps([message(taken), "", consumer.QUEUE]))
    client.sadd("kit:consumers", "c1")
    store.renew(["c1"])
    assert consumer.unplaced(client, store) == [lost]
    store.drop("c1")
    assert set(consumer.unplaced(client, store)) == {taken, lost}
    assert not client.exists(key)


@needs_redis
def test_ended_jobs_are_forgotten_and_open_ones_are_not(client: redis.Redis) -> None:
    store = JobStore(client, keep_s=0.0)
    ended, waiting = store.create(SHORT), store.create(SHORT)
    store.claim(ended.id, "a")
    store.bury(ended.id, "a", "why")
    eventually(lambda: store.get(ended.id) is None, 3)
    assert store.dead() == []
    assert store.counts() == {s: int(s == "queued") for s in store.counts()}
    assert store.get(waiting.id) == waiting


def test_the_job_queue_is_no_argument_of_the_model_app() -> None:
    with_queue, without = Settings(job_queue=True), Settings()
    assert application(with_queue) == application(without)


# --- on the shared cluster ---


@pytest.fixture(scope="module")
def queue(_cluster: Serving) -> Iterator[Serving]:
    """The shared cluster with the job queue beside `BASE`."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    _cluster.deploy(BASE)
    before = {r.pid for r in _cluster.status().running}
    _cluster.update(BASE.replace(job_queue=True))
    assert {r.pid for r in _cluster.status().running} == before, "the model was restarted"
    yield _cluster
    _cluster.update(BASE)
    assert JOBS_NAME not in _cluster.details()["applications"]


def fetch(queue: Serving, path: str = "", method: str = "GET", **kwargs: Any) -> requests.Response:
    return requests.request(method, f"{queue.url}/jobs{path}", timeout=30, **kwargs)


def pids(queue: Serving, app: str, deployment: str) -> list[int]:
    deployments = queue.details()["applications"][app]["deployments"]
    return [r["pid"] for r in deployments[deployment]["replicas"] if r["pid"]]


def counts(queue: Serving) -> dict[str, int]:
    return dict(fetch(queue).json())


def left_in_broker(queue: Serving) -> dict[str, int]:
    """Messages waiting, and taken but not acknowledged."""
    assert queue._broker is not None
    client: Any = broker.connect(queue._broker.url)
    taken = sum(client.hlen(key) for key in client.scan_iter("kit:unacked:*"))
    return {"waiting": client.llen(consumer.QUEUE), "taken": taken}


def test_submit_gives_an_id_and_later_the_result(queue: Serving) -> None:
    answer = fetch(queue, method="POST", json=SHORT, allow_redirects=False)
    assert answer.status_code == 202
    assert answer.json()["status"] == "queued"
    [row] = jobs.wait(queue.url, [answer.json()["id"]], 20).to_dict("records")
    assert row["status"] == "done"
    assert row["result"]["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7,
    }  # fmt: skip
    assert row["submitted_s"] <= row["started_s"] <= row["ended_s"]
    assert "/{job_id}" in fetch(queue, "/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("sent", "wrong"),
    [
        ({"json": {"prompt": ""}}, "prompt"),
        ({"json": SHORT | {"max_tokens": 0}}, "max_tokens"),
        ({"json": SHORT | {"expires_s": 0}}, "expires_s"),
        ({"json": SHORT | {"max_tokens": "four"}}, "max_tokens"),
        ({"data": b'{"prompt": NaN}'}, "prompt = nan"),
        ({"json": SHORT | {"stream": True}}, "stream"),
    ],
)
def test_a_wrong_body_is_refused_when_submitted(
    queue: Serving, sent: dict[str, Any], wrong: str
) -> None:
    answer = fetch(queue, method="POST", **sent)
    assert answer.status_code == 400
    assert wrong in answer.json()["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_an_unknown_id_is_told_so(queue: Serving, method: str) -> None:
    answer = fetch(queue, "/nope", method)
    assert answer.status_code == 404
    assert "no job 'nope'" in answer.json()["error"]["message"]


def test_what_can_not_be_done_becomes_a_dead_letter_with_its_reason(queue: Serving) -> None:
    # Only the model finds out that a prompt of white space has no token.
    ids = jobs.submit(queue.url, [SHORT | {"prompt": "   "}])
    [row] = jobs.wait(queue.url, ids, 20).to_dict("records")
    assert row["status"] == "failed"
    assert row["attempts"] == 1, "a refusal is not tried again"
    assert "white space" in row["error"]
    assert queue._broker is not None
    sender = consumer.instantiate_adapter_from_config(consumer.config(queue._broker.url))
    sender.enqueue_task_sync("nobody.knows", args=["stray"], ignore_result=True)
    eventually(lambda: bool(fetch(queue, "/dead").json()["unprocessable"]))
    dead = fetch(queue, "/dead").json()
    assert [(d["id"], d["reason"]) for d in dead["failed"]] == [(ids[0], row["error"])]
    assert "nobody.knows" in dead["unprocessable"][0]["message"]


def test_expired_and_cancelled_jobs_never_run(queue: Serving) -> None:
    busy = jobs.submit(queue.url, [LONG] * 16)
    eventually(lambda: counts(queue)["running"] == 8)
    expiring, waiting = jobs.submit(queue.url, [SHORT | {"expires_s": 0.2}, SHORT])
    running = next(i for i in busy if fetch(queue, f"/{i}").json()["status"] == "running")
    notes = [fetch(queue, f"/{i}", "DELETE").json()["note"] for i in (waiting, running)]
    assert "never run" in notes[0]
    assert "discarded" in notes[1]
    table = jobs.wait(queue.url, [expiring, waiting, running, *busy], 60).set_index("id")
    ended = table[~table.index.duplicated()]
    assert ended.loc[expiring, ["status", "attempts"]].tolist() == ["expired", 0]
    assert ended.loc[waiting, ["status", "attempts"]].tolist() == ["cancelled", 0]
    assert ended.loc[running, "status"] == "cancelled"
    assert ended.loc[running, "result"] is None
    assert (ended["status"] == "done").sum() == len(busy) - 1
    assert "had ended" in fetch(queue, f"/{running}", "DELETE").json()["note"]


def test_200_jobs_survive_a_killed_consumer_and_a_killed_replica(queue: Serving) -> None:
    start = counts(queue)["done"]
    ids = jobs.submit(queue.url, [{"prompt": f"job {i}", "max_tokens": 300} for i in range(200)])

    def done() -> int:
        return counts(queue)["done"] - start

    for at, app, deployment in ((30, JOBS_NAME, "Consumer"), (100, "kit", "Model")):
        eventually(lambda at=at: done() >= at, 60)  # type: ignore[misc]
        assert counts(queue)["running"] > 0
        [victim] = pids(queue, app, deployment)
        os.kill(victim, signal.SIGKILL)
        assert done() < 200, "the kill came too late"
    table = jobs.wait(queue.url, ids, 60)
    assert list(table["id"]) == ids
    assert set(table["status"]) == {"done"}
    assert all(r["usage"]["completion_tokens"] == 300 for r in table["result"])
    assert done() == 200, "a result too many"
    # The kills hit jobs in mid-way; little more than what ran then (8 each time) was begun again.
    again = int((table["attempts"] - 1).sum())
    assert 1 <= again <= 3 * 8
    eventually(lambda: left_in_broker(queue) == {"waiting": 0, "taken": 0}, 10)


def test_an_attached_cluster_needs_a_named_broker(queue: Serving) -> None:
    other = Serving("http://127.0.0.1:8265", queue.url, False, BASE)
    with pytest.raises(ServingError, match="name it in KIT_BROKER_URL"):
        other._job_queue()


def test_the_record_of_a_job_is_the_answer(queue: Serving) -> None:
    [job_id] = jobs.submit(queue.url, [SHORT])
    assert set(fetch(queue, f"/{job_id}").json()) == set(Job.model_fields)
