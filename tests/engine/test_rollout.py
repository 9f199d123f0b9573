"""The rollout worker: what it records of each token, with a scripted sampler and with the real one.

The scripted sampler remembers which weights it held at each token; that is what stamps are compared
with.
"""

import time

import numpy as np
import pyarrow as pa
import pytest
import torch

from engine.backends import Decoded, Request
from engine.config import (
    Dense,
    MultiSample,
    Poisson,
    Sampled,
    StudentTopK,
    TeacherMultiSample,
    TeacherTopK,
    TopKTail,
)
from engine.models import Language
from engine.rollout import SLICE_SECONDS, RolloutWorker
from engine.schema import ROLLOUT, describe, validate
from engine.weights import Weights, publish
from tests.engine.tiny import language, logprobs_of, prompt_batch, random_ids

V = 11
STOP = 2


class ScriptedSampler:
    """Emits given tokens; its logits are a function of ticket, position and weights."""

    def __init__(self, script: dict[int, list[int]], slots: int = 8, one_step_per_slice=False):
        self.script = script
        self.slots = slots
        self.one_step_per_slice = one_step_per_slice
        self.loads: list[int] = []
        self.version = 0
        self.requests: dict[int, Request] = {}
        self.versions: dict[int, list[int]] = {}
        """Version that each token of each ticket was emitted under."""
        self._going: list[int] = []

    @property
    def running(self) -> int:
        return len(self._going)

    def add(self, request: Request) -> None:
        self.requests[request.ticket] = request
        self.versions[request.ticket] = []
        self._going.append(request.ticket)

    def load(self, weights: Weights, reprefill: bool = False) -> None:
        self.loads.append(weights.version)
        self.version = weights.version

    def step(self) -> Decoded:
        if self.one_step_per_slice:
            time.sleep(SLICE_SECONDS)  # no second step fits
        tickets = self._going[: self.slots]
        ids, finished = [], {}
        for ticket in tickets:
            position = len(self.versions[ticket])
            ids.append(self.script[ticket][position])
            self.versions[ticket].append(self.version)
            if ids[-1] == STOP:
                finished[ticket] = "stop"
            elif position + 1 == len(self.script[ticket]):
                finished[ticket] = "length"
        rows = [self.logprobs(t, len(self.versions[t]) - 1, self.version) for t in tickets]
        self._going = [ticket for ticket in self._going if ticket not in finished]
        return Decoded(tickets, torch.tensor(ids), torch.stack(rows), finished)

    @staticmethod
    def logprobs(ticket: int, position: int, version: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(ticket * 10_000 + position * 100 + version)
        return torch.randn(V, generator=generator).log_softmax(-1)


def worker_of(sampler, cache=None, seed: int = 0, max_new_tokens: int = 20) -> RolloutWorker:
    decode = lambda ids: " ".join(map(str, ids))  # noqa: E731
    return RolloutWorker(sampler, decode, cache or Sampled(), max_new_tokens, seed)


def weights(version: int) -> Weights:
    return publish([("w", torch.zeros(1))], version, torch.float32)


def prompts(*tickets: int, **columns) -> pa.RecordBatch:
    batches = [prompt_batch([[5, 6, 7]], ticket, **columns) for ticket in tickets]
    return pa.concat_batches(batches)


def stamps(row: dict) -> list[int]:
    return [run["version"] for run in row["version_runs"] for _ in range(run["length"])]


def finish(worker: RolloutWorker, sampler: ScriptedSampler) -> list[dict]:
    rows = []
    while sampler.running:
        batch, _ = worker.advance(None)
        rows += validate(batch, ROLLOUT).to_pylist()
    return rows


def advance_until(worker, sampler, ticket: int, tokens: int) -> list[dict]:
    """Slices until the ticket has this many tokens."""
    rows = []
    while len(sampler.versions[ticket]) < tokens:
        batch, _ = worker.advance(None)
        rows += batch.to_pylist()
    return rows


# Versions


def test_each_token_carries_the_version_that_sampled_it_across_swaps():
    script = {0: [5, 6, 7, 8, 9, 10], 1: [5, 6, STOP], 2: [7, 8, 9]}
    sampler = ScriptedSampler(script, one_step_per_slice=True)
    worker = worker_of(sampler)
    rows = worker.advance(prompts(0, 1))[0].to_pylist()
    rows += advance_until(worker, sampler, 0, 2)
    rows += worker.advance(None, weights(3))[0].to_pylist()
    rows += advance_until(worker, sampler, 0, 4)
    rows += worker.advance(prompts(2), weights(4))[0].to_pylist()
    rows += finish(worker, sampler)

    by_ticket = {row["ticket"]: row for row in rows}
    assert sorted(by_ticket) == [0, 1, 2]
    for ticket, row in by_ticket.items():
        assert row["response_ids"] == script[ticket]
        assert stamps(row) == sampler.versions[ticket]
        expected = [
            ScriptedSampler.logprobs(ticket, position, version)[script[ticket][position]].item()
            for position, version in enumerate(sampler.versions[ticket])
        ]
        assert row["sampler_logprobs"] == expected
    assert set(stamps(by_ticket[0])) == {0, 3, 4}  # it was in flight through both swaps
    assert set(stamps(by_ticket[2])) == {4}


def test_version_runs_are_as_few_as_there_were_versions():
    sampler = ScriptedSampler({0: [5, 6, 7, 8]}, one_step_per_slice=True)
    worker = worker_of(sampler)
    worker.advance(prompts(0))
    advance_until(worker, sampler, 0, 2)
    (row,) = worker.advance(None, weights(1))[0].to_pylist() + finish(worker, sampler)
    assert [run["version"] for run in row["version_runs"]] == [0, 1]
    meta = describe(pa.RecordBatch.from_pylist([row], ROLLOUT))[0]
    assert (meta.oldest_version, meta.newest_version) == (0, 1)


def test_publishing_is_not_applying():
    sampler = ScriptedSampler({0: [5, 6, 7, 8]}, one_step_per_slice=True)
    worker = worker_of(sampler)
    _, report = worker.advance(prompts(0))
    published = weights(1)  # and nobody has handed it to the worker
    advance_until(worker, sampler, 0, 2)
    assert (report.version, worker.version, sampler.loads) == (0, 0, [])
    _, report = worker.advance(None, published)
    assert (report.version, sampler.loads) == (1, [1])


def test_weights_of_the_version_that_is_applied_are_not_applied_again():
    sampler = ScriptedSampler({0: [5, STOP], 1: [5, STOP]})
    worker = worker_of(sampler)
    worker.advance(prompts(0), weights(1))
    _, report = worker.advance(prompts(1), weights(1))
    assert sampler.loads == [1]
    assert report.version == 1


def test_weights_are_applied_to_an_idle_worker():
    sampler = ScriptedSampler({})
    worker = worker_of(sampler)
    _, report = worker.advance(None, weights(7))
    assert (report.version, sampler.loads) == (7, [7])


# What is recorded of a response


def test_an_empty_slice_gives_an_empty_valid_batch():
    worker = worker_of(ScriptedSampler({}))
    batch, report = worker.advance(None)
    assert validate(batch, ROLLOUT).num_rows == 0
    assert (report.metas, report.running, report.sampled_tokens) == ([], 0, 0)


def test_responses_of_one_two_and_the_most_tokens_are_recorded_whole():
    script = {0: [STOP], 1: [5], 2: [5, STOP], 3: [5, 6], 4: list(range(3, 11)) * 3}
    worker = worker_of(ScriptedSampler(script), max_new_tokens=24)
    batch, report = worker.generate(prompts(0, 1, 2, 3, 4))
    rows = {row["ticket"]: row for row in validate(batch, ROLLOUT).to_pylist()}
    assert {ticket: row["response_ids"] for ticket, row in rows.items()} == script
    reasons = {ticket: row["finish_reason"] for ticket, row in rows.items()}
    assert reasons == {0: "stop", 1: "length", 2: "stop", 3: "length", 4: "length"}
    assert report.sampled_tokens == sum(map(len, script.values()))
    assert [meta.response_tokens for meta in report.metas] == [
        len(script[meta.ticket]) for meta in report.metas
    ]


def test_generate_returns_every_prompt_once_with_its_own_columns():
    tickets = range(-5, 0)
    sampler = ScriptedSampler({t: [5] * (6 + t) + [STOP] for t in tickets}, slots=2)
    batch, report = worker_of(sampler).generate(prompts(*tickets, answers=["5"], attempt=2))
    rows = validate(batch, ROLLOUT).to_pylist()
    assert sorted(row["ticket"] for row in rows) == list(tickets)
    assert all(row["attempt"] == 2 and row["prompt_ids"] == [5, 6, 7] for row in rows)
    assert [(meta.ticket, meta.row) for meta in report.metas] == [
        (row["ticket"], index) for index, row in enumerate(rows)
    ]
    assert report.running == 0


def test_generate_refuses_a_worker_with_responses_in_flight():
    sampler = ScriptedSampler({0: [5] * 9, 1: [5]}, one_step_per_slice=True)
    worker = worker_of(sampler)
    worker.advance(prompts(0))
    with pytest.raises(RuntimeError, match="in flight"):
        worker.generate(prompts(1))


@pytest.mark.parametrize(
    ("answer", "correct"), [("5 6", True), ("5 7", False), (None, None)], ids=str
)
def test_the_verifier_judges_the_response_where_there_is_an_answer(answer, correct):
    worker = worker_of(ScriptedSampler({0: [5, 6]}))
    batch, report = worker.generate(prompts(0, answers=[answer]))
    assert batch["correct"].to_pylist() == [correct]
    assert report.metas[0].correct is correct


def test_the_verifier_is_the_one_that_the_prompt_names():
    worker = worker_of(ScriptedSampler({0: [5, 6]}))
    batch, _ = worker.generate(prompts(0, answers=["6"], verifier="number"))
    assert batch["correct"].to_pylist() == [True]


# Seeds


def seeds(tickets, seed: int = 0, attempt: int = 0) -> list[int]:
    sampler = ScriptedSampler({ticket: [STOP] for ticket in tickets})
    worker_of(sampler, seed=seed).generate(prompts(*tickets, attempt=attempt))
    return [sampler.requests[ticket].seed for ticket in tickets]


def test_a_responses_seed_depends_on_run_ticket_and_attempt_and_on_nothing_else():
    tickets = [-2, -1, 0, 1, 2]
    assert seeds(tickets) == seeds(tickets)
    assert seeds(tickets)[3:] == seeds(tickets[3:])
    everything = seeds(tickets) + seeds(tickets, seed=1) + seeds(tickets, attempt=1)
    assert len(set(everything)) == len(everything)


# Caches, with a real student


@pytest.fixture(scope="module")
def student(tiny_student) -> Language:
    return language(tiny_student)


def generated(student: Language, cache, temperature: float = 1.0) -> list[dict]:
    worker = RolloutWorker(student.sampler(temperature, slots=3), student.decode, cache, 15, seed=0)
    batch, _ = worker.generate(
        prompt_batch([random_ids(length, length, 50) for length in (1, 20, 3, 40, 9)])
    )
    return validate(batch, ROLLOUT).to_pylist()


def truth(student: Language, row: dict, temperature: float = 1.0) -> np.ndarray:
    """[T, V]."""
    return logprobs_of(
        student.model, row["prompt_ids"], row["response_ids"], student.vocabulary, temperature
    ).numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_poisson_cache_holds_ids_of_the_tokens_own_distribution(student, temperature):
    kept = 0
    for row in generated(student, Poisson(n=16, alpha=0.75), temperature):
        true = truth(student, row, temperature)
        for ids, logprobs, expected in zip(
            row["cache_ids"], row["cache_logprobs"], true, strict=True
        ):
            assert len(set(ids)) == len(ids)
            np.testing.assert_allclose(logprobs, expected[ids], atol=1e-4)
            certain = np.flatnonzero(expected > np.log(1 / 16) + 1e-3)  # n p > 1: always kept
            assert set(certain) <= set(ids)
            kept += len(ids)
    assert kept > 0


class ConstantSampler(ScriptedSampler):
    """Always the same distribution, P."""

    @staticmethod
    def logprobs(ticket: int, position: int, version: int) -> torch.Tensor:
        return ScriptedSampler.logprobs(0, 0, 0)


P = ScriptedSampler.logprobs(0, 0, 0).exp().numpy()
COUNT = 4_000


def constant(cache, token: int = 5) -> list[dict]:
    """Responses with COUNT tokens in all, each this one, of the distribution P."""
    sampler = ConstantSampler({ticket: [token] * 100 for ticket in range(40)}, slots=40)
    batch, _ = worker_of(sampler, cache).generate(prompts(*range(40)))
    return batch.to_pylist()


def test_ids_of_the_poisson_cache_are_kept_as_often_as_their_probability_says():
    n, alpha = 4, 0.75
    ids = [
        i for row in constant(Poisson(n=n, alpha=alpha)) for ids in row["cache_ids"] for i in ids
    ]
    inclusion = np.minimum(1, (n * P) ** alpha)
    frequencies = np.bincount(ids, minlength=V) / COUNT
    allowed = 5 * np.sqrt(inclusion * (1 - inclusion) / COUNT) + 1e-6
    assert np.all(np.abs(frequencies - inclusion) <= allowed)


def test_a_poisson_cache_begins_with_the_likeliest_ids_where_they_are_forced(student):
    # Without force, 2 coins of 4 ids would fall on no in nearly every token.
    beyond = 0
    for row in generated(student, Poisson(n=2, alpha=1.0, top_k=4)):
        for ids, logprobs, expected in zip(
            row["cache_ids"], row["cache_logprobs"], truth(student, row), strict=True
        ):
            assert set(ids[:4]) == set(np.argsort(-expected)[:4])
            assert len(set(ids)) == len(ids)
            np.testing.assert_allclose(logprobs, expected[ids], atol=1e-4)
            beyond += len(ids) - 4
        assert row["cache_draws"] == [[] for _ in row["response_ids"]]
    assert beyond > 0, "the others keep their coins"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("n", [1, 8])
def test_the_multi_sample_cache_counts_n_draws_and_the_emitted_token_is_one(
    student, n, temperature
):
    for row in generated(student, MultiSample(n=n), temperature):
        columns = (row["response_ids"], row["cache_ids"], row["cache_draws"], row["cache_logprobs"])
        tokens = zip(*columns, truth(student, row, temperature), strict=True)
        for token, ids, draws, logprobs, expected in tokens:
            assert token in ids
            assert len(set(ids)) == len(ids) == len(draws)
            assert min(draws) > 0
            assert sum(draws) == n
            np.testing.assert_allclose(logprobs, expected[ids], atol=1e-4)


def test_ids_of_the_multi_sample_cache_are_drawn_as_often_as_their_probability_says():
    n = 8
    drawn = np.zeros(V)
    for row in constant(MultiSample(n=n)):
        for ids, draws in zip(row["cache_ids"], row["cache_draws"], strict=True):
            drawn[ids] += draws
    drawn[5] -= COUNT  # emitted each time, and not by chance
    size = (n - 1) * COUNT
    assert np.all(np.abs(drawn - size * P) <= 5 * np.sqrt(size * P * (1 - P)))


def test_the_student_top_k_cache_holds_its_likeliest_ids(student):
    for row in generated(student, StudentTopK(k=4), temperature=0.7):
        for ids, logprobs, expected in zip(
            row["cache_ids"], row["cache_logprobs"], truth(student, row, 0.7), strict=True
        ):
            assert len(ids) == 4
            assert set(ids) == set(np.argsort(-expected)[:4])
            np.testing.assert_allclose(logprobs, expected[ids], atol=1e-4)
        assert row["cache_draws"] == [[] for _ in row["response_ids"]]


def test_the_tail_of_the_top_is_the_emitted_token_where_it_lies_outside():
    script = {0: [3, 4, 5, 6, 7, 8, 9, 10], 1: [10, 9, 8, STOP], 2: [STOP]}
    batch, _ = worker_of(ScriptedSampler(script), TopKTail(k=3)).generate(prompts(0, 1, 2))
    outside = 0
    for row in validate(batch, ROLLOUT).to_pylist():
        for t, token in enumerate(row["response_ids"]):
            logprobs = ScriptedSampler.logprobs(row["ticket"], t, 0)
            ids = logprobs.argsort(descending=True)[:3].tolist()
            tail = [] if token in ids else [token]
            outside += len(tail)
            assert row["cache_ids"][t] == ids + tail
            assert row["cache_draws"][t] == [0] * 3 + [1] * len(tail)
            assert row["cache_logprobs"][t] == logprobs[ids + tail].tolist()
    assert 0 < outside < 13, "of the 13 tokens some are inside, some outside"


def test_a_thinned_top_may_keep_nothing_of_a_token_and_stays_aligned():
    empty = 0
    top = set(np.argsort(-P)[:3])
    for row in constant(TopKTail(k=3, n=1, alpha=1.0), token=int(P.argmax())):
        assert len(row["cache_ids"]) == len(row["cache_draws"]) == 100
        for ids, draws, logprobs in zip(
            row["cache_ids"], row["cache_draws"], row["cache_logprobs"], strict=True
        ):
            assert set(ids) <= top
            assert draws == [0] * len(ids)
            np.testing.assert_allclose(logprobs, np.log(P)[ids], atol=1e-5)
            empty += not ids
    assert empty > 0.4 * COUNT  # 0.47 by the coins of three ids


def test_the_sampled_cache_holds_the_emitted_tokens(student):
    for row in generated(student, Sampled()):
        assert row["cache_ids"] == [[token] for token in row["response_ids"]]
        assert row["cache_draws"] == [[] for _ in row["response_ids"]]
        assert row["cache_logprobs"] == [[logprob] for logprob in row["sampler_logprobs"]]


@pytest.mark.parametrize(
    "cache", [TeacherTopK(k=4), TeacherMultiSample(n=4), Dense()], ids=lambda cache: cache.type
)
def test_where_the_teacher_chooses_the_sampler_caches_nothing(student, cache):
    for row in generated(student, cache):
        assert row["cache_ids"] == [[] for _ in row["response_ids"]]
        assert row["cache_logprobs"] == [[] for _ in row["response_ids"]]
        assert row["cache_draws"] == [[] for _ in row["response_ids"]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_logprobs_are_the_models_own_at_the_temperature(student, temperature):
    rows = generated(student, Dense(), temperature)
    assert len(rows) == 5
    for row in rows:
        true = truth(student, row, temperature)
        expected = true[np.arange(len(true)), row["response_ids"]]
        np.testing.assert_allclose(row["sampler_logprobs"], expected, atol=1e-4)
