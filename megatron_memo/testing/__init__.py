"""Process groups for tests and benchmarks: one rank of many on one device, and several true ranks on one device. Needs torch only."""
