"""The block: defaults, refusals that help, and where it comes from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memascend.config import block as config
from memascend.config.environment import CONFIG_VARIABLE
from memascend.errors import ConfigError
from tests.support.sections import SECTIONS


def test_an_empty_block_turns_every_section_on() -> None:
    parsed = config.parse_block({})
    assert parsed.sections_enabled == SECTIONS


def turned_off(*names: str) -> dict[str, Any]:
    """A block with these sections off; a dot leads into a section."""
    block: dict[str, Any] = {}
    for name in names:
        parent, _, child = name.rpartition(".")
        place = block.setdefault(parent, {}) if parent else block
        place[child] = {"enabled": False}
    return block


@pytest.mark.parametrize("section", config.parse_block({}).sections_enabled)
def test_each_section_can_be_turned_off_by_one_key(section: str) -> None:
    parsed = config.parse_block(turned_off(section))
    assert section not in parsed.sections_enabled
    assert len(parsed.sections_enabled) == 6


def test_null_is_the_word_that_accelerate_refuses() -> None:
    for value in (None, "auto"):
        block = {"streaming": {"optimizer": {"during_backward": value}}}
        assert config.parse_block(block).streaming.optimizer.during_backward == "auto"


@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_enabled_takes_only_true_or_false(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"memascend\.allocator\.enabled"):
        config.parse_block({"allocator": {"enabled": wrong}})


@pytest.mark.parametrize("wrong", ["", 5, None])
def test_the_status_takes_a_folder_or_whether_there_is_one(wrong: object) -> None:
    for value in (True, False, "folder"):
        assert config.parse_block({"status": value}).status == value
    with pytest.raises(ConfigError, match=r"memascend\.status: .*true or false or text"):
        config.parse_block({"status": wrong})


def test_sizes_take_units() -> None:
    parsed = config.parse_block({"buffer_pool": {"prefetch_bytes": "64MiB"}})
    assert parsed.buffer_pool.prefetch_bytes == 64 << 20


def test_a_size_without_a_known_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="64 parsecs"):
        config.parse_block({"buffer_pool": {"prefetch_bytes": "64 parsecs"}})


@pytest.mark.parametrize("size", [0, 1 << 10, 33 << 20])
def test_a_size_out_of_bounds_is_refused_with_key_value_and_bounds(size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse_block({"heap": {"mapped_bytes_min": size}})
    for part in ("memascend.heap.mapped_bytes_min", str(size), str(16 << 10), str(32 << 20)):
        assert part in str(caught.value)


def test_the_heap_alone_activates_nothing() -> None:
    block = turned_off(*SECTIONS) | {"heap": {"enabled": True}}
    assert config.active_config({"memascend": block}) is None


def test_activations_are_a_section_only_when_they_are_asked_for() -> None:
    assert "activations" not in config.parse_block({}).sections_enabled
    parsed = config.parse_block({"activations": {"enabled": True, "device_bytes": "2GiB"}})
    assert parsed.sections_enabled == (*SECTIONS, "activations")
    assert parsed.activations.device_bytes == 2 << 30


def test_activations_need_our_engine() -> None:
    block = turned_off("direct_nvme") | {"activations": {"enabled": True}}
    with pytest.raises(ConfigError, match=r"memascend\.activations needs memascend\.direct_nvme"):
        config.parse_block(block)


def test_a_block_that_is_not_an_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a JSON object"):
        config.find_block({"memascend": True})


@pytest.mark.parametrize("name", ["memasend", "MemAscend", "mem_ascend", "memascent"])
def test_a_block_that_is_misspelt_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no key of a DeepSpeed JSON\. Did you mean"):
        config.find_block({name: {"host_memory_limit": "1GiB"}})


def test_a_block_in_a_section_is_refused() -> None:
    with pytest.raises(ConfigError, match='in the section "zero_optimization"'):
        config.find_block({"zero_optimization": {"stage": 3, "memascend": {}}})


@pytest.mark.parametrize("name", ["_memascend", "#memascend", "memory", "ascend"])
def test_a_comment_and_another_key_are_no_block(name: str) -> None:
    assert config.find_block({name: {}}) is None


def test_without_a_block_nothing_is_active() -> None:
    assert config.active_config({"zero_optimization": {"stage": 3}}) is None
    assert config.active_config("some/path.json") is None


def test_enabled_false_means_not_active() -> None:
    assert config.active_config({"memascend": {"enabled": False}}) is None


def test_all_sections_off_means_not_active() -> None:
    names = config.parse_block({}).sections_enabled
    assert config.active_config({"memascend": turned_off(*names)}) is None


def test_the_environment_supplies_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps({"allocator": {"enabled": False}}))
    active = config.active_config({})
    assert active is not None
    assert not active.allocator.enabled


def test_the_block_in_the_file_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps({"allocator": {"enabled": False}}))
    active = config.active_config({"memascend": {}})
    assert active is not None
    assert active.allocator.enabled


def test_a_block_in_the_environment_that_is_not_json_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "{on}")
    with pytest.raises(ConfigError, match="MEMASCEND_CONFIG is not JSON"):
        config.find_block({})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host_memory_limit", "9" * 400 + "TiB"),
        ("host_memory_limit", 1 << 63),
        ("host_memory_limit", "1" + " " * 50_000 + "!"),
        ("report", "a\0b"),
        ("report", "\ud800"),
        ("wear", {"endurance": "9" * 5000}),
        ("wear", {"write_budget": 10**400}),
    ],
    ids=["beyond floats", "beyond files", "blanks", "null byte", "no text", "digits", "number"],
)
def test_no_value_is_beyond_a_config_error(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"memascend.{key}") as caught:
        config.parse_block({key: value})
    assert len(str(caught.value)) < 1000


def test_a_value_nested_too_deeply_to_be_shown_is_refused() -> None:
    value: object = 1
    for _ in range(900):
        value = {"a": value}
    for block in ({"volumes": value}, {"allocator": [value]}, {"streaming": {"optimizer": value}}):
        with pytest.raises(ConfigError):
            config.parse_block(block)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "9" * 5000, '{"report": "a", "report": "b"}'],
    ids=["deep", "long", "twice"],
)
def test_a_block_in_the_environment_that_cannot_be_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("MEMASCEND_CONFIG", text)
    with pytest.raises(ConfigError, match="is not JSON"):
        config.active_config({})


def test_states_are_fp32_or_bf16_and_no_third() -> None:
    assert config.parse_block({}).streaming.optimizer.state_dtype == "fp32"
    with pytest.raises(ConfigError) as caught:
        config.parse_block({"streaming": {"optimizer": {"state_dtype": "fp16"}}})
    message = str(caught.value)
    assert "memascend.streaming.optimizer.state_dtype" in message
    assert all(f'"{word}"' in message for word in ("fp16", "fp32", "bf16"))


@pytest.mark.parametrize("key", ["enabled", "fused"])
def test_states_in_bf16_need_the_one_pass_that_rounds_them(key: str) -> None:
    optimizer = {"state_dtype": "bf16", key: False}
    with pytest.raises(ConfigError) as caught:
        config.parse_block({"streaming": {"optimizer": optimizer}})
    message = str(caught.value)
    assert 'state_dtype="bf16"' in message
    assert f"streaming.optimizer.{key}" in message
    assert "Turn it on" in message
    config.parse_block({"streaming": {"optimizer": {key: False}}})


@pytest.mark.parametrize(
    ("section", "is_auto"),
    [
        ({}, True),
        ({"count": "auto"}, True),
        ({"reduction": "slice", "head": False}, True),
        ({"count": 1}, False),
        ({"sequences": 1 << 20}, False),
    ],
)
def test_slices_are_chosen_where_no_number_is_stated(
    section: dict[str, Any], is_auto: bool
) -> None:
    found = config.parse_block({"micro_batches": section}).micro_batches
    assert found is not None
    assert found.is_auto == is_auto


@pytest.mark.parametrize("wrong", [0, (1 << 20) + 1, -1, 2.5, True, "", "many", [2]])
def test_a_number_of_slices_out_of_bounds_is_refused_once(wrong: object) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse_block({"micro_batches": {"count": wrong}})
    assert str(caught.value) == (
        f"memascend.micro_batches.count: {json.dumps(wrong)} is not allowed. Allowed: "
        '"auto" or a whole number, at least 1 and at most 1048576. Leave the key out for automatic.'
    )


@pytest.mark.parametrize("count", [2, "auto"])
def test_slices_have_a_number_or_a_size(count: object) -> None:
    with pytest.raises(ConfigError, match=f"got count={json.dumps(count)} and sequences=3"):
        config.parse_block({"micro_batches": {"count": count, "sequences": 3}})
