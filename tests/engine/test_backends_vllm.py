"""The fast sampler against plain forward passes of the same model.

vLLM's engine is global to its process and pins it to a core, so one process is started for this
module. It drives one engine through a scenario and hands back everything that was emitted; the
tests compare.
"""

import importlib.util
import multiprocessing
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from engine.backends import Request, vllm_environment
from engine.config import Poisson
from engine.models import Language
from engine.rollout import RolloutWorker
from engine.schema import ROLLOUT, validate
from engine.weights import publish
from tests.engine.tiny import (
    Driven,
    Response,
    language,
    logprobs_across_swap,
    logprobs_of,
    prompt_batch,
    random_ids,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)

SLOTS = 3
TEMPERATURE = 0.7
PROMPT_LENGTHS = (1, 23, 4, 60, 2, 11, 35, 7)
RESPONSE_LENGTHS = (9, 1, 30, 4, 2, 17, 25, 12)
STOP_IDS = [10, 27]  # neither is the model's own end of sequence
GREEDY = 5
LONG = 40  # tokens of a response that is still running at a swap
BEFORE_SWAP = 4


@dataclass
class Record:
    """What happened in one phase of the scenario."""

    requests: dict[int, Request]
    responses: dict[int, Response]
    steps: list[list[int]]
    emitted_before: dict[int, int] = field(default_factory=dict)
    """Tokens of each response when weights were loaded; only those that had begun."""
    swap_step: int = 0


@dataclass
class Scenario:
    """All phases, in order."""

    mixed: Record
    swapped: Record
    reprefilled: Record
    back: Record
    batch: bytes


def request(ticket: int, prompt: int, response: int, greedy: bool = False) -> Request:
    return Request(ticket, random_ids(prompt, ticket, 50), response, ticket, greedy)


def play(student_folder: Path, teacher_folder: Path, result: Path) -> None:
    """Runs in the engine's own process."""
    cores = sorted(os.sched_getaffinity(0))[:1]
    os.environ |= vllm_environment(cores, memory_gib=0.05)
    from engine.backends.vllm import VLLMSampler

    student, teacher = language(student_folder), language(teacher_folder)
    sampler = VLLMSampler(
        str(student_folder),
        student.vocabulary,
        STOP_IDS,
        TEMPERATURE,
        SLOTS,
        max_length=128,
        memory_gib=0.05,
        dtype=torch.float32,
        trust_remote_code=False,
        seed=0,
    )
    original = publish(student.tensors().items(), 0, torch.float32)
    other = publish(teacher.tensors().items(), 1, torch.float32)

    scenario = Scenario(
        mixed=_mixed(Driven(sampler)),
        swapped=_swapped(Driven(sampler), other),
        reprefilled=_swapped(Driven(sampler), original, reprefill=True),
        back=_back(Driven(sampler), original),
        batch=_batch(sampler, student),
    )
    with result.open("wb") as file:
        pickle.dump(scenario, file)


def _mixed(driven: Driven) -> Record:
    """More requests than slots, of all lengths, some of which come late."""
    requests = [
        request(ticket, prompt, response, greedy=ticket == GREEDY)
        for ticket, (prompt, response) in enumerate(
            zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)
        )
    ]
    driven.add(*requests[:5])
    driven.step(5)
    driven.add(*requests[5:])
    driven.drain()
    return Record(driven.requests, driven.responses, driven.steps)


def _swapped(driven: Driven, weights, reprefill: bool = False) -> Record:
    """Three responses in flight and one that waits, when weights are loaded; one comes after."""
    driven.add(*(request(ticket, 5 + 6 * ticket, LONG) for ticket in range(10, 14)))
    driven.step(BEFORE_SWAP)
    emitted = {t: len(r.ids) for t, r in driven.responses.items() if r.ids and not r.reason}
    swap_step = len(driven.steps)
    driven.sampler.load(weights, reprefill)
    driven.add(request(14, 9, 20))
    driven.drain()
    return Record(driven.requests, driven.responses, driven.steps, emitted, swap_step)


def _back(driven: Driven, weights) -> Record:
    """The first weights again, loaded twice."""
    driven.sampler.load(weights)
    driven.sampler.load(weights)
    driven.add(request(20, 17, 20), request(21, 3, 20))
    driven.drain()
    return Record(driven.requests, driven.responses, driven.steps)


def _batch(sampler, student: Language) -> bytes:
    """A ROLLOUT batch of a worker with this sampler."""
    prompts = prompt_batch([random_ids(length, length, 50) for length in PROMPT_LENGTHS])
    worker = RolloutWorker(sampler, student.decode, Poisson(n=32), 12, seed=0)
    batch, _ = worker.generate(prompts)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()


@pytest.fixture(scope="module")
def scenario(tiny_student, tiny_teacher, tmp_path_factory) -> Scenario:
    result = tmp_path_factory.mktemp("vllm") / "scenario.pickle"
    arguments = (tiny_student, tiny_teacher, result)
    process = multiprocessing.get_context("spawn").Process(target=play, args=arguments)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")  # read when the process starts
        process.start()
    process.join(240)
    if process.is_alive():
        process.kill()
        pytest.fail("vLLM's process didn't end")
    assert process.exitcode == 0, "vLLM's process failed; see its output"
    with result.open("rb") as file:
        return pickle.load(file)


@pytest.fixture(scope="module")
def student(tiny_student) -> Language:
    return language(tiny_student)


@pytest.fixture(scope="module")
def teacher(tiny_teacher) -> Language:
    return language(tiny_teacher)


def difference(record: Record, ticket: int, model: Language, first: int = 0) -> float:
    """Greatest difference over all ids, and tokens from `first` on, from a fresh forward pass of
    this model."""
    ids = record.responses[ticket].ids
    prompt = record.requests[ticket].prompt_ids
    expected = logprobs_of(model.model, prompt, ids, model.vocabulary, TEMPERATURE)
    return (record.responses[ticket].logprobs - expected)[first:].abs().max().item()


def test_recorded_logprobs_are_those_of_the_reference_under_continuous_batching(scenario, student):
    record = scenario.mixed
    assert {len(tickets) for tickets in record.steps} >= {SLOTS, 1}  # batches came and went
    assert max(difference(record, ticket, student) for ticket in record.responses) < 1e-4


def test_no_more_responses_run_than_there_are_slots_and_none_is_forgotten(scenario):
    record = scenario.mixed
    assert max(len(tickets) for tickets in record.steps) == SLOTS
    assert all(response.reason for response in record.responses.values())


def test_a_response_ends_at_its_first_stop_id_or_at_its_length(scenario):
    records = (scenario.mixed, scenario.swapped, scenario.back)
    pairs = [(r.requests[t], r.responses[t]) for r in records for t in r.responses]
    for asked, response in pairs:
        stops = [token in STOP_IDS for token in response.ids]
        if response.reason == "stop":
            assert stops == [False] * (len(stops) - 1) + [True]
        else:
            assert response.reason == "length"
            assert stops == [False] * asked.max_new_tokens
    assert {response.reason for _, response in pairs} == {"stop", "length"}


def test_greedy_takes_the_likeliest_id_while_others_sample(scenario):
    responses = scenario.mixed.responses
    likeliest = {t: r.logprobs.argmax(-1).tolist() == r.ids for t, r in responses.items()}
    assert likeliest[GREEDY]
    assert not all(likeliest.values())


def test_ids_that_the_tokenizer_does_not_have_are_neither_sampled_nor_counted(scenario, student):
    for record in (scenario.mixed, scenario.swapped):
        for response in record.responses.values():
            assert max(response.ids) < student.vocabulary
            assert response.logprobs.shape[1] == student.vocabulary
            assert response.logprobs.logsumexp(-1).abs().max() < 1e-5


def test_loading_weights_neither_restarts_nor_drains_what_is_in_flight(scenario):
    record = scenario.swapped
    in_flight = {t for t, emitted in record.emitted_before.items()}
    assert len(in_flight) >= 2
    assert in_flight <= set(record.steps[record.swap_step])  # each goes on in the very next step
    for ticket in in_flight:
        emissions = sum(ticket in tickets for tickets in record.steps)
        assert emissions == len(record.responses[ticket].ids)


def test_after_a_swap_the_new_weights_meet_the_old_keys_and_values(scenario, student, teacher):
    record = scenario.swapped
    for ticket, swap in record.emitted_before.items():
        ids = record.responses[ticket].ids
        assert len(ids) > swap  # there are tokens after the swap to compare
        expected = logprobs_across_swap(
            student.model,
            teacher.model,
            record.requests[ticket].prompt_ids,
            ids,
            swap,
            student.vocabulary,
            TEMPERATURE,
        )
        assert (record.responses[ticket].logprobs - expected).abs().max() < 1e-4
        # The test can tell: keys and values computed anew would give something else.
        assert difference(record, ticket, teacher, first=swap) > 1e-2


def test_with_reprefill_responses_in_flight_go_on_as_the_new_models_own(scenario, student, teacher):
    record = scenario.reprefilled  # back from the teacher's weights to the student's
    assert len(record.emitted_before) >= 2
    for ticket, swap in record.emitted_before.items():
        response = record.responses[ticket]
        assert len(response.ids) > swap
        assert sum(ticket in tickets for tickets in record.steps) == len(response.ids)
        expected = logprobs_of(
            teacher.model,
            record.requests[ticket].prompt_ids,
            response.ids,
            teacher.vocabulary,
            TEMPERATURE,
        )
        assert (response.logprobs - expected)[:swap].abs().max() < 1e-4
        assert difference(record, ticket, student, first=swap) < 1e-4


def test_responses_that_begin_after_a_swap_are_the_new_models_own(scenario, teacher):
    record = scenario.swapped
    began_after = set(record.responses) - set(record.emitted_before)
    late = {t for t in began_after if all(t not in s for s in record.steps[: record.swap_step])}
    assert late >= {14}
    assert max(difference(record, ticket, teacher) for ticket in late) < 1e-4


def test_weights_may_be_loaded_again_and_again(scenario, student):
    record = scenario.back
    assert max(difference(record, ticket, student) for ticket in record.responses) < 1e-4


def test_a_workers_cache_holds_the_samplers_own_logprobs(scenario, student):
    batch = pa.ipc.open_stream(scenario.batch).read_next_batch()
    validate(batch, ROLLOUT)
    assert sorted(batch["ticket"].to_pylist()) == list(range(len(PROMPT_LENGTHS)))
    for row in batch.to_pylist():
        expected = logprobs_of(
            student.model, row["prompt_ids"], row["response_ids"], student.vocabulary, TEMPERATURE
        ).numpy()
        columns = (row["response_ids"], row["sampler_logprobs"], row["cache_ids"])
        tokens = zip(*columns, row["cache_logprobs"], expected, strict=True)
        for token, logprob, ids, logprobs, true in tokens:
            assert logprob == pytest.approx(true[token], abs=1e-4)
            np.testing.assert_allclose(logprobs, true[ids], atol=1e-4)
            assert set(np.flatnonzero(true > np.log(1 / 32) + 1e-3)) <= set(ids)  # n p > 1
