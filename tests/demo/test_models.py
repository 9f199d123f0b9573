"""The demo's models: tiny recipes, the same code."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from demo import ledger, models
from demo.models import DemoFiles, Lessons, Recipe, Shape, prepare

SHAPE = Shape(hidden=16, heads=2, kv_heads=1, ffn=16, layers=1, init_std=0.1)
LESSONS = Lessons(
    examples=16,
    long_share=0.0,
    steps=2,
    tokens=512,
    muon_rate=0.02,
    adamw_rate=4e-3,
    decay=0.1,
)
TINY = Recipe(
    teacher=SHAPE,
    teacher_lessons=replace(LESSONS, examples=None),
    student=SHAPE,
    student_lessons=LESSONS,
    baseline_lessons=LESSONS,
    prompts=20,
)


class Reports(list[tuple[str, float]]):
    """Collects progress."""

    def __call__(self, label: str, fraction: float) -> None:
        self.append((label, fraction))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoFiles, Reports]:
    directory = tmp_path_factory.mktemp("demo")
    reports = Reports()
    return directory, prepare(directory, reports, TINY), reports


def stamps(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def test_models_are_folders_that_transformers_loads(
    built: tuple[Path, DemoFiles, Reports],
) -> None:
    _, files, _ = built
    for folder in (files.teacher, files.student, files.baseline):
        assert (folder / "model.safetensors").exists()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.vocab_size == len(tokenizer)
        assert model.config.head_dim == models.HEAD_DIM
        assert model.dtype == torch.float32
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_generation_defaults_change_no_distribution(
    built: tuple[Path, DemoFiles, Reports],
) -> None:
    _, files, _ = built
    defaults = GenerationConfig.from_pretrained(files.student)
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (1.0, 1.0, 0)
    tokenizer = AutoTokenizer.from_pretrained(files.student)
    assert defaults.eos_token_id == tokenizer.eos_token_id
    assert defaults.pad_token_id == tokenizer.pad_token_id


def test_prompts_and_evaluation_are_apart(built: tuple[Path, DemoFiles, Reports]) -> None:
    _, files, _ = built
    rows = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (files.prompts, files.evaluation)
    ]
    assert [len(part) for part in rows] == [20, ledger.HELD_OUT]
    training, held_out = ({row["messages"][0]["content"] for row in part} for part in rows)
    assert not training & held_out
    assert len({row["id"] for part in rows for row in part}) == 20 + ledger.HELD_OUT


def test_progress_of_each_model_ends_at_one(built: tuple[Path, DemoFiles, Reports]) -> None:
    _, _, reports = built
    for label in ("teacher", "student", "baseline"):
        fractions = [fraction for name, fraction in reports if name == label]
        assert fractions == [0.5, 1.0]


def test_a_second_call_builds_nothing(built: tuple[Path, DemoFiles, Reports]) -> None:
    directory, files, _ = built
    before = stamps(directory)
    reports = Reports()
    assert prepare(directory, reports, TINY) == files
    assert reports == []
    assert stamps(directory) == before


def test_only_the_missing_model_is_built_again(
    built: tuple[Path, DemoFiles, Reports],
) -> None:
    directory, files, _ = built
    changed = replace(TINY, baseline_lessons=replace(LESSONS, steps=3))
    reports = Reports()
    again = prepare(directory, reports, changed)
    assert {label for label, _ in reports} == {"baseline"}
    assert (again.teacher, again.student) == (files.teacher, files.student)
    assert again.baseline != files.baseline


def test_a_name_changes_with_the_recipe(tmp_path: Path) -> None:
    names = models._files(tmp_path, TINY)
    reseeded = models._files(tmp_path, replace(TINY, seed=1))
    assert names.teacher != reseeded.teacher
    assert names.prompts != reseeded.prompts
    assert names.evaluation == reseeded.evaluation


def test_a_write_that_is_cut_short_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    def cut_short(path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text("{")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models._write_whole(tmp_path / "model", cut_short)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_build_left_is_not_taken_for_whole(tmp_path: Path) -> None:
    left = tmp_path / ".unfinished-killed" / "model"
    left.mkdir(parents=True)
    (left / "config.json").write_text("{")
    models._write_whole(tmp_path / "model", lambda path: path.mkdir())
    assert list((tmp_path / "model").iterdir()) == []


def test_a_folder_that_another_process_finished_first_is_kept(tmp_path: Path) -> None:
    def overtaken(path: Path) -> None:
        path.mkdir()
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "theirs").touch()

    models._write_whole(tmp_path / "model", overtaken)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["theirs"]


def test_a_worker_that_fails_is_an_error_that_says_what_to_do(
    built: tuple[Path, DemoFiles, Reports],
) -> None:
    directory, files, _ = built
    broken = replace(TINY, teacher=replace(SHAPE, hidden=-1))
    with pytest.raises(RuntimeError, match="traceback is above"):
        prepare(directory, Reports(), broken)
    assert list(directory.glob("teacher-*")) == [files.teacher]


def test_batches_hold_every_example_once_and_keep_to_their_size() -> None:
    examples = [([0] * 3, [1] * length) for length in (40, 2, 9, 2, 30, 9, 5, 200)]
    batches = models._split_by_length(examples, tokens=100)
    assert sorted(example for batch in batches for example in batch) == sorted(examples)
    for batch in batches:
        # The last example alone is longer than a batch may be, and is still learnt from.
        assert len(batch) == 1 or max(map(models._length, batch)) * len(batch) <= 100


def test_loss_is_the_mean_over_response_tokens_of_each_example_alone() -> None:
    tokenizer = ledger.make_tokenizer()
    model = models._new_model(SHAPE, tokenizer, seed=0)
    problems = [ledger.Problem(1, (("u", 2),)), ledger.Problem(5, (("a", 4), ("b", -9)))]
    batch = ledger.encode(tokenizer, problems)
    together = models._loss(model, batch, tokenizer.pad_token_id)
    alone = [models._loss(model, [example], tokenizer.pad_token_id) for example in batch]
    # 13 and 20 response tokens
    assert together.item() == pytest.approx((13 * alone[0] + 20 * alone[1]).item() / 33, rel=1e-5)
