"""Construction of the ZeRO-3 optimizer: offloading, the plan, and the dtype of its parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable

from deepspeed import comm as dist

from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.config.environment import local_world_size
from memascend.deepspeed.attach.attach import attach
from memascend.deepspeed.attach.attachment import Attachment
from memascend.deepspeed.older_releases import norm_dtype
from memascend.deepspeed.optimizer.recast_parameters import recast_parameters
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.deepspeed.plan.from_optimizer import plan_for
from memascend.plan.advice import (
    advise,
    advise_in_cpu,
    advise_one_pass,
    advise_pinning,
    advise_wear,
)
from memascend.plan.derive import Plan
from memascend.plan.muon import advise_muon
from memascend.plan.shapes import from_module
from memascend.runtime import streams_parameters

log = logging.getLogger(__name__)


class Construction:
    """Decisions while DeepSpeed constructs an optimizer."""

    def __init__(
        self, upstream: Upstream, config: MemAscendConfig, settings: DeepSpeedSettings
    ) -> None:
        """Start before the first sub-group.

        Args:
            upstream: The optimizer.
            config: The active block.
            settings: Settings of the DeepSpeed JSON.
        """
        self._upstream, self._config, self._settings = upstream, config, settings
        self._attachment: Attachment | None = None

    def attach(self) -> Attachment:
        """Return the attachment: the parameters' if they are on the drive, else a new one."""
        if self._attachment is None:
            first = next(iter(self._upstream.all_params), None)
            swapper = getattr(first, "nvme_swapper", None)
            self._attachment = getattr(swapper, "memascend_attachment", None)
            if self._attachment is not None:
                self._attachment.begin()
            else:
                nvme_path = self._settings.zero_optimization.offload_optimizer.nvme_path
                self._attachment = attach(self._config, self._settings, nvme_path)
        return self._attachment

    def decide_offloading(self) -> None:
        """Decide which parameters stay in host memory, and skip stock's shortcut at the start."""
        self._decide_parameters_in_cpu()
        # Stock's shortcut needs a parameter buffer as large as a whole sub-group.
        if self._upstream.skip_fast_init():
            reason = "no sub-group is loaded whole at the start"
            _warn_ignored("offload_optimizer.fast_init", reason)

    def _decide_parameters_in_cpu(self) -> None:
        """Keep parameters in host memory only if `max_in_cpu` is stated and there is no limit.

        DeepSpeed's default, 10^9 elements, would hold a whole small model.
        """
        upstream, config = self._upstream, self._config
        if not upstream.parameters_on_drive or not streams_parameters(config):
            return
        is_stated = "max_in_cpu" in self._settings.zero_optimization.offload_param.stated
        if not is_stated or config.host_memory_limit is not None:
            if is_stated and upstream.cpu_numel_max > 0:
                limit = f"memascend.host_memory_limit={config.host_memory_limit!r}"
                _warn_ignored("offload_param.max_in_cpu", f"{limit} sets how much stays in memory")
            upstream.cpu_numel_max = 0

    def open_streams(self, *, streams_gradients: bool, is_tiled: bool) -> None:
        """Adopt the plan if both streams are on; open the gradient stream if one of them is."""
        if streams_gradients and is_tiled:
            self._adopt_plan()
        if dist.get_rank() == 0 and self._upstream.uses_muon:
            self._warn_of_clipping()
        if streams_gradients or is_tiled:
            kept = norm_dtype() if streams_gradients else None
            self.attach().runtime.open_gradients(kept)

    def _warn_of_clipping(self) -> None:
        if line := advise_muon(from_module(self._upstream.module), self._settings):
            log.warning("memascend: %s", line)

    def _adopt_plan(self) -> None:
        """Derive the plan, resize slots and staging memory to it, and log its advice."""
        upstream, attachment = self._upstream, self.attach()
        limit_bytes = attachment.runtime.limit_bytes
        plan = plan_for(upstream, upstream.module, self._config, self._settings, limit_bytes)
        upstream.drop_unused_shards()
        upstream.wait_writes()
        attachment.adopt(plan)
        if dist.get_rank() == 0:
            for line in self.advice(plan):
                log.info("memascend: %s", line)

    def advice(self, plan: Plan) -> list[str]:
        """Return lines of advice for the log, given the plan."""
        attachment = self.attach()
        shapes, runtime = from_module(self._upstream.module), attachment.runtime
        page_locks = self._config.allocator.enabled and self._config.allocator.page_lock is None
        on_cpu = runtime.new_event is None
        found = (
            advise(shapes, plan),
            advise_in_cpu(shapes, plan),
            advise_one_pass(shapes, plan, self._settings, self._config.micro_batches),
            advise_pinning(shapes, plan, self._settings, locks_for_nothing=page_locks and on_cpu),
            advise_wear(
                shapes,
                plan,
                self._settings,
                self._config,
                ranks=local_world_size(),
                left_bytes=attachment.endurance_left_bytes(),
            ),
        )
        return [line for line in found if line]

    def set_up_parameters(self, original: Callable[[], None]) -> None:
        """Store parameters in the optimizer's dtype; those that stay in memory in the arena."""
        upstream, attachment = self._upstream, self.attach()
        if upstream.parameters_on_drive:
            recast_parameters(
                upstream.all_params,
                upstream.dtype,
                attachment=attachment,
                pin_memory=upstream.pins_parameters,
            )
        # If no parameter stays in memory DeepSpeed allocates a dummy of one element.
        has_any = not upstream.parameters_on_drive or upstream.cpu_numel_max > 0
        with attachment.host_buffers("parameters in cpu" if has_any else None):
            original()


def _warn_ignored(key: str, reason: str) -> None:
    """Warn on rank 0 that a stated key has no effect. A warning, since INFO may not be shown."""
    if dist.get_rank() == 0:
        log.warning("memascend: zero_optimization.%s is ignored: %s", key, reason)
