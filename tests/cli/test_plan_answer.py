"""The answer of `memascend plan`: it compares with this machine, or with the sizes stated."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from memascend.base.units import GIB
from memascend.cli import plan, plan_machine
from memascend.cli.main import main
from memascend.system.gpus import Gpu
from tests.support.plan_models import SMALL
from tests.support.planned import as_json


class Usage(NamedTuple):
    """What shutil.disk_usage returns."""

    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 32 GiB, a GPU of 24 GiB and 1 TiB free."""
    monkeypatch.setattr(plan_machine, "memory_total", lambda: 32 * GIB)
    monkeypatch.setattr(plan_machine, "list_gpus", lambda: [Gpu("RTX 4090", 24 * GIB, "1")])
    usage = Usage(2048 * GIB, 1024 * GIB, 1024 * GIB)
    monkeypatch.setattr(plan_machine.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setenv("COLUMNS", "80")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = as_json(capsys, *arguments)["answer"]
    return found


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_answer_comes_first_and_is_five_labelled_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(capsys, "Qwen/Qwen3-8B", "--fused-loss")
    assert lines[0].startswith("Qwen3-8B: 8.19 billion parameters, bf16, AdamW, 1 rank(s)")
    labels = [line.split()[0] for line in lines[1:] if line[:1].islower()]
    assert labels == ["fits", "drive", "save", "step", "wear"]
    text = " ".join(" ".join(lines).split())
    assert "fits yes: host memory 3.74 GiB of 32.00 GiB, drive space 106.80 GiB of 1024" in text
    assert "36,864 tokens (largest batch 9 x 4096), at most 192 tokens/s" in text
    assert "1000 steps write 115 TB, 10% of the 1,200 TB that a 2 TB drive" in text
    assert "; 3,111 GB per million tokens" in text  # 115 TB / 36.864 million


def test_space_for_second_values_is_told_where_a_checkpoint_has_room_beside_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(" ".join(printed(capsys, "Llama-3.1-8B")).split())
    assert (
        "104.70 GiB stay on it, and 89.75 GiB for a second copy of weights and moments if" in text
    )
    assert answer(capsys, "Llama-3.1-8B", "--world", "2")["second_bytes"] == pytest.approx(
        12 * 8.03e9, rel=0.001
    )
    needed = 104.70 + 89.75 + 209.41  # with a checkpoint and the model
    for free, has_room in ((needed - 0.1, False), (needed + 0.1, True)):
        usage = Usage(1, 1, int(free * GIB))
        monkeypatch.setattr(plan_machine.shutil, "disk_usage", lambda path, usage=usage: usage)
        found = answer(capsys, "Llama-3.1-8B")
        assert (found["fits"], found["second_bytes"] > 0) == (True, has_room)


def test_second_values_of_muon_are_only_for_a_drive_with_room_for_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = tmp_path / "ds.json"
    zero = {"stage": 3, "offload_param": drive, "offload_optimizer": drive}
    keys = {"bf16": {"enabled": True}, "optimizer": {"type": "Muon"}, "gradient_clipping": 0}
    config.write_text(json.dumps({"zero_optimization": zero, **keys}))
    arguments = ("Llama-3.1-8B", "--config", str(config), "--drive-space")
    roomy, tight = (answer(capsys, *arguments, space) for space in ("2TB", "150GB"))
    assert roomy["fits"]
    assert tight["fits"]
    matrices = 6.98e9
    assert roomy["drive_bytes"] - tight["drive_bytes"] == pytest.approx(4.1 * matrices, rel=0.02)
    assert tight["written_bytes"] - roomy["written_bytes"] == pytest.approx(2 * matrices, rel=0.02)


def test_checkpoints_are_counted_beside_the_run_and_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(" ".join(printed(capsys, "Llama-3.1-8B", "--drive-space", "600GB")).split())
    assert (
        "save a checkpoint takes 179.49 GiB, the model 14.96 GiB; the drive has room for 2" in text
    )
    run, checkpoint, model = 104.70, 179.49, 14.96
    for count in (0, 1, 3):
        for more, found_count in ((0.1, count), (-0.1, max(0, count - 1))):
            free = run + 2 * model + count * checkpoint + more
            found = answer(capsys, "Llama-3.1-8B", "--drive-space", f"{free}GiB")
            assert (found["fits"], found["checkpoint_count"]) == (True, found_count)
    none = " ".join(" ".join(printed(capsys, "Llama-3.1-8B", "--drive-space", "200GB")).split())
    assert "the drive has room for no checkpoints beside the run and the model" in none


def test_without_an_optimizer_on_the_drive_no_checkpoint_is_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    zero["offload_optimizer"] = {"device": "cpu"}
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    found = answer(capsys, "Llama-3.1-8B", "--config", str(config))
    assert (found["checkpoint_bytes"], found["checkpoint_count"]) == (0, None)
    assert not [
        line
        for line in printed(capsys, "Llama-3.1-8B", "--config", str(config))
        if line.startswith("save")
    ]


@pytest.fixture
def json_of(tmp_path: Path) -> Callable[..., str]:
    """Write a DeepSpeed JSON with more keys than the sections of offload; return its path."""

    def write(*, optimizer: str = "nvme", path: str = "", **keys: Any) -> str:
        drive = {"device": "nvme", "nvme_path": path or str(tmp_path)}
        zero = {"stage": 3, "offload_param": drive, "offload_optimizer": drive}
        if optimizer != "nvme":
            zero["offload_optimizer"] = {"device": optimizer}
        zero |= keys.pop("zero", {})
        file = tmp_path / "ds.json"
        file.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}} | keys))
        return str(file)

    return write


def test_memory_beside_memascends_has_to_fit(
    capsys: pytest.CaptureFixture[str], json_of: Callable[..., str]
) -> None:
    """DeepSpeed's optimizer in host memory, and stock where the block is off."""
    options = ("Llama-3.1-8B", "--host-memory", "32GiB", "--config")
    assert answer(capsys, *options, json_of())["fits"]
    found = as_json(capsys, *options, json_of(optimizer="cpu"))
    beside = sum(found["memascend"]["not_ours"].values())
    assert beside > 100 * GIB
    assert found["answer"]["needed"]["host memory"] > beside
    assert not found["answer"]["fits"]
    found = as_json(capsys, *options, json_of(memascend={"enabled": False}))
    assert found["answer"]["needed"]["host memory"] > found["stock"]["host_bytes"] > 32 * GIB
    assert found["answer"]["written_bytes"] == sum(found["stock"]["written_bytes"].values())
    assert not found["answer"]["fits"]
    assert "memascend.enabled is false: a run would use stock DeepSpeed" in found["warnings"]


def test_a_fraction_is_one_of_the_memory_that_is_stated(
    capsys: pytest.CaptureFixture[str], json_of: Callable[..., str]
) -> None:
    config = json_of(memascend={"host_memory_limit": 0.5})
    for stated, world in ((8, 1), (32, 1), (16, 2)):
        options = ("--host-memory", f"{stated}GiB", "--world", str(world), "--config", config)
        found = as_json(capsys, "Llama-3.1-8B", *options)
        assert found["memascend"]["limit_bytes"] == stated * GIB // 2
        assert found["answer"]["fits"]


def test_a_folder_that_a_run_would_make_is_on_the_drive_of_the_one_above(
    capsys: pytest.CaptureFixture[str], json_of: Callable[..., str], tmp_path: Path
) -> None:
    config = json_of(path=str(tmp_path / "not" / "yet"))
    assert answer(capsys, "Llama-3.1-8B", "--config", config)["place"] == str(tmp_path)


def test_the_batch_of_the_json_is_counted(
    capsys: pytest.CaptureFixture[str], json_of: Callable[..., str]
) -> None:
    sizes = {"gradient_accumulation_steps": 4, "train_batch_size": 16}
    for stated in ({}, {"train_micro_batch_size_per_gpu": 2}):
        config = json_of(**sizes, **stated)
        options = ("--world", "2", "--device-memory", "24GiB", "--config", config)
        assert answer(capsys, "Llama-3.1-8B", *options)["shape"] == "16 x 4096"


def test_of_several_machines_the_model_is_on_one_and_each_writes_its_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--world", "4", "--context", "4096", "--batch", "2", "--device-memory", "80GiB")
    one, two = (as_json(capsys, "Llama-3.1-8B", *options, "--nodes", nodes) for nodes in ("1", "2"))
    assert one["answer"]["model_bytes"] == two["answer"]["model_bytes"] == 2 * one["parameters"]
    for found, nodes in ((one, 1), (two, 2)):
        gigabytes = found["one_pass"]["one_pass"]["written_bytes_per_million_tokens"] / 1e9
        text = " ".join(printed(capsys, "Llama-3.1-8B", *options, "--nodes", str(nodes)))
        assert f"; {gigabytes:,.0f} GB per million tokens" in " ".join(text.split())


def test_several_drives_have_the_rates_and_the_endurance_of_several(
    capsys: pytest.CaptureFixture[str], json_of: Callable[..., str]
) -> None:
    paths = [{"path": f"/dev/nosuch{number}", "raw": True} for number in range(2)]
    config = json_of(memascend={"volumes": paths[:1]})
    one = answer(capsys, "Llama-3.1-8B", "--config", config)
    config = json_of(memascend={"volumes": paths})
    two = answer(capsys, "Llama-3.1-8B", "--config", config)
    assert two["drive_count"] == 2
    assert two["step_seconds"] == pytest.approx(one["step_seconds"] / 2, rel=0.01)
    assert two["rated_share"] == pytest.approx(one["rated_share"] / 2, rel=0.01)
    text = " ".join(" ".join(printed(capsys, "Llama-3.1-8B", "--config", config)).split())
    assert "(assumed of 2 drives)" in text
    assert "of the 2,400 TB that 2 drives of 2 TB are often rated for" in text


def test_a_checkpoint_of_the_trainer_has_the_model_as_well(
    capsys: pytest.CaptureFixture[str], json_of: Callable[..., str]
) -> None:
    free = ("--drive-space", f"{104.70 + 2 * 14.96 + 2 * (179.49 + 14.96) - 1}GiB")
    for saves, count in ((False, 2), (True, 1)):
        config = json_of(zero={"stage3_gather_16bit_weights_on_model_save": saves})
        found = answer(capsys, "Llama-3.1-8B", "--config", config, *free)
        assert found["checkpoint_count"] == count


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("microsoft/phi-4",), "the saved activations of model_type='phi3' are not known"),
        (("Llama-3.1-8B", "--limit", "9764864"), "the limit has no room for slots of activations"),
    ],
)
def test_device_memory_that_is_stated_and_not_counted_has_a_reason(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    lines = printed(capsys, *arguments, "--device-memory", "80GiB")
    text = " ".join(" ".join(lines).split())
    assert f"GPU memory not counted ({reason})" in text
    assert "--device-memory 24GiB counts one" not in text


#: Every mode of the command that prints for a reader.
MODES = [
    "Llama-3.1-8B",
    "Llama-3.1-8B --verbose",
    "DeepSeek-V3 --world 64 --nodes 8 --verbose",
    "Llama-3.1-8B --context 4096 --batch 4",
    "Llama-3.1-8B --context 131072 --verbose",
    "Llama-3.1-8B --context 4096 --batch 32 --verbose",
    "Llama-3.1-8B --context 4096 --batch 32 --micro-batches 4 --compute 9 99 --verbose",
    "Llama-3.1-70B --context 1000000 --world 8 --fused-loss --tiled-mlp --verbose",
    "Llama-3.1-8B --fit",
    "Llama-3.1-8B --fit --context 4096 --batch 16 --host-memory 2GiB --verbose",
    "--table",
    "--table --fit --device-memory 24GiB --host-memory 2GiB",
    "--help",
]


@pytest.mark.parametrize("mode", MODES)
def test_80_columns_are_enough(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(plan, "is_terminal", lambda: True)
    options = ["--device-memory", "24GiB"] if "Llama" in mode else []
    with contextlib.suppress(SystemExit):  # --help
        assert main(["plan", *mode.split(), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


def test_what_does_not_fit_is_named_with_what_it_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_machine, "memory_total", lambda: 2 * GIB)
    monkeypatch.setattr(plan_machine.shutil, "disk_usage", lambda path: Usage(1, 1, 100 * GIB))
    found = answer(capsys, "Llama-3.1-8B", "--device-memory", "4GiB")
    assert not found["fits"]
    assert set(found["lacking"]) == {"host memory", "drive space", "GPU memory"}
    text = " ".join(" ".join(printed(capsys, "Llama-3.1-8B")).split())
    assert "fits no, it needs 1.84 GiB more of host memory and 4.70 GiB more of drive" in text


def test_sizes_that_are_stated_come_before_those_of_the_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--host-memory", "8GiB", "--device-memory", "48GiB", "--world", "4", "--nodes", "2")
    found = answer(capsys, "Llama-3.1-8B", *options)
    assert found["available"]["host memory"] == 16 * GIB  # of the two ranks of a machine
    assert found["available"]["GPU memory"] == 48 * GIB
    assert found["tokens"] % (4 * 4096) == 0


def test_without_a_gpu_no_tokens_are_promised(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_machine, "list_gpus", list)
    found = answer(capsys, "Llama-3.1-8B")
    assert (found["fits"], found["tokens"]) == (True, None)
    text = " ".join(printed(capsys, "Llama-3.1-8B"))
    assert "no GPU counted" in text
    assert "tokens/s" not in text


def test_a_model_whose_activations_are_not_known_has_an_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = answer(capsys, "microsoft/phi-4")
    assert found["fits"]
    assert "GPU memory" not in found["available"]
    assert main(["plan", "microsoft/phi-4", "--context", "4096"]) == 1
    assert "leave out --context and --fit" in capsys.readouterr().err


def test_a_context_is_the_one_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(
        capsys, "Llama-3.1-8B", "--context", "8192", "--batch", "2", "--compute", "9", "99"
    )
    assert (found["tokens"], found["shape"]) == (16384, "2 x 8192")
    assert found["step_seconds"] > 99


def test_slices_and_activations_of_the_block_are_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": drive, "offload_optimizer": drive}
    config = tmp_path / "ds.json"

    def answered(block: dict[str, Any], *options: str) -> dict[str, Any]:
        text = {"zero_optimization": zero, "bf16": {"enabled": True}, "memascend": block}
        config.write_text(json.dumps(text))
        return as_json(capsys, "Qwen3-8B", "--config", str(config), "--fused-loss", *options)

    batch = ("--context", "4096", "--batch", "32", "--device-memory", "24GiB")
    on_drive = {"activations": {"enabled": True}}
    whole, none = answered(on_drive, *batch)["answer"], answered({}, *batch)["answer"]
    assert (whole["fits"], none["fits"]) == (False, False)
    for section in ({"count": 16}, {"sequences": 2}, {}):
        found = answered({**on_drive, "micro_batches": section}, *batch)
        ours, one_pass = found["answer"], found["one_pass"]["one_pass"]
        assert ours["fits"]
        names = ("read_bytes", "written_bytes")
        assert [ours[name] for name in names] == [one_pass[name] for name in names]
        assert ours["step_seconds"] == pytest.approx(one_pass["seconds"])
        if section:
            assert ours["needed"]["GPU memory"] == one_pass["device_bytes"]
        moved = ours["written_bytes"] - none["written_bytes"]
        assert moved == found["context"]["ways"]["memascend, one pass"]["drive_bytes"] > 0
        assert ours["drive_bytes"] - none["drive_bytes"] == moved
        # Without a context it is the largest batch that fits.
        largest = answered({**on_drive, "micro_batches": section})["answer"]["tokens"]
        assert largest > 2 * answered(on_drive)["answer"]["tokens"] > 0
    beside = (*batch, "--compute", "1", "1")
    found = answered({**on_drive, "micro_batches": {"count": 16}}, *beside)
    seconds = found["answer"]["step_seconds"]
    assert seconds == pytest.approx(found["one_pass"]["one_pass"]["seconds"])
    assert seconds > answered({}, *beside)["answer"]["step_seconds"]


def test_an_update_of_muon_during_backward_has_device_memory_beside_the_batch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": drive, "offload_optimizer": drive}
    base = {"zero_optimization": zero, "bf16": {"enabled": True}, "optimizer": {"type": "Muon"}}
    batch = ("--context", "4096", "--batch", "8", "--device-memory", "24GiB")
    needed = {}
    for choice in (True, False):
        block = {"streaming": {"optimizer": {"during_backward": choice}}}
        config = tmp_path / f"{choice}.json"
        config.write_text(json.dumps(base | {"gradient_clipping": 0, "memascend": block}))
        found = as_json(capsys, "Qwen3-8B", "--config", str(config), *batch)
        needed[choice] = found["answer"]["needed"]["GPU memory"]
    # For a matrix of the MLP; the batch has somewhat less room.
    assert needed[True] - needed[False] == pytest.approx(18 * 4096 * 12288, rel=0.05)


def test_the_folder_is_the_option_else_that_of_the_config_else_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    nvme = {"device": "nvme", "nvme_path": str(swap)}
    zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
    config = tmp_path / "ds.json"
    content = {"zero_optimization": zero, "bf16": {"enabled": True}}
    config.write_text(json.dumps(content | {"memascend": {"wear": {"endurance": "2400TB"}}}))
    model = ("Llama-3.1-8B", "--config", str(config))
    found = answer(capsys, *model)
    assert (found["place"], found["is_stated"]) == (str(swap), True)
    assert found["rated_share"] == pytest.approx(112.4 / 2400, rel=0.01)
    elsewhere = ("--path", str(tmp_path), "--drive-read", "3")  # stated: nothing is measured
    assert answer(capsys, *model, *elsewhere)["place"] == str(tmp_path)
    assert answer(capsys, "Llama-3.1-8B")["place"] == str(Path.cwd())
    assert main(["plan", "Llama-3.1-8B", "--path", str(tmp_path / "nosuch")]) == 1
    assert "--path" in capsys.readouterr().err


def test_the_space_of_another_drive_may_be_stated(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(" ".join(printed(capsys, "Llama-3.1-8B", "--drive-space", "50GB")).split())
    assert "more of drive space" in text
    assert "104.70 GiB of 46.57 GiB" in text
    assert " free in " not in text
    assert answer(capsys, "Llama-3.1-8B", "--drive-space", "2TB")["fits"]


def test_a_space_that_is_no_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "Llama-3.1-8B", "--drive-space", "much"])
    assert "--drive-space" in capsys.readouterr().err


@pytest.mark.parametrize(("batch", "shape"), [([], "16 x 4096"), (["--batch", "2"], "2 x 4096")])
def test_the_batch_is_the_option_else_that_of_the_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, batch: list[str], shape: str
) -> None:
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": drive, "offload_optimizer": drive}
    keys = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 16, "memascend": {}}
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": zero, **keys}))
    options = ("--config", str(config), "--context", "4096", *batch)
    found = as_json(capsys, "Qwen3-8B", *options)
    assert found["answer"]["shape"] == shape
    told = "--batch 2 is counted; the micro-batch of --config is 16"
    assert (told in found["warnings"]) == bool(batch)


def test_the_answer_beside_fit_is_for_the_batch_that_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = answer(capsys, "Qwen3-8B", "--fit", "--device-memory", "24GiB", "--batch", "64")
    assert found["shape"] == "64 x 4096"


def test_a_run_that_is_turned_off_has_the_bytes_of_stock_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("Qwen3-8B", "--device-memory", "24GiB", "--context", "4096")
    monkeypatch.setenv("MEMASCEND_DISABLE", "1")
    found = as_json(capsys, *options)
    assert found["answer"]["second_bytes"] == 0
    ways = found["context"]["ways"]
    stock = ways["stock, checkpoints on the device"]
    assert found["answer"]["needed"]["GPU memory"] == stock["device_bytes"]


def test_a_run_without_a_limit_takes_half_of_the_memory_if_its_plan_is_larger(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--drive-space", "4TB", "--context", "4096", "--device-memory", "80GiB")
    found = answer(capsys, "Llama-3.1-70B", "--host-memory", "6GiB", *options)
    assert "host memory" not in found["lacking"]


def test_packed_weights_are_said_to_be_counted_whole(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    content = {"model_type": "llama", **SMALL, "quantization_config": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = as_json(capsys, str(tmp_path / "config.json"))
    assert "packed ones cannot be trained" in found["warnings"][0]
