"""What a run costs while it runs, and when it must stop."""
