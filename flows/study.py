"""`opdflow study`: estimators by staleness by seed, as a table that grows cell by cell."""

import asyncio
import base64
import hashlib
import json
import math
import multiprocessing
import os
import statistics
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from prefect import flow
from prefect.artifacts import acreate_image_artifact, acreate_table_artifact
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine.config import ConfigError, Estimator, RunConfig, Section, override, parse

DEFAULT = Path(__file__).parent.parent / "deployments" / "study.toml"

# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom.
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)

WIDTH = 120  # of the tables, also where no terminal says how wide it is

ROW = pa.schema(
    [
        ("cell", pa.string()),  # digest of all that the cell depends on
        ("estimator", pa.string()),
        ("staleness", pa.int32()),
        ("seed", pa.int32()),
        ("accuracy", pa.float64()),
        ("kl", pa.float64()),
        ("mean_length", pa.float64()),
        ("finished", pa.float64()),
        ("entropy", pa.float64()),
        ("bytes_per_token", pa.float64()),
        ("seconds", pa.float64()),
    ]
)


class StudyConfig(Section):
    """A sweep: every estimator at every staleness with every seed."""

    run: dict[str, Any]
    """Tables of a run's configuration; without a student, on the demo's models and prompts."""
    estimators: dict[str, Estimator]
    """By the names under which they are shown."""
    staleness: list[int]
    """Ages, in steps, at which batches are trained on."""
    seeds: int = 3
    """Seeds 0, 1, …"""
    workers: int = 0
    """Cells that run at the same time, each in a process with one thread; 0 is one for each core,
    or one where there is a GPU."""
    directory: str = ".opdflow/study"
    """Folder of the table and the plot."""


@dataclass(frozen=True)
class Cell:
    """One run of the sweep."""

    estimator: str
    staleness: int
    seed: int
    config: RunConfig

    @property
    def digest(self) -> str:
        settings = json.dumps(self.config.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(settings.encode()).hexdigest()[:16]


def load(path: str | Path, overrides: list[str]) -> StudyConfig:
    """Reads a study's TOML file. Raises ConfigError naming file and key."""
    try:
        data = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for text in overrides:
        override(data, text)
    try:
        return StudyConfig.model_validate(data)
    except ValidationError as error:
        lines = [
            f"{path}: `{'.'.join(str(part) for part in problem['loc'])}`: {problem['msg']}"
            for problem in error.errors()
        ]
        raise ConfigError("\n".join(lines)) from None


def cells(study: StudyConfig, run: dict[str, Any]) -> list[Cell]:
    """All runs of a study, seed by seed, so that an unfinished one can be read too."""
    return [
        Cell(name, staleness, seed, _config(run, estimator, staleness, seed))
        for seed in range(study.seeds)
        for staleness in study.staleness
        for name, estimator in study.estimators.items()
    ]


def sweep(study: StudyConfig, run: dict[str, Any], console: Console) -> pa.Table:
    """Runs the cells that the table doesn't hold yet; each is written as soon as it is done."""
    path = Path(study.directory) / "study.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    wanted = cells(study, run)
    rows = _read(path)
    known = {row["cell"] for row in rows}
    missing = [cell for cell in wanted if cell.digest not in known]
    if len(missing) < len(wanted):
        console.print(f"  {len(wanted) - len(missing)} of {len(wanted)} cells are in {path}")
    for row in _run_all(missing, study.workers or _cores(), console):
        rows.append(row)
        _write(path, rows)
    digests = {cell.digest for cell in wanted}
    table = pa.Table.from_pylist([row for row in rows if row["cell"] in digests], ROW)
    plot(table, study).savefig(path.with_suffix(".png"), dpi=130)
    return table


@flow(name="study")
async def study_flow(config: StudyConfig) -> None:
    """`opdflow study` as Prefect runs it: the table and the plot are its artifacts."""
    console = Console(highlight=False)
    await asyncio.to_thread(sweep, config, config.run, console)
    plot = (Path(config.directory) / "study.png").read_bytes()
    rows = await asyncio.to_thread(_read, Path(config.directory) / "study.parquet")
    await acreate_table_artifact(rows, key="study")
    url = f"data:image/png;base64,{base64.b64encode(plot).decode()}"
    await acreate_image_artifact(url, key="study-plot")


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval; 0 for a single value."""
    if len(values) < 2:
        return values[0], 0.0
    quantile = T95[min(len(values) - 1, len(T95)) - 1]
    return statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def show(table: pa.Table, study: StudyConfig, console: Console) -> None:
    """Accuracy and divergence by estimator and staleness."""
    for column, title in (("accuracy", "held-out accuracy"), ("kl", "held-out KL, nats/token")):
        shown = Table(box=None, pad_edge=False, header_style="bold", title=title)
        shown.add_column("estimator", no_wrap=True)
        shown.add_column("bytes", justify="right", no_wrap=True)
        for staleness in study.staleness:
            shown.add_column(str(staleness), justify="right", no_wrap=True)
        for name in study.estimators:
            means = _curve(table, name, column, study.staleness)
            size = statistics.mean(_values(table, "bytes_per_token", name))
            texts = [f"{mean:.2f}±{half:.2f}" for mean, half in means]
            shown.add_row(name, f"{size:.0f}", *texts)
        console.print()
        console.print(shown, width=max(console.width, WIDTH))


def plot(table: pa.Table, study: StudyConfig) -> Figure:
    """Accuracy and divergence over staleness, with 95 % intervals over seeds."""
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    places = range(len(study.staleness))
    for axes, column, title in (
        (left, "accuracy", "held-out accuracy"),
        (right, "kl", "held-out KL to the teacher (nats/token)"),
    ):
        for index, name in enumerate(study.estimators):
            means = _curve(table, name, column, study.staleness)
            shifted = [place + 0.03 * (index - len(study.estimators) / 2) for place in places]
            heights = [mean for mean, _ in means]
            widths = [half for _, half in means]
            axes.errorbar(shifted, heights, widths, label=name, marker="o", ms=4, capsize=2, lw=1.2)
        axes.set_xticks(list(places), [str(staleness) for staleness in study.staleness])
        axes.set_xlabel("staleness (steps)")
        axes.set_title(title)
    left.set_ylim(bottom=0)
    right.set_yscale("log")  # a collapsed run is tens of times worse
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _config(run: dict[str, Any], estimator: Estimator, staleness: int, seed: int) -> RunConfig:
    changed = run | {
        "estimator": estimator.model_dump(),
        "staleness": run.get("staleness", {}) | {"max": staleness},
        "seed": seed,
    }
    return parse(changed, "run")


def _run_all(missing: list[Cell], workers: int, console: Console) -> Iterator[dict[str, Any]]:
    if not missing:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # read when a worker imports torch
    context = multiprocessing.get_context("spawn")
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=console, transient=True) as progress,
        ProcessPoolExecutor(workers, mp_context=context) as pool,
    ):
        task = progress.add_task("cells", total=len(missing))
        futures = [pool.submit(_run_cell, cell) for cell in missing]
        try:
            for future in as_completed(futures):
                yield future.result()
                progress.advance(task)
        finally:  # after an error or Ctrl-C nothing new is begun
            pool.shutdown(cancel_futures=True)


def _run_cell(cell: Cell) -> dict[str, Any]:
    """In a process of its own."""
    import torch

    from engine import preflight
    from engine.study import controlled

    torch.set_num_threads(1)
    start = time.perf_counter()
    outcome = controlled(cell.config, preflight.check(cell.config))
    figures = asdict(outcome.figures)
    return figures | {
        "cell": cell.digest,
        "estimator": cell.estimator,
        "staleness": cell.staleness,
        "seed": cell.seed,
        "entropy": outcome.entropy,
        "bytes_per_token": outcome.bytes_per_token,
        "seconds": time.perf_counter() - start,
    }


def _cores() -> int:
    import torch

    return 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0))


def _read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path, schema=ROW).to_pylist() if path.exists() else []


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    draft = path.with_suffix(".draft")
    pq.write_table(pa.Table.from_pylist(rows, ROW), draft)
    draft.replace(path)


def _values(table: pa.Table, column: str, name: str, staleness: int | None = None) -> list[float]:
    return [
        row[column]
        for row in table.to_pylist()
        if row["estimator"] == name and staleness in (None, row["staleness"])
    ]


def _curve(
    table: pa.Table, name: str, column: str, staleness: list[int]
) -> list[tuple[float, float]]:
    return [interval(_values(table, column, name, each)) for each in staleness]
