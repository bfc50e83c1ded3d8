"""Distillation: a teacher scores a corpus, a student trains on the scores."""
