"""The whole surface of the native core; a test compares this file with dir(_core)."""

# --- memory -----------------------------------------------------------------------------------------------------------

# --- nvme -------------------------------------------------------------------------------------------------------------

# --- kernels ----------------------------------------------------------------------------------------------------------

class ScanResult:
    """What one pass over memory found; `sum_squares` is NaN unless asked for and all is finite."""

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
    isa: str = "auto",
) -> ScanResult: ...
def overflow_isas() -> list[str]: ...
