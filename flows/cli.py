"""The command `opdflow`."""

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

STOP_SECONDS = 15.0

EXIT_CODES = """exit codes
  0    done; of a night also if the gate rejected its candidate
  1    a run failed
  2    something is wrong with what was asked, and was said before work started
  130  stopped by Ctrl-C"""
EXAMPLES = {
    "opdflow": [
        "opdflow demo",
        "opdflow doctor my.toml",
        "opdflow run my.toml --json figures.json",
    ],
    "run": ["opdflow run my.toml", "opdflow run my.toml staleness.max=0 rollout.backend=hf"],
    "demo": ["opdflow demo", "opdflow demo training.steps=64 seed=1"],
    "audit": ["opdflow audit runs/20261207-020000", "opdflow audit my.toml --plot audit.png"],
    "study": ["opdflow study", "opdflow study my-study.toml seeds=1"],
    "nightly": ["opdflow nightly my.toml", "opdflow nightly my.toml gate.level=0.01"],
    "doctor": ["opdflow doctor my.toml", "opdflow doctor my.toml --steps"],
    "metrics": ["opdflow metrics", "opdflow metrics staleness/"],
    "serve": [
        "opdflow serve",
        'opdflow serve my.toml --cron "30 1 * * *" --timezone Europe/Berlin',
        "opdflow serve my.toml --no-schedule --prefect-port 4201 --mlflow-port 5001",
    ],
    "promote": ["opdflow promote student", "opdflow promote student 7 --mlflow .opdflow"],
    "rollback": ["opdflow rollback student", "opdflow rollback student --mlflow http://host:5000"],
    "lineage": ["opdflow lineage student", "opdflow lineage student 7 --json facts.json"],
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit status. A wrong configuration is 2, a failed run 1."""
    parser = argparse.ArgumentParser(
        prog="opdflow", description="Asynchronous on-policy distillation of language models."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="distil as a TOML file says")
    run.add_argument("file", help="the run's configuration")
    demo = commands.add_parser("demo", help="a whole distillation on a small task, in minutes")
    audit = commands.add_parser("audit", help="compare an estimator with the exact gradient")
    audit.add_argument("target", help="a configuration, or the folder of a run, live or finished")
    audit.add_argument("--responses", type=int, default=32, help="to sample (32)")
    audit.add_argument("--positions", type=int, default=1024, help="of them, to compare at (1024)")
    audit.add_argument("--repeats", type=int, default=8, help="draws of each cache (8)")
    audit.add_argument("--plot", type=Path, metavar="PATH", help="write the plot there")
    study = commands.add_parser("study", help="estimators by staleness by seed; resumable")
    study.add_argument("file", nargs="?", help="the study; without it, the demo's")
    bench = commands.add_parser("bench", help="synchronous and asynchronous training side by side")
    bench.add_argument("--tier", choices=["pools", "shared", "remote"], default="pools")
    bench.add_argument("--seeds", type=int, default=3, help="runs of each arm (3)")
    bench.add_argument("--plot", type=Path, metavar="PATH", help="write the plot there")
    night = commands.add_parser("nightly", help="a night: new prompts, from the champion, the gate")
    night.add_argument("file", help="the configuration of its runs")
    doctor = commands.add_parser("doctor", help="every check before a run, each with its fix")
    doctor.add_argument("file", help="the run's configuration")
    doctor.add_argument(
        "--steps", action="store_true", help="make two steps with real workers, and time them"
    )
    metrics = commands.add_parser("metrics", help="what each metric means, and what to do")
    metrics.add_argument("pattern", nargs="?", default="", help="only names that hold this")
    metrics.add_argument("--json", type=Path, metavar="PATH", help="write the catalogue there too")
    serve = commands.add_parser("serve", help="schedule nights, with both user interfaces")
    _serve_options(serve)
    for command in (run, demo, audit, study, bench, night, doctor, serve):
        command.add_argument("overrides", nargs="*", metavar="key=value")
        command.add_argument(
            "--json", type=Path, metavar="PATH", help="write the figures there too"
        )
    _registry_commands(commands)
    for name, lines in EXAMPLES.items():
        command = parser if name == "opdflow" else commands.choices[name]
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.epilog = "\n".join(["examples", *(f"  {line}" for line in lines)])
    parser.epilog = f"{parser.epilog}\n\n{EXIT_CODES}"
    options = parser.parse_args(arguments)
    _quiet()

    from engine.config import ConfigError

    try:
        figures = COMMANDS[options.command](options)
    except ConfigError as error:
        print(f"opdflow: {error}", file=sys.stderr)
        return 2
    except NightFailedError:
        return 1
    except UnhealthyError as error:
        print(f"opdflow: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("opdflow: stopped", file=sys.stderr)
        return 130
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


def _run(options: argparse.Namespace) -> dict[str, Any]:
    from engine.config import load
    from flows.terminal import summary

    config = load(options.file, options.overrides)
    console = _console()
    figures = _distill(config)
    summary(console, figures, {"before": figures["before"], "after": figures["after"]})
    _where_next(console, figures)
    return figures


def _demo(options: argparse.Namespace) -> dict[str, Any]:
    from flows import demo
    from flows.terminal import summary

    console = _console()
    start = time.perf_counter()
    console.print("opdflow demo: a small student learns from a teacher, on its own responses")
    config, files = demo.build(console, options.overrides)
    made = time.perf_counter()
    console.print(f"  {'models and prompts':<34}{made - start:7.1f} s")
    more = demo.baseline(config, files)
    console.print(f"  {'evaluating more SFT, to compare':<34}{time.perf_counter() - made:7.1f} s")
    figures = _distill(config)
    figures["seconds"] = {"models": made - start} | figures["seconds"]
    figures["seconds"]["total"] = time.perf_counter() - start
    figures["baseline"] = more
    columns = {"before": figures["before"], "more SFT": more, "after": figures["after"]}
    summary(console, figures, columns)
    console.print("more SFT: 1,600 more updates on the student's solved examples, no teacher")
    _where_next(console, figures)
    opdflow = _program("opdflow")
    console.print("\ntry next")
    console.print(f"  {opdflow} demo staleness.max=0     strictly synchronous training")
    console.print(f"  {opdflow} demo rollout.backend=hf  plain transformers instead of vLLM")
    console.print(f"  {opdflow} run FILE                 your own models, see README.md")
    return figures


def _audit(options: argparse.Namespace) -> dict[str, Any]:
    from flows import audit

    reports = audit.audited(
        options.target, options.overrides, options.responses, options.positions, options.repeats
    )
    console = _console()
    audit.show(reports, console)
    if options.plot:
        audit.plot(reports).savefig(options.plot, dpi=130)
        console.print(f"\nplot         {options.plot}", soft_wrap=True)
    recommended = {name: report.recommended for name, report in reports.items()}
    return {"rows": audit.rows(reports), "recommended": recommended}


def _study(options: argparse.Namespace) -> dict[str, Any]:
    from flows import demo, study

    console = _console()
    # `opdflow study seeds=1` has no file.
    file, overrides = options.file, options.overrides
    if file is None or ("=" in file and not Path(file).exists()):
        file, overrides = study.DEFAULT, [*([file] if file else []), *overrides]
    config = study.load(file, overrides)
    run = config.run
    if "student" not in run:
        run = demo.with_inputs(run, demo.make(console, Path(demo.DIRECTORY) / "demo"))
    table = study.sweep(config, run, console)
    study.show(table, config, console)
    path = Path(config.directory) / "study.parquet"
    console.print(f"\ntable        {path}\nplot         {path.with_suffix('.png')}", soft_wrap=True)
    return {"rows": table.to_pylist()}


def _bench(options: argparse.Namespace) -> dict[str, Any]:
    from engine.config import ConfigError
    from flows import bench
    from flows.demo import DIRECTORY

    console = _console()
    if options.tier == "remote":
        if options.overrides:
            raise ConfigError("the tier `remote` has scripted workers: it takes no key=value")
        outcomes = bench.remote(options.seeds)
    else:
        from engine import preflight
        from flows import demo

        steps = f"training.steps={bench.STEPS}"
        config, _ = demo.build(console, [steps, *options.overrides])
        shared = options.tier == "shared"
        outcomes = bench.real(config, preflight.check(config), options.seeds, shared, console)
    bench.show(options.tier, outcomes, console)
    path = options.plot or Path(DIRECTORY) / f"bench-{options.tier}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    bench.plot(options.tier, outcomes).savefig(path, dpi=130)
    console.print(f"\nplot         {path}", soft_wrap=True)
    return bench.figures(options.tier, outcomes)


def _doctor(options: argparse.Namespace) -> dict[str, Any]:
    from engine.config import load
    from engine.doctor import Doctor

    doctor, console = Doctor(load(options.file, options.overrides)), _console()
    findings = []
    for finding in doctor.findings(options.steps):
        mark = "ok   " if finding.ok else "WRONG"
        console.print(f"{mark}  {finding.name:<20}{finding.text}", soft_wrap=True, markup=False)
        findings.append(finding)
    if wrong := [finding.name for finding in findings if not finding.ok]:
        raise UnhealthyError(f"{len(wrong)} of {len(findings)} checks failed: {', '.join(wrong)}")
    return {finding.name: finding.text for finding in findings}


def _metrics(options: argparse.Namespace) -> dict[str, Any]:
    from engine.metrics import CATALOGUE

    found = {name: metric for name, metric in CATALOGUE.items() if options.pattern in name}
    for name, metric in found.items():
        _console().print(f"{name}  [{metric.unit}]\n    {metric.meaning}", markup=False)
        if metric.advice:
            _console().print(f"    → {metric.advice}", markup=False)
    return {name: asdict(metric) for name, metric in found.items()}


def _serve_options(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("file", nargs="?", help="the nights' configuration; without it, the demo's")
    serve.add_argument("--cron", default="0 2 * * *", help="when nights start (0 2 * * *)")
    serve.add_argument("--timezone", default="UTC", help="of the schedule (UTC)")
    serve.add_argument("--no-schedule", action="store_true", help="nights start by hand only")
    serve.add_argument(
        "--overlap",
        choices=["skip", "wait"],
        default="skip",
        help="what a night does that is due while one runs (skip)",
    )
    serve.add_argument("--prefect-port", type=int, default=4200, help="(4200)")
    serve.add_argument("--mlflow-port", type=int, default=5000, help="(5000)")
    serve.add_argument("--mlflow-store", default="", metavar="URI", help="of MLflow's database")


def _serve(options: argparse.Namespace) -> dict[str, Any]:
    from engine.config import load
    from flows import demo, serve

    console = _console()
    file, overrides = options.file, options.overrides
    if file is None or ("=" in file and not Path(file).exists()):
        config, _ = demo.build(console, [*([file] if file else []), *overrides])
    else:
        config = load(file, overrides)
    asked = serve.Options(
        cron=options.cron,
        timezone=options.timezone,
        scheduled=not options.no_schedule,
        overlap=options.overlap,
        prefect_port=options.prefect_port,
        mlflow_port=options.mlflow_port,
        mlflow_store=options.mlflow_store,
    )
    serve.serve(config, asked, console)
    return {}


def _nightly(options: argparse.Namespace) -> dict[str, Any]:
    from engine.config import load

    config = load(options.file, options.overrides)
    _prefect_home(config)
    from flows.nightly import nightly

    signal.signal(signal.SIGINT, _interrupted)
    state: Any = asyncio.run(_ended(nightly(config, return_state=True)))
    console = _console()
    console.print(f"\n{state.name}: {state.message}", soft_wrap=True)
    if state.is_failed():
        raise NightFailedError
    row = asyncio.run(state.aresult()) or {}
    return {key: str(value) if key == "started" else value for key, value in row.items()}


class UnhealthyError(RuntimeError):
    """Checks of `opdflow doctor` failed; each has been printed."""


async def _ended(flow_run: Any) -> Any:
    """A flow's state; what starts a flow is awaitable, but no coroutine."""
    return await flow_run


class NightFailedError(RuntimeError):
    """The night's state has been printed, and says why."""


def _registry_commands(commands: Any) -> None:
    promote = commands.add_parser("promote", help="make a version of a model the champion")
    rollback = commands.add_parser("rollback", help="make the previous champion the champion again")
    lineage = commands.add_parser("lineage", help="what a version was made from, and its decisions")
    for command in (promote, rollback, lineage):
        command.add_argument("name", help="the registered model")
        command.add_argument(
            "--mlflow",
            default="runs",
            metavar="URI",
            help="of MLflow, or the folder of its file; MLFLOW_TRACKING_URI, or else `runs`",
        )
        command.add_argument("--json", type=Path, metavar="PATH", help="write the facts there too")
    for command in (promote, lineage):
        command.add_argument("version", nargs="?", help="its number; without it, the candidate")


def _registry(options: argparse.Namespace) -> Any:
    from engine import preflight
    from engine.config import ConfigError
    from tasks.tracking import Registry

    uri = options.mlflow
    if uri == "runs":
        uri = os.environ.get("MLFLOW_TRACKING_URI") or uri
    if "://" not in uri:
        file = Path(uri).absolute() / "mlflow.db"
        if not file.exists():  # MLflow would make one
            raise ConfigError(f"{file}: no such file; say where MLflow is with --mlflow")
        uri = f"sqlite:///{file}"
    preflight.check_address("--mlflow", uri)
    return Registry(uri, options.name)


def _version(registry: Any, version: str | None) -> str:
    from engine.config import ConfigError
    from tasks.tracking import CANDIDATE

    found = version or registry.version(CANDIDATE)
    if found is None:
        raise ConfigError(f"no model {registry.name!r} with an alias `{CANDIDATE}`")
    return str(found)


def _promote(options: argparse.Namespace) -> dict[str, Any]:
    from tasks.tracking import CHAMPION

    registry = _registry(options)
    champion, version = registry.version(CHAMPION), _version(registry, options.version)
    registry.promote(version, {"promoted_by": "hand"}, over=champion)
    _console().print(f"{options.name}: champion {champion or 'none'} → {version}")
    return {"champion": version, "previous": champion}


def _rollback(options: argparse.Namespace) -> dict[str, Any]:
    champion, previous = _registry(options).rollback()
    _console().print(f"{options.name}: champion {champion} → {previous}")
    return {"champion": previous, "rolled_back": champion}


def _lineage(options: argparse.Namespace) -> dict[str, Any]:
    registry = _registry(options)
    facts: dict[str, Any] = registry.lineage(_version(registry, options.version))
    width = max(map(len, facts))
    for name, value in facts.items():
        text = value.replace("\n", "\n" + " " * (width + 2))
        _console().print(f"{name:<{width}}  {text}", soft_wrap=True, markup=False)
    return facts


def _distill(config: Any) -> dict[str, Any]:
    """Checks everything that can be wrong, then runs the flow."""
    from engine import preflight

    preflight.check(config)  # before Prefect and Ray start, which takes longer than to be told
    _prefect_home(config)
    from flows.distill import distill

    signal.signal(signal.SIGINT, _interrupted)
    return asyncio.run(distill(config))


def _prefect_home(config: Any) -> None:
    """Where Prefect keeps its database, if it needs one of its own."""
    from engine import preflight

    preflight.check_address("PREFECT_API_URL", os.environ.get("PREFECT_API_URL", ""))
    home = os.environ.setdefault("PREFECT_HOME", str(Path(config.directory).absolute() / "prefect"))
    Path(home).mkdir(parents=True, exist_ok=True)  # Prefect waits minutes for one that isn't there


def _interrupted(*_: object) -> None:
    """Ctrl-C ends the run in good order, within STOP_SECONDS; a second one ends it at once.

    Prefect's own server gets the same signal and is gone first, and its client would then try to
    report to it for minutes."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    print("opdflow: stopping; press Ctrl-C again to stop at once", file=sys.stderr)
    end = threading.Timer(STOP_SECONDS, os._exit, [130])
    end.daemon = True
    end.start()
    raise KeyboardInterrupt


def _where_next(console: Any, figures: dict[str, Any]) -> None:
    """How to open both user interfaces, as commands to copy."""
    console.print("\nlook at it")
    uri = figures["mlflow_uri"]
    if uri.startswith("http"):
        console.print(f"  MLflow   {uri}", soft_wrap=True)
    else:
        mlflow = f"{_program('mlflow')} ui --backend-store-uri {uri}"
        console.print(f"  MLflow   {mlflow}   → http://127.0.0.1:5000", soft_wrap=True)
    if api := os.environ.get("PREFECT_API_URL"):
        console.print(f"  Prefect  {api.removesuffix('/api')}", soft_wrap=True)
    else:
        prefect = f"PREFECT_HOME={os.environ['PREFECT_HOME']} {_program('prefect')} server start"
        console.print(f"  Prefect  {prefect}   → http://127.0.0.1:4200", soft_wrap=True)


def _program(name: str) -> str:
    """A program of this environment, as it is called from here."""
    path = Path(sys.executable).parent / name
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _console() -> Any:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # tables are not cut off in a log
    return console


def _quiet() -> None:
    """Libraries speak when something needs a person; set before they are imported."""
    defaults = {
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_SERVER_LEVEL": "CRITICAL",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


COMMANDS = {
    "run": _run,
    "demo": _demo,
    "audit": _audit,
    "study": _study,
    "bench": _bench,
    "nightly": _nightly,
    "doctor": _doctor,
    "metrics": _metrics,
    "serve": _serve,
    "promote": _promote,
    "rollback": _rollback,
    "lineage": _lineage,
}


if __name__ == "__main__":
    sys.exit(main())
