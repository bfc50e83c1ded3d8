"""Start, watch and stop a Motley cluster from one machine."""
