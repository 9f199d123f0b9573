"""The demo with a mixture of experts for a student: whether what is true of a dense one holds.

    make experts

makes a small Qwen3-MoE as the demo makes its student, and distils the demo's teacher into it, by
vLLM, asynchronously. Prints accuracy and KL before and after, and the largest deviation of a fresh
token's ratio from 1 over all steps after the first swap.
"""

import argparse
import asyncio
import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from demo.models import Recipe, SparseShape, prepare
from engine.config import override, parse
from flows import demo

# About as many parameters as the demo's student, a quarter of which a token goes through.
STUDENT = SparseShape(
    hidden=64, heads=2, kv_heads=1, ffn=64, layers=2, init_std=0.1, experts=8, active=2
)
DIRECTORY = Path(".opdflow") / "experts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    figures = distilled(options.overrides)
    before, after = figures["before"], figures["after"]
    print("| held-out | before | after |\n|---|---|---|")
    for name in ("accuracy", "kl"):
        print(f"| {name} | {before[name]:.3f} | {after[name]:.3f} |")
    print(f"ratio deviation, worst step after a swap: {figures['worst_ratio_deviation']:.2e}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def distilled(overrides: list[str]) -> dict[str, Any]:
    """The demo's run with this student; its figures, and the worst ratio."""
    recipe = Recipe(student=STUDENT)
    # Nobody compares with a baseline here: it is the student itself.
    recipe = replace(recipe, baseline_lessons=replace(recipe.baseline_lessons, steps=0))
    files = prepare(DIRECTORY / "demo", lambda what, done: None, recipe)
    data = tomllib.loads(demo.CONFIG.read_text()) | {"directory": str(DIRECTORY)}
    for text in overrides:
        override(data, text)
    config = parse(demo.with_inputs(data, files), str(demo.CONFIG))
    os.environ.setdefault("PREFECT_HOME", str((DIRECTORY / "prefect").absolute()))
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    from flows import distill

    return asyncio.run(distill.distill(config))


if __name__ == "__main__":
    main()
