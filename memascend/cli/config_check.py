"""The check of a DeepSpeed JSON in `memascend doctor --config`; needs neither model nor device."""

from __future__ import annotations

import os
from pathlib import Path

from memascend.base.json_text import read_json_object
from memascend.config.block import active_config
from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.attach.refusals import check_config
from memascend.errors import ConfigError
from memascend.plan.muon import advise_muon
from memascend.plan.release import check_settings, refusal_of_tiles, why_tiles_differ


def check_file(path: Path) -> tuple[str, str, str]:
    """Return (state, finding, remedy) of a file: state as a doctor's Check has it.

    "problem" if a run would refuse it; "note" if it would refuse it for most models, or if
    gradient_clipping would divide Muon's updates.
    """
    try:
        ds_config = read_json_object(path)
        block = active_config(ds_config)
        if block is None:
            return "note", f"{path}: no block turns memascend on, DeepSpeed runs as it is", ""
        settings = parse_deepspeed(ds_config)
        check_config(settings)
        check_settings(block, settings)
    except ConfigError as error:
        remedy = f"change {path}" if os.path.exists(path) else "name a file that exists"
        return "problem", str(error), remedy
    if reason := why_tiles_differ(block, settings):
        return "note", str(refusal_of_tiles(reason)), ""
    if advice := advise_muon(None, settings):
        found, _, remedy = advice.partition(". ")
        return "note", found, remedy
    return "ok", f"{path}: no setting is refused", ""
