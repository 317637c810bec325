"""The whole surface of the native core; a test compares this file with dir(_core)."""

# --- memory -----------------------------------------------------------------------------------------------------------

# --- nvme -------------------------------------------------------------------------------------------------------------

class MemoryFaults:
    """What goes wrong on the memory engine: probabilities per request, drawn by a seed. Tests only."""

    def __init__(
        self,
        *,
        seed: int = 0,
        short: float = 0.0,
        eio: float = 0.0,
        enospc: float = 0.0,
        again: float = 0.0,
        reorder: float = 0.0,
        delay: float = 0.0,
        capacity_bytes: int = 1 << 30,
    ) -> None: ...
    @property
    def seed(self) -> int: ...
    paused: bool
    """While true, nothing completes."""

class Ticket:
    """What to wait on for one read or write."""

    def wait(self) -> None:
        """Raises StoreError, as often as asked, when the transfer failed."""
    def done(self) -> bool:
        """The transfer is over, well or not; its memory is quiet."""
    @property
    def nbytes(self) -> int: ...

class Store:
    """Named byte ranges on SSD. Thread-safe; belongs to the process that opened it.

    `hold` is kept alive until the I/O on its memory is over. `capacity` (0: as nbytes) tells how many
    bytes from `address` on may be used, so that an odd tail needs no bounce buffer.
    """

    def __init__(
        self,
        *,
        directories: list[str],
        engine: str = "auto",
        queue_depth: int = 64,
        chunk_bytes: int = 1 << 20,
        threads: int = 8,
        sqpoll: bool = False,
        iopoll: bool = False,
        grow_bytes: int = 1 << 28,
        watchdog_seconds: float = 60.0,
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
        """Without `offset` the bytes become the whole key; with one they go into a key that is there."""
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
    def wait(self, ticket: Ticket) -> None: ...
    def wait_all(self) -> None: ...
    def discard(self, *, key: str) -> bool: ...
    def contains(self, *, key: str) -> bool: ...
    def nbytes(self, *, key: str) -> int: ...
    def keys(self) -> list[str]: ...
    def stats(self) -> dict[str, int | float]:
        """Keys: bytes_read, bytes_written, bytes_bounced, requests, resubmitted, retries, stalls,

        reserved_bytes, used_bytes, available_bytes, key_count, in_flight_count, wait_seconds.
        """
    def register_buffer(self, *, address: int, nbytes: int) -> bool: ...
    def unregister_buffer(self, *, address: int, nbytes: int) -> None: ...
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

# --- kernels ----------------------------------------------------------------------------------------------------------
