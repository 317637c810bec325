"""The `volumes` key: what it takes, and refusals that name key, value, range and nearest key."""

from __future__ import annotations

import json

import pytest

from memascend.config.block import parse_block
from memascend.errors import ConfigError


def refusal(volumes: object, **block: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_block({"volumes": volumes, **block})
    return str(caught.value)


def test_a_path_alone_is_a_volume():
    paths, objects = (
        parse_block({"volumes": ["/a", "/b"]}),
        parse_block({"volumes": [{"path": "/a"}, {"path": "/b"}]}),
    )
    assert paths.volumes == objects.volumes
    assert paths.volumes is not None
    assert (paths.volumes[0].weight, paths.volumes[0].raw, paths.volumes[0].capacity) == (
        None,
        False,
        None,
    )


def test_left_out_it_is_deepspeeds_nvme_path():
    assert parse_block({}).volumes is None
    assert parse_block({"volumes": None}).volumes is None


def test_a_capacity_takes_units():
    volumes = parse_block({"volumes": [{"path": "/a", "capacity": "200GiB"}]}).volumes
    assert volumes is not None
    assert volumes[0].capacity == 200 << 30


@pytest.mark.parametrize("wrong", [[], {}, "/a", 7])
def test_anything_but_a_list_of_some_is_refused(wrong):
    assert "memascend.volumes: " in refusal(wrong)
    assert "Allowed: a list of one or more directories" in refusal(wrong)


def test_too_many_volumes_are_refused():
    assert "65 volumes are not allowed" in refusal([f"/{index}" for index in range(65)])


def test_a_wrong_key_is_named_with_its_place_and_the_nearest_one():
    text = refusal(["/a", {"path": "/b", "wieght": 2}])
    assert "memascend.volumes[1].wieght: unknown key" in text
    assert "Known: capacity, path, raw, weight" in text
    assert "Did you mean 'weight'?" in text


@pytest.mark.parametrize("wrong", [0, -1, 1001, float("nan"), float("inf"), "2", True])
def test_a_weight_out_of_range_names_value_and_range(wrong):
    text = refusal([{"path": "/a", "weight": wrong}])
    assert f"memascend.volumes[0].weight: {json.dumps(wrong)} is not allowed" in text
    assert "at least 0.001 and at most 1000" in text


def test_a_volume_without_a_path_is_refused():
    assert "memascend.volumes[0].path is missing" in refusal([{"weight": 1}])
    assert 'memascend.volumes[0].path: "" is not allowed' in refusal([""])
    assert "null byte" in refusal(["/a\0b"])
    assert "memascend.volumes[1]: 7 is not allowed" in refusal(["/a", 7])


@pytest.mark.parametrize("wrong", ["a lot", 1, -1, 1 << 61])
def test_a_capacity_out_of_range_names_value_and_range(wrong):
    text = refusal([{"path": "/a", "capacity": wrong}])
    assert f"memascend.volumes[0].capacity: {json.dumps(wrong)} is not allowed" in text
    assert "at least 1048576" in text


def test_the_same_path_twice_is_refused():
    assert 'memascend.volumes[1].path: "/a/../a/" is stated twice' in refusal(["/a", "/a/../a/"])


def test_weights_are_stated_for_all_or_none():
    text = refusal([{"path": "/a", "weight": 1}, "/b"])
    assert "memascend.volumes[1].weight is missing" in text


def test_volumes_need_our_engine():
    text = refusal(["/a"], direct_nvme={"enabled": False})
    assert "memascend.volumes needs memascend.direct_nvme" in text
