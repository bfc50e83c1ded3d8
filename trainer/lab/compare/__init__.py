"""Ways to sum gradients beside each other: the exchange, gloo, NCCL and MPI on the same hosts."""
