"""Whether a response is right: one function per verifier, from response text and answer."""

import re
from collections.abc import Callable
from decimal import Decimal

# Braces inside, as of \frac{1}{2}, to a depth of two.
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def boxed(response: str, answer: str) -> bool:
    r"""The content of the last `\boxed{}` is the answer, as text or as a number."""
    found = _BOXED.findall(response)
    return bool(found) and _same(found[-1], answer)


def number(response: str, answer: str) -> bool:
    """The last number in the response is the answer."""
    found = _NUMBER.findall(response.replace(",", ""))
    return bool(found) and _same(found[-1], answer.replace(",", ""))


def exact(response: str, answer: str) -> bool:
    """The whole response, stripped, is the answer."""
    return response.strip() == answer.strip()


VERIFIERS: dict[str, Callable[[str, str], bool]] = {
    "boxed": boxed,
    "number": number,
    "exact": exact,
}


def _same(found: str, answer: str) -> bool:
    found, answer = found.strip(), answer.strip()
    if _NUMBER.fullmatch(found) and _NUMBER.fullmatch(answer):
        return Decimal(found) == Decimal(answer)  # exact for large integers too
    return found == answer
