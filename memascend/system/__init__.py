"""What Linux says of this machine: memory, NUMA nodes, mounts, processes, pages."""
