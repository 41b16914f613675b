"""Ready tasks, one folder each. ``agile:<name>`` is the id of the task ``<name>``."""

TASKS = {
    "calculator": "agile_environments.calculator:Calculator",
    "countdown": "agile_environments.countdown:Countdown",
    "guess_number": "agile_environments.guess_number:GuessNumber",
    "math": "agile_environments.math:Math",
    "search_qa": "agile_environments.search_qa:SearchQA",
}
"""Where each task's environment is, as ``module:class``."""
