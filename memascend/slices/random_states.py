"""The random numbers with which a slice began, kept so that backward computes it as forward did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import ClassVar

import torch
from torch.utils.checkpoint import get_device_states, set_device_states


class RandomState:
    """The random numbers with which a slice began: of the host, and of the tensors' devices.

    States that equal those of the slice before are the same tensors: 5056 bytes of host memory for
    a model, and not for each slice of each layer, if no layer takes random numbers of the host.
    """

    __slots__ = ("_devices", "_host", "_states", "_types")
    _latest: ClassVar[RandomState | None] = None

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._host = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors)
        self._types = {tensor.device.type for tensor in tensors} - {"cpu", "meta"}
        latest = RandomState._latest
        if latest is not None and torch.equal(latest._host, self._host):
            self._host = latest._host
        if latest is not None and self.is_same(latest):
            self._devices, self._states, self._types = (
                latest._devices,
                latest._states,
                latest._types,
            )
        RandomState._latest = self

    def is_same(self, other: RandomState) -> bool:
        """Return whether the states of the tensors' devices, and of the host, are the same."""
        return (
            (self._types, self._devices) == (other._types, other._devices)
            and torch.equal(self._host, other._host)
            and all(map(torch.equal, self._states, other._states))
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within the context random numbers are those of then."""
        with ExitStack() as stack:
            device_type = next(iter(self._types), None)
            options = {} if device_type is None else {"device_type": device_type}
            stack.enter_context(torch.random.fork_rng(devices=self._devices, **options))
            self.restore()
            yield

    def restore(self) -> None:
        """Have the next random numbers be those of then."""
        torch.set_rng_state(self._host)
        for device_type in self._types:
            set_device_states(self._devices, self._states, device_type=device_type)
