"""Runs one case inside an initialised worker and tells everything that backends must agree on.

Knows DeepSpeed's public surface only. Called by every rank of a worker group with the same
arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from memascend.deepspeed.optimizer import worth
from memascend.deepspeed.optimizer.restore import replay_beta_powers
from memascend.deepspeed.optimizer.upstream import Upstream
from tests.support.rough_muon import orthogonalized_roughly

from . import accessors, models
from .cases import Case, deepspeed_json
from .digests import (
    consolidated_digests,
    digest,
    hexadecimal,
    master_digests,
    master_values,
    state_digests,
    weight_digests,
)
from .walks import watched

SEED = 20_250
PAUSE_TIMEOUT_S = 400.0
#: Of outputs that the head's weight is used for. DeepSpeed has a complete trace of the modules by
#: then: before the second one it has traced anew.
TOUCHED_STEPS = {"logits": 3, "last_hidden_state": 5}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Class attributes that one engine sets and the next would inherit.
INIT_DEFAULTS = {
    name: getattr(Init, name)
    for name in (
        "param_persistence_threshold",
        "model_persistence_threshold",
        "num_persisted_parameters",
        "num_persisted_elements",
        "apply_param_persistence",
        "override_module_apply",
    )
}


def _one_by_one(original: Any) -> Any:
    """Gather each parameter of a list by itself.

    On gloo the gathers of a list are independent, and DeepSpeed waits for the last one alone before
    0.19.8: which values its own runs have is chance then.
    """

    @functools.wraps(original)
    def gather(init: Any, params: Any, *arguments: Any, **keywords: Any) -> None:
        for param in params:
            original(init, [param], *arguments, **keywords)

    return gather


if "launch_handles[-1].wait()" in inspect.getsource(Init._allgather_params_coalesced):
    Init._allgather_params_coalesced = _one_by_one(Init._allgather_params_coalesced)


def run_case(case: Case, config: dict[str, Any], *, save_to: str | None = None) -> dict[str, Any]:
    """Train `case` under `config`, and save a checkpoint at the end if told where.

    Returns:
        Floats as hexadecimal text and tensors as SHA-256 digests, so that equality means equal
        bits.
    """
    eager = torch.compiler.set_stance if case.is_muon else contextlib.nullcontext
    # Compiling Muon's kernels for each shape takes minutes.
    with (
        watched(late=case.walk == "late") as walks,
        eager("force_eager"),
        _measured_quickly(case),
        orthogonalized_roughly() if case.is_muon else contextlib.nullcontext(),
    ):
        facts = _run_watched(case, config, save_to)
    return facts | {"walks": dataclasses.asdict(walks)}


@contextmanager
def _measured_quickly(case: Case) -> Iterator[None]:
    """Measure few steps, on every other rank at other times, so that ranks differ in most steps."""
    with pytest.MonkeyPatch.context() as patch:
        if case.during_backward == "auto":
            rank = int(os.environ["RANK"])
            for name, value in (("WARM_COUNT", rank % 2), ("ROW_COUNT", 2), ("SAMPLE_COUNT", 3)):
                patch.setattr(worth, name, value)
        yield


def _run_watched(case: Case, config: dict[str, Any], save_to: str | None) -> dict[str, Any]:
    for name, value in INIT_DEFAULTS.items():
        setattr(Init, name, value)
    saved = checkpoint_of(case) if case.resume_at else {}
    torch.manual_seed(SEED)
    model = build_model(case, config, seed=SEED + (1 if saved else 0))
    client = None
    warnings = Warnings()
    if case.optimizer_type in models.CLIENTS:
        client = models.CLIENTS[case.optimizer_type](model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=client)
    if isinstance(client, models.ScheduleFree):
        client.train()
    if case.compiled:
        torch._dynamo.reset()  # of what the last case has compiled
        torch._dynamo.utils.counters.clear()
        engine.compile(backend=case.compiled)
    try:
        facts: dict[str, Any] = {"start": saved.get("start") or weight_digests(engine.module)}
        if case.tells_masters:
            facts["start_values"] = master_values(engine.module)
        if case.optimizer == "absent":
            facts["logits"] = infer(case, engine)
        else:
            facts |= _train_and_save(case, engine, config, saved, save_to)
            if isinstance(client, models.ScheduleFree):
                client.eval()  # finds no weight
                assert master_digests(engine.module) == facts["masters"]
        facts["weights"] = weight_digests(engine.module)
        if case.tells_masters:
            facts["end_values"] = master_values(engine.module)
        facts["consolidated"] = consolidated_digests(engine)
        facts["placement"] = placement(engine.module)
        face = getattr(engine, "memascend", None)
        facts["ledger"] = face.ledger().as_dict() if face is not None else None
        facts["swapper_classes"] = sorted(map(qualified_name, swappers_of(engine.module)))
        facts["warnings"] = warnings.messages
        return facts
    finally:
        warnings.close()
        swappers = swappers_of(engine.module)
        is_stock = getattr(engine, "memascend", None) is None
        engine.destroy()
        release_stock_pools(swappers)
        if is_stock:  # tensors that ours would keep are to be seen
            forget_tensors(engine)
        del engine, model, swappers
        gc.collect()


def _train_and_save(
    case: Case, engine: Any, config: dict[str, Any], saved: dict[str, Any], save_to: str | None
) -> dict[str, Any]:
    """Load what the case loads, train, save what it saves, and return what is compared."""
    facts: dict[str, Any] = {}
    if saved:
        path, client_state = engine.load_checkpoint(case.checkpoint_folder)
        assert path is not None
        assert client_state["mark"] == SEED
    if case.load_from:
        path, _ = engine.load_checkpoint(case.load_from)
        assert path is not None
        # CPU offload would begin with powers of its betas that are rounded differently.
        replay_beta_powers(Upstream(engine.optimizer))
        facts["loaded"] = state_digests(engine)
    facts |= train(case, engine, config, first=case.resume_at or case.first_step)
    if case.compiled:
        facts["graph_count"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for name in ("losses", "norms", "scales"):
        facts[name] = saved.get(name, []) + facts[name]
    if save_to is not None:
        engine.save_checkpoint(save_to, client_state={"mark": SEED})
    if case.save_to:
        engine.save_checkpoint(case.save_to)
    if case.save_to or case.load_from:
        facts["states"] = state_digests(engine)
    facts["masters"] = master_digests(engine.module)
    facts["optimizer_class"] = qualified_name(engine.optimizer)
    steps = getattr(engine.optimizer, "steps", None)
    facts["early_tile_count"] = getattr(steps, "early_tile_count", 0)
    matrices = getattr(steps, "_muon", None)
    facts["applies_updates"] = matrices is not None and matrices._is_applied
    return facts


class Warnings(logging.Handler):
    """The warnings of memascend's side of DeepSpeed, and of slices.

    Not on the logger "memascend": with a handler of its own that one is not set up to show lines.
    """

    LOGGERS = tuple(map(logging.getLogger, ("memascend.deepspeed", "memascend.slices")))

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        for logger in self.LOGGERS:
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def close(self) -> None:
        for logger in self.LOGGERS:
            logger.removeHandler(self)
        super().close()


def checkpoint_of(case: Case) -> dict[str, Any]:
    """Train the first steps of a case and save them, in an engine of their own."""
    saver, backend = case.saver_case()
    saver = dataclasses.replace(saver, steps=case.resume_at, resume_at=0)
    folder = Path(case.checkpoint_folder)
    (folder / "drive").mkdir(parents=True, exist_ok=True)
    saver_config = deepspeed_json(saver, backend, str(folder / "drive"))
    facts = run_case(saver, saver_config, save_to=case.checkpoint_folder)
    deepspeed.comm.barrier()
    return facts


def build_model(case: Case, config: dict[str, Any], *, seed: int = SEED) -> nn.Module:
    """The model with its starting weights, built under zero.Init or handed over whole."""
    make = models.maker(case.family)
    if case.zero_init:
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=DTYPES[case.dtype]):
            model = make()
    else:
        model = make()
    model = models.adapted(case.family, model)
    for name, parameter in model.named_parameters():
        parameter.is_expert_group = len(getattr(parameter, "ds_shape", parameter.shape)) == 3
        # Outside zero.Init GatheredParameters finds nothing partitioned and does nothing.
        with (
            torch.no_grad(),
            deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=case.zero_init),
        ):
            models.set_weights(name, parameter.data, seed=seed)
    if case.checkpointing != "off":
        enable_checkpointing(case, model, config)
    if case.touched:
        touch_head(model, config)
    for name, module in model.named_modules():
        if any(word in name for word in case.cast):
            module.to(torch.float32)
    return model


def touch_head(model: Any, config: dict[str, Any]) -> None:
    """Have the root use the head's weight behind the head, and its model before it, while they
    are `touching`.

    DeepSpeed ends with an error where a weight is in flight as it is first used. That it is used
    is said beforehand to CPU offload.
    """
    model.touching = set()
    if "memascend" not in config:
        deepspeed.zero.register_external_parameter(model.model, model.lm_head.weight)
    for module, name in ((model, "logits"), (model.model, "last_hidden_state")):
        module.forward = _touching(model, module.forward, name)


def _touching(model: Any, forward: Any, name: str) -> Any:
    @functools.wraps(forward)
    def touch(*arguments: Any, **keywords: Any) -> Any:
        output = forward(*arguments, **keywords)
        if name in model.touching:
            factor = 1 + model.lm_head.weight.float().square().mean()
            setattr(output, name, getattr(output, name) * factor)
        return output

    return touch


def enable_checkpointing(case: Case, model: Any, config: dict[str, Any]) -> None:
    if case.checkpointing == "deepspeed":
        deepspeed.checkpointing.configure(None, deepspeed_config=config)
        model._set_gradient_checkpointing(True, deepspeed.checkpointing.checkpoint)
        return
    model.activation_checkpointing_enable(
        {"use_reentrant": case.checkpointing == "reentrant"},
        offload=case.checkpointing == "offload",
    )


def train(case: Case, engine: Any, config: dict[str, Any], *, first: int = 0) -> dict[str, Any]:
    losses, norms, scales = [], [], []
    extra: dict[str, Any] = {}
    micro_steps = itertools.count(first * case.accumulation * max(1, case.slices))
    averages = Averages(case, config) if case.averages else None
    for step in range(first, case.steps):
        if case.touched:
            engine.module.touching = {name for name, at in TOUCHED_STEPS.items() if step >= at}
        if step == case.steps - 1:
            disturb(case, engine.module)
            if case.second_model:
                other = dataclasses.replace(case, second_model=False, steps=1)
                extra["second"] = run_case(other, config)
        is_probed = case.accessors != "none" and step == case.steps // 2
        for number in range(case.accumulation):
            is_last = number == case.accumulation - 1
            if case.boundary == "stated":
                engine.set_gradient_accumulation_boundary(is_last)
            numbers = [next(micro_steps) for _ in range(max(1, case.slices))]
            loss = loss_of(case, engine, numbers)
            engine.backward(loss)
            if is_probed and is_last:
                extra["before step"] = accessors.before_step(case, engine.module)
            if is_last or case.boundary == "counted":
                engine.step()
            losses.append(loss.item())
        if is_probed:
            extra["after step"] = accessors.after_step(case, engine.module)
            extra["state_dict"] = accessors.layout(engine.optimizer.state_dict())
        if step + 1 == case.save_at:
            engine.save_checkpoint(case.checkpoint_folder, client_state={"mark": SEED})
        if averages is not None:
            averages.update(engine.module)
            extra["averages"] = [weight_digests(module) for module in averages.modules]
        norms.append(hexadecimal(engine.get_global_grad_norm()))
        scales.append(hexadecimal(getattr(engine.optimizer, "cur_scale", None)))
    step_losses = [
        sum(losses[end - case.accumulation : end]) / case.accumulation
        for end in range(case.accumulation, len(losses) + 1, case.accumulation)
    ]
    return {
        "losses": [] if case.labelled else [loss.hex() for loss in losses],
        "step_losses": step_losses,
        "norms": norms,
        "scales": scales,
        "skipped_steps": engine.skipped_steps,
        **extra,
    }


def loss_of(case: Case, engine: Any, numbers: list[int]) -> torch.Tensor:
    """The loss of the micro-steps of these numbers, whose batches are one behind the other."""
    rank = deepspeed.comm.get_rank()
    batches = [models.batch(seed=SEED, step=number, rank=rank, rows=2) for number in numbers]
    input_ids = torch.cat(batches).to(engine.device)
    if not case.labelled:
        return models.loss_of(engine, input_ids)
    item_count = input_ids.shape[0] * (input_ids.shape[1] - 1) * case.accumulation
    # DeepSpeed divides by the number of micro-steps.
    return case.accumulation * models.labelled_loss(engine, input_ids, item_count)


class Averages:
    """Two averages of the weights: of a model without a block, and of one with the engine's own."""

    def __init__(self, case: Case, config: dict[str, Any]) -> None:
        plain = dataclasses.replace(case, cast=(), touched=False, checkpointing="off")
        # Made first, so that a list of parameters begins with one that is not ours.
        in_memory = deepspeed_json(plain, "oracle", "")
        self.modules = [
            build_model(plain, made, seed=SEED + seed)
            for seed, made in enumerate((in_memory, config))
        ]

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move each average half-way to the weights, parameter by parameter of all three."""
        for params in zip(
            module.parameters(), *(m.parameters() for m in self.modules), strict=True
        ):
            with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
                if deepspeed.comm.get_rank() == 0:
                    for average in params[1:]:
                        average.lerp_(params[0].to(average.dtype), 0.5)
        everything = [param for one in (module, *self.modules) for param in one.parameters()]
        with deepspeed.zero.GatheredParameters(everything):
            assert all(param.numel() == param.ds_numel for param in everything)


def disturb(case: Case, module: nn.Module) -> None:
    """What users do between steps: change a weight by hand, or gather the whole model."""
    if case.modify_weights:
        parameters = list(module.parameters())
        for chosen in (parameters[0], max(parameters[1:], key=lambda p: p.ds_numel)):
            with torch.no_grad(), deepspeed.zero.GatheredParameters([chosen], modifier_rank=0):
                if deepspeed.comm.get_rank() == 0:
                    chosen.mul_(1.5)
    if case.gather_all:
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            assert all(p.numel() == p.ds_numel for p in module.parameters())

    if case.pause_folder:
        wait_for_go(Path(case.pause_folder))


def wait_for_go(folder: Path) -> None:
    """Tell the test that training has begun, and go on when it has done its worst."""
    (folder / "paused").touch()
    deadline = time.monotonic() + PAUSE_TIMEOUT_S
    while not (folder / "go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no file 'go' in {folder} within {PAUSE_TIMEOUT_S} s")
        time.sleep(0.02)


def infer(case: Case, engine: Any) -> list[str]:
    engine.eval()
    digests = []
    rank = deepspeed.comm.get_rank()
    with torch.no_grad():
        for step in range(case.steps):
            disturb(case, engine.module)
            input_ids = models.batch(seed=SEED, step=step, rank=rank, rows=2).to(engine.device)
            digests.append(digest(models.logits_of(engine, input_ids)))
    return digests


def placement(module: nn.Module) -> dict[str, int]:
    """How many shards lie on NVMe, in host memory: a case that swaps nothing proves nothing."""
    places: dict[str, int] = {}
    for parameter in module.parameters():
        location = getattr(parameter.ds_tensor.final_location, "value", None)
        places[str(location)] = places.get(str(location), 0) + 1
    return places


def qualified_name(subject: object) -> str:
    return f"{type(subject).__module__}.{type(subject).__qualname__}"


def swappers_of(module: nn.Module) -> set[Any]:
    swappers = {getattr(parameter, "nvme_swapper", None) for parameter in module.parameters()}
    return swappers - {None}


def release_stock_pools(swappers: set[Any]) -> None:
    """Stock never frees its parameter pool; a worker that runs many cases must."""
    for swapper in swappers:
        if type(swapper).__module__.startswith("deepspeed."):
            swapper.aio_read_handle.free_cpu_locked_tensor(swapper.buffers)


def forget_tensors(engine: Any) -> None:
    """A circle through autograd keeps stock's destroyed engines; it must not keep their tensors."""
    if engine.optimizer is None:
        return
    for parameter in engine.module.parameters():
        vars(parameter).clear()
        parameter.data = torch.empty(0)
    if hasattr(engine.optimizer, "optimizer"):
        engine.optimizer.optimizer.state.clear()
    vars(engine.optimizer).clear()
