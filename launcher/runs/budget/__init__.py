"""What runs may cost and have cost."""
