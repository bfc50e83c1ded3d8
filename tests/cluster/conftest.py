"""Clusters of real processes."""

from tests.cluster.real_cluster import bench, cluster, shared_memory

__all__ = ["bench", "cluster", "shared_memory"]
