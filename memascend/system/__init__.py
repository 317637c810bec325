"""This machine as Linux describes it: memory, NUMA nodes, mounts, processes, pages."""
