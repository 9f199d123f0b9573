"""Does asynchrony cost quality? Whole runs of the demo by estimator, staleness bound and seed.

    make calm
    make calm ARGS="--staleness 0 8 --seeds 3 --estimators teacher_hidden"

Held-out accuracy and KL with 95 % intervals, tokens per second, and what happened on the way: the
worst accuracy of a batch after step 30, and the longest mean response of a batch, in the teacher's.
A run takes two to four minutes on two cores, so that all 50 take about two hours; finished runs are
kept in `--directory`, and the next call goes on from there.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mlflow import MlflowClient

from flows.study import interval

CACHES = {
    "teacher_hidden": '{type = "teacher_hidden"}',
    "poisson": '{type = "poisson", n = 1024}',
}
# Before it, a cold student may be as weak as it was.
SETTLED = 30
COLUMNS = {
    "accuracy": 3,
    "kl": 3,
    "trained_tokens_per_second": 0,
    "mean_age": 2,
    "worst_accuracy": 2,
    "longest": 2,
}
HEADER = ("accuracy", "KL", "tokens/s", "mean age", "worst batch", "longest/teacher")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--estimators", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path(".opdflow/calm"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    results = []
    print(f"| estimator | `staleness.max` | seeds | {' | '.join(HEADER)} |")
    print("|" + "---|" * (3 + len(HEADER)), flush=True)
    for estimator in options.estimators:
        for bound in options.staleness:
            runs = [run(options.directory, estimator, bound, s) for s in range(options.seeds)]
            results += runs
            print(line(estimator, bound, runs), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.plot:
        plot(results, options.plot)


def run(directory: Path, estimator: str, bound: int, seed: int) -> dict[str, Any]:
    """One run of the demo, in processes of its own, or what was kept of it."""
    kept = directory / f"{estimator}-{bound}-{seed}.json"
    if not kept.exists():
        settings = [f"estimator.cache={CACHES[estimator]}", f"staleness.max={bound}"]
        draft = kept.with_suffix(".draft")
        command = [sys.executable, "-m", "flows.cli", "demo", *settings, f"seed={seed}"]
        subprocess.run([*command, "--json", str(draft)], check=True, stdout=subprocess.DEVNULL)
        figures = json.loads(draft.read_text())
        kept.write_text(json.dumps(figures | on_the_way(figures)))
        draft.unlink()
    figures = json.loads(kept.read_text())
    key = {"estimator": estimator, "staleness": bound, "seed": seed}
    return key | figures["after"] | figures


def on_the_way(figures: dict[str, Any]) -> dict[str, float]:
    """The worst moments of a run, from its metrics."""
    client = MlflowClient(figures["mlflow_uri"])

    def series(name: str) -> np.ndarray:
        history = client.get_metric_history(figures["mlflow_run"], name)
        return np.array([m.value for m in sorted(history, key=lambda m: m.step)])

    accuracy, length = series("train/accuracy"), series("train/response_tokens")
    return {
        "worst_accuracy": float(accuracy[SETTLED:].min()),
        "worst_accuracy_ever": float(accuracy[5:].min()),
        "longest": float(length.max() / figures["teacher"]["mean_length"]),
    }


def line(estimator: str, bound: int, runs: list[dict[str, Any]]) -> str:
    cells = [estimator, str(bound), str(len(runs))]
    for name, digits in COLUMNS.items():
        values = [r[name] for r in runs]
        if name in ("worst_accuracy", "longest"):
            cells.append(f"{(min if name == 'worst_accuracy' else max)(values):.{digits}f}")
        else:
            mean, half = interval(values)
            cells.append(f"{mean:.{digits}f} ± {half:.{digits}f}")
    return f"| {' | '.join(cells)} |"


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Accuracy and KL by staleness bound, a line for each estimator."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2), ("accuracy", "kl"), strict=True):
        for estimator in dict.fromkeys(r["estimator"] for r in results):
            mine = [r for r in results if r["estimator"] == estimator]
            bounds = sorted({r["staleness"] for r in mine})
            groups = [[r[name] for r in mine if r["staleness"] == b] for b in bounds]
            means, half = zip(*map(interval, groups), strict=True)
            axis.errorbar(bounds, means, half, marker="o", capsize=3, label=estimator)
        axis.set(xlabel="staleness.max", ylabel=f"held-out {name}")
        axis.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
