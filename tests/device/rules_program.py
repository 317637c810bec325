"""Whether the emulated device itself keeps the rules it claims; prints what each rule failed with.

A program of its own: torch knows one device of this kind in a process, for good.
"""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.device.emulator import torch_device

DELAY_US = 20_000
NUMEL = 1 << 18
REPEATS = 12
OWN_DEVICE = 2

Rule = Callable[[], None]
RULES: dict[str, Rule] = {}
core: Any = None


def rule(check: Rule) -> Rule:
    RULES[check.__name__] = check
    return check


def findings() -> str:
    core.synchronize()
    return " ".join(core.take_findings())


def on_a_new_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def pinned_ones() -> torch.Tensor:
    return torch.ones(NUMEL).pin_memory()


@rule
def operators_give_what_the_cpu_gives() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(33, 17), torch.randn(17, 9)
    index = torch.tensor([0, 3, 3, 8])
    cases: list[Callable[[str], torch.Tensor]] = [
        lambda d: a.to(d) @ b.to(d),
        lambda d: a.to(d).bfloat16().softmax(-1),
        lambda d: a.to(d)[index.to(d)],
        lambda d: a.to(d)[a.to(d) > 0],
        lambda d: torch.cat([a.to(d), a.to(d)], 1).t().contiguous().view(-1)[5:99:3],
        lambda d: torch.arange(12, device=d).view(3, 4).sum(1),
        lambda d: a.to(d).double().norm(2).square(),
        lambda d: torch.nn.functional.embedding(index.to(d), a.to(d)),
        lambda d: torch.where(a.to(d) > 0, a.to(d), torch.zeros((), device=d)).half(),
        lambda d: a.to(d) * a.to(d).pow(2).mean(-1, keepdim=True).rsqrt(),
        lambda d: torch.zeros(4, device=d).index_add_(
            0, torch.tensor([1, 1, 2], device=d), torch.ones(3, device=d)
        ),
    ]
    for number, case in enumerate(cases):
        assert torch.equal(case("sim").cpu(), case("cpu")), number
    assert findings() == ""


@rule
def gradients_are_the_cpus() -> None:
    gradients = []
    for device in ("cpu", "sim"):
        torch.manual_seed(1)
        layers = (torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 4))
        model = torch.nn.Sequential(*layers).to(device)
        model(torch.ones(3, 16, device=device)).pow(2).mean().backward()
        gradients.append([weight.grad.cpu() for weight in model.parameters()])
    assert all(map(torch.allclose, *gradients))  # a linear layer takes another kernel on the CPU
    assert findings() == ""


@rule
def host_memory_changed_under_a_pending_copy_is_found() -> None:
    core.set_delays(1, DELAY_US, 0)
    host = pinned_ones()
    assert host.is_pinned()
    assert not torch.empty(3).is_pinned()
    for _ in range(REPEATS):
        host.fill_(1)
        device = host.to("sim", non_blocking=True)
        host.fill_(2)
        core.synchronize()
    assert "host memory changed" in findings(), device[0]


@rule
def the_host_reads_nothing_before_the_copy_has_happened() -> None:
    core.set_delays(2, DELAY_US, 0)
    host, device = pinned_ones(), torch.ones(NUMEL, device="sim")
    early = 0
    for _ in range(REPEATS):
        host.copy_(device, non_blocking=True)
        early += bool(host[0].isnan())
        core.synchronize()
        assert host[0] == 1
    assert early > 0


@rule
def streams_without_an_event_are_found_whatever_the_timing() -> None:
    host, other = pinned_ones(), torch_device.Stream()
    for delay_us in (0, DELAY_US):
        core.set_delays(3, delay_us, 0)
        with torch_device.stream(other):
            device = host.to("sim", non_blocking=True)
        (device + 1).sum().item()
        assert "unordered use of device memory" in findings()
        with torch_device.stream(other):
            device = host.to("sim", non_blocking=True)
        torch_device.current_stream().wait_stream(other)
        assert device.sum().item() == NUMEL
        assert findings() == ""


@rule
def memory_freed_while_another_stream_uses_it_is_found() -> None:
    core.set_delays(4, 0, DELAY_US)
    other = torch_device.Stream()
    for is_recorded in (False, True):
        source = torch.ones(NUMEL, device="sim")
        other.wait_stream(torch_device.current_stream())
        with torch_device.stream(other):
            kept = [source * 2 for _ in range(3)]
        if is_recorded:
            source.record_stream(other)
        del source
        assert ("the free of it" in findings()) is not is_recorded
        del kept


@rule
def an_event_passes_after_the_copy_before_it() -> None:
    core.set_delays(5, DELAY_US, 0)
    host, event = pinned_ones(), torch_device.Event()
    assert event.query()
    late = 0
    for _ in range(REPEATS):
        device = host.to("sim", non_blocking=True)
        event.record()
        late += not event.query()
        event.synchronize()
        assert event.query()
    assert late > 0
    assert device[0].item() == 1


@rule
def pageable_copies_block() -> None:
    core.set_delays(6, DELAY_US, 0)
    host = torch.ones(NUMEL)
    for _ in range(REPEATS // 2):
        device = host.to("sim", non_blocking=True)
        host.fill_(1)
        assert device.cpu()[0] == 1
    assert findings() == ""


@rule
def registered_memory_is_pinned_until_it_is_let_go() -> None:
    host = torch.ones(NUMEL)
    address, nbytes = host.data_ptr() // 4096 * 4096, host.nbytes + 4096
    assert core.register_host(address, nbytes) == 0
    assert host.is_pinned()
    assert core.register_host(address, nbytes) == 712
    core.set_delays(7, DELAY_US, 0)
    for _ in range(REPEATS):
        device = host.to("sim", non_blocking=True)
    assert core.unregister_host(address) == 0
    assert core.unregister_host(address) == 713
    assert "unregistered while copies" in findings(), device[0]


@rule
def a_copy_over_two_registrations_is_found() -> None:
    host = torch.ones(NUMEL)
    begin, half = host.data_ptr() // 4096 * 4096, host.nbytes // 2
    assert core.register_host(begin, half) == 0
    assert core.register_host(begin + half, half + 4096) == 0
    device = host.to("sim", non_blocking=True)
    assert "spans two registered ranges" in findings(), device[0]
    assert core.unregister_host(begin) == 0
    assert core.unregister_host(begin + half) == 0


@rule
def a_use_by_the_host_before_a_copy_was_waited_for_is_found() -> None:
    host, event = pinned_ones(), torch_device.Event()
    span = {"address": host.data_ptr(), "nbytes": host.nbytes, "what": "the drive"}
    device = host.to("sim", non_blocking=True)
    event.record()
    core.use_on_host(**span, is_write=False)  # both read
    core.use_on_host(**span, is_write=True)
    event.synchronize()
    core.use_on_host(**span, is_write=True)
    found = core.take_findings()
    assert list(found.values()) == [1], device[0]
    assert "host memory used by the drive before read by h2d copy" in next(iter(found))


@rule
def an_empty_use_by_the_host_inside_a_copy_meets_nothing() -> None:
    host = pinned_ones()
    device = host.to("sim", non_blocking=True)
    inside = host.data_ptr() + host.nbytes // 2
    core.use_on_host(address=inside, nbytes=0, is_write=True, what="the drive")
    assert core.take_findings() == {}, device[0]


@rule
def an_error_on_a_stream_comes_up_at_the_next_wait() -> None:
    table, index = torch.ones(3, device="sim"), torch.tensor([7]).to("sim")
    table.index_select(0, index)
    with pytest.raises(RuntimeError, match="a kernel failed earlier"):
        core.synchronize()
    core.synchronize()


@rule
def a_wait_is_told_with_its_place() -> None:
    core.take_waits()
    torch.ones(3, device="sim").sum().item()
    ((why, place, count, milliseconds),) = core.take_waits()
    assert (why, count) == ("item()", 1)
    assert "tests/device/rules_program.py" in place
    assert milliseconds >= 0


@rule
def a_kernel_of_a_stated_time_keeps_its_stream_and_nobody_else() -> None:
    wanted_s, passed = 0.02, 0
    begin, end = (torch_device.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPEATS):
        begin.record()
        core.sleep(wanted_s)
        end.record()
        with torch_device.stream(torch_device.Stream()):
            torch.ones(3, device="sim").sum().item()
        passed += not end.query()
        end.synchronize()
        assert begin.elapsed_time(end) >= 1e3 * wanted_s
    assert passed > 0


@rule
def where_time_is_measured_memory_is_left_alone() -> None:
    core.set_delays(7, DELAY_US, 0)
    host = pinned_ones()
    for is_left in (False, True):
        core.set_poisons_and_sums(not is_left)
        for _ in range(REPEATS):
            device = host.to("sim", non_blocking=True)
            host.add_(1)
            core.synchronize()
        assert ("host memory changed" in findings()) is not is_left
        address = device.data_ptr()
        del device
        core.synchronize()
        taken = [torch.empty(NUMEL, device="sim") for _ in range(len(RULES) * REPEATS)]
        (again,) = [tensor for tensor in taken if tensor.data_ptr() == address]
        assert bool(again[0].isnan().item()) is not is_left


@rule
def where_time_is_measured_what_is_queued_keeps_no_memory() -> None:
    core.synchronize()
    for is_kept in (True, False):
        core.set_poisons_and_sums(is_kept)
        before = core.memory()["allocated"]
        core.sleep(DELAY_US / 1e6)
        torch.ones(NUMEL, device="sim").add_(1)
        assert (core.memory()["allocated"] > before) is is_kept
        core.synchronize()


@rule
def host_memory_is_told_apart_from_the_devices() -> None:
    core.take_host_peak()
    before, nbytes = core.take_host_peak(), 4 * len(RULES) * REPEATS * NUMEL
    reserved = core.memory()["reserved"]
    device = torch.zeros(nbytes, dtype=torch.uint8, device="sim")
    core.synchronize()
    assert core.memory()["reserved"] - reserved >= device.nbytes
    assert abs(core.take_host_peak() - before) < nbytes / 8
    host = torch.ones(nbytes, dtype=torch.uint8)
    more = torch.zeros(2 * nbytes, dtype=torch.uint8, device="sim")
    core.synchronize()
    assert abs(core.take_host_peak() - before - host.nbytes) < nbytes / 8
    assert more.nbytes == 2 * host.nbytes


@rule
def a_call_on_a_thread_that_has_not_set_its_device_is_found() -> None:
    event, stream = torch_device.Event(), torch_device.Stream()
    event.record()

    def leave_a_stream() -> None:
        with torch_device.stream(stream):
            pass

    calls: dict[str, Callable[[], object]] = {
        "event.record": torch_device.Event().record,
        "event.query": event.query,
        "event.synchronize": event.synchronize,
        "event.wait": event.wait,
        "stream.synchronize": stream.synchronize,
        "synchronize": core.synchronize,
        "set_device": leave_a_stream,
        "an allocation": lambda: torch.empty(3, device="sim"),
    }
    for name, call in calls.items():
        on_a_new_thread(call)
        found = core.take_findings()
        assert any(
            f"a context on device 0, the process works on device {OWN_DEVICE}: {name}" in one
            for one in found
        ), (name, found)

        def prepared(call: Callable[[], object] = call) -> None:
            torch_device.set_device(OWN_DEVICE)
            call()

        on_a_new_thread(prepared)
        assert core.take_findings() == {}, name


@rule
def a_tensor_on_another_device_is_found() -> None:
    tensor = torch.ones(3, device="sim")
    assert tensor.device.index == OWN_DEVICE
    assert torch.ones(3, device=f"sim:{OWN_DEVICE}").device == tensor.device
    assert findings() == ""
    torch.empty(3, device="sim:1")
    assert "a context on device 1" in findings()


@rule
def backward_runs_on_a_thread_of_the_own_device() -> None:
    seen: list[int] = []
    rows = torch.ones(3, device="sim", requires_grad=True)
    rows.register_hook(lambda gradient: seen.append(core.current_device()))
    (rows * 2).sum().backward()
    assert seen == [OWN_DEVICE]
    assert findings() == ""


def main() -> None:
    global core
    core = torch_device.install(OWN_DEVICE)
    torch.set_num_threads(1)
    problems = {}
    for name, check in RULES.items():
        core.set_delays(0, 0, 0)
        core.set_poisons_and_sums(True)
        try:
            check()
            problems[name] = ""
        except Exception:
            problems[name] = traceback.format_exc()
            core.take_findings()
    print(json.dumps(problems), flush=True)
    os._exit(0)  # the threads of streams never end


if __name__ == "__main__":
    main()
