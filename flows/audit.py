"""`opdflow audit`: how wrong the estimator in use is, and what others would cost."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from engine import preflight
from engine.audit import Report, alternatives, audit
from engine.checkpoint import Checkpoints
from engine.config import ConfigError, RunConfig, load, override, parse
from engine.models import Language, pick_device, pick_dtype


def audited(
    target: str, overrides: list[str], responses: int, positions: int, repeats: int
) -> dict[str, Report]:
    """Reports by the age of the sampler. `target` is a configuration file, whose student is
    audited, or the folder of a run, live or finished: its newest checkpoint, with responses of its
    own and of the checkpoint before."""
    folder = Path(target)
    config = _of_run(folder, overrides) if folder.is_dir() else load(target, overrides)
    inputs = preflight.check(config)
    device = pick_device()

    def language(model: Path) -> Language:
        return Language(model, pick_dtype("float32", device), device)

    models = [path / "model" for path in Checkpoints(folder / "checkpoints", 1).all()]
    student = language(models[-1] if models else inputs.student)
    samplers = {"fresh": student}
    if len(models) > 1:
        samplers[f"by {models[-2].parent.name}"] = language(models[-2])
    teacher = language(inputs.teacher)
    training = config.training
    return {
        name: audit(
            student,
            sampler,
            teacher,
            inputs.prompts[:responses],
            alternatives(config.estimator),
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            teacher_temperature=config.teacher.temperature,
            responses_per_update=training.batch / training.mini_batches,
            positions=positions,
            repeats=repeats,
            seed=config.seed,
        )
        for name, sampler in samplers.items()
    }


def _of_run(folder: Path, overrides: list[str]) -> RunConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: no config.json here, so this is not the folder of a run")
    data = json.loads(path.read_text())
    for text in overrides:
        override(data, text)
    return parse(data, str(path))


def rows(reports: dict[str, Report]) -> list[dict[str, Any]]:
    """One flat row for each estimator and sampler, for JSON."""
    return [
        {"sampler": name} | asdict(row) for name, report in reports.items() for row in report.rows
    ]


def show(reports: dict[str, Report], console: Console) -> None:
    """A table for each sampler; the estimator in use comes first. *worst* is the share of a
    position's error, summed over positions, that one of them has."""
    for name, report in reports.items():
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("estimator", no_wrap=True)
        for title in (
            "bytes",
            "tail",
            "bias",
            "mse",
            "worst",
            "cosine",
            "batch\nbias",
            "batch\nmse",
        ):
            table.add_column(title, justify="right", no_wrap=True)
        for row in report.rows:
            table.add_row(
                row.estimator,
                f"{row.bytes_per_token:.0f}",
                f"{row.tail_mass:.4f}",
                f"{row.bias:.3f}",
                f"{row.mse:.2g}" + ("*" if row.drawn else ""),
                f"{row.worst:.0%}",
                f"{row.cosine:.3f}",
                f"{row.batch_bias:.3f}",
                f"{row.batch_mse:.2g}" + ("*" if row.drawn else ""),
            )
        console.print(
            f"\n{name}: {report.positions} positions, student's entropy {report.entropy:.2f} nats, "
            f"KL(sampler || student) {report.drift:.4f}",
            soft_wrap=True,
        )
        console.print(table)
        console.print(
            f"an update's own noise, from its choice of responses: {report.noise:.2g}; "
            f"smallest cache that stays well below it: {report.recommended or 'none of these'}",
            soft_wrap=True,
        )
        if any(row.drawn for row in report.rows):
            console.print("* from draws; all other errors from closed forms")
        for warning in report.warnings:
            console.print(f"[yellow]warning[/]: {warning}", soft_wrap=True)


def plot(reports: dict[str, Report]) -> Figure:
    """Error of the batch gradient over bytes per token."""
    figure = Figure(figsize=(6.5 * len(reports), 5), layout="constrained")
    for axes, (name, report) in zip(
        figure.subplots(1, len(reports), squeeze=False)[0], reports.items(), strict=True
    ):
        families: dict[str, list[tuple[float, float]]] = {}
        for row in report.rows:
            family = row.estimator.partition("(")[0]
            point = (row.bytes_per_token, max(row.batch_mse, 1e-12))
            families.setdefault(family, []).append(point)
        for family, points in families.items():
            axes.loglog(*zip(*sorted(points), strict=True), "o-", label=family)
        axes.axhline(report.noise, color="gray", ls=":", label="noise of an update's responses")
        used = report.rows[0]
        axes.plot(used.bytes_per_token, max(used.batch_mse, 1e-12), "k*", ms=14, label="in use")
        axes.set_xlabel("bytes per token")
        axes.set_ylabel("squared error of the batch gradient, relative")
        axes.set_title(name)
        axes.legend(fontsize=8)
    return figure
