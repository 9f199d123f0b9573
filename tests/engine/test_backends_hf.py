"""The reference sampler against plain forward passes of the same model."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from engine.backends import Request
from engine.backends.hf import HFSampler
from engine.models import Language
from engine.weights import publish
from tests.engine.tiny import (
    Driven,
    language,
    logprobs_across_swap,
    logprobs_of,
    random_ids,
    worst_difference,
)

PROMPT_LENGTHS = (1, 23, 4, 60, 2, 11, 35, 7)
RESPONSE_LENGTHS = (9, 1, 30, 4, 2, 17, 25, 12)


@pytest.fixture(scope="module")
def student(tiny_student) -> Language:
    return language(tiny_student)


def request(ticket: int, prompt: int, response: int, seed: int | None = None, greedy=False):
    ids = random_ids(prompt, ticket, 50)
    return Request(ticket, ids, response, ticket if seed is None else seed, greedy)


def mixed_requests() -> list[Request]:
    lengths = zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)
    return [request(ticket, *pair) for ticket, pair in enumerate(lengths)]


def fresh(model, vocabulary: int, temperature: float = 1.0):
    return lambda request, response: logprobs_of(
        model, request.prompt_ids, response.ids, vocabulary, temperature
    )


def driven_with_late_joiners(sampler: HFSampler) -> Driven:
    driven = Driven(sampler)
    requests = mixed_requests()
    driven.add(*requests[:4])
    driven.step(3)
    driven.add(*requests[4:6])
    driven.step(6)
    driven.add(*requests[6:])
    driven.drain()
    return driven


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_are_those_of_a_fresh_forward_pass_at_the_temperature(
    student, temperature
):
    driven = driven_with_late_joiners(student.sampler(temperature, slots=3))
    assert any(len(tickets) > 1 for tickets in driven.steps)
    oracle = fresh(student.model, student.vocabulary, temperature)
    assert worst_difference(driven, oracle) < 1e-4


def test_a_model_with_sliding_windows_is_sampled_as_a_fresh_forward_pass_sees_it():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,  # one with a window, one without
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,  # shorter than most prompts here
        query_pre_attn_scalar=16,
        initializer_range=0.3,
    )
    model = Gemma2ForCausalLM(config).eval()
    sampler = HFSampler(model, 40, [1], temperature=1.0, slots=3)
    driven = Driven(sampler)
    lengths = list(zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True))
    driven.add(*(Request(t, random_ids(p, t, 40), r, t) for t, (p, r) in enumerate(lengths[:5])))
    driven.step(5)
    driven.add(*(Request(t, random_ids(p, t, 40), r, t) for t, (p, r) in enumerate(lengths[5:], 5)))
    driven.drain()
    assert worst_difference(driven, fresh(model, 40)) < 1e-4


def test_a_response_does_not_depend_on_its_company(student):
    together = driven_with_late_joiners(student.sampler(1.0, slots=3)).responses
    for asked in mixed_requests():
        alone = Driven(student.sampler(1.0, slots=1))
        alone.add(asked)
        assert alone.drain()[asked.ticket].ids == together[asked.ticket].ids


def test_another_seed_gives_another_response(student):
    driven = Driven(student.sampler(1.0, slots=2))
    driven.add(request(1, 5, 20, seed=1), Request(2, random_ids(5, 1, 50), 20, seed=2))
    responses = driven.drain()
    assert responses[1].ids != responses[2].ids


def test_no_more_responses_run_than_there_are_slots_and_none_is_forgotten(student):
    sampler = student.sampler(1.0, slots=3)
    driven = Driven(sampler)
    driven.add(*mixed_requests())
    assert sampler.running == 8
    left = 8
    while sampler.running:
        driven.step()
        left -= sum(bool(driven.responses[ticket].reason) for ticket in driven.steps[-1])
        assert sampler.running == left
    assert max(len(tickets) for tickets in driven.steps) == 3
    assert all(response.reason for response in driven.responses.values())


def test_a_response_ends_at_its_first_stop_id_or_at_its_length(student):
    driven = Driven(student.sampler(1.0, slots=40))
    driven.add(*(request(ticket, 5, 30) for ticket in range(40)))
    reasons = set()
    for response in driven.drain().values():
        reasons.add(response.reason)
        stops = [token in student.stop_ids for token in response.ids]
        if response.reason == "stop":
            assert stops == [False] * (len(stops) - 1) + [True]
        else:
            assert response.reason == "length"
            assert stops == [False] * 30
    assert reasons == {"stop", "length"}


def test_a_stop_id_in_the_last_place_is_a_stop(student):
    asked = request(0, 5, 1, greedy=True)
    first = logprobs_of(student.model, asked.prompt_ids, [0], student.vocabulary, 1.0).argmax()
    driven = Driven(HFSampler(student.model, student.vocabulary, [int(first)], 1.0, 1))
    driven.add(asked)
    assert driven.drain()[0].reason == "stop"


def test_greedy_takes_the_likeliest_id_whatever_the_seed_while_others_sample(student):
    driven = Driven(student.sampler(1.0, slots=3))
    driven.add(request(0, 6, 20, seed=1, greedy=True), request(1, 9, 20))
    driven.add(Request(2, random_ids(6, 0, 50), 20, seed=99, greedy=True))
    responses = driven.drain()
    for ticket in (0, 2):
        assert responses[ticket].ids == responses[ticket].logprobs.argmax(-1).tolist()
    assert responses[0].ids == responses[2].ids
    assert responses[1].ids != responses[1].logprobs.argmax(-1).tolist()


def test_ids_that_the_tokenizer_does_not_have_are_neither_sampled_nor_counted(tiny_student):
    student = language(tiny_student)
    with torch.no_grad():  # make them by far the likeliest
        student.model.get_output_embeddings().weight[student.vocabulary :] *= 20
    driven = Driven(student.sampler(1.0, slots=8))
    driven.add(*(request(ticket, 5, 20) for ticket in range(8)))
    for response in driven.drain().values():
        assert max(response.ids) < student.vocabulary
        assert response.logprobs.shape[1] == student.vocabulary
        assert response.logprobs.logsumexp(-1).abs().max() < 1e-5


def test_ids_are_drawn_as_often_as_their_probability_says(student):
    prompt = random_ids(5, 0, 50)
    count = 4_000
    driven = Driven(student.sampler(1.0, slots=count))
    driven.add(*(Request(ticket, prompt, 2, seed=ticket) for ticket in range(count)))
    responses = driven.drain().values()
    expected = logprobs_of(student.model, prompt, [0], student.vocabulary, 1.0)[0].exp()
    firsts = torch.tensor([response.ids[0] for response in responses])
    frequencies = torch.bincount(firsts, minlength=len(expected)) / count
    # Five standard errors of a frequency, and one draw for ids that are hardly ever drawn.
    allowed = 5 * (expected * (1 - expected) / count).sqrt() + 1 / count
    assert bool(((frequencies - expected).abs() < allowed).all())

    # The second token's number is not the first one's again.
    first = int(firsts.mode().values)
    seconds = torch.tensor([r.ids[1] for r in responses if r.ids[0] == first and len(r.ids) > 1])
    expected = logprobs_of(student.model, prompt, [first, 0], student.vocabulary, 1.0)[1].exp()
    frequencies = torch.bincount(seconds, minlength=len(expected)) / len(seconds)
    allowed = 5 * (expected * (1 - expected) / len(seconds)).sqrt() + 1 / len(seconds)
    assert bool(((frequencies - expected).abs() < allowed).all())


def test_weights_loaded_in_flight_meet_the_old_keys_and_values(tiny_student, tiny_teacher):
    old, new = language(tiny_student), language(tiny_teacher)
    sampled = language(tiny_student)
    driven = Driven(HFSampler(sampled.model, old.vocabulary, [], 0.7, slots=3))  # nobody stops
    driven.add(request(0, 30, 40), request(1, 3, 40), request(2, 10, 40), request(3, 8, 20))
    driven.step(7)
    driven.sampler.load(publish(new.tensors().items(), 1, torch.float32))
    driven.step()
    # Neither restarted nor drained: each goes on by one token.
    assert sorted(driven.steps[-1]) == [0, 1, 2]
    assert all(len(driven.responses[ticket].ids) == 8 for ticket in (0, 1, 2))
    driven.drain()

    def oracle(request, response):
        swap = 0 if request.ticket == 3 else 7
        return logprobs_across_swap(
            old.model, new.model, request.prompt_ids, response.ids, swap, old.vocabulary, 0.7
        )

    assert worst_difference(driven, oracle) < 1e-4
    # Request 3 began after the swap: the new model alone made it.
    assert worst_difference(driven, fresh(new.model, new.vocabulary, 0.7), [3]) < 1e-4
    # And the test can tell: with the new model's own keys and values the others differ.
    anew = fresh(new.model, new.vocabulary, 0.7)(driven.requests[0], driven.responses[0])
    assert (driven.responses[0].logprobs - anew)[7:].abs().max() > 1e-2


def test_with_reprefill_responses_in_flight_go_on_as_the_new_models_own(tiny_student, tiny_teacher):
    old, new = language(tiny_student), language(tiny_teacher)
    sampled = language(tiny_student)
    driven = Driven(HFSampler(sampled.model, old.vocabulary, [], 0.7, slots=3))
    driven.add(request(0, 30, 40), request(1, 3, 40), request(2, 10, 40), request(3, 8, 20))
    driven.step(7)
    driven.sampler.load(publish(new.tensors().items(), 1, torch.float32), reprefill=True)
    driven.step()
    assert sorted(driven.steps[-1]) == [0, 1, 2]
    driven.drain()
    before, after = (fresh(model.model, model.vocabulary, 0.7) for model in (old, new))
    for ticket in (0, 1, 2):
        asked, response = driven.requests[ticket], driven.responses[ticket]
        assert (response.logprobs - before(asked, response))[:7].abs().max() < 1e-4
        assert (response.logprobs - after(asked, response))[7:].abs().max() < 1e-4
    assert worst_difference(driven, after, [3]) < 1e-4
