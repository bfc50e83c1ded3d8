"""Lets the tests here, and the programs they start, share the modules beside them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from real_cluster import bench, cluster

__all__ = ["bench", "cluster"]
