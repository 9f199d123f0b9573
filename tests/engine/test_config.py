"""The configuration: read strictly, explained well."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from engine.config import (
    M2PO,
    Clipped,
    ConfigError,
    Decoupled,
    Dense,
    ForwardKL,
    JensenShannon,
    MultiSample,
    Poisson,
    ReverseKL,
    RunConfig,
    Sampled,
    StudentTopK,
    TeacherHidden,
    TeacherMultiSample,
    TeacherTopK,
    TopKTail,
    Unclipped,
    load,
    parse,
    valid_keys,
)

MINIMAL = """
[student]
model = "s"
[teacher]
model = "t"
[prompts]
path = "p.jsonl"
[evaluation]
path = "e.jsonl"
[training]
steps = 3
"""
REQUIRED = ["student", "teacher", "prompts", "evaluation", "training"]
DEPLOYMENTS = Path(__file__).parents[2] / "deployments"
RUNS = sorted(set(DEPLOYMENTS.glob("*.toml")) - {DEPLOYMENTS / "study.toml"})  # of many runs


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def minimal() -> dict:
    return {
        "student": {"model": "s"},
        "teacher": {"model": "t"},
        "prompts": {"path": "p.jsonl"},
        "evaluation": {"path": "e.jsonl"},
        "training": {"steps": 3},
    }


# Reading


def test_a_minimal_file_is_read_and_the_rest_is_default(file):
    config = load(file)
    assert config == parse(minimal(), "here")
    assert config.training.steps == 3
    assert config.staleness.max == 1
    assert config.estimator == ReverseKL(cache=TeacherHidden())


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_shipped_configuration_loads(path):
    # Paths are the user's, or the demo's to fill in.
    paths = ["student.model=s", "teacher.model=t", "prompts.path=p", "evaluation.path=e"]
    assert load(path, paths).training.steps > 0


def test_the_example_needs_nothing_but_its_file():
    assert load(DEPLOYMENTS / "example.toml").student.model


@pytest.mark.parametrize("table", REQUIRED)
def test_a_required_table_that_is_missing_is_named(table):
    data = minimal()
    del data[table]
    with pytest.raises(ConfigError, match=f"^run.toml: `{table}` is required and missing$"):
        parse(data, "run.toml")


@pytest.mark.parametrize("key", ["student.model", "prompts.path", "training.steps"])
def test_a_required_key_that_is_missing_is_named(key):
    data = minimal()
    table, leaf = key.split(".")
    del data[table][leaf]
    with pytest.raises(ConfigError, match=f"`{key}` is required and missing"):
        parse(data, "run.toml")


def test_all_that_is_wrong_is_told_at_once(file):
    file.write_text(MINIMAL + "[rollout]\nworkers = 0\nslotz = 3\n")
    with pytest.raises(ConfigError) as error:
        load(file)
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{file}: ") for line in lines)


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing.toml: no such configuration file"):
        load(tmp_path / "missing.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[student\nmodel = 1")
    with pytest.raises(ConfigError, match=r"bad.toml: not valid TOML: .*line 1"):
        load(bad)


# Unknown keys


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("trainning", "training"),
        ("training.step", "training.steps"),
        ("rollout.temprature", "rollout.temperature"),
        ("staleness.maximum", "staleness.max"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("estimator.cache.nn", "estimator.cache.n"),
        # Right, but in another table.
        ("training.lr", "optimizer.lr"),
        ("max_new_tokens", "rollout.max_new_tokens"),
        ("scoring.k", "estimator.cache.k"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(file, unknown, nearest):
    given = ["estimator.type=reverse_kl", "estimator.cache.type=poisson", f"{unknown}=1"]
    with pytest.raises(ConfigError) as error:
        load(file, given)
    assert str(error.value) == f"{file}: unknown key `{unknown}`; did you mean `{nearest}`?"


def test_a_key_that_is_like_no_other_is_refused_without_a_guess(file):
    with pytest.raises(ConfigError, match=r"unknown key `zzzzzzzz`$"):
        load(file, ["zzzzzzzz=1"])


def test_the_valid_keys_are_those_that_a_file_may_hold():
    keys = list(valid_keys())
    assert {"seed", "training.steps", "estimator.cache.k", "estimator.cache.n"} <= set(keys)
    assert "estimator.poisson.n" not in keys, "a variant's tag is no table"
    assert "model_config" not in keys


# Overrides


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("training.batch=32", 32),
        ("training.batch = 32", 32),
        ("rollout.temperature=0.5", 0.5),
        ("rollout.temperature=1", 1.0),
        ("student.trust_remote_code=true", True),
        ("student.model=models/mine", "models/mine"),
        ('student.model="models/mine"', "models/mine"),
        ("student.model=a = b", "a = b"),
        ("student.model=", ""),
        ("tracking.uri=http://host:5000", "http://host:5000"),
        ("staleness.older=wait", "wait"),
        ("prompts.template={enable_thinking = false}", {"enable_thinking": False}),
        ("prompts.template.enable_thinking=false", {"enable_thinking": False}),
    ],
)
def test_an_override_sets_a_key_in_its_type(file, override, value):
    section, key = override.partition("=")[0].strip().split(".")[:2]
    found = getattr(getattr(load(file, [override]), section), key)
    assert found == value
    assert type(found) is type(value)


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(file):
    assert load(file, ["training.steps=8", "training.steps=9"]).training.steps == 9
    assert load(file, ["seed=4"]).seed == 4


@pytest.mark.parametrize("override", ["training.steps", "=3", ""])
def test_an_override_without_key_and_value_is_refused(file, override):
    with pytest.raises(ConfigError, match=r"write key.sub=value"):
        load(file, [override])


def test_an_override_into_a_value_is_refused(file):
    with pytest.raises(ConfigError, match="'steps' is a value, not a table"):
        load(file, ["training.steps.more=3"])


# Values


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("training.steps=0", "`training.steps`: .*greater than 0 .got 0."),
        ("training.batch=many", "`training.batch`: .*integer.*got 'many'"),
        ("training.batch=1.5", "`training.batch`: .*integer.*got 1.5"),
        ("rollout.temperature=0", "`rollout.temperature`: .*greater than 0"),
        ("staleness.max=-1", "`staleness.max`: .*greater than or equal to 0"),
        ("staleness.older=forget", "`staleness.older`: .*'mask', 'drop' or 'wait'.*'forget'"),
        ("scoring.flush_seconds=-1", "`scoring.flush_seconds`"),
        ("optimizer.final_fraction=2", "`optimizer.final_fraction`: .*less than or equal to 1"),
        ("prompts.too_long=cut", "`prompts.too_long`: .*'refuse' or 'skip'"),
        ("checkpoint.keep=0", "`checkpoint.keep`"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_key_and_what_is_allowed(file, override, says):
    with pytest.raises(ConfigError, match=says):
        load(file, [override])


def test_more_mini_batches_than_responses_are_refused(file):
    with pytest.raises(
        ConfigError, match=r"mini_batches \(5\) is larger than training.batch \(4\)"
    ):
        load(file, ["training.batch=4", "training.mini_batches=5"])


@pytest.mark.parametrize(
    "uri", ["http://me:secret@host:5000", "https://secret@host", "postgresql://me:secret@host/db"]
)
def test_a_password_in_the_tracking_uri_is_refused_and_not_repeated(file, uri):
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as error:
        load(file, [f"tracking.uri={uri}"])
    assert "secret" not in str(error.value)


def test_a_tracking_uri_may_hold_an_at_sign_behind_its_host(file):
    uri = "http://host:5000/a@b"
    assert load(file, [f"tracking.uri={uri}"]).tracking.uri == uri


# Unions


@pytest.mark.parametrize(
    ("overrides", "estimator"),
    [
        (["estimator.type=reverse_kl"], ReverseKL(cache=TeacherHidden())),
        (["estimator.type=forward_kl"], ForwardKL(cache=TeacherHidden())),
        (
            ["estimator.type=reverse_kl", 'estimator.cache={type = "sampled"}'],
            ReverseKL(cache=Sampled()),
        ),
        (
            ["estimator.type=forward_kl", 'estimator.cache={type = "dense"}'],
            ForwardKL(cache=Dense()),
        ),
        (
            ["estimator.type=reverse_kl", 'estimator.cache={type = "poisson", n = 8}'],
            ReverseKL(cache=Poisson(n=8)),
        ),
        (
            ["estimator.type=reverse_kl", 'estimator.cache={type = "poisson", top_k = 4}'],
            ReverseKL(cache=Poisson(top_k=4)),
        ),
        (
            ["estimator.type=reverse_kl", 'estimator.cache={type = "multi_sample", n = 65535}'],
            ReverseKL(cache=MultiSample(n=65535, distinct=False)),
        ),
        (
            [
                "estimator.type=reverse_kl",
                'estimator.cache={type = "multi_sample", distinct = true}',
            ],
            ReverseKL(cache=MultiSample(n=64, distinct=True)),
        ),
        (
            ["estimator.type=reverse_kl", 'estimator.cache={type = "student_top_k"}'],
            ReverseKL(cache=StudentTopK(k=16, rest="bucket")),
        ),
        (
            ["estimator.type=reverse_kl", 'estimator.cache={type = "top_k_tail", n = 8}'],
            ReverseKL(cache=TopKTail(k=16, n=8, alpha=0.75)),
        ),
        (
            ["estimator.type=forward_kl", 'estimator.cache={type = "teacher_multi_sample"}'],
            ForwardKL(cache=TeacherMultiSample(n=64)),
        ),
        (["estimator.type=jsd"], JensenShannon(beta=0.5, cache=TeacherHidden())),
        (
            ["estimator.type=jsd", "estimator.beta=0", 'estimator.cache={type = "teacher_top_k"}'],
            JensenShannon(beta=0, cache=TeacherTopK()),
        ),
    ],
)
def test_a_variant_is_chosen_by_its_type(file, overrides, estimator):
    assert load(file, overrides).estimator == estimator


@pytest.mark.parametrize(
    ("table", "stabiliser"),
    [
        (
            '{type = "none", signal = "rollout", ratio = false}',
            Unclipped(signal="rollout", ratio=False),
        ),
        ('{type = "clip"}', Clipped(signal="learner", eps=0.2)),
        ('{type = "decoupled", cap = 3}', Decoupled(signal="learner", eps=0.2, cap=3)),
        ('{type = "m2po", signal = "rollout"}', M2PO(signal="rollout", budget=0.01)),
    ],
)
def test_a_stabiliser_is_chosen_by_its_type(file, table, stabiliser):
    cache = 'estimator.cache={type = "poisson", max_ratio = 0}'
    given = ["estimator.type=reverse_kl", cache, f"estimator.stabiliser={table}"]
    expected = ReverseKL(cache=Poisson(max_ratio=0), stabiliser=stabiliser)
    assert load(file, given).estimator == expected


@pytest.mark.parametrize(
    ("estimator", "says"),
    [
        (
            {"cache": {"type": "student_top_k", "k": 1, "rest": "renormalise"}},
            r'`estimator.cache` k = 1 .* nothing to learn; raise k, or set rest = "bucket"',
        ),
        *(
            (
                {"cache": {"type": cache}, "stabiliser": {"type": "clip"}},
                rf"`estimator` the cache `{cache}` .* leave out estimator.stabiliser, or take a "
                "cache that is drawn",
            )
            for cache in ("dense", "teacher_hidden", "student_top_k")
        ),
        (
            {"cache": {"type": "poisson"}, "stabiliser": {"type": "m2po"}},
            r"`estimator` estimator.cache.max_ratio and estimator.stabiliser .*max_ratio = 0",
        ),
        *(
            (
                {"type": "jsd", "beta": 0, "cache": {"type": cache}},
                rf"`estimator` beta = 0 .* `{cache}` .* take teacher_top_k",
            )
            for cache in ("poisson", "student_top_k")
        ),
        *(
            (
                {"type": kind, "cache": {"type": cache, "n": 2**16}},
                r"`estimator.cache.n`: .*less than 65536 \(got 65536\)",
            )
            for kind, cache in (
                ("reverse_kl", "multi_sample"),
                ("forward_kl", "teacher_multi_sample"),
            )
        ),
    ],
)
def test_an_estimator_that_makes_no_sense_is_refused_with_what_to_do(estimator, says):
    with pytest.raises(ConfigError, match=f"^run.toml: {says}"):
        parse(minimal() | {"estimator": {"type": "reverse_kl"} | estimator}, "run.toml")


def test_the_default_stabiliser_stands_beside_any_cache():
    for cache in ({"type": "dense"}, {"type": "poisson", "max_ratio": 2.0}):
        estimator = {"type": "reverse_kl", "cache": cache, "stabiliser": {"type": "none"}}
        loaded = parse(minimal() | {"estimator": estimator}, "run.toml").estimator
        assert loaded.stabiliser == Unclipped()


def test_a_variant_takes_no_key_of_another(file):
    given = ["estimator.type=reverse_kl", 'estimator.cache={type = "sampled", n = 8}']
    with pytest.raises(ConfigError, match=r"`estimator.cache.n` is a key of another type"):
        load(file, given)


def test_a_cache_that_an_estimator_does_not_work_with_is_refused(file):
    given = ["estimator.type=forward_kl", 'estimator.cache={type = "poisson"}']
    with pytest.raises(
        ConfigError, match=r"`estimator.cache`: .*'teacher_multi_sample', 'teacher_hidden'"
    ):
        load(file, given)


def test_an_unknown_variant_is_refused_with_the_known_ones(file):
    with pytest.raises(ConfigError, match=r"`estimator`: .*'reverse_kl', 'forward_kl', 'jsd'"):
        load(file, ["estimator.type=jensen_shannon"])


# Documentation, freezing


def test_every_field_is_documented_in_the_schema():
    schema = RunConfig.model_json_schema()
    sections = schema["$defs"] | {"RunConfig": schema}
    for name, section in sections.items():
        assert len(section["description"].split()) > 0, name
        for key, field in section["properties"].items():
            # A table is described by its section, and a variant's tag by its variant.
            tables = [field, *field.get("anyOf", []), *field.get("oneOf", [])]
            table = any("$ref" in part for part in tables)
            described = len(field.get("description", "").split()) > 1
            assert described or table or "const" in field, f"{name}.{key} has no docstring"
    assert len(sections) > 15


def test_a_configuration_can_not_be_changed(file):
    config = load(file)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.training.steps = 5


def test_a_configuration_survives_being_written_as_json(file):
    config = load(file, ["estimator.type=forward_kl", "seed=9"])
    assert parse(config.model_dump(mode="json"), "json") == config
