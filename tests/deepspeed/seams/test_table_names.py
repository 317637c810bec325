"""No name of DeepSpeed is used unwatched: what another release may rename is compared at the start.

tests/support/upstream_names.py says how names are found, and where a syntax tree can tell nothing.
"""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("deepspeed")

from memascend.deepspeed.seams import table
from memascend.deepspeed.seams.fingerprint import resolve
from tests.support.upstream_names import (
    OF_PARAMETERS,
    Names,
    Upstream,
    attributes_used,
    files_with_surfaces,
    imports_of_deepspeed,
    read_upstream,
)

#: Modules besides those of the table, for what our classes inherit and what a config has.
MODULES = ("deepspeed.runtime.base_optimizer", "deepspeed.runtime.config")

PUBLIC = "documented for users: DeepSpeed keeps it, or announces a change"
#: Names that are imported and not watched, and why.
IMPORTS = {
    "deepspeed": "for its version, and for names that are public",
    "deepspeed.accelerator.get_accelerator": PUBLIC,
    "deepspeed.comm": PUBLIC,
    "deepspeed.ops.adam.DeepSpeedCPUAdam": "its `__init__` and its `step` are watched",
    "deepspeed.ops.op_builder.AsyncIOBuilder": "only asked for stock's own handle",
    "deepspeed.runtime.zero.parameter_offload": "its `FWD_MODULE_STACK` is watched",
    "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam": "its file is watched",
    "deepspeed.runtime.zero.muon.original_muon.muon_update": "its file is watched",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": "its methods are watched",
    "deepspeed.runtime.zero.utils": "its `get_norm_dtype` is watched",
    "deepspeed.utils.logger": "a logger of Python's, for the format of its lines",
}
SAME = "a name of torch's or Python's own, of a tensor, a module, an optimizer or a collection"
#: Attributes that are read and not watched, and why.
ATTRIBUTES = {
    "GatheredParameters": PUBLIC,
    "__getitem__": SAME,
    "__version__": "only compared between ranks",
    "_parameters": SAME,
    "aux_optimizer": "of Muon, whose file is watched",
    "buffers": SAME,
    "clear": SAME,
    "cpu": SAME,
    "get_model_parallel_rank": "a method of the script's own `mpu`",
    "load_state_dict": SAME,
    "new_tensor": SAME,
    "param_groups": SAME,
    "pipeline": "assigned as text by `set_pipeline`, which is watched",
    "state_dict": SAME,
    "swappable": "absent but for Muon, and asked for with a default",
}
#: Names without which ours does not work, by their rows.
MUST_BE_FOUND = {
    "checkpoint_mp_rank": "deepspeed.runtime.engine.DeepSpeedEngine.checkpoint_mp_rank",
    "ds_zero_partition_rank": (
        "deepspeed.runtime.zero.partition_parameters.Init.ds_zero_partition_rank"
    ),
    "_get_param_partition_rank": (
        "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_param_partition_rank"
    ),
}


def test_every_name_that_is_imported_of_deepspeed_is_watched() -> None:
    assert unwatched_imports(watched()) == set()


def test_every_attribute_of_deepspeeds_objects_that_ours_reads_is_watched() -> None:
    assert unwatched_attributes(watched()) == {}


@pytest.mark.parametrize(("name", "row"), MUST_BE_FOUND.items())
def test_a_name_that_is_taken_off_the_list_is_found(name: str, row: str) -> None:
    assert row in watched()
    less = watched() - {row}
    assert {row} & unwatched_imports(less) or name in unwatched_attributes(less)


def test_the_boundary_is_watched_for_the_optimizer_and_for_the_engine() -> None:
    """Both classes have a method of the name, so one row would hide that the other is missing."""
    rows = {name for name in watched() if name.endswith(".is_gradient_accumulation_boundary")}
    assert len(rows) == 2
    assert "is_gradient_accumulation_boundary" in unwatched_attributes(watched() - rows)


def test_the_operator_that_our_adam_calls_is_watched_in_its_own_source() -> None:
    assert ("deepspeed.ops", "csrc/includes/cpu_adam.h") in table.relied_on()


def test_no_exception_is_for_a_name_that_is_not_used() -> None:
    assert set(IMPORTS) <= imports_of_deepspeed(files_with_surfaces())
    assert set(ATTRIBUTES) <= set(used())


# -- looking for them ------------------------------------------------------------------------------


@functools.cache
def found() -> Upstream:
    modules = {module for module, _ in table.relied_on()}
    named = imports_of_deepspeed(files_with_surfaces())
    modules |= {name.rpartition(".")[0] for name in named}
    return read_upstream(sorted(modules | set(MODULES)))


@functools.cache
def used() -> Names:
    return attributes_used(files_with_surfaces(), found())


@functools.cache
def home(module: str, attribute: str) -> str:
    """Return where a watched name is defined, which may be another module than uses it."""
    first = attribute.partition(".")[0]
    try:
        return f"{resolve(module, first).__module__}.{attribute}"
    except AttributeError:  # a constant, or a file
        return f"{module}.{attribute}"


def watched() -> set[str]:
    return {home(module, attribute) for module, attribute in table.relied_on()}


def unwatched_imports(names: set[str]) -> set[str]:
    wanted = {name for name in imports_of_deepspeed(files_with_surfaces()) if name not in IMPORTS}
    return {name for name in wanted if home(*name.rpartition(".")[::2]) not in names}


def unwatched_attributes(names: set[str]) -> Names:
    return {
        name: where
        for name, where in used().items()
        if name not in ATTRIBUTES and not is_watched(name, names)
    }


def is_watched(name: str, names: set[str]) -> bool:
    """Check if a name's code is compared: by a row of its own, or with what defines it.

    Parameters get their attributes from many sides: each place that gives one must be watched.
    """
    if any(watched.endswith(f".{name}") for watched in names):
        return True
    places = [
        any(f"{place}.".startswith(f"{one}.") for one in names) for place in found().places(name)
    ]
    return all(places) if name.startswith(OF_PARAMETERS) else any(places)
