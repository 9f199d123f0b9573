"""The demo: makes a small teacher and a weak student, and distils one into the other."""

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from demo.models import DemoFiles, prepare
from engine import preflight
from engine.config import RunConfig, override, parse
from engine.evaluation import evaluate

CONFIG = Path(__file__).parent.parent / "deployments" / "demo.toml"
DIRECTORY = ".opdflow"


def build(console: Console, overrides: list[str]) -> tuple[RunConfig, DemoFiles]:
    """The demo's configuration, its models and prompts made where they are missing."""
    data: dict[str, Any] = tomllib.loads(CONFIG.read_text())
    data["directory"] = DIRECTORY
    for text in overrides:
        override(data, text)
    files = make(console, Path(data["directory"]) / "demo")
    return parse(with_inputs(data, files), str(CONFIG)), files


def with_inputs(data: dict[str, Any], files: DemoFiles) -> dict[str, Any]:
    """A run's tables with the demo's models and prompts, where it names no others."""
    inputs = {
        "student": {"model": str(files.student)},
        "teacher": {"model": str(files.teacher)},
        "prompts": {"path": str(files.prompts)},
        "evaluation": {"path": str(files.evaluation)},
    }
    return data | {section: values | data.get(section, {}) for section, values in inputs.items()}


def baseline(config: RunConfig, files: DemoFiles) -> dict[str, Any]:
    """Held-out figures of more supervised training on the same solved examples, kept beside it."""
    path = files.baseline.with_suffix(".figures.json")
    if not path.exists():
        figures = evaluate(
            files.baseline,
            files.teacher,
            preflight.check(config).evaluation,
            max_new_tokens=config.rollout.max_new_tokens,
        )
        path.write_text(json.dumps(asdict(figures)))
    known: dict[str, Any] = json.loads(path.read_text())
    return known


def make(console: Console, directory: Path) -> DemoFiles:
    """Models and prompts, made where they are missing, with a bar for each."""
    columns = TextColumn("  {task.description:<34}"), BarColumn(bar_width=20), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def report(label: str, fraction: float) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(f"training the {label}", total=1.0)
            progress.update(tasks[label], completed=fraction)

        return prepare(directory, report)
