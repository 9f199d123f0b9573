"""Memory, time and gradients of the chunked language-model head, against two other ways.

    make head
    make head ARGS="--positions 4096"       # four times the work

One case is LM head, float32 log-softmax and loss, forward and backward, up to the gradients of
hidden states and head weight. The loss is one of engine.estimators, with its statistics. It is
computed by

    naive         all logits at once, autograd
    checkpointed  chunks of positions, each under torch.utils.checkpoint: logits computed twice
    ours          engine.head.chunked_loss

Chunks have the same size in both. Inputs are synthetic, the same for every dtype up to its
rounding, and peaked like a language model's. Runs on the GPU if there is one.

**Time** is of whole calls in one process, in turns (naive, checkpointed, ours, naive, ...) after
one untimed round. A ratio is taken within a turn, so that a slow moment of the machine hits all.

**Extra peak memory** is taken in a process of its own per way: the peak during the call, minus
what is held before (inputs, weights, libraries, threads), minus the two gradients, one number per
hidden state and weight in their dtype. These are the result: every way holds them in the end, and
to count them in all would make all look alike. Whatever else a way needs for them counts: sums in
float32, a chunk's part of the weight's gradient, copies. On a CPU it is the resident set
(VmHWM; Linux), on a GPU what torch has allocated. "A tenth of naive's" means this number.

**Gradients** are compared by the largest difference of an entry over naive's largest entry, the
worse of hidden states and weight. In bfloat16 naive rounds too, so all are also compared to naive
in float32 on the same rounded inputs.

The temperature is 1, by which only ours divides: the other two are at their best.

Naive needs 3 logit tensors of positions x vocabulary x 4 bytes for `poisson`, 5.5 for
`teacher_top_k`, 10 for `dense`: 1.9, 3.4 and 6.2 GB at the default size, and 2 GB beside them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.config import Dense, Estimator, ForwardKL, Poisson, ReverseKL, TeacherTopK
from engine.estimators import Loss, loss_of
from engine.head import Head, chunked_loss, positions_per_chunk
from engine.support import Support

MIB = 2**20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Gradients = tuple[Tensor, Tensor]


# The case


@dataclass(frozen=True)
class Case:
    hidden: Tensor
    head: torch.nn.Linear
    support: Support
    loss: Loss
    chunk: int

    @property
    def vocabulary(self) -> int:
        return self.head.out_features

    def first(self, positions: int) -> "Case":
        return Case(
            self.hidden[:positions], self.head, self.support[:positions], self.loss, self.chunk
        )


def estimator(loss: str, k: int) -> Estimator:
    return {
        "poisson": ReverseKL(cache=Poisson(n=k)),
        "dense": ReverseKL(cache=Dense()),
        "teacher_top_k": ForwardKL(cache=TeacherTopK(k=k)),
    }[loss]


def make_inputs(options: argparse.Namespace) -> dict[str, Any]:
    """In float32, on the CPU: hidden states, head weight and a support."""
    generator = torch.Generator().manual_seed(0)
    n, width, vocabulary = options.positions, options.hidden, options.vocabulary
    hidden = torch.randn(n, width, generator=generator)
    # Logits are normal; their entropy would come to zero at a deviation of sqrt(2 log V).
    deviation = 0.9 * (2 * torch.tensor(float(vocabulary)).log()).sqrt()
    weight = torch.randn(vocabulary, width, generator=generator) * deviation / width**0.5
    parts = hidden.split(positions_per_chunk(vocabulary))
    columns = [cached(part @ weight.T, options, generator) for part in parts]
    names = ("ids", "sampler_logprobs", "teacher_logprobs", "token_ids", "token_sampler_logprobs")
    support = {
        name: torch.cat([part.reshape(-1) for part in parts])
        for name, parts in zip(names, zip(*columns, strict=True), strict=True)
    }
    offsets = torch.arange(n + 1) * (len(support["teacher_logprobs"]) // n)
    return {"hidden": hidden, "weight": weight, "support": Support(offsets=offsets, **support)}


def cached(
    logits: Tensor, options: argparse.Namespace, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Of some positions: the columns of a support, k ids of each position or all."""
    noise = torch.randn(logits.shape, generator=generator)
    sampler, teacher = (0.97 * logits).log_softmax(1), (logits + noise).log_softmax(1)
    # k ids without replacement: their logits plus Gumbel noise, flattened as `poisson` does.
    gumbel = -noise.exponential_(generator=generator).log_()
    ids = (0.75 * sampler + gumbel).topk(options.k).indices
    emitted = ids[:, :1]
    nothing, behind = sampler[:0], sampler.gather(1, emitted)
    if options.loss == "dense":
        return ids[:0], nothing, teacher, emitted, behind
    if options.loss == "teacher_top_k":
        ids = teacher.topk(options.k).indices
        return ids, nothing, teacher.gather(1, ids), emitted, behind
    return ids, sampler.gather(1, ids), teacher.gather(1, ids), emitted, behind


def load_case(inputs: Path, options: argparse.Namespace, dtype: str) -> Case:
    read = torch.load(inputs, weights_only=False)  # written by this program
    weight = read["weight"].to(DEVICE, getattr(torch, dtype))
    head = torch.nn.Linear(options.hidden, options.vocabulary, bias=False, device="meta")
    head.weight = torch.nn.Parameter(weight)
    support = read["support"]
    columns = {name: column.to(DEVICE) for name, column in vars(support).items()}
    columns["offsets"] = support.offsets  # stays on the CPU, as the learner's does
    hidden = read["hidden"].to(DEVICE, weight.dtype)
    loss = loss_of(estimator(options.loss, options.k))
    return Case(hidden, head, Support(**columns), loss, options.chunk)


def in_float32(case: Case) -> Case:
    head = torch.nn.Linear(case.head.in_features, case.vocabulary, bias=False, device="meta")
    head.weight = torch.nn.Parameter(case.head.weight.detach().float())
    return Case(case.hidden.float(), head, case.support, case.loss, case.chunk)


# Three ways to the sum of the losses


def naive(case: Case, hidden: Tensor) -> Tensor:
    return sum_of_losses(case, hidden, case.support)


def checkpointed(case: Case, hidden: Tensor) -> Tensor:
    total = torch.zeros((), device=hidden.device)
    for start in range(0, len(hidden), case.chunk):
        part = slice(start, start + case.chunk)
        arguments = (case, hidden[part], case.support[part])
        total = total + checkpoint(sum_of_losses, *arguments, use_reentrant=False)
    return total


def ours(case: Case, hidden: Tensor) -> Tensor:
    arguments = (hidden, Head(case.head), case.loss, case.support)
    settings = {"vocabulary": case.vocabulary, "temperature": 1.0, "chunk": case.chunk}
    return chunked_loss(*arguments, **settings)[0]


def sum_of_losses(case: Case, hidden: Tensor, support: Support) -> Tensor:
    losses, _statistics = case.loss(case.head(hidden).float().log_softmax(-1), support)
    return losses.sum()


Way = Callable[[Case, Tensor], Tensor]
WAYS: dict[str, Way] = {"naive": naive, "checkpointed": checkpointed, "ours": ours}


def gradients(way: Way, case: Case) -> Gradients:
    """What is measured."""
    hidden = case.hidden.detach().requires_grad_()
    case.head.weight.grad = None
    way(case, hidden).backward()
    result = hidden.grad, case.head.weight.grad
    case.head.weight.grad = None
    return result


# Measurements


def seconds(way: Way, case: Case) -> float:
    synchronise()
    start = time.perf_counter()
    gradients(way, case)
    synchronise()
    return time.perf_counter() - start


def synchronise() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def difference(found: Gradients, expected: Gradients) -> float:
    """Largest of an entry, over the largest expected entry; the worse of the two gradients."""
    pairs = zip(found, expected, strict=True)
    return max(largest_difference(a, b) / b.abs().max().item() for a, b in pairs)


def largest_difference(a: Tensor, b: Tensor) -> float:
    parts = zip(a.split(4096), b.split(4096), strict=True)
    return max((x.float() - y.float()).abs().max().item() for x, y in parts)


def compare(case: Case) -> dict[str, dict[str, float]]:
    """Of each way, after an untimed call: differences from naive, and from naive in float32."""
    exact = naive_here = gradients(naive, in_float32(case))
    rows: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        found = gradients(way, case)
        if way is naive:
            naive_here = found
        differences = [difference(found, expected) for expected in (naive_here, exact)]
        rows[name] = dict(zip(("from_naive", "from_float32"), differences, strict=True))
    return rows


def peak(way: Way, case: Case) -> dict[str, float]:
    """In MiB: the peak during the call above what was held before, and the gradients' part."""
    gradients(way, case.first(8))  # libraries, threads
    before = start_peak()
    found = gradients(way, case)
    after = read_peak()
    owned = sum(gradient.nbytes for gradient in found)
    return {"above": (after - before) / MIB, "gradients": owned / MIB}


def start_peak() -> int:
    """Forgets earlier peaks; bytes held now."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def read_peak() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else resident("VmHWM")


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def peak_of(name: str, dtype: str, inputs: Path) -> dict[str, float]:
    """In a process of its own, whose freed tensors go back to the system at once."""
    command = [sys.executable, __file__, *sys.argv[1:], "--dtypes", dtype]
    command += ["--peak-of", name, "--inputs", str(inputs)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(answer.stdout)


def measure(options: argparse.Namespace, dtype: str, inputs: Path) -> list[dict[str, Any]]:
    peaks = {name: peak_of(name, dtype, inputs) for name in WAYS}
    case = load_case(inputs, options, dtype)
    differences = compare(case)
    turns = [
        {name: seconds(way, case) for name, way in WAYS.items()} for _ in range(options.repeats)
    ]
    extra = {name: p["above"] - p["gradients"] for name, p in peaks.items()}
    return [
        {
            "dtype": dtype,
            "implementation": name,
            "seconds": [turn[name] for turn in turns],
            "time_over_naive": [turn[name] / turn["naive"] for turn in turns],
            "extra_peak_mib": extra[name],
            "extra_peak_over_naive": extra[name] / extra["naive"],
            "gradients_mib": peaks[name]["gradients"],
            "difference": differences[name],
        }
        for name in WAYS
    ]


# Output


def main() -> None:
    options = parse()
    if options.peak_of:
        case = load_case(options.inputs, options, options.dtypes[0])
        print(json.dumps(peak(WAYS[options.peak_of], case)))
        return
    results = []
    print(describe(options))
    print(
        "| dtype | implementation | seconds | time / naive | extra peak, MiB | / naive "
        "| gradients, MiB | difference from naive | from float32 naive |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.pt"
        torch.save(make_inputs(options), inputs)
        for dtype in options.dtypes:
            rows = measure(options, dtype, inputs)
            results += rows
            print("\n".join(map(table_row, rows)), flush=True)
    if options.json:
        about = {"settings": describe(options), "rows": results}
        options.json.write_text(json.dumps(about, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--k", type=int, default=64, help="cached ids per position")
    parser.add_argument(
        "--dtypes", type=lambda names: names.split(","), default=["float32", "bfloat16"]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loss", choices=["poisson", "dense", "teacher_top_k"], default="poisson")
    parser.add_argument("--chunk", type=int, help="positions; the engine's own if not given")
    parser.add_argument("--peak-of", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--inputs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.chunk = options.chunk or positions_per_chunk(options.vocabulary)
    return options


def describe(options: argparse.Namespace) -> str:
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    return (
        f"{options.positions} positions, hidden size {options.hidden}, vocabulary "
        f"{options.vocabulary}, loss {options.loss}, k {options.k}, chunks of {options.chunk}; "
        f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}\n"
    )


def table_row(row: dict[str, Any]) -> str:
    cells = [
        row["dtype"],
        row["implementation"],
        spread(row["seconds"], 2),
        spread(row["time_over_naive"], 2),
        f"{row['extra_peak_mib']:.0f}",
        f"{row['extra_peak_over_naive']:.3f}",
        f"{row['gradients_mib']:.0f}",
        f"{row['difference']['from_naive']:.1e}",
        f"{row['difference']['from_float32']:.1e}",
    ]
    return f"| {' | '.join(cells)} |"


def spread(values: list[float], digits: int) -> str:
    """Median (minimum to maximum)."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
