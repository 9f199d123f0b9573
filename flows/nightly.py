"""A night: from the champion, on new prompts only, to a candidate, which the gate lets through.

    champion ─► prompts no night has trained on ─► distil ─► both models on fixed sets ─► gate
                                                                                           │
        table of nights ◄─ report ◄─ aliases `champion`, `previous` ◄─ candidate registered ◄┘

A night ends in a state with a name of its own:

    Promoted, Rejected              a candidate was registered, and the reasons are with it
    NoNewPrompts, TooFewPrompts     nothing was trained; the prompts wait for the next night
    Skipped                         another night of this model is under way
    TeacherAway                     failed before anything was started

A night that dies leaves no trace in the table, so the next one takes its prompts.
"""

import asyncio
import json
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import State, flow
from prefect.artifacts import acreate_markdown_artifact
from prefect.states import Completed, Failed

from engine import preflight
from engine.config import ConfigError, RunConfig
from engine.evaluation import HELD_OUT
from engine.gate import Change, Comparison, Decision, decide
from engine.models import resolve
from engine.nights import NightRunsError, Nights
from engine.preflight import Inputs
from flows.distill import (
    Distillation,
    Outcome,
    distilled,
    figure_table,
    registered,
    run_name,
    started,
)
from tasks.tracking import CHAMPION, Registry, RegistryError, end_dead_runs, tracking_uri

NIGHT_TAG = "opdflow.night"


@flow(name="nightly", flow_run_name=run_name)
async def nightly(config: RunConfig) -> State:
    """Distils on the prompts that no earlier night has trained on, starting from the champion, and
    promotes the result if the gate lets it through."""
    nights = Nights(Path(config.directory), config.tracking.model_name)
    try:
        with nights.lock():
            return await _night(config, nights)
    except NightRunsError as error:
        return Completed(name="Skipped", message=str(error))


@dataclass
class _Night:
    """A night under way."""

    config: RunConfig
    nights: Nights
    registry: Registry
    champion: str | None
    """Version that it starts from; None for the configured student."""
    inputs: Inputs
    row: dict[str, Any]
    """Of the table of nights."""


async def _night(config: RunConfig, nights: Nights) -> State:
    row: dict[str, Any] = {"started": datetime.now(UTC).replace(microsecond=0)}
    row["night"] = f"{row['started']:%Y%m%d-%H%M%S}"
    preflight.check_address("tracking.uri", tracking_uri(config))
    nights.export(_export_url(config))  # a folder that can't be written is known before the work
    registry = await asyncio.to_thread(_registry, config)
    champion = row["champion"] = registry.version(CHAMPION)
    if champion is not None:
        folder = Path(config.directory) / "champions"
        model = await asyncio.to_thread(registry.download, champion, folder)
        config = _changed(config, "student", model=str(model))
    try:
        resolve(config.teacher.model)
    except ConfigError as error:
        return Failed(name="TeacherAway", message=str(error))
    inputs = await asyncio.to_thread(preflight.check, config)
    fresh = nights.fresh(inputs.prompts)
    row["new_prompts"] = len(fresh)
    needed = max(config.training.batch, config.nightly.min_prompts)
    if len(fresh) < needed:
        return _waits(config, nights, row, needed)
    inputs = replace(inputs, prompts=fresh)
    steps = min(config.training.steps, len(fresh) // config.training.batch)
    config = _changed(config, "training", steps=steps)
    return await _train(_Night(config, nights, registry, champion, inputs, row))


def _registry(config: RunConfig) -> Registry:
    Path(config.directory).mkdir(parents=True, exist_ok=True)
    end_dead_runs(config, NIGHT_TAG)
    return Registry(tracking_uri(config), config.tracking.model_name)


def _waits(config: RunConfig, nights: Nights, row: dict[str, Any], needed: int) -> State:
    """Not enough prompts: they wait for the next night."""
    count = row["new_prompts"]
    sources = ", ".join(config.prompts.sources)
    name = "TooFewPrompts" if count else "NoNewPrompts"
    row["decision"] = "too few prompts" if count else "no new prompts"
    row["reasons"] = f"{count} new prompts in {sources}, and a night takes at least {needed}"
    nights.add(row, [])
    nights.export(_export_url(config))
    return Completed(name=name, message=row["reasons"], data=row)


async def _train(night: _Night) -> State:
    config, row = night.config, night.row
    tags = {NIGHT_TAG: config.tracking.model_name}
    async with started(config, night.inputs, tags) as distillation:
        outcome = await distilled(distillation)
        decision = decide(outcome.before, outcome.after, config.gate)
        base = f"version {night.champion}" if night.champion else config.student.model
        origin = {"base": base, "night": row["night"]} | _evidence(decision)
        version = await registered(distillation, outcome, origin)
        decision = await asyncio.to_thread(_move, night, version, decision)
        row |= _figures(distillation, outcome, decision, version)
        report = _report(night, outcome, decision)
        await asyncio.to_thread(distillation.tracker.report, report)
        await acreate_markdown_artifact(report, key="night")
        night.nights.add(row, distillation.run.trained())
        night.nights.export(_export_url(config))
    name = "Promoted" if decision.promote else "Rejected"
    return Completed(name=name, message=row["reasons"], data=row)


def _move(night: _Night, version: str, decision: Decision) -> Decision:
    """Does what the gate says."""
    if not decision.promote:
        return decision
    try:
        night.registry.promote(version, {}, over=night.champion)
    except RegistryError as error:
        decision = Decision(False, [*decision.reasons, str(error)], decision.comparisons)
        night.registry.tag(version, _evidence(decision))
    return decision


def _evidence(decision: Decision) -> dict[str, str]:
    """The decision as tags of a version."""
    return {
        "gate": "promoted" if decision.promote else "rejected",
        "gate.reasons": "\n".join(decision.reasons),
        "gate.evidence": json.dumps({k: asdict(v) for k, v in decision.comparisons.items()}),
    }


def _figures(
    distillation: Distillation, outcome: Outcome, decision: Decision, version: str
) -> dict[str, Any]:
    """Columns of the table of nights."""
    run = distillation.run
    held_out = decision.comparisons[HELD_OUT]
    accuracy = asdict(held_out.accuracy) if held_out.accuracy else {}
    return {
        "decision": "promoted" if decision.promote else "rejected",
        "reasons": "; ".join(decision.reasons),
        "candidate": version,
        "prompts": len(run.trained()),
        "steps": run.steps,
        "tokens": int(sum(record.metrics["train/tokens"] for record in run.history)),
        "accuracy_champion": accuracy.get("champion"),
        "accuracy_candidate": accuracy.get("candidate"),
        "accuracy_gain_at_least": accuracy.get("lower"),
        "kl_champion": held_out.kl.champion,
        "kl_candidate": held_out.kl.candidate,
        "kl_change_at_most": held_out.kl.upper,
        "seconds": sum(distillation.watch.seconds.values()),
        "cpu_seconds": sum(record.metrics["cost/cpu_seconds"] for record in run.history),
        "mlflow_run": distillation.tracker.run_id,
    }


def _report(night: _Night, outcome: Outcome, decision: Decision) -> str:
    """The night as Markdown."""
    row, name = night.row, night.config.tracking.model_name
    verdict = "promoted to champion" if decision.promote else "rejected"
    base = f"champion version {night.champion}" if night.champion else night.config.student.model
    return "\n".join(
        [
            f"# {name} version {row['candidate']}: {verdict}",
            "",
            *(f"- {reason}" for reason in decision.reasons),
            "",
            f"Trained from {base} on {row['prompts']} of {row['new_prompts']} new prompts, "
            f"{row['steps']} steps, {row['tokens']} tokens, in {row['seconds']:.0f} s "
            f"({row['cpu_seconds']:.0f} s of processor time).",
            "",
            figure_table(*outcome.figures),
            "",
            "| set | prompts | accuracy | KL (nats/token) |",
            "|---|---|---|---|",
            *(_row(*item) for item in decision.comparisons.items()),
            "",
            "Champion → candidate, and the bounds of the change.",
        ]
    )


def _row(name: str, comparison: Comparison) -> str:
    cells = " | ".join(_cell(change) for change in (comparison.accuracy, comparison.kl))
    return f"| {name} | {comparison.prompts} | {cells} |"


def _cell(change: Change | None) -> str:
    if change is None:
        return "–"
    bounds = f"{change.lower:+.3f} to {change.upper:+.3f}"
    return f"{change.champion:.3f} → {change.candidate:.3f} ({bounds})"


def _export_url(config: RunConfig) -> str:
    return config.nightly.export or str(Path(config.directory).absolute() / "nights" / "export")


def _changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    """The configuration with other values in one of its tables."""
    table = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: table})
