"""How replicas agree on a gradient: frames, the coordinator and its clients."""
