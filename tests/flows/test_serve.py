"""The deployments are what the code can run."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow

from engine.config import ConfigError, RunConfig, load
from flows.serve import DEPLOYMENTS, Options, Servers, deployments, environment
from flows.study import StudyConfig

CONFIGS = {"nightly": RunConfig, "distill": RunConfig, "study": StudyConfig}


def by_name(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {deployment["name"]: deployment for deployment in data["deployments"]}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        directory = "{tmp_path}/runs"
        student = {{ model = "mine" }}
        teacher = {{ model = "theirs" }}
        prompts = {{ path = "prompts.jsonl" }}
        evaluation = {{ path = "evaluation.jsonl" }}
        training = {{ steps = 4, batch = 4 }}
        """
    )
    return load(path)


def test_the_shipped_deployments_name_flows_that_take_their_parameters() -> None:
    shipped = by_name(yaml.safe_load(DEPLOYMENTS.read_text()))
    assert shipped.keys() == CONFIGS.keys()
    for name, deployment in shipped.items():
        module, _, attribute = deployment["entrypoint"].rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        assert isinstance(found, Flow) and found.name == name
        CONFIGS[name].model_validate(deployment["parameters"]["config"])
        assert deployment["concurrency_limit"]["limit"] == 1


def test_serve_puts_the_configuration_and_the_schedule_into_them(config: RunConfig) -> None:
    options = Options(cron="*/5 * * * *", timezone="Europe/Berlin", overlap="wait")
    made = by_name(deployments(config, options))
    assert RunConfig.model_validate(made["nightly"]["parameters"]["config"]) == config
    assert made["study"]["parameters"]["config"]["run"]["student"] == {"model": "mine"}
    assert made["nightly"]["schedules"] == [
        {"cron": "*/5 * * * *", "timezone": "Europe/Berlin", "active": True}
    ]
    assert made["nightly"]["concurrency_limit"]["collision_strategy"] == "ENQUEUE"
    assert "schedules" not in made["distill"]


def test_a_schedule_can_be_off_and_an_overlapping_night_skipped(config: RunConfig) -> None:
    made = by_name(deployments(config, Options(scheduled=False)))["nightly"]
    assert made["schedules"][0]["active"] is False
    assert made["concurrency_limit"]["collision_strategy"] == "CANCEL_NEW"


def test_the_forms_fields_carry_the_configurations_texts() -> None:
    from flows.nightly import nightly

    schema = str(nightly.parameters.model_dump())
    for text in ("Responses in a step.", "Held-out accuracy must be shown to have risen"):
        assert text in schema


def test_all_servers_listen_on_the_loopback_address(config: RunConfig) -> None:
    variables = environment(Path(config.directory), Options(prefect_port=4321, mlflow_port=5432))
    assert variables["PREFECT_API_URL"] == "http://127.0.0.1:4321/api"
    assert variables["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5432"


def test_a_server_that_ends_by_itself_is_named_with_what_it_said(tmp_path: Path) -> None:
    servers = Servers(tmp_path, {})
    servers.start("broken", "python", "-c", "raise SystemExit('no such port')")
    with pytest.raises(ConfigError, match=r"broken ended with 1: .*\n.*no such port"):
        servers.answers("broken", "http://127.0.0.1:9/")
    servers.stop()


def test_stopped_servers_leave_no_process_behind(tmp_path: Path) -> None:
    servers = Servers(tmp_path, {})
    script = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    servers.start("parent", "python", "-c", script)
    leader = servers.running["parent"].pid
    servers.stop()
    groups = [_group(path) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    assert leader not in groups


def _group(process: Path) -> int:
    try:
        state, _, group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state == "Z" else int(group)
