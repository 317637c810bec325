"""The model of `memascend plan`: a path, a name on the Hub, or a built-in name.

A config.json of an architecture that is not built in is read by transformers where that is
installed: the model is built on the meta device, without weights.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from memascend.base.json_text import read_json_object
from memascend.errors import ConfigError
from memascend.plan.architectures import LAYER_COUNT_MAX, is_known
from memascend.plan.shapes import (
    ModelShapes,
    builtin,
    from_config,
    from_module,
    from_safetensors,
    source_of,
)

#: Classes of transformers to try for a config.json that names none, the most usual first.
_AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModel",
)
#: An owner and a model, as on the Hub.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
#: Names of architectures whose head is not that of a language model, or that have none.
_HEADLESS = re.compile("(Classification|Answering|(?<!LMHead)Model)$")
#: Keys of numbers of modules, each of which transformers makes.
_COUNT = re.compile("(^|_)(layers?|experts)$")


def find_model(name: str) -> ModelShapes:
    """Return the shapes of a model, from a path, the Hub's cache, or the built-in models.

    Nothing is downloaded. Another name on the Hub than a built-in model's own is that of its cached
    config.json, which is exact; if none is cached, a built-in relative serves, and is shown as one.

    Raises:
        ConfigError: No such path or model, or it cannot be read.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "config.json").exists():
            try:
                return read_config(path / "config.json")  # exact, also in the order of tensors
            except ConfigError:
                if not any(path.glob("*.safetensors")):
                    raise
        return from_safetensors(path, name=path.resolve().name)
    if path.is_file():
        is_config = path.suffix == ".json" and not path.name.endswith(".index.json")
        return read_config(path) if is_config else from_safetensors(path)
    cached = _cached_config(name)
    try:
        found = builtin(name)
    except ConfigError:
        if cached is None:
            raise
    else:
        if name.lower() in (found.name.lower(), source_of(found.name).lower()):
            return found
        if cached is None:
            return dataclasses.replace(found, name=f"{name} (as {found.name})")
    return dataclasses.replace(read_config(cached), name=name)


def _cached_config(name: str) -> Path | None:
    """Return the config.json of a model that the Hub's library has in its cache, else None."""
    if not _HUB_NAME.fullmatch(name) or importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name that the Hub allows
        return None
    return Path(found) if isinstance(found, str) else None


def read_config(path: Path) -> ModelShapes:
    """Return the shapes of a config.json: by our own reading, else by that of transformers.

    Raises:
        ConfigError: Unreadable, or of an architecture that neither knows.
    """
    content = read_json_object(path)
    named = content.get("architectures")
    has_head = not (isinstance(named, list) and any(_HEADLESS.search(str(one)) for one in named))
    if (is_known(content) and has_head) or importlib.util.find_spec("transformers") is None:
        return from_config(path)
    try:
        found = from_module(build_on_meta(content), path.resolve().parent.name)
    except Exception as error:  # transformers raises many kinds
        try:
            return from_config(path)
        except ConfigError as known:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{known}. transformers cannot build it: {reason}") from error
    return dataclasses.replace(found, config=content)


def build_on_meta(content: Mapping[str, Any]) -> Any:
    """Return the module that transformers builds from a config.json, without memory for weights.

    The class is that which the file names as its architecture, else the first of the automatic ones
    that takes it. Code that comes with a model is not run.

    Raises:
        Exception: As transformers raises for a file that it cannot use.
    """
    for part in (content, *(value for value in content.values() if isinstance(value, Mapping))):
        for key, count in part.items():
            if _COUNT.search(key) and isinstance(count, int) and count > LAYER_COUNT_MAX:
                raise ConfigError(f"{key}={count} is more than {LAYER_COUNT_MAX}")
    import torch
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)  # advice on how to run the model
    numbers = {key: value for key, value in content.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(content["model_type"], **numbers)
    with torch.device("meta"):
        for name in content.get("architectures") or ():
            named = getattr(transformers, str(name), None)
            if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
                return cast(Any, named)._from_config(config)
        for name in _AUTO_CLASSES:
            known = getattr(transformers, name, None)
            if known is not None and type(config) in known._model_mapping:
                return known.from_config(config, trust_remote_code=False)
    raise ConfigError(f"no model is known for model_type={content['model_type']}")
