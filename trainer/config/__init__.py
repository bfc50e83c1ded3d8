"""The strict YAML of runs and distillations."""
