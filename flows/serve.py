"""`opdflow serve`: Prefect's server, MLflow's server and a worker, until Ctrl-C.

    config ─► deployments ─► Prefect server ─► worker ─► a process for each night ─► MLflow server

All listen on the loopback address. Databases lie in the configuration's `directory`;
PREFECT_API_DATABASE_CONNECTION_URL and `--mlflow-store` name others.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from engine.config import ConfigError, RunConfig

DEPLOYMENTS = Path(__file__).parent.parent / "deployments" / "prefect.yaml"
HOST = "127.0.0.1"
START_SECONDS = 180.0
# Prefect's worker is slow to take its leave, and ends the runs that it started.
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Options:
    """What `opdflow serve` was asked for."""

    cron: str = "0 2 * * *"
    timezone: str = "UTC"
    scheduled: bool = True
    overlap: str = "skip"
    """Of a night that is due while one runs: `skip` it, or `wait`."""
    prefect_port: int = 4200
    mlflow_port: int = 5000
    mlflow_store: str = ""

    @property
    def api(self) -> str:
        return f"http://{HOST}:{self.prefect_port}/api"

    @property
    def mlflow(self) -> str:
        return f"http://{HOST}:{self.mlflow_port}"


class Servers:
    """Child processes, each the leader of a group, so that none outlives this one."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._environment = os.environ | environment
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        with (self._logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [_program(command[0]), *command[1:]],
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def run(self, name: str, *command: str) -> None:
        """A command that ends. Raises ConfigError with what it said if it failed."""
        self.start(name, *command)
        if self.running.pop(name).wait(START_SECONDS):
            raise ConfigError(f"{' '.join(command[:3])} failed: {self._said(name)}")

    def answers(self, name: str, url: str) -> None:
        """Waits until a server answers."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            self.check()
            try:
                urllib.request.urlopen(url, timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise ConfigError(f"{name} doesn't answer at {url}: {self._said(name)}")

    def check(self) -> None:
        """Raises ConfigError if one of them has ended by itself."""
        for name, process in self.running.items():
            if process.poll() is not None:
                raise ConfigError(f"{name} ended with {process.returncode}: {self._said(name)}")

    def stop(self) -> None:
        """Ends all of them, the last started first."""
        for process in reversed(self.running.values()):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            _kill_group(process.pid)
            process.wait()

    def _said(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        return f"{path} ends with\n{path.read_text(errors='replace')[-2000:]}"


def serve(config: RunConfig, options: Options, console: Console) -> None:
    """Runs until Ctrl-C or SIGTERM."""
    folder = Path(config.directory).absolute()
    servers = Servers(folder, environment(folder, options))
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background job ignores Ctrl-C
        signal.signal(number, signal.default_int_handler)
    try:
        with console.status("starting Prefect and MLflow …"):
            _start(servers, config, options, folder)
        console.print(f"Prefect      http://{HOST}:{options.prefect_port}")
        console.print(f"MLflow       {options.mlflow}")
        when = f"{options.cron} {options.timezone}" if options.scheduled else "not scheduled"
        console.print(f"deployments  nightly ({when}), distill, study")
        console.print(f"logs         {folder / 'logs'}", soft_wrap=True)
        console.print("Ctrl-C stops all of it")
        while True:
            servers.check()
            time.sleep(1)
    finally:
        servers.stop()


def environment(folder: Path, options: Options) -> dict[str, str]:
    """Of the servers, the worker and the runs."""
    return {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": options.api,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(folder / "prefect" / "ui"),
        # On a busy machine SQLite's writers wait longer for each other than the default 10 s.
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "MLFLOW_TRACKING_URI": options.mlflow,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
    }


def deployments(config: RunConfig, options: Options) -> dict[str, Any]:
    """The deployments' file with this configuration and schedule."""
    data: dict[str, Any] = yaml.safe_load(DEPLOYMENTS.read_text())
    data.pop("definitions")
    data["pull"] = [
        {"prefect.deployments.steps.set_working_directory": {"directory": str(Path.cwd())}}
    ]
    run = config.model_dump(mode="json", exclude_unset=True)
    for deployment in data["deployments"]:
        parameters = deployment["parameters"]
        study = deployment["name"] == "study"
        parameters["config"] = parameters["config"] | {"run": run} if study else run
        for schedule in deployment.get("schedules", []):
            schedule |= {"cron": options.cron, "timezone": options.timezone}
            schedule["active"] = options.scheduled
            strategy = "CANCEL_NEW" if options.overlap == "skip" else "ENQUEUE"
            deployment["concurrency_limit"]["collision_strategy"] = strategy
    return data


def _start(servers: Servers, config: RunConfig, options: Options, folder: Path) -> None:
    (folder / "prefect").mkdir(parents=True, exist_ok=True)
    at = ("--host", HOST, "--port")
    servers.start("prefect", "prefect", "server", "start", *at, str(options.prefect_port))
    store = options.mlflow_store or f"sqlite:///{folder}/mlflow.db"
    artifacts = ("--artifacts-destination", str(folder / "mlartifacts"))
    # One process: each takes most of a GiB.
    where = (*at, str(options.mlflow_port), "--backend-store-uri", store, "--workers", "1")
    servers.start("mlflow", "mlflow", "server", *where, *artifacts)
    servers.answers("prefect", f"{options.api}/health")
    servers.answers("mlflow", f"{options.mlflow}/health")
    file = folder / "prefect.yaml"
    file.write_text(yaml.safe_dump(deployments(config, options), sort_keys=False))
    pool = ("work-pool", "create", "opdflow", "--type", "process", "--overwrite")
    servers.run("pool", "prefect", "--no-prompt", *pool)
    deploy = ("deploy", "--all", "--prefect-file", str(file))
    servers.run("deploy", "prefect", "--no-prompt", *deploy)
    worker = ("worker", "start", "--pool", "opdflow", "--type", "process")
    servers.start("worker", "prefect", *worker)


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(leader, signal.SIGKILL)
