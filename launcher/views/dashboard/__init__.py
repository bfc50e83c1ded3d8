"""A read-only page in a browser: the overview of a cluster, and each of its runs, live."""
