"""Ready run configs, one YAML file each."""
