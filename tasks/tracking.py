"""All of MLflow: a run's parameters, metrics, figures, and the registered model.

One thread does the writing, one `log_batch` a step, so that a slow or absent server delays metrics
and never the training. Models are logged as their Hugging Face folder, without a pickle, and load
by `transformers` from where MLflow puts them.
"""

import logging
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import matplotlib
import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from engine.config import ConfigError, RunConfig
from engine.evaluation import Figures
from engine.health import Symptom
from engine.loop import StepRecord
from engine.trace import BUSY, SYNCING, Span

matplotlib.use("Agg")
from matplotlib.figure import Figure

log = logging.getLogger("opdflow")

CHAMPION, PREVIOUS, CANDIDATE = "champion", "previous", "candidate"
# Tags of a version that say what became of it.
REPLACED = "replaced"
# MLflow's limit on the length of a parameter's value.
PARAMETER_LENGTH = 6000
RETRY_SECONDS = 5.0
TIMELINE_SECONDS = 60.0


def tracking_uri(config: RunConfig) -> str:
    """Where MLflow is: as configured, or as the environment says, or a file beside the runs."""
    configured = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    return configured or f"sqlite:///{Path(config.directory).absolute()}/mlflow.db"


def connect(uri: str) -> mlflow.MlflowClient:
    """A client of MLflow at a URI. Slow the first time, when MLflow makes its database."""
    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # The registry's store looks logged models up at the process's URI, not at its client's.
    mlflow.set_tracking_uri(uri)
    return mlflow.MlflowClient()


class Registry:
    """The versions of one registered model, and the aliases that say which is in use.

    `champion` is in use, `previous` was before it, `candidate` is the newest. MLflow moves one
    alias at a time and has no compare-and-set: `previous` moves first, so that a death in between
    leaves the champion as it was, and what was written is read again."""

    def __init__(self, uri: str, name: str) -> None:
        self._client = connect(uri)
        self.name = name

    def version(self, alias: str) -> str | None:
        """The version that an alias points at."""
        try:
            return str(self._client.get_model_version_by_alias(self.name, alias).version)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise

    def download(self, version: str, folder: Path) -> Path:
        """The version's model as a folder, in this one; from there the second time."""
        final = folder / f"{self.name}-{version}"
        if not final.exists():
            draft = folder / f".{self.name}-{version}.draft"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            uri = f"models:/{self.name}/{version}"
            mlflow.artifacts.download_artifacts(uri, dst_path=str(draft))
            draft.rename(final)
        return final

    def promote(self, version: str, evidence: dict[str, str], over: str | None) -> None:
        """Makes a version champion in place of `over`, and tags both.

        Raises RegistryError if another champion has come meanwhile: what was compared with one
        says nothing about the other."""
        self._known(version)
        champion = self.version(CHAMPION)
        if champion != over:
            raise RegistryError(
                f"{self.name}: version {version} was to replace champion {over}, and the champion "
                f"is {champion} by now; compare it with that one, or promote it by hand"
            )
        self.tag(version, evidence | {"promoted": _now(), REPLACED: champion or ""})
        if champion is not None:
            self.tag(champion, {"replaced_by": version})
            self._point(PREVIOUS, champion)
        self._point(CHAMPION, version)

    def rollback(self) -> tuple[str, str]:
        """Makes the previous champion the champion again; returns what was and what is. The one
        before it, by its tags, becomes `previous`, so that a second rollback goes back further."""
        champion, previous = self.version(CHAMPION), self.version(PREVIOUS)
        if champion is None or previous is None or champion == previous:
            raise ConfigError(f"{self.name} has no previous champion to go back to")
        self.tag(champion, {"rolled_back": _now()})
        self._point(CHAMPION, previous)
        before = self._known(previous).tags.get(REPLACED)
        if before:
            self._point(PREVIOUS, before)
        else:
            self._client.delete_registered_model_alias(self.name, PREVIOUS)
        return champion, previous

    def lineage(self, version: str) -> dict[str, str]:
        """Where a version comes from and what became of it."""
        found = self._known(version)
        aliases = self._client.get_registered_model(self.name).aliases
        names = sorted(alias for alias, at in aliases.items() if str(at) == version)
        created = datetime.fromtimestamp(found.creation_timestamp / 1000, UTC)
        facts = {
            "version": version,
            "aliases": ", ".join(names),
            "registered": f"{created:%Y-%m-%dT%H:%M:%SZ}",
            "mlflow_run": found.run_id,
        }
        return facts | dict(sorted(found.tags.items()))

    def tag(self, version: str, tags: dict[str, str]) -> None:
        """Tags a version."""
        for key, value in tags.items():
            self._client.set_model_version_tag(self.name, version, key, value)

    def _known(self, version: str) -> Any:
        try:
            return self._client.get_model_version(self.name, version)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise ConfigError(
                f"{mlflow.get_tracking_uri()}: no version {version} of a model {self.name!r}"
            ) from None

    def _point(self, alias: str, version: str) -> None:
        self._client.set_registered_model_alias(self.name, alias, version)
        if (now := self.version(alias)) != version:
            raise RegistryError(
                f"{self.name}: alias {alias} was set to {version} and is {now}: somebody else is "
                "moving it; look at the registry, and promote again"
            )


class RegistryError(RuntimeError):
    """The registry is not as it was when the decision was made."""


class Tracker:
    """One MLflow run."""

    def __init__(self, config: RunConfig, name: str, tags: dict[str, str] | None = None) -> None:
        """Opens the run. Slow the first time, when MLflow makes its database: call in a thread."""
        self._config = config
        Path(config.directory).mkdir(parents=True, exist_ok=True)
        self._client = connect(tracking_uri(config))
        self._experiment = self._experiment_id()
        tags = {"mlflow.runName": name} | (tags or {})
        self.run_id = self._client.create_run(self._experiment, tags=tags).info.run_id
        parameters = [
            Param(key, str(value)[:PARAMETER_LENGTH])
            for key, value in _flat(config.model_dump(mode="json")).items()
        ]
        self._client.log_batch(self.run_id, params=parameters)
        self._queue: queue.Queue[dict[str, list[Any]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._write, name="mlflow", daemon=True)
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        """Queues a step's metrics."""
        now = int(time.time() * 1000)
        metrics = [Metric(k, v, now, record.step) for k, v in record.metrics.items()]
        self._queue.put({"metrics": metrics})

    def symptom(self, symptom: Symptom) -> None:
        """Queues what the guard has noticed: a tag `health/<metric>`, which says it in words."""
        # MLflow takes the place of a tag with its name: the newest text stays.
        self._queue.put({"tags": [RunTag(f"health/{symptom.metric}", symptom.text)]})

    def evaluation(self, figures: Figures, step: int) -> None:
        """Logs held-out figures at a step."""
        now = int(time.time() * 1000)
        values = {k: v for k, v in asdict(figures).items() if v is not None}
        metrics = [Metric(f"evaluation/{k}", v, now, step) for k, v in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def plots(
        self, history: list[StepRecord], spans: Iterable[Span], before: Figures, after: Figures
    ) -> None:
        """Logs the learning curve, the histogram of ages, and what each worker did at the end."""
        self._client.log_figure(
            self.run_id, _learning_curve(history, before, after), "learning_curve.png"
        )
        self._client.log_figure(self.run_id, _age_histogram(history), "staleness.png")
        self._client.log_figure(self.run_id, timeline(list(spans)), "timeline.png")

    def report(self, text: str) -> None:
        """Keeps a Markdown report with the run."""
        self._client.log_text(self.run_id, text, "report.md")

    def register(
        self, folder: Path, before: Figures, after: Figures, origin: dict[str, str]
    ) -> str:
        """Registers a model's folder as the newest version, with alias `candidate`. `origin` are
        further tags: digests of what it was made from."""
        config, client = self._config, self._client
        name = config.tracking.model_name
        tags = {
            "student": config.student.model,
            "teacher": config.teacher.model,
            "data": ", ".join(config.prompts.sources),
            "commit": _commit(),
            "estimator": config.estimator.model_dump_json(),
            **origin,
            **{f"before.{k}": str(v) for k, v in asdict(before).items()},
            **{f"after.{k}": str(v) for k, v in asdict(after).items()},
        }
        model = client.create_logged_model(
            self._experiment, name=name, source_run_id=self.run_id, tags=tags
        )
        client.log_model_artifacts(model.model_id, str(folder))
        client.finalize_logged_model(model.model_id, "READY")
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = client.create_model_version(
            name,
            f"models:/{model.model_id}",
            run_id=self.run_id,
            tags=tags,
            model_id=model.model_id,
        )
        client.set_registered_model_alias(name, CANDIDATE, version.version)
        return str(version.version)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Writes what is queued and closes the run."""
        failed = kind is not None and issubclass(kind, Exception)
        status = "FINISHED" if kind is None else "FAILED" if failed else "KILLED"
        self._queue.put(None)
        self._thread.join(timeout=60)
        try:
            self._client.set_terminated(self.run_id, status)
        except MlflowException as error:
            log.warning("MLflow is away; the run stays open there: %s", error)

    def _experiment_id(self) -> str:
        name = self._config.tracking.experiment
        existing = self._client.get_experiment_by_name(name)
        if existing is not None:
            return str(existing.experiment_id)
        local = f"{Path(self._config.directory).absolute()}/mlartifacts"
        location = local if tracking_uri(self._config).startswith("sqlite:") else None
        return str(self._client.create_experiment(name, artifact_location=location))

    def _write(self) -> None:
        """Consumes batches of metrics or tags / waits for the next / ended by None / writes them,
        trying again while MLflow is away."""
        while (batch := self._queue.get()) is not None:
            while True:
                try:
                    self._client.log_batch(self.run_id, **batch)
                    break
                except MlflowException as error:
                    log.warning("MLflow is away, metrics wait for it: %s", error)
                    if self._queue.queue and self._queue.queue[-1] is None:
                        return  # the run is over, and waits no longer
                    time.sleep(RETRY_SECONDS)


def end_dead_runs(config: RunConfig, tag: str) -> int:
    """Closes runs that carry this tag of their own and that nobody is writing to any more, for the
    caller holds their lock; returns how many."""
    client = connect(tracking_uri(config))
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    if experiment is None:
        return 0
    wanted = f"tags.`{tag}` = '{config.tracking.model_name}' and attributes.status = 'RUNNING'"
    runs = client.search_runs([experiment.experiment_id], wanted)
    for run in runs:
        client.set_terminated(run.info.run_id, "KILLED")
    return len(runs)


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _commit() -> str:
    """The commit that runs, or nothing outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _learning_curve(history: list[StepRecord], before: Figures, after: Figures) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = [record.step for record in history]
    axes.plot(steps, [record.metrics["train/loss"] for record in history], label="loss (batch)")
    ends = [0, steps[-1]]
    axes.plot(ends, [before.kl, after.kl], "o--", label="KL to teacher (held-out)")
    axes.set_xlabel("step")
    axes.set_ylabel("nats / token")
    axes.set_ylim(bottom=0)
    right = axes.twinx()
    scored = [
        (r.step, r.metrics["train/accuracy"]) for r in history if "train/accuracy" in r.metrics
    ]
    if scored:
        right.plot(*zip(*scored, strict=True), color="tab:green", label="accuracy (batch)")
    if before.accuracy is not None and after.accuracy is not None:
        values = [before.accuracy, after.accuracy]
        right.plot(ends, values, "s--", color="tab:red", label="accuracy (held-out)")
    right.set_ylabel("accuracy")
    right.set_ylim(0, 1)
    figure.legend(loc="outside upper center", ncols=4)
    return figure


def _age_histogram(history: list[StepRecord]) -> Figure:
    totals: dict[int, int] = {}
    for record in history:
        for age, tokens in record.age_tokens.items():
            totals[age] = totals.get(age, 0) + tokens
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.bar(list(totals), list(totals.values()))
    axes.set_xticks(range(max(totals, default=0) + 1))
    axes.set_xlabel("age of a token when it was trained on (steps)")
    axes.set_ylabel("tokens")
    return figure


def timeline(spans: list[Span]) -> Figure:
    """What each worker did in the last minute: one row each, coloured by kind."""
    end = max((span.end for span in spans), default=0.0)
    shown = [span for span in spans if span.end > end - TIMELINE_SECONDS]
    workers = sorted({span.worker for span in shown}, reverse=True)
    figure = Figure(figsize=(12, 1.5 + 0.4 * len(workers)), layout="constrained")
    axes = figure.subplots()
    for kind, colour in _colours(shown).items():
        for row, worker in enumerate(workers):
            bars = [
                (s.start - end, s.seconds) for s in shown if (s.worker, s.kind) == (worker, kind)
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
        axes.bar(0, 0, color=colour, label=kind)
    axes.set_yticks(range(len(workers)), workers)
    axes.set_xlim(-TIMELINE_SECONDS, 0)
    axes.set_xlabel("seconds before the end of training")
    figure.legend(loc="outside upper center", ncols=8)
    return figure


def _colours(spans: list[Span]) -> dict[str, str]:
    """Of each kind of span: strong where work is done, pale where somebody waits."""
    waiting = sorted({span.kind for span in spans} - {*BUSY, *SYNCING})
    kinds = [*BUSY, *SYNCING, *waiting]
    colours = ["tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple"]
    return dict(zip(kinds, [*colours, *["0.85"] * len(waiting)], strict=True))
