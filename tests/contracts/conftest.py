"""Lets the contracts use the simulated cluster of the exchange, and clusters of real processes."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "trainer" / "exchange"))
sys.path.append(str(Path(__file__).parents[1] / "cluster"))

from real_cluster import bench, cluster
from small_frames import small_frames

__all__ = ["bench", "cluster", "small_frames"]
