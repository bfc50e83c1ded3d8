"""What the benchmarks share: a report, a synthetic worker, real processes, shaped networks."""
