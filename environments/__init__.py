"""Ready tasks, one folder each. ``agile:<name>`` is the id of the task ``<name>``."""

TASKS = {
    "archive": "agile_environments.archive:agent",
    "calculator": "agile_environments.calculator:Calculator",
    "courier": "agile_environments.courier:Courier",
    "colours": "agile_environments.colours:Colours",
    "countdown": "agile_environments.countdown:Countdown",
    "grid_navigation": "agile_environments.grid_navigation:GridNavigation",
    "guess_number": "agile_environments.guess_number:GuessNumber",
    "mastermind": "agile_environments.mastermind:Mastermind",
    "math": "agile_environments.math:Math",
    "search_qa": "agile_environments.search_qa:SearchQA",
    "wordle": "agile_environments.wordle:Wordle",
}
"""Task name to its environment, ``module:class``, or to its agent."""
