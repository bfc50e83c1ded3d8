"""Printed output: tables, the live view, logs."""
