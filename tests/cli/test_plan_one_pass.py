"""`memascend plan` with slices: one pass per step beside accumulation, and the fewest slices."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memascend.base.units import GIB
from memascend.cli.main import main
from memascend.cli.plan_one_pass import ACCUMULATION, ONE_PASS
from memascend.plan.context import OURS_CHECKPOINTS
from tests.support.planned import as_json

MODEL = ("Llama-3.1-8B", "--limit", "6GiB")
BATCH = (*MODEL, "--batch", "16", "--context", "4096")
GB = 10**9


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def written(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "ds.json"
    nvme = {"device": "nvme", "nvme_path": "/mnt"}
    zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
    path.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}} | changes))
    return str(path)


def moved(step: dict[str, Any]) -> int:
    return int(step["read_bytes"] + step["written_bytes"])


def test_an_8b_at_16_sequences_moves_at_most_240_gb_in_one_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = as_json(capsys, *BATCH, "--micro-batches", "1")["one_pass"]["one_pass"]
    for count in (4, 8, 16):
        found = as_json(capsys, *BATCH, "--micro-batches", str(count))["one_pass"]
        one_pass, accumulation = found["one_pass"], found["accumulation"]
        assert (found["slices"], found["is_chosen"]) == (count, False)
        assert moved(one_pass) < 240 * GB
        assert moved(one_pass) == pytest.approx(moved(whole), rel=0.01)
        assert accumulation["micro_steps"] == count
        assert one_pass["tokens_per_second"] > accumulation["tokens_per_second"]
    assert moved(accumulation) == pytest.approx(1008 * GB, rel=0.005)


def test_the_fewest_slices_that_fit_are_chosen_and_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    arguments = (*BATCH, "--device-memory", "24GiB")
    text = printed(capsys, *arguments)
    for part in (
        "a step of 16 sequences of 4096 tokens", ACCUMULATION, ONE_PASS, "drive time of a step",
        "tokens per second", "read per step", "written per million tokens", "on the drive",
        "8 slice(s) of up to 2 sequence(s) are the fewest that fit 24GiB of device memory",
        '"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1, '
        '"memascend": {"micro_batches": {"count": 8}, "activations": {"enabled": true}}',
        "one pass writes 17.00 GiB of checkpoints in a step",
    ):  # fmt: skip
        assert part in text
    assert re.search(r"device_bytes can be \d+ \(4\.84 GiB\) for memascend, one pass", text)
    found = as_json(capsys, *arguments)
    assert (found["one_pass"]["slices"], found["one_pass"]["is_chosen"]) == (8, True)
    one_pass = found["one_pass"]["one_pass"]
    way = found["context"]["ways"][ONE_PASS]
    assert way["device_bytes"] == one_pass["device_bytes"] <= 24 * GIB
    assert (way["tokens"], way["slice_tokens"]) == (16 * 4096, 2 * 4096)
    assert one_pass["read_bytes_per_million_tokens"] == pytest.approx(
        one_pass["read_bytes"] / (16 * 4096) * 10**6
    )


def test_a_batch_that_fits_in_one_pass_alone_is_said_to_in_the_first_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    room = ("--device-memory", "24GiB", "--host-memory", "64GiB", "--drive-space", "2TB")
    room += ("--fused-loss", "--context", "4096")
    said = r"fits no, it needs \d+\.\d\d GiB more of GPU memory \({} it fits, see below\)"
    for batch, way in (
        ("32", r"in one pass of \d slices"),
        ("16", "with checkpoints on the drive"),
    ):
        text = " ".join(printed(capsys, "Qwen3-8B", *room, "--batch", batch).split())
        assert re.search(said.format(way), text), text
        assert re.search(r'{"sequences": 1} activations.device_bytes can be \d+ \(1\d', text)
    text = " ".join(printed(capsys, *MODEL, *room, "--batch", "2").split())
    assert "it fits, see below" not in text
    assert '{"sequences": 1}' not in text
    lacking = " ".join(printed(capsys, *MODEL, *room, "--batch", "512").split())
    assert "it fits, see below" not in lacking


def test_a_batch_that_fits_whole_has_no_slices(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--batch", "2", "--context", "1024", "--device-memory", "48GiB")
    text = printed(capsys, *MODEL, *arguments)
    assert "1 slice(s) of up to 2 sequence(s) are the fewest that fit" in text
    assert ACCUMULATION not in text
    assert ONE_PASS not in as_json(capsys, *MODEL, *arguments)["context"]["ways"]


def test_without_a_device_the_options_that_compare_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    note = "--device-memory chooses the number of slices"
    assert note in printed(capsys, *BATCH)
    assert note not in printed(capsys, *MODEL, "--context", "4096")


@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        (("--device-memory", "8GiB"), "no number of slices fits: with 16 slice(s)"),
        (("--device-memory", "24GiB", "--micro-batches", "2"), "one pass: with 2 slice(s)"),
        (("--device-memory", "48GiB", "--host-memory", "2GiB"), "of host memory"),
    ],
)
def test_a_pass_that_does_not_fit_says_how_much_it_lacks(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], lacking: str
) -> None:
    text = printed(capsys, *BATCH, *options)
    assert lacking in text
    assert re.search(r"it lacks \d+\.\d\d GiB of (device|host) memory", text)


def test_slices_come_from_the_block_and_the_option_goes_before_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for section, slices in (({"count": 4}, 4), ({"sequences": 3}, 6), ({"count": 99}, 16)):
        config = written(tmp_path, memascend={"micro_batches": section})
        assert as_json(capsys, *BATCH, "--config", config)["one_pass"]["slices"] == slices
    option = ("--micro-batches", "2")
    assert as_json(capsys, *BATCH, "--config", config, *option)["one_pass"]["slices"] == 2


@pytest.mark.parametrize("section", [{}, {"count": "auto"}])
def test_slices_without_a_number_are_chosen_as_without_the_section(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, section: dict[str, Any]
) -> None:
    config = ("--config", written(tmp_path, memascend={"micro_batches": section}))
    room = ("--device-memory", "24GiB")
    found = as_json(capsys, *BATCH, *config, *room)["one_pass"]
    assert (found["slices"], found["is_chosen"]) == (8, True)
    assert as_json(capsys, *BATCH, *config, "--micro-batches", "4")["one_pass"]["slices"] == 4
    assert "--device-memory chooses the number of slices" in printed(capsys, *BATCH, *config)
    as_json(capsys, *MODEL, *config, *room, "--fit")


def test_a_stated_number_of_sequences_is_not_overridden(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = written(tmp_path, memascend={"micro_batches": {"sequences": 3}})
    with pytest.raises(SystemExit) as caught:
        main(["plan", *BATCH, "--config", config, "--micro-batches", "2"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "--micro-batches 2 contradicts memascend.micro_batches.sequences=3" in error


def test_micro_steps_of_the_configuration_are_told_from_slices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = written(tmp_path, gradient_accumulation_steps=4, train_micro_batch_size_per_gpu=2)
    arguments = (*MODEL, "--config", config)
    text = printed(capsys, *arguments, "--batch", "2", "--context", "4096")
    assert "gradient_accumulation_steps 1, --batch 8 counts the same sequences in one pass" in text
    advice = printed(capsys, *arguments)
    assert "Set train_micro_batch_size_per_gpu to 8 and gradient_accumulation_steps to 1" in advice


def test_compute_is_that_of_the_batch_and_divided_among_micro_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = (*BATCH, "--device-memory", "48GiB", "--compute", "600", "1800")
    arguments += ("--drive-write", "3")
    found = as_json(capsys, *arguments)["one_pass"]
    # Computing takes so long that the drive is hidden, but for gradients without room.
    for step in (found["one_pass"], found["accumulation"]):
        assert step["seconds"] == pytest.approx(2400, rel=0.01)
        assert step["tokens_per_second"] == pytest.approx(16 * 4096 / step["seconds"])
    slow = as_json(capsys, *arguments, "--drive-write", "0.01")["one_pass"]
    assert slow["accumulation"]["seconds"] > slow["one_pass"]["seconds"] > 2400
    text = printed(capsys, *arguments)
    assert "a step takes at least" in text
    assert "compute for 600 s and 1800 s for 16 sequence(s)" in text


def test_ranks_train_their_tokens_together(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, *BATCH, "--micro-batches", "4", "--world", "8")["one_pass"]["one_pass"]
    assert found["tokens_per_second"] == pytest.approx(8 * 16 * 4096 / found["seconds"])


def test_fit_finds_the_largest_slice_and_longer_contexts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = (*BATCH, "--device-memory", "24GiB", "--fit")
    fits = as_json(capsys, *arguments)["fit"]
    assert fits[ONE_PASS]["slice"] == 2
    assert fits[ONE_PASS]["context"] > 4 * fits[OURS_CHECKPOINTS.title]["context"]
    assert fits[ONE_PASS]["batch"] > 16
    assert "one pass over 16 sequence(s): slices of up to 2 fit" in printed(capsys, *arguments)
    stated = as_json(capsys, *arguments, "--micro-batches", "2")["fit"]
    assert stated[ONE_PASS]["context"] < fits[ONE_PASS]["context"]
    tiny = as_json(capsys, *BATCH, "--device-memory", "8GiB", "--fit")["fit"][ONE_PASS]
    assert (tiny["slice"], set(tiny["limits"])) == (0, {"device memory"})


def test_a_table_of_models_takes_no_slices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--table", "--fit", "--batch", "4", "--micro-batches", "2"])
    assert "--micro-batches needs MODEL" in capsys.readouterr().err
