"""The ledger: planned and measured memory, drive traffic, SSD wear, and the trace of a run."""
