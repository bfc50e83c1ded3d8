"""What generated meetings are about: one group of people and their issues a file."""
