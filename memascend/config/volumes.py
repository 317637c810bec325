"""The `volumes` key of the block: the settings of each drive.

Values and refusals only; memascend/volumes/ checks the drives themselves.
"""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from memascend.base.json_text import show_json
from memascend.config.section import Nbytes, PathText, Section

KEY = "memascend.volumes"
VOLUME_COUNT_MAX = 64


class VolumeConfig(Section):
    """One drive of several; a path alone is enough."""

    path: PathText = Field(
        min_length=1, description="directory on the drive; with `raw` its device"
    )
    weight: float | None = Field(
        None,
        ge=0.001,
        le=1000,
        description="share of the bytes, relative to other drives; left out: measured at start",
    )
    raw: bool = Field(False, description="`path` is a block device for memascend alone")
    capacity: Nbytes | None = Field(
        None, ge=1 << 20, le=1 << 60, description="bytes to use at most; left out: all"
    )


def accept_paths(value: object) -> object:
    """Convert each path of a list to an object; raise ValueError for any other value."""
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
    return tuple({"path": item} if isinstance(item, str | os.PathLike) else item for item in value)


def check_together(volumes: tuple[VolumeConfig, ...]) -> tuple[VolumeConfig, ...]:
    """Raise ValueError if a path is stated twice, or only some of the weights are."""
    paths = [os.path.abspath(volume.path) for volume in volumes]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise ValueError(
                f"{KEY}[{index}].path: {show_json(volumes[index].path)} is stated twice. Name each "
                "drive once; a larger weight gives it more of the bytes"
            )
    unstated = [index for index, volume in enumerate(volumes) if volume.weight is None]
    if 0 < len(unstated) < len(volumes):
        raise ValueError(
            f"{KEY}[{unstated[0]}].weight is missing, though other volumes state theirs. State it "
            "for all of them; without any, they are measured"
        )
    return volumes


Volumes = Annotated[
    tuple[VolumeConfig, ...], BeforeValidator(accept_paths), AfterValidator(check_together)
]
