"""The report as its users run it: one command, its own cluster, killed and interrupted as well."""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import nbformat
import pandas as pd
import psutil
import pytest
from fakes import fake_run

from kit import compare, explain, explain_apps, figures, phases, report, store, summary
from kit.report import NOTEBOOK, ROOT, Parameters, ReportError, main
from kit.settings import Settings
from kit.store import CHANGE_COLUMNS, Run

SHORT: dict[str, object] = {
    "duration_s": 20.0, "compare_duration_s": 3.0, "users": 16, "max_batch_size": 2,
    "time_scale": 0.08, "upscale_delay_s": 1.0, "look_back_period_s": 2.0,
}  # fmt: skip
"""What waits for the first, small batches is served before the next stretch has settled."""


def notebook_parameters() -> dict[str, object]:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(cells) == 1
    tree = ast.parse(cells[0].source)
    for node in tree.body:
        line = cells[0].source.splitlines()[node.lineno - 1]
        assert "#" in line, f"no help for {line}"
    return {n.targets[0].id: ast.literal_eval(n.value) for n in tree.body}  # type: ignore[attr-defined]


def test_o24_one_parameters_cell_with_the_same_defaults_as_the_command() -> None:
    assert notebook_parameters() == Parameters().model_dump()


def test_notebook_is_clean_and_thin() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
            assert len(cell.source.splitlines()) <= 10 or "parameters" in cell.metadata.get(
                "tags", []
            )
            assert "class " not in cell.source


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_batchsize": 8}, "no parameter 'max_batchsize'; did you mean 'max_batch_size'"),
        ({"max_batch_size": "8"}, "max_batch_size = '8'"),
        ({"max_batch_size": 0}, "max_batch_size = 0: must be a whole number from 1 to 512"),
        ({"max_batch_size": None}, "max_batch_size = None"),
        ({"later_max_batch_size": -3}, "max_batch_size = -3"),
        ({"batch_wait_timeout_s": float("nan")}, "batch_wait_timeout_s = nan"),
        ({"lengths": "azure"}, "not known; did you mean 'azure-2023-conv'"),
        ({"users": 2.5}, "users = 2.5"),
        ({"app": "batch"}, "app = 'batch': must be 'batched' or 'unbatched'"),
        ({"max_replicas": 0}, "max_replicas = 0"),
        ({"recorded": "nowhere"}, "recorded = 'nowhere': no run is there"),
        ({"recorded": "x", "users": 32, "folder": "y"}, "users: not with recorded = 'x'"),
        ({"recorded": 3}, "recorded = 3"),
    ],
)
def test_o24_wrong_parameters_are_refused_before_anything_starts(
    given: dict[str, object], text: str
) -> None:
    with pytest.raises(ReportError) as error:
        Parameters(**given)
    assert text in str(error.value)


def test_the_command_refuses_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-p", "max_batchsize", "8"]) == 2
    assert main(["-p", "max_batch_size", "eight"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'max_batch_size'" in said
    assert "max_batch_size = 'eight'" in said


@pytest.mark.parametrize(
    "code",
    [
        "import kit; assert not {'ray', 'locust', 'torch', 'vllm'} & set(sys.modules)",
        "import kit.report; assert not {'ray', 'locust', 'gevent', 'torch'} & set(sys.modules)",
        "from kit import experiment; assert 'locust' not in sys.modules",
        "from kit import *; assert 'locust' not in sys.modules; start, attach, panel if 0 else run",
        "import kit.gpu as g; assert g.readings() == {} or g.readings()",
    ],
)
def test_o17_o25_imports_bring_neither_locust_nor_warnings(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", f"import sys; {code}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_o17_locust_in_the_kernel_is_explained_instead_of_hanging() -> None:
    code = "import locust, kit; kit.start()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Restart the kernel; the kit runs Locust in a process of its own" in done.stderr


def test_o25_without_a_driver_there_is_a_gap_and_no_zero() -> None:
    from kit import gpu

    assert all(fields for fields in gpu.readings().values())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def begin(folder: Path, port: int, **parameters: object) -> subprocess.Popen[str]:
    given = SHORT | parameters | {"folder": str(folder), "port": port}
    flags = [x for name, value in given.items() for x in ("-p", name, str(value))]
    return subprocess.Popen(
        [sys.executable, "-m", "kit.report", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for_rows(
    folder: Path, n: int, name: str = "requests.csv", timeout_s: float = 90.0
) -> None:
    deadline = time.monotonic() + timeout_s
    path = folder / name
    while not path.exists() or len(path.read_text().splitlines()) < n:
        assert time.monotonic() < deadline, "no load within the time"
        time.sleep(0.2)


def offspring(of: int) -> list[psutil.Process]:
    return psutil.Process(of).children(recursive=True)


def assert_gone(processes: list[psutil.Process], port: int) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert [" ".join(p.cmdline())[:90] for p in alive if p.status() != "zombie"] == []
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", port))


WAYS = ("kernel killed", "Ctrl-C")


@dataclass(frozen=True)
class Ended:
    """A report that was ended between its first and its second change."""

    place: Path
    port: int
    everything: list[psutil.Process]
    returncode: int
    said: str


def end_early(place: Path, how: str) -> Ended:
    port = free_port()
    report = begin(place, port)
    try:
        wait_for_rows(place, 40)
        wait_for_rows(place, 2, name="changes.csv")
        everything = offspring(report.pid)
        assert any("raylet" in p.name() for p in everything)
        if how == "Ctrl-C":
            report.send_signal(signal.SIGINT)
        else:
            kernel = next(p for p in everything if "ipykernel_launcher" in " ".join(p.cmdline()))
            kernel.kill()
        said, _ = report.communicate(timeout=60)
    finally:
        report.kill()
    return Ended(place, port, everything, report.returncode, said)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """One report for each way to end it, at the same time: most of a start is waiting."""
    places = [tmp_path_factory.mktemp("reports") / "one" for _ in WAYS]
    with ThreadPoolExecutor(len(WAYS)) as pool:
        return dict(zip(WAYS, pool.map(end_early, places, WAYS), strict=True))


@pytest.mark.cluster
@pytest.mark.parametrize("how", WAYS)
def test_o22_an_ended_report_keeps_its_rows_and_leaves_nothing_running(
    ended: dict[str, Ended], how: str
) -> None:
    report = ended[how]
    place = report.place
    assert report.returncode == (130 if how == "Ctrl-C" else 1), report.said
    run = store.load(place)
    assert run.status in ("killed", "interrupted")
    assert json.loads((place / "run.json").read_text())["status"] == run.status
    assert len(run.requests) >= 39  # the file has a heading
    assert list(run.changes["knob"]) == ["max_batch_size"]
    assert len(run.samples) > 20
    assert (place / "report.html").stat().st_size > 10_000
    assert (place.parent / "latest").resolve() == place
    assert_gone(report.everything, report.port)


@pytest.mark.cluster
def test_a_failing_cell_keeps_the_partial_report_and_exits_with_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        report = begin(tmp_path / "one", port)
        said, _ = report.communicate(timeout=120)
    assert report.returncode == 1
    assert f"port {port} is taken" in said
    assert f"process {os.getpid()}" in said
    assert f"port {port} is taken" in (tmp_path / "one" / "report.html").read_text()


@pytest.mark.cluster
def test_the_report_from_start_to_end(tmp_path: Path) -> None:
    place, port = tmp_path / "reports" / "one", free_port()
    report = begin(place, port)
    wait_for_rows(place, 10)
    everything = offspring(report.pid)
    said, _ = report.communicate(timeout=240)
    assert report.returncode == 0, said
    assert_gone(everything, port)

    html = (place / "report.html").read_text()
    assert html.count("data:image/png") >= 3
    for words in ("emulated NVIDIA H100", "What each change did", "queueing p95", "unbatched"):
        assert words in html
    assert "read_parameters" not in html, "no code in the report"
    assert "it/s" not in html, "no progress bar in the report"
    notebook = nbformat.read(place / "report.ipynb", as_version=4)
    assert not any(o.output_type == "error" for c in notebook.cells for o in c.get("outputs", []))
    # O21: Ray's output stays out of the cells.
    outputs = [o.get("text", "") for c in notebook.cells for o in c.get("outputs", [])]
    assert not any("(pid=" in o or "ServeReplica" in o or "\tINFO" in o for o in outputs)

    summary = json.loads((place / "summary.json").read_text())
    assert summary["ok_requests"] > 150
    assert summary["restarted_replicas"] == 0
    assert summary["change_applied_median_s"] < 1.5
    assert summary["max_running_replicas"] > 1
    assert all(isinstance(v, str | int | float | bool | None) for v in summary.values())

    wanted = "sent_s e2e_s queueing_s router_s batch_wait_s inference_s rest_s outcome replica_id"
    wanted += " batch_size prompt_tokens output_tokens"
    requests = pd.read_csv(place / "requests.csv")
    assert set(wanted.split()) <= set(requests.columns)
    assert list(pd.read_csv(place / "samples.csv").columns) == [
        "time_s",
        "source",
        "metric",
        "value",
    ]
    changes = pd.read_csv(place / "changes.csv")
    assert {"knob", "from", "to", "asked_s", "applied_s", "restarted_replicas"} <= set(
        changes.columns
    )
    assert list(changes["knob"][:2]) == ["max_batch_size", "batch_wait_timeout_s"]

    run = store.load(place)
    beat = run.samples[run.samples["metric"] == "target_replicas"]["time_s"].diff().dropna()
    assert beat.median() == pytest.approx(0.5, abs=0.05)
    assert run.status == "complete"

    table = phases.stretches(run)
    print(table[["queueing_p95_s", "throughput_rps"]].round(2).to_string())
    # What the report claims of its first change, with room for a short run on a shared machine.
    assert table["queueing_p95_s"].iloc[1] < table["queueing_p95_s"].iloc[0]
    assert table["throughput_rps"].iloc[1] > 1.3 * table["throughput_rps"].iloc[0]


@pytest.mark.cluster
def test_o24_plain_papermill_refuses_unknown_names_before_anything_starts(tmp_path: Path) -> None:
    asked = (
        (["-p", "max_batchsize", "8"], "did you mean 'max_batch_size'"),
        (["-r", "max_batch_size", "8"], "max_batch_size = '8'"),
    )
    tries = [
        subprocess.Popen(
            [sys.executable, "-m", "papermill", str(NOTEBOOK), str(tmp_path / f"{k}.ipynb"), *flags],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for k, (flags, _) in enumerate(asked)
    ]  # fmt: skip
    for tried, (_, text) in zip(tries, asked, strict=True):
        _, said = tried.communicate(timeout=120)
        assert tried.returncode != 0
        assert text in said
        assert "raylet" not in said


SESSION = (
    ("max_batch_size", "8", "16", 10.0, 10.6, 0.0, ""),
    ("mark", "", "while <b>it</b> is applied", 10.3, 10.3, 0.0, ""),
    ("users", "8", "0", 20.0, 20.0, 0.0, ""),
    ("mark", "", "quiet", 20.4, 20.4, 0.0, ""),
    ("users", "0", "8", 40.0, 40.0, 0.0, ""),
    ("num_replicas", "1", "auto", 50.0, float("nan"), 0.0, "Serve was away"),
)
"""Changes of a session: one overlaps a mark, one begins a pause, one is refused."""


def session(folder: Path, n: int = 400, **settings: object) -> Run:
    """A recorded session on disk: no timeline, load off from 20 to 40 s."""
    run = fake_run(n, folder)
    experiment = run.experiment | {"settings": Settings(**settings).model_dump(), "timeline": []}
    requests = run.requests[~run.requests["sent_s"].between(19, 40)].reset_index(drop=True)
    run = replace(
        run,
        run_id="20260131-184500-session-1f3a",
        experiment=experiment | {"name": "session"},
        environment=store.environment(),
        notes=("recorded in the panel",),
        requests=requests,
        changes=pd.DataFrame(list(SESSION), columns=list(CHANGE_COLUMNS)),
    )
    store.write(run)
    run.requests.to_csv(folder / "requests.csv", index=False)
    run.samples.to_csv(folder / "samples.csv", index=False)
    return store.load(folder)


def test_a_recorded_run_is_reported_without_deploying_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = session(tmp_path / "session", app="continuous", engine="vllm", num_cpus=1.0)
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in run.folder.iterdir()}
    place = tmp_path / "reports" / "one"
    monkeypatch.setattr(report, "folder", lambda p: place)
    page = report.of(run.folder, progress=False)
    assert page == place / "report.html"
    html = page.read_text()
    assert html.count("<img") == 2, "the run and its distribution, no comparison"
    for words in (
        "continuous app", "vLLM", "recorded in the panel", "Marks", "20.4 s: quiet",
        "while &lt;b&gt;it", "refused: Serve was away", "comparison of ways to batch is left out",
    ):  # fmt: skip
        assert words in html, words
    for words in ("three changes while it runs", "Batches compared", "Takeaway", "read_parameters"):
        assert words not in html, words
    summary = json.loads((place / "summary.json").read_text())
    assert summary["run_id"] == run.run_id
    assert summary["change_applied_median_s"] == pytest.approx(0.6)
    after = {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in run.folder.iterdir()}
    assert after == before, "the run's own folder is only read"
    assert (place.parent / "latest").resolve() == place.resolve()


def test_a_report_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReportError, match="no run is there"):
        report.of(tmp_path, progress=False)
    run = session(tmp_path / "session")
    monkeypatch.setattr(report, "folder", lambda p: run.folder)
    with pytest.raises(ReportError, match="failed:\nreport: folder = .* is the recorded run's own"):
        report.of(run.folder, progress=False)


def test_o24_a_cell_as_it_stands_gives_no_parameter(tmp_path: Path) -> None:
    """The notebook's globals hold every default: beside `recorded` they are not given."""
    folder = str(session(tmp_path).folder)
    asked = notebook_parameters() | {"recorded": folder}
    assert report.read_parameters(asked).recorded == folder
    with pytest.raises(ReportError, match="users, seed: not with recorded"):
        report.read_parameters(asked | {"users": 8, "seed": 3})
    with pytest.raises(ReportError, match=r"users = 32\.0"):
        report.read_parameters(notebook_parameters() | {"users": 32.0})


@pytest.mark.parametrize("n", [0, 3, 400])
@pytest.mark.parametrize(
    "settings",
    [{}, {"app": "routed"}, {"app": "resnet50", "engine": "torch"}, {"app": "resnet50-batched"}],
)
def test_every_part_of_a_report_stands_any_session(
    n: int, settings: dict[str, object], tmp_path: Path
) -> None:
    run = session(tmp_path, n, **settings)
    table = phases.stretches(run)
    assert list(table["label"]) == [
        "start", "max_batch_size 8 → 16", "mark: while <b>it</b> is applied", "users 8 → 0",
        "mark: quiet", "users 0 → 8",
    ]  # fmt: skip
    assert (table["end_s"] >= table["start_s"]).all()
    assert table["requests"].iloc[4] == 0
    found = summary.of(run)
    assert found["change_applied_median_s"] == pytest.approx(0.6), "of knobs alone"
    for words in (
        explain.what_ran,
        explain.verdict_sentences,
        explain.changes,
        explain_apps.routes,
    ):
        assert all(words(run)) or not n
    assert "nan" not in " ".join(explain.changes(run))
    assert explain.dominant(run)
    explain.environment_table(run, found)
    figures.overview(run).savefig(tmp_path / "overview.png")
    figures.distribution(run).savefig(tmp_path / "distribution.png")
    for a in compare.stretches(run):
        assert len(compare.table(a, compare.whole(run), force=True)) == len(compare.MEASURES)
