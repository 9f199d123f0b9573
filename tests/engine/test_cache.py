"""The teacher cache on storage."""

from dataclasses import replace

import fsspec
import pytest

from engine.cache import TeacherCache, key
from engine.prompts import Prompt, to_batch
from engine.schema import SCORED, validate
from tests.engine.fakes import prompts, rollout_batch, scored_batch

SETTINGS = {"teacher": "abc", "temperature": 1.0, "dtype": "float32", "max_new_tokens": 9}
PROMPTS = [
    Prompt("a", "one", (1, 2), "4", "exact"),
    Prompt("b", "two", (3,), None, "exact"),
]


def scored(versions):
    batch = to_batch(prompts(len(versions)), range(len(versions)), [0] * len(versions))
    return scored_batch(rollout_batch(batch, versions))


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    if request.param == "local":
        yield str(tmp_path / "cache")
    else:
        yield "memory://opdflow-test/cache"
        fsspec.filesystem("memory").rm("/opdflow-test", recursive=True)


def test_a_batch_comes_back_as_it_was_written(url):
    cache, batch = TeacherCache(url), scored([[1, 1, 2], [3], [0, 4]])
    cache.write("entry", batch)
    read = TeacherCache(url).read("entry")
    assert read.equals(batch)
    validate(read, SCORED)


def test_a_slice_is_written_without_its_surroundings(url):
    cache, batch = TeacherCache(url), scored([[1, 1, 2], [3], [0, 4]])
    cache.write("entry", batch.slice(1, 1))
    assert cache.read("entry").to_pylist() == batch.to_pylist()[1:2]


def test_another_key_is_not_there(url):
    cache = TeacherCache(url)
    cache.write("entry", scored([[1]]))
    assert cache.read("other") is None
    assert TeacherCache(url + "-empty").read("entry") is None


def test_an_entry_is_replaced_as_a_whole_and_no_draft_is_left(url):
    cache = TeacherCache(url)
    cache.write("entry", scored([[1] * 50]))
    cache.write("entry", scored([[2]]))
    assert cache.read("entry").equals(scored([[2]]))
    files, folder = fsspec.core.url_to_fs(url)
    assert [path.split("/")[-1] for path in files.ls(folder, detail=False)] == ["entry.arrow"]


def test_the_key_is_the_same_for_the_same_content():
    again = [replace(prompt, id="other name", text="other text") for prompt in PROMPTS]
    assert key(PROMPTS, **SETTINGS) == key(again, **dict(reversed(SETTINGS.items())))


def test_the_key_changes_with_each_setting_and_each_prompt():
    changes = [
        *(key(PROMPTS, **SETTINGS | {name: "changed"}) for name in SETTINGS),
        key(PROMPTS, **SETTINGS, seed=0),
        key(PROMPTS[:1], **SETTINGS),
        key(PROMPTS[::-1], **SETTINGS),
        key([replace(PROMPTS[0], ids=(1, 3)), PROMPTS[1]], **SETTINGS),
        key([replace(PROMPTS[0], ids=(1,)), replace(PROMPTS[1], ids=(2, 3))], **SETTINGS),
        key([replace(PROMPTS[0], answer="5"), PROMPTS[1]], **SETTINGS),
        key([replace(PROMPTS[0], answer=None), PROMPTS[1]], **SETTINGS),
        key([replace(PROMPTS[0], verifier="boxed"), PROMPTS[1]], **SETTINGS),
    ]
    assert len({key(PROMPTS, **SETTINGS), *changes}) == 1 + len(changes)
