"""The README says what the code says."""

import re
from pathlib import Path

from flows.reference import fill

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_its_tables_are_those_of_the_code() -> None:
    assert fill(README) == README, "run `make docs`"


def test_every_file_that_its_tree_names_exists() -> None:
    tree = README.split("```text\nopdflow/")[1].split("```")[0]
    for line in tree.splitlines():
        found = re.match(r"^  (\S+)", line)
        if found:
            assert (ROOT / found[1]).exists(), found[1]


def test_every_make_target_that_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\S+?)`", README):
        assert f"\n{target}:" in makefile, target
