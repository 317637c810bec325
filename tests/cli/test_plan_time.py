"""How long a planned step takes: the drive's time, and what compute hides of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memascend.cli.main import main
from memascend.config.environment import cache_directory
from memascend.plan.drive_rates import READ_GB_S, WRITE_GB_S
from memascend.volumes.kept import KeptRates, keep_rates
from tests.support.planned import as_json

ROOT = Path(__file__).resolve().parents[2]


def test_ranks_share_the_drive_of_their_machine_and_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, two = (
        as_json(capsys, "Llama-3.1-8B", "--world", "8", "--nodes", nodes) for nodes in ("1", "2")
    )
    assert one["memascend"]["host"] == two["memascend"]["host"]
    seconds = [found["memascend"]["step_seconds"] for found in (one, two)]
    assert seconds[0] == pytest.approx(2 * seconds[1])


def test_without_a_measurement_a_modest_drive_is_assumed_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = as_json(capsys, "Llama-3.1-8B")
    assert (found["drive_read_gb_s"], found["drive_write_gb_s"]) == (READ_GB_S, WRITE_GB_S)
    ours = found["memascend"]
    read_s = sum(ours["read_bytes"].values()) / READ_GB_S / 1e9
    written_s = sum(ours["written_bytes"].values()) / WRITE_GB_S / 1e9
    assert ours["step_seconds"] == pytest.approx(read_s + written_s)
    printed = planned(capsys)
    assert f"{READ_GB_S:g} GB/s read, {WRITE_GB_S:g} GB/s written and 1.26 GB/s of both" in printed
    assert "read and write not measured, but assumed" in printed
    assert "`memascend volume bench --sustained` measures yours; reads and writes" in printed
    stated = planned(capsys, "--drive-write", "2", "--drive-mixed", "2.5")
    assert "3 GB/s read, 2 GB/s written and 2.5 GB/s of both" in stated
    assert "rates of the drive: read not measured, but assumed" in stated
    assert "take turns" not in stated
    assert "rates of the drive: as stated -" in planned(
        capsys, "--drive-read", "5", "--drive-write", "2", "--drive-mixed", "2.5"
    )


def test_a_drive_that_cannot_do_both_at_once_takes_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rates = ("--drive-read", "6", "--drive-write", "5", "--drive-mixed")
    fast, slow = (
        as_json(capsys, "Llama-3.1-8B", *rates, mixed)["memascend"] for mixed in ("11", "5")
    )
    assert slow["step_seconds"] > 1.5 * fast["step_seconds"]
    assert slow["hiding_forward_seconds"] > 1.5 * fast["hiding_forward_seconds"]


def test_rates_that_were_measured_are_counted_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_rates(str(tmp_path), KeptRates(2.0, 0.5, 0.9), cache=cache_directory())
    ds_config = json.loads((ROOT / "configs" / "nvme_gpu.json").read_text())
    for part in ("offload_param", "offload_optimizer"):
        ds_config["zero_optimization"][part]["nvme_path"] = str(tmp_path)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds_config))
    measured = ("--config", str(path))
    printed = planned(capsys, *measured)
    assert "2 GB/s read, 0.5 GB/s written and 0.9 GB/s of both" in printed
    assert f"measured by `memascend volume bench --sustained` on {tmp_path}" in printed
    stated = planned(capsys, *measured, "--drive-read", "7")
    assert f"7 GB/s read, {WRITE_GB_S:g} GB/s written" in stated
    ds_config["memascend"] = {"volumes": [{"path": "/dev/nosuch", "raw": True}, str(tmp_path)]}
    path.write_text(json.dumps(ds_config))
    assert "not measured, but assumed" in planned(capsys, *measured)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the plan of a model prints, in one line."""
    assert main(["plan", "Llama-3.1-8B", "--verbose", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_compute_says_what_of_the_optimizer_nothing_can_hide(
    capsys: pytest.CaptureFixture[str],
) -> None:
    account = as_json(capsys, "Llama-3.1-8B")["memascend"]
    hiding_s = account["hiding_forward_seconds"]
    assert hiding_s > 0
    assert "unhidden_seconds" not in account
    for forward_s, unhidden_s in ((hiding_s, 0.0), (hiding_s - 2, 2.0)):
        compute = (str(forward_s), "100")
        account = as_json(capsys, "Llama-3.1-8B", "--compute", *compute)["memascend"]
        assert account["unhidden_seconds"] == pytest.approx(unhidden_s)
        # Backward waits for the gradients of the embedding and the head alone.
        held_up_s = account["least_seconds"] - 100 - hiding_s
        assert 0 < held_up_s < 3
    assert main(["plan", "Llama-3.1-8B", "--verbose", "--compute", "7", "100"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"it is free only if that pass computes for {hiding_s:.1f} s or longer" in printed
    assert f"a step takes {100 + hiding_s + held_up_s:.1f} s or longer" in printed
    assert "computes nothing meanwhile" not in printed
    assert f"the optimizer adds {hiding_s - 7:.1f} s" in printed


@pytest.mark.parametrize(
    ("optimizer", "lines"),
    [
        ({"overlap": False}, ["s after backward, without overlap"]),
        (
            {"during_backward": True},
            [
                "a part of the optimizer overlaps the last backward pass",
                "the rest of the optimizer overlaps the next forward pass",
            ],
        ),
        (
            {"during_backward": True, "overlap": False},
            ["- the optimizer overlaps the last backward pass"],
        ),
    ],
)
def test_what_hides_the_optimizer_is_said_for_each_way_to_step(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    optimizer: dict[str, bool],
    lines: list[str],
) -> None:
    ds_config = json.loads((ROOT / "configs" / "nvme_gpu.json").read_text())
    ds_config |= {"gradient_clipping": 0, "memascend": {"streaming": {"optimizer": optimizer}}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds_config))
    arguments = ["Llama-3.1-8B", "--config", str(path)]
    assert main(["plan", *arguments, "--verbose"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    known = ("overlaps the last", "overlaps the next", "after backward, without")
    assert sum(printed.count(words) for words in known) == len(lines)
    assert [line for line in lines if line not in printed] == []
    account = as_json(capsys, *arguments)["memascend"]
    is_null = account["hiding_forward_seconds"] is None
    assert is_null == (optimizer.get("overlap") is False)


def test_gradients_without_room_are_a_note(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ds_config = json.loads((ROOT / "configs" / "nvme_gpu.json").read_text())
    ds_config["memascend"] = {"streaming": {"gradients": {"device_bytes": 0}}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds_config))
    assert main(["plan", "Llama-3.1-8B", "--verbose", "--config", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "computes nothing meanwhile: 93% of the gradients find no room" in printed
    assert "0 B, memascend.streaming.gradients.device_bytes" in printed


def test_an_optimizer_on_the_cpu_leaves_the_drive_its_parameters_to_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ds_config = json.loads((ROOT / "configs" / "nvme_gpu.json").read_text())
    ds_config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds_config))
    assert main(["plan", "Llama-3.1-8B", "--verbose", "--config", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "writing new parameters takes" in printed
    assert "the optimizer takes" not in printed


@pytest.mark.parametrize(
    "arguments",
    [
        ["--drive-read", "0"],
        ["--drive-read", "1e-308"],
        ["--drive-write", "nan"],
        ["--drive-write", "fast"],
        ["--drive-mixed", "-1"],
        ["--compute", "1"],
        ["--compute", "1", "-2"],
        ["--compute", "1", "2", "--fit", "--device-memory", "24GiB"],
    ],
)
def test_a_time_or_speed_that_cannot_be_is_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "Llama-3.1-8B", *arguments])
    assert caught.value.code == 2
    assert "invalid _" not in capsys.readouterr().err  # argparse names the function, not a range
