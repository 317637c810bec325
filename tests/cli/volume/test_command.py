"""`memascend volume`: what its command line takes, and which action gets it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from memascend.base.units import GIB, KIB, MIB
from memascend.cli.main import main
from memascend.cli.volume import bench, device, sustained


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """The arguments of every action that was called."""
    found: list[argparse.Namespace] = []

    def note(args: argparse.Namespace) -> int:
        found.append(args)
        return 0

    monkeypatch.setattr(bench, "volume_bench_command", note)
    monkeypatch.setattr(sustained, "sustained_command", note)
    monkeypatch.setattr(device, "volume_device_command", note)
    return found


def test_sizes_take_units_and_lists_take_several(asked: list[argparse.Namespace]) -> None:
    words = ["--chunk", "512KiB,1MiB", "--depth", "16,32", "--span", "2GiB", "--seconds", "0.5"]
    assert main(["volume", "bench", "/a", "/b", *words]) == 0
    [args] = asked
    assert args.paths == [Path("/a"), Path("/b")]
    assert (args.chunk, args.depth) == ([512 * KIB, MIB], [16, 32])
    assert (args.span, args.seconds) == (2 * GIB, 0.5)


def test_a_sustained_run_takes_one_setting(asked: list[argparse.Namespace]) -> None:
    words = ["--sustained", "--share", "0.2", "--chunk", "1MiB", "--depth", "8"]
    assert main(["volume", "bench", "/a", *words]) == 0
    assert [(args.sustained, args.share, args.chunk, args.depth) for args in asked] == [
        (True, 0.2, [MIB], [8])
    ]


@pytest.mark.parametrize("action", ["format", "show", "wipe"])
def test_the_actions_on_devices_are_told_apart(
    asked: list[argparse.Namespace], action: str
) -> None:
    assert main(["volume", action, "/dev/nvme9n9"]) == 0
    assert [(args.action, args.device) for args in asked] == [(action, "/dev/nvme9n9")]


@pytest.mark.parametrize(
    "wrong",
    [["--chunk", "1000"], ["--chunk", "128MiB"], ["--chunk", "100KiB"],
     ["--depth", "0"], ["--depth", "x"], ["--depth", "8,4097"],
     ["--span", "1KiB"], ["--seconds", "0"], ["--seconds", "nan"],
     ["--seconds", "long"], ["--share", "0.5"], ["--plot", "x.png"],
     ["--sustained", "--share", "0"], ["--sustained", "--share", "1"],
     ["--sustained", "--depth", "8,16"], ["--sustained", "--chunk", "1MiB,2MiB"],
     ["--chunk", "1 apple"]],
)  # fmt: skip
def test_a_mistake_in_the_command_line_is_2(
    asked: list[argparse.Namespace], wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["volume", "bench", "/a", *wrong])
    assert caught.value.code == 2
    assert "invalid _" not in capsys.readouterr().err  # argparse names the function, not a range
    assert asked == []
