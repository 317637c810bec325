"""The parts behind `allocator` and `direct_nvme`: ours, and stock's if the section is off."""
