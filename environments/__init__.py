"""Ready tasks, one folder each. ``agile:<name>`` is the id of the task ``<name>``."""

TASKS = {"guess_number": "agile_environments.guess_number:GuessNumber"}
"""Where each task's environment is, as ``module:class``."""
