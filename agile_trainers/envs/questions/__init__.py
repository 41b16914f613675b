"""Environments of questions from data sets: rows, answers, grading."""
