"""How often the gate promotes a candidate: one that is no better, and one that is 5 points better.

    make gate

simulates both models' outcomes on a set of prompts and lets the gate's own code decide, 1,000 times
for each line. A prompt has a difficulty of its own (a Beta law: many are easy or hard for both
models) and a length; a response is right by a coin of that prompt, and its KL varies by a factor of
about two from one sample to the next. Prints a Markdown table; `--json PATH` keeps it.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from engine.config import EvaluationConfig, GateConfig
from engine.evaluation import HELD_OUT, Outcomes
from engine.gate import decide

REPEATS = 1000
DEFAULT_SIZE = EvaluationConfig.model_fields["limit"].default
# Sum of the Beta law's two parameters: below 2 it has its mass at both ends.
CONCENTRATION = 1.5
GAIN = 0.05
NULL = [(DEFAULT_SIZE, accuracy) for accuracy in (0.2, 0.5, 0.8, 0.95)] + [(64, 0.8), (1024, 0.8)]
POWER = [(DEFAULT_SIZE, accuracy) for accuracy in (0.5, 0.8, 0.9)] + [(1024, 0.8), (2048, 0.8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    gate = GateConfig()
    rows = [
        {"prompts": size, "accuracy": accuracy, "gain": gain}
        | {"promoted": promoted(size, accuracy, gain, gate, options.repeats)}
        for gain, cases in ((0.0, NULL), (GAIN, POWER))
        for size, accuracy in cases
    ]
    print(f"level {gate.level}, {options.repeats} nights for each line\n")
    print("| prompts | champion's accuracy | candidate's | promoted |\n|---|---|---|---|")
    for row in rows:
        candidate = row["accuracy"] + row["gain"]
        print(f"| {row['prompts']} | {row['accuracy']} | {candidate:.2f} | {row['promoted']:.3f} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def promoted(size: int, accuracy: float, gain: float, gate: GateConfig, repeats: int) -> float:
    """Share of the nights on which the gate promotes."""
    random = np.random.default_rng(1)
    return float(np.mean([night(random, size, accuracy, gain, gate) for _ in range(repeats)]))


def night(
    random: np.random.Generator, size: int, accuracy: float, gain: float, gate: GateConfig
) -> bool:
    """One decision between two models on new prompts."""
    right = random.beta(accuracy * CONCENTRATION, (1 - accuracy) * CONCENTRATION, size)
    better = right + gain / (1 - accuracy) * (1 - right)
    length, kl = random.lognormal(4, 0.7, size), random.lognormal(-1.8, 0.7, size)
    champion, candidate = (outcomes(random, each, length, kl) for each in (right, better))
    return decide({HELD_OUT: champion}, {HELD_OUT: candidate}, gate).promote


def outcomes(
    random: np.random.Generator, right: np.ndarray, length: np.ndarray, kl: np.ndarray
) -> Outcomes:
    """A sample of one model's responses; [prompts] each."""
    tokens = np.ceil(length * random.lognormal(0, 0.3, len(length)))
    divergence = tokens * kl * random.lognormal(0, 0.7, len(kl))
    correct = (random.random(len(right)) < right).astype(float)
    return Outcomes(correct, divergence, tokens, np.ones(len(right), bool))


if __name__ == "__main__":
    main()
