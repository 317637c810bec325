"""The only file that assigns to transformers: three functions and a list, where it is in use.

Nothing here is needed for training, so a release whose code is not known is left as it is, and one
line is logged. transformers is never imported by us: what is replaced is looked up by transformers
when it loads weights, which is after it has built the model and so after `seams` has armed. What
stands there then is imported when it is armed, after DeepSpeed's code was compared.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

from memascend.base.post_import import after_import, forget_import
from memascend.deepspeed.seams.fingerprint import fingerprint, forget_sources
from memascend.deepspeed.seams.table import import_name

log = logging.getLogger(__name__)

#: Where transformers looks the functions up.
MODULE = "transformers.modeling_utils"
WRAPPERS = {
    "_load_state_dict_into_zero3_model": "memascend.deepspeed.weights.pretrained:wrap_load",
    "load_state_dict": "memascend.deepspeed.weights.pretrained:wrap_read",
}
#: Used by name alone, where it is there.
BY_NAME = {"save_on_cpu": "memascend.deepspeed.activations.offload:wrap_save_on_cpu"}
#: The releases whose code is known, and its fingerprints.
VERSIONS = ("5.23.0",)
KNOWN = {
    "_load_state_dict_into_zero3_model": ("3caeb97a50ee469e",),
    "load_state_dict": ("23b6ec155564f752",),
}


#: Where the Trainer looks up the callbacks that every Trainer has, by a list's name alone.
TRAINER_MODULE, CALLBACKS = "transformers.trainer", "DEFAULT_CALLBACKS"

#: What stood there before; empty while nothing is wrapped.
_originals: dict[str, Any] = {}
#: What differed, and was logged; looked at no more.
_refused: list[str] = []
#: What was added to the Trainer's callbacks.
_callbacks: list[type[Any]] = []


def arm() -> None:
    """Wrap all functions where transformers is imported and knows them, or none. Idempotent.

    Its Trainer may be imported later than the model is built.
    """
    after_import(TRAINER_MODULE, _register_callback)
    module: Any = sys.modules.get(MODULE)
    if module is None or _originals or _refused:
        return
    wrappers = {name: wrap for name, wrap in BY_NAME.items() if hasattr(module, name)}
    found = {name: _fingerprint(name) for name in WRAPPERS}
    forget_sources()
    _refused.extend(
        f"{name} ({found[name]})" for name in WRAPPERS if found[name] not in KNOWN[name]
    )
    if _refused:
        _log_refusal()
    else:
        wrappers |= WRAPPERS
    for name, wrap in wrappers.items():
        _originals[name] = vars(module)[name]
        vars(module)[name] = import_name(wrap)(_originals[name])


def disarm() -> None:
    """Restore what stood there."""
    if _originals:
        vars(sys.modules[MODULE]).update(_originals)
    _originals.clear()
    _refused.clear()
    forget_import(TRAINER_MODULE)
    while _callbacks:
        trainer_module: Any = sys.modules[TRAINER_MODULE]
        vars(trainer_module)[CALLBACKS].remove(_callbacks.pop())


def _register_callback(module: ModuleType) -> None:
    """Give every Trainer that is made from now on a callback, where the list of them is known."""
    listed, base = getattr(module, CALLBACKS, None), getattr(module, "TrainerCallback", None)
    if isinstance(listed, list) and isinstance(base, type) and not _callbacks:
        trainer_callback = import_name("memascend.deepspeed.monitor.logs:trainer_callback")
        _callbacks.append(trainer_callback(base))
        listed.append(_callbacks[0])


def is_armed() -> bool:
    """Check if the functions whose code must be known are wrapped."""
    return _originals.keys() >= WRAPPERS.keys()


def _fingerprint(name: str) -> str:
    try:
        return fingerprint(MODULE, name)
    except (AttributeError, ImportError, OSError, TypeError):  # others may have replaced it
        return "missing"


def _log_refusal() -> None:
    from deepspeed import comm as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    log.warning(
        "memascend: transformers %s loads weights with code that is not known here, which is left "
        "as it is: %s. Training is the same; but while pretrained weights are loaded, what was "
        "read of their files stays in memory and in the page cache. Known to work: %s",
        sys.modules["transformers"].__version__,
        ", ".join(_refused),
        ", ".join(VERSIONS),
    )
