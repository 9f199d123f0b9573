"""The `ledger` task: a chain of labelled additions, solved on a scratchpad.

    prompt     Compute 01 u+2 v-3 w+1
    response    u01+2=03 v03-3=00 w00+1=01
               \\boxed{01}

Every entry of the response names its label, the total before, the amount and the total after.
Totals have two digits always, labels follow the alphabet from a random letter, and a signed amount
is one token: without these three, a model of this size does not learn the task in seconds. The
length is log-normal, so a few responses are far longer than most: that tail is what makes waiting
for the longest response of a batch expensive.

A stream is named by a string, and the same name always gives the same problems. The held-out
problems are left out of every stream by their text, so nobody trains on what is measured.
"""

import functools
import json
import random
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LABELS = string.ascii_lowercase + string.ascii_uppercase
LARGEST_TOTAL = 99
LARGEST_AMOUNT = 9
LONGEST = 52
"""Most numbers in a problem, the start included: beyond this, labels would repeat."""

HELD_OUT = 256
"""How many problems are held out: a sampled accuracy near 0.9 is then known to about 2 points."""

END = "<|im_end|>"
PAD = "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = Regex(r"\\boxed\{| ?[A-Za-z]+|[+-]\d|\d|[\s\S]")
"""What no token may cross: the boxed opening, a word or label with its space, a signed digit."""


@dataclass(frozen=True)
class Problem:
    """A start and the labelled amounts to add to it in order."""

    start: int
    entries: tuple[tuple[str, int], ...]

    @property
    def totals(self) -> list[int]:
        """The start and the total after each entry."""
        totals = [self.start]
        for _, amount in self.entries:
            totals.append(totals[-1] + amount)
        return totals

    @property
    def prompt(self) -> str:
        """What the user asks."""
        return " ".join(
            [
                f"Compute {self.start:02d}",
                *(f"{label}{amount:+d}" for label, amount in self.entries),
            ]
        )

    @property
    def answer(self) -> str:
        """The number that belongs in the box."""
        return f"{self.totals[-1]:02d}"

    @property
    def response(self) -> str:
        """The solved scratchpad, without the end-of-sequence token."""
        lines = [
            f" {label}{before:02d}{amount:+d}={after:02d}"
            for (label, amount), (before, after) in zip(
                self.entries, pairwise(self.totals), strict=True
            )
        ]
        return "".join(lines) + f"\n\\boxed{{{self.answer}}}"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation that a chat template renders."""
        return [{"role": "user", "content": self.prompt}]


def stream(name: str, long_share: float = 0.0) -> Iterator[Problem]:
    """Endless problems for training, none of them held out.

    `long_share` of them have a length uniform in 2..52 instead of log-normal, so that a teacher
    sees enough of the tail to be right there too.
    """
    return (problem for problem in _draw(name, long_share) if problem.prompt not in _held_out())


def held_out() -> list[Problem]:
    """The problems that only evaluation sees."""
    return list(_held_out().values())


def write_prompts(path: Path, problems: Iterable[Problem], prefix: str) -> None:
    """Write one prompt a line, as opdflow reads them; `prefix` and a number make the ids."""
    with path.open("w", encoding="utf-8") as file:
        for number, problem in enumerate(problems):
            row = {
                "id": f"{prefix}-{number:05d}",
                "messages": problem.messages,
                "answer": problem.answer,
                "verifier": "boxed",
            }
            file.write(json.dumps(row) + "\n")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML, trained on generated problems; in it, every word is one token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,  # an upper bound: training ends when every word is one token
        special_tokens=[PAD, "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    samples = islice(stream("tokenizer"), 2_000)  # each label appears hundreds of times
    bpe.train_from_iterator(
        (f"user\n{problem.prompt}\nassistant\n{problem.response}" for problem in samples), trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]
) -> list[tuple[list[int], list[int]]]:
    """Prompt ids as generation sees them, and the response ids that should follow, end included."""
    prompts = tokenizer.apply_chat_template(
        [problem.messages for problem in problems], add_generation_prompt=True, return_dict=False
    )
    responses = tokenizer([problem.response + END for problem in problems])["input_ids"]
    return list(zip(prompts, responses, strict=True))


def _draw(name: str, long_share: float) -> Iterator[Problem]:
    rng = random.Random(f"ledger {name}")
    while True:
        if rng.random() < long_share:
            numbers = rng.randint(2, LONGEST)
        else:
            numbers = min(2 + int(rng.lognormvariate(1.5, 0.9)), LONGEST)
        yield _problem(rng, entries=numbers - 1)


def _problem(rng: random.Random, entries: int) -> Problem:
    total = start = rng.randint(1, 9)
    first = rng.randrange(len(LABELS))
    chosen = []
    for position in range(entries):
        amount = rng.choice(_possible_amounts(total))
        total += amount
        chosen.append((LABELS[(first + position) % len(LABELS)], amount))
    return Problem(start, tuple(chosen))


def _possible_amounts(total: int) -> list[int]:
    """The amounts that keep the total in two digits."""
    low = max(-LARGEST_AMOUNT, -total)
    high = min(LARGEST_AMOUNT, LARGEST_TOTAL - total)
    return [amount for amount in range(low, high + 1) if amount]


@functools.cache
def _held_out() -> dict[str, Problem]:
    """Held-out problems by their text."""
    chosen: dict[str, Problem] = {}
    for problem in _draw("held out", long_share=0.0):
        chosen.setdefault(problem.prompt, problem)
        if len(chosen) == HELD_OUT:
            return chosen
    raise AssertionError("the stream of problems has no end")
