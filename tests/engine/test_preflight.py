"""Each wrong input is found before a worker starts, and explained."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import ConfigError, RunConfig, parse
from engine.preflight import Inputs, check, check_address
from tests.conftest import PADDED_IDS, POSITIONS, build_tokenizer, save_model


def jsonl(path: Path, *rows: dict) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def config(tmp_path, tiny_student, tiny_teacher, monkeypatch) -> Callable[..., RunConfig]:
    """A right configuration, with changes by table."""
    # Elsewhere this may name a server.
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    prompts = jsonl(tmp_path / "p.jsonl", {"text": "1+1="}, {"text": "2+2="}, {"text": "10+20="})
    evaluation = jsonl(tmp_path / "e.jsonl", {"text": "3+3=", "answer": "6"})
    right = {
        "student": {"model": str(tiny_student)},
        "teacher": {"model": str(tiny_teacher)},
        "prompts": {"path": prompts},
        "evaluation": {"path": evaluation},
        "training": {"steps": 1},
        "rollout": {"max_new_tokens": 8},
    }

    def changed(**tables: dict) -> RunConfig:
        return parse(
            right | {name: right.get(name, {}) | table for name, table in tables.items()}, "test"
        )

    return changed


@pytest.fixture
def copied(tmp_path) -> Callable[[Path], Path]:
    """A copy of a model's folder, to be spoilt."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / f"copy-of-{folder.name}"))

    return copy


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as error:
        check(config)
    return str(error.value)


def texts(inputs: Inputs) -> tuple[list[str], list[str]]:
    return [p.text for p in inputs.prompts], [p.text for p in inputs.evaluation]


def test_right_inputs_are_found(config, tiny_student, tiny_teacher, tiny_tokenizer):
    inputs = check(config())
    assert (inputs.student, inputs.teacher) == (tiny_student, tiny_teacher)
    assert texts(inputs) == (["1+1=", "2+2=", "10+20="], ["3+3="])
    assert inputs.vocabulary == len(tiny_tokenizer), "without the padded rows of the embedding"
    assert (inputs.skipped, inputs.held_out) == (0, 0)
    assert inputs.longest_prompt == 6


# Models


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_model_folder_that_is_not_there_is_named(config, tmp_path, who):
    missing = str(tmp_path / "nowhere")
    assert refused(config(**{who: {"model": missing}})) == f"{missing}: no such model folder"


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_named(config, who):
    # Tests are offline, so that the hub gives us nothing.
    message = refused(config(**{who: {"model": "nobody/has-this-model"}}))
    assert message.startswith("nobody/has-this-model: neither a folder here nor a model")


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_folder_that_is_no_model_is_named(config, tmp_path, who):
    (tmp_path / "empty").mkdir()
    message = refused(config(**{who: {"model": str(tmp_path / "empty")}}))
    assert message.startswith(f"{tmp_path}/empty: the folder has no config.json")


def test_a_model_without_tokenizer_is_named(config, copied, tiny_student):
    folder = copied(tiny_student)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert refused(config(student={"model": str(folder)})).startswith(f"{folder}: the tokenizer")


@pytest.mark.parametrize(
    ("characters", "differing"),
    [
        ("abcdefg", 47),  # others are missing
        # The same tokens, and two ids changed places.
        ("bacdefghijklmnopqrstuvwxyz0123456789 \n.,:;?!+-*/=()\\{}", 2),
    ],
)
def test_a_teacher_with_another_vocabulary_is_refused(config, tmp_path, characters, differing):
    teacher = save_model(tmp_path / "other", build_tokenizer(characters), seed=3)
    message = refused(config(teacher={"model": str(teacher)}))
    assert f"different tokenizers: {differing} tokens differ" in message
    assert f"teacher {teacher}" in message
    assert "take one of the same family" in message


def test_a_teacher_that_splits_text_differently_is_refused(config, copied, tiny_teacher):
    folder = copied(tiny_teacher)
    path = folder / "tokenizer.json"
    edit(path, normalizer={"type": "Lowercase"})
    message = refused(config(teacher={"model": str(folder)}))
    assert "have tokenizers that split 'Hello, world!' differently" in message


def test_a_teacher_that_may_end_with_an_id_that_does_not_stop_the_student_is_refused(
    config, copied, tiny_teacher, tiny_student
):
    # As a base model for a student, and an instructed one for a teacher.
    teacher = copied(tiny_teacher)
    edit(teacher / "generation_config.json", eos_token_id=[0, 2])
    message = refused(config(teacher={"model": str(teacher)}))
    assert "ends a response with ids [2]" in message
    assert "with [0, 2]" in message
    assert "generation_config.json" in message
    # A student that stops at more than the teacher's ids learns to end all the same.
    student = copied(tiny_student)
    edit(student / "generation_config.json", eos_token_id=[0, 2])
    check(config(student={"model": str(student)}, teacher={"model": str(teacher)}))
    check(config(student={"model": str(student)}))


def test_a_teacher_whose_tokenizer_ends_otherwise_is_refused(config, copied, tiny_teacher):
    teacher = copied(tiny_teacher)
    (teacher / "generation_config.json").unlink()
    edit(teacher / "tokenizer_config.json", eos_token="<|endoftext|>")
    assert "with [0]" in refused(config(teacher={"model": str(teacher)}))


def test_more_ids_than_rows_of_the_embedding_are_refused(config, copied, tiny_student):
    folder = copied(tiny_student)
    edit(folder / "config.json", vocab_size=57)
    message = refused(config(student={"model": str(folder)}))
    assert f"student {folder}: the tokenizer has 58 ids, the model only 57" in message


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_responses_that_may_exceed_the_positions_of_a_model_are_refused(
    config, copied, request, who
):
    folder = copied(request.getfixturevalue(f"tiny_{who}"))
    edit(folder / "config.json", max_position_embeddings=100)
    model = {who: {"model": str(folder)}}
    # The longest prompt has 6 tokens.
    check(config(**model, rollout={"max_new_tokens": 94}))
    message = refused(config(**model, rollout={"max_new_tokens": 95}))
    assert f"{who} {folder}: reads at most 100 tokens" in message
    assert "longest prompt (6)" in message
    assert "make 101" in message


def test_the_longest_prompt_may_be_a_held_out_one(config, tmp_path):
    path = jsonl(tmp_path / "e2.jsonl", {"text": "1" * 20})
    new = POSITIONS - 19
    message = refused(config(evaluation={"path": path}, rollout={"max_new_tokens": new}))
    assert "longest prompt (20)" in message


# Prompts


def test_an_empty_prompt_file_is_refused(config, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    path = str(tmp_path / "empty.jsonl")
    assert refused(config(prompts={"path": path})) == f"{path}: the prompt file is empty"
    assert refused(config(evaluation={"path": path})) == f"{path}: the prompt file is empty"


def test_a_prompt_that_is_too_long_is_refused_or_skipped_and_counted(config):
    message = refused(config(prompts={"max_tokens": 5}))
    assert "row 3" in message
    assert "6 tokens, more than prompts.max_tokens = 5" in message
    inputs = check(config(prompts={"max_tokens": 5, "too_long": "skip"}))
    assert texts(inputs)[0] == ["1+1=", "2+2="]
    assert inputs.skipped == 1


def test_prompts_that_are_evaluated_on_are_left_out_of_training_and_counted(config, tmp_path):
    path = jsonl(tmp_path / "e2.jsonl", {"text": "2+2="}, {"text": "3+3="}, {"text": "1+1="})
    inputs = check(config(evaluation={"path": path}))
    assert texts(inputs) == (["10+20="], ["2+2=", "3+3=", "1+1="])
    assert inputs.held_out == 2
    inputs = check(config(evaluation={"path": path, "limit": 2}))
    assert texts(inputs) == (["1+1=", "10+20="], ["2+2=", "3+3="])


def test_a_run_whose_every_prompt_is_evaluated_on_is_refused(config, tmp_path):
    path = jsonl(tmp_path / "all.jsonl", {"text": "1+1="})
    both = {"prompts": {"path": path}, "evaluation": {"path": path}}
    assert "every prompt is also in" in refused(config(**both))


# The rest


@pytest.mark.parametrize(
    ("estimator", "cache"),
    [
        ("forward_kl", "teacher_top_k"),
        ("reverse_kl", "student_top_k"),
        ("jsd", "student_top_k"),
        ("reverse_kl", "top_k_tail"),
    ],
)
def test_a_top_k_beyond_the_vocabulary_is_refused(config, tiny_tokenizer, estimator, cache):
    def top(k: int) -> RunConfig:
        return config(estimator={"type": estimator, "cache": {"type": cache, "k": k}})

    check(top(58))
    message = refused(top(59))
    assert "estimator.cache.k = 59 is larger than the vocabulary of 58 ids" in message
    assert len(tiny_tokenizer) + PADDED_IDS > 59, "the padded rows are no ids"


@pytest.fixture
def closed_port():
    """A port of this machine that nobody listens on: bound, and not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def open_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_tracking_server_that_nobody_runs_is_refused(config, closed_port):
    message = refused(config(tracking={"uri": f"http://127.0.0.1:{closed_port}/mlflow"}))
    assert f"tracking.uri: nobody answers at http://127.0.0.1:{closed_port} " in message
    assert "start the server, or unset tracking.uri" in message


def test_a_tracking_server_that_answers_is_accepted(config, open_port):
    check(config(tracking={"uri": f"http://127.0.0.1:{open_port}"}))


def test_a_tracking_server_named_by_the_environment_is_tried_and_its_password_kept(
    config, closed_port, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hunter2@127.0.0.1:{closed_port}")
    message = refused(config())
    assert f"nobody answers at http://127.0.0.1:{closed_port} " in message
    assert "hunter2" not in message
    assert "me:" not in message


@pytest.mark.parametrize(
    "uri",
    [
        "http://me:hunter2@127.0.0.1:port",
        "http://me:hunter2#more@127.0.0.1",  # what follows # is no part of the address
        "http://127.0.0.1:99999",
    ],
)
def test_an_address_without_a_valid_port_is_refused_and_its_password_kept(uri):
    with pytest.raises(ConfigError, match="not a valid address; write http://host:port") as error:
        check_address("tracking.uri", uri)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("uri", ["", "sqlite:///x.db", "databricks", "/a/folder", "file:///a"])
def test_addresses_of_no_server_pass(uri):
    check_address("tracking.uri", uri)


def test_a_family_that_cannot_work_is_named_with_the_reason(config, copied, tiny_student):
    folder = copied(tiny_student)
    edit(folder / "config.json", model_type="t5", architectures=["T5ForConditionalGeneration"])
    message = refused(config(student={"model": str(folder)}))
    assert "models of the family t5 can't be used: they have an encoder" in message
