#!/usr/bin/env python3
"""Write the generated parts of the documents: the configuration reference and tables of the plan.

tests/test_docs.py fails when a document and the code disagree; this script makes them agree again.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from memascend.base import device_memory, sizes
from memascend.base.units import GIB, PAGE_BYTES
from memascend.cli.config import TRAINER, config_for, one_pass_sections
from memascend.cli.main import main as run_memascend
from memascend.cli.plan_answer import HOST, RATED_BYTES, TERABYTE, WEAR_STEPS
from memascend.config.block import ActivationConfig, MemAscendConfig
from memascend.config.deepspeed import ZeroOptimization
from memascend.config.messages import ABSENT, rules_of
from memascend.plan import context, derive, drive_rates, knobs, layers, stock
from memascend.plan.context import HOST_RESERVE_BYTES, widths_of
from memascend.plan.layers import FP32_BYTES
from memascend.plan.request import PlanRequest
from memascend.plan.shapes import ModelShapes, builtin, builtin_names

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- {}: written by scripts/update_docs.py -->", "<!-- end of {} -->"
#: The rate that a card of 24 GB may reach in bf16, for estimates.
GPU_TFLOPS = 50
#: For each parameter and token: 2 forward, as many in recomputation, 4 backward.
OPERATIONS = 8
#: README's GPU, batch and slice: sequences of 4096 tokens.
GPU_GIB, BATCH, SLICE = 24, 32, 2
KINDS = {int: "integer", float: "number", str: "text", bool: "true, false"}
UNITS = ((1 << 60, "EiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def reference() -> str:
    """Return the reference of the block: a heading and a table for each section, in their order."""
    return "\n\n".join(_section(MemAscendConfig, ""))


def printed(*arguments: str) -> str:
    """Return what `memascend` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = run_memascend(arguments)
    if status != 0:
        raise SystemExit(f"memascend {' '.join(arguments)} ended with status {status}")
    return output.getvalue().strip()


def scaled(*, model: str = "Llama-3.1-70B", ranks: int = 8) -> str:
    """Return the table of more and more machines: what each of them takes, and how long a step."""
    titles = (
        "machines",
        "GPUs",
        "host memory",
        "on the drive",
        "moved in a step",
        "seconds",
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for nodes in (1, 2, 4, 8, 16, 32, 64):
        world = nodes * ranks
        options = ("--world", str(world), "--nodes", str(nodes), "--json")
        found = json.loads(printed("plan", model, *options))
        plan = found["memascend"]
        moved = sum(plan["read_bytes"].values()) + sum(plan["written_bytes"].values())
        sizes = (plan["host_bytes"], plan["drive_bytes"], moved)
        cells = [f"{ranks * nbytes / GIB:.1f}" for nbytes in sizes]
        row = [str(nodes), str(world), *cells, f"{plan['step_seconds']:.1f}"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def planned(
    model: str, limit: str | None, *, batch: int, accumulation: int = 1, is_one_pass: bool = True
) -> dict[str, Any]:
    """Return the plan of README's JSON with sequences of 4096 tokens on README's machine."""
    sections = one_pass_sections(SLICE, GPU_GIB * GIB) if is_one_pass else {}
    config = config_for("/mnt/ssd", limit, caller=TRAINER, sections=sections)
    config["gradient_accumulation_steps"] = accumulation
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        options = ("--config", file.name, "--context", "4096", "--batch", str(batch))
        found: dict[str, Any] = json.loads(printed("plan", model, *options, *_MACHINE, "--json"))
    if not found["answer"]["fits"]:
        raise SystemExit(f"{model} does not fit README's machine: {found['answer']['lacking']}")
    return found


def machine() -> str:
    """Return the table of models on one machine, in one pass: memory, drive, a step, wear."""
    titles = ["model", "host memory", "tuned stock", "on the SSD", "time of the SSD"]
    titles += [f"a GPU at {GPU_TFLOPS} TFLOP/s", "tokens per second", "1000 steps write"]
    titles += [f"{RATED_BYTES // TERABYTE} TB last for"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for model in ("Llama-3.2-3B", "Qwen3-8B", "Llama-3.1-8B", "Qwen3-14B", "Qwen3-32B"):
        found = planned(model, None, batch=BATCH)
        answer = found["answer"]
        seconds = answer["step_seconds"]
        operations = OPERATIONS * found["parameters"] * answer["tokens"]
        steps = answer["rated_bytes"] / answer["written_bytes"]
        stock_bytes = max(found["tuned_stock"][f"{name}_bytes"] for name in _PEAKS)
        cells = [
            model,
            f"**{max(found['memascend'][f'{name}_bytes'] for name in _PEAKS) / GIB:.1f} GiB**",
            f"{stock_bytes / GIB:.0f} GiB",
            f"{answer['drive_bytes'] / 1e9:.0f} GB",
            f"{seconds:.0f} s",
            f"{operations / (GPU_TFLOPS * 10**12):.0f} s",
            f"{answer['tokens'] / seconds:.0f}",
            f"{WEAR_STEPS * answer['written_bytes'] / TERABYTE:.0f} TB",
            f"{round(steps, -2):,.0f} steps, {steps * answer['tokens'] / 1e9:.1f} billion tokens",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def answer(*, model: str = "Qwen/Qwen3-8B") -> str:
    """Return the lines that answer before the plan's table."""
    text = printed("plan", model, *_MACHINE)
    return f"```text\n{text[: text.index(_TITLE_OF_TABLE)].rstrip()}\n```"


def quick_start(*, model: str = "Qwen/Qwen3-8B", limit_gib: int = 16) -> str:
    """Return tokens, time, wear and drive space of the README's commands, with config's limit."""
    found = planned(model, f"{limit_gib}GiB", batch=BATCH)["answer"]
    names = ("drive", "checkpoint", "model")
    run, checkpoint, saved = (found[f"{name}_bytes"] / 1e9 for name in names)
    seconds, written = found["step_seconds"], found["written_bytes"]
    text = (
        f"{model.rpartition('/')[2]} fits a GPU of {GPU_GIB} GiB, 32 GiB of RAM and a 2 TB SSD, "
        f"with {found['needed'][HOST] / GIB:.0f} GiB of RAM: `config` sets a limit of half of the "
        "RAM, most of it a cache, and Python and torch take the rest. A step of "
        f"{BATCH} x 4096 tokens takes the SSD {seconds:.0f} s: {found['tokens'] / seconds:.0f} "
        f"tokens a second, {WEAR_STEPS * seconds / 3600:.0f} hours for {WEAR_STEPS} steps, which "
        f"write {WEAR_STEPS * written / TERABYTE:.0f} TB. The SSD needs room for "
        f"{run + 2 * checkpoint + 2 * saved:.0f} GB: {run:.0f} for the run, 2 x {checkpoint:.0f} "
        f"for checkpoints (one goes when the next is there), 2 x {saved:.0f} for the saved model; "
        f"the download takes {saved:.0f} where the Hub's cache is."
    )
    return textwrap.fill(text, width=150)


def larger_batch(*, model: str = "Qwen/Qwen3-8B") -> str:
    """Return writes and tokens of a batch at once, accumulated, and in one pass."""
    common = f"memascend plan {model} --config ds.json --context 4096 --fused-loss"
    lines = [
        f"| `{common}` with | GB written per million tokens | tokens per second |",
        "|---|---|---|",
    ]
    for batch, title, accumulation in (
        (8, "`--batch 8`", 1),
        (8, "`--batch 8`, and 4 as the JSON's `gradient_accumulation_steps`", 4),
        (BATCH, f"`--batch {BATCH}`, and the two sections", 1),
    ):
        found = planned(
            model, "16GiB", batch=batch, accumulation=accumulation, is_one_pass=batch == BATCH
        )["answer"]
        written = found["written_bytes"] / found["tokens"] * 1e6 / 1e9
        rate = found["tokens"] / found["step_seconds"]
        lines.append(f"| {title} | {written:,.0f} | {rate:.0f} |")
    return "\n".join(lines)


def host_memory(*, model: str = "Llama-3.1-8B", cells: int = 40) -> str:
    """Return a chart of host memory at its peak, in a block of text."""
    found = json.loads(printed("plan", model, "--json"))
    titles = {"stock": "stock DeepSpeed", "tuned_stock": "stock, tuned", "memascend": "memascend"}
    peaks = {
        title: max(found[name][f"{peak}_bytes"] for peak in _PEAKS) / GIB
        for name, title in titles.items()
    }
    scale = cells / max(peaks.values())
    lines = [f"host memory of {model} at its peak, GiB, computed by memascend plan"]
    lines += [
        f"{title:<15}  {'█' * max(1, round(peak * scale))} {peak:.1f}"
        for title, peak in peaks.items()
    ]
    return "\n".join(["```text", *lines, "```"])


def calculator() -> str:
    """Return what the calculator's arithmetic goes by, as a statement of JavaScript."""
    request, limits, zero = PlanRequest(), ActivationConfig(), ZeroOptimization()
    master, states = request.master_itemsize, request.states_bytes
    numbers = {
        "models": {name: of_form(builtin(name)) for name in form_models()},
        "page_bytes": PAGE_BYTES,
        "fp32_bytes": FP32_BYTES,
        "param_itemsize": request.param_itemsize,
        "gradient_itemsize": request.gradient_itemsize,
        "master_itemsize": master,
        "states": request.states,
        # Parameters, gradients, master weights, states: in the order in which they stay in memory.
        "stream_itemsizes": [
            request.param_itemsize,
            request.gradient_itemsize,
            request.stored_master_itemsize,
            states,
        ],
        "half_itemsize": master - request.stored_master_itemsize,  # read with the parameters
        "sub_group_size": request.sub_group_size,
        "reuse_numel": request.reuse_numel,
        "bounce_bytes": sizes.BOUNCE_BYTES,
        "small_numel": knobs.SMALL_NUMEL,
        "staging_slot_count": sizes.STAGING_SLOT_COUNT,
        "staging_slot_bytes": sizes.STAGING_SLOT_BYTES,
        "staging_slot_bytes_min": knobs.STAGING_SLOT_BYTES_MIN,
        "staging_bytes_min": knobs.STAGING_SLOT_COUNT_MIN * knobs.STAGING_SLOT_BYTES_MIN,
        "tile_count": knobs.TILE_COUNT,
        "spare_count": knobs.SPARE_COUNT,
        "written_more_max": derive.WRITTEN_MORE_MAX,
        "tile_numel": knobs.TILE_NUMEL,
        "tile_numel_knee": knobs.TILE_NUMEL_KNEE,
        "tile_numel_min": knobs.TILE_NUMEL_MIN,
        "tiles_per_drive": knobs.TILES_PER_DRIVE,
        "tile_element_bytes": knobs.tiles_element_bytes(request, 1),
        "scratch_element_bytes": knobs.scratch_element_bytes(request),
        "parameter_slots_bytes_min": knobs.PARAMETER_SLOTS_BYTES_MIN,
        "slot_bytes_max": knobs.SLOT_BYTES_MAX,
        "prefetch_bytes_min": sizes.PREFETCH_BYTES_MIN,
        "repeated_count_min": sizes.REPEATED_COUNT_MIN,
        "activation_bytes_min": limits.min_bytes,
        "read_gb_s": drive_rates.READ_GB_S,
        "write_gb_s": drive_rates.WRITE_GB_S,
        "host_reserve_bytes": HOST_RESERVE_BYTES,
        **device_numbers(),
        "rated_bytes": RATED_BYTES,
        "aligned_bytes": stock.ALIGNED_BYTES,
        "swappable_bytes_min": stock.SWAPPABLE_BYTES_MIN,
        "buffer_count": zero.offload_param.buffer_count,
        "buffer_numel": zero.offload_param.buffer_size,
        "resident_numel_max": zero.offload_param.max_in_cpu,
        "optimizer_buffer_count": max(zero.offload_optimizer.buffer_count, request.states + 2),
    }
    return f"*/\nconst NUMBERS = {json.dumps(numbers, indent=2)};\n/*"


def device_numbers() -> dict[str, int]:
    """Return the numbers that the calculator's device memory goes by."""
    settings = context.DeviceSettings()
    return {
        "live_numel": settings.live_numel,
        "norm_numel": context.NORM_NUMEL,
        "norm_tensors": layers.NORM_TENSORS,
        "logits_bytes": layers.LOGITS_BYTES,
        "fused_loss_tensors": layers.FUSED_LOSS_TENSORS,
        "in_flight_count": sizes.IN_FLIGHT_COUNT,
        "gradient_room_bytes_max": sizes.GRADIENT_ROOM_BYTES_MAX,
        "device_reserve_bytes": context.DEVICE_RESERVE_BYTES,
        "released_bytes_min": device_memory.RELEASED_BYTES_MIN,
        "held_up_bytes": device_memory.HELD_UP_BYTES,
        "held_up_divisor": device_memory.HELD_UP_DIVISOR,
        "released_divisor": device_memory.RELEASED_DIVISOR,
        "released_count": device_memory.RELEASED_COUNT_MIN,
    }


def form_models() -> list[str]:
    """Return the built-in models that the calculator's form can describe."""
    known = ("llama", "qwen2", "qwen3", "mistral", "mixtral")
    return [name for name in builtin_names() if (builtin(name).config or {})["model_type"] in known]


def of_form(shapes: ModelShapes) -> dict[str, int | bool]:
    """Return a decoder in the words of the calculator's form."""
    widths = widths_of(shapes)
    return {
        "layers": widths.layers,
        "hidden": widths.hidden,
        "inner": widths.inner,
        "experts": widths.experts,
        "active": widths.experts_per_token,
        "queries": widths.heads * widths.head_dim,
        "keys": widths.kv_heads * widths.head_dim,
        "head": widths.head_dim,
        "vocabulary": widths.vocabulary,
        "is_tied": bool(shapes.tied),
        "has_bias": any(tensor.name.endswith("q_proj.bias") for tensor in shapes.tensors),
        "has_qk_norm": widths.has_qk_norm,
    }


_MACHINE = ("--device-memory", f"{GPU_GIB}GiB", "--host-memory", "32GiB", "--drive-space", "2TB")
_MACHINE += ("--fused-loss",)
#: The line above the plan's table.
_TITLE_OF_TABLE = " " * 20 + "one rank"
_PEAKS = ("initialization", "step")
_FIT = ("plan", "--table", "--fit", "--fused-loss")
#: What is generated: its name in the marks, the document, and who writes it.
PARTS: dict[str, tuple[Path, Callable[[], str]]] = {
    "configuration reference": (ROOT / "docs" / "configuration.md", reference),
    "host memory of an 8B": (ROOT / "README.md", host_memory),
    "quick start in numbers": (ROOT / "README.md", quick_start),
    "answer of the plan": (ROOT / "docs" / "start.md", answer),
    "table of one pass": (ROOT / "docs" / "start.md", larger_batch),
    "table of one machine": (ROOT / "README.md", machine),
    "table of models, one rank": (ROOT / "docs" / "memory.md", lambda: printed("plan", "--table")),
    "numbers of the plan": (ROOT / "docs" / "calculator.js", calculator),
    "table of machines": (ROOT / "docs" / "scale.md", scaled),
    "table of contexts": (ROOT / "docs" / "context.md", lambda: printed(*_FIT)),
}


def replaced(name: str, text: str) -> str:
    """Return the text with the part of that name generated anew between its marks."""
    begin, end = BEGIN.format(name), END.format(name)
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"{PARTS[name][0]} has no {begin} ... {end}")
    return f"{before}{begin}\n{PARTS[name][1]()}\n{end}{after}"


def _section(section: type[BaseModel], prefix: str) -> Iterator[str]:
    title = f"`{prefix.rstrip('.')}`" if prefix else "The block"
    rows, inner_sections = [], []
    for name, field in section.model_fields.items():
        inner, is_list = _models_in(field.annotation)
        if inner is None:
            takes = _takes(section, name, field)
        else:
            inner_sections.append((inner, f"{prefix}{name}{'[]' if is_list else ''}."))
            if field.default is not None:
                continue
            takes = "list of paths or objects" if is_list else "object"
        row = f"`{prefix}{name}`", takes, _default(section, name, field), field.description or ""
        rows.append(f"| {' | '.join(row)} |")
    yield f"### {title}\n\n{(section.__doc__ or '').strip()}"
    if rows:
        yield "\n".join(["| key | takes | default | meaning |", "|---|---|---|---|", *rows])
    for inner, inner_prefix in inner_sections:
        yield from _section(inner, inner_prefix)


def _models_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the section that an annotation holds, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for argument in typing.get_args(annotation):
        found, is_list = _models_in(argument)
        if found is not None:
            return found, is_list or not _is_union(annotation)
    return None, False


def _takes(section: type[BaseModel], name: str, field: FieldInfo) -> str:
    kinds = [_kind(kind) for kind in _alternatives(field.annotation) if kind is not type(None)]
    is_size = _takes_units(section, name)
    rules = {
        attribute: (_as_size if is_size else str)(getattr(rule, attribute))
        for rule in rules_of(field)
        for attribute in ("ge", "le", "multiple_of")
        if getattr(rule, attribute, None) is not None
    }
    parts = ["size"] if is_size else kinds
    if "ge" in rules and "le" in rules:
        parts.append(f"{rules['ge']} to {rules['le']}")
    if "multiple_of" in rules:
        parts.append(f"a multiple of {rules['multiple_of']}")
    return ", ".join(parts)


def _takes_units(section: type[BaseModel], name: str) -> bool:
    """Ask the section itself; text for a key of numbers can only be a size."""
    alternatives = _alternatives(section.model_fields[name].annotation)
    if int not in alternatives or str in alternatives:
        return False
    try:
        section.model_validate({name: "1MiB"})
    except ValidationError as error:
        return all(found["loc"][:1] != (name,) for found in error.errors())
    return True


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if _is_union(annotation):
        return tuple(kind for part in typing.get_args(annotation) for kind in _alternatives(part))
    return (annotation,)


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f'"{value}"' for value in typing.get_args(annotation))
    return KINDS.get(annotation) or str(annotation.__name__)


def _default(section: type[BaseModel], name: str, field: FieldInfo) -> str:
    if field.default is None:
        return "none" if name in ABSENT else "automatic"
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return _as_size(field.default) if _takes_units(section, name) else str(field.default)


def _as_size(nbytes: int) -> str:
    for factor, unit in UNITS:
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return str(nbytes)


def main() -> None:
    """Rewrite every document that has a generated part."""
    for name, (path, _) in PARTS.items():
        path.write_text(replaced(name, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
