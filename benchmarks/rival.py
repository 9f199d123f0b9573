"""opdflow beside TRL's DistillationTrainer, on the demo: speed, and what was learned by then.

    make rival

installs TRL into a folder of its own (.opdflow/rival; packages of `.venv` stay as they are) and
runs three trainings, one after another, each on all cores: opdflow's, TRL's over as many steps, and
TRL's again over as many steps as fit into opdflow's time, its learning rate decayed by then. Same
student, teacher, prompts, longest response, responses in a step, float32, and reverse KL; TRL has
AdamW at the rate that opdflow gives AdamW, since it knows no other optimizer, and makes one update
a step. TRL generates with transformers; its vLLM mode needs a GPU. Times are of training alone, and
held-out figures are those of `engine.evaluation` for all.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

RIVAL = Path(".opdflow/rival")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl:  # in a process of its own
        options.trl.joinpath("figures.json").write_text(
            json.dumps(trl(options.trl, options.steps, options.seed))
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        ours = opdflow(Path(folder), options.steps, options.seed)
        equal_tokens = rival(Path(folder) / "tokens", options.steps, options.seed)
        fitting = max(1, round(options.steps * ours["seconds"] / equal_tokens["seconds"]))
        equal_time = rival(Path(folder) / "time", fitting, options.seed)
    rows = {"opdflow": ours, "TRL, equal tokens": equal_tokens, "TRL, equal time": equal_time}
    print("| | steps | response tokens | seconds | tokens/s | held-out KL | accuracy |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['steps']} | {row['tokens']:.0f} | {row['seconds']:.1f} | "
            f"{row['tokens'] / row['seconds']:.0f} | {row['kl']:.3f} | {row['accuracy']:.3f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def opdflow(folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """The demo's run."""
    path = folder / "opdflow.json"
    overrides = [f"training.steps={steps}", f"seed={seed}"]
    command = [sys.executable, "-m", "flows.cli", "demo", *overrides, "--json", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    figures = json.loads(path.read_text())
    found = held_out(Path(figures["student"]))
    return found | {
        "steps": steps,
        "tokens": figures["trained_tokens"],
        "seconds": figures["seconds"]["distil"],
    }


def rival(folder: Path, steps: int, seed: int) -> dict[str, Any]:
    folder.mkdir()
    # Where both have a package, that of `.venv` comes first.
    paths = ":".join(["", *sys.path[1:], str(RIVAL.absolute())])
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    arguments = ["--trl", str(folder), "--steps", str(steps), "--seed", str(seed)]
    command = [sys.executable, __file__, *arguments]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    figures = json.loads((folder / "figures.json").read_text())
    return held_out(folder / "student") | figures


def trl(folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """Trains, and saves the student."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DistillationConfig, DistillationTrainer

    config, _ = demo(steps)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    lines = Path(config.prompts.path).read_text().splitlines()
    prompts = [{"prompt": json.loads(line)["messages"]} for line in lines]
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (config.student.model, config.teacher.model)
    )
    trainer = DistillationTrainer(
        model=student,
        teacher_model=teacher,
        processing_class=AutoTokenizer.from_pretrained(config.student.model),
        train_dataset=Dataset.from_list(prompts),
        args=DistillationConfig(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=config.training.batch,
            max_completion_length=config.rollout.max_new_tokens,
            learning_rate=config.optimizer.lr,
            warmup_steps=min(steps // 4, config.optimizer.warmup_steps),
            lr_scheduler_type="linear",
            weight_decay=config.optimizer.weight_decay,
            max_grad_norm=config.optimizer.clip,
            beta=1.0,
            temperature=config.rollout.temperature,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            seed=seed,
        ),
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    lengths = [row[LENGTH] for row in trainer.state.log_history if LENGTH in row]
    trainer.save_model(str(folder / "student"))
    tokens = sum(lengths) * config.training.batch
    return {"steps": len(lengths), "tokens": tokens, "seconds": seconds}


LENGTH = "completions/mean_length"


def demo(steps: int = 64) -> tuple[Any, Any]:
    from rich.console import Console

    from flows.demo import build

    return build(Console(), [f"training.steps={steps}"])


def held_out(student: Path) -> dict[str, Any]:
    """By plain transformers, in this process."""
    from engine.evaluation import evaluate
    from engine.preflight import check

    config, files = demo()
    prompts = check(config).evaluation
    figures = evaluate(
        student, files.teacher, prompts, max_new_tokens=config.rollout.max_new_tokens
    )
    return asdict(figures)


if __name__ == "__main__":
    main()
