"""The `volumes` key of the block: what a user may say of each drive.

Values and refusals only; whether a drive is there is asked in volumes.py.
"""

from __future__ import annotations

import os

from pydantic import BaseModel, ConfigDict, Field, field_validator

from memascend.base.json_text import show_json
from memascend.base.units import parse_nbytes

KEY = "memascend.volumes"
VOLUME_COUNT_MAX = 64


class VolumeConfig(BaseModel):
    """One drive of several; a path alone does, too."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: str = Field(min_length=1, description="directory on the drive; with `raw` its device")
    weight: float | None = Field(
        None,
        ge=0.001,
        le=1000,
        description="share of the bytes, against the other drives'; left out: measured at start",
    )
    raw: bool = Field(False, description="`path` is a block device that memascend has to itself")
    capacity: int | None = Field(
        None,
        ge=1 << 20,
        le=1 << 60,
        description="use at most so much of it; left out: all there is",
    )

    @field_validator("path")
    @classmethod
    def _check_path(cls, value: str) -> str:
        check_path(value)
        return value

    @field_validator("capacity", mode="before")
    @classmethod
    def _accept_units(cls, value: object) -> object:
        return parse_nbytes(value) if isinstance(value, str) else value


def check_path(value: str) -> None:
    """Refuses what no file can be called.

    Raises:
        ValueError: It has a null byte, or half of a character.
    """
    if "\0" in value:
        raise ValueError("a path has no null byte")
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise ValueError("a path has no half of a surrogate pair") from None


def accept_paths(value: object) -> object:
    """Makes an object of each path.

    Raises:
        ValueError: Not a list with something in it, or with too much.
    """
    if value is None:
        return value
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(
            f"{KEY}: {show_json(value)} is not allowed. Allowed: a list of one or more "
            'directories, or of objects such as {"path": "/mnt/nvme1", "weight": 2}. Leave the key '
            "out for nvme_path"
        )
    if len(value) > VOLUME_COUNT_MAX:
        raise ValueError(
            f"{KEY}: {len(value)} volumes are not allowed. Allowed: at most {VOLUME_COUNT_MAX}"
        )
    return tuple({"path": item} if isinstance(item, str) else item for item in value)


def check_together(volumes: tuple[VolumeConfig, ...], *, direct_nvme: bool) -> None:
    """Compares the volumes with each other and with the section that serves them.

    Raises:
        ValueError: A path is there twice, some weights are stated and others not, or `direct_nvme`
            is off.
    """
    paths = [os.path.abspath(volume.path) for volume in volumes]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise ValueError(
                f"{KEY}[{index}].path: {show_json(volumes[index].path)} is there twice. Name each "
                "drive once; a larger weight gives it more of the bytes"
            )
    unstated = [index for index, volume in enumerate(volumes) if volume.weight is None]
    if 0 < len(unstated) < len(volumes):
        raise ValueError(
            f"{KEY}[{unstated[0]}].weight is missing, though other volumes state theirs. State it "
            "for all of them, or for none to have them measured"
        )
    if not direct_nvme:
        raise ValueError(
            f"{KEY} needs memascend.direct_nvme, which is off: DeepSpeed's own engine knows one "
            "directory. Turn it on, or leave volumes out"
        )
