"""A batch of 100 MB from one process to another: Arrow in the object store against Python lists.

    make transport

A rollout's cache is made by one actor and read by another, once as the Arrow batch that opdflow
sends and once as lists of Python numbers that Ray pickles. Both are ready in the first actor, and
have arrived when the second can use them: Arrow's bytes have all been read by then, the lists are
unpickled. Arms take turns, a ratio is of neighbours; printed are median and range over repeats.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import pyarrow as pa
import ray

from engine.schema import nest, ragged

RESPONSES, TOKENS, KEPT = 256, 200, 244  # times 8 bytes: 100 MB


@ray.remote(num_cpus=0)
class Sampler:
    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        count = RESPONSES * TOKENS * KEPT
        ids = rng.integers(0, 150_000, count, dtype=np.int32)
        logprobs = np.log(rng.random(count, dtype=np.float32))
        kept = np.full(RESPONSES * TOKENS, KEPT)
        tokens = np.full(RESPONSES, TOKENS)
        columns = [nest(ragged(values, kept), tokens) for values in (ids, logprobs)]
        self.batch = pa.RecordBatch.from_arrays(columns, ["cache_ids", "sampler_logprobs"])
        self.lists = [
            values.reshape(RESPONSES, TOKENS, KEPT).tolist() for values in (ids, logprobs)
        ]

    def arrow(self) -> pa.RecordBatch:
        return self.batch

    def python(self) -> list[Any]:
        return self.lists

    def size(self) -> int:
        return self.batch.nbytes


@ray.remote(num_cpus=0)
class Learner:
    def arrow(self, batch: pa.RecordBatch) -> None:
        for column in batch.columns:
            column.flatten().flatten().to_numpy().sum()

    def python(self, lists: list[Any]) -> None:
        """They have arrived."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=2 * 10**9,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    sampler, learner = Sampler.remote(), Learner.remote()
    size = ray.get(sampler.size.remote())
    seconds: dict[str, list[float]] = {"arrow": [], "python": []}
    for _ in range(options.repeats + 1):  # the first warms up
        for kind, times in seconds.items():
            start = time.perf_counter()
            sent = getattr(sampler, kind).remote()
            ray.get(getattr(learner, kind).remote(sent))
            times.append(time.perf_counter() - start)
            del sent
    ray.shutdown()
    arrow, python = (times[1:] for times in seconds.values())
    ratios = [theirs / ours for ours, theirs in zip(arrow, python, strict=True)]
    print(f"batch   {size / 1e6:.0f} MB, {RESPONSES} responses")
    print(f"arrow   {spread(arrow)} s\nlists   {spread(python)} s\nratio   {spread(ratios)}")
    if options.json:
        results = {"bytes": size, "arrow": arrow, "lists": python, "ratios": ratios}
        options.json.write_text(json.dumps(results, indent=1))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()
