"""Saves, resumes and pushes runs."""
