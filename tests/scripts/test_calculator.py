"""The calculator of the site gives the plan's numbers, and can be used on any screen."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from memascend.base.units import GIB, MIB
from memascend.cli.main import main
from memascend.cli.plan_accounts import DEFAULT_CONFIG
from memascend.config.block import ActivationConfig
from memascend.config.deepspeed import parse_deepspeed
from memascend.plan.context import (
    HOST_RESERVE_BYTES,
    OURS_CHECKPOINTS,
    OURS_ON_DEVICE,
    STOCK_CHECKPOINTS,
    STOCK_ON_HOST,
    DeviceSettings,
    Training,
    widths_of,
    with_activations,
)
from memascend.plan.derive import LimitTooSmallError, PlanRequest, derive
from memascend.plan.drive_rates import DriveRates
from memascend.plan.footprint import Footprint
from memascend.plan.shapes import ModelShapes, builtin, from_config
from memascend.plan.stock import stock
from tests.support.browser import Browser
from tests.support.scripts import load_script

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = """<!doctype html><meta name=viewport content="width=device-width">
<link rel=stylesheet href="{style}"><div id="calculator-place"></div>
<script src="{script}"></script>"""
FORM = "document.querySelector('form').elements"
RESULT = "document.querySelector('.calculator-result').textContent"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "calculator.html"
    style, script = DOCS / "pictures" / "site.css", DOCS / "calculator.js"
    path.write_text(PAGE.format(style=style.as_uri(), script=script.as_uri()))
    return path


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=str)
def seen(request: pytest.FixtureRequest, browser: Browser, page: Path) -> Browser:
    """The page in the browser, anew."""
    width, scheme = request.param
    browser.console()
    browser.look(page, width=width, scheme=scheme)
    return browser


# -- the arithmetic --------------------------------------------------------------------------------


def a_model(seed: int) -> ModelShapes:
    """Return a decoder whose sizes are in no relation to each other."""
    rng = random.Random(seed)
    heads, size = rng.randint(1, 64), 8 * rng.randint(1, 24)
    config = {
        "model_type": rng.choice(["llama", "qwen2", "qwen3", "mixtral"]),
        "vocab_size": rng.randint(1, 200_000),
        "hidden_size": rng.randint(1, 9000),
        "intermediate_size": rng.randint(1, 30_000),
        "num_hidden_layers": rng.randint(1, 90),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.randint(1, heads),
        "head_dim": size,
        "num_local_experts": rng.randint(1, 9),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    return from_config(config, name=f"seed {seed}")


def a_run(seed: int) -> dict[str, int]:
    """Return the options of a run; a limit is below, at, or above what is needed, or none."""
    rng = random.Random(seed)
    limit = rng.choice(
        [0, rng.randint(1, 64 * MIB), rng.randint(MIB, 4 * GIB), rng.randint(1, 1 << 41)]
    )
    return {
        "world": rng.choice([1, 2, 3, 8, 64]),
        "limit": limit,
        "tokens": rng.choice([0, rng.randint(1, 3000), rng.randint(1, 1 << 20)]),
        "drives": rng.choice([1, 1, 2, 8]),
    }


def planned(shapes: ModelShapes, run: dict[str, int]) -> dict[str, Any]:
    """Return what the plan says, in the form of the calculator; of a limit too small the least."""
    request = PlanRequest(
        world=run["world"],
        has_activations=run["tokens"] > 0,
        drive_count=run.get("drives", 1),
        tries_during_backward=True,
    )
    of_stock = stock(shapes, request=request)
    try:
        derive(shapes, request=request, limit_bytes=1)
    except LimitTooSmallError as error:
        least = error.minimum_bytes
    if 0 < run["limit"] < least:
        return {"stock": None, "memascend": {"least": least}}
    ours = derive(shapes, request=request, limit_bytes=run["limit"] or None)
    training = Training(
        shapes=shapes,
        stock=of_stock,
        ours=ours,
        device=DeviceSettings(),
        activations=ActivationConfig(enabled=True),
    )
    saved = training.plan(OURS_CHECKPOINTS, run["tokens"]).drive_bytes
    peak_bytes = training.plan(STOCK_ON_HOST, run["tokens"]).host_bytes - HOST_RESERVE_BYTES
    account = moved(with_activations(ours, saved, 1)) | {"peak": ours.host_bytes, "least": least}
    return {"stock": moved(of_stock) | {"peak": peak_bytes}, "memascend": account}


def moved(plan: Footprint) -> dict[str, Any]:
    read, written = plan.passes_read_bytes, plan.passes_written_bytes
    return {
        "host": plan.host_bytes,
        "drive": plan.drive_bytes,
        "passes": {"read": read, "written": written},
        "optimizer": {
            "read": sum(plan.read_bytes.values()) - read,
            "written": sum(plan.written_bytes.values()) - written,
        },
    }


def calculated(browser: Browser, cases: list[tuple[ModelShapes, dict[str, int]]]) -> list[Any]:
    """Return what the calculator says of models and runs."""
    of_form = load_script("update_docs").of_form
    asked = json.dumps([(of_form(shapes), run) for shapes, run in cases])
    return list(browser.ask(f"{asked}.map(([model, run]) => accountsOf(model, run))"))


def check(found: dict[str, Any], shapes: ModelShapes, run: dict[str, int]) -> None:
    """Compare an answer of the calculator with the plan's."""
    expected = planned(shapes, run)
    assert found["parameters"] == shapes.numel
    ours, of_plan = found["memascend"], expected["memascend"]
    if expected["stock"] is not None:
        assert found["stock"] == expected["stock"]
        if ours["host"] == run["limit"]:  # buffers shrink in steps: up to one is left over
            assert run["limit"] - 2 * MIB < of_plan["host"] <= run["limit"]
            ours = ours | {"host": of_plan["host"], "peak": of_plan["peak"]}
    assert ours == of_plan


@pytest.mark.parametrize("world", [1, 8, 64])
def test_built_in_models_have_the_numbers_of_the_plan(
    browser: Browser, page: Path, world: int
) -> None:
    browser.look(page, width=1280, scheme="light")
    runs = [{"world": world, "limit": limit, "tokens": 4096} for limit in (0, 32 * GIB)]
    cases = [
        (builtin(name), run) for name in load_script("update_docs").form_models() for run in runs
    ]
    for case, found in zip(cases, calculated(browser, cases), strict=True):
        check(found, *case)


def test_any_model_has_the_numbers_of_the_plan(browser: Browser, page: Path) -> None:
    browser.look(page, width=1280, scheme="light")
    cases = [(a_model(seed), a_run(seed)) for seed in range(60)]
    answers = calculated(browser, cases)
    for (shapes, run), found in zip(cases, answers, strict=True):
        print(shapes.name, run)
        check(found, shapes, run)
    hosts = [found["memascend"].get("host") for found in answers]
    limits = [run["limit"] for _, run in cases]
    assert None in hosts, "no limit was too small"
    assert any(limit == host for limit, host in zip(limits, hosts, strict=True)), "none shrank"


@pytest.mark.parametrize("mixed", [None, 1.0, 2.5, 1e6])
def test_the_drive_time_is_that_of_the_plan(
    browser: Browser, page: Path, mixed: float | None
) -> None:
    browser.look(page, width=1280, scheme="light")
    shapes, run = builtin("Llama-3.1-8B"), {"world": 1, "limit": 32 * GIB, "tokens": 0}
    [found] = calculated(browser, [(shapes, run)])
    rates = {"read": 3.0, "written": 2.0, "mixed": mixed or 0}
    asked = f"stepSeconds({json.dumps(found['memascend'])}, {json.dumps(rates)})"
    plan = derive(shapes, request=PlanRequest(tries_during_backward=True), limit_bytes=32 * GIB)
    expected = plan.step_seconds(DriveRates(read_gb_s=3.0, write_gb_s=2.0, mixed_gb_s=mixed))
    assert browser.ask(asked) == pytest.approx(expected)


def test_device_memory_is_that_of_the_plan(browser: Browser, page: Path) -> None:
    browser.look(page, width=1280, scheme="light")
    of_form = load_script("update_docs").of_form
    ways = {
        (True, False): OURS_ON_DEVICE,
        (True, True): OURS_CHECKPOINTS,
        (False, False): STOCK_CHECKPOINTS,
        (False, True): STOCK_ON_HOST,
    }
    settings = parse_deepspeed(DEFAULT_CONFIG)
    asked, expected = [], []
    for seed in range(60):
        rng, shapes = random.Random(seed), a_model(seed)
        run = {
            "world": rng.choice([1, 2, 8]),
            "batch": rng.randint(1, 100_000),
            "isFused": rng.random() < 0.5,
            "device": rng.choice([8, 24, 80, 141]) * GIB,
            "isOurs": rng.random() < 0.5,
            "isElsewhere": rng.random() < 0.5,
        }
        asked.append((of_form(shapes), run))
        request = PlanRequest(world=run["world"], has_activations=run["isElsewhere"])
        training = Training(
            shapes=shapes,
            stock=stock(shapes, request=request),
            ours=derive(shapes, request=request, limit_bytes=None),
            device=DeviceSettings.from_deepspeed(settings, hidden=widths_of(shapes).hidden),
            activations=ActivationConfig(enabled=True),
            has_fused_loss=bool(run["isFused"]),
        )
        way = ways[bool(run["isOurs"]), bool(run["isElsewhere"])]
        plan = training.plan(way, run["batch"], device_bytes=run["device"])
        expected.append(plan.device_bytes)
    found = browser.ask(
        f"{json.dumps(asked)}.map(([model, run]) => deviceBytes(model, tensorsOf(model), run))"
    )
    assert found == expected


# -- the form --------------------------------------------------------------------------------------


def enter(browser: Browser, name: str, value: str) -> None:
    """Enter a value in a field, as a reader does."""
    browser.ask(
        f"(field => {{ field.value = {json.dumps(value)}; "
        f"field.dispatchEvent(new Event('input', {{bubbles: true}})); }})({FORM}.{name})"
    )


def test_the_form_fits_the_screen_and_nothing_is_complained_of(seen: Browser) -> None:
    assert seen.console() == []
    seen.ask("document.querySelector('details').setAttribute('open', '')")
    width = seen.ask("innerWidth")
    assert seen.ask("document.documentElement.scrollWidth") <= width
    boxes = seen.ask(
        "[...document.querySelectorAll('label, table')].map(e => e.getBoundingClientRect())"
        ".map(b => [b.left, b.right])"
    )
    assert len(boxes) == 27
    assert all(left >= 0 and right <= width for left, right in boxes)


def test_a_reader_sees_what_the_table_of_the_documents_says(seen: Browser) -> None:
    assert seen.ask(f"{FORM}.model.value") == "Llama-3.1-8B"
    rows = (DOCS / "memory.md").read_text(encoding="utf-8").splitlines()
    row = next(line for line in rows if line.startswith("| Llama-3.1-8B"))
    peak, ours = (row.split("|")[column].strip(" *") for column in (3, 6))
    cells = seen.ask("[...document.querySelectorAll('td')].map(cell => cell.textContent)")
    assert cells[3:6] == ["at its highest", peak, ours]
    assert "memascend plan Llama-3.1-8B --world 1 --nodes 1" in seen.ask(RESULT)


def test_the_command_that_is_shown_prints_the_same_drive_time(
    browser: Browser, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    browser.look(page, width=1280, scheme="light")
    for name, value in (("drives", "2"), ("ranks", "4"), ("written", "1.5"), ("mixed", "1.2")):
        enter(browser, name, value)
    [command] = browser.ask("[...document.querySelectorAll('code')].map(e => e.textContent)")[1:2]
    cells = browser.ask("[...document.querySelectorAll('td')].map(cell => cell.textContent)")
    assert main([*command.split()[1:], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    row = cells.index("the drives need for a step")
    accounts = [found[name] for name in ("stock", "memascend")]
    assert cells[row + 1 : row + 3] == [f"{one['step_seconds']:.1f} s" for one in accounts]
    row = cells.index("1000 steps write to a drive")
    written = [4 * sum(one["written_bytes"].values()) / 2 / 1e9 for one in accounts]
    shown = [float(cell.removesuffix(" TB")) for cell in cells[row + 1 : row + 3]]
    assert shown == pytest.approx(written, rel=0.01)
    shares = [f"{terabytes / 1200:.0%}" for terabytes in written]
    assert cells[row + 3 : row + 6] == ["of the 1200 TB that it is rated for", *shares]


def test_numbers_of_ones_own_are_counted(seen: Browser) -> None:
    before = seen.ask(RESULT)
    enter(seen, "layers", "1")
    assert seen.ask(f"{FORM}.model.value") == "own numbers"
    assert seen.ask(RESULT) != before
    assert "memascend plan" not in seen.ask(RESULT)


@pytest.mark.parametrize("value", ["", "-1", "1.5", "1e300"])
def test_a_field_without_a_number_is_said_to_be_wrong(
    browser: Browser, page: Path, value: str
) -> None:
    browser.look(page, width=390, scheme="light")
    enter(browser, "ranks", value)
    assert browser.ask("document.querySelectorAll('.calculator-result td').length") == 0
    assert browser.ask(RESULT) != ""
    enter(browser, "ranks", "8")
    assert browser.ask("document.querySelectorAll('.calculator-result td').length") == 36


def test_a_limit_that_cannot_be_kept_is_refused_with_the_least(
    browser: Browser, page: Path
) -> None:
    browser.look(page, width=390, scheme="light")
    enter(browser, "limit", "0.001")
    assert "least that works" in browser.ask(RESULT)
