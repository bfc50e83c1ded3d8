"""Compare ways to sum gradients: the exchange, gloo, NCCL and MPI on the same hosts."""
