"""The only file that assigns to DeepSpeed: watches for a block, and installs the table of seams.

Nothing is replaced until a config with an active `memascend` block is constructed; a wrapper around
DeepSpeedConfig's constructor watches for it, and one in accelerate notes the optimizer of a script.
Every replacement is a dispatcher, so models without a block run stock code after arming too.

Replacements use names that another DeepSpeed release may not have. So they are imported only after
the fingerprints are compared: another release must be refused, not end in an ImportError. Imports
that need the compiled core wait for a block: DeepSpeed's launcher, started in a clone, finds the
clone's package and not the installed one.
"""

from __future__ import annotations

import functools
import importlib
import logging
import types
from typing import Any

from memascend.config.block import active_config
from memascend.config.deepspeed import parse_deepspeed
from memascend.config.environment import is_disabled
from memascend.deepspeed.attach.refusals import check_config, check_core
from memascend.deepspeed.seams import accelerate as accelerate_seams
from memascend.deepspeed.seams import fingerprints
from memascend.deepspeed.seams import transformers as transformers_seams
from memascend.deepspeed.seams import trl as trl_seams
from memascend.deepspeed.seams.compare import compare
from memascend.deepspeed.seams.fingerprint import resolve
from memascend.deepspeed.seams.refusal import refusal
from memascend.deepspeed.seams.table import SEAMS, Seam
from memascend.errors import UnsupportedDeepSpeedError

log = logging.getLogger(__name__)

#: The original of a seam that upstream does not have.
ABSENT: Any = object()
#: The original of each seam, by name; empty while disarmed.
_originals: dict[str, Any] = {}


# -- watching for a block ------------------------------------------------------------------------


def observe(config_module: types.ModuleType) -> None:
    """Wrap DeepSpeedConfig's constructor so that a block is noticed. Idempotent.

    The config gets an active block, parsed, as its attribute `memascend`.

    Args:
        config_module: `deepspeed.runtime.config`.
    """
    config_class = config_module.DeepSpeedConfig
    original = config_class.__init__
    if is_disabled() or hasattr(original, "__memascend__"):
        return

    @functools.wraps(original)
    def construct(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        config = active_config(self._param_dict)
        if config is None:
            return
        check_core()
        from memascend.plan.release import check_release

        settings = parse_deepspeed(self._param_dict)
        check_config(settings)
        check_release(config, settings)
        self.memascend = config
        arm()
        transformers_seams.arm()
        trl_seams.arm()

    construct.__memascend__ = True  # type: ignore[attr-defined]
    config_class.__init__ = construct
    accelerate_seams.watch()


# -- arming --------------------------------------------------------------------------------------


def arm() -> None:
    """Install every seam, or none. Idempotent.

    Raises:
        UnsupportedDeepSpeedError: A definition differs from the ones the seams were written for.
    """
    if is_armed():
        return
    check_fingerprints()
    # It subclasses the optimizer: imported before arming, its base is the stock class.
    importlib.import_module("deepspeed.runtime.superoffload.superoffload_stage3")
    replacements = []
    for seam in SEAMS:
        original = find(seam)
        if original is ABSENT and seam.is_wrapper:
            continue  # this release has nothing to wrap: its fingerprints are known
        replacements.append((seam, original, seam.replace(original)))
    for seam, original, replacement in replacements:
        _originals[seam.name] = original
        _assign(seam, replacement)
    log.info("memascend: %d seams installed in DeepSpeed", len(replacements))


def disarm() -> None:
    """Restore every upstream definition."""
    transformers_seams.disarm()
    trl_seams.disarm()
    for seam in SEAMS:
        if seam.name in _originals:
            _assign(seam, _originals.pop(seam.name))


def is_armed() -> bool:
    """Return whether the seams are installed."""
    return bool(_originals)


def _assign(seam: Seam, value: Any) -> None:
    owner, name = _owner_and_name(seam)
    if value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _owner_and_name(seam: Seam) -> tuple[Any, str]:
    """Return the owner of the replaced definition, and its name there."""
    owner, name = _resolve(seam.module, seam.attribute)
    if seam.older and not hasattr(owner, name):
        return _resolve(seam.module, seam.older)
    return owner, name


def _resolve(module: str, attribute: str) -> tuple[Any, str]:
    owner: Any
    owner_path, _, name = attribute.rpartition(".")
    owner = resolve(module, owner_path) if owner_path else importlib.import_module(module)
    if name.startswith("__") and not name.endswith("__"):  # Python's name of a private method
        name = f"_{owner.__name__}{name}"
    return owner, name


def find(seam: Seam) -> Any:
    """Return the current object at a seam, or ABSENT if there is none."""
    owner, name = _owner_and_name(seam)
    return getattr(owner, name, ABSENT)


def check_fingerprints() -> None:
    """Compare the installed DeepSpeed with the releases the seams were written for.

    Raises:
        UnsupportedDeepSpeedError: Names the release to install, and some definitions that differ.
    """
    version = importlib.import_module("deepspeed").__version__
    compared = compare()
    if compared.differing:
        for name, found in compared.differing.items():
            log.debug("memascend: unknown code in DeepSpeed %s: %s (%s)", version, name, found)
        raise UnsupportedDeepSpeedError(refusal(version, compared))
    if version not in fingerprints.VERSIONS:
        log.warning(
            "DeepSpeed %s was not tested with memascend, but all code that memascend relies on is "
            "the same as in %s",
            version,
            compared.release,
        )
