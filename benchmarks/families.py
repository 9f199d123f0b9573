"""How far samplers are from plain transformers, family by family: the README's table.

    make families                         all, about a quarter of an hour
    make families ARGS="qwen3 mixtral"    the rows of these

For each family two tiny models are made; a sampler begins with one, takes the other's weights with
responses in flight, and goes on. A cell is the greatest difference of any log-probability of any
id, before, across and after the swap; or what was said before a run would have begun.
"""

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from engine.config import ConfigError
from engine.models import check_family
from tests.conftest import build_tokenizer
from tests.engine.families import (
    FAMILIES,
    REFUSED,
    REFUSED_BY_VLLM,
    apart,
    compare,
    folders,
    rehearse,
    sample,
)

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- families -->\n", "<!-- /families -->"
HEADER = ["| family | particular to it | hf | vllm |", "|---|---|---|---|"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=[*FAMILIES, *REFUSED])
    options = parser.parse_args()
    torch.set_num_threads(1)  # on tensors this small, threads only wait for each other
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            cells = row(family, Path(folder))
        print(f"| {family} | {' | '.join(cells)} |", flush=True)
        write(family, cells)


def row(family: str, folder: Path) -> list[str]:
    """What is particular to a family, and what was seen of each sampler."""
    if family in REFUSED:
        old = REFUSED[family].save(folder, build_tokenizer(), 1)
        try:
            check_family(old)
        except ConfigError as error:
            return [str(error).split("be used: ")[1].split(";")[0], "refused", "refused"]
    pair = folders(family, folder, build_tokenizer())
    cells = [FAMILIES[family].note, worst("hf", pair)]
    if family in REFUSED_BY_VLLM:
        assert REFUSED_BY_VLLM[family] in apart(rehearse, "vllm", pair[0])
        return [*cells, f"refused: {REFUSED_BY_VLLM[family]}"]
    return [*cells, worst("vllm", pair)]


def worst(backend: str, pair: tuple[Path, Path]) -> str:
    taken = sample(backend, *pair) if backend == "hf" else apart(sample, backend, *pair)
    outcome = compare(taken, *pair)
    return f"{max(dataclasses.astuple(outcome)):.0e}"


def write(family: str, cells: list[str]) -> None:
    """Puts a row in its place in the README's table."""
    text = README.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text[start:end].splitlines()}
    rows[family] = f"| {family} | {' | '.join(cells)} |"
    ordered = [rows[name] for name in [*FAMILIES, *REFUSED] if name in rows]
    README.write_text(text[:start] + "\n".join([*HEADER, *ordered]) + "\n" + text[end:])


if __name__ == "__main__":
    main()
