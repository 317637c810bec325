"""Messages about wrong keys: the key as it was written, its value, what is allowed, a remedy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, field_validator

from memascend.config.block import parse_block
from memascend.config.messages import LINE_COUNT_MAX, explain, section_in, takes_units
from memascend.config.section import Nbytes, PathText, Section
from memascend.errors import ConfigError

# -- messages of any block -------------------------------------------------------------------------


class Inner(Section):
    enabled: bool = True
    place: PathText = Field(min_length=2)
    share: float = Field(0.5, gt=0)


class Example(Section):
    size: Nbytes = 4096
    limit: Nbytes | None = None
    count: int = Field(2, ge=1, le=9, multiple_of=2)
    mode: Literal["a", "b"] | None = None
    level: int | str = 1
    inner: Inner | None = None
    several: tuple[Inner, ...] = ()
    even: Annotated[int, Field(ge=0)] = 0

    @field_validator("even")
    @classmethod
    def _check_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("odd numbers have no half")
        return value


def message(content: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Example.model_validate(content)
    return explain(caught.value, model=Example, root="root")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"counts": 1}, ["root.counts: unknown key", "'count'", "several, size"]),
        ({"nothing like it": 1}, ["root.nothing like it: unknown key"]),
        ({"inner": {"plac": "/a", "place": "/a"}}, ["root.inner.plac: ", "'place'", "share"]),
        ({"inner": {}}, ["root.inner.place is missing in {}", "text", "at least 2 long"]),
        ({"inner": {"place": "a"}}, ['root.inner.place: "a" ', "at least 2 long"]),
        ({"inner": {"place": "/a", "share": 0}}, ["root.inner.share: 0 ", "above 0", "0.5"]),
        ({"inner": False}, ["root.inner: false ", '{"enabled": false}']),
        ({"count": 10}, ["root.count: 10 ", "a whole number", "at least 1 and at most 9"]),
        ({"count": 3}, ["root.count: 3 ", "a multiple of 2", "Leave the key out for 2."]),
        ({"mode": "c"}, ['root.mode: "c" ', '"a" or "b"', "automatic"]),
        ({"size": [1]}, ["root.size: [1] ", '"512MiB"', "Leave the key out for 4096."]),
        ({"even": 3}, ["root.even: 3 ", "odd numbers have no half", "at least 0"]),
        ({"several": 3}, ["root.several: 3 ", "a list"]),
        ({"several": ({"place": "/a"}, 7)}, ["root.several[1]: 7 ", "a path, or an object"]),
        ({"several": ({"place": "/a", "shares": 1},)}, ["root.several[0].shares: ", "'share'"]),
    ],
)
def test_a_message_names_key_value_and_what_is_allowed(content: object, parts: list[str]) -> None:
    text = message(content)
    assert len(text.splitlines()) == 1
    for part in parts:
        assert part in text


def test_no_key_is_suggested_that_is_not_near() -> None:
    assert "Did you mean" not in message({"nothing like it": 1})


def test_a_key_of_several_types_is_explained_once() -> None:
    for value in ([1], None, 1.5):
        text = message({"level": value})
        assert text.count("root.level") == 1
        assert "a whole number or text" in text


def test_every_wrong_key_is_explained_up_to_a_limit() -> None:
    lines = message({"count": 0, "mode": "c", "inner": 3}).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["root.count", "root.mode", "root.inner"]
    lines = message({f"{index}" * 500: 1 for index in range(2000)}).splitlines()
    assert len(lines) == LINE_COUNT_MAX + 1
    assert "more" in lines[-1]
    assert sum(map(len, lines)) < 20_000


def test_a_block_that_is_no_object_is_explained() -> None:
    assert message([1]).startswith("root: [1] is not allowed")


def test_only_sizes_take_units() -> None:
    assert [name for name in Example.model_fields if takes_units(Example, name)] == [
        "size",
        "limit",
    ]


@pytest.mark.parametrize(
    ("annotation", "section"),
    [
        (Inner, Inner),
        (Inner | None, Inner),
        (tuple[Inner, ...], Inner),
        (Annotated[tuple[Inner, ...], Field()] | None, Inner),
        (int | str | None, None),
        (Literal["a"], None),
    ],
)
def test_the_section_in_a_type_is_found(annotation: object, section: type | None) -> None:
    assert section_in(annotation) is section


# -- messages of the block -------------------------------------------------------------------------


def refusal(block: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_block(block)
    return str(caught.value)


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    text = refusal({"direct_nvme": {"queue_dept": 8}})
    for part in ("memascend.direct_nvme.queue_dept: unknown key", "'queue_depth'", "chunk_bytes"):
        assert part in text
    assert "Did you mean 'buffer_pool'" in refusal({"bufer_pool": {}})


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        ({"direct_nvme": {"queue_depth": 0}}, ["direct_nvme.queue_depth: 0 ", "least 1", "4096"]),
        (
            {"direct_nvme": {"engine": "aio"}},
            ['"aio"', '"uring" or "libaio" or "threads"', "automatic"],
        ),
        ({"direct_nvme": {"queue_depth": "lots"}}, ['"lots"', "a whole number", "out for 64"]),
        (
            {"direct_nvme": {"chunk_bytes": "1MB"}},
            ["chunk_bytes: 1000000 ", '"512MiB"', "least 65536", "most 67108864", "of 65536"],
        ),
        ({"allocator": False}, ["allocator: false ", '{"enabled": false}']),
        ({"report": 3}, ["report: 3 ", "text", "Leave the key out for none"]),
        ({"buffer_pool": {"prefetch_bytes": "64 parsecs"}}, ["prefetch_bytes", "64 parsecs"]),
        ({"host_memory_limit": [1]}, ["host_memory_limit: [1] "]),
    ],
)
def test_a_wrong_value_is_refused_in_the_words_of_json(
    block: dict[str, Any], parts: list[str]
) -> None:
    text = refusal(block)
    assert text.count("memascend.") == 1
    for part in parts:
        assert part in text


@pytest.mark.parametrize("block", [{"\ud800": 1}, {"report": [], "\udcff": 1}])
def test_a_key_that_is_no_text_is_refused(block: dict[str, Any]) -> None:
    assert "is not allowed as a key. Known: activations, allocator" in refusal(block)


@pytest.mark.parametrize(
    ("block", "hint"),
    [
        ({"HOST_MEMORY_LIMIT": "1GiB"}, "Did you mean 'host_memory_limit'?"),
        ({"queue_depth": 8}, "Did you mean 'memascend.direct_nvme.queue_depth'?"),
        ({"streaming": {"tile_bytes": 1}}, "'memascend.streaming.optimizer.tile_bytes'?"),
        ({"micro_batches": {"enabled": False}}, "Leave the section out to turn it off."),
    ],
)
def test_a_key_that_is_elsewhere_or_in_capitals_is_named(block: dict[str, Any], hint: str) -> None:
    assert hint in refusal(block)
    assert "Did you mean" not in refusal({"something else": 1})
