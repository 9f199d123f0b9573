"""The catalogue of metrics can't lag behind the code."""

import re

import pytest

from engine.metrics import CATALOGUE, UnknownMetricError, by_age, checked

AGED = {
    "policy/effective_sample",
    "policy/ratio_q05",
    "policy/ratio_q95",
    "policy/clipped_share",
    "cache/tail_mass",
}


def test_known_metrics_pass_unchanged():
    values = {"train/loss": 0.5, "wait/learner": 2.0}
    assert checked(values) == values
    assert checked({}) == {}


def test_unknown_metrics_are_an_error_that_names_all_of_them():
    with pytest.raises(UnknownMetricError, match=r"train/tone, train/vibes"):
        checked({"train/vibes": 1.0, "train/loss": 0.5, "train/tone": 2.0})


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_metric_is_known_for_each_age_only_where_the_catalogue_says_so(name):
    values = {by_age(name, age): 0.5 for age in (0, 3, 12)}
    if name in AGED:
        assert checked(values) == values
    else:
        with pytest.raises(UnknownMetricError, match=f"{name}/age_0, {name}/age_12, {name}/age_3"):
            checked(values)


@pytest.mark.parametrize("age", ["", "-1", "1.5", "old", "3/age_3"])
def test_an_age_is_a_whole_number(age):
    with pytest.raises(UnknownMetricError):
        checked({f"policy/ratio_q05/age_{age}": 0.5})


@pytest.mark.parametrize("name", CATALOGUE)
def test_each_metric_says_what_it_is_and_in_which_unit(name):
    metric = CATALOGUE[name]
    assert metric.unit
    assert len(metric.meaning.split()) > 2
    assert re.fullmatch(r"[a-z]+/[a-z_0-9]+", name), "a group and a name, as trackers show them"
