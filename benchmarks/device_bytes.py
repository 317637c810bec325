"""How many bytes of a training run would lie in device memory, were the device not the CPU.

Looked at each time a module is about to run or has run, in forward and in backward: gathered
parameters, gradients that are not yet reduced, the bucket they are reduced in, and what autograd
keeps for the backward pass. Approximate: temporaries inside a module are not seen.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus


class _Kept:
    """A tensor that autograd keeps, counted for as long as this object lives."""

    def __init__(self, owner: DeviceBytes, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._owner = owner
        self._address = tensor.untyped_storage().data_ptr()
        owner.keep(self._address, tensor.untyped_storage().nbytes())

    def __del__(self) -> None:
        self._owner.let_go(self._address)


class DeviceBytes:
    """Watches one engine from its construction on."""

    def __init__(self, engine: Any) -> None:
        self._parameters = list(engine.module.parameters())
        self._addresses: dict[int, list[int]] = {}  # storage: [bytes, times kept]
        self._kept_bytes = 0
        self._optimizer = engine.optimizer
        self._peaks: dict[str, int] = {}
        for module in engine.module.modules():
            module.register_forward_pre_hook(self._look)
            module.register_forward_hook(self._look)
            module.register_full_backward_hook(self._look)
        torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor).__enter__()

    def take_peaks(self) -> dict[str, int]:
        """Largest bytes since the last call: of all at once, and of each kind by itself."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def keep(self, address: int, nbytes: int) -> None:
        """Counts a storage once, however often it is kept."""
        entry = self._addresses.setdefault(address, [nbytes, 0])
        entry[1] += 1
        self._kept_bytes += nbytes if entry[1] == 1 else 0

    def let_go(self, address: int) -> None:
        """The other end of `keep`."""
        entry = self._addresses[address]
        entry[1] -= 1
        if entry[1] == 0:
            self._kept_bytes -= entry[0]
            del self._addresses[address]

    def _pack(self, tensor: torch.Tensor) -> Any:
        # Parameters (and views of them) are counted as gathered.
        base = tensor if tensor._base is None else tensor._base
        is_parameter = isinstance(base, torch.nn.Parameter)
        return _Plain(tensor) if is_parameter else _Kept(self, tensor)

    def _look(self, *_: Any) -> None:
        parts = {"gathered": 0, "gradients": 0, "activations": self._kept_bytes}
        for parameter in self._parameters:
            if parameter.ds_status is not ZeroParamStatus.NOT_AVAILABLE:
                parts["gathered"] += parameter.ds_numel * parameter.element_size()
            if parameter.grad is not None:
                parts["gradients"] += parameter.grad.nbytes
        parts["bucket"] = sum(
            bucket.buffer.nbytes
            for bucket in self._optimizer.ipg_buckets.values()
            if bucket.buffer is not None
        )
        parts["all at once"] = sum(parts.values())
        for name, nbytes in parts.items():
            self._peaks[name] = max(self._peaks.get(name, 0), nbytes)


class _Plain:
    """A tensor that is counted elsewhere."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
