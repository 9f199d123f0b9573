"""Prompts: read with errors that name file and row, and streamed in a seeded order."""

import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ConfigError, PromptsConfig
from engine.prompts import Prompt, PromptStream, read_prompts, read_rows, read_sources, to_batch
from engine.schema import PROMPT
from tests.conftest import build_tokenizer

CONFIG = PromptsConfig(path="given apart")
ASSISTANT = "<|im_start|>assistant\n"


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    """Where prompt files are: a folder, or memory."""
    if request.param == "local":
        yield str(tmp_path)
    else:
        yield "memory://opdflow-prompts"
        files = fsspec.filesystem("memory")
        if files.exists("/opdflow-prompts"):
            files.rm("/opdflow-prompts", recursive=True)


def written(path: str, *lines: object) -> str:
    """A JSONL file of these rows; strings are written as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    with fsspec.open(path, "w", encoding="utf-8", newline="") as file:
        file.write("\n".join(texts))
    return path


# Files


def test_rows_of_jsonl_are_read_from_any_file_system(folder):
    path = written(f"{folder}/p.jsonl", {"text": "a"}, "", {"text": "b", "id": 3})
    assert read_rows(path) == [{"text": "a"}, {"text": "b", "id": 3}]


def test_rows_of_parquet_are_read_from_any_file_system(folder):
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "answer": "4"},
        {"messages": [{"role": "user", "content": "b"}], "answer": None},
    ]
    with fsspec.open(f"{folder}/p.parquet", "wb") as file:
        pq.write_table(pa.Table.from_pylist(rows), file)
    assert read_rows(f"{folder}/p.parquet") == rows


def test_both_formats_give_the_same_prompts(tmp_path, tiny_tokenizer):
    rows = [
        {"messages": [{"role": "user", "content": "1+1"}], "answer": "2", "id": "x"},
        {"messages": [{"role": "user", "content": "1+2"}], "answer": "3", "id": "y"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    jsonl = written(str(tmp_path / "p.jsonl"), *rows)
    one = read_prompts(jsonl, tiny_tokenizer, CONFIG)
    assert one == read_prompts(str(tmp_path / "p.parquet"), tiny_tokenizer, CONFIG)
    assert [prompt.id for prompt in one[0]] == ["x", "y"]


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\x0c"])
def test_only_a_line_feed_ends_a_row(tmp_path, separator):
    # json.dumps(ensure_ascii=False) writes these as they are.
    row = {"text": f"one{separator}two"}
    line = json.dumps(row, ensure_ascii=False)
    path = written(str(tmp_path / "p.jsonl"), f"{line}\r", line)
    assert read_rows(path) == [row, row]


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "a"}\n{"text": "hal')
    assert read_rows(str(path), growing=True) == [{"text": "a"}]
    with pytest.raises(ConfigError, match="line 2: not valid JSON"):
        read_rows(str(path))
    path.write_text('{"text": "a"}\n{"text": "half"}\n')
    assert [row["text"] for row in read_rows(str(path), growing=True)] == ["a", "half"]


def test_several_sources_are_read_in_their_order(tmp_path, tiny_tokenizer):
    one = written(str(tmp_path / "one.jsonl"), {"text": "b"}, {"text": "a long one"})
    other = written(str(tmp_path / "other.jsonl"), {"text": "a"})
    config = PromptsConfig(path=[one, other], max_tokens=3, too_long="skip")
    prompts, skipped = read_sources(tiny_tokenizer, config)
    assert [prompt.text for prompt in prompts] == ["b", "a"]
    assert skipped == 1


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet"])
def test_a_file_that_is_not_there_is_named(folder, name):
    with pytest.raises(ConfigError, match=rf"{name}: no such prompt file"):
        read_rows(f"{folder}/{name}")


def test_a_folder_is_no_prompt_file(tmp_path):
    with pytest.raises(ConfigError, match="no such prompt file"):
        read_rows(str(tmp_path))


@pytest.mark.parametrize("lines", [[], ["", "  ", ""]])
def test_an_empty_file_is_refused(folder, lines):
    path = written(f"{folder}/p.jsonl", *lines)
    with pytest.raises(ConfigError, match=r"p.jsonl: the prompt file is empty"):
        read_rows(path)


def test_a_parquet_file_without_rows_is_refused(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match="the prompt file is empty"):
        read_rows(str(tmp_path / "p.parquet"))


def test_a_line_that_is_not_json_is_named_by_its_number(folder):
    path = written(f"{folder}/p.jsonl", {"text": "a"}, "", '{"text": ')
    with pytest.raises(ConfigError, match=r"p.jsonl, line 3: not valid JSON"):
        read_rows(path)


@pytest.mark.parametrize("line", ["3", '"text"', "[1]", "null"])
def test_a_line_that_is_no_object_is_named_by_its_number(tmp_path, line):
    path = written(str(tmp_path / "p.jsonl"), {"text": "a"}, line)
    with pytest.raises(ConfigError, match=r"p.jsonl, line 2: a row is an object"):
        read_rows(path)


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_a_file_of_something_else_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"\xff\xfe\x00 no text and no table")
    with pytest.raises(ConfigError, match=rf"{name}: can't be read: "):
        read_rows(str(tmp_path / name))


def test_an_unknown_protocol_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"gopher://p.jsonl: can't be read: .*gopher"):
        read_rows("gopher://p.jsonl")


# Rows


def read(tmp_path: Path, tokenizer, *rows: object, **settings):
    path = written(str(tmp_path / "p.jsonl"), *rows)
    return read_prompts(path, tokenizer, PromptsConfig(path=path, **settings))


def test_text_is_taken_as_it_is(tmp_path, tiny_tokenizer):
    (prompt,), skipped = read(tmp_path, tiny_tokenizer, {"text": "1+1=", "id": "x", "answer": 2})
    assert prompt.text == "1+1="
    assert prompt.ids == tuple(tiny_tokenizer.encode("1+1="))
    assert (prompt.id, prompt.answer, prompt.verifier) == ("x", "2", "exact")
    assert skipped == 0


def test_messages_go_through_the_chat_template(tmp_path, tiny_tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    (prompt,), _ = read(tmp_path, tiny_tokenizer, {"messages": messages, "verifier": "boxed"})
    assert prompt.text == f"<|im_start|>user\nhi<|im_end|>\n{ASSISTANT}"
    # The special tokens are one id each: 1 and 2 of the tiny tokenizer.
    assert prompt.ids.count(1) == 2
    assert prompt.ids.count(2) == 1
    assert len(prompt.ids) == len("1user\nhi2\n1assistant\n")
    assert prompt.answer is None
    assert prompt.verifier == "boxed"


def test_arguments_of_the_template_are_passed_on(tmp_path, tiny_tokenizer):
    row = {"messages": [{"role": "user", "content": "hi"}]}
    thinking, _ = read(tmp_path, tiny_tokenizer, row)
    quick, _ = read(tmp_path, tiny_tokenizer, row, template={"enable_thinking": False})
    assert quick[0].text == thinking[0].text + "!\n"


def test_special_tokens_are_added_to_text_and_never_to_a_template_twice(tmp_path):
    from tokenizers import processors

    tokenizer = build_tokenizer()
    bos = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[bos]
    )
    rows = [{"text": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}]
    (text, messages), _ = read(tmp_path, tokenizer, *rows)
    assert text.ids[0] == bos[1]
    assert messages.ids[:2].count(bos[1]) == 1


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a", "messages": [{"role": "user", "content": "a"}]},
        {"answer": "4"},
        {"text": None, "messages": None},
    ],
)
def test_both_or_neither_of_text_and_messages_are_refused(tmp_path, tiny_tokenizer, row):
    with pytest.raises(ConfigError, match=r"row 2: give either `text` or `messages`"):
        read(tmp_path, tiny_tokenizer, {"text": "fine"}, row)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "a", "verifier": "vibes"}, "unknown verifier 'vibes'; there are .*'boxed'"),
        ({"text": ""}, "the prompt is empty"),
        ({"text": 5}, "`text` is a string, not 5"),
        ({"messages": 5}, "the chat template fails on it"),
    ],
)
def test_a_bad_row_is_named(tmp_path, tiny_tokenizer, row, says):
    with pytest.raises(ConfigError, match=rf"p.jsonl, row 2: {says}"):
        read(tmp_path, tiny_tokenizer, {"text": "fine"}, row)


def test_a_row_that_the_chat_template_refuses_is_named_with_its_reason(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match=r"row 2: the chat template fails.*roles must alternate"):
        read(tmp_path, tokenizer, {"text": "a"}, {"messages": [{"role": "user", "content": "a"}]})


def test_messages_need_a_chat_template(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"row 1: has `messages`, but the tokenizer has no chat"):
        read(tmp_path, tokenizer, {"messages": [{"role": "user", "content": "a"}]})


@pytest.mark.parametrize(("given", "identity"), [("x", "x"), (0, "0"), (17, "17")])
def test_an_id_is_taken_as_text_and_zero_is_one(tmp_path, tiny_tokenizer, given, identity):
    (prompt,), _ = read(tmp_path, tiny_tokenizer, {"text": "a", "id": given})
    assert prompt.id == identity


def test_a_row_without_an_id_is_called_by_its_place(tmp_path, tiny_tokenizer):
    prompts, _ = read(tmp_path, tiny_tokenizer, {"text": "a"}, {"text": "a"})
    assert [prompt.id for prompt in prompts] == [f"{tmp_path}/p.jsonl, row {n}" for n in (1, 2)]


def test_a_prompt_that_is_too_long_is_refused_with_its_row_and_length(tmp_path, tiny_tokenizer):
    rows = [{"text": "12345"}, {"text": "123456", "id": "long"}]
    with pytest.raises(ConfigError, match=r"row 2 \(long\): 6 tokens.*max_tokens = 5.*skip"):
        read(tmp_path, tiny_tokenizer, *rows, max_tokens=5)


def test_prompts_that_are_too_long_are_skipped_and_counted_if_so_configured(
    tmp_path, tiny_tokenizer
):
    rows = [{"text": "123456"}, {"text": "12345"}, {"text": "1234567"}]
    prompts, skipped = read(tmp_path, tiny_tokenizer, *rows, max_tokens=5, too_long="skip")
    assert [prompt.text for prompt in prompts] == ["12345"]
    assert skipped == 2


def test_a_file_of_which_nothing_is_left_is_refused(tmp_path, tiny_tokenizer):
    with pytest.raises(ConfigError, match="no prompt is left after skipping 2"):
        read(tmp_path, tiny_tokenizer, *[{"text": "123"}] * 2, max_tokens=2, too_long="skip")


def test_a_limit_takes_rows_from_the_top(tmp_path, tiny_tokenizer):
    path = written(str(tmp_path / "p.jsonl"), *[{"text": str(n)} for n in range(5)])
    prompts, _ = read_prompts(path, tiny_tokenizer, CONFIG, limit=2)
    assert [prompt.text for prompt in prompts] == ["0", "1"]


# The stream


def five() -> list[Prompt]:
    return [Prompt(f"p{i}", str(i), (i, i + 1), None, "exact") for i in range(5)]


def taken(stream: PromptStream, count: int) -> list[tuple[int, int, str]]:
    batch = stream.take(count)
    columns = (batch["ticket"], batch["attempt"], batch["prompt_id"])
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def test_a_batch_of_prompts_holds_all_that_a_worker_needs():
    prompts = [Prompt("a", "t", (1, 2), "4", "boxed"), Prompt("b", "u", (3,), None, "exact")]
    batch = to_batch(prompts, [7, 2**40], [0, 1])
    assert batch.schema == PROMPT
    assert batch.to_pylist() == [
        {
            "ticket": 7,
            "attempt": 0,
            "prompt_id": "a",
            "prompt_ids": [1, 2],
            "answer": "4",
            "verifier": "boxed",
        },
        {
            "ticket": 2**40,
            "attempt": 1,
            "prompt_id": "b",
            "prompt_ids": [3],
            "answer": None,
            "verifier": "exact",
        },
    ]


def test_each_epoch_visits_each_prompt_once_in_an_order_of_its_own():
    stream = PromptStream(five(), seed=0)
    epochs = [tuple(name for _, _, name in taken(stream, 5)) for _ in range(6)]
    for epoch in epochs:
        assert sorted(epoch) == ["p0", "p1", "p2", "p3", "p4"]
    assert len(set(epochs)) > 1


def test_tickets_count_up_and_the_first_attempt_is_zero():
    stream = PromptStream(five(), seed=0)
    pairs = [(ticket, attempt) for ticket, attempt, _ in taken(stream, 4) + taken(stream, 3)]
    assert pairs == [(ticket, 0) for ticket in range(7)]
    assert stream.cursor == 7


@given(st.lists(st.integers(0, 7), max_size=6), st.integers(0, 3))
def test_the_order_is_a_function_of_the_seed_however_it_is_taken(counts, seed):
    parts, whole = PromptStream(five(), seed), PromptStream(five(), seed)
    in_parts = [row for count in counts for row in taken(parts, count)]
    assert in_parts == taken(whole, sum(counts))


def test_another_seed_gives_another_order():
    orders = {
        tuple(name for *_, name in taken(PromptStream(five(), seed), 10)) for seed in range(4)
    }
    assert len(orders) == 4


def test_what_is_queued_again_comes_first_and_with_its_attempt():
    stream = PromptStream(five(), seed=0)
    names = {ticket: name for ticket, _, name in taken(stream, 6)}
    stream.queue_again(4, 1)
    stream.queue_again(1, 2)
    assert stream.waiting == [(4, 1), (1, 2)]
    assert taken(stream, 1) == [(4, 1, names[4])]
    assert stream.waiting == [(1, 2)]
    (again, fresh) = taken(stream, 2)
    assert again == (1, 2, names[1]), "the same prompt as before"
    assert fresh[:2] == (6, 0)
    assert stream.waiting == []


def test_a_restored_stream_goes_on_as_if_nothing_had_happened():
    stream = PromptStream(five(), seed=3)
    taken(stream, 8)
    stream.queue_again(2, 1)
    cursor, waiting = stream.cursor, stream.waiting
    stream.queue_again(3, 1)
    assert waiting == [(2, 1)], "a saved position doesn't change"
    stream.restore(cursor, waiting)
    expected = taken(stream, 9)
    other = PromptStream(five(), seed=3)
    other.restore(cursor, waiting)
    assert taken(other, 9) == expected
    stream.restore(cursor, waiting)
    assert taken(stream, 9) == expected
