"""What a person sees of a run: one live line, and a short summary at the end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine.config import RunConfig
from engine.health import Symptom
from engine.loop import StepRecord
from engine.preflight import Inputs

# Without a terminal, in a log, a line now and then is enough.
LINES = 12


class Terminal:
    """Live progress of a run."""

    def __init__(self, config: RunConfig, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._total = config.training.steps
        self._progress: Progress | None = None
        self._task: Any = None

    def inputs(self, inputs: Inputs) -> None:
        """Says what is trained on, and what was left out of it."""
        left_out = [
            f"{count} {why}"
            for count, why in (
                (inputs.skipped, "too long"),
                (inputs.held_out, "held out"),
            )
            if count
        ]
        left_out_text = f" (left out: {', '.join(left_out)})" if left_out else ""
        self._console.print(
            f"  {len(inputs.prompts)} prompts{left_out_text}, {len(inputs.evaluation)} held out"
        )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage that takes a while and has no steps."""
        start = time.perf_counter()
        if self._console.is_terminal:
            with self._console.status(f"{name} …"):
                yield
        else:
            yield
        self._console.print(f"  {name:<34}{time.perf_counter() - start:7.1f} s")

    @contextmanager
    def steps(self) -> Iterator[None]:
        """The stage whose steps are shown as they come."""
        start = time.perf_counter()
        if self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task("first rollouts …", total=self._total)
            self._progress.start()
        yield
        self.close()
        self._console.print(f"  {'distillation':<34}{time.perf_counter() - start:7.1f} s")

    def step(self, record: StepRecord) -> None:
        """Shows a finished step."""
        if self._progress is not None:
            self._progress.update(self._task, completed=record.step, description=line(record))
        elif record.step % max(1, self._total // LINES) == 0:
            self._console.print(f"    {line(record, self._total)}", soft_wrap=True)

    def symptom(self, symptom: Symptom) -> None:
        """Says, above the live line, that the run has left its healthy range."""
        self._console.print(f"    [yellow]![/] {escape(symptom.text)}", soft_wrap=True)

    def close(self) -> None:
        """Takes the live line away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def line(record: StepRecord, total: int | None = None) -> str:
    """A step in one line."""
    metrics = record.metrics
    step = f"step {record.step}" + (f"/{total}" if total else "")
    accuracy = metrics.get("train/accuracy")
    idle = " ".join(
        f"{role} {max(0.0, 1 - metrics[f'busy/{role}']):.0%}"
        for role in ("rollout", "teacher", "learner")
    )
    parts = [
        step,
        f"loss {metrics['train/loss']:.3f}",
        *([f"accuracy {accuracy:.2f}"] if accuracy is not None else []),
        f"{metrics['throughput/trained']:.0f} tok/s",
        f"age {metrics['staleness/mean_age']:.1f} max {metrics['staleness/max_age']:.0f}",
        f"idle {idle}",
    ]
    return " | ".join(parts)


def summary(console: Console, figures: dict[str, Any], columns: dict[str, dict[str, Any]]) -> None:
    """The table of held-out figures, and where everything is."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("held-out")
    for name in columns:
        table.add_column(name, justify="right")
    rows = {
        "accuracy": "accuracy",
        "kl": "KL to teacher (nats/token)",
        "mean_length": "response length (tokens)",
        "finished": "finished",
    }
    for key, title in rows.items():
        values = [column.get(key) for column in columns.values()]
        if any(value is not None for value in values):
            table.add_row(title, *("–" if v is None else f"{v:.3f}" for v in values))
    console.print()
    console.print(table)
    console.print()
    console.print(
        f"{figures['steps']} steps, {figures['trained_tokens']:.0f} tokens trained at "
        f"{figures['trained_tokens_per_second']:.0f} tokens/s; token age mean "
        f"{figures['mean_age']:.2f}, max {figures['max_age']:.0f} steps",
        soft_wrap=True,
    )
    cost = f"{figures['cpu_seconds_per_million_tokens']:.0f} processor seconds"
    if (joules := figures["joules_per_million_tokens"]) is not None:
        cost += f", {joules:.0f} J"
    console.print(
        f"{cost} per million tokens; depth settled at {figures['settled_depth']:.0f} responses",
        soft_wrap=True,
    )
    version = f"{figures['model_name']} version {figures['model_version']}, alias candidate"
    console.print(f"registered   {version}")
    console.print(f"student      {figures['student']}", soft_wrap=True)
    console.print(f"run          {figures['run_directory']}", soft_wrap=True)
