"""The whole surface of the native core; a test compares this file with dir(_core)."""

from collections.abc import Sequence
from typing import Any, ClassVar

from memascend.base.interfaces import Registrar

# --- memory -------------------------------------------------------------------------------------

class ArenaReport:
    """Memory as the kernel reports it; `notes` name what is missing and how to get it."""

    @property
    def reserved_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def huge_page_bytes(self) -> int: ...
    @property
    def locked_bytes(self) -> int: ...
    @property
    def registered_bytes(self) -> int: ...
    @property
    def wants_registration(self) -> bool: ...
    @property
    def numa_node(self) -> int: ...
    @property
    def notes(self) -> list[str]: ...

class AllocatorStats:
    @property
    def requested_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def registered_bytes(self) -> int: ...
    @property
    def peak_used_bytes(self) -> int: ...
    @property
    def peak_reserved_bytes(self) -> int: ...
    @property
    def block_count(self) -> int: ...

class ComponentStats:
    @property
    def live_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def block_count(self) -> int: ...

class Block:
    """Bytes of an arena, freed when the last reference (a tensor's too) is gone."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def component(self) -> str: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, view: memoryview, /) -> None: ...

class Allocator:
    def __init__(
        self,
        *,
        huge_pages: str,
        lock: bool,
        register_device: bool,
        numa_node: int = -1,
        limit_bytes: int = 0,
        registrar: Registrar | None = None,
        cuda_library: str = "libcuda.so.1",
    ) -> None: ...
    def allocate(self, *, nbytes: int, component: str, zero: bool = False) -> Block: ...
    def trim(self) -> None: ...
    def report(self) -> ArenaReport: ...
    def notes(self) -> list[str]: ...
    def stats(self) -> AllocatorStats: ...
    def components(self) -> dict[str, ComponentStats]: ...
    def contains(self, address: int) -> bool: ...
    def is_valid(self) -> bool: ...

class TakenRun:
    """Bytes of a free space, given back with the last reference or by `release`."""

    @property
    def begin(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def release(self) -> None: ...

class FreeSpace:
    """The free runs of `nbytes` bytes: (begin, bytes). `besides` is a run that counts as free."""

    def __init__(self, nbytes: int) -> None: ...
    @property
    def free_bytes(self) -> int: ...
    def best(self, nbytes: int, *, besides: TakenRun | None = None) -> tuple[int, int] | None:
        """The smallest run that holds `nbytes`; the first among equals."""

    def largest(self, *, besides: TakenRun | None = None) -> tuple[int, int] | None: ...
    def take(self, *, begin: int, nbytes: int) -> TakenRun: ...

# --- nvme ---------------------------------------------------------------------------------------

def describe_cause(*, code: int) -> str:
    """Why a drive answers with this errno, and what to do: the last two lines of a message."""

class MemoryFaults:
    """Faults of the memory engine: probabilities per request, by a seed. Tests only."""

    def __init__(
        self,
        *,
        seed: int = 0,
        short: float = 0.0,
        eio: float = 0.0,
        enospc: float = 0.0,
        again: float = 0.0,
        reorder: float = 0.0,
        flip: float = 0.0,
        lost: float = 0.0,
        delay: float = 0.0,
        capacity_bytes: int = 1 << 30,
    ) -> None: ...
    @property
    def seed(self) -> int: ...
    paused: bool
    """While true, nothing completes."""
    paused_volume: int
    """Nothing of the volume with this index completes; -1 for none."""
    EVERY_VOLUME: ClassVar[int]
    slow_volume: int
    """The volume with this index runs `slow_width` requests at a time; -1 for none."""
    slow_milliseconds: int
    """For so long each."""
    slow_width: int
    gone: int
    """The errno of every request from now on; 0 for none."""

class VolumeOptions:
    """A volume of a store; where a list of them is wanted a path alone does, too.

    With `descriptor` it is an opened block device, of which bytes from `start_bytes` on are used;
    the store duplicates the descriptor. Threads of the volume stay on `cpus`, where there are any.
    """

    def __init__(
        self,
        path: str,
        *,
        weight: float = 1.0,
        capacity_bytes: int = (1 << 64) - 1,
        descriptor: int = -1,
        start_bytes: int = 0,
    ) -> None: ...
    @property
    def path(self) -> str: ...
    weight: float
    cpus: list[int]
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def descriptor(self) -> int: ...
    @property
    def start_bytes(self) -> int: ...

def largest_file_bytes(*, descriptor: int) -> int:
    """Return the bytes that a file has at most on the file system of an open one.

    2^64 - 1 where the file system does not say.
    """

class PrivateDescriptor:
    """A file descriptor that forked children do not keep; closes it in the end."""

    def __init__(self, descriptor: int) -> None: ...
    def close(self) -> None: ...

class VolumeStats:
    """A volume and what of it is taken."""

    @property
    def path(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def copies_on_write(self) -> bool:
        """Return whether overwrites go elsewhere than the space that was reserved for them."""
    @property
    def traffic(self) -> dict[str, Any]:
        """Return `bytes_read`, `bytes_written` and `busy_s` of the volume, as the device moved.

        And of requests, under "reads", "writes" and "needed" (those of either that a caller waited
        for): `count`, and in seconds `p50_s`, `p99_s`, `p999_s` and `longest_s`.
        """

class Ticket:
    """The handle of one read or write."""

    def wait(self) -> None:
        """Wait; raise StoreError, as often as asked, when the transfer failed."""
    def done(self) -> bool:
        """Return whether the transfer is over, well or not; its memory is quiet then."""
    @property
    def nbytes(self) -> int: ...

class Store:
    """Named byte ranges on SSD. Thread-safe; belongs to the process that opened it.

    `hold` is kept alive until the I/O on its memory is over. `capacity` (0: as nbytes) tells how
    many bytes from `address` on may be used, so that an odd tail needs no bounce buffer.
    """

    def __init__(
        self,
        *,
        volumes: Sequence[str | VolumeOptions],
        engine: str = "auto",
        queue_depth: int = 64,
        chunk_bytes: int = 1 << 20,
        grow_bytes: int = 1 << 28,
        stripe_bytes: int = 0,
        watchdog_seconds: float = 60.0,
        eio_retries: int = 2,
        eio_pause_seconds: float = 0.1,
        pace_seconds: float = 10.0,
        verify: str = "off",
        checksum_memory: Allocator | None = None,
        bounce_address: int,
        bounce_nbytes: int,
        bounce_hold: object,
        faults: MemoryFaults | None = None,
    ) -> None: ...
    def reserve(self, *, key: str, nbytes: int) -> None: ...
    def write(
        self,
        *,
        key: str,
        address: int,
        nbytes: int,
        offset: int | None = None,
        capacity: int = 0,
        hold: object | None = None,
    ) -> Ticket:
        """Start a write; without `offset` of the whole key, with one into a key that is there."""
    def read(
        self,
        *,
        key: str,
        address: int,
        nbytes: int,
        offset: int = 0,
        capacity: int = 0,
        hold: object | None = None,
    ) -> Ticket: ...
    def wait_all(self) -> None: ...
    def discard(self, *, key: str) -> bool: ...
    def shrink(self) -> None: ...
    def exchange(self, *, key: str, other: str) -> None: ...
    def contains(self, *, key: str) -> bool: ...
    def nbytes(self, *, key: str) -> int: ...
    def keys(self) -> list[str]: ...
    def stats(self) -> dict[str, int | float]:
        """Keys: bytes_read, bytes_written, bytes_bounced, requests, resubmitted, retries,

        eio_retries, stalls, slow_spells, bytes_verified, bytes_read_back, mismatches, corruptions,
        checksum_bytes, reserved_bytes, used_bytes, key_count, in_flight_count,
        wait_seconds (of all threads but those that called `wait_behind`).

        Asks no file system, and waits for no call that does; nor does `volume_stats`.
        """
    def volume_stats(self) -> list[VolumeStats]: ...
    def available_bytes(self) -> int:
        """Return the bytes that may still be reserved; ask the file systems for them.

        Raises:
            StoreError: One of them does not answer.
        """
    def provide_checksums(self, *, nbytes: int) -> None:
        """Take the host memory of checksums ahead; it grows where that is not enough."""
    def set_recovery(self, recovery: str) -> None:
        """Set the remedy that errors about corrupted data name."""
    def end_patience(self) -> None:
        """Make a device's silence an error of all who wait for it, as the program ends."""
    def close(self) -> None: ...
    @property
    def engine_name(self) -> str: ...
    @property
    def engine_reason(self) -> str: ...
    @property
    def engine_description(self) -> str: ...
    @property
    def direct(self) -> bool: ...
    @property
    def offset_alignment_bytes(self) -> int: ...
    @property
    def memory_alignment_bytes(self) -> int: ...

def wait_behind() -> None:
    """Count this thread's waits for drives no more: its work goes on behind training."""

class Crc32cMethod:
    @property
    def name(self) -> str: ...
    def checksum(self, *, address: int, nbytes: int, previous: int = 0) -> int: ...

def crc32c_methods() -> list[Crc32cMethod]: ...

# --- kernels ------------------------------------------------------------------------------------

class KernelHelpers:
    """Threads that kernels share, started when needed, kept between calls and joined in the end.

    Callers take turns. In a forked child the caller works alone.
    """

    def __init__(self) -> None: ...
    @property
    def thread_count(self) -> int: ...

class ScanResult:
    """Result of one pass over memory; `sum_squares` is NaN unless asked for and all is finite."""

    def __init__(self, *, non_finite: bool, sum_squares: float) -> None: ...
    @property
    def non_finite(self) -> bool: ...
    @property
    def sum_squares(self) -> float: ...

def overflow_scan(
    *,
    address: int,
    numel: int,
    dtype: str,
    sum_squares: bool = False,
    threads: int = 0,
    helpers: KernelHelpers | None = None,
    isa: str = "auto",
) -> ScanResult: ...
def kernel_isas() -> list[str]: ...

class AdamCoefficients:
    """Numbers of one Adam step, the same for every element; all are rounded to fp32."""

    def __init__(
        self,
        *,
        factor: float,
        beta1: float,
        beta2: float,
        take1: float,
        take2: float,
        root_scale: float,
        epsilon: float,
        step_size: float,
        gradient_decay: float | None = None,
        weight_decay: float | None = None,
    ) -> None: ...

def adam_update(
    *,
    gradient: int,
    gradient_dtype: str,
    weight: int,
    exp_avg: int,
    exp_avg_sq: int,
    output: int = 0,
    output_dtype: str | None = None,
    weight_dtype: str = "float32",
    moment_dtype: str = "float32",
    scales: int = 0,
    numel: int,
    coefficients: AdamCoefficients,
    tail_numel: int = 0,
    rounding_key: int = 0,
    first_index: int = 0,
    threads: int = 0,
    helpers: KernelHelpers | None = None,
    isa: str = "auto",
) -> None: ...
def halves_join(
    *,
    rounded: int,
    low: int,
    flags: int = 0,
    flag_dtype: str = "float32",
    weights: int,
    numel: int,
) -> None: ...
def halves_cut(*, weights: int, high: int, low: int, numel: int) -> None: ...
def halves_round_high(*, high: int, low: int, flags: int, flag_dtype: str, numel: int) -> None: ...
def halves_clear_flags(*, flags: int, flag_dtype: str, numel: int) -> None: ...
def halves_join_without_flags(*, rounded: int, low: int, weights: int, numel: int) -> None: ...
def halves_round_high_without_flags(*, high: int, low: int, numel: int) -> None: ...
def halves_join_with_bits(
    *, rounded: int, low: int, bits: int, first: int = 0, weights: int, numel: int
) -> None: ...
def halves_cut_with_bits(
    *, weights: int, rounded: int, low: int, bits: int, numel: int
) -> None: ...
def codes_encode(
    *,
    values: int,
    codes: int,
    scales: int,
    stride: int,
    numel: int,
    is_first: bool,
    rounding_key: int | None = None,
    first_index: int = 0,
) -> None: ...
def codes_decode(
    *, codes: int, scales: int, stride: int, values: int, numel: int, is_first: bool
) -> None: ...
def remainders_join(*, rounded: int, remainders: int, weights: int, numel: int) -> None: ...
def remainders_cut(
    *,
    weights: int,
    rounded: int,
    remainders: int,
    numel: int,
    rounding_key: int | None = None,
    first_index: int = 0,
) -> None: ...
