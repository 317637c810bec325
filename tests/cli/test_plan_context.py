"""`memascend plan --context` and `--fit`: what they print, and what they refuse."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from memascend.base.units import GIB
from memascend.cli.main import main
from memascend.cli.plan_accounts import AUTO_SIZES
from memascend.cli.plan_context import TABLE_WAYS
from memascend.cli.plan_one_pass import ONE_PASS
from memascend.plan.context import (
    KEPT,
    OURS_CHECKPOINTS,
    OURS_ON_DEVICE,
    STOCK_CHECKPOINTS,
    STOCK_ON_HOST,
    WAYS,
)
from tests.support.planned import as_json
from tests.support.without_torch import printed_without_torch

OURS, ON_HOST = OURS_CHECKPOINTS.title, STOCK_ON_HOST.title


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def written(tmp_path: Path, block: dict[str, Any], **changes: Any) -> str:
    path = tmp_path / "ds.json"
    nvme = {"device": "nvme", "nvme_path": "/mnt"}
    zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme} | changes
    content = {"zero_optimization": zero, "bf16": {"enabled": True}, "memascend": block}
    path.write_text(json.dumps(content))
    return str(path)


def titles(text: str) -> list[str]:
    """Return the titles of the columns of every table, each written over several lines."""
    found = []
    for _, lines in itertools.groupby(text.splitlines(), key=lambda line: line.startswith("┃")):
        rows = [line.strip("┃").split("┃") for line in lines if line.startswith("┃")]
        found += [" ".join(" ".join(cells).split()) for cells in zip(*rows, strict=True)]
    return found


def test_every_way_to_train_has_a_column_that_says_where_activations_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["plan", "Llama-3.1-8B", "--context", "131072", "--batch", "2", "--verbose"])
    assert titles(capsys.readouterr().out) == [
        "", *(way.title for way in WAYS if not way.has_memascend),
        "", *(way.title for way in WAYS if way.has_memascend),
    ]  # fmt: skip
    sliced = ("--batch", "8", "--context", "8192", "--device-memory", "16GiB")
    main(["plan", "Llama-3.1-8B", *sliced])
    shown = titles(capsys.readouterr().out)
    assert shown[1:4] == [STOCK_CHECKPOINTS.title, OURS_ON_DEVICE.title, OURS_CHECKPOINTS.title]
    assert shown[4] == f"{ONE_PASS}, checkpoints on the drive"


def test_the_notes_say_how_the_table_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "Llama-3.1-8B", "--context", "131072", "--verbose")
    parts = (
        "a context of 131072 tokens, batch 1, bf16", "32.00 GiB", "reduce bucket", "estimate",
        "host memory at most", "activations on the drive", "adds to a step",
        "written in 1000 steps", "eager attention", "--fused-loss counts with one",
        "no --config: Hugging Face's example",
        '"activations": {"enabled": true}', "with --device-memory the largest value is shown",
    )  # fmt: skip
    assert [part for part in parts if part not in text] == []


def test_the_json_has_what_the_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(
        capsys, "Qwen2.5-7B", "--context", "8192", "--batch", "4", "--fused-loss", "--tiled-mlp"
    )
    assert found["memascend"]["host_bytes"] > 0
    context = found["context"]
    assert (context["context"], context["batch"]) == (8192, 4)
    assert (context["fused_loss"], context["tiled_mlp"]) == (True, True)
    assert list(context["ways"]) == [way.title for way in WAYS]
    for plan in context["ways"].values():
        assert plan["tokens"] == 4 * 8192
        assert plan["device_bytes"] == sum(plan["device"].values()) + max(plan["moments"].values())
    ours = context["ways"][OURS]
    assert ours["drive_bytes"] > 0
    assert ours["added_seconds"] > 0
    assert context["ways"][ON_HOST]["added_seconds"] == 0


def test_slower_drives_take_longer(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("Llama-3.1-8B", "--context", "65536", "--drive-write")
    fast, slow = (as_json(capsys, *arguments, speed)["context"]["ways"] for speed in ("4", "1"))
    assert slow[OURS]["added_seconds"] > 2 * fast[OURS]["added_seconds"]


def test_ranks_share_the_drive_of_their_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("Llama-3.1-8B", "--context", "65536", "--world", "8", "--nodes")
    one, two = (as_json(capsys, *arguments, nodes)["context"]["ways"] for nodes in ("1", "2"))
    assert one[OURS]["added_seconds"] == pytest.approx(2 * two[OURS]["added_seconds"])


def test_what_is_free_on_the_device_is_offered_for_activations(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("Llama-3.1-8B", "--context", "131072", "--fused-loss", "--device-memory", "48GiB")
    text = printed(capsys, *arguments)
    found = re.search(r"activations\.device_bytes can be (\d+) ", text)
    assert found is not None
    nbytes = int(found.group(1))
    block = {"activations": {"enabled": True, "device_bytes": nbytes}}
    config = written(tmp_path, block, **dict.fromkeys(AUTO_SIZES, "auto"))
    ours = as_json(capsys, *arguments, "--config", config)["context"]["ways"][OURS]
    assert ours["device"][KEPT] == nbytes
    assert 48 * GIB - 4096 < ours["device_bytes"] <= 48 * GIB
    assert '"enabled": true' not in printed(capsys, *arguments, "--config", config)


@pytest.mark.parametrize(
    ("context", "note"),
    [
        ("8192", "not needed here: the device has room for the checkpoints"),
        ("65536", "of device memory are enough"),
        ("262144", "the device lacks"),
    ],
)
def test_whether_activations_have_to_go_to_the_drive_is_told(
    capsys: pytest.CaptureFixture[str], context: str, note: str
) -> None:
    room = ("--fused-loss", "--device-memory", "24GiB", "--context", context)
    text = printed(capsys, "Llama-3.1-8B", *room)
    assert '"activations": {"enabled": true} in the block' in text
    assert note in text
    ways = as_json(capsys, "Llama-3.1-8B", *room)["context"]["ways"]
    device_bytes = [ways[way.title]["device_bytes"] for way in (OURS_CHECKPOINTS, OURS_ON_DEVICE)]
    fits = [nbytes <= 24 * GIB for nbytes in device_bytes]
    assert fits == [context != "262144", context == "8192"]


def test_a_device_that_is_too_small_is_told_by_how_much(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("Llama-3.1-8B", "--context", "65536", "--device-memory", "8GiB")
    assert "the device lacks" in printed(capsys, *arguments)


def test_what_fits_is_found_for_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    room = ("--device-memory", "24GiB", "--host-memory", "64GiB", "--fused-loss")
    found = as_json(capsys, "Llama-3.1-8B", "--fit", *room)
    assert "context" not in found
    assert list(found["fit"]) == [way.title for way in WAYS]
    assert all("batch" not in row for row in found["fit"].values())
    assert found["fit"][ON_HOST]["limits"].keys() == {"host memory"}
    longest = found["fit"][OURS]["context"]
    assert longest > found["fit"][STOCK_CHECKPOINTS.title]["context"] > 0
    batches = as_json(capsys, "Llama-3.1-8B", "--fit", "--context", "1000", *room)["fit"]
    assert batches[OURS]["batch"] == longest // 1000
    of_two = as_json(capsys, "Llama-3.1-8B", "--fit", "--batch", "2", *room)["fit"]
    assert of_two[OURS]["context"] == longest // 2


def test_what_does_not_fit_says_what_is_short(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    room = ("--device-memory", "3GiB", "--host-memory", "32GiB")
    text = printed(capsys, "Llama-3.1-8B", "--fit", "--context", "4096", *room)
    assert "contexts in 3GiB of device memory, 32GiB of host memory" in text
    assert re.search(r"device memory by \d+\.\d\d GiB, host memory by \d+\.\d\d GiB", text)


def test_of_the_contexts_that_fit_a_way_takes_at_most_two_lines_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    room = ("--device-memory", "24GiB", "--host-memory", "32GiB", "--batch", "2")
    assert main(["plan", "Qwen3-8B", "--fit", "--context", "4096", *room]) == 0
    text = capsys.readouterr().out
    head, table = text[text.rindex("Qwen3-8B: contexts in") :].split("┡", 1)
    assert max(len(line) for line in (head + table).splitlines()) <= 80
    titles = "".join(re.findall(r"^┃.*", head, re.MULTILINE))
    assert {"longest", "largest", "batch", "context", "2", "4096"} < {*re.findall(r"\w+", titles)}
    body = re.findall(r"^│ (.{24}) │", table, re.MULTILINE)
    assert 0 < len(body) <= 2 * (len(WAYS) + 1)
    assert re.search(r" memory by \d+\.\d\d GiB +│", table)
    assert re.search(r"│ +\d\d?,\d{3} │", table)


def test_little_host_memory_makes_our_own_buffers_smaller(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("Llama-3.1-8B", "--fit", "--device-memory", "48GiB", "--host-memory")
    enough, little, none = (
        as_json(capsys, *arguments, size)["fit"][OURS] for size in ("64GiB", "3.1GiB", "2GiB")
    )
    assert enough["context"] == little["context"] > 0
    assert (none["context"], set(none["limits"])) == (0, {"host memory"})


def test_the_table_has_a_row_for_each_machine_and_stands_in_the_documents(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--table", "--fit", "--fused-loss"]) == 0
    whole = capsys.readouterr().out.strip()
    lines = whole.splitlines()
    assert len(lines) == 2 + 3 * 3
    assert all(way.title in lines[0] for way in TABLE_WAYS)
    assert main(["plan", "--table", "--fit", "--fused-loss", "--host-memory", "64GiB"]) == 0
    short = capsys.readouterr().out.strip().splitlines()
    assert short == [line for line in lines if "| 128 |" not in line and "| 32 |" not in line]
    assert main(["plan", "--table", "--fit", "--device-memory", "24GiB"]) == 0
    assert "no: host memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fit", "--device-memory", "much"], "--device-memory: not a byte count: 'much'"),
        (["--fit", "--device-memory", "0"], "--device-memory: must be above 0 bytes"),
        (["--context", "8", "--host-memory=-1"], "--host-memory: a byte count cannot be negative"),
    ],
)
def test_a_size_that_cannot_be_is_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "Llama-3.1-8B", *arguments])
    assert message in capsys.readouterr().err


def test_shapes_without_a_config_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]}}).encode()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert main(["plan", str(weights), "--context", "4096"]) == 1
    assert "Give the model's config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "0"], "must be a whole number from 1 to"),
        (["--context", "long"], "must be a whole number from 1 to"),
        (["--context", str(1 << 40), "--batch", "2"], "must be at most"),
        (["--fit"], "--fit needs --device-memory"),
        (["--batch", "2"], "--batch needs --context or --fit"),
        (["--micro-batches", "1"], "--micro-batches needs --context or --fit"),
        (["--context", "8", "--micro-batches", "0"], "must be a whole number from 1 to"),
        (["--context", "8", "--micro-batches", "2"], "--micro-batches 2 is more than --batch 1"),
    ],
)
def test_a_mistake_in_the_command_line_is_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "Llama-3.1-8B", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "4096"], "--fit beside --table"),
        (["--device-memory", "24GiB"], "--device-memory needs --context or --fit"),
        (["--path", "/nosuch"], "--path needs MODEL"),
        (["--drive-read", "5"], "--drive-read needs MODEL"),
        (["--fit", "--drive-space", "1TB"], "--drive-space needs MODEL"),
        (["--fit", "--verbose"], "--verbose needs MODEL"),
    ],
)
def test_a_table_refuses_options_without_effect(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--table", *arguments])
    assert message in capsys.readouterr().err


def test_it_runs_where_neither_torch_nor_deepspeed_exists() -> None:
    options = ["--context", "4096", "--fit", "--device-memory", "24GiB"]
    assert "limited by" in printed_without_torch(
        "from memascend.cli.main import main",
        f"sys.exit(main(['plan', 'Llama-3.1-8B', *{options}]))",
    )
