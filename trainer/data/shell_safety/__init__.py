"""The generated data set: shell scripts with one class of defect each."""
