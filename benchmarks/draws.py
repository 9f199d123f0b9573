"""What choosing the cached ids adds to a decoding step, by cache and vocabulary.

    make draws

One step of 64 responses, on one thread. The log-softmax over the vocabulary, which every cache
needs for log p_old, is the measure: choosing costs so many log-softmaxes. Arms take turns, and a
ratio is of neighbours; printed are median and range over repeats.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from engine.audit import label
from engine.config import MultiSample, Poisson, ReverseKL, Sampled, StudentTopK, TopKTail
from engine.support import choose

ROWS = 64
VOCABULARIES = {353: "the demo's", 49_152: "SmolLM2's", 151_936: "Qwen3's"}
CACHES = [
    Sampled(),
    MultiSample(n=64),
    StudentTopK(k=16),
    TopKTail(k=16),
    Poisson(n=256),
    Poisson(n=1024),
    Poisson(n=256, top_k=16),
]
ENTROPY = 0.4  # nats, of the synthetic distributions: a reasoning model's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    print("| vocabulary | cache | ms/step | log-softmaxes | ids/token |")
    print("|---|---|---|---|---|")
    for vocabulary in VOCABULARIES:
        logits = peaked(vocabulary)
        for cache in CACHES:
            row = measure(logits, cache, options.repeats)
            results.append({"vocabulary": vocabulary, "cache": label(ReverseKL(cache=cache))} | row)
            ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
            name = results[-1]["cache"]
            print(
                f"| {vocabulary} | {name} | {row['ms']:.2f} | {ratio} | {row['ids']:.1f} |",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def peaked(vocabulary: int) -> torch.Tensor:
    """[ROWS, vocabulary] random logits, sharpened until their mean entropy is ENTROPY."""
    logits = torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(0))
    low, high = 1.0, 100.0
    for _ in range(40):
        scale = (low * high) ** 0.5
        entropy = torch.special.entr((scale * logits).softmax(1)).sum(1).mean()
        low, high = (scale, high) if entropy > ENTROPY else (low, scale)
    return scale * logits


def measure(logits: torch.Tensor, cache: object, repeats: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    logprobs = logits.log_softmax(1)
    emitted = torch.multinomial(logprobs.exp(), 1, generator=generator).squeeze(1)
    choices, ratios = [], []
    for _ in range(repeats + 1):  # the first warms up
        base = seconds(lambda: logits.log_softmax(1))
        choices.append(seconds(lambda: choose(cache, logprobs, emitted, generator)))
        ratios.append(choices[-1] / base)
    ids = len(choose(cache, logprobs, emitted, generator).ids) / ROWS
    return {
        "ms": 1e3 * statistics.median(choices[1:]),
        "ratio": statistics.median(ratios[1:]),
        "ratio_min": min(ratios[1:]),
        "ratio_max": max(ratios[1:]),
        "ids": ids,
    }


def seconds(call: Callable[[], object]) -> float:
    """Of one call, mean over as many as take 50 ms."""
    start, calls = time.perf_counter(), 0
    while True:
        call()
        calls += 1
        if (elapsed := time.perf_counter() - start) > 0.05:
            return elapsed / calls


if __name__ == "__main__":
    main()
