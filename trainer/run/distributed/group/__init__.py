"""Several processes of a host that are one worker of the elastic exchange."""
