"""The only file that assigns to transformers: three functions and a list, if it is imported.

Training does not need these, so a release whose code is not known is left unchanged, and one line
is logged. We never import transformers. It looks the functions up when it loads weights, after it
has built the model and so after the seams were armed. The replacements are imported when they are
installed, after DeepSpeed's fingerprints were compared.
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

#: The module in which transformers looks the functions up.
MODULE = "transformers.modeling_utils"
WRAPPERS = {
    "_load_state_dict_into_zero3_model": "memascend.deepspeed.weights.pretrained:wrap_load",
    "load_state_dict": "memascend.deepspeed.weights.pretrained:wrap_read",
}
#: Wrapped if it exists; its code is not compared.
BY_NAME = {"save_on_cpu": "memascend.deepspeed.activations.offload:wrap_save_on_cpu"}
#: The releases whose code is known, and its fingerprints.
VERSIONS = ("5.23.0",)
KNOWN = {
    "_load_state_dict_into_zero3_model": ("3caeb97a50ee469e",),
    "load_state_dict": ("23b6ec155564f752",),
}


#: Module and name of the list of callbacks that every Trainer has.
TRAINER_MODULE, CALLBACKS = "transformers.trainer", "DEFAULT_CALLBACKS"

#: The original functions by name; empty while nothing is wrapped.
_originals: dict[str, Any] = {}
#: Functions whose code is not known. They were logged, and are not compared again.
_refused: list[str] = []
#: Our class in the Trainer's list of callbacks.
_callbacks: list[type[Any]] = []


def arm() -> None:
    """Wrap the functions if transformers is imported; those compared all or none. Idempotent.

    The Trainer may be imported after the model is built, so its callback is added at its import.
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
    """Restore the originals."""
    if _originals:
        vars(sys.modules[MODULE]).update(_originals)
    _originals.clear()
    _refused.clear()
    forget_import(TRAINER_MODULE)
    while _callbacks:
        trainer_module: Any = sys.modules[TRAINER_MODULE]
        vars(trainer_module)[CALLBACKS].remove(_callbacks.pop())


def _register_callback(module: ModuleType) -> None:
    """Add a callback to every Trainer constructed from now on, if the list exists."""
    listed, base = getattr(module, CALLBACKS, None), getattr(module, "TrainerCallback", None)
    if isinstance(listed, list) and isinstance(base, type) and not _callbacks:
        trainer_callback = import_name("memascend.deepspeed.monitor.logs:trainer_callback")
        _callbacks.append(trainer_callback(base))
        listed.append(_callbacks[0])


def is_armed() -> bool:
    """Return whether the functions whose code must be known are wrapped."""
    return _originals.keys() >= WRAPPERS.keys()


def _fingerprint(name: str) -> str:
    try:
        return fingerprint(MODULE, name)
    except (AttributeError, ImportError, OSError, TypeError):  # another program replaced it
        return "missing"


def _log_refusal() -> None:
    from deepspeed import comm as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    log.warning(
        "memascend: transformers %s loads weights with code that is not known here, which is left "
        "as it is: %s. Training is the same; but while pretrained weights are loaded, the pages "
        "read from their files stay in memory and in the page cache. Known to work: %s",
        sys.modules["transformers"].__version__,
        ", ".join(_refused),
        ", ".join(VERSIONS),
    )
