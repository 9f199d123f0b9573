"""The reference tables of the README, made from the code that they describe."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from engine.config import RunConfig, sections
from engine.metrics import CATALOGUE


def configuration_table() -> str:
    """Every key, its default and its meaning, as Markdown."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    rows += [f"| `{key}` | {default} | {text} |" for key, default, text in _keys(RunConfig, "")]
    return "\n".join(rows)


def metric_table() -> str:
    """Every metric of the catalogue, as Markdown."""
    rows = ["| metric | unit | meaning | what to do |", "|---|---|---|---|"]
    rows += [
        f"| `{name}` | {_cell(m.unit)} | {_cell(m.meaning)} | {_cell(m.guide)} |"
        for name, m in CATALOGUE.items()
    ]
    return "\n".join(rows)


def _keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        key = prefix + name
        variants = sections(field.annotation)
        if not variants:
            yield key, _default(field.default), _cell(field.description or "")
        elif len(variants) == 1:
            yield from _keys(variants[0], f"{key}.")
        else:
            yield key, f"`{field.default.type}`", _cell(field.description or "How it learns.")
            for variant in variants:
                kind = variant.model_fields["type"].default
                yield f'{key}.type = "{kind}"', "", _cell(variant.__doc__ or "")
                yield from (row for row in _keys(variant, f"{key}.") if row[0] != f"{key}.type")


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    return "–" if value in (None, "", {}) else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def fill(text: str) -> str:
    """A document with its tables made anew, between `<!-- name -->` and `<!-- /name -->`."""
    for name, table in (("configuration", configuration_table()), ("metrics", metric_table())):
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, _, after = rest.partition(f"<!-- /{name} -->")
        text = f"{before}<!-- {name} -->\n{table}\n<!-- /{name} -->{after}"
    return text


if __name__ == "__main__":
    readme = Path(__file__).parent.parent / "README.md"
    readme.write_text(fill(readme.read_text()))
