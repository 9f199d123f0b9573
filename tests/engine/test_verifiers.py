"""Right and wrong answers, as models write them."""

import pytest

from engine.verifiers import VERIFIERS, boxed, exact, number


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"so \boxed{42}.", "42", True),
        (r"so \boxed{43}.", "42", False),
        (r"\boxed{1}, no: \boxed{2}", "2", True),  # the last one counts
        (r"\boxed{1}, no: \boxed{2}", "1", False),
        (r"\boxed{ 42.0 }", "42", True),  # as a number
        (r"\boxed{-0.50}", "-0.5", True),
        (r"\boxed{x + 1}", "x + 1", True),  # as text
        (r"\boxed{x+1}", "x + 1", False),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True),  # braces inside
        (r"\boxed{1}, no: \boxed{\frac{1}{x_{0}}}", "1", False),
        (r"\boxed{1}, no: \boxed{\frac{1}{x_{0}}}", r"\frac{1}{x_{0}}", True),
        (r"\boxed{42", "42", False),  # cut before its end
        ("42", "42", False),  # nothing boxed
        ("", "42", False),
        (r"\boxed{}", "", True),
    ],
)
def test_the_last_box_holds_the_answer(response, answer, right):
    assert boxed(response, answer) is right


def test_an_unclosed_box_in_a_long_response_is_soon_given_up():
    assert not boxed(r"\boxed{" * 200 + "a" * 2000, "a")


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("it is 7", "7", True),
        ("it is 7.", "7", True),  # a full stop is no decimal point
        ("7 of 10", "7", False),  # the last number counts
        ("7 of 10", "10", True),
        ("1,234.50", "1234.5", True),
        ("1234.5", "1,234.5", True),
        ("-3", "3", False),
        ("-3", "-3.0", True),
        ("none", "0", False),
        # Beyond what a float tells apart.
        ("12345678901234567891", "12345678901234567890", False),
        ("12345678901234567890", "12345678901234567890.0", True),
    ],
)
def test_the_last_number_is_the_answer(response, answer, right):
    assert number(response, answer) is right


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (" yes\n", "yes", True),
        ("yes, it is", "yes", False),
        ("Yes", "yes", False),
        ("7.0", "7", False),
    ],
)
def test_the_whole_response_is_the_answer(response, answer, right):
    assert exact(response, answer) is right


def test_every_verifier_has_a_name_that_prompts_can_give():
    assert list(VERIFIERS.values()) == [boxed, number, exact]
    assert list(VERIFIERS) == ["boxed", "number", "exact"]
