"""The check of a DeepSpeed JSON in `memascend doctor --config`; needs neither model nor device."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from memascend.base.json_text import read_json_object
from memascend.cli.plan_accounts import volumes_of
from memascend.config.block import active_config
from memascend.config.deepspeed import parse_deepspeed
from memascend.config.volumes import VolumeConfig
from memascend.deepspeed.attach.refusals import check_config, check_report
from memascend.errors import ConfigError
from memascend.plan.muon import advise_muon
from memascend.plan.release import check_settings, refusal_of_tiles, why_tiles_differ


def check_file(path: Path) -> tuple[str, str, str]:
    """Return (state, finding, remedy) of a file: state as a doctor's Check has it.

    "problem" if a run would refuse it; "note" if it would refuse it for most models, or if
    gradient_clipping would divide Muon's updates, or weights are fp32.
    """
    try:
        ds_config = read_json_object(path)
        block = active_config(ds_config)
        if block is None:
            return "note", f"{path}: no block turns memascend on, DeepSpeed runs as it is", ""
        settings = parse_deepspeed(ds_config)
        check_config(settings)
        check_settings(block, settings)
        check_report(block)
    except ConfigError as error:
        remedy = f"change {path}" if os.path.exists(path) else "name a file that exists"
        return "problem", str(error), remedy
    if reason := why_tiles_differ(block, settings):
        return "note", str(refusal_of_tiles(reason)), ""
    if advice := advise_muon(None, settings):
        found, _, remedy = advice.partition(". ")
        return "note", found, remedy
    if settings.precision == "fp32" and not settings.torch_autocast.enabled:
        found = f"{path}: neither bf16 nor fp16: weights of 4 bytes, which move twice the bytes"
        return "note", found, 'add "bf16": {"enabled": true} if fp32 is not meant'
    return "ok", f"{path}: no setting is refused", ""


def volumes_in(path: Path) -> tuple[VolumeConfig, ...]:
    """Return the volumes that a JSON names; none if the file is wrong, or memascend is off."""
    with contextlib.suppress(ConfigError):
        ds_config = read_json_object(path)
        block = active_config(ds_config)
        if block is not None:
            return volumes_of(parse_deepspeed(ds_config), block)
    return ()
