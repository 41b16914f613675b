"""Ready tasks, one folder each. ``agile:<name>`` is the id of the task ``<name>``."""

TASKS = {
    "calculator": "agile_environments.calculator:Calculator",
    "guess_number": "agile_environments.guess_number:GuessNumber",
}
"""Where each task's environment is, as ``module:class``."""
