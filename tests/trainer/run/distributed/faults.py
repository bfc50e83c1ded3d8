"""The cases of `faulty_ranks` by name, for tests that do not import torch."""

STOPPED = "stopped"
CASES = ("killed", STOPPED, "refused", "defect")
HOLDER = "holder stopped"
HOLDER_REFUSED = "holder refused"
