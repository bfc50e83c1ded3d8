"""The processes of a run: as sessions or systemd units, and their logs."""
