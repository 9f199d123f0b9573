"""Every family of models: sampled before, across and after a swap of weights, trained, saved,
restored and loaded by others; or refused.

What plain transformers computes in eager attention is the truth. vLLM's part takes a process for
each family, and minutes: `make families-test` runs it.
"""

import dataclasses
import importlib.util
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.canary import WrongSamplerError
from engine.config import ConfigError, Dense, ReverseKL, Sampled
from engine.learner import LearnerWorker
from engine.models import check_family
from engine.names import WeightsMismatchError
from engine.rollout import RolloutWorker
from engine.scoring import TeacherWorker
from engine.weights import Weights, publish
from tests.engine.families import (
    FAMILIES,
    REFUSED,
    REFUSED_BY_VLLM,
    ROUGHER,
    apart,
    compare,
    folders,
    plain,
    rehearse,
    sample,
    sampler_of,
)
from tests.engine.tiny import language, prompt_batch, random_ids, rollout_batch, run_config

TOLERANCE = 1e-4
PROMPTS = [random_ids(length, length, 50) for length in (3, 17, 8)]
RESPONSES = [random_ids(length, 90 + length, 50) for length in (9, 2, 14)]
IDS = torch.tensor([random_ids(24, 7, 50)])

# One of each kind; the others are left to `make families-test`, for they take their time together.
CORE = {"llama twice", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "phi", "phi3", "olmo"}
CORE |= {"granite", "starcoder2", "gpt_neox", "gptj", "gpt2", "bloom", "falcon", "cohere2"}
CORE |= {"smollm3", "qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"}


def each(families: Iterable[str]) -> Any:
    slow = pytest.mark.families
    cases = [f if f in CORE else pytest.param(f, marks=slow) for f in families]
    return pytest.mark.parametrize("family", cases)


needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tiny_tokenizer):
    """The two folders of a family, made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(family: str) -> tuple[Path, Path]:
        if family not in made:
            made[family] = folders(family, tmp_path_factory.mktemp("family"), tiny_tokenizer)
        return made[family]

    return of


@each(FAMILIES)
def test_the_reference_sampler_is_right_before_across_and_after_a_swap(family, pair):
    outcome = compare(sample("hf", *pair(family)), *pair(family))
    assert max(dataclasses.astuple(outcome)) < TOLERANCE


@each(FAMILIES)
def test_a_learner_saves_restores_and_goes_on_bit_for_bit(family, pair, tmp_path):
    student_folder, teacher_folder = pair(family)
    rollouts = rollout_batch(language(student_folder), PROMPTS, RESPONSES, Dense())
    batch, _ = TeacherWorker(language(teacher_folder), 1.0, 4096).score([rollouts], Dense())
    settings = {"estimator": ReverseKL(cache=Dense()).model_dump(), "staleness": {"max": 9}}

    def begin() -> tuple[LearnerWorker, Any]:
        student = language(student_folder)
        config = run_config(student_folder, teacher_folder, **settings)
        return LearnerWorker(student, torch.float32, config), student

    def step(learner: LearnerWorker) -> dict[str, torch.Tensor]:
        learner.load([batch], [[0, 1, 2]], learner.version)
        assert learner.step().metrics["policy/ratio_deviation"] < 1e-3
        return dict(learner.published()[0].tensors())

    learner, student = begin()
    trained = step(learner)
    learner.save(tmp_path, [], [])
    after = step(learner)
    other, _ = begin()
    weights, _, _ = other.restore(tmp_path, 1)
    same(dict(weights.tensors()), trained)
    same(step(other), after)

    # What has been saved is what anybody loads.
    learner.restore(tmp_path, 1)
    with torch.no_grad():
        theirs = plain(tmp_path / "model")(input_ids=IDS).logits
        ours = student.model(input_ids=IDS).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_work_is_refused_with_the_reason(family, tmp_path, tiny_tokenizer):
    folder = REFUSED[family].save(tmp_path, tiny_tokenizer, 1)
    with pytest.raises(ConfigError, match=rf"family \w+ can't be used: .*{REFUSED[family].note}"):
        check_family(folder)


# Faults of a publication


def left_out(named: dict, old: dict, name: str) -> None:
    del named[name]


def swapped_halves(named: dict, old: dict, name: str) -> None:
    named[name] = named[name].roll(len(named[name]) // 2, 0)


def stale(named: dict, old: dict, name: str) -> None:
    named[name] = old[name]


def another_type(named: dict, old: dict, name: str) -> None:
    named[name] = named[name].to(torch.bfloat16)


# After each of these a sampler is fit for the next; `left_out` comes last.
FAULTS = [another_type, swapped_halves, stale]


def faulty(weights: Weights, old: Weights, fault: Any, name: str) -> Weights:
    """The same publication with a fault in one tensor."""
    named = dict(weights.tensors())
    fault(named, dict(old.tensors()), name)
    whole = {n: t for n, t in named.items() if t.dtype == torch.float32}
    rest = {n: t for n, t in named.items() if n not in whole}
    packed = publish(whole.items(), weights.version, torch.float32, weights.canary)
    odd = publish(rest.items(), weights.version, torch.bfloat16)
    return dataclasses.replace(
        packed, entries=packed.entries + odd.entries, buffers=packed.buffers | odd.buffers
    )


def notices(backend: str, old_folder: Path, new_folder: Path, names: list[str]) -> list[str]:
    """What a worker with a response in flight says of faults; it must give nothing away."""
    worker = RolloutWorker(sampler_of(backend, old_folder), str, Sampled(), 100, seed=0)
    old, new = published(old_folder, 0), published(new_folder, 1)
    said = []
    worker.rehearse(old)
    worker.advance(prompt_batch([random_ids(9, 1, 50)]))
    cases = [*itertools.product(FAULTS, names), (left_out, names[0])]
    for version, (fault, name) in enumerate(cases, start=1):
        weights = dataclasses.replace(faulty(new, old, fault, name), version=version)
        with pytest.raises((WrongSamplerError, WeightsMismatchError)) as error:
            worker.advance(None, weights)
        said.append(f"{fault.__name__} {name}: {error.value}")
    return said


def published(folder: Path, version: int) -> Weights:
    model = language(folder)
    canary = model.canary(1.0, 16, torch.float32)
    return publish(model.tensors().items(), version, torch.float32, canary)


FAULTY = {
    "qwen3": ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"],
    "qwen3_moe": ["model.layers.0.mlp.experts.2.up_proj.weight", "lm_head.weight"],
}


@pytest.mark.parametrize("family", FAULTY)
def test_a_faulty_publication_is_noticed_before_a_token_is_given_away(family, pair):
    said = notices("hf", *pair(family), FAULTY[family])
    assert len(said) == 7


@needs_vllm
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("qwen3", marks=pytest.mark.families)])
def test_vllm_notices_a_faulty_publication_before_a_token_is_given_away(family, pair):
    said = apart(notices, "vllm", *pair(family), FAULTY[family])
    assert len(said) == 7
    assert all("student" in text or "rollout.backend=hf" in text or "type" in text for text in said)


# vLLM


@needs_vllm
@pytest.mark.families
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED_BY_VLLM])
def test_vllm_is_right_before_across_and_after_a_swap(family, pair):
    outcome = compare(apart(sample, "vllm", *pair(family)), *pair(family))
    assert max(dataclasses.astuple(outcome)) < ROUGHER.get(family, TOLERANCE)


@needs_vllm
@pytest.mark.families
@pytest.mark.parametrize("family", REFUSED_BY_VLLM)
def test_what_vllm_computes_otherwise_ends_before_the_run_begins(family, pair):
    assert REFUSED_BY_VLLM[family] in apart(rehearse, "vllm", pair(family)[0])
