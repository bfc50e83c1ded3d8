"""The exchange's small frames, and clusters of real processes."""

from tests.cluster.real_cluster import bench, cluster, shared_memory
from tests.trainer.exchange.small_frames import small_frames

__all__ = ["bench", "cluster", "shared_memory", "small_frames"]
