"""What is printed: tables, the live view, logs."""
