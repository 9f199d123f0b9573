"""The ledger task: right answers, documented lengths, and nothing held out in any stream."""

import json
import re
import statistics
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from demo import ledger
from demo.ledger import Problem


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return ledger.make_tokenizer()


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return list(islice(ledger.stream("test"), 3_000))


def test_prompt_and_response_have_the_documented_form() -> None:
    problem = Problem(1, (("u", 2), ("v", -3), ("w", 1)))
    assert problem.prompt == "Compute 01 u+2 v-3 w+1"
    assert problem.response == " u01+2=03 v03-3=00 w00+1=01\n\\boxed{01}"
    assert problem.answer == "01"


def test_every_response_is_right_by_recomputing_it_from_the_prompt(problems: list[Problem]) -> None:
    for problem in problems:
        start, *amounts = map(int, re.findall(r"[+-]?\d+", problem.prompt))
        steps = re.findall(r" ([a-zA-Z])(\d\d)([+-]\d)=(\d\d)", problem.response)
        total = start
        for (label, before, amount, after), given in zip(steps, amounts, strict=True):
            assert f" {label}{amount}" in problem.prompt
            assert (int(before), int(amount)) == (total, given)
            total += given
            assert int(after) == total
        boxed = re.findall(r"\\boxed\{(\d\d)\}", problem.response)
        assert boxed == [problem.answer]
        assert int(problem.answer) == total


def test_totals_stay_in_two_digits_and_amounts_are_one_signed_digit(
    problems: list[Problem],
) -> None:
    for problem in problems:
        assert all(0 <= total <= 99 for total in problem.totals)
        assert all(1 <= abs(amount) <= 9 for _, amount in problem.entries)


def test_labels_follow_the_alphabet_and_never_repeat(problems: list[Problem]) -> None:
    circle = ledger.LABELS * 2
    for problem in problems:
        labels = "".join(label for label, _ in problem.entries)
        assert labels in circle
        assert len(set(labels)) == len(labels)


def test_response_lengths_have_the_documented_tail(
    tokenizer: PreTrainedTokenizerFast, problems: list[Problem]
) -> None:
    lengths = sorted(len(response) for _, response in ledger.encode(tokenizer, problems))
    assert lengths[0] == 13  # one entry of 7 tokens, a newline, \boxed{ 0 1 } and the end
    assert lengths[-1] == 363  # 51 entries of 7 tokens and the same 6
    assert statistics.mean(lengths) == pytest.approx(57, abs=3)
    assert statistics.median(lengths) == pytest.approx(41, abs=7)  # lengths come 7 apart
    assert lengths[int(0.9 * len(lengths))] == pytest.approx(111, abs=14)


def test_a_long_share_puts_more_problems_in_the_tail() -> None:
    def share_above_26(long_share: float) -> float:
        drawn = islice(ledger.stream("test", long_share), 2_000)
        return statistics.mean(len(problem.entries) > 26 for problem in drawn)

    assert share_above_26(0.0) < 0.05
    assert share_above_26(1.0) == pytest.approx(25 / 51, abs=0.04)


def test_a_stream_is_the_same_every_time_and_differs_by_name() -> None:
    assert list(islice(ledger.stream("a"), 50)) == list(islice(ledger.stream("a"), 50))
    assert list(islice(ledger.stream("a"), 50)) != list(islice(ledger.stream("b"), 50))


def test_held_out_problems_are_distinct_and_in_no_stream() -> None:
    held_out = {problem.prompt for problem in ledger.held_out()}
    assert len(held_out) == ledger.HELD_OUT
    for name in ("distillation 0", "teacher 0", "student 0", "tokenizer"):
        drawn = {problem.prompt for problem in islice(ledger.stream(name), 5_000)}
        assert not held_out & drawn


def test_a_held_out_problem_that_is_drawn_again_is_left_out() -> None:
    # 5 % of problems have one entry, and only some 8,000 such problems exist: streams do draw them.
    held_out = {problem.prompt for problem in ledger.held_out()}
    drawn = {problem.prompt for problem in islice(ledger._draw("test", 0.0), 30_000)}
    assert held_out & drawn


def test_words_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    signed = [f"{sign}{digit}" for sign in "+-" for digit in range(1, 10)]
    labels = [f" {label}" for label in ledger.LABELS]
    for word in [*"0123456789=}\n", *signed, *labels, "\\boxed{", "Compute", "user", "assistant"]:
        assert tokenizer.tokenize(word) == [
            tokenizer.convert_ids_to_tokens(tokenizer.encode(word))[0]
        ], word


def test_the_tokenizer_gives_back_every_text(
    tokenizer: PreTrainedTokenizerFast, problems: list[Problem]
) -> None:
    for text in [problem.prompt + problem.response for problem in problems[:200]] + ["é\t東 1+"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_is_small_and_has_a_padding_token_of_its_own(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert len(tokenizer) == pytest.approx(353, abs=5)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.padding_side == "left"


def test_a_saved_tokenizer_loads_as_the_same(
    tokenizer: PreTrainedTokenizerFast, problems: list[Problem], tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert ledger.encode(loaded, problems[:20]) == ledger.encode(tokenizer, problems[:20])
    assert (loaded.padding_side, loaded.pad_token) == ("left", tokenizer.pad_token)


def test_training_ids_are_the_rendered_prompt_then_the_response_then_the_end(
    tokenizer: PreTrainedTokenizerFast, problems: list[Problem]
) -> None:
    for problem, (prompt, response) in zip(
        problems[:50], ledger.encode(tokenizer, problems[:50]), strict=True
    ):
        whole = [*problem.messages, {"role": "assistant", "content": problem.response}]
        rendered = tokenizer.apply_chat_template(whole, return_dict=False)
        assert prompt == tokenizer.apply_chat_template(
            problem.messages, add_generation_prompt=True, return_dict=False
        )
        assert response[-1] == tokenizer.eos_token_id
        assert prompt + response + tokenizer.encode("\n") == rendered
        assert tokenizer.decode(response, skip_special_tokens=True) == problem.response


def test_prompts_are_written_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    ledger.write_prompts(path, [Problem(1, (("u", 2),)), Problem(9, (("Z", -9),))], prefix="ledger")
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {
        "id": "ledger-00000",
        "messages": [{"role": "user", "content": "Compute 01 u+2"}],
        "answer": "03",
        "verifier": "boxed",
    }
    assert (second["id"], second["answer"]) == ("ledger-00001", "00")
