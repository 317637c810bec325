"""The only file that assigns to transformers: three functions and a list, if it is imported.

Training does not need these, so a release whose code is not known is left unchanged, and one line
is logged. We never import transformers. It looks the functions up when it loads weights, after it
has built the model and so after the seams were armed. The replacements are imported when they are
installed, after DeepSpeed's fingerprints were compared.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from memascend.base.post_import import after_import, forget_import
from memascend.deepspeed.seams.fingerprint import fingerprint, forget_sources
from memascend.deepspeed.seams.table import import_name

log = logging.getLogger(__name__)

#: The module in which transformers looks the functions up.
MODULE = "transformers.modeling_utils"
LOAD, READ = "_load_state_dict_into_zero3_model", "load_state_dict"
WRAPPERS = {
    LOAD: "memascend.deepspeed.weights.pretrained:wrap_load",
    READ: "memascend.deepspeed.weights.pretrained:wrap_read",
}
#: Wrapped if it exists; its code is not compared.
BY_NAME = {"save_on_cpu": "memascend.deepspeed.activations.offload:wrap_save_on_cpu"}
#: Merges tensors of a checkpoint, such as the experts of a layer; since transformers 5.
CONVERT = ("transformers.integrations.deepspeed", "_apply_weight_conversions_to_state_dict")
#: Decides which tensors are merged.
RENAME = ("transformers.core_model_loading", "rename_source_key")


@dataclass(frozen=True, slots=True)
class Loader:
    """One release or several that load weights with the same `_load_state_dict_into_zero3_model`.

    Attributes:
        releases: The first and the last one.
        load: Fingerprint of that function.
        read: Fingerprints of `load_state_dict`, of which each release has one.
        convert: Those of CONVERT; empty if the function does not call it.
        rename: Those of RENAME; empty if our `weights/conversions.py` does not call it.
    """

    releases: str
    load: str
    read: tuple[str, ...]
    convert: tuple[str, ...] = ()
    rename: tuple[str, ...] = ()

    def unknown(self) -> Iterator[str]:
        """Yield the names of definitions that differ from the known ones, with fingerprints."""
        relied_on = (((MODULE, READ), self.read), (CONVERT, self.convert), (RENAME, self.rename))
        for (module, name), known in relied_on:
            found = _fingerprint(module, name) if known else ""
            if known and found not in known:
                yield f"{name} ({found})"


#: The loaders whose code is known.
LOADERS = (
    Loader(
        "4.51 to 4.54",
        load="76e66b807c37426b",
        read=("a0ae58e324b48fb1", "57b52558b31a0aed"),
    ),
    Loader(
        "4.55 to 4.57",
        load="d0388ab2cbeba706",
        read=("57b52558b31a0aed", "135e4621c8ce2f76"),
    ),
    Loader(
        "5.0 to 5.5",
        load="b2773eab7ce69552",
        read=("1f939ae6062c5b58",),
        convert=("9867cc38543b9535", "a03456580f20ccd7", "a5ec3d998b2f4001"),
        rename=("4c3d5a55889be416", "efa4bd0fc66ba969"),
    ),
    Loader(
        "5.6 to 5.22",
        load="0cb2763e2fac8cb7",
        read=("c33c86388171366e", "23b6ec155564f752"),
        convert=("a5ec3d998b2f4001", "4f2b4928c2383594", "e9cd5973f2a903a0"),
        rename=(
            "efa4bd0fc66ba969",
            "d30a18d22a9a09c1",
            "dc40489bd5bf0d7b",
            "f5e60ba3f42378d3",
            "2d5f08442ce64310",
        ),
    ),
    Loader(
        "5.23 to 5.24",
        load="3caeb97a50ee469e",
        read=("23b6ec155564f752",),
        convert=("b65af44f3784bc46",),
    ),
)

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
    _refused.extend(unknown_definitions())
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


def unknown_definitions() -> list[str]:
    """Return definitions whose code is not known, with fingerprints; imports transformers."""
    found = _fingerprint(MODULE, LOAD)
    loader = next((loader for loader in LOADERS if loader.load == found), None)
    unknown = [f"{LOAD} ({found})"] if loader is None else list(loader.unknown())
    forget_sources()
    return unknown


def known_releases() -> str:
    """Return the releases whose loaders are known, as text."""
    return ", ".join(loader.releases for loader in LOADERS)


def _fingerprint(module: str, name: str) -> str:
    try:
        return fingerprint(module, name)
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
        known_releases(),
    )
