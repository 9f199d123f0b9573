"""Held-out figures of the demo by staleness, backend and seed: asynchrony must not cost quality.

    make quality

runs `staleness.max` 0 and 4 on both backends, three seeds on vLLM, one on hf: eight whole runs of
the demo, one after another. Prints a Markdown table; `--json PATH` keeps all figures.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = [("vllm", 0, 3), ("vllm", 4, 3), ("hf", 0, 1), ("hf", 4, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    print("| backend | staleness.max | seeds | accuracy | KL | tokens/s | mean age | masked |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for backend, staleness, seeds in SETTINGS:
        runs = [run(backend, staleness, seed) for seed in range(seeds)]
        results += runs
        cells = [
            backend,
            str(staleness),
            str(seeds),
            spread([r["after"]["accuracy"] for r in runs], 3),
            spread([r["after"]["kl"] for r in runs], 3),
            spread([r["trained_tokens_per_second"] for r in runs], 0),
            spread([r["mean_age"] for r in runs], 2),
            spread([r["masked_tokens"] for r in runs], 0),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def run(backend: str, staleness: int, seed: int) -> dict[str, Any]:
    """One run of the demo, in processes of its own."""
    overrides = [f"rollout.backend={backend}", f"staleness.max={staleness}", f"seed={seed}"]
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "flows.cli", "demo", *overrides, "--json", str(figures)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return {"backend": backend, "staleness": staleness, "seed": seed} | json.loads(
            figures.read_text()
        )


def spread(values: list[float], digits: int) -> str:
    """Median (minimum to maximum)."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
