"""Environments over data sets of questions: rows, answers, grading."""
